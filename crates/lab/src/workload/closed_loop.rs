//! The closed-loop Redis client: how much a Redis answers, whatever waits it takes.
//!
//! ```text
//!   8 batches of requests under way:  ─▶ answers of the first ─▶ a ninth batch ─▶ …
//! ```
//!
//! It reads eight bytes of random values of a fill, as fast as they are answered. So much is under way
//! that the service always has something to do, however long the queues on the link are: what it counts
//! is what the service can do. What a user notices is for [`super::load`] to tell.

use std::{
    collections::VecDeque,
    net::SocketAddrV4,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::redis::{RedisClient, failed, values_of};
use crate::{error::LabError, handle::Lab};

/// Requests sent and counted together.
const BATCH: u64 = 2048;
/// Batches under way: Redis, which answers half a million such requests a second, has work for some thirty
/// milliseconds, which is longer than a round trip on a link whose queue is full.
const UNDER_WAY: usize = 8;
/// How long Redis may take to answer the first request.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running client.
#[derive(Debug)]
pub struct ClosedLoop {
    address: SocketAddrV4,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Answers, LabError>>,
}

/// When its requests were answered.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    batches: Vec<Instant>,
}

impl Answers {
    /// Requests answered per second between two moments; none if they are not apart.
    pub fn rate(&self, from: Instant, to: Instant) -> Option<f64> {
        let seconds = to.saturating_duration_since(from).as_secs_f64();
        let batches = self.batches.iter().filter(|answered| (from..to).contains(*answered)).count();
        (seconds > 0.0).then(|| batches as f64 * BATCH as f64 / seconds)
    }
}

impl ClosedLoop {
    /// Connects from a lab's host, and begins to read what [`RedisClient::fill`] stored.
    ///
    /// # Errors
    /// The Redis does not answer.
    pub fn start(lab: &Lab, host: &str, address: SocketAddrV4, bytes: u64) -> Result<Self, LabError> {
        let mut client = RedisClient::connect(lab, host, address, PATIENCE)?;
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = thread::Builder::new().name("redis-closed-loop".to_owned()).spawn(move || {
            let (mut answers, mut number) = (Answers::default(), 0_u64);
            let mut under_way = VecDeque::new();
            while !ended.load(Ordering::Relaxed) {
                while under_way.len() < UNDER_WAY {
                    let keys = (0..BATCH).map(|_| {
                        // A step that has no factor in common with the number of values reaches them all.
                        number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
                        number % values_of(bytes).max(1)
                    });
                    under_way.push_back(client.ask_peek(keys)?);
                }
                if let Some(expected) = under_way.pop_front() {
                    client.check_peek(&expected)?;
                    answers.batches.push(Instant::now());
                }
            }
            Ok(answers)
        });
        let thread = thread.map_err(|error| failed(address, error.to_string()))?;
        Ok(Self { address, stop, thread })
    }

    /// Ends it.
    ///
    /// # Errors
    /// Its connection broke, or it got an answer that was none.
    pub fn stop(self) -> Result<Answers, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.unwrap_or_else(|_| Err(failed(self.address, "the client's thread has ended".to_owned())))
    }
}
