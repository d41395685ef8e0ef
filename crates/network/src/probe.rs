//! What of the network works on this node, for `godwit doctor`.
//!
//! What the kernel can do is tried, not read from its version: in a network namespace that nobody
//! else sees and that ends with the thread that made it.

use std::path::Path;

use futures::StreamExt;
use nix::sched::{CloneFlags, unshare};
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use rtnetlink::{LinkBridge, LinkVeth, LinkVxlan};
use serde_json::Value;
use tokio::process::Command;

use crate::config::{LEAST_MTU, VXLAN_OVERHEAD};
use crate::netlink::{Netlink, has_errno};
use crate::netns::on_thread;
use crate::{
    Backend, Encryption, NetworkError, OverlayConfig, WireGuard, datapath, nft, publish, underlay_address,
};

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// What was looked at.
    pub name: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// Whether services can do without it.
    pub optional: bool,
    /// What was found and, if it is not as it should be, what to do.
    pub detail: String,
}

impl Fact {
    fn new(name: &'static str, ok: bool, detail: impl Into<String>) -> Self {
        Self { name, ok, optional: false, detail: detail.into() }
    }

    fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// Looks at the node's network, in the network namespace of the calling thread: the uplink, what
/// the kernel, nftables and the chosen switch can do, and packet filters that would swallow services'
/// frames.
pub async fn probe(config: &OverlayConfig) -> Vec<Fact> {
    let mut facts = uplink_facts(&config.uplink, config.encryption).await;
    facts.extend(kernel_facts().await);
    facts.push(wireguard_fact(config.encryption));
    facts.push(nft_fact().await);
    facts.push(match &config.backend {
        Backend::Kernel => openvswitch_fact().await,
        Backend::OpenVswitch { run } => match datapath::examine(&config.bridge, run.clone()).await {
            Ok(found) => Fact::new("openvswitch", true, found),
            Err(error) => Fact::new("openvswitch", false, describe(&error)),
        },
    });
    facts.push(filter_fact(&config.bridge).await);
    facts
}

async fn uplink_facts(uplink: &str, encryption: Encryption) -> Vec<Fact> {
    let found = async {
        let link = Netlink::new()?.need_link(uplink).await?;
        Ok::<_, NetworkError>((link, underlay_address(uplink).await))
    };
    let (link, address) = match found.await {
        Ok(found) => found,
        Err(error) => return vec![Fact::new("uplink", false, describe(&error))],
    };
    let address = match address {
        Ok(address) if link.up => {
            Fact::new("uplink", true, format!("{uplink} is up and has the address {address}"))
        }
        Ok(_) => Fact::new("uplink", false, format!("{uplink} is down; bring it up")),
        Err(error) => Fact::new("uplink", false, describe(&error)),
    };
    let least = LEAST_MTU + encryption.overhead();
    let mtu = if link.mtu < least {
        Fact::new(
            "mtu",
            false,
            format!("{uplink} has {}, the overlay needs at least {least}; raise it", link.mtu),
        )
    } else {
        let inner = link.mtu - VXLAN_OVERHEAD - encryption.overhead();
        Fact::new("mtu", true, format!("{uplink} has {}, services get {inner}", link.mtu))
    };
    vec![address, mtu]
}

/// Tries the devices the overlay is made of, and netem.
async fn kernel_facts() -> Vec<Fact> {
    let tried = on_thread("godwit-probe", || -> Result<Vec<Fact>, NetworkError> {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|errno| NetworkError::system("make a network namespace")(errno.into()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(NetworkError::system("start a runtime"))?;
        runtime.block_on(try_devices())
    });
    match tried.await.and_then(|inner| inner) {
        Ok(facts) => facts,
        Err(error) => vec![Fact::new("network namespaces", false, describe(&error))],
    }
}

async fn try_devices() -> Result<Vec<Fact>, NetworkError> {
    let netlink = Netlink::new()?;
    let devices: [(&'static str, LinkMessage); 3] = [
        ("bridge", LinkBridge::new("probe-br").build()),
        ("veth", LinkVeth::new("probe-v0", "probe-v1").build()),
        ("vxlan", LinkVxlan::new("probe-vx", 1).port(4789).learning(false).proxy(true).build()),
    ];
    let mut facts = Vec::new();
    for (name, message) in devices {
        facts.push(match netlink.handle.link().add(message).execute().await {
            Ok(()) => Fact::new(name, true, "the kernel makes such devices"),
            Err(error) => {
                let error = NetworkError::kernel(format!("make a {name} device"))(error);
                Fact::new(
                    name,
                    false,
                    format!("{}; load the module {name}, or use a kernel that has it", describe(&error)),
                )
            }
        });
    }
    let loopback = netlink.need_link("lo").await?.index;
    facts.push(match try_netem(&netlink, loopback).await {
        Ok(true) => Fact::new("netem", true, "the kernel can delay and lose packets (for labs)"),
        Ok(false) => Fact::new(
            "netem",
            false,
            "the kernel has no sch_netem: a lab emulates delay and loss with a forwarder of its own",
        ),
        Err(error) => Fact::new("netem", false, describe(&error)),
    });
    if let Some(netem) = facts.last_mut() {
        netem.optional = true;
    }
    Ok(facts)
}

/// Asks for a netem queue without its options: a kernel that has netem refuses that as invalid,
/// one that has not knows no such thing.
async fn try_netem(netlink: &Netlink, index: u32) -> Result<bool, NetworkError> {
    let failed = || NetworkError::kernel("make a netem queue");
    let mut message = TcMessage::with_index(i32::try_from(index).unwrap_or(i32::MAX));
    message.header.parent = TcHandle::ROOT;
    message.attributes.push(TcAttribute::Kind("netem".into()));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    let mut handle = netlink.handle.clone();
    let mut answers = handle.request(request).map_err(failed())?;
    while let Some(answer) = answers.next().await {
        let NetlinkPayload::Error(error) = answer.payload else { continue };
        let error = rtnetlink::Error::NetlinkError(error);
        return match () {
            () if has_errno(&error, libc::EINVAL) => Ok(true),
            () if has_errno(&error, libc::ENOENT) => Ok(false),
            () => Err(failed()(error)),
        };
    }
    Ok(true)
}

fn wireguard_fact(encryption: Encryption) -> Fact {
    let fact = match WireGuard::is_there() {
        Ok(true) => Fact::new("wireguard", true, "the kernel has it"),
        Ok(false) => {
            Fact::new("wireguard", false, "the kernel has none: `--encrypt auto` is the one in user space")
        }
        Err(error) => Fact::new("wireguard", false, describe(&error)),
    };
    if encryption == Encryption::WireGuard { fact } else { fact.optional() }
}

async fn nft_fact() -> Fact {
    let checked = publish::check().await;
    let fact = match checked {
        Ok(version) => Fact::new("nftables", true, version),
        Err(error) => {
            let lost = "without it no port can be published, and any host may send to the overlay";
            Fact::new("nftables", false, format!("{}; {lost}", describe(&error)))
        }
    };
    fact.optional()
}

async fn openvswitch_fact() -> Fact {
    let module = Path::new("/sys/module/openvswitch").exists();
    let version = match Command::new("ovs-vsctl").arg("--version").output().await {
        Ok(output) => String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned),
        Err(_) => None,
    };
    let fact = match (version, module) {
        (Some(version), true) => Fact::new("openvswitch", true, format!("{version}, with its kernel module")),
        (Some(version), false) => {
            Fact::new("openvswitch", true, format!("{version}, without its kernel module"))
        }
        (None, _) => Fact::new("openvswitch", false, "not installed; godwit uses the kernel's bridge"),
    };
    fact.optional()
}

/// Looks for packet filters that forward nothing by default, as Docker sets them up: they drop
/// what clients send to services and, where bridged frames are shown to them too, what services
/// send to each other.
async fn filter_fact(bridge: &str) -> Fact {
    let bridged = std::fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables")
        .is_ok_and(|value| value.trim() == "1");
    let mut dropping = nft_dropping().await;
    if legacy_drops().await {
        dropping.push("iptables-legacy FORWARD".into());
    }
    if dropping.is_empty() {
        return Fact::new("packet filter", true, "nothing drops forwarded packets by default");
    }
    let chains = dropping.join(", ");
    if ruleset_accepts(bridge).await {
        return Fact::new(
            "packet filter",
            true,
            format!("{chains} drops by default, but rules accept {bridge}"),
        );
    }
    let also =
        if bridged { ", and what services send each other (bridge-nf-call-iptables is 1)" } else { "" };
    Fact::new(
        "packet filter",
        false,
        format!(
            "{chains} drops what is forwarded to services{also}; accept it: \
             iptables -I FORWARD -i {bridge} -j ACCEPT && iptables -I FORWARD -o {bridge} -j ACCEPT"
        ),
    )
}

async fn nft_dropping() -> Vec<String> {
    let Ok(output) = nft::call(&["--json", "list", "chains"], "").await else { return Vec::new() };
    serde_json::from_slice(&output.stdout).map_or_else(|_| Vec::new(), |json| dropping_chains(&json))
}

fn dropping_chains(json: &Value) -> Vec<String> {
    let chains = json["nftables"].as_array().into_iter().flatten().map(|object| &object["chain"]);
    let dropping = chains.filter(|chain| {
        chain["hook"] == "forward"
            && chain["policy"] == "drop"
            && (chain["family"] == "ip" || chain["family"] == "inet")
    });
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    dropping.map(|c| format!("{} {} {}", text(&c["family"]), text(&c["table"]), text(&c["name"]))).collect()
}

async fn legacy_drops() -> bool {
    // nft does not see the tables of the old kernel interface.
    let tables = std::fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
    if !tables.lines().any(|table| table == "filter") {
        return false;
    }
    let rules = Command::new("iptables-legacy").args(["-S", "FORWARD"]).output().await;
    rules.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("-P FORWARD DROP"))
}

async fn ruleset_accepts(bridge: &str) -> bool {
    let Ok(output) = nft::call(&["list", "ruleset"], "").await else { return false };
    let name = format!("\"{bridge}\"");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .any(|line| line.contains(&name) && line.contains("accept"))
}

/// An error with its sources, as `error_chain` of `godwit-memory` has it: neither crate knows the other.
fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", describe(source)),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_forward_chains_that_drop_ipv4_count() {
        let chain = |family: &str, name: &str, hook: &str, policy: &str| {
            format!(
                r#"{{"chain": {{"family": "{family}", "table": "filter", "name": "{name}", "hook": "{hook}", "policy": "{policy}"}}}}"#
            )
        };
        let chains = [
            chain("ip", "FORWARD", "forward", "drop"),
            chain("inet", "fwd", "forward", "drop"),
            chain("ip", "open", "forward", "accept"),
            chain("ip", "INPUT", "input", "drop"),
            chain("ip6", "FORWARD", "forward", "drop"),
            r#"{"chain": {"family": "ip", "table": "filter", "name": "DOCKER"}}"#.into(),
        ];
        let json = format!(r#"{{"nftables": [{{"metainfo": {{}}}}, {}]}}"#, chains.join(","));
        let found = dropping_chains(&serde_json::from_str(&json).unwrap());
        assert_eq!(found, ["ip filter FORWARD", "inet filter fwd"]);
    }
}
