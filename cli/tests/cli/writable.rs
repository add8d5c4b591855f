//! `bcow mount --upper`, `bcow stats` and `mount.bcow` on real mounts.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::diagnostics::statistics;
use crate::mount::Place;
use crate::support::{Sandbox, is_root, missing, noise, snapshot, words};

impl Place {
    /// The process that serves the mount.
    fn server(&self) -> Pid {
        Pid::from_raw(statistics(self)["process"]["pid"].as_i64().unwrap() as i32).unwrap()
    }
}

#[test]
fn limits_of_the_shell_are_not_those_of_the_mount() {
    let Some(place) = Place::new() else { return };
    let mount = ["mount", "--upper=upper", "image.bcow", "mnt"];
    let limited = place.0.command(&mount);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 1 && umask 777 && exec \"$0\" \"$@\""]);
    shell.arg(limited.get_program()).args(limited.get_args());
    shell.envs(
        limited
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    shell.current_dir(place.0.path("."));
    let mounted = shell.output().unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
    let mode = fs::metadata(place.0.path("upper/.bcow")).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o700);
    let data = noise(1 << 20);
    // An ordinary user cannot raise the limit: then the write fails, and the mount stays.
    let written = fs::write(place.file("var/large"), &data);
    match written {
        Ok(()) => assert!(fs::read(place.file("var/large")).unwrap() == data),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge),
    }
    assert_eq!(place.unmounted(), "$ bcow umount mnt\n--- exit status 0\n");
}

#[test]
fn written_data_is_there_after_every_kind_of_unmount() {
    let Some(place) = Place::new() else { return };
    let mut expected = noise(100_000);
    for (round, how) in ["bcow", "umount", "fusermount3", "SIGTERM", "bcow"]
        .into_iter()
        .enumerate()
    {
        // At once after the unmount: the mount waits for a process that still has the upper.
        place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
        assert_eq!(fs::read(place.file("var/data")).unwrap(), expected, "{how}");
        let at = 10_000 * round + 777;
        expected[at..at + 3].copy_from_slice(b"new");
        let file = fs::File::options()
            .write(true)
            .open(place.file("var/data"))
            .unwrap();
        file.write_all_at(b"new", at as u64).unwrap();
        drop(file);
        fs::write(place.file(&format!("etc/round{round}")), how).unwrap();
        match how {
            "bcow" => assert_eq!(place.unmounted(), "$ bcow umount mnt\n--- exit status 0\n"),
            "SIGTERM" => {
                let server = place.server();
                kill_process(server, Signal::TERM).unwrap();
                let start = Instant::now();
                while place.file("etc").exists() {
                    assert!(start.elapsed() < Duration::from_secs(20), "still mounted");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            program => {
                let mut command = Command::new(program);
                if program == "fusermount3" {
                    command.arg("-u");
                }
                let unmounted = command.arg(place.0.path("mnt")).output();
                if let Err(error) = &unmounted {
                    missing(program, error);
                    assert!(place.unmounted().contains("status 0"));
                    continue;
                }
                assert!(unmounted.unwrap().status.success(), "{program}");
            }
        }
    }
    place
        .0
        .ok(&["mount", "--upper=upper", "-o", "ro", "image.bcow", "mnt"]);
    assert_eq!(fs::read(place.file("var/data")).unwrap(), expected);
    for round in 0..5 {
        assert!(place.file(&format!("etc/round{round}")).exists(), "{round}");
    }
}

#[test]
fn killed_server_leaves_an_upper_that_mounts_again() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    let path = place.file("var/data");
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"kept", 50_000).unwrap();
    file.sync_all().unwrap();
    kill_process(place.server(), Signal::KILL).unwrap();
    drop(file);
    // The dead mount is taken away, too.
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    let mut expected = noise(100_000);
    expected[50_000..50_004].copy_from_slice(b"kept");
    assert_eq!(fs::read(&path).unwrap(), expected);
    kill_process(place.server(), Signal::KILL).unwrap();
    let unmounted = place.unmounted();
    assert!(
        unmounted.contains("its process had been killed") && unmounted.ends_with("status 1\n"),
        "{unmounted}"
    );
}

#[test]
fn unmount_fails_if_the_upper_was_removed() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    fs::write(place.file("etc/new"), "new").unwrap();
    fs::remove_dir_all(place.0.path("upper")).unwrap();
    let unmounted = place.unmounted();
    assert!(
        unmounted.contains("/upper was removed while it was mounted: all its changes are lost\n")
            && unmounted.ends_with("status 1\n"),
        "{unmounted}"
    );
}

