//! What the pager and its client say to each other: one protobuf message per packet of a
//! SOCK_SEQPACKET socket.
//!
//! ```text
//! client                                   pager
//!   │ ── Hello{version} ────────────────────▶ │  the first packet; a newer client replaces an older
//!   │ ◀── Welcome{next_slot} + the store ──── │  memfd by SCM_RIGHTS
//!   │ ── Put, Zero, Pending, InImages, … ───▶ │  not answered, taken in order
//!   │ ── Listen, Push, State, Missing, … ───▶ │  answered under the request's number
//!   │ ◀── answers, events (number 0) ──────── │
//! ```
//!
//! Requests are taken in the order they are sent, so an answer to `State` also says that every
//! `Put` before it has been taken. Numbers of fields are never used for something else; readers
//! pass over what they do not know. A packet that is no message ends the connection, nothing else.

use std::ops::RangeInclusive;

use prost::{Message, Oneof};

use crate::Space;

/// The versions of this protocol that both sides speak. The client asks for the newest first, and the pager refuses
/// one that it does not speak. A change that an older program would misunderstand makes a new version, and the one
/// before it stays for a release: a pager outlives the daemon that started it, upgrades included.
///
/// Since 2 there is `Share`. A pager that fills shared memory speaks no older one: a daemon that does not know of that would
/// take the pages for some that nobody asked for.
pub const VERSIONS: RangeInclusive<u32> = 1..=2;

/// The oldest that a pager speaks which fills shared memory.
pub(crate) const SHARES: u32 = 2;

/// Most entries of one packet, so that taking one never keeps a fault waiting for long.
pub(crate) const MAX_ENTRIES: usize = 256;

/// Largest packet, in bytes: [`MAX_ENTRIES`] entries of at most 48 bytes, and a path of 4 KiB.
pub(crate) const MAX_PACKET: usize = 20 * 1024;

/// Pages of one address space at the source.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Extent {
    /// The address space.
    #[prost(uint32, tag = "1")]
    pub space: Space,
    /// Address of the first page at the source.
    #[prost(uint64, tag = "2")]
    pub addr: u64,
    /// Number of pages.
    #[prost(uint64, tag = "3")]
    pub pages: u64,
}

/// Pages of one address space that are in the store.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Stored {
    /// The address space.
    #[prost(uint32, tag = "1")]
    pub space: Space,
    /// Address of the first page at the source.
    #[prost(uint64, tag = "2")]
    pub addr: u64,
    /// Number of pages.
    #[prost(uint64, tag = "3")]
    pub pages: u64,
    /// Slot of the first page in the store; the others follow it.
    #[prost(uint64, tag = "4")]
    pub slot: u64,
}

/// A process that CRIU has restored.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Restored {
    /// Its address space: its PID inside the service.
    #[prost(uint32, tag = "1")]
    pub space: Space,
    /// Its PID in the node's namespace.
    #[prost(uint32, tag = "2")]
    pub pid: u32,
}

/// Where a pager is.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct State {
    /// Live address spaces whose userfaultfd the pager holds, forked ones included.
    #[prost(uint64, tag = "1")]
    pub spaces: u64,
    /// Pages in the store.
    #[prost(uint64, tag = "2")]
    pub stored: u64,
    /// Pages that exist at the source only.
    #[prost(uint64, tag = "3")]
    pub pending: u64,
    /// Pages that were put into processes, counted once for every process.
    #[prost(uint64, tag = "4")]
    pub installed: u64,
    /// Faults that were answered.
    #[prost(uint64, tag = "5")]
    pub faults: u64,
    /// Pages that were asked for by a fault and have not come.
    #[prost(uint64, tag = "6")]
    pub waiting: u64,
    /// CRIU has said that the restore is finished.
    #[prost(bool, tag = "7")]
    pub restore_finished: bool,
    /// `Push` was received.
    #[prost(bool, tag = "8")]
    pub push: bool,
    /// Every page is where it belongs.
    #[prost(bool, tag = "9")]
    pub done: bool,
    /// Why the pager cannot go on, empty if it can.
    #[prost(string, tag = "10")]
    pub failed: String,
    /// Why the last restore failed, empty if it did not; [`Client::listen`](super::Client::listen)
    /// begins another.
    #[prost(string, tag = "11")]
    pub restore_failed: String,
}

