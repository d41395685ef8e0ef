//! `godwit inspect`: everything a node knows of one service, and its connections.

use std::{io, process::ExitCode};

use godwit_api::v1::{Connection as Socket, ConnectionsResponse, ServiceRequest};
use serde_json::{Value, json};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Connections that a person is shown; a program is given all.
const SHOWN: usize = 20;

/// Show everything this node knows of a service, as JSON, and its connections
///
/// Times are milliseconds since 1970, sizes are bytes. Connections are counted by state, and the first
/// 20 shown as a table. With --json it is all one document on one line, with all connections.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.inspect(ServiceRequest { name: args.name.clone() }).await;
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let connections = match connection.node.connections(ServiceRequest { name: args.name }).await {
        Ok(answer) => Some(answer.into_inner()),
        Err(status) => {
            // What is known of the service is an answer without them.
            let reason = connection.explain(&status);
            output::note(&format!("the connections of {} cannot be shown: {reason}", service.name));
            None
        }
    };
    let mut value = output::service_json(&service);
    if global.json {
        value["connections"] = connections.as_ref().map_or(Value::Null, all);
        output::json(&value)?;
    } else {
        output::line(&format!("{value:#}"))?;
        if let Some(connections) = &connections {
            print(connections)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// How many there are, by state, and each of them.
fn all(connections: &ConnectionsResponse) -> Value {
    let mut states = json!({});
    for count in &connections.states {
        states[&count.protocol][&count.state] = count.count.into();
    }
    json!({
        "total": total(connections),
        "states": states,
        "list": connections.list,
        "unavailable": connections.unavailable,
    })
}

fn total(connections: &ConnectionsResponse) -> u64 {
    connections.states.iter().map(|count| count.count).fold(0, u64::saturating_add)
}

fn print(connections: &ConnectionsResponse) -> io::Result<()> {
    for protocol in &connections.unavailable {
        output::note(&format!("the node's kernel does not list {protocol} sockets"));
    }
    let states: Vec<_> = connections
        .states
        .iter()
        .map(|count| format!("{} {} {}", count.count, count.protocol, count.state))
        .collect();
    let total = total(connections);
    let shown = if total > SHOWN as u64 { format!("; the first {SHOWN} of {total}:") } else { ":".into() };
    match states.as_slice() {
        [] => return output::line("no connections"),
        states => output::line(&format!("connections: {}{shown}", states.join(", ")))?,
    }
    let mut table =
        Table::new(["PROTOCOL", "STATE", "LOCAL", "REMOTE", "RECV-Q", "SEND-Q", "RETRANS", "RTT", "TIMER"]);
    for socket in connections.list.iter().take(SHOWN) {
        table.row([
            socket.protocol.clone(),
            socket.state.clone(),
            socket.local.clone(),
            socket.remote.clone(),
            socket.receive_queue.to_string(),
            socket.send_queue.to_string(),
            retransmissions(socket),
            round_trip(socket),
            timer(socket),
        ]);
    }
    table.print()
}

/// Those in a row until now, and all.
fn retransmissions(socket: &Socket) -> String {
    match (socket.retransmits, socket.total_retransmits) {
        (0, 0) => String::new(),
        (now, all) => format!("{now} ({all} in all)"),
    }
}

fn round_trip(socket: &Socket) -> String {
    match socket.rtt_us {
        0 => String::new(),
        us => output::millis(f64::from(us) / 1000.0),
    }
}

fn timer(socket: &Socket) -> String {
    match socket.timer.as_str() {
        "" => String::new(),
        name => format!("{name} in {}", output::millis(socket.timer_ms.into())),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::v1::ConnectionCount;

    use super::*;

    #[test]
    fn connections_are_counted_by_protocol_and_state() {
        let count = |protocol: &str, state: &str, count| ConnectionCount {
            protocol: protocol.into(),
            state: state.into(),
            count,
        };
        let connections = ConnectionsResponse {
            list: vec![Socket { local: "10.88.0.10:80".into(), rtt_us: 300, ..Socket::default() }],
            states: vec![
                count("tcp", "established", 3),
                count("tcp", "listen", 1),
                count("udp", "connected", 2),
            ],
            unavailable: Vec::new(),
        };
        let value = all(&connections);
        assert_eq!(value["total"], 6);
        assert_eq!(value["states"]["tcp"], json!({ "established": 3, "listen": 1 }));
        assert_eq!(value["list"][0]["local"], "10.88.0.10:80");
        assert_eq!(round_trip(&connections.list[0]), "0.3 ms");
    }

    #[test]
    fn what_there_is_nothing_of_is_left_blank() {
        let idle = Socket::default();
        assert_eq!((retransmissions(&idle), round_trip(&idle), timer(&idle)), Default::default());
        let busy = Socket {
            retransmits: 2,
            total_retransmits: 5,
            timer: "retransmit".into(),
            timer_ms: 800,
            ..Socket::default()
        };
        assert_eq!(retransmissions(&busy), "2 (5 in all)");
        assert_eq!(timer(&busy), "retransmit in 800.0 ms");
    }
}
