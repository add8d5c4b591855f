//! The processes that use a mount, by name, for the error of an unmount.

use std::fs;
use std::path::{Path, PathBuf};

use bcow_fuse::MountedImage;
use bcow_images::names::printable;
use bcow_images::running;

/// The number of uses that are described one by one.
const SHOWN: usize = 5;

/// One line for each use of the mount that keeps it from being unmounted: the mounts inside it, and
/// the processes that this user may examine. This sends no request to the mount.
pub fn describe(mount: &MountedImage) -> Vec<String> {
    let mounts = mount.mounts_inside().into_iter();
    let mounts = mounts.map(|at| format!("another file system is mounted at {}", shown(&at)));
    let processes = processes_below(&mount.path).into_iter();
    let processes = processes.map(|(pid, path)| match running::command(pid) {
        Some(command) => format!("process {pid} (`{command}`) uses {}", shown(&path)),
        None => format!("process {pid} uses {}", shown(&path)),
    });
    let mut lines: Vec<String> = mounts.chain(processes).collect();
    if lines.len() > SHOWN {
        let more = lines.len() - (SHOWN - 1);
        lines.truncate(SHOWN - 1);
        lines.push(format!("{more} more mounts and processes use it"));
    }
    lines
}

fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy()).into_owned()
}

/// Each other process with a directory, an open file, or a mapped file or program at or below
/// `directory`, and one path of them.
fn processes_below(directory: &Path) -> Vec<(u32, PathBuf)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut users: Vec<(u32, PathBuf)> = processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| pid != std::process::id())
        .filter_map(|pid| Some((pid, used_path(pid, directory)?)))
        .collect();
    users.sort_unstable();
    users
}

/// The first path at or below `directory` that the process uses.
fn used_path(pid: u32, directory: &Path) -> Option<PathBuf> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let single = ["cwd", "root", "exe"].map(|name| process.join(name));
    let many = ["fd", "map_files"].into_iter().flat_map(|name| {
        let entries = fs::read_dir(process.join(name)).into_iter().flatten();
        entries.flatten().map(|entry| entry.path())
    });
    single
        .into_iter()
        .chain(many)
        .filter_map(|link| fs::read_link(link).ok())
        .find(|path| path.starts_with(directory))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_found_by_its_directory_and_by_its_files() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        assert_eq!(processes_below(&place), []);
        let file = place.join("file");
        fs::write(&file, "").unwrap();
        let started = |command: &mut Command| {
            let command = command.stdout(Stdio::piped()).stdin(Stdio::piped());
            let mut child = command.spawn().unwrap();
            // It has executed its program when the first byte arrives.
            let mut line = [0];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
            child
        };
        let script = "echo; read end";
        let mut inside = started(Command::new("sh").args(["-c", script]).current_dir(&place));
        let mut reading = started(
            Command::new("sh")
                .args(["-c", "exec 3< \"$0\"; echo; read end"])
                .arg(&file),
        );
        let mut expected = vec![(inside.id(), place.clone()), (reading.id(), file)];
        expected.sort_unstable();
        let found = processes_below(&place);
        for child in [&mut inside, &mut reading] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(found, expected);
        assert_eq!(processes_below(&place), []);
    }
}
