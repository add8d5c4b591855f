//! Names: the file or document that a URL or a tag led to when its server last answered.
//!
//! Only a server knows what a name means now. Without it, what the name meant last is the best that
//! there is, and the caller says so to the user.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Cache;

/// Largest size of a note.
const NOTE_BYTES: u64 = 16 << 10;
/// The begin of the names of notes.
pub(super) const NOTE: &str = "name-";

/// What is noted of a name. A torn write leaves no valid note, or one whose target is not there.
#[derive(Serialize, Deserialize)]
struct Note {
    /// The name without a query, for users.
    name: String,
    /// A root hash, or the digest of a document.
    target: String,
    unix_seconds: u64,
}

/// What a name led to.
pub(crate) struct Known {
    /// A root hash, or the digest of a document.
    pub(crate) target: String,
    pub(crate) age: Age,
}

/// The time since a server has answered, for messages.
pub(crate) struct Age(Duration);

impl Cache {
    /// Notes that `name`, which can have secrets, led to `target`. `shown` is the name for users.
    pub(crate) fn keep_name(&self, name: &str, shown: &str, target: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let note = Note {
            name: shown.to_owned(),
            target: target.to_owned(),
            unix_seconds: now.map_or(0, |now| now.as_secs()),
        };
        if let Ok(bytes) = serde_json::to_vec(&note) {
            self.keep_document(&key(name), &bytes);
        }
    }

    /// What the name led to when this was last noted.
    pub(crate) fn known(&self, name: &str) -> Option<Known> {
        let bytes = self.document(&key(name), NOTE_BYTES)?;
        let note: Note = serde_json::from_slice(&bytes).ok()?;
        let noted = UNIX_EPOCH + Duration::from_secs(note.unix_seconds);
        let age = SystemTime::now().duration_since(noted);
        Some(Known {
            target: note.target,
            age: Age(age.unwrap_or_default()),
        })
    }
}

/// The name of the note: a name can be long, and can have secrets.
fn key(name: &str) -> String {
    let hash = Sha256::digest(name.as_bytes());
    format!("{NOTE}{}", data_encoding::HEXLOWER.encode(&hash))
}

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0..120 => write!(f, "{seconds} s"),
            120..7200 => write!(f, "{} min", seconds / 60),
            7200..172_800 => write!(f, "{} h", seconds / 3600),
            _ => write!(f, "{} days", seconds / 86_400),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_its_last_target() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("a cache");
        assert!(cache.known("https://host/a?secret").is_none());
        for target in ["one", "two"] {
            cache.keep_name("https://host/a?secret", "https://host/a?...", target);
        }
        let known = cache.known("https://host/a?secret").expect("a note");
        assert_eq!(known.target, "two");
        assert!(cache.known("https://host/a").is_none());
        for entry in directory.path().read_dir().expect("a list").flatten() {
            let text = std::fs::read_to_string(entry.path()).expect("reads");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn ages_read_well() {
        for (seconds, text) in [
            (5, "5 s"),
            (600, "10 min"),
            (7300, "2 h"),
            (400_000, "4 days"),
        ] {
            assert_eq!(Age(Duration::from_secs(seconds)).to_string(), text);
        }
    }
}