#[test]
fn root_directory_is_refused_and_no_upper_is_made() {
    let Some(place) = Place::new() else { return };
    std::os::unix::fs::symlink("/", place.0.path("link")).unwrap();
    for root in ["/", "//", "/tmp/..", "link"] {
        for options in [&[][..], &["--driver=kernel"], &["--pool=none"]] {
            let arguments = [&["mount", "--upper=upper"], options, &["image.bcow", root]].concat();
            let shown = place.0.shown(&arguments);
            assert!(
                shown.contains(" is the root directory\n") && shown.ends_with("status 2\n"),
                "{shown}"
            );
            assert!(!place.0.path("upper").exists());
        }
    }
}

#[test]
fn mount_that_a_path_belongs_to_is_named() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    let mnt = place.0.path("mnt").canonicalize().unwrap();
    for (path, relation) in [
        ("mnt/etc", "inside"),
        ("image.bcow", "the image of"),
        ("upper", "the upper of"),
    ] {
        for command in ["stats", "umount"] {
            let shown = place.0.shown(&[command, path]);
            let hint = format!(
                "hint: it is {relation} the mount at {0}: `bcow {command} {0}`\n",
                mnt.display()
            );
            assert!(
                shown
                    .replace("[HERE]", &mnt.parent().unwrap().to_string_lossy())
                    .contains(&hint),
                "{shown}{hint}"
            );
        }
    }
    place.unmounted();
}

#[test]
fn mount_whose_server_hangs_can_be_unmounted() {
    let Some(place) = Place::new() else { return };
    let mount = ["mount", "--upper=upper", "image.bcow", "mnt"];
    place.0.ok(&mount);
    fs::create_dir(place.0.path("other")).unwrap();
    fs::write(place.file("etc/new"), "new").unwrap();
    let server = place.server();
    kill_process(server, Signal::STOP).unwrap();
    // One that still has a question in hand when it stops keeps the mount in use.
    let start = Instant::now();
    let is_stopped = || {
        let mut tasks = fs::read_dir(format!("/proc/{server}/task")).unwrap();
        tasks.all(|task| state_of(&task.unwrap().path()) == Some('T'))
    };
    while !is_stopped() {
        assert!(start.elapsed() < Duration::from_secs(20), "not stopped");
        std::thread::sleep(Duration::from_millis(5));
    }
    let shown = [
        &["stats", "--timeout=1", "mnt"][..],
        &["mount", "image.bcow", "mnt"],
        &["mount", "--upper=upper", "image.bcow", "other"],
        &["fsck", "upper"],
        &["resize", "mnt", "1G"],
    ]
    .map(|args| place.0.shown(args));
    let unmounted = place.unmounted();
    let shown = [&shown[..], &[unmounted]].concat().join("\n");
    let shown = without_chance(&place, &shown).replace(&format!("-CONT {server}"), "-CONT [PID]");
    kill_process(server, Signal::CONT).unwrap();
    snapshot!(shown);
    place.0.ok(&mount);
    assert_eq!(fs::read(place.file("etc/new")).unwrap(), b"new");
}

#[test]
fn mount_that_was_bound_elsewhere_is_named_and_ends_there_too() {
    let Some(place) = Place::new() else { return };
    if !is_root() {
        return;
    }
    // In a mount namespace of its own, where mounts can be moved.
    let script = format!(
        r#"{0} mount --upper=upper image.bcow mnt || exit 99
        mkdir bound moved && mount --bind mnt bound || exit 99
        {0} umount mnt
        echo new >bound/new
        mount --move bound moved || exit 99
        kill $({0} stats --json moved | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p')
        timeout 20 sh -c 'while grep -q "$1" /proc/self/mountinfo; do :; done' sh "$PWD/moved"
        echo $?"#,
        env!("CARGO_BIN_EXE_bcow")
    );
    let Some(output) = place.0.in_namespace(&script, &[]) else {
        return;
    };
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains(" continues: the image is also mounted at ") && said.ends_with("/bound\n"),
        "{said}"
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "0\n", "{said}");
    assert_eq!(fs::read(place.0.path("upper/new")).unwrap(), b"new\n");
}

