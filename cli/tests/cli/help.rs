//! What `--help` says is part of the interface, and is read as a whole.

use crate::support::{Sandbox, snapshot};

/// The names of all commands, as `bcow --help` lists them.
fn commands(top: &str) -> Vec<&str> {
    let commands: Vec<&str> = top
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(commands.contains(&"convert"), "{commands:?}");
    commands
}

#[test]
fn help_of_the_command_and_of_every_subcommand() {
    let sandbox = Sandbox::new();
    let top = String::from_utf8(sandbox.ok(&["--help"])).unwrap();
    snapshot!("help", top);
    for command in commands(&top) {
        let long = String::from_utf8(sandbox.ok(&[command, "--help"])).unwrap();
        snapshot!(format!("help_{command}"), long);
        let guide = format!("{}/../docs/guide/{command}.md", env!("CARGO_MANIFEST_DIR"));
        assert!(std::path::Path::new(&guide).exists(), "no {guide}");
    }
}

#[test]
fn short_help_is_short() {
    let sandbox = Sandbox::new();
    let text = String::from_utf8(sandbox.ok(&["convert", "-h"])).unwrap();
    assert!(text.lines().count() < 55, "{text}");
}

#[test]
fn short_help_sends_nobody_to_the_long_one_for_a_list() {
    let sandbox = Sandbox::new();
    let top = String::from_utf8(sandbox.ok(&["--help"])).unwrap();
    for command in commands(&top) {
        let short = String::from_utf8(sandbox.ok(&[command, "-h"])).unwrap();
        let mut options = short.lines().filter(|line| line.contains("--help"));
        let first = options.next().unwrap();
        assert!(first.trim_start().starts_with("-h, --help "), "{first}");
        assert_eq!(options.next(), None, "{command}");
    }
}

#[test]
fn short_help_names_every_mount_option() {
    let sandbox = Sandbox::new();
    let [short, long] =
        ["-h", "--help"].map(|help| String::from_utf8(sandbox.ok(&["mount", help])).unwrap());
    let explained: Vec<&str> = long
        .lines()
        .skip_while(|line| !line.starts_with("Mount options (-o"))
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| !line.starts_with(' '))
        .flat_map(|line| line.split("  ").next().unwrap_or_default().split(", "))
        .collect();
    assert!(explained.contains(&"writeback"), "{explained:?}");
    let named: Vec<&str> = short.split([',', ' ', '\n']).collect();
    for option in explained {
        assert!(named.contains(&option), "{option}: {short}");
    }
}

#[test]
fn version_is_told_three_ways() {
    let sandbox = Sandbox::new();
    let version = format!("bcow {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(sandbox.ok(&["--version"]), version.as_bytes());
    assert_eq!(sandbox.ok(&["version"]), version.as_bytes());
    snapshot!(sandbox.shown(&["version", "--json"]));
}

#[test]
fn completions_are_made_for_every_shell() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = sandbox.ok(&["completions", shell]);
        assert!(
            String::from_utf8_lossy(&script).contains("extract"),
            "{shell}"
        );
    }
}

#[test]
fn manual_pages_are_made_for_every_command() {
    let sandbox = Sandbox::new();
    let page = String::from_utf8(sandbox.ok(&["man"])).unwrap();
    assert!(page.contains(".TH bcow 1"), "{page}");
    sandbox.ok(&["man", "pages"]);
    for name in ["bcow", "bcow-convert", "bcow-fsck", "bcow-extract"] {
        let page = String::from_utf8(sandbox.read(&format!("pages/{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
    }
}
