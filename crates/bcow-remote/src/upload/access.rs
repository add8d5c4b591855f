//! Requests to a repository for writing.

use std::sync::Arc;

use ureq::http::Method;

use crate::address::Address;
use crate::auth::Auth;
use crate::client::{Answer, Content};
use crate::error::{Fault, Problem};
use crate::retry_budget::RetryBudget;
use crate::shared::Shared;

/// A repository, and the right to write to it.
pub(super) struct Access {
    pub(super) shared: Arc<Shared>,
    /// `https://HOST/v2/REPOSITORY/`
    pub(super) base: Address,
    pub(super) auth: Auth,
}

impl Access {
    /// Tries some times.
    pub(super) fn persist<T>(
        &self,
        attempt: impl Fn(&RetryBudget) -> Result<T, Fault>,
    ) -> Result<T, Problem> {
        self.shared.uploading().run(attempt)
    }

    pub(super) fn address(&self, path: &str) -> Result<Address, Fault> {
        self.base.join(path).map_err(Problem::permanent)
    }

    /// Sends a request, with authorization if the address is on the registry's server.
    pub(super) fn send(
        &self,
        method: Method,
        address: &Address,
        headers: &[(&str, &str)],
        content: Content<'_>,
        budget: &RetryBudget,
    ) -> Result<Answer, Fault> {
        let client = &self.shared.client;
        if !address.same_server(&self.base) {
            return client.send(method, address, headers, content, budget);
        }
        let with = |authorization: Option<&str>, content: Content<'_>| {
            let mut headers = headers.to_vec();
            headers.extend(authorization.map(|value| ("authorization", value)));
            client.send(method.clone(), address, &headers, content, budget)
        };
        // A stream cannot be sent twice.
        let again = match &content {
            Content::Nothing => Some(Content::Nothing),
            Content::Bytes(bytes) => Some(Content::Bytes(bytes)),
            Content::Stream(..) => None,
        };
        let authorization = self.auth.header(client, &self.base, budget)?;
        let answer = with(authorization.as_deref(), content)?;
        if answer.status != 401 {
            return Ok(answer);
        }
        let challenge = answer.headers;
        answer.body.finish();
        let sent = authorization.as_deref();
        self.auth
            .accept_challenge(&challenge, sent, client, &self.base, budget)?;
        let Some(content) = again else {
            let explanation = "while a blob was sent".to_owned();
            return Err(Problem::Denied {
                status: 401,
                explanation,
            }
            .transient());
        };
        let authorization = self.auth.header(client, &self.base, budget)?;
        with(authorization.as_deref(), content)
    }

    /// For requests that are worth waiting for.
    pub(super) fn budget(&self) -> RetryBudget {
        self.shared.reading()
    }
}
