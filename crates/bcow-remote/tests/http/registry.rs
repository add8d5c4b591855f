//! Registries: tokens, passwords, redirects; credentials go to no other server.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bcow::Storage;
use bcow_remote::{Credentials, Keychain, Problem, Reference, Registry, Remote};

use super::server::{Asked, Reply, Server};
use super::{cache_directory, image, options, options_with, read_all};

const PASSWORD: &str = "geheim";
/// `alice:geheim`
const BASIC: &str = "Basic YWxpY2U6Z2VoZWlt";
pub const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";

pub struct Alice;

impl Keychain for Alice {
    fn credentials(&self, _: &str) -> Result<Option<Credentials>, String> {
        Ok(Some(Credentials::Password {
            user: "alice".into(),
            password: PASSWORD.into(),
        }))
    }
}

pub struct Stranger;

impl Keychain for Stranger {
    fn credentials(&self, _: &str) -> Result<Option<Credentials>, String> {
        Ok(None)
    }
}

pub fn registry(server: &Server, keychain: Arc<dyn Keychain>, end: &str) -> Registry {
    let remote = options_with(None, Arc::clone(&keychain));
    let remote = Remote::new(remote).expect("a client");
    let reference: Reference = format!("docker://{}/team/image{end}", server.address)
        .parse()
        .expect("a reference");
    Registry::new(&remote, reference, keychain)
}

pub fn unauthorized(challenge: String) -> Reply {
    Reply::Answer(401, vec![("www-authenticate", challenge)], Vec::new())
}

/// A token server that accepts Alice, and counts its tokens.
fn token_server(lifetime: u64) -> Server {
    Server::start(move |asked| match asked.header("authorization") {
        Some(BASIC) => {
            let token = format!(
                r#"{{"token": "token-{}", "expires_in": {lifetime}}}"#,
                asked.number
            );
            Reply::Answer(200, Vec::new(), token.into_bytes())
        }
        _ => Reply::Answer(401, Vec::new(), Vec::new()),
    })
}

/// A registry that accepts the newest token, and whose blobs are on another server.
fn bearer_registry(tokens: &Server, blobs: &Server) -> Server {
    let challenge = format!(
        r#"Bearer realm="{}",service="the registry",scope="repository:team/image:pull""#,
        tokens.url("/token")
    );
    let target = blobs.url("/blob?signature=1");
    Server::start(move |asked| match asked.header("authorization") {
        Some(token) if token.starts_with("Bearer token-") => {
            if asked.path.contains("/blobs/") {
                Reply::Answer(307, vec![("location", target.clone())], Vec::new())
            } else {
                Reply::Answer(200, Vec::new(), b"{}".to_vec())
            }
        }
        _ => unauthorized(challenge.clone()),
    })
}

#[test]
fn token_opens_the_registry_and_goes_nowhere_else() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let blobs = Server::start(move |_| Reply::File(bytes.clone()));
    let tokens = token_server(300);
    let server = bearer_registry(&tokens, &blobs);
    let registry = registry(&server, Arc::new(Alice), ":1");
    assert_eq!(registry.manifest().expect("a manifest"), b"{}");
    let remote = registry.blob(DIGEST, Some(root.into())).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert_eq!(tokens.asked().len(), 1, "one token is enough");
    assert_eq!(
        tokens.asked()[0].path,
        "/token?scope=repository%3Ateam%2Fimage%3Apull&service=the%20registry"
    );
    let has_secret = |asked: &Asked| asked.header("authorization").is_some();
    assert!(!blobs.asked().iter().any(has_secret));
    assert!(
        !server
            .asked()
            .iter()
            .any(|asked| asked.header("authorization") == Some(BASIC))
    );
}

