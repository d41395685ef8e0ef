//! Unpacks a layer into a directory that overlayfs can use as a lower one.
//!
//! OCI's whiteouts become those of overlayfs (`.wh.NAME`: a character device 0/0 called NAME;
//! `.wh..wh..opq`: the attribute `trusted.overlay.opaque`). Owners, modes, times, extended
//! attributes, hard links, devices, fifos and holes are kept. No entry leaves the directory:
//! the directories of its path are resolved as if the layer were the root, see
//! [`crate::beneath`].
//!
//! Not kept: `trusted.overlay.*` attributes of the tar (a layer must not redirect overlayfs), and
//! SELinux labels.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use super::archive::{Member, MemberKind, Reader, TarFault};
use super::digest::Hashing;
use super::{Digest, LayerFault};
use crate::beneath::{self, Attributes, Links, Node, Root};

/// Most entries of one layer: ten times the largest that were seen (machine-learning images).
pub const MAX_LAYER_ENTRIES: u64 = 4_000_000;
/// Most bytes of files one layer is unpacked to: more than a node of an edge has for images, and
/// far less than a crafted archive of some MiB can expand to.
pub const MAX_LAYER_BYTES: u64 = 256 << 30;
/// Bytes that unpacking leaves free on the disk, for the node's journal and logs.
const RESERVE_BYTES: u64 = 64 << 20;
/// How many bytes are unpacked between two checks of the free space.
const RESERVE_INTERVAL: u64 = 16 << 20;
/// Bytes of a file handled at a time.
const CHUNK: usize = 256 << 10;
/// Compared with what is written.
static ZEROS: [u8; CHUNK] = [0; CHUNK];
/// OCI's mark of a removed name.
const WHITEOUT: &[u8] = b".wh.";
/// OCI's mark of names that say something else.
const WHITEOUT_META: &[u8] = b".wh..wh.";
/// OCI's mark of a directory that hides what is below.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// The same for overlayfs (Documentation/filesystems/overlayfs.rst).
const OPAQUE_XATTR: (&[u8], &[u8]) = (b"trusted.overlay.opaque", b"y");

/// Unpacks the layer in `blob` into the empty directory `tree`; returns the digest of its tar
/// stream, the diff id.
pub(super) fn unpack(blob: File, tree: &Path) -> Result<(Digest, u64), LayerFault> {
    let root = Root::open(tree, Links::InRoot).map_err(|source| LayerFault::Entry {
        path: "/".into(),
        action: "open the directory".into(),
        source,
    })?;
    let stream = Hashing::new(decompressed(BufReader::with_capacity(CHUNK, blob)).map_err(damaged(0))?);
    let mut unpacker = Unpacker::new(root, stream, true);
    let root_attributes = Attributes { mode: 0o755, ..Attributes::default() };
    let node = unpacker.root.node(b"").map_err(|error| entry_fault(b"", "examine it", error))?;
    set(&node, b"", false, &root_attributes)?;
    unpacker.run()?;
    // What follows the end of the archive belongs to the digest.
    let at = unpacker.reader.offset();
    let mut stream = unpacker.reader.into_stream();
    io::copy(&mut (&mut stream).take(MAX_LAYER_BYTES), &mut io::sink()).map_err(damaged(at))?;
    let (_, digest, bytes) = stream.into_parts();
    Ok((digest, bytes))
}

/// Unpacks a plain archive over what is in the directory `tree`, as the root directory of a container has it: what is there
/// under a name of the archive's is replaced, but directories stay and get its attributes. Names that mean a removal in a layer
/// stand for themselves, and an archive with a device is refused.
pub(crate) fn unpack_over(archive: File, tree: &Path) -> Result<(), LayerFault> {
    let root = Root::open(tree, Links::InRoot).map_err(|source| LayerFault::Entry {
        path: "/".into(),
        action: "open the directory".into(),
        source,
    })?;
    let stream: Box<dyn Read> = Box::new(BufReader::with_capacity(CHUNK, archive));
    Unpacker::new(root, Hashing::new(stream), false).run()
}

fn damaged(bytes: u64) -> impl Fn(io::Error) -> LayerFault {
    move |source| LayerFault::Damaged { bytes, source }
}

/// The tar stream of a blob, whatever it is compressed with.
fn decompressed(mut blob: BufReader<File>) -> io::Result<Box<dyn Read>> {
    let magic = io::BufRead::fill_buf(&mut blob)?;
    Ok(if magic.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(blob))
    } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || is_skippable_frame(magic) {
        Box::new(zstd::stream::read::Decoder::with_buffer(blob)?)
    } else {
        Box::new(blob)
    })
}

