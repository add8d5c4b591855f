//! `mount.bcow`: the helper that mount(8) calls for `mount -t bcow` and for lines of fstab(5).
//!
//! It is the program `bcow` itself, called by another name, so that a symbolic link
//! /sbin/mount.bcow suffices. mount(8) passes `IMG DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t
//! TYPE]`; the helper translates that into a command line of `bcow mount`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use bcow_fuse::MountOptions;
use bcow_images::error::{CommandError, exit};
use clap::Args as _;

use crate::args::MountArgs;

/// Whether `name`, argument 0 of the process, is `mount.bcow`.
pub fn is_called(name: Option<&OsStr>) -> bool {
    name.is_some_and(|name| Path::new(name).file_name() == Some(OsStr::new("mount.bcow")))
}

/// Translates an exit status of bcow into one of mount(8), which passes on the status of its
/// helper.
pub fn exit_status(of_bcow: u8) -> u8 {
    const USAGE: u8 = 1;
    const INTERRUPTED: u8 = 8;
    const MOUNT_FAILED: u8 = 32;
    match of_bcow {
        exit::DONE => exit::DONE,
        exit::USAGE => USAGE,
        exit::INTERRUPTED => INTERRUPTED,
        _ => MOUNT_FAILED,
    }
}

/// The request of mount(8).
#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    /// This command line of `bcow`.
    Run(Vec<OsString>),
    /// Print the usage of the helper.
    Help,
}

/// The usage of the helper.
pub const USAGE: &str = "\
Usage: mount.bcow IMG DIR [-sfnv] [-o OPTIONS] [-t TYPE]

Called by mount(8) as in `mount -t bcow IMG DIR -o OPTIONS`. OPTIONS are those of `bcow mount -o`,
those of fstab(5), and the long options of `bcow mount` with `_` for `-`, as in
`upper=DIR,size_limit=SIZE,insecure`; `bcow help mount` lists them.
In a value, write a comma as \\, or write the value in double quotes.
";

/// Options that the helper drops: those for mount(8), systemd and similar programs, and those that
/// change nothing in a bcow mount.
const FOR_OTHERS: [&[u8]; 16] = [
    b"auto",
    b"noauto",
    b"user",
    b"nouser",
    b"users",
    b"nousers",
    b"owner",
    b"noowner",
    b"group",
    b"nogroup",
    b"nofail",
    b"_netdev",
    b"nostrictatime",
    b"norelatime",
    b"nolazytime",
    b"silent",
];

/// Prefixes of such options.
const FOR_OTHERS_PREFIXES: [&[u8]; 5] = [b"x-", b"X-", b"comment=", b"user=", b"uhelper="];

/// The user who calls the helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// Root. mount(8) does not pass `suid` and `dev`, which are root's defaults; the helper adds
    /// them.
    Root,
    /// An ordinary user, who may use neither.
    Other,
}

/// Turns the helper's arguments, without its name, into those of `bcow`.
pub fn translate(
    arguments: impl Iterator<Item = OsString>,
    caller: Caller,
) -> Result<Request, CommandError> {
    let mut parsed = Arguments::default();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        match argument.as_bytes() {
            b"-h" | b"--help" => return Ok(Request::Help),
            b"--" => parsed.paths.extend(arguments.by_ref()),
            [b'-', flags @ ..] if !flags.is_empty() => parsed.flags(flags, &mut arguments)?,
            _ => parsed.paths.push(argument),
        }
    }
    parsed.into_command(caller)
}

/// The command line of this process in the form of `bcow`.
pub fn command_line() -> Result<Request, CommandError> {
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    if !is_called(name.as_deref()) {
        return Ok(Request::Run(name.into_iter().chain(arguments).collect()));
    }
    let is_root = rustix::process::geteuid().is_root();
    translate(
        arguments,
        if is_root { Caller::Root } else { Caller::Other },
    )
}

#[derive(Default)]
struct Arguments {
    paths: Vec<OsString>,
    lists: Vec<OsString>,
    sloppy: bool,
    fake: bool,
    verbose: bool,
}

