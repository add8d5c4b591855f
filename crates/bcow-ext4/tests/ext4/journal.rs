//! What the reader takes from the journal. debugfs writes the journals; e2fsck and the kernel judge
//! what is replayed of a damaged one.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use bcow_ext4::{FilesystemBytes, ReadError, Reader};
use bcow_testkit::{has_program, lacks, run, umount};
use tempfile::NamedTempFile;

use super::kernel::without_root;
use super::tree::{BLOCK, Image, image, of_all_kinds};

struct Host(fs::File);

impl FilesystemBytes for Host {
    fn bytes(&self) -> u64 {
        self.0.metadata().expect("metadata").len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buf, offset)
    }
}

fn open(path: &Path) -> Result<Reader, ReadError> {
    Reader::open(Box::new(Host(fs::File::open(path).expect("the file"))))
}

/// Runs commands of debugfs on an image. Returns what it prints.
fn debugfs(image: &Path, commands: &str) -> String {
    let script = NamedTempFile::new().expect("a file");
    fs::write(script.path(), commands).expect("writes");
    run(Command::new("debugfs")
        .args(["-w".as_ref(), "-f".as_ref(), script.path()])
        .arg(image))
}

fn content(byte: u8, blocks: u64) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a file");
    fs::write(file.path(), vec![byte; (blocks * BLOCK) as usize]).expect("writes");
    file
}

/// debugfs writes a transaction that changes three blocks, and one that revokes one of them.
#[test]
fn a_journal_of_each_kind_of_checksum_is_replayed() {
    if lacks("debugfs", has_program("debugfs")) {
        return;
    }
    let new = content(b'A', 3);
    for open_journal in ["jo", "jo -c -v 2", "jo -c -v 3"] {
        let image = image(&of_all_kinds(), 64 << 20);
        let commands = format!(
            "{open_journal}\njw -b 9000,9001,9002 {}\njw -r 9001 /dev/null\njc\n",
            new.path().display()
        );
        debugfs(image.file.path(), &commands);
        let reader = open(image.file.path()).expect("opens");
        let mut replayed: Vec<u64> = reader.replayed_blocks().collect();
        replayed.sort_unstable();
        assert_eq!(replayed, [9000, 9002], "{open_journal}");
        assert_eq!(reader.block(9002).expect("reads")[..], [b'A'; 4096]);
    }
}

/// A form of the journal.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// The compatible and the incompatible features that the superblock of the journal gets.
    features: [u32; 2],
    /// The command of debugfs that opens the journal.
    open: &'static str,
}

/// Without checksums; with checksums of version 1, 2 and 3; with asynchronous commits.
const FORMS: [Form; 6] = [
    Form {
        features: [0, 0],
        open: "jo",
    },
    Form {
        features: [1, 0],
        open: "jo",
    },
    Form {
        features: [1, 4],
        open: "jo",
    },
    Form {
        features: [0, 0],
        open: "jo -c -v 2",
    },
    Form {
        features: [0, 0],
        open: "jo -c -v 3",
    },
    Form {
        features: [0, 4],
        open: "jo -c -v 3",
    },
];

/// The blocks that the transactions of a test change.
const CHANGED: [u64; 2] = [9000, 9001];

/// A file system with a journal of three transactions: a change of each block, and a second change
/// of the first block. Each has a descriptor, one block of content, and a commit. A fourth revokes
/// the second block, unless the form has checksums of version 1: the checksum that debugfs writes
/// covers revoke blocks, and the one of the kernel does not.
struct Written {
    form: Form,
    image: Image,
    /// The blocks of the journal, as blocks of the file system.
    log: Vec<u64>,
}

impl Written {
    fn new(form: Form) -> Written {
        let image = image(&of_all_kinds(), 64 << 20);
        let start = debugfs(image.file.path(), "bmap <8> 0\n");
        let start = start.lines().last().and_then(|line| line.parse().ok());
        let start: u64 = start.expect("the first block of the journal");
        let count = if form.features[0] == 0 { 11 } else { 9 };
        let log: Vec<u64> = (start..=start + count).collect();
        let features = form.features.map(u32::to_be_bytes).concat();
        let file = image.file.as_file();
        file.write_all_at(&features, log[0] * BLOCK + 0x24)
            .expect("writes");
        let (old, new) = (content(b'A', 1), content(b'B', 1));
        let (old, new) = (old.path().display(), new.path().display());
        let open = form.open;
        let mut commands =
            format!("{open}\njw -b 9000 {old}\njw -b 9001 {old}\njw -b 9000 {new}\n");
        if count == 11 {
            commands += "jw -r 9001 /dev/null\n";
        }
        debugfs(image.file.path(), &(commands + "jc\n"));
        Written { form, image, log }
    }

