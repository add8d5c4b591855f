//! What the commands print about an image.

use std::io::Write;
use std::process::Stdio;

use crate::support::{Sandbox, noise, sample, snapshot, words};

#[test]
fn convert_reports_in_one_line() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &sample());
    snapshot!(sandbox.shown(&["convert", "--compress=none", "sample.tar", "image.bcow"]));
    assert_eq!(sandbox.names(), ["image.bcow", "sample.tar"]);
}

#[test]
fn convert_reports_in_json() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &sample());
    snapshot!(sandbox.shown(&words(
        "convert --compress=none --json sample.tar image.bcow"
    )));
}

#[test]
fn convert_reads_standard_input_and_gives_the_same_image() {
    let sandbox = Sandbox::with_image();
    let mut child = sandbox
        .command(&words(
            "convert --compress=none --block-size=4096 tar:- piped.bcow",
        ))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&sample()).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(sandbox.read("piped.bcow") == sandbox.read("image.bcow"));
}

#[test]
fn convert_replaces_an_existing_image() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["convert", "-q", "--plain", "sample.tar", "old.bcow"]);
    let old = sandbox.read("old.bcow");
    sandbox.ok(&["convert", "-q", "sample.tar", "old.bcow"]);
    assert!(sandbox.read("old.bcow") != old);
    sandbox.ok(&["fsck", "old.bcow"]);
}

#[test]
fn inspect_prints_text() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["inspect", "image.bcow"]));
}

#[test]
fn inspect_prints_json() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["inspect", "--json", "image.bcow"]));
}

#[test]
fn inspect_adds_up_for_compressed_and_for_plain_images() {
    let sandbox = Sandbox::with_image();
    for (options, features) in [
        (&["--compress=zstd:1"][..], "zstd"),
        (&["--plain"], "plain"),
        (&["--block-size=64K"], "zstd"),
    ] {
        let mut args = vec!["convert", "sample.tar", "other.bcow"];
        args.extend(options);
        sandbox.ok(&args);
        let facts = sandbox.json(&["inspect", "--json", "other.bcow"]);
        let names = facts["format"]["features"].as_array().unwrap();
        assert!(names.contains(&features.into()), "{facts}");
        let storage = &facts["storage"];
        let sum = |key: &str| {
            storage["content"][key].as_u64().unwrap() + storage["metadata"][key].as_u64().unwrap()
        };
        assert_eq!(facts["geometry"]["size"], sum("bytes"), "{facts}");
        let map = sandbox.json(&["map", "--json", "other.bcow"]);
        let stored: u64 = map["extents"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|extent| extent["stored_bytes"].as_u64())
            .sum();
        assert_eq!(stored, sum("stored_bytes"));
        assert_eq!(facts["metadata"]["content"]["deduplicated_bytes"], 100_000);
    }
}

#[test]
fn map_for_people() {
    let sandbox = Sandbox::with_image();
    let whole = sandbox.shown(&["map", "image.bcow"]);
    let lines: Vec<&str> = whole.lines().collect();
    assert_eq!(lines.len(), 34, "30 blocks and a hole: {whole}");
    let ends = [&lines[..5], &lines[29..]].concat();
    snapshot!(ends.join("\n"), @r"
    $ bcow map image.bcow
                 LBA       LENGTH KIND                  UBA       STORED
                   0         4096 raw                122880         4096
                4096         4096 raw                  4096         4096
                8192         4096 raw                  8192         4096
              110592         4096 raw                110592         4096
              114688         4096 raw                114688         4096
              118784       303104 zero                    -            -
              421888         4096 raw                118784         4096
    --- exit status 0
    ");
}

#[test]
fn map_of_a_part_for_programs() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["map", "--json", "--start=4K", "--length=8K", "image.bcow"]), @r#"
    $ bcow map --json --start=4K --length=8K image.bcow
    {"schema":"bcow.map/1","size":425984,"extents":[
    {"offset":4096,"length":4096,"kind":"raw","uba":4096,"stored_bytes":4096,"crc32c":"[CRC]"},
    {"offset":8192,"length":4096,"kind":"raw","uba":8192,"stored_bytes":4096,"crc32c":"[CRC]"}
    ]}
    --- exit status 0
    "#);
}

#[test]
fn map_covers_the_address_space_without_gaps() {
    let sandbox = Sandbox::with_image();
    let map = sandbox.json(&["map", "--json", "image.bcow"]);
    let mut next = 0;
    for extent in map["extents"].as_array().unwrap() {
        assert_eq!(extent["offset"], next);
        next += extent["length"].as_u64().unwrap();
    }
    assert_eq!(map["size"], next);
}

