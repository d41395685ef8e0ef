//! Reads untrusted tar streams: POSIX ustar and pax, GNU long names and sparse files.
//!
//! ```text
//! stream  = { member } [ 512 zero bytes × 2 ] rest
//! member  = { extension } header [ sparse headers ] data, padded to 512
//! extension = header of type x (pax records), g (pax records for all, passed over),
//!             L (long name) or K (long link) + data, padded to 512
//! ```
//!
//! Written for layers and not taken from the `tar` crate, which reads extensions of any length
//! into memory and does not know pax sparse files. Formats: POSIX.1-2017 pax, GNU tar manual
//! "Basic Tar Format" and "Storing Sparse Files".

use std::io::{self, BufReader, Read};

use crate::beneath::XattrPair;

/// Size of a header, and what data are padded to.
const BLOCK: usize = 512;
/// Longest extension in bytes, and most bytes of extended attributes that the extensions of one
/// member give: sixteen attributes of the kernel's largest size.
const MAX_EXTENSION: u64 = 1 << 20;
/// Most pieces of one sparse file: a piece every 1 MiB of 128 GiB.
const MAX_SPARSE_PIECES: usize = 128 << 10;

/// What is wrong with a tar stream.
#[derive(Debug)]
pub(crate) enum TarFault {
    /// The first block is no header.
    NotTar,
    /// The stream cannot be read, or ends early.
    Read { offset: u64, source: io::Error },
    /// A header breaks the form.
    Header { offset: u64, reason: &'static str },
}

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberKind {
    File,
    Directory,
    Symlink,
    HardLink,
    CharacterDevice,
    BlockDevice,
    Fifo,
    /// Nothing a layer can hold.
    Other,
}

/// One member of a tar stream; its data are read from the [`Reader`] before the next.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: MemberKind,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: (i64, u32),
    pub(crate) link: Vec<u8>,
    pub(crate) device: (u64, u64),
    /// Size of the file it makes.
    pub(crate) size: u64,
    /// Bytes stored for it.
    pub(crate) stored: u64,
    /// Where in the file the stored bytes go (offset and length), for a sparse file.
    pub(crate) sparse: Option<Vec<(u64, u64)>>,
    pub(crate) xattrs: Vec<XattrPair>,
    /// Where its data begin in the stream.
    pub(crate) data_offset: u64,
}

/// Something read in order, parts of which can be passed over.
pub(crate) trait Stream: Read {
    /// Passes over `count` bytes.
    fn skip(&mut self, count: u64) -> io::Result<()>;
}

impl Stream for BufReader<std::fs::File> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let count = i64::try_from(count).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        self.seek_relative(count)
    }
}

impl Stream for &[u8] {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let count = usize::try_from(count).ok().filter(|&count| count <= self.len());
        *self = &self[count.ok_or(io::ErrorKind::UnexpectedEof)?..];
        Ok(())
    }
}

impl<R: Read> Stream for super::digest::Hashing<R> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<XattrPair>,
    /// Length of their names and values.
    xattr_bytes: u64,
    sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
    sparse_version: (u64, u64),
    sparse_map: Vec<u64>,
    is_sparse: bool,
}

/// Reads the members of a tar stream one by one.
pub(crate) struct Reader<S> {
    stream: S,
    offset: u64,
    /// Data of the present member that were not read.
    data_left: u64,
    /// Padding after them.
    padding: u64,
}

