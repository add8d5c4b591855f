//! The stored names of the container's own attributes.
//!
//! Some names of the container's attributes would be marks in the upper. They are stored under
//! escaped names, as overlayfs escapes its own: `trusted.overlay.x` is stored as
//! `trusted.overlay.overlay.x`. An upper of an unprivileged user can store only `user.*`, so other
//! names get a prefix there.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::xattr::each_name;

/// The namespace of the marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Namespace {
    /// In `trusted.*`, which needs CAP_SYS_ADMIN.
    Trusted,
    /// In `user.*`, as overlayfs does with its option `userxattr`.
    User,
}

/// The place of owners, modes and types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ownership {
    /// On the host file itself.
    Native,
    /// In the attribute [`OVERRIDE`](super::OVERRIDE), because the host does not let this user
    /// change a file's owner.
    Override,
}

/// The prefix of names that an unprivileged user's upper cannot store.
const FOREIGN: &[u8] = b"user.bcow.x.";

/// The access ACL of a file.
pub(crate) const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

/// The default ACL of a directory, which new files in it inherit.
pub(crate) const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// The stored name of the root's access ACL. If it had its own name, the host would apply it to the
/// upper's directory: it would grant access to the users of the container's root, and change the
/// directory's mode.
const ROOT_ACCESS_ACL: &[u8] = b"trusted.bcow.x.system.posix_acl_access";

/// How an upper names attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    /// The namespace of the marks.
    pub namespace: Namespace,
    /// The place of owners.
    pub ownership: Ownership,
}

impl Names {
    /// The stored name of the container's attribute `name`, of the root or of another file.
    pub fn stored_name<'a>(&self, name: &'a [u8], is_root: bool) -> Cow<'a, [u8]> {
        if is_root && self.namespace == Namespace::Trusted && name == ACCESS_ACL {
            return ROOT_ACCESS_ACL.into();
        }
        if self.namespace == Namespace::User && !name.starts_with(b"user.") {
            return [FOREIGN, name].concat().into();
        }
        for prefix in self.reserved() {
            if name.starts_with(prefix) {
                return [prefix, last_part(prefix), &name[prefix.len()..]]
                    .concat()
                    .into();
            }
        }
        name.into()
    }

    /// The name that the container sees for the stored attribute `name`, of the root or of another
    /// file; `None` if the attribute is hidden: a mark, an attribute of the host, or the access ACL
    /// of the host's directory.
    pub fn shown_name<'a>(&self, name: &'a [u8], is_root: bool) -> Option<Cow<'a, [u8]>> {
        match name {
            ROOT_ACCESS_ACL if is_root && self.namespace == Namespace::Trusted => {
                return Some(ACCESS_ACL.into());
            }
            ACCESS_ACL if is_root => return None,
            _ => {}
        }
        if self.namespace == Namespace::User {
            if let Some(foreign) = name.strip_prefix(FOREIGN) {
                let shown = !foreign.is_empty() && !foreign.starts_with(b"user.");
                return shown.then(|| foreign.into());
            }
            if !name.starts_with(b"user.") {
                return None;
            }
        }
        for prefix in self.reserved() {
            if let Some(rest) = name.strip_prefix(prefix) {
                let own = rest.strip_prefix(last_part(prefix))?;
                return Some([prefix, own].concat().into());
            }
        }
        Some(name.into())
    }

    /// Converts a list of stored names to the names that the container sees. In both lists a NUL
    /// follows each name.
    pub fn shown_list(&self, list: &[u8], is_root: bool) -> Vec<u8> {
        let mut shown = Vec::with_capacity(list.len());
        for name in each_name(list) {
            if let Some(name) = self.shown_name(name, is_root) {
                shown.extend_from_slice(&name);
                shown.push(0);
            }
        }
        shown
    }

    /// The reserved prefixes, each with a dot at its end. A container's attribute with such a
    /// prefix is stored escaped.
    fn reserved(&self) -> impl Iterator<Item = &'static [u8]> {
        let (marks, ours): (&[u8], &[u8]) = match self.namespace {
            Namespace::Trusted => (b"trusted.overlay.", b"trusted.bcow."),
            Namespace::User => (b"user.overlay.", b"user.bcow."),
        };
        // The root stores its owner in this attribute, even where other files have theirs on the
        // host.
        [marks, ours, b"user.containers."].into_iter()
    }
}

