//! `bcow fsck`

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::check::{self, CheckOptions};
use bcow::format::compatible;
use bcow::{Image, OpenOptions};
use bcow_erofs::check as erofs_check;
use bcow_erofs::reader::Filesystem;
use serde_json::json;

use crate::error::{CommandError, Context, exit};
use crate::image::{cannot_open, refuse_what_is_no_file};
use crate::names::printable;
use crate::size::{Count, Human};
use crate::ui::Ui;

/// Check an image
///
/// Checks structure and checksums of the file, then the file system in it: every directory, inode
/// and link. With --data also every stored block and the whole Merkle tree, that is, every byte.
/// Nothing is changed.
///
/// Each finding is a line: how bad it is, a code, where, and what. Codes are stable: those of the
/// format stand in its specification, section 12, those of the file system begin with `erofs-`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Exit status, as in fsck(8):
  0   no errors
  4   errors are left
  8   the check could not be done (also: not a BCoW file, or one of a newer version)
  16  the command line makes no sense")]
pub struct Args {
    /// The image
    image: PathBuf,
    /// Read and check every byte
    #[arg(long)]
    data: bool,
    /// Repair what can be repaired (not supported yet)
    #[arg(long)]
    repair: bool,
    /// Threads that read and check [default: one for each CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Print JSON (schema bcow.fsck/1)
    #[arg(long)]
    json: bool,
}

/// Checks; the exit status says what came out.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    run_check(args, ui).map_err(|error| match error.exit() {
        exit::FAILED => error.exit_with(exit::FSCK_OPERATIONAL),
        exit::USAGE => error.exit_with(exit::FSCK_USAGE),
        _ => error,
    })
}

/// Both crates' findings, in one form.
struct Finding {
    error: bool,
    code: &'static str,
    place: String,
    message: String,
}

fn run_check(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    if args.repair {
        return Err(
            CommandError::not_supported_yet("repairing a sealed image").hint(
                "make the image again from its source with `bcow convert`; `bcow extract` saves what is intact",
            ),
        );
    }
    let path = &args.image;
    refuse_what_is_no_file(path)?;
    let storage = Arc::new(File::open(path).context(|| format!("cannot open {}", path.display()))?);
    let threads = match args.jobs {
        Some(jobs) => jobs.into(),
        None => std::thread::available_parallelism().map_or(1, |n| n.get()),
    };
    let options = CheckOptions {
        data: args.data,
        threads,
    };

    let progress = ui.progress();
    progress.phase("checking");
    let report = check::check(storage.clone(), &options)
        .context(|| format!("cannot check {}", path.display()))?;
    // What this program does not know it cannot judge.
    if report
        .findings
        .iter()
        .any(|f| matches!(f.code, "not-bcow" | "version" | "unknown-feature"))
    {
        return Err(match Image::open(path, &OpenOptions::default()) {
            Err(error) => cannot_open(path, &error),
            Ok(_) => CommandError::new(format!("{} changes while it is checked", path.display())),
        });
    }
    let mut findings: Vec<Finding> = report
        .findings
        .iter()
        .map(|f| Finding {
            error: f.severity == check::Severity::Error,
            code: f.code,
            place: f.place.clone(),
            message: f.message.clone(),
        })
        .collect();
    // Blocks that were all read and found good need no second reading; if some are bad, reading the
    // files says which files they belong to.
    let read_files = args.data && !report.is_sound();
    let inodes = check_tree(path, storage, read_files, &mut findings)?;
    drop(progress);

    let errors = findings.iter().filter(|f| f.error).count() as u64 + report.omitted;
    let warnings = findings.iter().filter(|f| !f.error).count() as u64;
    let verdict = if errors > 0 { "errors" } else { "clean" };
    if args.json {
        let findings: Vec<_> = findings
            .iter()
            .map(|f| {
                json!({
                    "code": f.code,
                    "severity": if f.error { "error" } else { "warning" },
                    "place": f.place,
                    "message": f.message,
                })
            })
            .collect();
        ui.print_json(&json!({
            "schema": "bcow.fsck/1",
            "verdict": verdict,
            "errors": errors,
            "warnings": warnings,
            "findings": findings,
            "findings_omitted": report.omitted,
            "data": args.data,
            "tables": report.tables,
            "blocks": report.blocks,
            "bytes_read": report.bytes_read,
            "inodes": inodes,
        }))?;
    } else {
        let mut out = ui.output();
        for finding in &findings {
            writeln!(
                out,
                "{} {}: {}: {}",
                if finding.error { "error" } else { "warning" },
                finding.code,
                printable(&finding.place),
                printable(&finding.message)
            )?;
        }
        if report.omitted > 0 {
            writeln!(out, "... and {} more", Count(report.omitted))?;
        }
        if errors + warnings > 0 || !ui.quiet() {
            let counts = match (errors, warnings) {
                (0, 0) => String::new(),
                (0, n) => format!(", {}", plural(n, "warning")),
                (n, 0) => format!(" {} found", plural(n, "error")),
                (n, m) => format!(" {} and {} found", plural(n, "error"), plural(m, "warning")),
            };
            let read = match args.data {
                true => format!(", {} read", Human(report.bytes_read)),
                false => ", data not read".to_owned(),
            };
            writeln!(
                out,
                "{}: {}{counts} ({}, {}{}{read})",
                path.display(),
                if errors > 0 { "damaged:" } else { "clean" },
                plural(report.tables, "table"),
                plural(report.blocks, "block"),
                inodes.map_or(String::new(), |n| format!(", {}", plural(n, "inode"))),
            )?;
        }
        out.finish()?;
    }
    Ok(if errors > 0 {
        exit::FSCK_ERRORS_LEFT
    } else {
        exit::DONE
    })
}

/// Checks the file system, if there is one that can be opened; returns how many inodes it says it has.
fn check_tree(
    path: &Path,
    storage: Arc<File>,
    read_files: bool,
    findings: &mut Vec<Finding>,
) -> Result<Option<u64>, CommandError> {
    let image = match Image::open_storage(storage, &OpenOptions::default()) {
        Ok(image) => image,
        // The first check has said what is wrong, if it is the file.
        Err(error) if error.code().is_some() && !findings.is_empty() => return Ok(None),
        Err(error) => return Err(cannot_open(path, &error)),
    };
    if !image.header().features.has_compatible(compatible::EROFS) {
        return Ok(None);
    }
    let filesystem = match Filesystem::open(image) {
        Ok(filesystem) => filesystem,
        Err(error) => {
            findings.push(Finding {
                error: true,
                code: "erofs-superblock",
                place: "superblock".into(),
                message: error.to_string(),
            });
            return Ok(None);
        }
    };
    let options = erofs_check::CheckOptions {
        read_data: read_files,
    };
    let found = erofs_check::check(&filesystem, &options);
    findings.extend(found.into_iter().map(|f| Finding {
        error: f.severity == erofs_check::Severity::Error,
        code: f.code,
        place: f.place,
        message: f.message,
    }));
    Ok(Some(filesystem.superblock().inodes))
}

fn plural(count: u64, word: &str) -> String {
    match count {
        1 => format!("1 {word}"),
        n => format!("{} {word}s", Count(n)),
    }
}
