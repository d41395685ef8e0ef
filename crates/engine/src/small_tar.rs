//! Archives of small filesystems in memory, in the place of tar(1).
//!
//! CRIU starts `tar` and `gzip` for each tmpfs of a container, four times in the frozen time of nearly every move (`/dev`
//! and `/dev/shm`, at both ends), 3 to 4 ms each. Most of these have a few devices and links. For such ones
//! `godwit-tar` ([`run`]) does what CRIU asks of tar itself, in less than a quarter of the time, and with the
//! same archives. For all others, and all that it does not know, it becomes tar(1) before it has done anything.
//!
//! Archives come from other nodes: names are resolved below the directory, and links are not followed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use flate2::Compression;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, makedev, mkdirat, mknodat, symlinkat};
use tar::{EntryType, Header};

use crate::beneath::{self, Attributes, Links, Node, Root};
use crate::image::archive::{Member, MemberKind, Reader};

/// Most entries, bytes of one file, bytes of all files, and bytes of an archive, until tar(1) is the better one.
const MOST_ENTRIES: usize = 256;
const MOST_FILE: u64 = 64 << 10;
const MOST_BYTES: u64 = 1 << 20;
const MOST_ARCHIVE: u64 = 2 << 20;

/// Why it is a matter for tar(1).
#[derive(Debug)]
pub enum NotSmall {
    /// There is something that only tar(1) knows, or too much of it.
    Other(&'static str),
    /// Something failed; tar(1) says it better.
    Io(io::Error),
}

impl From<io::Error> for NotSmall {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for NotSmall {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// Does what the words after the program's name ask tar(1) for, as far as CRIU does; `Err` where nothing was done.
///
/// # Errors
/// It is a matter for tar(1).
pub fn run(words: &[OsString]) -> Result<(), NotSmall> {
    let text: Vec<_> = words.iter().map(|word| word.to_str().unwrap_or("")).collect();
    match text.as_slice() {
        ["--create", "--gzip", .., "--directory", "/proc/self/fd/0", "."] => {
            let archive = create(io::stdin().as_fd())?;
            Ok(io::stdout().write_all(&archive)?)
        }
        ["--extract", "--gzip", .., "--directory", place] => {
            let mut archive = File::from(io::stdin().as_fd().try_clone_to_owned()?);
            let begin = archive.stream_position()?;
            extract(&mut archive, Path::new(place)).inspect_err(|_| {
                // Where this fails tar(1) finds no archive, and says so.
                let _ = archive.seek(io::SeekFrom::Start(begin));
            })
        }
        _ => Err(NotSmall::Other("it is not what CRIU asks for")),
    }
}

/// An archive of a directory.
fn create(directory: BorrowedFd<'_>) -> Result<Vec<u8>, NotSmall> {
    let begin = stat(directory, b"")?;
    let device = (begin.stx_dev_major, begin.stx_dev_minor);
    let encoder = GzEncoder::new(Vec::new(), Compression::none());
    let mut writer = Writer { builder: tar::Builder::new(encoder), entries: 0, bytes: 0 };
    writer.add(b"./", &begin, &[], &[])?;
    let mut left = vec![(Vec::new(), directory.try_clone_to_owned()?)];
    while let Some((path, directory)) = left.pop() {
        let listed = rustix::fs::openat(
            &directory,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        for name in beneath::names(listed.as_fd())? {
            let found = stat(listed.as_fd(), &name)?;
            let mut full = [b"./", &path[..], &name].concat();
            match FileType::from_raw_mode(found.stx_mode.into()) {
                FileType::Directory => {
                    full.push(b'/');
                    writer.add(&full, &found, &[], &[])?;
                    if (found.stx_dev_major, found.stx_dev_minor) == device {
                        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                        let below = rustix::fs::openat(&listed, &name[..], flags, Mode::empty())?;
                        left.push((full[2..].to_vec(), below));
                    }
                }
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(&listed, &name[..], Vec::new())?;
                    writer.add(&full, &found, target.as_bytes(), &[])?;
                }
                FileType::RegularFile => {
                    writer.add(&full, &found, &[], &content(listed.as_fd(), &name, &found)?)?
                }
                FileType::CharacterDevice | FileType::BlockDevice | FileType::Fifo => {
                    writer.add(&full, &found, &[], &[])?
                }
                // tar(1) passes over sockets, too.
                _ => {}
            }
        }
    }
    Ok(writer.builder.into_inner()?.finish()?)
}

fn stat(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Statx, NotSmall> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    Ok(rustix::fs::statx(directory, name, flags, StatxFlags::BASIC_STATS)?)
}

fn content(directory: BorrowedFd<'_>, name: &[u8], found: &Statx) -> Result<Vec<u8>, NotSmall> {
    if found.stx_nlink > 1 || found.stx_size > MOST_FILE {
        return Err(NotSmall::Other("it has a large file, or one with several names"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut content = Vec::new();
    let file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty())?);
    file.take(MOST_FILE + 1).read_to_end(&mut content)?;
    if content.len() as u64 != found.stx_size {
        return Err(NotSmall::Other("a file changes while it is read"));
    }
    Ok(content)
}

struct Writer {
    builder: tar::Builder<GzEncoder<Vec<u8>>>,
    entries: usize,
    bytes: u64,
}

impl Writer {
    fn add(&mut self, path: &[u8], found: &Statx, target: &[u8], content: &[u8]) -> Result<(), NotSmall> {
        self.entries += 1;
        self.bytes += content.len() as u64;
        if self.entries > MOST_ENTRIES || self.bytes > MOST_BYTES {
            return Err(NotSmall::Other("it has many files"));
        }
        let mut header = Header::new_gnu();
        let gnu = header.as_gnu_mut().ok_or(NotSmall::Other("it has no header"))?;
        // One that is full has no room for its end, which GNU tar wants.
        put(&mut gnu.name, path)?;
        put(&mut gnu.linkname, target)?;
        let mtime = u64::try_from(found.stx_mtime.tv_sec)
            .map_err(|_| NotSmall::Other("it has a time before 1970"))?;
        header.set_entry_type(match FileType::from_raw_mode(found.stx_mode.into()) {
            FileType::Directory => EntryType::Directory,
            FileType::Symlink => EntryType::Symlink,
            FileType::CharacterDevice => EntryType::Char,
            FileType::BlockDevice => EntryType::Block,
            FileType::Fifo => EntryType::Fifo,
            _ => EntryType::Regular,
        });
        header.set_mode(u32::from(found.stx_mode) & 0o7777);
        header.set_uid(found.stx_uid.into());
        header.set_gid(found.stx_gid.into());
        header.set_mtime(mtime);
        header.set_size(content.len() as u64);
        header.set_device_major(found.stx_rdev_major)?;
        header.set_device_minor(found.stx_rdev_minor)?;
        header.set_cksum();
        Ok(self.builder.append(&header, content)?)
    }
}

fn put(field: &mut [u8; 100], value: &[u8]) -> Result<(), NotSmall> {
    if value.len() >= field.len() {
        return Err(NotSmall::Other("it has a long path"));
    }
    field[..value.len()].copy_from_slice(value);
    Ok(())
}

/// Makes in an empty directory what is in an archive: all of it is looked at before anything is made.
///
/// # Errors
/// It is a matter for tar(1); where something failed, a part may have been made.
pub fn extract(archive: &mut impl Read, place: &Path) -> Result<(), NotSmall> {
    let mut packed = Vec::new();
    archive.take(MOST_ARCHIVE + 1).read_to_end(&mut packed)?;
    if packed.len() as u64 > MOST_ARCHIVE {
        return Err(NotSmall::Other("it is a large archive"));
    }
    let mut unpacked = Vec::new();
    MultiGzDecoder::new(&packed[..]).take(MOST_ARCHIVE + 1).read_to_end(&mut unpacked)?;
    if unpacked.len() as u64 > MOST_ARCHIVE {
        return Err(NotSmall::Other("it is a large archive"));
    }
    let parts = parts(&unpacked)?;
    let root = Root::open(place, Links::Refused)?;
    let top = root.open_at(b"", OFlags::RDONLY | OFlags::DIRECTORY)?;
    if !beneath::names(top.as_fd())?.is_empty() {
        return Err(NotSmall::Other("its place is not empty"));
    }
    parts.iter().try_for_each(|part| make(&root, part))?;
    // What is made in a directory changes its time.
    for part in parts.iter().rev().filter(|part| part.member.kind == MemberKind::Directory) {
        root.node(&part.path)?.set_mtime(part.member.mtime)?;
    }
    Ok(())
}

/// A member, where it comes below the directory, and what is in it.
struct Part {
    path: Vec<u8>,
    member: Member,
    content: Vec<u8>,
}

/// All parts of an archive.
fn parts(unpacked: &[u8]) -> Result<Vec<Part>, NotSmall> {
    let mut reader = Reader::new(unpacked);
    let mut parts = Vec::new();
    while let Some(member) = reader.next().map_err(|_| NotSmall::Other("it is a damaged archive"))? {
        let known = !matches!(member.kind, MemberKind::HardLink | MemberKind::Other);
        if !known || member.sparse.is_some() || parts.len() >= MOST_ENTRIES {
            return Err(NotSmall::Other("it has something else than a small tmpfs has"));
        }
        let names = member.path.split(|&byte| byte == b'/').filter(|part| !part.is_empty() && *part != b".");
        let path = names.collect::<Vec<_>>().join(&b'/');
        beneath::check_path(&path).map_err(NotSmall::Other)?;
        if path.is_empty() && member.kind != MemberKind::Directory {
            return Err(NotSmall::Other("its root is no directory"));
        }
        // What a header says may be more than there is.
        let stored = usize::try_from(member.stored).ok().filter(|stored| *stored <= unpacked.len());
        let mut content = vec![0; stored.ok_or(NotSmall::Other("it is a damaged archive"))?];
        let mut filled = 0;
        while filled < content.len() {
            match reader.read_data(&mut content[filled..]) {
                Ok(read) if read > 0 => filled += read,
                _ => return Err(NotSmall::Other("it is a damaged archive")),
            }
        }
        parts.push(Part { path, member, content });
    }
    Ok(parts)
}

fn make(root: &Root, Part { path, member, content }: &Part) -> Result<(), NotSmall> {
    let attributes = attributes(member)?;
    if path.is_empty() {
        return set(&root.node(path)?, member, &attributes);
    }
    let (parent, name) = beneath::split(path);
    let parent = root.directory(parent)?;
    let own = Mode::RUSR | Mode::WUSR;
    match member.kind {
        MemberKind::Directory => mkdirat(&parent, name, Mode::RWXU)?,
        MemberKind::Symlink => symlinkat(&member.link[..], &parent, name)?,
        MemberKind::File => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            File::from(rustix::fs::openat(&parent, name, flags, own)?).write_all(content)?;
        }
        _ => {
            let kind = match member.kind {
                MemberKind::CharacterDevice => FileType::CharacterDevice,
                MemberKind::BlockDevice => FileType::BlockDevice,
                _ => FileType::Fifo,
            };
            let part =
                |number: u64| u32::try_from(number).map_err(|_| NotSmall::Other("it has no such device"));
            mknodat(&parent, name, kind, own, makedev(part(member.device.0)?, part(member.device.1)?))?;
        }
    }
    set(&Node::at(parent.as_fd(), name)?, member, &attributes)
}

fn attributes(member: &Member) -> Result<Attributes, NotSmall> {
    let id = |number: u64| {
        let id = u32::try_from(number).ok().filter(|id| *id != u32::MAX);
        id.ok_or(NotSmall::Other("it has an owner out of range"))
    };
    let (uid, gid) = (id(member.uid)?, id(member.gid)?);
    Ok(Attributes { mode: member.mode, uid, gid, mtime: member.mtime, xattrs: Vec::new() })
}

fn set(node: &Node, member: &Member, attributes: &Attributes) -> Result<(), NotSmall> {
    node.set_attributes(member.kind == MemberKind::Symlink, attributes).map_err(|fault| fault.error)?;
    Ok(node.set_mtime(attributes.mtime)?)
}
