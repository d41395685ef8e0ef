//! Pages as bytes for the wire: runs of pages with data, runs that read as zero, one checksum over
//! all of it, and compression where the link is slower than the compressor.
//!
//! A batch belongs to one space and carries at most [`MAX_PAGES`] pages of data, so that a receiver
//! needs one buffer of a known size. What a batch says replaces what earlier batches said of the
//! same pages.

use prost::Message;
use xxhash_rust::xxh3::Xxh3;

use crate::{PAGE_SIZE, Range, Space};

/// Most pages of data in a batch: 256 KiB keep a wire busy and leave it free for others soon.
pub const MAX_PAGES: usize = 64;

/// Most runs in a batch: zero runs have no data, and could otherwise be many.
const MAX_RUNS: usize = 1024;

/// User addresses end here on every machine godwit knows (x86-64 with five levels).
const ADDRESS_LIMIT: u64 = 1 << 57;

const PAGE: usize = 4096;

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
    data: prost::bytes::Bytes,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct WireRun {
    /// Page number: the address divided by the page size.
    #[prost(uint64, tag = "1")]
    page: u64,
    #[prost(uint32, tag = "2")]
    pages: u32,
    #[prost(bool, tag = "3")]
    zero: bool,
}

/// A run of pages in a received batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Addresses, in the space of the service.
    pub range: Range,
    /// Whether they have data; else they read as zero.
    pub data: bool,
}

/// A received batch. The data of the runs that have data follow one another in `data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Whose pages they are.
    pub space: Space,
    /// In the order in which they were put in.
    pub runs: Vec<Run>,
    /// The contents.
    pub data: prost::bytes::Bytes,
}

/// Collects pages until there are enough for the wire.
#[derive(Debug)]
pub struct Builder {
    space: Space,
    runs: Vec<WireRun>,
    data: Vec<u8>,
}

impl Builder {
    /// An empty batch of one space.
    #[must_use]
    pub fn new(space: Space) -> Self {
        Self { space, runs: Vec::new(), data: Vec::with_capacity(MAX_PAGES * PAGE) }
    }

    /// Whether the next page wants a batch of its own.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.data.len() >= MAX_PAGES * PAGE || self.runs.len() >= MAX_RUNS
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes of pages in it, before packing.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data.len() as u64
    }

    /// Adds one page; one that is all zeroes costs no data.
    pub fn page(&mut self, address: u64, content: &[u8; PAGE]) {
        let zero = is_zero(content);
        if !zero {
            self.data.extend_from_slice(content);
        }
        self.run(address / PAGE_SIZE, 1, zero);
    }

    /// Adds pages that read as zero.
    pub fn zero(&mut self, range: &Range) {
        let mut page = range.start / PAGE_SIZE;
        let end = range.end / PAGE_SIZE;
        while page < end {
            let pages = u32::try_from(end - page).unwrap_or(u32::MAX);
            self.run(page, pages, true);
            page += u64::from(pages);
        }
    }

    fn run(&mut self, page: u64, pages: u32, zero: bool) {
        if let Some(last) = self.runs.last_mut()
            && last.zero == zero
            && last.page + u64::from(last.pages) == page
            && let Some(joined) = last.pages.checked_add(pages)
        {
            last.pages = joined;
            return;
        }
        self.runs.push(WireRun { page, pages, zero });
    }

    /// The batch's bytes, with what is left of data after packing; the builder is empty again. A
    /// codec that does not make the data smaller is not used.
    pub fn finish(&mut self, codec: Codec) -> Vec<u8> {
        let runs = std::mem::take(&mut self.runs);
        let checksum = checksum(self.space, &runs, &self.data);
        let packed = match codec {
            Codec::Raw => None,
            Codec::Lz4 => Some(lz4_flex::block::compress(&self.data)),
            // It fails for want of memory only, and then the data go as they are.
            Codec::Zstd => zstd::bulk::compress(&self.data, 1).ok(),
        };
        let (codec, data) = match packed {
            Some(packed) if packed.len() < self.data.len() => (codec, packed),
            _ => (Codec::Raw, std::mem::take(&mut self.data)),
        };
        let wire = Wire { space: self.space, codec: codec.into(), checksum, runs, data: data.into() };
        self.data = Vec::with_capacity(MAX_PAGES * PAGE);
        wire.encode_to_vec()
    }
}

