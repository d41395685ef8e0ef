//! `godwit nodes`: the members of the cluster.

use std::process::ExitCode;

use godwit_api::v1::{NodeInfo, NodesRequest};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// List the nodes of the cluster, as this one sees them
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only names
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.nodes(NodesRequest {}).await;
    let mut nodes = answer.map_err(|status| connection.explain(&status))?.into_inner().nodes;
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    if global.json {
        output::json(&nodes)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(nodes.iter().map(|node| &node.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        "NAME",
        "STATE",
        "ADDRESS",
        "SERVICES",
        "CPUS",
        "MEMORY FREE",
        "ARCH",
        "KERNEL",
        "VERSION",
        "PROTOCOL",
        "CRIU",
        "CLOCK",
    ]);
    for node in &nodes {
        table.row([
            format!("{}{}", node.name, if node.is_self { "*" } else { "" }),
            state(node),
            node.address.clone(),
            node.services.to_string(),
            node.cpus.to_string(),
            format!("{} of {}", output::bytes(node.memory_available_bytes), output::bytes(node.memory_bytes)),
            node.arch.clone(),
            node.kernel.clone(),
            node.version.clone(),
            protocol(node.oldest_protocol, node.newest_protocol),
            node.criu.clone(),
            clock(node.clock_ahead_ms),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

fn state(node: &NodeInfo) -> String {
    let cordoned = if node.cordoned { ", cordoned" } else { "" };
    match node.reason.as_str() {
        "" => format!("{}{cordoned}", node.state),
        reason => format!("{}{cordoned} ({reason})", node.state),
    }
}

/// The versions of the migration protocol that a node speaks.
fn protocol(oldest: u32, newest: u32) -> String {
    match (oldest, newest) {
        (0, 0) => String::new(),
        _ if oldest == newest => newest.to_string(),
        _ => format!("{oldest} to {newest}"),
    }
}

/// How a node's clock stands to this one's: what a message takes is no difference.
fn clock(ahead_ms: i64) -> String {
    match ahead_ms / 1000 {
        0 => String::new(),
        seconds => format!("{seconds:+} s"),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::v1::NodeInfo;

    #[test]
    fn a_cordoned_node_is_shown_as_one() {
        let of = |cordoned, reason: &str| {
            super::state(&NodeInfo {
                state: "ready".into(),
                reason: reason.into(),
                cordoned,
                ..NodeInfo::default()
            })
        };
        assert_eq!(
            [of(false, ""), of(true, ""), of(true, "why")],
            ["ready", "ready, cordoned", "ready, cordoned (why)"]
        );
    }

    #[test]
    fn the_versions_that_a_node_speaks_are_shown_as_far_as_they_are_known() {
        assert_eq!(
            [(0, 0), (3, 3), (3, 4)].map(|(oldest, newest)| super::protocol(oldest, newest)),
            ["", "3", "3 to 4"]
        );
    }

    #[test]
    fn a_clock_that_differs_is_shown_with_its_sign() {
        assert_eq!(
            [super::clock(-400), super::clock(3_605_400), super::clock(-2_000)],
            ["", "+3605 s", "-2 s"]
        );
    }
}
