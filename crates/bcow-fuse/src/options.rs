//! The `-o` options of a mount.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bcow_mount::filesystem::{AccessTimes, Settings};
use rustix::mount::MountFlags;

use crate::disk::{Barriers, Device, DiskMount};
use crate::error::MountError;
use crate::lower::OverlayXattrs;
use crate::owners::Owners;

/// The longest interval between commits: ext4 and btrfs warn of longer ones.
const MAX_SECONDS: u32 = 300;

/// Which users may enter the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Only the user who mounts. The kernel refuses root too.
    #[default]
    Owner,
    /// All users, as far as the permissions of the files allow (`allow_other`).
    Everyone,
}

/// Which checks apply when a program reads a file of the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Permissions {
    /// No checks: a user who may enter the mount may read every file. This user can read the image
    /// file as well.
    #[default]
    Open,
    /// The kernel checks owner, mode and POSIX ACL (`default_permissions`).
    ByMode,
}

/// Where written bytes are kept until the kernel sends them to bcow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteCache {
    /// Nowhere: each write is a request.
    #[default]
    Through,
    /// In the kernel's page cache. The kernel writes them back later, at the latest when a file is
    /// closed (`writeback`).
    Back,
}

/// The error of an interval between commits for a file system that has none.
pub(crate) fn no_interval() -> MountError {
    MountError::UnsupportedOption {
        option: "commit".to_owned(),
        reason: "only ext4 and btrfs have such an interval",
    }
}

/// Refuses options that do not exist with this driver.
fn refuse_with(driver: &'static str, given: &[(&'static str, bool)]) -> Result<(), MountError> {
    match given.iter().find(|(_, is_given)| *is_given) {
        Some(&(option, _)) => Err(MountError::NotWithDriver { option, driver }),
        None => Ok(()),
    }
}

/// Whether a mount can be writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// No: an image without an upper.
    Never,
    /// Yes: an image with an upper.
    ToUpper,
}

/// Mount options. The default is read-only, only for the owner, nosuid, nodev.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    access: Access,
    permissions: Permissions,
    flags: MountFlags,
    source: Option<OsString>,
    write_cache: WriteCache,
    /// Whether an option asked for access times.
    access_times: bool,
    discard: bool,
    /// Seconds between commits of the journal.
    commit_seconds: Option<u32>,
    /// `Some(true)` for `ro`, `Some(false)` for `rw`; the last one given wins.
    read_only: Option<bool>,
    /// The attributes for overlayfs, if the mount is for a lower directory of overlayfs.
    overlay_lower: Option<OverlayXattrs>,
    owners: Owners,
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions {
            access: Access::default(),
            permissions: Permissions::default(),
            flags: MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV,
            source: None,
            write_cache: WriteCache::default(),
            access_times: false,
            discard: false,
            commit_seconds: None,
            read_only: None,
            overlay_lower: None,
            owners: Owners::default(),
        }
    }
}

impl MountOptions {
    /// Applies the options of one `-o` argument, separated by commas. Of contradicting options the
    /// last one wins, as in mount(8).
    pub fn apply(&mut self, list: &OsStr) -> Result<(), MountError> {
        for option in list.as_bytes().split(|&byte| byte == b',') {
            if !option.is_empty() {
                self.apply_one(OsStr::from_bytes(option))?;
            }
        }
        Ok(())
    }

    /// Sets the source that `/proc/mounts` shows, unless an option has set it already.
    pub fn set_default_source(&mut self, source: OsString) {
        self.source.get_or_insert(source);
    }

    /// Which users may enter.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Which checks apply to reads. With `allow_other` the kernel always checks the mode.
    pub fn permissions(&self) -> Permissions {
        match self.access {
            Access::Owner => self.permissions,
            Access::Everyone => Permissions::ByMode,
        }
    }

    /// Whether `ro` was given.
    pub fn asks_for_read_only(&self) -> bool {
        self.read_only == Some(true)
    }

    /// The attributes of a lower directory of overlayfs, if the mount is to be one.
    pub fn overlay_lower(&self) -> Option<OverlayXattrs> {
        self.overlay_lower
    }

    /// The mapping of owners.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Where written bytes are kept until the kernel sends them to bcow.
    pub fn write_cache(&self) -> WriteCache {
        self.write_cache
    }

