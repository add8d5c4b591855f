//! What a supervisor holds for the next process of its pool, and gives to it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use bcow_fuse::Handover;
use bcow_fuse::kernel::{DiskFiles, DiskHandover};
use bcow_fuse::shared::SharedHandover;
use bcow_union::HeldUpper;

use crate::link::{Link, Packet, Wait};

/// A mount that a process can take over.
pub struct Kept {
    /// The file and the ledger of a disk. Closed before the hidden mount: when a mount has ended,
    /// its disk is not locked.
    pub disk: Option<DiskFiles>,
    /// The connection to the kernel.
    pub connection: OwnedFd,
    /// The stored [`MountRecord`](crate::record::MountRecord).
    pub record: OwnedFd,
    /// The device number of the mount.
    pub device: Option<String>,
    /// Whether the kernel driver serves the mount.
    pub is_disk: bool,
    /// The ledger of a mount with an upper, or the hidden mount of one with the kernel driver.
    pub companion: Option<OwnedFd>,
    /// The upper of the mount, if it has one. Closed before the pipe: the upper is unlocked then.
    pub upper: Option<HeldUpper>,
    /// The pipe for the outcome. Closed last: another process may use the upper or the disk then.
    pub outcome: Option<OwnedFd>,
}

impl Kept {
    /// Sends the mount with this number, and its descriptors.
    pub fn send(&self, link: &Link, number: u64) -> io::Result<()> {
        let packet = Packet::Keep {
            number,
            device: self.device.clone(),
            is_disk: self.is_disk,
        };
        link.send(&packet, &[self.connection.as_fd(), self.record.as_fd()])?;
        if let Some(companion) = &self.companion {
            link.send(&Packet::Companion { number }, &[companion.as_fd()])?;
        }
        if let Some(disk) = &self.disk {
            let descriptors = [disk.file.as_fd(), disk.ledger.as_fd()];
            link.send(&Packet::Disk { number }, &descriptors)?;
        }
        if let Some(upper) = &self.upper {
            link.send(&Packet::Upper { number }, &upper.descriptors())?;
        }
        if let Some(outcome) = &self.outcome {
            link.send(&Packet::Outcome { number }, &[outcome.as_fd()])?;
        }
        Ok(())
    }

    /// Unmounts a mount that no process serves any more.
    pub fn unmount(self) {
        drop(self.disk);
        if self.is_disk {
            let device = self.device.as_deref();
            DiskHandover::unmount_by_number(self.connection, self.companion, device);
        } else {
            let handover = Handover {
                connection: self.connection,
                target: PathBuf::new(),
                device: self.device,
                agreed: 0,
                ledger: None,
                upper: None,
                outcome: None,
            };
            handover.unmount();
        }
    }
}

/// Takes in a packet about one of `mounts`. Ignores other packets.
pub fn take(
    mounts: &mut BTreeMap<u64, Kept>,
    packet: Packet,
    descriptors: Vec<OwnedFd>,
) -> io::Result<()> {
    let mut descriptors = descriptors.into_iter();
    let mut next = || {
        let none = || io::Error::other("a descriptor is missing");
        descriptors.next().ok_or_else(none)
    };
    match packet {
        Packet::Keep {
            number,
            device,
            is_disk,
        } => {
            let kept = Kept {
                connection: next()?,
                record: next()?,
                device,
                is_disk,
                companion: None,
                disk: None,
                upper: None,
                outcome: None,
            };
            mounts.insert(number, kept);
        }
        Packet::Companion { number } => {
            if let Some(kept) = mounts.get_mut(&number) {
                // The ledger of an earlier process lacks changes.
                kept.companion = None;
                kept.companion = Some(next()?);
            }
        }
        Packet::Disk { number } => {
            if let Some(kept) = mounts.get_mut(&number) {
                // No process may go back to the file of an earlier disk.
                kept.disk = None;
                kept.disk = Some(DiskFiles {
                    file: next()?,
                    ledger: next()?,
                });
            }
        }
        Packet::Upper { number } => {
            if let Some(kept) = mounts.get_mut(&number) {
                let (root, lock) = (next()?, next()?);
                kept.upper = Some(HeldUpper::from_descriptors(root, lock));
            }
        }
        Packet::Outcome { number } => {
            if let Some(kept) = mounts.get_mut(&number) {
                kept.outcome = Some(next()?);
            }
        }
        Packet::Release { number } => drop(mounts.remove(&number)),
        _ => {}
    }
    Ok(())
}

