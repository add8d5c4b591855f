//! The words of other programs: qemu-img, skopeo, podman, docker, umoci, mksquashfs, mount(8).
//!
//! A word that means the same here works: some are aliases in the command line itself (`info` is
//! `inspect`), and [`translate`] replaces the others. For any other word of the table, [`advice`]
//! has the command of bcow. A word with another meaning here (`-f` of `convert`) is never taken as
//! the word of bcow if it can be that of the other program.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use bcow_images::{Name, Takes};
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error::CommandError;

/// Words that mean the same as words of bcow, or nothing here: the commands, the words, and those
/// of bcow.
const SAME: [(&str, &str, &str); 19] = [
    ("inspect|info|map|fsck|check", "--output=json", "--json"),
    ("inspect|info|map|fsck|check", "--output json", "--json"),
    ("inspect|info", "--backing-chain", ""),
    ("convert|commit|rebase", "-p", ""),
    ("convert", "-f bcow", "--from-format bcow"),
    ("convert", "-f raw", "--from-format raw"),
    ("convert", "-f qcow2", "--from-format qcow2"),
    ("convert", "-f qcow", "--from-format qcow"),
    ("convert", "-f qed", "--from-format qed"),
    ("convert", "-f vdi", "--from-format vdi"),
    ("convert", "-f vpc", "--from-format vpc"),
    ("convert", "-f vhdx", "--from-format vhdx"),
    ("convert", "-f vmdk", "--from-format vmdk"),
    ("copy", "-f oci", "--format"),
    ("copy", "-f v2s1", "--format"),
    ("copy", "-f v2s2", "--format"),
    ("ls", "-1", ""),
    ("mount", "-t bcow", ""),
    ("ps", "-a", ""),
];

