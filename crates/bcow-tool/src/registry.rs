//! The options for images in registries, in the forms that commands and mounts have them.

use std::path::{Path, PathBuf};

use crate::tool::{ResolveError, ToolError};

/// What to do with an image whose registry does not say whether a BCoW image is attached to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum IfUnanswered {
    /// Fail the pull.
    #[default]
    Fail,
    /// Let the engine pull the image whole.
    Pull,
}

/// How images in registries are found and mounted.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RegistryArgs {
    /// File with the credentials for registries, in the form of docker's config.json [default:
    /// $REGISTRY_AUTH_FILE, $DOCKER_CONFIG/config.json or /root/.docker/config.json]
    #[arg(long, value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// Largest size of the cache in DIR/cache; beyond it, the least recently used data is evicted
    /// [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub cache_limit: Option<String>,
    /// When a mount fetches the rest of its image: always, idle or never [default: never]
    #[arg(long, value_name = "WHEN")]
    pub complete: Option<String>,
    /// Start on remote blocks only images whose manifest and attached BCoW manifest both have a
    /// cosign signature by this key
    #[arg(long, value_name = "FILE")]
    pub verify_key: Option<PathBuf>,
    /// If the registry of an image fails or does not answer, so that it is not known whether a BCoW
    /// image is attached to the image: fail the pull, or pull the image whole
    #[arg(long, value_name = "WHAT", default_value = "fail")]
    pub if_unanswered: IfUnanswered,
    /// Request data whose hash is known from this server first, and then from the registry
    /// (repeatable)
    #[arg(long, value_name = "URL")]
    pub mirror: Vec<String>,
    /// Reach registries by plain HTTP, which is not encrypted
    #[arg(long)]
    pub insecure: bool,
}

/// The options of `bcow` for images in registries. The file with the credentials is separate.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// The file with the credentials of the user.
    pub auth_file: PathBuf,
    /// Options of commands that read an image.
    pub of_commands: Vec<String>,
    /// Options of the command that finds an image.
    pub of_lookups: Vec<String>,
    /// Options of mounts, as in fstab(5).
    pub of_mounts: Vec<String>,
    /// What to do without an answer of a registry.
    pub if_unanswered: IfUnanswered,
}

impl RegistryArgs {
    /// Fails if the file with the credentials that the user names cannot be read.
    pub fn require_auth_file(&self) -> Result<(), String> {
        let Some(path) = &self.auth_file else {
            return Ok(());
        };
        let opened = std::fs::File::open(path).map(drop);
        opened.map_err(|error| format!("--auth-file {}: {error}", path.display()))
    }

    /// The options for uses with the cache in `cache`. The error says which value cannot be an
    /// option of a mount.
    pub fn options(&self, cache: &Path) -> Result<RegistryOptions, String> {
        let auth_file = self.auth_file.clone().unwrap_or_else(usual_auth_file);
        let mut options = vec![("cache_dir", Some(text(cache)))];
        if let Some(limit) = &self.cache_limit {
            options.push(("cache_limit", Some(limit.clone())));
        }
        for url in &self.mirror {
            options.push(("mirror", Some(url.clone())));
        }
        if self.insecure {
            options.push(("insecure", None));
        }
        let values = options.iter().filter_map(|(_, value)| value.clone());
        let mut values = values
            .chain(self.complete.clone())
            .chain([text(&auth_file)]);
        if let Some(bad) = values.find(|value| !is_plain(value)) {
            return Err(format!(
                "{bad:?} cannot be an option of a mount: it is empty, or has a comma, a quotation \
                 mark, a backslash or a control character"
            ));
        }
        let as_mount = |(name, value): &(&str, Option<String>)| match value {
            Some(value) => format!("{name}={value}"),
            None => (*name).to_owned(),
        };
        let as_command = |(name, value): &(&str, Option<String>)| match value {
            Some(value) => format!("--{}={value}", name.replace('_', "-")),
            None => format!("--{name}"),
        };
        let of_commands: Vec<String> = options.iter().map(as_command).collect();
        let key = self.verify_key.as_ref();
        let key = key.map(|path| format!("--verify-key={}", path.display()));
        let complete = self.complete.as_ref();
        let complete = complete.map(|when| format!("complete={when}"));
        Ok(RegistryOptions {
            auth_file,
            of_lookups: of_commands.iter().cloned().chain(key).collect(),
            of_commands,
            of_mounts: options.iter().map(as_mount).chain(complete).collect(),
            if_unanswered: self.if_unanswered,
        })
    }
}

