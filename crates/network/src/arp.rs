//! ARP that godwit speaks itself (RFC 826, RFC 5227): gratuitous, which tells neighbours at which
//! link-layer address an IPv4 address now is, without being asked; and the question whether anybody
//! has an address.

use std::net::Ipv4Addr;

use crate::packet::PacketSocket;
use crate::{Mac, NetworkError};

const BROADCAST: Mac = [0xff; 6];
/// ARP's number in an Ethernet header.
pub(crate) const ETHERTYPE: u16 = 0x0806;
/// The least length of an Ethernet frame without its check sum.
const FRAME_LENGTH: usize = 60;

/// The two forms: some hosts heed only requests, some only replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Request = 1,
    Reply = 2,
}

/// Says on the interface, in both forms, that `address` is at `mac`.
pub(crate) fn announce(
    socket: &PacketSocket,
    index: u32,
    name: &str,
    address: Ipv4Addr,
    mac: Mac,
) -> Result<(), NetworkError> {
    for form in [Form::Request, Form::Reply] {
        let sent = socket.send_whole(index, &frame(form, address, address, mac));
        sent.map_err(NetworkError::system(format!("announce the address {address} on {name}")))?;
    }
    Ok(())
}

/// Asks on the interface whether anybody has `address`, without saying who asks: a probe.
pub(crate) fn probe(socket: &PacketSocket, index: u32, address: Ipv4Addr, mac: Mac) -> std::io::Result<()> {
    socket.send_whole(index, &frame(Form::Request, Ipv4Addr::UNSPECIFIED, address, mac))
}

/// The link-layer address whose owner says in this frame that it has `address`, in an answer or a
/// question of its own.
pub(crate) fn claims(frame: &[u8], address: Ipv4Addr) -> Option<Mac> {
    let body = frame.get(14..)?;
    let ethernet_and_ipv4 = [0, 1, 8, 0, 6, 4, 0];
    let asks_or_answers = body.get(..7)? == ethernet_and_ipv4 && matches!(body.get(7)?, 1 | 2);
    let (mac, sender) = (body.get(8..14)?, body.get(14..18)?);
    (asks_or_answers && sender == address.octets()).then(|| mac.try_into().ok()).flatten()
}

/// What `sender` says about `address`, which is its own when it announces. The target's link-layer address of a reply is the sender's own: Linux takes
/// only such a reply for a gratuitous one (`arp_is_garp`), and believes it at once.
fn frame(form: Form, sender: Ipv4Addr, address: Ipv4Addr, mac: Mac) -> Vec<u8> {
    let target = if form == Form::Reply { mac } else { [0; 6] };
    let parts: [&[u8]; 11] = [
        &BROADCAST,
        &mac,
        &ETHERTYPE.to_be_bytes(),
        &1_u16.to_be_bytes(),      // hardware: Ethernet
        &0x0800_u16.to_be_bytes(), // protocol: IPv4
        &[6, 4],                   // their addresses' lengths
        &(form as u16).to_be_bytes(),
        &mac,
        &sender.octets(),
        &target,
        &address.octets(),
    ];
    let mut frame = parts.concat();
    frame.resize(FRAME_LENGTH, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const MAC: Mac = [2, 0x67, 10, 88, 0, 10];

    #[test]
    fn a_request_asks_for_its_own_address() {
        let frame = frame(Form::Request, ADDRESS, ADDRESS, MAC);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0x67, 10, 88, 0, 10, 8, 6]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(frame[22..32], [2, 0x67, 10, 88, 0, 10, 10, 88, 0, 10]);
        assert_eq!(frame[32..42], [0, 0, 0, 0, 0, 0, 10, 88, 0, 10]);
        assert_eq!(frame[42..], [0; 18]);
    }

    #[test]
    fn a_reply_names_the_sender_as_target_too() {
        let frame = frame(Form::Reply, ADDRESS, ADDRESS, MAC);
        assert_eq!(frame[20..22], [0, 2]);
        assert_eq!(frame[22..32], frame[32..42]);
    }
    #[test]
    fn a_probe_names_no_sender_and_claims_nothing() {
        let frame = frame(Form::Request, Ipv4Addr::UNSPECIFIED, ADDRESS, MAC);
        assert_eq!(frame[22..32], [2, 0x67, 10, 88, 0, 10, 0, 0, 0, 0]);
        assert_eq!(frame[32..42], [0, 0, 0, 0, 0, 0, 10, 88, 0, 10]);
        assert_eq!(claims(&frame, ADDRESS), None);
    }

    #[test]
    fn who_asks_or_answers_with_an_address_claims_it() {
        let other = Ipv4Addr::new(10, 88, 0, 11);
        for form in [Form::Request, Form::Reply] {
            let said = frame(form, ADDRESS, other, MAC);
            assert_eq!(claims(&said, ADDRESS), Some(MAC), "{form:?}");
            assert_eq!(claims(&said, other), None, "{form:?}");
            for length in 0..32 {
                assert_eq!(claims(&said[..length], ADDRESS), None, "{length} bytes");
            }
        }
        let mut reverse = frame(Form::Reply, ADDRESS, ADDRESS, MAC);
        reverse[21] = 3;
        assert_eq!(claims(&reverse, ADDRESS), None, "not an ARP question or answer");
    }
}
