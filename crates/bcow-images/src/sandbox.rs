//! The sandbox of a command that reads images.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use bcow_sandbox::{Access, Attributes, CapabilitySet, Sandbox, Service, When, WhenArgs};

use crate::disks::is_disk;
use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::{Name, views};

/// The option of commands with a sandbox.
#[derive(Debug, Default, clap::Args)]
pub struct SandboxArgs {
    #[command(flatten)]
    when: WhenArgs,
}

impl SandboxArgs {
    /// Begins the sandbox of a process that opens these images.
    pub fn begin<'n>(
        &self,
        images: impl IntoIterator<Item = &'n Name>,
        stores: &StoreArgs,
    ) -> Result<Sandbox, CommandError> {
        if stores.may_need_network(images) {
            return match self.when.sandbox {
                When::Auto => self.begin_service(),
                When::Require | When::Off => self.without(NETWORK),
            };
        }
        self.begin_changing(Attributes::Refused)
    }

    /// Begins the sandbox of a process that needs no network, and changes these attributes.
    pub fn begin_changing(&self, attributes: Attributes) -> Result<Sandbox, CommandError> {
        Sandbox::begin(self.when.sandbox, attributes).context(cannot)
    }

    /// The sandbox of a process that needs the network, or mounts with the kernel driver.
    pub fn begin_service(&self) -> Result<Sandbox, CommandError> {
        Sandbox::of_service(self.when.sandbox, Service::Mounts).context(cannot)
    }

    /// The process gets no sandbox, which is an error if the user requires one.
    pub fn without(&self, reason: &str) -> Result<Sandbox, CommandError> {
        match self.when.sandbox {
            When::Require => Err(CommandError::new(cannot()).caused_by_text(reason)),
            When::Auto | When::Off => Ok(Sandbox::off()),
        }
    }

    pub fn is_off(&self) -> bool {
        self.when.sandbox == When::Off
    }
}

/// Completes the sandbox: apart from files that are open, the process only needs these.
pub fn complete(
    sandbox: &mut Sandbox,
    paths: &[(PathBuf, Access)],
    capabilities: CapabilitySet,
) -> Result<(), CommandError> {
    let confined = sandbox.confine(paths, capabilities);
    confined
        .and_then(|()| sandbox.finish(Attributes::Refused))
        .context(cannot)
}

/// Completes the sandbox of a process that opens no further file.
pub fn close(mut sandbox: Sandbox) -> Result<(), CommandError> {
    complete(&mut sandbox, &[], CapabilitySet::empty())
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

/// Why a process has no sandbox.
pub const NETWORK: &str = "the process needs the network";

/// The action of an error of the sandbox.
pub fn cannot() -> &'static str {
    "cannot enter the sandbox"
}