/// zstd streams may begin with frames to be passed over (zstd:chunked has them at the end).
fn is_skippable_frame(magic: &[u8]) -> bool {
    matches!(magic, [first, 0x2a, 0x4d, 0x18, ..] if first & 0xf0 == 0x50)
}

struct Unpacker {
    root: Root,
    reader: Reader<Hashing<Box<dyn Read>>>,
    entries: u64,
    bytes: u64,
    checked_at: u64,
    buffer: Vec<u8>,
    /// Directories and the times they get once everything is in them.
    directories: Vec<(Vec<u8>, (i64, u32))>,
    /// Whether it is a layer's, in which some names mean a removal; else it has no devices.
    is_layer: bool,
}

impl Unpacker {
    fn new(root: Root, stream: Hashing<Box<dyn Read>>, is_layer: bool) -> Self {
        Self {
            root,
            reader: Reader::new(stream),
            entries: 0,
            bytes: 0,
            checked_at: 0,
            buffer: vec![0; CHUNK],
            directories: Vec::new(),
            is_layer,
        }
    }

    fn run(&mut self) -> Result<(), LayerFault> {
        while let Some(member) = self.reader.next()? {
            self.entries += 1;
            if self.entries > MAX_LAYER_ENTRIES {
                return Err(LayerFault::TooLarge { limit: MAX_LAYER_ENTRIES, unit: "entries" });
            }
            if member.kind != MemberKind::Other {
                self.member(&member)?;
            }
        }
        for (path, mtime) in self.directories.iter().rev() {
            // Later entries may have put something else in its place.
            let Ok(node) = self.root.node(path) else { continue };
            node.set_mtime(*mtime).map_err(|error| entry_fault(path, "set its time", error))?;
        }
        Ok(())
    }

    fn member(&mut self, member: &Member) -> Result<(), LayerFault> {
        let path = clean(&member.path)?;
        if path.is_empty() {
            return if member.kind == MemberKind::Directory { self.directory(member, &path) } else { Ok(()) };
        }
        let (parent_path, name) = beneath::split(&path);
        let parent = self.parent(&path, parent_path)?;
        if self.is_layer {
            if name == OPAQUE {
                return self.opaque(parent_path);
            }
            if name.starts_with(WHITEOUT_META) {
                return Ok(());
            }
            if let Some(removed) = name.strip_prefix(WHITEOUT) {
                return self.whiteout(parent.as_fd(), &path, removed);
            }
        } else if matches!(member.kind, MemberKind::CharacterDevice | MemberKind::BlockDevice) {
            return Err(path_fault(&path, "it is a device"));
        }
        if member.kind == MemberKind::Directory {
            return self.directory(member, &path);
        }
        beneath::remove_tree(parent.as_fd(), name)
            .map_err(|error| entry_fault(&path, "replace what had its name", error))?;
        let made = |result: rustix::io::Result<()>| {
            result.map_err(|error| entry_fault(&path, "make it", error.into()))
        };
        match member.kind {
            MemberKind::HardLink => return self.hard_link(member, &path, parent.as_fd(), name),
            MemberKind::Symlink => {
                if member.link.is_empty() || member.link.contains(&0) {
                    return Err(path_fault(&path, "it is a symbolic link to nothing"));
                }
                made(rustix::fs::symlinkat(&member.link[..], &parent, name))?;
            }
            MemberKind::File => self.file(member, &path, parent.as_fd(), name)?,
            _ => {
                let file_type = match member.kind {
                    MemberKind::CharacterDevice => FileType::CharacterDevice,
                    MemberKind::BlockDevice => FileType::BlockDevice,
                    _ => FileType::Fifo,
                };
                let part = |value| {
                    u32::try_from(value).map_err(|_| path_fault(&path, "its device number is damaged"))
                };
                let device = rustix::fs::makedev(part(member.device.0)?, part(member.device.1)?);
                made(rustix::fs::mknodat(&parent, name, file_type, Mode::RUSR | Mode::WUSR, device))?;
            }
        }
        let node = Node::at(parent.as_fd(), name).map_err(|error| entry_fault(&path, "examine it", error))?;
        set(&node, &path, member.kind == MemberKind::Symlink, &attributes(member, &path)?)
    }

