//! What source and destination say to each other on their data connection.
//!
//! ```text
//! source                                   destination
//!   │ Open ─────────────────────────────────► │  checks name, address, memory, disk, layers
//!   │ ◄──────────────────── Accepted | Refused│  journal: reserved
//!   │ ◄────────── RetainedPages… RetainedEnd  │  where the service has been there before
//!   │ (further connections, each) Join ─────► │  streams for pages, one for faults
//!   │ ◄──────────────────────── StillLacking  │  where it asks the image's registry first
//!   │ LayerBegin LayerData… LayerEnd ───────► │  per missing layer, the next before the one before is stored
//!   │ ◄─────────────────────────── LayerStored│  per layer, as far as Accepted allows that
//!   │ TellFiles ────────────────────────────► │  where Accepted says that files are there, of which the source
//!   │ ◄────── FilesHere FileHere… FilesHereEnd│  does not know
//!   │ TreeBegin TreeItem… TreeEnd ──────────► │  changed files, while the service runs; onto those that are
//!   │                                         │  there: TreeOnto in place of TreeBegin
//!   │ ◄─────────────────────────── TreeApplied│
//!   │ LogData… OldLogData… LogRotated… ─────► │  the log so far, now or later
//!   │ Segments ─────────────────────────────► │  shared memory that comes over the streams, too
//!   │ ◄────────────────────────── SegmentsMade│
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
//!   │ TmpfsBegin TreeItem… TreeEnd ─────────► │  per tmpfs whose contents came over the streams: its names
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
//!
//! where the source only asks (Ask in place of Open), and nothing is reserved, it may measure the link or prepare a move:
//!   │ Probe… ProbeEnd ──────────────────────► │
//!   │ ◄───────────────────────────── ProbeEnd │
//!   │ Prepare ──────────────────────────────► │  reserves memory
//!   │ ◄──── Accepted RetainedPages… | Refused │
//!   │ LayerBegin… ──────────────────────────► │  as above
//!   │ TellFiles ────────────────────────────► │  as above
//!   │ (TreeBegin | TreeOnto) TreeItem… TreeEnd│  changed files, onto what is there
//!   │ ◄──────────────────────────── FilesKept │
//!   │ (streams) Pages… PagesEnd ────────────► │
//!   │ Retain ───────────────────────────────► │
//!   │ ◄──────────────────────────── RetainEnd │  layers, files and pages stay, in no journal
//! ```
//! Either side may send `Abort` before the commit. `Heartbeat` goes out after a second without
//! other frames, so that a cut link shows as silence. Frame kinds are fixed numbers and are never
//! given a second meaning; 0 is invalid. `Open` offers a range of versions, and `Accepted` names the chosen one.

mod contents;
mod versions;

use bytes::Bytes;
use godwit_transfer::frame::SELF_CHECKED;
use prost::Message as _;

pub use self::contents::{
    Accepted, CriuVersion, FaultRequest, FilesHere, FilesKept, ImageData, ImageFile, ImagesEnd, Join, Layer,
    MOST_TMPFS_NAMES, Open, PageRanges, Purpose, Reason, Refused, Resume, RetainEnd, RetainedPages, Running,
    Segments, SharedSegment, StillLacking, TmpfsBegin,
};
pub use self::versions::{OLDEST_PROTOCOL_VERSION, Versions};
pub use crate::step::{Reached, Step};

/// The newest version of this conversation that is spoken; see [`Versions`].
pub const PROTOCOL_VERSION: u32 = 3;

