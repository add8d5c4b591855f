//! Claims about `--help`, and about what the documents say of commands and options.

use std::path::{Path, PathBuf};

use regex::Regex;

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

/// Each command and each command below it, with its long help.
fn long_helps(sandbox: &Sandbox) -> Vec<(String, String)> {
    let help = |args: &[&str]| {
        String::from_utf8(sandbox.ok(&[args, &["--help"]].concat())).expect("a help is UTF-8")
    };
    let mut helps = Vec::new();
    for command in commands(&help(&[])) {
        let long = help(&[command]);
        for below in subcommands(&long) {
            helps.push((format!("{command} {below}"), help(&[command, below])));
        }
        helps.push((command.to_owned(), long));
    }
    helps
}

#[test]
fn long_help_explains_each_argument_and_option() {
    let sandbox = Sandbox::new();
    let entry = Regex::new(r"^ {2,6}(-\w\b|--\w|<[A-Z])").unwrap();
    let has_text = Regex::new(r"^ +\S.*\S {2,}\S").unwrap();
    for (command, help) in long_helps(&sandbox) {
        assert!(help.contains("Usage: bcow "), "{command}: {help}");
        let mut lines = help.lines().peekable();
        let mut entries = 0;
        while let Some(line) = lines.next() {
            assert!(line.chars().count() <= 100, "{command}: {line}");
            if entry.is_match(line) {
                entries += 1;
                let text = lines.peek().map_or("", |next| next.trim());
                assert!(
                    !text.is_empty() || has_text.is_match(line),
                    "{command}: {line} has no text"
                );
            }
        }
        assert!(entries > 0, "{command}: {help}");
    }
}

/// The documents for users: the pages of the guide, and README.md.
fn documents() -> Vec<PathBuf> {
    let pages = std::fs::read_dir(guide("README").parent().unwrap()).unwrap();
    let mut documents: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    documents.push(guide("README").with_file_name("../../README.md"));
    documents
}

