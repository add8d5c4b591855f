//! A client in the transmission phase. All workers of its connection share this state.

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
    /// Sends the pending replies and removes them from `replies`. After an error, shuts down the
    /// connection.
    pub(crate) fn send(&self, replies: &mut Replies) -> Result<(), SessionEnd> {
        if replies.bytes().is_empty() {
            return Ok(());
        }
        let patience = Patience(self.shared.options.request_timeout);
        let sent = self.socket.send(replies.bytes(), patience);
        replies.clear();
        sent.map_err(|error| {
            // A part of a reply may have been sent, so the client cannot decode a further reply.
            self.socket.cut();
            error.into()
        })
    }
}
