//! An archive that GNU tar writes of a directory gives the same tree as the directory.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use bcow_oci::Source;
use bcow_testkit::{has_program, lacks};

use crate::support::{convert_tar, convert_with, options};

fn fill(root: &Path) {
    let deep = root.join("d".repeat(90)).join("e".repeat(90));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("f".repeat(90)), "long").unwrap();
    fs::write(root.join("file"), vec![b'x'; 12_345]).unwrap();
    fs::set_permissions(root.join("file"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(root.join("file"), root.join("link")).unwrap();
    symlink("t".repeat(150), root.join("symlink")).unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    for i in 0..40 {
        sparse.write_all_at(b"island", i * 70_000 + 1).unwrap();
    }
    for path in [
        root.join("file"),
        root.join("sparse"),
        deep.clone(),
        deep.join("f".repeat(90)),
    ] {
        // Whole seconds, because some formats have no fractions.
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000);
        File::open(path).unwrap().set_modified(time).unwrap();
    }
}

/// The tree without times, because those of directories and links depend on the host.
fn tree(text: &str) -> String {
    text.lines()
        .map(|line| {
            let words = line
                .split(' ')
                .filter(|w| !w.contains(".0") || w.starts_with('/'));
            let words = words.filter(|w| {
                w.split('.').count() != 2 || !w.ends_with(|c: char| c.is_ascii_digit())
            });
            words.collect::<Vec<_>>().join(" ") + "\n"
        })
        .collect()
}

#[test]
fn gnu_tar_and_the_directory_itself_agree() {
    if lacks("GNU tar", has_program("tar")) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path());
    let expected = convert_with(&Source::Directory(dir.path().into()), &options()).unwrap();
    for arguments in [
        &["--format=posix"][..],
        &["--format=posix", "--sparse"],
        &["--format=posix", "--sparse", "--sparse-version=0.0"],
        &["--format=posix", "--sparse", "--sparse-version=0.1"],
        &["--format=gnu"],
        &["--format=gnu", "--sparse"],
        &["--format=oldgnu", "--sparse"],
    ] {
        let output = Command::new("tar")
            .args(arguments)
            .args(["-c", "-C"])
            .arg(dir.path())
            .arg(".")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let converted = convert_tar(&output.stdout).unwrap();
        assert_eq!(
            tree(&converted.dump()),
            tree(&expected.dump()),
            "{arguments:?}"
        );
    }
}
