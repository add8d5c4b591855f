//! Where S3 is, and the credentials for it, as the command line tools of AWS find them: in the
//! environment, and in `~/.aws`.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bcow_remote::{Address, S3, S3Credentials, S3Keychain};
use bcow_sandbox::fork::forget_variable;

use crate::error::CommandError;

/// Largest size of a file with credentials or settings.
const MAX_BYTES: u64 = 1 << 20;

/// The S3 server of this process.
pub fn server() -> Result<S3, CommandError> {
    let endpoint = match setting("AWS_ENDPOINT_URL_S3").or_else(|| setting("AWS_ENDPOINT_URL")) {
        None => in_config("endpoint_url")?,
        endpoint => endpoint,
    };
    let endpoint = endpoint.map(|url| {
        Address::parse(&url).map_err(|problem| {
            CommandError::usage(format!("invalid AWS_ENDPOINT_URL: {problem}"))
                .hint("write https://HOST[:PORT]")
        })
    });
    let region = match setting("AWS_REGION").or_else(|| setting("AWS_DEFAULT_REGION")) {
        None => in_config("region")?,
        region => region,
    };
    let is_name = |text: &String| {
        let mut bytes = text.bytes();
        bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if let Some(wrong) = region.as_ref().filter(|region| !is_name(region)) {
        return Err(CommandError::usage(format!(
            "invalid region of S3: {wrong:?}"
        )));
    }
    Ok(S3 {
        endpoint: endpoint.transpose()?,
        region,
        keychain: Arc::new(Keys),
    })
}

/// The credentials in the environment, or those of the profile in the file.
struct Keys;

impl S3Keychain for Keys {
    fn credentials(&self) -> Result<Option<S3Credentials>, String> {
        // As for the libraries of AWS, keys in the environment come before a profile.
        let (secret, session_token) = SECRETS.get_or_init(secrets).clone();
        if let (Some(key_id), Some(secret)) = (setting("AWS_ACCESS_KEY_ID"), secret) {
            return checked(key_id, secret, session_token).map(Some);
        }
        let Some(path) = file("AWS_SHARED_CREDENTIALS_FILE", "credentials") else {
            return Ok(None);
        };
        let Some(text) = read(&path)? else {
            return Ok(None);
        };
        let profile = profile();
        let value = |name| value(&text, &[&profile], name);
        match (value("aws_access_key_id"), value("aws_secret_access_key")) {
            (Some(key_id), Some(secret)) => {
                checked(key_id, secret, value("aws_session_token")).map(Some)
            }
            _ if setting("AWS_PROFILE").is_some() => Err(format!(
                "{} has no keys for the profile {profile:?}",
                path.display()
            )),
            _ => Ok(None),
        }
    }
}

/// The secret access key and the session token in the environment.
static SECRETS: OnceLock<(Option<String>, Option<String>)> = OnceLock::new();

fn secrets() -> (Option<String>, Option<String>) {
    (
        setting("AWS_SECRET_ACCESS_KEY"),
        setting("AWS_SESSION_TOKEN"),
    )
}

/// Reads the secrets in the environment: [`forget_secrets`] removes them there.
pub fn keep_secrets() {
    let _ = SECRETS.set(secrets());
}

/// Removes the secrets from the environment of this process, which has one thread.
pub fn forget_secrets() {
    forget_variable(c"AWS_SECRET_ACCESS_KEY");
    forget_variable(c"AWS_SESSION_TOKEN");
}

fn checked(
    key_id: String,
    secret: String,
    session_token: Option<String>,
) -> Result<S3Credentials, String> {
    let is_header = |text: &String| text.bytes().all(|byte| byte.is_ascii_graphic());
    if is_header(&key_id) && session_token.as_ref().is_none_or(is_header) {
        Ok(S3Credentials {
            key_id,
            secret,
            session_token,
        })
    } else {
        Err("the key ID or the session token has characters that no header has".into())
    }
}

/// A variable that is set and not empty.
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn profile() -> String {
    setting("AWS_PROFILE").unwrap_or_else(|| "default".to_owned())
}

/// The file that the variable names, or the one in `~/.aws`.
fn file(variable: &str, name: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).filter(|path| !path.is_empty());
    match named {
        Some(path) => Some(path.into()),
        None => Some(
            PathBuf::from(std::env::var_os("HOME")?)
                .join(".aws")
                .join(name),
        ),
    }
}

/// The text of a file; `None` if it is missing.
fn read(path: &std::path::Path) -> Result<Option<String>, String> {
    use std::io::Read;
    let mut text = String::new();
    let opened = std::fs::File::open(path);
    match opened.and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// A setting of the profile in `~/.aws/config`. Without the file, the usual values hold.
fn in_config(name: &str) -> Result<Option<String>, CommandError> {
    let Some(path) = file("AWS_CONFIG_FILE", "config") else {
        return Ok(None);
    };
    let text = read(&path)
        .map_err(|why| CommandError::new("cannot read the settings for S3").caused_by_text(why))?;
    let profile = profile();
    let section = format!("profile {profile}");
    Ok(text.and_then(|text| value(&text, &[&section, &profile], name)))
}

/// The value of a name in the first of these sections that has it.
fn value(text: &str, sections: &[&str], name: &str) -> Option<String> {
    let in_section = |wanted: &str| {
        let mut is_wanted = false;
        for line in text.lines() {
            let line = line.trim();
            if let Some(section) = line.strip_prefix('[') {
                let section = section.split(']').next().unwrap_or_default();
                is_wanted = section.split_whitespace().eq(wanted.split_whitespace());
            } else if is_wanted
                && !line.starts_with(['#', ';'])
                && let Some((found, value)) = line.split_once('=')
                && found.trim().eq_ignore_ascii_case(name)
                && !value.trim().is_empty()
            {
                return Some(value.trim().to_owned());
            }
        }
        None
    };
    sections.iter().find_map(|section| in_section(section))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_profile() {
        let text = "[default]\naws_access_key_id = A\n# aws_access_key_id = X\n\
                    [ profile  work ]\naws_access_key_id=B=\nregion =\n[work]\nregion = r\n";
        let get = |sections: &[&str], name| value(text, sections, name);
        assert_eq!(get(&["default"], "aws_access_key_id").as_deref(), Some("A"));
        let work = ["profile work", "work"];
        assert_eq!(get(&work, "AWS_ACCESS_KEY_ID").as_deref(), Some("B="));
        assert_eq!(get(&work, "region").as_deref(), Some("r"));
        assert_eq!(get(&["other"], "region"), None);
        assert_eq!(get(&["default"], "region"), None);
    }

    #[test]
    fn keys_that_no_header_can_have_are_refused() {
        let key = |id: &str| checked(id.to_owned(), "s".to_owned(), None);
        assert!(key("AKIA").is_ok());
        assert!(key("A\nB").is_err());
    }
}
