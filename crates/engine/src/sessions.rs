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
//!
//! The descriptors are the container's, too: a program in it may have a call at one of them wait for ever. So such calls are
//! made by a thread of their own, one at a time for each session, and nothing else of godwitd waits for that without a limit.

mod typed;

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use godwit_names::ServiceName;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use rustix::termios;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::sync::watch::{self, Receiver, Sender};
use tokio::time::timeout;

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

/// Most bytes that a terminal of a frozen container may hold for its user. The kernel's limits are lower.
const SHOWN_LIMIT: usize = 1 << 20;

/// Of more typed bytes nobody has heard.
const TYPED_LIMIT: u64 = 1 << 62;

/// The numbers of the device that makes terminals.
const PTMX: (u32, u32) = (5, 2);

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
    /// The container's first process.
    main: AsyncFd<OwnedFd>,
    master: AsyncFd<OwnedFd>,
    orders: OwnedFd,
    news: AsyncFd<OwnedFd>,
    /// Whose turn it is at the descriptors.
    turn: Arc<tokio::sync::Mutex<Kept>>,
    /// Not held during a call that may wait.
    state: Mutex<State>,
    /// Bytes typed by users at all nodes.
    typed: AtomicU64,
    /// Somebody sits at it, or nobody may any more.
    is_attached: AtomicBool,
    /// Its container has run here since it came: its user is on the way.
    is_expecting: AtomicBool,
    /// Is made [`Phase::Held`] before the turn is waited for: whoever has a later turn finds it so.
    phase: Sender<Phase>,
}

/// What was typed and not read.
#[derive(Debug, Default)]
struct Kept {
    /// While it is held.
    taken: Vec<Piece>,
    /// What of it the kernel does not hold again.
    rest: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    /// What was read of the terminal for the user, and not taken yet.
    shown: Vec<u8>,
    /// That goes along to the next node, and is shown there alone.
    goes_along: bool,
    /// No program has the terminal any more.
    is_closed: bool,
    /// The command's exit code, or none where nobody knows it, once it has ended.
    ended: Option<Option<i32>>,
}

/// A session as it goes along with a dump.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    pid: u32,
    token: String,
    typed: u64,
    input: Vec<Piece>,
    /// What no user has seen, where none has come yet.
    #[serde(with = "text", default)]
    shown: Vec<u8>,
}

/// Bytes as base64.
mod text {
    use base64::Engine as _;
    use base64::prelude::BASE64_STANDARD;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64_STANDARD.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        BASE64_STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)
    }
}

