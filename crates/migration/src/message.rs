//! What source and destination say to each other on their data connection.
//!
//! ```text
//! source                                   destination
//!   │ Open ─────────────────────────────────► │  checks name, address, memory, disk, layers
//!   │ ◄──────────────────── Accepted | Refused│  journal: reserved
//!   │ ◄────────── RetainedPages… RetainedEnd  │  where the service has been there before
//!   │ (further connections, each) Join ─────► │  streams for pages, one for faults
//!   │ LayerBegin LayerData… LayerEnd ───────► │  per missing layer
//!   │ ◄─────────────────────────── LayerStored│
//!   │ TreeBegin TreeItem… TreeEnd ──────────► │  changed files, while the service runs
//!   │ ◄─────────────────────────── TreeApplied│
//!   │ LogData… OldLogData… LogRotated… ─────► │  the log so far, now or later
//!   │ (streams) Pages… ─────────────────────► │  rounds of memory, while the service runs, or
//!   │ Pending… PendingEnd ──────────────────► │  only the names of pages that will come later
//!   │ ◄──────────────────────────── PendingEnd│
//!   │ TreeAgain TreeItem… TreeEnd ──────────► │  files changed since, while it still runs
//!   │ ◄─────────────────────────── TreeApplied│
//!   │ (journal: frozen; freeze, close port)   │
//!   │ Pending… PendingEnd ──────────────────► │  the others that are still to come
//!   │ ◄──────────────────────────── PendingEnd│
//!   │ (streams) Pages… PagesEnd ────────────► │  they come now, beside all that follows, or stay
//!   │ TreeBegin TreeItem… TreeEnd ──────────► │  files changed since
//!   │ LogData… ImageData… ImagesEnd ────────► │
//!   │ ◄─────────────────────── ImagesReceived │  restores, all processes stopped
//!   │ ◄──────────────────────────────── Step… │  to a source that has asked for them in Open
//!   │ ◄────────── (fault stream) FaultRequest │  for what the restore or a process waits for
//!   │ (fault stream) Pages ─────────────────► │
//!   │ ◄───────────────────────────── Restored │  journal: restored
//!   │ (journal: COMMITTED, the commit point;  │
//!   │  SERVING where pages have stayed)       │
//!   │ Commit ───────────────────────────────► │  journal: committed; opens port, continues
//!   │ ◄────────────────────────────── Running │
//!
//! only where pages have stayed:
//!   │ (streams) Pages… PagesEnd ────────────► │
//!   │ ◄───────────────────────────── Received │  the source lets go
//!
//! when the connection broke before Received, over new ones:
//!   │ Resume ───────────────────────────────► │
//!   │ ◄──────────────── Missing… MissingEnd   │  and on as above
//! ```
//! Either side may send `Abort` before the commit. `Heartbeat` goes out after a second without
//! other frames, so that a cut link shows as silence. Frame kinds are fixed numbers and are never
//! given a second meaning; 0 is invalid. Versions are compared in `Open`.

use bytes::Bytes;
use godwit_memory::{PAGE_SIZE, Range, Space};
use godwit_transfer::frame::SELF_CHECKED;
use prost::Message as _;

pub use crate::step::{Reached, Step};
use crate::terms::OverlayTerms;

/// The version of this conversation; both sides must speak the same.
pub const PROTOCOL_VERSION: u32 = 3;

