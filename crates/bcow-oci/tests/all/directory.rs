//! Directories of the host as a source.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

use bcow_oci::{LayoutOptions, LayoutPlace, Source, convert_to_layout};

use crate::support::{convert_with, message, options};

#[test]
fn a_directory_becomes_an_image_of_the_same_tree() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("d/e")).unwrap();
    fs::set_permissions(at("d/e"), fs::Permissions::from_mode(0o2711)).unwrap();
    fs::write(at("d/file"), "content").unwrap();
    fs::hard_link(at("d/file"), at("a-link")).unwrap();
    symlink("/etc/passwd", at("s")).unwrap();
    symlink("d", at("to-dir")).unwrap();
    fs::write(at(".wh.not-a-whiteout"), "").unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(10 << 20).unwrap();
    sparse.write_all_at(b"in the middle", 5 << 20).unwrap();
    let converted = convert_with(&Source::Directory(dir.path().into()), &options()).unwrap();
    let names: Vec<_> = converted
        .lines()
        .lines()
        .map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
        .collect();
    insta::assert_snapshot!(names.join("\n"), @r"
    /.wh.not-a-whiteout -0644 1
    /a-link -0644 2
    /d d0755 3
    /d/e d2711 2
    /d/file -0644 2
    /s l0777 1
    /sparse -0644 1
    /to-dir l0777 1
    ");
    assert_eq!(converted.read("d/file"), b"content");
    assert_eq!(converted.read("a-link"), b"content");
    let bytes = converted.read("sparse");
    assert_eq!(&bytes[5 << 20..][..13], b"in the middle");
    assert_eq!(bytes.iter().filter(|&&b| b != 0).count(), 13);
    assert!(converted.report.content_bytes < 1 << 20);
}

#[test]
fn a_layout_in_the_source_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::Directory(dir.path().into());
    for name in ["new", "new/deeper", "."] {
        let layout = LayoutOptions {
            place: LayoutPlace {
                path: dir.path().join(name),
                ..LayoutPlace::default()
            },
            ..LayoutOptions::default()
        };
        let error = convert_to_layout(&source, &layout, &options(), &()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("would become a part of the image"), "{text}");
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    }
}

#[test]
fn the_order_of_the_host_does_not_matter() {
    let make = |names: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(dir.path().join(name), name.repeat(1000)).unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(5);
            let file = File::options()
                .write(true)
                .open(dir.path().join(name))
                .unwrap();
            file.set_modified(time).unwrap();
        }
        let root = File::open(dir.path()).unwrap();
        root.set_modified(std::time::UNIX_EPOCH).unwrap();
        convert_with(&Source::Directory(dir.path().into()), &options())
            .unwrap()
            .bytes()
    };
    assert!(make(&["a", "b", "c", "B"]) == make(&["c", "B", "b", "a"]));
}

#[test]
fn a_file_in_place_of_a_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f");
    fs::write(&file, "").unwrap();
    let text = message(convert_with(&Source::Directory(file), &options()));
    assert!(text.starts_with("TMP/f: not a directory;"), "{text}");
}
