//! `godwit ps`: the services of the cluster.

use std::process::ExitCode;

use godwit_api::v1::{AwaitedPages, ListRequest, Service, ServiceState};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Width of the longest command shown.
const COMMAND_WIDTH: usize = 40;

/// List the services of the cluster
///
/// A service on another node is `remote`; its NODE column says where. `in-doubt` means that a migration may
/// have committed, and this node waits for the source to say so. `restarting` means that the service has ended
/// and will be started again, as --restart of `run` says. `waits for NODE` means that it moved from that node,
/// which still has some of its memory and does not answer.
#[derive(Debug, clap::Args)]
#[command(visible_alias = "list")]
pub(crate) struct Args {
    /// Include services that do not run
    #[arg(short, long)]
    all: bool,
    /// Only names
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.list(ListRequest { all: args.all }).await;
    let mut services = answer.map_err(|status| connection.explain(&status))?.into_inner().services;
    services.sort_by(|a, b| a.name.cmp(&b.name));
    if global.json {
        let services: Vec<_> = services.iter().map(output::service_json).collect();
        output::json(&services)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(services.iter().map(|service| &service.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(["NAME", "NODE", "ADDRESS", "STATE", "STARTED", "MEMORY", "PORTS", "COMMAND"]);
    for service in &services {
        table.row([
            service.name.clone(),
            service.node.clone(),
            addresses(service),
            state(service),
            output::age(service.started_ms),
            memory(service),
            ports(service),
            output::shorten(&output::command(&service.command), COMMAND_WIDTH),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

/// Its address on each of its networks.
fn addresses(service: &Service) -> String {
    let addresses: Vec<_> = service.networks.iter().map(|network| network.address.as_str()).collect();
    addresses.join(", ")
}

fn state(service: &Service) -> String {
    match service.state() {
        state @ (ServiceState::Stopped | ServiceState::Restarting) => {
            format!("{} ({})", output::state(state), service.exit_code)
        }
        state => match &service.awaits {
            None => output::state(state).to_owned(),
            Some(AwaitedPages { node, bytes, unreachable_ms: 0, .. }) => {
                format!("{}, {} on {node}", output::state(state), output::bytes(*bytes))
            }
            Some(AwaitedPages { node, bytes, .. }) => {
                format!("waits for {node}, which has {}", output::bytes(*bytes))
            }
        },
    }
}

fn memory(service: &Service) -> String {
    match (service.memory_current_bytes, service.memory_bytes) {
        (0, _) => String::new(),
        (now, 0) => output::bytes(now),
        (now, limit) => format!("{} of {}", output::bytes(now), output::bytes(limit)),
    }
}

fn ports(service: &Service) -> String {
    let ports = service
        .publish
        .iter()
        .map(|port| format!("{}->{}/{}", port.host_port, port.container_port, port.protocol));
    ports.collect::<Vec<_>>().join(",")
}
