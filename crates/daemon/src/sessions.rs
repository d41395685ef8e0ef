//! Users at terminals that move with their services: the user stays at the node where the command was begun, and what is
//! typed and shown crosses to the node on which the service is.
//!
//! ```text
//!   godwit exec ◀──▶ User, on node a ◀─┬─▶ Attended ◀──▶ Session          while the service is on node a
//!                                      └─▶ Peer.Attach ◀──▶ Attended ◀──▶ Session     on node b, by its token
//! ```
//! A [`User`] keeps what was typed until it is told that the terminal has it. A terminal's count of bytes moves with it, so
//! that at the next node all is typed once. What was shown before the service left comes before the word that it has.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use godwit_api::v1::{
    self as api, AttachInput, AttachOutput, ExecInput, ExecOutput, attach_input, attach_output, exec_input,
    exec_output,
};
use godwit_engine::{BEATS, ContainerConfig, News, Session, TerminalSize};
use godwit_migration::{Backoff, failpoint};
use godwit_names::ServiceName;
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::directory::elsewhere;
use crate::node::Node;
use crate::services::owned;
use crate::status::internal;

/// Messages under way; then who sends waits.
const QUEUE: usize = 16;

/// What was typed and is not known to be in the terminal, bytes; then the user waits.
const UNSETTLED: usize = 64 << 10;

/// Most bytes of one message.
const PIECE: usize = 16 << 10;

/// Most bytes that wait at a terminal: those of one message are told to be in it while they still wait.
const WAITING: usize = UNSETTLED + PIECE;

/// After so long without a word the other end is gone.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a terminal may be looked for where its service has moved to. The terminal itself waits as long as that.
const FOLLOW: Duration = Duration::from_secs(25);

/// The exit code of what ended with its container, by SIGKILL.
const KILLED: i32 = 137;

/// How long a container's end may take after that of a program in it.
const END_LIMIT: Duration = Duration::from_secs(2);

pub(crate) type Outputs = Pin<Box<dyn Stream<Item = Result<AttachOutput, Status>> + Send>>;
/// What is sent to a user of this node.
pub(crate) type Outgoing = mpsc::Sender<Result<ExecOutput, Status>>;

type Sender = mpsc::Sender<Result<AttachOutput, Status>>;

fn output(kind: attach_output::Kind) -> Result<AttachOutput, Status> {
    Ok(AttachOutput { kind: Some(kind) })
}

/// The size of a user's terminal.
pub(crate) fn size(size: api::TerminalSize) -> TerminalSize {
    let fits = |characters: u32| u16::try_from(characters).unwrap_or(u16::MAX);
    TerminalSize { rows: fits(size.rows), columns: fits(size.columns) }
}

/// Attaches a user of another node to a terminal that has come with its service.
pub(crate) async fn attach(
    node: &Arc<Node>,
    from: &str,
    mut input: Streaming<AttachInput>,
) -> Result<Outputs, Status> {
    let first = timeout(SILENCE, input.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("nothing says which terminal is meant"))??;
    let Some(AttachInput { kind: Some(attach_input::Kind::Start(start)) }) = first else {
        return Err(Status::invalid_argument("the first message must say which terminal is meant"));
    };
    let name = convert::service_name(&start.name)?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let outputs = attached(node, &name, &start.token, receiver)?;
    tracing::info!(from, service = %name, "a user is at a terminal of a command");
    tokio::spawn(async move {
        while let Ok(Some(message)) = input.message().await {
            if sender.send(message).await.is_err() {
                return;
            }
        }
    });
    Ok(outputs)
}

/// Attaches to a terminal of a service of this node.
fn attached(
    node: &Arc<Node>,
    name: &ServiceName,
    token: &str,
    input: mpsc::Receiver<AttachInput>,
) -> Result<Outputs, Status> {
    let config = node.local().config(&owned(node, name)?.service);
    let session = node.local().engine.attach(&config, token);
    let session = session.ok_or_else(|| {
        Status::not_found(format!("node {} has no such terminal of service {name}", node.name))
    })?;
    Ok(attended(node, config, session, input))
}

fn attended(
    node: &Arc<Node>,
    config: ContainerConfig,
    session: Arc<Session>,
    input: mpsc::Receiver<AttachInput>,
) -> Outputs {
    let (outputs, receiver) = mpsc::channel(QUEUE);
    let waiting = Waiting::default();
    tokio::spawn(Attended { node: Arc::clone(node), config, session, outputs, waiting }.attend(input));
    ReceiverStream::new(receiver).boxed()
}

/// A terminal of this node with a user.
struct Attended {
    node: Arc<Node>,
    config: ContainerConfig,
    session: Arc<Session>,
    outputs: Sender,
    waiting: Waiting,
}

