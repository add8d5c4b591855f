//! `bcow`: creates, mounts, inspects, checks and extracts BCoW images.
//!
//! The path through it: [`Cli`] is the command line, with [`examples`] in its help, and
//! [`foreign_words`] knows the words of other programs. [`run`] selects the command, [`commands`]
//! has one file for each, [`ui`] formats messages, progress and results, and [`error`] describes a
//! failure.

mod commands;
mod examples;
mod foreign_words;
mod sealing;
mod ui;

use std::ffi::OsString;
use std::process::ExitCode;

use bcow_images::global::GlobalArgs;
use bcow_images::{
    cache, changes, disks, error, image, interrupt, names, new_file, push, remote, running, size,
    stat, views,
};
use bcow_mounts::helper::{self, Request};
use bcow_mounts::{ask, heap, limits, named_mount};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::error::{CommandError, exit};
use crate::ui::Ui;

/// The exit statuses of all commands but `fsck` and `diff`.
const EXIT_STATUS: &str = "\
Exit status:
  0         done
  1         failed
  2         the command line is invalid
  130       interrupted by a signal
  129, 143  ended by SIGHUP or SIGTERM without cleanup, if the work did not stop in two seconds
  141       the reader of standard output closed it, as in `bcow ls IMG | head`";

/// Block-mapped copy-on-write images for container layers
///
/// bcow creates, mounts, inspects, checks and extracts BCoW images and disks. A BCoW image is one
/// file that holds a container image as a file system. Its blocks are compressed, and every block
/// has a checksum. A BCoW disk is a virtual disk in the same file format, like a qcow2 file.
#[derive(Debug, Parser)]
#[command(
    name = "bcow",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Exit status: 0 done, 1 failed, 2 usage; `bcow fsck` and `bcow diff`: as fsck(8) and diff(1).",
    after_long_help = format!("\
{EXIT_STATUS}
`bcow fsck` and `bcow diff` have the statuses of fsck(8) and diff(1); see their help.

Environment:
  BCOW_STORE         directories to search for layers, separated by colons (see also --store)
  BCOW_CACHE         directory of the cache for remote images (see --cache-dir)
  BCOW_CACHE_LIMIT   largest size of that cache (see --cache-limit)
  BCOW_MIRRORS       URLs of mirrors, separated by spaces (see --mirror)
  BCOW_BACKING_URLS  allowed URLs of backings, separated by spaces (see --backing-url)
  BCOW_POOLS         directory for the sockets of pools (see `bcow help pool start`)
  BCOW_VIEWS         directory for the ext4 metadata of images (see `bcow help create`)
  BCOW_LOG           filter of the log on standard error, as in BCOW_LOG=bcow=debug (see also -v)
  NO_COLOR           disables colour
  SOURCE_DATE_EPOCH  the time that `bcow convert` and `bcow commit` record, in seconds since 1970

Results go to standard output. Messages, progress and errors go to standard error.")
)]
struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Convert(commands::convert::Args),
    Copy(commands::copy::Args),
    Create(commands::create::Args),
    Resize(commands::resize::Args),
    Rebase(commands::rebase::Args),
    Commit(commands::commit::Args),
    Compact(commands::compact::Args),
    Seal(commands::seal::Args),
    Snapshot(commands::snapshot::Args),
    Fork(commands::fork::Args),
    Rollback(commands::rollback::Args),
    #[command(alias = "info")]
    Inspect(commands::inspect::Args),
    Map(commands::map::Args),
    #[command(alias = "check")]
    Fsck(commands::fsck::Args),
    Ls(commands::ls::Args),
    Cat(commands::cat::Args),
    Extract(commands::extract::Args),
    Export(commands::export::Args),
    Diff(commands::diff::Args),
    Mount(commands::mount::Args),
    #[command(alias = "unmount")]
    Umount(commands::umount::Args),
    Run(commands::run::Args),
    Cache(commands::cache::Args),
    Stats(commands::stats::Args),
    Pool(commands::pool::Args),
    Ps(commands::ps::Args),
    Top(commands::top::Args),
    Serve(commands::serve::Args),
    Attach(commands::attach::Args),
    Detach(commands::detach::Args),
    #[command(alias = "completion")]
    Completions(commands::completions::Args),
    Man(commands::man::Args),
    Version(commands::version::Args),
    #[command(hide = true)]
    FetchBlob(commands::fetch_blob::Args),
}

fn main() -> ExitCode {
    abort_on_panic();
    let arguments = match helper::command_line() {
        Ok(Request::Run(arguments)) => foreign_words::translate(arguments),
        Ok(Request::Help) => {
            print!("{}", helper::USAGE);
            return ExitCode::from(exit::DONE);
        }
        Err(error) => {
            Ui::new(&GlobalArgs::default()).error(&error);
            return exit_code(error.exit());
        }
    };
    let cli = match parse(&arguments) {
        Ok(cli) => cli,
        Err(error) => return exit_code(no_command(error, &arguments)),
    };
    let ui = Ui::new(&cli.global);
    ui.start_log();
    limits::adapt();
    match run(&cli.command, &ui) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let status = error.exit();
            // `bcow ls IMG | head` is not a failure, and prints no error.
            if status != exit::PIPE_CLOSED {
                let kept = kept(&cli.command).filter(|_| status == exit::INTERRUPTED);
                ui.error(&error.hint_if(kept));
            }
            exit_code(status)
        }
    }
}

/// The command line with everything that its help shows.
fn command() -> clap::Command {
    examples::add("bcow", Cli::command())
}

fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    match parse_of_one_command(arguments) {
        Some(cli) => Ok(cli),
        None => Cli::from_arg_matches(&command().try_get_matches_from(arguments)?),
    }
}

/// Parses the command lines that a start of a container executes. To make the options and the help
/// of all commands takes milliseconds, as long as the rest of a mount. `None` for other commands,
/// and for a command line that is not valid or asks for help.
fn parse_of_one_command(arguments: &[OsString]) -> Option<Cli> {
    let name = arguments.get(1)?.to_str()?;
    let command = match name {
        "mount" => commands::mount::Args::augment_args(clap::Command::new("mount")),
        "umount" => commands::umount::Args::augment_args(clap::Command::new("umount")),
        _ => return None,
    };
    let all = GlobalArgs::augment_args(clap::Command::new("bcow")).subcommand(command);
    let matches = all.try_get_matches_from(arguments).ok()?;
    Cli::from_arg_matches(&matches).ok()
}

/// A panic is a bug of bcow, and the state that a panicked thread leaves behind is not reliable:
/// the process aborts. The profile still unwinds, because a library for foreign formats may panic
/// on a bad image; that panic becomes an error.
fn abort_on_panic() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !bcow_foreign::is_guarded() {
            default_hook(panic);
            std::process::abort();
        }
    }));
}

/// What a command leaves if it is interrupted.
fn kept(command: &Command) -> Option<&'static str> {
    Some(match command {
        Command::Convert(args) if args.has_cache() => {
            "the destination is as it was; the layers in the cache are kept"
        }
        Command::Convert(_) => "the destination is as it was",
        Command::Copy(_) => "what was copied is kept; the same command continues",
        Command::Extract(_) => "the files that were extracted are kept; --force replaces them",
        Command::Commit(_) | Command::Rebase(_) => "the content of the disk is as it was",
        Command::Compact(_) | Command::Seal(_) | Command::Export(_) => "no file was changed",
        Command::Cache(args) if args.keeps_what_it_fetched() => {
            "what was fetched is kept; the same command continues"
        }
        _ => return None,
    })
}

/// The exit status in the numbering of the caller: mount(8) has its own.
fn exit_code(status: u8) -> ExitCode {
    if helper::is_called(std::env::args_os().next().as_deref()) {
        ExitCode::from(helper::exit_status(status))
    } else {
        ExitCode::from(status)
    }
}

fn run(command: &Command, ui: &Ui) -> Result<u8, CommandError> {
    match command {
        // fsck(8) and diff(1) have exit statuses of their own.
        Command::Fsck(args) => return commands::fsck::run(args, ui),
        Command::Diff(args) => return commands::diff::run(args, ui),
        // The background process of a mount, and that of a pool, have a status.
        Command::Mount(args) => return commands::mount::run(args, ui),
        Command::Fork(args) => return commands::fork::run(args, ui),
        Command::Rollback(args) => return commands::rollback::run(args, ui),
        // The status is that of a program.
        Command::Run(args) => return commands::run::run(args),
        Command::Pool(args) => return commands::pool::run(args, ui),
        Command::Convert(args) => commands::convert::run(args, ui),
        Command::Copy(args) => commands::copy::run(args, ui),
        Command::Create(args) => commands::create::run(args, ui),
        Command::Resize(args) => commands::resize::run(args, ui),
        Command::Rebase(args) => commands::rebase::run(args, ui),
        Command::Commit(args) => commands::commit::run(args, ui),
        Command::Compact(args) => commands::compact::run(args, ui),
        Command::Seal(args) => commands::seal::run(args, ui),
        Command::Snapshot(args) => commands::snapshot::run(args, ui),
        Command::Inspect(args) => commands::inspect::run(args, ui),
        Command::Map(args) => commands::map::run(args, ui),
        Command::Ls(args) => commands::ls::run(args, ui),
        Command::Cat(args) => commands::cat::run(args, ui),
        Command::Extract(args) => commands::extract::run(args, ui),
        Command::Export(args) => commands::export::run(args, ui),
        Command::Umount(args) => commands::umount::run(args, ui),
        Command::Cache(args) => commands::cache::run(args, ui),
        Command::Stats(args) => commands::stats::run(args, ui),
        Command::Ps(args) => commands::ps::run(args, ui),
        Command::Top(args) => commands::top::run(args, ui),
        Command::Serve(args) => commands::serve::run(args, ui),
        Command::Attach(args) => commands::attach::run(args, ui),
        Command::Detach(args) => commands::detach::run(args),
        Command::Completions(args) => commands::completions::run(args, ui),
        Command::Man(args) => commands::man::run(args, ui),
        Command::Version(args) => commands::version::run(args, ui),
        Command::FetchBlob(args) => commands::fetch_blob::run(args, ui),
    }
    .map(|()| exit::DONE)
}

/// Prints the help, the version or the error of the command line. Returns the exit status.
fn no_command(mut error: clap::Error, arguments: &[OsString]) -> u8 {
    use clap::error::{ContextKind, ErrorKind};
    // "To pass '-x' as a value, use '-- -x'": a name that begins with a hyphen is rare.
    error.remove(ContextKind::Suggested);
    let printed = match foreign_words::advice(&error, arguments) {
        Some(advice) => {
            Ui::new(&GlobalArgs::default()).error(&advice);
            Ok(())
        }
        None => error.print(),
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match printed {
            Ok(()) => exit::DONE,
            Err(error) => CommandError::standard_output(&error).exit(),
        },
        // It has other exit statuses.
        _ if foreign_words::is_command(arguments, &["fsck", "check"]) => exit::FSCK_USAGE,
        _ => exit::USAGE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }
}
