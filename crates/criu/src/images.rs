//! CRIU's image files, as far as godwit reads them: the inventory, each task's core and memory
//! (in [`memory`](self::lazy_areas)), and the statistics of a dump.
//!
//! ```text
//! file    = magic(u32: common or service; not in the inventory) kind(u32) record*
//! record  = length(u32) message(protobuf, length bytes)          all integers little-endian
//! ```
//!
//! The messages are subsets of CRIU's `images/*.proto` (MIT) with the tags of those files; fields
//! that are not named here are passed over. What is read may come from another node, so lengths
//! are checked before anything is allocated.

mod address_space;
mod cgroup;
mod connected;
mod connection;
mod credentials;
mod devices;
mod doubt;
mod memory;
mod network;
mod opened;
mod plain;
mod process_images;
mod rights;
mod system_calls;
mod thread;
pub(crate) mod wire;

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use prost::Message;

pub use address_space::{AddressSpace, KernelBounds, MappedArea, Treatment};
pub use cgroup::stay_in_cgroup;
pub use connected::connections;
pub use connection::scale_windows;
pub use devices::{Device, archives};
pub use doubt::{Unacknowledged, unacknowledged};
pub use memory::{
    Area, LazyAreas, PageRun, Pagemap, RestoredPages, areas, lazy_areas, page_size, pagemap, restored_pages,
    wiped_areas,
};
pub use network::bring_network;
pub use opened::OpenedFile;
pub use plain::{LazyPages, bring, make_plain};
pub use process_images::{ChangedImages, ProcessImages};
pub use rights::{Allowed, excess};
pub use system_calls::{Refused, RefusedOf, filters_let};
pub use thread::{Architecture, PendingSignal, Registers, SignalAction, ThreadImage};

/// First word of ordinary images.
const COMMON_MAGIC: u32 = 0x5456_4319;
/// First word of service files such as the statistics.
const SERVICE_MAGIC: u32 = 0x5510_5940;

/// Largest image read here, in bytes. An inventory has tens of bytes and a core some kilobytes
/// (registers, signal queue); 16 MiB leaves room for a core with full signal queues.
const FILE_LIMIT: u64 = 16 << 20;

/// The same for those about memory: a million areas, or three million runs of pages; and of open files, with
/// 4 KiB in the queues of 10,000 connections.
const MEMORY_LIMIT: u64 = 64 << 20;

/// `TASK_STOPPED` of CRIU's `task_state`.
const TASK_STOPPED: u32 = 3;

/// The kinds of image that are read here, by their magic number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ImageKind {
    /// `inventory.img`.
    Inventory = 0x5831_3116,
    /// `core-PID.img`.
    Core = 0x5505_3847,
    /// `pstree.img`.
    ProcessTree = 0x5027_3030,
    /// `ids-PID.img`.
    Ids = 0x5443_2030,
    /// `mountpoints-NAMESPACE.img`.
    Mountpoints = 0x5556_3928,
    /// `files.img`.
    Files = 0x5630_3138,
    /// `remap-fpath.img`.
    RemapPaths = 0x5913_3954,
    /// `seccomp.img`.
    Seccomp = 0x6441_3049,
    /// `ghost-file-NUMBER.img`, behind whose record come the contents.
    Ghost = 0x5258_3605,
    /// `mm-PID.img`.
    Memory = 0x5749_2820,
    /// `pagemap-PID.img`; its records are of two kinds: see [`Pagemap::decode`].
    Pagemap = 0x5608_4025,
    /// `stats-dump`.
    Statistics = 0x5709_3306,
}

impl ImageKind {
    /// The word before the kind's own; none for the inventory, which tells of the others.
    fn head(self) -> Option<u32> {
        match self {
            Self::Inventory => None,
            Self::Statistics => Some(SERVICE_MAGIC),
            Self::Core
            | Self::ProcessTree
            | Self::Ids
            | Self::Mountpoints
            | Self::Files
            | Self::RemapPaths
            | Self::Seccomp
            | Self::Ghost
            | Self::Memory
            | Self::Pagemap => Some(COMMON_MAGIC),
        }
    }

