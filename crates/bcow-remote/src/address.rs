//! Addresses of files: `https://HOST[:PORT]/PATH`.

use std::fmt::{self, Write};

use ureq::http::Uri;
use ureq::http::uri::Scheme;

use crate::error::{Fault, Problem};

/// The address of a file on an HTTP server.
///
/// A query can hold a signature that gives access, so the text forms of an address (`Display`,
/// `Debug`) leave it out.
#[derive(Clone, PartialEq, Eq)]
pub struct Address(Uri);

/// Whether plain HTTP is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    TlsOnly,
    PlainToo,
}

impl Address {
    /// Parses an address, whose scheme is `https` or `http`.
    pub fn parse(text: &str) -> Result<Address, Problem> {
        let bad = |why: &str| Problem::Address(why.to_owned());
        if text.contains('#') {
            return Err(bad("it has a fragment (#)"));
        }
        let uri: Uri = text.parse().map_err(|_| bad("it is not a valid URL"))?;
        if ![Some(&Scheme::HTTPS), Some(&Scheme::HTTP)].contains(&uri.scheme()) {
            return Err(bad("its scheme is neither https nor http"));
        }
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return Err(bad(
                "it contains a user name or password, which other users of this machine could read",
            ));
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err(bad("it names no host"));
        }
        Ok(Address(uri))
    }

    /// The address to which a reference leads from this one (RFC 3986, section 5.2).
    pub(crate) fn join(&self, location: &str) -> Result<Address, Problem> {
        let location = location.split('#').next().unwrap_or_default();
        let (scheme, authority) = self.parts();
        let has_scheme = location
            .find(':')
            .is_some_and(|colon| !location[..colon].contains(['/', '?']));
        let text = match location {
            "" => return Err(Problem::Answer("a redirect without a target".into())),
            _ if has_scheme => location.to_owned(),
            _ if location.starts_with("//") => format!("{scheme}:{location}"),
            _ => {
                let (path, query) = location.split_at(location.find('?').unwrap_or(location.len()));
                let own = self.0.path();
                let path = match path {
                    "" => own.to_owned(),
                    path if path.starts_with('/') => without_dots(path),
                    path => {
                        let directory = &own[..own.rfind('/').map_or(0, |slash| slash + 1)];
                        without_dots(&format!("{directory}{path}"))
                    }
                };
                format!("{scheme}://{authority}{path}{query}")
            }
        };
        Address::parse(&text).map_err(|_| {
            Problem::Answer("a redirect to something that is no valid http or https URL".into())
        })
    }

    /// The same address with these fields added to its query.
    pub(crate) fn with_query(&self, fields: &str) -> Result<Address, Problem> {
        let (scheme, authority) = self.parts();
        let before = self
            .0
            .query()
            .map_or(String::new(), |query| format!("{query}&"));
        let path = self.0.path();
        Address::parse(&format!("{scheme}://{authority}{path}?{before}{fields}"))
    }

    /// The same address with this path behind its own, and without a query.
    pub(crate) fn with_path(&self, path: &str) -> Result<Address, Problem> {
        let base = self.0.path().trim_end_matches('/');
        Address::parse(&format!("{}{base}{path}", self.origin()))
    }

    /// The address of the file with this digest that belongs to the file at this address: see
    /// [`blob_beside`]. It has the same query, because that can give access to a whole directory.
    pub fn blob(&self, hex: &str) -> Result<Address, Problem> {
        let path = blob_beside(self.0.path(), hex);
        let query = match self.0.query() {
            Some(query) => format!("?{query}"),
            None => String::new(),
        };
        Address::parse(&format!("{}{path}{query}", self.origin()))
    }

    /// Refuses plain HTTP, unless it is allowed.
    pub(crate) fn check(&self, transport: Transport) -> Result<(), Problem> {
        if transport == Transport::PlainToo || self.is_encrypted() {
            Ok(())
        } else {
            Err(Problem::PlainHttp(self.to_string()))
        }
    }

    /// Whether the connection is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.0.scheme() == Some(&Scheme::HTTPS)
    }

    /// Fails with a denial of this status unless credentials may be sent to this server: encrypted,
    /// or to this machine.
    pub(crate) fn require_secrecy(&self, status: u16) -> Result<(), Fault> {
        let host = self.0.host().unwrap_or_default();
        if self.is_encrypted() || ["localhost", "127.0.0.1", "[::1]"].contains(&host) {
            return Ok(());
        }
        let server = self.server();
        let why = format!("credentials are not sent to {server} without encryption");
        Err(Problem::denied(status, why).permanent())
    }

    /// Whether both are on the same server: scheme, host and port.
    pub(crate) fn same_server(&self, other: &Address) -> bool {
        let port = |address: &Address| {
            let default = if address.is_encrypted() { 443 } else { 80 };
            address.0.port_u16().unwrap_or(default)
        };
        let host = |address: &Address| address.0.host().unwrap_or_default().to_ascii_lowercase();
        self.is_encrypted() == other.is_encrypted()
            && host(self) == host(other)
            && port(self) == port(other)
    }

    /// Host and port as written, for messages and for lookups of credentials.
    pub fn server(&self) -> &str {
        self.parts().1
    }

    /// `SCHEME://HOST[:PORT]`
    pub(crate) fn origin(&self) -> String {
        let (scheme, authority) = self.parts();
        format!("{scheme}://{authority}")
    }

    /// The path, as it is sent.
    pub(crate) fn path(&self) -> &str {
        self.0.path()
    }

    /// All of the address, with a query that can be secret.
    pub(crate) fn with_secrets(&self) -> String {
        self.0.to_string()
    }

    pub(crate) fn uri(&self) -> &Uri {
        &self.0
    }

    fn parts(&self) -> (&str, &str) {
        let scheme = self.0.scheme_str().unwrap_or_default();
        let authority = self
            .0
            .authority()
            .map_or("", |authority| authority.as_str());
        (scheme, authority)
    }
}