    /// Adapts the options to the kind of mount. With an upper, the mount is writable unless `ro`
    /// was given, and the kernel checks permissions. Without an upper, `rw` and the options of
    /// writable mounts are errors.
    pub fn settle(&mut self, writing: Writing) -> Result<(), MountError> {
        let commit = self.commit_seconds.is_some();
        refuse_with("FUSE", &[("discard", self.discard), ("commit", commit)])?;
        match writing {
            Writing::ToUpper if self.overlay_lower.is_some() => {
                Err(MountError::OnlyWithoutUpper("overlay_lower"))
            }
            Writing::ToUpper => {
                self.permissions = Permissions::ByMode;
                self.flags
                    .set(MountFlags::RDONLY, self.read_only == Some(true));
                Ok(())
            }
            Writing::Never if self.read_only == Some(false) => Err(MountError::NoUpper("rw")),
            Writing::Never if self.write_cache != WriteCache::Through => {
                Err(MountError::NoUpper("writeback"))
            }
            Writing::Never => Ok(()),
        }
    }

    /// The settings of a mount with the kernel driver. There, every user may enter as far as the
    /// permissions of the files allow, and the kernel always collects writes in its page cache.
    /// Access times are off unless an option asks for them: each update is a write.
    pub(crate) fn for_kernel(&self, disk: &DiskMount) -> Result<Settings, MountError> {
        let is_sealed = matches!(disk.device, Device::ReadOnly(_));
        self.settings(is_sealed, &disk.path, disk.barriers)
    }

    /// The settings of a mount of an image, the file `image`, that the kernel reads by itself.
    pub(crate) fn for_image(&self, image: &Path) -> Result<Settings, MountError> {
        let settings = self.settings(true, image, Barriers::On)?;
        match settings.commit_seconds {
            None => Ok(settings),
            Some(_) => Err(no_interval()),
        }
    }

    /// The settings for content that is sealed, and never changes, or that is not.
    pub(crate) fn settings(
        &self,
        is_sealed: bool,
        path: &Path,
        barriers: Barriers,
    ) -> Result<Settings, MountError> {
        let has = |flag| self.flags.contains(flag);
        if is_sealed && self.read_only == Some(false) {
            return Err(MountError::SealedDisk(path.to_owned()));
        }
        let only_fuse = [
            ("fsname", self.source.is_some()),
            ("overlay_lower", self.overlay_lower.is_some()),
            ("uidmap or gidmap", !self.owners.are_same()),
        ];
        refuse_with("kernel", &only_fuse)?;
        Ok(Settings {
            read_only: is_sealed || self.read_only == Some(true),
            nosuid: has(MountFlags::NOSUID),
            nodev: has(MountFlags::NODEV),
            noexec: has(MountFlags::NOEXEC),
            access_times: match (self.access_times, has(MountFlags::NODIRATIME)) {
                (false, _) => AccessTimes::Off,
                (true, true) => AccessTimes::RelativeForFiles,
                (true, false) => AccessTimes::Relative,
            },
            sync: has(MountFlags::SYNCHRONOUS),
            discard: self.discard,
            commit_seconds: self.commit_seconds,
            barriers: barriers == Barriers::On,
        })
    }

    pub(crate) fn flags(&self) -> MountFlags {
        self.flags
    }

    /// The source that `/proc/mounts` shows.
    pub fn source(&self) -> &OsStr {
        self.source.as_deref().unwrap_or(OsStr::new("bcow"))
    }

    /// Whether [`MountOptions::apply`] knows the option `option`, also if it refuses the option.
    pub fn is_known(option: &OsStr) -> bool {
        let applied = MountOptions::default().apply_one(option);
        !matches!(applied, Err(MountError::UnknownOption(_)))
    }

