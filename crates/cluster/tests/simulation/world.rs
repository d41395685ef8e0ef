//! What is outside of the nodes: time, messages that are late, lost or doubled, and the store, which is cut off or restarts.
//!
//! Time is virtual, and there is one thread. All chance comes from one seed, so a seed gives the same history again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use futures::channel::{mpsc, oneshot};
use futures::future::{Either, select};
use godwit_cluster::history::{Bounds, History};
use godwit_cluster::promise::Settings;
use godwit_cluster::store::{
    Cause, Entry, Folder, Key, Page, ReadError, Revision, Store, Swap, SwapError, Swapped, Watch, WatchError,
};
use godwit_names::{NodeName, ServiceName};
use ulid::Ulid;

/// How long a node waits for the store, and for another node.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3);

/// The limit of a lease.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// A node does at once what follows from an answer, and looks at each service more often than its lease lapses.
const BOUNDS: Bounds = Bounds { acts: Duration::ZERO, looks: LIMIT, limit: LIMIT };

/// What nodes say to each other about a service.
#[derive(Debug, Clone)]
pub(crate) enum Message {
    /// The source has sent all of a copy.
    Restore { id: Ulid, epoch: u64, settings: Settings, source: NodeName },
    /// The destination has it.
    Restored { id: Ulid },
    /// The source has committed the move; `forward`: by its journal, without an answer of the store.
    Commit { id: Ulid, forward: bool },
}

#[derive(Clone)]
enum Call {
    Get(Key),
    Range(Folder, Option<String>, usize),
    Swap(Swap),
}

enum Reply {
    Got(Result<Option<Entry>, ReadError>),
    Listed(Result<Page, ReadError>),
    Swapped(Result<Swapped, SwapError>),
}

enum Event {
    Wakes(oneshot::Sender<()>),
    Arrives { from: NodeName, call: Call, reply: Option<oneshot::Sender<Reply>> },
    Returns { to: NodeName, reply: oneshot::Sender<Reply>, value: Reply },
    Says { to: NodeName, about: ServiceName, message: Message },
}

type Opens = Box<dyn Fn() -> Arc<dyn Store>>;

struct Inner {
    now: Duration,
    random: fastrand::Rng,
    sequence: u64,
    events: BTreeMap<(Duration, u64), Event>,
    store: Option<Arc<dyn Store>>,
    cut: BTreeSet<NodeName>,
    slow: BTreeSet<NodeName>,
    calm: bool,
    inboxes: BTreeMap<(NodeName, ServiceName), mpsc::UnboundedSender<Message>>,
    history: History,
}

impl Inner {
    fn after(&mut self, delay: Duration, event: Event) {
        self.sequence += 1;
        self.events.insert((self.now + delay, self.sequence), event);
    }

    /// Most messages are quick, some come at about the time when nobody waits for them any more, and a few much later.
    fn delay(&mut self) -> Duration {
        Duration::from_micros(match self.random.u32(..100) {
            _ if self.calm => self.random.u64(100..5_000),
            0..92 => self.random.u64(100..50_000),
            92..98 => self.random.u64(50_000..4_000_000),
            _ => self.random.u64(4_000_000..40_000_000),
        })
    }

    fn happens(&mut self, percent: u32) -> bool {
        !self.calm && self.random.u32(..100) < percent
    }
}

/// The world. Its copies are the same one.
#[derive(Clone)]
pub(crate) struct World {
    inner: Arc<Mutex<Inner>>,
    opens: std::rc::Rc<Opens>,
}