/// Sends the hidden mount of the files that mounts share.
pub fn send_shared(link: &Link, shared: &SharedHandover) -> io::Result<()> {
    let packet = Packet::Shared {
        agreed: shared.agreed,
        next_slot: shared.next_slot,
    };
    link.send(&packet, &[shared.connection.as_fd(), shared.hidden.as_fd()])
}

/// Takes in the descriptors of [`send_shared`].
pub fn take_shared(
    agreed: u64,
    next_slot: u32,
    descriptors: Vec<OwnedFd>,
) -> io::Result<SharedHandover> {
    let [connection, hidden] = <[OwnedFd; 2]>::try_from(descriptors)
        .map_err(|_| io::Error::other("a descriptor is missing"))?;
    Ok(SharedHandover {
        connection,
        hidden,
        agreed,
        next_slot,
    })
}

/// What the supervisor gives to a new process.
pub struct Given {
    /// The socket of the pool.
    pub listener: UnixListener,
    /// The socket for metrics.
    pub metrics: Option<OwnedFd>,
    /// Start time of the pool in seconds since 1970.
    pub since: u64,
    /// The processes that the pool had before.
    pub restarts: u64,
    /// The process that starts this one again.
    pub supervisor: u32,
    /// The log file: an absolute path.
    pub log_file: Option<PathBuf>,
    /// Whether the supervisor keeps the hidden mount of shared files for the next process.
    pub keeps_shared: bool,
    /// The mounts of the previous process, by number.
    pub mounts: BTreeMap<u64, Kept>,
    /// The hidden mount of the files that they share.
    pub shared: Option<SharedHandover>,
}

impl Given {
    /// Receives all that comes before [`Packet::Begin`].
    pub fn receive(link: &Link) -> io::Result<Self> {
        let mut given = None;
        let mut mounts = BTreeMap::new();
        let mut shared = None;
        loop {
            let (packet, descriptors) = link
                .receive(Wait::Yes)?
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            match packet {
                Packet::Socket {
                    since,
                    restarts,
                    supervisor,
                    log_file,
                    keeps_shared,
                } => {
                    let mut sockets = descriptors.into_iter();
                    let none = || io::Error::other("a descriptor is missing");
                    given = Some(Given {
                        listener: sockets.next().ok_or_else(none)?.into(),
                        metrics: sockets.next(),
                        since,
                        restarts,
                        supervisor,
                        log_file: log_file.map(OsString::from).map(PathBuf::from),
                        keeps_shared,
                        mounts: BTreeMap::new(),
                        shared: None,
                    });
                }
                Packet::Shared { agreed, next_slot } => {
                    shared = Some(take_shared(agreed, next_slot, descriptors)?);
                }
                Packet::Begin => {
                    let given = given.ok_or_else(|| io::Error::other("the socket is missing"))?;
                    return Ok(Given {
                        mounts,
                        shared,
                        ..given
                    });
                }
                packet => take(&mut mounts, packet, descriptors)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_was_replaced_is_not_the_earlier_one() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut mounts = BTreeMap::new();
        let keep = Packet::Keep {
            number: 7,
            device: None,
            is_disk: true,
        };
        take(&mut mounts, keep, vec![file(), file()]).unwrap();
        let disk = || Packet::Disk { number: 7 };
        take(&mut mounts, disk(), vec![file(), file()]).unwrap();
        assert!(mounts[&7].disk.is_some());
        // The supervisor has no descriptor left for the ledger.
        take(&mut mounts, disk(), vec![file()]).unwrap_err();
        assert!(mounts[&7].disk.is_none());
    }
}
