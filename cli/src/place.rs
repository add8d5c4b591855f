//! The forms of SRC and DST: one table for all commands.
//!
//! A name is `TRANSPORT:REST`, or a file. The text before the first colon is a transport if it
//! begins with a letter and has only small letters, digits and hyphens. A file of such a name is
//! written `./NAME`. An unknown transport is an error, and never a file name.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bcow::Storage;
use bcow_oci::store;
use bcow_oci::{ImageName, LayoutForm};

use crate::error::CommandError;

/// A transport, and its uses.
struct Transport {
    name: &'static str,
    /// The uses of the transport.
    uses: Uses,
}

/// The uses of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Uses {
    Both,
    /// Only a source; the hint says how to write such a file from an image.
    Source(&'static str),
    /// Neither source nor destination; the hint says how to copy an image there.
    Neither(&'static str),
}

/// The begin of the hint for destinations of skopeo.
const BY_SKOPEO: &str =
    "`bcow export IMG --to oci-archive:FILE` writes an archive for `skopeo copy oci-archive:FILE";

/// The hint for destinations on web servers.
const BY_UPLOAD: &str = "write a file, and copy it to the server";

const TRANSPORTS: [Transport; 17] = [
    Transport::both("bcow"),
    Transport::both("oci"),
    Transport::both("oci-archive"),
    Transport::both("raw"),
    Transport::both("qcow2"),
    Transport {
        name: "tar",
        uses: Uses::Source(
            "`bcow export IMG --to tar -o FILE` writes an archive of an image's tree",
        ),
    },
    Transport {
        name: "dir",
        uses: Uses::Source("`bcow extract IMG DIR` extracts an image"),
    },
    Transport {
        name: "docker-archive",
        uses: Uses::Source(BY_SKOPEO),
    },
    Transport {
        name: "https",
        uses: Uses::Source(BY_UPLOAD),
    },
    Transport {
        name: "http",
        uses: Uses::Source(BY_UPLOAD),
    },
    Transport::both("s3"),
    Transport::both("docker"),
    Transport::both("containerd-cache"),
    Transport::foreign("docker-daemon"),
    Transport::foreign("containers-storage"),
    Transport::foreign("ostree"),
    Transport::foreign("sif"),
];

impl Transport {
    const fn both(name: &'static str) -> Self {
        Transport {
            name,
            uses: Uses::Both,
        }
    }

    const fn foreign(name: &'static str) -> Self {
        Transport {
            name,
            uses: Uses::Neither(BY_SKOPEO),
        }
    }

    /// The hint for this transport.
    fn hint(&self, text: &str) -> String {
        match text == BY_SKOPEO {
            true => format!("{text} {}:...`", self.name),
            false => text.to_owned(),
        }
    }
}

/// The transport at the begin of a name, and the rest of the name. `None` for the name of a file.
fn split(name: &OsStr) -> Option<(&str, &OsStr)> {
    let bytes = name.as_bytes();
    let colon = bytes.iter().position(|&byte| byte == b':')?;
    let (transport, rest) = (&bytes[..colon], &bytes[colon + 1..]);
    let is_one = transport.first().is_some_and(u8::is_ascii_lowercase)
        && transport
            .iter()
            .all(|&byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'));
    let transport = std::str::from_utf8(transport).ok().filter(|_| is_one)?;
    Some((transport, OsStr::from_bytes(rest)))
}

/// A destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A BCoW file.
    File(PathBuf),
    /// An image in an OCI layout.
    Layout(Layout),
    /// An archive of a tree or a layer; `None` is standard output.
    Tar(Option<PathBuf>),
    /// The bytes of a disk.
    Raw(PathBuf),
    /// A qcow2 image.
    Qcow2(PathBuf),
    /// An image in a registry: `docker://...`.
    Registry(String),
    /// A BCoW file in S3: `s3://...`.
    S3(String),
    /// A directory with layers of images for containerd's erofs snapshotter.
    ContainerdCache(PathBuf),
}

/// An image in an OCI layout, as the user names it; or in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub form: LayoutForm,
    /// The directory, or the archive's file.
    pub path: PathBuf,
    pub reference: Option<String>,
}

