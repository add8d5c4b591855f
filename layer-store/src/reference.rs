//! References to images, which are names of directories in the store.

use std::fmt;

use data_encoding::BASE64;

/// Longest reference in bytes.
const MAX_BYTES: usize = 512;

/// A reference to an image in a registry, such as `registry.example.org/team/app:1`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference(String);

impl Reference {
    /// Decodes the name of a directory: the base64 form of a reference. `None` if the text is not a
    /// reference to an image in a registry. `bcow` parses the reference completely.
    pub fn decode(name: &[u8]) -> Option<Self> {
        if name.len() > BASE64.encode_len(MAX_BYTES) {
            return None;
        }
        let text = String::from_utf8(BASE64.decode(name).ok()?).ok()?;
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@[]".contains(&byte);
        let (server, rest) = text.split_once('/')?;
        let is_server = server.contains(['.', ':']) || server == "localhost";
        let starts = |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric());
        let is_valid = text.bytes().all(is_allowed)
            && is_server
            && (starts(server) || server.starts_with('['))
            && starts(rest);
        is_valid.then_some(Reference(text))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The digest that is the name of a layer's directory. `None` if the text is not a SHA-256 digest.
pub fn digest(name: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(name).ok()?;
    let digits = text.strip_prefix("sha256:")?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (digits.len() == 64 && digits.bytes().all(is_digit)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_references_to_registries_are_decoded() {
        let digest = format!("h.org/r@sha256:{}", "a".repeat(64));
        for text in [
            "docker.io/library/debian:12",
            "localhost/a",
            "localhost:5000/team/app:1",
            "[::1]:5000/a:1",
            &digest,
        ] {
            let decoded = Reference::decode(BASE64.encode(text.as_bytes()).as_bytes());
            assert_eq!(
                decoded.map(|reference| reference.to_string()).as_deref(),
                Some(text)
            );
        }
        let long = format!("h.org/{}", "a".repeat(MAX_BYTES));
        for text in [
            "",
            "debian",
            "a/b",
            "/h.org/a",
            "-h.org/a",
            "h.org/-a",
            "h.org/../x",
            "h.org/a b",
            "h.org/a\n",
            "h.org/a,suid",
            "h.org/ä",
            &long,
        ] {
            assert_eq!(
                Reference::decode(BASE64.encode(text.as_bytes()).as_bytes()),
                None
            );
        }
        for name in [
            &b"h.org/a"[..],
            b"aC5vcmcvYQ",
            b"aC5vcmcvYQ=",
            b"aC5vcmcvYR==",
        ] {
            assert_eq!(Reference::decode(name), None, "not in base64");
        }
        assert!(Reference::decode(b"aC5vcmcvYQ==").is_some());
    }

    #[test]
    fn only_sha256_digests_name_layers() {
        let valid = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(digest(valid.as_bytes()), Some(&*valid));
        let upper = valid.to_uppercase();
        for name in ["", "info", "sha256:", "sha256:..", &valid[..70], &upper] {
            assert_eq!(digest(name.as_bytes()), None);
        }
    }
}