/// The source's request.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Open {
    /// [`PROTOCOL_VERSION`] of the source.
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// The migration.
    #[prost(string, tag = "2")]
    pub migration: String,
    /// The service ([`crate::Service`]) as JSON.
    #[prost(string, tag = "3")]
    pub service: String,
    /// Resident memory now, bytes.
    #[prost(uint64, tag = "4")]
    pub memory_bytes: u64,
    /// Upper bound of the images' size, bytes.
    #[prost(uint64, tag = "5")]
    pub images_bytes: u64,
    /// Changed files, bytes.
    #[prost(uint64, tag = "6")]
    pub tree_bytes: u64,
    /// Layers of the root filesystem, lowest first.
    #[prost(message, repeated, tag = "7")]
    pub layers: Vec<Layer>,
    /// `uname -m` of the source.
    #[prost(string, tag = "8")]
    pub machine: String,
    /// CPU feature flags of the source that programs may have chosen code by.
    #[prost(string, repeated, tag = "9")]
    pub cpu_flags: Vec<String>,
    /// Connections that will bring pages.
    #[prost(uint32, tag = "10")]
    pub streams: u32,
    /// The source's overlay; nothing from a node that cannot tell.
    #[prost(message, optional, tag = "11")]
    pub overlay: Option<OverlayTerms>,
    /// The identity of the source's journal, by which a destination in doubt knows whom it asks; empty from a
    /// node of an older version.
    #[prost(string, tag = "12")]
    pub journal: String,
    /// The source's CRIU; nothing from a node that does not tell.
    #[prost(message, optional, tag = "40")]
    pub criu: Option<CriuVersion>,
    /// The source's time of day, milliseconds since 1970; 0 from a node that does not tell.
    #[prost(int64, tag = "41")]
    pub now_ms: i64,
    /// Whether the source understands [`Message::Step`].
    #[prost(bool, tag = "42")]
    pub steps: bool,
}

/// A release of CRIU: the dump of a newer one cannot be restored by an older one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, prost::Message)]
pub struct CriuVersion {
    /// Major number.
    #[prost(uint32, tag = "1")]
    pub major: u32,
    /// Minor number.
    #[prost(uint32, tag = "2")]
    pub minor: u32,
    /// Sublevel.
    #[prost(uint32, tag = "3")]
    pub sublevel: u32,
}

impl From<godwit_criu::Version> for CriuVersion {
    fn from(version: godwit_criu::Version) -> Self {
        Self { major: version.major, minor: version.minor, sublevel: version.sublevel }
    }
}

impl CriuVersion {
    /// Why images of this CRIU on node `theirs` cannot be restored by `other` on node `ours`, if they cannot.
    #[must_use]
    pub fn objection(self, theirs: &str, other: godwit_criu::Version, ours: &str) -> Option<String> {
        let own =
            godwit_criu::Version { major: self.major, minor: self.minor, sublevel: self.sublevel, series: 0 };
        (Self::from(other) < self).then(|| {
            format!(
                "it has CRIU {other}, older than {own} on node {theirs}, whose dumps it cannot restore; run scripts/setup on node {ours}"
            )
        })
    }
}

/// A layer the service stands on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Layer {
    /// `sha256:…`
    #[prost(string, tag = "1")]
    pub digest: String,
    /// Size of the blob; 0 when the source cannot send it.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
}

/// The destination holds room, and names what it lacks.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Accepted {
    /// Digests to send.
    #[prost(string, repeated, tag = "1")]
    pub missing_layers: Vec<String>,
    /// Whether processes can be restored here before their pages are in place.
    #[prost(bool, tag = "2")]
    pub userfaultfd: bool,
    /// Whether the pages follow that were retained when the service left the destination.
    #[prost(bool, tag = "3")]
    pub retained: bool,
    /// Whether the CRIU here finds TCP connections in the image of the files.
    #[prost(bool, tag = "4")]
    pub tcp_inline: bool,
    /// The key of these pages' hashes: 192 bytes, or none where nothing was retained.
    #[prost(bytes = "bytes", tag = "5")]
    pub key: Bytes,
    /// Whether this node takes the log, and further rounds of files, while the service runs.
    #[prost(bool, tag = "6")]
    pub ahead: bool,
    /// The most memory that its kernel gives a process in one piece, bytes; 0 where that has no bound, and from a
    /// node that does not tell.
    #[prost(uint64, tag = "40")]
    pub most_at_once: u64,
    /// Whether the CRIU here maps reservations as they were.
    #[prost(bool, tag = "41")]
    pub keeps_rights: bool,
}

/// Pages of an earlier visit that the destination still has: hashes of 64 pages, 16 bytes each; all
/// zeroes where it has none.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RetainedPages {
    /// The space.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// The first page's number, divided by 64.
    #[prost(uint64, tag = "2")]
    pub leaf: u64,
    /// XXH3 with the key of [`Accepted`], 128 bits, little-endian.
    #[prost(bytes = "vec", tag = "3")]
    pub hashes: Vec<u8>,
}

