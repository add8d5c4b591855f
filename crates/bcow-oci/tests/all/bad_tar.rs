//! The converter refuses invalid tar archives with a precise message.

use bcow_oci::{ConvertOptions, Limits, Source, TarInput, convert};

use crate::support::{Warnings, convert_tar, convert_tar_with, gzip, message, options};
use bcow_testkit::changed;
use bcow_testkit::tar::{GNU, Header, Tar, record, seal};

fn refused(tar: &[u8]) -> String {
    message(convert_tar(tar)).replace("TMP/in.tar", "in.tar")
}

/// Asserts that an archive is refused because of this entry.
fn refused_at(entry: &str, tar: &[u8], why: &str) {
    assert_eq!(refused(tar), format!("in.tar, entry {entry:?}: {why}"));
}

/// Asserts that the archive `f` of one PAX header and an empty file is refused.
fn refused_pax(entry: &str, records: &[u8], why: &str) {
    let tar = Tar::new().pax_raw(b'x', records).file("f", "").done();
    refused_at(entry, &tar, why);
}

#[test]
fn damaged_archives_are_refused() {
    let tar = Tar::new()
        .file("a", "content")
        .file("b", vec![1; 2000])
        .done();
    for no_archive in [&b"this is no archive at all"[..], &[b'x'; 1024]] {
        assert_eq!(refused(no_archive), "in.tar: not a tar archive (at byte 0)");
    }
    for (length, entry, begin) in [(515, "a", 512), (2000, "b", 1536)] {
        let middle = "it ends in the middle of an entry's data";
        let why = format!("the archive is truncated: {middle} (at byte {begin})");
        refused_at(entry, &tar[..length], &why);
    }
    let mut flipped = tar.clone();
    flipped[1024 + 3] ^= 1;
    let lone = Tar::new().file("a", "").raw(&[0; 512]).file("b", "").done();
    let messages = [&tar[..1100], &flipped, &lone].map(refused);
    insta::assert_snapshot!(messages.join("\n"), @r"
    in.tar: the archive is truncated: it ends in the middle of a header (at byte 1024)
    in.tar: header checksum is 3854, expected 3853 (at byte 1024)
    in.tar: a zero block in the middle of the archive (at byte 512)
    ");
}

#[test]
fn bad_fields_are_refused() {
    let with = |at: usize, bytes: &[u8]| {
        let mut block = Header::new("victim", b'0').block();
        block[at..at + bytes.len()].copy_from_slice(bytes);
        Tar::new().raw(&seal(block)).done()
    };
    let field = |at, bytes: &[u8], why| refused_at("victim", &with(at, bytes), why);
    let binary = |number: u64| ((1 << 63) | number).to_be_bytes();
    field(100, b"rw-r--r-", "bad number in header field mode");
    field(108, &[0xff; 8], "uid -1 is out of range");
    field(108, &binary(1 << 32), "uid 4294967296 is out of range");
    // (uid_t)-1, which chown(2) takes as "do not change".
    field(108, &binary(0xffff_ffff), "uid 4294967295 is out of range");
    field(116, &binary(0xffff_ffff), "gid 4294967295 is out of range");
    assert!(convert_tar(&with(108, &binary(0xffff_fffe))).is_ok());
    field(124, b"99999999999\0", "bad number in header field size");
    field(124, &[0xff; 12], "bad number in header field size");
    let largest = [&[0x80_u8, 0, 0, 0][..], &i64::MAX.to_be_bytes()].concat();
    field(124, &largest, "size 9223372036854775807 is out of range");
    field(136, b"1234567x\0\0\0\0", "bad number in header field mtime");
    field(156, b"Z", "unknown entry type 'Z'");
    field(156, b"M", "multi-volume archives are not supported");
    field(156, b"S", "unknown entry type 'S'");
    let mut device = Header::new("dev", b'3');
    device.device = (4096, 0);
    let tar = Tar::new().entry(&device, b"").done();
    refused_at("dev", &tar, "device major 4096 is out of range");
}

#[test]
fn bad_names_are_refused() {
    let named = |name: &[u8]| Tar::new().pax(&[(&b"path"[..], name)]).file("x", "").done();
    for name in ["../up", "/a/../../b"] {
        let tar = named(name.as_bytes());
        refused_at(name, &tar, "the path leads out of the root");
    }
    let zero = "the name contains a zero byte";
    refused_at("PaxHeaders/x", &named(b"a\0b"), zero);
    let long_name = "a name in the path has 256 bytes, more than 255";
    let long_path = "too many bytes of path: 4098, the limit is 4096";
    for (part, count, why) in [("n", 256, long_name), ("d/", 2049, long_path)] {
        let name = part.repeat(count);
        let shown = format!("\"{}...\" ({} bytes)", &name[..120], name.len());
        let expected = format!("in.tar, entry {shown}: {why}");
        assert_eq!(refused(&named(name.as_bytes())), expected);
    }
    refused_at("", &Tar::new().file("", "").done(), "the name is empty");
    let link = Tar::new().symlink("./", "x").done();
    refused_at("./", &link, "the entry for the root is not a directory");
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
    let link = |kind: u8, name: &str, target: &str, why: &str| {
        let header = Header::new(name, kind).link(target);
        refused_at(name, &Tar::new().entry(&header, b"").done(), why);
    };
    link(b'2', "s", "", "a link without a target");
    link(b'1', "h", "", "a link without a target");
    let out = "hardlink to \"../../x\", which leads out of the root";
    link(b'1', "h", "../../x", out);
    link(b'1', "h", "/", "hardlink to \"/\", which is a directory");
    let cycle = Tar::new()
        .hardlink("a", "b")
        .hardlink("b", "c")
        .hardlink("c", "a");
    for (tar, from, to) in [
        (Tar::new().hardlink("h", "nothing"), "h", "nothing"),
        (Tar::new().hardlink("h", "h"), "h", "h"),
        (cycle, "a", "b"),
        (Tar::new().hardlink("h", "d").dir("d"), "h", "d"),
    ] {
        let why = "neither this layer nor one below has such a file";
        let expected = format!("in.tar: /{from}: hardlink to /{to}: {why}");
        assert_eq!(refused(&tar.done()), expected);
    }
    let long = Tar::new().pax(&[("linkpath", "t".repeat(4096))]);
    let long = long.symlink("s", "").done();
    refused_at("s", &long, "the link target has 4096 bytes, more than 4095");
    let through_file = Tar::new().file("f", "").file("f/x", "").done();
    refused_at("f/x", &through_file, "\"f\" is not a directory");
    let cycle = Tar::new().symlink("a", "b").symlink("b", "a");
    let why = "too many symbolic links on the way to the parent directory";
    refused_at("a/x", &cycle.file("a/x", "").done(), why);
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
    let malformed = |records: &[u8], why: &str| {
        let why = format!("malformed PAX record: {why}");
        refused_pax("PaxHeaders/x", records, &why);
    };
    malformed(b"99 path=x\n", "a record is longer than the header");
    malformed(b"garbage", "a record does not begin with its length");
    malformed(&record("mtime", "yesterday"), "mtime is not a number");
    // 4294967295 is (uid_t)-1, which chown(2) takes as "do not change".
    for (key, id) in [
        ("uid", 1_u64 << 32),
        ("uid", 0xffff_ffff),
        ("gid", 0xffff_ffff),
    ] {
        let why = format!("{key} {id} is out of range");
        refused_pax("f", &record(key, id.to_string()), &why);
    }
    let large = record("SCHILY.xattr.user.big", vec![b'v'; 70_000]);
    let why = "extended attribute \"user.big\": the value has more than 65536 bytes";
    refused_pax("PaxHeaders/x", &large, why);
    let twice = Tar::new().pax(&[("uid", "1")]).pax(&[("uid", "2")]);
    let twice = twice.file("f", "").done();
    refused_at("PaxHeaders/x", &twice, "two PAX headers for one entry");
    let twice = Tar::new().gnu_long(b'L', "a").gnu_long(b'L', "b");
    let why = "two GNU long-name headers for one entry";
    refused_at("././@LongLink", &twice.file("f", "").done(), why);
    let orphan = Tar::new().pax(&[("uid", "1")]);
    let between = Tar::new().pax(&[("uid", "1")]).pax_raw(b'g', b"");
    for tar in [orphan.done(), between.file("f", "").done()] {
        refused_at("PaxHeaders/x", &tar, "extension headers without an entry");
    }
    let global = Tar::new().pax_raw(b'g', &record("path", "everyone"));
    let why = "a global header with path, size, holes or attributes of a file";
    let why = format!("malformed PAX record: {why}");
    refused_at("PaxHeaders/x", &global.file("f", "").done(), &why);
    for (name, header, size, limit) in [
        ("x", Header::new("x", b'x'), 1 << 32, 1_048_576),
        ("L", Header::new("L", b'L').magic(GNU), 1 << 20, 65536),
    ] {
        let huge = Tar::new().entry(&header.size(size), b"").done();
        let why = format!("too many bytes of tar extension headers: {size}, the limit is {limit}");
        refused_at(name, &huge, &why);
    }
}

#[test]
fn bad_sparse_files_are_refused() {
    let bad = |records: &[(&str, &str)], data: &[u8], why: &str| {
        let tar = Tar::new().pax(records).file("f", data).done();
        refused_at("f", &tar, &format!("malformed sparse map: {why}"));
    };
    let map = |runs: &str, length: usize, why: &str| {
        let records = [("GNU.sparse.size", "100"), ("GNU.sparse.map", runs)];
        bad(&records, &vec![1_u8; length], why);
    };
    map("0,50,40,10", 60, "the runs overlap or are out of order");
    map("90,20", 20, "a run ends beyond the file");
    let sum = "the runs do not add up to the bytes in the archive";
    map("0,10", 20, sum);
    map("0,10,20", 10, "a run has no length");
    let without_size = [("GNU.sparse.map", "0,10")];
    bad(&without_size, &[1; 10], "the file's size is missing");
    let why = "malformed sparse map: offsets and lengths do not alternate";
    refused_pax("PaxHeaders/x", &record("GNU.sparse.numbytes", "1"), why);
    let (major, minor) = ("GNU.sparse.major", "GNU.sparse.minor");
    bad(&[(major, "2"), (minor, "0")], &[], "an unknown version");
    let v1 = [(major, "1"), (minor, "0"), ("GNU.sparse.realsize", "9")];
    for data in [&b"999999999\n"[..], b"1\n", b""] {
        bad(&v1, data, "the map is longer than the data");
    }
    bad(&v1, &[b'1'; 512], "the map is not a list of numbers");
    let mut gnu = Header::new("f", b'S').magic(GNU).block();
    gnu[482] = 1;
    let why = "the archive is truncated: it ends in the middle of a sparse header (at byte 512)";
    refused_at("f", &Tar::new().raw(&seal(gnu)).bytes, why);
}

#[test]
fn limits_hold() {
    let limited = |limits: Limits, tar: &[u8]| {
        let options = changed(options(), |new| new.limits = limits);
        message(convert_tar_with(tar, &options)).replace("TMP/in.tar", "in.tar")
    };
    let many = (0..20)
        .fold(Tar::new(), |tar, i| tar.file(format!("a/b/{i}"), ""))
        .done();
    let max_entries = changed(Limits::default(), |new| new.max_entries = 10);
    insta::assert_snapshot!(limited(max_entries, &many), @r#"
    in.tar, entry "a/b/8": too many entries: 11, the limit is 10
    hint: if you trust the input, raise the limit with --max-entries
    "#);
    let max_bytes = changed(Limits::default(), |new| new.max_bytes = 1 << 20);
    let zeros = Tar::new().file("zeros", vec![0; 4 << 20]).done();
    insta::assert_snapshot!(limited(max_bytes, &gzip(&zeros)), @r"
    in.tar: too many uncompressed bytes (holes counted): 2097152, the limit is 1048576
    hint: if you trust the input, raise the limit with --max-size
    ");
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
    let (tar, [empty, one, two]) = two_entries();
    for tar in [&tar[..empty], &gzip(b"")] {
        let why = "it has no entries and no end-of-archive marker";
        assert_eq!(refused(tar), format!("in.tar: the archive is empty: {why}"));
    }
    for (tar, at) in [
        (&tar[..one], 1024),
        (&tar[..two], 3584),
        (&gzip(&tar[..one])[..], 1024),
    ] {
        let why =
            format!("no end-of-archive marker (at byte {at}): the archive may have been cut off");
        let hint =
            "check the program that wrote it; --allow-truncated accepts the entries that are there";
        assert_eq!(refused(tar), format!("in.tar: {why}\nhint: {hint}"));
    }
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
    let truncated = changed(options(), |new| new.allow_truncated = true);
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
    let limit = |tar: &[u8], entry: &str, gigabytes: u64| {
        let text = refused(tar);
        let (before, value) = text.split_once("counted): ").unwrap();
        let expected = format!("in.tar, entry {entry:?}: too many uncompressed bytes (holes ");
        assert_eq!(before, expected);
        let (value, after) = value.split_once(',').unwrap();
        assert_eq!(value.parse::<u64>().unwrap() >> 30, gigabytes);
        let hint = "hint: if you trust the input, raise the limit with --max-size";
        assert_eq!(after, format!(" the limit is 1099511627776\n{hint}"));
    };
    for size in [15 << 40, 1 << 60] {
        limit(&pax(size), "f", size >> 30);
        limit(&gnu(size), "f", size >> 30);
    }
    let twice = Tar::new()
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("a", [])
        .pax(&[("GNU.sparse.size", "700000000000"), ("GNU.sparse.map", "")])
        .file("b", [])
        .done();
    limit(&twice, "b", 1303);
}