#[test]
fn ls_shows_names() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["ls", "image.bcow"]), @r"
    $ bcow ls image.bcow
    bin
    dev
    etc
    pipe
    usr
    var
    --- exit status 0
    ");
}

#[test]
fn ls_shows_all_of_it_at_length() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["ls", "-laR", "image.bcow"]));
}

#[test]
fn ls_follows_a_link_to_a_directory_unless_it_shows_the_link() {
    let sandbox = Sandbox::with_image();
    assert_eq!(sandbox.ok(&["ls", "image.bcow", "bin"]), b"su\nsudo\n");
    assert_eq!(sandbox.ok(&["ls", "image.bcow", "/bin/su"]), b"/bin/su\n");
    snapshot!(sandbox.shown(&["ls", "-l", "image.bcow", "bin"]), @r"
    $ bcow ls -l image.bcow bin
    lrwxrwxrwx   1     0     0          7 2023-11-14 22:13 bin -> usr/bin
    --- exit status 0
    ");
}

#[test]
fn ls_in_json_has_all_fields_of_an_inode() {
    let sandbox = Sandbox::with_image();
    snapshot!(sandbox.shown(&["ls", "-aR", "--json", "image.bcow"]));
    sandbox.json(&["ls", "-aR", "--json", "image.bcow"]);
    sandbox.json(&["ls", "--json", "image.bcow", "pipe"]);
}

#[test]
fn ls_gives_a_pipe_the_bytes_of_names() {
    let sandbox = Sandbox::with_image();
    let listing = sandbox.ok(&["ls", "-0", "image.bcow", "etc"]);
    let names: Vec<&[u8]> = listing.split(|&b| b == 0).collect();
    assert!(names.contains(&&b"odd \x1b[31m\nname\xff"[..]));
}

#[test]
fn cat_gives_the_bytes_of_files_one_behind_the_other() {
    let sandbox = Sandbox::with_image();
    let mut expected = b"Welcome.\n".to_vec();
    expected.extend(noise(100_000));
    expected.extend([0; 300_000]);
    let cat = sandbox.ok(&words(
        "cat image.bcow etc/motd /var/same ./var/../var/zeros",
    ));
    assert!(cat == expected);
}

#[test]
fn cat_follows_links_inside_the_image_only() {
    let sandbox = Sandbox::with_image();
    assert_eq!(
        sandbox.ok(&["cat", "image.bcow", "etc/outside"]),
        b"Welcome.\n"
    );
    assert!(sandbox.ok(&["cat", "image.bcow", "bin/sudo"]) == noise(10_000));
}

#[test]
fn fsck_finds_nothing() {
    let sandbox = Sandbox::with_image();
    let shown = sandbox.all_shown(&[
        &["fsck", "image.bcow"],
        &["fsck", "--data", "-j1", "image.bcow"],
        &["-q", "fsck", "image.bcow"],
    ]);
    snapshot!(shown, @r"
    $ bcow fsck image.bcow
    image.bcow: structure clean (0 tables, 30 blocks, 19 inodes, data not checked)
    --- exit status 0

    $ bcow fsck --data -j1 image.bcow
    image.bcow: clean (0 tables, 30 blocks, 19 inodes, 120 KiB read)
    --- exit status 0

    $ bcow -q fsck image.bcow
    --- exit status 0
    ");
    // `damaged_tables` has all fields of the document.
    let json = sandbox.json(&["fsck", "--json", "--data", "image.bcow"]);
    for about in [&json, &json["files"][0]] {
        let facts = ["verdict", "errors", "blocks", "inodes", "bytes_read"];
        let facts = facts.map(|key| about[key].to_string());
        assert_eq!(facts.join(" "), "\"clean\" 0 30 19 122880");
    }
    assert_eq!(json["findings"], serde_json::json!([]));
    assert_eq!(json["checked"], "all");
    assert_eq!(json["data"], true);
}

#[test]
fn export_of_every_kind_of_image_is_the_same_erofs() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["export", "image.bcow", "--to=erofs", "-o", "a.erofs"]);
    let piped = sandbox.ok(&["export", "image.bcow", "--to=erofs", "-o", "-"]);
    let exported = sandbox.read("a.erofs");
    assert!(exported == piped);
    assert_eq!(exported[1024..1028], [0xe2, 0xe1, 0xf5, 0xe0]);
    let raw = sandbox.ok(&["export", "image.bcow", "--to=raw", "-o", "-"]);
    assert!(raw.starts_with(&exported[..]));
    snapshot!(sandbox.shown(&["export", "image.bcow", "--to=raw", "-o", "a.raw"]), @r"
    $ bcow export image.bcow --to=raw -o a.raw
    --- stderr
    a.raw: 416 KiB exported
    --- exit status 0
    ");
    assert!(sandbox.read("a.raw") == raw);
}

#[test]
fn export_leaves_holes() {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::new();
    sandbox.write(
        "zeros.tar",
        &crate::support::Tar::new()
            .file("zeros", &vec![0; 8 << 20])
            .file("noise", &noise(5000))
            .finish(),
    );
    sandbox.ok(&["convert", "--block-size=4K", "zeros.tar", "image.bcow"]);
    sandbox.ok(&["export", "image.bcow", "--to=raw", "-o", "image.raw"]);
    let metadata = std::fs::metadata(sandbox.path("image.raw")).unwrap();
    assert!(
        metadata.blocks() * 512 < 1 << 20,
        "{} blocks for {} bytes",
        metadata.blocks(),
        metadata.len()
    );
}

#[test]
fn export_satisfies_fsck_erofs() {
    let sandbox = Sandbox::with_image();
    sandbox.ok(&["export", "image.bcow", "--to=erofs", "-o", "a.erofs"]);
    sandbox.ok(&["convert", "--plain", "sample.tar", "plain.bcow"]);
    for file in ["a.erofs", "plain.bcow"] {
        match std::process::Command::new("fsck.erofs")
            .arg(sandbox.path(file))
            .output()
        {
            Ok(output) => assert!(
                output.status.success(),
                "{file}: {}",
                String::from_utf8_lossy(&output.stderr)
            ),
            Err(error) => crate::support::missing("fsck.erofs", &error),
        }
    }
}

#[test]
fn quiet_commands_say_nothing_but_results() {
    let sandbox = Sandbox::with_image();
    for args in [
        &["-q", "export", "image.bcow", "--to=raw", "-o", "a.raw"][..],
        &["-q", "extract", "image.bcow", "out"],
        &["-q", "man", "pages"],
    ] {
        let output = sandbox.run(args);
        assert!(output.status.success());
        let warnings = String::from_utf8_lossy(&output.stderr);
        assert!(
            warnings.lines().all(|line| line.starts_with("warning: ")),
            "{warnings}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn commands_that_write_report_in_json() {
    let sandbox = Sandbox::with_image();
    std::fs::create_dir(sandbox.path("changes")).unwrap();
    sandbox.write("changes/new", b"new");
    for (line, schema, field) in [
        ("create disk.bcow 1M", "create", "size"),
        ("create -b disk.bcow top.bcow", "create", "backing"),
        ("commit top.bcow", "commit", "bytes"),
        ("commit top.bcow sealed.bcow", "commit", "file_bytes"),
        (
            "commit image.bcow --upper changes a.bcow",
            "commit",
            "content_bytes",
        ),
        (
            "commit image.bcow --upper changes tar:a.tar",
            "commit",
            "entries",
        ),
        (
            "commit image.bcow --upper changes oci:a:b",
            "commit",
            "manifest",
        ),
        ("export image.bcow --to tar -o b.tar", "export", "entries"),
        ("export image.bcow --to raw -o b.raw", "export", "bytes"),
        ("export image.bcow --to oci:c:d", "export", "manifest"),
        ("extract image.bcow etc out", "extract", "unreadable"),
    ] {
        let report = sandbox.json(&[words(line), vec!["--json"]].concat());
        assert_eq!(report["schema"], format!("bcow.{schema}/1"), "{line}");
        assert!(!report["name"].as_str().unwrap().is_empty(), "{line}");
        assert!(!report[field].is_null(), "{line}: {report}");
    }
    for line in [
        "export --json image.bcow --to tar -o -",
        "commit --json image.bcow --upper changes tar:-",
    ] {
        let output = sandbox.run(&words(line));
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

#[test]
fn progress_is_shown_in_lines_where_they_are_asked_for() {
    let sandbox = Sandbox::with_image();
    let shown = |form: &str| {
        let args = ["convert", "--progress", form, "sample.tar", "new.bcow"];
        String::from_utf8(sandbox.run(&args).stderr).unwrap()
    };
    assert!(
        shown("plain")
            .lines()
            .any(|line| line.starts_with("verify: "))
    );
    let json = shown("json");
    assert!(json.lines().count() > 1, "{json}");
    for line in json.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["schema"], "bcow.progress/1");
        assert!(
            line["phase"].is_string() && line["bytes"].is_u64(),
            "{line}"
        );
    }
    for form in ["auto", "none"] {
        assert_eq!(shown(form), "", "{form}");
    }
}
