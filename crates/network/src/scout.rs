//! Frames by which a switch learns the way to a service before anybody's frames take it.
//!
//! Open vSwitch's kernel module asks ovs-vswitchd where frames of a new kind go. Those that come before it is told are
//! carried when it is told, and are overtaken by those that come then. When a service comes to a node, the frames of
//! all its clients come there by a new way at once.
//!
//! Nobody receives these frames: they have the service's link-layer address, and an IP header that every host drops.

use crate::subnet::SCOUT_MAC;
use crate::{Mac, packet::PacketSocket};

/// Version 4, header of 5 words, without the check sum that its fields need.
const IPV4: [u8; 20] = [0x45, 0, 0, 20, 0, 0, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const NO_NEXT_HEADER: u8 = 59;
const ETHERTYPES: [[u8; 2]; 2] = [[0x08, 0x00], [0x86, 0xdd]];
/// Without its check sum.
const SHORTEST: usize = 60;

/// Sends one frame of each protocol to the link-layer address.
pub(crate) fn send(sender: &PacketSocket, index: u32, to: Mac) -> std::io::Result<()> {
    // Version 6, from nowhere to nowhere.
    let mut ipv6 = [0; 40];
    (ipv6[0], ipv6[6]) = (0x60, NO_NEXT_HEADER);
    for (ethertype, header) in ETHERTYPES.iter().zip([&IPV4[..], &ipv6[..]]) {
        let mut frame = [&to[..], &SCOUT_MAC, ethertype, header].concat();
        frame.resize(SHORTEST.max(frame.len()), 0);
        sender.send_whole(index, &frame)?;
    }
    Ok(())
}