/// Words that bcow does not have, and what to write instead. Words behind a space are those of the
/// commands before it. The others are commands, or options of all commands.
const OTHER: [&str; 71] = [
    "bench: `bcow serve DISK --socket SOCK` serves a disk for `qemu-img bench`, fio and others",
    "build: `buildah` and `docker buildx` build images, which `bcow convert` takes",
    "clone: `bcow fork DISK NEW.bcow` makes a further disk with the content of DISK",
    "compare: `bcow diff A B` compares two images or two disks",
    "config|history|show|stat: `bcow inspect IMG`; with `--json` the whole configuration",
    "connect|losetup|nbd|qemu-nbd: `bcow serve DISK`, or `bcow attach DISK /dev/nbd0` as root",
    "cp: `bcow cat IMG PATH` prints a file, and `bcow extract IMG PATH DIR` copies it",
    "dd: `bcow export DISK --to raw -o FILE` writes the bytes of a disk",
    "delete|remove|rm|rmi: images are files: rm(1); `skopeo delete docker://HOST/REPO:TAG`",
    "df|du: `bcow inspect IMG` shows the size of an image, `bcow cache list` that of the cache",
    "disconnect: `bcow detach /dev/nbd0`",
    "enter|exec|start: `bcow run IMG [CMD]` runs a program in the root file system of an image",
    "find|tree: `bcow ls -R IMG` lists the whole tree",
    "format|mkfs: `bcow attach DISK /dev/nbd0`, and mkfs(8) on it",
    "gc|prune|system: `bcow cache prune --all` empties the cache of remote images",
    "image|images|list|status: `bcow ps` lists mounts, `bcow cache list` remote images",
    "import|load: `bcow convert FILE.tar IMAGE.bcow` makes an image of an archive",
    "init|new: `bcow create NEW.bcow 10G` makes a disk",
    "list-tags|search|tags: `skopeo list-tags docker://HOST/REPO` lists the tags",
    "login|logout: `skopeo login HOST`, or that of docker or podman: bcow uses what they store",
    "measure|size: `bcow inspect IMG` shows the sizes of the content and of the file",
    "flatten|merge|squash: `bcow convert IMG NEW.bcow` merges the layers into one file",
    "mkfs.erofs|mksquashfs|pack: `bcow convert dir:DIR IMAGE.bcow` makes an image of a directory",
    "pull: `bcow convert docker://NAME IMAGE.bcow` makes an image of one in a registry",
    "push: `bcow copy IMG docker://HOST/REPO:TAG` writes an image in BCoW form to a registry",
    "repack: `bcow commit IMG --upper UPPER oci:DIR:REF` writes the changes as a layer",
    "save: `bcow export IMG --to oci-archive:FILE` writes an ordinary image in an archive",
    "tag: `bcow copy IMG docker://HOST/REPO:TAG` writes an image under another name",
    "logs: `bcow stats DIR` shows the activity and the last errors of a mount",
    "unpack|unsquashfs|untar: `bcow extract IMG DIR` extracts an image",
    "test|validate|verify: `bcow fsck --data IMG` reads and verifies every block",
    "--creds|--src-creds|--dest-creds|--src-authfile|--dest-authfile: `skopeo login`; --auth-file",
    "--tls-verify|--src-tls-verify|--dest-tls-verify: `--insecure` allows plain HTTP",
    "--image-opts|--object|--target-image-opts: name the disk: FILE.bcow, raw:FILE, qcow2:FILE",
    "cache clean|clear|delete|purge|rm: `bcow cache prune --all` empties the cache",
    "cache ls: `bcow cache list`",
    "check|fsck -a|-p|-r|-y: `bcow fsck --repair IMG` repairs what has one correct repair",
    "check|fsck -n: leave it out: `bcow fsck IMG` changes nothing without `--repair`",
    "check|create|fsck|map|rebase|resize -f: leave it out: the format of the file is BCoW",
    "commit --author|--change|--message|-a|-c|-m: leave it out: bcow records none of these",
    "convert -B: `bcow create -b BACKING NEW.bcow` makes a disk over a backing",
    "convert -c: `--compress zstd`, or `--compress zlib` for qcow2; sealed disks are compressed",
    "convert -l: `qemu-img convert -l SNAPSHOT` writes a snapshot of a qcow2 disk to a file",
    "convert -S|-T|-W|-m|-n|-o|-t: leave it out: bcow has no such option",
    "convert --all|--multi-arch|-a: `--platform all` converts the images of all platforms",
    "copy --format|--preserve-digests: leave it out: `bcow copy` copies byte for byte",
    "copy --all|--multi-arch|-a: leave it out: `bcow copy` copies an index with all its images",
    "create|rebase -F: leave it out: a backing is a BCoW file",
    "create -o: leave it out: `--layout` and `--block-size` are the options of the format",
    "diff -p|-r|-s|-u: leave it out: `bcow diff` compares whole trees, or disks block by block",
    "export --format: `--to FORM`: tar, erofs, raw, oci:DIR[:REF] or oci-archive:FILE[:REF]",
    "extract --dest|--directory|-C|-d: the directory is the last word: `bcow extract IMG DIR`",
    "info|inspect --config|--format|--raw|-f: `--json` prints all, for a program such as jq",
    "ls --human-readable: sizes are in bytes, and `-h` alone is the help: `bcow ls -l IMG`",
    "ls --sort|-S|-d|-r|-t: leave it out: sort(1) can sort the output of `bcow ls -l IMG`",
    "mount --lowerdir: `bcow mount IMG DIR --upper UPPER` stores the changes, without a workdir",
    "mount --all|-a: `mount -a -t bcow` mounts what fstab(5) lists",
    "mount --types|-t: leave it out: bcow finds the file system by itself",
    "mount --read-only|-r: `-o ro`; without `--upper`, an image is mounted read-only",
    "mount --read-write|--rw|-w: `--upper UPPER` makes the mount writable",
    "mount --bind|--move|--rbind|-B|-R: mount(8) does this with the directory of any mount",
    "pool ls|ps|status: `bcow pool list`",
    "ps --filter|--format|-f: `--json` prints all, for a program such as jq",
    "snapshot -a|-c|-d|-l: `bcow snapshot DISK NAME`, `snapshot list`, `snapshot rm`, `rollback`",
    "serve --connect|-c: `bcow attach DISK /dev/nbd0` makes a disk a block device of the kernel",
    "serve -k: `--socket PATH`",
    "serve --bind|--port|-b|-p: `--listen ADDR:PORT`",
    "serve --format|--persistent|--shared|-e|-f|-t: leave it out: bcow has no such option",
    "serve --export-name|-x: `--export NAME=IMG`",
    "umount --all|-A|-a: `bcow ps` lists the mounts: `bcow umount DIR` for each",
    "umount --force|-f: `bcow umount --lazy DIR` detaches a mount that is in use",
];

/// The place of the command in a command line, behind the name of the program and the options of
/// all commands.
fn command_at(arguments: &[OsString]) -> Option<usize> {
    let mut value_follows = false;
    let mut places = arguments.iter().enumerate().skip(1);
    let found = places.find(|(_, argument)| {
        let has_value = *argument == "--color" || *argument == "--progress";
        let is_value = std::mem::replace(&mut value_follows, has_value);
        !is_value && !argument.as_encoded_bytes().starts_with(b"-")
    });
    found.map(|(at, _)| at)
}

/// Whether a command line is of one of these commands.
pub fn is_command(arguments: &[OsString], commands: &[&str]) -> bool {
    command_at(arguments).is_some_and(|at| commands.iter().any(|one| arguments[at] == *one))
}

