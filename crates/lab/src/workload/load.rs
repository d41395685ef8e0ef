//! The open-loop Redis client: what a user of a service notices while it moves.
//!
//! ```text
//!   schedule   │  │  │  │  │  │  │  │  │  │  │  │     a request each 1/rate, whatever happens
//!   answers     ╲  ╲  ╲              ╲╲╲╲╲╲  ╲  ╲    in order, each checked
//!                     ◀── longest ──▶                wait of an answer since its scheduled time
//! ```
//!
//! One TCP connection, never renewed. Requests go out on schedule without waiting for answers, so a
//! pause of the service is met by every request that was due in it, not only by the one that happened
//! to be under way ("coordinated omission", Tene 2013). Each request is an INCR of one of a few
//! counters, or counts somewhere in all of the memory ([`super::writer`]), so the right answer of each
//! is known: a lost, a repeated and a reordered execution all give a wrong one.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, Read, Write},
    net::{SocketAddrV4, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::{
    redis::{connect, failed},
    resp::{self, Reply},
    writer::Writes,
};
use crate::{error::LabError, handle::Lab};

/// Counters that the requests go round.
const COUNTERS: u64 = 64;
/// How long the answers that are out may take when the client is asked for a report: longer than the
/// two minutes that TCP may wait between two attempts to send a segment again (RFC 6298, TCP_RTO_MAX).
const PATIENCE: Duration = Duration::from_secs(130);
/// Significant digits of the latency histogram; its unit is the microsecond.
const DIGITS: u8 = 3;
/// How many of the first answers tell the usual round trip.
const FIRST: u64 = 500;
/// The longest wait that it tells from longer ones: an hour.
const LONGEST: u64 = 3_600_000_000;

/// What the client saw.
#[derive(Clone, Serialize)]
pub struct LoadReport {
    /// Requests issued.
    pub sent: u64,
    /// Requests answered, rightly or wrongly.
    pub answered: u64,
    /// Requests not answered, though there was time.
    pub lost_ops: u64,
    /// Answers that were not the expected ones.
    pub wrong: u64,
    /// Connections made after the first: always 0, this client makes one.
    pub reconnects: u64,
    /// Why the connection broke, if it did; then every request since is not even sent.
    pub broken: Option<String>,
    /// The first wrong answer.
    pub first_wrong: Option<String>,
    /// Longest wait of an answer minus the usual one, in milliseconds. A request that has no answer
    /// yet counts with its wait so far.
    pub downtime_ms: f64,
    /// The round trip of a service that nothing happens to, in microseconds: the median of the client's
    /// first answers, or of all if that is less. (The median of a report alone would be half of a
    /// pause, if the report covers little else.)
    pub usual_us: u64,
    /// Half of the answers took no longer, in microseconds.
    pub median_us: u64,
    /// 99 of 100 answers took no longer.
    pub p99_us: u64,
    /// 999 of 1000 answers took no longer.
    pub p999_us: u64,
    /// The longest wait, also of a request that has no answer yet.
    pub longest_us: u64,
    /// Time that the report covers, in milliseconds.
    pub duration_ms: f64,
    /// All waits, in microseconds.
    #[serde(skip)]
    pub latency: Histogram<u64>,
    /// The same in the order of the requests; only in the last report.
    #[serde(skip)]
    pub timeline: Timeline,
    /// What was written all over the memory; only in the last report, and of a client that did.
    #[serde(skip)]
    pub writes: Option<Writes>,
}

/// When each request was due, and how long its answer took.
#[derive(Clone, Debug)]
pub struct Timeline {
    begun: Instant,
    interval: Duration,
    /// Microseconds, by number of the request. (An hour at a thousand a second: 14 MB.)
    waits: Vec<u32>,
}

impl Timeline {
    fn new(interval: Duration) -> Self {
        Self { begun: Instant::now(), interval, waits: Vec::new() }
    }

    /// When each request was due that was answered, and how long its answer took.
    pub fn waits(&self) -> impl Iterator<Item = (Instant, Duration)> {
        let each = (0..).zip(&self.waits);
        each.map(|(number, wait)| {
            (due(self.begun, self.interval, number), Duration::from_micros(u64::from(*wait)))
        })
    }

    /// The wait that this share of the requests did not exceed that were due between two moments, and
    /// were answered; none if there were none.
    pub fn quantile(&self, from: Instant, to: Instant, share: f64) -> Option<Duration> {
        let mut waits = histogram();
        for (due, wait) in self.waits() {
            if (from..to).contains(&due) {
                waits.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
            }
        }
        (!waits.is_empty()).then(|| Duration::from_micros(waits.value_at_quantile(share)))
    }
}

impl fmt::Debug for LoadReport {
    /// Without the histogram, which has thousands of counts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string_pretty(self).map_err(|_| fmt::Error)?)
    }
}

