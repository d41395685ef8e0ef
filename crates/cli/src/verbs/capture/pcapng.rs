//! Writing pcapng (draft-ietf-opsawg-pcapng), the four kinds of blocks that a capture needs.
//!
//! ```text
//! block    type u32 | length u32 | body, options … padded to 4 | length u32      length of all of it
//! option   code u16 | length u16 | value padded to 4                             the last is 0, 0
//!
//! section    once, at the beginning      interface   before its first packet, numbered from 0
//! packet     as they come                statistics  of each interface, at the end
//! ```
//!
//! Little-endian on every machine; times are nanoseconds since 1970, in two halves, the high one first.

use std::io::{self, Write};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
/// LINKTYPE_ETHERNET.
const ETHERNET: u16 = 1;

const SHB_OS: u16 = 3;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_DESCRIPTION: u16 = 3;
const IF_TSRESOL: u16 = 9;
const IF_FILTER: u16 = 11;
const EPB_FLAGS: u16 = 2;
const ISB_STARTTIME: u16 = 2;
const ISB_ENDTIME: u16 = 3;
const ISB_IFRECV: u16 = 4;
const ISB_OSDROP: u16 = 7;
const ISB_USRDELIV: u16 = 8;
/// A power of ten: nanoseconds.
const NANOSECONDS: u8 = 9;
/// The kind of filter that is a text.
const FILTER_TEXT: u8 = 0;
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
/// What an option can hold.
const LONGEST_OPTION: usize = 65_535;

/// Where packets are seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interface<'a> {
    pub(super) name: &'a str,
    pub(super) description: &'a str,
    pub(super) filter: &'a str,
    /// Bytes of each packet that are kept.
    pub(super) snaplen: u32,
}

/// One packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet<'a> {
    pub(super) time_ns: i64,
    pub(super) outgoing: bool,
    /// On the interface.
    pub(super) length: u32,
    pub(super) data: &'a [u8],
}

/// What became of an interface's packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Statistics {
    pub(super) begun_ns: i64,
    pub(super) ended_ns: i64,
    /// Those dropped among them.
    pub(super) received: u64,
    pub(super) dropped: u64,
    /// In the file.
    pub(super) written: u64,
}

/// A pcapng file of one section.
pub(super) struct Writer<W> {
    out: W,
    interfaces: u32,
}

impl<W: Write> Writer<W> {
    /// Begins a file.
    pub(super) fn begin(out: W) -> io::Result<Self> {
        let mut writer = Self { out, interfaces: 0 };
        let mut body = BYTE_ORDER.to_le_bytes().to_vec();
        // Version 1.0, of a length that is not known.
        body.extend(1_u16.to_le_bytes());
        body.extend(0_u16.to_le_bytes());
        body.extend((-1_i64).to_le_bytes());
        option(&mut body, SHB_OS, std::env::consts::OS.as_bytes());
        option(&mut body, SHB_USERAPPL, concat!("godwit ", env!("CARGO_PKG_VERSION")).as_bytes());
        writer.block(SECTION, body)?;
        Ok(writer)
    }

    /// Adds an interface; its number.
    pub(super) fn interface(&mut self, interface: Interface<'_>) -> io::Result<u32> {
        let mut body = ETHERNET.to_le_bytes().to_vec();
        body.extend(0_u16.to_le_bytes());
        body.extend(interface.snaplen.to_le_bytes());
        option(&mut body, IF_NAME, interface.name.as_bytes());
        option(&mut body, IF_DESCRIPTION, interface.description.as_bytes());
        option(&mut body, IF_TSRESOL, &[NANOSECONDS]);
        if !interface.filter.is_empty() {
            option(&mut body, IF_FILTER, &[&[FILTER_TEXT][..], interface.filter.as_bytes()].concat());
        }
        self.block(INTERFACE, body)?;
        let number = self.interfaces;
        self.interfaces += 1;
        Ok(number)
    }

    /// Adds a packet that an interface saw.
    pub(super) fn packet(&mut self, interface: u32, packet: Packet<'_>) -> io::Result<()> {
        let kept = u32::try_from(packet.data.len()).map_err(io::Error::other)?;
        let mut body = Vec::with_capacity(32 + packet.data.len());
        body.extend(interface.to_le_bytes());
        body.extend(time(packet.time_ns));
        body.extend(kept.to_le_bytes());
        body.extend(packet.length.max(kept).to_le_bytes());
        body.extend(packet.data);
        pad(&mut body);
        let direction = if packet.outgoing { OUTBOUND } else { INBOUND };
        option(&mut body, EPB_FLAGS, &direction.to_le_bytes());
        self.block(PACKET, body)
    }

    /// Adds what became of an interface's packets.
    pub(super) fn statistics(&mut self, interface: u32, statistics: Statistics) -> io::Result<()> {
        let mut body = interface.to_le_bytes().to_vec();
        body.extend(time(statistics.ended_ns));
        option(&mut body, ISB_STARTTIME, &time(statistics.begun_ns));
        option(&mut body, ISB_ENDTIME, &time(statistics.ended_ns));
        option(&mut body, ISB_IFRECV, &statistics.received.to_le_bytes());
        option(&mut body, ISB_OSDROP, &statistics.dropped.to_le_bytes());
        option(&mut body, ISB_USRDELIV, &statistics.written.to_le_bytes());
        self.block(STATISTICS, body)
    }

