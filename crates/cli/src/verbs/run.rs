//! `godwit run`: create and start a service.

use std::{net::Ipv4Addr, process::ExitCode};

use clap::ArgGroup;
use godwit_api::v1::{Mount, PublishedPort, RunRequest, run_request::Source};

use crate::{cli::Global, client::Connection, output, values};

/// Create and start a service on this node; print its name
///
/// The service runs detached: `godwit logs` shows what it writes.
#[derive(Debug, clap::Args)]
#[command(
    group = ArgGroup::new("source").required(true).args(["rootfs", "image"]),
    after_long_help = "\
Examples:
  godwit run --name redis --ip 10.88.0.10 --image redis.tar -- redis-server --bind 0.0.0.0
  godwit run --name web --rootfs ./web -m 256m --cpus 1.5 -p 8080:80 -- nginx -g 'daemon off;'
  godwit run --name api --network front --network back:ip=10.89.0.5 --image api.tar"
)]
pub(crate) struct Args {
    /// Name of the service, unique in the cluster [default: made from the command]
    #[arg(long)]
    name: Option<String>,
    /// Address of the service, which moves with it [default: the next free one of its network]
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<Ipv4Addr>,
    /// Directory to take the root filesystem from
    #[arg(long, value_name = "DIR", value_parser = values::absolute_text)]
    rootfs: Option<String>,
    /// OCI archive or image layout directory to take the root filesystem from
    #[arg(long, value_name = "PATH", value_parser = values::absolute_text)]
    image: Option<String>,
    /// Environment of the command: NAME=VALUE, or NAME to pass on your own
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = values::env)]
    env: Vec<String>,
    /// Mount into the container: type=bind,src=PATH,dst=PATH[,ro] or type=tmpfs,dst=PATH[,size=64m]
    #[arg(long, value_name = "MOUNT", value_parser = values::mount)]
    mount: Vec<Mount>,
    /// Bind mount in short: SOURCE:TARGET[:ro]
    #[arg(short, long, value_name = "SOURCE:TARGET", value_parser = values::volume)]
    volume: Vec<Mount>,
    /// Memory limit, for example 256m or 2GiB [default: none]
    #[arg(short, long, value_name = "SIZE", value_parser = values::size)]
    memory: Option<u64>,
    /// CPU limit, for example 1.5 [default: none]
    #[arg(long, value_name = "NUMBER", value_parser = values::cpus)]
    cpus: Option<u32>,
    /// Forward a port of the node to the service: HOST:CONTAINER[/udp]
    #[arg(short, long, value_name = "PORTS", value_parser = values::publish)]
    publish: Vec<PublishedPort>,
    /// Network of the service, again for each of several: NAME or NAME:ip=ADDRESS; the first leads to
    /// everybody else. Or ns:PATH alone, a network namespace of yours [default: the network "default"]
    #[arg(long, value_name = "NETWORK")]
    network: Vec<String>,
    /// Program in the nodes' directory of hooks to run at a moment of a move: pre-freeze, post-resume, kept
    #[arg(long, value_name = "MOMENT=NAME", value_parser = values::hook)]
    hook: Vec<(String, String)>,
    /// Host name inside the container [default: the service's name]
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// User that runs the command: UID, UID:GID, or a name that the image knows
    #[arg(short, long)]
    user: Option<String>,
    /// Directory inside the container that the command starts in
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Label kept with the service and shown by inspect
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = values::label)]
    label: Vec<String>,
    /// Accepted for Podman's sake: a service always runs detached
    #[arg(short, long)]
    detach: bool,
    /// Command and its arguments [default: the image's own]
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let name = match args.name {
        Some(name) => name,
        None => values::invented_name(&args.command)?,
    };
    let request = RunRequest {
        name,
        address: args.ip.map(|address| address.to_string()).unwrap_or_default(),
        source: args.rootfs.map(Source::Rootfs).or(args.image.map(Source::Image)),
        command: args.command,
        env: args.env.into_iter().filter(|entry| !entry.is_empty()).collect(),
        mounts: args.mount.into_iter().chain(args.volume).collect(),
        memory_bytes: args.memory.unwrap_or_default(),
        cpu_millis: args.cpus.unwrap_or_default(),
        publish: args.publish,
        hostname: args.hostname.unwrap_or_default(),
        user: args.user.unwrap_or_default(),
        workdir: args.workdir.unwrap_or_default(),
        labels: args.label,
        networks: args.network,
        hooks: args.hook.into_iter().collect(),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.run(request).await;
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&output::service_json(&service))?;
    } else {
        output::line(&service.name)?;
    }
    Ok(ExitCode::SUCCESS)
}
