//! How long a frozen service waits for a destination that makes no progress.
//!
//! A destination that hangs still sends heartbeats: they come from a task of their own. So progress is measured by its
//! work: bytes that it takes, messages and steps that come from it, pages that its restore asks for. When none of these
//! has changed for the [`patience`], the move is rolled back, and the service continues at its source. A move that has
//! committed is not watched.
//!
//! Time in which this node itself works (CRIU's dump has a limit of its own) does not count, nor does time in which
//! this daemon got no processor: a busy machine makes a wait longer, never shorter.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use godwit_transfer::{Carrier, Gauge};

use super::SourceError;
use crate::link::{Advance, Link};

/// Bytes per second that a destination moves at least where it says nothing meanwhile: pages into images and from
/// them into processes, and files to its disk.
const SLOWEST_MEMORY: u64 = 500 << 20;
const SLOWEST_DISK: u64 = 20 << 20;

/// Between two checks.
const INTERVAL: Duration = Duration::from_millis(250);

/// How long a destination may make no progress: this `limit`, and the time of its longest silent work on a slow
/// machine, with so many bytes of memory and of files.
pub(super) fn patience(limit: Duration, memory: u64, files: u64) -> Duration {
    let at = |bytes: u64, rate: u64| Duration::from_millis(bytes.saturating_mul(1000) / rate);
    limit + at(memory, SLOWEST_MEMORY) + at(files, SLOWEST_DISK)
}

/// Counts of the destination's work, which never decrease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// Bytes that its kernel has taken. What it does not read fills a bounded buffer, and stops.
    arrived: u64,
    /// Messages from it.
    received: u64,
    /// Pages asked for, no more than it was told of.
    faults: u64,
}

/// For how long nothing has changed.
#[derive(Debug, Default)]
struct Stopwatch {
    last: Seen,
    still: Duration,
}

impl Stopwatch {
    /// Takes new counts, after a time that is known to have passed.
    fn observe(&mut self, seen: Seen, passed: Duration, working: bool) -> Duration {
        self.still = if working || seen != self.last { Duration::ZERO } else { self.still + passed };
        self.last = seen;
        self.still
    }
}

/// What a destination is watched by while a service is frozen.
pub(super) struct Deadline {
    patience: Duration,
    node: String,
    links: Mutex<Vec<(Weak<Gauge>, Arc<Advance>)>>,
    faults: Mutex<Option<Box<dyn Fn() -> u64 + Send>>>,
    /// What the destination is to do, in the source's eyes.
    awaited: Mutex<&'static str>,
    /// How much this node itself does for which the destination waits.
    working: AtomicU32,
    /// Messages that the connections had brought when the last of `awaited` began.
    received_before: AtomicU64,
}

/// This node works, as long as this is not dropped.
pub(super) struct Working<'a>(&'a Deadline);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.working.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Deadline {
    pub(super) fn new(node: &str, patience: Duration) -> Self {
        Self {
            patience,
            node: node.to_owned(),
            links: Mutex::default(),
            faults: Mutex::default(),
            awaited: Mutex::new("answer"),
            working: AtomicU32::new(0),
            received_before: AtomicU64::new(0),
        }
    }

    /// Counts what this connection brings.
    pub(super) fn watch<S: Carrier>(&self, link: &Link<S>) {
        self.links().push((link.gauge(), link.advance()));
    }

    /// Takes the number of pages asked for from this function.
    pub(super) fn watch_faults(&self, faults: impl Fn() -> u64 + Send + 'static) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(faults));
    }

    /// From now on the destination is to do this.
    pub(super) fn awaits(&self, what: &'static str) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = what;
        self.received_before.store(self.seen().received, Ordering::Relaxed);
    }

