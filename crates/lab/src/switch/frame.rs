//! Sizes of frames on the wire.
//!
//! A TAP device hands over frames of up to 64 KiB that a network card would cut into segments
//! ("generic segmentation offload"). Each begins with the header of virtio (virtio specification 1.2,
//! section 5.1.6), little-endian here:
//!
//! ```text
//!   0 flags  1 gso_type  2 hdr_len:16  4 gso_size:16  6 csum_start:16  8 csum_offset:16  10 frame …
//! ```

/// Bytes of the virtio header before each frame.
pub(crate) const HEADER: usize = 10;
/// The largest frame with its header: 64 KiB of IP packet, Ethernet with one VLAN tag, the header.
pub(crate) const MAX: usize = HEADER + 18 + 65_536;

/// Preamble and delimiter (8), frame check sequence (4) and inter-frame gap (12), IEEE 802.3.
const WIRE_OVERHEAD: usize = 24;
/// The shortest Ethernet frame without its check sequence.
const MIN_FRAME: usize = 60;

const GSO_TCPV4: u8 = 1;
const GSO_UDP: u8 = 3;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Flag beside the type: the segments carry ECN.
const GSO_ECN: u8 = 0x80;

/// Bytes on the wire of a frame with an IP packet of this length.
pub(crate) fn frame_on_wire(packet: usize) -> usize {
    (14 + packet).max(MIN_FRAME) + WIRE_OVERHEAD
}

/// What a frame occupies on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireSize {
    /// Bytes of all segments.
    pub(crate) total: usize,
    /// Bytes of the first segment.
    pub(crate) first: usize,
}

/// The size of `packet`, which begins with its virtio header; none if it is too short to be a frame.
pub(crate) fn wire_size(packet: &[u8]) -> Option<WireSize> {
    let frame = packet.get(HEADER..)?;
    if frame.len() < 14 {
        return None;
    }
    let whole = frame.len().max(MIN_FRAME) + WIRE_OVERHEAD;
    let one = WireSize { total: whole, first: whole };
    let kind = *packet.get(1)? & !GSO_ECN;
    let segment = usize::from(field(packet, 4)?);
    let transport = usize::from(field(packet, 6)?);
    let headers = match kind {
        GSO_TCPV4 | GSO_TCPV6 => transport + usize::from(*frame.get(transport + 12)? >> 4) * 4,
        GSO_UDP_L4 | GSO_UDP => transport + 8,
        _ => return Some(one),
    };
    let Some(payload) = frame.len().checked_sub(headers).filter(|payload| segment > 0 && *payload > segment)
    else {
        return Some(one);
    };
    let segments = payload.div_ceil(segment);
    let first = (headers + segment).max(MIN_FRAME) + WIRE_OVERHEAD;
    Some(WireSize { total: segments * (headers + WIRE_OVERHEAD) + payload, first })
}

fn field(packet: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes([*packet.get(at)?, *packet.get(at + 1)?]))
}

/// Destination and source address of a frame.
pub(crate) fn addresses(packet: &[u8]) -> Option<([u8; 6], [u8; 6])> {
    let frame = packet.get(HEADER..)?;
    Some((frame.get(0..6)?.try_into().ok()?, frame.get(6..12)?.try_into().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn packet(kind: u8, segment: u16, payload: usize) -> Vec<u8> {
        // Ethernet 14, IPv4 20, TCP 32 with time stamps.
        let mut packet = vec![0; HEADER + 14 + 20 + 32 + payload];
        packet[1] = kind;
        packet[4..6].copy_from_slice(&segment.to_le_bytes());
        packet[6..8].copy_from_slice(&34_u16.to_le_bytes());
        packet[HEADER + 34 + 12] = 8 << 4;
        packet
    }

    #[test]
    fn small_frames_are_padded_and_framed() {
        let size = wire_size(&[0; HEADER + 42]).unwrap();
        assert_eq!(size, WireSize { total: 84, first: 84 });
        assert_eq!(wire_size(&packet(0, 0, 1448)).unwrap().total, 1514 + 24);
    }

    #[test]
    fn large_frames_count_the_headers_of_every_segment() {
        // 10 full segments and one of 1 byte.
        let size = wire_size(&packet(GSO_TCPV4, 1448, 14_481)).unwrap();
        assert_eq!(size.first, 1538);
        assert_eq!(size.total, 10 * 1538 + 66 + 24 + 1);
        assert_eq!(wire_size(&packet(GSO_TCPV4 | GSO_ECN, 1448, 14_481)).unwrap(), size);
    }

    #[test]
    fn nonsense_is_no_frame() {
        assert_eq!(wire_size(&[0; HEADER + 13]), None);
        assert_eq!(wire_size(&[]), None);
        let mut broken = vec![0; HEADER + 20];
        broken[1] = GSO_TCPV4;
        broken[6..8].copy_from_slice(&60_000_u16.to_le_bytes());
        assert_eq!(wire_size(&broken), None);
    }
}
