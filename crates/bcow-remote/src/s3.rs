//! Files in S3: their names, and the signatures of requests (AWS Signature Version 4).
//!
//! The secret key never leaves this process; a session token does, and only if the connection is
//! encrypted or leads to this machine. No text of an error or of the log contains either.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::HEXLOWER;
use ring::hmac;
use sha2::{Digest, Sha256};
use ureq::http::Method;

use crate::address::{Address, blob_beside, encode};
use crate::client::{Answer, Client, Content};
use crate::error::{Fault, Problem, printable};
use crate::lock::lock;
use crate::retry_budget::RetryBudget;

/// The region that has no name in the address of AWS, and that other servers expect.
const USUAL_REGION: &str = "us-east-1";
const SERVICE: &str = "s3";
const ALGORITHM: &str = "AWS4-HMAC-SHA256";
/// Largest size of the text with which a server explains an error.
pub(crate) const EXPLANATION_BYTES: u64 = 16 << 10;
/// Errors after which other credentials may be accepted.
const EXPIRED: [&str; 4] = [
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "TokenRefreshRequired",
];

/// The name of a file in S3: `s3://BUCKET/KEY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Name {
    bucket: String,
    pub(crate) key: String,
}

impl FromStr for S3Name {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = text
            .strip_prefix("s3://")
            .ok_or("it does not begin with s3://")?;
        let (bucket, key) = rest.split_once('/').ok_or("the key is missing")?;
        let is_bucket = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_bucket) || bucket.starts_with('.') {
            return Err("the bucket may have letters, digits, and . - _");
        }
        if key.is_empty() {
            return Err("the key is missing");
        }
        if key.split('/').any(|part| matches!(part, "." | "..")) {
            return Err("a part of the key is . or .., which servers understand differently");
        }
        Ok(S3Name {
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }
}

impl fmt::Display for S3Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.key)
    }
}

impl S3Name {
    /// The name of the file with this digest that belongs to the file of this name, in the same
    /// bucket.
    #[must_use]
    pub fn blob(&self, hex: &str) -> S3Name {
        S3Name {
            bucket: self.bucket.clone(),
            key: blob_beside(&self.key, hex),
        }
    }
}

/// Credentials for S3.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Credentials {
    /// The access key ID.
    pub key_id: String,
    /// The secret access key.
    pub secret: String,
    /// The session token of temporary credentials.
    pub session_token: Option<String>,
}

/// Where credentials for S3 come from.
pub trait S3Keychain: Send + Sync {
    /// The credentials. `None`: there are none, and requests are not signed. The error is for the
    /// user, and must not contain secrets.
    fn credentials(&self) -> Result<Option<S3Credentials>, String>;
}

/// An S3 server, and the access to it.
#[derive(Clone)]
pub struct S3 {
    /// The address of the server; `None` is AWS.
    pub endpoint: Option<Address>,
    /// The region; `None` is `us-east-1`.
    pub region: Option<String>,
    /// The credentials.
    pub keychain: Arc<dyn S3Keychain>,
}

impl S3 {
    fn region(&self) -> &str {
        self.region.as_deref().unwrap_or(USUAL_REGION)
    }

    /// The address of a file: `ENDPOINT/BUCKET/KEY`.
    pub(crate) fn address(&self, name: &S3Name) -> Result<Address, Problem> {
        self.at(&format!("/{}/{}", name.bucket, encode_path(&name.key)))
    }

    /// The address of the bucket of a file.
    pub(crate) fn bucket(&self, name: &S3Name) -> Result<Address, Problem> {
        self.at(&format!("/{}", name.bucket))
    }

    fn at(&self, path: &str) -> Result<Address, Problem> {
        let endpoint = match &self.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => Address::parse(&format!("https://s3.{}.amazonaws.com", self.region()))?,
        };
        endpoint.with_path(path)
    }

    pub(crate) fn signer(&self) -> Signer {
        Signer {
            region: self.region().to_owned(),
            keychain: Arc::clone(&self.keychain),
            credentials: Mutex::default(),
        }
    }
}

/// A path in the one encoding that signatures are made of.
fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}

/// Signs the requests for one file.
pub(crate) struct Signer {
    region: String,
    keychain: Arc<dyn S3Keychain>,
    /// The credentials, once they are read. The lock is held while they are read, never during a
    /// request, and no other lock is taken under it.
    credentials: Mutex<Option<Option<S3Credentials>>>,
}

/// A name in lower case, and a value.
type Header = (String, String);

/// A request to be signed.
pub(crate) struct Request<'r> {
    pub(crate) method: Method,
    pub(crate) address: &'r Address,
    pub(crate) headers: &'r [(&'r str, &'r str)],
    /// The content.
    pub(crate) bytes: &'r [u8],
}

