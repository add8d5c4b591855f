//! Any bytes as the documents of a registry: what a name leads to, what its indexes list, the
//! configuration of an image, and what is attached to it.
//!
//! The documents are separated by zero bytes; the first is that of the name. In a document, `@N` is
//! replaced by the digest of document N, and `#N` by its length, if N is greater than the number of
//! the document itself. So a fuzzer needs no hash.

use std::io::{self, Read};
use std::sync::Arc;

use bcow_oci::{
    ConvertOptions, Digest, RegistryImage, Repository, Source, diff_ids, find_attached,
    find_in_registry,
};

/// More are not read.
const MAX_DOCUMENTS: usize = 10;

/// The documents of a registry, each with its digest.
struct Documents(Vec<(Digest, Vec<u8>)>);

impl Documents {
    fn new(bytes: &[u8]) -> Self {
        let texts: Vec<&[u8]> = bytes.splitn(MAX_DOCUMENTS, |&byte| byte == 0).collect();
        let mut done: Vec<(Digest, Vec<u8>)> = Vec::new();
        for text in texts.iter().rev() {
            let mut document = Vec::new();
            let mut rest = *text;
            while let Some((&byte, behind)) = rest.split_first() {
                rest = behind;
                let number = behind
                    .first()
                    .and_then(|digit| char::from(*digit).to_digit(10));
                // Of the documents behind this one, the last was done first.
                let named = number.and_then(|number| texts.len().checked_sub(1 + number as usize));
                match (byte, named.and_then(|index| done.get(index))) {
                    (b'@', Some((digest, _))) => document.extend(digest.to_string().bytes()),
                    (b'#', Some((_, named))) => document.extend(named.len().to_string().bytes()),
                    _ => {
                        document.push(byte);
                        continue;
                    }
                }
                rest = &behind[1..];
            }
            done.push((Digest::of(&document), document));
        }
        Documents(done)
    }

    fn find(&self, digest: Option<&Digest>) -> io::Result<Vec<u8>> {
        let found = match digest {
            None => self.0.last(),
            Some(digest) => self.0.iter().find(|(known, _)| known == digest),
        };
        Ok(found.ok_or(io::ErrorKind::NotFound)?.1.clone())
    }
}

impl Repository for Documents {
    fn name(&self) -> String {
        "docker://host/name:tag".to_owned()
    }

    fn manifest(&self, digest: Option<&Digest>) -> io::Result<Vec<u8>> {
        self.find(digest)
    }

    fn referrers(&self, _: &Digest, _: &str) -> io::Result<Vec<u8>> {
        // The last document.
        Ok(self
            .0
            .first()
            .map(|(_, bytes)| bytes.clone())
            .unwrap_or_default())
    }

    fn blob(&self, digest: &Digest, length: u64) -> io::Result<Box<dyn Read + Send>> {
        let bytes = self.find(Some(digest))?;
        Ok(Box::new(io::Cursor::new(bytes).take(length)))
    }
}

pub fn fuzz(bytes: &[u8]) {
    let repository = Arc::new(Documents::new(bytes));
    let platform = "linux/amd64".parse().expect("a platform");
    for platform in [None, Some(&platform)] {
        let found = find_in_registry(repository.clone(), platform);
        if let Ok(RegistryImage::Ordinary(image)) = found {
            let _ = find_attached(&image);
            let _ = diff_ids(&Source::Registry(image), &ConvertOptions::default());
        }
    }
}
