//! Paths from archives, as sequences of names below the root.

use crate::error::TarProblem;

/// Longest path, as in Linux. Also bounds the depth of the tree.
pub(crate) const MAX_PATH_BYTES: usize = 4096;

/// The names of a path from an archive: a leading slash, empty names and `.` are dropped, `..` takes
/// back a name. Empty for the root itself.
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
            name if name.len() > 255 => {
                return Err(TarProblem::NameTooLong { bytes: name.len() });
            }
            name => names.push(name),
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
}