/// The options of a command, with the file that has the credentials, if there is this file.
pub fn with_auth_file(options: &[String], auth_file: &Path) -> Vec<String> {
    let auth_file = auth_file_text(auth_file).map(|file| format!("--auth-file={file}"));
    auth_file
        .into_iter()
        .chain(options.iter().cloned())
        .collect()
}

/// The file with the credentials, as the value of an option; `None` without this file.
pub fn auth_file_text(auth_file: &Path) -> Option<String> {
    auth_file.exists().then(|| text(auth_file))
}

/// Why an engine pulls an image whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PulledWhole {
    /// The registry says that no BCoW image is attached to the image.
    NoImage,
    /// The registry denies access to this program. The engine can have other credentials.
    Denied,
    /// The registry does not answer, and the user asks for that.
    Unanswered,
}

impl RegistryOptions {
    /// What a failure to find the BCoW image of `image` with the credentials in `auth_file` means:
    /// whether the engine pulls the image whole. The log says why.
    pub fn without_image(
        &self,
        image: &str,
        auth_file: &Path,
        error: ResolveError,
    ) -> Result<PulledWhole, String> {
        let why = on_one_line(&error);
        let unknown = "it is not known whether a BCoW image is attached";
        match (&error, self.if_unanswered) {
            (ResolveError::NoImage(_), _) => {
                tracing::info!("{image}: pulled whole: {why}");
                Ok(PulledWhole::NoImage)
            }
            (ResolveError::Denied(_), _) => {
                let denial = denial(image, auth_file);
                tracing::error!("{image}: {unknown}: {why}; {denial}; it is pulled whole");
                Ok(PulledWhole::Denied)
            }
            (ResolveError::Unknown(_), IfUnanswered::Pull) => {
                tracing::error!("{image}: {unknown}: {why}; it is pulled whole");
                Ok(PulledWhole::Unanswered)
            }
            (ResolveError::Unknown(_), IfUnanswered::Fail) => Err(format!(
                "{image}: {unknown}: {why}; --if-unanswered=pull pulls the image whole"
            )),
        }
    }
}

/// A failure with an image in a registry, on one line. If the registry denies access, with the name
/// of the registry, and with the file where `bcow` looks for credentials.
pub fn explained(error: &ToolError, image: &str, auth_file: &Path) -> String {
    let text = on_one_line(error);
    if error.is_denial() {
        format!("{text}; {}", denial(image, auth_file))
    } else {
        text
    }
}

fn denial(image: &str, auth_file: &Path) -> String {
    let name = image.strip_prefix("docker://").unwrap_or(image);
    let host = match name.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
        _ => "docker.io",
    };
    let file = auth_file.display();
    if auth_file.exists() {
        format!("{host} denies access; the file with the credentials is {file}")
    } else {
        format!("{host} denies access; the file for credentials, {file}, does not exist")
    }
}

/// A message of `bcow` on one line.
pub fn on_one_line(error: &impl ToString) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join("; ")
}