impl Arguments {
    /// Short options, as getopt(3) reads them: several after one dash; a value after its letter or
    /// in the next argument.
    fn flags(
        &mut self,
        mut flags: &[u8],
        arguments: &mut impl Iterator<Item = OsString>,
    ) -> Result<(), CommandError> {
        while let Some((&flag, rest)) = flags.split_first() {
            flags = rest;
            match flag {
                b's' => self.sloppy = true,
                b'f' => self.fake = true,
                b'v' => self.verbose = true,
                // "Do not write mtab"; no system has an mtab any more.
                b'n' => {}
                b'r' => self.lists.push("ro".into()),
                b'w' => self.lists.push("rw".into()),
                b'o' | b't' | b'N' => {
                    let value = match flags {
                        [] => arguments.next().ok_or_else(|| {
                            usage(format!("option -{} has no value", char::from(flag)))
                        })?,
                        rest => OsStr::from_bytes(rest).to_owned(),
                    };
                    flags = &[];
                    match (flag, value.as_bytes()) {
                        (b'o', _) => self.lists.push(value),
                        (b't', b"bcow" | b"fuse.bcow") => {}
                        (b't', _) => {
                            return Err(usage(format!("unsupported type {}", value.display())));
                        }
                        _ => {
                            return Err(usage(
                                "mount.bcow cannot mount in another namespace: use nsenter(1)",
                            ));
                        }
                    }
                }
                other => {
                    return Err(usage(format!("unknown option -{}", char::from(other))));
                }
            }
        }
        Ok(())
    }

    fn into_command(self, caller: Caller) -> Result<Request, CommandError> {
        let [image, directory] = &self.paths[..] else {
            return Err(usage("expected an image and a directory"));
        };
        let mut command: Vec<OsString> = vec!["bcow".into()];
        if self.verbose {
            command.push("--verbose".into());
        }
        command.push("mount".into());
        if self.fake {
            command.push("--fake".into());
        }
        // `bcow mount` lets the last of two contradicting options win, so root's defaults come
        // first.
        let mut kept = match caller {
            Caller::Root => vec![b"suid".to_vec(), b"dev".to_vec()],
            Caller::Other => Vec::new(),
        };
        let options = long_options();
        let mut has_upper = false;
        let lists: Result<Vec<_>, _> = self.lists.iter().map(|l| split(l.as_bytes())).collect();
        for option in lists?.into_iter().flatten() {
            match long(&options, &option) {
                Some(argument) => {
                    has_upper |= argument.as_bytes().starts_with(b"--upper=");
                    command.push(argument);
                }
                None if option.split(|&byte| byte == b'=').next() == Some(b"remount") => {
                    return Err(usage("a bcow mount cannot be remounted").hint(
                        "unmount the image and mount it again; `mount -i -o remount,ro DIR` \
                         makes the mount read-only",
                    ));
                }
                None if is_for_others(&option) => {}
                None if self.sloppy && !is_known(&options, &option) => {}
                // `bcow mount -o` would split it at the comma.
                None if option.contains(&b',') => {
                    return Err(usage(format!(
                        "option {} must not contain a comma",
                        String::from_utf8_lossy(&option)
                    )));
                }
                None => kept.push(option),
            }
        }
        // mount(8) passes `rw` for every mount that is not read-only. Without an upper, `bcow
        // mount` refuses it.
        if !has_upper {
            kept.retain(|option| option != b"rw");
        }
        if !kept.is_empty() {
            command.extend(["-o".into(), OsString::from_vec(kept.join(&b','))]);
        }
        command.extend(["--".into(), image.clone(), directory.clone()]);
        Ok(Request::Run(command))
    }
}

fn is_for_others(option: &[u8]) -> bool {
    FOR_OTHERS.contains(&option)
        || FOR_OTHERS_PREFIXES
            .iter()
            .any(|prefix| option.starts_with(prefix))
}

