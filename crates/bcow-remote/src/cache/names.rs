//! Name records: the file or the document to which a URL or a tag resolved at the last answer of
//! its server.
//!
//! Only the server can resolve a name. If no server answers, the caller uses the record, and warns
//! the user with the age of the record.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Cache;

/// Largest size of a record in bytes.
const MAX_RECORD_BYTES: u64 = 16 << 10;
/// Prefix of the document names of records.
pub(super) const RECORD_PREFIX: &str = "name-";

/// A record, as JSON. After a torn write, the JSON is invalid, or the cache does not have the
/// target.
#[derive(Serialize, Deserialize)]
struct NameRecord {
    /// The name without its query, for users.
    name: String,
    /// A root hash, or the digest of a document.
    target: String,
    unix_seconds: u64,
}

impl Cache {
    /// Records that `name` resolved to `target`. `name` can contain secrets; `shown` is the name
    /// without them.
    pub(crate) fn record_name(&self, name: &str, shown: &str, target: &str) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let record = NameRecord {
            name: shown.to_owned(),
            target: target.to_owned(),
            unix_seconds: now.map_or(0, |now| now.as_secs()),
        };
        if let Ok(bytes) = serde_json::to_vec(&record) {
            self.keep_document(&key(name), &bytes);
        }
    }

    /// The recorded target of a name, and the age of the record, for messages; `None` without a
    /// valid record.
    pub(crate) fn recorded_target(&self, name: &str) -> Option<(String, String)> {
        let bytes = self.document(&key(name), MAX_RECORD_BYTES)?;
        let record: NameRecord = serde_json::from_slice(&bytes).ok()?;
        // The file can have any time. A time that the system cannot represent is an invalid record.
        let recorded = UNIX_EPOCH.checked_add(Duration::from_secs(record.unix_seconds))?;
        let age = SystemTime::now().duration_since(recorded);
        Some((record.target, in_words(age.unwrap_or_default())))
    }
}

/// The document name of a record: a hash, because the recorded name can be long and can contain
/// secrets.
fn key(name: &str) -> String {
    let hash = Sha256::digest(name.as_bytes());
    format!("{RECORD_PREFIX}{}", data_encoding::HEXLOWER.encode(&hash))
}

fn in_words(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_its_last_target() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("a cache");
        assert!(cache.recorded_target("https://host/a?secret").is_none());
        for target in ["one", "two"] {
            cache.record_name("https://host/a?secret", "https://host/a?...", target);
        }
        let (target, _) = cache
            .recorded_target("https://host/a?secret")
            .expect("a record");
        assert_eq!(target, "two");
        assert!(cache.recorded_target("https://host/a").is_none());
        for entry in directory.path().read_dir().expect("a list").flatten() {
            let text = std::fs::read_to_string(entry.path()).expect("reads");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn a_record_with_an_impossible_time_is_invalid() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("a cache");
        cache.record_name("https://host/a", "https://host/a", "one");
        assert!(cache.recorded_target("https://host/a").is_some());
        let path = directory
            .path()
            .join(format!("{}.json", key("https://host/a")));
        for seconds in [u64::MAX, u64::MAX / 2 + 1] {
            let record = format!(r#"{{"name":"n","target":"one","unix_seconds":{seconds}}}"#);
            std::fs::write(&path, record).expect("writes");
            assert!(cache.recorded_target("https://host/a").is_none());
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
            assert_eq!(in_words(Duration::from_secs(seconds)), text);
        }
    }
}