#[test]
fn expired_token_is_renewed() {
    let (file, root) = image(1);
    let blobs = Server::start(|_| Reply::Answer(403, Vec::new(), Vec::new()));
    let bytes = Arc::clone(&file);
    let tokens = token_server(300);
    let challenge = format!(r#"Bearer realm="{}""#, tokens.url("/token"));
    // Each token is good for three requests.
    let used = Mutex::new((String::new(), 0));
    let server = Server::start(move |asked| {
        let token = asked.header("authorization").unwrap_or_default().to_owned();
        let mut used = used.lock().expect("no panic");
        if used.0 != token {
            *used = (token, 0);
        }
        used.1 += 1;
        if used.0.is_empty() || used.1 > 3 {
            unauthorized(challenge.clone())
        } else {
            Reply::File(bytes.clone())
        }
    });
    let registry = registry(&server, Arc::new(Alice), ":1");
    let remote = registry.blob(DIGEST, Some(root.into())).expect("opens");
    assert!(read_all(&remote).expect("reads") == **file);
    assert!(tokens.asked().len() > 1);
    drop(blobs);
}

#[test]
fn password_is_sent_when_the_registry_asks_for_one() {
    let server = Server::start(|asked| match asked.header("authorization") {
        Some(BASIC) => Reply::Answer(200, Vec::new(), b"{}".to_vec()),
        _ => unauthorized(r#"Basic realm="x""#.into()),
    });
    let registry = registry(&server, Arc::new(Alice), "");
    assert_eq!(registry.manifest().expect("a manifest"), b"{}");
    assert!(server.asked()[0].header("authorization").is_none());
    assert_eq!(server.asked()[0].path, "/v2/team/image/manifests/latest");
}

#[test]
fn refused_credentials_are_an_error_without_secrets() {
    let challenges = [
        r#"Basic realm="x""#.to_owned(),
        r#"Bearer realm="ftp://x/""#.to_owned(),
        r#"Negotiate x"#.to_owned(),
        String::new(),
    ];
    for challenge in challenges {
        for keychain in [Arc::new(Alice) as Arc<dyn Keychain>, Arc::new(Stranger)] {
            let challenge = challenge.clone();
            let server = Server::start(move |_| unauthorized(challenge.clone()));
            let error = registry(&server, keychain, ":1")
                .manifest()
                .expect_err("refused");
            let expected = matches!(error.problem, Problem::Denied { .. } | Problem::Answer(_));
            assert!(expected, "{error}");
            assert!(!error.to_string().contains(PASSWORD), "{error}");
            assert!(
                server.asked().len() <= 2,
                "the server is not asked again and again"
            );
        }
    }
}

#[test]
fn manifest_must_have_its_digest_and_comes_from_the_cache() {
    let text = b"{\"schemaVersion\": 2}".to_vec();
    let right = "sha256:b2d27b2f6cf9a2a8a1c1f9f5c5e7a7e0dbf3ee5f6a1b4fd0d6bb1b0e2a3c4d5e";
    let server = Server::start(move |_| Reply::Answer(200, Vec::new(), text.clone()));
    let error = registry(&server, Arc::new(Stranger), &format!("@{right}"))
        .manifest()
        .expect_err("another digest");
    assert!(matches!(error.problem, Problem::Answer(_)), "{error}");

    let empty = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
    let cache = cache_directory();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let server = Server::start(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Reply::Answer(200, Vec::new(), b"{}".to_vec())
    });
    for damage in [false, true, false] {
        let path = cache
            .path()
            .join(format!("{}.json", empty.replace(':', "-")));
        if damage {
            std::fs::write(&path, b"{ }").expect("written");
        }
        let remote = Remote::new(options(Some(&cache))).expect("a client");
        let reference: Reference = format!("docker://{}/team/image@{empty}", server.address)
            .parse()
            .expect("a reference");
        let registry = Registry::new(&remote, reference, Arc::new(Stranger));
        assert_eq!(registry.manifest().expect("a manifest"), b"{}");
    }
    assert_eq!(
        count.load(Ordering::SeqCst),
        2,
        "once, and once after the damage"
    );
}

#[test]
fn blob_without_a_root_hash_is_compared_with_its_digest() {
    let (file, root) = image(1);
    let bytes = Arc::clone(&file);
    let server = Server::start(move |_| Reply::File(bytes.clone()));
    let registry = registry(&server, Arc::new(Stranger), ":1");
    let error = registry
        .blob(DIGEST, None)
        .map(drop)
        .expect_err("another digest");
    assert!(matches!(error.problem, Problem::Answer(_)), "{error}");
    let found = error.to_string();
    let (_, digest) = found
        .split_once("the digest of the file is ")
        .expect("a digest");
    let remote = registry.blob(digest, None).expect("its own digest");
    assert_eq!(remote.root(), root);
    assert_eq!(remote.len().expect("a length"), file.len() as u64);
}

#[test]
fn whole_blob_is_continued_where_the_connection_broke() {
    let bytes: Arc<Vec<u8>> = Arc::new((0..500_000_u32).map(|n| (n / 7) as u8).collect());
    let sent = Arc::clone(&bytes);
    let server = Server::start(move |asked| {
        let whole = super::server::ranged(asked, &sent, "\"one\"");
        match asked.number {
            0..3 => Reply::Raw(whole[..100_000].to_vec()),
            _ => Reply::File(sent.clone()),
        }
    });
    let registry = registry(&server, Arc::new(Stranger), ":1");
    let mut download = registry
        .download(DIGEST, bytes.len() as u64)
        .expect("an address");
    let mut found = Vec::new();
    std::io::Read::read_to_end(&mut download, &mut found).expect("all bytes");
    assert!(found == **bytes);
    let ranges: Vec<_> = server.asked().iter().map(|asked| asked.range).collect();
    assert_eq!(ranges[0], None);
    assert!(
        ranges[1..]
            .iter()
            .all(|range| range.is_some_and(|(first, _)| first > 90_000))
    );
}

#[test]
fn time_of_a_slow_reader_is_not_that_of_the_server() {
    let bytes = Arc::new(vec![7; 300_000]);
    let sent = Arc::clone(&bytes);
    let server = Server::start(move |_| Reply::File(sent.clone()));
    let registry = registry(&server, Arc::new(Stranger), ":1");
    let mut download = registry
        .download(DIGEST, bytes.len() as u64)
        .expect("an address");
    let mut buf = [0; 100_000];
    for _ in 0..3 {
        std::io::Read::read_exact(&mut download, &mut buf).expect("bytes");
        std::thread::sleep(super::TIMEOUT);
    }
    assert_eq!(
        std::io::Read::read(&mut download, &mut buf).expect("the end"),
        0
    );
}