/// Whether `words`, which are separated by bars, have `word`.
fn has(words: &str, word: &str) -> bool {
    words.split('|').any(|one| one == word)
}

/// Replaces words of other programs that mean the same as words of bcow.
pub fn translate(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let Some(at) = command_at(&arguments) else {
        return arguments;
    };
    let command = arguments[at].to_string_lossy().into_owned();
    let behind = at + 1;
    // What is behind `--` is the name of a file.
    let end = arguments.iter().position(|argument| argument == "--");
    let rest = arguments.split_off(end.filter(|&end| end > at).unwrap_or(arguments.len()));
    for (_, theirs, ours) in SAME.iter().filter(|(of, ..)| has(of, &command)) {
        replace(&mut arguments, behind, theirs, ours);
    }
    // As in `ls -lh`, which does not ask for help.
    let asks_for_units = |argument: &OsString| {
        let letters = argument.to_str().and_then(|text| text.strip_prefix('-'));
        letters.is_some_and(|text| text.len() > 1 && !text.starts_with('-') && text.contains('h'))
    };
    let has_layers = |argument: &OsString| argument.to_string_lossy().contains("lowerdir=");
    match (&*command, &arguments[behind..]) {
        // mount(8) lists the mounts.
        ("mount", []) if rest.is_empty() => arguments[at] = "ps".into(),
        ("mount", words) if words.iter().any(has_layers) => {
            arguments.insert(behind, "--lowerdir".into());
        }
        ("ls", words) if words.iter().any(asks_for_units) => {
            arguments.insert(behind, "--human-readable".into());
        }
        ("shell", _) => {
            arguments[at] = "run".into();
            arguments.insert(behind, "--shell".into());
        }
        // The verb says that the image is in a registry, so its name needs no transport.
        ("pull", [image, _, ..]) if !image.as_encoded_bytes().starts_with(b"-") => {
            if !is_in_registry(image) {
                let mut name = OsString::from("docker://");
                name.push(image);
                arguments[behind] = name;
            }
            arguments[at] = "convert".into();
        }
        ("push", names) if names.iter().any(|name| is_in_registry(name)) => {
            arguments[at] = "copy".into()
        }
        _ => {}
    }
    arguments.extend(rest);
    arguments
}

fn is_in_registry(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"docker://")
}

/// Replaces the words `theirs` behind the command, unless the second one is the name of a file.
fn replace(arguments: &mut Vec<OsString>, behind: usize, theirs: &str, ours: &str) {
    let theirs: Vec<&str> = theirs.split(' ').collect();
    let is_same = |(argument, word): (&OsString, &&str)| argument.as_os_str() == *word;
    let mut groups = arguments[behind..].windows(theirs.len());
    let found = groups.position(|group| group.iter().zip(&theirs).all(is_same));
    if let Some(at) = found
        && !theirs.iter().skip(1).any(|word| Path::new(word).exists())
    {
        let range = behind + at..behind + at + theirs.len();
        drop(arguments.splice(range, ours.split_whitespace().map(OsString::from)));
    }
}

/// What to write instead of a word of another program, if `error` is about one.
pub fn advice(error: &clap::Error, arguments: &[OsString]) -> Option<CommandError> {
    let (kind, noun) = match error.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, "command"),
        ErrorKind::UnknownArgument => (ContextKind::InvalidArg, "option"),
        _ => return None,
    };
    let Some(ContextValue::String(word)) = error.get(kind) else {
        return None;
    };
    let at = command_at(arguments);
    let command = at
        .and_then(|at| arguments[at].to_str())
        .filter(|command| command != word);
    let is_option = word.starts_with('-');
    if !is_option && noun == "option" {
        return None;
    }
    let hint = OTHER.iter().find_map(|row| {
        let (key, hint) = row.split_once(": ")?;
        let is_it = match key.split_once(' ') {
            Some((of, words)) => {
                command.is_some_and(|command| has(of, command)) && has(words, word)
            }
            None => (command.is_none() || is_option) && has(key, word),
        };
        is_it.then_some(hint)
    })?;
    let place = command.map_or("bcow".to_owned(), |command| format!("`bcow {command}`"));
    Some(CommandError::usage(format!("{place} has no {noun} {word}")).hint(hint))
}