    /// What an image of this kind begins with.
    fn head_bytes(self) -> Vec<u8> {
        self.head().into_iter().chain([self as u32]).flat_map(u32::to_le_bytes).collect()
    }

    /// Most bytes that one may have.
    fn limit(self) -> u64 {
        match self {
            Self::Memory | Self::Pagemap | Self::Files => MEMORY_LIMIT,
            _ => FILE_LIMIT,
        }
    }
}

/// Why an image cannot be read, or not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be read.
    #[error("image {path} cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("image {path} is damaged: {reason}; dump the service again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The kernel shows what a container must not see, and there is nothing to cover it.
    #[error(
        "this node's kernel has {path}, which the container must not see, and the images have nothing of its kind to cover it with; move it to another node, or start it anew on this one"
    )]
    Bare {
        /// What it shows.
        path: String,
    },
    /// The file cannot be written.
    #[error("image {path} cannot be written; make sure that this node has free memory for them")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Pages that are to be put into the images cannot be had.
    #[error(
        "the memory of process {pid} at {address:#x} cannot be put into the images; move the service again"
    )]
    LazyPages {
        /// PID inside the PID namespace.
        pid: u32,
        /// Address of the first page.
        address: u64,
        /// What stands in the way.
        #[source]
        source: std::io::Error,
    },
}

/// `inventory_entry`: what CRIU dumped, as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Inventory {
    /// Version of the image format.
    #[prost(uint32, required, tag = "1")]
    pub img_version: u32,
    /// Uptime of the node at the dump, in microseconds.
    #[prost(uint64, optional, tag = "8")]
    pub dump_uptime: Option<u64>,
    /// How CRIU locked the network: 0 by iptables, 1 by nftables, 2 not at all.
    #[prost(uint32, optional, tag = "11")]
    pub network_lock_method: Option<u32>,
}

/// `task_core_entry`: a process.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TaskCore {
    /// 1 alive, 2 dead, 3 stopped by a signal, 6 zombie.
    #[prost(uint32, required, tag = "1")]
    pub task_state: u32,
    /// Exit code of a zombie.
    #[prost(uint32, required, tag = "2")]
    pub exit_code: u32,
    /// Name of the command.
    #[prost(bytes = "vec", required, tag = "6")]
    pub comm: Vec<u8>,
}

/// `core_entry`: a process or a thread.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Core {
    /// Instruction set: 1 x86-64, 3 arm64, 8 riscv64.
    #[prost(uint32, required, tag = "1")]
    pub mtype: u32,
    /// The process; none in the core of a thread.
    #[prost(message, optional, tag = "3")]
    pub task: Option<TaskCore>,
}

/// `pstree_entry`: a process in its tree.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ProcessTreeEntry {
    /// PID inside the PID namespace.
    #[prost(uint32, required, tag = "1")]
    pub pid: u32,
    /// PID of its parent; 0 for the root.
    #[prost(uint32, required, tag = "2")]
    pub ppid: u32,
    /// Process group.
    #[prost(uint32, required, tag = "3")]
    pub pgid: u32,
    /// Session.
    #[prost(uint32, required, tag = "4")]
    pub sid: u32,
    /// Thread ids, the main thread's first.
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// `file_entry`: something that processes have open.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct FileEntry {
    /// Its kind, of CRIU's `fd_types`.
    #[prost(uint32, required, tag = "1")]
    pub(crate) kind: u32,
    /// Its number in the images.
    #[prost(uint32, required, tag = "2")]
    pub(crate) id: u32,
    /// What more there is of a regular file.
    #[prost(message, optional, tag = "3")]
    pub(crate) regular: Option<RegularFile>,
}

/// `reg_file_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct RegularFile {
    /// Its path in the service, as it was opened.
    #[prost(bytes = "vec", required, tag = "6")]
    pub(crate) name: Vec<u8>,
    /// Its `st_mode`.
    #[prost(uint32, optional, tag = "10")]
    pub(crate) mode: Option<u32>,
}

