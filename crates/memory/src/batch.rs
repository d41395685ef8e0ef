//! Pages as bytes for the wire: runs of pages with data, as differences to what was sent before, that
//! read as zero, or that the receiver retained from an earlier visit; one checksum over all of it, and
//! compression where the link is slower than the compressor.
//!
//! A batch belongs to one space and carries at most [`MAX_PAGES`] pages of data, so that a receiver needs one buffer of a
//! known size. What a batch says replaces what earlier batches said of the same pages.
//!
//! ```text
//!   +-----------------+-------+-------------------------------------------+
//!   | data's tag, len | data  | space, codec, checksum, runs, data length |    one protobuf message
//!   +-----------------+-------+-------------------------------------------+
//! ```
//!
//! The data come first, so that pages are put straight into the buffer that goes to the wire, and the rest
//! is appended when it is known. The checksum is over what the batch means, and over the hashes of its
//! pages in place of the pages.

mod pool;

use prost::Message;
use prost::bytes::Bytes;
use prost::encoding::{WireType, encode_key, encode_varint};
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use crate::{PAGE_SIZE, Range, Space};
use pool::Lent;
pub use pool::Pool;

/// Most pages of data in a batch: 256 KiB keep a wire busy and leave it free for others soon.
pub const MAX_PAGES: usize = 64;

/// Most runs in a batch: zero runs have no data, and could otherwise be many.
const MAX_RUNS: usize = 1024;

/// User addresses end here on every machine godwit knows (x86-64 with five levels).
const ADDRESS_LIMIT: u64 = 1 << 57;

const PAGE: usize = 4096;

/// Where data begin in a buffer: behind their tag and length, on a boundary that copies like.
const FRONT: usize = 64;

/// Before each difference: its packed length (u16, little-endian), and the hash of the page that it
/// makes (u64, little-endian).
const DELTA_HEAD: usize = 10;

/// A difference that packs worse is not worth its page's place in the sender's memory.
const DELTA_LIMIT: usize = PAGE / 2;

/// How the data of a batch is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Codec {
    /// As it is.
    Raw = 0,
    /// LZ4 block: several times faster than a gigabit link.
    Lz4 = 1,
    /// Zstandard, level 1: about the speed of a gigabit link.
    Zstd = 2,
}

/// Why a batch was refused. The memory of the service at the source is not touched by that.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Not a batch.
    #[error("a batch of pages is damaged")]
    Damaged(#[from] prost::DecodeError),
    /// It cannot be unpacked.
    #[error("a batch of pages cannot be unpacked: {0}")]
    Packed(String),
    /// It breaks a rule.
    #[error("a batch of pages is refused: {0}")]
    Malformed(&'static str),
    /// The bytes are not those that were sent.
    #[error("a batch of pages has the checksum {have:016x} and was sent with {want:016x}")]
    Checksum {
        /// Of what came.
        have: u64,
        /// As announced.
        want: u64,
    },
}

#[derive(Clone, PartialEq, Message)]
struct Wire {
    #[prost(uint32, tag = "1")]
    space: u32,
    #[prost(enumeration = "Codec", tag = "2")]
    codec: i32,
    #[prost(fixed64, tag = "3")]
    checksum: u64,
    #[prost(message, repeated, tag = "4")]
    runs: Vec<WireRun>,
    #[prost(bytes = "bytes", tag = "5")]
    data: Bytes,
    /// Length of the data before packing.
    #[prost(uint32, tag = "6")]
    length: u32,
}

/// The number of [`Wire::data`].
const DATA: u32 = 5;

#[derive(Clone, Copy, PartialEq, Message)]
struct WireRun {
    /// Page number: the address divided by the page size.
    #[prost(uint64, tag = "1")]
    page: u64,
    #[prost(uint32, tag = "2")]
    pages: u32,
    #[prost(enumeration = "Kind", tag = "3")]
    kind: i32,
}

/// What a run's pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    /// They are in the batch.
    Data = 0,
    /// They read as zero.
    Zero = 1,
    /// They are what the receiver retained when the service left it.
    Retained = 2,
    /// Their differences to what was sent before are in the batch.
    Delta = 3,
}

/// A run of pages in a received batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Addresses, in the space of the service.
    pub range: Range,
    /// What they are.
    pub kind: Kind,
    /// What the batch has of them: whole pages ([`Kind::Data`]), or the differences one after the
    /// other ([`Kind::Delta`], see [`apply_deltas`]).
    pub data: Bytes,
}

