//! What bcow says of itself when something goes wrong, where it can be found afterwards.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde_json::Value;

use crate::mount::Place;
use crate::support::{Sandbox, is_root, noise, snapshot, words};

pub fn statistics(place: &Place) -> Value {
    place.0.json(&["stats", "--json", "mnt"])
}

fn count(errors: &Value, kind: &str) -> u64 {
    let kinds = errors["kinds"].as_array().unwrap();
    let found = kinds.iter().find(|entry| entry["kind"] == kind);
    found.unwrap()["count"].as_u64().unwrap()
}

fn metrics(place: &Place) -> String {
    let mut client = UnixStream::connect(place.0.path("metrics")).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

#[test]
fn error_in_a_mount_is_found_with_image_mountpoint_paths_place_and_cause() {
    let Some(place) = Place::new() else { return };
    place.0.damage_su("image.bcow", 5000);
    for upper in [&[][..], &["--upper=upper"]] {
        let options = ["mount", "--log-file=log", "--metrics=unix:metrics"];
        let mount = [&options, upper, &["image.bcow", "mnt"]].concat();
        place.0.ok(&mount);
        let before = statistics(&place);
        assert_eq!(before["errors"]["total"], 0);
        assert!(metrics(&place).contains("\nbcow_errors_total{kind=\"image-damage\"} 0\n"));
        let shown = place.0.shown(&["stats", "mnt"]);
        assert!(shown.contains("\nerrors:      none\n"), "{shown}");
        for name in ["usr/bin/su", "usr/bin/sudo"] {
            let error = fs::read(place.file(name)).unwrap_err();
            assert_eq!(errno(&error), Some(Errno::IO));
        }

        let stats = statistics(&place);
        let errors = &stats["errors"];
        let damages = count(errors, "image-damage");
        assert!(damages >= 2, "{stats}");
        assert_eq!(errors["total"], damages, "each is counted once: {stats}");
        let [last] = &errors["recent"].as_array().unwrap()[..] else {
            panic!("{stats}");
        };
        let paths: Vec<_> = last["paths"].as_array().unwrap().iter().collect();
        // A node of a writable mount is named as it was looked up.
        assert!(paths.contains(&&Value::from("/usr/bin/su")), "{stats}");
        assert_eq!(last["kind"], "image-damage");
        assert_eq!(last["count"], damages);
        assert_eq!(last["offset"], 4096);
        let cause = last["cause"].as_str().unwrap();
        assert!(cause.contains("stored at byte"), "{stats}");

        let directory = place.0.path("").canonicalize().unwrap();
        let (image, mountpoint) = (directory.join("image.bcow"), directory.join("mnt"));
        assert_eq!(stats["mountpoint"], mountpoint.to_str().unwrap());
        assert_eq!(stats["image"]["file"], image.to_str().unwrap());
        let log = String::from_utf8(place.0.read("log")).unwrap();
        let expected = format!(
            "bcow[{}]: error: {} at {}: /usr/bin/su = /usr/bin/sudo: cannot read at byte 4096: \
             {cause}\n",
            stats["process"]["pid"],
            image.display(),
            mountpoint.display(),
        );
        let (_, line) = log.split_once(' ').unwrap();
        assert_eq!(line, expected, "one line per place");

        let page = metrics(&place);
        let sample = format!("\nbcow_errors_total{{kind=\"image-damage\"}} {damages}\n");
        assert!(page.contains(&sample), "{page}");
        assert!(
            page.contains("\nbcow_last_error_timestamp_seconds "),
            "{page}"
        );
        let shown = place.0.shown(&["stats", "mnt"]);
        assert!(
            shown.contains(&format!("\nerrors:      {damages} image-damage\n")),
            "{shown}"
        );
        let last = shown
            .lines()
            .find(|line| line.starts_with("last error:"))
            .unwrap();
        let text = format!("/usr/bin/su = /usr/bin/sudo: cannot read at byte 4096: {cause}");
        assert!(last.ends_with(&text), "{last}");
        assert!(place.unmounted().contains("status 0"));
        // A log that was rotated away is begun anew.
        fs::remove_file(place.0.path("log")).unwrap();
    }
}

#[test]
fn lack_of_room_is_counted_and_logged_once() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&words(
        "mount --upper=upper --size-limit=1M --log-file=log image.bcow mnt",
    ));
    let file = fs::File::create(place.file("big")).unwrap();
    file.write_all_at(&noise(2 << 20), 0).unwrap_err();
    let filled = count(&statistics(&place)["errors"], "no-space");
    for _ in 0..3 {
        let error = file.write_all_at(&noise(1 << 16), 4 << 20).unwrap_err();
        assert_eq!(errno(&error), Some(Errno::NOSPC));
    }
    let errors = &statistics(&place)["errors"];
    assert_eq!(count(errors, "no-space"), filled + 3, "{errors}");
    assert_eq!(errors["total"], filled + 3, "{errors}");
    let last = &errors["recent"][0];
    assert_eq!(last["paths"], serde_json::json!(["/big"]));
    let log = String::from_utf8(place.0.read("log")).unwrap();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains(": warning: "), "{log}");
    assert!(
        log.ends_with(
            "/big: cannot write: the size limit of the upper is reached (1048576 bytes)\n"
        ),
        "{log}"
    );
    // What a program asks wrongly is no error of the mount.
    fs::read(place.file("missing")).unwrap_err();
    fs::remove_dir(place.file("etc")).unwrap_err();
    assert_eq!(statistics(&place)["errors"]["total"], filled + 3);
    drop(file);
    assert!(place.unmounted().contains("status 0"));
}