/// A packet to the pager.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ToPager {
    /// The number that the answer bears.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    // 5 and 12 are taken: pagers that live have other requests there.
    #[prost(oneof = "Request", tags = "2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18")]
    pub request: Option<Request>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Request {
    #[prost(message, tag = "2")]
    Hello(Hello),
    #[prost(message, tag = "3")]
    Put(StoredList),
    #[prost(message, tag = "4")]
    Zero(ExtentList),
    #[prost(message, tag = "6")]
    Pending(ExtentList),
    #[prost(message, tag = "7")]
    Listen(Listen),
    #[prost(message, tag = "8")]
    Push(Nothing),
    #[prost(message, tag = "9")]
    State(Nothing),
    #[prost(message, tag = "10")]
    Missing(Nothing),
    #[prost(message, tag = "11")]
    Index(Nothing),
    #[prost(message, tag = "13")]
    Abandon(Nothing),
    #[prost(message, tag = "14")]
    InImages(ExtentList),
    #[prost(message, tag = "15")]
    Verify(RestoredList),
    #[prost(message, tag = "16")]
    WipedOnFork(ExtentList),
    #[prost(message, tag = "17")]
    Share(Share),
    #[prost(message, tag = "18")]
    LeaveOut(ExtentList),
}

/// A packet to the client: an answer, or an event under the number 0.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ToClient {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    #[prost(oneof = "Answer", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub answer: Option<Answer>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Answer {
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    #[prost(message, tag = "3")]
    Taken(Nothing),
    #[prost(string, tag = "4")]
    Refused(String),
    #[prost(message, tag = "5")]
    State(State),
    #[prost(message, tag = "6")]
    Extents(ExtentList),
    #[prost(message, tag = "7")]
    Stored(StoredList),
    // Events.
    #[prost(message, tag = "8")]
    RestoreFinished(Nothing),
    #[prost(string, tag = "9")]
    RestoreFailed(String),
    #[prost(message, tag = "10")]
    Fault(Extent),
    #[prost(message, tag = "11")]
    Done(Nothing),
    #[prost(string, tag = "12")]
    Failed(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct Nothing {}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub version: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Welcome {
    /// The first slot that was never used.
    #[prost(uint64, tag = "1")]
    pub next_slot: u64,
    /// The first slot that does not exist.
    #[prost(uint64, tag = "2")]
    pub slots: u64,
    #[prost(message, optional, tag = "3")]
    pub state: Option<State>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Listen {
    /// CRIU's work directory.
    #[prost(bytes = "vec", tag = "1")]
    pub directory: Vec<u8>,
}

/// Shared memory of which pages come after the restore.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Share {
    /// Its pages are those of this space, by their offset.
    #[prost(uint32, tag = "1")]
    pub space: Space,
    /// Where it can be opened.
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    /// Its bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExtentList {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Extent>,
    /// The list goes on in another packet under the same number.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StoredList {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Stored>,
    /// The list goes on in another packet under the same number.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RestoredList {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Restored>,
    /// More follow in another request.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_largest_list_fits_into_a_packet() {
        let entry = Stored { space: u32::MAX, addr: u64::MAX, pages: u64::MAX, slot: u64::MAX };
        let packet = ToPager {
            number: u64::MAX,
            request: Some(Request::Put(StoredList { entries: vec![entry; MAX_ENTRIES], more: true })),
        };
        assert!(packet.encoded_len() <= MAX_PACKET, "{}", packet.encoded_len());
    }

    #[test]
    fn a_packet_reads_back_as_it_was_written() {
        let entries = vec![Extent { space: 7, addr: 0x7f00_0000_0000, pages: 3 }];
        let packet =
            ToPager { number: 9, request: Some(Request::Pending(ExtentList { entries, more: false })) };
        assert_eq!(ToPager::decode(&packet.encode_to_vec()[..]).unwrap(), packet);
    }
}