impl<S: Stream> Reader<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, offset: 0, data_left: 0, padding: 0 }
    }

    /// The stream, at the place read so far.
    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    /// How many bytes of the stream have been read.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next member; none at the end of the archive.
    pub(crate) fn next(&mut self) -> Result<Option<Member>, TarFault> {
        let mut extensions = Extensions::default();
        loop {
            self.skip(self.data_left + self.padding)?;
            (self.data_left, self.padding) = (0, 0);
            let at = self.offset;
            let Some(header) = self.header()? else { return Ok(None) };
            let size = field(&header[124..136], at)?;
            match header[156] {
                b'x' => self.pax(size, &mut extensions)?,
                b'L' => extensions.path = Some(self.long_name(size)?),
                b'K' => extensions.link = Some(self.long_name(size)?),
                b'g' => self.expect(size)?,
                _ => return self.member(&header, at, size, extensions).map(Some),
            }
        }
    }

    /// Reads from the present member's stored bytes; 0 at their end.
    pub(crate) fn read_data(&mut self, buffer: &mut [u8]) -> Result<usize, TarFault> {
        let wanted = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        self.read_exact(&mut buffer[..wanted])?;
        self.data_left -= wanted as u64;
        Ok(wanted)
    }

    /// The next header block; none at a zero block or the end of the stream.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>, TarFault> {
        let first = self.offset == 0;
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.stream.read(&mut block[filled..]) {
                Ok(0) if filled == 0 && !first => return Ok(None),
                Ok(0) if first => return Err(TarFault::NotTar),
                Ok(0) => return Err(self.fault(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => {
                    filled += read;
                    self.offset += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.fault(error)),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let at = self.offset - BLOCK as u64;
        let sum: i64 = block
            .iter()
            .enumerate()
            .map(|(index, byte)| if (148..156).contains(&index) { 32 } else { i64::from(*byte) })
            .sum();
        if number(&block[148..156]) != Some(sum) {
            return Err(if first {
                TarFault::NotTar
            } else {
                TarFault::Header { offset: at, reason: "its checksum is wrong" }
            });
        }
        Ok(Some(block))
    }

    fn member(
        &mut self,
        header: &[u8; BLOCK],
        at: u64,
        size: u64,
        extensions: Extensions,
    ) -> Result<Member, TarFault> {
        let fault = |reason| TarFault::Header { offset: at, reason };
        let type_flag = header[156];
        let mut stored = extensions.size.unwrap_or(size);
        let mut path = extensions.path.unwrap_or_else(|| plain_path(header));
        let kind = match type_flag {
            b'0' | 0 | b'7' | b'S' if type_flag != b'S' && path.ends_with(b"/") => MemberKind::Directory,
            b'0' | 0 | b'7' | b'S' => MemberKind::File,
            b'1' => MemberKind::HardLink,
            b'2' => MemberKind::Symlink,
            b'3' => MemberKind::CharacterDevice,
            b'4' => MemberKind::BlockDevice,
            b'5' => MemberKind::Directory,
            b'6' => MemberKind::Fifo,
            _ => MemberKind::Other,
        };
        // Links and the like may tell a size and have no data.
        if !matches!(kind, MemberKind::File | MemberKind::Other) {
            stored = 0;
        }
        let mut file_size = stored;
        let mut sparse = None;
        if type_flag == b'S' {
            file_size = field(&header[483..495], at)?;
            sparse = Some(self.old_sparse(header, at)?);
        }
        self.expect(stored)?;
        if extensions.is_sparse && kind == MemberKind::File {
            path = extensions.sparse_name.unwrap_or(path);
            file_size = extensions.sparse_size.ok_or_else(|| fault("a sparse file has no size"))?;
            let map = if extensions.sparse_version == (1, 0) {
                let map = self.sparse_map_in_data(at)?;
                stored = self.data_left;
                map
            } else {
                extensions.sparse_map.as_chunks().0.iter().map(|[start, length]| (*start, *length)).collect()
            };
            sparse = Some(map);
        }
        if let Some(map) = &sparse {
            check_map(map, file_size, stored).map_err(fault)?;
        }
        let device_field = |range: std::ops::Range<usize>| match kind {
            MemberKind::CharacterDevice | MemberKind::BlockDevice => field(&header[range], at),
            _ => Ok(0),
        };
        Ok(Member {
            path,
            kind,
            mode: u32::try_from(field(&header[100..108], at)? & 0o7777).unwrap_or(0),
            uid: extensions.uid.map_or_else(|| field(&header[108..116], at), Ok)?,
            gid: extensions.gid.map_or_else(|| field(&header[116..124], at), Ok)?,
            mtime: match extensions.mtime {
                Some(mtime) => mtime,
                None => (number(&header[136..148]).ok_or_else(|| fault("its time is not a number"))?, 0),
            },
            link: extensions.link.unwrap_or_else(|| text(&header[157..257])),
            device: (device_field(329..337)?, device_field(337..345)?),
            size: file_size,
            stored,
            sparse,
            xattrs: extensions.xattrs,
            data_offset: self.offset,
        })
    }

    /// Says how much data follow here.
    fn expect(&mut self, size: u64) -> Result<(), TarFault> {
        let fault = TarFault::Header { offset: self.offset, reason: "its size is out of range" };
        if size > i64::MAX as u64 {
            return Err(fault);
        }
        self.data_left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
        Ok(())
    }

    /// Reads the whole data of an extension.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>, TarFault> {
        if size > MAX_EXTENSION {
            let reason = "an extended header is larger than 1 MiB";
            return Err(TarFault::Header { offset: self.offset, reason });
        }
        self.expect(size)?;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        self.read_exact(&mut bytes)?;
        self.data_left = 0;
        Ok(bytes)
    }

    fn long_name(&mut self, size: u64) -> Result<Vec<u8>, TarFault> {
        Ok(text(&self.extension(size)?))
    }

    fn pax(&mut self, size: u64, extensions: &mut Extensions) -> Result<(), TarFault> {
        let at = self.offset;
        let bytes = self.extension(size)?;
        records(&bytes, extensions).map_err(|reason| TarFault::Header { offset: at, reason })
    }

    /// Pieces in the header of GNU's old sparse format and the headers that follow it.
    fn old_sparse(&mut self, header: &[u8; BLOCK], at: u64) -> Result<Vec<(u64, u64)>, TarFault> {
        let mut map = Vec::new();
        let mut add = |bytes: &[u8]| -> Result<(), TarFault> {
            for piece in bytes.as_chunks::<24>().0.iter().take_while(|piece| piece[0] != 0) {
                map.push((field(&piece[..12], at)?, field(&piece[12..], at)?));
            }
            if map.len() > MAX_SPARSE_PIECES {
                return Err(TarFault::Header { offset: at, reason: "a sparse file has too many pieces" });
            }
            Ok(())
        };
        add(&header[386..482])?;
        let mut more = header[482] != 0;
        while more {
            let mut block = [0; BLOCK];
            self.read_exact(&mut block)?;
            add(&block[..504])?;
            more = block[504] != 0;
        }
        Ok(map)
    }

    /// The map at the beginning of the data of a sparse file in pax format 1.0: decimal numbers,
    /// one a line, the first is the count of pieces; padded to a block.
    fn sparse_map_in_data(&mut self, at: u64) -> Result<Vec<(u64, u64)>, TarFault> {
        let fault = |reason| TarFault::Header { offset: at, reason };
        let mut numbers: Vec<u64> = Vec::new();
        let mut line: Vec<u8> = Vec::new();
        loop {
            let mut block = [0; BLOCK];
            if self.read_data(&mut block)? < BLOCK {
                return Err(fault("the map of a sparse file is cut off"));
            }
            for byte in block {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > 20 {
                        return Err(fault("the map of a sparse file is not a list of numbers"));
                    }
                    continue;
                }
                let value = decimal(&line)
                    .ok_or_else(|| fault("the map of a sparse file is not a list of numbers"))?;
                line.clear();
                numbers.push(value);
                let pieces = usize::try_from(numbers[0]).unwrap_or(usize::MAX);
                if pieces > MAX_SPARSE_PIECES {
                    return Err(fault("a sparse file has too many pieces"));
                }
                if numbers.len() == 1 + 2 * pieces {
                    return Ok(numbers[1..]
                        .as_chunks()
                        .0
                        .iter()
                        .map(|[start, length]| (*start, *length))
                        .collect());
                }
            }
        }
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), TarFault> {
        self.stream.read_exact(buffer).map_err(|error| self.fault(error))?;
        self.offset += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, count: u64) -> Result<(), TarFault> {
        if count > 0 {
            self.stream.skip(count).map_err(|error| self.fault(error))?;
            self.offset += count;
        }
        Ok(())
    }

    fn fault(&self, source: io::Error) -> TarFault {
        TarFault::Read { offset: self.offset, source }
    }
}