    /// Hands on what was written.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn block(&mut self, kind: u32, mut body: Vec<u8>) -> io::Result<()> {
        // The end of the options, which all of these blocks have: code 0, length 0.
        body.extend([0; 4]);
        let length = u32::try_from(body.len() + 12).map_err(io::Error::other)?.to_le_bytes();
        self.out.write_all(&kind.to_le_bytes())?;
        self.out.write_all(&length)?;
        self.out.write_all(&body)?;
        self.out.write_all(&length)
    }
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = value.get(..LONGEST_OPTION).unwrap_or(value);
    body.extend(code.to_le_bytes());
    body.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_le_bytes());
    body.extend(value);
    pad(body);
}

fn pad(body: &mut Vec<u8>) {
    body.resize(body.len().next_multiple_of(4), 0);
}

fn time(ns: i64) -> [u8; 8] {
    // There is nothing before 1970.
    let [a, b, c, d, e, f, g, h] = u64::try_from(ns).unwrap_or_default().to_le_bytes();
    [e, f, g, h, a, b, c, d]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// The blocks of a file: kinds and bodies. Ends the test where it is not as the draft has it.
    fn blocks(file: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let (mut rest, mut blocks) = (file, Vec::new());
        while !rest.is_empty() {
            let length = u32_at(rest, 4) as usize;
            assert!(length.is_multiple_of(4) && length >= 12);
            assert_eq!(u32_at(rest, length - 4) as usize, length, "the length before and behind");
            blocks.push((u32_at(rest, 0), rest[8..length - 4].to_vec()));
            rest = &rest[length..];
        }
        blocks
    }

    /// The options that begin at `at` in a block's body.
    fn options(body: &[u8], at: usize) -> Vec<(u16, Vec<u8>)> {
        let (mut rest, mut options) = (&body[at..], Vec::new());
        loop {
            let code = u16::from_le_bytes(rest[..2].try_into().unwrap());
            let length = usize::from(u16::from_le_bytes(rest[2..4].try_into().unwrap()));
            if code == 0 {
                assert_eq!((length, rest.len()), (0, 4), "the last option is the last");
                return options;
            }
            options.push((code, rest[4..4 + length].to_vec()));
            rest = &rest[4 + length.next_multiple_of(4)..];
        }
    }

    #[test]
    fn a_file_reads_back_as_what_was_written() {
        let mut file = Vec::new();
        let mut writer = Writer::begin(&mut file).unwrap();
        let at_a = Interface { name: "a:eth0", description: "web on a", filter: "tcp port 80", snaplen: 96 };
        assert_eq!(writer.interface(at_a).unwrap(), 0);
        assert_eq!(writer.interface(Interface { name: "b:eth0", filter: "", ..at_a }).unwrap(), 1);
        let time_ns = 1_700_000_000_123_456_789;
        let packet = Packet { time_ns, outgoing: true, length: 1500, data: b"seven b" };
        writer.packet(1, packet).unwrap();
        writer.packet(0, Packet { outgoing: false, data: b"", length: 0, ..packet }).unwrap();
        let statistics = Statistics { begun_ns: 1, ended_ns: time_ns, received: 9, dropped: 2, written: 7 };
        writer.statistics(1, statistics).unwrap();
        writer.flush().unwrap();

        let blocks = blocks(&file);
        let kinds: Vec<_> = blocks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [SECTION, INTERFACE, INTERFACE, PACKET, PACKET, STATISTICS]);
        assert_eq!(blocks[0].1[..8], [0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0]);
        assert_eq!(blocks[0].1[8..16], [0xff; 8]);
        assert!(options(&blocks[0].1, 16)[1].1.starts_with(b"godwit "));

        assert_eq!(blocks[1].1[..8], [1, 0, 0, 0, 96, 0, 0, 0]);
        let told = options(&blocks[1].1, 8);
        assert_eq!(told[0], (IF_NAME, b"a:eth0".to_vec()));
        assert_eq!(told[1], (IF_DESCRIPTION, b"web on a".to_vec()));
        assert_eq!(told[2], (IF_TSRESOL, vec![9]));
        assert_eq!(told[3], (IF_FILTER, b"\0tcp port 80".to_vec()));
        assert_eq!(options(&blocks[2].1, 8).len(), 3);

        let body = &blocks[3].1;
        assert_eq!(u32_at(body, 0), 1);
        let time = u64::from(u32_at(body, 4)) << 32 | u64::from(u32_at(body, 8));
        assert_eq!(time, 1_700_000_000_123_456_789);
        assert_eq!((u32_at(body, 12), u32_at(body, 16)), (7, 1500));
        assert_eq!(&body[20..28], b"seven b\0");
        assert_eq!(options(body, 28), [(EPB_FLAGS, vec![2, 0, 0, 0])]);
        assert_eq!(options(&blocks[4].1, 20), [(EPB_FLAGS, vec![1, 0, 0, 0])]);

        let told = options(&blocks[5].1, 12);
        let codes: Vec<_> = told.iter().map(|(code, _)| *code).collect();
        assert_eq!(codes, [ISB_STARTTIME, ISB_ENDTIME, ISB_IFRECV, ISB_OSDROP, ISB_USRDELIV]);
        assert_eq!(told[0].1, [0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(told[3].1, 2_u64.to_le_bytes());
    }
}
