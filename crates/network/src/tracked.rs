//! What this node's kernel tracks of connections (nf_conntrack), which a service that comes must not meet.
//!
//! A service that was here before has left entries behind. Its connections went on elsewhere, past what the kernel saw here,
//! so that it takes their packets for invalid ones when they come through this node again, and firewalls drop those
//! (`ct state invalid drop`, as ufw, firewalld and netavark have it). Forgotten connections are taken up in the middle
//! (`nf_conntrack_tcp_loose`, on unless somebody has changed it).
//!
//! Connections whose addresses this node translates stay: those of published ports, whose node is in their way all the time.

use std::collections::HashSet;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::Path;

use netlink_packet_netfilter::conntrack::{ConntrackAttribute, ConntrackMessage, IPTuple, Tuple};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{Socket, SocketAddr};

/// It is there where the kernel tracks connections. Asking otherwise would have it load what tracks them.
const TRACKING: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

/// Forgets the connections with these addresses in the network namespace of the calling thread; how many there were.
///
/// # Errors
/// The kernel refuses.
pub(crate) async fn forget(addresses: Vec<IpAddr>) -> io::Result<usize> {
    if !Path::new(TRACKING).exists() {
        return Ok(0);
    }
    // A socket belongs to the namespace of the thread that has made it.
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let forgetting = tokio::task::spawn_blocking(move || {
        let addresses: HashSet<_> = addresses.into_iter().collect();
        let mut forgotten = 0;
        for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
            let listed = ask(&socket, family, ConntrackMessage::Get(Vec::new()), NLM_F_DUMP)?;
            for attributes in listed.into_iter().filter(|attributes| is_of(attributes, &addresses)) {
                match ask(&socket, family, ConntrackMessage::Delete(naming(attributes)), NLM_F_ACK) {
                    // It has ended meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    forgot => {
                        forgot?;
                        forgotten += 1;
                    }
                }
            }
        }
        Ok(forgotten)
    });
    forgetting.await.map_err(io::Error::other)?
}

/// Source and destination of one direction.
fn ends(tuples: &[Tuple]) -> Option<(IpAddr, IpAddr)> {
    let (mut source, mut destination) = (None, None);
    let parts = tuples.iter().filter_map(|tuple| match tuple {
        Tuple::Ip(parts) => Some(parts),
        _ => None,
    });
    for part in parts.flatten() {
        match part {
            IPTuple::SourceAddress(address) => source = Some(*address),
            IPTuple::DestinationAddress(address) => destination = Some(*address),
            _ => {}
        }
    }
    source.zip(destination)
}

/// Whether a connection is one of these addresses, which nobody translates.
fn is_of(attributes: &[ConntrackAttribute], addresses: &HashSet<IpAddr>) -> bool {
    let (mut there, mut back) = (None, None);
    for attribute in attributes {
        match attribute {
            ConntrackAttribute::CtaTupleOrig(tuples) => there = ends(tuples),
            ConntrackAttribute::CtaTupleReply(tuples) => back = ends(tuples),
            _ => {}
        }
    }
    let Some(((source, destination), back)) = there.zip(back) else { return false };
    back == (destination, source) && (addresses.contains(&source) || addresses.contains(&destination))
}

/// What the kernel finds it by.
fn naming(attributes: Vec<ConntrackAttribute>) -> Vec<ConntrackAttribute> {
    let is_name = |attribute: &ConntrackAttribute| matches!(attribute, ConntrackAttribute::CtaTupleOrig(_));
    attributes.into_iter().filter(is_name).collect()
}

/// Sends one message, and waits for all answers to it.
fn ask(
    socket: &Socket,
    family: NetfilterProtoFamily,
    message: ConntrackMessage,
    flags: u16,
) -> io::Result<Vec<Vec<ConntrackAttribute>>> {
    let mut request =
        NetlinkMessage::from(NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message));
    request.header.flags = NLM_F_REQUEST | flags;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut answers = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer = NetlinkMessage::<NetfilterMessage>::deserialize(rest).map_err(io::Error::other)?;
            // Messages begin at multiples of four.
            let length = usize::try_from(answer.header.length).map_err(io::Error::other)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            match answer.payload {
                NetlinkPayload::InnerMessage(NetfilterMessage {
                    inner: NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)),
                    ..
                }) => answers.push(attributes),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(answers),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_is_translated_is_not_one_of_the_services() {
        let [client, node, service, other] = [1, 2, 3, 4].map(|last| IpAddr::from([10, 0, 0, last]));
        let tuple = |(source, destination): (IpAddr, IpAddr)| {
            vec![Tuple::Ip(vec![IPTuple::SourceAddress(source), IPTuple::DestinationAddress(destination)])]
        };
        let is_services = |there: (IpAddr, IpAddr), back: (IpAddr, IpAddr)| {
            let attributes = [
                ConntrackAttribute::CtaTupleOrig(tuple(there)),
                ConntrackAttribute::CtaTupleReply(tuple(back)),
            ];
            is_of(&attributes, &HashSet::from([service]))
        };
        assert!(is_services((client, service), (service, client)));
        assert!(is_services((service, client), (client, service)));
        assert!(!is_services((client, other), (other, client)));
        // A published port, and a service that calls out.
        assert!(!is_services((client, node), (service, node)));
        assert!(!is_services((service, client), (client, node)));
    }
}
