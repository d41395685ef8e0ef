//! Who may send to the overlay: the cluster's nodes, and nobody else.
//!
//! VXLAN asks nobody for a name: whoever reaches its UDP port puts frames on the services' bridge.
//! So a packet filter of godwit's own stands before it, table `ip godwit_guard`:
//!
//! ```text
//!   input   to VXLAN's port:  from the bridge (a service that plays a node) ......... dropped
//!                             by another way than the tunnel, where there is one .... dropped
//!                             from an address in the set `nodes` .................... taken
//!                             else .................................................. dropped
//!   output  to VXLAN's port:  by another way than the tunnel, where there is one .... dropped
//! ```
//!
//! It stands at `input`, where the kernel has put fragments together: a filter before that would
//! let the second fragment of a stranger's packet pass. It is a table of its own, since the one of
//! published ports ([`crate::publish`]) comes and goes and makes the kernel track connections.
//!
//! Each change is one nft transaction: the old rules count until the new ones do, so that nothing
//! between known nodes is lost.
//!
//! Without encryption this keeps out hosts, not liars: who can send with a node's address as its own
//! is taken for that node.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::Value;

use crate::{NetworkError, publish};

const TABLE: &str = "godwit_guard";

/// What is let through; the rest is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// VXLAN's UDP port.
    pub port: u16,
    /// The bridge that services are plugged into: nothing from there is a node's.
    pub bridge: String,
    /// The tunnel's device, where the nodes' packets are encrypted: there is no other way then.
    pub tunnel: Option<String>,
    /// The underlay addresses of the other nodes.
    pub nodes: BTreeSet<Ipv4Addr>,
}

/// What the kernel says of the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guarding {
    /// Those it lets through.
    pub nodes: BTreeSet<Ipv4Addr>,
    /// Packets it has dropped since it was made.
    pub dropped: u64,
}

impl Guard {
    /// Puts the filter in force, or changes it to this, in one step.
    ///
    /// # Errors
    /// When there is no nft, or it refuses: nothing is changed then.
    pub async fn apply(&self) -> Result<(), NetworkError> {
        publish::run("guard the overlay against strangers", &self.script()).await
    }

    fn script(&self) -> String {
        let Self { port, bridge, tunnel, nodes } = self;
        let mut script = format!(
            r#"add table ip {TABLE}
add set ip {TABLE} nodes {{ type ipv4_addr; }}
add counter ip {TABLE} strangers
add chain ip {TABLE} input {{ type filter hook input priority -10; policy accept; }}
add chain ip {TABLE} output {{ type filter hook output priority -10; policy accept; }}
flush chain ip {TABLE} input
flush chain ip {TABLE} output
flush set ip {TABLE} nodes
add rule ip {TABLE} input udp dport {port} iifname "{bridge}" counter name strangers drop
"#
        );
        if let Some(tunnel) = tunnel {
            for (chain, way) in [("input", "iifname"), ("output", "oifname")] {
                script.push_str(&format!(
                    "add rule ip {TABLE} {chain} udp dport {port} {way} != \"{tunnel}\" counter name strangers drop\n"
                ));
            }
        }
        script.push_str(&format!(
            "add rule ip {TABLE} input udp dport {port} ip saddr != @nodes counter name strangers drop\n"
        ));
        if !nodes.is_empty() {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            script.push_str(&format!("add element ip {TABLE} nodes {{ {} }}\n", nodes.join(", ")));
        }
        script
    }

    /// What of the filter is in force, in the network namespace of the calling thread; nothing when
    /// it was not made, or somebody has emptied it.
    ///
    /// # Errors
    /// When there is no nft, or it cannot be understood.
    pub async fn in_force() -> Result<Option<Guarding>, NetworkError> {
        let output = publish::nft(&["--json", "list", "table", "ip", TABLE], "").await?;
        let action = "list the guard of the overlay";
        if !output.status.success() {
            if String::from_utf8_lossy(&output.stderr).contains("No such file or directory") {
                return Ok(None);
            }
            return Err(publish::refused(action, &output.stderr));
        }
        let json: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| NetworkError::Nft { action: action.into(), message: error.to_string() })?;
        Ok(parse(&json))
    }

    /// Takes the filter away; no error when there is none.
    ///
    /// # Errors
    /// When nft refuses.
    pub async fn remove() -> Result<(), NetworkError> {
        // Adding first makes deleting succeed in any case, in one transaction.
        let script = format!("add table ip {TABLE}\ndelete table ip {TABLE}\n");
        match publish::run("remove the guard of the overlay", &script).await {
            Err(NetworkError::NoNft(_)) => Ok(()),
            other => other,
        }
    }
}

