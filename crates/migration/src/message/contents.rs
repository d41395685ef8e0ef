//! What the messages of a migration carry.
//!
//! Fields are added and never change their meaning. A field that an older node does not know has its default.

use bytes::Bytes;
use godwit_memory::shared::{Kind, Segment};
use godwit_memory::{PAGE_SIZE, Range, Space};

use crate::crossing::{AtRest, CrossingOffer};
use crate::databases::Remembered;
use crate::needs::KernelNeeds;
use crate::terms::OverlayTerms;
use crate::timeline::TimelineThere;

/// The source's request.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Open {
    /// The oldest version of the conversation that the source speaks: the one that releases up to 0.2.0 compare.
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
    /// CPU features of the source by which programs may have chosen their code.
    #[prost(string, repeated, tag = "9")]
    pub cpu_flags: Vec<String>,
    /// Connections that will bring pages.
    #[prost(uint32, tag = "10")]
    pub streams: u32,
    /// The source's overlay; nothing from a node that cannot tell.
    #[prost(message, optional, tag = "11")]
    pub overlay: Option<OverlayTerms>,
    /// The identity of the source's journal, by which a destination in doubt recognises the journal that it asks; empty
    /// from a node of an older version.
    #[prost(string, tag = "12")]
    pub journal: String,
    /// The source's CRIU; nothing from a node that does not tell.
    #[prost(message, optional, tag = "40")]
    pub criu: Option<CriuVersion>,
    /// The source's time of day, milliseconds since 1970; 0 from a node that does not tell.
    #[prost(int64, tag = "41")]
    pub now_ms: i64,
    /// Whether the source understands [`Message::Step`](super::Message::Step).
    #[prost(bool, tag = "42")]
    pub steps: bool,
    /// The newest version that the source speaks; 0 from one that speaks `protocol` alone.
    #[prost(uint32, tag = "43")]
    pub newest_protocol: u32,
    /// The pipes that are the service's standard output and standard error, with which the destination begins the
    /// restore before the dump; nothing from a node that does not tell.
    #[prost(uint64, repeated, tag = "44")]
    pub output_pipes: Vec<u64>,
    /// What the service needs of the kernel; nothing from a node that does not tell.
    #[prost(message, optional, tag = "45")]
    pub needs: Option<KernelNeeds>,
    /// Whether the source understands [`Message::StillLacking`](super::Message::StillLacking).
    #[prost(bool, tag = "46")]
    pub waits_for_registry: bool,
    /// How many names its changed files have; 0 from an older source.
    #[prost(uint64, tag = "47")]
    pub tree_names: u64,
    /// Its processes, where they may go on under executables of the destination's.
    #[prost(message, optional, tag = "48")]
    pub crossing: Option<CrossingOffer>,
    /// Layers of its image for other platforms, which a node keeps to send them on.
    #[prost(message, repeated, tag = "49")]
    pub further_layers: Vec<Layer>,
}

impl Open {
    /// All layers that the source can send.
    pub fn all_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().chain(&self.further_layers)
    }
}

/// A CRIU: the dump of a newer release cannot be restored by an older one. What godwit's patches add to images is
/// agreed on by itself, so that any series can restore what another dumped.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
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
    /// Number of the series of godwit's patches; 0 where it has none, and from a node that does not tell.
    #[prost(uint32, tag = "4")]
    pub series: u32,
}

impl From<godwit_criu::Version> for CriuVersion {
    fn from(version: godwit_criu::Version) -> Self {
        let godwit_criu::Version { major, minor, sublevel, series } = version;
        Self { major, minor, sublevel, series }
    }
}

impl From<CriuVersion> for godwit_criu::Version {
    fn from(version: CriuVersion) -> Self {
        let CriuVersion { major, minor, sublevel, series } = version;
        Self { major, minor, sublevel, series }
    }
}