/// The state of a process or thread, by its directory in /proc.
fn state_of(task: &Path) -> Option<char> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Whether a process runs, and is not just waiting for its parent to notice its end.
fn is_running(process: Pid) -> bool {
    !matches!(
        state_of(Path::new(&format!("/proc/{process}"))),
        None | Some('Z')
    )
}

#[test]
fn unmount_waits_for_a_mount_that_became_read_only() {
    let Some(place) = Place::new() else { return };
    if !is_root() {
        return;
    }
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    fs::write(place.file("etc/new"), "new").unwrap();
    let server = place.server();
    let output = Command::new("mount")
        .args(["-i", "-o", "remount,ro"])
        .arg(place.0.path("mnt"))
        .output();
    if let Err(error) = &output {
        return missing("mount", error);
    }
    assert!(output.unwrap().status.success());
    assert_eq!(place.unmounted(), "$ bcow umount mnt\n--- exit status 0\n");
    assert!(!is_running(server));
}

/// Not even root may look into a mount that is for its user only.
#[test]
fn root_unmounts_a_mount_of_another_user_and_waits() {
    let Some(place) = Place::new() else { return };
    if !is_root() {
        return;
    }
    const OVERFLOW_UID: u32 = 65_534;
    place.0.open_to_others();
    for name in ["mnt", "user-upper"] {
        let _ = fs::create_dir(place.0.path(name));
        std::os::unix::fs::chown(place.0.path(name), Some(OVERFLOW_UID), Some(OVERFLOW_UID))
            .unwrap();
    }
    let mounted = place
        .0
        .command_as(
            OVERFLOW_UID,
            &["mount", "--upper=user-upper", "image.bcow", "mnt"],
        )
        .output()
        .unwrap();
    if !mounted.status.success() {
        let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
        return missing("mounts of ordinary users", &std::io::Error::other(said));
    }
    let looked = fs::metadata(place.file("etc")).map(drop);
    assert!(looked.is_err(), "root is let in");
    assert_eq!(place.unmounted(), "$ bcow umount mnt\n--- exit status 0\n");
    // No process has the upper any more, or the commit would wait.
    let lock = Command::new("sh")
        .args(["-c", "grep -l user-uppe[r] /proc/[0-9]*/cmdline"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&lock.stdout), "");
}

#[test]
fn failed_writable_mount_has_a_reason() {
    let Some(place) = Place::new() else { return };
    let sandbox = &place.0;
    sandbox.write("text", b"no directory");
    fs::create_dir(sandbox.path("another")).unwrap();
    fs::create_dir(sandbox.path("mnt/inside")).unwrap();
    fs::create_dir_all(sandbox.path("around/mnt")).unwrap();
    sandbox.ok(&["convert", "dir:another", "another.bcow"]);
    sandbox.ok(&["mount", "--upper=used", "another.bcow", "another"]);
    let mut shown: Vec<_> = [
        &["mount", "-o", "rw", "image.bcow", "mnt"][..],
        &["mount", "--size-limit=1G", "image.bcow", "mnt"],
        &words("mount --upper=upper --sync=batch image.bcow mnt"),
        &words("mount --upper=upper --sync=batch=0 image.bcow mnt"),
        &words("mount --upper=upper --sketch=thin image.bcow mnt"),
        &words("mount --upper=upper --size-limit=many image.bcow mnt"),
        &["mount", "--cpus=1-", "image.bcow", "mnt"],
        &["mount", "--cpus=1023", "image.bcow", "mnt"],
        &["mount", "--metrics=nowhere", "image.bcow", "mnt"],
        &words("mount --metrics=unix:missing/socket image.bcow mnt"),
        &["mount", "--upper=mnt", "image.bcow", "mnt"],
        &["mount", "--upper=mnt/inside", "image.bcow", "mnt"],
        &["mount", "--upper=around", "image.bcow", "around/mnt"],
        &["mount", "--upper=text", "image.bcow", "mnt"],
        &["mount", "--upper=missing/upper", "image.bcow", "mnt"],
        &["mount", "--upper=used", "another.bcow", "mnt"],
        &["mount", "--upper=used/inside", "another.bcow", "mnt"],
    ]
    .into_iter()
    .map(|args| sandbox.shown(args))
    .collect();
    sandbox.ok(&["umount", "another"]);
    shown.push(sandbox.shown(&["mount", "--upper=used", "image.bcow", "mnt"]));
    assert!(!sandbox.path("upper").exists());
    snapshot!(without_chance(&place, &shown.join("\n")));
}

