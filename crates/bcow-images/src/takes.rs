//! The names that an argument of a command takes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::form::{NameForm, spellings};
use crate::name::{Name, NameParts};
use crate::name_error::{NameError, Syntax};
use crate::url::Url;

/// What a command does with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameUse {
    /// Opens an image in BCoW form or a disk. A file of any name may be one.
    Open,
    /// Converts an image, an archive, a directory or a disk.
    Convert,
    /// Writes. The command is that in `bcow COMMAND`.
    Write(&'static str),
}

/// The names that an argument of a command takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takes {
    /// What the command does with the name.
    pub to: NameUse,
    pub forms: &'static [NameForm],
}

/// The end of hints for places that only skopeo writes.
const BY_SKOPEO: &str =
    "`bcow export IMG --to oci-archive:FILE` writes an archive for `skopeo copy oci-archive:FILE";

impl Takes {
    /// Parses a name, and refuses one of another form.
    pub fn parse(&self, text: &OsStr) -> Result<Name, NameError> {
        let named = |Syntax { problem, hint }| NameError {
            message: format!(
                "invalid {} {:?}: {problem}",
                self.noun(),
                text.to_string_lossy()
            ),
            hint,
        };
        self.check(Name::parse(text).map_err(named)?)
    }

    /// Refuses a name of another form. A name to write is not a file if its ending promises another
    /// form: that form is written or refused.
    pub fn check(&self, name: Name) -> Result<Name, NameError> {
        let name = match self.to {
            NameUse::Write(_) => self.by_ending(name)?,
            NameUse::Open | NameUse::Convert
                if !self.takes(&name) && Path::new(name.text()).exists() =>
            {
                Name::file(Path::new(name.text()))
            }
            _ => name,
        };
        if !self.takes(&name) {
            return Err(self.refuse(&name));
        }
        if name
            .registry()
            .is_some_and(|image| image.digest().is_some())
            && matches!(self.to, NameUse::Write(_))
        {
            Err(NameError {
                message: format!(
                    "invalid destination {:?}: the digest of an image follows from its content",
                    name.text().to_string_lossy()
                ),
                hint: "write docker://SERVER/REPOSITORY[:TAG]".to_owned(),
            })
        } else {
            Ok(name)
        }
    }

    fn takes(&self, name: &Name) -> bool {
        self.forms.contains(&name.form())
    }

    fn noun(&self) -> &'static str {
        match self.to {
            NameUse::Open => "image name",
            NameUse::Convert => "source",
            NameUse::Write(_) => "destination",
        }
    }

    /// The error for a name of a form that the command does not take.
    pub fn refuse(&self, name: &Name) -> NameError {
        let shown = name.display();
        let form = name.form();
        let promised = form.syntax().split(':').next().unwrap_or_default();
        let transport = name.transport().unwrap_or(promised);
        let all = spellings(self.forms);
        let invalid = |why: &str| format!("invalid {} {:?}: {why}", self.noun(), shown.to_string());
        let (message, hint) = match (self.to, form) {
            (NameUse::Write(_), NameForm::Unknown) => (
                invalid(&format!("unknown transport {transport}")),
                format!("write ./{shown} for a file of that name"),
            ),
            (_, NameForm::Unknown) => (
                invalid("unknown transport"),
                match registry_hint(name.shown()) {
                    Some(hint) => format!("{hint}; ./{shown} is a file"),
                    None => format!("write ./{shown} for a file of that name"),
                },
            ),
            (
                NameUse::Open,
                NameForm::File | NameForm::Bcow | NameForm::Layout | NameForm::Blob,
            ) => (
                invalid("it is on this machine"),
                format!("names of other places are {all}"),
            ),
            (NameUse::Open, _) => (
                format!(
                    "cannot open {shown} as a BCoW image: it is {}",
                    form.title()
                ),
                open_hint(name, &all),
            ),
            (NameUse::Convert, NameForm::ContainerdCache) => (
                invalid("bcow only writes such a directory"),
                "name the image that these layers were made of".to_owned(),
            ),
            (NameUse::Convert, _) => (
                invalid(&format!("bcow does not read {transport}:")),
                match form {
                    NameForm::Elsewhere => from_skopeo(name),
                    _ => format!("write {all}"),
                },
            ),
            (NameUse::Write(command), _) => (
                invalid(&format!("`bcow {command}` cannot write to {transport}:")),
                format!("{}; `bcow {command}` writes {all}", write_hint(name)),
            ),
        };
        NameError { message, hint }
    }

    /// The name of a file with an ending that promises another form, as a name of that form.
    fn by_ending(&self, name: Name) -> Result<Name, NameError> {
        let NameParts::File(path) = name.parts() else {
            return Ok(name);
        };
        let refused = |message: String, hint: String| Err(NameError { message, hint });
        if name.text() == "-" {
            return refused(
                "invalid destination \"-\": an image cannot be written to standard output, which \
                 is sequential"
                    .to_owned(),
                "name a file; `bcow export IMG --to tar -o -` and `bcow commit ... tar:-` write \
                 archives"
                    .to_owned(),
            );
        }
        let shown = name.display();
        let (form, hint) = match form_by_ending(name.text()) {
            None => return Ok(name),
            Some(Ending::Disk(disk)) => {
                let disk = Name::of(name.text(), disk(path.clone()));
                return if self.takes(&disk) {
                    Ok(disk)
                } else {
                    let mut refused = self.refuse(&disk);
                    refused.hint =
                        format!("bcow:{shown} is a BCoW file of that name; {}", refused.hint);
                    Err(refused)
                };
            }
            Some(Ending::Qemu(format)) => (
                format!("a disk in the format {format}"),
                format!(
                    "`bcow convert SRC DISK.qcow2` and `qemu-img convert -O {format} DISK.qcow2 \
                     {shown}` write one"
                ),
            ),
            Some(Ending::Other { form, hint }) => {
                ((*form).to_owned(), hint.replace("DST", &shown.to_string()))
            }
        };
        refused(
            format!(
                "invalid destination {:?}: the output is not {form}",
                shown.to_string()
            ),
            format!("{hint}; bcow:{shown} is a BCoW file of that name"),
        )
    }
}