impl Session {
    /// The session of the process `outer`, which is a `godwit-exec`, in the container with the first process `main`. `identify`
    /// is asked for PIDs in their PID namespaces, and fails where a process is none of the container's.
    pub(crate) fn open(
        (outer, main): (u32, u32),
        identify: impl Fn(u32) -> io::Result<u32>,
        token: String,
        typed: u64,
    ) -> io::Result<Self> {
        let gone = || io::Error::from(ErrorKind::NotFound);
        let handle = |pid: u32| {
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
            let handle = rustix::process::pidfd_open(raw, PidfdFlags::empty())?;
            let inner = identify(pid)?;
            // Otherwise all that was read of this PID was of this process.
            if has_ended(&handle) { Err(gone()) } else { Ok((handle, inner)) }
        };
        let (monitor, pid) = handle(outer)?;
        let main = watch(handle(main)?.0, Interest::READABLE)?;
        let descriptor = |number| rustix::process::pidfd_getfd(&monitor, number, PidfdGetfdFlags::empty());
        let master = descriptor(MASTER)?;
        // Of a container that has something else there nothing is taken for a terminal.
        let found = rustix::fs::fstat(&master)?;
        let device = (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
        if !rustix::fs::FileType::from_raw_mode(found.st_mode).is_char_device() || device != PTMX {
            return Err(io::Error::other(format!("its descriptor {MASTER} is not a terminal's")));
        }
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
        let (phase, _) = watch::channel(Phase::Open);
        Ok(Self {
            pid,
            token,
            monitor,
            main,
            master,
            orders,
            news,
            turn: Arc::default(),
            state: Mutex::default(),
            typed: AtomicU64::new(typed),
            is_attached: AtomicBool::new(false),
            is_expecting: AtomicBool::new(false),
            phase,
        })
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
        self.typed.load(Ordering::Acquire)
    }

    /// Tells that its user is there. At least every [`BEATS`], or the terminal hangs up.
    pub async fn beat(self: &Arc<Self>) {
        self.order(BEAT).await;
    }

    /// Hangs up the terminal, or lets go of a command that has ended.
    pub async fn hang_up(self: &Arc<Self>) {
        self.order(QUIT).await;
    }

    async fn order(self: &Arc<Self>, order: &'static [u8]) {
        // Full of beats that nobody reads it needs no more, and `godwit-exec` hangs up by itself.
        let give = move |this: &Self, _: &mut Kept| Ok(rustix::io::write(&this.orders, order)?);
        match timeout(HOLD_LIMIT, self.in_turn(give)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "an order to godwit-exec cannot be given"),
            Err(_) => tracing::warn!("a program in the container keeps an order from godwit-exec"),
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
            if let Some(shown) = self.take_shown() {
                return Ok(News::Output(shown));
            }
            let (is_closed, ended) = {
                let state = self.lock();
                (state.is_closed, state.ended)
            };
            // It was read here, and is told nowhere else. What was written before it comes first, also where whoever has
            // the turn now reads it. A terminal that is kept from being read has no more to show.
            if let Some(ended) = ended {
                if let Ok(shown) = timeout(HOLD_LIMIT, self.in_turn(Self::show_some)).await {
                    shown?;
                }
                return Ok(match self.take_shown() {
                    Some(shown) => News::Output(shown),
                    None => ended.map_or(News::Lost, News::Ended),
                });
            }
            let now = phase.borrow_and_update().clone();
            match now {
                Phase::Left(node) => match self.take_shown() {
                    Some(shown) => return Ok(News::Output(shown)),
                    None => return Ok(News::Left(node)),
                },
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
                    if self.in_turn(Self::show_some).await? == Some(false) {
                        ready.clear_ready();
                    }
                }
                ready = self.news.readable() => {
                    let mut ready = ready?;
                    if self.in_turn(Self::read_news).await? == Some(false) {
                        ready.clear_ready();
                    }
                }
            }
        }
    }

    /// Waits until the container has ended.
    ///
    /// # Errors
    /// That cannot be waited for.
    pub async fn container_ended(&self) -> io::Result<()> {
        self.main.readable().await.map(|_| ())
    }

    fn take_shown(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        (!state.goes_along && !state.shown.is_empty()).then(|| std::mem::take(&mut state.shown))
    }

    /// Does something with the descriptors, where that may wait: whether their ends block is the container's to say.
    async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &mut Kept) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let mut turn = Arc::clone(&self.turn).lock_owned().await;
        let this = Arc::clone(self);
        on_thread(move || work(&this, &mut turn)).await
    }

    /// Whether the container runs here. Where it does, it does so until the turn ends.
    fn is_open(&self) -> bool {
        *self.phase.borrow() == Phase::Open
    }

    /// Reads what there is to be shown; whether there was anything, or none where the container does not run here.
    fn show_some(&self, _: &mut Kept) -> io::Result<Option<bool>> {
        if !self.is_open() {
            return Ok(None);
        }
        let mut has_some = false;
        while self.read_master(CHUNK)? {
            has_some = true;
        }
        Ok(Some(has_some))
    }

    /// Reads once, until there is as much to be shown; whether there was anything.
    fn read_master(&self, most: usize) -> io::Result<bool> {
        {
            let state = self.lock();
            if state.is_closed || state.shown.len() >= most {
                return Ok(false);
            }
        }
        let mut buffer = vec![0; CHUNK];
        match rustix::io::read(self.master.get_ref(), &mut buffer) {
            // What Linux answers at a terminal whose other end is closed.
            Ok(0) | Err(Errno::IO) => {
                self.lock().is_closed = true;
                Ok(false)
            }
            Ok(length) => {
                self.lock().shown.extend_from_slice(&buffer[..length]);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Reads how the command has ended; whether that is known now, or none where the container does not run here.
    fn read_news(&self, _: &mut Kept) -> io::Result<Option<bool>> {
        if !self.is_open() {
            return Ok(None);
        }
        let mut status = [0; 4];
        let ended = match rustix::io::read(self.news.get_ref(), &mut status) {
            Ok(4) => Some(Some(exit_code(i32::from_ne_bytes(status)))),
            Ok(_) => Some(None),
            Err(Errno::AGAIN) => None,
            Err(errno) => return Err(errno.into()),
        };
        self.lock().ended = ended;
        Ok(Some(ended.is_some()))
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
                    let work = move |this: &Self, kept: &mut Kept| {
                        this.is_open().then(|| this.write_master(kept, &text)).transpose()
                    };
                    match self.in_turn(work).await? {
                        Some(0) => ready.clear_ready(),
                        Some(typed) => return Ok(Some(typed)),
                        None => {}
                    }
                }
            }
        }
    }

    fn write_master(&self, kept: &mut Kept, text: &[u8]) -> io::Result<usize> {
        let write = |text: &[u8]| match rustix::io::write(self.master.get_ref(), text) {
            Ok(length) => Ok(length),
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(io::Error::from(errno)),
        };
        // What was typed before the last move comes first.
        while !kept.rest.is_empty() {
            match write(&kept.rest)? {
                0 => return Ok(0),
                length => drop(kept.rest.drain(..length)),
            }
        }
        let length = write(text)?;
        self.typed.fetch_add(length as u64, Ordering::AcqRel);
        Ok(length)
    }

    /// The container is frozen and dumped next: takes what the terminal holds. Where that took so long that the container has
    /// gone on meanwhile, it is given back.
    fn hold(&self, kept: &mut Kept) -> io::Result<Record> {
        // Nobody in the container lets it block from here on.
        rustix::io::ioctl_fionbio(self.master.get_ref(), true)?;
        let end = typed::programs_end(self.master.get_ref().as_fd())?;
        // First what was typed: as it is read, more of it may be echoed.
        let taken = typed::take(end.as_fd());
        kept.taken.extend(taken?);
        drop(end);
        while self.read_master(SHOWN_LIMIT)? {}
        if *self.phase.borrow() != Phase::Held {
            self.release(kept)?;
            return Err(ErrorKind::TimedOut.into());
        }
        let mut input = kept.taken.clone();
        if !kept.rest.is_empty() {
            input.push(Piece::rest(kept.rest.clone()));
        }
        let mut state = self.lock();
        if state.shown.len() >= SHOWN_LIMIT {
            return Err(io::Error::other("a terminal is written to while the container is frozen"));
        }
        state.goes_along = !self.is_attached.load(Ordering::Acquire);
        let shown = if state.goes_along { state.shown.clone() } else { Vec::new() };
        drop(state);
        Ok(Record { pid: self.pid, token: self.token.clone(), typed: self.typed(), input, shown })
    }

    /// The container is here, and has not gone on yet: gives the terminal what was taken of it.
    fn release(&self, kept: &mut Kept) -> io::Result<()> {
        rustix::io::ioctl_fionbio(self.master.get_ref(), true)?;
        let taken = std::mem::take(&mut kept.taken);
        let end = typed::programs_end(self.master.get_ref().as_fd())?;
        let mut rest = typed::put_back(end.as_fd(), &taken)?;
        rest.append(&mut kept.rest);
        kept.rest = rest;
        // What of it is still not taken comes before what is typed next.
        self.write_master(kept, &[])?;
        Ok(())
    }

    /// The container runs here.
    fn go_on(&self) {
        self.lock().goes_along = false;
        self.phase.send_replace(Phase::Open);
    }

    fn has_ended(&self) -> bool {
        has_ended(&self.monitor)
    }

    /// Whether a user is still to come, who has to hear how it ended.
    fn awaits_user(&self) -> bool {
        self.is_expecting.load(Ordering::Acquire) && !self.is_attached.load(Ordering::Acquire)
    }
}

