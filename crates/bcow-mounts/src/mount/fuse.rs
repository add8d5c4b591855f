//! A mount with the FUSE driver, in a process of its own or in the process of a pool.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_fuse::lower::{OverlayLower, OverlayXattrs};
use bcow_fuse::options::Access;
use bcow_fuse::session::Content;
use bcow_fuse::stats::{About, ServedBy};
use bcow_fuse::{AnySession, Handover, ImageFs, MountOptions, MountStats, Session};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::OpenImage;
use bcow_images::record::Recording;
use bcow_images::running::{self, Service};

use super::ahead;
use super::host::{Host, UpperUse};
use super::{owners, share, upper};
use crate::args::MountArgs;
use crate::error::failure;
use bcow_images::image::Messages;

/// A mount that programs can use as soon as its session is served.
pub struct Mounted {
    pub session: AnySession,
    pub stats: Arc<MountStats>,
    /// The entry for `bcow ps`.
    pub service: Service,
    /// The identity of the image.
    pub identity: [u8; 32],
    pub access: Access,
    /// To be started when the mount is served.
    pub fetching: Option<ahead::Ready>,
    /// Becomes a trace when the mount has ended; never in a pool.
    pub recording: Option<Recording>,
}

/// The entry of a new mount for `bcow ps`.
pub fn service(
    args: &MountArgs,
    host: &Host<'_>,
    mountpoint: &Path,
    device: Option<String>,
) -> Result<Service, CommandError> {
    let mount = bcow_fuse::mounted_image(mountpoint);
    let is_writable = mount.is_ok_and(|mount| mount.is_writable);
    let is_repeatable = host.pool.is_none() && !args.foreground;
    let directory = is_repeatable.then(|| running::absolute(Path::new(".")));
    Ok(Service {
        kind: "mount".to_owned(),
        image: args.image.absolute().to_string_lossy().into_owned(),
        layers: args.layer_names()?,
        upper: args.upper.path().map(running::absolute),
        at: vec![mountpoint.to_string_lossy().into_owned()],
        mode: if is_writable { "rw" } else { "ro" }.to_owned(),
        since: running::now(),
        device,
        pool: host.pool.as_ref().map(|pool| pool.name.clone()),
        directory,
        ..Service::default()
    })
}

/// What the statistics of a mount say about it, if its source is the image.
pub fn about(
    args: &MountArgs,
    host: &Host<'_>,
    identity: [u8; 32],
    driver: ServedBy,
    recording: Option<&Recording>,
) -> About {
    let file = PathBuf::from(args.image.absolute());
    About {
        image: file.clone().into(),
        file,
        identity,
        cache: host.cache.clone(),
        driver: Some(driver),
        remote: crate::remote_report::of(&args.stores.remote),
        pool: host.pool.as_ref().map(|pool| pool.name.clone()),
        trace: recording.map(|recording| recording.destination().to_owned()),
    }
}

/// Content that is not mounted yet.
pub struct Opened {
    content: Content,
    options: MountOptions,
    stats: Arc<MountStats>,
    /// The identity of the image.
    pub identity: [u8; 32],
    /// Threads that answer requests.
    threads: usize,
    /// The owner of files that the upper cannot store without privilege.
    owner_is_needed: Option<u32>,
    /// Why the mount does not share files.
    why_not_shared: Option<String>,
    fetching: Option<ahead::Ready>,
    recording: Option<Recording>,
}