/// What was sent and is not typed yet, as the terminal is full.
#[derive(Default)]
struct Waiting {
    bytes: Mutex<VecDeque<u8>>,
    news: Notify,
}

impl Waiting {
    fn bytes(&self) -> MutexGuard<'_, VecDeque<u8>> {
        // Each change is one call.
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what comes; whether there was room, which whoever counts as it should leaves.
    fn push(&self, data: &[u8]) -> bool {
        let mut bytes = self.bytes();
        let fits = bytes.len() + data.len() <= WAITING;
        if fits {
            bytes.extend(data);
            self.news.notify_one();
        }
        fits
    }

    /// The next to be typed.
    async fn next(&self) -> Vec<u8> {
        loop {
            let next: Vec<u8> = self.bytes().iter().take(PIECE).copied().collect();
            if !next.is_empty() {
                return next;
            }
            self.news.notified().await;
        }
    }
}

impl Attended {
    /// Until the command has ended, the service has left, or the user has gone: then the terminal hangs up.
    async fn attend(self, input: mpsc::Receiver<AttachInput>) {
        let typed = output(attach_output::Kind::Typed(self.session.typed()));
        // The user may have gone.
        let _ = self.outputs.send(typed).await;
        let has_left = tokio::select! {
            has_left = self.show() => has_left,
            () = self.listen(input) => false,
            () = self.type_all() => false,
            () = self.beat() => false,
            () = self.outputs.closed() => false,
        };
        if !has_left {
            self.session.hang_up().await;
            self.node.local().engine.detach(&self.config, self.session.token());
        }
    }

    /// Shows what comes, to the end; whether the service has left.
    async fn show(&self) -> bool {
        loop {
            let kind = match self.session.next().await {
                Ok(News::Output(data)) => attach_output::Kind::Stdout(data.into()),
                Ok(News::Ended(code)) => attach_output::Kind::ExitCode(code),
                Ok(News::Lost) if self.container_ended().await => attach_output::Kind::ExitCode(KILLED),
                Ok(News::Lost) => attach_output::Kind::Lost(true),
                Ok(News::Left(node)) => attach_output::Kind::Left(node),
                Err(error) => {
                    let status = Status::internal(format!("the terminal cannot be read: {error}"));
                    // The user may have gone.
                    let _ = self.outputs.send(Err(status)).await;
                    return false;
                }
            };
            let goes_on = matches!(kind, attach_output::Kind::Stdout(_));
            let has_left = matches!(kind, attach_output::Kind::Left(_));
            if self.outputs.send(output(kind)).await.is_err() || !goes_on {
                return has_left;
            }
        }
    }

    /// Whether the command has ended with its container.
    async fn container_ended(&self) -> bool {
        matches!(timeout(END_LIMIT, self.session.container_ended()).await, Ok(Ok(())))
    }

    /// Takes what the user sends, until the user has gone: also while the terminal takes nothing.
    async fn listen(&self, mut input: mpsc::Receiver<AttachInput>) {
        while let Ok(Some(message)) = timeout(SILENCE, input.recv()).await {
            match message.kind {
                Some(attach_input::Kind::Stdin(data)) => {
                    if !self.waiting.push(&data) {
                        tracing::warn!(service = %self.config.name, "more is typed at a terminal than was asked for; it hangs up");
                        return;
                    }
                }
                Some(attach_input::Kind::Size(new)) => {
                    if let Err(error) = self.session.resize(size(new)) {
                        tracing::debug!(%error, "a command's terminal takes no size");
                    }
                }
                Some(attach_input::Kind::Start(_) | attach_input::Kind::Beat(_)) | None => {}
            }
        }
    }

    /// Types what the user types.
    async fn type_all(&self) {
        loop {
            let next = self.waiting.next().await;
            match self.session.type_some(&next).await {
                Ok(Some(typed)) => drop(self.waiting.bytes().drain(..typed)),
                // It is typed where the service is now.
                Ok(None) => std::future::pending().await,
                // Its programs have gone: what they have written is still shown.
                Err(error) => {
                    tracing::debug!(%error, "a command's terminal takes nothing");
                    self.waiting.bytes().drain(..next.len());
                }
            }
            // Who waits for it hears of a later one.
            let _ = self.outputs.try_send(output(attach_output::Kind::Typed(self.session.typed())));
        }
    }

    /// Tells both ends that the other one is there.
    async fn beat(&self) {
        let mut beats = interval(BEATS);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            self.session.beat().await;
            // A queue that is full says so, too.
            let _ = self.outputs.try_send(output(attach_output::Kind::Typed(self.session.typed())));
        }
    }
}