impl LoadReport {
    /// What went wrong, in a sentence whose subject the caller names: "lost 2 answers and got 0 wrong ones".
    pub fn loss(&self) -> Option<String> {
        let Self { lost_ops, wrong, broken, .. } = self;
        let broken = broken.as_ref().map(|reason| format!(", and its connection broke: {reason}"));
        let lost =
            || format!("lost {lost_ops} answers and got {wrong} wrong ones{}", broken.unwrap_or_default());
        (!self.is_clean()).then(lost)
    }

    /// Whether every request was answered rightly on the one connection.
    pub fn is_clean(&self) -> bool {
        self.lost_ops == 0 && self.wrong == 0 && self.broken.is_none() && self.answered > 0
    }
}

/// A running client.
#[derive(Debug)]
pub struct RedisLoad {
    orders: Sender<Order>,
    thread: Option<JoinHandle<()>>,
    sent: Arc<AtomicU64>,
    answered: Arc<AtomicU64>,
    address: SocketAddrV4,
}

#[derive(Debug)]
enum Order {
    /// Report since the last report, and go on.
    Lap(Sender<LoadReport>),
    /// Send no more, report on everything since the start, and end.
    Stop(Sender<LoadReport>),
}

impl RedisLoad {
    /// Connects from a lab's host, and begins.
    ///
    /// # Errors
    /// The Redis cannot be connected to, or the rate is 0.
    pub fn start(lab: &Lab, host: &str, address: SocketAddrV4, rate_per_s: u32) -> Result<Self, LabError> {
        Self::start_with(lab, host, address, rate_per_s, None)
    }

    /// The same with requests that write all over what [`super::RedisClient::fill`] stored, `bytes`
    /// bytes; nobody else may write to it.
    ///
    /// # Errors
    /// As for [`RedisLoad::start`].
    pub fn start_writing(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        rate_per_s: u32,
        bytes: u64,
    ) -> Result<Self, LabError> {
        Self::start_with(lab, host, address, rate_per_s, Some(Writes::new(bytes)))
    }

    fn start_with(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        rate_per_s: u32,
        writes: Option<Writes>,
    ) -> Result<Self, LabError> {
        let problem = |error: &dyn ToString| failed(address, error.to_string());
        let interval = Duration::from_secs(1).checked_div(rate_per_s);
        let interval =
            interval.ok_or_else(|| problem(&"the rate is 0 requests a second; give at least 1"))?;
        let stream = connect(lab, host, address)?.map_err(|error| problem(&error))?;
        stream.set_nonblocking(true).map_err(|error| problem(&error))?;
        let (orders, inbox) = mpsc::channel();
        let (sent, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let client = Client {
            stream,
            inbox,
            // Counters of their own for each client.
            prefix: format!("load:{:x}:", started.as_nanos()),
            writes,
            timeline: Timeline::new(interval),
            issued: 0,
            waiting: VecDeque::new(),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            broken: None,
            first: histogram(),
            lap: Figures::new(),
            total: Figures::new(),
            sent: Arc::clone(&sent),
            answered: Arc::clone(&answered),
        };
        let thread = thread::Builder::new().name("redis-load".to_owned()).spawn(move || client.run());
        let thread = thread.map_err(|error| problem(&error))?;
        Ok(Self { orders, thread: Some(thread), sent, answered, address })
    }

    /// Requests issued so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until the requests issued so far are answered (for 130 s at most), and reports what
    /// happened since the start or the last lap. The client goes on.
    ///
    /// # Errors
    /// The client's thread has ended, which only a bug can do.
    pub fn lap(&self) -> Result<LoadReport, LabError> {
        self.order(Order::Lap)
    }

    /// Issues no more, waits for the answers that are out (for 130 s at most), and reports what
    /// happened since the start.
    ///
    /// # Errors
    /// As for [`RedisLoad::lap`].
    pub fn stop(mut self) -> Result<LoadReport, LabError> {
        let report = self.order(Order::Stop)?;
        if let Some(thread) = self.thread.take() {
            // A panic has no report, so it was met above.
            let _ = thread.join();
        }
        Ok(report)
    }

    fn order(&self, order: impl FnOnce(Sender<LoadReport>) -> Order) -> Result<LoadReport, LabError> {
        let ended = || failed(self.address, "the client's thread has ended".to_owned());
        let (reply, report) = mpsc::channel();
        self.orders.send(order(reply)).map_err(|_| ended())?;
        match report.recv_timeout(2 * PATIENCE) {
            Ok(report) => Ok(report),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }
}

#[derive(Debug)]
struct Figures {
    begun: Instant,
    sent: u64,
    answered: u64,
    wrong: u64,
    first_wrong: Option<String>,
    latency: Histogram<u64>,
}

fn histogram() -> Histogram<u64> {
    #[allow(clippy::unwrap_used)] // fails for other bounds and more than 5 digits only
    Histogram::new_with_bounds(1, LONGEST, DIGITS).unwrap()
}

impl Figures {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            sent: 0,
            answered: 0,
            wrong: 0,
            first_wrong: None,
            latency: histogram(),
        }
    }

