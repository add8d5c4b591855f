//! The attributes that a new file gets from the file that it replaces.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;

/// The extended attribute with the access control list (ACL) of a file.
const ACL: &str = "system.posix_acl_access";
/// The kernel's limit for the value of an extended attribute, and for the list of names.
const MAX_XATTR_BYTES: usize = 64 << 10;

/// Gives `new` the owner, the group, the mode, the ACL, the SELinux label and the `user.*`
/// attributes of `old`, as far as the host allows.
///
/// No other user gets a right to `new` that `old` denies: if the host refuses the group, that group
/// gets no permission; if the host refuses the ACL, only the owner gets permissions.
pub fn pass(old: &File, new: &File) -> io::Result<()> {
    let metadata = old.metadata()?;
    let (user, group) = (Some(metadata.uid()), Some(metadata.gid()));
    // A user who is not root can only give the file to another of the user's groups.
    let has_group = fchown(new, user, group).is_ok()
        || fchown(new, None, group).is_ok()
        || new.metadata()?.gid() == metadata.gid();
    pass_labels(old, new);
    let mode = metadata.mode() & 0o7777;
    let mode = match (acl_of(old), has_group) {
        // The directory may have given the new file an ACL.
        (Ok(None), true) if removed_acl(new) => mode,
        // Members of the old group are others for the new file.
        (Ok(None), false) if removed_acl(new) => mode & (0o5700 | mode >> 3 & 0o7),
        // With an ACL, the group bits of the mode are its mask: the next statement changes nothing.
        (Ok(Some(acl)), true) if fsetxattr(new, ACL, &acl, XattrFlags::empty()).is_ok() => mode,
        _ => mode & 0o5700,
    };
    new.set_permissions(Permissions::from_mode(mode))
}

/// Copies the attributes that are no permissions. A refusal of the host is no error.
fn pass_labels(old: &File, new: &File) {
    let mut names = vec![0; MAX_XATTR_BYTES];
    let Ok(length) = flistxattr(old, &mut names[..]) else {
        return;
    };
    for name in names[..length].split(|&byte| byte == 0) {
        if !name.starts_with(b"user.") && name != b"security.selinux" {
            continue;
        }
        if let Ok(value) = value_of(old, name) {
            let _ = fsetxattr(new, name, &value, XattrFlags::empty());
        }
    }
}

/// The ACL of a file. `None` if the mode has all permissions.
fn acl_of(file: &File) -> Result<Option<Vec<u8>>, Errno> {
    match value_of(file, ACL.as_bytes()) {
        Ok(acl) => Ok(Some(acl)),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the file has no ACL any more.
fn removed_acl(file: &File) -> bool {
    matches!(
        fremovexattr(file, ACL),
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP)
    )
}

fn value_of(file: &File, name: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; MAX_XATTR_BYTES];
    let length = fgetxattr(file, name, &mut value[..])?;
    value.truncate(length);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ACL: the owner and the user 33 may read and write, the group has no permission.
    fn acl_of_one_user() -> Vec<u8> {
        let entries: [(u16, u16, u32); 5] = [
            (0x01, 6, u32::MAX),
            (0x02, 6, 33),
            (0x04, 0, u32::MAX),
            (0x10, 6, u32::MAX),
            (0x20, 0, u32::MAX),
        ];
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            acl.extend(tag.to_le_bytes());
            acl.extend(permissions.to_le_bytes());
            acl.extend(id.to_le_bytes());
        }
        acl
    }

    fn set(file: &File, name: &str, value: &[u8]) {
        fsetxattr(file, name, value, XattrFlags::empty()).unwrap();
    }

    #[test]
    fn acl_and_user_attributes_pass_to_the_new_file() {
        let (old, new) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        old.set_permissions(Permissions::from_mode(0o600)).unwrap();
        new.set_permissions(Permissions::from_mode(0o644)).unwrap();
        set(&old, ACL, &acl_of_one_user());
        set(&old, "user.note", b"web server");
        pass(&old, &new).unwrap();
        assert_eq!(acl_of(&new), Ok(Some(acl_of_one_user())));
        assert_eq!(value_of(&new, b"user.note"), Ok(b"web server".to_vec()));
        assert_eq!(new.metadata().unwrap().mode() & 0o7777, 0o660);
    }

    #[test]
    fn acl_from_the_directory_gives_no_rights_that_the_old_file_denies() {
        let (old, new) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        old.set_permissions(Permissions::from_mode(0o660)).unwrap();
        set(&new, ACL, &acl_of_one_user());
        pass(&old, &new).unwrap();
        assert_eq!(acl_of(&new), Ok(None));
        assert_eq!(new.metadata().unwrap().mode() & 0o7777, 0o660);
    }

    #[test]
    fn refused_acl_leaves_permissions_to_the_owner_only() {
        let old = tempfile::tempfile().unwrap();
        old.set_permissions(Permissions::from_mode(0o604)).unwrap();
        set(&old, ACL, &acl_of_one_user());
        // A pipe has a mode, and no ACL.
        let (_reader, writer) = std::io::pipe().unwrap();
        let new = File::from(std::os::fd::OwnedFd::from(writer));
        let refused = fsetxattr(&new, ACL, &acl_of_one_user(), XattrFlags::empty());
        assert_eq!(refused, Err(Errno::OPNOTSUPP));
        pass(&old, &new).unwrap();
        assert_eq!(new.metadata().unwrap().mode() & 0o7777, 0o600);
    }
}
