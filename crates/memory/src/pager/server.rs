//! The pager's two threads.
//!
//! ```text
//! control thread: epoll over client, CRIU's restorer, userfaultfds ─┐
//!                                                                   ├─▶ State, one lock
//! push thread:    installs chunk after chunk, punches the store ────┘
//! ```
//!
//! The push lets go of the lock after each chunk, and takes it again only through a turnstile that the
//! control thread holds shut while it wants the lock or has it: so a fault waits for one chunk at
//! most. The other way round the control thread makes a step of the push itself when faults come
//! so densely that the push did not get a turn.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, open};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::sys::stat::Mode;

use super::connection::Connection;
use super::index::IndexError;
use super::protocol::{
    Answer, ExtentList, MAX_ENTRIES, Nothing, Request, SHARES, StoredList, ToPager, VERSIONS, Welcome,
};
use super::restorer::{Restorer, RestorerListener, Word};
use super::state::{FIRST_LIVE, State, Work};
use super::store::Store;
use super::{LOCK, PagerError, SOCKET};
use crate::PAGE_SIZE;

const LISTENER: u64 = 0;
const CLIENT: u64 = 1;
const RESTORER_LISTENER: u64 = 2;
const RESTORER: u64 = 3;
const WAKE: u64 = 4;

/// Garbage from which on slots are punched out although there is other work, in pages: 4 MiB.
const PUNCH_FROM: u64 = 1024;

/// Turns of the control thread after which the push gets one if it had none.
const PATIENCE: u32 = 8;

/// How long to wait where the kernel says "try again" and gives no event to wait for: a process that
/// forks or unmaps is on its way out of the system call.
const BACKOFF: Duration = Duration::from_millis(1);

/// How long the push leaves the processors and the lock to a service that faults, where there are at most so many
/// processors, and after how many chunks: half a GB/s is left of its rate.
const AFTER_FAULT: Duration = Duration::from_millis(1);
const FEW_PROCESSORS: usize = 4;
const CHUNKS: u32 = 4;

#[derive(Debug)]
struct Shared {
    turnstile: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
    store: Arc<Store>,
    wake: EventFd,
}

// A panic stops the process (see the program), so that a poisoned lock is never met.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pager, ready to be run.
#[derive(Debug)]
pub struct Server {
    directory: PathBuf,
    listener: OwnedFd,
    epoll: Arc<Epoll>,
    shared: Arc<Shared>,
    client: Option<Connection>,
    restorer_listener: Option<RestorerListener>,
    restorer: Option<Restorer>,
    /// Held for the process's life.
    _lock: Flock<File>,
}