    /// `oldest` is how long the oldest request without an answer has waited.
    fn report(&self, usual: u64, lost_ops: u64, oldest: Duration, broken: Option<String>) -> LoadReport {
        let oldest = u64::try_from(oldest.as_micros()).unwrap_or(u64::MAX);
        let (median, longest) = (self.latency.value_at_quantile(0.5), self.latency.max().max(oldest));
        LoadReport {
            sent: self.sent,
            answered: self.answered,
            lost_ops,
            wrong: self.wrong,
            reconnects: 0,
            broken,
            first_wrong: self.first_wrong.clone(),
            downtime_ms: Duration::from_micros(longest.saturating_sub(usual)).as_secs_f64() * 1e3,
            usual_us: usual,
            median_us: median,
            p99_us: self.latency.value_at_quantile(0.99),
            p999_us: self.latency.value_at_quantile(0.999),
            longest_us: longest,
            duration_ms: self.begun.elapsed().as_secs_f64() * 1e3,
            latency: self.latency.clone(),
            timeline: Timeline::new(Duration::ZERO),
            writes: None,
        }
    }
}

/// When request `number` is due. By multiplication, so that rounding does not add up.
fn due(begun: Instant, interval: Duration, number: u64) -> Instant {
    let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
    begun + Duration::from_nanos(nanos.saturating_mul(number))
}

/// A request whose answer is out.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    due: Instant,
    expected: i64,
}

/// A report that was asked for, and until when its answers are waited for.
#[derive(Debug)]
struct Pending {
    order: Order,
    /// Number of the last request that it covers, plus one.
    until: u64,
    deadline: Instant,
}

struct Client {
    stream: TcpStream,
    inbox: Receiver<Order>,
    prefix: String,
    writes: Option<Writes>,
    timeline: Timeline,
    issued: u64,
    waiting: VecDeque<Waiting>,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    broken: Option<String>,
    /// Waits of the first answers.
    first: Histogram<u64>,
    lap: Figures,
    total: Figures,
    sent: Arc<AtomicU64>,
    answered: Arc<AtomicU64>,
}

