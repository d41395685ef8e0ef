//! Who may send to the overlay: the cluster's nodes, and nobody else; and of its services those on a
//! network to those on the same.
//!
//! VXLAN asks nobody for a name: whoever reaches its UDP port puts frames on the services' bridge.
//! So a packet filter of godwit's own stands before it, table `inet godwit_guard`:
//!
//! ```text
//!   input    to VXLAN's port:  from a bridge (a service that plays a node) .......... dropped
//!                              by another way than the tunnel, where there is one ... dropped
//!                              from an address in the set `nodes` ................... taken
//!                              else ................................................. dropped
//!   output   to VXLAN's port:  by another way than the tunnel, where there is one ... dropped
//!   input, forward             out of the tunnel, and not to VXLAN's port ........... dropped
//!   between  to a network's addresses:  from another network's bridge ............... dropped
//!                                       from another network's address .............. dropped
//! ```
//!
//! `between` is there where there are several networks. A node would route between their bridges, as
//! services have it as their gateway; and what one node sends out on its uplink another would let in. It
//! stands at `prerouting` before destination NAT, so that it sees whom a service asked for: a published port,
//! which is a node's, is everybody's. Of what is answered from there the source is the node.
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
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use serde_json::Value;

use crate::{NetworkError, OverlayConfig, Prefix6, Subnet, nft};

const TABLE: &str = "godwit_guard";

/// What is let through; the rest is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// VXLAN's UDP port.
    pub port: u16,
    /// The networks that services are on: nothing from there is a node's, or another network's.
    pub networks: Vec<Between>,
    /// The tunnel's device, where the nodes' packets are encrypted: there is no other way then.
    pub tunnel: Option<String>,
    /// The underlay addresses of the other nodes.
    pub nodes: BTreeSet<Ipv4Addr>,
}

/// A network, as far as it is kept apart from others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Between {
    /// The bridge that its services are plugged into.
    pub bridge: String,
    /// Its addresses.
    pub subnet: Subnet,
    /// Its IPv6 addresses.
    pub prefix6: Option<Prefix6>,
}

impl Between {
    /// Of the network that is brought up so.
    #[must_use]
    pub fn of(config: &OverlayConfig) -> Self {
        Self { bridge: config.bridge.clone(), subnet: config.subnet, prefix6: config.prefix6 }
    }
}

impl Between {
    /// What must not pass to the other networks.
    fn rules(&self) -> Vec<String> {
        let Self { bridge, subnet, prefix6 } = self;
        let others = format!("ip daddr @apart ip daddr != {subnet} counter name crossing");
        let mut rules = vec![
            format!("between iifname \"{bridge}\" {others}"),
            format!("between ip saddr {subnet} {others}"),
        ];
        let own = prefix6.map(|prefix| format!(" ip6 daddr != {prefix}")).unwrap_or_default();
        let others = format!("ip6 daddr @apart6{own} counter name crossing");
        rules.push(format!("between iifname \"{bridge}\" {others}"));
        rules.extend(prefix6.map(|prefix| format!("between ip6 saddr {prefix} {others}")));
        rules
    }
}

/// The line that puts these into a set, each once; none for nothing.
fn elements<T: ToString>(set: &str, these: impl IntoIterator<Item = T>) -> String {
    let these: BTreeSet<_> = these.into_iter().map(|one| one.to_string()).collect();
    if these.is_empty() {
        return String::new();
    }
    let these: Vec<_> = these.into_iter().collect();
    format!("add element inet {TABLE} {set} {{ {} }}\n", these.join(", "))
}

/// What the kernel says of the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guarding {
    /// Those it lets through.
    pub nodes: BTreeSet<Ipv4Addr>,
    /// The networks that it keeps apart, by their subnets; none where there is but one.
    pub apart: BTreeSet<Subnet>,
    /// Packets to VXLAN's port that it has dropped since it was made.
    pub dropped: u64,
    /// Packets from one network to another that it has dropped since it was made.
    pub crossing: u64,
}

impl Guard {
    /// Puts the filter in force, or changes it to this, in one step.
    ///
    /// # Errors
    /// When there is no nft, or it refuses: nothing is changed then.
    pub async fn apply(&self) -> Result<(), NetworkError> {
        nft::run("guard the overlay against strangers", &self.script()).await
    }

