//! Reading what `godwit capture` writes: the blocks of the file, and the streams of TCP in it.
//!
//! Strict: a block that is not as the draft has it ends the test.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddrV4},
    path::Path,
};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;
/// Of an interface: its name; the time's unit.
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
/// Of statistics: received, and dropped.
const ISB_IFRECV: u16 = 4;
const ISB_OSDROP: u16 = 7;
const VXLAN: u16 = 4789;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;

/// A file.
#[derive(Debug, Default)]
pub struct Capture {
    /// Names of the interfaces.
    pub interfaces: Vec<String>,
    /// In the order of the file.
    pub packets: Vec<Packet>,
    /// By interface: packets received, and dropped.
    pub statistics: HashMap<usize, (u64, u64)>,
}

/// A packet of a file.
#[derive(Debug)]
pub struct Packet {
    /// Index of its interface.
    pub interface: usize,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// On the interface.
    pub length: usize,
    /// As much as was kept.
    pub data: Vec<u8>,
}

/// A segment of TCP.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Where it comes from.
    pub from: SocketAddrV4,
    /// Where it goes.
    pub to: SocketAddrV4,
    /// The sequence number of its first byte.
    pub sequence: u32,
    /// Whether it opens the connection.
    pub syn: bool,
    /// Its bytes.
    pub data: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u16_be(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

impl Capture {
    /// Reads a file.
    pub fn read(path: &Path) -> Self {
        let file = std::fs::read(path).unwrap();
        let mut capture = Self::default();
        let mut rest = file.as_slice();
        while !rest.is_empty() {
            let length = u32_at(rest, 4) as usize;
            assert_eq!(u32_at(rest, length - 4) as usize, length, "a block's length before and behind");
            let (kind, body) = (u32_at(rest, 0), &rest[8..length - 4]);
            assert_eq!(kind == SECTION, rest.len() == file.len(), "one section, at the beginning");
            match kind {
                SECTION => assert_eq!(u32_at(body, 0), 0x1a2b_3c4d, "little-endian"),
                INTERFACE => capture.take_interface(body),
                PACKET => capture.take_packet(body),
                STATISTICS => {
                    let told = options(body, 12);
                    let count = |code| u64::from_le_bytes(told[&code].as_slice().try_into().unwrap());
                    let counts = (count(ISB_IFRECV), count(ISB_OSDROP));
                    capture.statistics.insert(u32_at(body, 0) as usize, counts);
                }
                other => panic!("a block of kind {other:#x}"),
            }
            rest = &rest[length..];
        }
        capture
    }

    fn take_interface(&mut self, body: &[u8]) {
        assert_eq!(u32_at(body, 0), 1, "Ethernet");
        let told = options(body, 8);
        assert_eq!(told[&IF_TSRESOL], [9], "nanoseconds");
        self.interfaces.push(String::from_utf8(told[&IF_NAME].clone()).unwrap());
    }

    fn take_packet(&mut self, body: &[u8]) {
        let kept = u32_at(body, 12) as usize;
        let packet = Packet {
            interface: u32_at(body, 0) as usize,
            time_ns: u64::from(u32_at(body, 4)) << 32 | u64::from(u32_at(body, 8)),
            length: u32_at(body, 16) as usize,
            data: body[20..20 + kept].to_vec(),
        };
        assert!(packet.interface < self.interfaces.len() && packet.length >= kept, "{packet:?}");
        self.packets.push(packet);
    }

    /// Packets of the interfaces with these names.
    pub fn at<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = &'a Packet> {
        self.packets.iter().filter(|packet| names.contains(&self.interfaces[packet.interface].as_str()))
    }

    /// The name of the interface of the node that begins so.
    pub fn interface(&self, node: &str, beginning: &str) -> &str {
        let start = format!("{node}:{beginning}");
        let found = self.interfaces.iter().find(|name| name.starts_with(&start));
        found.unwrap_or_else(|| panic!("there is no {start}… among {:?}", self.interfaces))
    }
}

fn options(body: &[u8], at: usize) -> HashMap<u16, Vec<u8>> {
    let mut rest = &body[at..];
    let mut options = HashMap::new();
    loop {
        let code = u16::from_le_bytes(rest[..2].try_into().unwrap());
        let length = usize::from(u16::from_le_bytes(rest[2..4].try_into().unwrap()));
        if code == 0 {
            assert_eq!(rest.len(), 4, "the end of the options is the end of the block");
            return options;
        }
        options.insert(code, rest[4..4 + length].to_vec());
        rest = &rest[4 + length.next_multiple_of(4)..];
    }
}

impl Packet {
    /// The segment of TCP over IPv4 in it, also where VXLAN wraps it.
    pub fn segment(&self) -> Option<Segment<'_>> {
        let (protocol, from, to, body) = ipv4(&self.data)?;
        if protocol == UDP && u16_be(body, 2) == VXLAN {
            let (protocol, from, to, body) = ipv4(&body[16..])?;
            return (protocol == TCP).then(|| segment(from, to, body));
        }
        (protocol == TCP).then(|| segment(from, to, body))
    }
}

fn ipv4(frame: &[u8]) -> Option<(u8, Ipv4Addr, Ipv4Addr, &[u8])> {
    if u16_be(frame, 12) != 0x0800 {
        return None;
    }
    let packet = &frame[14..];
    let (header, total) = (usize::from(packet[0] & 0x0f) * 4, usize::from(u16_be(packet, 2)));
    let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
    // What is behind the packet's own end is padding.
    Some((packet[9], address(12), address(16), &packet[header..total]))
}

fn segment(from: Ipv4Addr, to: Ipv4Addr, body: &[u8]) -> Segment<'_> {
    Segment {
        from: SocketAddrV4::new(from, u16_be(body, 0)),
        to: SocketAddrV4::new(to, u16_be(body, 2)),
        sequence: u32::from_be_bytes(body[4..8].try_into().unwrap()),
        syn: body[13] & SYN != 0,
        data: &body[usize::from(body[12] >> 4) * 4..],
    }
}

/// What one side of a connection sent, as the packets tell it: from its first byte to the first that is
/// missing, and how many bytes there are behind that.
///
/// Bytes that were sent again must be the same.
pub fn stream<'a>(
    packets: impl Iterator<Item = &'a Packet>,
    from: SocketAddrV4,
    to: SocketAddrV4,
) -> (Vec<u8>, usize) {
    let segments: Vec<_> = packets
        .filter_map(Packet::segment)
        .filter(|segment| (segment.from, segment.to) == (from, to))
        .collect();
    let opening = segments.iter().find(|segment| segment.syn).expect("the segment that opens the connection");
    let first = opening.sequence.wrapping_add(1);
    let mut bytes: Vec<Option<u8>> = Vec::new();
    for segment in &segments {
        let offset = segment.sequence.wrapping_sub(first).cast_signed();
        // What is before the first byte are the opening and what asks whether the other side lives.
        let Ok(offset) = usize::try_from(offset) else { continue };
        let end = offset + segment.data.len();
        bytes.resize(bytes.len().max(end), None);
        for (known, byte) in bytes[offset..end].iter_mut().zip(segment.data) {
            assert!(known.is_none_or(|known| known == *byte), "bytes sent again are others");
            *known = Some(*byte);
        }
    }
    let whole: Vec<u8> = bytes.iter().map_while(|byte| *byte).collect();
    let behind = bytes[whole.len()..].iter().flatten().count();
    (whole, behind)
}
