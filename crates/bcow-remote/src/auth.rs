//! Access to a registry: challenges, tokens, credentials (distribution specification, token
//! authentication).
//!
//! Credentials are sent only to the registry itself and to the token server that the registry
//! names, and only if the connection is encrypted or leads to this machine. No text of an error or
//! of the log contains them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use serde::Deserialize;
use serde_json::Value;
use ureq::http::{HeaderMap, Method};

use crate::address::{Address, query};
use crate::client::{Answer, Client, Content};
use crate::error::{Fault, Problem};
use crate::lock::lock;
use crate::retry_budget::RetryBudget;

/// Largest size of the answer of a token server.
const TOKEN_BYTES: u64 = 1 << 20;
/// Lifetime of a token if the server does not say (distribution specification).
const USUAL_LIFETIME: Duration = Duration::from_secs(60);
/// A token is renewed after this time at the latest.
const LONGEST_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// A token is renewed this long before it expires, or after half of its lifetime.
const RENEW_BEFORE: Duration = Duration::from_secs(20);

/// Credentials for a registry.
pub enum Credentials {
    /// A user name and a password.
    Password {
        user: String,
        /// The password, or a token in its place.
        password: String,
    },
    /// A token with which a token server issues others.
    IdentityToken(String),
}

/// Where credentials come from.
pub trait Keychain: Send + Sync {
    /// The credentials for a server (`HOST[:PORT]`). `None`: there are none. The error is for the
    /// user, and must not contain secrets.
    fn credentials(&self, server: &str) -> Result<Option<Credentials>, String>;
}

/// Access to one repository of a registry.
pub(crate) struct Auth {
    /// The registry's name for the keychain.
    server: String,
    repository: String,
    /// The scopes of tokens.
    scopes: Vec<String>,
    /// Whether these scopes replace the one that the registry names for a request. It names one
    /// only, and an upload needs more.
    own_scopes: bool,
    keychain: Arc<dyn Keychain>,
    client: Arc<Client>,
    /// The lock is held while a token is fetched: other threads need the same token, and wait for
    /// it. No other lock is taken under it, except that of the number of requests.
    state: Mutex<AuthState>,
}

#[derive(Default)]
struct AuthState {
    challenge: Option<Challenge>,
    /// The value of the header, and the time at which it is renewed.
    header: Option<(String, Option<Instant>)>,
}

/// What a registry requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// The answer of a token server. Not all servers keep to the types of the fields.
#[derive(Deserialize)]
pub(crate) struct Token(Value);

impl Token {
    pub(crate) fn text(&self) -> Option<&str> {
        let mut texts = ["token", "access_token"].into_iter();
        texts.find_map(|name| self.0[name].as_str().filter(|text| !text.is_empty()))
    }

    /// How long the token is valid. A time that makes no sense counts as none.
    pub(crate) fn lifetime(&self) -> Duration {
        let seconds = match &self.0["expires_in"] {
            Value::String(text) => text.trim().parse().ok(),
            number => number.as_f64(),
        };
        let seconds = seconds.filter(|seconds| *seconds >= 1.0);
        seconds.map_or(USUAL_LIFETIME, |seconds| {
            Duration::from_secs_f64(seconds.min(LONGEST_LIFETIME.as_secs_f64()))
        })
    }
}

impl Auth {
    /// Access for reading. `server` is the registry's name for the keychain.
    pub(crate) fn new(
        client: &Arc<Client>,
        server: &str,
        repository: &str,
        keychain: &Arc<dyn Keychain>,
    ) -> Self {
        Auth {
            server: server.to_owned(),
            repository: repository.to_owned(),
            scopes: vec![format!("repository:{repository}:pull")],
            own_scopes: false,
            keychain: Arc::clone(keychain),
            client: Arc::clone(client),
            state: Mutex::default(),
        }
    }

    /// The registry's name for the keychain, and the repository.
    pub(crate) fn names(&self) -> (&str, &str) {
        (&self.server, &self.repository)
    }

    /// The same access for writing, and for reading another repository.
    pub(crate) fn and_push(self, repository: &str, from: Option<&str>) -> Self {
        let own = format!("repository:{repository}:pull,push");
        let from = from.map(|from| format!("repository:{from}:pull"));
        Auth {
            scopes: std::iter::once(own).chain(from).collect(),
            own_scopes: true,
            ..self
        }
    }

    /// Sends a request with the authorization that the registry requires; once more if the registry
    /// asks for another one. `send` gets the value of the header `Authorization`.
    pub(crate) fn send(
        &self,
        registry: &Address,
        budget: &RetryBudget,
        mut send: impl FnMut(Option<&str>) -> Result<Answer, Fault>,
    ) -> Result<Answer, Fault> {
        let sent = self.header(registry, budget)?;
        let answer = send(sent.as_deref())?;
        if answer.status != 401 {
            return Ok(answer);
        }
        // The answer is read to its end first, so that the request for a token can use the same
        // connection.
        let challenge = answer.headers;
        answer.body.finish();
        self.accept_challenge(&challenge, sent.as_deref(), registry, budget)?;
        send(self.header(registry, budget)?.as_deref())
    }

