//! The mapping of owners: files belong to other IDs on the host than in the image and the upper.
//!
//! A container in a user namespace runs with IDs of the host that its image does not have: 100000
//! for root, for example. With a mapping, the mount shows each file with the ID of the host, and
//! the upper stores the ID that the container means. So the mount needs no change of a single file,
//! and a layer of the upper has the same owners as one of any other container.
//!
//! An ID without a counterpart is shown as no ID, as in the kernel's mapped mounts: programs see
//! the overflow ID 65534, and the kernel refuses writes to such a file. A file cannot be given to
//! an ID without a counterpart.

use std::fmt;

use bcow_union::fs::{Attributes, Caller};
use rustix::io::Errno;

/// The ID that the kernel takes for no ID.
const NO_ID: u32 = u32::MAX;

/// The mapping of one kind of IDs, users or groups. Without ranges, IDs stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IdMap(Vec<Range>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    /// The first ID in the image and the upper.
    inner: u32,
    /// The first ID on the host.
    host: u32,
    count: u32,
}

impl IdMap {
    /// Adds a range, `CONTAINER:HOST:COUNT`. The error says what is wrong with it.
    pub fn add(&mut self, text: &str) -> Result<(), &'static str> {
        let numbers: Option<Vec<u32>> = text.split(':').map(|it| it.parse().ok()).collect();
        let numbers = numbers.and_then(|numbers| <[u32; 3]>::try_from(numbers).ok());
        let Some([inner, host, count]) = numbers else {
            return Err("a range of IDs is CONTAINER:HOST:COUNT, three numbers");
        };
        let fits = |first: u32| first.checked_add(count).is_some_and(|end| end < NO_ID);
        if count == 0 || !fits(inner) || !fits(host) {
            return Err("the range of IDs is empty, or ends above 4294967294");
        }
        let overlaps =
            |one: u32, other: u32, of_other: u32| one < other + of_other && other < one + count;
        let is_taken = |range: &Range| {
            overlaps(inner, range.inner, range.count) || overlaps(host, range.host, range.count)
        };
        if self.0.iter().any(is_taken) {
            return Err("two ranges of IDs have a common ID");
        }
        self.0.push(Range { inner, host, count });
        Ok(())
    }

    fn to_host(&self, id: u32) -> u32 {
        self.find(id, |range| (range.inner, range.host))
            .unwrap_or(NO_ID)
    }

    fn to_inner(&self, id: u32) -> Result<u32, Errno> {
        self.find(id, |range| (range.host, range.inner))
            .ok_or(Errno::OVERFLOW)
    }

    fn find(&self, id: u32, ends: impl Fn(&Range) -> (u32, u32)) -> Option<u32> {
        if self.0.is_empty() {
            return Some(id);
        }
        self.0.iter().find_map(|range| {
            let (from, to) = ends(range);
            let offset = id.checked_sub(from)?;
            (offset < range.count).then(|| to + offset)
        })
    }
}

impl fmt::Display for IdMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}:{}:{}", range.inner, range.host, range.count)?;
        }
        Ok(())
    }
}

/// The mappings of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owners {
    /// Of user IDs.
    pub users: IdMap,
    /// Of group IDs.
    pub groups: IdMap,
}

impl Owners {
    /// Whether all IDs stay as they are.
    pub fn are_same(&self) -> bool {
        *self == Owners::default()
    }

    /// An owner and a group as the host sees them.
    pub(crate) fn to_host(&self, (uid, gid): (u32, u32)) -> (u32, u32) {
        (self.users.to_host(uid), self.groups.to_host(gid))
    }

    /// The attributes of a file as the host sees them.
    pub(crate) fn shown(&self, attributes: Attributes) -> Attributes {
        let (uid, gid) = self.to_host((attributes.uid, attributes.gid));
        Attributes {
            uid,
            gid,
            ..attributes
        }
    }