/// Does something on a thread of its own that may wait for ever: it takes no place from others, and godwitd ends without it.
pub(crate) async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    let run = move || {
        let _runtime = runtime.enter();
        // Who waits for it may have gone.
        let _ = done.send(work());
    };
    std::thread::Builder::new().name("terminal".into()).spawn(run)?;
    result.await.map_err(io::Error::other)?
}

/// Whether the process of a handle has ended, reaped or not.
fn has_ended(process: &OwnedFd) -> bool {
    let mut poll = [rustix::event::PollFd::new(process, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ended| ended > 0)
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
            sessions.retain(|session| !session.has_ended() || session.awaits_user());
            !sessions.is_empty()
        });
        let of = all.get(name).into_iter().flatten();
        of.filter(|session| !session.has_ended()).cloned().collect()
    }

    /// Adds one whose user is there, or is to come.
    pub(crate) fn add(&self, name: &ServiceName, session: Session, is_attached: bool) -> Arc<Session> {
        session.is_attached.store(is_attached, Ordering::Release);
        let session = Arc::new(session);
        self.lock().entry(name.clone()).or_default().push(Arc::clone(&session));
        session
    }

    /// The one with this token, for its only user at this node: also where it has ended before the user came.
    pub(crate) fn attach(&self, name: &ServiceName, token: &str) -> Option<Arc<Session>> {
        let found = self.lock().get(name)?.iter().find(|session| session.token == token).cloned()?;
        (!found.is_attached.swap(true, Ordering::AcqRel)).then_some(found)
    }

    /// Closes this node's ends of a session: the terminal of one that hangs up is gone then.
    pub(crate) fn detach(&self, name: &ServiceName, token: &str) {
        let mut gone = Vec::new();
        if let Some(sessions) = self.lock().get_mut(name) {
            gone.extend(sessions.extract_if(.., |session| session.token == token));
        }
    }

    /// The container runs from now on: its users have to come soon.
    pub(crate) fn begin(&self, name: &ServiceName) {
        let mut expected: Vec<Weak<Session>> = Vec::new();
        for session in self.lock().get(name).into_iter().flatten() {
            session.is_expecting.store(true, Ordering::Release);
            expected.push(Arc::downgrade(session));
        }
        if !expected.is_empty() {
            tokio::spawn(self.clone().expect_users_within(USER_LIMIT, name.clone(), expected));
        }
    }

    /// Detaches from those to which no user has come.
    async fn expect_users_within(self, limit: Duration, name: ServiceName, expected: Vec<Weak<Session>>) {
        tokio::time::sleep(limit).await;
        for session in expected.iter().filter_map(Weak::upgrade) {
            // Nobody comes from here on.
            if !session.is_attached.swap(true, Ordering::AcqRel) {
                self.detach(&name, &session.token);
            }
        }
    }

    /// Holds those of a container that is frozen; what of them goes along with the dump, if there are any.
    pub(crate) async fn hold(&self, name: &ServiceName) -> io::Result<Option<(String, Vec<u8>)>> {
        let sessions = self.of(name);
        if sessions.is_empty() {
            return Ok(None);
        }
        for session in &sessions {
            session.phase.send_replace(Phase::Held);
        }
        let holding =
            futures::future::try_join_all(sessions.iter().map(|session| session.in_turn(Session::hold)));
        let late = |_| {
            let why = format!(
                "one does not say within {} s what it holds: a program in the container keeps it",
                HOLD_LIMIT.as_secs()
            );
            io::Error::new(ErrorKind::TimedOut, why)
        };
        let content = serde_json::to_vec(&timeout(HOLD_LIMIT, holding).await.map_err(late)??)?;
        if content.len() as u64 > FILE_LIMIT {
            return Err(io::Error::other(format!(
                "they hold more than can move, {FILE_LIMIT} bytes, that was typed or written and not read"
            )));
        }
        Ok(Some((FILE.to_owned(), content)))
    }

    /// Gives those of a container that is still frozen what was taken of them. Those of one that has ended go on to say so.
    pub(crate) async fn release(&self, name: &ServiceName) {
        let held: Vec<_> = {
            let all = self.lock();
            let sessions = all.get(name).into_iter().flatten();
            sessions.filter(|session| *session.phase.borrow() == Phase::Held).cloned().collect()
        };
        let releasing =
            futures::future::join_all(held.iter().map(|session| session.in_turn(Session::release)));
        match timeout(HOLD_LIMIT, releasing).await {
            Ok(released) => {
                for error in released.into_iter().filter_map(Result::err) {
                    tracing::warn!(service = %name, %error, "what was typed at a terminal before a move is lost");
                }
            }
            // Nobody waits for it, and no service is kept frozen for it.
            Err(_) => {
                tracing::warn!(service = %name, "a program in the container keeps a terminal, where what was typed before a move may be lost");
            }
        }
        for session in held {
            session.go_on();
        }
    }

    /// Those of a container are with it on this node now.
    pub(crate) fn leave(&self, name: &ServiceName, node: &str) {
        let left = self.lock().remove(name).unwrap_or_default();
        for session in left {
            session.phase.send_replace(Phase::Left(node.to_owned()));
        }
    }

    /// Takes those of a container that has been restored and does not run. `main` is its first process, `members` are its
    /// processes: their PIDs, and those in the PID namespaces in which they are; `identify` is as for [`Session::open`]. One
    /// that cannot be taken hangs up by itself.
    pub(crate) async fn arrive(
        &self,
        name: &ServiceName,
        images: &Path,
        (main, members): (u32, Vec<(u32, u32)>),
        identify: impl Fn(u32) -> io::Result<u32> + Send + 'static,
    ) -> io::Result<()> {
        let mut content = Vec::new();
        match std::fs::File::open(images.join(FILE)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
            Ok(file) => file.take(FILE_LIMIT + 1).read_to_end(&mut content)?,
        };
        if content.len() as u64 > FILE_LIMIT {
            return Err(io::Error::other(format!("{FILE} is too long")));
        }
        let mut records: Vec<Record> = serde_json::from_slice(&content)?;
        records.truncate(MOST);
        let (all, of) = (self.clone(), name.clone());
        let taking = on_thread(move || {
            for record in records {
                let Some((outer, _)) = members.iter().find(|(_, inner)| *inner == record.pid) else {
                    continue;
                };
                match arrived((*outer, main), record, &identify) {
                    Ok(session) => drop(all.add(&of, session, false)),
                    Err(error) => {
                        tracing::warn!(service = %of, %error, "a command's terminal that came with it cannot be used");
                    }
                }
            }
            Ok(())
        });
        match timeout(HOLD_LIMIT, taking).await {
            Ok(taken) => taken,
            Err(_) => {
                tracing::warn!(service = %name, "the terminals of commands that came with it do not answer, and hang up");
                Ok(())
            }
        }
    }
}

fn arrived(
    processes: (u32, u32),
    record: Record,
    identify: impl Fn(u32) -> io::Result<u32>,
) -> io::Result<Session> {
    let Record { pid, token, typed, input, shown } = record;
    if typed > TYPED_LIMIT {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("{typed} bytes cannot have been typed")));
    }
    let session = Session::open(processes, identify, token, typed)?;
    if session.pid != pid {
        return Err(io::Error::new(
            ErrorKind::NotFound,
            format!("process {pid} in the container is another one now"),
        ));
    }
    session.lock().shown = shown;
    session.release(&mut Kept { taken: input, rest: Vec::new() })?;
    Ok(session)
}

#[cfg(test)]
mod tests;
