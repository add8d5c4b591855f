//! Images that were damaged: every command says so, none makes data up, none panics.

use serde_json::Value;

use crate::support::{Sandbox, Tar, noise, snapshot, words};

fn inspect(sandbox: &Sandbox, name: &str) -> Value {
    sandbox.json(&["inspect", "--json", name])
}

/// Where the image stores the byte `offset` of its address space.
fn stored_at(sandbox: &Sandbox, name: &str, offset: u64) -> usize {
    let start = format!("--start={offset}");
    let map = sandbox.json(&["map", "--json", &start, "--length=1", name]);
    map["extents"][0]["uba"].as_u64().unwrap() as usize
}

fn flip(sandbox: &Sandbox, name: &str, at: usize) {
    sandbox.patch(name, |file| file[at] ^= 0x40);
}

#[test]
fn damaged_file_content() {
    let sandbox = Sandbox::with_image();
    sandbox.damage_su("image.bcow", 0);
    let shown = sandbox.all_shown(&[
        &["cat", "image.bcow", "usr/bin/su"],
        &["fsck", "image.bcow"],
        &["fsck", "--data", "image.bcow"],
    ]);
    snapshot!("content", shown);
    let extract = sandbox.run(&["extract", "image.bcow", "usr/bin", "out"]);
    assert_eq!(extract.status.code(), Some(1));
    assert!(!sandbox.path("out/su").exists(), "half a file was left");
    let export = sandbox.run(&["export", "image.bcow", "--to=raw", "-o", "out.raw"]);
    assert_eq!(export.status.code(), Some(1));
    assert_eq!(sandbox.names(), ["image.bcow", "sample.tar"]);
    // What is not damaged can still be read.
    assert_eq!(
        sandbox.ok(&["cat", "image.bcow", "etc/motd"]),
        b"Welcome.\n"
    );
}

/// The root hash of an image, as `--root-hash` takes it.
fn root_hash(sandbox: &Sandbox, name: &str) -> String {
    let root = inspect(sandbox, name)["merkle"]["root"].clone();
    root.as_str().unwrap().to_owned()
}

#[test]
fn fsck_with_a_root_hash_reads_every_byte() {
    let sandbox = Sandbox::with_image();
    let root = format!("--root-hash={}", root_hash(&sandbox, "image.bcow"));
    let json = sandbox.json(&["fsck", "--json", &root, "image.bcow"]);
    assert_eq!(
        (&json["checked"], &json["data"]),
        (&"all".into(), &true.into())
    );
    sandbox.damage_su("image.bcow", 0);
    sandbox.ok(&["fsck", "image.bcow"]);
    let shown = sandbox.shown(&["fsck", &root, "image.bcow"]);
    assert!(shown.contains("error merkle: "), "{shown}");
    assert!(shown.ends_with("--- exit status 4\n"), "{shown}");
}

#[test]
fn file_with_another_root_hash_is_not_repaired() {
    let sandbox = Sandbox::with_image();
    let root = format!("--root-hash={}", root_hash(&sandbox, "image.bcow"));
    let good = sandbox.read("image.bcow");
    sandbox.write("copy.bcow", &good);
    flip(&sandbox, "image.bcow", 60);
    let damaged = sandbox.read("image.bcow");
    let other = format!("--root-hash={}", "0".repeat(64));
    for from in [&[][..], &["--from=copy.bcow"]] {
        let repair = [&["fsck", "--repair", &other], from, &["image.bcow"]].concat();
        let shown = sandbox.shown(&repair);
        assert!(shown.contains("its root hash is not"), "{shown}");
        assert!(shown.ends_with("--- exit status 8\n"), "{shown}");
        assert!(sandbox.read("image.bcow") == damaged, "{shown}");
    }
    let shown = sandbox.shown(&["fsck", "--repair", &root, "image.bcow"]);
    assert!(shown.ends_with("--- exit status 1\n"), "{shown}");
    assert!(sandbox.read("image.bcow") == good, "{shown}");
}

