//! Archives with random damage cause neither a panic nor a hang.

use bcow_oci::fuzz_ingest;
use proptest::prelude::*;

use bcow_testkit::tar::{GNU, Header, Tar, seal};

/// An archive with an entry of every type.
fn seed() -> Vec<u8> {
    let mut sparse = Header::new("sparse", b'S').magic(GNU).size(10).block();
    sparse[386..398].copy_from_slice(b"00000023420\0");
    sparse[398..410].copy_from_slice(b"00000000012\0");
    sparse[482] = 1;
    sparse[483..495].copy_from_slice(b"00000223420\0");
    let v1 = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "100000"),
        ("GNU.sparse.name", "v1"),
    ];
    let mut map = b"1\n50000\n5\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"hello");
    Tar::new()
        .dir("d")
        .file("d/file", vec![b'x'; 5000])
        .hardlink("link", "late")
        .file("late", "late")
        .symlink("s", "d")
        .file("s/through", "")
        .raw(&seal(sparse))
        .raw(&[0; 512])
        .raw(&[b'y'; 512])
        .pax(&v1)
        .file("x", map)
        .pax(&[
            ("SCHILY.xattr.user.a", "b"),
            ("mtime", "-1.5"),
            ("path", "p"),
        ])
        .file("x", "")
        .gnu_long(b'L', "l".repeat(200))
        .file("x", "")
        .file("d/.wh.gone", "")
        .file("d/.wh..wh..opq", "")
        .entry(&Header::new("dev", b'3'), b"")
        .done()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_survived(
        layers in any::<u8>(),
        cut in 0..97usize,
        places in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
        removed in proptest::option::of((any::<prop::sample::Index>(), 1..4usize)),
    ) {
        let mut bytes = seed();
        for (place, value) in places {
            let at = place.index(bytes.len());
            bytes[at] = value;
        }
        if let Some((place, blocks)) = removed {
            let at = place.index(bytes.len() / 512) * 512;
            let end = (at + blocks * 512).min(bytes.len());
            bytes.drain(at..end);
        }
        bytes.resize(bytes.len() + cut, layers);
        fuzz_ingest(&bytes);
    }
}
