//! The limits of the process (setrlimit(2)). It cannot raise them: [`crate::calls`].

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::system::sysinfo;

use crate::SandboxError;

/// What each process may have, also on a small machine, in bytes: the stacks of 1024 threads count
/// whole.
const LEAST_MEMORY: u64 = 4 << 30;

/// More than the files and clients of a command that changes no upper.
const MOST_DESCRIPTORS: u64 = 1 << 16;

/// A core dump would have the content of images. With a limit of one byte, the kernel also starts
/// no program that stores core dumps; with zero, it starts such a program, and tells it the limit.
/// A process may be unable to raise a limit of zero, which sudo(8) sets.
pub fn refuse_core_dumps() -> Result<(), SandboxError> {
    let least = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    match setrlimit(Resource::Core, least) {
        Err(Errno::PERM) if getrlimit(Resource::Core).maximum == Some(0) => Ok(()),
        set => set.map_err(|errno| SandboxError::CoreDumps(errno.into())),
    }
}

/// Bounds the memory of its own that the process can have beside its cache: half of that of the
/// machine. If it needs more, it ends, and not any other process that the kernel chooses.
pub fn bound_memory(cache: u64) -> Result<(), SandboxError> {
    let machine = sysinfo();
    let all = machine.totalram.saturating_mul(machine.mem_unit.into());
    let most = (all / 2).max(LEAST_MEMORY).saturating_add(cache);
    lower(Resource::Data, most)
}

/// Bounds the descriptors that the process can have.
pub fn bound_descriptors() -> Result<(), SandboxError> {
    lower(Resource::Nofile, MOST_DESCRIPTORS)
}

/// Keeps lower limits.
fn lower(resource: Resource, most: u64) -> Result<(), SandboxError> {
    let before = getrlimit(resource);
    let lowered = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
    let after = Rlimit {
        current: lowered(before.current),
        maximum: lowered(before.maximum),
    };
    setrlimit(resource, after).map_err(|errno| SandboxError::Limits(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;

    #[test]
    fn limits_are_lowered_and_not_raised() {
        if !is_alone("limits_are_lowered", "BCOW_TEST_OF_LIMITS") {
            return;
        }
        let all = sysinfo().totalram * u64::from(sysinfo().mem_unit);
        bound_memory(5).unwrap();
        let most = (all / 2).max(LEAST_MEMORY) + 5;
        let bounded = getrlimit(Resource::Data);
        assert_eq!((bounded.current, bounded.maximum), (Some(most), Some(most)));
        let too_much = usize::try_from(most).unwrap();
        assert!(Vec::<u8>::new().try_reserve_exact(too_much).is_err());

        let before = getrlimit(Resource::Nofile);
        let maximum = before.maximum.unwrap_or(u64::MAX).min(MOST_DESCRIPTORS);
        bound_descriptors().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).maximum, Some(maximum));

        for most in [200, 100, 150] {
            lower(Resource::Nofile, most).unwrap();
        }
        let kept = getrlimit(Resource::Nofile);
        assert_eq!((kept.current, kept.maximum), (Some(100), Some(100)));
    }
}
