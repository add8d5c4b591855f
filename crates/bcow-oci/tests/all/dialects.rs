//! The converter reads tar archives of every dialect.

use crate::support::{convert_layers, convert_tar, convert_tar_with, convert_with, gzip, options};
use bcow_testkit::tar::{GNU, Header, Tar, USTAR, V7, record, seal};

#[test]
fn every_type_of_entry_is_kept() {
    let mut device = Header::new("dev/null", b'3');
    device.device = (1, 3);
    device.mode = 0o666;
    let mut disk = Header::new("dev/disk", b'4');
    disk.device = (4095, 1_048_575);
    let mut zero = Header::new("dev/zero-zero", b'3');
    zero.device = (0, 0);
    let tar = Tar::new()
        .dir("./")
        .dir("dev/")
        .entry(&device, b"")
        .entry(&disk, b"")
        .entry(&zero, b"")
        .entry(&Header::new("fifo", b'6'), b"")
        .file("file", "text")
        .hardlink("link", "file")
        .symlink("symlink", "/not/there")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().dump(), @r"
    / d0755 3 0:0 1000000000.000000000
    /dev d0755 2 0:0 1000000000.000000000
    /dev/disk b0644 1 0:0 0 1000000000.000000000 dev 4095:1048575
    /dev/null c0666 1 0:0 0 1000000000.000000000 dev 1:3
    /dev/zero-zero c0644 1 0:0 0 1000000000.000000000 dev 0:0
    /fifo p0644 1 0:0 0 1000000000.000000000
    /file -0644 2 0:0 4 1000000000.000000000 crc64 ac28b1bccd5bf577
    /link -0644 2 0:0 4 1000000000.000000000 = /file
    /symlink l0644 1 0:0 10 1000000000.000000000 -> /not/there
    ");
}

#[test]
fn the_oldest_headers_are_understood() {
    let mut dir = Header::new("dir/", 0).magic(V7);
    dir.mode = 0o700;
    let tar = Tar::new()
        .entry(&dir, b"")
        .entry(&Header::new("dir/file", 0).magic(V7).size(2), b"ab")
        .entry(&Header::new("cont", b'7').magic(V7).size(1), b"c")
        .entry(&Header::new("link", b'1').magic(V7).link("cont"), b"")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /cont -0644 2 0:0 1 1000000000.000000000 crc64 72f265d5d4a0eece
    /dir d0700 2 0:0 1000000000.000000000
    /dir/file -0644 1 0:0 2 1000000000.000000000 crc64 eb4fb212c8b65432
    /link -0644 2 0:0 1 1000000000.000000000 = /cont
    ");
}

#[test]
fn all_four_forms_of_long_names_are_read() {
    let long = |c: char| format!("{}/{}", c.to_string().repeat(120), c.to_string().repeat(90));
    let (prefix, name) = ("p".repeat(155), "n".repeat(100));
    let mut ustar = Header::new(&name, b'0').block();
    ustar[345..500].copy_from_slice(prefix.as_bytes());
    // Go before 1.9 put a prefix into GNU headers.
    let mut go = Header::new("name", b'0').magic(GNU).block();
    go[345..351].copy_from_slice(b"golang");
    let mut star = Header::new("name", b'0').block();
    star[345..349].copy_from_slice(b"star");
    star[476..488].copy_from_slice(b"00000000001\0");
    star[508..512].copy_from_slice(b"tar\0");
    let tar = Tar::new()
        .pax(&[("path", long('a')), ("linkpath", long('t'))])
        .symlink("short", "short")
        .gnu_long(b'K', long('u'))
        .gnu_long(b'L', long('b'))
        .entry(&Header::new("short", b'2').magic(GNU).link("short"), b"")
        .raw(&seal(ustar))
        .raw(&seal(go))
        .raw(&seal(star))
        .done();
    let converted = convert_tar(&tar).unwrap();
    for path in [
        long('a'),
        long('b'),
        format!("{prefix}/{name}"),
        "golang/name".into(),
        "star/name".into(),
    ] {
        assert!(
            converted
                .filesystem()
                .resolve(path.as_bytes())
                .unwrap()
                .is_some(),
            "{path}"
        );
    }
    assert!(converted.dump().contains(&long('t')) && converted.dump().contains(&long('u')));
}

