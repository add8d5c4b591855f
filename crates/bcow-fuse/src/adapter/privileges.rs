//! Decides whether set-id bits stay, for requests in which fuser does not pass on the kernel's
//! flag.
//!
//! With FUSE_HANDLE_KILLPRIV_V2, the kernel leaves it to bcow to clear set-id bits when a file is
//! written, truncated or changes its owner. In return, the kernel requests `security.capability`
//! once per file instead of before every write. (The kernel still removes capabilities itself.)
//!
//! Flags of the requests say when to clear the bits. fuser passes on the flag of WRITE, but not
//! that of SETATTR. This module derives the flag of SETATTR. The kernel sets it when the owner
//! changes, and for a new size if the caller does not have CAP_FSETID.
//!
//! Before a write, fallocate, copy_file_range and similar calls of a caller without CAP_FSETID, the
//! kernel sends an empty SETATTR with the same meaning, whoever owns the file. But it sends an
//! empty SETATTR in two other cases too: for `chown(-1, -1)`, where the file system must refuse
//! callers that do not own the file, and after root's write has removed a capability.
//!
//! `/proc/PID/syscall` tells these cases apart, because the caller waits in its system call. If
//! that file cannot be read, callers are refused that do not own the file and could not have opened
//! it for writing.

use std::time::Duration;

use bcow_erofs::reader::FileType;
use bcow_union::NodeId;
use bcow_union::fs::{Attributes, Changes, UnionFs};
use fuser::Request;
use rustix::io::Errno;

/// Numbers of capabilities (linux/capability.h): ignore permissions, act as the owner, keep set-id
/// bits.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;

const SET_UID: u16 = 0o4000;
const SET_GID: u16 = 0o2000;
const GROUP_EXECUTES: u16 = 0o0010;

/// Adds the clearing of set-id bits to `changes` if a SETATTR implies it.
pub(super) fn drop_set_id(
    fs: &UnionFs,
    request: &Request,
    node: NodeId,
    changes: &mut Changes,
) -> Result<(), Errno> {
    let given_away = changes.uid.is_some() || changes.gid.is_some();
    let resized = changes.size.is_some();
    let nothing = *changes == Changes::default();
    if changes.permissions.is_some() || !(given_away || resized || nothing) {
        return Ok(());
    }
    let attributes = fs.attributes(node)?;
    if attributes.kind == FileType::Directory || attributes.permissions & (SET_UID | SET_GID) == 0 {
        return Ok(());
    }
    let cause = match nothing {
        true => Cause::of(request),
        false => Cause::Other,
    };
    if !given_away && cause != Cause::Chown && may_keep_set_id(request) {
        return Ok(());
    }
    let group = match given_away || is_in_group(request, attributes.gid) {
        true => Group::Same,
        false => Group::Another,
    };
    let kept = without_set_id(attributes.permissions, group);
    let permitted = kept == attributes.permissions
        || match cause {
            Cause::Other => true,
            Cause::Chown => owns(request, &attributes),
            Cause::Unknown => may_change(fs, request, node, &attributes)?,
        };
    if !permitted {
        return Err(Errno::PERM);
    }
    changes.permissions = Some(kept);
    Ok(())
}

/// The system call behind an empty SETATTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Chown,
    Other,
    Unknown,
}

/// Numbers of the system calls that may be a `chown(-1, -1)`, those of 32-bit programs included. In
/// 64-bit programs, the numbers of the 32-bit calls belong to calls that never cause an empty
/// SETATTR (arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h). The 16-bit `lchown` is
/// left out: its number is that of `ioctl`, which can be a fallocate.
#[cfg(target_arch = "x86_64")]
const CHOWNS: &[u32] = &[92, 93, 94, 260, 95, 182, 198, 207, 212, 298];
#[cfg(not(target_arch = "x86_64"))]
const CHOWNS: &[u32] = &[54, 55, 95, 182, 198, 207, 212, 325];
/// The bit that marks system calls of the x32 ABI.
const X32: u32 = 0x4000_0000;

impl Cause {
    fn of(request: &Request) -> Cause {
        // 0 is a process that is not visible in this PID namespace.
        let Some(pid) = Some(request.pid()).filter(|&pid| pid != 0) else {
            return Cause::Unknown;
        };
        // /proc reports `running` until the caller sleeps, which happens soon.
        for _ in 0..200 {
            match std::fs::read_to_string(format!("/proc/{pid}/syscall")) {
                Err(_) => return Cause::Unknown,
                Ok(text) => match Cause::parse(&text) {
                    Some(cause) => return cause,
                    None => std::thread::sleep(Duration::from_micros(100)),
                },
            }
        }
        Cause::Unknown
    }

    /// Parses `/proc/PID/syscall` (proc(5)); `None` while the process is running.
    fn parse(text: &str) -> Option<Cause> {
        match text.split_whitespace().next() {
            Some("running") => None,
            // -1 is a kernel thread, for example of io_uring. Kernel threads do not change owners.
            Some("-1") => Some(Cause::Other),
            Some(number) => Some(match number.parse::<u32>() {
                Ok(number) if CHOWNS.contains(&(number & !X32)) => Cause::Chown,
                Ok(_) => Cause::Other,
                Err(_) => Cause::Unknown,
            }),
            None => Some(Cause::Unknown),
        }
    }
}

/// Whether the caller owns the file or has CAP_FOWNER.
fn owns(request: &Request, attributes: &Attributes) -> bool {
    let user = request.uid();
    user == 0
        || user == attributes.uid
        || Process::of(request).is_some_and(|process| process.has(CAP_FOWNER))
}

