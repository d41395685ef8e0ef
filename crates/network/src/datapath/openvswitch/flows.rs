//! The flows of the bridge, all written by godwit, as `ovs-ofctl` reads and writes them (ovs-fields(7),
//! ovs-actions(7)).
//!
//! ```text
//!   table 0: from where?             table 1: to where?                       table 2: may it?
//!   gw0, tunnel  ──────────────────► gateway's MAC or ARP ─► gw0
//!   open port    ──────────────────► service's MAC ─► tunnel
//!   else: dropped                    service's MAC ─► its port ─────────────► port is open: to it
//!                                    ARP for a service ─► answered            else: dropped
//!                                    else: dropped
//! ```
//!
//! Nothing is learned and nothing is flooded: broadcast and multicast frames end in table 1, but for ARP
//! requests, which the switch answers itself. A port is closed by leaving it out of tables 0 and 2, so
//! that where a service is stays entered while its port is closed. The cookie of an entry in table 1 is the
//! port that it leads to.

use std::collections::HashSet;
use std::fmt::Write;
use std::net::Ipv4Addr;

use crate::{Mac, mac_to_string};

/// What of the bridge does not depend on services: the gateway, and the tunnel's port.
pub(super) fn base(tunnel: u32, gateway: Ipv4Addr, mac: Mac) -> String {
    let mac = mac_to_string(mac);
    format!(
        "table=0,priority=100,in_port=LOCAL,actions=goto_table:1\n\
         table=0,priority=100,in_port={tunnel},actions=goto_table:1\n\
         table=1,priority=100,dl_dst={mac},actions=LOCAL\n\
         table=1,priority=200,arp,arp_op=1,arp_tpa={gateway},actions=LOCAL\n"
    )
}

/// Lets frames pass a port in both directions.
pub(super) fn open(port: u32) -> String {
    format!(
        "table=0,priority=100,in_port={port},actions=goto_table:1\n\
         table=2,priority=100,reg0={port},actions=output:{port}\n"
    )
}

/// Undoes [`open`].
pub(super) fn close(port: u32) -> String {
    format!("delete table=0,in_port={port}\ndelete table=2,reg0={port}\n")
}

/// Frames to the service go to a port, if that is open. Takes the place of what was entered before.
pub(super) fn entry_here(address: Ipv4Addr, mac: Mac, port: u32) -> String {
    entry(address, mac, port, &format!("set_field:{port}->reg0,goto_table:2"))
}

/// Frames to the service go to the tunnel. Takes the place of what was entered before.
pub(super) fn entry_there(address: Ipv4Addr, mac: Mac, tunnel: u32) -> String {
    entry(address, mac, tunnel, &format!("output:{tunnel}"))
}

fn entry(address: Ipv4Addr, mac: Mac, cookie: u32, actions: &str) -> String {
    let whole = mac.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let number = address.to_bits();
    let mac = mac_to_string(mac);
    // The answer is made of the request: its sender becomes the target, and the service the sender.
    format!(
        "cookie={cookie},table=1,priority=100,dl_dst={mac},actions={actions}\n\
         cookie={cookie},table=1,priority=200,arp,arp_op=1,arp_tpa={address},actions=\
         move:NXM_OF_ETH_SRC[]->NXM_OF_ETH_DST[],set_field:{mac}->eth_src,set_field:2->arp_op,\
         move:NXM_NX_ARP_SHA[]->NXM_NX_ARP_THA[],load:{whole:#x}->NXM_NX_ARP_SHA[],\
         move:NXM_OF_ARP_SPA[]->NXM_OF_ARP_TPA[],load:{number:#x}->NXM_OF_ARP_SPA[],in_port\n"
    )
}

/// Removes the entry that the service is behind this port, if that is what is entered.
pub(super) fn delete_entry(address: Ipv4Addr, mac: Mac, port: u32) -> String {
    let mac = mac_to_string(mac);
    format!(
        "delete cookie={port}/-1,table=1,dl_dst={mac}\n\
         delete cookie={port}/-1,table=1,arp,arp_op=1,arp_tpa={address}\n"
    )
}

/// Removes all that has to do with a port.
pub(super) fn forget(port: u32) -> String {
    let mut text = close(port);
    // Writing to a string does not fail.
    let _ = writeln!(text, "delete cookie={port}/-1,table=1");
    text
}

/// The ports that frames may come in by, from what `ovs-ofctl dump-flows` says of table 0.
pub(super) fn open_ports(dump: &str) -> HashSet<u32> {
    let number = |line: &str| {
        let (_, after) = line.split_once("in_port=")?;
        after.split([' ', ',']).next()?.parse().ok()
    };
    dump.lines().filter_map(number).collect()
}

/// Whether the bridge has no flows, from what `ovs-ofctl dump-flows` says of table 0.
pub(super) fn is_empty(dump: &str) -> bool {
    !dump.contains("in_port=LOCAL")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const MAC: Mac = [2, 0x67, 10, 88, 0, 10];

    #[test]
    fn an_entry_here_and_one_there_match_the_same_and_so_replace_each_other() {
        let matches = |text: &str| -> Vec<String> {
            let before = |line: &str| line.split_once("actions=").map(|(before, _)| before.to_owned());
            text.lines()
                .filter_map(before)
                .map(|line| line.split_once(',').map_or(line.clone(), |(_, m)| m.to_owned()))
                .collect()
        };
        let (here, there) = (entry_here(ADDRESS, MAC, 5), entry_there(ADDRESS, MAC, 1));
        assert_eq!(matches(&here), matches(&there));
        assert_eq!(matches(&here).len(), 2);
        assert!(here.contains("cookie=5") && there.contains("cookie=1"));
    }

    #[test]
    fn arp_for_a_service_is_answered_with_its_link_layer_address() {
        let text = entry_there(ADDRESS, MAC, 1);
        assert!(text.contains("arp_tpa=10.88.0.10"), "{text}");
        assert!(text.contains("load:0x2670a58000a->NXM_NX_ARP_SHA[]"), "{text}");
        assert!(text.contains("load:0xa58000a->NXM_OF_ARP_SPA[],in_port"), "{text}");
    }

    #[test]
    fn open_ports_are_read_from_ovs_ofctls_own_output() {
        // As ovs-ofctl 3.1.0 printed it.
        let dump = "OFPST_FLOW reply (OF1.4) (xid=0x2):\n \
                    priority=100,in_port=LOCAL actions=goto_table:1\n \
                    priority=100,in_port=1 actions=goto_table:1\n \
                    cookie=0x5, priority=100,in_port=12 actions=goto_table:1\n";
        assert_eq!(open_ports(dump), HashSet::from([1, 12]));
    }
}