#[test]
fn a_gnu_header_with_times_has_no_prefix() {
    let mut block = Header::new("name", b'0').magic(GNU).block();
    block[345..357].copy_from_slice(b"14514520410\0");
    block[357..369].copy_from_slice(b"14514520410\0");
    let tar = Tar::new().raw(&seal(block)).done();
    assert!(convert_tar(&tar).unwrap().lines().starts_with("/name"));
}

#[test]
fn pax_records_override_the_header() {
    let tar = Tar::new()
        .pax(&[
            ("uid", "4294967294"),
            ("gid", "70000"),
            ("mtime", "-1.25"),
            ("path", "new\nline"),
            ("comment", "ignored"),
            ("size", "3"),
        ])
        .entry(&Header::new("x", b'0').size(0), b"abc")
        .file("next", "")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /new\x0aline -0644 1 4294967294:70000 3 -2.750000000 crc64 05e5cabb3fc1faeb
    /next -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    ");
}

#[test]
fn a_global_header_gives_defaults() {
    let global = [record("uid", "7"), record("mtime", "5.5")].concat();
    let tar = Tar::new()
        .pax_raw(b'g', &global)
        .file("a", "")
        .pax(&[("uid", "8")])
        .file("b", "")
        .pax(&[("uid", "")])
        .file("c", "")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /a -0644 1 7:0 0 5.500000000 crc64 0000000000000000
    /b -0644 1 8:0 0 5.500000000 crc64 0000000000000000
    /c -0644 1 0:0 0 5.500000000 crc64 0000000000000000
    ");
}

#[test]
fn extended_attributes_keep_every_byte() {
    let capability = b"\x01\0\0\x02\0\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let tar = Tar::new()
        .pax(&[
            (&b"SCHILY.xattr.security.capability"[..], &capability[..]),
            (b"SCHILY.xattr.user.empty", b""),
            (b"LIBARCHIVE.xattr.user.%3D", b"AAr/"),
            (b"SCHILY.xattr.trusted.overlay.opaque", b"y"),
            (b"SCHILY.xattr.user.overlay.opaque", b"y"),
            (b"SCHILY.xattr.com.example", b"no such namespace"),
            (b"RHT.security.selinux", b"label\0"),
        ])
        .file("f", "")
        .done();
    let line = convert_tar(&tar).unwrap().lines();
    let xattrs: Vec<&str> = line.split(" @").skip(1).collect();
    let capability = r"\x01\x00\x00\x02\x00\x0a".to_owned() + &r"\x00".repeat(14);
    assert_eq!(
        xattrs,
        [
            &format!("security.capability={capability}")[..],
            r"security.selinux=label\x00",
            r"user.\x3d=\x00\x0a\xff",
            "user.empty=",
        ]
    );
}

#[test]
fn numbers_beyond_octal_are_in_base_256() {
    let mut block = Header::new("f", b'0').block();
    block[108..116].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff]);
    block[136..148].copy_from_slice(&[
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe,
    ]);
    let tar = Tar::new().raw(&seal(block)).done();
    let line = convert_tar(&tar).unwrap().lines();
    assert!(
        line.starts_with("/f -0644 1 2147483647:0 0 -2.000000000 "),
        "{line}"
    );
}

/// A file of two runs with holes before, between and behind them.
fn sparse_content() -> (Vec<u8>, Vec<u8>) {
    let mut whole = vec![0; 300_000];
    whole[10_000..10_100].fill(b'a');
    whole[200_000..204_096].fill(b'b');
    let data = [&whole[10_000..10_100], &whole[200_000..204_096]].concat();
    (whole, data)
}