/// The hint for a name that leads to nothing on this machine, and that docker and podman would look
/// for in a registry (`debian:12`, `quay.io/team/app`). bcow sends no request for such a name: a
/// misspelt file name must not become the image of a stranger.
pub fn registry_hint(name: &Path) -> Option<String> {
    let text = name.to_str()?;
    let last = text.rsplit('/').next()?;
    // The name of a file usually has an ending; dots in a tag are something else.
    let has_ending = last.split(':').next()?.contains('.');
    if has_ending || text.starts_with(['.', '/']) {
        return None;
    }
    Url::parse(&format!("docker://{text}")).ok()?;
    Some(format!(
        "if it is an image in a registry, `bcow convert docker://{text} IMAGE.bcow` makes a BCoW \
         image of it"
    ))
}

/// The hint for an image in a place that only skopeo reads.
fn from_skopeo(name: &Name) -> String {
    format!(
        "`skopeo copy {name} oci-archive:FILE` copies it, and `bcow convert oci-archive:FILE \
         IMAGE.bcow` makes a BCoW image of it"
    )
}

/// The hint for a name that leads to no image in BCoW form.
fn open_hint(name: &Name, all: &str) -> String {
    match name.form() {
        NameForm::Raw | NameForm::Qcow2 => {
            format!("`bcow convert {name} DISK.bcow` makes a BCoW disk of it")
        }
        NameForm::Tar | NameForm::Directory | NameForm::DockerArchive => {
            format!("`bcow convert {name} IMAGE.bcow` makes a BCoW image of it")
        }
        NameForm::OciArchive => format!(
            "`bcow convert {name} IMAGE.bcow` makes a BCoW image of it; `bcow copy {name} oci:DIR` \
             unpacks an image that is in BCoW form already"
        ),
        NameForm::ContainerdCache => "name the image that these layers were made of".to_owned(),
        NameForm::Elsewhere => from_skopeo(name),
        _ => format!("write {all}"),
    }
}

/// The way to write to a place of this form.
fn write_hint(name: &Name) -> String {
    match name.form() {
        NameForm::Tar => {
            "`bcow export IMG --to tar -o FILE` writes an archive of an image's tree".to_owned()
        }
        NameForm::Directory => "`bcow extract IMG DIR` extracts an image".to_owned(),
        NameForm::DockerArchive | NameForm::Elsewhere => {
            format!("{BY_SKOPEO} {}:...`", name.transport().unwrap_or_default())
        }
        NameForm::Web => "write a file, and copy it to the server".to_owned(),
        NameForm::Blob => "the digest of a file follows from its content".to_owned(),
        NameForm::S3 => format!("`bcow copy FILE.bcow {name}` copies a file there"),
        _ => format!("`bcow convert SRC {name}` writes there"),
    }
}