/// pax records: `length key=value\n`, the length counting itself.
fn records(mut bytes: &[u8], extensions: &mut Extensions) -> Result<(), &'static str> {
    while !bytes.is_empty() {
        let space =
            bytes.iter().take(20).position(|byte| *byte == b' ').ok_or("a pax record has no length")?;
        let length = decimal(&bytes[..space]).and_then(|length| usize::try_from(length).ok());
        let length = length.ok_or("the length of a pax record is not a number")?;
        if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
            return Err("the length of a pax record is wrong");
        }
        let record = &bytes[space + 1..length - 1];
        let equals = record.iter().position(|byte| *byte == b'=').ok_or("a pax record has no =")?;
        take_record(&record[..equals], &record[equals + 1..], extensions)?;
        bytes = &bytes[length..];
    }
    Ok(())
}

fn take_record(key: &[u8], value: &[u8], extensions: &mut Extensions) -> Result<(), &'static str> {
    let whole = || decimal(value).ok_or("a pax record is not a number");
    match key {
        b"path" => extensions.path = Some(value.to_vec()),
        b"linkpath" => extensions.link = Some(value.to_vec()),
        b"size" => extensions.size = Some(whole()?),
        b"uid" => extensions.uid = Some(whole()?),
        b"gid" => extensions.gid = Some(whole()?),
        b"mtime" => extensions.mtime = Some(time(value).ok_or("a pax time is not a number")?),
        b"GNU.sparse.major" => (extensions.is_sparse, extensions.sparse_version.0) = (true, whole()?),
        b"GNU.sparse.minor" => (extensions.is_sparse, extensions.sparse_version.1) = (true, whole()?),
        b"GNU.sparse.name" => extensions.sparse_name = Some(value.to_vec()),
        b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
            (extensions.is_sparse, extensions.sparse_size) = (true, Some(whole()?));
        }
        b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => extensions.sparse_map.push(whole()?),
        b"GNU.sparse.map" => {
            let numbers: Option<Vec<u64>> = value.split(|byte| *byte == b',').map(decimal).collect();
            extensions.sparse_map = numbers.ok_or("the map of a sparse file is not a list of numbers")?;
        }
        _ => {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                // A member may have any number of extensions, and a compressed one costs nothing.
                extensions.xattr_bytes += (key.len() + value.len()) as u64;
                if extensions.xattr_bytes > MAX_EXTENSION {
                    return Err("its extended attributes are larger than 1 MiB");
                }
                extensions.xattrs.push((name.to_vec(), value.to_vec()));
            }
        }
    }
    if extensions.sparse_map.len() > 2 * MAX_SPARSE_PIECES {
        return Err("a sparse file has too many pieces");
    }
    Ok(())
}