/// The long options of `bcow mount`, and whether each has a value.
fn long_options() -> Vec<(String, bool)> {
    let command = MountArgs::augment_args(clap::Command::new("mount"));
    let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
    // The list of -o has no lists in it.
    arguments
        .flat_map(|one| {
            let has_value = one.get_action().takes_values();
            let names = one.get_long().into_iter();
            let names = names.chain(one.get_all_aliases().unwrap_or_default());
            names
                .map(move |name| (name.to_owned(), has_value))
                .collect::<Vec<_>>()
        })
        .filter(|(long, _)| long != "options")
        .collect()
}

/// The name of an option of a list as `bcow mount` has it, and the value with its `=`.
fn long_name(option: &[u8]) -> (Vec<u8>, &[u8]) {
    let end = option.iter().position(|&byte| byte == b'=');
    let (name, value) = option.split_at(end.unwrap_or(option.len()));
    (
        name.iter()
            .map(|&byte| if byte == b'_' { b'-' } else { byte })
            .collect(),
        value,
    )
}

/// An option of a list as a long option of `bcow mount`, if it is one.
fn long(options: &[(String, bool)], option: &[u8]) -> Option<OsString> {
    let (name, value) = long_name(option);
    let is_it = |(long, has_value): &&(String, bool)| {
        long.as_bytes() == name && *has_value != value.is_empty()
    };
    let (long, _) = options.iter().find(is_it)?;
    let mut argument = OsString::from(format!("--{long}"));
    argument.push(OsStr::from_bytes(value));
    Some(argument)
}

/// Whether `bcow mount` knows the option. With `-s`, the helper drops all others.
fn is_known(options: &[(String, bool)], option: &[u8]) -> bool {
    let (name, _) = long_name(option);
    options.iter().any(|(long, _)| long.as_bytes() == name)
        || MountOptions::is_known(OsStr::from_bytes(option))
}

/// Splits a list at its commas, but for those behind a backslash and inside double quotes.
fn split(list: &[u8]) -> Result<Vec<Vec<u8>>, CommandError> {
    let mut options = vec![Vec::new()];
    let mut quoted = false;
    let mut bytes = list.iter();
    while let Some(&byte) = bytes.next() {
        let byte = match byte {
            b'"' => {
                quoted = !quoted;
                continue;
            }
            b',' if !quoted => {
                options.push(Vec::new());
                continue;
            }
            b'\\' => match bytes.clone().next() {
                Some(&escaped @ (b',' | b'"' | b'\\')) => {
                    bytes.next();
                    escaped
                }
                _ => byte,
            },
            byte => byte,
        };
        if let Some(option) = options.last_mut() {
            option.push(byte);
        }
    }
    if quoted {
        return Err(usage("a double quote in the list of -o is not closed"));
    }
    options.retain(|option| !option.is_empty());
    Ok(options)
}

