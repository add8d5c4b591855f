//! Names of files and remote images.

use std::fmt;

use bcow_remote::{Address, Reference, S3Name};

use crate::name_error::Syntax;

/// The name of a file or a remote image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Url {
    /// A file on a web server.
    Web(Address),
    /// A file in S3.
    S3(S3Name),
    /// An image in a registry.
    Registry(Reference),
}

impl Url {
    /// Parses `https://...`, `http://...`, `s3://...` or `docker://...`.
    pub fn parse(text: &str) -> Result<Url, Syntax> {
        let transport = text.split(':').next().unwrap_or_default();
        match transport {
            "docker" => match text.parse() {
                Ok(reference) => Ok(Url::Registry(reference)),
                Err(why) => Err(Syntax::new(
                    why,
                    "write docker://SERVER/REPOSITORY[:TAG][@sha256:DIGEST]",
                )),
            },
            "s3" => match text.parse() {
                Ok(name) => Ok(Url::S3(name)),
                Err(why) => Err(Syntax::new(why, "write s3://BUCKET/KEY")),
            },
            _ => match Address::parse(text) {
                Ok(address) => Ok(Url::Web(address)),
                Err(problem) => Err(Syntax::new(
                    problem.to_string(),
                    "write https://HOST/PATH; a query may follow",
                )),
            },
        }
    }
}

impl fmt::Display for Url {
    /// The query of a URL can have a signature that gives access, so it is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Url::Web(address) => address.fmt(f),
            Url::S3(name) => name.fmt(f),
            Url::Registry(reference) => reference.fmt(f),
        }
    }
}