#[test]
fn documents_name_only_commands_and_options_that_exist() {
    let sandbox = Sandbox::new();
    let helps = long_helps(&sandbox);
    // Up to the end of the command, of the inline code or of the line.
    let call = Regex::new(r"\bbcow ([a-z]+)( [a-z]+)?([^`|;&\n]*)").unwrap();
    let option = Regex::new(r"(?:^|\s)(--[a-z][a-z-]*)").unwrap();
    let mut checked = 0;
    for document in documents() {
        let text = std::fs::read_to_string(&document).unwrap();
        for found in call.captures_iter(&text) {
            let below = format!(
                "{}{}",
                &found[1],
                found.get(2).map_or("", |word| word.as_str())
            );
            let help = helps.iter().find(|(name, _)| *name == below);
            let help = help.or_else(|| helps.iter().find(|(name, _)| *name == found[1]));
            for option in option
                .captures_iter(&found[0])
                .map(|option| option.extract::<1>().1[0])
            {
                let (_, help) = help.unwrap_or_else(|| panic!("{document:?}: {}", &found[0]));
                let listed = Regex::new(&format!(r"{option}\b[^-]")).unwrap();
                assert!(
                    listed.is_match(help),
                    "{document:?}: {}: {option}",
                    &found[0]
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn guide_has_a_page_for_each_command() {
    let sandbox = Sandbox::new();
    for command in commands(&String::from_utf8(sandbox.ok(&["--help"])).unwrap()) {
        let page = std::fs::read_to_string(guide(command)).unwrap();
        assert!(
            page.starts_with(&format!("# bcow {command}\n")),
            "{command}"
        );
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

/// The page of a command in the guide, or `README`.
fn guide(name: &str) -> PathBuf {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide");
    guide.join(format!("{name}.md"))
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
fn bash_completes_files_and_options() {
    let sandbox = Sandbox::new();
    sandbox.write("complete", &sandbox.ok(&["completions", "bash"]));
    for (word, before, expected, excluded) in [
        ("", &["bcow"][..], "mount", "--quiet"),
        ("", &["bcow", "mount"], "", "--upper"),
        ("", &["bcow", "cache"], "prune", "--help"),
        ("--up", &["bcow", "mount"], "--upper", "--lazy"),
        ("", &["bcow", "completions"], "zsh", "--help"),
        ("", &["bcow", "snapshot"], "complete", "--help"),
        ("", &["bcow", "snapshot"], "rm", "--help"),
    ] {
        let words = [before, &[word]].concat();
        let script = "source ./complete; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1))
                      _bcow bcow \"${COMP_WORDS[-1]}\" \"${COMP_WORDS[-2]}\"
                      echo \"${COMPREPLY[@]}\"";
        let output = std::process::Command::new("bash")
            .args(["-c", script, "bash"])
            .args(&words)
            .current_dir(sandbox.path(""))
            .output()
            .unwrap();
        let found = String::from_utf8(output.stdout).unwrap();
        let found: Vec<&str> = found.split_whitespace().collect();
        assert!(!found.contains(&excluded), "{words:?}: {found:?}");
        assert_eq!(
            found.is_empty(),
            expected.is_empty(),
            "{words:?}: {found:?}"
        );
        assert!(
            expected.is_empty() || found.contains(&expected),
            "{words:?}: {found:?}"
        );
    }
}

#[test]
fn zsh_and_fish_complete_files() {
    let sandbox = Sandbox::new();
    let [zsh, fish] = ["zsh", "fish"]
        .map(|shell| String::from_utf8(sandbox.ok(&["completions", shell])).unwrap());
    for command in ["extract", "inspect", "mount", "snapshot"] {
        let label = format!("({command})");
        let block = zsh.lines().skip_while(|line| line.trim() != label);
        let mut arguments = block
            .take_while(|line| !line.starts_with(";;"))
            .filter(|line| line.starts_with("':"));
        assert!(arguments.next().unwrap().contains(":_files"), "{command}");
        // Words with `-f` are in the place of files, except those behind an option.
        let condition = format!("__fish_bcow_using_subcommand {command}");
        let mut lines = fish.lines().filter(|line| line.contains(&condition));
        let is_for_words = |line: &&str| {
            line.contains(" -f -a ")
                && !line.contains(" -l ")
                && !line.contains("seen_subcommand_from help")
        };
        assert_eq!(lines.find(is_for_words), None);
    }
}

#[test]
fn manual_pages_are_made_for_every_command() {
    let sandbox = Sandbox::new();
    let page = String::from_utf8(sandbox.ok(&["man"])).unwrap();
    assert!(page.contains(".TH bcow 1"), "{page}");
    sandbox.ok(&["man", "pages"]);
    let top = String::from_utf8(sandbox.ok(&["--help"])).unwrap();
    let named = Regex::new(r"(bcow[a-z\\-]*)\(1\)").unwrap();
    let pages = std::fs::read_dir(sandbox.path("pages")).unwrap();
    let pages: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    assert_eq!(pages.len(), 1 + long_helps(&sandbox).len());
    for path in pages {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
        for section in ["EXAMPLES", "EXIT STATUS", "SEE ALSO"] {
            let title = format!(".SH \"{section}\"\n");
            assert_eq!(page.matches(&title).count(), 1, "{name}: {section}");
        }
        for command in commands(&top)
            .into_iter()
            .filter(|one| name != format!("bcow-{one}"))
        {
            assert!(page.contains(&format!("bcow\\-{command}(1)")), "{page}");
        }
        for other in named.captures_iter(&page) {
            let other = other[1].replace('\\', "");
            let file = path.with_file_name(format!("{other}.1"));
            assert!(file.exists(), "{name} refers to {other}(1)");
        }
        assert!(page.contains("Show progress on standard error"), "{page}");
    }
    for (command, name) in [("info", "bcow-inspect"), ("cache-list", "bcow-cache-list")] {
        let page = String::from_utf8(sandbox.ok(&["man", command])).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
    }
}
