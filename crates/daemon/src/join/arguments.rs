//! What `godwitd init` and `godwitd join` are called with. None of it is needed, but the token.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::own::Asked;
use crate::protection::encrypt::Encrypt;
use crate::unit;

/// How `godwitd init` was called.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InitArgs {
    /// Directory for what must survive a restart of the machine
    #[arg(long, default_value = unit::STATE)]
    pub state: PathBuf,
    /// Name of the cluster
    #[arg(long, default_value = "godwit")]
    pub cluster: String,
    /// Name of this node [default: the machine's host name]
    // The last one counts: `godwit` gives the one of its environment first.
    #[arg(long, alias = "node", overrides_with = "name")]
    pub name: Option<String>,
    /// Address and port at which other nodes reach this one [default: the address of the route to the outside, port 7117]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Interface that carries the overlay and on which clients reach services [default: the one that has the address]
    #[arg(long, value_name = "INTERFACE")]
    pub uplink: Option<String>,
    /// Encryption of services' packets between nodes, for this node and all that join
    #[arg(long, value_enum)]
    pub encrypt: Option<Encrypt>,
    /// Leave the systemd unit godwitd.service as it is [default: it is enabled and started]
    #[arg(long)]
    pub no_start: bool,
}

/// How `godwitd join` was called; its token is a secret, and so it is not shown by `Debug`.
#[derive(Clone, clap::Args)]
pub(crate) struct JoinArgs {
    /// Directory for what must survive a restart of the machine
    #[arg(long, default_value = unit::STATE)]
    pub state: PathBuf,
    /// Name of this node [default: the one that the token is for]
    #[arg(long, alias = "node", overrides_with = "name")]
    pub name: Option<String>,
    /// Address and port at which other nodes reach this one [default: the address of the route to the founding node,
    /// port 7117]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Interface that carries the overlay and on which clients reach services [default: the one that has the address]
    #[arg(long, value_name = "INTERFACE")]
    pub uplink: Option<String>,
    /// Leave the systemd unit godwitd.service as it is [default: it is enabled and started]
    #[arg(long)]
    pub no_start: bool,
    /// The token that `godwit cluster token` printed on the founding node; with `-` it is read from standard
    /// input, where other users of the machine do not see it
    pub token: String,
}

impl InitArgs {
    /// What it says of the node.
    pub(super) fn asked(&self) -> Asked {
        Asked { name: self.name.clone(), listen: self.listen, uplink: self.uplink.clone() }
    }
}

impl JoinArgs {
    /// What it says of the node.
    pub(super) fn asked(&self) -> Asked {
        Asked { name: self.name.clone(), listen: self.listen, uplink: self.uplink.clone() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn parse<A: Args + FromArgMatches>(line: &str) -> A {
        let command = A::augment_args(clap::Command::new("godwitd"));
        A::from_arg_matches(&command.try_get_matches_from(line.split(' ')).unwrap()).unwrap()
    }

    #[test]
    fn no_flag_is_needed_and_those_of_version_0_1_are_taken() {
        let init: InitArgs = parse("init");
        assert_eq!((init.name, init.listen, init.uplink, init.no_start), (None, None, None, false));
        let join: JoinArgs = parse("join gwt1.x");
        assert_eq!((join.name, join.listen, join.token.as_str()), (None, None, "gwt1.x"));
        let init: InitArgs = parse("init --node a --listen 192.0.2.1:7117 --cluster x --state /s");
        assert_eq!(init.name.as_deref(), Some("a"));
        let join: JoinArgs = parse("join --state /s --node b --listen 192.0.2.2:7117 -- gwt1.x");
        assert_eq!((join.name.as_deref(), join.token.as_str()), (Some("b"), "gwt1.x"));
        let init: InitArgs = parse("init --node environment --name typed");
        assert_eq!(init.name.as_deref(), Some("typed"));
    }

    #[test]
    fn every_flag_is_in_the_documentation() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/install.md");
        let page = std::fs::read_to_string(page).unwrap();
        let command = JoinArgs::augment_args(InitArgs::augment_args(clap::Command::new("godwitd")));
        let missing: Vec<_> = command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .filter(|flag| !page.contains(&format!("`--{flag}`")) && !page.contains(&format!("`--{flag} ")))
            .collect();
        assert!(missing.is_empty(), "not in docs/install.md: {missing:?}");
    }
}