    fn apply_one(&mut self, option: &OsStr) -> Result<(), MountError> {
        let shown = || option.to_string_lossy().into_owned();
        let bad = |problem| MountError::BadOption {
            option: shown(),
            problem,
        };
        let unsupported = |reason| MountError::UnsupportedOption {
            option: shown(),
            reason,
        };
        let bytes = option.as_bytes();
        if let Some(name) = bytes.strip_prefix(b"fsname=") {
            if name.is_empty() || name.contains(&0) {
                return Err(bad("a name is missing"));
            }
            self.source = Some(OsStr::from_bytes(name).to_owned());
            return Ok(());
        }
        if let Some(seconds) = bytes.strip_prefix(b"commit=") {
            let seconds = std::str::from_utf8(seconds).ok();
            let seconds = seconds.and_then(|seconds| seconds.parse().ok());
            self.commit_seconds = seconds.filter(|seconds| (1..=MAX_SECONDS).contains(seconds));
            let is_valid = self.commit_seconds.map(drop);
            return is_valid.ok_or_else(|| bad("the interval is a number of seconds, 1 to 300"));
        }
        for (name, map) in [
            ("uidmap=", &mut self.owners.users),
            ("gidmap=", &mut self.owners.groups),
        ] {
            if let Some(range) = bytes.strip_prefix(name.as_bytes()) {
                let range = std::str::from_utf8(range).unwrap_or_default();
                return map.add(range).map_err(bad);
            }
        }
        if let Some(xattrs) = bytes.strip_prefix(b"overlay_lower=") {
            self.overlay_lower = match xattrs {
                b"trusted" => Some(OverlayXattrs::Trusted),
                b"user" => Some(OverlayXattrs::User),
                _ => {
                    return Err(bad(
                        "the extended attributes of overlayfs are trusted or user",
                    ));
                }
            };
            return Ok(());
        }
        match bytes {
            b"overlay_lower" => self.overlay_lower = Some(OverlayXattrs::here()),
            // These options are always in effect, and no mount needs a loop device of its caller.
            b"defaults" | b"loop" | b"subtype=bcow" => {}
            b"ro" => self.read_only = Some(true),
            b"rw" => self.read_only = Some(false),
            b"writeback" => self.write_cache = WriteCache::Back,
            b"nowriteback" => self.write_cache = WriteCache::Through,
            _ if bytes.starts_with(b"subtype=") => {
                let reason = "`bcow umount` knows its mounts by the subtype bcow";
                return Err(unsupported(reason));
            }
            b"allow_other" => self.access = Access::Everyone,
            // libfuse checks the user in the daemon, but accesses to cached names and pages do not
            // reach the daemon. bcow lets the kernel cache without a time limit, so this check
            // would give no protection.
            b"allow_root" if rustix::process::geteuid().is_root() => {}
            b"allow_root" => {
                let reason = "the kernel would show cached files to every user";
                return Err(unsupported(reason));
            }
            b"default_permissions" => self.permissions = Permissions::ByMode,
            b"suid" => self.flags.remove(MountFlags::NOSUID),
            b"nosuid" => self.flags.insert(MountFlags::NOSUID),
            b"dev" => self.flags.remove(MountFlags::NODEV),
            b"nodev" => self.flags.insert(MountFlags::NODEV),
            b"exec" => self.flags.remove(MountFlags::NOEXEC),
            b"noexec" => self.flags.insert(MountFlags::NOEXEC),
            b"atime" | b"relatime" => {
                self.flags.remove(MountFlags::NOATIME);
                self.access_times = true;
            }
            b"noatime" => {
                self.flags.insert(MountFlags::NOATIME);
                self.access_times = false;
            }
            b"discard" => self.discard = true,
            b"nodiscard" => self.discard = false,
            b"diratime" => self.flags.remove(MountFlags::NODIRATIME),
            b"nodiratime" => self.flags.insert(MountFlags::NODIRATIME),
            b"sync" => self.flags.insert(MountFlags::SYNCHRONOUS),
            b"async" => self.flags.remove(MountFlags::SYNCHRONOUS),
            _ => return Err(MountError::UnknownOption(shown())),
        }
        Ok(())
    }