impl Layout {
    /// How it is written.
    pub fn shown(&self) -> String {
        match &self.reference {
            Some(reference) => format!("{}:{reference}", self.without_reference()),
            None => self.without_reference(),
        }
    }

    /// The layout alone.
    pub fn without_reference(&self) -> String {
        let transport = match &self.form {
            LayoutForm::Directory => "oci",
            LayoutForm::Archive => "oci-archive",
            LayoutForm::Registry(upload) => return upload.name(),
        };
        format!("{transport}:{}", self.path.display())
    }
}

/// Refuses a destination that the command cannot write; the hint says how to write it.
pub fn refuse(shown: &str, command: &str) -> CommandError {
    let refused = CommandError::usage(format!("`bcow {command}` cannot write {shown}"));
    let known = split(OsStr::new(shown))
        .and_then(|(transport, _)| TRANSPORTS.iter().find(|known| known.name == transport));
    match known.map(|known| (known, known.uses)) {
        Some((known, Uses::Source(hint) | Uses::Neither(hint))) => refused.hint(known.hint(hint)),
        _ => refused,
    }
}

/// The hint for an image in a place that only skopeo reads.
fn from_skopeo(shown: &str) -> String {
    format!(
        "`skopeo copy {shown} oci-archive:FILE` copies it, and `bcow convert oci-archive:FILE \
         IMAGE.bcow` makes a BCoW image of it"
    )
}

/// The error for a source with a transport that bcow does not read; `None` for any other source.
pub fn not_a_source(shown: &str) -> Option<CommandError> {
    let (transport, _) = split(OsStr::new(shown))?;
    let refused = |why: &str| CommandError::usage(format!("invalid source {shown:?}: {why}"));
    match TRANSPORTS.iter().find(|known| known.name == transport) {
        None => Some(refused("unknown transport").hint(format!(
            "docker://{shown} is an image in a registry, and ./{shown} is a file"
        ))),
        Some(known) if known.name == "containerd-cache" => {
            Some(refused("bcow only writes such a directory"))
        }
        Some(known) if matches!(known.uses, Uses::Neither(_)) => {
            Some(refused(&format!("bcow does not read {transport}:")).hint(from_skopeo(shown)))
        }
        Some(_) => None,
    }
}

/// The error for the name of a BCoW image that begins with the transport of another form; `None`
/// for any other name.
pub fn not_bcow(name: &OsStr) -> Option<CommandError> {
    let (transport, _) = split(name)?;
    let known = TRANSPORTS.iter().find(|known| known.name == transport)?;
    let shown = name.to_string_lossy();
    let (form, hint) = match known.name {
        "bcow" | "oci" | "docker" | "s3" | "https" | "http" => return None,
        "raw" | "qcow2" => (
            "a disk in another format",
            format!("`bcow convert {shown} DISK.bcow` makes a BCoW disk of it"),
        ),
        "tar" => (
            "a tar archive",
            format!("`bcow convert {shown} IMAGE.bcow` makes a BCoW image of it"),
        ),
        "dir" => (
            "a directory",
            format!("`bcow convert {shown} IMAGE.bcow` makes a BCoW image of it"),
        ),
        "docker-archive" => (
            "an image in an archive",
            format!("`bcow convert {shown} IMAGE.bcow` makes a BCoW image of it"),
        ),
        "oci-archive" => (
            "an image in an archive",
            format!(
                "`bcow convert {shown} IMAGE.bcow` makes a BCoW image of it; `bcow copy {shown} \
                 oci:DIR` unpacks an image that is in BCoW form already"
            ),
        ),
        "containerd-cache" => (
            "a directory with layers for containerd",
            "name the image that these layers were made of".to_owned(),
        ),
        _ => ("not in a place that bcow reads", from_skopeo(&shown)),
    };
    let refused = CommandError::new(format!("cannot open {shown} as a BCoW image: it is {form}"));
    Some(refused.hint(hint))
}

