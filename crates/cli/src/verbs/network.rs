//! `godwit network`: the overlay that carries services' frames between nodes.

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{NetworkInfo, NetworkInspectRequest};

use crate::{
    cli::Global,
    client::Connection,
    output::{self, Table},
};

/// Look at the network that services are on
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: NetworkVerb,
}

#[derive(Debug, Subcommand)]
enum NetworkVerb {
    /// Tell how this node takes part in the overlay: MTU, port, who may send, encryption, other nodes
    Inspect,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        NetworkVerb::Inspect => inspect(global).await,
    }
}

async fn inspect(global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.network_inspect(NetworkInspectRequest {}).await;
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
    let mut table = Table::new(["NODE", "ADDRESS", "MTU", "ENCRYPTION", "STATE", "KEYS", "PACKETS"]);
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
            known(node.packets.to_string(), node.keys_age_s != 0),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

fn facts(info: &NetworkInfo) -> Vec<(&'static str, String)> {
    let guard = if info.guarded {
        format!("known nodes only; {} packets of others dropped", info.dropped)
    } else {
        format!("anybody may send: {}", info.guard_reason)
    };
    let encryption = match info.encryption.as_str() {
        "off" => "off".to_owned(),
        name => {
            format!("{name}; {} packets refused, {} not sent for want of keys", info.refused, info.unsent)
        }
    };
    vec![
        ("node", info.node.clone()),
        ("backend", info.backend.clone()),
        ("subnet", format!("{}, gateway {} on {}", info.subnet, info.gateway, info.bridge)),
        ("ipv6", if info.subnet6.is_empty() { "none".to_owned() } else { info.subnet6.clone() }),
        ("mtu", info.mtu.to_string()),
        ("vxlan", format!("network {}, UDP port {} on {}", info.vni, info.vxlan_port, info.uplink)),
        ("guard", guard),
        ("encryption", encryption),
    ]
}
