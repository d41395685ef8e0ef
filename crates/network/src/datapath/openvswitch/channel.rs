//! A connection to the management socket of a bridge, on which its flows are written and read.
//!
//! ```text
//!   us                                    ovs-vswitchd
//!    │ hello ─────────────────────────────► │
//!    │ ◄───────────────────────────── hello │
//!    │ flow_mod, flow_mod, …, barrier ────► │
//!    │ ◄──────────────── barrier, or errors │
//! ```
//!
//! A task of its own reads what comes: it answers the switch's questions whether anybody is there, hands on
//! answers, and tells when the connection has ended, which it does when ovs-vswitchd does or the bridge is
//! removed.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::openflow::{self, Change, Flow, Malformed, Message, Part, Port, kind};

/// How long an answer may take. It takes a fraction of a millisecond, and more while ovs-vswitchd sets up
/// interfaces.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// Messages that wait to be looked at. Each has at most 64 KiB.
const WAITING: usize = 16;
/// The flows or ports of one answer, in bytes: some hundred thousand flows.
const LARGEST_ANSWER: usize = 64 << 20;

/// Why something was not done.
#[derive(Debug, Error)]
pub(super) enum ChannelError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the connection has ended")]
    Ended,
    #[error("no answer came within {} s", LIMIT.as_secs())]
    Late,
    #[error("what it said is not OpenFlow: {0}")]
    Malformed(#[from] Malformed),
    #[error("it does not speak OpenFlow 1.3 on this bridge")]
    OtherVersion,
    #[error("its answer has more than {} MiB", LARGEST_ANSWER >> 20)]
    TooLarge,
    /// The type and code of the switch's own error (ovs-ofctl(8) and `ofp-errors.h` have their meaning).
    #[error("it refused a flow, with OpenFlow's error {0}, {1}")]
    Refused(u16, u16),
}

/// A connection that is there, as far as is known.
#[derive(Debug)]
pub(super) struct Channel {
    writer: Arc<Mutex<OwnedWriteHalf>>,
    answers: mpsc::Receiver<Result<Message, Malformed>>,
    number: u32,
    /// A request was begun and not ended: part of it may be on its way, or its answer.
    midway: bool,
    _reader: AbortOnDropHandle<()>,
}

impl Channel {
    /// Connects; `ended` is told when the connection has come to its end.
    pub(super) async fn connect(socket: &Path, ended: Arc<Notify>) -> Result<Self, ChannelError> {
        let connect = async {
            let (mut reader, mut writer) = UnixStream::connect(socket).await?.into_split();
            writer.write_all(&openflow::hello(0)).await?;
            let mut received = Vec::new();
            let hello = next(&mut reader, &mut received).await?;
            if hello.kind != kind::HELLO || !hello.speaks_our_version() {
                return Err(ChannelError::OtherVersion);
            }
            let (sender, answers) = mpsc::channel(WAITING);
            let writer = Arc::new(Mutex::new(writer));
            let task = tokio::spawn(follow(reader, received, Arc::clone(&writer), sender, ended));
            let reader = AbortOnDropHandle::new(task);
            Ok(Self { writer, answers, number: 0, midway: false, _reader: reader })
        };
        timeout(LIMIT, connect).await.map_err(|_| ChannelError::Late)?
    }

    /// Whether it has not ended.
    pub(super) fn is_alive(&self) -> bool {
        !self.midway && !self.answers.is_closed()
    }

    /// Makes changes, in this order; what holds when this returns. With an error, some may hold.
    pub(super) async fn change(&mut self, changes: &[Change]) -> Result<(), ChannelError> {
        let first = self.number.wrapping_add(1);
        let mut request = Vec::new();
        for change in changes {
            request.extend(change.message(self.next_number()));
        }
        let last = self.next_number();
        request.extend(openflow::barrier(last));
        let mut refused = None;
        let ours = |number: u32| number.wrapping_sub(first) <= last.wrapping_sub(first);
        self.ask(&request, |answer| {
            match answer.kind {
                kind::ERROR if ours(answer.number) => {
                    // The first one is the reason for the others.
                    refused.get_or_insert(answer.error()?);
                }
                kind::BARRIER_REPLY if answer.number == last => return Ok(true),
                _ => {}
            }
            Ok(false)
        })
        .await?;
        refused.map_or(Ok(()), |(kind, code)| Err(ChannelError::Refused(kind, code)))
    }