/// The name of a disk with the format that `-f` or `-O` of `qemu-img convert` gives.
pub fn in_format(name: &Name, format: Option<&str>, takes: &Takes) -> Result<Name, CommandError> {
    match (format, name.transport()) {
        (Some(format @ ("bcow" | "qcow2" | "raw")), None) => {
            let mut text = OsString::from(format!("{format}:"));
            text.push(name.text());
            Ok(takes.parse(&text)?)
        }
        (Some(format), given) if given != Some(format) => Err(CommandError::usage(format!(
            "{name} cannot have the format {format}"
        ))
        .hint(
            "the formats are bcow, qcow2 and raw, for a name without a transport; `qemu-img \
             convert` converts a qcow2 disk from and to other formats",
        )),
        _ => Ok(name.clone()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn command_line(words: &str) -> Vec<OsString> {
        format!("bcow {words}")
            .split(' ')
            .map(OsString::from)
            .collect()
    }

    #[test]
    fn words_with_the_same_meaning_are_replaced() {
        for (theirs, ours) in [
            ("mount", "ps"),
            ("mount a b", "mount a b"),
            ("mount -- a b", "mount -- a b"),
            ("ls x -- -1", "ls x -- -1"),
            (
                "-q --color never map --output json x",
                "-q --color never map --json x",
            ),
            (
                "convert -f qcow2 -O raw a b",
                "convert --from-format qcow2 -O raw a b",
            ),
            ("convert -f a.tar b", "convert -f a.tar b"),
            ("convert -p a b", "convert a b"),
            ("pull debian:12 x.bcow", "convert docker://debian:12 x.bcow"),
            ("pull docker://x:1 x.bcow", "convert docker://x:1 x.bcow"),
            ("pull debian:12", "pull debian:12"),
            (
                "push x.bcow docker://host.x/y",
                "copy x.bcow docker://host.x/y",
            ),
            ("push x.bcow host.x/y", "push x.bcow host.x/y"),
            ("ls -lh x", "ls --human-readable -lh x"),
            (
                "mount -o lowerdir=a,upperdir=b x y",
                "mount --lowerdir -o lowerdir=a,upperdir=b x y",
            ),
            ("ls -h", "ls -h"),
            ("shell x", "run --shell x"),
            ("run x ls -t", "run x ls -t"),
        ] {
            assert_eq!(translate(command_line(theirs)), command_line(ours));
        }
        for (commands, theirs, ours) in SAME {
            for command in commands.split('|') {
                let theirs = command_line(&format!("{command} {theirs} name"));
                let ours = format!("{command} {ours} name").replace("  ", " ");
                assert_eq!(translate(theirs), command_line(&ours));
            }
        }
    }

    #[test]
    fn every_other_word_leads_on() {
        let all = crate::command();
        for row in OTHER {
            let (key, hint) = row.split_once(": ").expect(row);
            let (commands, words) = match key.split_once(' ') {
                Some(both) => both,
                None if key.starts_with('-') => ("ls", key),
                None => ("", key),
            };
            for command in commands.split('|') {
                for word in words.split('|') {
                    let arguments = command_line(format!("{command} {word}").trim_start());
                    let parsed = all.clone().try_get_matches_from(&arguments);
                    let advice = advice(&parsed.expect_err(word), &arguments).expect(word);
                    assert_eq!(advice.hint_text(), Some(hint), "{arguments:?}");
                }
            }
        }
    }

    #[test]
    fn commands_are_recognised_behind_global_options() {
        let is_fsck = |words| is_command(&command_line(words), &["fsck"]);
        assert!(is_fsck("-q --color never fsck --bogus"));
        assert!(is_fsck("fsck"));
        assert!(!is_fsck("ls fsck"));
        assert!(!is_fsck("--color fsck ls"));
    }

    #[test]
    fn no_word_of_the_table_is_one_of_bcow() {
        let mut all = crate::Cli::command();
        all.build();
        let same = SAME.map(|(commands, theirs, _)| format!("{commands} {theirs}: "));
        // An option with a value is that of the other program only with this value.
        let same = same
            .iter()
            .filter(|row| !row.contains('=') && row.split(' ').count() == 3);
        for row in OTHER.into_iter().chain(same.map(String::as_str)) {
            let (key, hint) = row.split_once(": ").expect(row);
            assert!(
                !hint.contains("--force") && !hint.contains("--no-verify"),
                "{row}"
            );
            let (commands, words) = match key.split_once(' ') {
                Some((commands, words)) => (commands.split('|').collect(), words),
                None => (vec!["bcow"], key),
            };
            for name in commands {
                let command = if name == "bcow" { Some(&all) } else { all.find_subcommand(name) };
                let command = command.expect(row);
                for word in words.split('|') {
                    let long = word.strip_prefix("--");
                    let short = word.strip_prefix('-').and_then(|word| word.chars().next());
                    let is_known = |known: &clap::Arg| match long {
                        Some(long) => known.get_long() == Some(long),
                        None => short.is_some() && known.get_short() == short,
                    };
                    assert!(command.find_subcommand(word).is_none(), "{row}");
                    assert!(!command.get_arguments().any(is_known), "{row}");
                }
            }
        }
    }
}