impl Server {
    /// Takes the directory's lock and makes store and socket. At most `max_bytes` of pages are held.
    pub fn bind(directory: &Path, max_bytes: u64) -> Result<Self, PagerError> {
        let mut lock = take_lock(directory, LOCK)?;
        let path = directory.join(LOCK);
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .map_err(|source| PagerError::File { action: "write", path, source })?;
        let system = |action| move |source| PagerError::System { action, source };
        let store = Arc::new(Store::new().map_err(system("make its page store"))?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
            .map_err(|errno| system("make an epoll set")(errno.into()))?;
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| system("make an eventfd")(errno.into()))?;
        let path = directory.join(SOCKET);
        let listener =
            bind_socket(directory).map_err(|source| PagerError::File { action: "bind", path, source })?;
        let epoll = Arc::new(epoll);
        let state = State::new(store.clone(), epoll.clone(), max_bytes / PAGE_SIZE);
        let shared = Shared {
            turnstile: Mutex::new(()),
            state: Mutex::new(state),
            changed: Condvar::new(),
            store,
            wake,
        };
        epoll
            .add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))
            .and_then(|()| epoll.add(&shared.wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE)))
            .map_err(|errno| system("watch its socket")(errno.into()))?;
        Ok(Self {
            directory: directory.to_owned(),
            listener,
            epoll,
            shared: Arc::new(shared),
            client: None,
            restorer_listener: None,
            restorer: None,
            _lock: lock,
        })
    }

    /// Serves until the client says that it is over. The directory's lock is held as long as the server is there: whoever
    /// finds it free may start another pager, so the guard must be gone by then.
    pub fn run(&mut self) -> Result<(), PagerError> {
        let system = |action| move |source| PagerError::System { action, source };
        let shared = self.shared.clone();
        let push = std::thread::Builder::new()
            .name("push".into())
            .spawn(move || push(&shared))
            .map_err(system("start its push thread"))?;
        let mut ready = [EpollEvent::empty(); 64];
        let (mut retry, mut over) = (false, false);
        let (mut steps, mut turns) = (0, 0);
        while !over {
            let timeout = if retry { EpollTimeout::from(1_u8) } else { EpollTimeout::NONE };
            let count = match self.epoll.wait(&mut ready, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(system("wait for events")(errno.into())),
            };
            let (processes, others): (Vec<_>, Vec<_>) =
                ready[..count].iter().map(EpollEvent::data).partition(|token| *token >= FIRST_LIVE);
            // Faults first. Each time the lock is taken may mean waiting for a chunk of the push.
            let (mut happened, punch) = self.with_state(|state| {
                for id in processes {
                    state.read(id);
                }
                state.retry();
                retry = state.has_retries();
                turns = if state.steps() == steps { turns + 1 } else { 0 };
                steps = state.steps();
                let punch = (turns >= PATIENCE).then(|| state.step(u64::MAX));
                (std::mem::take(&mut state.events), punch)
            });
            if let Some(Work::Punch(slots)) = punch {
                punch_out(&self.shared.store, &slots);
            }
            if !others.is_empty() {
                // Before a new client's hello is answered: it learns of these otherwise.
                self.deliver(std::mem::take(&mut happened));
                for token in others {
                    over |= self.turn(token);
                }
                happened = self.with_state(|state| {
                    retry = state.has_retries();
                    std::mem::take(&mut state.events)
                });
            }
            self.deliver(happened);
            self.shared.changed.notify_all();
        }
        self.with_state(State::end);
        self.shared.changed.notify_all();
        // The answer to the last request is on its way; the socket's buffer outlives us.
        drop(self.client.take());
        let _ = push.join();
        let _ = std::fs::remove_file(self.directory.join(SOCKET));
        Ok(())
    }

    fn with_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let _shut = lock(&self.shared.turnstile);
        let mut state = lock(&self.shared.state);
        work(&mut state)
    }

    /// Handles one descriptor that is not a process's; `true` if the pager's work is over.
    fn turn(&mut self, token: u64) -> bool {
        match token {
            LISTENER => self.greet(),
            CLIENT => return self.client_turn(),
            RESTORER_LISTENER => self.admit(),
            RESTORER => self.restorer_turn(),
            _ => {
                // Only resets the counter.
                let _ = self.shared.wake.read();
            }
        }
        false
    }

    /// A new client takes the place of an old one.
    fn greet(&mut self) {
        match Connection::accept(&self.listener) {
            Ok(Some(connection)) => {
                self.client = None;
                match self.epoll.add(&connection, EpollEvent::new(EpollFlags::EPOLLIN, CLIENT)) {
                    Ok(()) => self.client = Some(connection),
                    Err(errno) => tracing::warn!(%errno, "a client cannot be watched"),
                }
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "a client cannot be accepted"),
        }
    }

    /// One packet: more are waited for again, after the faults that may have come meanwhile.
    fn client_turn(&mut self) -> bool {
        let Some(client) = self.client.as_mut() else { return false };
        match client.receive() {
            Ok(Some(packet)) => match self.handle(packet) {
                Ok(over) => over,
                Err(reason) => {
                    tracing::warn!(%reason, "the client violated the protocol");
                    self.client = None;
                    false
                }
            },
            Ok(None) => false,
            Err(error) => {
                tracing::info!(%error, "the client is gone");
                self.client = None;
                false
            }
        }
    }

    /// Does what a packet says; the error ends the connection.
    fn handle(&mut self, packet: ToPager) -> Result<bool, String> {
        let number = packet.number;
        let request = packet.request.ok_or("a packet without a request")?;
        let greeted = self.client.as_ref().is_some_and(|client| client.greeted);
        if !greeted && !matches!(request, Request::Hello(_)) {
            return Err("a request before the hello".into());
        }
        let answers = match request {
            Request::Hello(hello) if self.versions().contains(&hello.version) => {
                return self.hello(number).map(|()| false);
            }
            Request::Hello(hello) => {
                let (oldest, newest) = self.versions().into_inner();
                vec![Answer::Refused(format!(
                    "the client asks for version {} of the protocol, and the pager speaks {oldest} to {newest}",
                    hello.version
                ))]
            }
            Request::Put(list) => {
                self.each(&list.entries, State::put)?;
                return Ok(false);
            }
            Request::Zero(list) => {
                self.each(&list.entries, State::zero)?;
                return Ok(false);
            }
            Request::Pending(list) => {
                self.each(&list.entries, State::set_pending)?;
                return Ok(false);
            }
            Request::InImages(list) => {
                self.each(&list.entries, State::in_images)?;
                return Ok(false);
            }
            Request::LeaveOut(list) => {
                self.each(&list.entries, State::leave_out)?;
                return Ok(false);
            }
            Request::WipedOnFork(list) => {
                self.each(&list.entries, State::wiped_on_fork)?;
                return Ok(false);
            }
            Request::Verify(list) => {
                let verified = self.with_state(|state| state.verify(&list.entries, !list.more));
                vec![verified.map_or_else(Answer::Refused, |()| Answer::Taken(Nothing {}))]
            }
            Request::Share(share) => {
                let shared = self.with_state(|state| state.share(&share));
                vec![shared.map_or_else(Answer::Refused, |()| Answer::Taken(Nothing {}))]
            }
            Request::Listen(listen) => vec![self.listen(listen.directory)],
            Request::Push(_) => {
                self.with_state(State::start_push);
                vec![Answer::Taken(Nothing {})]
            }
            Request::State(_) => vec![Answer::State(self.with_state(|state| state.summary()))],
            Request::Missing(_) => {
                let entries = self.with_state(|state| state.missing());
                packets(&entries, |entries, more| Answer::Extents(ExtentList { entries, more }))
            }
            Request::Index(_) => {
                let entries = self.with_state(|state| state.stored());
                packets(&entries, |entries, more| Answer::Stored(StoredList { entries, more }))
            }
            Request::Abandon(_) => {
                self.farewell(number);
                return Ok(true);
            }
        };
        if let Some(client) = self.client.as_mut() {
            for answer in answers {
                client.send(number, answer);
            }
        }
        Ok(false)
    }

    /// Applies a list; one that exceeds the bounds fails the pager, an invalid one the connection.
    fn each<T>(
        &self,
        entries: &[T],
        apply: impl Fn(&mut State, &T) -> Result<(), IndexError>,
    ) -> Result<(), String> {
        self.with_state(|state| {
            for entry in entries {
                match apply(state, entry) {
                    Ok(()) => {}
                    Err(error @ (IndexError::Full { .. } | IndexError::Scattered { .. })) => {
                        state.fail(error.to_string());
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
            Ok(())
        })
    }

    /// The versions that it speaks as it is.
    fn versions(&self) -> RangeInclusive<u32> {
        let shares = self.with_state(|state| state.shares());
        if shares { SHARES..=*VERSIONS.end() } else { VERSIONS }
    }

    fn hello(&mut self, number: u64) -> Result<(), String> {
        let store = self.shared.store.clone();
        let (summary, next_slot, outstanding) = self.with_state(|state| {
            // It learns from the summary and the list what these would say.
            state.events.clear();
            (state.summary(), state.next_slot(), state.outstanding())
        });
        // Whatever a former client wrote and did not come to tell.
        store
            .punch(next_slot..store.slots())
            .map_err(|error| format!("the end of the store cannot be cleared: {error}"))?;
        let slots = store.slots();
        let Some(client) = self.client.as_mut() else { return Ok(()) };
        if client.greeted {
            return Err("a second hello".into());
        }
        client.greeted = true;
        client.attach(store);
        client.send(number, Answer::Welcome(Welcome { next_slot, slots, state: Some(summary) }));
        for fault in outstanding {
            client.send(0, fault);
        }
        Ok(())
    }

    fn listen(&mut self, directory: Vec<u8>) -> Answer {
        use std::os::unix::ffi::OsStringExt;
        let directory = PathBuf::from(std::ffi::OsString::from_vec(directory));
        if self.with_state(|state| state.summary().restore_finished) {
            return Answer::Refused("the service has been restored already".into());
        }
        if self.restorer.take().is_some() {
            self.with_state(|state| state.restore_failed("another restore was begun".into()));
        }
        // A listener removes its socket when it is closed: before the next is made in the same place.
        self.restorer_listener = None;
        let opened = RestorerListener::open(&directory).and_then(|listener| {
            self.epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, RESTORER_LISTENER))?;
            Ok(listener)
        });
        match opened {
            Ok(listener) => {
                self.restorer_listener = Some(listener);
                self.with_state(State::restore_begins);
                Answer::Taken(Nothing {})
            }
            Err(error) => {
                Answer::Refused(format!("cannot listen for CRIU in {}: {error}", directory.display()))
            }
        }
    }

    /// Answers the last request at once, and says whether it was the last.
    fn farewell(&mut self, number: u64) {
        if let Some(client) = self.client.as_mut() {
            client.send(number, Answer::Taken(Nothing {}));
            // If the socket is full the client sees the end of file instead.
            let _ = client.flush();
        }
    }

    fn admit(&mut self) {
        let accepted = match self.restorer_listener.as_ref().map(RestorerListener::accept) {
            Some(Ok(Some(restorer))) => restorer,
            Some(Err(error)) => return tracing::warn!(%error, "CRIU cannot be accepted"),
            _ => return,
        };
        if self.restorer.is_some() {
            return tracing::warn!("a second CRIU connects during a restore; it is turned away");
        }
        match self.epoll.add(&accepted, EpollEvent::new(EpollFlags::EPOLLIN, RESTORER)) {
            Ok(()) => self.restorer = Some(accepted),
            Err(errno) => tracing::warn!(%errno, "CRIU cannot be watched"),
        }
    }

    fn restorer_turn(&mut self) {
        let Some(mut restorer) = self.restorer.take() else { return };
        let mut over = false;
        while !over && let Some(word) = restorer.next() {
            self.with_state(|state| match word {
                Word::Process(space, uffd) => {
                    if let Err(error) = state.register(space, uffd) {
                        state.restore_failed(format!("space {space} cannot be watched: {error}"));
                        over = true;
                    }
                }
                Word::Zombie(space) => state.register_zombie(space),
                Word::Finished => {
                    state.restore_finished();
                    over = true;
                }
                Word::Failed(reason) => {
                    state.restore_failed(reason);
                    over = true;
                }
            });
        }
        if !over {
            self.restorer = Some(restorer);
        } else if self.with_state(|state| state.summary().restore_finished) {
            self.restorer_listener = None;
        }
    }

    /// Sends the client what has happened and what it asked for.
    fn deliver(&mut self, events: VecDeque<Answer>) {
        let Some(client) = self.client.as_mut() else { return };
        if client.greeted {
            for event in events {
                client.send(0, event);
            }
        }
        let flushed = client.flush().and_then(|left| {
            if left != client.waits_to_send {
                let also = if left { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
                let mut event = EpollEvent::new(EpollFlags::EPOLLIN | also, CLIENT);
                self.epoll.modify(&*client, &mut event)?;
                client.waits_to_send = left;
            }
            Ok(())
        });
        if let Err(error) = flushed {
            tracing::info!(%error, "the client is gone");
            self.client = None;
        }
    }
}

/// The push thread. While the service faults, it lets others run after each chunk, and waits now and then: where there are
/// few processors they would wait for it, milliseconds each time. A lower priority would be worse, as who answers faults
/// waits for its lock.
fn push(shared: &Shared) {
    let has_few = std::thread::available_parallelism().is_ok_and(|count| count.get() <= FEW_PROCESSORS);
    let (mut faults, mut chunks) = (0, 0_u32);
    loop {
        drop(lock(&shared.turnstile));
        let mut state = lock(&shared.state);
        let work = state.step(PUNCH_FROM);
        if !state.events.is_empty() {
            // Cannot fail but by overflow, which wakes as well.
            let _ = shared.wake.write(1);
        }
        match work {
            Work::Go => {
                let now = state.faults();
                drop(state);
                if std::mem::replace(&mut faults, now) != now {
                    chunks = chunks.wrapping_add(1);
                    match has_few && chunks.is_multiple_of(CHUNKS) {
                        true => std::thread::sleep(AFTER_FAULT),
                        false => std::thread::yield_now(),
                    }
                }
            }
            Work::Wait => drop(shared.changed.wait(state)),
            Work::Backoff => drop(shared.changed.wait_timeout(state, BACKOFF)),
            Work::Punch(slots) => {
                drop(state);
                punch_out(&shared.store, &slots);
            }
            Work::End => return,
        }
    }
}

fn punch_out(store: &Store, slots: &rangemap::RangeSet<u64>) {
    for range in slots.iter() {
        if let Err(error) = store.punch(range.clone()) {
            tracing::warn!(?range, %error, "slots cannot be given back");
        }
    }
}

/// Cuts a list into packets, at least one.
fn packets<T: Copy>(entries: &[T], answer: impl Fn(Vec<T>, bool) -> Answer) -> Vec<Answer> {
    let mut parts = entries.chunks(MAX_ENTRIES).peekable();
    let mut answers = Vec::new();
    while let Some(part) = parts.next() {
        answers.push(answer(part.to_vec(), parts.peek().is_some()));
    }
    if answers.is_empty() {
        answers.push(answer(Vec::new(), false));
    }
    answers
}

/// Takes one of the directory's locks.
pub(super) fn take_lock(directory: &Path, name: &str) -> Result<Flock<File>, PagerError> {
    let path = directory.join(name);
    let failed = |action| {
        let path = path.clone();
        move |source| PagerError::File { action, path, source }
    };
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed("open"))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => PagerError::Running { directory: directory.to_owned() },
        errno => failed("lock")(errno.into()),
    })
}

/// The client's socket, mode 0600 by the process's umask, which the program sets.
fn bind_socket(directory: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(directory.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let at = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(&super::short(&at))?)?;
    listen(&listener, Backlog::new(4)?)?;
    Ok(listener)
}
