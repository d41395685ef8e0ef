//! Which frames packet sockets take, of captures and of those who come new, as programs of the kernel's classic BPF
//! (`Documentation/networking/filter.rst`): on an uplink that carries a migration, frames of others
//! must not even be copied.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::Mac;

const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const LOAD_WORD_BEHIND: u16 = 0x40;
const LOAD_HALF_BEHIND: u16 = 0x48;
const LOAD_BYTE_BEHIND: u16 = 0x50;
/// X becomes four times the low half of a byte: the length of an IPv4 header.
const MEASURE_HEADER: u16 = 0xb1;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

const KIND_IPV4: u32 = 0x0800;
const KIND_ARP: u32 = 0x0806;
const KIND_IPV6: u32 = 0x86dd;
const UDP: u32 = 17;
const TCP: u32 = 6;
/// Of TCP's flags.
const SYN: u32 = 0x02;
const ACK: u32 = 0x10;
/// Where a program finds what the kernel knows of a frame (`SKF_AD_OFF` and `SKF_AD_PKTTYPE`), and what an
/// interface sends.
const PACKET_TYPE: u32 = u32::MAX - 0x1000 + 1 + 4;
const PACKET_OUTGOING: u32 = 4;

/// Takes every frame, and `keep` bytes of it.
pub(crate) fn everything(keep: u32) -> Vec<libc::sock_filter> {
    assemble(&[Line::Do(RETURN, keep)])
}

/// Takes `keep` bytes of frames from and to the service: by its link-layer address, by its addresses
/// in ARP, IPv4 and IPv6, and those that VXLAN wraps, by its link-layer address.
pub(crate) fn of_service(
    mac: Mac,
    (address, address6): (Ipv4Addr, Option<Ipv6Addr>),
    port: u16,
    keep: u32,
) -> Vec<libc::sock_filter> {
    use Line::{Do, If, Mark};
    // Without one nothing that is routed has it.
    let word = |number: u32| {
        let bits = address6.unwrap_or(Ipv6Addr::UNSPECIFIED).to_bits();
        u32::try_from(bits >> (96 - 32 * number) & u128::from(u32::MAX)).unwrap_or_default()
    };
    let [a, b, c, d, e, f] = mac;
    let (high, low) = (u32::from_be_bytes([a, b, c, d]), u32::from(u16::from_be_bytes([e, f])));
    let address = u32::from(address);
    let port = u32::from(port);
    assemble(&[
        Do(LOAD_WORD, 0),
        If(JUMP_IF_EQUAL, high, NEXT, "source"),
        Do(LOAD_HALF, 4),
        If(JUMP_IF_EQUAL, low, TAKE, NEXT),
        Mark("source"),
        Do(LOAD_WORD, 6),
        If(JUMP_IF_EQUAL, high, NEXT, "kind"),
        Do(LOAD_HALF, 10),
        If(JUMP_IF_EQUAL, low, TAKE, NEXT),
        Mark("kind"),
        Do(LOAD_HALF, 12),
        If(JUMP_IF_EQUAL, KIND_IPV4, "ipv4", NEXT),
        If(JUMP_IF_EQUAL, KIND_IPV6, "ipv6", NEXT),
        If(JUMP_IF_EQUAL, KIND_ARP, NEXT, LEAVE),
        // Sender and target of ARP.
        Do(LOAD_WORD, 28),
        If(JUMP_IF_EQUAL, address, TAKE, NEXT),
        Do(LOAD_WORD, 38),
        If(JUMP_IF_EQUAL, address, TAKE, LEAVE),
        Mark("ipv6"),
        Do(LOAD_WORD, 22),
        If(JUMP_IF_EQUAL, word(0), NEXT, "ipv6 target"),
        Do(LOAD_WORD, 26),
        If(JUMP_IF_EQUAL, word(1), NEXT, "ipv6 target"),
        Do(LOAD_WORD, 30),
        If(JUMP_IF_EQUAL, word(2), NEXT, "ipv6 target"),
        Do(LOAD_WORD, 34),
        If(JUMP_IF_EQUAL, word(3), TAKE, NEXT),
        Mark("ipv6 target"),
        Do(LOAD_WORD, 38),
        If(JUMP_IF_EQUAL, word(0), NEXT, LEAVE),
        Do(LOAD_WORD, 42),
        If(JUMP_IF_EQUAL, word(1), NEXT, LEAVE),
        Do(LOAD_WORD, 46),
        If(JUMP_IF_EQUAL, word(2), NEXT, LEAVE),
        Do(LOAD_WORD, 50),
        If(JUMP_IF_EQUAL, word(3), TAKE, LEAVE),
        Mark("ipv4"),
        Do(LOAD_WORD, 26),
        If(JUMP_IF_EQUAL, address, TAKE, NEXT),
        Do(LOAD_WORD, 30),
        If(JUMP_IF_EQUAL, address, TAKE, NEXT),
        // VXLAN: UDP, the first fragment, the port; then 8 bytes of UDP and 8 of VXLAN.
        Do(LOAD_BYTE, 23),
        If(JUMP_IF_EQUAL, UDP, NEXT, LEAVE),
        Do(LOAD_HALF, 20),
        If(JUMP_IF_ANY_BIT, 0x1fff, LEAVE, NEXT),
        Do(MEASURE_HEADER, 14),
        Do(LOAD_HALF_BEHIND, 14 + 2),
        If(JUMP_IF_EQUAL, port, NEXT, LEAVE),
        Do(LOAD_WORD_BEHIND, 14 + 16),
        If(JUMP_IF_EQUAL, high, NEXT, "wrapped source"),
        Do(LOAD_HALF_BEHIND, 14 + 16 + 4),
        If(JUMP_IF_EQUAL, low, TAKE, NEXT),
        Mark("wrapped source"),
        Do(LOAD_WORD_BEHIND, 14 + 16 + 6),
        If(JUMP_IF_EQUAL, high, NEXT, LEAVE),
        Do(LOAD_HALF_BEHIND, 14 + 16 + 10),
        If(JUMP_IF_EQUAL, low, TAKE, LEAVE),
        Mark(LEAVE),
        Do(RETURN, 0),
        Mark(TAKE),
        Do(RETURN, keep),
    ])
}

