//! Tar archives that must be refused, with a word that helps.

use bcow_oci::{ConvertOptions, Limits};

use crate::support::{convert_tar, convert_tar_with, gzip, message, options};
use crate::tarmaker::{GNU, Header, Tar, record, seal};

fn refused(tar: &[u8]) -> String {
    message(convert_tar(tar)).replace("TMP/in.tar", "in.tar")
}

#[test]
fn damaged_archives_are_refused() {
    let tar = Tar::new()
        .file("a", "content")
        .file("b", vec![1; 2000])
        .done();
    insta::assert_snapshot!(refused(b"this is no archive at all"), @"Invalid: in.tar: not a tar archive (at byte 0)");
    insta::assert_snapshot!(refused(&[b'x'; 1024]), @"Invalid: in.tar: not a tar archive (at byte 0)");
    insta::assert_snapshot!(refused(&tar[..515]), @r#"Invalid: in.tar, entry "a": the archive is truncated: it ends in the middle of an entry's data (at byte 512)"#);
    insta::assert_snapshot!(refused(&tar[..1100]), @"Invalid: in.tar: the archive is truncated: it ends in the middle of a header (at byte 1024)");
    insta::assert_snapshot!(refused(&tar[..2000]), @r#"Invalid: in.tar, entry "b": the archive is truncated: it ends in the middle of an entry's data (at byte 1536)"#);
    let mut flipped = tar.clone();
    flipped[1024 + 3] ^= 1;
    insta::assert_snapshot!(refused(&flipped), @"Invalid: in.tar: header checksum is 3854, expected 3853 (at byte 1024)");
    let lone = Tar::new().file("a", "").raw(&[0; 512]).file("b", "").done();
    insta::assert_snapshot!(refused(&lone), @"Invalid: in.tar: a zero block stands in the middle of the archive (at byte 512)");
}

#[test]
fn bad_fields_are_refused() {
    let field = |at: usize, bytes: &[u8]| {
        let mut block = Header::new("victim", b'0').block();
        block[at..at + bytes.len()].copy_from_slice(bytes);
        refused(&Tar::new().raw(&seal(block)).done())
    };
    insta::assert_snapshot!(field(100, b"rw-r--r-"), @r#"Invalid: in.tar, entry "victim": bad number in header field mode"#);
    insta::assert_snapshot!(field(108, &[0xff; 8]), @r#"Invalid: in.tar, entry "victim": uid -1 does not fit"#);
    insta::assert_snapshot!(field(108, &[0x80, 0, 0, 1, 0, 0, 0, 0]), @r#"Invalid: in.tar, entry "victim": uid 4294967296 does not fit"#);
    insta::assert_snapshot!(field(124, b"99999999999\0"), @r#"Invalid: in.tar, entry "victim": bad number in header field size"#);
    insta::assert_snapshot!(field(124, &[0xff; 12]), @r#"Invalid: in.tar, entry "victim": bad number in header field size"#);
    insta::assert_snapshot!(field(124, &[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), @r#"Invalid: in.tar, entry "victim": size 9223372036854775807 does not fit"#);
    insta::assert_snapshot!(field(136, b"1234567x\0\0\0\0"), @r#"Invalid: in.tar, entry "victim": bad number in header field mtime"#);
    insta::assert_snapshot!(field(156, b"Z"), @r#"Unsupported: in.tar, entry "victim": unknown entry type 'Z'"#);
    insta::assert_snapshot!(field(156, b"M"), @r#"Unsupported: in.tar, entry "victim": multi-volume archives are not supported"#);
    insta::assert_snapshot!(field(156, b"S"), @r#"Unsupported: in.tar, entry "victim": unknown entry type 'S'"#);
    let mut device = Header::new("dev", b'3');
    device.device = (4096, 0);
    insta::assert_snapshot!(refused(&Tar::new().entry(&device, b"").done()), @r#"Invalid: in.tar, entry "dev": device major 4096 does not fit"#);
}

#[test]
fn bad_names_are_refused() {
    let named =
        |name: &[u8]| refused(&Tar::new().pax(&[(&b"path"[..], name)]).file("x", "").done());
    insta::assert_snapshot!(named(b"../up"), @r#"Invalid: in.tar, entry "../up": the path climbs out of the root"#);
    insta::assert_snapshot!(named(b"/a/../../b"), @r#"Invalid: in.tar, entry "/a/../../b": the path climbs out of the root"#);
    insta::assert_snapshot!(named(b"a\0b"), @r#"Invalid: in.tar, entry "PaxHeaders/x": the name contains a zero byte"#);
    insta::assert_snapshot!(named(&[b'n'; 256]), @r#"Invalid: in.tar, entry "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn..." (256 bytes): a name in the path has 256 bytes, at most 255 are possible"#);
    insta::assert_snapshot!(named(&b"d/".repeat(2049)), @r#"Limit: in.tar, entry "d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/..." (4098 bytes): too many bytes of path: 4098, at most 4096 are allowed"#);
    insta::assert_snapshot!(refused(&Tar::new().file("", "").done()), @r#"Invalid: in.tar, entry "": the name is empty"#);
    insta::assert_snapshot!(refused(&Tar::new().symlink("./", "x").done()), @r#"Invalid: in.tar, entry "./": the root is no directory here"#);
}

#[test]
fn a_name_that_climbs_out_with_an_escape_cannot_drive_the_terminal() {
    let tar = Tar::new()
        .pax(&[("path", "../\x1b[2Jx")])
        .file("x", "")
        .done();
    let text = refused(&tar);
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn bad_links_are_refused() {
    let one = |name: &str, kind: u8, link: &str| {
        Tar::new()
            .entry(&Header::new(name, kind).link(link), b"")
            .done()
    };
    insta::assert_snapshot!(refused(&one("s", b'2', "")), @r#"Invalid: in.tar, entry "s": a link without a target"#);
    insta::assert_snapshot!(refused(&one("h", b'1', "")), @r#"Invalid: in.tar, entry "h": a link without a target"#);
    insta::assert_snapshot!(refused(&one("h", b'1', "nothing")), @"Invalid: in.tar: /h: hardlink to /nothing: neither this layer nor one below has such a file");
    insta::assert_snapshot!(refused(&one("h", b'1', "../../x")), @r#"Invalid: in.tar, entry "h": hardlink to "../../x", which climbs out of the root"#);
    insta::assert_snapshot!(refused(&one("h", b'1', "h")), @r#"Invalid: in.tar, entry "h": hardlink to "h", which is not there"#);
    insta::assert_snapshot!(refused(&one("h", b'1', "/")), @r#"Invalid: in.tar, entry "h": hardlink to "/", which is a directory"#);
    let cycle = Tar::new()
        .hardlink("a", "b")
        .hardlink("b", "c")
        .hardlink("c", "a")
        .done();
    insta::assert_snapshot!(refused(&cycle), @r#"Invalid: in.tar, entry "a": hardlink to "b", which is not there"#);
    let to_dir = Tar::new().hardlink("h", "d").dir("d").done();
    insta::assert_snapshot!(refused(&to_dir), @r#"Invalid: in.tar, entry "h": hardlink to "d", which is a directory"#);
    let long = Tar::new()
        .pax(&[("linkpath", "t".repeat(4096))])
        .symlink("s", "")
        .done();
    insta::assert_snapshot!(refused(&long), @r#"Invalid: in.tar, entry "s": the link target has 4096 bytes, at most 4095 are possible"#);
    let through_file = Tar::new().file("f", "").file("f/x", "").done();
    insta::assert_snapshot!(refused(&through_file), @r#"Invalid: in.tar, entry "f/x": "f" is no directory"#);
    let cycle = Tar::new()
        .symlink("a", "b")
        .symlink("b", "a")
        .file("a/x", "")
        .done();
    insta::assert_snapshot!(refused(&cycle), @r#"Invalid: in.tar, entry "a/x": too many symbolic links on the way to the parent directory"#);
}

#[test]
fn bad_whiteouts_are_refused() {
    for name in [".wh.", "d/.wh..", ".wh..."] {
        let text = refused(&Tar::new().file(name, "").done());
        assert!(text.ends_with("whiteout of nothing"), "{text}");
    }
}

#[test]
fn bad_extension_headers_are_refused() {
    let pax = |data: &[u8]| refused(&Tar::new().pax_raw(b'x', data).file("f", "").done());
    insta::assert_snapshot!(pax(b"99 path=x\n"), @r#"Invalid: in.tar, entry "PaxHeaders/x": malformed PAX record: a record is longer than the header"#);
    insta::assert_snapshot!(pax(b"garbage"), @r#"Invalid: in.tar, entry "PaxHeaders/x": malformed PAX record: a record does not begin with its length"#);
    insta::assert_snapshot!(pax(&record("mtime", "yesterday")), @r#"Invalid: in.tar, entry "PaxHeaders/x": malformed PAX record: mtime is no number"#);
    insta::assert_snapshot!(pax(&record("uid", "4294967296")), @r#"Invalid: in.tar, entry "f": uid 4294967296 does not fit"#);
    let twice = Tar::new()
        .pax(&[("uid", "1")])
        .pax(&[("uid", "2")])
        .file("f", "")
        .done();
    insta::assert_snapshot!(refused(&twice), @r#"Invalid: in.tar, entry "PaxHeaders/x": two PAX headers for one entry"#);
    let twice = Tar::new()
        .gnu_long(b'L', "a")
        .gnu_long(b'L', "b")
        .file("f", "")
        .done();
    insta::assert_snapshot!(refused(&twice), @r#"Invalid: in.tar, entry "././@LongLink": two GNU long-name headers for one entry"#);
    let orphan = Tar::new().pax(&[("uid", "1")]).done();
    insta::assert_snapshot!(refused(&orphan), @r#"Invalid: in.tar, entry "PaxHeaders/x": extension headers without an entry to belong to"#);
    let global = Tar::new()
        .pax_raw(b'g', &record("path", "everyone"))
        .file("f", "")
        .done();
    insta::assert_snapshot!(refused(&global), @r#"Invalid: in.tar, entry "PaxHeaders/x": malformed PAX record: a global header with path, size, holes or attributes of a file"#);
    let between = Tar::new()
        .pax(&[("uid", "1")])
        .pax_raw(b'g', b"")
        .file("f", "")
        .done();
    insta::assert_snapshot!(refused(&between), @r#"Invalid: in.tar, entry "PaxHeaders/x": extension headers without an entry to belong to"#);
    let huge = Tar::new()
        .entry(&Header::new("x", b'x').size(1 << 32), b"")
        .done();
    insta::assert_snapshot!(refused(&huge), @r#"Limit: in.tar, entry "x": too many bytes of tar extension headers: 4294967296, at most 1048576 are allowed"#);
    let huge = Tar::new()
        .entry(&Header::new("L", b'L').magic(GNU).size(1 << 20), b"")
        .done();
    insta::assert_snapshot!(refused(&huge), @r#"Limit: in.tar, entry "L": too many bytes of tar extension headers: 1048576, at most 65536 are allowed"#);
    let name = record("SCHILY.xattr.user.big", vec![b'v'; 70_000]);
    insta::assert_snapshot!(pax(&name), @r#"Invalid: in.tar, entry "PaxHeaders/x": extended attribute "user.big": the value has more than 65536 bytes"#);
}

#[test]
fn bad_sparse_files_are_refused() {
    let pax = |records: &[(&str, &str)], data: &[u8]| {
        refused(&Tar::new().pax(records).file("f", data).done())
    };
    let (size, map) = ("GNU.sparse.size", "GNU.sparse.map");
    insta::assert_snapshot!(pax(&[(size, "100"), (map, "0,50,40,10")], &[1; 60]), @r#"Invalid: in.tar, entry "f": malformed sparse map: the runs overlap or are out of order"#);
    insta::assert_snapshot!(pax(&[(size, "100"), (map, "90,20")], &[1; 20]), @r#"Invalid: in.tar, entry "f": malformed sparse map: a run ends beyond the file"#);
    insta::assert_snapshot!(pax(&[(size, "100"), (map, "0,10")], &[1; 20]), @r#"Invalid: in.tar, entry "f": malformed sparse map: the runs do not add up to the bytes in the archive"#);
    insta::assert_snapshot!(pax(&[(size, "100"), (map, "0,10,20")], &[1; 10]), @r#"Invalid: in.tar, entry "f": malformed sparse map: a run has no length"#);
    insta::assert_snapshot!(pax(&[(map, "0,10")], &[1; 10]), @r#"Invalid: in.tar, entry "f": malformed sparse map: the file's size is missing"#);
    insta::assert_snapshot!(pax(&[("GNU.sparse.numbytes", "1")], &[1; 10]), @r#"Invalid: in.tar, entry "PaxHeaders/x": malformed sparse map: offsets and lengths do not take turns"#);
    insta::assert_snapshot!(pax(&[("GNU.sparse.major", "2"), ("GNU.sparse.minor", "0")], &[]), @r#"Invalid: in.tar, entry "f": malformed sparse map: an unknown version"#);
    let v1 = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "9"),
    ];
    insta::assert_snapshot!(pax(&v1, b"999999999\n"), @r#"Invalid: in.tar, entry "f": malformed sparse map: the map is longer than the data"#);
    insta::assert_snapshot!(pax(&v1, &[b'1'; 512]), @r#"Invalid: in.tar, entry "f": malformed sparse map: the map holds no numbers"#);
    insta::assert_snapshot!(pax(&v1, b"1\n"), @r#"Invalid: in.tar, entry "f": malformed sparse map: the map is longer than the data"#);
    insta::assert_snapshot!(pax(&v1, &[]), @r#"Invalid: in.tar, entry "f": malformed sparse map: the map is longer than the data"#);
    let mut gnu = Header::new("f", b'S').magic(GNU).block();
    gnu[482] = 1;
    insta::assert_snapshot!(refused(&Tar::new().raw(&seal(gnu)).bytes), @r#"Invalid: in.tar, entry "f": the archive is truncated: it ends in the middle of a sparse header (at byte 512)"#);
}

#[test]
fn limits_hold() {
    let limited = |limits: Limits, tar: &[u8]| {
        let options = ConvertOptions {
            limits,
            ..options()
        };
        message(convert_tar_with(tar, &options)).replace("TMP/in.tar", "in.tar")
    };
    let many = (0..20)
        .fold(Tar::new(), |tar, i| tar.file(format!("a/b/{i}"), ""))
        .done();
    let max_entries = Limits {
        max_entries: 10,
        ..Limits::default()
    };
    insta::assert_snapshot!(limited(max_entries, &many), @r#"
    Limit: in.tar, entry "a/b/8": too many entries: 11, at most 10 are allowed
    hint: if you trust the input, raise it with --max-entries
    "#);
    let max_bytes = Limits {
        max_bytes: 1 << 20,
        ..Limits::default()
    };
    let zeros = Tar::new().file("zeros", vec![0; 4 << 20]).done();
    insta::assert_snapshot!(limited(max_bytes, &gzip(&zeros)), @r"
    Limit: in.tar: too many decompressed bytes: 2097152, at most 1048576 are allowed
    hint: if you trust the input, raise it with --max-size
    ");
}