#[test]
fn damaged_files_beyond_the_limit_are_counted() {
    let sandbox = Sandbox::new();
    let content = noise(10_000);
    let mut archive = Tar::new().directory("./");
    for number in 0..1003 {
        archive = archive.file(&format!("{number}"), &content);
    }
    sandbox.write("many.tar", &archive.finish());
    sandbox.ok(&words(
        "convert --compress=none --block-size=4K tar:many.tar many.bcow",
    ));
    sandbox.damage_su("many.bcow", 0);
    let output = sandbox.run(&["fsck", "--data", "--json", "many.bcow"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap();
    let named = findings.iter().filter(|found| found["code"] == "file-data");
    assert_eq!(named.count(), 1000);
    assert_eq!(json["findings_omitted"], 3);
    assert_eq!(json["errors"], findings.len() + 3);
    let shown = sandbox.shown(&["fsck", "--data", "many.bcow"]);
    assert!(shown.contains("\n... and 3 more\n"), "{shown}");
    // One block is damaged: a few files that need it have a line, the others are a number.
    assert_eq!(shown.matches("error file-data: ").count(), 3, "{shown}");
    let rest = "\n... and 997 more findings because of region ";
    assert!(shown.contains(rest), "{shown}");
}

#[test]
fn damaged_file_system_metadata() {
    let sandbox = Sandbox::with_image();
    let facts = inspect(&sandbox, "image.bcow");
    let start = facts["metadata"]["content"]["metadata_start"]
        .as_u64()
        .unwrap();
    let at = stored_at(&sandbox, "image.bcow", start);
    flip(&sandbox, "image.bcow", at);
    snapshot!("metadata_ls", sandbox.shown(&["ls", "-R", "image.bcow"]));
    let fsck = sandbox.run(&["fsck", "--data", "image.bcow"]);
    assert_eq!(fsck.status.code(), Some(4));
}

#[test]
fn damaged_tables() {
    let sandbox = Sandbox::with_image();
    let root = u64::from_le_bytes(sandbox.read("image.bcow")[72..80].try_into().unwrap());
    flip(&sandbox, "image.bcow", root as usize);
    let shown = sandbox.all_shown(&[
        &["ls", "image.bcow"],
        &["fsck", "image.bcow"],
        &["fsck", "--json", "image.bcow"],
    ]);
    snapshot!("root_table", shown);
}

#[test]
fn damaged_json_section_leaves_the_rest_to_see() {
    let sandbox = Sandbox::with_image();
    let at = u64::from_le_bytes(sandbox.read("image.bcow")[88..96].try_into().unwrap());
    flip(&sandbox, "image.bcow", at as usize);
    let inspect = sandbox.run(&["inspect", "image.bcow"]);
    assert_eq!(inspect.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&inspect.stdout).contains("EROFS"));
    snapshot!(String::from_utf8_lossy(&inspect.stderr), @r"
    error: cannot read the metadata of image.bcow
      caused by: metadata: checksum is [CRC], the header says [CRC]
    hint: `bcow fsck image.bcow` lists all damage
    ");
    sandbox.ok(&["ls", "image.bcow"]);
}

#[test]
fn damaged_headers() {
    let sandbox = Sandbox::with_image();
    flip(&sandbox, "image.bcow", 60);
    snapshot!(sandbox.shown(&["fsck", "image.bcow"]), @r"
    $ bcow fsck image.bcow
    warning header-slot: header slot A: is damaged or empty; the other slot serves
    image.bcow: structure clean, 1 warning (0 tables, 30 blocks, 19 inodes, data not checked)
    --- exit status 0
    ");
    let output = sandbox.run(&["fsck", "--json", "image.bcow"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["findings"][0]["repair"], "writes the slot again");
    sandbox.ok(&["ls", "image.bcow"]);
    let shown = [0, 1].map(|_| sandbox.shown(&["fsck", "--repair", "image.bcow"]));
    snapshot!(shown.concat(), @r"
    $ bcow fsck --repair image.bcow
    repaired: header slot A was damaged and is written again
    image.bcow: structure clean (0 tables, 30 blocks, 19 inodes, data not checked)
    --- stderr
    hint: the content of blocks was not checked: `bcow fsck --data image.bcow` reads it too
    --- exit status 1
    $ bcow fsck --repair image.bcow
    image.bcow: structure clean (0 tables, 30 blocks, 19 inodes, data not checked)
    --- stderr
    hint: the content of blocks was not checked: `bcow fsck --data image.bcow` reads it too
    --- exit status 0
    ");
    flip(&sandbox, "image.bcow", 60);
    flip(&sandbox, "image.bcow", 512 + 60);
    let shown = sandbox.all_shown(&[&["ls", "image.bcow"], &["fsck", "image.bcow"]]);
    snapshot!(shown, @r"
    $ bcow ls image.bcow
    --- stderr
    error: cannot open image.bcow
      caused by: both header slots are damaged (checksum)
    hint: `bcow fsck image.bcow` lists all damage
    --- exit status 1

    $ bcow fsck image.bcow
    error header-crc: header: both header slots are damaged (checksum)
    image.bcow: damaged: 1 error found (0 tables, 0 blocks, data not checked)
    --- stderr
    hint: `bcow convert` creates the image again from its source
    --- exit status 4
    ");
}

#[test]
fn truncated_image() {
    let sandbox = Sandbox::with_image();
    sandbox.patch("image.bcow", |file| file.truncate(file.len() - 1));
    let shown = sandbox.shown(&["inspect", "image.bcow"]) + &sandbox.shown(&["fsck", "image.bcow"]);
    let filters = vec![(r"\d+ bytes", "[N] bytes"), (r"says \d+", "says [N]")];
    insta::with_settings!({filters => filters}, {
        insta::assert_snapshot!(shown, @r"
        $ bcow inspect image.bcow
        --- stderr
        error: cannot open image.bcow
          caused by: the file is [N] bytes long, its header says [N]: it was cut short
        hint: copy it again from where it came, or convert its source again
        --- exit status 1
        $ bcow fsck image.bcow
        error truncated: header: the file is [N] bytes long, its header says [N]: it was cut short
        image.bcow: damaged: 1 error found (0 tables, 0 blocks, data not checked)
        --- stderr
        hint: `bcow convert` creates the image again from its source
        hint: `bcow fsck --repair --from COPY image.bcow` restores it from another copy
        --- exit status 4
        ");
    });
}

#[test]
fn disks_that_a_crash_left() {
    let sandbox = Sandbox::new();
    let vectors = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/vectors");
    let mut shown = String::new();
    for name in [
        "valid/log-two-records",
        "valid/log-only-without-its-block",
        "valid/free-list-leak",
        "invalid/free-list-crc",
        "invalid/overlap-two-blocks",
    ] {
        let bytes = std::fs::read(vectors.join(name).with_extension("bcow")).unwrap();
        sandbox.write("disk.bcow", &bytes);
        for arguments in [
            &["fsck", "disk.bcow"][..],
            &["fsck", "--repair", "disk.bcow"],
        ] {
            shown += &sandbox.shown(arguments);
        }
    }
    snapshot!("disks_fsck", shown);
}

/// A sweep: nothing that a flipped byte can do ends otherwise than documented.
#[test]
fn no_flipped_byte_makes_a_command_misbehave() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &crate::support::sample());
    sandbox.ok(&["convert", "--block-size=16K", "sample.tar", "good.bcow"]);
    let good = sandbox.read("good.bcow");
    let content = sandbox.ok(&["cat", "good.bcow", "var/data", "etc/motd"]);
    let step = good.len() / 40;
    for at in (0..64).step_by(8).chain((4096..good.len()).step_by(step)) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x21;
        if at < 512 {
            bytes[512 + at] ^= 0x21;
        }
        sandbox.write("bad.bcow", &bytes);
        let code = |args: &[&str]| {
            let output = sandbox.run(args);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!message.contains("panicked"), "byte {at}: {message}");
            (output.status.code().unwrap_or(-1), output.stdout)
        };
        let (status, _) = code(&["fsck", "--data", "bad.bcow"]);
        assert!(
            matches!(status, 4 | 8),
            "byte {at}: fsck ended with {status}"
        );
        let (status, _) = code(&["ls", "-laR", "bad.bcow"]);
        assert!(matches!(status, 0 | 1), "byte {at}: ls ended with {status}");
        let (status, _) = code(&["inspect", "bad.bcow"]);
        assert!(
            matches!(status, 0 | 1),
            "byte {at}: inspect ended with {status}"
        );
        let (status, output) = code(&["cat", "bad.bcow", "var/data", "etc/motd"]);
        assert!(
            status == 1 || (status == 0 && output == content),
            "byte {at}: cat gave other bytes"
        );
    }
}

/// The exact length of the source is in the metadata.
#[test]
fn damaged_metadata_of_a_disk_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write("disk.img", &noise(10_000));
    sandbox.ok(&["convert", "raw:disk.img", "disk.bcow"]);
    sandbox.ok(&["convert", "disk.bcow", "raw:out.img"]);
    assert_eq!(sandbox.read("out.img"), sandbox.read("disk.img"));
    let header = bcow::format::choose_header(&sandbox.read("disk.bcow")).unwrap();
    flip(&sandbox, "disk.bcow", header.metadata.offset as usize);
    let failed = sandbox.run(&["convert", "--force", "disk.bcow", "raw:out.img"]);
    assert_eq!(failed.status.code(), Some(1));
    assert_eq!(sandbox.read("out.img"), sandbox.read("disk.img"));
    let failed = sandbox.run(&["convert", "disk.bcow", "raw:new.img"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(!sandbox.path("new.img").exists());
}

/// Metadata can list a layer that is no backing of the stack.
#[test]
fn listed_layer_without_a_file_is_not_dropped() {
    let sandbox = Sandbox::with_image();
    sandbox.layout("src", "x", &["sample.tar", "sample.tar"]);
    sandbox.ok(&["convert", "oci:src:x", "oci:store:x"]);
    let missing = "0".repeat(64);
    let (mut stacks, mut changed) = (0, Vec::new());
    for entry in std::fs::read_dir(sandbox.path("store/blobs/sha256")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let Ok(header) = bcow::format::choose_header(&bytes) else {
            continue;
        };
        let start = header.metadata.offset as usize;
        let json = &bytes[start..start + header.metadata.bytes as usize];
        let mut metadata: Value = serde_json::from_slice(json).unwrap();
        if metadata["layers"]
            .as_array()
            .is_some_and(|layers| layers.len() == 2)
        {
            stacks += 1;
            let layers = metadata["layers"].as_array_mut().unwrap();
            let mut extra = layers[0].clone();
            extra["digest"] = format!("sha256:{missing}").into();
            layers.push(extra);
            changed = with_metadata(bytes, header, &metadata);
        }
    }
    assert_eq!(stacks, 1);
    sandbox.write("stack.bcow", &changed);
    let export = ["export", "--store=store", "stack.bcow", "--to=oci:out:x"];
    let text = sandbox.shown(&export);
    assert!(
        text.contains(&format!("its layer sha256:{missing} was not found")),
        "{text}"
    );
    assert!(!sandbox.path("out/index.json").exists());
}

/// The file with other metadata, and without a Merkle tree.
fn with_metadata(mut bytes: Vec<u8>, mut header: bcow::format::Header, json: &Value) -> Vec<u8> {
    use bcow::format::{SLOT_BYTES, Section, crc32c, read_only_compatible};
    let json = serde_json::to_vec(json).unwrap();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    header.metadata = Section {
        offset: bytes.len() as u64,
        bytes: json.len() as u32,
        crc: crc32c(&json),
    };
    bytes.extend_from_slice(&json);
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    header.merkle = None;
    header.features.read_only_compatible &= !read_only_compatible::MERKLE;
    header.file_bytes = bytes.len() as u64;
    header.generation += 1;
    bytes[..SLOT_BYTES].copy_from_slice(&header.encode());
    bytes
}

#[test]
fn disks_over_a_repaired_disk_open_after_the_advised_command() {
    let sandbox = Sandbox::new();
    let vectors = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/vectors");
    for (name, is_repaired) in [("log-two-records", false), ("free-list-leak", true)] {
        let bytes = std::fs::read(vectors.join("valid").join(name).with_extension("bcow")).unwrap();
        sandbox.write("base.bcow", &bytes);
        sandbox.ok(&["create", "-b", "base.bcow", "disk.bcow"]);
        let shown = sandbox.shown(&["fsck", "--repair", "base.bcow"]);
        let command = "`bcow rebase --unsafe DISK -b base.bcow`";
        assert_eq!(shown.contains(command), is_repaired, "{shown}");
        if is_repaired {
            let shown = sandbox.shown(&["map", "disk.bcow"]);
            assert!(shown.contains("changed since"), "{shown}");
            sandbox.ok(&["rebase", "--unsafe", "disk.bcow", "-b", "base.bcow"]);
        }
        sandbox.ok(&["map", "disk.bcow"]);
        std::fs::remove_file(sandbox.path("disk.bcow")).unwrap();
    }
}