impl Signer {
    /// Sends a signed request; once more with other credentials, if those have expired. The fields
    /// of a query must be encoded and sorted.
    pub(crate) fn send(
        &self,
        client: &Client,
        request: &Request<'_>,
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        let checked = request.address.check(client.transport);
        checked.map_err(Problem::permanent)?;
        let mut is_second = false;
        loop {
            let (headers, credentials) = self.sign(request, SystemTime::now())?;
            let pairs: Vec<_> = headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let mut bytes = request.bytes;
            let content = match bytes.len() as u64 {
                0 if request.method == Method::GET || request.method == Method::HEAD => {
                    Content::Nothing
                }
                0 => Content::Bytes(&[]),
                length => Content::Stream(&mut bytes, length),
            };
            let method = request.method.clone();
            let answer = client.send(method, request.address, &pairs, content, budget)?;
            if !matches!(answer.status, 301 | 400 | 401 | 403) {
                return Ok(answer);
            }
            match self.refused(answer, credentials.as_ref()) {
                None if !is_second => is_second = true,
                None => return Err(denied("the credentials were not accepted".to_owned())),
                Some(fault) => return Err(fault),
            }
        }
    }

    /// The headers of a signed request, its own included, and the credentials, for
    /// [`Signer::refused`].
    fn sign(
        &self,
        request: &Request<'_>,
        now: SystemTime,
    ) -> Result<(Vec<Header>, Option<S3Credentials>), Fault> {
        let Request {
            address, headers, ..
        } = request;
        let mut all: Vec<Header> = headers
            .iter()
            .map(|(name, value)| (name.to_ascii_lowercase(), (*value).to_owned()))
            .collect();
        let Some(credentials) = self.credentials()? else {
            return Ok((all, None));
        };
        address.require_secrecy(403)?;
        let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let time = timestamp(seconds);
        all.push(("host".into(), address.server().to_owned()));
        let content = HEXLOWER.encode(&Sha256::digest(request.bytes));
        all.push(("x-amz-content-sha256".into(), content.clone()));
        all.push(("x-amz-date".into(), time.clone()));
        if let Some(token) = &credentials.session_token {
            all.push(("x-amz-security-token".into(), token.clone()));
        }
        let authorization = self.authorization(&credentials, request, &content, &mut all, &time);
        all.push(("authorization".into(), authorization));
        Ok((all, Some(credentials)))
    }

    /// The value of the header `Authorization`. Sorts the headers, all of which are signed.
    fn authorization(
        &self,
        credentials: &S3Credentials,
        sent: &Request<'_>,
        content: &str,
        headers: &mut [Header],
        time: &str,
    ) -> String {
        headers.sort();
        let (region, method) = (&self.region, &sent.method);
        let day = time.split('T').next().unwrap_or_default();
        let scope = format!("{day}/{region}/{SERVICE}/aws4_request");
        let canonical: String = headers
            .iter()
            .map(|(name, value)| format!("{name}:{}\n", value.trim()))
            .collect();
        let names: Vec<&str> = headers.iter().map(|(name, _)| name.as_str()).collect();
        let names = names.join(";");
        let uri = sent.address.uri();
        let (path, query) = (uri.path(), uri.query().unwrap_or_default());
        let request = format!("{method}\n{path}\n{query}\n{canonical}\n{names}\n{content}");
        let request = HEXLOWER.encode(&Sha256::digest(request.as_bytes()));
        let text = format!("{ALGORITHM}\n{time}\n{scope}\n{request}");
        let mac = |key: &[u8], text: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key);
            hmac::sign(&key, text.as_bytes())
        };
        let mut key = mac(format!("AWS4{}", credentials.secret).as_bytes(), day);
        for part in [region.as_str(), SERVICE, "aws4_request"] {
            key = mac(key.as_ref(), part);
        }
        let signature = HEXLOWER.encode(mac(key.as_ref(), &text).as_ref());
        format!(
            "{ALGORITHM} Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            credentials.key_id
        )
    }

    fn credentials(&self) -> Result<Option<S3Credentials>, Fault> {
        let mut known = lock(&self.credentials);
        if let Some(credentials) = &*known {
            return Ok(credentials.clone());
        }
        let read = self.keychain.credentials().map_err(denied)?;
        *known = Some(read.clone());
        Ok(read)
    }

    /// Reacts to an answer with status 301, 400 or 403 to a request with these credentials. `None`:
    /// there are other credentials now.
    fn refused(&self, mut answer: Answer, sent: Option<&S3Credentials>) -> Option<Fault> {
        let status = answer.status;
        let region = answer.header("x-amz-bucket-region").map(printable);
        let fault = answer.refusal();
        let text = answer.body.read_document(EXPLANATION_BYTES);
        let text = text.unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let code = element(&text, "Code");
        if code.is_some_and(|code| EXPIRED.contains(&code)) {
            let mut known = lock(&self.credentials);
            // Another thread may have read them meanwhile.
            if known.as_ref().is_some_and(|known| known.as_ref() == sent)
                && let Ok(read) = self.keychain.credentials()
            {
                *known = Some(read);
            }
            if known.as_ref().is_some_and(|known| known.as_ref() != sent) {
                return None;
            }
        }
        if code == Some("RequestTimeout") {
            return Some(Problem::Busy(status).transient());
        }
        let explanation = match (region, explanation(&text)) {
            (Some(region), _) if region != self.region => {
                format!("the bucket is in the region {region}, not {}", self.region)
            }
            (_, Some(explanation)) => explanation,
            _ if sent.is_none() => "there are no credentials for S3".to_owned(),
            _ => return Some(fault),
        };
        Some(Problem::denied(status, explanation).permanent())
    }
}

