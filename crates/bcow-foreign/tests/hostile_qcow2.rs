//! Damaged and hostile qcow2 images give an error or a disk, and never end the process.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bcow::{BlockDevice, Content};
use bcow_foreign::{ClusterCompression, Qcow2Disk, Qcow2Writer};

const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const CLUSTER: usize = 1 << 16;

/// An image of 256 KiB: data, a hole, zeros, data.
fn image(compression: ClusterCompression) -> Vec<u8> {
    let file = tempfile::tempfile().unwrap();
    let mut writer = Qcow2Writer::new(&file, 4 * CLUSTER as u64, compression).unwrap();
    let noise: Vec<u8> = (0..CLUSTER as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as u8)
        .collect();
    writer.data(&noise).unwrap();
    writer.zeros(2 * CLUSTER as u64).unwrap();
    writer.data(&[7; CLUSTER]).unwrap();
    let length = writer.finish().unwrap();
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// With these header extensions behind the header of `header_bytes`, and a backing file `base`
/// behind them.
fn with_extensions(
    mut bytes: Vec<u8>,
    header_bytes: usize,
    extensions: &[(u32, &[u8])],
    backing: &[u8],
) -> Vec<u8> {
    let mut all = Vec::new();
    for (kind, data) in extensions.iter().chain(&[(0, &[][..])]) {
        all.extend_from_slice(&kind.to_be_bytes());
        all.extend_from_slice(&(data.len() as u32).to_be_bytes());
        all.extend_from_slice(data);
        all.resize(all.len().next_multiple_of(8), 0);
    }
    put(&mut bytes, header_bytes, &all);
    if !backing.is_empty() {
        let at = header_bytes + all.len();
        put(&mut bytes, at, backing);
        put(&mut bytes, 8, &(at as u64).to_be_bytes());
        put(&mut bytes, 16, &(backing.len() as u32).to_be_bytes());
    }
    bytes
}

/// The same as version 2, whose header is shorter.
fn as_version_2(mut bytes: Vec<u8>) -> Vec<u8> {
    put(&mut bytes, 4, &2u32.to_be_bytes());
    bytes[72..512].fill(0);
    bytes
}

/// The first MiB of the disk at `path`, or the error.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let directory = path.parent().unwrap().to_owned();
    let disk = Qcow2Disk::open(path, &[directory]).map_err(|e| e.to_string())?;
    let end = disk.size().min(1 << 20);
    let mut content = vec![0; end as usize];
    let mut at = 0;
    while at < end {
        let status = disk.status(at, end - at).map_err(|e| e.to_string())?;
        let length = status.length.clamp(1, end - at);
        if status.content == Content::Data {
            let part = &mut content[at as usize..(at + length) as usize];
            disk.read_at(at, part).map_err(|e| e.to_string())?;
        }
        at += length;
    }
    Ok(content)
}

fn read_bytes(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("base"),
        image(ClusterCompression::None),
    )
    .unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, bytes).unwrap();
    read(&path)
}

#[test]
fn a_feature_name_table_of_one_byte_is_refused() {
    let with_table = |table: &[u8]| {
        with_extensions(
            image(ClusterCompression::None),
            112,
            &[(FEATURE_NAMES, table)],
            b"",
        )
    };
    let error = read_bytes(&with_table(b"x")).unwrap_err();
    assert!(
        error.ends_with("the length of its feature name table, 1, is not a multiple of 48"),
        "{error}"
    );
    assert!(read_bytes(&with_table(&[0; 96])).is_ok());
}

#[test]
fn a_refused_header_has_the_hint_of_a_damaged_image() {
    let hint = |bytes: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        Qcow2Disk::open(file.path(), &[]).err().unwrap().hint()
    };
    let mut version_1 = image(ClusterCompression::None);
    put(&mut version_1, 4, &1u32.to_be_bytes());
    for header in [&version_1[..], b"QFI\xfb and so on"] {
        assert!(hint(header).unwrap().starts_with("`qemu-img check`"));
    }
    assert_eq!(hint(b"some text"), None);
}

#[test]
fn the_format_of_a_version_2_backing_file_is_read_as_qemu_records_it() {
    let expected = read_bytes(&image(ClusterCompression::None)).unwrap();
    let mut empty = image(ClusterCompression::None);
    // Nothing is allocated: the L1 table's only entry goes.
    let l1 = u64::from_be_bytes(empty[40..48].try_into().unwrap()) as usize;
    empty[l1..l1 + 8].fill(0);
    let overlay =
        |format: &[(u32, &[u8])]| with_extensions(as_version_2(empty.clone()), 72, format, b"base");
    assert_eq!(
        read_bytes(&overlay(&[(BACKING_FORMAT, b"qcow2")])).as_ref(),
        Ok(&expected)
    );
    // Never guessed: a guest may have written the header of a qcow2 image into its raw disk.
    let error = read_bytes(&overlay(&[])).unwrap_err();
    assert!(error.contains("does not record its format"), "{error}");
    let error = read_bytes(&overlay(&[
        (BACKING_FORMAT, b"qcow2"),
        (BACKING_FORMAT, b"raw"),
    ]))
    .unwrap_err();
    assert!(error.contains("two formats"), "{error}");
    // No extensions and no end of them, as before qemu 0.11: the name is right behind the header.
    let mut old = as_version_2(empty.clone());
    put(&mut old, 72, b"base");
    put(&mut old, 8, &72u64.to_be_bytes());
    put(&mut old, 16, &4u32.to_be_bytes());
    let error = read_bytes(&old).unwrap_err();
    assert!(error.contains("does not record its format"), "{error}");
}

