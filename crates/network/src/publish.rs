//! Published ports: a port of every node leads to a port of a service, by destination NAT.
//!
//! The service sees the node that was asked as its client (source NAT), so that its answers pass that node
//! again wherever the service is: a connection through a published port goes on when the service moves,
//! and nothing of it has to move along.
//!
//! The rules are few and fixed, one table `ip godwit` with three chains; what varies are the
//! elements of one map, `protocol . node's port : service's address . service's port`, with the
//! service's name as the element's comment. Each change is one nft transaction. The table exists
//! only while a port is published: its presence makes the kernel track every connection.
//!
//! A second table, `arp godwit`, keeps the gateway's address, which every node has, from being
//! claimed on the uplink by all of them.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::Mutex;

use crate::endpoint::{Protocol, Published};
use crate::{NetworkError, OverlayConfig};

/// Adds what is missing of the table; each statement is harmless when repeated.
fn table(bridge: &str, vtep: Ipv4Addr) -> String {
    format!(
        r#"add table ip godwit
add map ip godwit published {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
add chain ip godwit prerouting {{ type nat hook prerouting priority dstnat; }}
add chain ip godwit output {{ type nat hook output priority -100; }}
add chain ip godwit postrouting {{ type nat hook postrouting priority srcnat; }}
flush chain ip godwit prerouting
flush chain ip godwit output
flush chain ip godwit postrouting
add rule ip godwit prerouting fib daddr type local dnat ip to meta l4proto . th dport map @published
add rule ip godwit output ip daddr != 127.0.0.0/8 fib daddr type local dnat ip to meta l4proto . th dport map @published
add rule ip godwit postrouting oifname "{bridge}" ct status dnat snat to {vtep}
"#
    )
}

/// One element of the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Element {
    owner: String,
    protocol: String,
    host_port: u16,
    address: Ipv4Addr,
    container_port: u16,
}

/// What is published, as the kernel has it: read once, and changed by nobody else.
#[derive(Debug, Default)]
pub(crate) struct Ports(Mutex<Option<Vec<Element>>>);

impl Ports {
    /// Publishes exactly these ports of the service, and none that it had before.
    ///
    /// # Errors
    /// [`NetworkError::PortTaken`] when another service has one of them.
    pub(crate) async fn publish(
        &self,
        config: &OverlayConfig,
        name: &str,
        address: Ipv4Addr,
        ports: &[Published],
    ) -> Result<(), NetworkError> {
        if ports.is_empty() {
            return self.unpublish(address).await;
        }
        let mut known = self.0.lock().await;
        let known = read(&mut known).await?;
        let (old, others): (Vec<_>, Vec<_>) = known.iter().cloned().partition(|e| e.address == address);
        let new: Vec<_> = ports.iter().map(|port| Element::new(name, address, *port)).collect();
        if old == new {
            return Ok(());
        }
        for element in &new {
            let same = |e: &&Element| e.protocol == element.protocol && e.host_port == element.host_port;
            if let Some(other) = others.iter().find(same) {
                return Err(NetworkError::PortTaken {
                    port: element.host_port,
                    protocol: element.protocol.clone(),
                    owner: other.owner.clone(),
                });
            }
        }
        let script: String = std::iter::once(table(&config.bridge, config.vtep))
            .chain(old.iter().map(Element::delete))
            .chain(new.iter().map(Element::add))
            .collect();
        run(&format!("publish the ports of the service {name}"), &script).await?;
        *known = others.into_iter().chain(new).collect();
        Ok(())
    }

    /// Publishes no port of the service with this address any more.
    pub(crate) async fn unpublish(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let mut known = self.0.lock().await;
        let known = match read(&mut known).await {
            // Without nft, nothing was ever published.
            Err(NetworkError::NoNft(_)) => return Ok(()),
            other => other?,
        };
        let (gone, stay): (Vec<_>, Vec<_>) = known.iter().cloned().partition(|e| e.address == address);
        if gone.is_empty() {
            return Ok(());
        }
        let script = match stay.is_empty() {
            true => "delete table ip godwit\n".to_owned(),
            false => gone.iter().map(Element::delete).collect(),
        };
        run(&format!("take back the published ports of {address}"), &script).await?;
        *known = stay;
        Ok(())
    }
}

async fn read(known: &mut Option<Vec<Element>>) -> Result<&mut Vec<Element>, NetworkError> {
    if known.is_none() {
        *known = Some(elements().await?);
    }
    Ok(known.get_or_insert_default())
}

impl Element {
    fn new(owner: &str, address: Ipv4Addr, port: Published) -> Self {
        Self {
            owner: owner.to_owned(),
            protocol: port.protocol.name().to_owned(),
            host_port: port.host_port,
            address,
            container_port: port.container_port,
        }
    }

    fn add(&self) -> String {
        let Self { owner, protocol, host_port, address, container_port } = self;
        format!(
            "add element ip godwit published {{ {protocol} . {host_port} comment \"{owner}\" : {address} . {container_port} }}\n"
        )
    }

    fn delete(&self) -> String {
        format!("delete element ip godwit published {{ {} . {} }}\n", self.protocol, self.host_port)
    }
}

/// Keeps the uplink from answering for the gateway's address.
pub(crate) async fn guard_gateway(uplink: &str, gateway: Ipv4Addr) -> Result<(), NetworkError> {
    let script = format!(
        r#"add table arp godwit
add chain arp godwit input {{ type filter hook input priority 0; }}
flush chain arp godwit input
add rule arp godwit input iifname "{uplink}" arp daddr ip {gateway} drop
"#
    );
    run("keep the gateway's address off the uplink", &script).await
}

