//! The conversation's carrier: messages over one data connection, with heartbeats.
//!
//! A task owns the writing side, so that heartbeats go out even while the state machine is busy;
//! the reading side gives up after [`SILENCE`] without a frame.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_transfer::{
    Carrier, Connection, ConnectionOptions, DataReader, FrameError, FrameWriter, Gauge, SecureStream, Traffic,
};
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::message::{Message, MessageError, Reached, Step};

/// How long nothing may come from the other side before the link counts as cut. Five heartbeats:
/// long enough for a busy edge node, short enough that a frozen service is back soon.
pub const SILENCE: Duration = Duration::from_secs(5);

/// How often a side that has nothing to say says so.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long the reason of a connection that takes no more data may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Messages that wait for the wire: at 256 KiB each, 4 MiB keep a 10 Gbit/s link busy for 3 ms.
const QUEUE: usize = 16;

/// Why the conversation broke.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Reading failed, or nothing came for [`SILENCE`].
    #[error(transparent)]
    Broken(#[from] FrameError),
    /// Writing failed; what is read next says why, as a rule.
    #[error("the connection to node {0} is no longer writable")]
    Closed(String),
    /// A frame could not be understood.
    #[error("node {node} sent something this node does not understand")]
    Message {
        /// The other node.
        node: String,
        /// Why.
        #[source]
        source: MessageError,
    },
    /// The other side gave up.
    #[error("node {node} gave up: {reason}")]
    Aborted {
        /// The other node.
        node: String,
        /// In its words.
        reason: String,
    },
    /// A message that makes no sense now.
    #[error("node {node} sent {got} where {wanted} was due")]
    Unexpected {
        /// The other node.
        node: String,
        /// What came.
        got: &'static str,
        /// What was due.
        wanted: &'static str,
    },
}

impl LinkError {
    /// Whether the other side ended the conversation as agreed.
    #[must_use]
    pub fn is_of_closing(&self) -> bool {
        matches!(self, Self::Broken(error) if error.is_closed())
    }
}

/// How far a conversation has come, as seen from this node. Heartbeats do not count: they say that the other
/// daemon lives, not that it does its work.
#[derive(Debug, Default)]
pub struct Advance {
    /// Where on the wire this node's last message ends, heartbeats not counted.
    said: AtomicU64,
    /// How many messages came, without heartbeats and without steps that had been reached before.
    received: AtomicU64,
    /// The last step that the other node has told of.
    step: AtomicI32,
}

impl Advance {
    /// Of these bytes that the other node's kernel has acknowledged, those that are not heartbeats: the ones at
    /// the end may be.
    #[must_use]
    pub fn arrived(&self, acknowledged: u64) -> u64 {
        acknowledged.min(self.said.load(Ordering::Relaxed))
    }

    /// How many messages came.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// What the other node has said that it does.
    #[must_use]
    pub fn step(&self) -> Step {
        Step::try_from(self.step.load(Ordering::Relaxed)).unwrap_or(Step::Unknown)
    }
}

/// One conversation: over TLS, unless what is measured is a link without it.
#[derive(Debug)]
pub struct Link<S = SecureStream> {
    node: String,
    outgoing: mpsc::Sender<Message>,
    reader: DataReader<S>,
    /// Until its end has been looked at.
    writer: Option<JoinHandle<Result<(), FrameError>>>,
    traffic: Arc<Traffic>,
    gauge: Weak<Gauge>,
    advance: Arc<Advance>,
}

/// The limits of a connection that carries a conversation.
#[must_use]
pub fn options() -> ConnectionOptions {
    ConnectionOptions {
        idle_timeout: Some(SILENCE),
        stall_timeout: Some(SILENCE),
        ..ConnectionOptions::default()
    }
}

impl<S: Carrier> Link<S> {
    /// Starts the writing task.
    #[must_use]
    pub fn new(connection: Connection<S>) -> Self {
        let node = connection.peer().to_string();
        let (traffic, gauge) = (connection.traffic(), connection.gauge());
        let (reader, writer) = connection.into_split();
        let (outgoing, incoming) = mpsc::channel(QUEUE);
        let advance = Arc::new(Advance::default());
        let progress = (Arc::clone(&traffic), Arc::clone(&advance));
        let writer = Some(tokio::spawn(write(writer, incoming, progress)));
        Self { node, outgoing, reader, writer, traffic, gauge, advance }
    }

