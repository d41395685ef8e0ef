//! The daemon's side of the conversation with a pager.
//!
//! ```text
//! any thread: Client ── requests ──▶ socket ──▶ pager
//!      ▲ answer                        │
//!      └── waiting requests ◀── reader thread ──▶ Events (a queue and an eventfd)
//! ```
//!
//! Requests and answers carry a number; what bears the number 0 is an event. Nothing is read by the
//! caller's threads, so a request can never wait behind events that nobody takes.

mod socket;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{Shutdown, shutdown};
use prost::Message;

use super::PagerError;
use super::protocol::{
    Answer, Extent, ExtentList, Listen, MAX_ENTRIES, MAX_PACKET, Nothing, Request, Restored, RestoredList,
    Share, State, Stored, StoredList, ToClient, ToPager,
};
use crate::{PAGE_SIZE, Space};
use socket::{greet, has_room, receive, send_packet};

/// How long an answer may take. The pager never waits for anything itself; the longest that it does is
/// to list an index.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a pager says unasked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// CRIU has restored the processes; they run now or very soon.
    RestoreFinished,
    /// CRIU went away before that. [`Client::listen`] may be used again.
    RestoreFailed {
        /// What happened.
        reason: String,
    },
    /// A process needs a page that is at the source only. Said once for each page, and again to a
    /// client that connects while the page has not come.
    Fault {
        /// The address space.
        space: Space,
        /// The page's address at the source.
        addr: u64,
    },
    /// Every process has all of its pages.
    Done,
    /// The pager cannot go on; the service must be killed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A connection to a pager. All methods may be used from several threads at once; they wait for the
/// pager's answer where there is one, never for pages. Dropping it leaves the pager as it is.
#[derive(Debug)]
pub struct Client {
    directory: PathBuf,
    socket: Arc<OwnedFd>,
    store: File,
    next_slot: AtomicU64,
    slots: u64,
    next_number: AtomicU64,
    shared: Arc<Shared>,
}

/// What the reader thread shares with the client and the receiver of events.
#[derive(Debug)]
struct Shared {
    /// Who waits for an answer; `None` when the connection is gone.
    waiting: Mutex<Option<HashMap<u64, mpsc::Sender<Answer>>>>,
    events: Mutex<Queue>,
    /// Readable while there are events, and for good when the connection is gone.
    signal: EventFd,
    /// The first reason of a `Failed`.
    failed: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    closed: bool,
}

// The data are whole at every step, so a panic of another thread does no harm.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The events of a connection.
#[derive(Debug)]
pub struct Events {
    shared: Arc<Shared>,
}