/// Opens the image and the upper.
pub fn open(
    args: &MountArgs,
    mut options: MountOptions,
    reason: String,
    host: &Host<'_>,
    upper_use: UpperUse<'_>,
    ui: &dyn Messages,
) -> Result<Opened, CommandError> {
    let open_options = args.open_options(&host.cache);
    let image = args.open_image(&open_options)?;
    let fetching = ahead::prepare(args, &image);
    let identity = image.identity();
    let record = |path| Recording::start(image.image().clone(), identity, path);
    let recording = args.record.as_deref().map(record).transpose()?;
    let tree = match &recording {
        None => image.tree()?.into_filesystem(),
        Some(recording) => image.tree_on(recording.device())?.into_filesystem(),
    };
    options.set_default_source(args.image.absolute());
    let driver = ServedBy {
        name: "fuse".to_owned(),
        reason,
    };
    let stats = Arc::new(MountStats::new(About {
        image: options.source().to_owned(),
        ..about(args, host, identity, driver, recording.as_ref())
    }));
    let mut owner_is_needed = None;
    let tree = Arc::new(tree);
    let union = upper::open(args, &image, &tree, host, upper_use, ui)?;
    let (content, why_not_shared) = match union {
        None => {
            let fs = ImageFs::new(Arc::clone(&tree));
            let content = Content::from(match options.overlay_lower() {
                None => fs,
                Some(xattrs) => fs.as_overlay_lower(overlay_lower(&image, &tree, xattrs)?),
            });
            (content, Some(share::NO_UPPER.to_owned()))
        }
        Some(union) => {
            owner_is_needed = upper::owner_who_is_needed(&union);
            share::content(args, &options, host, &image, union, upper_use.slots())?
        }
    };
    let threads = host.threads(args, args.upper.path().is_some());
    Ok(Opened {
        content,
        options,
        stats,
        identity,
        threads,
        owner_is_needed,
        why_not_shared,
        fetching,
        recording,
    })
}

/// What the image shows in addition to its tree, as a lower directory of overlayfs.
fn overlay_lower(
    image: &OpenImage,
    tree: &Filesystem,
    xattrs: OverlayXattrs,
) -> Result<OverlayLower, CommandError> {
    let cannot = || {
        format!(
            "cannot show {} as a lower directory of overlayfs",
            image.path().display()
        )
    };
    let layers = image.merged_layers();
    let layers = layers.into_iter().map(|layer| Filesystem::open(layer));
    let layers = layers.collect::<Result<Vec<_>, _>>().context(cannot)?;
    OverlayLower::new(tree, &layers, xattrs).context(cannot)
}

impl Opened {
    pub fn mount(
        self,
        args: &MountArgs,
        host: &Host<'_>,
        ui: &dyn Messages,
    ) -> Result<Mounted, CommandError> {
        let session = Session::mount(
            self.content,
            Arc::clone(&self.stats),
            args.directory(),
            &self.options,
            self.threads,
        )
        .map_err(|error| failure(&error))?;
        share::settle(args, &session, &self.stats, self.why_not_shared)?;
        let (mountpoint, device) = session.place();
        let service = Service {
            owners: owners(&self.options),
            ..service(args, host, &mountpoint, device)?
        };
        if service.mode == "rw"
            && let Some(owner) = self.owner_is_needed
        {
            // Only a process of its own has the command line of the mount, for a hint.
            let has_hint = !args.foreground && host.pool.is_none();
            upper::warn_of_owner(owner, args.image.shown(), args.directory(), has_hint, ui);
        }
        tracing::info!(
            "ready at {}, mounted as {} with {} threads, a cache of {} bytes and {}; device {}",
            mountpoint.display(),
            self.options.source().to_string_lossy(),
            self.threads,
            host.cache.figures().limit_bytes,
            match args.upper.path() {
                Some(upper) => format!("upper {}", upper.display()),
                None => "no upper".to_owned(),
            },
            service.device.as_deref().unwrap_or("unknown")
        );
        Ok(Mounted {
            session: AnySession::Fuse(session),
            stats: self.stats,
            service,
            identity: self.identity,
            access: self.options.access(),
            fetching: self.fetching,
            recording: self.recording,
        })
    }

    /// Takes over a mount of this content from a process that has ended. Sends no request to the
    /// mount, which this process does not serve yet.
    pub fn take_over(
        self,
        args: &MountArgs,
        handover: Handover,
        service: Service,
    ) -> Result<Mounted, CommandError> {
        let stats = Arc::clone(&self.stats);
        let (content, options) = (self.content, &self.options);
        let session = Session::take_over(content, stats, handover, options, self.threads);
        let session = session.map_err(|error| failure(&error))?;
        share::settle(args, &session, &self.stats, self.why_not_shared)?;
        Ok(Mounted {
            session: AnySession::Fuse(session),
            stats: self.stats,
            service,
            identity: self.identity,
            access: self.options.access(),
            fetching: self.fetching,
            recording: self.recording,
        })
    }
}
