//! Whether a mount shares files with the other mounts of its pool.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bcow::Verify;
use bcow_fuse::lower::OverlayXattrs;
use bcow_fuse::options::WriteCache;
use bcow_fuse::session::Content;
use bcow_fuse::shared::{ImageKey, Layers};
use bcow_fuse::stats::FileSharing;
use bcow_fuse::{MountOptions, MountStats, Session};
use bcow_images::Name;
use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_union::fs::UnionFs;
use rustix::thread::CapabilitySet;

use super::driver::Way;
use super::host::{Host, TakenSlots};
use crate::args::{MountArgs, ShareChoice, VerifyWhat};
use crate::error::failure;

/// Why a mount with all conditions does not share files.
const NO_PASSTHROUGH: &str =
    "the kernel reads no files of other mounts (Linux 6.12 with CONFIG_FUSE_PASSTHROUGH does)";

/// Why a mount without an upper does not share files.
pub(super) const NO_UPPER: &str = "the mount has no upper";

/// Refuses `--share on` for a mount that cannot share files, before it is made.
pub(super) fn check(args: &MountArgs, way: &Way) -> Result<(), CommandError> {
    let reason = match args.share {
        ShareChoice::Auto | ShareChoice::Off => return Ok(()),
        ShareChoice::On if args.pool.is_none() => "only mounts of a pool share files",
        ShareChoice::On if args.upper.path().is_none() => NO_UPPER,
        ShareChoice::On if !matches!(way, Way::Fuse { .. }) => "only the FUSE driver shares files",
        ShareChoice::On => return Ok(()),
    };
    Err(CommandError::usage(format!("--share on: {reason}")))
}

/// The content of a mount with `union`, and why it does not share files; `None` if it does. A mount
/// that this process takes over has `slots` if it shared files before.
pub(super) fn content(
    args: &MountArgs,
    options: &MountOptions,
    host: &Host<'_>,
    image: &OpenImage,
    union: Arc<UnionFs>,
    slots: TakenSlots<'_>,
) -> Result<(Content, Option<String>), CommandError> {
    let above = args.layers()?;
    let mut names = std::iter::once(&args.image).chain(&above);
    let remote = names.any(Name::is_remote).then(|| number_of(args, &above));
    let key = ImageKey {
        identity: image.identity(),
        verify: verify(args).unwrap_or_default(),
        remote,
    };
    let layers = Layers {
        stack: Arc::clone(image.image()),
        // Their metadata would have to be fetched.
        files: if remote.is_some() { Vec::new() } else { image.merged_layers() },
    };
    let pool = host.pool.as_ref();
    let files = pool.and_then(|pool| pool.files.as_ref());
    if let TakenSlots::Of(slots) = slots {
        let files = files.ok_or_else(|| cannot("the hidden mount is missing"))?;
        let image = files.share_again(key, union.image(), layers, slots);
        let image = image.map_err(|error| failure(&error))?;
        return Ok((Content::Shared(union, image), None));
    }
    let why_not = match (reason_against(args, options, slots), files) {
        (Some(reason), _) => reason,
        (None, None) if pool.is_none() => "no pool serves the mount".to_owned(),
        (None, None) => "the supervisor of the pool is of an earlier version".to_owned(),
        (None, Some(files)) => match files.share(key, union.image(), layers) {
            Ok(image) => return Ok((Content::Shared(union, image), None)),
            Err(error) => failure(&error).in_one_line(),
        },
    };
    match args.share {
        ShareChoice::On if slots == TakenSlots::New => Err(cannot(&why_not)),
        _ => Ok((Content::Union(union), Some(why_not))),
    }
}

fn reason_against(
    args: &MountArgs,
    options: &MountOptions,
    slots: TakenSlots<'_>,
) -> Option<String> {
    let reason = match () {
        () if args.share == ShareChoice::Off => "as --share says",
        () if slots == TakenSlots::None => "the mount was made without",
        () if verify(args).is_none() => {
            "reads of the layers are not verified in the same way as those of the image"
        }
        () if options.write_cache() == WriteCache::Back => "the mount has the option writeback",
        () if !is_kernel_new() => NO_PASSTHROUGH,
        () if !may_share() => "this needs CAP_SYS_ADMIN outside of user namespaces",
        () => return None,
    };
    Some(reason.to_owned())
}

/// Images with the same content on different servers share no files: a server that does not answer
/// must not delay the mounts of the others.
fn number_of(args: &MountArgs, above: &[Name]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for name in std::iter::once(&args.image).chain(above) {
        name.shown().hash(&mut hasher);
    }
    hasher.finish()
}

/// What each read verifies; `None` if that is not the same for the image and the layers on top.
fn verify(args: &MountArgs) -> Option<Verify> {
    let all = args.verify == Some(VerifyWhat::Merkle);
    // Also without `--verify`.
    let image = all || args.image.is_remote() || args.stores.remote.root_hash.is_some();
    let verify = if image { Verify::Merkle } else { Verify::Checksums };
    Some(verify).filter(|_| image == all || !args.has_layers())
}

/// Whether this is Linux 6.12 or later: before, a descriptor without access (O_PATH) cannot be a
/// backing, and any other one could send requests to the process that closes it.
fn is_kernel_new() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok());
    (numbers.next(), numbers.next()) >= (Some(6_u32), Some(12))
}

/// Whether this process may let the kernel read other files in the place of those of a mount.
fn may_share() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
        && OverlayXattrs::here() == OverlayXattrs::Trusted
}

/// Puts into the statistics whether the mount shares files. Fails if it must.
pub(super) fn settle(
    args: &MountArgs,
    session: &Session,
    stats: &MountStats,
    why_not: Option<String>,
) -> Result<(), CommandError> {
    let on = !session.slots().is_empty();
    let reason = match (on, why_not) {
        (true, _) => None,
        (false, Some(reason)) => Some(reason),
        (false, None) => Some(NO_PASSTHROUGH.to_owned()),
    };
    let refused = reason.as_deref().filter(|_| args.share == ShareChoice::On);
    let result = refused.map_or(Ok(()), |reason| Err(cannot(reason)));
    stats.set_sharing(FileSharing { on, reason });
    result
}

/// The error of a mount that must share files.
fn cannot(reason: &str) -> CommandError {
    CommandError::new("the mount cannot share files with other mounts").caused_by_text(reason)
}
