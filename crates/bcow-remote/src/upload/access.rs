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
        let mut content = Some(content);
        self.auth.send(&self.base, budget, |authorization| {
            // A stream cannot be sent twice.
            let again = match &content {
                Some(Content::Nothing) => Some(Content::Nothing),
                Some(Content::Bytes(bytes)) => Some(Content::Bytes(bytes)),
                _ => None,
            };
            let Some(content) = std::mem::replace(&mut content, again) else {
                return Err(Problem::denied(401, "while a blob was sent").transient());
            };
            let mut headers = headers.to_vec();
            headers.extend(authorization.map(|value| ("authorization", value)));
            client.send(method.clone(), address, &headers, content, budget)
        })
    }
}