impl Destination {
    /// Reads DST. A file without a transport is a BCoW file, unless the ending of its name promises
    /// another form: that form is written or refused.
    pub fn parse(name: &OsStr) -> Result<Self, CommandError> {
        let shown = name.to_string_lossy();
        let Some((transport, rest)) = split(name) else {
            return Destination::file(name);
        };
        let known = TRANSPORTS.iter().find(|known| known.name == transport);
        let Some(known) = known else {
            return Err(CommandError::usage(format!(
                "invalid destination {shown:?}: unknown transport {transport}"
            ))
            .hint(format!("write ./{shown} for a file of that name")));
        };
        if rest.is_empty() {
            return Err(CommandError::usage(format!(
                "invalid destination {shown:?}: missing name after the colon"
            )));
        }
        match (known.name, known.uses) {
            ("bcow", _) => Ok(Destination::File(rest.into())),
            ("raw", _) => Ok(Destination::Raw(rest.into())),
            ("qcow2", _) => Ok(Destination::Qcow2(rest.into())),
            ("containerd-cache", _) => Ok(Destination::ContainerdCache(rest.into())),
            ("docker", _) => match name.to_str().filter(|name| name.starts_with("docker://")) {
                Some(name) => Ok(Destination::Registry(name.to_owned())),
                None => Err(
                    CommandError::usage(format!("invalid destination {shown:?}"))
                        .hint("write docker://SERVER/REPOSITORY[:TAG]"),
                ),
            },
            ("s3", _) => match name.to_str().filter(|name| name.starts_with("s3://")) {
                Some(name) => Ok(Destination::S3(name.to_owned())),
                None => Err(
                    CommandError::usage(format!("invalid destination {shown:?}"))
                        .hint("write s3://BUCKET/KEY"),
                ),
            },
            ("tar", _) if rest == "-" => Ok(Destination::Tar(None)),
            ("tar", _) => Ok(Destination::Tar(Some(rest.into()))),
            ("oci", _) => Layout::parse(&shown, rest, LayoutForm::Directory),
            ("oci-archive", _) => Layout::parse(&shown, rest, LayoutForm::Archive),
            (_, Uses::Source(hint) | Uses::Neither(hint)) => Err(CommandError::usage(format!(
                "invalid destination {shown:?}: bcow cannot write to {transport}:"
            ))
            .hint(known.hint(hint))),
            (_, Uses::Both) => Err(CommandError::usage(format!(
                "invalid destination {shown:?}"
            ))),
        }
    }

    /// Reads NEW of `command`, which writes only BCoW files.
    pub fn bcow_file(name: &Path, command: &str) -> Result<PathBuf, CommandError> {
        match Destination::parse(name.as_os_str())? {
            Destination::File(path) => Ok(path),
            _ => {
                let shown = name.to_string_lossy();
                let refused = refuse(&shown, command);
                Err(match split(name.as_os_str()) {
                    None => refused.hint(format!("bcow:{shown} is a BCoW file of that name")),
                    Some(_) => refused.hint("the output is a BCoW file"),
                })
            }
        }
    }

    fn file(name: &OsStr) -> Result<Self, CommandError> {
        if name == "-" {
            return Err(CommandError::usage(
                "an image cannot be written to standard output, which is sequential",
            )
            .hint(
                "name a file; `bcow export IMG --to tar -o -` and `bcow commit ... tar:-` \
                         write archives",
            ));
        }
        let (form, hint) = match form_by_ending(name) {
            None => return Ok(Destination::File(name.into())),
            Some(NamedForm::Disk(destination)) => return Ok(destination(name.into())),
            Some(NamedForm::Qemu(format)) => (
                format!("a disk in the format {format}"),
                format!(
                    "`bcow convert SRC DISK.qcow2` and `qemu-img convert -O {format} DISK.qcow2 \
                     DST` write one"
                ),
            ),
            Some(NamedForm::Other { form, hint }) => ((*form).to_owned(), (*hint).to_owned()),
        };
        let shown = name.to_string_lossy();
        let hint = hint.replace("DST", &shown);
        Err(CommandError::usage(format!(
            "invalid destination {shown:?}: the output is not {form}"
        ))
        .hint(format!("{hint}; bcow:{shown} is a BCoW file of that name")))
    }
}