#[test]
fn an_encrypted_image_is_refused() {
    for method in [1u32, 2, 9] {
        let mut bytes = image(ClusterCompression::None);
        put(&mut bytes, 32, &method.to_be_bytes());
        let error = read_bytes(&bytes).unwrap_err();
        assert!(error.contains("encrypt"), "{error}");
    }
}

#[test]
fn a_truncated_image_is_an_error_instead_of_zeros() {
    let bytes = image(ClusterCompression::None);
    let whole = read_bytes(&bytes).unwrap();
    // The tables come last in what bcow writes; here they come first.
    let tables = bytes.len();
    let mut moved = [&bytes[..], &bytes[CLUSTER..2 * CLUSTER]].concat();
    let l1 = u64::from_be_bytes(moved[40..48].try_into().unwrap()) as usize;
    let l2 = (u64::from_be_bytes(moved[l1..l1 + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00)
        as usize;
    put(&mut moved, l2, &(1 << 63 | tables as u64).to_be_bytes());
    assert_eq!(read_bytes(&moved).unwrap(), whole);
    let error = read_bytes(&moved[..tables]).unwrap_err();
    assert!(error.contains("the image is truncated"), "{error}");
    // qemu leaves the end of the last cluster away if there are only zeros.
    let short = read_bytes(&moved[..tables + 512]).unwrap();
    assert_eq!(short[..512], whole[..512]);
}

#[test]
fn tables_too_large_or_too_small_for_the_disk_are_refused() {
    let refused = |at: usize, value: &[u8]| {
        let mut bytes = image(ClusterCompression::None);
        put(&mut bytes, at, value);
        read_bytes(&bytes).unwrap_err()
    };
    for (at, value, why) in [
        (
            36,
            &u32::MAX.to_be_bytes()[..],
            "its L1 table has 4294967295 entries",
        ),
        (36, &0u32.to_be_bytes(), "too small for its disk"),
        (24, &(1u64 << 40).to_be_bytes(), "too small for its disk"),
        (20, &63u32.to_be_bytes(), "its cluster size of 2^63 bytes"),
        (
            100,
            &u32::MAX.to_be_bytes(),
            "the length of its header is 4294967295",
        ),
        (8, &u64::MAX.to_be_bytes(), "outside its first cluster"),
        (4, &1u32.to_be_bytes(), "qcow2 version 1 is not supported"),
    ] {
        let error = refused(at, value);
        assert!(error.contains(why), "{error}");
    }
}

/// Changes each byte of the header, its extensions, the L1 table, an L2 table and the refcount
/// table to several values, one at a time, in images of both versions, with a backing file and
/// without, compressed and not.
#[test]
fn any_changed_byte_of_the_tables_is_an_error_or_another_disk() {
    let names: &[(u32, &[u8])] = &[
        (BACKING_FORMAT, b"qcow2"),
        (FEATURE_NAMES, &[1; 48]),
        (0x1234, b"unknown"),
    ];
    let plain = image(ClusterCompression::None);
    let seeds = [
        with_extensions(plain.clone(), 112, names, b"base"),
        with_extensions(as_version_2(plain), 72, &names[..1], b"base"),
        with_extensions(image(ClusterCompression::Zlib), 112, &[], b""),
    ];
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("base"),
        image(ClusterCompression::None),
    )
    .unwrap();
    let path = directory.path().join("image");
    let (mut errors, mut disks) = (0, 0);
    for seed in seeds {
        std::fs::write(&path, &seed).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        read(&path).unwrap();
        let word = |at: usize| u64::from_be_bytes(seed[at..at + 8].try_into().unwrap()) as usize;
        let l1 = word(40);
        let l2 = word(l1) & 0x00ff_ffff_ffff_fe00;
        let tables = [0..260, l1..l1 + 8, l2..l2 + 32, word(48)..word(48) + 8];
        for at in tables.into_iter().flatten() {
            let old = seed[at];
            for new in [
                0,
                1,
                0x7f,
                0x80,
                0xff,
                old ^ 1,
                old ^ 0x40,
                old.wrapping_add(1),
            ] {
                if new == old {
                    continue;
                }
                file.write_all_at(&[new], at as u64).unwrap();
                match read(&path) {
                    Ok(_) => disks += 1,
                    Err(error) => {
                        // The header check refuses each value that is known to be an index. The
                        // guard is for unknown ones.
                        assert!(!error.contains("its reader panicked"), "byte {at}: {error}");
                        errors += 1;
                    }
                }
            }
            file.write_all_at(&[old], at as u64).unwrap();
        }
    }
    assert!(
        errors > 500 && disks > 500,
        "{errors} errors, {disks} disks"
    );
}
