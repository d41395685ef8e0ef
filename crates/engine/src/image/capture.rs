//! Makes an image of one layer from a directory.
//!
//! The tar is a function of the tree alone: entries sorted by their bytes, owners by number,
//! times to the nanosecond, extended attributes sorted, nothing of the machine or of now. What a
//! tar cannot hold is left out (sockets) or refused (names that mean a removal in a layer). The
//! walk stays in the mount it began in: a directory on which something is mounted (`/proc`,
//! `/dev`, a bind mount) becomes an empty directory.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, Statx, StatxAttributes};

use super::layer::{MAX_LAYER_BYTES, MAX_LAYER_ENTRIES};
use super::{Image, ImageConfig, ImageError, RootfsFault, Store, machine_architecture};
use crate::beneath::{self, Links, MAX_PATH, Node, Root};

const BLOCK: usize = 512;
/// The largest number eight octal digits of a header hold is for ids, the one of eleven for sizes.
const MAX_ID_FIELD: u64 = 0o7_777_777;
/// See [`MAX_ID_FIELD`].
const MAX_LONG_FIELD: u64 = 0o77_777_777_777;
/// Room for a name or link in a header.
const NAME_FIELD: usize = 100;
/// Names that mean a removal in a layer.
const WHITEOUT: &[u8] = b".wh.";

/// Attributes by which overlayfs notes something of its own, and the one of a directory that hides what is below.
const OF_OVERLAY: &[u8] = b"trusted.overlay.";
const OPAQUE: &[u8] = b"trusted.overlay.opaque";

impl Store {
    /// Makes an image of a directory that holds a root filesystem. The same tree gives the same
    /// layer, on every node.
    pub fn import_rootfs(&self, directory: &Path) -> Result<Image, ImageError> {
        let fault = |fault| ImageError::Rootfs { path: directory.to_path_buf(), fault };
        let read = |source| fault(RootfsFault::Read { member: "it".into(), source });
        let metadata = match std::fs::metadata(directory) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(fault(RootfsFault::Missing)),
            Err(error) => return Err(read(error)),
        };
        if !metadata.is_dir() {
            return Err(fault(RootfsFault::NotADirectory));
        }
        let canonical = directory.canonicalize().map_err(read)?;
        if self.directory().starts_with(&canonical) {
            return Err(fault(RootfsFault::HoldsStore { store: self.directory().to_path_buf() }));
        }
        if std::fs::read_dir(&canonical).map_err(read)?.next().is_none() {
            return Err(fault(RootfsFault::Empty));
        }
        let root = Root::open(&canonical, Links::Refused).map_err(read)?;
        let out = io::BufWriter::with_capacity(1 << 20, self.new_blob_writer()?);
        let mut capture = Capture::new(root, out, Of::Layer);
        capture.whole().map_err(|stop| match stop {
            Stop::Fault(found) => fault(found),
            Stop::Write(error) => self.fault("write the layer", error),
        })?;
        let writer =
            capture.out.into_inner().map_err(|error| self.fault("write the layer", error.into_error()))?;
        let digest = writer.finish()?;
        self.unpack(&digest)?;
        Ok(Image {
            layers: vec![digest],
            config: ImageConfig::default(),
            architecture: machine_architecture().to_owned(),
            reference: directory.display().to_string(),
            id: None,
            platforms: Vec::new(),
            neutral: None,
        })
    }
}

/// Why a directory could not be written as an archive.
pub(crate) enum Stop {
    /// What is in it.
    Fault(RootfsFault),
    /// Where the archive goes.
    Write(io::Error),
}

/// What an upper directory of overlayfs takes away from the layers below, as paths below the root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TakenAway {
    /// Names that are removed.
    pub(crate) removed: Vec<Vec<u8>>,
    /// Directories of which nothing is seen but what the upper directory has.
    pub(crate) hidden: Vec<Vec<u8>>,
}

/// What a directory is of which an archive is made.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// A root filesystem, which becomes a layer.
    Layer,
    /// An upper directory of overlayfs.
    Upper(TakenAway),
    /// Files that are nothing else.
    Files,
}

/// Writes an archive that is no layer: names that would mean a removal in one stand for themselves. What an upper directory
/// takes away is not in it: that is returned. What [`super::layer::unpack_over`] would refuse or leave out is refused.
pub(crate) fn pack(directory: &Path, out: impl Write, of: Of) -> Result<TakenAway, Stop> {
    let root = Root::open(directory, Links::Refused).map_err(|error| unreadable(&[], error))?;
    let mut capture = Capture::new(root, out, of);
    capture.whole()?;
    Ok(match capture.of {
        Of::Upper(taken) => taken,
        Of::Layer | Of::Files => TakenAway::default(),
    })
}

struct Capture<W> {
    root: Root,
    out: W,
    /// Inodes with several names, and the name each was written as.
    inodes: HashMap<(u32, u32, u64), Vec<u8>>,
    of: Of,
    /// How many entries and bytes of files there are so far.
    entries: u64,
    bytes: u64,
}

impl<W: Write> Capture<W> {
    fn new(root: Root, out: W, of: Of) -> Self {
        Self { root, out, inodes: HashMap::new(), of, entries: 0, bytes: 0 }
    }

