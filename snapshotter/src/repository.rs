//! The repositories of image names.

use std::fmt;

/// The registry of names without a server, and its name in credentials, as `bcow` has them.
const HUB: &str = "docker.io";
const HUB_KEY: &str = "https://index.docker.io/v1/";

/// A repository of a registry.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Repository {
    /// `HOST[:PORT]`
    server: String,
    path: String,
}

impl Repository {
    /// The repository of the image with this name: `[docker://][SERVER/]REPOSITORY[:TAG][@DIGEST]`.
    /// `None` if the name is invalid.
    pub fn of(image: &str) -> Option<Self> {
        let image = image.strip_prefix("docker://").unwrap_or(image);
        let image = image.split_once('@').map_or(image, |(image, _)| image);
        let (server, path) = match image.split_once('/') {
            Some((server, path)) if server.contains(['.', ':']) || server == "localhost" => {
                (server.to_ascii_lowercase(), path)
            }
            _ => (HUB.to_owned(), image),
        };
        let path = path.split_once(':').map_or(path, |(path, _)| path);
        let path = if server == HUB && !path.contains('/') {
            format!("library/{path}")
        } else {
            path.to_owned()
        };
        let is_server = |server: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
            server.bytes().all(is_plain)
        };
        let is_part = |part: &str| {
            let is_plain = |byte: u8| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte)
            };
            !part.is_empty() && part.bytes().all(is_plain)
        };
        let is_valid = is_server(&server) && path.split('/').all(is_part);
        is_valid.then_some(Repository { server, path })
    }

    /// The registry.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The name of the registry in files with credentials.
    pub fn key(&self) -> &str {
        match &*self.server {
            HUB => HUB_KEY,
            server => server,
        }
    }

    /// A name for a file. It has no slash, and each repository has another one.
    pub fn file_name(&self) -> String {
        self.to_string().replace('/', "+")
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.server, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_repositories() {
        let hub = |path: &str| format!("{HUB}/{path}");
        for (name, expected) in [
            ("app", hub("library/app")),
            ("app:1", hub("library/app")),
            ("team/app", hub("team/app")),
            (
                "registry.example.org/app:1",
                "registry.example.org/app".to_owned(),
            ),
            (
                "docker://Host:5000/a/b:1@sha256:00",
                "host:5000/a/b".to_owned(),
            ),
            ("localhost/a@sha256:00", "localhost/a".to_owned()),
            ("Docker.io/app", hub("library/app")),
        ] {
            let found = Repository::of(name).unwrap();
            assert_eq!(found.to_string(), expected, "{name}");
            let full = found.to_string();
            assert_eq!(Repository::of(&full).unwrap(), found, "{full}");
        }
        for name in ["", "a//b", "Team/app", "h.org/", "h.org/a,b", "h.o g/a"] {
            assert_eq!(Repository::of(name), None, "{name}");
        }
        assert_eq!(Repository::of("h:1/a").unwrap().key(), "h:1");
        assert_eq!(Repository::of("h:1/a/b").unwrap().file_name(), "h:1+a+b");
        assert_eq!(Repository::of("app").unwrap().key(), HUB_KEY);
    }
}
