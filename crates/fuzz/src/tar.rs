//! Tar streams that are right where a random one never would be, and wrong in the places that an
//! input chooses.

use arbitrary::Arbitrary;

use crate::path;

const BLOCK: usize = 512;

/// pax keys that the reader knows, and one that it does not.
const PAX_KEYS: [&str; 18] = [
    "path",
    "linkpath",
    "size",
    "uid",
    "gid",
    "mtime",
    "GNU.sparse.major",
    "GNU.sparse.minor",
    "GNU.sparse.name",
    "GNU.sparse.size",
    "GNU.sparse.realsize",
    "GNU.sparse.offset",
    "GNU.sparse.numbytes",
    "GNU.sparse.map",
    "SCHILY.xattr.user.a",
    "SCHILY.xattr.trusted.overlay.opaque",
    "SCHILY.xattr.security.capability",
    "comment",
];
const TYPES: [u8; 16] = *b"0000123455675LKS";

/// A member of a tar stream.
#[derive(Debug, Arbitrary)]
pub struct Member<'a> {
    path: [u8; 3],
    link: [u8; 3],
    kind: u8,
    mode: u16,
    /// Taken as the size instead of the true one.
    size: Option<u64>,
    data: &'a [u8],
    /// Key, then the value as a number or as bytes.
    pax: Vec<(u8, Result<u64, &'a [u8]>)>,
    /// Bytes of the header that are replaced.
    edits: Vec<(u16, u8)>,
}

/// [`stream`] with bytes replaced, each at its place, and cut off.
#[must_use]
pub fn spoilt(members: &[Member<'_>], edits: &[(u16, u8)], cut: Option<u16>) -> Vec<u8> {
    let mut tar = stream(members);
    for (at, byte) in edits {
        let at = usize::from(*at) % tar.len();
        tar[at] = *byte;
    }
    tar.truncate(cut.map_or(tar.len(), usize::from));
    tar
}

/// The members as a tar stream with right checksums.
#[must_use]
pub fn stream(members: &[Member<'_>]) -> Vec<u8> {
    let mut tar = Vec::new();
    for member in members {
        let mut records = Vec::new();
        for (key, value) in &member.pax {
            let key = PAX_KEYS[usize::from(*key) % PAX_KEYS.len()];
            let value = match value {
                Ok(number) => number.to_string().into_bytes(),
                Err(bytes) if matches!(key, "path" | "linkpath" | "GNU.sparse.name") => path(bytes),
                Err(bytes) => bytes.to_vec(),
            };
            records.extend(record(key, &value));
        }
        if !records.is_empty() {
            put(&mut tar, &header(b"pax", b'x', b"", records.len() as u64, 0o644), &records);
        }
        let kind = TYPES[usize::from(member.kind) % TYPES.len()];
        let data: Vec<u8> =
            if matches!(kind, b'L' | b'K') { path(member.data) } else { member.data.to_vec() };
        let size = member.size.unwrap_or(data.len() as u64);
        let mut block = header(&path(&member.path), kind, &path(&member.link), size, member.mode);
        for (at, byte) in &member.edits {
            block[usize::from(*at) % BLOCK] = *byte;
        }
        put(&mut tar, &block, &data);
    }
    tar.resize(tar.len() + 2 * BLOCK, 0);
    tar
}

/// `length key=value\n`, the length counting itself.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
    let mut length = rest.len() + 1;
    while length.to_string().len() + rest.len() != length {
        length += 1;
    }
    [length.to_string().as_bytes(), &rest].concat()
}

fn header(name: &[u8], kind: u8, link: &[u8], size: u64, mode: u16) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut field = |at: usize, bytes: &[u8], width: usize| {
        let length = bytes.len().min(width);
        block[at..at + length].copy_from_slice(&bytes[..length]);
    };
    field(0, name, 100);
    field(100, format!("{:07o}", mode & 0o7777).as_bytes(), 7);
    field(108, b"0000000", 7);
    field(116, b"0000000", 7);
    if size < 1 << 33 {
        field(124, format!("{size:011o}").as_bytes(), 11);
    } else {
        field(124, &[0x80, 0, 0, 0], 4);
        field(128, &size.to_be_bytes(), 8);
    }
    field(136, b"00000000007", 11);
    field(156, &[kind], 1);
    field(157, link, 100);
    field(257, b"ustar\x0000", 8);
    block
}

fn put(tar: &mut Vec<u8>, block: &[u8; BLOCK], data: &[u8]) {
    tar.extend_from_slice(block);
    let at = tar.len() - BLOCK;
    mend(&mut tar[at..]);
    tar.extend_from_slice(data);
    tar.resize(tar.len().next_multiple_of(BLOCK), 0);
}

/// Gives one header its right checksum.
fn mend(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header[..BLOCK].iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// A member that is a symbolic link called `link`, to be put before others.
#[must_use]
pub fn link(target: &[u8]) -> Vec<u8> {
    let mut tar = Vec::new();
    put(&mut tar, &header(b"link", b'2', target, 0, 0o777), b"");
    tar
}

/// A tar stream of regular files.
#[must_use]
pub fn of_files(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, content) in files {
        put(&mut tar, &header(name.as_bytes(), b'0', b"", content.len() as u64, 0o644), content);
    }
    tar.resize(tar.len() + 2 * BLOCK, 0);
    tar
}
