//! Reads an archive, of godwit's or of Podman's, into a directory of its own.
//!
//! Nothing of it is trusted: a member is a file of a known name, or it is passed over; one that is a link or a device, that
//! comes twice, or whose name leads elsewhere is refused, and so is what does not fit on the disk. The digests of one of
//! godwit's are checked before anything is made of it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::{
    ArchiveError, CONFIG, DELETED, DEV_SHM, IMAGES, LOOK, NETWORK, OWN, ROOTFS_DIFF, SPEC, STATISTICS, SUMS,
    VOLUMES, fits, is_plain_name,
};
use crate::image::archive::{Member, MemberKind, Reader, Stream, TarFault};

/// Most members: CRIU writes ten or twenty files for a process.
const MOST_MEMBERS: usize = 1 << 20;
/// Longest name.
const LONGEST_NAME: usize = 1024;
/// Most bytes of all names: each is kept, with its digest, until the end.
const NAMES: usize = 64 << 20;
/// Largest document: those of Podman have some tens of thousands of bytes.
const DOCUMENT: u64 = 4 << 20;
/// Largest list of removed files or of digests, which have a line for each.
const LIST: u64 = 64 << 20;
/// Most bytes of members that are passed over, such as Podman's log: a few of a compressed one can stand for any number.
const PASSED_OVER: u64 = 16 << 30;
/// Most bytes behind the end of the archive: tar(1) fills the last 10 KiB.
const BEHIND: u64 = 1 << 20;
/// Bytes that are copied at a time.
const CHUNK: usize = 256 << 10;

/// Documents that are kept.
const DOCUMENTS: &[&str] = &[OWN, SUMS, CONFIG, SPEC, NETWORK, STATISTICS, DELETED];
/// Archives that are kept.
const ARCHIVES: &[&str] = &[ROOTFS_DIFF, DEV_SHM];

/// An archive that lies unpacked in a directory.
#[derive(Debug)]
pub struct Unpacked {
    directory: PathBuf,
    /// Bytes of each member that was kept.
    members: BTreeMap<String, u64>,
}

impl Unpacked {
    /// Whether godwit made it: then its digests were right.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.has(OWN)
    }

    /// Whether it has this member.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// Where a member is.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The directory of CRIU's images.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.path(IMAGES)
    }

    /// Where everything is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The content of a document.
    ///
    /// # Errors
    /// It is not there.
    pub fn document(&self, name: &str) -> Result<Vec<u8>, ArchiveError> {
        if !self.has(name) {
            return Err(ArchiveError::Damaged(format!("it has no {name}")));
        }
        std::fs::read(self.path(name))
            .map_err(ArchiveError::io(format!("read {}", self.path(name).display())))
    }
}

/// Unpacks an archive into a directory, which is empty.
///
/// # Errors
/// It is damaged, asks for what it must not, or does not fit.
pub fn unpack(archive: impl Read + 'static, into: &Path) -> Result<Unpacked, ArchiveError> {
    for name in [IMAGES, VOLUMES] {
        let path = into.join(name);
        std::fs::create_dir(&path).map_err(ArchiveError::io(format!("make {}", path.display())))?;
    }
    let archive = decompressed(BufReader::with_capacity(CHUNK, archive))
        .map_err(|error| ArchiveError::Damaged(error.to_string()))?;
    let mut unpacking = Unpacking {
        into,
        reader: Reader::new(Skipping { from: archive, is_over: false }),
        members: BTreeMap::new(),
        sums: BTreeMap::new(),
        seen: 0,
        names: 0,
        passed_over: 0,
        buffer: vec![0; CHUNK],
    };
    while let Some(member) = unpacking.reader.next()? {
        unpacking.member(&member)?;
    }
    let Unpacking { reader, members, sums, .. } = unpacking;
    // Behind its end there is nothing, and the checksum of its compression.
    let offset = reader.offset();
    let stream = reader.into_stream();
    if stream.is_over {
        return Err(ArchiveError::Damaged(format!("it is cut off after {offset} bytes")));
    }
    let behind = io::copy(&mut stream.from.take(BEHIND + 1), &mut io::sink());
    if behind.map_err(|error| ArchiveError::Damaged(error.to_string()))? > BEHIND {
        return Err(ArchiveError::Refused("something follows behind its end".into()));
    }
    let unpacked = Unpacked { directory: into.to_owned(), members };
    for needed in [CONFIG, SPEC, "checkpoint/inventory.img"] {
        if !unpacked.has(needed) {
            return Err(ArchiveError::Damaged(format!("it has no {needed}")));
        }
    }
    if unpacked.is_own() || unpacked.has(SUMS) {
        check(&unpacked, sums)?;
    }
    Ok(unpacked)
}