/// The part after the namespace: `overlay.` of `trusted.overlay.`.
fn last_part(prefix: &[u8]) -> &[u8] {
    let namespace = prefix.iter().position(|&byte| byte == b'.');
    &prefix[namespace.map_or(0, |dot| dot + 1)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUSTED: Names = Names {
        namespace: Namespace::Trusted,
        ownership: Ownership::Native,
    };
    const USER: Names = Names {
        namespace: Namespace::User,
        ownership: Ownership::Override,
    };

    fn text(name: Cow<'_, [u8]>) -> String {
        String::from_utf8(name.into_owned()).unwrap()
    }

    #[test]
    fn reserved_names_are_escaped_and_come_back() {
        let both = [
            (TRUSTED, "user.a", "user.a"),
            (TRUSTED, "trusted.overlay", "trusted.overlay"),
            (
                TRUSTED,
                "trusted.overlay.opaque",
                "trusted.overlay.overlay.opaque",
            ),
            (
                TRUSTED,
                "trusted.overlay.overlay.opaque",
                "trusted.overlay.overlay.overlay.opaque",
            ),
            (TRUSTED, "trusted.bcow.sketch", "trusted.bcow.bcow.sketch"),
            (
                TRUSTED,
                "user.containers.override_stat",
                "user.containers.containers.override_stat",
            ),
            (TRUSTED, "user.overlay.opaque", "user.overlay.opaque"),
            (TRUSTED, "security.capability", "security.capability"),
            (USER, "user.a", "user.a"),
            (USER, "user.overlay.opaque", "user.overlay.overlay.opaque"),
            (USER, "user.bcow.x.user.a", "user.bcow.bcow.x.user.a"),
            (
                USER,
                "user.containers.override_stat",
                "user.containers.containers.override_stat",
            ),
            (
                USER,
                "security.capability",
                "user.bcow.x.security.capability",
            ),
            (
                USER,
                "trusted.overlay.opaque",
                "user.bcow.x.trusted.overlay.opaque",
            ),
        ];
        for (names, shown, stored) in both {
            assert_eq!(text(names.stored_name(shown.as_bytes(), false)), stored);
            let back = names.shown_name(stored.as_bytes(), false).map(text);
            assert_eq!(back.as_deref(), Some(shown));
        }
    }

    #[test]
    fn marks_and_attributes_of_the_host_are_not_shown() {
        for name in [
            "trusted.overlay.opaque",
            "trusted.overlay.",
            "trusted.bcow.sketch",
        ] {
            assert_eq!(TRUSTED.shown_name(name.as_bytes(), false), None);
        }
        let hidden = [
            "user.overlay.origin",
            "user.bcow.sketch",
            "user.containers.override_stat",
            "user.bcow.x.user.a",
            "user.bcow.x.",
            "security.selinux",
            "trusted.a",
        ];
        for name in hidden {
            assert_eq!(USER.shown_name(name.as_bytes(), false), None, "{name}");
        }
        let list = b"user.a\0user.overlay.origin\0user.bcow.x.security.b\0";
        assert_eq!(USER.shown_list(list, false), b"user.a\0security.b\0");
        assert_eq!(USER.shown_list(b"", false), b"");
    }

    #[test]
    fn root_has_its_acl_where_the_host_does_not_follow_it() {
        assert_eq!(
            text(TRUSTED.stored_name(ACCESS_ACL, true)),
            "trusted.bcow.x.system.posix_acl_access"
        );
        for names in [TRUSTED, USER] {
            for shown in [ACCESS_ACL, b"user.a", b"trusted.bcow.x.b"] {
                let stored = names.stored_name(shown, true).into_owned();
                assert_ne!(stored, ACCESS_ACL);
                assert_eq!(names.shown_name(&stored, true).as_deref(), Some(shown));
            }
            assert_eq!(names.shown_name(ACCESS_ACL, true), None);
        }
        assert_eq!(TRUSTED.shown_name(ROOT_ACCESS_ACL, false), None);
    }
}
