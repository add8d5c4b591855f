//! A storage with injected faults.

use std::io;
use std::sync::Mutex;

use bcow::{MemoryStorage, Storage};

/// A storage in memory whose operations fail according to a plan.
pub struct Faulty {
    content: MemoryStorage,
    plan: Mutex<Plan>,
}

#[derive(Debug, Clone, Copy)]
struct Plan {
    done: u64,
    fault: Option<Fault>,
    hits: u64,
    paused: bool,
}

/// An injected fault.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The kind of operations that are counted and fail.
    pub on: On,
    /// Number of these operations that succeed first.
    pub after: u64,
    /// Whether all later ones fail too.
    pub stays: bool,
    /// Error number of the host.
    pub errno: i32,
}

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Writes, changes of length, and syncs.
    Change,
    /// Writes and changes of length that extend the storage, as on a full disk.
    Growth,
    Sync,
    Read,
}

impl Faulty {
    /// Storage with this content, without a fault.
    pub fn new(content: Vec<u8>) -> Self {
        Faulty {
            content: MemoryStorage::new(content),
            plan: Mutex::new(Plan {
                done: 0,
                fault: None,
                hits: 0,
                paused: false,
            }),
        }
    }

    /// Sets the fault, and starts to count operations.
    pub fn plan(&self, fault: Option<Fault>) {
        *self.lock() = Plan {
            done: 0,
            fault,
            hits: 0,
            paused: false,
        };
    }

    /// Suspends or resumes the plan. A suspended plan neither counts nor fails operations.
    pub fn pause(&self, paused: bool) {
        self.lock().paused = paused;
    }

    /// Number of operations that failed since [`Faulty::plan`].
    pub fn hits(&self) -> u64 {
        self.lock().hits
    }

    /// A copy of the content.
    pub fn to_vec(&self) -> Vec<u8> {
        self.content.to_vec()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.plan
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn step(&self, kinds: &[On]) -> io::Result<()> {
        let mut plan = self.lock();
        let fault = plan.fault.filter(|fault| kinds.contains(&fault.on));
        let Some(fault) = fault.filter(|_| !plan.paused) else {
            return Ok(());
        };
        let index = plan.done;
        plan.done += 1;
        if index == fault.after || (fault.stays && index > fault.after) {
            plan.hits += 1;
            return Err(io::Error::from_raw_os_error(fault.errno));
        }
        Ok(())
    }
}

impl Storage for Faulty {
    crate::forward!(content: len, punch);

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.step(&[On::Read])?;
        self.content.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let grows = offset + bytes.len() as u64 > self.content.len()?;
        self.step(if grows { &[On::Change, On::Growth] } else { &[On::Change] })?;
        self.content.write_at(offset, bytes)
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let grows = bytes > self.content.len()?;
        self.step(if grows { &[On::Change, On::Growth] } else { &[On::Change] })?;
        self.content.set_len(bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.step(&[On::Change, On::Sync])?;
        self.content.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operation_of_the_plan_fails_and_changes_nothing() {
        let disk = Faulty::new(vec![0; 4]);
        let fault = Fault {
            on: On::Change,
            after: 1,
            stays: false,
            errno: 5,
        };
        disk.plan(Some(fault));
        disk.write_at(0, &[1]).unwrap();
        assert_eq!(disk.sync().unwrap_err().raw_os_error(), Some(5));
        disk.sync().unwrap();
        assert_eq!((disk.hits(), disk.to_vec()), (1, vec![1, 0, 0, 0]));
        disk.plan(Some(Fault {
            on: On::Growth,
            after: 0,
            stays: true,
            errno: 28,
        }));
        disk.write_at(0, &[2; 4]).unwrap();
        assert!(disk.write_at(1, &[3; 4]).is_err());
        assert!(disk.set_len(5).is_err());
        disk.set_len(3).unwrap();
        assert_eq!(disk.to_vec(), [2; 3]);
    }
}