    /// The other node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Bytes put on the wire so far, with framing and TLS.
    #[must_use]
    pub fn bytes_sent(&self) -> u64 {
        self.traffic.sent()
    }

    /// What the kernel knows of the connection, as long as there is one.
    #[must_use]
    pub fn gauge(&self) -> Weak<Gauge> {
        self.gauge.clone()
    }

    /// How far the conversation has come.
    #[must_use]
    pub fn advance(&self) -> Arc<Advance> {
        Arc::clone(&self.advance)
    }

    /// Queues a message; waits while the wire is busy.
    pub async fn send(&self, message: Message) -> Result<(), LinkError> {
        self.outgoing.send(message).await.map_err(|_| LinkError::Closed(self.node.clone()))
    }

    /// A sender for a task that produces messages.
    #[must_use]
    pub fn sender(&self) -> mpsc::Sender<Message> {
        self.outgoing.clone()
    }

    /// The next message that is neither a heartbeat nor a step; an `Abort` is an error.
    pub async fn receive(&mut self) -> Result<Message, LinkError> {
        loop {
            let frame = self.reader.recv().await?;
            let message = Message::decode(frame.kind, frame.payload)
                .map_err(|source| LinkError::Message { node: self.node.clone(), source })?;
            match message {
                Message::Heartbeat => continue,
                // A step that was reached before is no further.
                Message::Step(Reached { step }) => {
                    let before = self.advance.step.fetch_max(step, Ordering::Relaxed);
                    self.advance.received.fetch_add(u64::from(step > before), Ordering::Relaxed);
                    continue;
                }
                _ => self.advance.received.fetch_add(1, Ordering::Relaxed),
            };
            match message {
                Message::Abort(why) => {
                    return Err(LinkError::Aborted { node: self.node.clone(), reason: why.reason });
                }
                other => return Ok(other),
            }
        }
    }

    /// An error for a message that was not due.
    #[must_use]
    pub fn unexpected(&self, got: &Message, wanted: &'static str) -> LinkError {
        LinkError::Unexpected { node: self.node.clone(), got: got.name(), wanted }
    }

    /// Why nothing can be sent any more, in the words of the other side if it left any; nothing when
    /// the connection is not known to be broken.
    pub async fn why_closed(&mut self) -> Option<LinkError> {
        if !self.outgoing.is_closed() {
            return None;
        }
        if let Some(error) = self.last_words(LAST_WORDS).await {
            return Some(error);
        }
        // Silence on this side too: then the writer knows why.
        match self.writer.take()?.await {
            Ok(Err(error)) => Some(error.into()),
            _ => None,
        }
    }

    /// Why the other side ends the conversation, if it does or says so in time. What came before the end
    /// is passed over.
    pub async fn last_words(&mut self, limit: Duration) -> Option<LinkError> {
        let last_words = async {
            loop {
                if let Err(error) = self.receive().await {
                    return error;
                }
            }
        };
        tokio::time::timeout(limit, last_words).await.ok()
    }

    /// Sends what is queued and closes; errors no longer matter to anyone.
    pub async fn close(self) {
        drop(self.outgoing);
        let Some(mut writer) = self.writer else { return };
        if tokio::time::timeout(SILENCE, &mut writer).await.is_err() {
            writer.abort();
        }
    }
}

impl<S> Link<S> {
    /// Ends the writing side at once; what is queued is not sent.
    pub(crate) fn cut(&self) {
        if let Some(writer) = &self.writer {
            writer.abort();
        }
    }
}

async fn write<W: AsyncWrite + Unpin>(
    mut writer: FrameWriter<W>,
    mut incoming: mpsc::Receiver<Message>,
    (traffic, advance): (Arc<Traffic>, Arc<Advance>),
) -> Result<(), FrameError> {
    // Whether a message other than a heartbeat is there of which the kernel may not have all bytes yet.
    let mut said = false;
    loop {
        let message = match tokio::time::timeout(HEARTBEAT, incoming.recv()).await {
            Err(_) => Message::Heartbeat,
            Ok(Some(message)) => message,
            Ok(None) => break,
        };
        said |= message != Message::Heartbeat;
        writer.send_parts(message.kind(), message.flags(), &[&message.payload()]).await?;
        if incoming.is_empty() {
            writer.flush().await?;
            if std::mem::take(&mut said) {
                advance.said.store(traffic.sent(), Ordering::Relaxed);
            }
        } else {
            advance.said.store(traffic.sent(), Ordering::Relaxed);
        }
    }
    writer.finish().await
}
