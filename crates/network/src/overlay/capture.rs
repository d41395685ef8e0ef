//! Packets of a service, seen at the places that they pass on this node.
//!
//! ```text
//!   service namespace            node
//!  ┌────────────────┐   ┌──────────────────────────┐
//!  │ eth0 (Service) ├───┤gws… (Port)               │
//!  └────────────────┘   │     ├ gw0                │
//!                       │     └ gwvx0 (Overlay) ───┤ uplink (Uplink)
//!                       └──────────────────────────┘
//! ```
//!
//! One thread per capture empties the packet sockets of its places and hands batches over. All
//! queues are bounded: when nobody takes the batches, the thread stands still, the sockets' queues
//! fill, and the kernel drops and counts what comes then. Nothing else waits for a capture.
//!
//! **Across moves.** A capture is entered with the node's [`Overlay`] and lasts as long as somebody
//! takes its batches. [`Overlay::create_endpoint`] plugs the captures of that service in before it
//! returns, when nothing runs in the namespace yet: not a frame passes unseen. An endpoint's removal
//! ends the sockets that looked at it, after their queues are empty.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_names::ServiceName;
use nix::net::if_::if_nametoindex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::mpsc;

use super::Overlay;
use crate::filter::Filter;
use crate::inside;
use crate::netns::{self, Found};
use crate::packet::PacketSocket;
use crate::packet::watch::{Received, room_beside};
use crate::port::port_name;
use crate::select::{everything, of_service};
use crate::{NetworkError, enter, mac_of};

/// Bytes of a frame that are kept at most: no frame is longer, also with segments yet to be cut.
pub const WHOLE: u32 = 256 << 10;
/// Bytes of a frame that the filter of the user may look at, whatever is kept of it.
const HEADERS: u32 = 256;
/// Memory of each socket's queue, of which a capture has four (the kernel doubles it).
const QUEUE: i32 = 8 << 20;
/// Captures on a node, of all users: their queues are the node's memory.
const MOST_CAPTURES: usize = 16;
/// Batches that wait to be taken.
const BATCHES: usize = 32;
/// What one place may bring into a batch, so that each has its turn and a batch stays small.
const SHARE_BYTES: usize = 128 << 10;
const SHARE_FRAMES: usize = 1024;
/// A batch comes at least so often, to tell that there was nothing.
const HEARTBEAT: Duration = Duration::from_millis(200);
/// What comes within this time goes into one batch: a message a frame would cost more than the
/// service itself.
const PACE: Duration = Duration::from_millis(10);
/// How long the kernel may take from a frame's time stamp until it is in a queue: microseconds, unless
/// the machine is a virtual one that is not run just then.
const SLACK_NS: i64 = 100_000_000;

/// Where packets are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The service's own interface, in its network namespace: all frames.
    Service,
    /// Its port of the node's bridge: all frames.
    Port,
    /// The VXLAN device: frames from and to the service.
    Overlay,
    /// The uplink: frames from and to the service, also those wrapped in VXLAN.
    Uplink,
}

impl Place {
    /// All of them, from the inside out.
    pub const ALL: [Self; 4] = [Self::Service, Self::Port, Self::Overlay, Self::Uplink];
}

/// What is to be captured.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The service, which need not be on this node.
    pub name: ServiceName,
    /// Its address on this network.
    pub address: Ipv4Addr,
    /// Which of its networks that is ([`crate::ServiceEndpoint::nth`]).
    pub nth: u8,
    /// Where to look.
    pub places: Vec<Place>,
    /// Bytes of each frame that are kept; 0: all.
    pub snaplen: u32,
    /// Which frames are kept.
    pub filter: Filter,
}

/// A capture that runs until its batches are no longer taken.
#[derive(Debug)]
pub struct Capture {
    /// The places and the names of their interfaces, also of those that are not there yet.
    pub interfaces: Vec<(Place, String)>,
    /// What was seen. The first batch comes at once, when everything that is there is looked at.
    pub batches: mpsc::Receiver<Batch>,
}

