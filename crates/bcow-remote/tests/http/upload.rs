//! Uploads: what the registry has is not sent, and a break is continued, with every kind of
//! registry.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

use bcow_remote::{Keychain, Problem, Pushed, Reference, Remote, RemoteError, Upload};
use sha2::{Digest, Sha256};

use super::options;
use super::registry::{Alice, Stranger, unauthorized};
use super::server::{Asked, Reply, Server};

pub fn digest(bytes: &[u8]) -> String {
    format!(
        "sha256:{}",
        data_encoding::HEXLOWER.encode(&Sha256::digest(bytes))
    )
}

/// What a registry has.
#[derive(Default)]
pub struct State {
    pub blobs: HashMap<String, Vec<u8>>,
    pub uploads: Vec<Vec<u8>>,
    pub manifests: HashMap<String, Vec<u8>>,
}

/// How a registry differs from a good one.
#[derive(Clone, Copy, Default)]
pub struct Habits {
    /// Forgets an upload when a connection breaks.
    pub forgets: bool,
    /// Answers PATCH with this status.
    pub patch: Option<u16>,
    /// Takes blobs from other repositories.
    pub mounts: bool,
    /// Names uploads by absolute URLs.
    pub absolute: bool,
    /// The status of new uploads.
    pub refuses: Option<u16>,
    /// Stores other bytes than it was sent.
    pub damages: bool,
    /// Lists what is attached to a manifest.
    pub lists: bool,
}

/// The habits of a good registry, with a change.
fn habits(change: impl FnOnce(&mut Habits)) -> Habits {
    let mut habits = Habits::default();
    change(&mut habits);
    habits
}

/// A registry that breaks connections as `cut` wants.
pub fn start(
    habits: Habits,
    cut: impl Fn(&Asked) -> Option<usize> + Send + Sync + 'static,
) -> (Server, Arc<Mutex<State>>) {
    let state = Arc::<Mutex<State>>::default();
    let shared = Arc::clone(&state);
    let cut = Arc::new(cut);
    let is_cut = Arc::clone(&cut);
    let server = Server::cutting(
        move |asked| cut(asked),
        move |asked| {
            let mut state = shared.lock().expect("no panic");
            let reply = answer(asked, habits, &mut state);
            if is_cut(asked).is_some() && habits.forgets {
                state.uploads.clear();
            }
            reply
        },
    );
    (server, state)
}