/// Pieces must rise, stay within the file, and be all of the stored bytes.
fn check_map(map: &[(u64, u64)], size: u64, stored: u64) -> Result<(), &'static str> {
    let (mut end, mut total) = (0, 0_u64);
    for (offset, length) in map {
        let piece_end = offset.checked_add(*length).ok_or("a piece of a sparse file is out of range")?;
        if *offset < end || piece_end > size {
            return Err("a piece of a sparse file is out of range");
        }
        end = piece_end;
        total = total.saturating_add(*length);
    }
    if total == stored { Ok(()) } else { Err("the pieces of a sparse file are not its data") }
}

/// Name of an old or ustar header.
fn plain_path(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = text(&header[..100]);
    let prefix = if &header[257..263] == b"ustar\0" { text(&header[345..500]) } else { Vec::new() };
    if prefix.is_empty() { name } else { [prefix, name].join(&b'/') }
}

/// Up to the first NUL.
fn text(bytes: &[u8]) -> Vec<u8> {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

fn decimal(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?
        .parse()
        .ok()
}

/// Seconds with an optional fraction and sign, rounded down to nanoseconds.
fn time(bytes: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().ok()?;
    if whole.starts_with('-') && nanoseconds > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds));
    }
    Some((seconds, nanoseconds))
}

/// A numeric field that is not negative.
fn field(bytes: &[u8], at: u64) -> Result<u64, TarFault> {
    number(bytes)
        .and_then(|value| u64::try_from(value).ok())
        .ok_or(TarFault::Header { offset: at, reason: "a number is damaged" })
}

/// A numeric field: octal, or big-endian two's complement when the first bit is set. A field of
/// nothing is 0.
fn number(bytes: &[u8]) -> Option<i64> {
    if bytes[0] & 0x80 != 0 {
        let first = if bytes[0] & 0x40 == 0 { bytes[0] & 0x3f } else { bytes[0] };
        let mut value = if bytes[0] & 0x40 == 0 { i128::from(first) } else { i128::from(first) - 256 };
        for byte in &bytes[1..] {
            value = (value << 8) | i128::from(*byte);
        }
        return i64::try_from(value).ok();
    }
    let blank = |byte: &u8| *byte == b' ' || *byte == 0;
    let start = bytes.iter().position(|byte| !blank(byte)).unwrap_or(bytes.len());
    let digits = bytes[start..].split(blank).next().unwrap_or_default();
    if digits.is_empty() {
        return Some(0);
    }
    i64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}