/// A received batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Whose pages they are.
    pub space: Space,
    /// In the order in which they were put in.
    pub runs: Vec<Run>,
}

/// Collects pages until there are enough for the wire.
pub struct Builder {
    space: Space,
    runs: Vec<WireRun>,
    /// [`FRONT`] bytes, and the data.
    buffer: Vec<u8>,
    /// Of the data so far.
    sum: Xxh3,
    /// Pages that are not zero.
    pages: usize,
    pool: Pool,
}

impl Builder {
    /// An empty batch of one space.
    #[must_use]
    pub fn new(space: Space) -> Self {
        Self::with(space, &Pool::default())
    }

    /// An empty batch of one space, whose buffers come from a pool and go back there.
    #[must_use]
    pub fn with(space: Space, pool: &Pool) -> Self {
        let (pool, buffer) = (pool.clone(), pool.take());
        Self { space, runs: Vec::new(), buffer, sum: Xxh3::new(), pages: 0, pool }
    }

    /// Whether the next page wants a batch of its own.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pages >= MAX_PAGES || self.runs.len() >= MAX_RUNS
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes of pages in it, before packing.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        (self.buffer.len() - FRONT) as u64
    }

    /// Adds one page; one that is all zeroes costs no data.
    pub fn page(&mut self, address: u64, content: &[u8; PAGE]) {
        if is_zero(content) {
            return self.run(address / PAGE_SIZE, 1, Kind::Zero);
        }
        self.whole_page(address, content);
    }

    /// Adds one page with its content, also one that is all zeroes: of those that are not there it is told apart.
    pub fn whole_page(&mut self, address: u64, content: &[u8; PAGE]) {
        self.buffer.extend_from_slice(content);
        self.sum.update(&xxh3_128(content).to_le_bytes());
        self.pages += 1;
        self.run(address / PAGE_SIZE, 1, Kind::Data);
    }

    /// Adds one page that the receiver retained.
    pub fn retained(&mut self, address: u64) {
        self.pages += 1;
        self.run(address / PAGE_SIZE, 1, Kind::Retained);
    }

    /// Adds one page as its difference to what was sent before; says whether that is worth it, and
    /// adds nothing else.
    pub fn delta(&mut self, address: u64, before: &[u8; PAGE], now: &[u8; PAGE]) -> bool {
        let mut difference = [0; PAGE];
        for (out, (a, b)) in difference.iter_mut().zip(before.iter().zip(now)) {
            *out = a ^ b;
        }
        let packed = lz4_flex::block::compress(&difference);
        let (true, Ok(length)) = (packed.len() <= DELTA_LIMIT, u16::try_from(packed.len())) else {
            return false;
        };
        let begin = self.buffer.len();
        self.buffer.extend_from_slice(&length.to_le_bytes());
        self.buffer.extend_from_slice(&xxh3_64(now).to_le_bytes());
        self.buffer.extend_from_slice(&packed);
        self.sum.update(&self.buffer[begin..]);
        self.pages += 1;
        self.run(address / PAGE_SIZE, 1, Kind::Delta);
        true
    }

    /// Adds pages that read as zero.
    pub fn zero(&mut self, range: &Range) {
        let mut page = range.start / PAGE_SIZE;
        let end = range.end / PAGE_SIZE;
        while page < end {
            let pages = u32::try_from(end - page).unwrap_or(u32::MAX);
            self.run(page, pages, Kind::Zero);
            page += u64::from(pages);
        }
    }

    fn run(&mut self, page: u64, pages: u32, kind: Kind) {
        if let Some(last) = self.runs.last_mut()
            && last.kind() == kind
            && last.page + u64::from(last.pages) == page
            && let Some(joined) = last.pages.checked_add(pages)
        {
            last.pages = joined;
            return;
        }
        self.runs.push(WireRun { page, pages, kind: kind.into() });
    }

    /// The batch's bytes, with what is left of data after packing; the builder is empty again. A
    /// codec that does not make the data smaller is not used.
    pub fn finish(&mut self, codec: Codec) -> Bytes {
        let runs = std::mem::take(&mut self.runs);
        self.pages = 0;
        let data = &self.buffer[FRONT..];
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let checksum = checksum(self.space, &runs, &std::mem::take(&mut self.sum));
        let packed = match codec {
            Codec::Raw => None,
            Codec::Lz4 => Some(lz4_flex::block::compress(data)),
            // It fails for want of memory only, and then the data go as they are.
            Codec::Zstd => zstd::bulk::compress(data, 1).ok(),
        };
        let codec = match packed {
            Some(packed) if packed.len() < data.len() => {
                self.buffer.truncate(FRONT);
                self.buffer.extend_from_slice(&packed);
                codec
            }
            _ => Codec::Raw,
        };
        let mut buffer = std::mem::replace(&mut self.buffer, self.pool.take());
        let mut front = Vec::new();
        encode_key(DATA, WireType::LengthDelimited, &mut front);
        encode_varint((buffer.len() - FRONT) as u64, &mut front);
        let begin = FRONT - front.len();
        buffer[begin..FRONT].copy_from_slice(&front);
        // Without its data, which stand before it: an empty field is no byte on the wire.
        let (space, codec, data) = (self.space, codec.into(), Bytes::new());
        let rest = Wire { space, codec, checksum, runs, data, length };
        buffer.reserve(rest.encoded_len());
        if rest.encode(&mut buffer).is_err() {
            unreachable!("a vector takes all that is written to it");
        }
        Bytes::from_owner(Lent { buffer, pool: self.pool.clone() }).slice(begin..)
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { space, runs, pages, .. } = self;
        f.debug_struct("Builder")
            .field("space", space)
            .field("runs", runs)
            .field("pages", pages)
            .finish_non_exhaustive()
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

impl Batch {
    /// Reads and checks what [`Builder::finish`] wrote.
    ///
    /// # Errors
    /// For anything that a builder would not have written: the bytes come from the network.
    pub fn decode(bytes: Bytes) -> Result<Self, BatchError> {
        let wire = Wire::decode(bytes)?;
        if wire.runs.len() > MAX_RUNS + 1 {
            return Err(BatchError::Malformed("it has too many runs"));
        }
        let length = wire.length as usize;
        if length > MAX_PAGES * PAGE {
            return Err(BatchError::Malformed("it has too many pages"));
        }
        let packed = |e: &dyn std::fmt::Display| BatchError::Packed(e.to_string());
        let data = match Codec::try_from(wire.codec) {
            Ok(Codec::Raw) => wire.data,
            Ok(Codec::Lz4) => lz4_flex::block::decompress(&wire.data, length).map_err(|e| packed(&e))?.into(),
            Ok(Codec::Zstd) => zstd::bulk::decompress(&wire.data, length).map_err(|e| packed(&e))?.into(),
            Err(_) => return Err(BatchError::Malformed("its packing is unknown")),
        };
        if data.len() != length {
            return Err(BatchError::Malformed("its data are longer or shorter than it says"));
        }
        let contents = wire.runs.iter().filter(|run| run.kind() != Kind::Zero);
        if contents.map(|run| u64::from(run.pages)).sum::<u64>() > MAX_PAGES as u64 {
            return Err(BatchError::Malformed("it has too many pages"));
        }
        let mut rest = data;
        let mut sum = Xxh3::new();
        let mut runs = Vec::with_capacity(wire.runs.len());
        for run in &wire.runs {
            let run = run.decode(&mut rest)?;
            match run.kind {
                Kind::Data => {
                    run.data
                        .as_chunks::<PAGE>()
                        .0
                        .iter()
                        .for_each(|page| sum.update(&xxh3_128(page).to_le_bytes()));
                }
                _ => sum.update(&run.data),
            }
            runs.push(run);
        }
        if !rest.is_empty() {
            return Err(BatchError::Malformed("it has data that belongs to no page"));
        }
        let have = checksum(wire.space, &wire.runs, &sum);
        if have != wire.checksum {
            return Err(BatchError::Checksum { have, want: wire.checksum });
        }
        Ok(Self { space: wire.space, runs })
    }
}

impl WireRun {
    /// Takes the run's data off the front of the batch's.
    fn decode(&self, rest: &mut Bytes) -> Result<Run, BatchError> {
        let start = self.page.checked_mul(PAGE_SIZE);
        let length = u64::from(self.pages) * PAGE_SIZE;
        let end = start.and_then(|start| start.checked_add(length)).filter(|end| *end <= ADDRESS_LIMIT);
        let (Some(start), Some(end), true) = (start, end, self.pages > 0) else {
            return Err(BatchError::Malformed("a run has no pages or leaves the address space"));
        };
        let kind =
            Kind::try_from(self.kind).map_err(|_| BatchError::Malformed("a run is of an unknown kind"))?;
        let bytes = match kind {
            Kind::Data => self.pages as usize * PAGE,
            Kind::Delta => {
                let mut bytes = 0usize;
                for _ in 0..self.pages {
                    let head = rest.get(bytes..).and_then(|rest| rest.first_chunk::<DELTA_HEAD>());
                    let [low, high, ..] = head.ok_or(BatchError::Malformed("a delta is cut off"))?;
                    bytes += DELTA_HEAD + usize::from(u16::from_le_bytes([*low, *high]));
                }
                bytes
            }
            Kind::Zero | Kind::Retained => 0,
        };
        if bytes > rest.len() {
            return Err(BatchError::Malformed("its data are shorter than its runs"));
        }
        Ok(Run { range: start..end, kind, data: rest.split_to(bytes) })
    }
}

/// Turns the pages before (one after the other, whole) into the pages now, by the differences of a run.
///
/// # Errors
/// When a result is not the page that was sent: the page before was another one there.
pub fn apply_deltas(deltas: &[u8], pages: &mut [u8]) -> Result<(), BatchError> {
    let cut = || BatchError::Malformed("a delta is cut off");
    let mut rest = deltas;
    for page in pages.as_chunks_mut::<PAGE>().0 {
        let (head, after) = rest.split_first_chunk::<DELTA_HEAD>().ok_or_else(cut)?;
        let [low, high, want @ ..] = head;
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (packed, after) = after.split_at_checked(length).ok_or_else(cut)?;
        rest = after;
        let difference =
            lz4_flex::block::decompress(packed, PAGE).map_err(|e| BatchError::Packed(e.to_string()))?;
        if difference.len() != PAGE {
            return Err(BatchError::Malformed("a delta does not give a whole page"));
        }
        for (byte, change) in page.iter_mut().zip(difference) {
            *byte ^= change;
        }
        let (have, want) = (xxh3_64(page), u64::from_le_bytes(*want));
        if have != want {
            return Err(BatchError::Checksum { have, want });
        }
    }
    Ok(())
}

/// Over what the batch means, not over how it is packed: `data` has been given the hashes of the pages
/// and the differences, in order.
fn checksum(space: Space, runs: &[WireRun], data: &Xxh3) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&space.to_le_bytes());
    for run in runs {
        hash.update(&run.page.to_le_bytes());
        hash.update(&run.pages.to_le_bytes());
        hash.update(&run.kind.to_le_bytes());
    }
    hash.update(&data.digest128().to_le_bytes());
    hash.digest()
}