/// Paths and numbers that are others every time.
fn without_chance(place: &Place, text: &str) -> String {
    let here = place.0.path("");
    let here = here.to_str().unwrap().trim_end_matches('/');
    let text = text.replace(here, "[HERE]");
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("process ") {
        let (before, after) = rest.split_at(at + "process ".len());
        out.push_str(before);
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
        if rest.len() < after.len() {
            out.push_str("[PID]");
        }
    }
    out + rest
}

#[test]
fn limit_is_kept_and_space_comes_back() {
    let Some(place) = Place::new() else { return };
    let mount = words("mount --upper=upper --size-limit=1M image.bcow mnt");
    place.0.ok(&mount);
    // The upper's own directories and files count, as in du(1).
    let stored = || {
        statistics(&place)["upper"]["stored_bytes"]
            .as_u64()
            .unwrap()
    };
    let empty = stored();
    let error = fs::write(place.file("large"), noise(2_000_000)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
    let length = fs::metadata(place.file("large")).unwrap().len();
    assert_eq!(length, (1 << 20) - empty);
    fs::remove_file(place.file("large")).unwrap();
    fs::write(place.file("small"), noise(500_000)).unwrap();
    assert_eq!(stored(), empty + (492 << 10));
    let shown = format!(
        "stored:      {} KiB of 1 MiB, in 1 of 4,096 inodes\n",
        stored() >> 10
    );
    let text = || String::from_utf8(place.0.ok(&["stats", "mnt"])).unwrap();
    assert!(text().contains(&shown), "{}", text());
    assert!(place.unmounted().contains("status 0"));
    place.0.ok(&mount);
    assert!(text().contains(&shown), "{}", text());
}

#[test]
fn statistics_are_for_people_and_for_programs() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&words(
        "mount --upper=upper --sync=batch=8 --sandbox=off image.bcow mnt",
    ));
    let mut motd = fs::File::options()
        .append(true)
        .open(place.file("etc/motd"))
        .unwrap();
    motd.write_all(b"Changed.\n").unwrap();
    drop(motd);
    let file = fs::File::options()
        .write(true)
        .open(place.file("var/zeros"))
        .unwrap();
    file.write_all_at(b"x", 100_000).unwrap();
    file.sync_all().unwrap();
    // A request is counted after its reply, so the last one may still be missing.
    let start = Instant::now();
    let text = loop {
        let text = place.0.shown(&["stats", "mnt"]);
        let mut requests = ["lookup", "write", "fsync", "mean", "99.9%"].iter();
        if requests.all(|request| text.contains(request)) {
            break text;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{text}");
    };
    let before_requests = text.split("\n\n").next().unwrap();
    // Behind it is why the mount is not with the kernel driver: that depends on the user.
    assert!(text.contains("\ndriver:        fuse: the default for a new upper; "));
    let no_numbers: String = without_chance(&place, before_requests)
        .lines()
        .map(|line| match line.split_once(':') {
            Some((
                "cache" | "served by" | "identity" | "driver" | "saved" | "incomplete"
                | "in flight",
                _,
            )) => "...\n".to_owned(),
            _ => format!("{line}\n"),
        })
        .collect();
    snapshot!(no_numbers);
    let json = statistics(&place);
    assert_eq!(json["schema"], "bcow.stats/1");
    assert_eq!(json["upper"]["sync"], "batch=8");
    assert_eq!(json["upper"]["copied_whole"], 1);
    assert_eq!(json["upper"]["sketches"]["open"], 1);
    let fills = json["upper"]["sketches"]["fills"].as_object().unwrap();
    let completed: u64 = fills.values().filter_map(|count| count.as_u64()).sum();
    assert_eq!(completed, 1, "{json}");
    drop(file);
    assert!(place.unmounted().contains("status 0"));
    place.0.ok(&["mount", "image.bcow", "mnt"]);
    let json = statistics(&place);
    assert_eq!(json["upper"], serde_json::Value::Null);
    assert!(place.unmounted().contains("status 0"));
    let shown =
        [&["stats", "mnt"][..], &["stats", "/proc"], &["stats"]].map(|args| place.0.shown(args));
    snapshot!(shown.join("\n"));
}

#[test]
fn metrics_are_served_while_it_is_mounted() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&words(
        "mount --upper=upper --metrics=unix:metrics image.bcow mnt",
    ));
    let socket = place.0.path("metrics");
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    let mut client = UnixStream::connect(&socket).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for line in [
        "\nbcow_sketches_open 0\n",
        "mode=\"rw\"} 1\n",
        "bcow_sketch_fills_total{by=\"flush\"} 0\n",
    ] {
        assert!(answer.contains(line), "{answer}");
    }
    assert!(place.unmounted().contains("status 0"));
    assert!(!socket.exists());
}