fn usage(message: impl Into<String>) -> CommandError {
    CommandError::usage(message).hint("`mount.bcow -h` prints the usage")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(arguments: &[&str]) -> Result<String, String> {
        command_of(Caller::Other, arguments)
    }

    fn command_of(caller: Caller, arguments: &[&str]) -> Result<String, String> {
        match translate(arguments.iter().map(OsString::from), caller) {
            Ok(Request::Run(command)) => Ok(command
                .iter()
                .map(|argument| argument.to_string_lossy().into_owned())
                .collect::<Vec<_>>()
                .join(" ")),
            Ok(Request::Help) => Ok("help".into()),
            Err(error) => Err(error.message().to_owned()),
        }
    }

    #[test]
    fn mounts_of_fstab_become_commands() {
        for (arguments, expected) in [
            (
                &["a.bcow", "/mnt", "-o", "rw"][..],
                "bcow mount -- a.bcow /mnt",
            ),
            (
                &[
                    "a.bcow",
                    "/mnt",
                    "-v",
                    "-o",
                    "rw,upper=/u,noauto,x-systemd.automount,allow_other",
                ],
                "bcow --verbose mount --upper=/u -o rw,allow_other -- a.bcow /mnt",
            ),
            (
                &["a", "m", "-sn", "-oro,what,suid", "-t", "bcow"],
                "bcow mount -o ro,suid -- a m",
            ),
            (
                &[
                    "-o",
                    "ro,cpus=\"0,2\",upper=/a\\,b,sync=batch=4,comment=x",
                    "--",
                    "-a",
                    "-m",
                ],
                "bcow mount --cpus=0,2 --upper=/a,b --sync=batch=4 -o ro -- -a -m",
            ),
            (
                &["a", "m", "-o", "upper=/u,driver=kernel,size=8G,discard"],
                "bcow mount --upper=/u --driver=kernel --size=8G -o discard -- a m",
            ),
            (
                &[
                    "docker://h/r:t",
                    "m",
                    "-o",
                    "ro,insecure,cache_dir=/c,mirror=https://m",
                ],
                "bcow mount --insecure --cache-dir=/c --mirror=https://m -o ro -- docker://h/r:t m",
            ),
            (&["a", "m", "-fo", "rw,nofail"], "bcow mount --fake -- a m"),
            (
                &["a", "m", "-o", "pool=web"],
                "bcow mount --pool=web -- a m",
            ),
            // Hidden options, and those of -o with the name of one that has a value, stay in -o.
            (
                &["a", "m", "-o", "no_cache,sync,fake,options=x"],
                "bcow mount --no-cache -o sync,fake,options=x -- a m",
            ),
            // Sloppy or not, what demands a verification is never dropped.
            (
                &[
                    "a",
                    "m",
                    "-s",
                    "-o",
                    "root_hash=00ff,verify_key=/k,backing_dir=/b,x=y",
                ],
                "bcow mount --root-hash=00ff --verify-key=/k --backing-dir=/b -- a m",
            ),
            (&["-h"], "help"),
        ] {
            assert_eq!(command(arguments).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for (arguments, expected) in [
            (&["a"][..], "expected an image and a directory"),
            (&["a", "b", "c"], "expected an image and a directory"),
            (&["a", "b", "-x"], "unknown option -x"),
            (
                &["a", "b", "-oremount,ro"],
                "a bcow mount cannot be remounted",
            ),
            (&["a", "b", "-o"], "option -o has no value"),
            (
                &["a", "b", "-o", "fsname=x\\,suid"],
                "option fsname=x,suid must not contain a comma",
            ),
            (
                &["a", "b", "-o", "upper=\"/u,ro"],
                "a double quote in the list of -o is not closed",
            ),
            (&["a", "b", "-t", "ext4"], "unsupported type ext4"),
        ] {
            assert_eq!(command(arguments), Err(expected.to_owned()));
        }
    }

    #[test]
    fn root_has_set_id_bits_and_devices_by_default() {
        for (options, expected) in [
            ("rw", "suid,dev"),
            (
                "rw,nosuid,noexec,nodev,users",
                "suid,dev,nosuid,noexec,nodev",
            ),
        ] {
            assert_eq!(
                command_of(Caller::Root, &["a", "m", "-o", options]),
                Ok(format!("bcow mount -o {expected} -- a m"))
            );
        }
    }

    #[test]
    fn unknown_options_are_left_to_the_command() {
        assert_eq!(
            command(&["a", "m", "-o", "surprise,upper"]).as_deref(),
            Ok("bcow mount -o surprise,upper -- a m")
        );
    }

    #[test]
    fn sloppy_mounts_drop_unknown_options_only() {
        let known = "ro,discard,nodiscard,fsname=x,noatime,allow_other,subtype=bcow";
        assert_eq!(
            command(&[
                "a",
                "m",
                "-s",
                "-o",
                &format!("surprise,{known},size=8G,x=y")
            ]),
            Ok(format!("bcow mount --size=8G -o {known} -- a m"))
        );
        // The command refuses an option that lacks its value.
        assert_eq!(
            command(&["a", "m", "-s", "-o", "upper"]).as_deref(),
            Ok("bcow mount -o upper -- a m")
        );
    }

    #[test]
    fn it_is_known_by_its_name() {
        assert!(is_called(Some(OsStr::new("/sbin/mount.bcow"))));
        assert!(!is_called(Some(OsStr::new("/mnt/mount.bcow/bcow"))));
        assert!(!is_called(None));
    }
}
