//! A writer that reaches all of the memory of a filled Redis, and knows every right answer.
//!
//! ```text
//!   fill:0    │ page │ page │ page │ page │      each request: BITFIELD fill:N INCRBY u32 #I 1
//!   fill:1    │ page │ page │ page │ page │      N and the page of its value at random, uniformly;
//!     …         ▲ four bytes that count          the answer is the new count
//! ```
//!
//! A request writes one page in place, so a thousand a second write nearly a thousand pages a second.
//! The count goes on from the bytes that the fill put there: a page that a move lost, repeated or
//! mixed up gives a wrong answer, when it is written next or when all is read back at the end.

use super::{
    redis::{VALUE, values_of},
    resp,
};

/// Bytes from one counter of a value to the next: those of a page.
const STEP: usize = 4096;
/// Counters of a value.
const COUNTERS: u64 = (VALUE / STEP) as u64;
/// `BITFIELD` counts in numbers of this many bytes.
const WIDTH: usize = size_of::<u32>();

/// What was written into the values of a fill: how often each counter was counted up.
#[derive(Clone, Debug)]
pub struct Writes {
    counts: Vec<u32>,
    random: u64,
}

impl Writes {
    /// Nothing was written yet to a fill of about `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        let counters = usize::try_from(values_of(bytes) * COUNTERS).unwrap_or(usize::MAX);
        Self { counts: vec![0; counters], random: 0 }
    }

    /// Appends the next request to `out`; returns its right answer.
    pub(super) fn request(&mut self, out: &mut Vec<u8>) -> i64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The upper half of a product is as uniform as its factor (Lemire 2019), without a division.
        let counters = self.counts.len() as u128;
        let chosen = (u128::from(mixed(self.random)) * counters) >> u64::BITS;
        let chosen = usize::try_from(chosen).unwrap_or(0);
        let (number, counter) = (chosen as u64 / COUNTERS, chosen as u64 % COUNTERS);
        let key = format!("fill:{number}");
        let place = format!("#{}", counter * (STEP / WIDTH) as u64);
        resp::encode(out, &[b"BITFIELD", key.as_bytes(), b"INCRBY", b"u32", place.as_bytes(), b"1"]);
        let Some(count) = self.counts.get_mut(chosen) else { return 0 };
        *count = count.wrapping_add(1);
        i64::from(first(number, counter).wrapping_add(*count))
    }

    /// The value number `number` of the fill with what was written to it.
    pub(super) fn apply(&self, number: u64, value: &mut [u8]) {
        for counter in 0..COUNTERS {
            let index = usize::try_from(number * COUNTERS + counter).unwrap_or(usize::MAX);
            let at = usize::try_from(counter).unwrap_or(0) * STEP;
            if let (Some(count), Some(bytes)) = (self.counts.get(index), value.get_mut(at..at + WIDTH)) {
                bytes.copy_from_slice(&first(number, counter).wrapping_add(*count).to_be_bytes());
            }
        }
    }

    /// How many pages' worth of counters were written at least once.
    pub fn touched(&self) -> usize {
        self.counts.iter().filter(|count| **count > 0).count()
    }
}

/// What the fill put where this counter is.
fn first(number: u64, counter: u64) -> u32 {
    // The value's eight bytes at that place, of which the first four count.
    let eight = word(number, counter * (STEP / size_of::<u64>()) as u64);
    let [a, b, c, d, ..] = eight.to_le_bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// Eight bytes of the value stored under `fill:<number>`: the same each time, and without a pattern.
pub(super) fn word(number: u64, index: u64) -> u64 {
    mixed(number.wrapping_mul(0x0001_0000_0001).wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mixed(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_all_pages_about_evenly() {
        let mut writes = Writes::new(1 << 20);
        let mut out = Vec::new();
        for _ in 0..25_600 {
            writes.request(&mut out);
            out.clear();
        }
        assert_eq!(writes.counts.len(), 256);
        assert_eq!(writes.touched(), 256);
        // A hundred each, with a standard deviation of ten.
        assert!(writes.counts.iter().all(|count| (50..150).contains(count)), "{:?}", writes.counts);
    }

    #[test]
    fn the_answers_are_those_of_the_value_that_is_read_back() {
        let mut writes = Writes::new(VALUE as u64);
        let mut answers = Vec::new();
        for _ in 0..40 {
            answers.push(writes.request(&mut Vec::new()));
        }
        let mut value = super::super::redis::value(0);
        writes.apply(0, &mut value);
        for counter in 0..4 {
            let at = counter * STEP;
            let seen = u32::from_be_bytes(value[at..at + 4].try_into().unwrap());
            assert!(answers.contains(&i64::from(seen)), "{seen} {answers:?}");
        }
    }
}