fn denied(explanation: String) -> Fault {
    Problem::denied(403, explanation).permanent()
}

/// The content of the first element of this name. The documents of S3 are flat and short.
pub(crate) fn element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, behind) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = behind.split_once("</")?;
    Some(content.trim())
}

/// What the document of an error says.
pub(crate) fn explanation(text: &str) -> Option<String> {
    let code = element(text, "Code")?;
    Some(match element(text, "Message") {
        Some(message) => printable(&format!("{code}: {message}")),
        None => printable(code),
    })
}

/// `20261123T130000Z`
fn timestamp(unix_seconds: u64) -> String {
    let text = i64::try_from(unix_seconds).ok().and_then(bcow::rfc3339);
    text.unwrap_or_default().replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    struct Fixed(Option<S3Credentials>);

    impl S3Keychain for Fixed {
        fn credentials(&self) -> Result<Option<S3Credentials>, String> {
            Ok(self.0.clone())
        }
    }

    fn server(endpoint: &str, credentials: Option<S3Credentials>) -> S3 {
        S3 {
            endpoint: Some(Address::parse(endpoint).expect("an address")),
            region: None,
            keychain: Arc::new(Fixed(credentials)),
        }
    }

    fn example() -> S3Credentials {
        S3Credentials {
            key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            session_token: None,
        }
    }

    #[test]
    fn signature_is_that_of_the_example_in_the_documentation_of_s3() {
        let s3 = server("https://examplebucket.s3.amazonaws.com", Some(example()));
        let address = Address::parse("https://examplebucket.s3.amazonaws.com/test.txt");
        let address = address.expect("an address");
        let now = UNIX_EPOCH + Duration::from_secs(1_369_353_600);
        let request = Request {
            method: Method::GET,
            address: &address,
            headers: &[("range", "bytes=0-9")],
            bytes: &[],
        };
        let signed = s3.signer().sign(&request, now);
        let headers = match signed {
            Ok((headers, _)) => headers,
            Err(fault) => panic!("{}", fault.problem),
        };
        let value = |name: &str| {
            let mut found = headers.iter().filter(|(n, _)| n == name);
            found.next().map(|(_, value)| value.as_str())
        };
        assert_eq!(value("x-amz-date"), Some("20130524T000000Z"));
        assert_eq!(
            value("authorization"),
            Some(
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/\
                 aws4_request, SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
                 Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
            )
        );
    }

    #[test]
    fn names_lead_to_addresses_in_the_style_of_paths() {
        let name: S3Name = "s3://bucket/a b/\u{e9}+x.bcow".parse().expect("a name");
        let s3 = server("https://s3.host:7070/base/", None);
        let address = s3.address(&name).expect("an address");
        assert_eq!(
            address.to_string(),
            "https://s3.host:7070/base/bucket/a%20b/%C3%A9%2Bx.bcow"
        );
        let aws = S3 {
            endpoint: None,
            region: Some("eu-central-1".into()),
            ..s3
        };
        let address = aws.address(&name).expect("an address");
        assert_eq!(address.server(), "s3.eu-central-1.amazonaws.com");
    }

    #[test]
    fn invalid_names_are_refused() {
        for text in [
            "s3://",
            "s3://bucket",
            "s3://bucket/",
            "s3:///key",
            "s3://bu cket/key",
            "s3://a@b/key",
            "s3://bucket/a/../b",
        ] {
            text.parse::<S3Name>().expect_err(text);
        }
    }

    #[test]
    fn secrets_are_not_sent_without_encryption() {
        let s3 = server("http://s3.host", Some(example()));
        let address = s3.address(&"s3://b/k".parse().expect("a name"));
        let request = Request {
            method: Method::GET,
            address: &address.expect("an address"),
            headers: &[],
            bytes: &[],
        };
        let signed = s3.signer().sign(&request, UNIX_EPOCH);
        let Err(fault) = signed else {
            panic!("credentials are sent");
        };
        let text = fault.problem.to_string();
        assert!(
            text.contains("without encryption") && !text.contains("AKIA"),
            "{text}"
        );
    }

    #[test]
    fn errors_of_servers_are_found_in_their_documents() {
        let text = "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code>\
                    <Message>No</Message></Error>";
        assert_eq!(element(text, "Code"), Some("AccessDenied"));
        assert_eq!(element(text, "Message"), Some("No"));
        assert_eq!(element("<Code>", "Code"), None);
    }
}