/// Whether a page is all zeroes. The comparison of the page with itself, one byte on, is the
/// fastest that the standard library has.
#[must_use]
pub fn is_zero(page: &[u8; PAGE]) -> bool {
    page[0] == 0 && page[..PAGE - 1] == page[1..]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(byte: u8) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[PAGE - 1] = byte;
        page
    }

    fn sample() -> Builder {
        let mut builder = Builder::new(7);
        builder.page(0x1000, &page(1));
        builder.page(0x2000, &page(2));
        builder.page(0x3000, &page(0));
        builder.zero(&(0x4000..0x9000));
        builder.page(0x20_0000, &page(3));
        builder.retained(0x30_0000);
        builder.retained(0x30_1000);
        builder
    }

    #[test]
    fn pages_arrive_as_runs_whatever_the_codec() {
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
            let batch = Batch::decode(sample().finish(codec)).unwrap();
            assert_eq!(batch.space, 7);
            let runs: Vec<_> =
                batch.runs.iter().map(|run| (run.range.clone(), run.kind, run.data.len())).collect();
            assert_eq!(
                runs,
                [
                    (0x1000..0x3000, Kind::Data, 2 * PAGE),
                    (0x3000..0x9000, Kind::Zero, 0),
                    (0x20_0000..0x20_1000, Kind::Data, PAGE),
                    (0x30_0000..0x30_2000, Kind::Retained, 0),
                ]
            );
            assert_eq!(batch.runs[2].data, &page(3)[..]);
        }
        assert!(sample().finish(Codec::Lz4).len() < 2 * PAGE, "it is packed");
    }

    #[test]
    fn a_page_is_its_difference_to_the_one_before_or_goes_whole() {
        let (before, now) = (page(1), page(2));
        let mut builder = Builder::new(1);
        assert!(builder.delta(0x1000, &before, &now));
        assert!(builder.delta(0x2000, &now, &before));
        let mut state = 1u32;
        let noise: [u8; PAGE] = std::array::from_fn(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        });
        assert!(!builder.delta(0x3000, &before, &noise), "it packs badly");
        let bytes = builder.finish(Codec::Raw);
        assert!(bytes.len() < PAGE / 4, "{}", bytes.len());
        let batch = Batch::decode(bytes).unwrap();
        assert_eq!((batch.runs[0].range.clone(), batch.runs[0].kind), (0x1000..0x3000, Kind::Delta));
        let mut pages = [before, now].concat();
        apply_deltas(&batch.runs[0].data, &mut pages).unwrap();
        assert_eq!(pages, [now, before].concat());
        let mut others = [now, now].concat();
        assert!(matches!(apply_deltas(&batch.runs[0].data, &mut others), Err(BatchError::Checksum { .. })));
    }

    #[test]
    fn a_builder_is_empty_after_it_gave_its_batch_and_full_at_its_bound() {
        let mut builder = sample();
        builder.finish(Codec::Raw);
        assert!(builder.is_empty());
        for n in 0..MAX_PAGES as u64 {
            assert!(!builder.is_full());
            builder.page(n * 2 * PAGE_SIZE, &page(9));
        }
        assert!(builder.is_full());
        assert_eq!(Batch::decode(builder.finish(Codec::Raw)).unwrap().runs.len(), MAX_PAGES);
    }

    #[test]
    fn a_changed_bit_never_changes_a_page() {
        let sent = sample().finish(Codec::Raw);
        let whole = Batch::decode(sent.clone()).unwrap();
        let mut refused = 0;
        for at in (0..sent.len()).step_by(97).chain(0..40) {
            let mut bytes = sent.to_vec();
            bytes[at] ^= 4;
            match Batch::decode(bytes.into()) {
                // A bit of the encoding that means nothing, such as `true` written as 5.
                Ok(batch) => assert_eq!(batch, whole, "byte {at}"),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 100, "{refused}");
    }

    #[test]
    fn what_no_builder_writes_is_refused() {
        let run = |page, pages, kind: Kind| WireRun { page, pages, kind: kind.into() };
        let wire = |runs: Vec<WireRun>, data: Vec<u8>| {
            let mut sum = Xxh3::new();
            data.as_chunks::<PAGE>().0.iter().for_each(|page| sum.update(&xxh3_128(page).to_le_bytes()));
            let checksum = checksum(1, &runs, &sum);
            let length = u32::try_from(data.len()).unwrap();
            let wire = Wire { space: 1, codec: 0, checksum, runs, data: data.into(), length };
            Batch::decode(wire.encode_to_vec().into())
        };
        wire(vec![run(1, 1, Kind::Data)], vec![1; PAGE]).unwrap();
        for (runs, data) in [
            (vec![run(1, 0, Kind::Data)], vec![]),
            (vec![run(u64::MAX / PAGE_SIZE, 1, Kind::Zero)], vec![]),
            (vec![run(u64::MAX, 1, Kind::Zero)], vec![]),
            (vec![run(1, 65, Kind::Data)], vec![1; 65 * PAGE]),
            (vec![run(1, 1, Kind::Data)], vec![1; PAGE - 1]),
            (vec![run(1, 1, Kind::Zero)], vec![1; PAGE]),
            (vec![run(1, u32::MAX, Kind::Delta)], vec![0; PAGE]),
            (vec![run(1, 65, Kind::Retained)], vec![]),
            (vec![run(1, u32::MAX, Kind::Retained), run(1, u32::MAX, Kind::Retained)], vec![]),
            (vec![run(1, 1, Kind::Delta)], vec![255; DELTA_HEAD]),
            (vec![WireRun { page: 1, pages: 1, kind: 9 }], vec![]),
        ] {
            assert!(matches!(wire(runs.clone(), data), Err(BatchError::Malformed(_))), "{runs:?}");
        }
        // A bomb: little on the wire, too much unpacked.
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        let bytes = Wire {
            space: 1,
            codec: Codec::Zstd.into(),
            checksum: 0,
            runs: vec![run(1, 1, Kind::Data)],
            data: bomb.into(),
            length: u32::try_from(PAGE).unwrap(),
        };
        assert!(matches!(Batch::decode(bytes.encode_to_vec().into()), Err(BatchError::Packed(_))));
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_refused_but_never_a_panic(bytes: Vec<u8>) {
            let _ = Batch::decode(bytes.into());
        }

        #[test]
        fn foreign_differences_are_refused_but_never_a_panic(bytes: Vec<u8>) {
            let mut pages = vec![0; 3 * PAGE];
            prop_assert!(apply_deltas(&bytes, &mut pages).is_err());
        }
    }
}
