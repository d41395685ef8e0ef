//! What is on a host's uplink, byte for byte.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket, sockopt,
};

use super::{Host, UPLINK};

/// Every frame on the uplink of a host, from the moment this is made.
pub struct Wire {
    socket: OwnedFd,
    uplink: usize,
}

impl Wire {
    pub fn tap(host: &Host) -> Self {
        let socket = host.run(|| {
            socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK, SockProtocol::EthAll)
                .unwrap()
        });
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).unwrap();
        let link = host.sh(&format!("ip -o link show {UPLINK}"));
        let uplink = link.split(':').next().unwrap().parse().unwrap();
        Self { socket, uplink }
    }

    /// What came since, each as the UDP port it was for, if any, and all of its bytes.
    pub fn frames(&self) -> Vec<(Option<u16>, Vec<u8>)> {
        let (mut frames, mut buffer) = (Vec::new(), vec![0; 1 << 17]);
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer) {
                Ok((length, from)) if from.unwrap().ifindex() == self.uplink => {
                    let frame = buffer[..length].to_vec();
                    let is_udp = frame.get(12..14) == Some(&[8, 0][..]) && frame.get(23) == Some(&17);
                    let port = frame.get(36..38).filter(|_| is_udp);
                    frames.push((port.map(|port| u16::from_be_bytes([port[0], port[1]])), frame));
                }
                Ok(_) => {}
                Err(Errno::EAGAIN) => return frames,
                Err(errno) => panic!("{errno}"),
            }
        }
    }
}

/// Whether the bytes are somewhere in the frame.
pub fn contains(frame: &[u8], bytes: &[u8]) -> bool {
    frame.windows(bytes.len()).any(|window| window == bytes)
}