/// First on a further connection of a migration.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Join {
    /// The migration.
    #[prost(string, tag = "1")]
    pub migration: String,
    /// What the connection is for.
    #[prost(enumeration = "Purpose", tag = "2")]
    pub purpose: i32,
}

/// What a further connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Purpose {
    /// Nothing known.
    Unknown = 0,
    /// Pages, in order.
    Pages = 1,
    /// Pages that a process waits for.
    Faults = 2,
}

/// First from the source after a break: it still has pages of this migration.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Resume {
    /// The migration.
    #[prost(string, tag = "1")]
    pub migration: String,
}

/// Pages of one space, by number.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PageRanges {
    /// The space.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// First page and number of pages of each range, one after the other.
    #[prost(uint64, repeated, tag = "2")]
    pub ranges: Vec<u64>,
}

impl PageRanges {
    /// These ranges of addresses of a space.
    pub fn encode(space: Space, ranges: impl IntoIterator<Item = Range>) -> Self {
        let pair = |range: Range| [range.start / PAGE_SIZE, (range.end - range.start) / PAGE_SIZE];
        Self { space, ranges: ranges.into_iter().flat_map(pair).collect() }
    }

    /// The ranges of addresses, if they are such.
    #[must_use]
    pub fn decode(&self) -> Option<Vec<Range>> {
        let (pairs, []) = self.ranges.as_chunks::<2>() else { return None };
        let range = |[page, pages]: &[u64; 2]| {
            let start = page.checked_mul(PAGE_SIZE)?;
            let end = start.checked_add(pages.checked_mul(PAGE_SIZE)?)?;
            (start < end).then_some(start..end)
        };
        pairs.iter().map(range).collect()
    }
}

/// A page that a process waits for.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FaultRequest {
    /// The space.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// The page's number.
    #[prost(uint64, tag = "2")]
    pub page: u64,
}

/// The destination will not take the service: every reason at once.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Refused {
    /// Sentences.
    #[prost(string, repeated, tag = "1")]
    pub reasons: Vec<String>,
}

/// Part of a CRIU image file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageData {
    /// File name inside the image directory.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Where the data belongs.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// The bytes.
    #[prost(bytes = "bytes", tag = "3")]
    pub data: Bytes,
}

/// All images are sent.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImagesEnd {
    /// Every file with its final length, so that nothing can be missing unseen.
    #[prost(message, repeated, tag = "1")]
    pub files: Vec<ImageFile>,
    /// Processes that were stopped by a signal before the dump, by PID inside the container.
    #[prost(uint32, repeated, tag = "2")]
    pub keep_stopped: Vec<u32>,
}

/// One image file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageFile {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its length.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
}

/// A sentence for the other side.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Reason {
    /// Why.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// What the destination's network did when the service went on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Running {
    /// How long it took, microseconds.
    #[prost(uint32, tag = "1")]
    pub cutover_us: u32,
    /// Frames that had come for it and were handed in.
    #[prost(uint64, tag = "2")]
    pub held_frames: u64,
    /// Frames for which there was no room.
    #[prost(uint64, tag = "3")]
    pub held_dropped: u64,
}

/// One frame's meaning.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Still there.
    Heartbeat,
    /// First from the source.
    Open(Open),
    /// First from the destination.
    Accepted(Accepted),
    /// First and last from the destination.
    Refused(Refused),
    /// A layer's blob follows.
    LayerBegin(Layer),
    /// Part of the blob, in order.
    LayerData(Bytes),
    /// The blob is complete.
    LayerEnd,
    /// It is verified and unpacked.
    LayerStored,
    /// A round of changed files follows.
    TreeBegin,
    /// As `TreeBegin`, of a service that still runs: another round will follow.
    TreeAgain,
    /// An encoded [`godwit_engine::tree::Item`].
    TreeItem(Bytes),
    /// The round is complete.
    TreeEnd,
    /// It is applied.
    TreeApplied,
    /// Part of the service's log, in order.
    LogData(Bytes),
    /// Part of the log's older file, in order.
    OldLogData(Bytes),
    /// What came of the log is its older file from now on, in place of what was, and it begins anew.
    LogRotated,
    /// Part of an image.
    ImageData(ImageData),
    /// All images are sent.
    ImagesEnd(ImagesEnd),
    /// Every image is here and whole.
    ImagesReceived,
    /// What the destination has begun to do.
    Step(Reached),
    /// The stopped copy is complete.
    Restored,
    /// Ownership has passed.
    Commit,
    /// The service runs at the destination.
    Running(Running),
    /// No: the service stays at the source.
    Abort(Reason),
    /// First on a further connection.
    Join(Join),
    /// An encoded [`godwit_memory::batch::Batch`].
    Pages(Bytes),
    /// The stream has brought all.
    PagesEnd,
    /// Pages that are still to come.
    Pending(PageRanges),
    /// All of those are named; and noted, in the other direction.
    PendingEnd,
    /// A page is wanted now.
    FaultRequest(FaultRequest),
    /// First from the source after a break.
    Resume(Resume),
    /// Pages that the destination still lacks.
    Missing(PageRanges),
    /// All of those are named.
    MissingEnd,
    /// Pages of an earlier visit.
    RetainedPages(RetainedPages),
    /// All of those are named.
    RetainedEnd,
    /// Nothing at the source is needed any more.
    Received,
}