    /// All flows of the bridge.
    pub(super) async fn flows(&mut self) -> Result<Vec<Flow>, ChannelError> {
        self.list(openflow::ask_flows, Message::flows).await
    }

    /// All ports of the bridge that are set up.
    pub(super) async fn ports(&mut self) -> Result<Vec<Port>, ChannelError> {
        self.list(openflow::ask_ports, Message::ports).await
    }

    async fn list<T>(
        &mut self,
        question: fn(u32) -> Vec<u8>,
        read: fn(&Message) -> Part<T>,
    ) -> Result<Vec<T>, ChannelError> {
        let number = self.next_number();
        let (mut found, mut bytes) = (Vec::new(), 0);
        self.ask(&question(number), |answer| {
            if answer.number != number {
                return Ok(false);
            }
            if answer.kind == kind::ERROR {
                let (kind, code) = answer.error()?;
                return Err(ChannelError::Refused(kind, code));
            }
            bytes += answer.body.len();
            if bytes > LARGEST_ANSWER {
                return Err(ChannelError::TooLarge);
            }
            let (part, more) = read(&answer)?;
            found.extend(part);
            Ok(!more)
        })
        .await?;
        Ok(found)
    }

    fn next_number(&mut self) -> u32 {
        self.number = self.number.wrapping_add(1);
        self.number
    }

    /// Sends a request and takes answers until `done`.
    async fn ask(
        &mut self,
        request: &[u8],
        mut done: impl FnMut(Message) -> Result<bool, ChannelError>,
    ) -> Result<(), ChannelError> {
        if std::mem::replace(&mut self.midway, true) {
            return Err(ChannelError::Ended);
        }
        let talk = async {
            self.writer.lock().await.write_all(request).await?;
            loop {
                let answer = self.answers.recv().await.ok_or(ChannelError::Ended)??;
                if done(answer)? {
                    return Ok::<_, ChannelError>(());
                }
            }
        };
        timeout(LIMIT, talk).await.map_err(|_| ChannelError::Late)??;
        self.midway = false;
        Ok(())
    }
}

/// The next message.
async fn next(reader: &mut OwnedReadHalf, received: &mut Vec<u8>) -> Result<Message, ChannelError> {
    loop {
        if let Some(message) = Message::take(received)? {
            return Ok(message);
        }
        if reader.read_buf(received).await? == 0 {
            return Err(ChannelError::Ended);
        }
    }
}

/// Reads for as long as the connection lasts.
async fn follow(
    mut reader: OwnedReadHalf,
    mut received: Vec<u8>,
    writer: Arc<Mutex<OwnedWriteHalf>>,
    answers: mpsc::Sender<Result<Message, Malformed>>,
    ended: Arc<Notify>,
) {
    loop {
        let handed_on = match next(&mut reader, &mut received).await {
            Ok(message) if message.kind == kind::ECHO_REQUEST => {
                writer.lock().await.write_all(&openflow::echo(&message)).await.is_ok()
            }
            Ok(message)
                if [kind::ERROR, kind::MULTIPART_REPLY, kind::BARRIER_REPLY].contains(&message.kind) =>
            {
                answers.send(Ok(message)).await.is_ok()
            }
            // News that nobody asked for.
            Ok(_) => true,
            Err(error) => {
                if let ChannelError::Malformed(error) = error {
                    // Whoever asks next is told; nobody may.
                    let _ = answers.try_send(Err(error));
                }
                false
            }
        };
        if !handed_on {
            break;
        }
    }
    drop(answers);
    ended.notify_one();
}