impl CriuVersion {
    /// Why images of this CRIU on node `theirs` cannot be restored by `other` on node `ours`, if they cannot.
    #[must_use]
    pub fn objection(self, theirs: &str, other: godwit_criu::Version, ours: &str) -> Option<String> {
        let own = godwit_criu::Version::from(self);
        let release = |version: godwit_criu::Version| (version.major, version.minor, version.sublevel);
        (release(other) < release(own)).then(|| {
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

/// The destination has made a reservation, and names what it lacks.
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
    /// The CRIU here.
    #[prost(message, optional, tag = "44")]
    pub criu: Option<CriuVersion>,
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
    /// The version of the conversation that is used from here on; 0 from a node that knows only one.
    #[prost(uint32, tag = "42")]
    pub protocol: u32,
    /// Whether this node takes [`Message::Segments`](super::Message::Segments), and its CRIU what came of them.
    #[prost(bool, tag = "45")]
    pub segments: bool,
    /// Whether this node can charge them to the service, whose limit counts them then.
    #[prost(bool, tag = "46")]
    pub charges: bool,
    /// Whether this node takes files of a tmpfs among the segments, and [`Message::TmpfsBegin`](super::Message::TmpfsBegin).
    #[prost(bool, tag = "47")]
    pub tmpfs: bool,
    /// Whether this node takes copies of files' pages among the segments, and puts them into the images.
    #[prost(bool, tag = "48")]
    pub copied: bool,
    /// Whether this node takes segments of System V, and its CRIU what came of them.
    #[prost(bool, tag = "49")]
    pub system_v: bool,
    /// Whether this node takes parts of files that it has from an earlier round.
    #[prost(bool, tag = "50")]
    pub parts: bool,
    /// Whether this node knows of containers that engines of others keep.
    #[prost(bool, tag = "51")]
    pub keepers: bool,
    /// Digests of layers that the engine has here which is to keep it, where the engine lacks the image: of each alone with
    /// Podman, with all beneath it (chain ID) with Docker.
    #[prost(string, repeated, tag = "52")]
    pub engine_layers: Vec<String>,
    /// Whether it has tried what the service has as storage of both nodes.
    #[prost(bool, tag = "53")]
    pub tries_storage: bool,
    /// Whether this node takes [`Message::Prepare`](super::Message::Prepare).
    #[prost(bool, tag = "54")]
    pub retains: bool,
    /// How many layers may be under way at once: the one that crosses, and those that this node has not confirmed. 0 from a
    /// node that takes one after the other.
    #[prost(uint32, tag = "55")]
    pub layers_at_once: u32,
    /// Whether this node asks the image's registry first, and then sends [`Message::StillLacking`](super::Message::StillLacking).
    #[prost(bool, tag = "56")]
    pub asks_registry: bool,
    /// Whether files come with a preparation, after layers: in the answer to an `Ask` whether this node takes them, and in that
    /// to a `Prepare` whether it has room for them.
    #[prost(bool, tag = "60")]
    pub takes_files: bool,
    /// Why it has not, as a sentence.
    #[prost(string, tag = "61")]
    pub no_files: String,
    /// The token of the files that are there, from a preparation, an attempt that was aborted, or an earlier visit; none where
    /// there are none. A source that does not know of it may send [`Message::TellFiles`](super::Message::TellFiles).
    #[prost(bytes = "bytes", tag = "62")]
    pub files: Bytes,
    /// Whether commands of `godwit exec` on a terminal can come with the service.
    #[prost(bool, tag = "63")]
    pub sessions: bool,
    /// Whether it tells which files are there.
    #[prost(bool, tag = "64")]
    pub tells_files: bool,
    /// Whether it knows single files of volumes, and volumes of an engine that do not go along.
    #[prost(bool, tag = "65")]
    pub parts_of_mounts: bool,
    /// Whether pages of shared anonymous memory may come after the commit, as other pages do.
    #[prost(bool, tag = "66")]
    pub fills_shared: bool,
    /// Whether services follow their clients from this node, too.
    #[prost(bool, tag = "67")]
    pub follows: bool,
    /// Whether services have further names there.
    #[prost(bool, tag = "68")]
    pub aliases: bool,
    /// The instruction set of the executables under which the processes go on there, as `uname -m` names it, where these are
    /// its own; else empty.
    #[prost(string, tag = "69")]
    pub crosses: String,
    /// Whether it corrects what processes remember of files of databases.
    #[prost(bool, tag = "70")]
    pub corrects: bool,
}

/// The round of files that are sent ahead is applied.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FilesKept {
    /// Of the directory that has them.
    #[prost(bytes = "bytes", tag = "1")]
    pub token: Bytes,
    /// All of them.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
}

/// Files that are at the destination follow.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FilesHere {
    /// The key of their hashes: 192 bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
}

/// What the destination lacks after its image's registry was asked.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StillLacking {
    /// Digests to send, of those that were missing, in their order.
    #[prost(string, repeated, tag = "1")]
    pub layers: Vec<String>,
}

/// What a destination has retained for a migration that may follow.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RetainEnd {
    /// Of pages.
    #[prost(uint64, tag = "1")]
    pub bytes: u64,
    /// Of pages for which there was no room.
    #[prost(uint64, tag = "2")]
    pub left: u64,
}

/// All segments of shared memory whose pages come over the streams. What an earlier message named and this one does not,
/// is not to be restored from them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Segments {
    /// Each of them.
    #[prost(message, repeated, tag = "1")]
    pub all: Vec<SharedSegment>,
}