pub fn answer(asked: &Asked, habits: Habits, state: &mut State) -> Reply {
    let (path, query) = asked.path.split_once('?').unwrap_or((&asked.path, ""));
    let end = path.strip_prefix("/v2/team/image/").unwrap_or_default();
    let host = asked.header("host").unwrap_or_default();
    let parameter = |name: &str| {
        let value = query
            .split('&')
            .find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        value.map(|value| value.replace("%3A", ":").replace("%2F", "/"))
    };
    let empty = |status, headers| Reply::Answer(status, headers, Vec::new());
    let place = |number: usize, bytes: usize| {
        let place = format!("/v2/team/image/blobs/uploads/{number}?_state=a%2Fb");
        let location = if habits.absolute { format!("http://{host}{place}") } else { place };
        let range = format!("0-{}", bytes.saturating_sub(1));
        vec![("location", location), ("range", range)]
    };
    if let Some(digest) = end.strip_prefix("blobs/sha256:") {
        return match state.blobs.get(&format!("sha256:{digest}")) {
            Some(bytes) => Reply::Answer(200, vec![], bytes.clone()),
            None => empty(404, vec![]),
        };
    }
    if let Some(name) = end.strip_prefix("manifests/") {
        return match &*asked.method {
            "PUT" => {
                let mut bytes = asked.body.clone();
                let own = digest(&bytes);
                if habits.damages {
                    bytes.push(b' ');
                }
                state.manifests.insert(name.to_owned(), bytes);
                let mut headers = vec![("docker-content-digest", own)];
                if habits.lists {
                    headers.push(("oci-subject", "sha256:x".to_owned()));
                }
                empty(201, headers)
            }
            _ => match state.manifests.get(name) {
                Some(bytes) => Reply::Answer(200, vec![], bytes.clone()),
                None => empty(404, vec![]),
            },
        };
    }
    let Some(upload) = end.strip_prefix("blobs/uploads/") else {
        return empty(404, vec![]);
    };
    if asked.method == "POST" {
        if let Some(status) = habits.refuses {
            let text = br#"{"errors": [{"code": "DENIED", "message": "not your repository"}]}"#;
            return Reply::Answer(status, vec![], text.to_vec());
        }
        if let (Some(digest), true) = (parameter("mount"), habits.mounts) {
            assert_eq!(parameter("from").as_deref(), Some("team/other"));
            state.blobs.insert(digest, b"mounted".to_vec());
            return empty(201, vec![]);
        }
        state.uploads.push(Vec::new());
        return empty(202, place(state.uploads.len() - 1, 0));
    }
    assert_eq!(parameter("_state").as_deref(), Some("a/b"));
    let number: usize = upload.parse().expect("the number of an upload");
    let Some(bytes) = state.uploads.get_mut(number) else {
        return empty(404, vec![]);
    };
    match &*asked.method {
        "PATCH" => {
            if let Some(status) = habits.patch {
                return empty(status, vec![]);
            }
            let range = asked.header("content-range").expect("a range");
            let first: usize = range
                .split('-')
                .next()
                .expect("a start")
                .parse()
                .expect("one");
            if first != bytes.len() {
                return empty(416, vec![]);
            }
            bytes.extend_from_slice(&asked.body);
            empty(202, place(number, bytes.len()))
        }
        "GET" => empty(204, place(number, bytes.len())),
        "PUT" => {
            bytes.extend_from_slice(&asked.body);
            let bytes = bytes.clone();
            let wanted = parameter("digest").expect("a digest");
            if digest(&bytes) == wanted {
                state.blobs.insert(wanted, bytes);
                empty(201, vec![])
            } else {
                empty(400, vec![])
            }
        }
        _ => empty(204, vec![]),
    }
}

pub fn upload(server: &Server, keychain: Arc<dyn Keychain>, from: Option<&str>) -> Upload {
    let remote = Remote::new(options(None)).expect("a client");
    let reference = |repository: &str| -> Reference {
        let name = format!("docker://{}/{repository}:1", server.address);
        name.parse().expect("a reference")
    };
    let from = from.map(reference);
    Upload::new(&remote, reference("team/image"), keychain, from.as_ref()).expect("an address")
}

pub fn send(upload: &Upload, bytes: &Arc<Vec<u8>>) -> (Result<Pushed, RemoteError>, u64) {
    let sent = Mutex::new(0);
    let open = |offset: u64| -> io::Result<Box<dyn Read>> {
        Ok(Box::new(io::Cursor::new(bytes[offset as usize..].to_vec())))
    };
    let count = |bytes| *sent.lock().expect("no panic") += bytes;
    let result = upload.blob(&digest(bytes), bytes.len() as u64, &open, &count);
    (result, sent.into_inner().expect("no panic"))
}

/// Sends a blob, which arrives whole; returns the number of bytes that were counted as sent.
fn arrives(server: &Server, state: &Mutex<State>) -> u64 {
    let bytes = noise(LARGE);
    let (result, sent) = send(&upload(server, Arc::new(Stranger), None), &bytes);
    assert_eq!(result.expect("sent"), Pushed::Sent);
    assert!(state.lock().expect("no panic").blobs[&digest(&bytes)] == **bytes);
    sent
}

pub fn noise(length: usize) -> Arc<Vec<u8>> {
    let mut state = length as u64;
    let next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 56) as u8
    };
    Arc::new(std::iter::repeat_with(next).take(length).collect())
}

pub const LARGE: usize = 5 << 20;

pub fn methods(server: &Server) -> Vec<String> {
    server.asked().iter().map(|a| a.method.clone()).collect()
}

