//! A client in the transmission phase, as all workers of its connection share it.

use std::sync::Arc;

use crate::error::SessionEnd;
use crate::export::Selection;
use crate::reply::Replies;
use crate::shared::Shared;
use crate::socket::{Patience, Socket};

/// A client that has selected an export.
pub(crate) struct Client {
    pub(crate) shared: Arc<Shared>,
    pub(crate) socket: Arc<Socket>,
    pub(crate) selection: Selection,
}

impl Client {
    /// Sends the waiting replies.
    pub(crate) fn send(&self, replies: &mut Replies) -> Result<(), SessionEnd> {
        if replies.bytes().is_empty() {
            return Ok(());
        }
        let patience = Patience(self.shared.options.request_timeout);
        let sent = self.socket.send(replies.bytes(), patience);
        replies.clear();
        sent.map_err(|error| {
            // Half a reply may have been sent, so no further reply can follow.
            self.socket.cut();
            error.into()
        })
    }
}
