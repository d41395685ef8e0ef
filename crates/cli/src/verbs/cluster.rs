//! `godwit cluster`: found a cluster, let nodes join it.
//!
//! Founding and joining write the node's identity before a daemon runs, so `godwitd` itself does
//! both; these verbs only find it and become it.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Subcommand;
use godwit_api::v1::{CreateTokenRequest, RemoveNodeRequest};

use crate::{client::Connection, companion, global::Global, output, values};

/// Found a cluster, and let nodes join it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: ClusterVerb,
}

#[derive(Debug, Subcommand)]
enum ClusterVerb {
    /// Make this machine the founding node of a new cluster, with its certificate authority
    ///
    /// Its daemon is started. Without flags the node has the machine's host name, and other nodes reach it at the address
    /// of its default route. This is `godwitd init` with the same flags; `godwitd init --help` lists them.
    Init {
        /// Flags of `godwitd init`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<String>,
    },
    /// Print a token with which one node can join; only the founding node can
    Token {
        /// The name the new node will have
        name: String,
        /// How long the token can be used: 90s, 15m, 2h, 1d
        #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
        valid: Duration,
        /// Make another token for a node that was admitted but whose join failed
        #[arg(long)]
        again: bool,
    },
    /// Remove a node, so that the others refuse its certificate; only the founding node can
    ///
    /// Its services stay where they are, and are shown as services on a removed node until `godwit rm` forgets
    /// them. A node that was removed can join again with a new token.
    Remove {
        /// The node
        name: String,
    },
    /// Make this machine a node of the cluster that the token comes from
    ///
    /// Its daemon is started. Without flags the node has the name that the token is for, and other nodes reach it at the
    /// address of its route to the founding node. This is `godwitd join` with the same flags; `godwitd join --help` lists
    /// them.
    Join {
        /// The token that `godwit cluster token` printed; with `-` it is read from standard input, where other
        /// users of the machine do not see it
        #[arg(allow_hyphen_values = true)]
        token: String,
        /// Flags of `godwitd join`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<String>,
    },
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        ClusterVerb::Init { flags } => become_daemon(global, "init", flags),
        ClusterVerb::Join { token, flags } => {
            become_daemon(global, "join", std::iter::once(token).chain(flags))
        }
        ClusterVerb::Remove { name } => remove(name, global).await,
        ClusterVerb::Token { name, valid, again } => {
            let mut connection = Connection::open(global).await?;
            let valid_s =
                u32::try_from(valid.as_secs()).context("--valid is longer than a token can last")?;
            let answer =
                connection.node.create_token(CreateTokenRequest { node: name, valid_s, again }).await;
            let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
            if global.json {
                output::json(&answer)?;
            } else {
                output::line(&answer.token)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Removes a node.
pub(super) async fn remove(name: String, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.remove_node(RemoveNodeRequest { node: name.clone() }).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
    } else {
        output::line(&format!("node {name} is removed"))?;
        for service in &answer.services {
            output::line(&format!("service {service} was there; `godwit rm {service}` forgets it"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Becomes `godwitd <verb>`.
fn become_daemon(
    global: &Global,
    verb: &str,
    flags: impl IntoIterator<Item = String>,
) -> anyhow::Result<ExitCode> {
    let mut arguments = vec![verb.to_owned()];
    // `--node` before the first flag that is godwitd's own was read as godwit's.
    if let Some(node) = &global.node {
        arguments.extend(["--node".to_owned(), node.clone()]);
    }
    arguments.extend(flags);
    companion::become_daemon(arguments)
}
