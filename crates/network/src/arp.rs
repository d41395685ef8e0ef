//! Gratuitous ARP (RFC 5227, section 3): tells neighbours at which link-layer address an IPv4
//! address now is, without being asked.

use std::io;
use std::mem;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::{Mac, NetworkError};

const BROADCAST: Mac = [0xff; 6];
const ETHERTYPE_ARP: u16 = 0x0806;
/// The least length of an Ethernet frame without its check sum.
const FRAME_LENGTH: usize = 60;

/// The two forms: some hosts heed only requests, some only replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Request = 1,
    Reply = 2,
}

/// Says on the interface, in both forms, that `address` is at `mac`.
pub(crate) fn announce(index: u32, name: &str, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
    let failed = |error| NetworkError::system(format!("announce the address {address} on {name}"))(error);
    let socket = packet_socket().map_err(failed)?;
    for form in [Form::Request, Form::Reply] {
        send(&socket, index, &frame(form, address, mac)).map_err(failed)?;
    }
    Ok(())
}

/// One announcement. The target's link-layer address of a reply is the sender's own: Linux takes
/// only such a reply for a gratuitous one (`arp_is_garp`), and believes it at once.
fn frame(form: Form, address: Ipv4Addr, mac: Mac) -> [u8; FRAME_LENGTH] {
    let target = if form == Form::Reply { mac } else { [0; 6] };
    let mut frame = [0; FRAME_LENGTH];
    let parts: [&[u8]; 12] = [
        &BROADCAST,
        &mac,
        &ETHERTYPE_ARP.to_be_bytes(),
        &1_u16.to_be_bytes(),      // hardware: Ethernet
        &0x0800_u16.to_be_bytes(), // protocol: IPv4
        &[6, 4],                   // their addresses' lengths
        &(form as u16).to_be_bytes(),
        &mac,
        &address.octets(),
        &target,
        &address.octets(),
        &[],
    ];
    let mut rest = frame.as_mut_slice();
    for part in parts {
        let (place, after) = rest.split_at_mut(part.len());
        place.copy_from_slice(part);
        rest = after;
    }
    frame
}

/// A socket for whole frames that receives nothing (protocol 0).
fn packet_socket() -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn send(socket: &OwnedFd, index: u32, frame: &[u8]) -> io::Result<()> {
    // SAFETY: sockaddr_ll is plain old data, for which all zeroes is a valid value.
    let mut to: libc::sockaddr_ll = unsafe { mem::zeroed() };
    to.sll_family = libc::AF_PACKET.try_into().map_err(io::Error::other)?;
    to.sll_protocol = ETHERTYPE_ARP.to_be();
    to.sll_ifindex = index.try_into().map_err(io::Error::other)?;
    to.sll_halen = 6;
    to.sll_addr[..6].copy_from_slice(&BROADCAST);
    let length = mem::size_of_val(&to).try_into().map_err(io::Error::other)?;
    // SAFETY: `frame` and `to` are readable for the lengths given, and live across the call.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            length,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const MAC: Mac = [2, 0x67, 10, 88, 0, 10];

    #[test]
    fn a_request_asks_for_its_own_address() {
        let frame = frame(Form::Request, ADDRESS, MAC);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0x67, 10, 88, 0, 10, 8, 6]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(frame[22..32], [2, 0x67, 10, 88, 0, 10, 10, 88, 0, 10]);
        assert_eq!(frame[32..42], [0, 0, 0, 0, 0, 0, 10, 88, 0, 10]);
        assert_eq!(frame[42..], [0; 18]);
    }

    #[test]
    fn a_reply_names_the_sender_as_target_too() {
        let frame = frame(Form::Reply, ADDRESS, MAC);
        assert_eq!(frame[20..22], [0, 2]);
        assert_eq!(frame[22..32], frame[32..42]);
    }
}
