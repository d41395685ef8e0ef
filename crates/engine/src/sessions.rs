//! Sessions: commands on a terminal in a container, which move with it. On each node a [`Session`] has copies of what the
//! session's `godwit-exec` (`monitor/main.rs`) has open in the container.
//!
//! ```text
//!   user ◀──▶ Session ◀── pidfd_getfd ──▶ godwit-exec, the terminal, the command: all in the container
//!
//!   source: freeze ─▶ hold ─ what was typed and not read, in sessions.json ─▶ dump ─▶ leave
//!                      │ what was written and not read is the user's             └─▶ release, where it stays
//!   destination:       restore ─▶ arrive: a Session for each, with what was typed ─▶ a user attaches, by the token
//! ```
//! CRIU finds both ends of a terminal, empty, and dumps them. The count of bytes that were typed goes along: a user knows
//! from it what to type again.

mod typed;

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_names::ServiceName;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use rustix::termios;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch::{self, Receiver, Sender};

use crate::exec::TerminalSize;
use crate::watch::watch;
use typed::Piece;

/// The file beside the images with the sessions of a container that is dumped.
pub(crate) const FILE: &str = "sessions.json";

/// Most bytes that such a file may have: [`MOST`] sessions with a little typed ahead, or a few with much.
const FILE_LIMIT: u64 = 4 << 20;

/// Most sessions of a container.
pub(crate) const MOST: usize = 64;

/// The descriptors in `godwit-exec`: see there.
const MASTER: i32 = 5;
const ORDERS_IN: i32 = 7;
const NEWS_OUT: i32 = 8;

/// Its orders.
const BEAT: &[u8] = b"b";
const QUIT: &[u8] = b"q";

/// How often an order has to come at least is three times as long as this: see there.
pub const BEATS: Duration = Duration::from_secs(8);

/// How long a terminal that has moved waits for its user. Its `godwit-exec` waits as long.
const USER_LIMIT: Duration = Duration::from_secs(30);

/// What is read at once.
const CHUNK: usize = 64 << 10;

/// Longest the kernel may take to say what a terminal holds.
const HOLD_LIMIT: Duration = Duration::from_secs(2);

/// Where a session is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// Its container runs here.
    Open,
    /// Its container is frozen, and is about to be dumped.
    Held,
    /// Its container is this node's now.
    Left(String),
}

/// What a user is told.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// The command, or a child of it, has written this.
    Output(Vec<u8>),
    /// The command has ended with this exit code, after all that it has written.
    Ended(i32),
    /// `godwit-exec` has ended first: how the command ended is not known.
    Lost,
    /// The container is on this node now.
    Left(String),
}

/// A session on this node.
#[derive(Debug)]
pub struct Session {
    /// Of its `godwit-exec`, in the container's PID namespace.
    pid: u32,
    token: String,
    monitor: OwnedFd,
    master: AsyncFd<OwnedFd>,
    orders: OwnedFd,
    news: AsyncFd<OwnedFd>,
    state: Mutex<State>,
    phase: Sender<Phase>,
}

#[derive(Debug)]
struct State {
    /// What was read of the terminal for the user, and not taken yet.
    shown: Vec<u8>,
    /// Bytes typed by users at all nodes.
    typed: u64,
    /// What was typed and not read, while it is held; and what of it the kernel does not hold again.
    taken: Vec<Piece>,
    rest: Vec<u8>,
    /// No program has the terminal any more.
    is_closed: bool,
    /// The command's exit code, or none where nobody knows it, once it has ended.
    ended: Option<Option<i32>>,
    /// Somebody sits at it.
    is_attached: bool,
}

/// A session as it goes along with a dump.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    pid: u32,
    token: String,
    typed: u64,
    input: Vec<Piece>,
}