#[test]
fn all_four_forms_of_sparse_files_are_read() {
    let (whole, data) = sparse_content();
    let stored = data.len() as u64;
    let mut gnu = Header::new("gnu", b'S').magic(GNU).size(stored).block();
    gnu[386..398].copy_from_slice(b"00000023420\0");
    gnu[398..410].copy_from_slice(b"00000000144\0");
    gnu[482] = 1;
    gnu[483..495].copy_from_slice(format!("{:011o}\0", whole.len()).as_bytes());
    let mut extension = [0; 512];
    extension[..12].copy_from_slice(format!("{:011o}\0", 200_000).as_bytes());
    extension[12..24].copy_from_slice(format!("{:011o}\0", 4096).as_bytes());
    let padding = vec![0; data.len().next_multiple_of(512) - data.len()];
    let mut map = b"3\n10000\n100\n200000\n4096\n300000\n0\n".to_vec();
    map.resize(512, 0);
    let in_data = [&map[..], &data].concat();
    let tar = Tar::new()
        .raw(&seal(gnu))
        .raw(&extension)
        .raw(&data)
        .raw(&padding)
        .pax(&[
            ("GNU.sparse.size", "300000"),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.offset", "10000"),
            ("GNU.sparse.numbytes", "100"),
            ("GNU.sparse.offset", "200000"),
            ("GNU.sparse.numbytes", "4096"),
        ])
        .file("pax-0.0", &data)
        .pax(&[
            ("GNU.sparse.size", "300000"),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.map", "10000,100,200000,4096"),
            ("GNU.sparse.name", "pax-0.1"),
        ])
        .file("GNUSparseFile.1/x", &data)
        .pax(&[
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "pax-1.0"),
            ("GNU.sparse.realsize", "300000"),
            ("size", &in_data.len().to_string()),
        ])
        .file("GNUSparseFile.1/x", &in_data)
        .file("after", "the archive goes on")
        .done();
    let converted = convert_tar(&tar).unwrap();
    for path in ["gnu", "pax-0.0", "pax-0.1", "pax-1.0"] {
        assert!(converted.read(path) == whole, "{path}");
    }
    assert_eq!(converted.read("after"), b"the archive goes on");
    // Two pages of data and one of holes: no block stores a hole, and equal data is stored once.
    assert_eq!(
        converted.report.content_bytes - converted.report.deduplicated_bytes,
        3 * 4096 + 19
    );
}

#[test]
fn a_file_that_is_one_hole_costs_nothing() {
    let tar = Tar::new()
        .pax(&[
            ("GNU.sparse.size", "549755813888"),
            ("GNU.sparse.numblocks", "0"),
            ("GNU.sparse.map", ""),
        ])
        .file("hole", "")
        .done();
    let converted = convert_tar(&tar).unwrap();
    assert!(converted.report.file_bytes < 100_000);
    let fs = converted.filesystem();
    let inode = fs.inode(fs.resolve(b"hole").unwrap().unwrap()).unwrap();
    assert_eq!(inode.size, 1 << 39);
    let mut last = [1; 10];
    assert_eq!(fs.read(&inode, (1 << 39) - 10, &mut last).unwrap(), 10);
    assert_eq!(last, [0; 10]);
}

#[test]
fn a_layer_with_the_right_digest_may_lack_the_end_marker() {
    let tar = Tar::new().file("a", "1").file("b", "2").done();
    let expected = convert_layers(std::slice::from_ref(&tar)).unwrap().dump();
    let end = tar.len() - 1024;
    for short in [end, end + 512, end - 511, end - 200] {
        let converted = convert_layers(&[tar[..short].to_vec()]).unwrap();
        assert_eq!(converted.dump(), expected, "{short}");
    }
    let long = [&tar[..], &[7; 3000]].concat();
    assert_eq!(convert_layers(&[long]).unwrap().dump(), expected);
}

#[test]
fn no_entries_are_an_empty_tree() {
    let empty = convert_tar(&[0; 1024]).unwrap().dump();
    assert_eq!(empty.lines().count(), 1);
    assert_eq!(convert_tar(&[0; 10240]).unwrap().dump(), empty);
    assert_eq!(convert_layers(&[vec![]]).unwrap().dump(), empty);
}

#[test]
fn compression_is_known_by_its_magic() {
    let tar = Tar::new().file("a", vec![b'x'; 100_000]).done();
    let plain = convert_tar(&tar).unwrap().bytes();
    let (head, rest) = tar.split_at(50_000);
    let zstd = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
    let skippable = [&[0x53, 0x2a, 0x4d, 0x18, 5, 0, 0, 0][..], b"12345"].concat();
    let streams = [
        gzip(&tar),
        [gzip(head), gzip(b""), gzip(rest)].concat(),
        [gzip(&tar), vec![0; 700_000]].concat(),
        zstd(&tar),
        [
            &skippable[..],
            &zstd(head),
            &skippable,
            &zstd(rest),
            &skippable,
        ]
        .concat(),
    ];
    for (i, stream) in streams.iter().enumerate() {
        // The image does not depend on the boundaries of the compressed frames.
        assert!(convert_tar(stream).unwrap().bytes() == plain, "stream {i}");
    }
}

