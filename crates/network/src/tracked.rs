//! What this node's kernel tracks of connections (nf_conntrack), made fit for a service that comes.
//!
//! A service that was here before has left entries behind. Its connections went on elsewhere, unseen by this kernel. When they
//! come through this node again, it takes their packets for invalid ones, and firewalls drop those (`ct state invalid drop`, as
//! ufw, firewalld and netavark have it). So the kernel is told not to compare their sequence numbers with what it has seen. It
//! does so by itself with connections that it takes up in the middle. All else of an entry stays: who has begun it, and what is
//! translated.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use netlink_packet_netfilter::conntrack::{
    ConntrackAttribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP, Tuple,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload, Nla,
};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{Socket, SocketAddr};

/// It is there where the kernel tracks connections. Asking otherwise would have it load what tracks them.
const TRACKING: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

/// The attribute with the zone of an entry, in which alone it is found (`CTA_ZONE`).
const ZONE: u16 = 18;

/// What is said of the packets of each direction (`CTA_PROTOINFO_TCP_FLAGS_ORIGINAL` and `_REPLY`).
const FLAGS: [u16; 2] = [4, 5];

/// Sequence numbers are not compared (`IP_CT_TCP_FLAG_BE_LIBERAL`).
const LIBERAL: u8 = 0x08;

/// Has the kernel take all packets of the TCP connections with these addresses for valid ones, in the network namespace of the
/// calling thread; how many connections there are.
///
/// # Errors
/// The kernel refuses. The others of them are as they shall be.
pub(crate) async fn relax(addresses: Vec<IpAddr>) -> io::Result<usize> {
    if !Path::new(TRACKING).exists() {
        return Ok(0);
    }
    // A socket belongs to the namespace of the thread that has made it.
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let relaxing = tokio::task::spawn_blocking(move || {
        let addresses: HashSet<_> = addresses.into_iter().collect();
        let mut found = Vec::new();
        for family in [NetfilterProtoFamily::IPv4, NetfilterProtoFamily::IPv6] {
            let listed = ask(&socket, family, ConntrackMessage::Get(Vec::new()), NLM_F_DUMP, |entry| {
                if is_of(&entry, &addresses) {
                    found.push((family, relaxed(entry)));
                }
            });
            match listed {
                // The kernel has no such interface.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(0),
                listed => listed?,
            }
        }
        let (mut relaxed, mut refused) = (0, None);
        for (family, entry) in found {
            match ask(&socket, family, ConntrackMessage::New(entry), NLM_F_ACK, drop) {
                Ok(()) => relaxed += 1,
                // It has ended meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => refused = Some(error),
            }
        }
        refused.map_or(Ok(relaxed), Err)
    });
    relaxing.await.map_err(io::Error::other)?
}

/// Whether a connection is TCP's, and one of these addresses is an end of it.
fn is_of(entry: &[ConntrackAttribute], addresses: &HashSet<IpAddr>) -> bool {
    let is_tcp = |attribute: &ConntrackAttribute| match attribute {
        ConntrackAttribute::CtaProtoInfo(of) => of.iter().any(|of| matches!(of, ProtoInfo::TCP(_))),
        _ => false,
    };
    let ends = entry.iter().flat_map(|attribute| match attribute {
        ConntrackAttribute::CtaTupleOrig(tuples) | ConntrackAttribute::CtaTupleReply(tuples) => {
            tuples.as_slice()
        }
        _ => &[],
    });
    let mut parts = ends.flat_map(|tuple| match tuple {
        Tuple::Ip(parts) => parts.as_slice(),
        _ => &[],
    });
    let is_end = |part: &IPTuple| match part {
        IPTuple::SourceAddress(address) | IPTuple::DestinationAddress(address) => addresses.contains(address),
        _ => false,
    };
    entry.iter().any(is_tcp) && parts.any(is_end)
}