/// Takes the frames that an interface sends and that ask for a TCP connection (SYN without ACK), over IPv4 or
/// over IPv6 without extension headers.
pub(crate) fn openings_sent() -> Vec<libc::sock_filter> {
    use Line::{Do, If, Mark};
    assemble(&[
        Do(LOAD_WORD, PACKET_TYPE),
        If(JUMP_IF_EQUAL, PACKET_OUTGOING, NEXT, LEAVE),
        Do(LOAD_HALF, 12),
        If(JUMP_IF_EQUAL, KIND_IPV4, NEXT, "ipv6"),
        Do(LOAD_BYTE, 23),
        If(JUMP_IF_EQUAL, TCP, NEXT, LEAVE),
        Do(LOAD_HALF, 20),
        If(JUMP_IF_ANY_BIT, 0x1fff, LEAVE, NEXT),
        Do(MEASURE_HEADER, 14),
        Do(LOAD_BYTE_BEHIND, 14 + 13),
        If(JUMP_IF_ANY_BIT, ACK, LEAVE, NEXT),
        If(JUMP_IF_ANY_BIT, SYN, TAKE, LEAVE),
        Mark("ipv6"),
        If(JUMP_IF_EQUAL, KIND_IPV6, NEXT, LEAVE),
        Do(LOAD_BYTE, 20),
        If(JUMP_IF_EQUAL, TCP, NEXT, LEAVE),
        Do(LOAD_BYTE, 14 + 40 + 13),
        If(JUMP_IF_ANY_BIT, ACK, LEAVE, NEXT),
        If(JUMP_IF_ANY_BIT, SYN, TAKE, LEAVE),
        Mark(LEAVE),
        Do(RETURN, 0),
        Mark(TAKE),
        Do(RETURN, u32::MAX),
    ])
}

/// Takes the frames that an interface sends and that are TCP, over IPv4 or over IPv6 without extension headers.
pub(crate) fn segments_sent() -> Vec<libc::sock_filter> {
    use Line::{Do, If, Mark};
    assemble(&[
        Do(LOAD_WORD, PACKET_TYPE),
        If(JUMP_IF_EQUAL, PACKET_OUTGOING, NEXT, LEAVE),
        Do(LOAD_HALF, 12),
        If(JUMP_IF_EQUAL, KIND_IPV4, NEXT, "ipv6"),
        Do(LOAD_BYTE, 23),
        If(JUMP_IF_EQUAL, TCP, TAKE, LEAVE),
        Mark("ipv6"),
        If(JUMP_IF_EQUAL, KIND_IPV6, NEXT, LEAVE),
        Do(LOAD_BYTE, 20),
        If(JUMP_IF_EQUAL, TCP, TAKE, LEAVE),
        Mark(LEAVE),
        Do(RETURN, 0),
        Mark(TAKE),
        Do(RETURN, u32::MAX),
    ])
}

