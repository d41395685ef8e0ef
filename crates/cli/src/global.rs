//! The flags that every verb of `godwit` takes, also those that `godwit-lab` performs.

use std::{ffi::OsString, path::PathBuf};

/// Flags that every verb takes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Print JSON: one document a line
    #[arg(long, global = true)]
    pub json: bool,
    /// Unix socket of the daemon to ask, whatever --node says
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Ask the daemon of this node of the lab
    #[arg(long, global = true, value_name = "NODE", env = "GODWIT_NODE")]
    pub node: Option<String>,
    /// The lab that --node and the lab's verbs mean
    #[arg(long, global = true, value_name = "NAME", env = "GODWIT_LAB", default_value = "default")]
    pub lab: String,
}

impl Global {
    /// The same flags as arguments, for another program that takes them.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let Self { json, socket, node, lab } = self;
        let mut arguments = Vec::new();
        if *json {
            arguments.push("--json".into());
        }
        if let Some(socket) = socket {
            arguments.extend(["--socket".into(), socket.into()]);
        }
        if let Some(node) = node {
            arguments.extend(["--node".into(), node.into()]);
        }
        arguments.extend(["--lab".into(), lab.into()]);
        arguments
    }
}
