//! What `--help` says is part of the interface, and is read as a whole.

use std::path::{Path, PathBuf};

use crate::support::{Sandbox, snapshot};

/// The names of all commands, as `bcow --help` lists them.
fn commands(top: &str) -> Vec<&str> {
    let commands = subcommands(top);
    assert!(commands.contains(&"convert"), "{commands:?}");
    commands
}

/// The names of the commands that a help lists.
fn subcommands(help: &str) -> Vec<&str> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        // A description can have a second line.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect()
}

#[test]
fn help_of_the_command_and_of_every_subcommand() {
    let sandbox = Sandbox::new();
    let top = String::from_utf8(sandbox.ok(&["--help"])).unwrap();
    snapshot!("help", top);
    for command in commands(&top) {
        let long = String::from_utf8(sandbox.ok(&[command, "--help"])).unwrap();
        for below in subcommands(&long) {
            let long = String::from_utf8(sandbox.ok(&[command, below, "--help"])).unwrap();
            snapshot!(format!("help_{command}_{below}"), long);
        }
        snapshot!(format!("help_{command}"), long);
    }
}

#[test]
fn short_help_is_short() {
    let sandbox = Sandbox::new();
    let text = String::from_utf8(sandbox.ok(&["convert", "-h"])).unwrap();
    assert!(text.lines().count() < 55, "{text}");
}

#[test]
fn short_help_refers_to_the_long_one_in_one_line_only() {
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

/// Usage, arguments and options of a short help, without the options of all commands.
fn options(short: &str) -> String {
    let start = short.find("Usage: ").expect("a usage");
    let end = short.find("\nGlobal options:").expect("global options");
    let lines = short[start..end].lines();
    let lines: Vec<&str> = lines.filter(|line| !line.contains("-h, --help ")).collect();
    let text = lines.join("\n");
    let text = text.trim_end();
    text.strip_suffix("\n\nOptions:").unwrap_or(text).to_owned()
}

/// The page of a command in the guide, or `README`.
fn guide(name: &str) -> PathBuf {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide");
    guide.join(format!("{name}.md"))
}

/// Each page ends with the list; `BCOW_GUIDE_WRITE=1` writes the lists anew.
#[test]
fn guide_lists_the_options_of_the_help() {
    let sandbox = Sandbox::new();
    let top = String::from_utf8(sandbox.ok(&["--help"])).unwrap();
    for command in commands(&top) {
        let short = String::from_utf8(sandbox.ok(&[command, "-h"])).unwrap();
        let mut lists = vec![options(&short)];
        for below in subcommands(&short) {
            let short = String::from_utf8(sandbox.ok(&[command, below, "-h"])).unwrap();
            lists.push(options(&short));
        }
        let list = format!("\n## Options\n\n```\n{}\n```\n", lists.join("\n\n"));
        let page = std::fs::read_to_string(guide(command)).unwrap();
        if std::env::var_os("BCOW_GUIDE_WRITE").is_some() {
            let text = page.split("\n## Options\n").next().unwrap_or_default();
            std::fs::write(guide(command), format!("{text}{list}")).unwrap();
            continue;
        }
        assert!(
            page.ends_with(&list),
            "{command}.md does not end with{list}"
        );
    }
}

/// The statuses of a table in the guide, and their meanings.
fn statuses_of_page(name: &str) -> Vec<(String, String)> {
    let page = std::fs::read_to_string(guide(name)).unwrap();
    let rows = page.lines().filter_map(|line| {
        let row = line.strip_prefix("| ")?.strip_suffix(" |")?;
        let (status, meaning) = row.split_once(" | ")?;
        let is_status = status
            .split(", ")
            .all(|number| number.parse::<u8>().is_ok());
        is_status.then(|| (status.to_owned(), meaning.replace("\\|", "|")))
    });
    rows.collect()
}

/// The statuses that a long help lists, and their meanings.
fn statuses_of_help(long: &str) -> Vec<(String, String)> {
    let lines = long
        .lines()
        .skip_while(|line| !line.starts_with("Exit status"));
    let lines = lines.skip(1).map_while(|line| line.strip_prefix("  "));
    let pairs = lines.map(|line| line.split_once("  ").expect("a status and its meaning"));
    pairs
        .map(|(status, meaning)| (status.to_owned(), meaning.trim().to_owned()))
        .collect()
}

#[test]
fn guide_has_the_exit_statuses_of_the_help() {
    let sandbox = Sandbox::new();
    for (page, args) in [
        ("README", &["--help"][..]),
        ("fsck", &["fsck", "--help"]),
        ("diff", &["diff", "--help"]),
    ] {
        let long = String::from_utf8(sandbox.ok(args)).unwrap();
        let statuses = statuses_of_help(&long);
        assert!(statuses.len() >= 3, "{long}");
        assert_eq!(statuses_of_page(page), statuses, "{page}.md");
    }
}

#[test]
fn version_is_printed_three_ways() {
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
