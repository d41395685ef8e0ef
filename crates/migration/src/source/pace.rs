//! How fast pages go: a bound on bandwidth, and compression where the link is slower than it.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_memory::batch::{Builder, Codec};

use crate::options::Compress;

/// Batches between two decisions: 8 MiB of pages.
const WINDOW: u32 = 32;

/// A stream that waits for the link more than this share of its time can afford to compress harder.
const IDLE: f64 = 0.5;

/// One that waits less than this is the slower of the two.
const BUSY: f64 = 0.1;

/// Data that shrink by less than this are not worth it.
const WORTH: f64 = 0.9;

/// Windows without compression after one that was not worth it.
const REST: u32 = 16;

/// Packs batches, as hard as the link leaves time for.
#[derive(Debug)]
pub(crate) struct Packer {
    wanted: Compress,
    codec: Codec,
    window: Window,
    rest: u32,
}

#[derive(Debug)]
struct Window {
    begun: Instant,
    waited: Duration,
    batches: u32,
    raw: u64,
    packed: u64,
}

impl Window {
    fn new() -> Self {
        Self { begun: Instant::now(), waited: Duration::ZERO, batches: 0, raw: 0, packed: 0 }
    }
}

impl Packer {
    pub(crate) fn new(wanted: Compress) -> Self {
        let codec = match wanted {
            Compress::Auto | Compress::Off => Codec::Raw,
            Compress::Lz4 => Codec::Lz4,
            Compress::Zstd => Codec::Zstd,
        };
        Self { wanted, codec, window: Window::new(), rest: 0 }
    }

    /// The batch's bytes.
    pub(crate) fn pack(&mut self, batch: &mut Builder) -> Bytes {
        let raw = batch.data_bytes();
        let packed = batch.finish(self.codec);
        self.window.raw += raw;
        self.window.packed += packed.len() as u64;
        packed
    }

    /// The link took the batch after this time.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.window.waited += time;
        self.window.batches += 1;
        if self.wanted == Compress::Auto && self.window.batches >= WINDOW {
            let window = std::mem::replace(&mut self.window, Window::new());
            let idle = window.waited.as_secs_f64() / window.begun.elapsed().as_secs_f64().max(1e-9);
            let ratio = window.packed as f64 / window.raw.max(1) as f64;
            self.decide(idle, ratio);
        }
    }

    fn decide(&mut self, idle: f64, ratio: f64) {
        self.rest = self.rest.saturating_sub(1);
        if self.codec != Codec::Raw && ratio > WORTH {
            self.codec = Codec::Raw;
            self.rest = REST;
            return;
        }
        self.codec = match self.codec {
            Codec::Raw if idle > IDLE && self.rest == 0 => Codec::Lz4,
            Codec::Lz4 if idle > IDLE => Codec::Zstd,
            Codec::Zstd if idle < BUSY => Codec::Lz4,
            Codec::Lz4 if idle < BUSY => Codec::Raw,
            same => same,
        };
    }
}

/// Keeps all streams together below a bandwidth.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Bytes per second, and the instant at which the next byte may go.
    limit: Option<(f64, Mutex<Instant>)>,
}

impl Pacer {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        let limit = bytes_per_second.map(|limit| (limit.max(1) as f64, Mutex::new(Instant::now())));
        Self { limit }
    }

    /// Blocks the thread until `bytes` more may go.
    pub(crate) fn wait(&self, bytes: u64) {
        std::thread::sleep(self.book(bytes));
    }

    /// Returns when `bytes` more may go.
    pub(crate) async fn turn(&self, bytes: u64) {
        tokio::time::sleep(self.book(bytes)).await;
    }

    /// Gives `bytes` their turn, and says how long that is away.
    fn book(&self, bytes: u64) -> Duration {
        let Some((limit, next)) = &self.limit else { return Duration::ZERO };
        let now = Instant::now();
        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
        let go = (*next).max(now);
        *next = go + Duration::from_secs_f64(bytes as f64 / limit);
        go.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_packs_harder_on_an_idle_link_and_less_on_a_busy_machine() {
        let mut packer = Packer::new(Compress::Auto);
        let mut seen = Vec::new();
        for (idle, ratio) in [(0.9, 1.0), (0.8, 0.6), (0.3, 0.4), (0.05, 0.4), (0.05, 0.6)] {
            packer.decide(idle, ratio);
            seen.push(packer.codec);
        }
        assert_eq!(seen, [Codec::Lz4, Codec::Zstd, Codec::Zstd, Codec::Lz4, Codec::Raw]);
    }

    #[test]
    fn what_does_not_shrink_is_left_alone_for_a_while() {
        let mut packer = Packer::new(Compress::Auto);
        packer.decide(0.9, 1.0);
        packer.decide(0.9, 0.99);
        let windows = (0..).take_while(|_| {
            packer.decide(0.9, 1.0);
            packer.codec == Codec::Raw
        });
        assert_eq!(windows.count(), REST as usize - 1);
    }

    #[test]
    fn streams_share_one_limit() {
        let pacer = Pacer::new(Some(1 << 20));
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..4).for_each(|_| pacer.wait(32 << 10)));
            }
        });
        // The first may go at once; the other seven wait for those before them.
        let least = Duration::from_secs_f64(7.0 * 32.0 / 1024.0);
        assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
    }
}