/// Where `docker login` stores credentials. systemd starts a service without HOME.
fn usual_auth_file() -> PathBuf {
    let named = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    named("REGISTRY_AUTH_FILE")
        .or_else(|| Some(named("DOCKER_CONFIG")?.join("config.json")))
        .unwrap_or_else(|| PathBuf::from("/root/.docker/config.json"))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Whether a text can be the value of an option of a mount.
pub fn is_plain(value: &str) -> bool {
    !value.is_empty() && !value.contains([',', '"', '\\']) && !value.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_of_the_registry_means_that_there_is_no_image() {
        let failed = |status| {
            let error = crate::ToolError {
                command: "bcow inspect".to_owned(),
                message: "error: a\n  b".to_owned(),
                status: Some(status),
            };
            ResolveError::from(error)
        };
        let options = |if_unanswered| {
            let args = RegistryArgs {
                auth_file: Some("/auth".into()),
                if_unanswered,
                ..RegistryArgs::default()
            };
            args.options(Path::new("/c")).unwrap()
        };
        let pulled = |status, if_unanswered| {
            options(if_unanswered).without_image("h/r:1", Path::new("/auth"), failed(status))
        };
        for (status, whole) in [(3, PulledWhole::NoImage), (4, PulledWhole::Denied)] {
            assert_eq!(pulled(status, IfUnanswered::Fail), Ok(whole));
            assert_eq!(pulled(status, IfUnanswered::Pull), Ok(whole));
        }
        let refused = pulled(1, IfUnanswered::Fail).unwrap_err();
        let unknown = "h/r:1: it is not known whether a BCoW image is attached: ";
        assert!(refused.starts_with(unknown), "{refused}");
        assert!(
            refused.contains("error: a; b; --if-unanswered"),
            "{refused}"
        );
        assert_eq!(pulled(1, IfUnanswered::Pull), Ok(PulledWhole::Unanswered));
    }

    #[test]
    fn a_denial_names_the_registry_and_the_file_with_the_credentials() {
        let failed = |message: &str| ToolError {
            command: "bcow mount".to_owned(),
            message: message.to_owned(),
            status: Some(32),
        };
        let denied = failed("error: x\n  caused by: the server denies access (status 401): y");
        for (image, file, expected) in [
            (
                "docker://h.org:5000/r@sha256:a",
                "/dev/null",
                "; h.org:5000 denies access; the file with the credentials is /dev/null",
            ),
            (
                "team/app:1",
                "/none",
                "; docker.io denies access; the file for credentials, /none, does not exist",
            ),
        ] {
            let text = explained(&denied, image, Path::new(file));
            assert!(text.ends_with(expected), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
        let other = explained(&failed("error: x"), "h.org/r", Path::new("/dev/null"));
        assert_eq!(other, "bcow mount failed: error: x");
    }

    #[test]
    fn options_have_the_names_of_mounts_and_commands() {
        let args = RegistryArgs {
            auth_file: Some("/dev/null".into()),
            cache_limit: Some("1G".into()),
            complete: Some("idle".into()),
            verify_key: Some("/key".into()),
            mirror: vec!["https://m".into()],
            insecure: true,
            ..RegistryArgs::default()
        };
        let options = args.options(Path::new("/c")).unwrap();
        assert_eq!(
            options.of_mounts.join(","),
            "cache_dir=/c,cache_limit=1G,mirror=https://m,insecure,complete=idle"
        );
        assert_eq!(
            with_auth_file(&options.of_lookups, &options.auth_file).join(" "),
            "--auth-file=/dev/null --cache-dir=/c --cache-limit=1G --mirror=https://m --insecure \
             --verify-key=/key"
        );
        let of_commands = with_auth_file(&options.of_commands, Path::new("/none"));
        assert_eq!(of_commands, options.of_commands);
        args.require_auth_file().unwrap();
        let missing = RegistryArgs {
            auth_file: Some("/none".into()),
            ..RegistryArgs::default()
        };
        let error = missing.require_auth_file().unwrap_err();
        assert!(error.contains("--auth-file /none: No such file"), "{error}");
        let bad = RegistryArgs {
            mirror: vec!["https://m,suid".into()],
            ..RegistryArgs::default()
        };
        assert!(bad.options(Path::new("/c")).is_err());
    }
}
