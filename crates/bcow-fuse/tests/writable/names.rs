//! Names, and files without one.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::pair::Pair;
use crate::support::set_xattr;

#[test]
fn renames_exchange_and_spare_what_is_there() {
    let Some(pair) = Pair::new("") else { return };
    for directory in pair.both() {
        let rename = |from: &str, to: &str, flags| {
            rustix::fs::renameat_with(CWD, directory.join(from), CWD, directory.join(to), flags)
        };
        assert_eq!(
            rename("file", "other", RenameFlags::NOREPLACE),
            Err(Errno::EXIST)
        );
        rename("d", "file", RenameFlags::EXCHANGE).unwrap();
        rename("other", "fresh", RenameFlags::NOREPLACE).unwrap();
    }
    // RENAME_WHITEOUT is refused: the whiteout would hide the old name at once.
    let whiteout = rustix::fs::renameat_with(
        CWD,
        pair.path("fresh"),
        CWD,
        pair.path("elsewhere"),
        RenameFlags::WHITEOUT,
    );
    assert_eq!(whiteout, Err(Errno::INVAL));
    let pair = pair.again("");
    pair.same("find . | sort; cat d file/inner fresh | cksum");
}

#[test]
fn file_without_a_name_lives_until_it_is_closed() {
    let Some(pair) = Pair::new("") else { return };
    for name in ["file", "new"] {
        let path = pair.path(name);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!path.exists());
        file.write_all_at(b"still here", 5).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600))
            .unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(
            (metadata.nlink(), metadata.mode()),
            (0, 0o100_600),
            "{name}"
        );
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(&content[5..15], b"still here");
        fs::write(&path, "another").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"another");
        file.sync_all().unwrap();
    }
    let pair = pair.again("");
    assert_eq!(fs::read(pair.path("file")).unwrap(), b"another");
}

#[test]
fn nameless_files_are_refused_as_not_supported() {
    let Some(pair) = Pair::new("") else { return };
    let opened = rustix::fs::open(pair.root(), OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR);
    assert_eq!(opened.map(drop), Err(Errno::OPNOTSUPP));
}

/// A listing shows the name of a damaged file, and programs that have the file open keep it.
#[test]
fn open_file_that_is_damaged_on_the_host_is_listed_and_stays_open() {
    const MARK: &str = "trusted.overlay.metacopy";
    let Some(pair) = Pair::new("") else { return };
    let file = File::create(pair.path("new")).unwrap();
    set_xattr(&pair.upper().join("new"), MARK, b"bad");
    for _ in 0..3 {
        let names = fs::read_dir(pair.root()).unwrap();
        let shown = names
            .filter(|name| name.as_ref().unwrap().file_name() == "new")
            .count();
        assert_eq!(shown, 1);
    }
    rustix::fs::lremovexattr(pair.upper().join("new"), MARK).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600))
        .unwrap();
}
