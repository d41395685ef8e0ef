//! What a process says about rest, at the fixed address [`godwit_isa_plan::RECORD`] of its memory, and the signal that
//! asks it (`isa/runtime/include/gw/rest.h`). Little endian:
//!
//! ```text
//!  0  u8[32]  identity of the build           52  u32  threads that do
//! 32  u8[8]   "GODWREST"                      56  u64  number of the rest
//! 40  u32     version: 1                      64  u64  nanoseconds from the request to rest
//! 44  u32     ready: requests are heard       72  u64  highest number that is over
//! 48  u32     resting: all threads stand still
//! ```

use std::time::Duration;

const MAGIC: &[u8; 8] = b"GODWREST";
const VERSION: u32 = 1;

/// What a process is asked for by a queued signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To come to rest: the one of this number.
    Rest(u32),
    /// To go on in place when it is at the rest of this number, and not to come to it any more.
    GoOn(u32),
}

impl Request {
    /// The signal: the runtime's own.
    pub const SIGNAL: i32 = 58;
    /// The `si_code` of the signal, which no call of a program's own gives it.
    pub const CODE: i32 = -58;

    /// The signal's `si_value`.
    #[must_use]
    pub fn value(self) -> u32 {
        match self {
            Self::Rest(number) => number << 2 | 1,
            Self::GoOn(number) => number << 2 | 2,
        }
    }

    /// The request that a signal with this code and value is, if it is one.
    #[must_use]
    pub fn of(signal: i32, code: i32, value: u32) -> Option<Self> {
        match (signal, code, value & 3) {
            (Self::SIGNAL, Self::CODE, 1) => Some(Self::Rest(value >> 2)),
            (Self::SIGNAL, Self::CODE, 2) => Some(Self::GoOn(value >> 2)),
            _ => None,
        }
    }
}

/// The record of a process that `godwit-cc` has built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Of which build it is: the same in the executables of all sets.
    pub identity: [u8; 32],
    /// Whether requests are heard. Before, the signal would end the process.
    pub ready: bool,
    /// The rest that it is at.
    pub rest: Option<Rest>,
    /// The highest number of a rest that it has heard of; at rest, or on its way to it, as long as that is above `over`.
    pub asked: u64,
    /// The highest number of a rest that is over or was taken back.
    pub over: u64,
}

/// A rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// Its number.
    pub number: u64,
    /// How many threads stand still.
    pub threads: u32,
    /// From the request's arrival until the last of them did.
    pub park_time: Duration,
}

/// A process has no record of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// There is something else at that address.
    #[error("the process was not built by godwit-cc")]
    Foreign,
    /// Of a later or an earlier godwit-cc.
    #[error(
        "the process was built by another version of godwit-cc: its record of rest has version {0}, not {VERSION}"
    )]
    Version(u32),
}

impl Record {
    /// How many bytes it has.
    pub const BYTES: usize = 80;

    /// Whether it is at rest, or on its way to one.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.asked > self.over
    }

    /// The number of the next rest to ask for; none when a request has no room for it, as after no number of rests that
    /// a process could have been at.
    #[must_use]
    pub fn next(&self) -> Option<u32> {
        u32::try_from(self.over).ok().filter(|over| *over < u32::MAX >> 2).map(|over| over + 1)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// When the bytes are none.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, RecordError> {
        let (identity, rest) = bytes.split_at(32);
        let (magic, rest) = rest.split_at(8);
        if magic != MAGIC {
            return Err(RecordError::Foreign);
        }
        let u32_at = |at: usize| rest[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let u64_at = |at: usize| rest[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if u32_at(0) != VERSION {
            return Err(RecordError::Version(u32_at(0)));
        }
        let (ready, asked, over) = (u32_at(4) != 0, u64_at(16), u64_at(32));
        let mut record = Self { identity: [0; 32], ready, rest: None, asked, over };
        record.identity.copy_from_slice(identity);
        // A rest that is over or was taken back is none, even if its threads have not noticed yet.
        if u32_at(8) != 0 && u64_at(16) > record.over {
            let park_time = Duration::from_nanos(u64_at(24));
            record.rest = Some(Rest { number: u64_at(16), threads: u32_at(12), park_time });
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(version: u32, resting: u32) -> [u8; Record::BYTES] {
        let mut bytes = [7; Record::BYTES];
        bytes[32..40].copy_from_slice(MAGIC);
        for (at, word) in [(40, version), (44, 1), (48, resting), (52, 3)] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[56..64].copy_from_slice(&9_u64.to_le_bytes());
        bytes[64..72].copy_from_slice(&1500_u64.to_le_bytes());
        bytes[72..80].copy_from_slice(&8_u64.to_le_bytes());
        bytes
    }

    #[test]
    fn a_record_says_what_the_process_is_at() {
        let resting = Record::decode(&record(VERSION, 1)).expect("it is one");
        let rest = Rest { number: 9, threads: 3, park_time: Duration::from_nanos(1500) };
        assert_eq!(resting, Record { identity: [7; 32], ready: true, rest: Some(rest), asked: 9, over: 8 });
        assert!(resting.is_asked() && Record { rest: None, ..resting }.is_asked());
        assert!(!Record { over: 9, ..resting }.is_asked());
        assert_eq!(resting.next(), Some(9));
        assert_eq!(Record { over: u64::MAX, ..resting }.next(), None);
        assert_eq!(Record { over: u64::from(u32::MAX >> 2), ..resting }.next(), None);
        assert_eq!(Record::decode(&record(VERSION, 0)).expect("it is one").rest, None);
        let mut over = record(VERSION, 1);
        over[72..80].copy_from_slice(&9_u64.to_le_bytes());
        assert_eq!(Record::decode(&over).expect("it is one").rest, None);
    }

    #[test]
    fn a_request_is_told_from_other_signals() {
        for request in [Request::Rest(7), Request::GoOn(7)] {
            assert_eq!(Request::of(58, -58, request.value()), Some(request));
        }
        for (signal, code, value) in [(57, -58, 5), (58, -1, 5), (58, -58, 4)] {
            assert_eq!(Request::of(signal, code, value), None, "{signal} {code} {value}");
        }
    }

    #[test]
    fn what_is_no_record_is_refused() {
        assert_eq!(Record::decode(&[0; Record::BYTES]), Err(RecordError::Foreign));
        assert_eq!(Record::decode(&record(2, 0)), Err(RecordError::Version(2)));
    }
}
