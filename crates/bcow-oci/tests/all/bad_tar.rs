//! Tar archives that must be refused, with a word that helps.

use bcow_oci::{ConvertOptions, Limits, Source, TarInput, convert};

use crate::support::{Told, convert_tar, convert_tar_with, gzip, message, options};
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
    // (uid_t)-1, which chown(2) takes for "leave it as it is".
    insta::assert_snapshot!(field(108, &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), @r#"Invalid: in.tar, entry "victim": uid 4294967295 does not fit"#);
    insta::assert_snapshot!(field(116, &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), @r#"Invalid: in.tar, entry "victim": gid 4294967295 does not fit"#);
    assert!(
        convert_tar(
            &Tar::new()
                .raw(&seal({
                    let mut block = Header::new("last", b'0').block();
                    block[108..116].copy_from_slice(&[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xfe]);
                    block
                }))
                .done()
        )
        .is_ok()
    );
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
    Limit: in.tar: too many uncompressed bytes (holes counted): 2097152, at most 1048576 are allowed
    hint: if you trust the input, raise it with --max-size
    ");
}

/// An archive of two files, and where each of its entries ends.
fn two_entries() -> (Vec<u8>, [usize; 3]) {
    let one = Tar::new().file("a", "content").bytes.len();
    let two = Tar::new().file("a", "content").file("b", vec![1; 2000]);
    let ends = [0, one, two.bytes.len()];
    (two.done(), ends)
}

#[test]
fn an_archive_that_may_have_been_cut_off_between_two_entries_is_refused() {
    let (tar, [empty, one, two]) = two_entries();
    insta::assert_snapshot!(refused(&tar[..empty]), @"Invalid: in.tar: there is nothing in it, not even the end-of-archive marker");
    insta::assert_snapshot!(refused(&tar[..one]), @r#"
    Invalid: in.tar: no end-of-archive marker (at byte 1024): the archive may have been cut off
    hint: look at what writes it; --allow-truncated takes the entries that there are
    "#);
    insta::assert_snapshot!(refused(&tar[..two]), @r#"
    Invalid: in.tar: no end-of-archive marker (at byte 3584): the archive may have been cut off
    hint: look at what writes it; --allow-truncated takes the entries that there are
    "#);
    insta::assert_snapshot!(refused(&gzip(&tar[..one])), @r#"
    Invalid: in.tar: no end-of-archive marker (at byte 1024): the archive may have been cut off
    hint: look at what writes it; --allow-truncated takes the entries that there are
    "#);
    insta::assert_snapshot!(refused(&gzip(b"")), @"Invalid: in.tar: there is nothing in it, not even the end-of-archive marker");
}

/// The warnings of converting an archive, and the tree.
fn warned(tar: &[u8], options: &ConvertOptions) -> (Vec<String>, String) {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.tar");
    std::fs::write(&input, tar).unwrap();
    let heard = Told::default();
    let source = Source::Tar(TarInput::File(input.clone()));
    convert(&source, &dir.path().join("image.bcow"), options, &heard).unwrap();
    let warnings = heard.0.into_inner().unwrap();
    let place = input.display().to_string();
    let warnings = warnings
        .iter()
        .map(|w| w.replace(&place, "in.tar"))
        .collect();
    let converted = convert_tar_with(tar, options).unwrap();
    (warnings, converted.lines())
}

#[test]
fn an_archive_without_its_end_is_taken_if_asked_for_and_an_empty_one_never() {
    let (tar, [empty, one, two]) = two_entries();
    let truncated = ConvertOptions {
        allow_truncated: true,
        ..options()
    };
    let whole = warned(&tar, &options());
    assert_eq!(whole.0, [""; 0]);
    let (warnings, lines) = warned(&tar[..two], &truncated);
    assert_eq!(lines, whole.1);
    assert_eq!(
        warnings,
        ["in.tar: no end-of-archive marker: the archive may have been cut off"]
    );
    let (_, lines) = warned(&tar[..one], &truncated);
    assert_eq!(lines.lines().count(), 1, "{lines}");
    for bad in [&tar[..empty], &tar[..one + 512 + 1999], &tar[..one + 100]] {
        assert!(convert_tar_with(bad, &truncated).is_err());
    }
}

#[test]
fn half_an_end_marker_and_what_follows_a_whole_one_are_told() {
    let (tar, [.., two]) = two_entries();
    let whole = warned(&tar, &options()).1;
    let (warnings, lines) = warned(&tar[..two + 512], &options());
    assert_eq!(lines, whole);
    assert_eq!(
        warnings,
        ["in.tar: the end-of-archive marker has one block of zeros instead of two"]
    );
    // `cat a.tar b.tar`: tar reads the first.
    let (warnings, lines) = warned(
        &[&tar[..], &Tar::new().file("c", "").done()].concat(),
        &options(),
    );
    assert_eq!(lines, whole);
    assert_eq!(
        warnings,
        ["in.tar: something follows the end-of-archive marker, and is left out, as tar does"]
    );
    let padded = [&tar[..], &[0; 20_000]].concat();
    assert_eq!(warned(&padded, &options()), (vec![], whole));
}

#[test]
fn an_archive_without_any_entry_is_an_empty_root_if_it_says_where_it_ends() {
    assert_eq!(
        warned(&Tar::new().done(), &options()),
        (vec![], String::new())
    );
}

#[test]
fn a_compressed_archive_is_refused_wherever_it_is_cut() {
    let (tar, _) = two_entries();
    // Skippable frames, as zstd:chunked has them, and a second frame that holds the end mark alone.
    let skip = [
        &0x184D_2A50u32.to_le_bytes()[..],
        &5u32.to_le_bytes(),
        b"hello",
    ]
    .concat();
    let frame = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
    let zstd = [
        &skip,
        &frame(&tar[..tar.len() - 1024])[..],
        &skip,
        &frame(&tar[tar.len() - 1024..]),
    ]
    .concat();
    for whole in [gzip(&tar), zstd] {
        assert!(convert_tar(&whole).is_ok());
        for length in 0..whole.len() {
            assert!(
                convert_tar(&whole[..length]).is_err(),
                "cut after {length} bytes"
            );
        }
    }
}

#[test]
fn the_owner_that_chown_does_not_take_is_refused_in_pax_records_too() {
    for key in ["uid", "gid"] {
        let tar = Tar::new().pax(&[(key, "4294967295")]).file("f", "").done();
        let text = refused(&tar);
        assert_eq!(
            text,
            format!("Invalid: in.tar, entry \"f\": {key} 4294967295 does not fit")
        );
    }
}

#[test]
fn the_size_limit_counts_the_holes_of_sparse_files() {
    let pax = |size: u64| {
        let size = size.to_string();
        let records = [("GNU.sparse.size", &size[..]), ("GNU.sparse.map", "0,10")];
        Tar::new().pax(&records).file("f", [1; 10]).done()
    };
    let gnu = |size: u64| {
        let mut block = Header::new("f", b'S').magic(GNU).size(10).block();
        block[386..398].copy_from_slice(b"00000000000\0");
        block[398..410].copy_from_slice(b"00000000012\0");
        block[483..495].fill(0);
        block[483] = 0x80;
        block[487..495].copy_from_slice(&size.to_be_bytes());
        Tar::new().raw(&seal(block)).raw(&[1; 512]).done()
    };
    for tar in [pax(1 << 39), gnu(1 << 39)] {
        assert!(convert_tar(&tar).is_ok());
    }
    // What has been read so far counts too, and how much that is depends on the dialect.
    let limit = |tar: &[u8]| {
        let text = refused(tar);
        let (before, value) = text.split_once("counted): ").unwrap();
        let (value, after) = value.split_once(',').unwrap();
        let gigabytes = value.parse::<u64>().unwrap() >> 30;
        format!("{before}counted): {gigabytes} GiB,{after}")
    };
    for tar in [pax(15 << 40), gnu(15 << 40)] {
        insta::allow_duplicates!(insta::assert_snapshot!(limit(&tar), @r#"
        Limit: in.tar, entry "f": too many uncompressed bytes (holes counted): 15360 GiB, at most 1099511627776 are allowed
        hint: if you trust the input, raise it with --max-size
        "#));
    }
    for tar in [pax(1 << 60), gnu(1 << 60)] {
        insta::allow_duplicates!(insta::assert_snapshot!(limit(&tar), @r#"
        Limit: in.tar, entry "f": too many uncompressed bytes (holes counted): 1073741824 GiB, at most 1099511627776 are allowed
        hint: if you trust the input, raise it with --max-size
        "#));
    }
    let twice = Tar::new()
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("a", [])
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("b", [])
        .done();
    insta::assert_snapshot!(limit(&twice), @r#"
    Limit: in.tar, entry "b": too many uncompressed bytes (holes counted): 1303 GiB, at most 1099511627776 are allowed
    hint: if you trust the input, raise it with --max-size
    "#);
}