#[test]
fn blob_of_any_length_arrives_and_is_sent_once() {
    for absolute in [false, true] {
        for length in [0, 1, 100_000, LARGE] {
            let habits = habits(|new| new.absolute = absolute);
            let (server, state) = start(habits, |_| None);
            let upload = upload(&server, Arc::new(Stranger), None);
            let bytes = noise(length);
            let (result, sent) = send(&upload, &bytes);
            assert_eq!(result.expect("sent"), Pushed::Sent);
            assert_eq!(sent, length as u64);
            assert!(state.lock().expect("no panic").blobs[&digest(&bytes)] == **bytes);
            let before = server.asked().len();
            assert_eq!(send(&upload, &bytes).0.expect("there"), Pushed::There);
            assert_eq!(
                methods(&server)[before..],
                ["HEAD"],
                "nothing is sent again"
            );
        }
    }
}

#[test]
fn blob_of_another_repository_is_mounted() {
    let habits = habits(|new| new.mounts = true);
    let (server, _) = start(habits, |_| None);
    let bytes = noise(LARGE);
    let here = upload(&server, Arc::new(Stranger), Some("team/other"));
    assert_eq!(send(&here, &bytes).0.expect("mounted"), Pushed::Mounted);
    assert_eq!(methods(&server), ["HEAD", "POST"]);
    assert!(here.adopt(&digest(&noise(7)), 7).expect("mounted"));
    // A registry that does not mount begins an upload, which goes on, or is ended.
    let (server, state) = start(Habits::default(), |_| None);
    let here = upload(&server, Arc::new(Stranger), Some("team/other"));
    assert_eq!(send(&here, &bytes).0.expect("sent"), Pushed::Sent);
    assert_eq!(methods(&server), ["HEAD", "POST", "PATCH", "PUT"]);
    assert!(!here.adopt(&digest(&noise(7)), 7).expect("not there"));
    assert_eq!(methods(&server).last().expect("a request"), "DELETE");
    assert!(here.adopt(&digest(&bytes), LARGE as u64).expect("there"));
    assert_eq!(state.lock().expect("no panic").blobs.len(), 1);
}

#[test]
fn upload_is_continued_where_the_connection_broke() {
    let cut = |asked: &Asked| (asked.number == 2).then_some(3 << 20);
    let (server, state) = start(Habits::default(), cut);
    assert_eq!(arrives(&server, &state), LARGE as u64);
    let asked = server.asked();
    let again = asked.iter().filter(|asked| asked.method == "PATCH").nth(1);
    let range = again.expect("a second piece").header("content-range");
    assert_eq!(range, Some(format!("{}-{}", 3 << 20, LARGE - 1).as_str()));
}

#[test]
fn forgotten_upload_begins_again() {
    let cut = |asked: &Asked| (asked.number == 2).then_some(3 << 20);
    let habits = habits(|new| new.forgets = true);
    let (server, state) = start(habits, cut);
    assert_eq!(arrives(&server, &state), LARGE as u64);
}

#[test]
fn connection_that_always_breaks_is_an_error() {
    let cut = |asked: &Asked| (asked.method == "PATCH").then_some(0);
    for forgets in [false, true] {
        let habits = habits(|new| new.forgets = forgets);
        let (server, state) = start(habits, cut);
        let (result, _) = send(&upload(&server, Arc::new(Stranger), None), &noise(LARGE));
        let error = result.expect_err("no way through");
        assert!(error.to_string().contains("docker://"), "{error}");
        assert!(state.lock().expect("no panic").blobs.is_empty());
        assert!(
            server.asked().len() < 60,
            "{} requests",
            server.asked().len()
        );
    }
}

/// Requests after which a test counts an upload as endless.
const MANY: usize = 60;

