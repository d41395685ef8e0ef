//! `godwit network`: the networks that carry services' frames between nodes.

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{
    NetworkCreateRequest, NetworkEntry, NetworkInfo, NetworkInspectRequest, NetworkListRequest, NetworkNode,
    NetworkRemoveRequest,
};

use super::each;
use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Create, list, inspect and remove the networks that services are on
///
/// Services on different networks do not reach each other; a service can be on several. Every cluster has the
/// network "default".
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: NetworkVerb,
}

#[derive(Debug, Subcommand)]
enum NetworkVerb {
    /// Create a network on all nodes of the cluster, which must all be reachable; print its name
    Create(Create),
    /// List the networks and the services on them
    #[command(visible_alias = "list")]
    Ls(List),
    /// Remove networks without services from all nodes of the cluster, which must all be reachable
    Rm(Remove),
    /// Show how this node takes part in a network: MTU, port, permitted senders, encryption, other nodes
    Inspect(Inspect),
}

#[derive(Debug, clap::Args)]
struct Create {
    /// Name of the network
    name: String,
    /// IPv4 addresses of its services [default: the next free /24 of 10.89.0.0/16]
    #[arg(long, value_name = "SUBNET")]
    subnet: Option<String>,
    /// Prefix for its services' IPv6 addresses, such as fd67:6f65::/96 [default: they have IPv4 addresses
    /// only]
    #[arg(long, value_name = "PREFIX/96")]
    subnet6: Option<String>,
    /// VXLAN network identifier, where other equipment expects a certain one [default: one that is free]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    vni: Option<u32>,
}

#[derive(Debug, clap::Args)]
struct List {
    /// Only names
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
struct Remove {
    /// The networks
    #[arg(required = true)]
    names: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Inspect {
    /// The network
    #[arg(default_value = "default")]
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        NetworkVerb::Create(args) => create(args, global).await,
        NetworkVerb::Ls(args) => list(args, global).await,
        NetworkVerb::Rm(args) => remove(args, global).await,
        NetworkVerb::Inspect(args) => inspect(args, global).await,
    }
}

async fn create(args: Create, global: &Global) -> anyhow::Result<ExitCode> {
    let request = NetworkCreateRequest {
        name: args.name,
        subnet: args.subnet.unwrap_or_default(),
        subnet6: args.subnet6.unwrap_or_default(),
        vni: args.vni.unwrap_or_default(),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.network_create(request).await;
    let network = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&network)?;
    } else {
        output::line(&network.name)?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(args: List, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.network_list(NetworkListRequest {}).await;
    let networks = answer.map_err(|status| connection.explain(&status))?.into_inner().networks;
    if global.json {
        output::json(&networks)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(networks.iter().filter_map(|entry| Some(&entry.network.as_ref()?.name)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(["NAME", "SUBNET", "IPV6", "VNI", "STATE", "SERVICES"]);
    for NetworkEntry { network, services, reason } in networks {
        let network = network.unwrap_or_default();
        table.row([
            network.name,
            network.subnet,
            if network.subnet6.is_empty() { "-".into() } else { network.subnet6 },
            network.vni.to_string(),
            if reason.is_empty() { "up".into() } else { format!("down ({reason})") },
            if services.is_empty() { "-".into() } else { services.join(", ") },
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

async fn remove(args: Remove, global: &Global) -> anyhow::Result<ExitCode> {
    each::removed(args.names, global, async |node, name| {
        node.network_remove(NetworkRemoveRequest { name }).await
    })
    .await
}

async fn inspect(args: Inspect, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.network_inspect(NetworkInspectRequest { name: args.name }).await;
    let info = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&info)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut about = Table::plain();
    for (name, value) in facts(&info) {
        about.row([name.to_owned(), value]);
    }
    about.print()?;
    output::line("")?;
    let mut table = Table::new(["NODE", "ADDRESS", "MTU", "ENCRYPTION", "STATE", "KEYS", "SENT"]);
    for node in &info.nodes {
        let known = |value: String, known: bool| if known { value } else { "-".to_owned() };
        table.row([
            format!("{}{}", node.name, if node.is_self { "*" } else { "" }),
            node.vtep.clone(),
            known(node.mtu.to_string(), node.mtu != 0),
            known(node.encryption.clone(), !node.encryption.is_empty()),
            match node.reason.as_str() {
                "" => node.state.clone(),
                reason => format!("{} ({reason})", node.state),
            },
            known(format!("{} s old", node.keys_age_s), node.keys_age_s != 0),
            known(sent(node), node.keys_age_s != 0),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

/// What was sent to a node: the kernel's WireGuard counts bytes, the tunnel packets.
fn sent(node: &NetworkNode) -> String {
    match node.sent_bytes {
        0 => format!("{} packets", node.packets),
        bytes => output::bytes(bytes),
    }
}

fn facts(info: &NetworkInfo) -> Vec<(&'static str, String)> {
    let guard = if info.guarded {
        format!("known nodes only; {} packets of others dropped", info.dropped)
    } else {
        format!("any host may send: {}", info.guard_reason)
    };
    let names = match info.names_reason.as_str() {
        "" => format!("services ask {}", info.gateway),
        reason => format!("services do not find each other by name: {reason}"),
    };
    let encryption = match info.encryption.as_str() {
        "off" => "off".to_owned(),
        name => {
            format!("{name}; {} packets refused, {} not sent for lack of keys", info.refused, info.unsent)
        }
    };
    vec![
        ("network", info.name.clone()),
        ("node", info.node.clone()),
        ("backend", info.backend.clone()),
        ("subnet", format!("{}, gateway {} on {}", info.subnet, info.gateway, info.bridge)),
        ("ipv6", if info.subnet6.is_empty() { "none".to_owned() } else { info.subnet6.clone() }),
        ("mtu", info.mtu.to_string()),
        ("vxlan", format!("network {}, UDP port {} on {}", info.vni, info.vxlan_port, info.uplink)),
        ("guard", guard),
        ("isolation", format!("{} packets from one network to another dropped", info.crossing)),
        ("encryption", encryption),
        ("names", names),
    ]
}