/// A form of files that the ending of a name promises.
enum NamedForm {
    /// A disk in a form that bcow writes.
    Disk(fn(PathBuf) -> Destination),
    /// A disk in a form that only qemu-img writes, by its name there.
    Qemu(&'static str),
    /// A form that a destination cannot have; the hint says how to make the file `DST` in it.
    Other {
        form: &'static str,
        hint: &'static str,
    },
}

/// The endings of names that promise another form than BCoW.
const ENDINGS: [(&[&str], NamedForm); 13] = [
    (&[".qcow2"], NamedForm::Disk(Destination::Qcow2)),
    (&[".raw", ".img"], NamedForm::Disk(Destination::Raw)),
    (&[".qcow"], NamedForm::Qemu("qcow")),
    (&[".qed"], NamedForm::Qemu("qed")),
    (&[".vdi"], NamedForm::Qemu("vdi")),
    (&[".vhd"], NamedForm::Qemu("vpc")),
    (&[".vhdx"], NamedForm::Qemu("vhdx")),
    (&[".vmdk"], NamedForm::Qemu("vmdk")),
    (
        &[".tar"],
        NamedForm::Other {
            form: "an archive",
            hint: "`bcow export IMG --to tar -o DST` writes an archive; oci-archive:DST is an OCI \
                   image in an archive",
        },
    ),
    (
        &[
            ".tgz", ".txz", ".tzst", ".tbz2", ".gz", ".xz", ".zst", ".bz2", ".zip", ".7z", ".cpio",
        ],
        NamedForm::Other {
            form: "an archive of this kind",
            hint: "`bcow export IMG --to tar -o -` writes a tar archive, for a program that makes \
                   DST of it",
        },
    ),
    (
        &[".erofs"],
        NamedForm::Other {
            form: "an EROFS file system",
            hint: "`bcow export IMG --to erofs -o DST` writes one",
        },
    ),
    (
        &[
            ".squashfs",
            ".sqsh",
            ".sqfs",
            ".sfs",
            ".iso",
            ".ext2",
            ".ext3",
            ".ext4",
            ".xfs",
            ".btrfs",
        ],
        NamedForm::Other {
            form: "a file system of this kind",
            hint: "`bcow extract IMG DIR` writes the tree to a directory, for a program that makes \
                   DST of it",
        },
    ),
    (
        &[".sif"],
        NamedForm::Other {
            form: "an Apptainer image",
            hint: "`bcow export IMG --to oci-archive:FILE` writes an archive, for `apptainer build \
                   DST oci-archive:FILE`",
        },
    ),
];

/// The form that the ending of a file's name promises.
fn form_by_ending(name: &OsStr) -> Option<&'static NamedForm> {
    let name = name.as_bytes().to_ascii_lowercase();
    let ends = |ending: &&str| name.ends_with(ending.as_bytes());
    let found = ENDINGS.iter().find(|(endings, _)| endings.iter().any(ends));
    found.map(|(_, form)| form)
}

impl Layout {
    fn parse(shown: &str, rest: &OsStr, form: LayoutForm) -> Result<Destination, CommandError> {
        let bad = |why: &str| {
            CommandError::usage(format!("invalid destination {shown:?}: {why}"))
                .hint("write oci:DIR[:REF] or oci-archive:FILE[:REF]")
        };
        let bytes = rest.as_bytes();
        let (path, reference) = match bytes.iter().position(|&byte| byte == b':') {
            None => (bytes, None),
            Some(colon) => {
                let reference = std::str::from_utf8(&bytes[colon + 1..])
                    .map_err(|_| bad("the reference is not UTF-8"))?;
                (&bytes[..colon], Some(reference))
            }
        };
        if path.is_empty() {
            return Err(bad("missing path"));
        }
        if reference == Some("") {
            return Err(bad("missing reference after the second colon"));
        }
        Ok(Destination::Layout(Layout {
            form,
            path: OsStr::from_bytes(path).into(),
            reference: reference.map(str::to_owned),
        }))
    }
}

/// A source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A container image, an archive or a directory: for [`bcow_oci::Source`] to read.
    Files,
    /// A BCoW file, or an image in BCoW form in an OCI layout or on another machine.
    Bcow(PathBuf),
    /// The bytes of a disk.
    Raw(PathBuf),
    /// A qcow2 image.
    Qcow2(PathBuf),
}

impl Source {
    /// Reads SRC. A file without a transport is a BCoW file if it begins as one; no other format is
    /// detected.
    pub fn parse(name: &OsStr) -> Source {
        match split(name) {
            Some(("raw", path)) => Source::Raw(path.into()),
            Some(("qcow2", path)) => Source::Qcow2(path.into()),
            Some(("bcow" | "https" | "http" | "s3" | "docker", _)) => Source::Bcow(name.into()),
            Some(("oci", _)) if is_in_bcow_form(name) => Source::Bcow(name.into()),
            None if begins_as_bcow(Path::new(name)) => Source::Bcow(name.into()),
            _ => Source::Files,
        }
    }
}