impl Session {
    /// The session of the process `outer`, which is a `godwit-exec` that is `pid` in its PID namespace.
    pub(crate) fn open(outer: u32, pid: u32, token: String, typed: u64) -> io::Result<Self> {
        let gone = || io::Error::from(ErrorKind::NotFound);
        let outer = i32::try_from(outer).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let monitor = rustix::process::pidfd_open(outer, PidfdFlags::empty())?;
        let descriptor = |number| rustix::process::pidfd_getfd(&monitor, number, PidfdGetfdFlags::empty());
        let master = descriptor(MASTER)?;
        // Of a container that has something else there nothing is taken for a terminal.
        typed::programs_end(master.as_fd())?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // Opened again, whether they block is not the container's to say.
        let again = |number, flags| {
            let pipe = descriptor(number)?;
            if !rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&pipe)?.st_mode).is_fifo() {
                return Err(io::Error::other(format!("its descriptor {number} is not a pipe")));
            }
            let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
            let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
        };
        let orders = again(ORDERS_IN, OFlags::WRONLY)?;
        let news = watch(again(NEWS_OUT, OFlags::RDONLY)?, Interest::READABLE)?;
        let master = watch(master, Interest::READABLE | Interest::WRITABLE)?;
        let state = State {
            shown: Vec::new(),
            typed,
            taken: Vec::new(),
            rest: Vec::new(),
            is_closed: false,
            ended: None,
            is_attached: false,
        };
        let (phase, _) = watch::channel(Phase::Open);
        Ok(Self { pid, token, monitor, master, orders, news, state: Mutex::new(state), phase })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What panics in between has not changed what goes together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By which a user finds it at another node.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.token
    }

    /// How many bytes have been typed, at all nodes.
    #[must_use]
    pub fn typed(&self) -> u64 {
        self.lock().typed
    }

    /// Tells that its user is there. At least every [`BEATS`], or the terminal hangs up.
    pub fn beat(&self) {
        self.order(BEAT);
    }

    /// Hangs up the terminal, or lets go of a command that has ended.
    pub fn hang_up(&self) {
        self.order(QUIT);
    }

    fn order(&self, order: &[u8]) {
        // Full of beats that nobody reads it needs no more, and `godwit-exec` hangs up by itself.
        if let Err(error) = rustix::io::write(&self.orders, order) {
            tracing::debug!(%error, "an order to godwit-exec cannot be given");
        }
    }

    /// Gives the terminal another size.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resize(&self, size: TerminalSize) -> io::Result<()> {
        Ok(termios::tcsetwinsize(self.master.get_ref(), size.into())?)
    }

    /// What comes next for the user. What has come is not lost when this is dropped before its end.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub async fn next(self: &Arc<Self>) -> io::Result<News> {
        let mut phase = self.phase.subscribe();
        loop {
            let (is_closed, ended) = {
                let mut state = self.lock();
                if !state.shown.is_empty() {
                    return Ok(News::Output(std::mem::take(&mut state.shown)));
                }
                (state.is_closed, state.ended)
            };
            // It was read here, and is told nowhere else. What was written before it comes first.
            if let Some(ended) = ended {
                if self.off_worker(Self::show_some).await? {
                    continue;
                }
                return Ok(ended.map_or(News::Lost, News::Ended));
            }
            let now = phase.borrow_and_update().clone();
            match now {
                Phase::Left(node) => return Ok(News::Left(node)),
                Phase::Held => {
                    changed(&mut phase).await?;
                    continue;
                }
                Phase::Open => {}
            }
            tokio::select! {
                changed = changed(&mut phase) => changed?,
                ready = self.master.readable(), if !is_closed => {
                    let mut ready = ready?;
                    if !self.off_worker(Self::show_some).await? {
                        ready.clear_ready();
                    }
                }
                ready = self.news.readable() => {
                    let mut ready = ready?;
                    if self.lock_open(|state| self.read_news(state))? == Some(false) {
                        ready.clear_ready();
                    }
                }
            }
        }
    }

    /// Does something with the terminal where that may wait for the kernel: whether its ends block is the container's to say.
    async fn off_worker<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(&this)).await.map_err(io::Error::other)?
    }

    /// Does something while the container runs here; none where it does not.
    fn lock_open<T>(&self, work: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<Option<T>> {
        let mut state = self.lock();
        if *self.phase.borrow() != Phase::Open {
            return Ok(None);
        }
        work(&mut state).map(Some)
    }

    /// Reads what there is to be shown; whether there was anything.
    fn show_some(&self) -> io::Result<bool> {
        Ok(self.lock_open(|state| self.read_master(state))?.unwrap_or(false))
    }

    fn read_master(&self, state: &mut State) -> io::Result<bool> {
        if state.is_closed || state.shown.len() >= CHUNK {
            return Ok(false);
        }
        let mut buffer = vec![0; CHUNK];
        match rustix::io::read(self.master.get_ref(), &mut buffer) {
            // What Linux answers at a terminal whose other end is closed.
            Ok(0) | Err(Errno::IO) => {
                state.is_closed = true;
                Ok(false)
            }
            Ok(length) => {
                state.shown.extend_from_slice(&buffer[..length]);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Reads how the command has ended; whether that is known now.
    fn read_news(&self, state: &mut State) -> io::Result<bool> {
        let mut status = [0; 4];
        state.ended = match rustix::io::read(self.news.get_ref(), &mut status) {
            Ok(4) => Some(Some(exit_code(i32::from_ne_bytes(status)))),
            Ok(_) => Some(None),
            Err(Errno::AGAIN) => None,
            Err(errno) => return Err(errno.into()),
        };
        Ok(state.ended.is_some())
    }

    /// Types the beginning of this; how much. It waits while the container is frozen, and while the terminal takes nothing.
    /// None where the container has left.
    ///
    /// # Errors
    /// The terminal takes nothing any more.
    pub async fn type_some(self: &Arc<Self>, text: &[u8]) -> io::Result<Option<usize>> {
        let mut phase = self.phase.subscribe();
        loop {
            let now = phase.borrow_and_update().clone();
            match now {
                Phase::Left(_) => return Ok(None),
                Phase::Held => {
                    changed(&mut phase).await?;
                    continue;
                }
                Phase::Open => {}
            }
            tokio::select! {
                changed = changed(&mut phase) => changed?,
                ready = self.master.writable() => {
                    let mut ready = ready?;
                    let text = text[..text.len().min(CHUNK)].to_owned();
                    match self.off_worker(move |this| this.lock_open(|state| this.write_master(state, &text))).await? {
                        Some(0) => ready.clear_ready(),
                        Some(typed) => return Ok(Some(typed)),
                        None => {}
                    }
                }
            }
        }
    }

    fn write_master(&self, state: &mut State, text: &[u8]) -> io::Result<usize> {
        let write = |text: &[u8]| match rustix::io::write(self.master.get_ref(), text) {
            Ok(length) => Ok(length),
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(io::Error::from(errno)),
        };
        // What was typed before the last move comes first.
        while !state.rest.is_empty() {
            match write(&state.rest)? {
                0 => return Ok(0),
                length => drop(state.rest.drain(..length)),
            }
        }
        let length = write(text)?;
        state.typed += length as u64;
        Ok(length)
    }

    /// The container is frozen and dumped next: takes what the terminal holds.
    fn hold(&self) -> io::Result<Record> {
        let mut state = self.lock();
        self.phase.send_replace(Phase::Held);
        let end = typed::programs_end(self.master.get_ref().as_fd())?;
        // First what was typed: as it is read, more of it may be echoed.
        state.taken.extend(typed::take(end.as_fd())?);
        drop(end);
        let mut kept = std::mem::take(&mut state.shown);
        while self.read_master(&mut state)? {
            kept.append(&mut state.shown);
        }
        state.shown = kept;
        let rest = std::mem::take(&mut state.rest);
        let mut input = state.taken.clone();
        if !rest.is_empty() {
            input.push(Piece::rest(rest.clone()));
            state.rest = rest;
        }
        Ok(Record { pid: self.pid, token: self.token.clone(), typed: state.typed, input })
    }

    /// The container is here, and has not gone on yet: gives the terminal what was taken of it.
    fn release(&self) -> io::Result<()> {
        let mut state = self.lock();
        let taken = std::mem::take(&mut state.taken);
        let end = typed::programs_end(self.master.get_ref().as_fd())?;
        let mut rest = typed::put_back(end.as_fd(), &taken)?;
        rest.append(&mut state.rest);
        state.rest = rest;
        // What of it is still not taken comes before what is typed next.
        self.write_master(&mut state, &[])?;
        self.phase.send_replace(Phase::Open);
        Ok(())
    }

    fn leave(&self, node: &str) {
        let _order = self.lock();
        self.phase.send_replace(Phase::Left(node.to_owned()));
    }

    fn has_ended(&self) -> bool {
        let mut poll = [rustix::event::PollFd::new(&self.monitor, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ended| ended > 0)
    }
}

async fn changed(phase: &mut Receiver<Phase>) -> io::Result<()> {
    // Its sender is the session's.
    phase.changed().await.map_err(io::Error::other)
}

/// An exit code as shells have it, of a status as wait(2) has it.
fn exit_code(status: i32) -> i32 {
    match status & 0x7f {
        0 => status >> 8 & 0xff,
        signal => 128 + signal,
    }
}

/// The sessions of a node's containers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sessions(Arc<Mutex<HashMap<ServiceName, Vec<Arc<Session>>>>>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceName, Vec<Arc<Session>>>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of a container that have not ended.
    pub(crate) fn of(&self, name: &ServiceName) -> Vec<Arc<Session>> {
        let mut all = self.lock();
        all.retain(|_, sessions| {
            sessions.retain(|session| !session.has_ended());
            !sessions.is_empty()
        });
        all.get(name).cloned().unwrap_or_default()
    }

    /// Adds one whose user is there, or is to come.
    pub(crate) fn add(&self, name: &ServiceName, session: Session, is_attached: bool) -> Arc<Session> {
        session.lock().is_attached = is_attached;
        let session = Arc::new(session);
        self.lock().entry(name.clone()).or_default().push(Arc::clone(&session));
        session
    }

    /// The one with this token, for its only user at this node.
    pub(crate) fn attach(&self, name: &ServiceName, token: &str) -> Option<Arc<Session>> {
        let found = self.of(name).into_iter().find(|session| session.token == token)?;
        (!std::mem::replace(&mut found.lock().is_attached, true)).then_some(found.clone())
    }

    /// Closes this node's ends of a session: the terminal of one that hangs up is gone then.
    pub(crate) fn detach(&self, name: &ServiceName, token: &str) {
        if let Some(sessions) = self.lock().get_mut(name) {
            sessions.retain(|session| session.token != token);
        }
    }

    /// Detaches from those to which no user has come.
    async fn expect_users(self, name: ServiceName) {
        tokio::time::sleep(USER_LIMIT).await;
        if let Some(sessions) = self.lock().get_mut(&name) {
            sessions.retain(|session| session.lock().is_attached);
        }
    }

    /// Holds those of a container that is frozen; what of them goes along with the dump, if there are any.
    pub(crate) async fn hold(&self, name: &ServiceName) -> io::Result<Option<(String, Vec<u8>)>> {
        let sessions = self.of(name);
        if sessions.is_empty() {
            return Ok(None);
        }
        let hold = move || sessions.iter().map(|session| session.hold()).collect::<io::Result<Vec<_>>>();
        let holding = tokio::task::spawn_blocking(hold);
        let late = |_| io::Error::from(ErrorKind::TimedOut);
        let records =
            tokio::time::timeout(HOLD_LIMIT, holding).await.map_err(late)?.map_err(io::Error::other)??;
        Ok(Some((FILE.to_owned(), serde_json::to_vec(&records)?)))
    }

    /// Gives those of a container that is still frozen what was taken of them.
    pub(crate) async fn release(&self, name: &ServiceName) {
        let held = self.of(name).into_iter().filter(|session| *session.phase.borrow() == Phase::Held);
        let held: Vec<_> = held.collect();
        let release = move || {
            for session in held {
                if let Err(error) = session.release() {
                    tracing::warn!(%error, "what was typed at a terminal before a move is lost");
                    session.phase.send_replace(Phase::Open);
                }
            }
        };
        if let Err(error) = tokio::task::spawn_blocking(release).await {
            tracing::error!(%error, "a terminal cannot be used");
        }
    }

    /// Those of a container are with it on this node now.
    pub(crate) fn leave(&self, name: &ServiceName, node: &str) {
        for session in self.lock().remove(name).unwrap_or_default() {
            session.leave(node);
        }
    }

    /// Takes those of a container that has been restored and does not run. `members` are its processes: their PIDs, and those
    /// in the PID namespaces in which they are. One that cannot be taken hangs up by itself.
    pub(crate) fn arrive(&self, name: &ServiceName, images: &Path, members: &[(u32, u32)]) -> io::Result<()> {
        let path = images.join(FILE);
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
            Ok(found) if found.len() > FILE_LIMIT => {
                return Err(io::Error::other(format!("{FILE} is too long")));
            }
            Ok(_) => {}
        }
        tokio::spawn(self.clone().expect_users(name.clone()));
        let mut records: Vec<Record> = serde_json::from_slice(&std::fs::read(&path)?)?;
        records.truncate(MOST);
        for Record { pid, token, typed, input } in records {
            let Some((outer, _)) = members.iter().find(|(_, inner)| *inner == pid) else { continue };
            let arrived = Session::open(*outer, pid, token, typed).and_then(|session| {
                session.lock().taken = input;
                session.release()?;
                Ok(session)
            });
            match arrived {
                Ok(session) => drop(self.add(name, session, false)),
                Err(error) => {
                    tracing::warn!(service = %name, %error, "a command's terminal that came with it cannot be used");
                }
            }
        }
        Ok(())
    }
}