/// A segment of shared memory, or what a process has written in private mappings of files.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SharedSegment {
    /// Whose its pages are on the streams: from [`godwit_memory::shared::FIRST_SPACE`] on.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// By which CRIU knows it at the source, of a segment of System V the identifier; 0 for a file of a tmpfs, and for what a process has written.
    #[prost(uint32, tag = "2")]
    pub inode: u32,
    /// Its bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// The name of a memory file; none of anonymous memory.
    #[prost(string, optional, tag = "4")]
    pub name: Option<String>,
    /// Whether seals can be added to the memory file.
    #[prost(bool, tag = "5")]
    pub sealable: bool,
    /// Of a file in a tmpfs, that one's number in the definition of the container.
    #[prost(uint32, optional, tag = "6")]
    pub tmpfs: Option<u32>,
    /// Of what a process has written in private mappings of files, that one's PID inside the service. Offsets are addresses.
    /// A run of zeros says of these pages that they are gone: a file's pages may lie beneath.
    #[prost(uint32, optional, tag = "7")]
    pub process: Option<u32>,
    /// The key of a segment of System V.
    #[prost(uint32, optional, tag = "8")]
    pub key: Option<u32>,
}

impl SharedSegment {
    /// How to make it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        if let Some(process) = self.process {
            Kind::Copied { process }
        } else if let Some(number) = self.tmpfs {
            Kind::Tmpfs { number }
        } else if let Some(key) = self.key {
            Kind::SystemV { key }
        } else if let Some(name) = &self.name {
            Kind::Memfd { name: name.clone(), sealable: self.sealable }
        } else {
            Kind::Anonymous
        }
    }

    /// The name of this segment in a conversation.
    #[must_use]
    pub fn of(space: Space, segment: &Segment) -> Self {
        let own = Self { space, size: segment.size(), ..Self::default() };
        // A larger one is none of those that are found.
        let inode = u32::try_from(segment.inode()).unwrap_or(0);
        match segment.kind() {
            Kind::Anonymous => Self { inode, ..own },
            Kind::Memfd { name, sealable } => {
                Self { inode, name: Some(name.clone()), sealable: *sealable, ..own }
            }
            Kind::SystemV { key } => Self { inode, key: Some(*key), ..own },
            Kind::Tmpfs { number } => Self { tmpfs: Some(*number), ..own },
            Kind::Copied { process } => Self { process: Some(*process), ..own },
        }
    }
}

/// Most names in a tmpfs whose contents come over the streams.
pub const MOST_TMPFS_NAMES: u64 = 1 << 16;

/// The names in a tmpfs follow, as the items of a tree. The content of a file with a number is that of the segment whose
/// space has it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TmpfsBegin {
    /// Its number in the definition of the container.
    #[prost(uint32, tag = "1")]
    pub number: u32,
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
    /// Every file with its final length, so that a missing part is noticed.
    #[prost(message, repeated, tag = "1")]
    pub files: Vec<ImageFile>,
    /// Processes that were stopped by a signal before the dump, by PID inside the container.
    #[prost(uint32, repeated, tag = "2")]
    pub keep_stopped: Vec<u32>,
    /// All processes, where they go on under executables of the destination's.
    #[prost(message, repeated, tag = "3")]
    pub at_rest: Vec<AtRest>,
    /// What its processes remember of files of databases.
    #[prost(message, repeated, tag = "4")]
    pub remembered: Vec<Remembered>,
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
    /// Held frames that were delivered.
    #[prost(uint64, tag = "2")]
    pub held_frames: u64,
    /// Frames for which there was no room.
    #[prost(uint64, tag = "3")]
    pub held_dropped: u64,
    /// What the destination did in the frozen time. Daemons between two releases sent it otherwise, as field 4.
    #[prost(message, optional, tag = "5")]
    pub timeline: Option<TimelineThere>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
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

    #[test]
    fn a_criu_of_the_same_release_with_other_patches_restores() {
        let with = |series| godwit_criu::Version { series, ..godwit_criu::Version::release(4, 2, 1) };
        for (source, destination) in [(4, 0), (0, 4), (4, 3)] {
            assert_eq!(CriuVersion::from(with(source)).objection("a", with(destination), "b"), None);
        }
        let newer = godwit_criu::Version { sublevel: 2, ..with(0) };
        let said = CriuVersion::from(newer).objection("a", with(4), "b").unwrap();
        assert!(said.contains("CRIU 4.2.1+godwit.4, older than 4.2.2 on node a"), "{said}");
    }

    #[test]
    fn ranges_arrive_as_they_were_sent_and_others_are_refused() {
        let ranges = [0x1000..0x3000, 0x9000..0xa000];
        assert_eq!(PageRanges::encode(1, ranges.clone()).decode().unwrap(), ranges);
        for bad in [&[1][..], &[1, 0], &[u64::MAX, 1], &[1, u64::MAX], &[1, 2, 3]] {
            assert_eq!(PageRanges { space: 1, ranges: bad.to_vec() }.decode(), None, "{bad:?}");
        }
    }
}