/// What was seen since the last batch.
#[derive(Debug, Default)]
pub struct Batch {
    /// In no order between places.
    pub packets: Vec<Packet>,
    /// No frame of a later batch is older; nanoseconds since 1970 by this node's clock.
    pub up_to_ns: i64,
    /// What the kernel has counted since the capture began, of each place.
    pub counts: Vec<Count>,
    /// What could not be looked at, and why, in sentences.
    pub troubles: Vec<String>,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Where it was seen.
    pub place: Place,
    /// When, in nanoseconds since 1970 by this node's clock.
    pub time_ns: i64,
    /// Whether the interface sent it; else it received it.
    pub outgoing: bool,
    /// Its length on the interface.
    pub length: u32,
    /// As much of it as was to be kept.
    pub data: Vec<u8>,
}

/// What the kernel counted at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Where.
    pub place: Place,
    /// Frames of the service, those that were dropped among them.
    pub received: u64,
    /// Frames that were dropped because the queue was full.
    pub dropped: u64,
}

/// The captures that run on a node.
#[derive(Debug, Default)]
pub(crate) struct Captures(Mutex<Vec<Weak<Running>>>);

impl Captures {
    fn enter(&self, running: &Arc<Running>) -> Result<(), NetworkError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        if all.len() >= MOST_CAPTURES {
            return Err(NetworkError::TooManyCaptures { most: MOST_CAPTURES });
        }
        all.push(Arc::downgrade(running));
        Ok(())
    }

    fn of(&self, name: &ServiceName, address: Ipv4Addr) -> Vec<Arc<Running>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let running = all.iter().filter_map(Weak::upgrade);
        running.filter(|one| one.wanted.name == *name && one.wanted.address == address).collect()
    }
}

impl Overlay {
    /// Begins to capture packets of a service on this node, wherever it is now.
    ///
    /// # Errors
    /// When the address cannot be a service's, too many captures run, or the kernel refuses.
    pub async fn capture(&self, wanted: Wanted) -> Result<Capture, NetworkError> {
        self.config.subnet.check(wanted.address)?;
        let (name, address) = (wanted.name.clone(), wanted.address);
        let (nth, port) = (wanted.nth, port_name(address));
        let mut places = wanted.places.clone();
        places.sort_unstable();
        places.dedup();
        let interfaces = places.iter().map(|place| (*place, self.interface_at(*place, nth, &port))).collect();
        let running = Arc::new(Running::new(wanted, self.config.port)?);
        // Entered before it looks for the endpoint: one that is made meanwhile is plugged in by its
        // maker, and only once.
        self.shared.captures.enter(&running)?;
        for (place, index) in [(Place::Overlay, self.vxlan), (Place::Uplink, self.uplink)] {
            if places.contains(&place) {
                let mut program = of_service(
                    mac_of(address),
                    (address, self.address6(address)),
                    self.config.port,
                    running.keep(),
                );
                let opened = PacketSocket::watch(index, &mut program, QUEUE);
                let interface = self.interface_at(place, nth, &port);
                let socket = opened.map_err(NetworkError::system(format!("capture at {interface}")))?;
                running.add(Source::new(place, socket));
            }
        }
        let netns = self.config.netns_dir.join(&name);
        if netns::inspect(&netns)? == Found::Namespace {
            self.plug_captures_in(&name, address, &netns, &port).await;
        }
        let (sender, batches) = mpsc::channel(BATCHES);
        let reader = Reader::new(running, sender);
        thread::Builder::new()
            .name("godwit-capture".into())
            .spawn(move || reader.run())
            .map_err(NetworkError::system("start a thread"))?;
        Ok(Capture { interfaces, batches })
    }

    fn interface_at(&self, place: Place, nth: u8, port: &str) -> String {
        match place {
            Place::Service => inside::interface(nth),
            Place::Port => port.to_owned(),
            Place::Overlay => self.config.vxlan.clone(),
            Place::Uplink => self.config.uplink.clone(),
        }
    }

    /// Lets the captures of a service look at its endpoint here. What cannot be looked at is told by
    /// the capture; it is no reason against the endpoint.
    pub(crate) async fn plug_captures_in(
        &self,
        name: &ServiceName,
        address: Ipv4Addr,
        netns: &Path,
        port: &str,
    ) {
        let captures = self.shared.captures.of(name, address);
        if captures.is_empty() {
            return;
        }
        let index = match self.netlink.link(port).await {
            Ok(Some(link)) => link.index,
            // Not made yet, or being removed: who makes it comes here again.
            Ok(None) => return,
            Err(error) => return captures.iter().for_each(|capture| capture.complain(name, &error)),
        };
        for capture in captures {
            capture.plug_in(netns, index).await;
        }
    }
}