    /// The options in the syntax of `fusermount3 -o`.
    pub(crate) fn for_helper(&self) -> Result<OsString, MountError> {
        let mut list = Vec::new();
        if !self.flags.contains(MountFlags::RDONLY) {
            list.extend_from_slice(b"rw,");
        }
        for (flag, set) in [
            (MountFlags::RDONLY, "ro"),
            (MountFlags::NOSUID, "nosuid"),
            (MountFlags::NODEV, "nodev"),
            (MountFlags::NOEXEC, "noexec"),
            (MountFlags::NOATIME, "noatime"),
            (MountFlags::NODIRATIME, "nodiratime"),
            (MountFlags::SYNCHRONOUS, "sync"),
        ] {
            if self.flags.contains(flag) {
                list.extend_from_slice(set.as_bytes());
                list.push(b',');
            }
        }
        // fusermount3 silently ignores `suid` and `dev` from ordinary users.
        for (flag, option) in [(MountFlags::NOSUID, "suid"), (MountFlags::NODEV, "dev")] {
            if !self.flags.contains(flag) {
                return Err(MountError::RootOnly(option));
            }
        }
        if self.access == Access::Everyone {
            list.extend_from_slice(b"allow_other,");
        }
        if self.permissions() == Permissions::ByMode {
            list.extend_from_slice(b"default_permissions,");
        }
        list.extend_from_slice(b"subtype=bcow,fsname=");
        for &byte in self.source().as_bytes() {
            if matches!(byte, b',' | b'\\') {
                list.push(b'\\');
            }
            list.push(byte);
        }
        Ok(OsStr::from_bytes(&list).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(lists: &[&str]) -> Result<MountOptions, MountError> {
        let mut options = MountOptions::default();
        for list in lists {
            options.apply(OsStr::new(list))?;
        }
        Ok(options)
    }

    #[test]
    fn default_is_owner_only_nosuid_nodev_readonly() {
        let options = MountOptions::default();
        assert_eq!(options.access(), Access::Owner);
        assert_eq!(options.permissions(), Permissions::Open);
        assert_eq!(
            options.flags(),
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV
        );
    }

    #[test]
    fn allow_other_comes_with_default_permissions() {
        let options = parsed(&["allow_other"]).unwrap();
        assert_eq!(options.permissions(), Permissions::ByMode);
    }

    #[test]
    fn last_of_two_opposites_wins() {
        let options = parsed(&["suid,nosuid", "nodev,dev"]).unwrap();
        assert!(options.flags().contains(MountFlags::NOSUID));
        assert!(!options.flags().contains(MountFlags::NODEV));
    }

    #[test]
    fn writing_needs_an_upper() {
        for option in ["rw", "writeback"] {
            let mut options = parsed(&["ro", option]).unwrap();
            assert!(options.clone().settle(Writing::ToUpper).is_ok());
            let error = options.settle(Writing::Never).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("mount option {option:?} needs an upper")
            );
        }
        assert!(parsed(&["rw,ro"]).unwrap().settle(Writing::Never).is_ok());
    }

    #[test]
    fn with_an_upper_the_kernel_decides_and_ro_holds() {
        for (list, read_only) in [("", false), ("rw", false), ("ro", true), ("ro,rw", false)] {
            let mut options = parsed(&[list]).unwrap();
            options.settle(Writing::ToUpper).unwrap();
            assert_eq!(options.permissions(), Permissions::ByMode);
            let expected = if read_only {
                "ro,nosuid,nodev,default_permissions,subtype=bcow,fsname=bcow"
            } else {
                "rw,nosuid,nodev,default_permissions,subtype=bcow,fsname=bcow"
            };
            assert_eq!(options.for_helper().unwrap(), expected, "{list}");
        }
    }

    #[test]
    fn lower_directory_of_overlayfs_has_no_upper_and_is_not_for_the_kernel_driver() {
        for (list, expected) in [
            ("overlay_lower", OverlayXattrs::here()),
            (
                "overlay_lower,overlay_lower=trusted",
                OverlayXattrs::Trusted,
            ),
            ("overlay_lower=user", OverlayXattrs::User),
        ] {
            let mut options = parsed(&[list]).unwrap();
            assert_eq!(options.overlay_lower(), Some(expected), "{list}");
            let error = options.for_image(Path::new("image")).unwrap_err();
            assert_eq!(
                error.to_string(),
                "mount option \"overlay_lower\" is not supported with the kernel driver"
            );
            assert!(options.clone().settle(Writing::Never).is_ok());
            let error = options.settle(Writing::ToUpper).unwrap_err();
            assert_eq!(
                error.to_string(),
                "mount option \"overlay_lower\" is for mounts without an upper"
            );
        }
        let error = parsed(&["overlay_lower=x"]).unwrap_err();
        assert!(matches!(error, MountError::BadOption { .. }), "{error}");
    }

    #[test]
    fn owners_are_mapped_by_several_ranges_and_not_for_the_kernel_driver() {
        let options = parsed(&["uidmap=0:1000:1,uidmap=1:100000:9", "gidmap=0:5:1"]).unwrap();
        assert_eq!(options.owners().to_string(), "0:1000:1,1:100000:9;0:5:1");
        let error = options.for_image(Path::new("image")).unwrap_err();
        assert!(
            error.to_string().contains("\"uidmap or gidmap\""),
            "{error}"
        );
        let error = parsed(&["uidmap=0:1000:1,uidmap=0:7:1"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mount option \"uidmap=0:7:1\": two ranges of IDs have a common ID"
        );
    }

    #[test]
    fn unknown_option_is_named() {
        let error = parsed(&["ro,big_writes"]).unwrap_err();
        assert_eq!(error.to_string(), "unknown mount option \"big_writes\"");
        assert!(error.hint().is_some());
    }

    #[test]
    fn empty_items_are_skipped() {
        assert_eq!(parsed(&[",defaults,,"]).unwrap(), MountOptions::default());
    }

    #[test]
    fn fsname_replaces_the_default_source_and_is_escaped_for_the_helper() {
        let mut options = parsed(&[r"fsname=a\b"]).unwrap();
        options.set_default_source("image".into());
        assert_eq!(options.source(), r"a\b");
        options.source = Some("x,y".into());
        assert_eq!(
            options.for_helper().unwrap(),
            r"ro,nosuid,nodev,subtype=bcow,fsname=x\,y"
        );
    }

    #[test]
    fn helper_is_not_asked_for_what_it_would_silently_drop() {
        for option in ["suid", "dev"] {
            let error = parsed(&[option]).unwrap().for_helper().unwrap_err();
            assert!(matches!(error, MountError::RootOnly(_)), "{error}");
        }
    }
}
