//! Layers hide, replace and link to content of lower layers.

use rustix::process::{Resource, Rlimit};

use crate::support::{Layout, convert_layers, convert_with, message, options};
use bcow_testkit::tar::{Header, Tar};

/// Content that does not deduplicate, and differs for each seed.
fn data(seed: u8) -> Vec<u8> {
    (0..10_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8 ^ seed)
        .collect()
}

#[test]
fn whiteouts_hide_lower_layers_only() {
    let lower = Tar::new()
        .dir("d")
        .file("d/old", "old")
        .file("gone", "x")
        .dir("tree")
        .file("tree/x", "x")
        .dir("remade")
        .file("remade/old", "x")
        .done();
    let upper = Tar::new()
        .file("d/.wh.old", "")
        .file("d/old", "new, though its whiteout came first")
        .file("d/new", "")
        .file("d/.wh.new", "")
        .file(".wh.gone", "")
        .file(".wh.tree", "")
        .dir("remade")
        .file("remade/new", "")
        .file(".wh.remade", "")
        .file(".wh.never-there", "")
        .done();
    let converted = convert_layers(&[lower, upper]).unwrap();
    insta::assert_snapshot!(converted.lines(), @r"
    /d d0755 2 0:0 1000000000.000000000
    /d/new -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /d/old -0644 1 0:0 35 1000000000.000000000 crc64 0da12e1c3524ed6c
    /remade d0755 2 0:0 1000000000.000000000
    /remade/new -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    ");
    assert_eq!(converted.report.hidden_bytes, 6);
}

#[test]
fn an_opaque_mark_at_any_position_hides_lower_layers() {
    let lower = Tar::new()
        .entry(
            &Header {
                mode: 0o700,
                ..Header::new("d", b'5')
            },
            b"",
        )
        .file("d/old", "x")
        .file("d/sub/old", "x")
        .done();
    let upper = Tar::new()
        .file("d/sub/new", "")
        .file("d/.wh..wh..opq", "")
        .file("d/new", "")
        .done();
    let top = Tar::new().file("d/top", "").done();
    let converted = convert_layers(&[lower, upper, top]).unwrap();
    insta::assert_snapshot!(converted.lines(), @r"
    /d d0700 3 0:0 1000000000.000000000
    /d/new -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /d/sub d0755 2 0:0 0.000000000
    /d/sub/new -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /d/top -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    ");
}

#[test]
fn files_of_aufs_are_ignored() {
    let layer = Tar::new()
        .dir(".wh..wh.plnk")
        .file(".wh..wh.plnk/123.456", "x")
        .file(".wh..wh.aufs", "x")
        .file(".wh..wh.orph/x", "x")
        .file("kept", "")
        .done();
    let lines = convert_layers(&[layer]).unwrap().lines();
    assert!(
        lines.starts_with("/kept -0644 ") && lines.lines().count() == 1,
        "{lines}"
    );
}

#[test]
fn hidden_content_is_not_stored() {
    let lower = Tar::new()
        .file("secret", data(1))
        .file("dir/secret", data(2))
        .file("kept", data(3))
        .done();
    let upper = Tar::new()
        .file(".wh.secret", "")
        .symlink("dir", "elsewhere")
        .done();
    let converted = convert_layers(&[lower, upper]).unwrap();
    assert_eq!(converted.report.hidden_bytes, 20_000);
    assert_eq!(converted.report.content_bytes, 10_000);
    assert_eq!(converted.read("kept"), data(3));
}

#[test]
fn a_hidden_file_keeps_its_other_names() {
    let lower = Tar::new()
        .file("first", data(1))
        .hardlink("second", "first")
        .hardlink("early", "late")
        .file("late", data(2))
        .file("all-gone", data(3))
        .hardlink("all-gone-too", "all-gone")
        .done();
    let upper = Tar::new()
        .file(".wh.first", "")
        .file(".wh.late", "")
        .file(".wh.all-gone", "")
        .file("all-gone-too", "replaced")
        .done();
    let converted = convert_layers(&[lower, upper]).unwrap();
    assert_eq!(converted.read("second"), data(1));
    assert_eq!(converted.read("early"), data(2));
    assert_eq!(converted.report.content_bytes, 20_000 + 8);
}

#[test]
fn a_link_into_a_lower_layer_keeps_its_file_even_if_the_name_is_deleted() {
    let lower = Tar::new()
        .file("d/a", data(1))
        .hardlink("d/b", "d/a")
        .file("plain", data(2))
        .done();
    let upper = Tar::new()
        .hardlink("link", "d/b")
        .file("d/.wh..wh..opq", "")
        .hardlink("moved", "plain")
        .file(".wh.plain", "")
        .done();
    let converted = convert_layers(&[lower, upper]).unwrap();
    assert_eq!(converted.read("link"), data(1));
    assert_eq!(converted.read("moved"), data(2));
    insta::assert_snapshot!(converted.lines(), @r"
    /d d0755 2 0:0 0.000000000
    /link -0644 1 0:0 10000 1000000000.000000000 crc64 8977bb3199652490
    /moved -0644 1 0:0 10000 1000000000.000000000 crc64 d9a17056c3de792a
    ");
}

/// As in umoci and GNU tar, which unpack the entries in order.
#[test]
fn a_link_before_a_new_file_of_its_target_refers_to_the_lower_file() {
    let lower = Tar::new()
        .file("f", "old f")
        .file("g", "old g")
        .file("c", "old c")
        .done();
    let upper = Tar::new()
        .hardlink("k", "f")
        .file("f", "new f")
        .hardlink("k-of-new", "f")
        .hardlink("to-g", "g")
        .dir("g")
        .hardlink("a", "c")
        .file("c", "new c")
        .hardlink("c", "a")
        // Without a lower file, the link refers to the later one.
        .hardlink("early", "late")
        .file("late", "late")
        .done();
    let converted = convert_layers(&[lower.clone(), upper.clone()]).unwrap();
    let read = |path: &str| String::from_utf8(converted.read(path)).unwrap();
    assert_eq!(read("k"), "old f");
    assert_eq!(
        (read("f"), read("k-of-new")),
        ("new f".into(), "new f".into())
    );
    assert_eq!(read("to-g"), "old g");
    assert_eq!((read("a"), read("c")), ("old c".into(), "old c".into()));
    assert_eq!(
        (read("early"), read("late")),
        ("late".into(), "late".into())
    );
    // An upper layer hides the names that carry the data.
    let top = Tar::new()
        .file(".wh.f", "")
        .file(".wh.late", "")
        .file(".wh.k-of-new", "")
        .done();
    let converted = convert_layers(&[lower, upper, top]).unwrap();
    assert_eq!(converted.read("k"), b"old f");
    assert_eq!(converted.read("early"), b"late");
}

#[test]
fn a_parent_that_is_a_symlink_below_becomes_a_directory() {
    let lower = Tar::new().dir("usr/lib").symlink("lib", "usr/lib").done();
    let upper = Tar::new().file("lib/x", "").done();
    insta::assert_snapshot!(convert_layers(&[lower, upper]).unwrap().lines(), @r"
    /lib d0755 2 0:0 0.000000000
    /lib/x -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /usr d0755 3 0:0 0.000000000
    /usr/lib d0755 2 0:0 1000000000.000000000
    ");
}

#[test]
fn implicit_parents_take_the_attributes_of_lower_layers() {
    let mut dir = Header::new("d", b'5');
    (dir.mode, dir.uid, dir.mtime) = (0o1777, 33, 77);
    let lower = Tar::new().entry(&dir, b"").done();
    let upper = Tar::new().file("d/x", "").file("new/x", "").done();
    insta::assert_snapshot!(convert_layers(&[lower, upper]).unwrap().lines(), @r"
    /d d1777 2 33:0 77.000000000
    /d/x -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    /new d0755 2 0:0 0.000000000
    /new/x -0644 1 0:0 0 1000000000.000000000 crc64 0000000000000000
    ");
}

#[test]
fn the_bytes_do_not_depend_on_threads() {
    let mut tar = Tar::new();
    for i in 0..60u8 {
        tar = tar.file(format!("f{i}"), data(i).repeat(1 + usize::from(i) * 4));
    }
    let upper = Tar::new().file(".wh.f7", "").file("f8", data(99)).done();
    let layout = Layout::of(&[tar.done(), upper]);
    let with = |threads, plain| {
        let options = bcow_oci::ConvertOptions {
            threads,
            plain,
            ..options()
        };
        convert_with(&layout.source(None), &options)
            .unwrap()
            .bytes()
    };
    for plain in [false, true] {
        let expected = with(1, plain);
        for threads in [1, 2, 3, 8] {
            assert!(
                with(threads, plain) == expected,
                "-j {threads}, plain: {plain}"
            );
        }
    }
}

#[test]
fn a_thousand_layers_need_no_recursion() {
    // A stack needs one descriptor per layer, and a login may set a limit of 1,024.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    rustix::process::setrlimit(Resource::Nofile, raised).unwrap();
    let layers: Vec<_> = (0..1000)
        .map(|i| {
            Tar::new()
                .file("same", format!("{i}"))
                .file(format!("d/{i}"), "")
                .done()
        })
        .collect();
    let converted = convert_layers(&layers).unwrap();
    assert_eq!(converted.read("same"), b"999");
    assert_eq!(converted.report.entries, 1 + 1 + 1 + 1000);
}

/// A layer as skopeo 1.9 writes it with `--dest-compress-format zstd:chunked`: what follows the
/// archive's two end blocks is left out, and counted in the diffID.
#[test]
fn a_zstd_chunked_layer_without_its_padding_is_the_layer_that_the_image_names() {
    const MEDIA_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    let whole = Tar::new().file("a", "content").dir("d").done();
    let image = |padded_to: usize, kept: &[u8]| {
        let mut padded = whole.clone();
        padded.resize(padded_to, 0);
        let mut layout = Layout::new();
        let stored = zstd::encode_all(kept, 3).unwrap();
        let image = layout.image("linux/amd64", &[(MEDIA_TYPE, stored, padded)]);
        layout.list(image, Some("test"));
        layout
    };
    let expected = convert_layers(std::slice::from_ref(&whole)).unwrap();
    // GNU tar's record of 20 blocks, a large one, and none.
    for padded_to in [10_240, 65_536, whole.len()] {
        let layout = image(padded_to, &whole);
        let converted = convert_with(&layout.source(None), &options()).unwrap();
        assert_eq!(converted.dump(), expected.dump());
    }
    // What is missing has to be zeros behind the end, and little.
    for layout in [
        image(10_240, &whole[..whole.len() - 1]),
        image(1 << 20, &whole),
        image(10_240, &Tar::new().file("a", "Content").dir("d").done()),
    ] {
        let text = message(convert_with(&layout.source(None), &options()));
        assert!(text.contains("diffID is sha256:"), "{text}");
    }
}