/// A process that is ending its mount has the upper. `mount` waits for as long as that process
/// lives.
#[test]
fn waiting_for_an_upper_ends_with_a_signal() {
    let Some(place) = Place::new() else { return };
    place.0.ok(&["mount", "--upper=upper", "image.bcow", "mnt"]);
    place.unmounted();
    let ending = place.0.path(bcow_fuse::session::CLOSING.to_str().unwrap());
    fs::copy("/bin/sleep", &ending).unwrap();
    let mut ending = Command::new(ending).arg("600").spawn().unwrap();
    let lock = fs::File::create(place.0.path("upper/.bcow/lock")).unwrap();
    let note = format!("bcow mount, process {}, at elsewhere", ending.id());
    // A test that makes a mount namespace meanwhile keeps the mount, and its lock, a little longer.
    let start = Instant::now();
    let held = loop {
        match bcow::lock::FileLock::exclusive(&lock, &note) {
            Ok(held) => break held,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut waiting = place
        .0
        .command(&["mount", "-f", "--upper=upper", "image.bcow", "mnt"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 7];
    let stderr = waiting.stderr.as_mut().unwrap();
    stderr.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"waiting");
    let pid = Pid::from_raw(waiting.id() as i32).unwrap();
    // Tests that run in the background of a shell inherit that SIGINT is ignored.
    kill_process(pid, Signal::TERM).unwrap();
    let ended = waiting.wait().unwrap();
    assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()));
    drop((held, lock));
    ending.kill().unwrap();
    ending.wait().unwrap();
}

#[test]
fn server_keeps_to_its_cpus() {
    let Some(place) = Place::new() else { return };
    place
        .0
        .ok(&["mount", "--upper=upper", "--cpus=0", "image.bcow", "mnt"]);
    let server = place.server();
    for task in fs::read_dir(format!("/proc/{server}/task")).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        assert!(status.contains("\nCpus_allowed_list:\t0\n"), "{status}");
    }
}