/// Whether a name with the transport `oci:` means an image in BCoW form, or a BCoW file.
fn is_in_bcow_form(name: &OsStr) -> bool {
    match ImageName::parse(name) {
        Ok(ImageName::File(_)) | Err(_) => false,
        // A blob that is missing or damaged is an error of the opening.
        Ok(ImageName::Blob { .. }) => true,
        Ok(name) => store::locate(&name).is_ok(),
    }
}

/// Whether a file has the magic in one of its header slots (spec section 3).
fn begins_as_bcow(path: &Path) -> bool {
    const MAGIC: &[u8] = b"BCoW\r\n\x1a\n";
    let is_file = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let Some(file) = is_file.then(|| File::open(path).ok()).flatten() else {
        return false;
    };
    [0, 512].iter().any(|&slot| {
        let mut magic = [0; MAGIC.len()];
        Storage::read_at(&file, slot, &mut magic).is_ok() && magic == MAGIC
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination(name: &str) -> Result<Destination, String> {
        Destination::parse(OsStr::new(name)).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn name_has_a_transport_before_the_colon_or_is_a_file() {
        for file in [
            "a.bcow",
            "./oci:x",
            "dir/raw:x",
            "Debian:12.bcow",
            "12:30.bcow",
            "a_b:c",
            ":x",
            "./x.qcow2:y",
        ] {
            assert_eq!(destination(file), Ok(Destination::File(file.into())));
        }
        assert_eq!(
            destination("bcow:a:b.tar"),
            Ok(Destination::File("a:b.tar".into()))
        );
        assert_eq!(destination("raw:a:b"), Ok(Destination::Raw("a:b".into())));
        assert_eq!(destination("qcow2:x"), Ok(Destination::Qcow2("x".into())));
        assert_eq!(
            destination("containerd-cache:a:b"),
            Ok(Destination::ContainerdCache("a:b".into()))
        );
        assert_eq!(
            destination("x.qcow2"),
            Ok(Destination::Qcow2("x.qcow2".into()))
        );
        assert_eq!(destination("tar:-"), Ok(Destination::Tar(None)));
        assert_eq!(
            destination("tar:a:b"),
            Ok(Destination::Tar(Some("a:b".into())))
        );
        assert_eq!(
            destination("docker://x/y:z"),
            Ok(Destination::Registry("docker://x/y:z".into()))
        );
        assert_eq!(
            destination("s3://b/k:1"),
            Ok(Destination::S3("s3://b/k:1".into()))
        );
        let layout = |form, reference: Option<&str>| {
            Ok(Destination::Layout(Layout {
                form,
                path: "a".into(),
                reference: reference.map(str::to_owned),
            }))
        };
        assert_eq!(destination("oci:a"), layout(LayoutForm::Directory, None));
        assert_eq!(
            destination("oci-archive:a:b:c"),
            layout(LayoutForm::Archive, Some("b:c"))
        );
    }

    #[test]
    fn destinations_that_bcow_cannot_write_are_refused_with_a_hint() {
        for name in [
            "docker-archive:x",
            "docker-daemon:x:y",
            "containers-storage:x",
            "dir:x",
            "sif:x",
        ] {
            let error = Destination::parse(OsStr::new(name)).unwrap_err();
            assert!(error.message().contains("cannot write to"), "{name}");
        }
        for name in [
            "a.tar",
            "b.tgz",
            "nothing:x",
            "oci:",
            "oci::x",
            "oci:a:",
            "-",
            "raw:",
            "docker:x/y",
            "s3:x/y",
        ] {
            assert!(destination(name).is_err(), "{name}");
        }
    }

    #[test]
    fn every_transport_can_be_split_off() {
        for transport in &TRANSPORTS {
            let name = format!("{}:x:y", transport.name);
            let (found, rest) = split(OsStr::new(&name)).unwrap();
            assert_eq!((found, rest), (transport.name, OsStr::new("x:y")));
        }
    }
}
