//! Credentials of pulls: what a kubelet sends with the name of an image, kept for the mounts of
//! this image.
//!
//! ```text
//! AUTH/+pull-N           of a pull that runs; the next start removes it
//! AUTH/REPOSITORY.json   accepted by the registry, for a repository with layers on this machine
//! ```
//!
//! Each file has the form of docker's config.json, with one registry. Only root can read it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use crate::error::Error;
use crate::protocol::Auth;
use crate::repository::Repository;
use bcow_tool::At;
use bcow_tool::host::{entries_if_any, remove_if_any, replace, write_private};

/// The begin of the names of the files of pulls. No name of a registry begins with a plus.
const PULL: &str = "+pull-";

/// The credentials of repositories.
pub struct Keyring {
    directory: PathBuf,
    /// Protects the list of pulls, and the files of repositories against each other's writers. The
    /// lock of the index of snapshots is taken under it.
    pulls: Mutex<Pulls>,
}

#[derive(Default)]
struct Pulls {
    /// The number of the last pull.
    last: u64,
    running: BTreeMap<u64, Repository>,
}

impl Keyring {
    /// The credentials in `directory`.
    pub fn open(directory: PathBuf) -> Self {
        let removed = entries_if_any(&directory).and_then(|paths| {
            let mut of_pulls = paths.iter().filter(|path| name(path).starts_with(PULL));
            of_pulls.try_for_each(|path| remove_if_any(path))
        });
        if let Err(error) = removed {
            tracing::error!("{error}");
        }
        Keyring {
            directory,
            pulls: Mutex::default(),
        }
    }

    /// The credentials of a pull from this repository, until the result is dropped. `None` if a
    /// mount could not use them.
    pub fn begin(
        self: &Arc<Self>,
        repository: Repository,
        auth: &Auth,
    ) -> Result<Option<Pull>, Error> {
        let Some(document) = document(&repository, auth) else {
            return Ok(None);
        };
        let number = {
            let mut pulls = self.pulls.lock();
            pulls.last += 1;
            pulls.last
        };
        // Removes the file if this fails.
        let pull = Pull {
            keyring: self.clone(),
            repository: repository.clone(),
            number,
        };
        write_private(&self.of_pull(number), document.as_bytes())?;
        self.pulls.lock().running.insert(number, repository);
        Ok(Some(pull))
    }

    /// The file for a question about an image of this repository: that of the last pull that runs,
    /// or else the one for mounts.
    pub fn for_question(&self, repository: &Repository) -> Option<PathBuf> {
        let pulls = self.pulls.lock();
        let mut running = pulls.running.iter().rev();
        match running.find(|(_, pulled)| *pulled == repository) {
            Some((number, _)) => Some(self.of_pull(*number)),
            None => self.for_mounts(repository),
        }
    }

    /// The file for mounts of images of this repository, if there is one.
    pub fn for_mounts(&self, repository: &Repository) -> Option<PathBuf> {
        let path = self.of_repository(repository);
        path.is_file().then_some(path)
    }

    /// Keeps for mounts what the registry has accepted: a file of [`Self::for_question`].
    pub fn keep(&self, repository: &Repository, accepted: &Path) -> Result<(), Error> {
        let path = self.of_repository(repository);
        let _alone = self.pulls.lock();
        if path == accepted {
            return Ok(());
        }
        let document = fs::read(accepted).at("read", accepted)?;
        if fs::read(&path).is_ok_and(|kept| kept == document) {
            return Ok(());
        }
        let mut new = accepted.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        Ok(replace(&path, &new, &document)?)
    }

    /// Removes what is of no repository in `used`, and of no running pull.
    pub fn sweep(&self, used: impl FnOnce() -> HashSet<Repository>) -> Result<(), Error> {
        // A pull registers layers before it ends, so a repository whose pull has ended is in `used`
        // if it has layers.
        let pulls = self.pulls.lock();
        let mut kept = used();
        kept.extend(pulls.running.values().cloned());
        let kept: HashSet<String> = kept.iter().map(file_name).collect();
        for path in entries_if_any(&self.directory)? {
            let name = name(&path);
            if !name.starts_with(PULL) && !kept.contains(&*name) {
                remove_if_any(&path)?;
            }
        }
        Ok(())
    }

    fn of_pull(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{PULL}{number}"))
    }

    fn of_repository(&self, repository: &Repository) -> PathBuf {
        self.directory.join(file_name(repository))
    }
}

/// A pull that runs.
pub struct Pull {
    keyring: Arc<Keyring>,
    repository: Repository,
    number: u64,
}

impl Pull {
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Keeps the credentials for mounts: containerd has pulled with them.
    pub fn keep(&self) -> Result<(), Error> {
        let path = self.keyring.of_pull(self.number);
        self.keyring.keep(&self.repository, &path)
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.keyring.pulls.lock().running.remove(&self.number);
        if let Err(error) = remove_if_any(&self.keyring.of_pull(self.number)) {
            tracing::warn!("{error}; the next start removes it");
        }
    }
}

fn name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

fn file_name(repository: &Repository) -> String {
    format!("{}.json", repository.file_name())
}