/// Whether the caller owns the file, may write to it, or has CAP_DAC_OVERRIDE.
fn may_change(
    fs: &UnionFs,
    request: &Request,
    node: NodeId,
    attributes: &Attributes,
) -> Result<bool, Errno> {
    if owns(request, attributes) {
        return Ok(true);
    }
    let process = Process::of(request);
    let is_in = &mut |group| {
        request.gid() == group
            || process
                .as_ref()
                .is_some_and(|process| process.groups.contains(&group))
    };
    let needs_not_ask = process
        .as_ref()
        .is_some_and(|process| process.has(CAP_DAC_OVERRIDE));
    Ok(needs_not_ask || fs.lets_write(node, request.uid(), is_in)?)
}

/// Clears set-group-ID after a new ACL, unless the caller is in the group or has
/// CAP_FSETID.
pub(super) fn drop_set_gid(fs: &UnionFs, request: &Request, node: NodeId) -> Result<(), Errno> {
    let attributes = fs.attributes(node)?;
    if attributes.permissions & SET_GID == 0 || is_in_group(request, attributes.gid) {
        return Ok(());
    }
    let changes = Changes {
        permissions: Some(attributes.permissions & !SET_GID),
        ..Changes::default()
    };
    fs.set_attributes(node, &changes).map(drop)
}

/// Whether the caller is in the file's group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    Same,
    Another,
}

/// The permissions after the kernel's rule for clearing set-id bits. Set-group-ID without group
/// execute is not a privilege but an old mark for mandatory locking; it stays if the caller is in
/// the group.
fn without_set_id(permissions: u16, group: Group) -> u16 {
    let kept = permissions & !SET_UID;
    match kept & GROUP_EXECUTES == 0 && group == Group::Same {
        true => kept,
        false => kept & !SET_GID,
    }
}

/// Whether the caller has CAP_FSETID in the initial user namespace; the kernel accepts no other.
/// `false` if this cannot be determined.
fn may_keep_set_id(request: &Request) -> bool {
    if request.uid() != 0 {
        // Only root is checked: the capability without uid 0 is rare, and clearing the bits is the
        // safe choice.
        return false;
    }
    Process::of(request).is_some_and(|process| process.has(CAP_FSETID))
}

/// Whether the caller is in the group or has CAP_FSETID.
fn is_in_group(request: &Request, group: u32) -> bool {
    request.gid() == group
        || may_keep_set_id(request)
        || Process::of(request).is_some_and(|process| process.groups.contains(&group))
}

/// The caller's data from /proc.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    effective: u64,
    groups: Vec<u32>,
    first_user_namespace: bool,
}

impl Process {
    /// Whether the process has a capability in the initial user namespace.
    fn has(&self, capability: u32) -> bool {
        self.first_user_namespace && self.effective & (1 << capability) != 0
    }

    fn of(request: &Request) -> Option<Process> {
        // 0 is a process that is not visible in this PID namespace.
        let pid = Some(request.pid()).filter(|&pid| pid != 0)?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
        Process::parse(&status, &map)
    }

    fn parse(status: &str, uid_map: &str) -> Option<Process> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        Some(Process {
            effective: u64::from_str_radix(field("CapEff:")?.trim(), 16).ok()?,
            groups: field("Groups:")?
                .split_whitespace()
                .filter_map(|group| group.parse().ok())
                .collect(),
            first_user_namespace: uid_map.split_whitespace().eq(["0", "0", "4294967295"]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_go_as_in_the_kernel() {
        for (before, same, another) in [
            (0o6777, 0o0777, 0o0777),
            (0o4600, 0o0600, 0o0600),
            (0o2644, 0o2644, 0o0644),
            (0o6644, 0o2644, 0o0644),
            (0o2654, 0o0654, 0o0654),
            (0o1777, 0o1777, 0o1777),
        ] {
            assert_eq!(without_set_id(before, Group::Same), same, "{before:o}");
            assert_eq!(
                without_set_id(before, Group::Another),
                another,
                "{before:o}"
            );
        }
    }

    #[test]
    fn process_is_read_from_its_status() {
        let status = "Name:\tx\nGroups:\t4 24 1000 \nCapEff:\t0000000000000010\n";
        let process = Process::parse(status, "         0          0 4294967295\n").unwrap();
        assert_eq!(process.effective, 1 << CAP_FSETID);
        assert_eq!(process.groups, [4, 24, 1000]);
        assert!(process.first_user_namespace);
        assert!(
            !Process::parse(status, "0 100000 65536\n")
                .unwrap()
                .first_user_namespace
        );
        assert_eq!(Process::parse("Name:\tx\n", ""), None);
    }

    #[test]
    fn system_call_tells_a_change_of_owner_from_a_write() {
        let chown = CHOWNS[0];
        for (text, cause) in [
            (
                &*format!("{chown} 0x7f 0xff 0x7ffc 0x7f\n"),
                Some(Cause::Chown),
            ),
            ("64 0x3 0x5 0x1 0x0 0x0 0x0 0x7f 0x7f\n", Some(Cause::Other)),
            ("-1 0x7ffc 0x7f\n", Some(Cause::Other)),
            ("running\n", None),
            ("", Some(Cause::Unknown)),
        ] {
            assert_eq!(Cause::parse(text), cause, "{text:?}");
        }
    }

    #[test]
    fn this_process_can_be_read() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        assert!(Process::parse(&status, &map).is_some());
    }
}