/// `dump_stats_entry`; times in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct DumpStats {
    /// Time to seize the tasks.
    #[prost(uint32, required, tag = "1")]
    pub freezing_time: u32,
    /// Time the tasks were held.
    #[prost(uint32, required, tag = "2")]
    pub frozen_time: u32,
    /// Time to take the memory.
    #[prost(uint32, required, tag = "3")]
    pub memdump_time: u32,
    /// Time to write the memory.
    #[prost(uint32, required, tag = "4")]
    pub memwrite_time: u32,
    /// Private pages examined.
    #[prost(uint64, required, tag = "5")]
    pub pages_scanned: u64,
    /// Private pages written.
    #[prost(uint64, required, tag = "7")]
    pub pages_written: u64,
    /// Shared pages examined.
    #[prost(uint64, optional, tag = "12")]
    pub shpages_scanned: Option<u64>,
    /// Shared pages written.
    #[prost(uint64, optional, tag = "14")]
    pub shpages_written: Option<u64>,
}

/// `stats_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Stats {
    #[prost(message, optional, tag = "1")]
    dump: Option<DumpStats>,
}

/// Reads `inventory.img` in a directory of images.
pub fn inventory(images: &Path) -> Result<Inventory, ImageError> {
    single(&images.join("inventory.img"), ImageKind::Inventory)
}

/// Reads `pstree.img` in a directory of images: the processes, parents first.
pub fn process_tree(images: &Path) -> Result<Vec<ProcessTreeEntry>, ImageError> {
    let path = images.join("pstree.img");
    records(&path, ImageKind::ProcessTree)
}

/// Reads the core of the process (or thread) with this PID inside its PID namespace.
pub fn core(images: &Path, pid: u32) -> Result<Core, ImageError> {
    single(&images.join(format!("core-{pid}.img")), ImageKind::Core)
}

/// PIDs, inside the PID namespace, of the dumped processes that were stopped by a signal.
pub fn stopped_processes(images: &Path) -> Result<Vec<u32>, ImageError> {
    let mut stopped = Vec::new();
    for process in process_tree(images)? {
        let core = core(images, process.pid)?;
        if core.task.is_some_and(|task| task.task_state == TASK_STOPPED) {
            stopped.push(process.pid);
        }
    }
    Ok(stopped)
}

/// Reads `stats-dump` in CRIU's work directory.
pub(crate) fn dump_stats(work: &Path) -> Result<DumpStats, ImageError> {
    let path = work.join("stats-dump");
    let stats: Stats = single(&path, ImageKind::Statistics)?;
    stats.dump.ok_or_else(|| ImageError::Damaged { path, reason: "it has no statistics of a dump".into() })
}

/// The messages in the bytes of an image; the error says what is wrong with them.
pub fn decode<M: Message + Default>(bytes: &[u8], kind: ImageKind) -> Result<Vec<M>, String> {
    let (_, records) = split(bytes, kind)?;
    records.into_iter().map(|record| M::decode(record).map_err(|error| error.to_string())).collect()
}

/// The head of an image and its records; the error says what is wrong with them.
pub(crate) fn split(bytes: &[u8], kind: ImageKind) -> Result<(&[u8], Vec<&[u8]>), String> {
    let mut rest = bytes;
    for expected in kind.head().into_iter().chain([kind as u32]) {
        let word = take_word(&mut rest).ok_or("it ends inside its header")?;
        if word != expected {
            return Err(format!("its header has {word:#x}, where a {kind:?} image has {expected:#x}"));
        }
    }
    let (head, _) = bytes.split_at(bytes.len() - rest.len());
    let mut records = Vec::new();
    while !rest.is_empty() {
        let length = take_word(&mut rest).ok_or("it ends inside the length of a record")?;
        let length = usize::try_from(length).map_err(|_| "a record is too long")?;
        records.push(rest.split_off(..length).ok_or("it ends inside a record")?);
    }
    Ok((head, records))
}

fn take_word(rest: &mut &[u8]) -> Option<u32> {
    let (word, after) = rest.split_first_chunk::<4>()?;
    *rest = after;
    Some(u32::from_le_bytes(*word))
}

fn read_image(path: &Path, kind: ImageKind) -> Result<Vec<u8>, ImageError> {
    let limit = kind.limit();
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
        .map_err(|source| ImageError::Read { path: path.to_owned(), source })?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > limit) {
        let reason = format!("it is longer than {limit} bytes");
        return Err(ImageError::Damaged { path: path.to_owned(), reason });
    }
    Ok(bytes)
}