    /// An owner and a group that the host names, for the upper.
    pub(crate) fn to_inner(
        &self,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(Option<u32>, Option<u32>), Errno> {
        let uid = uid.map(|uid| self.users.to_inner(uid)).transpose()?;
        let gid = gid.map(|gid| self.groups.to_inner(gid)).transpose()?;
        Ok((uid, gid))
    }

    /// The owner of new files of this caller.
    pub(crate) fn caller(&self, caller: Caller) -> Result<Caller, Errno> {
        Ok(Caller {
            uid: self.users.to_inner(caller.uid)?,
            gid: self.groups.to_inner(caller.gid)?,
            ..caller
        })
    }

    /// The value of an extended attribute as the host sees it.
    pub(crate) fn shown_xattr(&self, name: &[u8], value: Vec<u8>) -> Vec<u8> {
        let to_host = |map: &IdMap, id| Ok(map.to_host(id));
        // `to_host` does not fail.
        self.mapped(name, &value, to_host)
            .ok()
            .flatten()
            .unwrap_or(value)
    }

    /// The value of an extended attribute that the host sets, for the upper. `None`: as it is.
    pub(crate) fn stored_xattr(&self, name: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        self.mapped(name, value, IdMap::to_inner)
    }

    /// The value with other IDs; `None` if it has none.
    fn mapped(
        &self,
        name: &[u8],
        value: &[u8],
        map: impl Fn(&IdMap, u32) -> Result<u32, Errno>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        if self.are_same() {
            return Ok(None);
        }
        match name {
            b"system.posix_acl_access" | b"system.posix_acl_default" => {
                self.mapped_acl(value, map).map(Some)
            }
            b"security.capability" => self.mapped_capability(value, map),
            _ => Ok(None),
        }
    }

    /// `struct posix_acl_xattr_header` and its entries (linux/posix_acl_xattr.h).
    fn mapped_acl(
        &self,
        value: &[u8],
        map: impl Fn(&IdMap, u32) -> Result<u32, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        const HEADER_BYTES: usize = 4;
        const ENTRY_BYTES: usize = 8;
        let mut mapped = value.to_owned();
        let entries = mapped.get_mut(HEADER_BYTES..).unwrap_or_default();
        for entry in entries.chunks_exact_mut(ENTRY_BYTES) {
            let (tag, id) = entry.split_at_mut(4);
            let ids = match tag[..2] {
                // ACL_USER, ACL_GROUP
                [2, 0] => &self.users,
                [8, 0] => &self.groups,
                _ => continue,
            };
            let old = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
            id.copy_from_slice(&map(ids, old)?.to_le_bytes());
        }
        Ok(mapped)
    }

    /// `struct vfs_cap_data` and `struct vfs_ns_cap_data` (linux/capability.h). The second one has
    /// the root user of the namespace in which the capabilities hold. For the first one, that is
    /// user 0.
    fn mapped_capability(
        &self,
        value: &[u8],
        map: impl Fn(&IdMap, u32) -> Result<u32, Errno>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        const BYTES: usize = 20;
        const WITH_ROOT_BYTES: usize = 24;
        const REVISION: usize = 3;
        let root = match (value.get(REVISION), value.len()) {
            (Some(2), BYTES) => 0,
            (Some(3), WITH_ROOT_BYTES) => {
                u32::from_le_bytes([value[20], value[21], value[22], value[23]])
            }
            _ => return Ok(None),
        };
        let root = map(&self.users, root)?;
        let mut mapped = value[..BYTES].to_owned();
        mapped[REVISION] = 2;
        if root != 0 {
            mapped[REVISION] = 3;
            mapped.extend(root.to_le_bytes());
        }
        Ok(Some(mapped))
    }
}

impl fmt::Display for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{};{}", self.users, self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(ranges: &[&str]) -> Owners {
        let mut map = IdMap::default();
        for range in ranges {
            map.add(range).unwrap();
        }
        Owners {
            users: map.clone(),
            groups: map,
        }
    }

    #[test]
    fn each_id_has_its_counterpart_and_others_have_none() {
        let owners = owners(&["0:1000:1", "1:100000:65535"]);
        assert_eq!(
            owners.to_string(),
            "0:1000:1,1:100000:65535;0:1000:1,1:100000:65535"
        );
        assert_eq!(owners.to_host((0, 65535)), (1000, 165_534));
        assert_eq!(owners.to_host((1, 65536)), (100_000, NO_ID));
        assert_eq!(owners.to_inner(Some(1000), None), Ok((Some(0), None)));
        assert_eq!(
            owners.to_inner(None, Some(165_534)),
            Ok((None, Some(65535)))
        );
        assert_eq!(owners.to_inner(Some(0), None), Err(Errno::OVERFLOW));
        let same = Owners::default();
        assert_eq!(same.to_host((7, NO_ID)), (7, NO_ID));
        assert!(same.are_same() && !owners.are_same());
    }

    #[test]
    fn ranges_that_are_no_mapping_are_refused() {
        for (ranges, expected) in [
            (&["0:1"][..], "three numbers"),
            (&["0:1:2:3"], "three numbers"),
            (&["0:1:x"], "three numbers"),
            (&["0:-1:1"], "three numbers"),
            (&["0:1:0"], "is empty"),
            (&["0:4294967290:5"], "ends above"),
            (&["0:1:2", "1:9:1"], "a common ID"),
            (&["0:1:2", "5:2:1"], "a common ID"),
        ] {
            let mut map = IdMap::default();
            let added: Result<Vec<()>, _> = ranges.iter().map(|range| map.add(range)).collect();
            let error = added.unwrap_err();
            assert!(error.contains(expected), "{ranges:?}: {error}");
        }
    }

    #[test]
    fn acls_and_capabilities_are_those_of_the_host() {
        let owners = owners(&["0:100000:65536"]);
        let acl = |user: u32, group: u32| {
            let entry = |tag: u8, id: u32| [&[tag, 0, 7, 0][..], &id.to_le_bytes()].concat();
            let entries = [(1, NO_ID), (2, user), (8, group), (0x20, NO_ID)];
            let entries = entries.map(|(tag, id)| entry(tag, id)).concat();
            [&[2, 0, 0, 0][..], &entries].concat()
        };
        let name = b"system.posix_acl_default";
        assert_eq!(owners.shown_xattr(name, acl(5, 6)), acl(100_005, 100_006));
        assert_eq!(owners.shown_xattr(name, acl(5, 70000)), acl(100_005, NO_ID));
        assert_eq!(
            owners.stored_xattr(name, &acl(100_005, 100_006)),
            Ok(Some(acl(5, 6)))
        );
        assert_eq!(owners.stored_xattr(name, &acl(5, 6)), Err(Errno::OVERFLOW));

        let capability =
            |revision, root: &[u8]| [&[1, 0, 0, revision], &[9; 16][..], root].concat();
        let (plain, of_root) = (
            capability(2, &[]),
            capability(3, &100_000_u32.to_le_bytes()),
        );
        let name = b"security.capability";
        assert_eq!(owners.shown_xattr(name, plain.clone()), of_root);
        assert_eq!(owners.stored_xattr(name, &of_root), Ok(Some(plain.clone())));
        assert_eq!(owners.stored_xattr(name, &plain), Err(Errno::OVERFLOW));

        // Other attributes, values that are none of these, and mounts without a mapping.
        assert_eq!(owners.stored_xattr(b"user.x", &plain), Ok(None));
        for odd in [&b""[..], &[2, 0], &[0; 21]] {
            assert_eq!(owners.shown_xattr(name, odd.to_owned()), odd);
            assert_eq!(
                owners.shown_xattr(b"system.posix_acl_access", odd.to_owned()),
                odd
            );
        }
        assert_eq!(Owners::default().shown_xattr(name, plain.clone()), plain);
    }
}