/// The file with these credentials. As containerd, uses a user's name before an identity token, and
/// no token for the registry itself, which expires soon.
pub fn document(repository: &Repository, auth: &Auth) -> Option<String> {
    if !is_for(repository, &auth.server_address) {
        return None;
    }
    let entry = match auth {
        Auth { username, .. } if !username.is_empty() => {
            json!({"username": username, "password": auth.password})
        }
        Auth { identity_token, .. } if !identity_token.is_empty() => {
            json!({"identitytoken": identity_token})
        }
        Auth { auth, .. } if !auth.is_empty() => json!({"auth": auth}),
        _ => return None,
    };
    Some(json!({"auths": {repository.key(): entry}}).to_string())
}

/// Whether credentials for a server, an URL or `HOST[:PORT]`, are for the registry of the image.
/// Those without a server are for the image with which they came.
fn is_for(repository: &Repository, address: &str) -> bool {
    let server_of = |text: &str| {
        let text = text.split_once("://").map_or(text, |(_, rest)| rest);
        let server = text.split('/').next().unwrap_or_default();
        server.to_ascii_lowercase()
    };
    address.is_empty()
        || server_of(address) == repository.server()
        || server_of(address) == server_of(repository.key())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn repository(name: &str) -> Repository {
        Repository::of(name).unwrap()
    }

    fn login(password: &str) -> Auth {
        Auth {
            username: "u".to_owned(),
            password: password.to_owned(),
            ..Auth::default()
        }
    }

    #[test]
    fn what_a_pull_brings_ends_with_it_unless_it_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let keyring = Arc::new(Keyring::open(path.clone()));
        let app = repository("h.org/team/app:1");
        let begin = |password| {
            keyring
                .begin(app.clone(), &login(password))
                .unwrap()
                .unwrap()
        };
        let read = |path: Option<PathBuf>| fs::read_to_string(path.unwrap()).unwrap();

        drop(begin("1"));
        assert!(entries_if_any(&path).unwrap().is_empty());
        assert_eq!(keyring.for_question(&app), None);

        let pull = begin("2");
        assert!(read(keyring.for_question(&app)).contains("\"password\":\"2\""));
        assert_eq!(keyring.for_mounts(&app), None);
        assert_eq!(keyring.for_question(&repository("h.org/team/other")), None);
        pull.keep().unwrap();
        // Without a layer, until the pull ends.
        keyring.sweep(HashSet::new).unwrap();
        drop(pull);
        assert_eq!(
            entries_if_any(&path).unwrap(),
            [path.join("h.org+team+app.json")]
        );
        let kept = keyring.for_mounts(&app).unwrap();
        assert_eq!(keyring.for_question(&app), Some(kept.clone()));
        assert_eq!(kept.metadata().unwrap().permissions().mode() & 0o777, 0o600);

        // The password of another pull replaces it only if the registry accepts it.
        let pull = begin("3");
        let question = keyring.for_question(&app).unwrap();
        drop(begin("4"));
        assert!(read(keyring.for_mounts(&app)).contains("\"2\""));
        keyring.keep(&app, &question).unwrap();
        drop(pull);
        assert!(read(keyring.for_mounts(&app)).contains("\"3\""));

        keyring.sweep(|| HashSet::from([app.clone()])).unwrap();
        assert_eq!(entries_if_any(&path).unwrap().len(), 1);
        keyring.sweep(HashSet::new).unwrap();
        assert!(entries_if_any(&path).unwrap().is_empty());
    }

    #[test]
    fn a_start_removes_what_pulls_have_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        for name in ["+pull-7", "+pull-7.new", "pull-1.org+a.json"] {
            fs::write(path.join(name), "{}").unwrap();
        }
        Keyring::open(path.clone());
        assert_eq!(
            entries_if_any(&path).unwrap(),
            [path.join("pull-1.org+a.json")]
        );
    }

    #[test]
    fn credentials_have_the_forms_of_cri() {
        let app = repository("h.org:5000/app");
        let of = |auth: &Auth| document(&app, auth);
        let entry = |entry: &str| Some(format!("{{\"auths\":{{\"h.org:5000\":{entry}}}}}"));
        assert_eq!(of(&Auth::default()), None);
        assert_eq!(
            of(&login("p")),
            entry("{\"username\":\"u\",\"password\":\"p\"}")
        );
        let coded = Auth {
            auth: "dTpw".to_owned(),
            ..Auth::default()
        };
        assert_eq!(of(&coded), entry("{\"auth\":\"dTpw\"}"));
        let token = Auth {
            identity_token: "t".to_owned(),
            ..coded.clone()
        };
        assert_eq!(of(&token), entry("{\"identitytoken\":\"t\"}"));
        for (address, is_used) in [
            ("h.org:5000", true),
            ("https://h.org:5000/v2/", true),
            ("https://h.org", false),
            ("other.org", false),
        ] {
            let auth = Auth {
                server_address: address.to_owned(),
                ..coded.clone()
            };
            assert_eq!(of(&auth).is_some(), is_used, "{address}");
        }
    }
}
