//! `godwit update`: change limits and restart policy.

use std::process::ExitCode;

use clap::ArgGroup;
use godwit_api::v1::UpdateRequest;

use super::each;
use crate::{global::Global, values};

/// Change limits and restart policy of services, at once and wherever they move
#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["memory", "cpus", "pids_limit", "restart"]))]
pub(crate) struct Args {
    /// Memory limit, for example 256m or 2GiB; 0 for none
    #[arg(short, long, value_name = "SIZE", value_parser = values::size_or_none)]
    memory: Option<u64>,
    /// CPU limit, for example 1.5; 0 for none
    #[arg(long, value_name = "NUMBER", value_parser = values::cpus_or_none)]
    cpus: Option<u32>,
    /// Most processes and threads; 0 or -1 for no limit
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, value_parser = values::pids)]
    pids_limit: Option<u64>,
    /// When to start it again: no, on-failure, on-failure:N or always
    #[arg(long, value_name = "POLICY")]
    restart: Option<String>,
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let Args { memory, cpus, pids_limit, restart, name } = args;
    each::service(name, global, async |node, name| {
        let restart = restart.clone();
        node.update(UpdateRequest { name, memory_bytes: memory, cpu_millis: cpus, pids_limit, restart }).await
    })
    .await
}
