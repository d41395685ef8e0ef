//! `godwit node`: takes a node out of service, for a while or for good; `drain.rs` shows how its services leave it.

mod drain;

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{CordonRequest, CordonResponse};

use super::{cluster, nodes};
use crate::client::Connection;
use crate::global::Global;
use crate::output;

/// Take a node out of service, for a while or for good
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit node drain a
  godwit node uncordon a")]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: NodeVerb,
}

#[derive(Debug, Subcommand)]
enum NodeVerb {
    /// List the nodes of the cluster; the same as `nodes`
    Ls(nodes::Args),
    /// Have a node take no more services
    ///
    /// Services that are on it stay, and are started again there. None moves to it, and `run`, `adopt` and `restore` are
    /// refused there, until `godwit node uncordon`, whatever godwitd and the machine do meanwhile.
    Cordon(Named),
    /// Have a node take services again
    Uncordon(Named),
    Drain(drain::Args),
    /// Remove a node from the cluster, once it is drained; the same as `cluster remove`
    ///
    /// Only the founding node can. What is still on the node stays there, and is the cluster's no more.
    Rm(Named),
}

#[derive(Debug, clap::Args)]
struct Named {
    /// The node
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        NodeVerb::Ls(args) => nodes::run(args, global).await,
        NodeVerb::Cordon(Named { name }) => cordon(name, false, global).await,
        NodeVerb::Uncordon(Named { name }) => cordon(name, true, global).await,
        NodeVerb::Drain(args) => drain::run(args, global).await,
        NodeVerb::Rm(Named { name }) => cluster::remove(name, global).await,
    }
}

async fn cordon(node: String, lift: bool, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.cordon(CordonRequest { node, lift }).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
    } else {
        output::line(&sentence(&answer))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the node does from now on.
fn sentence(answer: &CordonResponse) -> String {
    let CordonResponse { node, cordoned, changed, services } = answer;
    let before = if *changed { "" } else { " already" };
    if !cordoned {
        return format!("{node} takes services{before}");
    }
    let stay = match services.len() {
        0 => "none is on it".to_owned(),
        1 => "1 is on it".to_owned(),
        several => format!("{several} are on it"),
    };
    format!("{node} is cordoned{before}: it takes no more services, and {stay}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_does_from_now_on_is_a_sentence() {
        let said = |cordoned, changed, services: &[&str]| {
            let services = services.iter().map(ToString::to_string).collect();
            sentence(&CordonResponse { node: "a".into(), cordoned, changed, services })
        };
        assert_eq!(said(true, true, &[]), "a is cordoned: it takes no more services, and none is on it");
        assert_eq!(
            said(true, false, &["x"]),
            "a is cordoned already: it takes no more services, and 1 is on it"
        );
        assert_eq!(
            said(true, true, &["x", "y"]),
            "a is cordoned: it takes no more services, and 2 are on it"
        );
        assert_eq!(said(false, true, &["x"]), "a takes services");
        assert_eq!(said(false, false, &["x"]), "a takes services already");
    }
}