/// A user of this node at a terminal, wherever that is.
pub(crate) struct User {
    node: Arc<Node>,
    name: ServiceName,
    /// Of the service: another one may have its name later.
    id: String,
    token: String,
    /// Whether what the user types is for the command.
    types: bool,
    size: api::TerminalSize,
    /// What was typed and is not known to be in the terminal, and how many bytes were typed before it.
    unsettled: VecDeque<u8>,
    settled: u64,
    out: Outgoing,
}

/// A way to the terminal.
struct Way {
    input: mpsc::Sender<AttachInput>,
    outputs: Outputs,
    /// Where it is, for users.
    node: String,
}

/// Why a user does not sit there any longer.
enum End {
    /// The command has ended with this code.
    Exit(i32),
    /// The service is on this node now.
    Left(String),
    /// The user has gone.
    Gone,
}

impl User {
    pub(crate) fn new(
        node: &Arc<Node>,
        (name, id): (ServiceName, String),
        session: &Session,
        (types, size): (bool, api::TerminalSize),
        out: Outgoing,
    ) -> Self {
        let token = session.token().to_owned();
        let unsettled = VecDeque::new();
        Self { node: Arc::clone(node), name, id, token, types, size, unsettled, settled: 0, out }
    }

    /// Sees the command to its end, and says how it ended after all that it has written.
    pub(crate) async fn sit(mut self, session: Arc<Session>, mut input: Streaming<ExecInput>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let outputs = match owned(&self.node, &self.name) {
            Ok(owned) => attended(&self.node, self.node.local().config(&owned.service), session, receiver),
            // It has been removed meanwhile, with all that runs in it.
            Err(status) => {
                drop(self.out.send(Err(status)).await);
                return;
            }
        };
        let mut way = Way { input: sender, outputs, node: self.node.name.clone() };
        let last = loop {
            match self.pass_on(&mut way, &mut input).await {
                Ok(End::Exit(code)) => {
                    break Ok(ExecOutput { kind: Some(exec_output::Kind::ExitCode(code)) });
                }
                Ok(End::Gone) => return,
                Ok(End::Left(node)) => match self.follow(&node).await {
                    Ok(Some(next)) => way = next,
                    Ok(None) => return,
                    Err(status) => break Err(status),
                },
                Err(status) => break Err(status),
            }
        };
        // The user may have gone.
        let _ = self.out.send(last).await;
    }

