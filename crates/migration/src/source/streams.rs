//! The further connections of a migration: streams for pages, and one for faults.

use std::sync::{Arc, Weak};

use godwit_transfer::{Carrier, Connection, Gauge, SecureStream, Traffic};
use tokio::sync::mpsc;

use super::SourceError;
use crate::link::{Link, LinkError};
use crate::message::{Join, Message, Purpose};
use crate::resources::{Cluster, ClusterError};

/// The streams of one migration. Dropping them closes them.
#[derive(Debug)]
pub(crate) struct Streams<S = SecureStream> {
    pages: Vec<Link<S>>,
    /// Until it is taken.
    faults: Option<Link<S>>,
    traffic: StreamTraffic,
}

/// Counts what all streams of one migration carry, also those that were taken, and outlives them.
#[derive(Debug, Clone, Default)]
pub(crate) struct StreamTraffic(Vec<Arc<Traffic>>);

impl StreamTraffic {
    /// Bytes put on the wire so far, with framing and TLS.
    pub(crate) fn sent(&self) -> u64 {
        self.0.iter().map(|stream| stream.sent()).sum()
    }
}

impl Streams {
    /// Connects `count` streams for pages, and one for faults.
    pub(crate) async fn open(
        cluster: &dyn Cluster,
        node: &str,
        migration: &str,
        count: usize,
    ) -> Result<Self, ClusterError> {
        let (mut pages, mut traffic) = (Vec::new(), StreamTraffic::default());
        for _ in 0..count {
            pages.push(join(cluster.connect(node).await?, migration, Purpose::Pages, &mut traffic).await?);
        }
        let faults =
            Some(join(cluster.connect(node).await?, migration, Purpose::Faults, &mut traffic).await?);
        Ok(Self { pages, faults, traffic })
    }
}

impl<S> Drop for Streams<S> {
    /// Threads that still have pages for a stream must not wait for a link that is no longer needed.
    fn drop(&mut self) {
        for stream in self.pages.iter().chain(&self.faults) {
            stream.cut();
        }
    }
}

impl<S: Carrier> Streams<S> {
    /// These, for pages alone.
    pub(crate) fn of(connections: Vec<Connection<S>>) -> Self {
        let traffic = StreamTraffic(connections.iter().map(Connection::traffic).collect());
        Self { pages: connections.into_iter().map(Link::new).collect(), faults: None, traffic }
    }

    /// The stream for faults, once.
    pub(crate) fn take_faults(&mut self) -> Option<Link<S>> {
        self.faults.take()
    }

    /// What the kernel knows of each stream for pages.
    pub(crate) fn gauges(&self) -> Vec<Weak<Gauge>> {
        self.pages.iter().map(Link::gauge).collect()
    }

    /// Those for pages.
    pub(crate) fn pages(&self) -> &[Link<S>] {
        &self.pages
    }

    /// One sender for each stream.
    pub(crate) fn senders(&self) -> Vec<mpsc::Sender<Message>> {
        self.pages.iter().map(Link::sender).collect()
    }

    /// Returns when the destination has in its store all that the streams were given.
    pub(crate) async fn arrived(&mut self) -> Result<(), LinkError> {
        for stream in &self.pages {
            stream.send(Message::PagesEnd).await?;
        }
        for stream in &mut self.pages {
            match stream.receive().await? {
                Message::PagesEnd => {}
                other => return Err(stream.unexpected(&other, "PagesEnd")),
            }
        }
        Ok(())
    }

    /// What is behind an error that only says that something takes no more data: what a stream says that does not.
    pub(super) async fn explain(&mut self, error: SourceError) -> SourceError {
        if error.is_of_closing() {
            for stream in &mut self.pages {
                if let Some(why) = stream.why_closed().await {
                    return why.into();
                }
            }
        }
        error
    }

    /// What they carry.
    pub(crate) fn traffic(&self) -> &StreamTraffic {
        &self.traffic
    }

    /// Closes them after what is queued.
    pub(crate) async fn close(mut self) {
        for stream in std::mem::take(&mut self.pages).into_iter().chain(self.faults.take()) {
            stream.close().await;
        }
    }
}

async fn join(
    connection: Connection,
    migration: &str,
    purpose: Purpose,
    traffic: &mut StreamTraffic,
) -> Result<Link, ClusterError> {
    traffic.0.push(connection.traffic());
    let link = Link::new(connection);
    let join = Join { migration: migration.into(), purpose: purpose.into() };
    link.send(Message::Join(join)).await.map_err(|error| ClusterError(error.to_string()))?;
    Ok(link)
}
