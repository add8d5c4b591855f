//! Paths from archives, as sequences of names below the root.

use crate::error::TarProblem;

/// Longest path, as in Linux. The limit also bounds the depth of the tree.
pub(crate) const MAX_PATH_BYTES: u64 = 4096;

/// The prefix of the name of a whiteout.
pub(crate) const WHITEOUT: &[u8] = b".wh.";

/// The names of a path from an archive: a leading slash, empty names and `.` are dropped, and `..`
/// removes the previous name. The result is empty for the root. The last name may be a whiteout's,
/// which is longer than other names by its prefix.
pub(crate) fn components(path: &[u8]) -> Result<Vec<&[u8]>, TarProblem> {
    if path.is_empty() {
        return Err(TarProblem::EmptyName);
    }
    if path.contains(&0) {
        return Err(TarProblem::ZeroInName);
    }
    let mut names = Vec::with_capacity(8);
    for name in path.split(|&b| b == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                names.pop().ok_or(TarProblem::ClimbsOut)?;
            }
            name => names.push(name),
        }
    }
    let last = names.len().saturating_sub(1);
    for (i, name) in names.iter().enumerate() {
        let prefix = if i == last && name.starts_with(WHITEOUT) { WHITEOUT.len() } else { 0 };
        if name.len() - prefix > 255 {
            return Err(TarProblem::NameTooLong { bytes: name.len() });
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_below_the_root() {
        let ok = |path: &[u8]| components(path).unwrap().join(&b"/"[..]);
        assert_eq!(ok(b"./a//b/."), b"a/b");
        assert_eq!(ok(b"/a/b/"), b"a/b");
        assert_eq!(ok(b"a/../b"), b"b");
        assert_eq!(ok(b"./"), b"");
        assert_eq!(ok(b"/"), b"");
        assert_eq!(components(b"../a"), Err(TarProblem::ClimbsOut));
        assert_eq!(components(b"/a/../../b"), Err(TarProblem::ClimbsOut));
        assert_eq!(components(b""), Err(TarProblem::EmptyName));
        assert_eq!(components(b"a\0b"), Err(TarProblem::ZeroInName));
        assert!(components(&[b'x'; 255]).is_ok());
        assert_eq!(
            components(&[b'x'; 256]),
            Err(TarProblem::NameTooLong { bytes: 256 })
        );
    }

    #[test]
    fn a_whiteout_of_the_longest_name_is_not_too_long() {
        let whiteout = |bytes| [WHITEOUT, &vec![b'x'; bytes]].concat();
        assert!(components(&whiteout(255)).is_ok());
        assert!(components(&whiteout(256)).is_err());
        assert!(components(&[whiteout(255), b"/a".to_vec()].concat()).is_err());
    }
}
