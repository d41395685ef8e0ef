//! The sockets of a service, asked of this node or of the one that has it.

use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_names::ServiceName;
use godwit_network::Protocol;
use godwit_network::connections::{self, Connection, Connections, MOST_LISTED};
use tonic::Status;

use crate::directory::elsewhere;
use crate::node::Node;
use crate::services::owned;
use crate::status::internal;

/// The longest answer taken of a peer: as many sockets as are listed, at some 200 bytes each.
const MAX_ANSWER: usize = 16 << 20;
/// States of all protocols, with room for more.
const MOST_STATES: usize = 64;
/// The longest word or address: `[` IPv6 with IPv4 at its end `]:65535`.
const LONGEST_WORD: usize = 56;

/// The sockets of a service, wherever it is.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    name: &ServiceName,
) -> Result<api::ConnectionsResponse, Status> {
    let Some((owner, address)) = elsewhere(node, name)? else { return here(node, name).await };
    let mut client = node.peers.get(&owner, &address).max_decoding_message_size(MAX_ANSWER);
    let answer = client.connections(api::ServiceRequest { name: name.to_string() }).await?.into_inner();
    if is_plain(&answer) {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {owner} returned an invalid list of connections for service {name}")))
}

/// The sockets of a service of this node.
pub(crate) async fn here(node: &Node, name: &ServiceName) -> Result<api::ConnectionsResponse, Status> {
    let service = owned(node, name)?.service;
    let found = connections::inside(&node.local().config(&service).network_namespace).await;
    Ok(shown(found.map_err(internal)?))
}

fn shown(found: Connections) -> api::ConnectionsResponse {
    let count = |((protocol, state), count): ((&str, &str), u64)| api::ConnectionCount {
        protocol: protocol.into(),
        state: state.into(),
        count,
    };
    api::ConnectionsResponse {
        list: found.list.into_iter().map(connection).collect(),
        states: found.states.into_iter().map(count).collect(),
        unavailable: found.unavailable.into_iter().map(str::to_owned).collect(),
    }
}

fn connection(found: Connection) -> api::Connection {
    let tcp = found.tcp;
    api::Connection {
        protocol: match found.protocol {
            Protocol::Tcp => "tcp".into(),
            Protocol::Udp => "udp".into(),
        },
        state: found.state.into(),
        local: found.local.to_string(),
        remote: found.remote.to_string(),
        receive_queue: found.receive_queue,
        send_queue: found.send_queue,
        timer: found.timer.into(),
        timer_ms: found.timer_ms,
        retransmits: found.retransmits,
        total_retransmits: tcp.map_or(0, |tcp| tcp.total_retransmits),
        rtt_us: tcp.map_or(0, |tcp| tcp.rtt_us),
        rtt_var_us: tcp.map_or(0, |tcp| tcp.rtt_var_us),
        rto_us: tcp.map_or(0, |tcp| tcp.rto_us),
        unacked: tcp.map_or(0, |tcp| tcp.unacked),
        congestion_window: tcp.map_or(0, |tcp| tcp.congestion_window),
    }
}

/// Whether an answer is valid: not too many sockets, and words that do a terminal no harm.
fn is_plain(answer: &api::ConnectionsResponse) -> bool {
    let word = |text: &String| text.len() <= LONGEST_WORD && text.bytes().all(|b| b.is_ascii_graphic());
    answer.list.len() <= MOST_LISTED
        && answer.states.len() <= MOST_STATES
        && answer.unavailable.len() <= MOST_STATES
        && answer.unavailable.iter().all(word)
        && answer.states.iter().all(|count| word(&count.protocol) && word(&count.state))
        && answer
            .list
            .iter()
            .all(|one| [&one.protocol, &one.state, &one.local, &one.remote, &one.timer].into_iter().all(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_peer_that_could_harm_a_terminal_are_not_passed_on() {
        let good = api::Connection {
            protocol: "tcp".into(),
            state: "established".into(),
            local: "[::1]:80".into(),
            remote: "10.99.0.100:40000".into(),
            ..api::Connection::default()
        };
        let answer =
            |one: api::Connection| api::ConnectionsResponse { list: vec![one], ..Default::default() };
        assert!(is_plain(&answer(good.clone())));
        for local in ["\u{1b}[2J", "a b", &"x".repeat(LONGEST_WORD + 1)] {
            assert!(!is_plain(&answer(api::Connection { local: local.into(), ..good.clone() })), "{local:?}");
        }
        let many = vec![good; MOST_LISTED + 1];
        assert!(!is_plain(&api::ConnectionsResponse { list: many, ..Default::default() }));
    }
}