/// The line that follows.
const NEXT: &str = "";
const TAKE: &str = "take";
const LEAVE: &str = "leave";

/// A line of a program whose jumps go to marks.
enum Line {
    Do(u16, u32),
    /// Where to go on if the test holds, and if not.
    If(u16, u32, &'static str, &'static str),
    Mark(&'static str),
}

fn assemble(lines: &[Line]) -> Vec<libc::sock_filter> {
    let mut marks = Vec::new();
    let mut length = 0_usize;
    for line in lines {
        match line {
            Line::Mark(mark) => marks.push((*mark, length)),
            Line::Do(..) | Line::If(..) => length += 1,
        }
    }
    let mut program = Vec::with_capacity(length);
    for line in lines {
        let here = program.len() + 1;
        // All marks lie ahead, and near: the programs are those above.
        let way = |to: &str| {
            let at = marks.iter().find(|(mark, _)| *mark == to).map_or(here, |(_, at)| *at);
            u8::try_from(at.saturating_sub(here)).unwrap_or(u8::MAX)
        };
        match line {
            Line::Mark(_) => {}
            Line::Do(code, k) => program.push(libc::sock_filter { code: *code, jt: 0, jf: 0, k: *k }),
            Line::If(code, k, yes, no) => {
                program.push(libc::sock_filter { code: *code, jt: way(yes), jf: way(no), k: *k });
            }
        }
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::tests::{in_vxlan, ipv4_frame};
    use crate::mac_of;

    const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const SERVICE6: Ipv6Addr = Ipv6Addr::new(0xfd67, 0x6f64, 0, 0, 0, 0, 0x0a58, 10);
    const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 0x64);
    const OTHER6: Ipv6Addr = Ipv6Addr::new(0xfd67, 0x6f64, 0, 0, 0, 0, 0x0a58, 11);
    const OTHER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 11);
    const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 100);
    const TCP: u8 = 6;

    /// What the kernel does with a program: bytes that it takes of the frame.
    fn run(program: &[libc::sock_filter], frame: &[u8]) -> u32 {
        let (mut a, mut x, mut at) = (0_u32, 0_usize, 0_usize);
        let load = |at: usize, bytes: usize| {
            let bytes = frame.get(at..at + bytes)?;
            Some(bytes.iter().fold(0_u32, |value, byte| value << 8 | u32::from(*byte)))
        };
        loop {
            let line = program[at];
            let k = line.k as usize;
            at += 1;
            let loaded = match line.code {
                // The tests' frames are sent.
                LOAD_WORD if line.k == PACKET_TYPE => Some(PACKET_OUTGOING),
                LOAD_WORD => load(k, 4),
                LOAD_HALF => load(k, 2),
                LOAD_BYTE => load(k, 1),
                LOAD_WORD_BEHIND => load(x + k, 4),
                LOAD_HALF_BEHIND => load(x + k, 2),
                LOAD_BYTE_BEHIND => load(x + k, 1),
                MEASURE_HEADER => {
                    let Some(first) = frame.get(k) else { return 0 };
                    x = usize::from(first & 0x0f) * 4;
                    continue;
                }
                JUMP_IF_EQUAL | JUMP_IF_ANY_BIT => {
                    let holds = if line.code == JUMP_IF_EQUAL { a == line.k } else { a & line.k != 0 };
                    at += usize::from(if holds { line.jt } else { line.jf });
                    continue;
                }
                RETURN => return line.k,
                other => panic!("the kernel's {other:#x} is not known here"),
            };
            // Beyond the frame's end the kernel leaves it.
            let Some(loaded) = loaded else { return 0 };
            a = loaded;
        }
    }

    fn taken(frame: &[u8]) -> bool {
        let program = of_service(mac_of(SERVICE), (SERVICE, Some(SERVICE6)), 4789, 96);
        match run(&program, frame) {
            0 => false,
            kept => {
                assert_eq!(kept, 96);
                true
            }
        }
    }

    fn with_macs(mut frame: Vec<u8>, to: Mac, from: Mac) -> Vec<u8> {
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&from);
        frame
    }

    fn between(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        ipv4_frame(TCP, (from.octets(), 1), (to.octets(), 2))
    }

    fn between6(from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 58, 255]);
        frame.extend(from.octets().iter().chain(&to.octets()));
        frame
    }

    fn arp(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1, 2, 2, 2, 2, 2, 2]);
        frame.extend(from.octets().iter().chain(&[0; 6]).chain(&to.octets()));
        frame
    }

    #[test]
    fn frames_of_the_service_are_taken_by_either_address() {
        let (service, other) = (mac_of(SERVICE), mac_of(OTHER));
        for yes in [
            between(CLIENT, SERVICE),
            between(SERVICE, CLIENT),
            between6(CLIENT6, SERVICE6),
            between6(SERVICE6, CLIENT6),
            arp(CLIENT, SERVICE),
            arp(SERVICE, CLIENT),
            with_macs(arp(CLIENT, OTHER), [0xff; 6], service),
            with_macs(between(CLIENT, CLIENT), service, other),
        ] {
            assert!(taken(&yes), "{yes:02x?}");
        }
        for no in [
            between(CLIENT, OTHER),
            between6(CLIENT6, OTHER6),
            between6(OTHER6, CLIENT6),
            arp(CLIENT, OTHER),
            with_macs(between(CLIENT, OTHER), other, [2; 6]),
            // The first four bytes of all services' are alike where their networks are.
            with_macs(arp(OTHER, CLIENT), [0xff; 6], other),
            vec![2; 14],
            Vec::new(),
        ] {
            assert!(!taken(&no), "{no:02x?}");
        }
    }

    #[test]
    fn frames_in_vxlan_are_taken_by_the_address_of_what_is_inside() {
        let (service, other) = (mac_of(SERVICE), mac_of(OTHER));
        let inner = |to, from| in_vxlan(&with_macs(between(CLIENT, CLIENT), to, from));
        assert!(taken(&inner(service, other)));
        assert!(taken(&inner(other, service)));
        assert!(!taken(&inner(other, other)));
        let mut elsewhere = inner(service, other);
        // The destination port of UDP.
        elsewhere[36..38].copy_from_slice(&4790_u16.to_be_bytes());
        assert!(!taken(&elsewhere));
        let mut fragment = inner(service, other);
        fragment[21] = 1;
        assert!(!taken(&fragment));
        let whole = inner(service, other);
        for length in 0..whole.len() {
            // Cut anywhere it ends, and is not taken without the address.
            assert_eq!(taken(&whole[..length]), length >= 14 + 20 + 16 + 6, "{length}");
        }
    }

    #[test]
    fn only_the_first_frame_of_a_connection_opens_it() {
        let taken = |frame: &[u8]| run(&openings_sent(), frame) > 0;
        let with = |mut frame: Vec<u8>, at: usize, flags: u8| {
            frame.resize(at + 13, 0);
            frame.push(flags);
            frame
        };
        let four = |flags| with(between(CLIENT, SERVICE), 14 + 20, flags);
        let six = |flags| {
            let mut frame = with(between6(CLIENT6, SERVICE6), 14 + 40, flags);
            frame[20] = TCP;
            frame
        };
        let (syn, ack, fin) = (0x02, 0x10, 0x01);
        // With ECN, too.
        for opens in [four(syn), six(syn), four(syn | 0xc0)] {
            assert!(taken(&opens), "{opens:02x?}");
        }
        let mut udp = four(syn);
        udp[23] = 17;
        let mut fragment = four(syn);
        fragment[21] = 1;
        let no = [
            four(syn | ack),
            six(syn | ack),
            four(ack),
            four(fin | ack),
            udp,
            fragment,
            arp(CLIENT, SERVICE),
        ];
        for does_not in no.into_iter().chain([Vec::new(), between(CLIENT, SERVICE)[..30].to_vec()]) {
            assert!(!taken(&does_not), "{does_not:02x?}");
        }
    }

    #[test]
    fn everything_is_everything() {
        assert_eq!(run(&everything(7), &[]), 7);
    }
}