/// Why a frame could not be understood.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// A number this version does not know.
    #[error("a frame of unknown kind {0} came; both nodes must run the same version of godwit")]
    UnknownKind(u16),
    /// Not what its kind says.
    #[error("a frame of kind {kind} is damaged")]
    Damaged {
        /// The frame's kind.
        kind: u16,
        /// What the decoder said.
        #[source]
        source: prost::DecodeError,
    },
}

impl Message {
    /// The frame's kind.
    #[must_use]
    pub fn kind(&self) -> u16 {
        match self {
            Self::Heartbeat => 1,
            Self::Open(_) => 2,
            Self::Accepted(_) => 3,
            Self::Refused(_) => 4,
            Self::LayerBegin(_) => 5,
            Self::LayerData(_) => 6,
            Self::LayerEnd => 7,
            Self::LayerStored => 8,
            Self::TreeBegin => 9,
            Self::TreeItem(_) => 10,
            Self::TreeEnd => 11,
            Self::TreeApplied => 12,
            Self::LogData(_) => 13,
            Self::ImageData(_) => 14,
            Self::ImagesEnd(_) => 15,
            Self::Restored => 16,
            Self::Commit => 17,
            Self::Running(_) => 18,
            Self::Abort(_) => 19,
            Self::ImagesReceived => 20,
            Self::OldLogData(_) => 21,
            Self::Join(_) => 22,
            Self::Pages(_) => 23,
            Self::PagesEnd => 24,
            Self::Pending(_) => 25,
            Self::PendingEnd => 26,
            Self::FaultRequest(_) => 27,
            Self::Resume(_) => 28,
            Self::Missing(_) => 29,
            Self::MissingEnd => 30,
            Self::RetainedPages(_) => 32,
            Self::RetainedEnd => 33,
            Self::Received => 31,
            Self::Step(_) => 34,
            Self::LogRotated => 35,
            Self::TreeAgain => 36,
        }
    }

    /// The frame's payload.
    #[must_use]
    pub fn payload(&self) -> Bytes {
        match self {
            Self::Open(m) => m.encode_to_vec().into(),
            Self::Accepted(m) => m.encode_to_vec().into(),
            Self::Refused(m) => m.encode_to_vec().into(),
            Self::LayerBegin(m) => m.encode_to_vec().into(),
            Self::ImageData(m) => m.encode_to_vec().into(),
            Self::ImagesEnd(m) => m.encode_to_vec().into(),
            Self::Abort(m) => m.encode_to_vec().into(),
            Self::Resume(m) => m.encode_to_vec().into(),
            Self::Join(m) => m.encode_to_vec().into(),
            Self::FaultRequest(m) => m.encode_to_vec().into(),
            Self::RetainedPages(m) => m.encode_to_vec().into(),
            Self::Running(m) => m.encode_to_vec().into(),
            Self::Step(m) => m.encode_to_vec().into(),
            Self::Pending(m) | Self::Missing(m) => m.encode_to_vec().into(),
            Self::LayerData(data)
            | Self::TreeItem(data)
            | Self::LogData(data)
            | Self::OldLogData(data)
            | Self::Pages(data) => data.clone(),
            _ => Bytes::new(),
        }
    }

