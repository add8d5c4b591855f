//! The lines on the socket of a pool, each a JSON document.
//!
//! The pool sends a [`Hello`]; the client sends one request; the pool sends one [`Answer`], and
//! closes the connection. Fields that a reader does not know are ignored. A change that an older
//! reader would misunderstand gets a new [`VERSION`].

use std::io;
use std::os::unix::fs::MetadataExt;

use bcow_images::error::{CommandError, exit};
use bcow_images::image::Messages;
use bcow_images::names::printable;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::asked::Asked;

/// The version of the protocol.
pub const VERSION: u64 = 1;
/// Longest request in bytes, with its newline.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Longest answer in bytes, with its newline.
pub const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The first line, from the pool.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the protocol that the pool has.
    pub version: u64,
    /// The version of bcow.
    pub program: String,
    /// The name of the pool.
    pub pool: String,
    /// The process of the pool.
    pub pid: u32,
    /// Start time of the pool in seconds since 1970.
    pub since: u64,
    /// Number of its mounts.
    pub mounts: usize,
    /// The process that starts the process of the pool again.
    #[serde(default)]
    #[serde(rename = "keeper")]
    pub supervisor: Option<u32>,
    /// The processes that the pool had before.
    #[serde(default)]
    pub restarts: u64,
    /// The mounts of the process before that this one could not take over.
    #[serde(default)]
    pub lost: u64,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    /// Mount an image.
    Mount {
        #[serde(flatten)]
        asked: Asked,
        /// What its paths mean.
        view: View,
    },
    /// Return the statistics.
    Stats,
    /// Unmount everything, and end.
    Stop {
        /// Also if there are mounts.
        force: bool,
    },
    /// Let another process take over the mounts.
    Restart {
        /// Unmount first what another process cannot take over.
        force: bool,
    },
}

/// What determines which file a path leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    mount_namespace: String,
    user_namespace: String,
    root: (u64, u64),
}

impl View {
    /// The view of this process.
    pub fn own() -> io::Result<Self> {
        let namespace = |name: &str| {
            let link = std::fs::read_link(format!("/proc/self/ns/{name}"))?;
            Ok::<_, io::Error>(link.to_string_lossy().into_owned())
        };
        let root = std::fs::metadata("/")?;
        Ok(View {
            mount_namespace: namespace("mnt")?,
            user_namespace: namespace("user")?,
            root: (root.dev(), root.ino()),
        })
    }
}

/// A message for the user that is not an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    Status(String),
    Warning(String),
    Hint(String),
}

impl Message {
    /// Shows the message of another process.
    pub fn show(&self, ui: &dyn Messages) {
        match self {
            Message::Status(text) => ui.status(&printable(text)),
            Message::Warning(text) => ui.warning(text),
            Message::Hint(text) => ui.hint(text),
        }
    }
}

/// The last line, from the pool; `T` is what the request returns.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer<T> {
    /// Messages for the user, before the result.
    #[serde(default)]
    pub messages: Vec<Message>,
    pub result: Outcome<T>,
}

/// The result of a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome<T> {
    /// What the request returns.
    Done(T),
    /// Why it failed.
    Failed(CommandError),
    /// Nothing was done: another process is about to take over, and can be asked.
    Again,
}

/// Encodes a request, with the version.
pub fn encode_request(request: &Request) -> serde_json::Result<Vec<u8>> {
    let mut value = serde_json::to_value(request)?;
    value["version"] = VERSION.into();
    line(&value)
}

/// Decodes a request. The error is for the client.
pub fn decode_request(line: &[u8]) -> Result<Request, CommandError> {
    let invalid = || CommandError::new("invalid request to the pool");
    let value: Value = serde_json::from_slice(line).map_err(|error| invalid().caused_by(&error))?;
    match value["version"].as_u64() {
        Some(VERSION) => {}
        Some(other) => {
            return Err(CommandError::new(format!(
                "the request has version {other} of the protocol, and the pool has version \
                 {VERSION}"
            ))
            .hint("use the version of bcow that started the pool, or start the pool again"));
        }
        None => return Err(invalid().caused_by_text("it has no version")),
    }
    serde_json::from_value(value).map_err(|error| invalid().caused_by(&error))
}

/// Reads the answer of a pool, and shows its messages. The inner result is that of the request;
/// `None` if it is to be sent again.
pub fn read_answer(
    line: &[u8],
    ui: &dyn Messages,
) -> serde_json::Result<Result<Option<Value>, CommandError>> {
    let answer: Answer<Value> = serde_json::from_slice(line)?;
    for message in &answer.messages {
        message.show(ui);
    }
    Ok(match answer.result {
        Outcome::Done(value) => Ok(Some(value)),
        Outcome::Again => Ok(None),
        Outcome::Failed(error) => {
            let exit = error.exit().max(exit::FAILED);
            Err(error.exit_with(exit))
        }
    })
}

/// Encodes a document as a line.
pub fn line(document: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(document)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn requests_keep_their_bytes() {
        let request = Request::Mount {
            asked: Asked {
                arguments: vec![
                    OsStr::new("bcow").into(),
                    OsStr::from_bytes(b"a\xff\n").into(),
                ],
                directory: OsStr::new("/ä").into(),
            },
            view: View::own().unwrap(),
        };
        let line = encode_request(&request).unwrap();
        assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
        assert_eq!(decode_request(&line).unwrap(), request);
        let Request::Mount { asked, .. } = request else {
            panic!("{request:?}");
        };
        let bytes: OsString = asked.arguments[1].clone().into();
        assert_eq!(bytes.as_bytes(), b"a\xff\n");
    }

    #[test]
    fn a_changed_request_is_an_error_or_another_request() {
        let asked = Asked {
            arguments: vec![OsStr::from_bytes(b"a\xff\n").into(), OsStr::new("x").into()],
            directory: OsStr::new("/").into(),
        };
        let view = View::own().unwrap();
        let (mut errors, mut others) = (0, 0);
        for request in [
            Request::Mount { asked, view },
            Request::Stats,
            Request::Stop { force: true },
        ] {
            let line = encode_request(&request).unwrap();
            // The newline is no part of the document.
            for at in 0..line.len() - 1 {
                decode_request(&line[..at]).unwrap_err();
                for new in [b'0', b'9', b'"', b'\\', b'[', b'}', b',', b'\0', 0x80, 0xff] {
                    let mut changed = line.clone();
                    changed[at] = new;
                    let Ok(found) = decode_request(&changed) else {
                        errors += 1;
                        continue;
                    };
                    others += 1;
                    let again = encode_request(&found).unwrap();
                    assert_eq!(decode_request(&again).unwrap(), found);
                }
            }
        }
        assert!(
            errors > 1000 && others > 100,
            "{errors} errors, {others} others"
        );
    }

    #[test]
    fn unknown_versions_and_requests_are_named() {
        for (line, expected) in [
            (r#"{"version":7,"request":"stats"}"#, "version 7"),
            (r#"{"request":"stats"}"#, "it has no version"),
            (r#"{"version":1,"request":"sing"}"#, "`sing`"),
            (r#"{"version":1}"#, "`request`"),
            (r#"{"version":1,"request":"stop"}"#, "force"),
            ("{", "EOF"),
        ] {
            let error = decode_request(line.as_bytes()).unwrap_err();
            let text = format!("{error}: {}", error.causes().join(": "));
            assert!(text.contains(expected), "{text}");
        }
    }
}
