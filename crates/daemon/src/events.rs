//! What happened on this node: stored in the state, and sent to those who listen.

use std::sync::Arc;

use godwit_api::v1::Event;
use tokio::sync::broadcast;

use crate::state::{State, now_ms};

/// Events a slow listener may fall behind before it is told that it lost some.
const BACKLOG: usize = 1024;

/// The node's events.
pub(crate) struct Events {
    node: String,
    state: Arc<State>,
    live: broadcast::Sender<Event>,
}

impl Events {
    /// Events of the named node, kept in `state`.
    pub(crate) fn new(node: &str, state: Arc<State>) -> Self {
        Self { node: node.to_string(), state, live: broadcast::channel(BACKLOG).0 }
    }

    /// Tells an event. One that cannot be stored is still told, and the failure logged.
    pub(crate) fn tell(&self, subject: &str, action: &str, name: &str, detail: &str) {
        let event = Event {
            time_ms: now_ms(),
            node: self.node.clone(),
            subject: subject.into(),
            action: action.into(),
            name: name.into(),
            detail: detail.into(),
        };
        tracing::info!(subject, action, name, detail, "event");
        if let Err(error) = self.state.put_event(&event) {
            tracing::error!(%error, "cannot record an event");
        }
        // Nobody listening is fine.
        let _ = self.live.send(event);
    }

    /// Events from now on.
    pub(crate) fn listen(&self) -> broadcast::Receiver<Event> {
        self.live.subscribe()
    }
}