/// Removes both tables; no error when there are none.
pub(crate) async fn remove_tables() -> Result<(), NetworkError> {
    // Adding first makes deleting succeed in any case, in one transaction.
    let script =
        "add table ip godwit\ndelete table ip godwit\nadd table arp godwit\ndelete table arp godwit\n";
    match run("remove godwit's tables", script).await {
        Err(NetworkError::NoNft(_)) => Ok(()),
        other => other,
    }
}

/// Says which nft there is, having let it check, not load, the rules of a published port.
pub(crate) async fn check() -> Result<String, NetworkError> {
    let checked = nft(&["--check", "-f", "-"], &table("gw0", Ipv4Addr::LOCALHOST)).await?;
    if !checked.status.success() {
        return Err(refused("check the rules of a published port", &checked.stderr));
    }
    let version = nft(&["--version"], "").await?;
    Ok(String::from_utf8_lossy(&version.stdout).trim().to_owned())
}

/// Reads the map back from the kernel; no table means no elements.
async fn elements() -> Result<Vec<Element>, NetworkError> {
    let output = nft(&["--json", "list", "maps", "ip"], "").await?;
    let action = "list the published ports";
    if !output.status.success() {
        return Err(refused(action, &output.stderr));
    }
    let json: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| NetworkError::Nft { action: action.into(), message: error.to_string() })?;
    Ok(parse(&json))
}

/// Takes the elements out of nft's JSON (libnftables-json(5)):
/// `{"nftables": [{"map": {"table": "godwit", "name": "published", "elem": [[KEY, DATA], …]}}]}`,
/// where KEY is `{"elem": {"val": {"concat": ["tcp", 80]}, "comment": "web"}}`.
fn parse(json: &Value) -> Vec<Element> {
    let objects = json["nftables"].as_array().into_iter().flatten();
    let ours = objects
        .map(|object| &object["map"])
        .filter(|map| map["table"] == "godwit" && map["name"] == "published");
    ours.filter_map(|map| map["elem"].as_array()).flatten().filter_map(element).collect()
}

fn element(pair: &Value) -> Option<Element> {
    let (key, data) = (&pair[0], &pair[1]["concat"]);
    let value = if key["elem"].is_object() { &key["elem"]["val"]["concat"] } else { &key["concat"] };
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    Some(Element {
        owner: key["elem"]["comment"].as_str().unwrap_or("(unknown)").to_owned(),
        protocol: value[0].as_str()?.to_owned(),
        host_port: port(&value[1])?,
        address: data[0].as_str()?.parse().ok()?,
        container_port: port(&data[1])?,
    })
}

/// Has nft do what the script says, all of it or, with an error, nothing.
pub(crate) async fn run(action: &str, script: &str) -> Result<(), NetworkError> {
    let output = nft(&["-f", "-"], script).await?;
    if output.status.success() { Ok(()) } else { Err(refused(action, &output.stderr)) }
}

/// Why nft did not, in its own words.
pub(crate) fn refused(action: &str, stderr: &[u8]) -> NetworkError {
    let text = String::from_utf8_lossy(stderr);
    let message = text.lines().next().unwrap_or("it gave no reason").trim().to_owned();
    NetworkError::Nft { action: action.to_owned(), message }
}

/// Runs nft with `script` on its standard input.
pub(crate) async fn nft(arguments: &[&str], script: &str) -> Result<std::process::Output, NetworkError> {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(NetworkError::NoNft)?;
    if let Some(mut stdin) = child.stdin.take() {
        match stdin.write_all(script.as_bytes()).await {
            // It ended without reading; its own words say why.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            other => other.map_err(NetworkError::system("write to nft"))?,
        }
    }
    child.wait_with_output().await.map_err(NetworkError::system("read from nft"))
}

impl Protocol {
    /// As nft writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn elements_are_read_from_nfts_own_output() {
        // As nft 1.0.6 printed it, with a map of somebody else's beside it.
        let json = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
            {"map": {"family": "ip", "name": "published", "table": "other", "type": "ipv4_addr", "map": "mark",
              "elem": [["10.0.0.1", 1]]}},
            {"map": {"family": "ip", "name": "published", "table": "godwit", "handle": 4,
              "type": ["inet_proto", "inet_service"], "map": "ipv4_addr . inet_service",
              "elem": [[{"elem": {"val": {"concat": ["tcp", 80]}, "comment": "redis"}}, {"concat": ["10.88.0.10", 8080]}],
                       [{"concat": ["udp", 53]}, {"concat": ["10.88.0.11", 53]}]]}}]}"#;
        let found = parse(&serde_json::from_str(json).unwrap());
        let element = |owner: &str, protocol: &str, host_port, last, container_port| Element {
            owner: owner.into(),
            protocol: protocol.into(),
            host_port,
            address: Ipv4Addr::new(10, 88, 0, last),
            container_port,
        };
        assert_eq!(found, [element("redis", "tcp", 80, 10, 8080), element("(unknown)", "udp", 53, 11, 53)]);
    }

    #[test]
    fn output_of_another_shape_gives_no_elements() {
        for json in ["{}", "[]", r#"{"nftables": [{"map": {"table": "godwit", "name": "published"}}]}"#] {
            assert_eq!(parse(&serde_json::from_str(json).unwrap()), []);
        }
    }
}