/// Takes the filter out of nft's JSON (libnftables-json(5)).
fn parse(json: &Value) -> Option<Guarding> {
    let objects: Vec<_> = json["nftables"].as_array().into_iter().flatten().collect();
    let ours = |kind: &'static str| {
        objects.iter().map(move |object| &object[kind]).filter(|found| found["table"] == TABLE)
    };
    let set = ours("set").find(|set| set["name"] == "nodes")?;
    // The rule that names the set is the one that keeps strangers out.
    let names_the_set =
        |rule: &Value| rule["chain"] == "input" && rule["expr"].to_string().contains("\"@nodes\"");
    if !ours("rule").any(names_the_set) {
        return None;
    }
    let address = |element: &Value| {
        let value = if element["elem"].is_object() { &element["elem"]["val"] } else { element };
        value.as_str()?.parse().ok()
    };
    Some(Guarding {
        nodes: set["elem"].as_array().into_iter().flatten().filter_map(address).collect(),
        dropped: ours("counter").filter_map(|counter| counter["packets"].as_u64()).sum(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn guard(tunnel: Option<&str>, nodes: &[u8]) -> Guard {
        Guard {
            port: 4789,
            bridge: "gw0".into(),
            tunnel: tunnel.map(str::to_owned),
            nodes: nodes.iter().map(|last| Ipv4Addr::new(10, 99, 0, *last)).collect(),
        }
    }

    #[test]
    fn a_node_that_is_alone_lets_nobody_through() {
        let script = guard(None, &[]).script();
        assert!(!script.contains("add element"), "{script}");
        assert!(script.contains("ip saddr != @nodes counter name strangers drop"), "{script}");
        assert!(!script.contains("oifname"), "{script}");
    }

    #[test]
    fn with_a_tunnel_there_is_no_other_way_in_or_out() {
        let script = guard(Some("gwtun0"), &[12, 11]).script();
        assert!(script.contains("input udp dport 4789 iifname != \"gwtun0\""), "{script}");
        assert!(script.contains("output udp dport 4789 oifname != \"gwtun0\""), "{script}");
        assert!(script.contains("nodes { 10.99.0.11, 10.99.0.12 }"), "{script}");
    }

    #[test]
    fn what_nft_lists_is_understood() {
        let json = |rules: &str| {
            let text = format!(
                r#"{{"nftables": [{{"metainfo": {{"version": "1.0.6"}}}},
                {{"table": {{"family": "ip", "name": "godwit_guard", "handle": 2}}}},
                {{"set": {{"family": "ip", "name": "nodes", "table": "other", "elem": ["10.0.0.1"]}}}},
                {{"set": {{"family": "ip", "name": "nodes", "table": "godwit_guard", "type": "ipv4_addr", "handle": 1,
                  "elem": ["10.99.0.11", "10.99.0.12"]}}}},
                {{"counter": {{"family": "ip", "name": "strangers", "table": "godwit_guard", "packets": 7, "bytes": 900}}}}
                {rules}]}}"#
            );
            serde_json::from_str::<Value>(&text).unwrap()
        };
        let rule = r#", {"rule": {"family": "ip", "table": "godwit_guard", "chain": "input", "handle": 9, "expr": [
            {"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "@nodes"}},
            {"counter": "strangers"}, {"drop": null}]}}"#;
        let found = parse(&json(rule)).unwrap();
        assert_eq!(found, Guarding { nodes: guard(None, &[11, 12]).nodes, dropped: 7 });
        assert_eq!(parse(&json("")), None, "a set that no rule asks keeps nobody out");
        assert_eq!(parse(&serde_json::json!({"nftables": []})), None);
    }
}
