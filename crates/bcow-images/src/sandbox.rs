//! The sandbox of a command that reads images.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use bcow_sandbox::{Access, Attributes, CapabilitySet, Sandbox, Sockets, When, WhenArgs};

use crate::disks::is_disk;
use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::{Name, views};

/// A view that opening an image makes gets attributes.
const OF_NEW_VIEWS: Attributes = Attributes::OfOpenFiles;

/// The option of commands with a sandbox.
#[derive(Debug, Default, clap::Args)]
pub struct SandboxArgs {
    #[command(flatten)]
    when: WhenArgs,
}

impl SandboxArgs {
    /// Begins the sandbox of a process that opens these images before it has the whole sandbox, and
    /// makes no socket. The process has one thread.
    pub fn begin<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
    ) -> Result<Sandbox, CommandError> {
        self.begin_for(images, stores, OF_NEW_VIEWS, Sockets::OfOpenOnes, 0)
    }

    /// The same for a process that makes sockets until it has its whole sandbox, and has a cache of
    /// this many bytes.
    pub fn begin_with_sockets<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
        cache: u64,
    ) -> Result<Sandbox, CommandError> {
        self.begin_for(images, stores, OF_NEW_VIEWS, Sockets::UntilTheEnd, cache)
    }

    /// The same for a process that opens these images when it has its whole sandbox.
    pub fn begin_to_open_later<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
    ) -> Result<Sandbox, CommandError> {
        self.begin_for(images, stores, Attributes::Refused, Sockets::OfOpenOnes, 0)
    }

    fn begin_for<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
        attributes: Attributes,
        sockets: Sockets,
        cache: u64,
    ) -> Result<Sandbox, CommandError> {
        if !self.prepare(images, stores)? {
            return Ok(Sandbox::off());
        }
        let attributes = stores.remote.rights().attributes.max(attributes);
        self.begin_changing(attributes, sockets, cache)
    }

    /// Starts the process that makes connections for one that opens these images, if they may need
    /// some. Returns whether this process can have a sandbox. It has one thread.
    pub fn prepare<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
    ) -> Result<bool, CommandError> {
        if self.is_off() || !stores.may_need_network(images) {
            return Ok(!self.is_off());
        }
        match stores.remote.start_fetcher(self.when.sandbox) {
            Ok(()) => Ok(true),
            Err(error) => self.without(&error.in_one_line()).map(|_| false),
        }
    }

    /// Begins the sandbox of a process that needs no network, changes these attributes, and has a
    /// cache of this many bytes.
    pub fn begin_changing(
        &self,
        attributes: Attributes,
        sockets: Sockets,
        cache: u64,
    ) -> Result<Sandbox, CommandError> {
        Sandbox::begin(self.when.sandbox, attributes, sockets, Some(cache)).context(cannot)
    }

    /// The process gets no sandbox, which is an error if the user requires one.
    pub fn without(&self, reason: &str) -> Result<Sandbox, CommandError> {
        match self.when.sandbox {
            When::Require => Err(CommandError::new(cannot()).caused_by_text(reason)),
            When::Auto | When::Off => Ok(Sandbox::off()),
        }
    }

    pub fn when(&self) -> When {
        self.when.sandbox
    }

    pub fn is_off(&self) -> bool {
        self.when.sandbox == When::Off
    }
}

/// The process that makes the connections of this one reads no further file from now on.
pub fn seal(stores: &StoreArgs) -> Result<(), CommandError> {
    let sealed = stores.remote.seal_fetcher();
    sealed.map_err(|why| CommandError::new(cannot()).caused_by_text(why.to_string()))
}

/// Completes the sandbox: apart from files that are open, the process only needs these, and what
/// files on other machines need.
pub fn complete(
    sandbox: &mut Sandbox,
    stores: &StoreArgs,
    paths: &[(PathBuf, Access)],
    capabilities: CapabilitySet,
) -> Result<(), CommandError> {
    let remote = stores.remote.rights();
    let paths = [paths, &remote.files].concat();
    let mut kept = capabilities;
    if !remote.files.is_empty() {
        // The cache may be that of another user.
        kept |= CapabilitySet::DAC_OVERRIDE;
    }
    let confined = sandbox.confine(&paths, kept);
    confined
        .and_then(|()| sandbox.finish(remote.attributes))
        .context(cannot)
}

/// Completes the sandbox of a process that opens no further file.
pub fn close(mut sandbox: Sandbox, stores: &StoreArgs) -> Result<(), CommandError> {
    seal(stores)?;
    complete(&mut sandbox, stores, &[], CapabilitySet::empty())
}

/// What the process of a disk needs to make a view: its directory, which is made if it is missing,
/// because the process cannot change the directory above.
pub fn views_of(image: &Name) -> Option<(PathBuf, Access)> {
    image.path().filter(|path| is_disk(path))?;
    let directory = views::directory(None)?;
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(&directory);
    made.ok().map(|()| (directory, Access::Write))
}

/// The action of an error of the sandbox.
pub fn cannot() -> &'static str {
    "cannot enter the sandbox"
}
