//! `godwit adopt`: take a container of another engine into godwit's care.

use std::net::Ipv4Addr;
use std::process::ExitCode;

use godwit_api::v1::{AdoptRequest, PublishedPort};

use crate::{client::Connection, global::Global, output, values};

/// Take a running container of Podman's or Docker's into godwit's care; print the name of its service
///
/// The container runs on, and its engine keeps it: `podman ps`, `logs`, `exec` and `stop`, or those of `docker`, work as
/// before, also on the node that it moves to. It gets an address that moves with it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  podman run -d --name web -p 8080:80 nginx && godwit adopt podman:web --leave-networks
  docker run -d --name web -p 8080:80 nginx && godwit adopt docker:web --leave-networks
  podman run -d --name db --network none postgres && godwit adopt podman:db
  docker run -d --name web -v /srv/data:/data nginx && godwit adopt docker:web --leave-networks --mount /data=copy
  godwit adopt podman:3f4a0c2b9d17 --name cache --ip 10.88.0.10")]
pub(crate) struct Args {
    /// Engine and container: podman: or docker:, and a name or an ID
    #[arg(value_name = "ENGINE:CONTAINER", value_parser = container)]
    container: String,
    /// Name of the service, unique in the cluster [default: the container's]
    #[arg(long)]
    name: Option<String>,
    /// Address of the service, which moves with it [default: the next free one of its network]
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<Ipv4Addr>,
    /// Network of the service, NAME or NAME:ip=ADDRESS, once for each; the first has the default route [default: the network
    /// "default"]
    #[arg(long, value_name = "NETWORK")]
    network: Vec<String>,
    /// Name by which services on its networks find it, beside its own and those that it has on the networks that it leaves
    #[arg(long, value_name = "NAME")]
    network_alias: Vec<String>,
    /// Forward a port of the node to the service: HOST:CONTAINER[/udp]
    #[arg(short, long, value_name = "PORTS", value_parser = values::publish)]
    publish: Vec<PublishedPort>,
    /// Take it off its engine's networks, whose addresses do not move: its connections end, and godwit publishes the ports
    /// that the engine did; it keeps the names that it has there
    #[arg(long)]
    leave_networks: bool,
    /// What becomes of a bind mount or a volume in a move, by its target, as for `migrate`: `skip`, `shared` or `copy`; else each move is to
    /// say it
    #[arg(long, value_name = "TARGET=WHAT", value_parser = values::on_move)]
    mount: Vec<(String, String)>,
    /// Program in the nodes' directory of hooks to run at a point of a move: pre-freeze, post-resume, aborted
    #[arg(long, value_name = "POINT=NAME", value_parser = values::hook)]
    hook: Vec<(String, String)>,
    /// Label of the service, which inspect shows
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = values::label)]
    label: Vec<String>,
}

fn container(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some(("podman" | "docker", container)) if !container.is_empty() => Ok(text.to_owned()),
        _ => Err("give podman: or docker:, and the name or ID of a container, for example podman:web".into()),
    }
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let request = AdoptRequest {
        container: args.container,
        name: args.name.unwrap_or_default(),
        address: args.ip.map(|address| address.to_string()).unwrap_or_default(),
        networks: args.network,
        aliases: args.network_alias,
        publish: args.publish,
        labels: args.label,
        hooks: args.hook.into_iter().collect(),
        leave_networks: args.leave_networks,
        mounts: args.mount.into_iter().collect(),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.adopt(request).await;
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&output::service_json(&service))?;
    } else {
        output::line(&service.name)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::container;

    #[test]
    fn an_engine_and_a_container_are_needed() {
        for text in ["podman:web", "docker:web"] {
            assert_eq!(container(text).as_deref(), Ok(text));
        }
        for text in ["web", "podman:", "lxc:web", ":web"] {
            assert!(container(text).is_err(), "{text}");
        }
    }
}