impl Batch {
    /// Reads and checks what [`Builder::finish`] wrote.
    ///
    /// # Errors
    /// For anything that a builder would not have written: the bytes come from the network.
    pub fn decode(bytes: prost::bytes::Bytes) -> Result<Self, BatchError> {
        let wire = Wire::decode(bytes)?;
        let mut runs = Vec::with_capacity(wire.runs.len().min(MAX_RUNS));
        let mut data_pages = 0usize;
        if wire.runs.len() > MAX_RUNS + MAX_PAGES {
            return Err(BatchError::Malformed("it has too many runs"));
        }
        for run in &wire.runs {
            let start = run.page.checked_mul(PAGE_SIZE);
            let length = u64::from(run.pages) * PAGE_SIZE;
            let end = start.and_then(|start| start.checked_add(length)).filter(|end| *end <= ADDRESS_LIMIT);
            let (Some(start), Some(end), true) = (start, end, run.pages > 0) else {
                return Err(BatchError::Malformed("a run has no pages or leaves the address space"));
            };
            if !run.zero {
                data_pages = data_pages.saturating_add(run.pages as usize);
            }
            runs.push(Run { range: start..end, data: !run.zero });
        }
        if data_pages > MAX_PAGES {
            return Err(BatchError::Malformed("it has too many pages"));
        }
        let length = data_pages * PAGE;
        let packed = |e: &dyn std::fmt::Display| BatchError::Packed(e.to_string());
        let data = match Codec::try_from(wire.codec) {
            Ok(Codec::Raw) => wire.data,
            Ok(Codec::Lz4) => lz4_flex::block::decompress(&wire.data, length).map_err(|e| packed(&e))?.into(),
            Ok(Codec::Zstd) => zstd::bulk::decompress(&wire.data, length).map_err(|e| packed(&e))?.into(),
            Err(_) => return Err(BatchError::Malformed("its packing is unknown")),
        };
        if data.len() != length {
            return Err(BatchError::Malformed("its data are longer or shorter than its runs"));
        }
        let have = checksum(wire.space, &wire.runs, &data);
        if have != wire.checksum {
            return Err(BatchError::Checksum { have, want: wire.checksum });
        }
        Ok(Self { space: wire.space, runs, data })
    }

    /// Pages of data in it.
    #[must_use]
    pub fn data_pages(&self) -> u64 {
        self.data.len() as u64 / PAGE_SIZE
    }
}

/// Over what the batch means, not over how it is packed.
fn checksum(space: Space, runs: &[WireRun], data: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&space.to_le_bytes());
    for run in runs {
        hash.update(&run.page.to_le_bytes());
        hash.update(&run.pages.to_le_bytes());
        hash.update(&[u8::from(run.zero)]);
    }
    hash.update(data);
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
        builder
    }

    #[test]
    fn pages_arrive_as_runs_whatever_the_codec() {
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
            let batch = Batch::decode(sample().finish(codec).into()).unwrap();
            assert_eq!(batch.space, 7);
            assert_eq!(
                batch.runs,
                [
                    Run { range: 0x1000..0x3000, data: true },
                    Run { range: 0x3000..0x9000, data: false },
                    Run { range: 0x20_0000..0x20_1000, data: true },
                ]
            );
            assert_eq!(batch.data_pages(), 3);
            assert_eq!(batch.data[2 * PAGE..], page(3));
        }
        assert!(sample().finish(Codec::Lz4).len() < 2 * PAGE, "it is packed");
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
        assert_eq!(Batch::decode(builder.finish(Codec::Raw).into()).unwrap().data_pages(), MAX_PAGES as u64);
    }

    #[test]
    fn a_changed_bit_never_changes_a_page() {
        let sent = sample().finish(Codec::Raw);
        let whole = Batch::decode(sent.clone().into()).unwrap();
        let mut refused = 0;
        for at in (0..sent.len()).step_by(97).chain(0..40) {
            let mut bytes = sent.clone();
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
        let run = |page, pages, zero| WireRun { page, pages, zero };
        let wire = |runs: Vec<WireRun>, data: Vec<u8>| {
            let checksum = checksum(1, &runs, &data);
            Batch::decode(
                Wire { space: 1, codec: 0, checksum, runs, data: data.into() }.encode_to_vec().into(),
            )
        };
        wire(vec![run(1, 1, false)], vec![1; PAGE]).unwrap();
        for (runs, data) in [
            (vec![run(1, 0, false)], vec![]),
            (vec![run(u64::MAX / PAGE_SIZE, 1, true)], vec![]),
            (vec![run(u64::MAX, 1, true)], vec![]),
            (vec![run(1, 65, false)], vec![1; 65 * PAGE]),
            (vec![run(1, 1, false)], vec![1; PAGE - 1]),
            (vec![run(1, 1, true)], vec![1; PAGE]),
        ] {
            assert!(matches!(wire(runs.clone(), data), Err(BatchError::Malformed(_))), "{runs:?}");
        }
        // A bomb: little on the wire, too much unpacked.
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        let bytes = Wire {
            space: 1,
            codec: Codec::Zstd.into(),
            checksum: 0,
            runs: vec![run(1, 1, false)],
            data: bomb.into(),
        };
        assert!(matches!(Batch::decode(bytes.encode_to_vec().into()), Err(BatchError::Packed(_))));
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_refused_but_never_a_panic(bytes: Vec<u8>) {
            let _ = Batch::decode(bytes.into());
        }
    }
}
