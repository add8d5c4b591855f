//! Lists of what is attached to a manifest: all of it is found, or there is an error.

use std::sync::Arc;

use bcow_remote::{Problem, Reference, Registry, Remote, RemoteError};
use serde_json::{Value, json};

use super::registry::{DIGEST, Stranger, registry};
use super::server::{Asked, Reply, Server};
use super::{cache_directory, options};

const KIND: &str = "application/vnd.test";

fn entry(number: usize, kind: &str) -> Value {
    json!({"digest": format!("sha256:{number:064x}"), "artifactType": kind, "size": 2})
}

fn index(entries: &[Value]) -> Vec<u8> {
    json!({"schemaVersion": 2, "manifests": entries})
        .to_string()
        .into_bytes()
}

fn page(entries: &[Value], link: &str) -> Reply {
    let mut headers = vec![(
        "content-type",
        "application/vnd.oci.image.index.v1+json".to_owned(),
    )];
    if !link.is_empty() {
        headers.push(("link", link.to_owned()));
    }
    Reply::Answer(200, headers, index(entries))
}

fn status(status: u16) -> Reply {
    Reply::Answer(status, vec![], Vec::new())
}

/// The numbers of the listed manifests.
fn found(result: Result<Vec<u8>, RemoteError>) -> Result<Vec<usize>, RemoteError> {
    let index: Value = serde_json::from_slice(&result?).expect("JSON");
    let entries = index["manifests"].as_array().expect("entries").clone();
    let number = |entry: &Value| {
        let digest = entry["digest"].as_str().expect("a digest");
        usize::from_str_radix(&digest["sha256:".len()..], 16).expect("a number")
    };
    Ok(entries.iter().map(number).collect())
}

/// What is found if the server answers the first page, the second page, and the tag like this.
fn find(
    first: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    second: impl Fn() -> Reply + Send + Sync + 'static,
    tag: impl Fn() -> Reply + Send + Sync + 'static,
) -> (Result<Vec<usize>, RemoteError>, Server) {
    let server = Server::start(move |asked| match &*asked.path {
        path if path.contains("/manifests/") => tag(),
        path if path.contains("page=2") => second(),
        _ => first(asked),
    });
    let registry = registry(&server, Arc::new(Stranger), ":1");
    (found(registry.referrers(DIGEST, KIND)), server)
}