#[test]
fn hardlinks_are_resolved_in_any_order() {
    let tar = Tar::new()
        .hardlink("first", "./target")
        .hardlink("chain", "first")
        .file("target", "content")
        .hardlink("/later", "/target")
        .file("target2", "old")
        .hardlink("keeps-old", "target2")
        .file("target2", "new")
        .symlink("s", "target")
        .hardlink("to-symlink", "s")
        .dir("d")
        .symlink("by-symlink", "d")
        .file("d/f", "in d")
        .hardlink("through", "by-symlink/f")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /by-symlink l0644 1 0:0 1 1000000000.000000000 -> d
    /chain -0644 4 0:0 7 1000000000.000000000 crc64 96155d5f25504c61
    /d d0755 2 0:0 1000000000.000000000
    /d/f -0644 2 0:0 4 1000000000.000000000 crc64 c2fe6e027e6bdecf
    /first -0644 4 0:0 7 1000000000.000000000 = /chain
    /keeps-old -0644 1 0:0 3 1000000000.000000000 crc64 f4131a6b25129f73
    /later -0644 4 0:0 7 1000000000.000000000 = /chain
    /s l0644 2 0:0 6 1000000000.000000000 -> target
    /target -0644 4 0:0 7 1000000000.000000000 = /chain
    /target2 -0644 1 0:0 3 1000000000.000000000 crc64 9d89c1cc3fbf3a4a
    /through -0644 2 0:0 4 1000000000.000000000 = /d/f
    /to-symlink l0644 2 0:0 6 1000000000.000000000 = /s
    ");
}

#[test]
fn a_link_that_waits_is_forgotten_with_its_directory() {
    let tar = Tar::new()
        .hardlink("a/link", "c")
        .dir("c")
        .symlink("a", "a")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /a l0644 1 0:0 1 1000000000.000000000 -> a
    /c d0755 2 0:0 1000000000.000000000
    ");
}

#[test]
fn a_long_chain_of_links_takes_no_longer_than_many_links() {
    let count = 20_000;
    let tar = (0..count).fold(Tar::new(), |tar, i| {
        tar.hardlink(format!("l{i}"), format!("l{}", i + 1))
    });
    let tar = tar.file(format!("l{count}"), "end").done();
    let converted = convert_tar(&tar).unwrap();
    assert_eq!(converted.report.entries, 2);
    assert_eq!(converted.read("l0"), b"end");
}

#[test]
fn a_pipe_is_read_once_without_seeking() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo.tar");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.is_ok_and(|status| status.success()));
    let tar = Tar::new()
        .file("a", vec![7; 3_000_000])
        .file("b", "")
        .done();
    let expected = convert_tar(&tar).unwrap().bytes();
    let writer = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::write(fifo, gzip(&tar)).unwrap()
    });
    let source = bcow_oci::Source::Tar(bcow_oci::TarInput::File(fifo));
    let converted = convert_with(&source, &options()).unwrap();
    writer.join().unwrap();
    assert!(converted.bytes() == expected);
}

#[test]
fn symlinks_of_the_layer_are_followed_to_parents() {
    let tar = Tar::new()
        .symlink("lib", "usr/lib")
        .symlink("usr/abs", "/../opt/./x")
        .symlink("up", "usr/lib/../..")
        .file("lib/a", "1")
        .file("usr/abs/b", "2")
        .file("up/c", "3")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /c -0644 1 0:0 1 1000000000.000000000 crc64 dd4840532670ac20
    /lib l0644 1 0:0 7 1000000000.000000000 -> usr/lib
    /opt d0755 3 0:0 0.000000000
    /opt/x d0755 2 0:0 0.000000000
    /opt/x/b -0644 1 0:0 1 1000000000.000000000 crc64 a226b09b16452559
    /up l0644 1 0:0 13 1000000000.000000000 -> usr/lib/../..
    /usr d0755 3 0:0 0.000000000
    /usr/abs l0644 1 0:0 11 1000000000.000000000 -> /../opt/./x
    /usr/lib d0755 2 0:0 0.000000000
    /usr/lib/a -0644 1 0:0 1 1000000000.000000000 crc64 2395a1c3461bbed2
    ");
}