/// What the kernel finds an entry by, and what is to become of it.
fn relaxed(entry: Vec<ConntrackAttribute>) -> Vec<ConntrackAttribute> {
    let names = entry.into_iter().filter(|attribute| match attribute {
        ConntrackAttribute::CtaTupleOrig(_) => true,
        ConntrackAttribute::Other(other) => other.kind() == ZONE,
        _ => false,
    });
    // The flags, and which of them count.
    let both = FLAGS.map(|kind| ProtoInfoTCP::Other(DefaultNla::new(kind, vec![LIBERAL, LIBERAL]))).to_vec();
    names.chain([ConntrackAttribute::CtaProtoInfo(vec![ProtoInfo::TCP(both)])]).collect()
}

/// Sends one message, and takes all answers to it.
fn ask(
    socket: &Socket,
    family: NetfilterProtoFamily,
    message: ConntrackMessage,
    flags: u16,
    mut take: impl FnMut(Vec<ConntrackAttribute>),
) -> io::Result<()> {
    let mut request =
        NetlinkMessage::from(NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message));
    request.header.flags = NLM_F_REQUEST | flags;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
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
                    inner: NetfilterMessageInner::Conntrack(ConntrackMessage::New(entry)),
                    ..
                }) => take(entry),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Done(done) if done.code < 0 => {
                    return Err(io::Error::from_raw_os_error(-done.code));
                }
                NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(()),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::Emitable;

    use super::*;

    fn entry(there: [u8; 2], back: [u8; 2], protocol: ProtoInfo) -> Vec<ConntrackAttribute> {
        let tuple = |[source, destination]: [u8; 2]| {
            let [source, destination] = [source, destination].map(|last| IpAddr::from([10, 0, 0, last]));
            vec![Tuple::Ip(vec![IPTuple::SourceAddress(source), IPTuple::DestinationAddress(destination)])]
        };
        vec![
            ConntrackAttribute::CtaTupleOrig(tuple(there)),
            ConntrackAttribute::CtaTupleReply(tuple(back)),
            ConntrackAttribute::CtaProtoInfo(vec![protocol]),
            ConntrackAttribute::Other(DefaultNla::new(ZONE, vec![0, 7])),
            ConntrackAttribute::Other(DefaultNla::new(ZONE + 1, vec![0, 0])),
        ]
    }

    #[test]
    fn connections_of_a_service_are_found_by_either_end_also_where_an_address_is_translated() {
        let of_three = HashSet::from([IpAddr::from([10, 0, 0, 3])]);
        let is_its =
            |there, back| is_of(&entry(there, back, ProtoInfo::TCP(vec![ProtoInfoTCP::State(3)])), &of_three);
        assert!(is_its([1, 3], [3, 1]) && is_its([3, 1], [1, 3]));
        // A published port, and a service that calls out.
        assert!(is_its([1, 2], [3, 2]) && is_its([3, 1], [1, 2]));
        assert!(!is_its([1, 4], [4, 1]));
        let of_others = ProtoInfo::Other(DefaultNla::new(2, Vec::new()));
        assert!(!is_of(&entry([1, 3], [3, 1], of_others), &of_three), "not TCP's");
    }

    #[test]
    fn an_entry_is_named_by_its_first_direction_and_zone_and_keeps_all_but_two_flags() {
        let whole = entry([1, 3], [3, 1], ProtoInfo::TCP(vec![ProtoInfoTCP::State(3)]));
        let asked = relaxed(whole.clone());
        let [ConntrackAttribute::CtaTupleOrig(_), ConntrackAttribute::Other(zone), flags] = asked.as_slice()
        else {
            panic!("{asked:?}")
        };
        assert_eq!((zone.kind(), &asked[0]), (ZONE, &whole[0]));
        let mut bytes = vec![0; flags.buffer_len()];
        flags.emit(&mut bytes);
        // As `conntrack --update` writes them: CTA_PROTOINFO_TCP_FLAGS_ORIGINAL and _REPLY.
        let told: Vec<_> = [4_u8, 5].into_iter().flat_map(|kind| [6, 0, kind, 0, 8, 8, 0, 0]).collect();
        assert!(bytes.ends_with(&told), "{bytes:?}");
    }
}