    fn script(&self) -> String {
        let Self { port, networks, tunnel, nodes } = self;
        let mut script = format!(
            r#"add table inet {TABLE}
add set inet {TABLE} nodes {{ type ipv4_addr; }}
add set inet {TABLE} apart {{ type ipv4_addr; flags interval; }}
add set inet {TABLE} apart6 {{ type ipv6_addr; flags interval; }}
add counter inet {TABLE} strangers
add counter inet {TABLE} crossing
add chain inet {TABLE} input {{ type filter hook input priority -10; policy accept; }}
add chain inet {TABLE} output {{ type filter hook output priority -10; policy accept; }}
add chain inet {TABLE} between {{ type filter hook prerouting priority -150; policy accept; }}
add chain inet {TABLE} forward {{ type filter hook forward priority -10; policy accept; }}
flush chain inet {TABLE} input
flush chain inet {TABLE} forward
flush chain inet {TABLE} output
flush chain inet {TABLE} between
flush set inet {TABLE} nodes
flush set inet {TABLE} apart
flush set inet {TABLE} apart6
"#
        );
        let mut rule = |text: String| {
            // Writing to a string does not fail.
            let _ = writeln!(script, "add rule inet {TABLE} {text} drop");
        };
        for Between { bridge, .. } in networks {
            rule(format!("input udp dport {port} iifname \"{bridge}\" counter name strangers"));
        }
        if let Some(tunnel) = tunnel {
            for (chain, way) in [("input", "iifname"), ("output", "oifname")] {
                rule(format!("{chain} udp dport {port} {way} != \"{tunnel}\" counter name strangers"));
            }
            // A node is believed about its own frames: nothing else of it comes in past other filters.
            rule(format!("input iifname \"{tunnel}\" meta l4proto != udp counter name strangers"));
            rule(format!("input iifname \"{tunnel}\" udp dport != {port} counter name strangers"));
            rule(format!("forward iifname \"{tunnel}\" counter name strangers"));
        }
        rule(format!("input udp dport {port} ip saddr != @nodes counter name strangers"));
        if networks.len() > 1 {
            networks.iter().flat_map(Between::rules).for_each(&mut rule);
            let (subnets, prefixes) = (
                networks.iter().map(|network| network.subnet),
                networks.iter().filter_map(|network| network.prefix6),
            );
            script.push_str(&elements("apart", subnets));
            script.push_str(&elements("apart6", prefixes));
        }
        script.push_str(&elements("nodes", nodes));
        script
    }