/// A capture, as its reader and those who make endpoints share it.
#[derive(Debug)]
struct Running {
    wanted: Wanted,
    vxlan_port: u16,
    /// Raised when something was added.
    wake: EventFd,
    added: Mutex<Added>,
}

#[derive(Debug, Default)]
struct Added {
    /// What the reader has not taken over yet.
    sources: Vec<Source>,
    troubles: Vec<String>,
    /// Ports, by the kernel's index, that are looked at already or were. It does not use an index twice.
    plugged: HashSet<(Place, u32)>,
}

/// One socket.
#[derive(Debug)]
struct Source {
    place: Place,
    socket: PacketSocket,
    /// Whether its interface was seen down.
    down: bool,
}

impl Source {
    fn new(place: Place, socket: PacketSocket) -> Self {
        Self { place, socket, down: false }
    }
}

impl Running {
    fn new(wanted: Wanted, vxlan_port: u16) -> Result<Self, NetworkError> {
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|errno| NetworkError::system("make an eventfd")(errno.into()))?;
        Ok(Self { wanted, vxlan_port, wake, added: Mutex::default() })
    }

    /// Bytes of a frame that are kept.
    fn snaplen(&self) -> u32 {
        if self.wanted.snaplen == 0 { WHOLE } else { self.wanted.snaplen.min(WHOLE) }
    }

    /// Bytes of a frame that the kernel hands over.
    fn keep(&self) -> u32 {
        self.snaplen().max(HEADERS)
    }

    fn added(&self) -> MutexGuard<'_, Added> {
        // Every change under this lock is a single insertion or removal: nothing is half done.
        self.added.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, source: Source) {
        self.added().sources.push(source);
        self.wake();
    }

    fn complain(&self, what: &str, error: &NetworkError) {
        let reason = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        self.added().troubles.push(format!("cannot capture at {what}: {error}{reason}"));
        self.wake();
    }

    fn wake(&self) {
        // A full counter is a wake-up that has not been heard yet.
        let _ = self.wake.write(1);
    }

    /// Looks at an endpoint from now on, if it does not already. `port` is the bridge port's index.
    async fn plug_in(&self, netns: &Path, port: u32) {
        for place in [Place::Service, Place::Port] {
            if !self.wanted.places.contains(&place) || !self.added().plugged.insert((place, port)) {
                continue;
            }
            let mut program = everything(self.keep());
            let opened = if place == Place::Port {
                PacketSocket::watch(port, &mut program, QUEUE)
                    .map_err(NetworkError::system(format!("capture at the service's bridge port {port}")))
            } else {
                let interface = inside::interface(self.wanted.nth);
                let name = interface.clone();
                let inside = move || {
                    let index = if_nametoindex(name.as_str())?;
                    PacketSocket::watch(index, &mut program, QUEUE)
                };
                let opened: Result<io::Result<_>, _> = enter(netns, inside).await;
                opened.and_then(|opened| {
                    opened.map_err(NetworkError::system(format!("capture at {interface} of the service")))
                })
            };
            match opened {
                Ok(socket) => self.add(Source::new(place, socket)),
                Err(error) => {
                    self.added().plugged.remove(&(place, port));
                    self.complain(&self.wanted.name, &error);
                }
            }
        }
    }
}

/// The thread that empties the queues.
struct Reader {
    running: Arc<Running>,
    to: mpsc::Sender<Batch>,
    sources: Vec<Source>,
    counts: BTreeMap<Place, Count>,
    up_to_ns: i64,
    buffer: Vec<u8>,
    beside: Vec<u8>,
}

impl Reader {
    fn new(running: Arc<Running>, to: mpsc::Sender<Batch>) -> Self {
        let zero = |place: &Place| (*place, Count { place: *place, received: 0, dropped: 0 });
        let counts = running.wanted.places.iter().map(zero).collect();
        let buffer = vec![0; running.keep() as usize];
        Self { running, to, sources: Vec::new(), counts, up_to_ns: 0, buffer, beside: room_beside() }
    }

