//! The groups and capabilities of processes that use a mount, from /proc.
//!
//! A process in a sandbox asks another one for them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Largest answer: a process has at most 65,536 groups.
const MOST_BYTES: u32 = 1 << 20;

/// A process that uses a mount.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Caller {
    effective: u64,
    pub(crate) groups: Vec<u32>,
    is_in_initial_user_namespace: bool,
}

/// The process that is asked, if this one is in a sandbox.
static OTHER: OnceLock<Callers> = OnceLock::new();

/// The connection to that process. The lock is held for a question and its answer; no other lock is
/// taken meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct Callers(Arc<Mutex<UnixStream>>);

impl Caller {
    /// `None` if the process is unknown.
    pub(crate) fn of(pid: u32) -> Option<Caller> {
        // The kernel sends 0 for a process outside the PID namespace in which the mount was made.
        let pid = Some(pid).filter(|&pid| pid != 0)?;
        match OTHER.get() {
            Some(callers) => callers.ask(pid).ok()?,
            None => Caller::read(pid),
        }
    }

    /// Whether the process has a capability in the initial user namespace.
    pub(crate) fn has(&self, capability: u32) -> bool {
        self.is_in_initial_user_namespace && self.effective & (1 << capability) != 0
    }

    fn read(pid: u32) -> Option<Caller> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
        Caller::parse(&status, &map)
    }

    fn parse(status: &str, uid_map: &str) -> Option<Caller> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        Some(Caller {
            effective: u64::from_str_radix(field("CapEff:")?.trim(), 16).ok()?,
            groups: field("Groups:")?
                .split_whitespace()
                .filter_map(|group| group.parse().ok())
                .collect(),
            is_in_initial_user_namespace: uid_map.split_whitespace().eq(["0", "0", "4294967295"]),
        })
    }
}

impl Callers {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Callers(Arc::new(Mutex::new(socket)))
    }

    /// Asks this process from now on.
    pub(crate) fn use_always(&self) {
        // A process enters a sandbox once.
        let _ = OTHER.set(self.clone());
    }

    pub(crate) fn ask(&self, pid: u32) -> io::Result<Option<Caller>> {
        let mut socket = self.0.lock();
        socket.write_all(&pid.to_le_bytes())?;
        let length = read_number(&mut *socket)?;
        if length > MOST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; length as usize];
        socket.read_exact(&mut bytes)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}

/// Answers questions until the other process has ended. Each is the number of a process.
pub(crate) fn serve(mut socket: &UnixStream) -> io::Result<()> {
    loop {
        let pid = read_number(&mut socket)?;
        let mut answer = vec![0; 4];
        serde_json::to_writer(&mut answer, &Caller::read(pid))?;
        let length = answer.len() as u32 - 4;
        answer[..4].copy_from_slice(&length.to_le_bytes());
        socket.write_all(&answer)?;
    }
}

fn read_number(socket: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    socket.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_read_from_its_status() {
        let status = "Name:\tx\nGroups:\t4 24 1000 \nCapEff:\t0000000000000010\n";
        let caller = Caller::parse(status, "         0          0 4294967295\n").unwrap();
        assert!(caller.has(4) && !caller.has(3));
        assert_eq!(caller.groups, [4, 24, 1000]);
        let elsewhere = Caller::parse(status, "0 100000 65536\n").unwrap();
        assert!(!elsewhere.has(4));
        assert_eq!(Caller::parse("Name:\tx\n", ""), None);
    }

    #[test]
    fn another_process_answers_as_this_one_reads() {
        let (own, other) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(&other));
        let callers = Callers::new(own);
        let own = std::process::id();
        let read = Caller::read(own);
        assert!(read.is_some());
        assert_eq!(callers.ask(own).unwrap(), read);
        assert_eq!(callers.ask(u32::MAX).unwrap(), None);
        drop(callers);
        // The end of the socket.
        serving.join().unwrap().unwrap_err();
    }
}
