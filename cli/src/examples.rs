//! Examples for the help and the manual page of each command.

use clap::Command;

/// Examples of the program.
const FIRST: [&str; 4] = [
    "bcow convert docker://debian:12 debian.bcow",
    "bcow inspect debian.bcow",
    "bcow mount debian.bcow mnt",
    "bcow umount mnt",
];

/// Examples of the commands, which each line names.
const EXAMPLES: [&str; 58] = [
    "bcow convert docker://debian:12 debian.bcow",
    "bcow convert dir:rootfs root.bcow",
    "bcow convert qcow2:vm.qcow2 base.bcow",
    "bcow copy debian.bcow docker://registry.example.org/team/debian:12",
    "bcow create data.bcow 20G",
    "bcow create -b base.bcow vm.bcow",
    "bcow create -b debian.bcow --fs ext4 root.bcow",
    "bcow resize vm.bcow +10G",
    "bcow rebase -b new-base.bcow vm.bcow",
    "bcow commit vm.bcow",
    "bcow commit debian.bcow --upper changes tar:layer.tar",
    "bcow commit debian.bcow --upper changes oci:store:mine",
    "bcow compact vm.bcow",
    "bcow seal --flatten -o base.bcow vm.bcow",
    "bcow snapshot vm.bcow clean",
    "bcow snapshot list vm.bcow",
    "bcow snapshot rm vm.bcow clean",
    "bcow fork vm.bcow@clean test.bcow",
    "bcow rollback vm.bcow clean --keep failed",
    "bcow inspect debian.bcow",
    "bcow map vm.bcow",
    "bcow fsck --data debian.bcow",
    "bcow fsck --repair vm.bcow",
    "bcow ls -l debian.bcow /etc",
    "bcow cat debian.bcow /etc/os-release",
    "bcow extract debian.bcow rootfs",
    "bcow export debian.bcow --to tar -o debian.tar",
    "bcow export debian.bcow --to oci-archive:debian.tar:12",
    "bcow diff old.bcow new.bcow",
    "bcow diff debian.bcow --upper changes",
    "bcow diff debian.bcow --upper changes --stat",
    "bcow mount debian.bcow mnt",
    "bcow mount debian.bcow mnt --upper changes -o allow_other,suid,dev",
    "bcow umount mnt",
    "bcow run debian.bcow",
    "bcow run debian.bcow --upper changes apt-get update",
    "bcow run debian.bcow --fork changes@before make test",
    "bcow cache list",
    "bcow cache prune --older-than 30d",
    "bcow cache verify",
    "bcow cache warm docker://registry.example.org/team/debian:12",
    "bcow stats mnt",
    "bcow stats mnt --interval 5",
    "bcow pool list",
    "bcow pool restart web",
    "bcow pool start web --memory 256M",
    "bcow pool stats web",
    "bcow pool stop --force web",
    "bcow ps",
    "bcow top",
    "bcow top --once --sort errors --filter web",
    "bcow serve vm.bcow --socket vm.sock",
    "bcow serve --read-only debian.bcow --listen 127.0.0.1:10809",
    "bcow attach vm.bcow /dev/nbd0",
    "bcow detach /dev/nbd0",
    "bcow completions bash",
    "bcow man /usr/local/share/man/man1",
    "bcow version --json",
];

/// Adds examples to the long help of `command` and of the commands below it. `path` is the words
/// that lead to it.
pub fn add(path: &str, command: Command) -> Command {
    let command = command.mut_subcommands(|below| {
        let path = format!("{path} {}", below.get_name());
        add(&path, below)
    });
    let is_of_command = |line: &str| {
        let rest = line.strip_prefix(path);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    let lines = if path == "bcow" { &FIRST[..] } else { &EXAMPLES[..] };
    let lines = lines.iter().filter(|line| is_of_command(line));
    let examples: String = lines.map(|line| format!("\n  {line}")).collect();
    if examples.is_empty() {
        return command;
    }
    let after = command.get_after_long_help();
    let after = after.map_or(String::new(), |text| format!("\n\n{text}"));
    command.after_long_help(format!("Examples:{examples}{after}"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::Cli;

    #[test]
    fn examples_are_command_lines() {
        for line in FIRST.iter().chain(&EXAMPLES) {
            let parsed = Cli::try_parse_from(line.split(' '));
            assert!(parsed.is_ok(), "{line}: {:?}", parsed.err());
        }
    }

    #[test]
    fn every_command_has_examples() {
        fn check(command: &Command) {
            for below in command
                .get_subcommands()
                .filter(|below| !below.is_hide_set())
            {
                let help = below.get_after_long_help().map(ToString::to_string);
                let name = below.get_name();
                assert!(
                    help.unwrap_or_default().starts_with("Examples:\n  bcow "),
                    "{name}"
                );
                check(below);
            }
        }
        check(&add("bcow", Cli::command()));
    }
}