    /// A copy with damage to blocks of the log.
    fn damaged(&self, damage: &[(usize, Damage)]) -> NamedTempFile {
        let copy = NamedTempFile::new().expect("a file");
        let status = Command::new("cp")
            .args([
                "--sparse=always".as_ref(),
                self.image.file.path(),
                copy.path(),
            ])
            .status();
        assert!(status.expect("cp runs").success());
        for (block, damage) in damage {
            let at = self.log[*block] * BLOCK;
            let mut bytes = [0; BLOCK as usize];
            copy.as_file().read_exact_at(&mut bytes, at).expect("reads");
            damage.apply(&mut bytes);
            copy.as_file().write_all_at(&bytes, at).expect("writes");
        }
        copy
    }
}

/// Damage to a block of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// The block was never written.
    Absent,
    /// Only the first half was written.
    Torn,
    /// A byte differs: of the checksum of a commit, or of the content of a block.
    Changed,
    /// The time of a commit is before all others.
    Old,
}

impl Damage {
    fn apply(self, block: &mut [u8; BLOCK as usize]) {
        match self {
            Damage::Absent => block.fill(0),
            Damage::Torn => block[BLOCK as usize / 2..].fill(0x5a),
            Damage::Changed => block[18] ^= 0x40,
            Damage::Old => block[48..56].fill(0),
        }
    }
}

/// The bytes of the changed blocks after a replay, or `None` for a refused journal.
type Verdict = Option<Vec<u8>>;

fn first_bytes(read: impl Fn(u64) -> u8) -> Verdict {
    Some(CHANGED.map(read).to_vec())
}

fn ours(path: &Path) -> Verdict {
    let reader = open(path).ok()?;
    first_bytes(|block| reader.block(block).expect("reads")[0])
}

fn in_place(file: &fs::File) -> Verdict {
    first_bytes(|block| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * BLOCK).expect("reads");
        byte[0]
    })
}

/// The verdict of e2fsck. It does not know commits of which only a part was written.
fn e2fsck(copy: &NamedTempFile) -> Verdict {
    // It repairs a journal that the kernel refuses.
    let text = run(Command::new("e2fsck")
        .args(["-y", "-E", "journal_only"])
        .arg(copy.path()));
    if !(text.contains("was corrupt") || text.contains("checksum error")) {
        in_place(copy.as_file())
    } else {
        None
    }
}

fn kernel(copy: &NamedTempFile) -> Verdict {
    let directory = tempfile::tempdir().expect("a directory");
    let mounted = Command::new("mount")
        .args(["-t", "ext4", "-o", "loop"])
        .args([copy.path(), directory.path()])
        .output()
        .expect("mount runs");
    if !mounted.status.success() {
        return None;
    }
    umount(directory.path());
    in_place(copy.as_file())
}

/// Compares the verdict of the reader with that of a judge.
fn agree(written: &Written, damage: &[(usize, Damage)], judge: impl Fn(&NamedTempFile) -> Verdict) {
    let copy = written.damaged(damage);
    let ours = ours(copy.path());
    assert_eq!(ours, judge(&copy), "{:?}, {damage:?}", written.form);
}

#[test]
fn a_damaged_journal_is_replayed_as_far_as_e2fsck_replays_it() {
    if lacks("debugfs", has_program("debugfs")) || lacks("e2fsck", has_program("e2fsck")) {
        return;
    }
    for form in FORMS {
        let written = Written::new(form);
        agree(&written, &[], e2fsck);
        // The content of the first transaction has a later change.
        for block in [2, 4, 5, 6, 7, 8, 9] {
            for damage in [Damage::Absent, Damage::Torn, Damage::Changed] {
                if block % 3 != 0 || damage != Damage::Torn {
                    agree(&written, &[(block, damage)], e2fsck);
                }
            }
        }
        for commit in [3, 9] {
            agree(&written, &[(commit, Damage::Old)], e2fsck);
            for block in [commit - 2, commit - 1] {
                for damage in [Damage::Absent, Damage::Old] {
                    agree(&written, &[(block, Damage::Torn), (commit, damage)], e2fsck);
                }
            }
        }
    }
}

#[test]
fn a_damaged_commit_ends_the_replay_as_it_does_in_the_kernel() {
    if lacks("debugfs", has_program("debugfs")) || without_root() {
        return;
    }
    for form in FORMS {
        let written = Written::new(form);
        for damage in [Damage::Torn, Damage::Changed, Damage::Old] {
            agree(&written, &[(9, damage)], kernel);
        }
    }
}