    /// The frame's flags: batches of pages have a checksum of their own, which is looked at when they are
    /// unpacked.
    #[must_use]
    pub fn flags(&self) -> u16 {
        match self {
            Self::Pages(_) => SELF_CHECKED,
            _ => 0,
        }
    }

    /// What a frame says.
    pub fn decode(kind: u16, payload: Bytes) -> Result<Self, MessageError> {
        fn typed<M: prost::Message + Default>(kind: u16, payload: Bytes) -> Result<M, MessageError> {
            M::decode(payload).map_err(|source| MessageError::Damaged { kind, source })
        }
        Ok(match kind {
            1 => Self::Heartbeat,
            2 => Self::Open(typed(kind, payload)?),
            3 => Self::Accepted(typed(kind, payload)?),
            4 => Self::Refused(typed(kind, payload)?),
            5 => Self::LayerBegin(typed(kind, payload)?),
            6 => Self::LayerData(payload),
            7 => Self::LayerEnd,
            8 => Self::LayerStored,
            9 => Self::TreeBegin,
            10 => Self::TreeItem(payload),
            11 => Self::TreeEnd,
            12 => Self::TreeApplied,
            13 => Self::LogData(payload),
            14 => Self::ImageData(typed(kind, payload)?),
            15 => Self::ImagesEnd(typed(kind, payload)?),
            16 => Self::Restored,
            17 => Self::Commit,
            18 => Self::Running(typed(kind, payload)?),
            19 => Self::Abort(typed(kind, payload)?),
            20 => Self::ImagesReceived,
            21 => Self::OldLogData(payload),
            22 => Self::Join(typed(kind, payload)?),
            23 => Self::Pages(payload),
            24 => Self::PagesEnd,
            25 => Self::Pending(typed(kind, payload)?),
            26 => Self::PendingEnd,
            27 => Self::FaultRequest(typed(kind, payload)?),
            28 => Self::Resume(typed(kind, payload)?),
            29 => Self::Missing(typed(kind, payload)?),
            30 => Self::MissingEnd,
            32 => Self::RetainedPages(typed(kind, payload)?),
            33 => Self::RetainedEnd,
            31 => Self::Received,
            34 => Self::Step(typed(kind, payload)?),
            35 => Self::LogRotated,
            36 => Self::TreeAgain,
            other => return Err(MessageError::UnknownKind(other)),
        })
    }

    /// The message's name, for errors.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Heartbeat => "Heartbeat",
            Self::Open(_) => "Open",
            Self::Accepted(_) => "Accepted",
            Self::Refused(_) => "Refused",
            Self::LayerBegin(_) => "LayerBegin",
            Self::LayerData(_) => "LayerData",
            Self::LayerEnd => "LayerEnd",
            Self::LayerStored => "LayerStored",
            Self::TreeBegin => "TreeBegin",
            Self::TreeItem(_) => "TreeItem",
            Self::TreeEnd => "TreeEnd",
            Self::TreeApplied => "TreeApplied",
            Self::LogData(_) => "LogData",
            Self::ImageData(_) => "ImageData",
            Self::ImagesEnd(_) => "ImagesEnd",
            Self::Restored => "Restored",
            Self::Commit => "Commit",
            Self::Running(_) => "Running",
            Self::Abort(_) => "Abort",
            Self::ImagesReceived => "ImagesReceived",
            Self::OldLogData(_) => "OldLogData",
            Self::Join(_) => "Join",
            Self::Pages(_) => "Pages",
            Self::PagesEnd => "PagesEnd",
            Self::Pending(_) => "Pending",
            Self::PendingEnd => "PendingEnd",
            Self::FaultRequest(_) => "FaultRequest",
            Self::Resume(_) => "Resume",
            Self::Missing(_) => "Missing",
            Self::MissingEnd => "MissingEnd",
            Self::RetainedPages(_) => "RetainedPages",
            Self::RetainedEnd => "RetainedEnd",
            Self::Received => "Received",
            Self::Step(_) => "Step",
            Self::LogRotated => "LogRotated",
            Self::TreeAgain => "TreeAgain",
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_older_criu_at_the_destination_is_said_with_both_versions() {
        let version = |major, minor, sublevel| godwit_criu::Version { major, minor, sublevel, series: 0 };
        let source = CriuVersion::from(version(4, 2, 1));
        assert_eq!(source.objection("a", version(4, 2, 1), "b"), None);
        assert_eq!(source.objection("a", version(4, 10, 0), "b"), None);
        let said = source.objection("a", version(4, 1, 1), "b").unwrap();
        assert!(
            said.contains("CRIU 4.1.1, older than 4.2.1 on node a") && said.contains("on node b"),
            "{said}"
        );
    }