#[test]
fn piece_that_the_registry_does_not_count_is_an_error() {
    for (status, range) in [
        (202, Some("0-0")),
        (200, None),
        (201, None),
        (204, None),
        (204, Some("0-0")),
    ] {
        let server = Server::start(move |asked| match &*asked.method {
            _ if asked.number > MANY => Reply::Answer(403, vec![], Vec::new()),
            "HEAD" => Reply::Answer(404, vec![], Vec::new()),
            "POST" => Reply::Answer(202, vec![("location", "/upload".into())], Vec::new()),
            _ => {
                let range = range.map(|range| ("range", range.to_owned()));
                Reply::Answer(status, range.into_iter().collect(), Vec::new())
            }
        });
        let (result, sent) = send(&upload(&server, Arc::new(Stranger), None), &noise(LARGE));
        let error = result.expect_err("not counted").to_string();
        let words = "it does not count the bytes that were sent";
        assert!(error.contains(words), "{status}: {error}");
        assert_eq!(methods(&server), ["HEAD", "POST", "PATCH"], "{status}");
        assert_eq!(sent, 0);
    }
}

#[test]
fn invalid_range_is_named_in_the_error() {
    for (range, words) in [
        ("0-x", "its range is invalid"),
        ("0-9999999", "it counts more bytes than were sent"),
    ] {
        let server = Server::start(move |asked| match &*asked.method {
            "HEAD" => Reply::Answer(404, vec![], Vec::new()),
            "POST" => Reply::Answer(202, vec![("location", "/upload".into())], Vec::new()),
            _ => Reply::Answer(202, vec![("range", range.to_owned())], Vec::new()),
        });
        let (result, _) = send(&upload(&server, Arc::new(Stranger), None), &noise(LARGE));
        let error = result.expect_err("a wrong range").to_string();
        assert!(error.contains(words), "{range}: {error}");
    }
}

#[test]
fn broken_piece_has_not_arrived_if_the_registry_does_not_count_it() {
    let state = Arc::<Mutex<State>>::default();
    let shared = Arc::clone(&state);
    let server = Server::cutting(
        |asked| (asked.number == 2).then_some(0),
        move |asked| {
            let mut state = shared.lock().expect("no panic");
            match answer(asked, Habits::default(), &mut state) {
                Reply::Answer(_, mut headers, body) if asked.method == "GET" => {
                    headers.retain(|(name, _)| *name != "range");
                    Reply::Answer(202, headers, body)
                }
                reply => reply,
            }
        },
    );
    arrives(&server, &state);
    let methods = methods(&server);
    assert_eq!(methods[..4], ["HEAD", "POST", "PATCH", "GET"]);
    assert_eq!(methods[4], "PATCH", "{methods:?}");
    assert_eq!(methods.last().expect("a request"), "PUT");
    assert_eq!(methods.iter().filter(|method| *method == "PUT").count(), 1);
}

#[test]
fn registry_that_loses_all_pieces_at_each_break_is_an_error() {
    let state = Arc::<Mutex<State>>::default();
    // Pieces become shorter until the first one of several arrives.
    let whole = format!("0-{}", LARGE - 1);
    let cut = move |asked: &Asked| {
        let range = asked.header("content-range")?;
        let is_first = range != whole && range.starts_with("0-");
        (asked.number > MANY || !is_first).then_some(0)
    };
    let server = Server::cutting(cut, move |asked| {
        let mut state = state.lock().expect("no panic");
        if asked.method == "GET" {
            state.uploads.iter_mut().for_each(Vec::clear);
        }
        answer(asked, Habits::default(), &mut state)
    });
    let (result, _) = send(&upload(&server, Arc::new(Stranger), None), &noise(LARGE));
    result.expect_err("no way through");
    assert!(server.asked().len() < MANY);
}

#[test]
fn registry_that_takes_no_pieces_gets_the_blob_whole() {
    for status in [400, 405, 416, 501] {
        let habits = habits(|new| new.patch = Some(status));
        let (server, state) = start(habits, |_| None);
        arrives(&server, &state);
    }
}