impl World {
    /// One whose chance is of this seed, and whose store opens so.
    pub(crate) fn new(seed: u64, opens: Opens) -> Self {
        let store = Some(opens());
        let inner = Inner {
            now: Duration::ZERO,
            random: fastrand::Rng::with_seed(seed),
            sequence: 0,
            events: BTreeMap::new(),
            store,
            cut: BTreeSet::new(),
            slow: BTreeSet::new(),
            calm: false,
            inboxes: BTreeMap::new(),
            history: History::new(BOUNDS),
        };
        Self { inner: Arc::new(Mutex::new(inner)), opens: std::rc::Rc::new(opens) }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.inner.lock().unwrap())
    }

    /// The time.
    pub(crate) fn now(&self) -> Duration {
        self.with(|inner| inner.now)
    }

    /// Chance.
    pub(crate) fn random<T>(&self, draw: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
        self.with(|inner| draw(&mut inner.random))
    }

    /// A new id.
    pub(crate) fn id(&self) -> Ulid {
        self.random(|random| Ulid(random.u128(..)))
    }

    /// What happened so far.
    pub(crate) fn history<T>(&self, work: impl FnOnce(&mut History) -> T) -> T {
        self.with(|inner| work(&mut inner.history))
    }

    /// Waits.
    pub(crate) async fn sleep(&self, time: Duration) {
        let (wakes, woken) = oneshot::channel();
        self.with(|inner| inner.after(time, Event::Wakes(wakes)));
        // An event that is dropped is one after the end.
        let _ = woken.await;
    }

    /// A node's link to the store breaks.
    pub(crate) fn cut(&self, node: &NodeName) {
        self.with(|inner| inner.cut.insert(node.clone()));
    }

    /// The store's answers to a node come only just in time.
    pub(crate) fn slow(&self, node: &NodeName) {
        self.with(|inner| inner.slow.insert(node.clone()));
    }

    /// A node's link to the store works again.
    pub(crate) fn mend(&self, node: &NodeName) {
        self.with(|inner| {
            inner.cut.remove(node);
            inner.slow.remove(node);
        });
    }

    /// The store ends.
    pub(crate) fn end_store(&self) {
        self.with(|inner| inner.store = None);
    }

    /// It opens again, with what it had.
    pub(crate) fn open_store(&self) {
        self.with(|inner| {
            if inner.store.is_none() {
                inner.store = Some((self.opens)());
            }
        });
    }

    /// From now on nothing breaks, and all messages are quick.
    pub(crate) fn calm(&self) {
        self.open_store();
        self.with(|inner| {
            inner.calm = true;
            inner.cut.clear();
            inner.slow.clear();
        });
    }

    /// Whether nothing breaks any more.
    pub(crate) fn is_calm(&self) -> bool {
        self.with(|inner| inner.calm)
    }

    /// Messages for a node about a service come here from now on.
    pub(crate) fn inbox(&self, node: &NodeName, service: &ServiceName) -> mpsc::UnboundedReceiver<Message> {
        let (sender, receiver) = mpsc::unbounded();
        self.with(|inner| inner.inboxes.insert((node.clone(), service.clone()), sender));
        receiver
    }

    /// Sends a message, which may be lost or doubled.
    pub(crate) fn say(&self, to: &NodeName, about: &ServiceName, message: Message) {
        self.with(|inner| {
            let copies = if inner.happens(10) { 0 } else { 1 + usize::from(inner.happens(3)) };
            for _ in 0..copies {
                let (delay, to, about) = (inner.delay(), to.clone(), about.clone());
                inner.after(delay, Event::Says { to, about, message: message.clone() });
            }
        });
    }

    /// The next event, if there is one before this time.
    pub(crate) fn step(&self, end: Duration) -> bool {
        self.with(|inner| {
            let Some(entry) = inner.events.first_entry().filter(|entry| entry.key().0 <= end) else {
                return false;
            };
            let ((now, _), event) = entry.remove_entry();
            inner.now = now;
            match event {
                // Who was woken may be gone.
                Event::Wakes(wakes) => drop(wakes.send(())),
                Event::Says { to, about, message } => {
                    if let Some(inbox) = inner.inboxes.get(&(to, about)) {
                        let _ = inbox.unbounded_send(message);
                    }
                }
                Event::Arrives { from, call, reply } => arrive(inner, from, &call, reply),
                Event::Returns { to, reply, value } => {
                    if !inner.cut.contains(&to) {
                        let _ = reply.send(value);
                    }
                }
            }
            true
        })
    }

    /// A node's connection to the store.
    pub(crate) fn link(&self, node: &NodeName) -> Link {
        Link { inner: Arc::clone(&self.inner), node: node.clone() }
    }
}

/// A call arrives at the store, which answers if it is there.
fn arrive(inner: &mut Inner, from: NodeName, call: &Call, reply: Option<oneshot::Sender<Reply>>) {
    let Some(store) = inner.store.clone() else { return };
    let value = match call {
        Call::Get(key) => store.get(key).now_or_never().map(Reply::Got),
        Call::Range(folder, after, limit) => {
            store.range(*folder, after.as_deref(), *limit).now_or_never().map(Reply::Listed)
        }
        Call::Swap(swap) => store.swap(swap).now_or_never().map(Reply::Swapped),
    };
    let value = value.expect("the store answers at once");
    if let Some(reply) = reply {
        let delay = match inner.slow.contains(&from) {
            true => TIMEOUT - Duration::from_millis(inner.random.u64(100..900)),
            false => inner.delay(),
        };
        inner.after(delay, Event::Returns { to: from, reply, value });
    }
}

/// A connection to the store.
pub(crate) struct Link {
    inner: Arc<Mutex<Inner>>,
    node: NodeName,
}

enum Silence {
    NotSent,
    Unknown,
}

fn cause(what: &'static str) -> Cause {
    Error::new(ErrorKind::TimedOut, what).into()
}

impl Link {
    async fn call(&self, call: Call) -> Result<Reply, Silence> {
        let (wakes, woken) = oneshot::channel();
        let answered = {
            let mut inner = self.inner.lock().unwrap();
            inner.after(TIMEOUT, Event::Wakes(wakes));
            (!inner.cut.contains(&self.node)).then(|| {
                let (reply, answered) = oneshot::channel();
                let delay = inner.delay();
                if inner.happens(5) {
                    let (delay, from, call) = (inner.delay(), self.node.clone(), call.clone());
                    inner.after(delay, Event::Arrives { from, call, reply: None });
                }
                inner.after(delay, Event::Arrives { from: self.node.clone(), call, reply: Some(reply) });
                answered
            })
        };
        let Some(answered) = answered else {
            let _ = woken.await;
            return Err(Silence::NotSent);
        };
        match select(answered, woken).await {
            Either::Left((Ok(reply), _)) => Ok(reply),
            // The connection breaks, or nobody waits any longer.
            _ => Err(Silence::Unknown),
        }
    }
}

#[async_trait]
impl Store for Link {
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError> {
        match self.call(Call::Get(key.clone())).await {
            Ok(Reply::Got(found)) => found,
            _ => Err(ReadError::Unavailable(cause("no answer"))),
        }
    }

    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        match self.call(Call::Range(folder, after.map(str::to_owned), limit)).await {
            Ok(Reply::Listed(page)) => page,
            _ => Err(ReadError::Unavailable(cause("no answer"))),
        }
    }

    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        match self.call(Call::Swap(swap.clone())).await {
            Ok(Reply::Swapped(swapped)) => swapped,
            Err(Silence::NotSent) => Err(SwapError::NotDone(cause("not sent"))),
            _ => Err(SwapError::Unknown(cause("no answer"))),
        }
    }

    async fn watch(&self, _: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError> {
        Err(WatchError::Compacted { after })
    }
}