    /// Reads until nobody takes the batches.
    fn run(mut self) {
        let mut due = Instant::now();
        loop {
            let troubles = self.take_over();
            let (mut batch, drained) = self.round();
            batch.troubles.extend(troubles);
            let news = !batch.packets.is_empty() || !batch.troubles.is_empty();
            if news || Instant::now() >= due {
                if self.to.blocking_send(batch).is_err() {
                    return;
                }
                due = Instant::now() + HEARTBEAT;
            }
            if drained {
                if news {
                    thread::sleep(PACE);
                }
                self.wait(due);
            }
        }
    }

    /// Takes over what was added; what is to be complained of.
    fn take_over(&mut self) -> Vec<String> {
        // An error means that there was nothing to hear.
        let _ = self.running.wake.read();
        let mut added = self.running.added();
        self.sources.append(&mut added.sources);
        std::mem::take(&mut added.troubles)
    }

    /// Waits for a frame or for something that is added, and not beyond `due`.
    fn wait(&self, due: Instant) {
        use std::os::fd::AsFd;
        let wanted = PollFlags::POLLIN;
        let mut waiting: Vec<_> =
            self.sources.iter().map(|source| PollFd::new(source.socket.descriptor(), wanted)).collect();
        waiting.push(PollFd::new(self.running.wake.as_fd(), wanted));
        let patience = due.saturating_duration_since(Instant::now());
        // Rounded up, so that it does not spin in the last millisecond.
        let patience = u16::try_from(patience.as_millis() + 1).unwrap_or(u16::MAX);
        // Interrupted or not, a round shows what there is.
        let _ = poll(&mut waiting, PollTimeout::from(patience));
    }

    /// Takes what is in the queues, within the bounds of a batch; whether they are empty then.
    fn round(&mut self) -> (Batch, bool) {
        let mut batch = Batch::default();
        let mut up_to = now_ns() - SLACK_NS;
        let mut all_drained = true;
        let mut kept = Vec::with_capacity(self.sources.len());
        for mut source in std::mem::take(&mut self.sources) {
            let drained = self.empty(&mut source, &mut batch);
            self.count(&source);
            match drained {
                Ok(None) => {
                    let gone = source.down && source.socket.interface_is_gone().unwrap_or(true);
                    if !gone {
                        kept.push(source);
                    }
                }
                Ok(Some(newest)) => {
                    // What is still in its queue is not older than this.
                    up_to = up_to.min(newest);
                    all_drained = false;
                    kept.push(source);
                }
                Err(error) => batch
                    .troubles
                    .push(format!("cannot capture at {} any more: {error}", self.running.wanted.name)),
            }
        }
        self.sources = kept;
        self.up_to_ns = self.up_to_ns.max(up_to);
        batch.up_to_ns = self.up_to_ns;
        batch.counts = self.counts.values().copied().collect();
        (batch, all_drained)
    }

    /// Takes frames out of one queue; the time of the last one when there may be more.
    fn empty(&mut self, source: &mut Source, batch: &mut Batch) -> io::Result<Option<i64>> {
        let (mut frames, mut bytes) = (0, 0);
        loop {
            let seen = match source.socket.see(&mut self.buffer, &mut self.beside)? {
                Received::Empty => return Ok(None),
                Received::Down => {
                    source.down = true;
                    continue;
                }
                Received::Frame(seen) => seen,
            };
            let frame = self.buffer.get(..seen.kept).unwrap_or_default();
            if self.running.wanted.filter.keeps(frame, self.running.vxlan_port) {
                let snaplen = frame.len().min(self.running.snaplen() as usize);
                bytes += snaplen;
                batch.packets.push(Packet {
                    place: source.place,
                    time_ns: seen.time_ns,
                    outgoing: seen.outgoing,
                    length: seen.length,
                    data: frame[..snaplen].to_vec(),
                });
            }
            frames += 1;
            if frames >= SHARE_FRAMES || bytes >= SHARE_BYTES {
                return Ok(Some(seen.time_ns));
            }
        }
    }

    fn count(&mut self, source: &Source) {
        // They are only counts: a socket that does not tell them adds none.
        let (received, dropped) = source.socket.counts().unwrap_or_default();
        if let Some(count) = self.counts.get_mut(&source.place) {
            count.received += u64::from(received);
            count.dropped += u64::from(dropped);
        }
    }
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