    /// The value of the header `Authorization`; `None` as long as the registry requires none.
    fn header(&self, registry: &Address, budget: &RetryBudget) -> Result<Option<String>, Fault> {
        let mut state = lock(&self.state);
        match &state.header {
            Some((_, Some(renewal))) if *renewal <= Instant::now() => {
                self.renew(&mut state, registry, budget)?;
            }
            _ => {}
        }
        Ok(state.header.as_ref().map(|(header, _)| header.clone()))
    }

    /// Reacts to the status 401 of a request with the header `sent`. After this,
    /// [`Auth::header`] has another value, or this fails.
    fn accept_challenge(
        &self,
        headers: &HeaderMap,
        sent: Option<&str>,
        registry: &Address,
        budget: &RetryBudget,
    ) -> Result<(), Fault> {
        let mut state = lock(&self.state);
        // Another thread may have got a token meanwhile.
        let present = state.header.as_ref().map(|(header, _)| header.as_str());
        if present.is_some() && present != sent {
            return Ok(());
        }
        let challenges = headers.get_all("www-authenticate").iter();
        let challenge = challenges
            .filter_map(|value| parse_challenge(value.to_str().ok()?))
            .max_by_key(|challenge| matches!(challenge, Challenge::Bearer { .. }))
            .ok_or_else(|| denied("the registry asks for an unknown form of credentials"))?;
        state.challenge = Some(challenge);
        self.renew(&mut state, registry, budget)?;
        match &state.header {
            Some((header, _)) if Some(&**header) == sent => {
                state.header = None;
                Err(denied("the credentials were not accepted"))
            }
            _ => Ok(()),
        }
    }

    fn renew(
        &self,
        state: &mut AuthState,
        registry: &Address,
        budget: &RetryBudget,
    ) -> Result<(), Fault> {
        let credentials = self
            .keychain
            .credentials(&self.server)
            .map_err(|why| denied(format!("no credentials for {}: {why}", self.server)))?;
        state.header = match &state.challenge {
            None => None,
            Some(Challenge::Basic) => {
                let Some(Credentials::Password { user, password }) = &credentials else {
                    return Err(denied(format!("there is no password for {}", self.server)));
                };
                registry.require_secrecy(401)?;
                Some((basic(user, password), None))
            }
            Some(Challenge::Bearer {
                realm,
                service,
                scope,
            }) => {
                let realm = Address::parse(realm).map_err(|_| {
                    Problem::Answer("it names an invalid token server".into()).permanent()
                })?;
                let named = scope.as_ref().filter(|_| !self.own_scopes);
                let scopes = named.map_or(&self.scopes[..], std::slice::from_ref);
                let credentials = credentials.as_ref();
                let service = service.as_deref();
                let token = self.fetch_token(&realm, service, scopes, credentials, budget)?;
                self.client.counters.tokens.fetch_add(1, Ordering::Relaxed);
                Some(token)
            }
        };
        Ok(())
    }

    /// Gets a token: the value of the header, and the time at which it is to be renewed.
    fn fetch_token(
        &self,
        realm: &Address,
        service: Option<&str>,
        scopes: &[String],
        credentials: Option<&Credentials>,
        budget: &RetryBudget,
    ) -> Result<(String, Option<Instant>), Fault> {
        if credentials.is_some() {
            realm.require_secrecy(401)?;
        }
        // A form has all scopes in one field, a query has one field for each.
        let joined = scopes.join(" ");
        let service = service.map(|service| ("service", service));
        let begun = Instant::now();
        let answer = match credentials {
            Some(Credentials::IdentityToken(token)) => {
                let mut fields = vec![("scope", joined.as_str())];
                fields.extend(service);
                fields.extend([
                    ("grant_type", "refresh_token"),
                    ("refresh_token", token.as_str()),
                    ("client_id", "bcow"),
                ]);
                let form = query(&fields);
                let kind = [("content-type", "application/x-www-form-urlencoded")];
                let content = Content::Bytes(form.as_bytes());
                self.client
                    .send(Method::POST, realm, &kind, content, budget)?
            }
            _ => {
                let mut fields: Vec<_> = scopes
                    .iter()
                    .map(|scope| ("scope", scope.as_str()))
                    .collect();
                fields.extend(service);
                let address = realm
                    .with_query(&query(&fields))
                    .map_err(Problem::permanent)?;
                let authorization = match credentials {
                    Some(Credentials::Password { user, password }) => Some(basic(user, password)),
                    _ => None,
                };
                let headers: Vec<_> = authorization
                    .iter()
                    .map(|value| ("authorization", value.as_str()))
                    .collect();
                self.client.get(&address, &headers, budget)?
            }
        };
        if answer.status != 200 {
            let fault = answer.refusal();
            return Err(match fault.problem {
                Problem::Denied { .. } => denied(format!(
                    "the token server {} does not accept {}",
                    realm.server(),
                    match credentials {
                        Some(_) => "the credentials",
                        None => "requests without credentials",
                    }
                )),
                _ => fault,
            });
        }
        let invalid =
            || Problem::Answer(format!("no valid token from {}", realm.server())).permanent();
        let body = answer.document(TOKEN_BYTES)?;
        let token: Token = serde_json::from_slice(&body).map_err(|_| invalid())?;
        let lifetime = token.lifetime();
        let text = token.text().ok_or_else(invalid)?;
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid());
        }
        let usable = lifetime
            .saturating_sub(RENEW_BEFORE)
            .max(lifetime / 2)
            .max(Duration::from_secs(1));
        Ok((format!("Bearer {text}"), begun.checked_add(usable)))
    }
}

