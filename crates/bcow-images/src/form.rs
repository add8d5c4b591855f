//! The forms of names: one table of transports, spellings and meanings.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NameForm {
    /// A path without a transport.
    File,
    /// `bcow:FILE`: a BCoW file of any name.
    Bcow,
    /// `oci:DIR[:REF]`
    Layout,
    /// `oci:DIR@sha256:DIGEST`
    Blob,
    /// `oci-archive:FILE[:REF]`
    OciArchive,
    /// `docker-archive:FILE[:REF]`
    DockerArchive,
    /// `tar:FILE`, and `tar:-`, which is standard input or output.
    Tar,
    /// `dir:PATH`
    Directory,
    /// `raw:FILE`
    Raw,
    /// `qcow2:FILE`
    Qcow2,
    /// `https://HOST/PATH` or `http://HOST/PATH`
    Web,
    /// `s3://BUCKET/KEY`
    S3,
    /// `docker://[SERVER/]REPOSITORY[:TAG][@sha256:DIGEST]`
    Registry,
    /// `docker://...#layers=N`: the N lowest layers of an image in a registry.
    Lowest,
    /// `containerd-cache:DIR`
    ContainerdCache,
    /// A transport of other programs, which bcow neither reads nor writes.
    Elsewhere,
    /// A transport that no program of this table has.
    Unknown,
}

/// The transports, and the forms of the names that begin with them.
pub(crate) const TRANSPORTS: [(&str, NameForm); 17] = [
    ("bcow", NameForm::Bcow),
    ("oci", NameForm::Layout),
    ("oci-archive", NameForm::OciArchive),
    ("docker-archive", NameForm::DockerArchive),
    ("tar", NameForm::Tar),
    ("dir", NameForm::Directory),
    ("raw", NameForm::Raw),
    ("qcow2", NameForm::Qcow2),
    ("https", NameForm::Web),
    ("http", NameForm::Web),
    ("s3", NameForm::S3),
    ("docker", NameForm::Registry),
    ("containerd-cache", NameForm::ContainerdCache),
    ("docker-daemon", NameForm::Elsewhere),
    ("containers-storage", NameForm::Elsewhere),
    ("ostree", NameForm::Elsewhere),
    ("sif", NameForm::Elsewhere),
];

impl NameForm {
    /// The spelling of such a name.
    pub fn syntax(self) -> &'static str {
        match self {
            NameForm::File => "FILE",
            NameForm::Bcow => "bcow:FILE",
            NameForm::Layout => "oci:DIR[:REF]",
            NameForm::Blob => "oci:DIR@sha256:DIGEST",
            NameForm::OciArchive => "oci-archive:FILE[:REF]",
            NameForm::DockerArchive => "docker-archive:FILE[:REF]",
            NameForm::Tar => "tar:FILE",
            NameForm::Directory => "dir:PATH",
            NameForm::Raw => "raw:FILE",
            NameForm::Qcow2 => "qcow2:FILE",
            NameForm::Web => "https://HOST/PATH",
            NameForm::S3 => "s3://BUCKET/KEY",
            NameForm::Registry => "docker://HOST/REPO[:TAG]",
            NameForm::Lowest => "docker://HOST/REPO[:TAG]#layers=N",
            NameForm::ContainerdCache => "containerd-cache:DIR",
            NameForm::Elsewhere | NameForm::Unknown => "TRANSPORT:...",
        }
    }

    /// A noun phrase for what such a name leads to.
    pub fn title(self) -> &'static str {
        match self {
            NameForm::File => "a file",
            NameForm::Bcow => "a BCoW file",
            NameForm::Layout => "an OCI image layout",
            NameForm::Blob => "one file of an OCI image layout",
            NameForm::OciArchive | NameForm::DockerArchive => "an image in an archive",
            NameForm::Tar => "a tar archive",
            NameForm::Directory => "a directory",
            NameForm::Raw | NameForm::Qcow2 => "a disk in another format",
            NameForm::Web => "a file on a web server",
            NameForm::S3 => "a file in S3",
            NameForm::Registry => "an image in a registry",
            NameForm::Lowest => "a part of an image in a registry",
            NameForm::ContainerdCache => "a directory with layers for containerd",
            NameForm::Elsewhere => "not in a place that bcow reads",
            NameForm::Unknown => "a name with an unknown transport",
        }
    }
}

/// The spellings of `forms`, for help texts and hints.
pub fn spellings(forms: &[NameForm]) -> String {
    let texts: Vec<&str> = forms.iter().map(|form| form.syntax()).collect();
    match &texts[..] {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