    /// Passes on what is typed and shown.
    async fn pass_on(&mut self, way: &mut Way, input: &mut Streaming<ExecInput>) -> Result<End, Status> {
        let of = way.node.clone();
        let away = |why: String| {
            Status::unavailable(format!(
                "the terminal on node {of} cannot be reached any more, and hangs up: {why}; how the command ended is not known"
            ))
        };
        let silent = || away(format!("nothing has come from there for {} s", SILENCE.as_secs()));
        let first = timeout(SILENCE, way.outputs.next()).await.map_err(|_| silent())?;
        let Some(Ok(AttachOutput { kind: Some(attach_output::Kind::Typed(typed)) })) = first else {
            return Err(away("it did not say what has been typed".to_owned()));
        };
        self.settle(typed).ok_or_else(|| away("it says that more was typed than was".to_owned()))?;
        // What of the unsettled has been sent there.
        let mut sent = 0;
        let mut resized = Some(self.size);
        let _beats = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(beat(way.input.clone())));
        let out = self.out.clone();
        loop {
            // One message of a user may be longer than what may be under way.
            let most = self.unsettled.len().min(UNSETTLED);
            let waits = sent < most || resized.is_some();
            tokio::select! {
                () = out.closed() => return Ok(End::Gone),
                shown = timeout(SILENCE, way.outputs.next()) => {
                    let shown = match shown.map_err(|_| silent())? {
                        Some(Ok(shown)) => shown,
                        Some(Err(status)) => return Err(away(status.message().to_owned())),
                        None => return Err(away("its godwitd has ended".to_owned())),
                    };
                    match shown.kind {
                        Some(attach_output::Kind::Typed(typed)) => {
                            let settled = self.settle(typed);
                            let settled = settled.ok_or_else(|| away("it says that more was typed than was".to_owned()))?;
                            sent = sent.saturating_sub(settled);
                        }
                        Some(attach_output::Kind::Stdout(data)) => {
                            let shown = ExecOutput { kind: Some(exec_output::Kind::Stdout(data)) };
                            if out.send(Ok(shown)).await.is_err() {
                                return Ok(End::Gone);
                            }
                        }
                        Some(attach_output::Kind::ExitCode(code)) => return Ok(End::Exit(code)),
                        Some(attach_output::Kind::Lost(_)) => {
                            return Err(Status::unknown(format!(
                                "how the command in service {} ended is not known: its godwit-exec was ended first",
                                self.name
                            )));
                        }
                        Some(attach_output::Kind::Left(node)) => return Ok(End::Left(node)),
                        None => {}
                    }
                }
                permit = way.input.reserve(), if waits => {
                    // Where it has just ended, its last word comes next.
                    let Ok(permit) = permit else {
                        (sent, resized) = (most, None);
                        continue;
                    };
                    let kind = match resized.take() {
                        Some(size) => attach_input::Kind::Size(size),
                        None => {
                            let data: Bytes = self.unsettled.range(sent..most).take(PIECE).copied().collect();
                            sent += data.len();
                            attach_input::Kind::Stdin(data)
                        }
                    };
                    permit.send(AttachInput { kind: Some(kind) });
                }
                typed = input.message(), if self.unsettled.len() < UNSETTLED => {
                    let Ok(Some(ExecInput { kind: Some(kind) })) = typed else { return Ok(End::Gone) };
                    match kind {
                        // The end of input, as a terminal knows it: of a line that has begun, and of all.
                        exec_input::Kind::Stdin(data) if self.types && data.is_empty() => self.unsettled.extend(b"\x04\x04"),
                        exec_input::Kind::Stdin(data) if self.types => self.unsettled.extend(&data),
                        exec_input::Kind::Size(size) => {
                            self.size = size;
                            resized = Some(size);
                        }
                        exec_input::Kind::Stdin(_) | exec_input::Kind::Start(_) => {}
                    }
                }
            }
        }
    }

    /// The terminal has so many bytes of what was typed; how many of them are news. None where that cannot be.
    fn settle(&mut self, typed: u64) -> Option<usize> {
        let news = usize::try_from(typed.checked_sub(self.settled)?).ok()?;
        if news > self.unsettled.len() {
            return None;
        }
        self.unsettled.drain(..news);
        self.settled = typed;
        Some(news)
    }

    /// Looks for the terminal where its service is now; none where the user has gone.
    async fn follow(&self, node: &str) -> Result<Option<Way>, Status> {
        failpoint::point("exec.follow").await;
        let begun = Instant::now();
        let mut pauses = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));
        loop {
            let found = tokio::select! {
                () = self.out.closed() => return Ok(None),
                found = timeout(FOLLOW, self.find(node)) => {
                    found.unwrap_or_else(|_| Err(Status::deadline_exceeded("it does not answer")))
                }
            };
            match found {
                Ok(way) => return Ok(Some(way)),
                Err(status) if begun.elapsed() > FOLLOW => {
                    return Err(Status::unavailable(format!(
                        "service {} has moved to node {node}, and the terminal of the command there cannot be reached, and hangs up: {}; how the command ends is not known",
                        self.name,
                        status.message()
                    )));
                }
                Err(_) => pauses.wait().await,
            }
        }
    }

    async fn find(&self, node: &str) -> Result<Way, Status> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        if let Some(owned) = self.node.state.service(&self.name).map_err(internal)?
            && owned.service.id == self.id
        {
            let outputs = attached(&self.node, &self.name, &self.token, receiver)?;
            return Ok(Way { input: sender, outputs, node: self.node.name.clone() });
        }
        // It may have moved on since.
        let (of, address) = match elsewhere(&self.node, &self.name)? {
            Some(place) => place,
            None => {
                let address = self.node.member_address(node).map_err(internal)?;
                let gone = || Status::not_found(format!("service {} is on no node", self.name));
                (node.to_owned(), address.ok_or_else(gone)?)
            }
        };
        let start = api::AttachStart { name: self.name.to_string(), token: self.token.clone() };
        let start = AttachInput { kind: Some(attach_input::Kind::Start(start)) };
        sender.send(start).await.map_err(|_| Status::internal("its queue is closed"))?;
        // It may take as long as the command lives.
        let mut client = self.node.peers.get_patient(&of, &address);
        let outputs = client.attach(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Way { input: sender, outputs: outputs.boxed(), node: of })
    }
}

/// Tells the terminal's node that the user is still there.
async fn beat(way: mpsc::Sender<AttachInput>) {
    let mut beats = interval(BEATS);
    loop {
        beats.tick().await;
        if way.send(AttachInput { kind: Some(attach_input::Kind::Beat(true)) }).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_waits_to_be_typed_is_typed_in_order_and_has_a_bound() {
        let waiting = Waiting::default();
        assert!(waiting.push(b"first") && waiting.push(b" second"));
        assert_eq!(waiting.next().await, b"first second");
        waiting.bytes().drain(..6);
        assert_eq!(waiting.next().await, b"second");
        assert!(!waiting.push(&[b'x'; WAITING]));
        assert!(waiting.push(&[b'x'; WAITING - 6]));
        assert!(!waiting.push(b"x"));
        assert_eq!(waiting.next().await.len(), PIECE);
    }
}