fn denied(explanation: impl Into<String>) -> Fault {
    Problem::denied(401, explanation).permanent()
}

fn basic(user: &str, password: &str) -> String {
    format!(
        "Basic {}",
        BASE64.encode(format!("{user}:{password}").as_bytes())
    )
}

pub(crate) fn parse_challenge(text: &str) -> Option<Challenge> {
    let text = text.trim();
    let (scheme, mut rest) = text.split_once(' ').unwrap_or((text, ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service, mut scope) = (None, None, None);
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if rest.is_empty() {
            break;
        }
        let (name, behind) = rest.split_once('=')?;
        let (value, behind) = match behind.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => behind.split_once(',').unwrap_or((behind, "")),
        };
        rest = behind;
        match &*name.trim().to_ascii_lowercase() {
            "realm" => realm = Some(value.to_owned()),
            "service" => service = Some(value.to_owned()),
            "scope" => scope = Some(value.to_owned()),
            _ => {}
        }
    }
    Some(Challenge::Bearer {
        realm: realm?,
        service,
        scope,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed() {
        let text =
            r#"Bearer realm="https://auth.host/token?x=1,2",service="registry",scope="a:b:c,d""#;
        assert_eq!(
            parse_challenge(text),
            Some(Challenge::Bearer {
                realm: "https://auth.host/token?x=1,2".into(),
                service: Some("registry".into()),
                scope: Some("a:b:c,d".into()),
            })
        );
        let unquoted = parse_challenge("bearer Realm=https://h/t , service=s");
        assert!(matches!(unquoted, Some(Challenge::Bearer { .. })));
        assert_eq!(
            parse_challenge(r#"Basic realm="x""#),
            Some(Challenge::Basic)
        );
        for text in [
            "",
            "Digest x",
            "Bearer",
            r#"Bearer realm="x"#,
            "Bearer service=x",
        ] {
            assert_eq!(parse_challenge(text), None, "{text}");
        }
    }

    #[test]
    fn odd_answers_of_token_servers_are_understood() {
        let read = |text: &str| {
            let token: Token = serde_json::from_str(text).expect(text);
            (token.text().map(str::to_owned), token.lifetime().as_secs())
        };
        for (text, token, seconds) in [
            (r#"{"token": "a", "expires_in": 300}"#, Some("a"), 300),
            (r#"{"token": "", "access_token": "b"}"#, Some("b"), 60),
            (r#"{"token": null, "access_token": "b"}"#, Some("b"), 60),
            (r#"{"token": "a", "access_token": "b"}"#, Some("a"), 60),
            (r#"{"token": "a", "expires_in": "300"}"#, Some("a"), 300),
            (r#"{"token": "a", "expires_in": 299.9}"#, Some("a"), 299),
            (r#"{"token": "a", "expires_in": 0}"#, Some("a"), 60),
            (r#"{"token": "a", "expires_in": -5}"#, Some("a"), 60),
            (r#"{"token": "a", "expires_in": null}"#, Some("a"), 60),
            (r#"{"token": "a", "expires_in": "soon"}"#, Some("a"), 60),
            (r#"{"token": "a", "expires_in": 1e300}"#, Some("a"), 86400),
            (r#"{"token": 7}"#, None, 60),
            ("{}", None, 60),
        ] {
            assert_eq!(read(text), (token.map(str::to_owned), seconds), "{text}");
        }
    }

    #[test]
    fn queries_are_encoded() {
        let query = query(&[
            ("scope", "repository:a/b:pull"),
            ("service", "x y&z=\u{e9}"),
        ]);
        assert_eq!(
            query,
            "scope=repository%3Aa%2Fb%3Apull&service=x%20y%26z%3D%C3%A9"
        );
    }
}
