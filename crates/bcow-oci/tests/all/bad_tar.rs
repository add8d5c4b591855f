//! The converter refuses invalid tar archives with a precise message.

use bcow_oci::{ConvertOptions, Limits, Source, TarInput, convert};

use crate::support::{Warnings, convert_tar, convert_tar_with, gzip, message, options};
use bcow_testkit::tar::{GNU, Header, Tar, record, seal};

fn refused(tar: &[u8]) -> String {
    message(convert_tar(tar)).replace("TMP/in.tar", "in.tar")
}

#[test]
fn damaged_archives_are_refused() {
    let mut messages = Vec::new();
    let tar = Tar::new()
        .file("a", "content")
        .file("b", vec![1; 2000])
        .done();
    messages.push(refused(b"this is no archive at all"));
    messages.push(refused(&[b'x'; 1024]));
    messages.push(refused(&tar[..515]));
    messages.push(refused(&tar[..1100]));
    messages.push(refused(&tar[..2000]));
    let mut flipped = tar.clone();
    flipped[1024 + 3] ^= 1;
    messages.push(refused(&flipped));
    let lone = Tar::new().file("a", "").raw(&[0; 512]).file("b", "").done();
    messages.push(refused(&lone));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn bad_fields_are_refused() {
    let mut messages = Vec::new();
    let field = |at: usize, bytes: &[u8]| {
        let mut block = Header::new("victim", b'0').block();
        block[at..at + bytes.len()].copy_from_slice(bytes);
        refused(&Tar::new().raw(&seal(block)).done())
    };
    messages.push(field(100, b"rw-r--r-"));
    messages.push(field(108, &[0xff; 8]));
    messages.push(field(108, &[0x80, 0, 0, 1, 0, 0, 0, 0]));
    // (uid_t)-1, which chown(2) takes as "do not change".
    messages.push(field(108, &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]));
    messages.push(field(116, &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]));
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
    messages.push(field(124, b"99999999999\0"));
    messages.push(field(124, &[0xff; 12]));
    messages.push(field(
        124,
        &[
            0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        ],
    ));
    messages.push(field(136, b"1234567x\0\0\0\0"));
    messages.push(field(156, b"Z"));
    messages.push(field(156, b"M"));
    messages.push(field(156, b"S"));
    let mut device = Header::new("dev", b'3');
    device.device = (4096, 0);
    messages.push(refused(&Tar::new().entry(&device, b"").done()));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn bad_names_are_refused() {
    let mut messages = Vec::new();
    let named =
        |name: &[u8]| refused(&Tar::new().pax(&[(&b"path"[..], name)]).file("x", "").done());
    messages.push(named(b"../up"));
    messages.push(named(b"/a/../../b"));
    messages.push(named(b"a\0b"));
    messages.push(named(&[b'n'; 256]));
    messages.push(named(&b"d/".repeat(2049)));
    messages.push(refused(&Tar::new().file("", "").done()));
    messages.push(refused(&Tar::new().symlink("./", "x").done()));
    insta::assert_snapshot!(messages.join("\n"));
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
    let mut messages = Vec::new();
    let one = |name: &str, kind: u8, link: &str| {
        Tar::new()
            .entry(&Header::new(name, kind).link(link), b"")
            .done()
    };
    messages.push(refused(&one("s", b'2', "")));
    messages.push(refused(&one("h", b'1', "")));
    messages.push(refused(&one("h", b'1', "nothing")));
    messages.push(refused(&one("h", b'1', "../../x")));
    messages.push(refused(&one("h", b'1', "h")));
    messages.push(refused(&one("h", b'1', "/")));
    let cycle = Tar::new()
        .hardlink("a", "b")
        .hardlink("b", "c")
        .hardlink("c", "a")
        .done();
    messages.push(refused(&cycle));
    let to_dir = Tar::new().hardlink("h", "d").dir("d").done();
    messages.push(refused(&to_dir));
    let long = Tar::new()
        .pax(&[("linkpath", "t".repeat(4096))])
        .symlink("s", "")
        .done();
    messages.push(refused(&long));
    let through_file = Tar::new().file("f", "").file("f/x", "").done();
    messages.push(refused(&through_file));
    let cycle = Tar::new()
        .symlink("a", "b")
        .symlink("b", "a")
        .file("a/x", "")
        .done();
    messages.push(refused(&cycle));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn bad_whiteouts_are_refused() {
    for name in [".wh.", "d/.wh..", ".wh..."] {
        let text = refused(&Tar::new().file(name, "").done());
        assert!(text.ends_with("whiteout without a name"), "{text}");
    }
}

#[test]
fn bad_extension_headers_are_refused() {
    let mut messages = Vec::new();
    let pax = |data: &[u8]| refused(&Tar::new().pax_raw(b'x', data).file("f", "").done());
    messages.push(pax(b"99 path=x\n"));
    messages.push(pax(b"garbage"));
    messages.push(pax(&record("mtime", "yesterday")));
    messages.push(pax(&record("uid", "4294967296")));
    // (uid_t)-1, which chown(2) takes as "do not change".
    messages.push(pax(&record("uid", "4294967295")));
    messages.push(pax(&record("gid", "4294967295")));
    let twice = Tar::new()
        .pax(&[("uid", "1")])
        .pax(&[("uid", "2")])
        .file("f", "")
        .done();
    messages.push(refused(&twice));
    let twice = Tar::new()
        .gnu_long(b'L', "a")
        .gnu_long(b'L', "b")
        .file("f", "")
        .done();
    messages.push(refused(&twice));
    let orphan = Tar::new().pax(&[("uid", "1")]).done();
    messages.push(refused(&orphan));
    let global = Tar::new()
        .pax_raw(b'g', &record("path", "everyone"))
        .file("f", "")
        .done();
    messages.push(refused(&global));
    let between = Tar::new()
        .pax(&[("uid", "1")])
        .pax_raw(b'g', b"")
        .file("f", "")
        .done();
    messages.push(refused(&between));
    let huge = Tar::new()
        .entry(&Header::new("x", b'x').size(1 << 32), b"")
        .done();
    messages.push(refused(&huge));
    let huge = Tar::new()
        .entry(&Header::new("L", b'L').magic(GNU).size(1 << 20), b"")
        .done();
    messages.push(refused(&huge));
    let name = record("SCHILY.xattr.user.big", vec![b'v'; 70_000]);
    messages.push(pax(&name));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn bad_sparse_files_are_refused() {
    let mut messages = Vec::new();
    let pax = |records: &[(&str, &str)], data: &[u8]| {
        refused(&Tar::new().pax(records).file("f", data).done())
    };
    let (size, map) = ("GNU.sparse.size", "GNU.sparse.map");
    messages.push(pax(&[(size, "100"), (map, "0,50,40,10")], &[1; 60]));
    messages.push(pax(&[(size, "100"), (map, "90,20")], &[1; 20]));
    messages.push(pax(&[(size, "100"), (map, "0,10")], &[1; 20]));
    messages.push(pax(&[(size, "100"), (map, "0,10,20")], &[1; 10]));
    messages.push(pax(&[(map, "0,10")], &[1; 10]));
    messages.push(pax(&[("GNU.sparse.numbytes", "1")], &[1; 10]));
    messages.push(pax(
        &[("GNU.sparse.major", "2"), ("GNU.sparse.minor", "0")],
        &[],
    ));
    let v1 = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "9"),
    ];
    messages.push(pax(&v1, b"999999999\n"));
    messages.push(pax(&v1, &[b'1'; 512]));
    messages.push(pax(&v1, b"1\n"));
    messages.push(pax(&v1, &[]));
    let mut gnu = Header::new("f", b'S').magic(GNU).block();
    gnu[482] = 1;
    messages.push(refused(&Tar::new().raw(&seal(gnu)).bytes));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn limits_hold() {
    let mut messages = Vec::new();
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
    messages.push(limited(max_entries, &many));
    let max_bytes = Limits {
        max_bytes: 1 << 20,
        ..Limits::default()
    };
    let zeros = Tar::new().file("zeros", vec![0; 4 << 20]).done();
    messages.push(limited(max_bytes, &gzip(&zeros)));
    insta::assert_snapshot!(messages.join("\n"));
}

/// An archive of two files, and the end of each of its entries.
fn two_entries() -> (Vec<u8>, [usize; 3]) {
    let one = Tar::new().file("a", "content").bytes.len();
    let two = Tar::new().file("a", "content").file("b", vec![1; 2000]);
    let ends = [0, one, two.bytes.len()];
    (two.done(), ends)
}

#[test]
fn an_archive_that_may_have_been_cut_off_between_two_entries_is_refused() {
    let mut messages = Vec::new();
    let (tar, [empty, one, two]) = two_entries();
    messages.push(refused(&tar[..empty]));
    messages.push(refused(&tar[..one]));
    messages.push(refused(&tar[..two]));
    messages.push(refused(&gzip(&tar[..one])));
    messages.push(refused(&gzip(b"")));
    insta::assert_snapshot!(messages.join("\n"));
}

/// The warnings of converting an archive, and the tree.
fn warned(tar: &[u8], options: &ConvertOptions) -> (Vec<String>, String) {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.tar");
    std::fs::write(&input, tar).unwrap();
    let progress = Warnings::default();
    let source = Source::Tar(TarInput::File(input.clone()));
    convert(&source, &dir.path().join("image.bcow"), options, &progress).unwrap();
    let warnings = progress.0.into_inner().unwrap();
    let place = input.display().to_string();
    let warnings = warnings
        .iter()
        .map(|w| w.replace(&place, "in.tar"))
        .collect();
    let converted = convert_tar_with(tar, options).unwrap();
    (warnings, converted.lines())
}

#[test]
fn truncated_archives_are_accepted_on_request_and_empty_ones_never() {
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
fn half_an_end_marker_and_data_after_a_whole_one_cause_warnings() {
    let (tar, [.., two]) = two_entries();
    let whole = warned(&tar, &options()).1;
    let (warnings, lines) = warned(&tar[..two + 512], &options());
    assert_eq!(lines, whole);
    assert_eq!(
        warnings,
        ["in.tar: the end-of-archive marker has one block of zeros instead of two"]
    );
    // `cat a.tar b.tar`: tar reads the first archive only.
    let (warnings, lines) = warned(
        &[&tar[..], &Tar::new().file("c", "").done()].concat(),
        &options(),
    );
    assert_eq!(lines, whole);
    assert_eq!(
        warnings,
        ["in.tar: data after the end-of-archive marker is ignored, as tar does"]
    );
    let padded = [&tar[..], &[0; 20_000]].concat();
    assert_eq!(warned(&padded, &options()), (vec![], whole));
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
fn the_size_limit_counts_the_holes_of_sparse_files() {
    let mut messages = Vec::new();
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
    // The bytes read before count too; their number depends on the dialect.
    let limit = |tar: &[u8]| {
        let text = refused(tar);
        let (before, value) = text.split_once("counted): ").unwrap();
        let (value, after) = value.split_once(',').unwrap();
        let gigabytes = value.parse::<u64>().unwrap() >> 30;
        format!("{before}counted): {gigabytes} GiB,{after}")
    };
    for tar in [pax(15 << 40), gnu(15 << 40)] {
        messages.push(limit(&tar));
    }
    for tar in [pax(1 << 60), gnu(1 << 60)] {
        messages.push(limit(&tar));
    }
    let twice = Tar::new()
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("a", [])
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("b", [])
        .done();
    messages.push(limit(&twice));
    insta::assert_snapshot!(messages.join("\n"));
}