#[test]
fn log_file_that_cannot_be_written_is_refused() {
    let Some(place) = Place::new() else { return };
    let shown = place
        .0
        .shown(&["mount", "--log-file=missing/log", "image.bcow", "mnt"]);
    assert!(
        shown.contains("error: cannot write the log file missing/log\n"),
        "{shown}"
    );
    assert!(shown.contains("exit status 1"), "{shown}");
}

/// A process that is ended with the test.
struct Ended(Child);

impl Ended {
    /// Lets it end by itself.
    fn end(mut self) {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves a file at the socket `socket`; returns when clients can connect.
fn serve(sandbox: &Sandbox, name: &str) -> Ended {
    let mut child = sandbox
        .command(&["serve", name, "--socket=socket"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    assert!(line.starts_with("nbd+unix:"), "{line}");
    Ended(child)
}

/// What `bcow ps` lists of things in the sandbox, as this command sees it.
fn listed(sandbox: &Sandbox, ps: &mut Command) -> Vec<Value> {
    let output = ps.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["schema"], "bcow.ps/1");
    let here = sandbox.path("").canonicalize().unwrap();
    let services = document["services"].as_array().unwrap().iter();
    let services = services.filter(|service| {
        service["image"]
            .as_str()
            .is_some_and(|image| image.starts_with(here.to_str().unwrap()))
    });
    services.cloned().collect()
}

#[test]
fn mounts_and_served_disks_are_listed() {
    let Some(place) = Place::new() else { return };
    let sandbox = &place.0;
    fs::create_dir(sandbox.path("read")).unwrap();
    sandbox.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    sandbox.ok(&["mount", "image.bcow", "read"]);
    sandbox.ok(&["create", "--size=1M", "disk.bcow"]);
    let server = serve(sandbox, "disk.bcow");
    let here = sandbox.path("").canonicalize().unwrap();
    let at = |name: &str| Value::from(here.join(name).to_str().unwrap());

    let found = listed(sandbox, &mut sandbox.command(&["ps", "--json"]));
    let text = String::from_utf8(sandbox.ok(&["ps"])).unwrap();
    assert!(text.starts_with("PID"), "{text}");
    for (kind, mode, place, upper) in [
        ("mount", "rw", at("mnt"), at("upper")),
        ("mount", "ro", at("read"), Value::Null),
        ("serve", "rw", Value::Null, Value::Null),
    ] {
        let is_it = |service: &&Value| service["kind"] == kind && service["mode"] == mode;
        let service = found.iter().find(is_it).expect("it is listed");
        assert_eq!(service["state"], "running", "{service}");
        assert_eq!(service["upper"], upper, "{service}");
        assert_eq!(service["other_mount_namespace"], false);
        let pid = service["pid"].as_u64().unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{pid} ")));
        let line = line.expect("people see it too");
        assert!(line.contains(service["image"].as_str().unwrap()), "{line}");
        let first = service["at"][0].as_str().unwrap();
        assert!(line.contains(first), "{line}");
        match kind {
            "mount" => assert_eq!(first, place),
            _ => {
                assert_eq!(pid, u64::from(server.0.id()));
                assert!(first.starts_with("nbd+unix:///?socket="), "{line}");
            }
        }
    }
    assert_eq!(found.len(), 3, "{found:?}");

    if is_root() {
        // Others see what the kernel lists, but neither whose process it is nor the upper.
        sandbox.open_to_others();
        let seen = listed(sandbox, &mut sandbox.command_as(4321, &["ps", "--json"]));
        assert_eq!(seen.len(), 2, "{seen:?}");
        for service in seen {
            assert_eq!(service["pid"], Value::Null, "{service}");
            assert_eq!(service["upper"], Value::Null, "{service}");
        }
    }
    drop(server);
    sandbox.ok(&["umount", "read"]);
    assert!(place.unmounted().contains("status 0"));
    let left = listed(sandbox, &mut sandbox.command(&["ps", "--json"]));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn mount_with_layers_is_listed_with_them_and_as_dead_without_its_process() {
    let Some(place) = Place::new() else { return };
    place.commit_layer();
    let sandbox = &place.0;
    sandbox.ok(&["mount", "image.bcow", "layer.bcow", "mnt"]);
    let list = || {
        let found = listed(sandbox, &mut sandbox.command(&["ps", "--json"]));
        let [service] = &found[..] else {
            panic!("{found:?}");
        };
        service.clone()
    };
    let layer = sandbox.path("").canonicalize().unwrap().join("layer.bcow");
    let layer = layer.to_str().unwrap();
    let service = list();
    assert_eq!(service["layers"], serde_json::json!([layer]), "{service}");
    let text = String::from_utf8(sandbox.ok(&["ps"])).unwrap();
    assert!(text.contains(&format!(", layer {layer} at ")), "{text}");

    let pid = service["pid"].as_i64().unwrap() as i32;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let start = Instant::now();
    let dead = loop {
        // The process lists the mount until it has ended, and then the mount may not answer within
        // the time that `ps` waits.
        let service = list();
        if service["state"] == "dead" || start.elapsed() > Duration::from_secs(60) {
            break service;
        }
    };
    assert_eq!(dead["state"], "dead", "{dead}");
    assert_eq!(dead["pid"], Value::Null, "{dead}");
    assert_eq!(dead["at"], service["at"], "{dead}");
}

#[test]
fn disk_in_use_is_refused_with_the_place_where_it_is_served() {
    let sandbox = Sandbox::new();
    sandbox.ok(&["create", "--size=1M", "disk.bcow"]);
    let server = serve(&sandbox, "disk.bcow");
    let pid = server.0.id();
    let here = sandbox.path("").canonicalize().unwrap();
    let disk = here.join("disk.bcow").to_str().unwrap().to_owned();
    let line = format!(
        "\n  caused by: process {pid} (`bcow serve disk.bcow --socket=socket`) serves {disk} at \
         nbd+unix:///?socket="
    );
    for command in [
        &["resize", "disk.bcow", "+1M"][..],
        &["fsck", "--repair", "disk.bcow"],
        &["fsck", "disk.bcow"],
        &["inspect", "disk.bcow"],
    ] {
        let shown = sandbox.shown(command);
        if command[0] != "inspect" {
            assert!(shown.contains(&line), "{shown}");
        }
        let note = format!("bcow serve, process {pid}");
        assert!(shown.contains(&note), "{shown}");
    }
    // A reader leaves no note, and is named all the same.
    server.end();
    let reader = fs::File::open(sandbox.path("disk.bcow")).unwrap();
    reader.try_lock_shared().unwrap();
    let shown = sandbox.shown(&["resize", "disk.bcow", "+1M"]);
    let reader = format!("\n  caused by: process {} (`", std::process::id());
    assert!(shown.contains("in use by another program\n"), "{shown}");
    assert!(shown.contains(&reader), "{shown}");
}

#[test]
fn request_that_fails_at_a_disk_is_logged_with_its_file() {
    let sandbox = Sandbox::with_image();
    sandbox.damage_su("image.bcow", 5000);
    let mut server = serve(&sandbox, "image.bcow");
    let mut log = BufReader::new(server.0.stderr.take().unwrap());
    let mut client = UnixStream::connect(sandbox.path("socket")).unwrap();
    // Old-style answer to "export name" without more: the fixed newstyle handshake (NBD,
    // doc/proto.md).
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    client.write_all(&hello).unwrap();
    let mut size_and_flags = [0; 10];
    client.read_exact(&mut size_and_flags).unwrap();
    let size = u64::from_be_bytes(size_and_flags[..8].try_into().unwrap());
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend([0; 12]);
    request.extend(0_u64.to_be_bytes());
    request.extend((size as u32).to_be_bytes());
    client.write_all(&request).unwrap();
    let mut line = String::new();
    log.read_line(&mut line).unwrap();
    let image = sandbox.path("").canonicalize().unwrap().join("image.bcow");
    let expected = format!(
        "{}: Read of {size} bytes at byte 0 failed: block at byte",
        image.display()
    );
    assert!(line.contains(&expected), "{line}");
    drop(server);
}

#[test]
fn extract_with_keep_going_names_damaged_files_and_extracts_the_rest() {
    let sandbox = Sandbox::with_image();
    sandbox.damage_su("image.bcow", 5000);
    // By default the extraction ends at the first damaged file, here before any other.
    let shown = sandbox.shown(&["extract", "image.bcow", "usr", "out"]);
    assert!(
        shown.contains("\nerror: cannot read \"usr/bin/su\" in image.bcow\n")
            || shown.contains("usr/bin/su in image.bcow\n"),
        "{shown}"
    );
    assert!(
        shown.ends_with(
            "hint: --keep-going extracts all parts that can be read\n--- exit status 1\n"
        ),
        "{shown}"
    );
    let args = words("extract --keep-going --no-same-owner image.bcow all");
    let output = sandbox.run(&args);
    let shown = crate::support::show(&args, &output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    for name in ["usr/bin/su", "usr/bin/sudo"] {
        let line = shown.lines().find(|line| {
            line.starts_with("error: cannot read") && line.contains(&format!("/{name} in"))
        });
        assert!(line.is_some(), "{name} is named: {shown}");
        assert!(!sandbox.path("all").join(name).exists(), "{name}");
    }
    assert!(shown.contains("  caused by: block at byte"), "{shown}");
    assert!(
        shown.contains("\nerror: 2 parts of the image could not be read and are missing in all\n"),
        "{shown}"
    );
    assert_eq!(sandbox.read("all/etc/motd"), b"Welcome.\n");
    assert_eq!(sandbox.read("all/var/data"), noise(100_000));
    assert_eq!(sandbox.read("all/var/zeros"), vec![0; 300_000]);
    let left: Vec<_> = fs::read_dir(sandbox.path("all/usr/bin")).unwrap().collect();
    assert!(left.is_empty(), "nothing half-made: {left:?}");
    // What the host refuses is no damage, and ends it.
    let again = sandbox.shown(&args);
    assert!(again.contains("caused by: file exists\n"), "{again}");
    // A sound image is unpacked as ever.
    let sound = Sandbox::with_image();
    sound.ok(&args);
    assert_eq!(sound.read("all/usr/bin/sudo"), noise(10_000));
}

#[test]
fn verdict_clean_covers_checked_parts_only() {
    let sandbox = Sandbox::with_image();
    sandbox.damage_su("image.bcow", 5000);
    for repair in [
        &["fsck", "image.bcow"][..],
        &["fsck", "--repair", "image.bcow"],
    ] {
        let shown = sandbox.shown(repair);
        assert!(shown.contains("\nimage.bcow: structure clean ("), "{shown}");
        assert!(shown.contains(", data not checked)\n"), "{shown}");
        assert!(shown.ends_with("--- exit status 0\n"), "{shown}");
        let hint = "hint: the content of blocks was not checked: \
                    `bcow fsck --data image.bcow` reads it too\n";
        assert_eq!(
            shown.contains(hint),
            repair.contains(&"--repair"),
            "{shown}"
        );
    }
    let json = sandbox.json(&["fsck", "--json", "image.bcow"]);
    assert_eq!(
        (&json["verdict"], &json["checked"]),
        (&"clean".into(), &"structure".into())
    );
    let shown = sandbox.shown(&["fsck", "--repair", "--data", "image.bcow"]);
    for text in [
        "\nimage.bcow: damaged: ",
        "error file-data: /usr/bin/su: ",
        "error file-data: /usr/bin/sudo: ",
        "\nhint: `bcow convert` creates the image again",
    ] {
        assert!(shown.contains(text), "{shown}");
    }
    assert!(shown.ends_with("--- exit status 4\n"), "{shown}");
}

#[test]
fn a_copy_restores_the_bytes_of_an_image() {
    let sandbox = Sandbox::with_image();
    let good = sandbox.read("image.bcow");
    sandbox.write("copy.bcow", &good);
    sandbox.damage_su("image.bcow", 5000);
    sandbox.patch("image.bcow", |bytes| bytes.truncate(good.len() - 1));
    let shown = sandbox.shown(&["fsck", "image.bcow"]);
    let advice = "hint: `bcow fsck --repair --from COPY image.bcow` restores it";
    assert!(shown.contains(advice), "{shown}");
    let repair = ["fsck", "--repair", "--from", "copy.bcow", "image.bcow"];
    snapshot!(sandbox.shown(&repair), @r"
    $ bcow fsck --repair --from copy.bcow image.bcow
    repaired: image.bcow: 15.0 KiB in 2 ranges restored from copy.bcow
    image.bcow: clean (0 tables, 30 blocks, 19 inodes, 120 KiB read)
    --- exit status 1
    ");
    assert_eq!(sandbox.read("image.bcow"), good);
    snapshot!(sandbox.shown(&repair), @r"
    $ bcow fsck --repair --from copy.bcow image.bcow
    image.bcow: clean (0 tables, 30 blocks, 19 inodes, 120 KiB read)
    --- exit status 0
    ");

    let about = sandbox.json(&["inspect", "--json", "copy.bcow"]);
    let root = about["merkle"]["root"].as_str().unwrap();
    let root = root.trim_start_matches("sha256:");
    sandbox.patch("image.bcow", |bytes| bytes[..1024].fill(0));
    assert_eq!(sandbox.run(&repair).status.code(), Some(8));
    let pinned = [&repair[..], &["--root-hash", root]].concat();
    assert_eq!(sandbox.run(&pinned).status.code(), Some(1));
    assert_eq!(sandbox.read("image.bcow"), good);

    sandbox.write("other.tar", &crate::support::sample()[..]);
    sandbox.ok(&["convert", "--block-size=4K", "tar:other.tar", "other.bcow"]);
    let other = ["fsck", "--repair", "--from", "other.bcow", "image.bcow"];
    snapshot!(sandbox.shown(&other), @r"
    $ bcow fsck --repair --from other.bcow image.bcow
    --- stderr
    error: cannot restore image.bcow: other.bcow has no copy of it
    hint: `bcow inspect` shows the Merkle root of each; copies of an image have the same
    --- exit status 8
    ");
    let itself = ["fsck", "--repair", "--from", "image.bcow", "image.bcow"];
    assert_eq!(sandbox.run(&itself).status.code(), Some(8));
    let without = ["fsck", "--from", "copy.bcow", "image.bcow"];
    assert_eq!(sandbox.run(&without).status.code(), Some(16));
    sandbox.ok(&["create", "disk.bcow", "-s", "1M"]);
    let disk = ["fsck", "--repair", "--from", "copy.bcow", "disk.bcow"];
    let why = "the file has no Merkle tree, so a copy cannot be compared with it";
    let refused = format!("error: cannot restore disk.bcow: {why}\n--- exit status 8\n");
    assert!(sandbox.shown(&disk).ends_with(&refused));
    assert_eq!(sandbox.read("image.bcow"), good);
}

#[test]
fn a_copy_restores_the_layers_of_a_layout() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &crate::support::sample());
    sandbox.layout("source", "x", &["sample.tar"]);
    for layout in ["oci:store:x", "oci:copy:x"] {
        sandbox.ok(&["convert", "oci:source:x", layout]);
    }
    let blobs = || {
        let blobs = fs::read_dir(sandbox.path("store/blobs/sha256")).unwrap();
        let mut blobs: Vec<_> = blobs.map(|blob| blob.unwrap().path()).collect();
        blobs.sort();
        let read = |path: &PathBuf| (path.clone(), fs::read(path).unwrap());
        blobs.iter().map(read).collect::<Vec<_>>()
    };
    let good = blobs();
    for (path, bytes) in &good {
        if !bytes.starts_with(b"{") {
            // The layer loses both header slots, the stack some bytes.
            let mut bytes = bytes.clone();
            if bytes.len() == good.iter().map(|(_, bytes)| bytes.len()).max().unwrap() {
                bytes[..1024].fill(0)
            } else {
                bytes[1024..1100].fill(0)
            }
            fs::write(path, bytes).unwrap();
        }
    }
    assert!(blobs() != good);
    let repair = ["fsck", "--repair", "--from", "oci:copy:x", "oci:store:x"];
    assert_eq!(sandbox.run(&repair).status.code(), Some(1));
    assert!(blobs() == good);
    sandbox.ok(&["fsck", "--data", "oci:store:x"]);
}

#[test]
fn advice_about_a_damaged_layer_mends_the_layout() {
    let sandbox = Sandbox::new();
    sandbox.write("sample.tar", &crate::support::sample());
    sandbox.layout("source", "x", &["sample.tar"]);
    let convert = words("convert --compress=none --block-size=4K oci:source:x oci:store:x");
    sandbox.ok(&convert);
    let check = ["fsck", "--data", "oci:store:x"];
    sandbox.ok(&check);
    // The largest file is the layer.
    let blobs = fs::read_dir(sandbox.path("store/blobs/sha256")).unwrap();
    let blobs = blobs.map(|blob| blob.unwrap().path());
    let layer = blobs
        .max_by_key(|blob| blob.metadata().unwrap().len())
        .unwrap();
    let layer = layer.strip_prefix(sandbox.path("")).unwrap().to_owned();
    let damage = || sandbox.damage_su(layer.to_str().unwrap(), 5000);
    damage();
    let shown = sandbox.shown(&check);
    let layer_name = layer.display();
    for hint in [
        &*format!("the damaged file is {layer_name}: remove it before"),
        "`bcow convert SOURCE oci:store:x` replaces damaged and missing files\n",
    ] {
        assert!(shown.contains(&format!("\nhint: {hint}")), "{shown}");
    }
    let saved = sandbox.run(&["extract", "--keep-going", "oci:store:x", "saved"]);
    assert_eq!(saved.status.code(), Some(1));
    assert_eq!(sandbox.read("saved/var/data"), noise(100_000));
    sandbox.ok(&convert);
    sandbox.ok(&check);
    damage();
    fs::remove_file(sandbox.path(&layer)).unwrap();
    sandbox.ok(&convert);
    sandbox.ok(&check);
    // A stack whose layer is missing is not to be removed itself.
    fs::remove_file(sandbox.path(&layer)).unwrap();
    let shown = sandbox.shown(&check);
    assert!(!shown.contains("remove it"), "{shown}");
    let args = words("extract --keep-going --no-same-owner oci:store:x less");
    let less = crate::support::show(&args, &sandbox.run(&args));
    assert!(less.contains("/var/data in oci:store:x\n"), "{less}");
    assert!(less.ends_with("--- exit status 1\n"), "{less}");
    assert!(fs::symlink_metadata(sandbox.path("less/bin")).is_ok_and(|bin| bin.is_symlink()));
    assert!(!sandbox.path("less/var/data").exists());
    sandbox.ok(&convert);
    sandbox.ok(&check);
}

/// What a command says on standard error, with these global options.
fn said(sandbox: &Sandbox, options: &[&str], command: &[&str]) -> String {
    let output = sandbox.run(&[options, command].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn verbose_commands_log_reads_checks_and_writes() {
    let sandbox = Sandbox::with_image();
    sandbox.layout("source", "x", &["sample.tar"]);
    let convert = ["convert", "oci:source:x", "v.bcow"];
    let to_layout = ["convert", "oci:source:x", "oci:store:x"];
    let check = ["fsck", "--data", "oci:store:x"];
    for command in [&convert[..], &to_layout, &check] {
        for quiet in [&[][..], &["-q"]] {
            let said = said(&sandbox, quiet, command);
            assert!(!said.contains("INFO") && !said.contains("DEBUG"), "{said}");
        }
    }
    let said = |options: &[&str], command: &[&str]| said(&sandbox, options, command);
    let logged = said(&["-v"], &convert);
    for text in [
        "source oci:source:x: manifest sha256:",
        ", 1 layers",
        "entries, ",
        " bytes of archive from ",
        "written: ",
        "verified in ",
    ] {
        assert!(logged.contains(text), "{text}: {logged}");
    }
    assert!(!logged.contains("DEBUG"), "{logged}");
    let logged = said(&["-vv"], &convert);
    assert!(
        logged.contains("application/vnd.oci.image.layer.v1.tar, "),
        "{logged}"
    );
    let logged = said(&["-v"], &to_layout);
    assert!(logged.contains("there already, as sha256:"), "{logged}");
    assert!(logged.contains("merged 1 layers in "), "{logged}");
    let logged = said(&["-v"], &check);
    for text in [
        "checking ",
        ", every byte, with ",
        " tables and ",
        "file system of 19 inodes checked",
    ] {
        assert!(logged.contains(text), "{text}: {logged}");
    }
    assert!(!logged.contains("DEBUG"), "{logged}");
    let more = said(&["-vv"], &check);
    for text in [": file system of ", " further devices", "DEBUG"] {
        assert!(more.contains(text), "{text}: {more}");
    }
    let logged = said(&["-vv"], &["cat", "oci:store:x", "etc/motd"]);
    assert!(logged.contains("oci:store:x: opened "), "{logged}");
    assert!(logged.contains("regions of 2^"), "{logged}");
}

#[test]
fn verbose_mount_logs_its_options() {
    let Some(place) = Place::new() else { return };
    let logged = said(&place.0, &["-v"], &["mount", "image.bcow", "mnt"]);
    let how = if is_root() { " by mount(2)" } else { " by fusermount3" };
    for text in ["image.bcow: opened ", how, "ready at ", "no upper"] {
        assert!(logged.contains(text), "{text}: {logged}");
    }
    assert!(!logged.contains("DEBUG"), "{logged}");
    assert!(place.unmounted().contains("status 0"));
    let more = said(&place.0, &["-vv"], &["mount", "image.bcow", "mnt"]);
    assert!(
        more.contains("DEBUG") && more.len() > logged.len(),
        "{more}"
    );
    assert!(place.unmounted().contains("status 0"));
}

#[test]
fn the_filter_of_the_environment_selects_what_is_logged() {
    let sandbox = Sandbox::with_image();
    let logged = |filter: &str, command: &[&str]| {
        let mut command = sandbox.command(command);
        let output = command.env("BCOW_LOG", filter).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        said
    };
    let convert = ["convert", "--force", "tar:sample.tar", "copy.bcow"];
    let check = ["fsck", "--data", "image.bcow"];
    for (command, info) in [
        (&convert[..], "verified in "),
        (&check[..], ", every byte, with "),
    ] {
        assert!(!logged("warn", command).contains("INFO"));
        let said = logged("info", command);
        assert!(said.contains(info) && !said.contains("DEBUG"), "{said}");
        let said = logged("trace", command);
        assert!(said.contains(info) && said.contains("DEBUG"), "{said}");
        // Only one of the modules.
        assert!(!logged("warn,no_such_module=trace", command).contains("INFO"));
    }
    if let Some(place) = Place::new() {
        let mut command = place.0.command(&["mount", "image.bcow", "mnt"]);
        let output = command.env("BCOW_LOG", "bcow=info").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("ready at "), "{said}");
        assert!(place.unmounted().contains("status 0"));
    }
}

#[test]
fn replaced_changed_and_removed_images_are_named() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&words("mount image.bcow mnt"));
    let image = place.0.path("image.bcow");
    let state = || statistics(&place)["image"]["file_state"].clone();
    assert_eq!(state(), "same");
    assert!(!place.0.shown(&["stats", "mnt"]).contains("image file:"));
    let file = fs::File::options().append(true).open(&image).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    assert_eq!(state(), "changed");
    fs::rename(&image, place.0.path("old.bcow")).unwrap();
    assert_eq!(state(), "removed");
    fs::copy(place.0.path("old.bcow"), &image).unwrap();
    assert_eq!(state(), "replaced");
    let shown = place.0.shown(&["stats", "mnt"]);
    assert!(
        shown.contains("image.bcow was replaced since the mount\n"),
        "{shown}"
    );
    assert!(place.unmounted().contains("status 0"));
}

#[test]
fn rates_of_a_mount_are_printed_in_each_interval() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&words("mount image.bcow mnt"));
    let mut stats = place.0.command(&["stats", "mnt", "--interval=1"]);
    let mut running = stats.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    assert!(next().trim_start().starts_with("REQ/S "));
    // A further name is a request each.
    let end = Instant::now() + Duration::from_secs(60);
    for number in 0.. {
        fs::metadata(place.file(&format!("missing-{number}"))).unwrap_err();
        std::thread::sleep(Duration::from_millis(10));
        if number % 100 == 99 {
            let line = next();
            let rate: u64 = line.split_whitespace().next().unwrap().parse().unwrap();
            if rate > 0 {
                break;
            }
            assert!(Instant::now() < end, "{line}");
        }
    }
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(place.unmounted().contains("status 0"));
}