/// A form of files that the ending of a name promises.
enum Ending {
    /// A disk in a form that bcow writes.
    Disk(fn(PathBuf) -> NameParts),
    /// A disk in a form that only qemu-img writes, by its name there.
    Qemu(&'static str),
    /// A form that a destination cannot have; the hint says how to make the file `DST` in it.
    Other {
        form: &'static str,
        hint: &'static str,
    },
}

/// The endings of names that promise another form than BCoW.
const ENDINGS: [(&[&str], Ending); 13] = [
    (&[".qcow2"], Ending::Disk(NameParts::Qcow2)),
    (&[".raw", ".img"], Ending::Disk(NameParts::Raw)),
    (&[".qcow"], Ending::Qemu("qcow")),
    (&[".qed"], Ending::Qemu("qed")),
    (&[".vdi"], Ending::Qemu("vdi")),
    (&[".vhd"], Ending::Qemu("vpc")),
    (&[".vhdx"], Ending::Qemu("vhdx")),
    (&[".vmdk"], Ending::Qemu("vmdk")),
    (
        &[".tar"],
        Ending::Other {
            form: "an archive",
            hint: "`bcow export IMG --to tar -o DST` writes an archive; oci-archive:DST is an OCI \
                   image in an archive",
        },
    ),
    (
        &[
            ".tgz", ".txz", ".tzst", ".tbz2", ".gz", ".xz", ".zst", ".bz2", ".zip", ".7z", ".cpio",
        ],
        Ending::Other {
            form: "an archive of this kind",
            hint: "`bcow export IMG --to tar -o -` writes a tar archive, for a program that makes \
                   DST of it",
        },
    ),
    (
        &[".erofs"],
        Ending::Other {
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
        Ending::Other {
            form: "a file system of this kind",
            hint: "`bcow extract IMG DIR` writes the tree to a directory, for a program that makes \
                   DST of it",
        },
    ),
    (
        &[".sif"],
        Ending::Other {
            form: "an Apptainer image",
            hint: "`bcow export IMG --to oci-archive:FILE` writes an archive, for `apptainer build \
                   DST oci-archive:FILE`",
        },
    ),
];

/// The form that the ending of a file's name promises.
fn form_by_ending(name: &OsStr) -> Option<&'static Ending> {
    let name = name.as_bytes().to_ascii_lowercase();
    let ends = |ending: &&str| name.ends_with(ending.as_bytes());
    let found = ENDINGS.iter().find(|(endings, _)| endings.iter().any(ends));
    found.map(|(_, form)| form)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[NameForm] = &[NameForm::File, NameForm::Bcow];
    const OPEN: Takes = Takes {
        to: NameUse::Open,
        forms: FILES,
    };
    const WRITE: Takes = Takes {
        to: NameUse::Write("create"),
        forms: FILES,
    };
    const WRITE_DISKS: Takes = Takes {
        to: NameUse::Write("convert"),
        forms: &[NameForm::File, NameForm::Raw, NameForm::Qcow2],
    };
    /// A name of each form.
    const NAMES: [&str; 18] = [
        "oci:x",
        "oci:x@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "oci-archive:x",
        "docker-archive:x",
        "tar:x",
        "tar:-",
        "dir:x",
        "raw:x",
        "qcow2:x",
        "https://host/x",
        "s3://bucket/x",
        "docker://host.x/x",
        "docker://host.x/x#layers=1",
        "containerd-cache:x",
        "docker-daemon:x:y",
        "containers-storage:x",
        "sif:x",
        "nothing:x",
    ];

    #[test]
    fn every_refusal_has_the_name_and_a_hint() {
        for takes in [
            OPEN,
            WRITE,
            Takes {
                to: NameUse::Convert,
                ..OPEN
            },
        ] {
            for name in NAMES {
                let error = takes.parse(name.as_ref()).expect_err(name);
                assert!(error.to_string().contains(name), "{error}");
                assert!(!error.hint().is_empty(), "{error}");
            }
        }
    }

    #[test]
    fn ending_of_a_name_promises_the_form_of_a_destination() {
        let parts =
            |takes: Takes, name: &str| takes.parse(name.as_ref()).map(|name| name.parts().clone());
        for name in ["x.qcow2", "X.QCOW2"] {
            assert_eq!(parts(WRITE_DISKS, name), Ok(NameParts::Qcow2(name.into())));
        }
        assert_eq!(
            parts(WRITE_DISKS, "x.img"),
            Ok(NameParts::Raw("x.img".into()))
        );
        assert_eq!(
            parts(WRITE, "bcow:a.tar"),
            Ok(NameParts::Bcow("a.tar".into()))
        );
        for name in [
            "x.qcow2", "x.raw", "a.tar", "b.tgz", "c.vmdk", "d.iso", "e.sif", "-",
        ] {
            let error = parts(WRITE, name).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            assert!(error.hint().contains("file"), "{}", error.hint());
        }
        assert_eq!(
            parts(OPEN, "x.qcow2"),
            Ok(NameParts::File("x.qcow2".into()))
        );
    }

    #[test]
    fn existing_file_of_any_name_can_be_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x");
        std::fs::write(&path, "").unwrap();
        // The transport `tar:` with a path that cannot exist, and a file.
        assert!(OPEN.parse("tar:/no/such/file".as_ref()).is_err());
        let name = OPEN.parse(path.as_os_str()).unwrap();
        assert_eq!(name.path(), Some(&*path));
    }

    #[test]
    fn names_as_in_docker_lead_to_the_registry() {
        let is_hinted = |name: &str| registry_hint(Path::new(name)).is_some();
        for name in [
            "alpine",
            "debian:12.5",
            "docker.io/library/debian",
            "localhost:5000/x:1",
        ] {
            assert!(is_hinted(name), "{name}");
        }
        for name in ["a.bcow", "./alpine", "/x", "Debian", "dir/disk.img", "a b"] {
            assert!(!is_hinted(name), "{name}");
        }
    }

    #[test]
    fn digest_is_not_part_of_a_destination() {
        let takes = Takes {
            to: NameUse::Write("copy"),
            forms: &[NameForm::Registry],
        };
        let name = format!("docker://host.x/y@sha256:{}", "0".repeat(64));
        let error = takes.parse(name.as_ref()).unwrap_err();
        assert!(error.to_string().contains("digest"), "{error}");
    }
}