#[test]
fn mount_8_and_fstab_mount_images() {
    let Some(place) = Place::new() else { return };
    if !is_root() {
        return;
    }
    for program in ["mount", "unshare"] {
        if let Err(error) = Command::new(program).arg("--version").output() {
            return missing(program, &error);
        }
    }
    let sandbox = &place.0;
    sandbox.write(
        "fstab",
        format!(
            "{0}/image.bcow {0}/mnt bcow \
             upper={0}/upper,noauto,nofail,x-any=thing,size_limit=1M,cpus=\"0\" 0 0\n",
            sandbox.path("").to_str().unwrap().trim_end_matches('/')
        )
        .as_bytes(),
    );
    // In a mount namespace of its own, with the helper where mount(8) looks for it.
    let script = format!(
        "set -e
         mkdir sbin; ln -s {} sbin/mount.bcow
         mount -t overlay -o lowerdir=sbin:$(readlink -f /sbin) none $(readlink -f /sbin)
         shown() {{ grep \" $PWD/mnt \" /proc/self/mountinfo | cut -d' ' -f6,9; }}
         mount -T fstab $PWD/mnt; shown
         echo written > mnt/file; umount mnt
         mount -t bcow image.bcow mnt -o upper=upper,nosuid,noatime; shown; cat mnt/file; umount mnt
         mount -t bcow image.bcow mnt; shown
         mount -f -t bcow image.bcow mnt
         mount -t bcow image.bcow mnt -o remount,ro || echo refused
         umount mnt
         mount -t bcow image.bcow mnt -o upper=upper,surprise || echo refused $?
         mount -t bcow missing.bcow mnt > /dev/null 2>&1 || echo failed $?",
        env!("CARGO_BIN_EXE_bcow")
    );
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .current_dir(sandbox.path(""))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let overlay = text(&output.stderr);
    if overlay.contains("overlay") {
        return missing("overlayfs", &std::io::Error::other(overlay));
    }
    let shown = format!("{}---\n{overlay}", text(&output.stdout));
    snapshot!(without_chance(&place, &shown));
    let help = Sandbox::new();
    let helper = help.path("mount.bcow");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_bcow"), &helper).unwrap();
    let output = Command::new(&helper).arg("-h").output().unwrap();
    assert!(text(&output.stdout).starts_with("Usage: mount.bcow IMG DIR"));
    // The statuses are those of mount(8).
    let status = |arguments: &[&str]| {
        let output = Command::new(&helper).args(arguments).output().unwrap();
        output.status.code()
    };
    assert_eq!(status(&[]), Some(1));
    assert_eq!(status(&["a", "b", "-o", "surprise"]), Some(1));
    assert_eq!(status(&["missing.bcow", "mnt"]), Some(32));
}

#[test]
fn output_of_a_command_does_not_replace_its_image() {
    let sandbox = Sandbox::with_image();
    fs::create_dir(sandbox.path("upper")).unwrap();
    std::os::unix::fs::symlink("image.bcow", sandbox.path("link")).unwrap();
    let before = sandbox.read("image.bcow");
    let commit = ["commit", "image.bcow", "--upper=upper"];
    let export = ["export", "image.bcow", "--to"];
    for (command, rest) in [
        (&commit, &["tar:image.bcow"][..]),
        (&commit, &["tar:./link"]),
        (&commit, &["--flatten", "image.bcow"]),
        (&export, &["tar", "-o", "image.bcow"]),
        (&export, &["tar", "-o", "link"]),
        (&export, &["erofs", "-o", "image.bcow"]),
        (&export, &["raw", "-o", "image.bcow"]),
    ] {
        let args = [&command[..], rest].concat();
        let shown = sandbox.shown(&args);
        assert!(shown.contains("image.bcow is made of it"), "{shown}");
        assert!(!shown.contains("status 0"), "{shown}");
        assert!(sandbox.read("image.bcow") == before, "{shown}");
    }
    assert_eq!(
        sandbox.names(),
        ["image.bcow", "link", "sample.tar", "upper"]
    );
    sandbox.ok(&[&commit[..], &["tar:other"]].concat());
}

#[test]
fn upper_of_an_image_with_layers_is_checked_against_them() {
    let Some(place) = Place::new() else { return };
    place.commit_layer();
    let sandbox = &place.0;
    sandbox.ok(&["mount", "--upper=upper", "image.bcow", "layer.bcow", "mnt"]);
    let file = fs::File::options().write(true).open(place.file("var/data"));
    file.unwrap().write_all_at(b"changed", 5000).unwrap();
    assert!(place.unmounted().contains("status 0"));

    let unchecked = sandbox.shown(&["fsck", "upper"]);
    let warning = "the image image.bcow is not usable, so references to it are not checked: ";
    let hint = "\nhint: name the image as LOWER, and its layers with --layer";
    assert!(
        unchecked.contains(warning) && unchecked.contains(hint),
        "{unchecked}"
    );
    for image in [&[][..], &["image.bcow"]] {
        let args = [&["fsck", "--json", "upper"], image, &["--layer=layer.bcow"]].concat();
        let output = sandbox.run(&args);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let checked = json["upper"]["image"].as_str().unwrap();
        assert!(checked.ends_with("image.bcow"), "{checked}");
    }
    let refused = sandbox.shown(&["fsck", "image.bcow", "--layer=layer.bcow"]);
    assert!(refused.ends_with("--- exit status 16\n"), "{refused}");
}

#[test]
fn fsck_of_an_upper_names_a_file_that_the_host_cannot_read() {
    let Some(place) = Place::new() else { return };
    if !is_root() {
        return;
    }
    // `--sketch=sparse` has no effect.
    let mount = ["mount", "--upper=upper", "--sketch=sparse"];
    place.0.ok(&[&mount[..], &["image.bcow", "mnt"]].concat());
    fs::write(place.file("new"), "new").unwrap();
    assert!(place.unmounted().contains("status 0"));
    // A regular file of some size that can only be written. Putting together image and upper would
    // find it, too.
    let unreadable = "/sys/bus/platform/drivers_probe";
    let script = format!(
        "mount --bind {unreadable} upper/new || exit 99
         mv image.bcow elsewhere
         {0} fsck upper; echo $?; {0} fsck --data upper; echo $?",
        env!("CARGO_BIN_EXE_bcow")
    );
    let Some(output) = place.0.in_namespace(&script, &[]) else {
        return;
    };
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        shown.contains("partial files)\n0\nerror upper-host: new: it cannot be read: "),
        "{shown}"
    );
    assert!(shown.ends_with("\n4\n"), "{shown}");
}
