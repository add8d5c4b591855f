//! The directory of the cache for remote images.

use std::path::{Path, PathBuf};

use bcow_remote::{Cache, CacheProblem};

use crate::error::CommandError;
use crate::size;

/// Opens the cache, and creates it if it is missing. A directory that the user names must be
/// usable; if no default directory is usable, the result is `None`.
pub fn open(argument: Option<&Path>) -> Result<Option<Cache>, CommandError> {
    if let Some(named) = named(argument) {
        let hint = "name another directory with --cache-dir, or use --no-cache";
        return Cache::open(&named)
            .map(Some)
            .map_err(|problem| refused(problem).hint(hint));
    }
    let directories = default_directories();
    for (index, path) in directories.iter().enumerate() {
        match Cache::open(path) {
            Ok(cache) => return Ok(Some(cache)),
            Err(problem) => log(&problem, index + 1 == directories.len()),
        }
    }
    Ok(None)
}

/// The cache that [`open`] would use.
pub enum FoundCache {
    /// It exists.
    Present(Cache),
    /// It does not exist at this path.
    Missing(PathBuf),
}

/// Finds the cache that [`open`] would use, and does not create it.
pub fn find(argument: Option<&Path>) -> Result<FoundCache, CommandError> {
    let mut missing = None;
    let named = named(argument);
    let is_named = named.is_some();
    let directories = named.map_or_else(default_directories, |named| vec![named]);
    for (index, path) in directories.iter().enumerate() {
        match Cache::find(path) {
            Ok(Some(cache)) => return Ok(FoundCache::Present(cache)),
            Ok(None) => drop(missing.get_or_insert(path.clone())),
            Err(problem) if is_named => return Err(refused(problem)),
            Err(problem) => log(&problem, index + 1 == directories.len()),
        }
    }
    missing.map(FoundCache::Missing).ok_or_else(|| {
        CommandError::new("no directory can be used as a cache").hint("name one with --cache-dir")
    })
}

/// Logs that a default directory is not usable. Root of a user namespace cannot write to /var/cache
/// as a rule, which is worth a warning only if no other directory is left.
fn log(problem: &CacheProblem, is_last: bool) {
    if is_last || is_first_user_namespace() {
        tracing::warn!("{problem}")
    } else {
        tracing::debug!("{problem}")
    }
}

/// Whether the users of this process are those of the machine.
fn is_first_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map");
    map.is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

fn refused(problem: CacheProblem) -> CommandError {
    CommandError::new(problem.to_string())
}

/// The limit of the command line or the environment.
pub fn limit(argument: Option<u64>) -> Result<Option<u64>, CommandError> {
    const VARIABLE: &str = "BCOW_CACHE_LIMIT";
    match (argument, std::env::var_os(VARIABLE)) {
        (Some(limit), _) => Ok(Some(limit)),
        (None, Some(text)) if !text.is_empty() => {
            let text = text.to_string_lossy();
            size::parse(&text)
                .map(Some)
                .map_err(|why| CommandError::usage(format!("invalid {VARIABLE}: {text:?}: {why}")))
        }
        _ => Ok(None),
    }
}

/// The directory that the user names, on the command line or in the environment.
pub fn named(argument: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os("BCOW_CACHE").filter(|path| !path.is_empty());
    argument
        .map(Path::to_owned)
        .or_else(|| variable().map(PathBuf::from))
}

/// The first default directory in which this process can create files.
pub fn default_directory() -> Option<PathBuf> {
    let mut directories = default_directories();
    let usable = directories.iter().position(|directory| {
        // A directory that does not exist is created in the nearest one above it that does.
        let existing = directory.ancestors().find(|above| above.exists());
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        existing.is_some_and(|above| rustix::fs::access(above, access).is_ok())
    });
    match (usable, directories.is_empty()) {
        (_, true) => None,
        (usable, false) => Some(directories.swap_remove(usable.unwrap_or(0))),
    }
}

/// The default directories; the first usable one is used. Root has two, because root of a user
/// namespace cannot write to /var/cache. A relative path is ignored, as the specification of XDG
/// says.
fn default_directories() -> Vec<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    let of_root = is_root.then(|| PathBuf::from("/var/cache/bcow"));
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let directory = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let of_user = directory.map(|directory| directory.join("bcow"));
    of_root.into_iter().chain(of_user).collect()
}