#[test]
fn the_last_of_several_entries_wins() {
    let tar = Tar::new()
        .file("a", "1")
        .file("a", "22")
        .dir("d")
        .file("d/kept", "")
        .entry(
            &Header {
                mode: 0o711,
                ..Header::new("d", b'5')
            },
            b"",
        )
        .dir("gone")
        .file("gone/x", "")
        .symlink("gone", "d")
        .file("was-file", "")
        .dir("was-file")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /a -0644 1 0:0 2 1000000000.000000000 crc64 d44cafd127a2559e
    /d d0711 2 0:0 1000000000.000000000
    /d/kept -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /gone l0644 1 0:0 1 1000000000.000000000 -> d
    /was-file d0755 2 0:0 1000000000.000000000
    ");
}

#[test]
fn volume_labels_and_data_of_directories_are_skipped() {
    let tar = Tar::new()
        .entry(&Header::new("label", b'V').magic(GNU), b"")
        .entry(&Header::new("d", b'D').magic(GNU).size(5), b"Ya\0\0\0")
        // The header has a size, but no data follows, as Go and libarchive read it.
        .entry(&Header::new("e", b'5').size(4096), b"")
        .entry(&Header::new("f", b'0').magic(USTAR).size(1), b"x")
        .done();
    insta::assert_snapshot!(convert_tar(&tar).unwrap().lines(), @r"
    /d d0644 2 0:0 1000000000.000000000
    /e d0755 2 0:0 1000000000.000000000
    /f -0644 1 0:0 1 1000000000.000000000 crc64 2dbd67026454e4b1
    ");
}

#[test]
fn file_sizes_do_not_change_how_a_stream_is_read() {
    // Sizes around those of stream chunks and of deduplicated pieces.
    let mib = 1 << 20;
    let mut tar = Tar::new();
    let mut contents = Vec::new();
    for (i, size) in [
        0,
        1,
        255,
        256,
        257,
        4095,
        4096,
        4097,
        mib - 1,
        mib,
        mib + 1,
        3 * mib + 777,
    ]
    .into_iter()
    .enumerate()
    {
        let content: Vec<u8> = (0..size)
            .map(|n: usize| (n * (i + 3) / 7 + n / 511) as u8)
            .collect();
        tar = tar.file(format!("f{i}"), &content);
        contents.push(content);
    }
    for plain in [false, true] {
        let options = bcow_oci::ConvertOptions { plain, ..options() };
        let converted = convert_tar_with(&tar.clone().done(), &options).unwrap();
        for (i, content) in contents.iter().enumerate() {
            assert!(
                converted.read(&format!("f{i}")) == *content,
                "f{i}, plain: {plain}"
            );
        }
    }
}

#[test]
fn equal_content_is_stored_once() {
    let mib = 1 << 20;
    let large: Vec<u8> = (0..3 * mib + 5)
        .map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut changed = large.clone();
    changed[mib as usize + 17] ^= 1;
    let tar = Tar::new()
        .file("a", &large)
        .file("b", &large)
        .file("c", &changed)
        .file("small1", "some text ".repeat(100))
        .file("small2", "some text ".repeat(100))
        // Content beside the inodes is not shared.
        .file("tiny1", "tiny")
        .file("tiny2", "tiny")
        .done();
    let converted = convert_tar(&tar).unwrap();
    assert!(converted.read("b") == large && converted.read("c") == changed);
    let report = &converted.report;
    let size = u64::from(3 * mib + 5);
    assert_eq!(report.content_bytes, 3 * size + 2008);
    assert_eq!(
        report.deduplicated_bytes,
        size + (size - u64::from(mib)) + 1000
    );
    // The second file is one run like the first, not a list of chunks.
    let fs = converted.filesystem();
    let extents = |path: &[u8]| {
        let inode = fs.inode(fs.resolve(path).unwrap().unwrap()).unwrap();
        format!(
            "{:?}",
            fs.extents(&inode, 0)
                .map(|e| e.unwrap().source)
                .collect::<Vec<_>>()
        )
    };
    assert_eq!(extents(b"a"), extents(b"b"));
}