    /// Opens the directory an entry is in; the ones a layer leaves out are made.
    fn parent(&mut self, path: &[u8], parent_path: &[u8]) -> Result<std::os::fd::OwnedFd, LayerFault> {
        match self.root.directory(parent_path) {
            Ok(parent) => return Ok(parent),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(entry_fault(path, "open its directory", error)),
        }
        let mut above =
            self.root.directory(b"").map_err(|error| entry_fault(path, "open its directory", error))?;
        let ends = parent_path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        for end in ends.chain([parent_path.len()]) {
            let prefix = &parent_path[..end];
            let name = beneath::split(prefix).1;
            match rustix::fs::mkdirat(&above, name, Mode::RWXU) {
                Ok(()) => {
                    let made = Attributes { mode: 0o755, ..Attributes::default() };
                    let node = Node::at(above.as_fd(), name)
                        .map_err(|error| entry_fault(path, "examine its directory", error))?;
                    set(&node, prefix, false, &made)?;
                    self.directories.push((prefix.to_vec(), made.mtime));
                }
                Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(entry_fault(path, "make its directory", error.into())),
            }
            above = self
                .root
                .directory(prefix)
                .map_err(|error| entry_fault(path, "open its directory", error))?;
        }
        Ok(above)
    }

    fn directory(&mut self, member: &Member, path: &[u8]) -> Result<(), LayerFault> {
        let mut attributes = attributes(member, path)?;
        let node = if path.is_empty() {
            self.root.node(path).map_err(|error| entry_fault(path, "examine it", error))?
        } else {
            let (parent_path, name) = beneath::split(path);
            let parent = self.parent(path, parent_path)?;
            let present = Node::at(parent.as_fd(), name).and_then(|node| node.statx());
            let present = present.ok().map(|stat| (FileType::from_raw_mode(stat.stx_mode.into()), stat));
            if let Some((FileType::Directory, _)) = present {
                let node =
                    Node::at(parent.as_fd(), name).map_err(|error| entry_fault(path, "examine it", error))?;
                // A whiteout in it may have come before the directory itself.
                let marks = node.xattrs().map_err(|error| entry_fault(path, "examine it", error))?;
                attributes.xattrs.extend(marks.into_iter().filter(|(mark, _)| mark == OPAQUE_XATTR.0));
                node
            } else {
                let replaces_whiteout = present.is_some_and(|(file_type, stat)| {
                    file_type == FileType::CharacterDevice
                        && (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0)
                });
                beneath::remove_tree(parent.as_fd(), name)
                    .map_err(|error| entry_fault(path, "replace what had its name", error))?;
                rustix::fs::mkdirat(&parent, name, Mode::RWXU)
                    .map_err(|error| entry_fault(path, "make it", error.into()))?;
                if replaces_whiteout {
                    attributes.xattrs.push((OPAQUE_XATTR.0.to_vec(), OPAQUE_XATTR.1.to_vec()));
                }
                Node::at(parent.as_fd(), name).map_err(|error| entry_fault(path, "examine it", error))?
            }
        };
        set(&node, path, false, &attributes)?;
        self.directories.push((path.to_vec(), attributes.mtime));
        Ok(())
    }

