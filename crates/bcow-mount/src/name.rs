//! The name of the file behind a loop device, from which other processes recognise the mount.

use std::path::Path;

/// The start of the name.
const PREFIX: &str = "bcow:";
/// Most bytes of the disk's name that are kept.
const MAX_BYTES: usize = 60;

/// `bcow:PID:NAME`: the process that serves the file, and the name of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HiddenName {
    /// The process, in its own PID namespace.
    pub pid: u32,
    /// The file name of the disk; characters that could mislead a terminal or a script are `_`.
    pub disk: String,
}

impl HiddenName {
    /// The name for a disk that this process serves.
    pub fn of(disk: &Path) -> Self {
        let name = disk.file_name().unwrap_or_default().to_string_lossy();
        let plain =
            |c: char| if c.is_ascii_alphanumeric() || "._-+@".contains(c) { c } else { '_' };
        HiddenName {
            pid: std::process::id(),
            disk: name.chars().take(MAX_BYTES).map(plain).collect(),
        }
    }

    /// Reads the path of a backing file as sysfs shows it. Such a file is at the root of a mount
    /// that no path reaches, so the path has one component.
    pub fn parse(backing_file: &str) -> Option<Self> {
        let rest = backing_file.strip_prefix('/')?.strip_prefix(PREFIX)?;
        let (pid, disk) = rest.split_once(':')?;
        let pid = pid.parse().ok().filter(|_| !disk.contains('/'))?;
        let disk = disk.to_owned();
        Some(HiddenName { pid, disk })
    }
}

impl std::fmt::Display for HiddenName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{PREFIX}{}:{}", self.pid, self.disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_found_again() {
        let name = HiddenName::of(Path::new("/disks/my vm\n.bcow"));
        assert_eq!(
            name.to_string(),
            format!("bcow:{}:my_vm_.bcow", std::process::id())
        );
        assert_eq!(HiddenName::parse(&format!("/{name}")), Some(name));
        let long = HiddenName::of(Path::new(&"é".repeat(300)));
        assert_eq!(long.disk.len(), MAX_BYTES);
    }

    #[test]
    fn other_backing_files_are_not_recognised() {
        for other in [
            "/images/bcow:1:x",
            "/bcow:1:x/y",
            "/bcow:x:y",
            "bcow:1:x",
            "/bcow:1",
            "",
        ] {
            assert_eq!(HiddenName::parse(other), None, "{other}");
        }
    }
}