/// Writes an image anew with the records that `change` makes of those in it; none: it stays as it is.
pub(crate) fn rewrite(
    path: &Path,
    kind: ImageKind,
    change: impl for<'a> FnOnce(&[&'a [u8]]) -> Result<Option<Vec<Cow<'a, [u8]>>>, String>,
) -> Result<(), ImageError> {
    let bytes = read_image(path, kind)?;
    let changed = || {
        let (head, records) = split(&bytes, kind)?;
        let Some(records) = change(&records)? else { return Ok(None) };
        let mut changed = head.to_vec();
        for record in records {
            let length = u32::try_from(record.len()).map_err(|_| "a record is too long")?;
            changed.extend(length.to_le_bytes());
            changed.extend_from_slice(&record);
        }
        Ok(Some(changed))
    };
    let changed = changed().map_err(|reason| ImageError::Damaged { path: path.to_owned(), reason })?;
    let Some(changed) = changed else { return Ok(()) };
    fs::write(path, changed).map_err(|source| ImageError::Write { path: path.to_owned(), source })
}

fn records<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<Vec<M>, ImageError> {
    let bytes = read_image(path, kind)?;
    decode(&bytes, kind).map_err(|reason| ImageError::Damaged { path: path.to_owned(), reason })
}

fn single<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<M, ImageError> {
    let mut messages = records(path, kind)?;
    if messages.len() != 1 {
        let reason = format!("it has {} records, and must have one", messages.len());
        return Err(ImageError::Damaged { path: path.to_owned(), reason });
    }
    Ok(messages.remove(0))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    pub(super) fn image<M: Message>(kind: ImageKind, messages: &[M]) -> Vec<u8> {
        let mut bytes = kind.head_bytes();
        for message in messages {
            let message = message.encode_to_vec();
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(message);
        }
        bytes
    }

    fn core_of(state: u32) -> Core {
        let task = TaskCore { task_state: state, exit_code: 0, comm: b"sleep".to_vec() };
        Core { mtype: 1, task: Some(task) }
    }

    #[test]
    fn stopped_processes_are_found_in_the_images() {
        let directory = tempfile::tempdir().unwrap();
        let process = |pid| ProcessTreeEntry { pid, ppid: 1, pgid: 1, sid: 1, threads: vec![pid, 90] };
        let tree = [process(1), process(7), process(8)];
        std::fs::write(directory.path().join("pstree.img"), image(ImageKind::ProcessTree, &tree)).unwrap();
        for (pid, state) in [(1, 1), (7, TASK_STOPPED), (8, 6)] {
            let bytes = image(ImageKind::Core, &[core_of(state)]);
            std::fs::write(directory.path().join(format!("core-{pid}.img")), bytes).unwrap();
        }
        assert_eq!(stopped_processes(directory.path()).unwrap(), [7]);
    }

    #[test]
    fn an_image_of_another_kind_is_refused() {
        let bytes = image(ImageKind::Core, &[core_of(1)]);
        assert!(decode::<Inventory>(&bytes, ImageKind::Inventory).unwrap_err().contains("head"));
    }

    #[test]
    fn a_record_longer_than_its_file_is_refused() {
        let mut bytes = image::<Core>(ImageKind::Core, &[]);
        bytes.extend(u32::MAX.to_le_bytes());
        assert!(decode::<Core>(&bytes, ImageKind::Core).unwrap_err().contains("inside a record"));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = decode::<Core>(&bytes, ImageKind::Core);
            let mut headed = image::<Core>(ImageKind::Core, &[]);
            headed.extend(&bytes);
            if let Ok(cores) = decode::<Core>(&headed, ImageKind::Core) {
                prop_assert!(cores.len() <= bytes.len() / 4);
            }
        }

        #[test]
        fn a_cut_image_is_refused_or_shorter(state in 0u32..9, cut in 0usize..64) {
            let bytes = image(ImageKind::Core, &[core_of(state), core_of(state)]);
            let cut = cut.min(bytes.len() - 1);
            if let Ok(cores) = decode::<Core>(&bytes[..cut], ImageKind::Core) {
                prop_assert!(cores.len() < 2);
            }
        }
    }
}