#[test]
fn refusals_have_the_words_of_the_registry() {
    for (status, words) in [
        (
            403,
            "denies access (status 403): DENIED: not your repository",
        ),
        (405, "takes no uploads"),
        (422, "refuses it (status 422): DENIED: not your repository"),
    ] {
        let habits = habits(|new| new.refuses = Some(status));
        let (server, _) = start(habits, |_| None);
        let (result, _) = send(&upload(&server, Arc::new(Stranger), None), &noise(10));
        let error = result.expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn content_that_cannot_be_read_is_an_error_of_this_machine() {
    let (server, state) = start(Habits::default(), |_| None);
    let upload = upload(&server, Arc::new(Stranger), None);
    let short = |_: u64| -> io::Result<Box<dyn Read>> { Ok(Box::new(io::Cursor::new(vec![0; 9]))) };
    for length in [10, LARGE as u64] {
        let name = digest(b"something else");
        let error = upload
            .blob(&name, length, &short, &|_| {})
            .expect_err("too short");
        assert!(matches!(error.problem, Problem::Content(_)), "{error}");
    }
    assert!(state.lock().expect("no panic").blobs.is_empty());
}

#[test]
fn manifest_gets_its_tag_last_and_only_if_it_is_stored_rightly() {
    let text = b"{\"schemaVersion\": 2}";
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    for damages in [false, true] {
        let habits = habits(|new| new.damages = damages);
        let (server, state) = start(habits, |_| None);
        let upload = upload(&server, Arc::new(Stranger), None);
        let result = upload.manifest(text, media_type, &digest(text));
        let state = state.lock().expect("no panic");
        if !damages {
            result.expect("written");
            assert_eq!(state.manifests["1"], text);
            let puts: Vec<_> = server
                .asked()
                .into_iter()
                .filter(|asked| asked.method == "PUT")
                .collect();
            assert!(puts[0].path.contains(&digest(text)));
            assert_eq!(puts[1].header("content-type"), Some(media_type));
        } else {
            result.expect_err("stored wrongly");
            assert!(!state.manifests.contains_key("1"));
        }
    }
}

#[test]
fn token_allows_to_push_and_to_read_the_other_repository() {
    let tokens = Server::start(|asked| {
        if asked.path.contains("push") {
            Reply::Answer(200, vec![], br#"{"token": "to-push"}"#.to_vec())
        } else {
            Reply::Answer(200, vec![], br#"{"token": "to-read"}"#.to_vec())
        }
    });
    // The challenge of a registry names the scope of one request only.
    let challenge = format!(
        r#"Bearer realm="{}",scope="repository:team/image:pull""#,
        tokens.url("/token")
    );
    let state = Arc::<Mutex<State>>::default();
    let shared = Arc::clone(&state);
    let server = Server::start(move |asked| match asked.header("authorization") {
        Some("Bearer to-push") => {
            let mut state = shared.lock().expect("no panic");
            answer(asked, Habits::default(), &mut state)
        }
        _ => unauthorized(challenge.clone()),
    });
    let upload = upload(&server, Arc::new(Alice), Some("team/other"));
    let bytes = noise(LARGE);
    assert_eq!(send(&upload, &bytes).0.expect("sent"), Pushed::Sent);
    let asked = tokens.asked();
    assert_eq!(asked.len(), 1, "one token is enough");
    for scope in [
        "scope=repository%3Ateam%2Fimage%3Apull%2Cpush",
        "scope=repository%3Ateam%2Fother%3Apull",
    ] {
        assert!(asked[0].path.contains(scope), "{}", asked[0].path);
    }
}

#[test]
fn credentials_do_not_follow_an_upload_to_another_server() {
    let other = Server::start(|_| Reply::Answer(201, vec![], Vec::new()));
    let place = other.url("/elsewhere?key=1");
    let server = Server::start(move |asked| match asked.header("authorization") {
        None => unauthorized(r#"Basic realm="x""#.into()),
        Some(_) if asked.method == "POST" => {
            Reply::Answer(202, vec![("location", place.clone())], Vec::new())
        }
        Some(_) => Reply::Answer(404, vec![], Vec::new()),
    });
    let upload = upload(&server, Arc::new(Alice), None);
    assert_eq!(send(&upload, &noise(10)).0.expect("sent"), Pushed::Sent);
    let (asked, place) = (&other.asked()[0], "/elsewhere?key=1&digest=sha256%3A");
    assert!(asked.path.starts_with(place), "{}", asked.path);
    assert!(asked.header("authorization").is_none());
}

#[test]
fn attached_manifest_is_listed_once_by_the_registry_or_under_a_tag() {
    let (ordinary, text) = (b"{}", b"{\"subject\": {}}");
    let entry = serde_json::json!({"digest": digest(text)});
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    for lists in [false, true] {
        let habits = habits(|new| new.lists = lists);
        let (server, state) = start(habits, |_| None);
        let upload = upload(&server, Arc::new(Stranger), None);
        let attach = || upload.attach(text, media_type, &digest(text), &digest(ordinary), &entry);
        let error = attach().expect_err("nothing to attach to");
        assert!(matches!(error.problem, Problem::NoSubject), "{error}");
        let manifests = || state.lock().expect("no panic").manifests.clone();
        assert!(manifests().is_empty());
        let mut held = state.lock().expect("no panic");
        held.manifests.insert(digest(ordinary), ordinary.to_vec());
        drop(held);
        attach().expect("attached");
        attach().expect("attached again");
        let tag = digest(ordinary).replace(':', "-");
        let found = manifests();
        match found.get(&tag) {
            None => assert!(lists),
            Some(list) => {
                assert!(!lists);
                let list: serde_json::Value = serde_json::from_slice(list).expect("JSON");
                assert_eq!(list["manifests"], serde_json::json!([entry]));
            }
        }
        assert!(!found.contains_key("1"), "the tag has moved");
    }
}

#[test]
fn list_of_referrers_that_is_invalid_is_left_alone() {
    let (ordinary, text) = (b"{}", b"{\"subject\": {}}");
    let tag = digest(ordinary).replace(':', "-");
    for list in ["[]", "text", "{\"manifests\": 7}"] {
        let (server, state) = start(Habits::default(), |_| None);
        let mut held = state.lock().expect("no panic");
        held.manifests.insert(digest(ordinary), ordinary.to_vec());
        held.manifests.insert(tag.clone(), list.as_bytes().to_vec());
        drop(held);
        let upload = upload(&server, Arc::new(Stranger), None);
        let entry = serde_json::json!({"digest": digest(text)});
        upload
            .attach(text, "a/b", &digest(text), &digest(ordinary), &entry)
            .expect_err("invalid");
        let held = state.lock().expect("no panic");
        assert_eq!(held.manifests[&tag], list.as_bytes());
    }
}

#[test]
fn registry_that_limits_requests_gets_pieces_of_full_length() {
    let state = Arc::<Mutex<State>>::default();
    let lengths = Arc::new(Mutex::new(Vec::new()));
    let (shared, seen) = (Arc::clone(&state), Arc::clone(&lengths));
    let server = Server::start(move |asked| {
        if asked.method == "PATCH" {
            let mut lengths = seen.lock().expect("no panic");
            lengths.push(asked.body.len());
            if lengths.len() <= 6 {
                let status = [429, 503][lengths.len() % 2];
                return Reply::Answer(status, vec![], Vec::new());
            }
        }
        let mut state = shared.lock().expect("no panic");
        answer(asked, Habits::default(), &mut state)
    });
    arrives(&server, &state);
    assert_eq!(*lengths.lock().expect("no panic"), [LARGE; 7]);
}

#[test]
fn access_is_known_before_anything_is_sent() {
    let (server, state) = start(Habits::default(), |_| None);
    let here = upload(&server, Arc::new(Stranger), None);
    here.require_access().expect("allowed");
    assert_eq!(methods(&server), ["POST", "DELETE"]);
    assert!(state.lock().expect("no panic").blobs.is_empty());
    for status in [401, 403, 405] {
        let habits = habits(|new| new.refuses = Some(status));
        let (server, _) = start(habits, |_| None);
        let here = upload(&server, Arc::new(Stranger), None);
        let error = here.require_access().expect_err("refused").to_string();
        assert!(error.contains(&server.address), "{error}");
        assert_eq!(methods(&server), ["POST"]);
    }
}
