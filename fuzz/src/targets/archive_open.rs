//! Any bytes as an archive of an OCI layout or of `docker save`: the image in it is found, and the
//! digests of its layers are read.

use bcow_oci::{ConvertOptions, Source, TarInput, diff_ids};

use super::memory::MemoryFile;

pub fn fuzz(bytes: &[u8]) {
    let archive = MemoryFile::new(bytes);
    let file = || archive.path();
    let sources = [
        Source::OciArchive {
            file: file(),
            reference: None,
        },
        Source::DockerArchive {
            file: file(),
            reference: None,
        },
        Source::Archive(TarInput::File(file())),
    ];
    let options = ConvertOptions {
        scratch: "/nonexistent".into(),
        ..ConvertOptions::default()
    };
    for source in sources {
        let _ = diff_ids(&source, &options);
    }
}
