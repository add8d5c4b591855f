//! The names that the arguments of the commands take: one table.

use std::ffi::OsStr;
use std::path::Path;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;

use crate::error::CommandError;
use crate::form::NameForm::{
    Bcow, Blob, ContainerdCache, Directory, DockerArchive, File, Layout, Lowest, OciArchive, Qcow2,
    Raw, Registry, S3, Tar, Web,
};
use crate::name::Name;
use crate::name_error::NameError;
use crate::takes::{NameUse, Takes};

/// IMG, DISK, BACKING and LAYER of all commands.
pub const IMAGE: Takes = Takes {
    to: NameUse::Open,
    forms: &[File, Bcow, Layout, Blob, Web, S3, Registry, Lowest],
};
/// IMG and COPY of `bcow fsck`, which checks whole files.
pub const WHOLE_IMAGE: Takes = Takes {
    to: NameUse::Open,
    forms: &[File, Bcow, Layout, Blob, Web, S3, Registry],
};
/// IMG of `bcow cache warm`.
pub const REMOTE_IMAGE: Takes = Takes {
    to: NameUse::Open,
    forms: &[Web, S3, Registry, Lowest],
};
/// NAME of `bcow fetch-blob`, and IMG of `bcow inspect --resolve`.
pub const REPOSITORY: Takes = Takes {
    to: NameUse::Open,
    forms: &[Registry],
};
/// SRC of `bcow copy`.
pub const COPY_FROM: Takes = Takes {
    to: NameUse::Open,
    forms: &[File, Bcow, Layout, Blob, OciArchive, Web, S3, Registry],
};
/// SRC of `bcow convert`.
pub const CONVERT_FROM: Takes = Takes {
    to: NameUse::Convert,
    forms: &[
        File,
        Bcow,
        Layout,
        Blob,
        OciArchive,
        DockerArchive,
        Tar,
        Directory,
        Raw,
        Qcow2,
        Web,
        S3,
        Registry,
    ],
};
/// DST of `bcow convert`.
pub const CONVERT_TO: Takes = Takes {
    to: NameUse::Write("convert"),
    forms: &[
        File,
        Bcow,
        Layout,
        OciArchive,
        Registry,
        S3,
        ContainerdCache,
        Raw,
        Qcow2,
    ],
};
/// DST of `bcow copy`.
pub const COPY_TO: Takes = Takes {
    to: NameUse::Write("copy"),
    forms: &[File, Bcow, Layout, OciArchive, Registry, S3],
};
/// NEW of `bcow commit --upper`.
pub const COMMIT_TO: Takes = Takes {
    to: NameUse::Write("commit"),
    forms: &[File, Bcow, Tar, Layout, OciArchive, Registry],
};
/// NEW of `bcow commit DISK`.
pub const COMMIT_DISK_TO: Takes = Takes {
    to: NameUse::Write("commit"),
    forms: &[File, Bcow],
};
/// FORM of `bcow export`, besides words without a colon.
pub const EXPORT_TO: Takes = Takes {
    to: NameUse::Write("export"),
    forms: &[Layout, OciArchive, Registry],
};

/// The new files of `bcow create`, `bcow seal` and `bcow compact`.
pub const fn new_file(command: &'static str) -> Takes {
    Takes {
        to: NameUse::Write(command),
        forms: &[File, Bcow],
    }
}

/// The path of a new BCoW file.
pub fn new_path(name: &Name) -> Result<&Path, CommandError> {
    name.path()
        .ok_or_else(|| new_file("create").refuse(name).into())
}

/// Parses a value of the command line as a name.
#[derive(Debug, Clone, Copy)]
pub struct NameParser(pub Takes);

impl TypedValueParser for NameParser {
    type Value = Name;

    fn parse_ref(
        &self,
        _command: &clap::Command,
        _argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Name, clap::Error> {
        self.0.parse(value).map_err(|error| {
            let text = format!("{error}\nhint: {}\n", error.hint());
            clap::Error::raw(ErrorKind::ValueValidation, text)
        })
    }
}

impl From<NameError> for CommandError {
    fn from(error: NameError) -> Self {
        CommandError::usage(error.to_string()).hint(error.hint())
    }
}
