//! Detects container images that were given as a root file system.
//!
//! `tar:` and `dir:` convert files as they are, so an archive of `docker save` or an OCI layout
//! would become a root file system of blobs. The check reads the content of the marker files,
//! because a file with the name `manifest.json` can be anything.

use std::path::Path;

use serde_json::Value;

use crate::blob::open_regular;
use crate::error::{ConvertError, ImageForm};

/// Limit on the size of a file that is read.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// The form of image that a file in the root of an archive or directory indicates.
pub(crate) fn recognise(name: &[u8], content: &[u8]) -> Option<ImageForm> {
    match name {
        b"manifest.json" if is_docker_manifest(content) => Some(ImageForm::DockerArchive),
        b"oci-layout" if is_oci_layout(content) => Some(ImageForm::OciLayout),
        b"version" if content.starts_with(b"Directory Transport Version:") => {
            Some(ImageForm::SkopeoDirectory)
        }
        _ => None,
    }
}

/// Whether [`recognise`] reads files of this name.
pub(crate) fn is_marker_file(name: &[u8]) -> bool {
    matches!(name, b"manifest.json" | b"oci-layout" | b"version")
}

/// The form of image in a directory of the host; `None` for a root file system.
pub(crate) fn recognise_directory(path: &Path) -> Result<Option<ImageForm>, ConvertError> {
    for name in ["manifest.json", "oci-layout", "version"] {
        let Ok(Some(blob)) = open_regular(&path.join(name)) else {
            continue;
        };
        if blob.length().is_some_and(|length| length <= MAX_BYTES) {
            let form = recognise(name.as_bytes(), &blob.document(MAX_BYTES, None)?);
            if form.is_some() {
                return Ok(form);
            }
        }
    }
    Ok(None)
}

fn is_docker_manifest(content: &[u8]) -> bool {
    let Ok(Value::Array(images)) = serde_json::from_slice(content) else {
        return false;
    };
    !images.is_empty()
        && images
            .iter()
            .all(|image| image["Config"].is_string() && image["Layers"].is_array())
}

fn is_oci_layout(content: &[u8]) -> bool {
    serde_json::from_slice(content)
        .is_ok_and(|layout: Value| layout["imageLayoutVersion"].is_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_containers_are_recognized_by_their_files() {
        let docker = br#"[{"Config":"a.json","RepoTags":null,"Layers":["a/layer.tar"]}]"#;
        for (name, content, form) in [
            (
                &b"manifest.json"[..],
                &docker[..],
                Some(ImageForm::DockerArchive),
            ),
            (b"manifest.json", b"[]", None),
            (b"manifest.json", br#"{"name":"an app","icons":[]}"#, None),
            (b"manifest.json", br#"[{"Config":"a.json"}]"#, None),
            (b"manifest.json", b"\xff", None),
            (
                b"oci-layout",
                br#"{"imageLayoutVersion":"1.0.0"}"#,
                Some(ImageForm::OciLayout),
            ),
            (b"oci-layout", b"{}", None),
            (
                b"version",
                b"Directory Transport Version: 1.1\n",
                Some(ImageForm::SkopeoDirectory),
            ),
            (b"version", b"1.0\n", None),
            (b"index.json", docker, None),
        ] {
            assert_eq!(recognise(name, content), form, "{name:?} {content:?}");
        }
    }
}