/// Makes [`Message`] out of a table of frame kinds, each with its number and name, in three groups: they carry nothing, an
/// encoded struct of `contents.rs`, or bytes as they are.
macro_rules! messages {
    (
        nothing { $($(#[$bare_doc:meta])* $bare_kind:literal $bare:ident,)* }
        encoded { $($(#[$encoded_doc:meta])* $encoded_kind:literal $encoded:ident($content:ty),)* }
        bytes { $($(#[$bytes_doc:meta])* $bytes_kind:literal $bytes:ident(Bytes),)* }
    ) => {
        /// One frame's meaning.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Message {
            $($(#[$bare_doc])* $bare,)*
            $($(#[$encoded_doc])* $encoded($content),)*
            $($(#[$bytes_doc])* $bytes(Bytes),)*
        }

        #[cfg(test)]
        const KINDS: &[u16] = &[$($bare_kind,)* $($encoded_kind,)* $($bytes_kind,)*];

        impl Message {
            /// The frame's kind.
            #[must_use]
            pub fn kind(&self) -> u16 {
                match self {
                    $(Self::$bare => $bare_kind,)*
                    $(Self::$encoded(_) => $encoded_kind,)*
                    $(Self::$bytes(_) => $bytes_kind,)*
                }
            }

            /// The message's name, for errors.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$bare => stringify!($bare),)*
                    $(Self::$encoded(_) => stringify!($encoded),)*
                    $(Self::$bytes(_) => stringify!($bytes),)*
                }
            }

            /// The frame's payload.
            #[must_use]
            pub fn payload(&self) -> Bytes {
                match self {
                    $(Self::$bare => Bytes::new(),)*
                    $(Self::$encoded(content) => content.encode_to_vec().into(),)*
                    $(Self::$bytes(data) => data.clone(),)*
                }
            }

            /// What a frame says.
            pub fn decode(kind: u16, payload: Bytes) -> Result<Self, MessageError> {
                let damaged = |source| MessageError::Damaged { kind, source };
                Ok(match kind {
                    $($bare_kind => Self::$bare,)*
                    $($encoded_kind => Self::$encoded(prost::Message::decode(payload).map_err(damaged)?),)*
                    $($bytes_kind => Self::$bytes(payload),)*
                    other => return Err(MessageError::UnknownKind(other)),
                })
            }
        }
    };
}

messages! {
    nothing {
        /// Still there.
        1 Heartbeat,
        /// A layer's blob is complete.
        7 LayerEnd,
        /// A layer is verified and unpacked.
        8 LayerStored,
        /// A round of changed files follows.
        9 TreeBegin,
        /// The round of changed files is complete.
        11 TreeEnd,
        /// The round of changed files is applied.
        12 TreeApplied,
        /// The stopped copy is complete.
        16 Restored,
        /// Ownership has passed.
        17 Commit,
        /// Every image is here and whole.
        20 ImagesReceived,
        /// The stream has brought all.
        24 PagesEnd,
        /// All pages that are still to come are named; and noted, in the other direction.
        26 PendingEnd,
        /// All pages that the destination still lacks are named.
        30 MissingEnd,
        /// Nothing at the source is needed any more.
        31 Received,
        /// All pages of an earlier visit are named.
        33 RetainedEnd,
        /// What came of the log is its older file from now on, in place of what was, and it begins anew.
        35 LogRotated,
        /// The destination has made the segments of shared memory that were named last.
        37 SegmentsMade,
        /// All that was sent to measure the link is sent; and has come, in the other direction.
        41 ProbeEnd,
        /// As `TreeBegin`, of a service that still runs: another round will follow.
        36 TreeAgain,
        /// All layers and pages of a preparation have come.
        43 Retain,
        /// After an answered `Ask`: layers and pages will follow, to be there for a migration that may follow.
        45 Prepare,
        /// As `TreeBegin`, onto files that are there.
        50 TreeOnto,
        /// The source wants to know which files are there.
        52 TellFiles,
        /// All files are named that are there.
        55 FilesHereEnd,
    }
    encoded {
        /// First from the source.
        2 Open(Open),
        /// First from the destination.
        3 Accepted(Accepted),
        /// First and last from the destination.
        4 Refused(Refused),
        /// A layer's blob follows.
        5 LayerBegin(Layer),
        /// Part of an image.
        14 ImageData(ImageData),
        /// All images are sent.
        15 ImagesEnd(ImagesEnd),
        /// The service runs at the destination.
        18 Running(Running),
        /// The migration is aborted: the service stays at the source.
        19 Abort(Reason),
        /// First on a further connection.
        22 Join(Join),
        /// Pages that are still to come.
        25 Pending(PageRanges),
        /// A page is wanted now.
        27 FaultRequest(FaultRequest),
        /// First from the source after a break.
        28 Resume(Resume),
        /// Pages that the destination still lacks.
        29 Missing(PageRanges),
        /// Pages of an earlier visit.
        32 RetainedPages(RetainedPages),
        /// Shared memory whose pages come over the streams.
        38 Segments(Segments),
        /// The names in a tmpfs follow.
        39 TmpfsBegin(TmpfsBegin),
        /// What the destination has begun to do.
        34 Step(Reached),
        /// What has come is retained.
        44 RetainEnd(RetainEnd),
        /// The image's registry was asked for the missing layers: these have to come from the source.
        46 StillLacking(StillLacking),
        /// The round of files that are sent ahead is applied.
        51 FilesKept(FilesKept),
        /// The files that are there follow.
        53 FilesHere(FilesHere),
        /// As `Open`, from a source that only asks whether the service may come: nothing is reserved beyond the answer.
        40 Ask(Open),
    }
    bytes {
        /// Part of a layer's blob, in order.
        6 LayerData(Bytes),
        /// An encoded [`godwit_engine::tree::Item`].
        10 TreeItem(Bytes),
        /// An encoded [`godwit_engine::tree::Listed`].
        54 FileHere(Bytes),
        /// Part of the service's log, in order.
        13 LogData(Bytes),
        /// Part of the log's older file, in order.
        21 OldLogData(Bytes),
        /// An encoded [`godwit_memory::batch::Batch`].
        23 Pages(Bytes),
        /// Anything, to measure the link.
        42 Probe(Bytes),
    }
}

impl Message {
    /// The frame's flags: batches of pages have a checksum of their own, which is checked when they are unpacked.
    #[must_use]
    pub fn flags(&self) -> u16 {
        match self {
            Self::Pages(_) => SELF_CHECKED,
            _ => 0,
        }
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::crossing::AtRest;
    use crate::databases::Remembered;
    use crate::timeline::{SpanThere, TimelineThere};

    fn every_message() -> Vec<Message> {
        let layer = Layer { digest: "sha256:00".into(), bytes: 7 };
        let ranges = PageRanges { space: 1, ranges: vec![7, 2, 1 << 40, 1] };
        let segment = SharedSegment {
            space: 1 << 31,
            inode: 7,
            size: 4096,
            name: Some("x".into()),
            sealable: true,
            tmpfs: Some(1),
            process: Some(1),
            key: Some(7),
        };
        let image = ImageData { name: "pages-1.img".into(), offset: 4096, data: Bytes::from_static(b"page") };
        vec![
            Message::Heartbeat,
            Message::Open(Open {
                protocol: OLDEST_PROTOCOL_VERSION,
                newest_protocol: PROTOCOL_VERSION,
                migration: "01A".into(),
                ..Open::default()
            }),
            Message::Ask(Open { migration: "01A".into(), ..Open::default() }),
            Message::Probe(Bytes::from_static(b"anything")),
            Message::ProbeEnd,
            Message::Prepare,
            Message::Retain,
            Message::RetainEnd(RetainEnd { bytes: 4096, left: 8192 }),
            Message::Accepted(Accepted {
                missing_layers: vec!["sha256:00".into()],
                tells_files: true,
                parts_of_mounts: true,
                fills_shared: true,
                userfaultfd: true,
                retained: false,
                tcp_inline: true,
                criu: Some(CriuVersion { major: 4, minor: 2, sublevel: 1, series: 4 }),
                key: Bytes::from_static(b"key"),
                ahead: true,
                most_at_once: 7 << 40,
                keeps_rights: true,
                protocol: PROTOCOL_VERSION,
                segments: true,
                charges: true,
                tmpfs: true,
                copied: true,
                system_v: true,
                parts: true,
                keepers: true,
                engine_layers: vec!["sha256:01".into()],
                tries_storage: true,
                retains: true,
                layers_at_once: 3,
                asks_registry: true,
                takes_files: true,
                no_files: "full".into(),
                files: Bytes::from_static(b"token"),
                sessions: true,
                follows: true,
                aliases: true,
                crosses: "aarch64".into(),
                corrects: true,
            }),
            Message::StillLacking(StillLacking { layers: vec!["sha256:00".into()] }),
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
            Message::ImagesEnd(ImagesEnd {
                files: vec![],
                keep_stopped: vec![4],
                at_rest: vec![AtRest { pid: 1, record: vec![1], executable: vec![2] }],
                remembered: vec![Remembered {
                    pid: 1,
                    descriptor: 3,
                    device: 2,
                    inode: 4,
                    places: vec![4096],
                }],
            }),
            Message::ImagesReceived,
            Message::Step(Reached { step: Step::Restoring.into() }),
            Message::LogRotated,
            Message::SegmentsMade,
            Message::Segments(Segments { all: vec![segment] }),
            Message::TreeAgain,
            Message::TreeOnto,
            Message::FilesKept(FilesKept { token: Bytes::from_static(b"token"), bytes: 4096 }),
            Message::TellFiles,
            Message::FilesHere(FilesHere { key: Bytes::from_static(b"key") }),
            Message::FileHere(Bytes::from_static(b"listed")),
            Message::FilesHereEnd,
            Message::TmpfsBegin(TmpfsBegin { number: 1 }),
            Message::Restored,
            Message::Commit,
            Message::Running(Running {
                cutover_us: 700,
                held_frames: 100,
                held_dropped: 1,
                timeline: Some(TimelineThere {
                    spans: vec![SpanThere { what: "restore".into(), start_us: -1, us: 2 }],
                    told_us: vec![0, 7, 9],
                }),
            }),
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
    fn every_message_arrives_as_it_was_sent_under_a_number_of_its_own() {
        let mut kinds = std::collections::BTreeSet::new();
        for message in every_message() {
            assert!(kinds.insert(message.kind()), "{} shares its number", message.name());
            assert_eq!(Message::decode(message.kind(), message.payload()).unwrap(), message);
        }
        assert!(!kinds.contains(&0), "0 is invalid");
        assert_eq!(kinds.len(), KINDS.len(), "the test knows all messages");
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
