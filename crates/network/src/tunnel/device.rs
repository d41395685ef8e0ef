//! The system calls of the tunnel that no crate here wraps: a TUN device
//! (`Documentation/networking/tuntap.rst`), and a UDP socket whose packets may be cut on their way.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::socket::{setsockopt, sockopt};

/// Makes a device of that name, which is gone when the file is closed. Reading gives one IP packet
/// that the kernel sends through it, writing hands one in; neither waits.
pub(super) fn open_tun(name: &str) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: ifreq is plain old data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the interface's name is too long"));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    // SAFETY: `request` is an ifreq that lives through the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if made < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

/// Bytes that may wait until the thread that opens packets runs. With the kernel's default of 208 KiB, which is 90 packets
/// with their overhead, a fifth of one connection's segments was lost where two nodes shared two processors.
const RECEIVE_QUEUE: usize = 4 << 20;

/// A UDP socket at the address, whose packets may be cut into fragments where a link on their way is
/// too small, as VXLAN's own may: slow is better than never.
pub(super) fn bind_udp(at: SocketAddrV4) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(at)?;
    let mode: libc::c_int = libc::IP_PMTUDISC_DONT;
    let length = size_of_val(&mode).try_into().map_err(io::Error::other)?;
    // SAFETY: `mode` is readable for its size during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            (&raw const mode).cast(),
            length,
        )
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_QUEUE)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::Ipv4Addr;

    use nix::sys::socket::getsockopt;

    use super::*;

    #[test]
    fn a_burst_finds_room_whatever_the_machine_allows_sockets() {
        let socket = bind_udp(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        // The kernel doubles what it is asked for: socket(7).
        assert_eq!(getsockopt(&socket, sockopt::RcvBuf).unwrap(), 2 * RECEIVE_QUEUE);
    }
}