    /// From now on the destination waits for this node.
    pub(super) fn works(&self) -> Working<'_> {
        self.working.fetch_add(1, Ordering::Relaxed);
        Working(self)
    }

    fn links(&self) -> std::sync::MutexGuard<'_, Vec<(Weak<Gauge>, Arc<Advance>)>> {
        // Each change is one call.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> Seen {
        let mut seen = Seen::default();
        for (gauge, advance) in self.links().iter() {
            // A connection that is gone brings nothing; its end is an error elsewhere.
            let acknowledged = gauge.upgrade().and_then(|gauge| gauge.read().ok());
            seen.arrived += acknowledged.map_or(0, |reading| advance.arrived(reading.acknowledged));
            seen.received += advance.received();
        }
        if let Some(faults) = &*self.faults.lock().unwrap_or_else(PoisonError::into_inner) {
            seen.faults = faults();
        }
        seen
    }

    /// What the destination was to do last: as it says itself, where it has said anything since it was awaited.
    fn work(&self) -> &'static str {
        let awaited = *self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        if self.seen().received == self.received_before.load(Ordering::Relaxed) {
            return awaited;
        }
        let told = self.links().iter().find_map(|(_, advance)| advance.step().work());
        told.unwrap_or(awaited)
    }

    /// Pends as long as the destination makes progress; then why the move is given up.
    pub(super) async fn passed(&self) -> SourceError {
        let mut stopwatch = Stopwatch::default();
        let interval = INTERVAL.min(self.patience / 8);
        let mut last = Instant::now();
        loop {
            tokio::time::sleep(interval).await;
            let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
            let working = self.working.load(Ordering::Relaxed) > 0;
            // More than that is this machine's delay, and perhaps the destination's answer waits to be read.
            let still = stopwatch.observe(self.seen(), passed.min(interval * 2), working);
            if still >= self.patience {
                return SourceError::Standstill {
                    node: self.node.clone(),
                    work: self.work(),
                    seconds: still.as_secs_f64(),
                };
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_transfer::{Connection, LinkOptions, NodeName, Socket};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::message::{Message, Reached, Step};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_comes_of_the_destinations_work_starts_the_wait_anew() {
        let mut stopwatch = Stopwatch::default();
        let mut seen = Seen::default();
        assert_eq!(stopwatch.observe(seen, SECOND, false), SECOND);
        assert_eq!(stopwatch.observe(seen, SECOND, false), 2 * SECOND);
        for change in [
            |seen: &mut Seen| seen.arrived += 1,
            |seen: &mut Seen| seen.received += 1,
            |seen: &mut Seen| seen.faults += 1,
        ] {
            change(&mut seen);
            assert_eq!(stopwatch.observe(seen, SECOND, false), Duration::ZERO);
            assert_eq!(stopwatch.observe(seen, SECOND, false), SECOND);
        }
        assert_eq!(stopwatch.observe(seen, SECOND, true), Duration::ZERO, "this node works");
        assert_eq!(stopwatch.observe(seen, SECOND, false), SECOND);
    }

    #[test]
    fn patience_grows_with_what_a_destination_does_in_silence() {
        let limit = Duration::from_secs(30);
        assert_eq!(patience(limit, 0, 0), limit);
        assert_eq!(patience(limit, 500 << 20, 20 << 20), limit + 2 * SECOND);
        assert!(patience(limit, u64::MAX, u64::MAX) > limit, "no overflow");
    }

    /// Two ends of a conversation.
    async fn pair() -> (Link<Socket>, Link<Socket>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
        let open = async |stream| {
            let socket = Socket::new(stream, &LinkOptions::default()).unwrap();
            let node = NodeName::new("b").unwrap();
            Link::new(Connection::unprotected(socket, node, &crate::link::options()).await.unwrap())
        };
        tokio::join!(open(near.unwrap()), open(far.unwrap().0))
    }

    #[tokio::test]
    async fn a_destination_of_which_only_heartbeats_come_is_given_up_with_the_step_at_which_it_stands() {
        let (mut near, mut far) = pair().await;
        // Heartbeats go both ways after a second.
        let deadline = Deadline::new("b", Duration::from_millis(2500));
        deadline.watch(&near);
        deadline.awaits("restore the service");
        let received = near.sender();
        received.send(Message::TreeEnd).await.unwrap();
        assert_eq!(far.receive().await.unwrap(), Message::TreeEnd);
        for step in [Step::Restoring, Step::Syncing] {
            far.send(Message::Step(Reached { step: step.into() })).await.unwrap();
        }
        let hanging = async { far.receive().await };
        let began = Instant::now();
        let error = tokio::select! {
            error = deadline.passed() => error,
            message = near.receive() => panic!("{message:?}"),
            message = hanging => panic!("{message:?}"),
        };
        assert!(began.elapsed() >= Duration::from_millis(2500), "{:?}", began.elapsed());
        let SourceError::Standstill { node, work, seconds } = &error else { panic!("{error}") };
        assert!(node == "b" && *seconds >= 2.5, "{error}");
        assert_eq!(Some(*work), Step::Syncing.work(), "what it said last that it does");
        assert!(error.to_string().contains("write the changed files to its disk"), "{error}");
    }

    #[tokio::test]
    async fn bytes_of_heartbeats_are_not_taken_for_what_the_destination_has_got() {
        let (near, mut far) = pair().await;
        let advance = near.advance();
        let reading = tokio::spawn(async move {
            let first = far.receive().await;
            (first, far)
        });
        near.send(Message::TreeBegin).await.unwrap();
        let (first, far) = reading.await.unwrap();
        assert_eq!(first.unwrap(), Message::TreeBegin);
        let acknowledged = || near.gauge().upgrade().unwrap().read().unwrap().acknowledged;
        let before = advance.arrived(u64::MAX);
        let at_first = near.bytes_sent();
        while near.bytes_sent() == at_first {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(advance.arrived(u64::MAX), before, "a heartbeat went");
        assert!(advance.arrived(acknowledged()) <= before);
        drop(far);
    }
}
