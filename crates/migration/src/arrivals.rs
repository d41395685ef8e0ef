//! Services on their way to this node: which migration takes further connections now, and which services are not
//! complete yet.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::{mpsc, watch};

use crate::link::Link;
use crate::message::Purpose;

/// Most connections of a migration that wait to be taken: all streams, and all again after a break. A source that makes
/// more is broken.
const MOST_WAITING: usize = 256;

/// A further connection of a migration.
#[derive(Debug)]
pub(crate) enum FurtherConnection {
    /// A stream.
    Stream(Purpose, Link),
    /// The conversation, after a break.
    Resumed(Link),
}

#[derive(Debug)]
struct Entry {
    source: String,
    service: String,
    connections: mpsc::Sender<FurtherConnection>,
    ended: watch::Receiver<Option<String>>,
}

/// All of them, by migration.
#[derive(Debug, Default)]
pub struct Arrivals(Mutex<HashMap<String, Entry>>);

/// A service on its way; it is no longer when this is dropped.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) connections: mpsc::Receiver<FurtherConnection>,
    /// Its end is what others wait for; or why it does not come by itself.
    stuck: watch::Sender<Option<String>>,
}

impl Arrival {
    /// The service is not complete and will not be by itself: tasks that wait for that are told why.
    pub(crate) fn is_stuck(&self, why: String) {
        self.stuck.send_replace(Some(why));
    }
}

impl Arrivals {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Entry>> {
        // Nothing can panic while the map is changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on connections of `source` for this migration are taken.
    pub(crate) fn expect(&self, migration: &str, source: &str, service: &str) -> Arrival {
        let (sender, connections) = mpsc::channel(MOST_WAITING);
        let (stuck, ended) = watch::channel(None);
        let entry = Entry { source: source.into(), service: service.into(), connections: sender, ended };
        let mut entries = self.lock();
        entries.retain(|_, entry| !entry.connections.is_closed());
        entries.insert(migration.into(), entry);
        Arrival { connections, stuck }
    }

    /// Gives a connection from `node` to its migration; returns it when there is no such migration, or too many wait.
    pub(crate) fn give(
        &self,
        migration: &str,
        node: &str,
        connection: FurtherConnection,
    ) -> Option<FurtherConnection> {
        match self.lock().get(migration) {
            Some(entry) if entry.source == node => {
                entry.connections.try_send(connection).err().map(mpsc::error::TrySendError::into_inner)
            }
            _ => Some(connection),
        }
    }

    /// Returns when the service of this name is complete, or is not on its way here at all.
    ///
    /// # Errors
    /// Why it will not be complete by itself.
    pub async fn settled(&self, service: &str) -> Result<(), String> {
        loop {
            let ended = self
                .lock()
                .values()
                .find(|entry| entry.service == service && !entry.connections.is_closed())
                .map(|entry| entry.ended.clone());
            let Some(mut ended) = ended else { return Ok(()) };
            // An error is the end of the sender.
            if let Ok(stuck) = ended.wait_for(Option::is_some).await {
                return Err(stuck.clone().unwrap_or_default());
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_transfer::{ClusterAuthority, Connection, Identity, ListenOptions, Listener, NodeName};

    use super::*;
    use crate::link;

    #[tokio::test]
    async fn a_service_is_waited_for_until_its_arrival_ends() {
        let arrivals = Arrivals::default();
        arrivals.settled("redis").await.unwrap();
        let arrival = arrivals.expect("01A", "a", "redis");
        arrivals.settled("other").await.unwrap();
        let waiting = arrivals.settled("redis");
        tokio::pin!(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(arrival);
        waiting.await.unwrap();
    }

    #[tokio::test]
    async fn who_waits_for_a_service_that_cannot_be_complete_is_told_why() {
        let arrivals = Arrivals::default();
        let arrival = arrivals.expect("01A", "a", "redis");
        arrival.is_stuck("its pager is too old".into());
        assert_eq!(arrivals.settled("redis").await, Err("its pager is too old".into()));
        drop(arrival);
        assert_eq!(arrivals.settled("redis").await, Ok(()));
    }

    /// A connection that this node has accepted from node "b", and the other end of it.
    async fn link() -> (Link, Connection) {
        let directory = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| (NodeName::new(name).unwrap(), directory.path().join(name)));
        let authority = ClusterAuthority::create(&a.1, "test").unwrap();
        let own = authority.issue_own(&a.1, &a.0).unwrap();
        let request = Identity::create_request(&b.1, &b.0).unwrap();
        let certificate = authority.issue(&b.0, &request).unwrap();
        let other = Identity::install(&b.1, authority.pem(), &certificate).unwrap();
        let mut listener =
            Listener::bind(([127, 0, 0, 1], 0).into(), &own, ListenOptions::default()).await.unwrap();
        let (address, options) = (listener.local_addr().to_string(), link::options());
        let accepted = async { Connection::accept(listener.accept().await, &options).await };
        let (accepted, opened) = tokio::join!(accepted, Connection::open(&other, &address, &a.0, &options));
        (Link::new(accepted.unwrap()), opened.unwrap())
    }

    #[tokio::test]
    async fn so_many_connections_of_a_migration_wait_and_the_next_one_is_given_back() {
        let arrivals = Arrivals::default();
        let _arrival = arrivals.expect("01A", "b", "redis");
        let (link, _other) = link().await;
        let sender = arrivals.lock().get("01A").unwrap().connections.clone();
        // Each stands for a connection that waits.
        let mut waiting = sender.reserve_many(MOST_WAITING).await.unwrap();
        let refused = arrivals.give("01A", "b", FurtherConnection::Resumed(link)).unwrap();
        drop(waiting.next());
        assert!(arrivals.give("01A", "b", refused).is_none());
    }
}