impl Client {
    /// Connects to the pager that lives in the directory, in place of any other client of it, which must
    /// not store pages any more: what was stored and not put is thrown away. Faults that
    /// wait for pages come as events.
    ///
    /// # Errors
    /// [`PagerError::Version`] when a pager lives there that no version of the protocol is shared with. It goes on
    /// serving what it has.
    pub fn connect(directory: &Path) -> Result<(Self, Events), PagerError> {
        let (socket, welcome, store) = greet(directory)?;
        let signal = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| PagerError::System { action: "make an eventfd", source: errno.into() })?;
        let state = welcome.state.unwrap_or_default();
        let shared = Arc::new(Shared {
            waiting: Mutex::new(Some(HashMap::new())),
            events: Mutex::new(Queue::default()),
            signal,
            failed: Mutex::new(Some(state.failed).filter(|reason| !reason.is_empty())),
        });
        let socket = Arc::new(socket);
        let reader = Reader { socket: socket.clone(), shared: shared.clone() };
        std::thread::Builder::new()
            .name("pager-client".into())
            .spawn(move || reader.run())
            .map_err(|source| PagerError::System { action: "start its reader thread", source })?;
        let client = Self {
            directory: directory.to_owned(),
            socket,
            store: store.into(),
            next_slot: AtomicU64::new(welcome.next_slot),
            slots: welcome.slots,
            next_number: AtomicU64::new(2),
            shared: shared.clone(),
        };
        Ok((client, Events { shared }))
    }

    /// Writes whole pages into slots that follow each other, and answers the first. The pager knows of
    /// them when they are [`put`](Self::put).
    pub fn store(&self, bytes: &[u8]) -> Result<u64, PagerError> {
        let failed =
            |source| PagerError::Store { directory: self.directory.clone(), bytes: bytes.len(), source };
        let length = bytes.len() as u64;
        if length == 0 || !length.is_multiple_of(PAGE_SIZE) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let pages = length / PAGE_SIZE;
        let slot = self.next_slot.fetch_add(pages, Ordering::Relaxed);
        if slot + pages > self.slots {
            return Err(failed(io::ErrorKind::StorageFull.into()));
        }
        self.store.write_all_at(bytes, slot * PAGE_SIZE).map_err(failed)?;
        Ok(slot)
    }

    /// These pages are in the store now, instead of whatever was known of them. Processes that wait for them get them at
    /// once. Not answered: an answer to any later request says that it has been taken.
    pub fn put(&self, entries: &[Stored]) -> Result<(), PagerError> {
        self.check_failed()?;
        for part in entries.chunks(MAX_ENTRIES) {
            self.tell(Request::Put(StoredList { entries: part.to_vec(), more: false }))?;
        }
        Ok(())
    }

    /// Whether a request can be sent without waiting for the pager to take earlier ones.
    pub fn has_room(&self) -> bool {
        has_room(&self.socket)
    }

    /// These pages are zero or not mapped at the source. Not answered.
    pub fn zero(&self, entries: &[Extent]) -> Result<(), PagerError> {
        self.each(entries, Request::Zero)
    }

    /// These pages are at the source only and will come by [`put`](Self::put). Not answered.
    pub fn pending(&self, entries: &[Extent]) -> Result<(), PagerError> {
        self.each(entries, Request::Pending)
    }

    /// CRIU's images have these pages, and CRIU puts them in place itself. They may be known here too:
    /// then CRIU's are as good. Not answered.
    pub fn in_images(&self, entries: &[Extent]) -> Result<(), PagerError> {
        self.each(entries, Request::InImages)
    }

    /// These pages of processes are not kept, neither those that have come nor those that will: they are zero where CRIU puts
    /// none. Not answered.
    pub fn leave_out(&self, entries: &[Extent]) -> Result<(), PagerError> {
        self.each(entries, Request::LeaveOut)
    }

    /// Children of the processes of these spaces have these areas empty (`MADV_WIPEONFORK`), whatever comes for their parents.
    /// Before a process comes. Not answered.
    pub fn wiped_on_fork(&self, entries: &[Extent]) -> Result<(), PagerError> {
        self.each(entries, Request::WipedOnFork)
    }

    /// The processes map this shared memory, which can be opened at `path` and has `size` bytes. What is
    /// [pending](Self::pending) of this space are its pages, by their offset, and must have placeholders by then: pages that
    /// are allocated. Before the restore.
    ///
    /// # Errors
    /// [`PagerError::Refused`] says why it cannot be filled here.
    pub fn share(&self, space: Space, path: &Path, size: u64) -> Result<(), PagerError> {
        let path = path.as_os_str().as_bytes().to_vec();
        self.ask_simply(Request::Share(Share { space, path, size }))
    }

    /// Checks that the restored processes, which do not run yet, have no page where they are to get one from here. These
    /// are all of the processes. After the restore is finished, and before the [push](Self::push).
    ///
    /// # Errors
    /// [`PagerError::Refused`] says which process has a page that is not its own, and what to do.
    pub fn verify(&self, processes: &[Restored]) -> Result<(), PagerError> {
        let mut parts = processes.chunks(MAX_ENTRIES).peekable();
        loop {
            let entries = parts.next().unwrap_or_default().to_vec();
            let more = parts.peek().is_some();
            self.ask_simply(Request::Verify(RestoredList { entries, more }))?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Listens for CRIU's restorer at `directory/lazy-pages.socket`, where `directory` is CRIU's work
    /// directory.
    pub fn listen(&self, directory: &Path) -> Result<(), PagerError> {
        self.ask_simply(Request::Listen(Listen { directory: directory.as_os_str().as_bytes().to_vec() }))
    }

    /// Begins to fill the processes, as soon as the restore is finished; until then and beside it
    /// faults are served.
    pub fn push(&self) -> Result<(), PagerError> {
        self.ask_simply(Request::Push(Nothing {}))
    }

    /// Where the pager is.
    pub fn state(&self) -> Result<State, PagerError> {
        match self.ask(Request::State(Nothing {}))?.pop() {
            Some(Answer::State(state)) => Ok(state),
            other => Err(self.strange(other)),
        }
    }

    /// The pages that are at the source only, in order.
    pub fn missing(&self) -> Result<Vec<Extent>, PagerError> {
        let mut extents = Vec::new();
        for answer in self.ask(Request::Missing(Nothing {}))? {
            match answer {
                Answer::Extents(list) => extents.extend(list.entries),
                other => return Err(self.strange(Some(other))),
            }
        }
        Ok(extents)
    }

    /// Every page in the store, in order; its contents are read with [`read`](Self::read).
    pub fn index(&self) -> Result<Vec<Stored>, PagerError> {
        let mut stored = Vec::new();
        for answer in self.ask(Request::Index(Nothing {}))? {
            match answer {
                Answer::Stored(list) => stored.extend(list.entries),
                other => return Err(self.strange(Some(other))),
            }
        }
        Ok(stored)
    }

    /// Reads slots of the store. Only slots that are in the [index](Self::index) have contents.
    pub fn read(&self, slot: u64, bytes: &mut [u8]) -> Result<(), PagerError> {
        let length = bytes.len();
        let offset = slot.saturating_mul(PAGE_SIZE);
        self.store.read_exact_at(bytes, offset).map_err(|source| PagerError::Store {
            directory: self.directory.clone(),
            bytes: length,
            source,
        })
    }

    /// Ends the pager whatever it holds. Processes that lack pages must have been killed, or be about to
    /// be and frozen: they would go on with zeros.
    pub fn abandon(&self) -> Result<(), PagerError> {
        self.ask_simply(Request::Abandon(Nothing {}))
    }

    fn each(&self, entries: &[Extent], request: impl Fn(ExtentList) -> Request) -> Result<(), PagerError> {
        self.check_failed()?;
        for part in entries.chunks(MAX_ENTRIES) {
            self.tell(request(ExtentList { entries: part.to_vec(), more: false }))?;
        }
        Ok(())
    }

    fn check_failed(&self) -> Result<(), PagerError> {
        match lock(&self.shared.failed).as_ref() {
            Some(reason) => {
                Err(PagerError::Refused { directory: self.directory.clone(), reason: reason.clone() })
            }
            None => Ok(()),
        }
    }

    fn gone(&self) -> PagerError {
        PagerError::Gone { directory: self.directory.clone() }
    }

    fn strange(&self, answer: Option<Answer>) -> PagerError {
        PagerError::Answer {
            directory: self.directory.clone(),
            reason: format!("{answer:?} does not answer the request"),
        }
    }

    fn tell(&self, request: Request) -> Result<(), PagerError> {
        self.send(0, request)
    }

    fn send(&self, number: u64, request: Request) -> Result<(), PagerError> {
        let packet = ToPager { number, request: Some(request) }.encode_to_vec();
        send_packet(&self.socket, &packet).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                PagerError::Silent { directory: self.directory.clone(), seconds: PATIENCE.as_secs() }
            }
            _ => self.gone(),
        })
    }

    fn ask_simply(&self, request: Request) -> Result<(), PagerError> {
        match self.ask(request)?.pop() {
            Some(Answer::Taken(_)) => Ok(()),
            other => Err(self.strange(other)),
        }
    }

    /// Sends a request and waits for the answer's packets.
    fn ask(&self, request: Request) -> Result<Vec<Answer>, PagerError> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        lock(&self.shared.waiting).as_mut().ok_or_else(|| self.gone())?.insert(number, sender);
        let answers = self.send(number, request).and_then(|()| self.collect(&receiver));
        if let Some(waiting) = lock(&self.shared.waiting).as_mut() {
            waiting.remove(&number);
        }
        answers
    }

    fn collect(&self, receiver: &mpsc::Receiver<Answer>) -> Result<Vec<Answer>, PagerError> {
        let mut answers = Vec::new();
        loop {
            let answer = receiver.recv_timeout(PATIENCE).map_err(|error| match error {
                mpsc::RecvTimeoutError::Disconnected => self.gone(),
                mpsc::RecvTimeoutError::Timeout => {
                    PagerError::Silent { directory: self.directory.clone(), seconds: PATIENCE.as_secs() }
                }
            })?;
            if let Answer::Refused(reason) = answer {
                return Err(PagerError::Refused { directory: self.directory.clone(), reason });
            }
            let more = matches!(
                answer,
                Answer::Extents(ExtentList { more: true, .. })
                    | Answer::Stored(StoredList { more: true, .. })
            );
            answers.push(answer);
            if !more {
                return Ok(answers);
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The reader thread and with it the events end.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

impl Events {
    /// Waits for the next event; `None` when the connection is gone.
    #[allow(clippy::should_implement_trait)] // `None` is not the end of a list, but of the pager or the client
    pub fn next(&self) -> Option<Event> {
        loop {
            {
                let mut queue = lock(&self.shared.events);
                if let Some(event) = self.pop(&mut queue) {
                    return Some(event);
                }
                if queue.closed {
                    return None;
                }
            }
            let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
            // Interrupted or not: look again.
            let _ = poll(&mut fds, PollTimeout::NONE);
        }
    }

    /// The next event if there is one, without waiting.
    pub fn try_next(&self) -> Option<Event> {
        self.pop(&mut lock(&self.shared.events))
    }

    fn pop(&self, queue: &mut Queue) -> Option<Event> {
        let event = queue.events.pop_front();
        if queue.events.is_empty() && !queue.closed {
            // Not readable any more; it is set under the same lock.
            let _ = self.shared.signal.read();
        }
        event
    }
}

impl AsFd for Events {
    /// Readable while [`try_next`](Events::try_next) has something to say, and when the connection is
    /// gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.signal.as_fd()
    }
}

/// The thread that reads the socket.
struct Reader {
    socket: Arc<OwnedFd>,
    shared: Arc<Shared>,
}

impl Reader {
    fn run(self) {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            let packet = match receive(&self.socket, &mut buffer) {
                Ok(packet) => packet,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            match packet {
                ToClient { number: 0, answer: Some(answer) } => self.event(answer),
                ToClient { number, answer: Some(answer) } => {
                    if let Some(sender) = lock(&self.shared.waiting).as_ref().and_then(|w| w.get(&number)) {
                        // The caller may have given up.
                        let _ = sender.send(answer);
                    }
                }
                // Of a newer pager: not for us.
                ToClient { answer: None, .. } => {}
            }
        }
        *lock(&self.shared.waiting) = None;
        let mut queue = lock(&self.shared.events);
        queue.closed = true;
        let _ = self.shared.signal.write(1);
    }

    fn event(&self, answer: Answer) {
        let event = match answer {
            Answer::RestoreFinished(_) => Event::RestoreFinished,
            Answer::RestoreFailed(reason) => Event::RestoreFailed { reason },
            Answer::Fault(Extent { space, addr, .. }) => Event::Fault { space, addr },
            Answer::Done(_) => Event::Done,
            Answer::Failed(reason) => {
                lock(&self.shared.failed).get_or_insert_with(|| reason.clone());
                Event::Failed { reason }
            }
            _ => return,
        };
        let mut queue = lock(&self.shared.events);
        queue.events.push_back(event);
        let _ = self.shared.signal.write(1);
    }
}