    fn every_message() -> Vec<Message> {
        let layer = Layer { digest: "sha256:00".into(), bytes: 7 };
        let ranges = PageRanges { space: 1, ranges: vec![7, 2, 1 << 40, 1] };
        let image = ImageData { name: "pages-1.img".into(), offset: 4096, data: Bytes::from_static(b"page") };
        vec![
            Message::Heartbeat,
            Message::Open(Open { protocol: PROTOCOL_VERSION, migration: "01A".into(), ..Open::default() }),
            Message::Accepted(Accepted {
                missing_layers: vec!["sha256:00".into()],
                userfaultfd: true,
                retained: false,
                tcp_inline: true,
                key: Bytes::from_static(b"key"),
                ahead: true,
                most_at_once: 7 << 40,
                keeps_rights: true,
            }),
            Message::Refused(Refused { reasons: vec!["no room".into()] }),
            Message::LayerBegin(layer),
            Message::LayerData(Bytes::from_static(b"layer")),
            Message::LayerEnd,
            Message::LayerStored,
            Message::TreeBegin,
            Message::TreeItem(Bytes::from_static(b"item")),
            Message::TreeEnd,
            Message::TreeApplied,
            Message::LogData(Bytes::from_static(b"log")),
            Message::OldLogData(Bytes::from_static(b"older")),
            Message::ImageData(image),
            Message::ImagesEnd(ImagesEnd { files: vec![], keep_stopped: vec![4] }),
            Message::ImagesReceived,
            Message::Step(Reached { step: Step::Restoring.into() }),
            Message::LogRotated,
            Message::TreeAgain,
            Message::Restored,
            Message::Commit,
            Message::Running(Running { cutover_us: 700, held_frames: 100, held_dropped: 1 }),
            Message::Abort(Reason { reason: "cancelled".into() }),
            Message::Join(Join { migration: "01A".into(), purpose: Purpose::Faults.into() }),
            Message::Pages(Bytes::from_static(b"batch")),
            Message::PagesEnd,
            Message::Pending(ranges.clone()),
            Message::PendingEnd,
            Message::FaultRequest(FaultRequest { space: 1, page: 9 }),
            Message::Resume(Resume { migration: "01A".into() }),
            Message::Missing(ranges),
            Message::MissingEnd,
            Message::RetainedPages(RetainedPages { space: 1, leaf: 2, hashes: vec![0; 32] }),
            Message::RetainedEnd,
            Message::Received,
        ]
    }

    #[test]
    fn ranges_arrive_as_they_were_sent_and_others_are_refused() {
        let ranges = [0x1000..0x3000, 0x9000..0xa000];
        assert_eq!(PageRanges::encode(1, ranges.clone()).decode().unwrap(), ranges);
        for bad in [&[1][..], &[1, 0], &[u64::MAX, 1], &[1, u64::MAX], &[1, 2, 3]] {
            assert_eq!(PageRanges { space: 1, ranges: bad.to_vec() }.decode(), None, "{bad:?}");
        }
    }

    #[test]
    fn every_message_arrives_as_it_was_sent_under_a_number_of_its_own() {
        let mut kinds = std::collections::BTreeSet::new();
        for message in every_message() {
            assert!(kinds.insert(message.kind()), "{} shares its number", message.name());
            assert_eq!(Message::decode(message.kind(), message.payload()).unwrap(), message);
        }
        assert!(!kinds.contains(&0), "0 is invalid");
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_refused_or_understood_but_never_a_panic(kind: u16, payload: Vec<u8>) {
            let known = every_message().iter().any(|message| message.kind() == kind);
            let decoded = Message::decode(kind, payload.into());
            prop_assert!(known || matches!(decoded, Err(MessageError::UnknownKind(_))));
        }
    }
}