    /// Hides `removed` of the layers below; what this layer has of that name stays.
    fn whiteout(&self, parent: BorrowedFd<'_>, path: &[u8], removed: &[u8]) -> Result<(), LayerFault> {
        if removed.is_empty() || removed == b"." || removed == b".." {
            return Err(path_fault(path, "it does not name what it removes"));
        }
        let device = rustix::fs::makedev(0, 0);
        match rustix::fs::mknodat(parent, removed, FileType::CharacterDevice, Mode::empty(), device) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::EXIST) => {
                let node =
                    Node::at(parent, removed).map_err(|error| entry_fault(path, "examine it", error))?;
                let stat = node.statx().map_err(|error| entry_fault(path, "examine it", error))?;
                if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory {
                    let (name, value) = OPAQUE_XATTR;
                    node.set_xattr(name, value)
                        .map_err(|error| entry_fault(path, "hide what is below", error))?;
                }
                Ok(())
            }
            Err(error) => Err(entry_fault(path, "make the whiteout", error.into())),
        }
    }

    fn opaque(&self, directory: &[u8]) -> Result<(), LayerFault> {
        let (name, value) = OPAQUE_XATTR;
        self.root
            .open_at(directory, OFlags::RDONLY | OFlags::DIRECTORY)
            .and_then(|directory| {
                Ok(rustix::fs::fsetxattr(directory, name, value, rustix::fs::XattrFlags::empty())?)
            })
            .map_err(|error| entry_fault(directory, "hide what is below", error))
    }

    fn hard_link(
        &self,
        member: &Member,
        path: &[u8],
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), LayerFault> {
        let target = clean(&member.link)?;
        let (target_parent, target_name) = beneath::split(&target);
        if target_name.is_empty() {
            return Err(path_fault(path, "it is a hard link to a directory"));
        }
        let target_parent = self
            .root
            .directory(target_parent)
            .map_err(|error| entry_fault(path, "find the target of the hard link", error))?;
        rustix::fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())
            .map_err(|error| entry_fault(path, "make the hard link", error.into()))
    }

    fn file(
        &mut self,
        member: &Member,
        path: &[u8],
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), LayerFault> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| entry_fault(path, "make it", error.into()))?;
        let file = File::from(file);
        file.set_len(member.size).map_err(|error| entry_fault(path, "set its size", error))?;
        let whole = [(0, member.stored)];
        for (offset, length) in member.sparse.as_deref().unwrap_or(&whole) {
            self.piece(&file, path, *offset, *length)?;
        }
        Ok(())
    }

    fn piece(
        &mut self,
        file: &File,
        path: &[u8],
        mut offset: u64,
        mut length: u64,
    ) -> Result<(), LayerFault> {
        while length > 0 {
            let wanted = usize::try_from(length).unwrap_or(CHUNK).min(CHUNK);
            let read = self.reader.read_data(&mut self.buffer[..wanted])?;
            if read == 0 {
                return Err(path_fault(path, "its data are cut off"));
            }
            self.bytes += read as u64;
            if self.bytes > MAX_LAYER_BYTES {
                return Err(LayerFault::TooLarge { limit: MAX_LAYER_BYTES, unit: "bytes" });
            }
            if self.bytes >= self.checked_at {
                self.checked_at = self.bytes + RESERVE_INTERVAL;
                check_space(file).map_err(|error| entry_fault(path, "ask for the free space", error))??;
            }
            // Zeros become holes: many tars hold large sparse files written out.
            if self.buffer[..read] != ZEROS[..read] {
                file.write_all_at(&self.buffer[..read], offset)
                    .map_err(|error| entry_fault(path, "write it", error))?;
            }
            (offset, length) = (offset + read as u64, length - read as u64);
        }
        Ok(())
    }
}

fn check_space(file: &File) -> io::Result<Result<(), LayerFault>> {
    let stat = rustix::fs::fstatvfs(file)?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    Ok(if free < RESERVE_BYTES + RESERVE_INTERVAL {
        Err(LayerFault::DiskFull { reserve: RESERVE_BYTES + RESERVE_INTERVAL })
    } else {
        Ok(())
    })
}

/// A tar's name as a path below the root: `./`, leading and doubled slashes are passed over.
fn clean(name: &[u8]) -> Result<Vec<u8>, LayerFault> {
    let parts: Vec<&[u8]> =
        name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    let path = parts.join(&b'/');
    beneath::check_path(&path).map_err(|reason| path_fault(name, reason))?;
    Ok(path)
}

fn attributes(member: &Member, path: &[u8]) -> Result<Attributes, LayerFault> {
    let id = |value: u64| {
        let id = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
        id.ok_or_else(|| path_fault(path, "its owner is out of range"))
    };
    let kept = |name: &[u8]| !name.starts_with(b"trusted.overlay.") && !name.is_empty();
    Ok(Attributes {
        mode: member.mode,
        uid: id(member.uid)?,
        gid: id(member.gid)?,
        mtime: member.mtime,
        xattrs: member.xattrs.iter().filter(|(name, _)| kept(name)).cloned().collect(),
    })
}

fn set(node: &Node, path: &[u8], is_link: bool, attributes: &Attributes) -> Result<(), LayerFault> {
    node.set_attributes(is_link, attributes)
        .map_err(|fault| entry_fault(path, &format!("set its {}", fault.what), fault.error))?;
    node.set_mtime(attributes.mtime).map_err(|error| entry_fault(path, "set its time", error))
}

fn entry_fault(path: &[u8], action: &str, source: io::Error) -> LayerFault {
    LayerFault::Entry { path: beneath::display(path), action: action.to_owned(), source }
}

fn path_fault(path: &[u8], reason: &'static str) -> LayerFault {
    LayerFault::Path { path: beneath::display(path), reason }
}

impl From<TarFault> for LayerFault {
    fn from(fault: TarFault) -> Self {
        match fault {
            TarFault::NotTar => Self::NotTar,
            TarFault::Read { offset, source } => Self::Damaged { bytes: offset, source },
            TarFault::Header { offset, reason } => Self::Header { offset, reason },
        }
    }
}