/// Compares the digests of all members with those that the archive has.
fn check(unpacked: &Unpacked, mut sums: BTreeMap<String, String>) -> Result<(), ArchiveError> {
    let cut_off = || ArchiveError::Damaged(format!("it has no {SUMS}, which comes last: it was cut off"));
    let text = if unpacked.has(SUMS) { unpacked.document(SUMS)? } else { return Err(cut_off()) };
    sums.remove(SUMS);
    let text = String::from_utf8(text).map_err(|_| ArchiveError::Damaged(format!("{SUMS} is no text")))?;
    for line in text.lines() {
        let Some((sum, name)) = line.split_once("  ") else {
            return Err(ArchiveError::Damaged(format!("{SUMS} has a line that is none of sha256sum's")));
        };
        match sums.remove(name) {
            Some(found) if found == sum => {}
            Some(_) => {
                return Err(ArchiveError::Damaged(format!(
                    "the checksum of {name} is wrong: the file has changed since it was written; take another copy of it"
                )));
            }
            None => return Err(ArchiveError::Damaged(format!("{name} is missing"))),
        }
    }
    match sums.keys().next() {
        None => Ok(()),
        Some(name) => Err(ArchiveError::Damaged(format!("{name} has no checksum: it was added later"))),
    }
}

struct Unpacking<'a, R: Read> {
    into: &'a Path,
    reader: Reader<Skipping<R>>,
    members: BTreeMap<String, u64>,
    /// Digests of all members, also of those that are passed over.
    sums: BTreeMap<String, String>,
    seen: usize,
    names: usize,
    passed_over: u64,
    buffer: Vec<u8>,
}

impl<R: Read> Unpacking<'_, R> {
    fn member(&mut self, member: &Member) -> Result<(), ArchiveError> {
        self.seen += 1;
        if self.seen > MOST_MEMBERS {
            return Err(ArchiveError::Refused(format!("it has more than {MOST_MEMBERS} members")));
        }
        let Some(name) = name(&member.path)? else { return Ok(()) };
        self.names += name.len();
        if self.names > NAMES {
            return Err(ArchiveError::Refused(format!("its members have names of more than {NAMES} bytes")));
        }
        match member.kind {
            MemberKind::Directory => return Ok(()),
            MemberKind::File if member.sparse.is_none() => {}
            _ => return Err(ArchiveError::Refused(format!("{name} in it is no plain file"))),
        }
        let is_document = DOCUMENTS.contains(&name.as_str());
        let most = if [SUMS, DELETED].contains(&name.as_str()) { LIST } else { DOCUMENT };
        if is_document && member.stored > most {
            return Err(ArchiveError::Refused(format!("{name} in it has {} bytes", member.stored)));
        }
        if self.sums.contains_key(&name) {
            return Err(ArchiveError::Refused(format!("{name} is in it twice")));
        }
        let is_kept = is_document || ARCHIVES.contains(&name.as_str()) || is_image_or_volume(&name);
        let mut file = None;
        if !is_kept {
            self.passed_over = self.passed_over.saturating_add(member.stored);
            if self.passed_over > PASSED_OVER {
                return Err(ArchiveError::Refused(format!("{name} in it has {} bytes", member.stored)));
            }
        }
        if is_kept {
            let path = self.into.join(&name);
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
            file = Some(made.map_err(ArchiveError::io(format!("make {}", path.display())))?);
        }
        let sum = self.copy(&name, member.stored, file.as_mut())?;
        if is_kept {
            self.members.insert(name.clone(), member.stored);
        }
        self.sums.insert(name, sum);
        Ok(())
    }

    /// Copies a member's data, and returns their digest.
    fn copy(&mut self, name: &str, size: u64, mut to: Option<&mut File>) -> Result<String, ArchiveError> {
        let (mut hasher, mut left, mut look) = (Sha256::new(), size, 0);
        while left > 0 {
            if let Some(file) = &to
                && look == 0
            {
                look = LOOK.min(left);
                if !fits(file, look).map_err(ArchiveError::io("ask for the free space"))? {
                    return Err(ArchiveError::Refused(format!(
                        "{name} has {size} bytes, and the disk of this node is full"
                    )));
                }
            }
            let wanted = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let read = self.reader.read_data(&mut self.buffer[..wanted])?;
            if read == 0 {
                return Err(ArchiveError::Damaged(format!("it ends inside of {name}")));
            }
            hasher.update(&self.buffer[..read]);
            if let Some(file) = &mut to {
                file.write_all(&self.buffer[..read]).map_err(ArchiveError::io(format!("write {name}")))?;
            }
            left -= read as u64;
            look = look.saturating_sub(read as u64);
        }
        Ok(format!("{:x}", hasher.finalize()))
    }
}