impl Client {
    fn run(mut self) {
        let mut pending: Option<Pending> = None;
        loop {
            let stopping = matches!(&pending, Some(Pending { order: Order::Stop(_), .. }));
            if self.broken.is_none() {
                if !stopping {
                    self.issue();
                }
                if let Err(reason) = self.write().and_then(|()| self.read()) {
                    self.broken = Some(reason);
                }
            }
            let done = pending.take_if(|pending| self.is_done(pending));
            if done.is_some_and(|done| self.report(done.order)) {
                return;
            }
            if pending.is_none() {
                match self.inbox.try_recv() {
                    Ok(order) => {
                        let deadline = Instant::now() + PATIENCE;
                        pending = Some(Pending { order, until: self.issued, deadline });
                        continue;
                    }
                    Err(mpsc::TryRecvError::Empty) => {}
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
            self.sleep(stopping);
        }
    }

    fn due(&self, number: u64) -> Instant {
        due(self.timeline.begun, self.timeline.interval, number)
    }

    /// Queues every request that is due.
    fn issue(&mut self) {
        let now = Instant::now();
        while self.due(self.issued) <= now {
            let (due, number) = (self.due(self.issued), self.issued);
            let expected = match &mut self.writes {
                Some(writes) => writes.request(&mut self.outgoing),
                None => {
                    let key = format!("{}{}", self.prefix, number % COUNTERS);
                    resp::encode(&mut self.outgoing, &[b"INCR", key.as_bytes()]);
                    i64::try_from(number / COUNTERS + 1).unwrap_or(i64::MAX)
                }
            };
            self.waiting.push_back(Waiting { due, expected });
            self.issued += 1;
            for figures in [&mut self.lap, &mut self.total] {
                figures.sent += 1;
            }
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn write(&mut self) -> Result<(), String> {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(length) => drop(self.outgoing.drain(..length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("sending failed: {error}")),
            }
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), String> {
        let mut buffer = [0; 64 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err("the server closed the connection".to_owned()),
                Ok(length) => {
                    self.incoming.extend_from_slice(buffer.get(..length).unwrap_or_default());
                    self.take_answers(Instant::now())?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("receiving failed: {error}")),
            }
        }
    }

    fn take_answers(&mut self, now: Instant) -> Result<(), String> {
        let mut taken = 0;
        while let Some((reply, length)) =
            resp::parse(self.incoming.get(taken..).unwrap_or_default()).map_err(|error| error.to_string())?
        {
            taken += length;
            let request = self.waiting.pop_front().ok_or("an answer came that nothing had asked for")?;
            let wait =
                u64::try_from(now.saturating_duration_since(request.due).as_micros()).unwrap_or(u64::MAX);
            let right = match &reply {
                // A BITFIELD has an answer for each of its parts.
                Reply::Array(Some(parts)) => parts[..] == [Reply::Integer(request.expected)],
                reply => *reply == Reply::Integer(request.expected),
            };
            self.timeline.waits.push(u32::try_from(wait).unwrap_or(u32::MAX));
            for figures in [&mut self.lap, &mut self.total] {
                figures.answered += 1;
                figures.latency.saturating_record(wait);
                if !right {
                    figures.wrong += 1;
                    figures
                        .first_wrong
                        .get_or_insert_with(|| format!("{reply:?} instead of {}", request.expected));
                }
            }
            if self.first.len() < FIRST {
                self.first.saturating_record(wait);
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
        }
        self.incoming.drain(..taken);
        Ok(())
    }

    /// Number of the oldest request that is not answered.
    fn oldest(&self) -> u64 {
        self.issued - self.waiting.len() as u64
    }

    fn is_done(&self, pending: &Pending) -> bool {
        self.oldest() >= pending.until || self.broken.is_some() || Instant::now() >= pending.deadline
    }

    fn usual(&self) -> u64 {
        let periods = [&self.first, &self.lap.latency, &self.total.latency].into_iter();
        periods.filter(|waits| !waits.is_empty()).map(|waits| waits.value_at_quantile(0.5)).min().unwrap_or(0)
    }

    /// Sends a report; true if it was the last.
    fn report(&mut self, order: Order) -> bool {
        // Of a lap, what is out may still come, unless nothing can come any more or it had its time.
        let broken = self.broken.is_some();
        let overdue = self.waiting.iter().filter(|request| broken || request.due.elapsed() >= PATIENCE);
        let overdue = overdue.count() as u64;
        let usual = self.usual();
        let oldest = self.waiting.front().map_or(Duration::ZERO, |request| request.due.elapsed());
        match order {
            Order::Lap(reply) => {
                let report = self.lap.report(usual, overdue, oldest, self.broken.clone());
                self.lap = Figures::new();
                // Whoever asked and went away does not want it.
                let _ = reply.send(report);
                false
            }
            Order::Stop(reply) => {
                let lost = self.waiting.len() as u64;
                let mut report = self.total.report(usual, lost, oldest, self.broken.clone());
                report.writes = self.writes.take();
                report.timeline.clone_from(&self.timeline);
                let _ = reply.send(report);
                true
            }
        }
    }

    /// Until the next request is due, or an answer or room to send is there.
    fn sleep(&self, stopping: bool) {
        let wait = match self.due(self.issued).saturating_duration_since(Instant::now()) {
            // Nothing more is issued, so nothing is due.
            _ if stopping || self.broken.is_some() => self.timeline.interval,
            wait => wait,
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let mut events = PollFlags::IN;
        if !self.outgoing.is_empty() {
            events |= PollFlags::OUT;
        }
        let descriptor = self.stream.as_fd();
        let mut set = [PollFd::from_borrowed_fd(descriptor, events)];
        // A broken connection is readable all the time: then only the time counts.
        let watched = if self.broken.is_some() { &mut set[..0] } else { &mut set[..] };
        // An interruption is a wake-up like any other.
        let _ = poll(watched, Some(&timeout));
    }
}
