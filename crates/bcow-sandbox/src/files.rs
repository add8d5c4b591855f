//! The files that a process can open (landlock(7)).

use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};

use rustix::fs::{Mode, OFlags};

use crate::{Access, SandboxError};

/// The newest form that is used, of Linux 6.12. On an older kernel, its rights apply as far as that
/// kernel knows them.
const NEWEST: ABI = ABI::V6;

/// Refuses all other files to this thread, and connections and signals to other processes. Landlock
/// itself refuses mounts, and the processes outside to ptrace(2).
pub fn restrict(paths: &[(PathBuf, Access)]) -> Result<(), SandboxError> {
    let mut rules = Ruleset::default();
    if paths.iter().any(|(_, allowed)| *allowed == Access::All) {
        // Linux 5.13 to 5.18 refuse all renames to other directories.
        rules = rules
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::Refer)?
            .set_compatibility(CompatLevel::BestEffort);
    }
    let mut rules = rules
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    for (path, allowed) in paths {
        // A path that does not exist needs no rule.
        rules = rules.add_rules(path_beneath_rules([path], rights(*allowed)))?;
        if path.starts_with("/proc") {
            keep(path);
        }
    }
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced => Err(SandboxError::Partly),
        RulesetStatus::NotEnforced => Err(SandboxError::Landlock),
    }
}

/// Keeps a directory open as long as the process lives. A rule belongs to an inode. When the kernel
/// drops its caches, procfs forgets the inodes that are not open, and later has new ones for the
/// same directories, to which the rule does not apply.
fn keep(path: &Path) {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    if let Ok(directory) = rustix::fs::open(path, flags, Mode::empty()) {
        let _ = directory.into_raw_fd();
    }
}

fn rights(allowed: Access) -> BitFlags<AccessFs> {
    match allowed {
        Access::Read => make_bitflags!(AccessFs::{ReadFile | ReadDir}),
        Access::Write => make_bitflags!(AccessFs::{
            ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeDir | RemoveFile
        }),
        Access::All => AccessFs::from_all(NEWEST) & !(AccessFs::Execute | AccessFs::IoctlDev),
        Access::Remove => AccessFs::RemoveFile.into(),
    }
}