    fn whole(&mut self) -> Result<(), Stop> {
        self.tree(&[])?;
        self.out.write_all(&[0; 2 * BLOCK]).map_err(Stop::Write)?;
        self.out.flush().map_err(Stop::Write)
    }

    fn tree(&mut self, path: &[u8]) -> Result<(), Stop> {
        let mut pending = vec![path.to_vec()];
        while let Some(path) = pending.pop() {
            if !self.entry(&path)? {
                continue;
            }
            let directory = self
                .root
                .open_at(&path, OFlags::RDONLY | OFlags::DIRECTORY)
                .map_err(|error| unreadable(&path, error))?;
            let names = beneath::names(directory.as_fd()).map_err(|error| unreadable(&path, error))?;
            // The last pushed is the first popped.
            for name in names.into_iter().rev() {
                pending.push(if path.is_empty() { name } else { [&path[..], &name].join(&b'/') });
            }
        }
        Ok(())
    }

    /// Writes one entry; tells whether it is a directory to be entered.
    fn entry(&mut self, path: &[u8]) -> Result<bool, Stop> {
        let node = self.root.node(path).map_err(|error| unreadable(path, error))?;
        let stat = node.statx().map_err(|error| unreadable(path, error))?;
        let file_type = FileType::from_raw_mode(stat.stx_mode.into());
        let not_kept = |reason| Stop::Fault(RootfsFault::NotKept { member: beneath::display(path), reason });
        if path.len() > MAX_PATH {
            return Err(not_kept("its path is longer than 4095 bytes"));
        }
        if let Of::Upper(taken) = &mut self.of
            && file_type == FileType::CharacterDevice
            && (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0)
        {
            taken.removed.push(path.to_vec());
            return Ok(false);
        }
        if self.of == Of::Layer && beneath::split(path).1.starts_with(WHITEOUT) {
            return Err(not_kept("a name that begins with .wh. means a removal there"));
        }
        if matches!(file_type, FileType::Socket | FileType::Unknown) {
            return Ok(false);
        }
        if self.of != Of::Layer {
            self.entries += 1;
            if file_type == FileType::RegularFile {
                self.bytes = self.bytes.saturating_add(stat.stx_size);
            }
            if matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice) {
                return Err(not_kept("it is a device"));
            }
            if self.entries > MAX_LAYER_ENTRIES || self.bytes > MAX_LAYER_BYTES {
                return Err(not_kept("the files before it are as many, or as large, as are unpacked again"));
            }
        }
        let is_directory = file_type == FileType::Directory;
        if stat.stx_nlink > 1 && !is_directory {
            let inode = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
            if let Some(first) = self.inodes.get(&inode) {
                let first = first.clone();
                self.header(path, b'1', &stat, &first, 0, &[])?;
                return Ok(false);
            }
            self.inodes.insert(inode, path.to_vec());
        }
        let mut xattrs = node.xattrs().map_err(|error| unreadable(path, error))?;
        match &mut self.of {
            Of::Layer => {}
            Of::Upper(taken) => {
                if is_directory && xattrs.iter().any(|(name, value)| name == OPAQUE && value == b"y") {
                    taken.hidden.push(path.to_vec());
                }
                xattrs.retain(|(name, _)| !name.starts_with(OF_OVERLAY));
            }
            Of::Files if xattrs.iter().any(|(name, _)| name.starts_with(OF_OVERLAY)) => {
                return Err(not_kept("it has an attribute of overlayfs, which is of use in its place alone"));
            }
            Of::Files => {}
        }
        if xattrs.iter().any(|(name, _)| name.contains(&b'=')) {
            return Err(not_kept("the name of an extended attribute holds an ="));
        }
        let (type_flag, size) = match file_type {
            FileType::RegularFile => (b'0', stat.stx_size),
            FileType::Symlink => (b'2', 0),
            FileType::CharacterDevice => (b'3', 0),
            FileType::BlockDevice => (b'4', 0),
            FileType::Fifo => (b'6', 0),
            _ => (b'5', 0),
        };
        let link = if type_flag == b'2' {
            node.link_target().map_err(|error| unreadable(path, error))?
        } else {
            Vec::new()
        };
        self.header(path, type_flag, &stat, &link, size, &xattrs)?;
        if type_flag == b'0' {
            self.content(path, &node, &stat)?;
        }
        let is_mount = !path.is_empty() && stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        Ok(is_directory && !is_mount)
    }

    fn content(&mut self, path: &[u8], node: &Node, stat: &Statx) -> Result<(), Stop> {
        let changed = || Stop::Fault(RootfsFault::Changed { member: beneath::display(path) });
        let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
        let file = rustix::fs::openat(CWD, node.magic(), flags, Mode::empty())
            .map_err(|error| unreadable(path, error.into()))?;
        let mut file = File::from(file);
        let mut buffer = vec![0; 256 << 10];
        let mut left = stat.stx_size;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(buffer.len()).min(buffer.len());
            let read = file.read(&mut buffer[..wanted]).map_err(|error| unreadable(path, error))?;
            if read == 0 {
                return Err(changed());
            }
            self.out.write_all(&buffer[..read]).map_err(Stop::Write)?;
            left -= read as u64;
        }
        let now = node.statx().map_err(|error| unreadable(path, error))?;
        let version = |stat: &Statx| (stat.stx_size, stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec);
        if version(&now) != version(stat) {
            return Err(changed());
        }
        self.pad(stat.stx_size)
    }

    fn header(
        &mut self,
        path: &[u8],
        type_flag: u8,
        stat: &Statx,
        link: &[u8],
        size: u64,
        xattrs: &[beneath::XattrPair],
    ) -> Result<(), Stop> {
        let mut name = if path.is_empty() { b".".to_vec() } else { path.to_vec() };
        if type_flag == b'5' {
            name.push(b'/');
        }
        let (uid, gid) = (u64::from(stat.stx_uid), u64::from(stat.stx_gid));
        let mtime = stat.stx_mtime;
        let plain_time = u64::try_from(mtime.tv_sec).ok().filter(|time| *time <= MAX_LONG_FIELD);
        let mut records = Vec::new();
        if name.len() > NAME_FIELD {
            record(&mut records, b"path", &name);
        }
        if link.len() > NAME_FIELD {
            record(&mut records, b"linkpath", link);
        }
        if size > MAX_LONG_FIELD {
            record(&mut records, b"size", size.to_string().as_bytes());
        }
        for (key, value) in [(b"uid", uid), (b"gid", gid)] {
            if value > MAX_ID_FIELD {
                record(&mut records, key, value.to_string().as_bytes());
            }
        }
        if mtime.tv_nsec != 0 || plain_time.is_none() {
            record(&mut records, b"mtime", time(mtime.tv_sec, mtime.tv_nsec).as_bytes());
        }
        for (key, value) in xattrs {
            record(&mut records, &[b"SCHILY.xattr.", &key[..]].concat(), value);
        }
        if !records.is_empty() {
            let length = records.len() as u64;
            let fields = Fields { mode: 0o644, size: length, ..Fields::default() };
            self.block(b"././@PaxHeader", b'x', &[], &fields)?;
            self.out.write_all(&records).map_err(Stop::Write)?;
            self.pad(length)?;
        }
        let fit = |value: u64, most: u64| if value > most { 0 } else { value };
        let fields = Fields {
            mode: u64::from(stat.stx_mode) & 0o7777,
            uid: fit(uid, MAX_ID_FIELD),
            gid: fit(gid, MAX_ID_FIELD),
            size: fit(size, MAX_LONG_FIELD),
            mtime: plain_time.unwrap_or(0),
            device: if matches!(type_flag, b'3' | b'4') {
                (stat.stx_rdev_major.into(), stat.stx_rdev_minor.into())
            } else {
                (0, 0)
            },
        };
        self.block(&name, type_flag, link, &fields)
    }

    fn block(&mut self, name: &[u8], type_flag: u8, link: &[u8], fields: &Fields) -> Result<(), Stop> {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name[..name.len().min(NAME_FIELD)]);
        put(100, format!("{:07o}", fields.mode).as_bytes());
        put(108, format!("{:07o}", fields.uid).as_bytes());
        put(116, format!("{:07o}", fields.gid).as_bytes());
        put(124, format!("{:011o}", fields.size).as_bytes());
        put(136, format!("{:011o}", fields.mtime).as_bytes());
        put(148, b"        ");
        put(156, &[type_flag]);
        put(157, &link[..link.len().min(NAME_FIELD)]);
        put(257, b"ustar\x0000");
        // Linux has 12 bits of major and 20 of minor numbers; both fit.
        put(329, format!("{:07o}", fields.device.0).as_bytes());
        put(337, format!("{:07o}", fields.device.1).as_bytes());
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.out.write_all(&block).map_err(Stop::Write)
    }

    fn pad(&mut self, written: u64) -> Result<(), Stop> {
        let padding = written.next_multiple_of(BLOCK as u64) - written;
        self.out.write_all(&[0; BLOCK][..usize::try_from(padding).unwrap_or(0)]).map_err(Stop::Write)
    }
}

/// Numbers of a header.
#[derive(Default)]
struct Fields {
    mode: u64,
    uid: u64,
    gid: u64,
    size: u64,
    mtime: u64,
    device: (u64, u64),
}

/// Adds a pax record; its length counts its own digits.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} ").as_bytes());
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Decimal seconds; the fraction of a time before 1970 counts towards 1970.
fn time(seconds: i64, nanoseconds: u32) -> String {
    let (sign, whole, fraction) = if seconds < 0 && nanoseconds > 0 {
        ("-", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds)
    } else if seconds < 0 {
        ("-", seconds.unsigned_abs(), 0)
    } else {
        ("", seconds.unsigned_abs(), nanoseconds)
    };
    if fraction == 0 { format!("{sign}{whole}") } else { format!("{sign}{whole}.{fraction:09}") }
}

fn unreadable(path: &[u8], source: io::Error) -> Stop {
    Stop::Fault(RootfsFault::Read { member: beneath::display(path), source })
}