    /// What of the filter is in force, in the network namespace of the calling thread; nothing when
    /// it was not made, or somebody has emptied it.
    ///
    /// # Errors
    /// When there is no nft, or it cannot be understood.
    pub async fn in_force() -> Result<Option<Guarding>, NetworkError> {
        let output = nft::call(&["--json", "list", "table", "inet", TABLE], "").await?;
        let action = "list the guard of the overlay";
        if !output.status.success() {
            if nft::is_missing(&output.stderr) {
                return Ok(None);
            }
            return Err(nft::refused(action, &output.stderr));
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
        let script = format!("add table inet {TABLE}\ndelete table inet {TABLE}\n");
        match nft::run("remove the guard of the overlay", &script).await {
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
    let set = |name: &'static str| {
        let set = ours("set").find(|set| set["name"] == name)?;
        Some(set["elem"].as_array().into_iter().flatten())
    };
    let packets = |name: &'static str| {
        ours("counter")
            .filter(|counter| counter["name"] == name)
            .find_map(|counter| counter["packets"].as_u64())
    };
    // The rules that name a set are those that it is there for.
    let naming = |chain: &'static str, set: &'static str| {
        let names = |rule: &&Value| rule["chain"] == chain && rule["expr"].to_string().contains(set);
        ours("rule").filter(names).count()
    };
    let apart: BTreeSet<Subnet> = set("apart")?.filter_map(subnet).collect();
    if naming("input", "\"@nodes\"") == 0 || naming("between", "\"@apart\"") < 2 * apart.len() {
        return None;
    }
    let address = |element: &Value| {
        let value = if element["elem"].is_object() { &element["elem"]["val"] } else { element };
        value.as_str()?.parse().ok()
    };
    Some(Guarding {
        nodes: set("nodes")?.filter_map(address).collect(),
        apart,
        dropped: packets("strangers")?,
        crossing: packets("crossing")?,
    })
}

/// An element of a set of subnets: `{"prefix": {"addr": "10.88.0.0", "len": 16}}`.
fn subnet(element: &Value) -> Option<Subnet> {
    let prefix = &element["prefix"];
    let bits = u8::try_from(prefix["len"].as_u64()?).ok()?;
    Subnet::new(prefix["addr"].as_str()?.parse().ok()?, bits).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn guard(tunnel: Option<&str>, nodes: &[u8]) -> Guard {
        Guard {
            port: 4789,
            networks: vec![network("gw0", "10.88.0.0/16", None)],
            tunnel: tunnel.map(str::to_owned),
            nodes: nodes.iter().map(|last| Ipv4Addr::new(10, 99, 0, *last)).collect(),
        }
    }

    fn network(bridge: &str, subnet: &str, prefix6: Option<&str>) -> Between {
        let prefix6 = prefix6.map(|prefix| prefix.parse().unwrap());
        Between { bridge: bridge.into(), subnet: subnet.parse().unwrap(), prefix6 }
    }

    #[test]
    fn a_node_that_is_alone_lets_nobody_through() {
        let script = guard(None, &[]).script();
        assert!(!script.contains("add element"), "{script}");
        assert!(script.contains("ip saddr != @nodes counter name strangers drop"), "{script}");
        assert!(
            !script.contains("oifname") && !script.contains("rule inet godwit_guard forward"),
            "{script}"
        );
    }

    #[test]
    fn with_a_tunnel_there_is_no_other_way_in_or_out() {
        let script = guard(Some("gwtun0"), &[12, 11]).script();
        assert!(script.contains("input udp dport 4789 iifname != \"gwtun0\""), "{script}");
        assert!(script.contains("output udp dport 4789 oifname != \"gwtun0\""), "{script}");
        assert!(script.contains("input iifname \"gwtun0\" meta l4proto != udp"), "{script}");
        assert!(script.contains("input iifname \"gwtun0\" udp dport != 4789"), "{script}");
        assert!(script.contains("forward iifname \"gwtun0\" counter"), "{script}");
        assert!(script.contains("nodes { 10.99.0.11, 10.99.0.12 }"), "{script}");
    }

    #[test]
    fn each_network_is_kept_from_the_others_and_not_from_itself() {
        let one = guard(None, &[]).script();
        assert!(!one.contains("rule inet godwit_guard between"), "{one}");
        let networks =
            vec![network("gw0", "10.88.0.0/16", Some("fd67::/96")), network("gw9", "10.89.0.0/24", None)];
        let script = Guard { networks, ..guard(None, &[]) }.script();
        for rule in [
            "between iifname \"gw0\" ip daddr @apart ip daddr != 10.88.0.0/16 counter name crossing drop",
            "between ip saddr 10.89.0.0/24 ip daddr @apart ip daddr != 10.89.0.0/24 counter name crossing drop",
            "between iifname \"gw9\" ip6 daddr @apart6 counter name crossing drop",
            "between ip6 saddr fd67::/96 ip6 daddr @apart6 ip6 daddr != fd67::/96 counter name crossing drop",
            "input udp dport 4789 iifname \"gw9\" counter name strangers drop",
            "element inet godwit_guard apart { 10.88.0.0/16, 10.89.0.0/24 }",
            "element inet godwit_guard apart6 { fd67::/96 }",
        ] {
            assert!(script.contains(rule), "{rule}\n{script}");
        }
    }

    #[test]
    fn what_nft_lists_is_understood() {
        let json = |rules: &str, apart: &str| {
            let text = format!(
                r#"{{"nftables": [{{"metainfo": {{"version": "1.0.6"}}}},
                {{"table": {{"family": "inet", "name": "godwit_guard", "handle": 2}}}},
                {{"set": {{"family": "ip", "name": "nodes", "table": "other", "elem": ["10.0.0.1"]}}}},
                {{"set": {{"family": "inet", "name": "nodes", "table": "godwit_guard", "type": "ipv4_addr", "handle": 1,
                  "elem": ["10.99.0.11", "10.99.0.12"]}}}},
                {{"set": {{"family": "inet", "name": "apart", "table": "godwit_guard", "type": "ipv4_addr", "handle": 5,
                  "flags": ["interval"], "elem": [{apart}]}}}},
                {{"counter": {{"family": "inet", "name": "strangers", "table": "godwit_guard", "packets": 7, "bytes": 900}}}},
                {{"counter": {{"family": "inet", "name": "crossing", "table": "godwit_guard", "packets": 3, "bytes": 90}}}}
                {rules}]}}"#
            );
            serde_json::from_str::<Value>(&text).unwrap()
        };
        let rule = r#", {"rule": {"family": "inet", "table": "godwit_guard", "chain": "input", "handle": 9, "expr": [
            {"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "@nodes"}},
            {"counter": "strangers"}, {"drop": null}]}}"#;
        let found = parse(&json(rule, "")).unwrap();
        let nodes = guard(None, &[11, 12]).nodes;
        assert_eq!(found, Guarding { nodes: nodes.clone(), apart: [].into(), dropped: 7, crossing: 3 });
        assert_eq!(parse(&json("", "")), None, "a set that no rule asks keeps nobody out");
        assert_eq!(parse(&serde_json::json!({"nftables": []})), None);

        let network = r#"{"prefix": {"addr": "10.88.0.0", "len": 16}}"#;
        let between = r#", {"rule": {"family": "inet", "table": "godwit_guard", "chain": "between", "handle": 9,
            "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
            "right": "@apart"}}, {"drop": null}]}}"#;
        assert_eq!(parse(&json(rule, network)), None, "networks that no rule keeps apart");
        let found = parse(&json(&[rule, between, between].concat(), network)).unwrap();
        assert_eq!(found.apart, ["10.88.0.0/16".parse().unwrap()].into());
    }
}
