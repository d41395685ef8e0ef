//! The flows of the bridge, all written by godwit.
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

use std::net::Ipv4Addr;

use super::openflow::{Actions, Change, Field, Flow, IN_PORT, LOCAL, Match};
use crate::Mac;

const FROM: u8 = 0;
const TO: u8 = 1;
const MAY: u8 = 2;
/// What is asked of frames in general.
const USUAL: u16 = 100;
/// ARP requests come before frames to the address that they are sent to.
const ARP: u16 = 200;

const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];

fn to_mac(mac: Mac) -> Match {
    Match::default().with(Field::EthDst, mac)
}

fn asks_for(address: Ipv4Addr) -> Match {
    let arp = Match::default().with(Field::EthType, ETHERTYPE_ARP).with(Field::ArpOp, REQUEST);
    arp.with(Field::ArpTpa, address.octets())
}

fn came_by(port: u32) -> Match {
    Match::default().with(Field::InPort, port.to_be_bytes())
}

fn goes_to(port: u32) -> Match {
    Match::default().with(Field::Reg0, port.to_be_bytes())
}

fn flow(table: u8, priority: u16, cookie: u32, matched: Match, instructions: Vec<u8>) -> Change {
    Change::Add(Flow { table, priority, cookie: cookie.into(), matched, instructions })
}

/// What of the bridge does not depend on services: the gateway, and the tunnel's port.
pub(super) fn base(tunnel: u32, gateway: Ipv4Addr, mac: Mac) -> Vec<Change> {
    let here = || Actions::default().output(LOCAL).then(None);
    vec![
        enter(LOCAL),
        enter(tunnel),
        flow(TO, USUAL, 0, to_mac(mac), here()),
        flow(TO, ARP, 0, asks_for(gateway), here()),
    ]
}

fn enter(port: u32) -> Change {
    flow(FROM, USUAL, 0, came_by(port), Actions::default().then(Some(TO)))
}

/// Lets frames pass a port in both directions.
pub(super) fn open(port: u32) -> Vec<Change> {
    vec![enter(port), flow(MAY, USUAL, 0, goes_to(port), Actions::default().output(port).then(None))]
}

/// Undoes [`open`].
pub(super) fn close(port: u32) -> Vec<Change> {
    [(FROM, came_by(port)), (MAY, goes_to(port))]
        .map(|(table, matched)| Change::Delete { table, cookie: None, matched })
        .to_vec()
}

/// Frames to the service go to a port, if that is open. Takes the place of what was entered before.
pub(super) fn entry_here(address: Ipv4Addr, mac: Mac, port: u32) -> Vec<Change> {
    let actions = Actions::default().set(Field::Reg0, port.to_be_bytes());
    entry(address, mac, port, actions.then(Some(MAY)))
}

/// Frames to the service go to the tunnel. Takes the place of what was entered before.
pub(super) fn entry_there(address: Ipv4Addr, mac: Mac, tunnel: u32) -> Vec<Change> {
    entry(address, mac, tunnel, Actions::default().output(tunnel).then(None))
}

fn entry(address: Ipv4Addr, mac: Mac, cookie: u32, instructions: Vec<u8>) -> Vec<Change> {
    // The answer is made of the request: its sender becomes the target, and the service the sender.
    let answer = Actions::default()
        .copy(Field::EthSrc, Field::EthDst)
        .set(Field::EthSrc, mac)
        .set(Field::ArpOp, REPLY)
        .copy(Field::ArpSha, Field::ArpTha)
        .set(Field::ArpSha, mac)
        .copy(Field::ArpSpa, Field::ArpTpa)
        .set(Field::ArpSpa, address.octets())
        .output(IN_PORT);
    vec![
        flow(TO, USUAL, cookie, to_mac(mac), instructions),
        flow(TO, ARP, cookie, asks_for(address), answer.then(None)),
    ]
}

/// Removes the entry that the service is behind this port, if that is what is entered.
pub(super) fn delete_entry(address: Ipv4Addr, mac: Mac, port: u32) -> Vec<Change> {
    [to_mac(mac), asks_for(address)]
        .map(|matched| Change::Delete { table: TO, cookie: Some(port.into()), matched })
        .to_vec()
}

/// Removes all that has to do with a port.
pub(super) fn forget(port: u32) -> Vec<Change> {
    let mut changes = close(port);
    changes.push(Change::Delete { table: TO, cookie: Some(port.into()), matched: Match::default() });
    changes
}

/// The port that frames may come in by because of this flow.
pub(super) fn opens(flow: &Flow) -> Option<u32> {
    (flow.table == FROM).then(|| flow.matched.number(Field::InPort)).flatten()
}

/// The numbers of the ports that a flow has to do with.
pub(super) fn ports_of(flow: &Flow) -> impl Iterator<Item = u32> + use<> {
    let field = match flow.table {
        FROM => flow.matched.number(Field::InPort),
        MAY => flow.matched.number(Field::Reg0),
        // Without a cookie it is not a service's.
        _ => u32::try_from(flow.cookie).ok().filter(|port| *port > 0),
    };
    field.into_iter()
}

/// Whether this is the flow by which the bridge's own interface takes part.
pub(super) fn is_base(flow: &Flow) -> bool {
    opens(flow) == Some(LOCAL)
}

/// Whether a flow is one that is written here, by its place and its match.
pub(super) fn is_ours(flow: &Flow) -> bool {
    match (flow.table, flow.priority) {
        (FROM, USUAL) => flow.matched.only(&[Field::InPort]),
        (TO, USUAL) => flow.matched.only(&[Field::EthDst]),
        (TO, ARP) => flow.matched.only(&[Field::EthType, Field::ArpOp, Field::ArpTpa]),
        (MAY, USUAL) => flow.matched.only(&[Field::Reg0]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
    const MAC: Mac = [2, 0x67, 10, 88, 0, 10];

    fn added(changes: &[Change]) -> Vec<&Flow> {
        let flows = changes.iter().filter_map(|change| match change {
            Change::Add(flow) => Some(flow),
            _ => None,
        });
        flows.collect()
    }

    #[test]
    fn an_entry_here_and_one_there_match_the_same_and_so_replace_each_other() {
        let (here, there) = (entry_here(ADDRESS, MAC, 5), entry_there(ADDRESS, MAC, 1));
        let (here, there) = (added(&here), added(&there));
        assert_eq!((here.len(), there.len()), (2, 2));
        for (here, there) in here.into_iter().zip(there) {
            let place = |flow: &Flow| (flow.table, flow.priority, flow.matched.clone());
            assert_eq!(place(here), place(there));
            assert_eq!((here.cookie, there.cookie), (5, 1));
        }
    }

    #[test]
    fn all_that_is_written_is_known_again() {
        let all = [base(1, ADDRESS, MAC), open(5), entry_here(ADDRESS, MAC, 5), entry_there(ADDRESS, MAC, 1)];
        let all = all.concat();
        assert_eq!(added(&all).len(), 10);
        assert!(added(&all).into_iter().all(is_ours));
        assert_eq!(added(&all).into_iter().filter(|flow| is_base(flow)).count(), 1);
        assert_eq!(added(&open(5)).into_iter().filter_map(opens).collect::<Vec<_>>(), [5]);
    }
}