/// The name of a member, below the directory; nothing for the directory itself.
fn name(path: &[u8]) -> Result<Option<String>, ArchiveError> {
    let refused = |reason: &str| {
        let shown: String = String::from_utf8_lossy(path).chars().take(100).collect();
        Err(ArchiveError::Refused(format!("a member {shown:?} of it {reason}")))
    };
    let Ok(text) = std::str::from_utf8(path) else { return refused("has a name that is no text") };
    if text.len() > LONGEST_NAME {
        return refused("has a name that is too long");
    }
    if text.starts_with('/') {
        return refused("has an absolute name");
    }
    if text.contains(['\0', '\n']) {
        return refused("has a name with a line feed");
    }
    let parts: Vec<_> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return refused("has a name that leads out of it");
    }
    Ok((!parts.is_empty()).then(|| parts.join("/")))
}

/// Whether a member is an image of CRIU's or a volume.
fn is_image_or_volume(name: &str) -> bool {
    match name.split_once('/') {
        Some((IMAGES, file)) => is_plain_name(file),
        Some((VOLUMES, file)) => file.strip_suffix(".tar").is_some_and(is_plain_name),
        _ => false,
    }
}

impl From<TarFault> for ArchiveError {
    fn from(fault: TarFault) -> Self {
        Self::Damaged(match fault {
            TarFault::NotTar => "it is no tar archive".into(),
            TarFault::Read { offset, source } if source.kind() == io::ErrorKind::UnexpectedEof => {
                format!("it is cut off after {offset} bytes")
            }
            TarFault::Read { offset, source } => format!("after {offset} bytes: {source}"),
            TarFault::Header { offset, reason } => format!("after {offset} bytes: {reason}"),
        })
    }
}

/// A stream whose parts are passed over by reading them.
struct Skipping<R> {
    from: R,
    /// It has come to its end. An archive has zeros before that.
    is_over: bool,
}

impl<R: Read> Read for Skipping<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.is_over |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

impl<R: Read> Stream for Skipping<R> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.from).take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// The tar stream, whatever it is compressed with.
fn decompressed<R: Read + 'static>(mut archive: BufReader<R>) -> io::Result<Box<dyn Read>> {
    let magic = io::BufRead::fill_buf(&mut archive)?;
    Ok(if magic.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(archive))
    } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::stream::read::Decoder::with_buffer(archive)?)
    } else {
        Box::new(archive)
    })
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