#[test]
fn all_pages_of_a_list_are_read_in_their_order() {
    let path = "/v2/team/image/referrers/x?page=2";
    for link in [
        format!("<{path}>; rel=\"next\""),
        format!("<{path}>; REL=next; title=\"x\""),
        format!("</first>; rel=\"first\", <{path}>; title=x; rel=\"last next\""),
        "<x?page=2>; rel=\"next\"".to_owned(),
        "<?page=2>; rel=\"next\"".to_owned(),
        "<../../x/y/../page?page=2>; rel=\"next\"".to_owned(),
    ] {
        let shown = link.clone();
        let (found, server) = find(
            move |_| page(&[entry(1, KIND), entry(2, "other")], &link),
            || page(&[entry(3, KIND)], ""),
            || status(500),
        );
        assert_eq!(found.expect(&shown), [1, 3], "{shown}");
        assert_eq!(server.asked().len(), 2, "{shown}");
    }
    let (found, server) = find(
        |_| page(&[entry(1, KIND)], "</x?page=2>; rel=\"prev\""),
        || status(500),
        || status(500),
    );
    assert_eq!(found.expect("one page"), [1]);
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn list_that_is_not_complete_is_an_error() {
    let next = "</v2/team/image/referrers/x?page=2>; rel=\"next\"";
    for code in [400, 401, 403, 404, 405, 410, 429, 500, 501, 503] {
        let (found, server) = find(
            move |_| page(&[entry(1, KIND)], next),
            move || status(code),
            || page(&[entry(9, KIND)], ""),
        );
        found.expect_err("no second page");
        assert!(
            server
                .asked()
                .iter()
                .all(|asked| !asked.path.contains("/manifests/"))
        );
    }
    // The same page again and again.
    let (found, server) = find(
        move |_| page(&[], next),
        move || page(&[entry(1, KIND)], next),
        || status(404),
    );
    let error = found.expect_err("no end").to_string();
    assert!(error.contains("more than 100 pages"), "{error}");
    assert_eq!(server.asked().len(), 100);
    // Another server would get the credentials of this one, or would be believed.
    let other = Server::start(|_| page(&[entry(1, KIND)], ""));
    let link = format!("<{}>; rel=next", other.url("/"));
    let (found, _) = find(move |_| page(&[], &link), || status(500), || status(404));
    let error = found.expect_err("another server").to_string();
    assert!(error.contains("on another server"), "{error}");
    assert!(other.asked().is_empty());
}

#[test]
fn only_a_registry_without_lists_has_the_list_of_a_tag() {
    let unsupported = br#"{"errors": [{"code": "UNSUPPORTED", "message": "no"}]}"#;
    let is_absent = |reply: &dyn Fn() -> Reply| {
        let reply = Arc::new(std::sync::Mutex::new(vec![
            reply(),
            reply(),
            reply(),
            reply(),
        ]));
        let next = move |_: &Asked| reply.lock().expect("no panic").pop().expect("few requests");
        let (found, _) = find(next, || status(500), || page(&[entry(7, KIND)], ""));
        found
    };
    let html = || {
        let kind = vec![("content-type", "text/html".to_owned())];
        Reply::Answer(200, kind, b"<html>".to_vec())
    };
    let refused = || Reply::Answer(400, vec![], unsupported.to_vec());
    let absent: [&dyn Fn() -> Reply; 6] = [
        &|| status(404),
        &|| status(405),
        &|| status(406),
        &|| status(501),
        &html,
        &refused,
    ];
    for reply in absent {
        assert_eq!(is_absent(reply).expect("the tag"), [7]);
    }
    let long = || {
        let kind = vec![("content-type", "application/json".to_owned())];
        Reply::Answer(200, kind, vec![b' '; (4 << 20) + 1])
    };
    let text = || Reply::Answer(200, vec![], b"text".to_vec());
    let number = || Reply::Answer(200, vec![], br#"{"manifests": 7}"#.to_vec());
    let cut = || Reply::Raw(b"HTTP/1.1 200 x\r\ncontent-length: 9\r\n\r\n{".to_vec());
    let failed: [&dyn Fn() -> Reply; 5] = [&|| status(400), &long, &text, &number, &cut];
    for reply in failed {
        let error = is_absent(reply).expect_err("no list").to_string();
        assert!(error.contains("referrers of sha256:"), "{error}");
    }
}

#[test]
fn nothing_is_attached_if_neither_the_list_nor_the_tag_is_there() {
    let (found, _) = find(|_| status(404), || status(500), || status(404));
    assert_eq!(found.expect("an answer"), [0_usize; 0]);
    for code in [400, 401, 403, 410, 500, 503] {
        let (found, _) = find(|_| status(404), || status(500), move || status(code));
        let error = found.expect_err("no answer").to_string();
        assert!(error.contains("referrers of sha256:"), "{error}");
    }
    let null = || Reply::Answer(200, vec![], br#"{"manifests": null}"#.to_vec());
    let (found, _) = find(move |_| null(), || status(500), || status(500));
    assert_eq!(found.expect("an empty list"), [0_usize; 0]);
}

#[test]
fn last_result_is_used_only_without_the_registry() {
    let cache = cache_directory();
    let server = Server::start(|asked| match asked.path.contains("/manifests/") {
        true => status(404),
        false if asked.number < 2 => {
            let link = match asked.number {
                0 => "</v2/team/image/referrers/x>; rel=next",
                _ => "",
            };
            page(&[entry(asked.number + 1, KIND)], link)
        }
        false if asked.number < 5 => status(503),
        false => Reply::Raw(Vec::new()),
    });
    let find = || {
        let remote = Remote::new(options(Some(&cache)));
        let name = format!("docker://{}/team/image:1", server.address);
        let reference: Reference = name.parse().expect("a reference");
        let registry = Registry::new(&remote.expect("a client"), reference, Arc::new(Stranger));
        found(registry.referrers(DIGEST, KIND))
    };
    assert_eq!(find().expect("two pages"), [1, 2]);
    let error = find().expect_err("the registry has answered");
    assert!(matches!(error.problem, Problem::Busy(503)), "{error}");
    assert_eq!(find().expect("the last result"), [1, 2]);
}
