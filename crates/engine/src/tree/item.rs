//! The pieces a tree is sent in, as protobuf messages.
//!
//! ```text
//! round = { Hold } { Remove } { Entry { Data | Hole } } End
//! ```
//!
//! An [`Item`] encodes to at most [`MAX_ITEM`] bytes. Parents come before what is in them, the
//! target of a hard link before the links. `Data` and `Hole` belong to the `Entry` of a regular
//! file before them, with rising offsets. What they do not cover is as the content of the file
//! begins: with that of an earlier round where `Entry` says so, else with holes. Field numbers
//! are never used again for something else; a decoder passes over fields it does not know.

use prost::Message;

/// Most bytes in one [`Data`]: several fit in the socket buffers, and the overhead is nothing.
pub const MAX_DATA: usize = 256 << 10;
/// Most bytes of one encoded [`Item`]: one frame of the data plane. An entry with the most
/// attributes that are carried (512 KiB) and three longest paths stays well below.
pub const MAX_ITEM: usize = 1 << 20;

/// What an [`Entry`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    /// Not set: never sent.
    Invalid = 0,
    /// Regular file; `size` is set, `Data` follows.
    File = 1,
    /// Directory; keeps what is in it when it is there already.
    Directory = 2,
    /// Symbolic link to `link_target`.
    Symlink = 3,
    /// Character device; 0/0 is a whiteout of overlayfs.
    CharacterDevice = 4,
    /// Block device.
    BlockDevice = 5,
    /// Named pipe.
    Fifo = 6,
    /// Inode of a unix socket.
    Socket = 7,
    /// Another name of the inode that was sent as `hard_link_of`; only `path` is set beside.
    HardLink = 8,
}

/// An extended attribute.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Xattr {
    /// Name with its namespace, e.g. `trusted.overlay.opaque`.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// Value.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// One name of the tree. It replaces what has the name at the receiver.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Entry {
    /// Path below the root, without a leading `/`; empty for the root, which is a directory.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// What it is.
    #[prost(enumeration = "Kind", tag = "2")]
    pub kind: i32,
    /// Permission, setuid, setgid and sticky bits.
    #[prost(uint32, tag = "3")]
    pub mode: u32,
    /// Owner.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Group.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Modification time, seconds since 1970.
    #[prost(sint64, tag = "6")]
    pub mtime_seconds: i64,
    /// Modification time, nanoseconds, below 10⁹.
    #[prost(uint32, tag = "7")]
    pub mtime_nanoseconds: u32,
    /// All extended attributes.
    #[prost(message, repeated, tag = "8")]
    pub xattrs: Vec<Xattr>,
    /// Device number, for devices.
    #[prost(uint32, tag = "9")]
    pub rdev_major: u32,
    /// Device number, for devices.
    #[prost(uint32, tag = "10")]
    pub rdev_minor: u32,
    /// Where a symbolic link leads; any bytes.
    #[prost(bytes = "vec", tag = "11")]
    pub link_target: Vec<u8>,
    /// For a hard link: the path the inode was sent as in this round.
    #[prost(bytes = "vec", tag = "12")]
    pub hard_link_of: Vec<u8>,
    /// Size of a regular file in bytes, holes included.
    #[prost(uint64, tag = "13")]
    pub size: u64,
    /// Of a regular file whose content comes in another way, the number by which that is known.
    #[prost(uint32, optional, tag = "14")]
    pub content: Option<u32>,
    /// Of a regular file: its content begins with what the path has, a regular file, cut or grown to `size`.
    #[prost(bool, tag = "15")]
    pub kept: bool,
    /// Of a regular file: it is the one that is held under this number, cut or grown to `size`. Used once.
    #[prost(uint32, optional, tag = "16")]
    pub held: Option<u32>,
}

/// A file of an earlier round will have another name in this one. Until then it has none.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Hold {
    /// Path of a regular file.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Number by which an [`Entry`] asks for it.
    #[prost(uint32, tag = "2")]
    pub number: u32,
}

/// Bytes of the regular file before it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Data {
    /// Where in the file, in bytes.
    #[prost(uint64, tag = "1")]
    pub offset: u64,
    /// 1 to [`MAX_DATA`] bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub bytes: Vec<u8>,
}

/// A hole in the regular file before it, where the file may have begun with other content.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Hole {
    /// Where in the file, in bytes.
    #[prost(uint64, tag = "1")]
    pub offset: u64,
    /// Bytes, at least 1.
    #[prost(uint64, tag = "2")]
    pub length: u64,
}

/// A name that is no more, with all below it. No error when it never came.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Remove {
    /// Path below the root; not the root.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
}

/// The round is complete.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct End {
    /// How many [`Entry`] items there were.
    #[prost(uint64, tag = "1")]
    pub entries: u64,
    /// How many bytes there were in [`Data`] items.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
}

/// One piece of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A name goes.
    Remove(Remove),
    /// A name comes or changes.
    Entry(Entry),
    /// Bytes of the file before.
    Data(Data),
    /// A hole in the file before.
    Hole(Hole),
    /// A file is held.
    Hold(Hold),
    /// The round is complete.
    End(End),
}

/// What goes over the wire.
#[derive(Clone, PartialEq, prost::Message)]
struct Envelope {
    #[prost(oneof = "Piece", tags = "1, 2, 3, 4, 5, 6")]
    piece: Option<Piece>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Piece {
    #[prost(message, tag = "1")]
    Remove(Remove),
    #[prost(message, tag = "2")]
    Entry(Entry),
    #[prost(message, tag = "3")]
    Data(Data),
    #[prost(message, tag = "4")]
    End(End),
    #[prost(message, tag = "5")]
    Hole(Hole),
    #[prost(message, tag = "6")]
    Hold(Hold),
}

/// Why bytes are no [`Item`].
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than [`MAX_ITEM`].
    #[error("an item of a tree has {length} bytes, more than {MAX_ITEM}; the sending node is broken")]
    TooLong {
        /// Bytes given.
        length: usize,
    },
    /// Not protobuf of this form.
    #[error("an item of a tree cannot be decoded; the sending node is broken or speaks another version")]
    Malformed(#[from] prost::DecodeError),
    /// A kind of item this version does not know.
    #[error("an item of a tree is of an unknown kind; the sending node speaks another version")]
    Unknown,
}

impl Item {
    /// As bytes of at most [`MAX_ITEM`].
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let piece = match self {
            Self::Remove(remove) => Piece::Remove(remove),
            Self::Entry(entry) => Piece::Entry(entry),
            Self::Data(data) => Piece::Data(data),
            Self::Hole(hole) => Piece::Hole(hole),
            Self::Hold(hold) => Piece::Hold(hold),
            Self::End(end) => Piece::End(end),
        };
        Envelope { piece: Some(piece) }.encode_to_vec()
    }

    /// From the bytes of one encoded item.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > MAX_ITEM {
            return Err(DecodeError::TooLong { length: bytes.len() });
        }
        match Envelope::decode(bytes)?.piece {
            Some(Piece::Remove(remove)) => Ok(Self::Remove(remove)),
            Some(Piece::Entry(entry)) => Ok(Self::Entry(entry)),
            Some(Piece::Data(data)) => Ok(Self::Data(data)),
            Some(Piece::Hole(hole)) => Ok(Self::Hole(hole)),
            Some(Piece::Hold(hold)) => Ok(Self::Hold(hold)),
            Some(Piece::End(end)) => Ok(Self::End(end)),
            None => Err(DecodeError::Unknown),
        }
    }
}
