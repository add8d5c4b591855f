//! The credentials for registries, in the files and helpers of other programs.

use std::io;
use std::path::PathBuf;

use bcow_remote::{Credentials, Keychain};
use docker_credential::{CredentialRetrievalError, DockerCredential};

/// The credentials that `docker login`, `podman login` and `skopeo login` store.
pub struct Keys {
    /// The file with the credentials, instead of the usual ones. It is read for each server, so it
    /// can change while an image is mounted. A file that is removed meanwhile has no credentials.
    pub(super) file: Option<PathBuf>,
}

impl Keychain for Keys {
    fn credentials(&self, server: &str) -> Result<Option<Credentials>, String> {
        if let Some(path) = &self.file {
            let file = match std::fs::File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(|error| format!("{}: {error}", path.display()))?,
            };
            let reader = io::BufReader::new(file);
            return found(docker_credential::get_credential_from_reader(
                reader, server,
            ));
        }
        let directory = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let podman = directory("REGISTRY_AUTH_FILE")
            .or_else(|| Some(directory("XDG_RUNTIME_DIR")?.join("containers/auth.json")));
        if is_there(podman)?
            && let Some(found) = found(docker_credential::get_podman_credential(server))?
        {
            return Ok(Some(found));
        }
        let docker =
            directory("DOCKER_CONFIG").or_else(|| Some(directory("HOME")?.join(".docker")));
        if is_there(docker.map(|directory| directory.join("config.json")))? {
            found(docker_credential::get_credential(server))
        } else {
            Ok(None)
        }
    }
}

/// Whether there is such a file. One that cannot be reached is an error: it may have credentials.
fn is_there(file: Option<PathBuf>) -> Result<bool, String> {
    let Some(file) = file else { return Ok(false) };
    match file.try_exists() {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
        found => found.map_err(|error| format!("{}: {error}", file.display())),
    }
}

/// The text of an error of the library can have what a helper printed, so it is not used.
fn found(
    result: Result<DockerCredential, CredentialRetrievalError>,
) -> Result<Option<Credentials>, String> {
    match result {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Ok(Some(Credentials::Password { user, password }))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(Some(Credentials::IdentityToken(token))),
        Err(
            CredentialRetrievalError::NoCredentialConfigured
            | CredentialRetrievalError::ConfigNotFound,
        ) => Ok(None),
        Err(CredentialRetrievalError::HelperFailure { helper, .. }) => {
            Err(format!("the credential helper {helper} failed"))
        }
        Err(CredentialRetrievalError::ConfigReadError) => {
            Err("the file with the credentials cannot be read".into())
        }
        Err(_) => Err("the stored credentials are invalid, or their helper does not work".into()),
    }
}