/// A path without the segments `.` and `..` (RFC 3986, section 5.2.4).
fn without_dots(path: &str) -> String {
    let mut kept = Vec::new();
    for segment in path.split('/') {
        match segment {
            "." => {}
            // The first one is the empty one before the first slash.
            ".." if kept.len() > 1 => drop(kept.pop()),
            ".." => {}
            segment => kept.push(segment),
        }
    }
    if path.ends_with("/.") || path.ends_with("/..") {
        kept.push("");
    }
    kept.join("/")
}

/// The directory of files named by their digests, as in an OCI layout.
const BLOBS: &str = "blobs/sha256/";

/// The path of the file with this digest that belongs to the stack at `path` (spec section 17): in
/// `blobs/sha256` beside the stack; or beside the stack, if the stack is in such a directory.
pub(crate) fn blob_beside(path: &str, hex: &str) -> String {
    let directory = &path[..path.rfind('/').map_or(0, |slash| slash + 1)];
    let is_among_blobs = directory
        .strip_suffix(BLOBS)
        .is_some_and(|above| above.is_empty() || above.ends_with('/'));
    if is_among_blobs {
        format!("{directory}{hex}")
    } else {
        format!("{directory}{BLOBS}{hex}")
    }
}

/// A part of a path, or a value of a query, in the one encoding that signatures are made of.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(byte.into());
            }
            // Writing to a String cannot fail.
            _ => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

/// A query: `a=1&b=2`.
pub(crate) fn query(fields: &[(&str, &str)]) -> String {
    let fields = fields
        .iter()
        .map(|(name, value)| format!("{name}={}", encode(value)));
    fields.collect::<Vec<_>>().join("&")
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, authority) = self.parts();
        write!(f, "{scheme}://{authority}{}", self.0.path())?;
        match self.0.query() {
            Some(_) => f.write_str("?..."),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Address {
        Address::parse(text).expect(text)
    }

    #[test]
    fn text_of_an_address_has_no_query() {
        let signed = parse("https://host/a.bcow?X-Signature=secret");
        assert_eq!(signed.to_string(), "https://host/a.bcow?...");
        assert_eq!(format!("{signed:?}"), "https://host/a.bcow?...");
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "ftp://host/x",
            "https://user:secret@host/x",
            "https:///x",
            "https://host/x#part",
            "host/x",
            "https://ho st/",
        ] {
            let problem = Address::parse(text).expect_err(text);
            assert!(!problem.to_string().contains("secret"), "{problem}");
        }
    }

    #[test]
    fn redirects_resolve_like_links() {
        let from = parse("https://host:8443/a/b.bcow?x");
        for (location, to) in [
            ("https://other/c?d", "https://other/c?..."),
            ("//other/c", "https://other/c"),
            ("/c", "https://host:8443/c"),
            ("c", "https://host:8443/a/c"),
            ("c?u=http://x/", "https://host:8443/a/c?..."),
            ("?d", "https://host:8443/a/b.bcow?..."),
            ("./c", "https://host:8443/a/c"),
            ("../c", "https://host:8443/c"),
            ("../..", "https://host:8443/"),
            ("../../../c/./d/..", "https://host:8443/c/"),
            ("/x/../c", "https://host:8443/c"),
            ("..c/.d", "https://host:8443/a/..c/.d"),
        ] {
            assert_eq!(from.join(location).expect(location).to_string(), to);
        }
        for location in [
            "",
            "#x",
            "file:///etc/passwd",
            "javascript:x",
            "https://u:p@h/",
        ] {
            from.join(location).expect_err(location);
        }
    }

    #[test]
    fn layers_are_in_a_directory_of_blobs_beside_their_stack_or_among_the_blobs() {
        for (stack, layer) in [
            ("/debian.bcow", "/blobs/sha256/ab"),
            ("/x/y/debian.bcow", "/x/y/blobs/sha256/ab"),
            ("/x/blobs/sha256/cd", "/x/blobs/sha256/ab"),
            ("/blobs/sha256/cd", "/blobs/sha256/ab"),
            ("/xblobs/sha256/cd", "/xblobs/sha256/blobs/sha256/ab"),
            ("debian.bcow", "blobs/sha256/ab"),
            ("blobs/sha256/cd", "blobs/sha256/ab"),
        ] {
            assert_eq!(blob_beside(stack, "ab"), layer);
        }
        let signed = parse("https://host:8443/x/a.bcow?signature=1").blob("ab");
        let signed = signed.expect("an address").with_secrets();
        assert_eq!(signed, "https://host:8443/x/blobs/sha256/ab?signature=1");
    }

    #[test]
    fn a_server_is_scheme_host_and_port() {
        let from = parse("https://Host/a");
        assert!(from.same_server(&parse("https://host:443/b")));
        for other in ["http://host/a", "https://host:444/a", "https://host.x/a"] {
            assert!(!from.same_server(&parse(other)), "{other}");
        }
    }
}
