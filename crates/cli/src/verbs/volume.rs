//! `godwit volume`: files with a name, which outlive the service that has them and move with it.

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{Volume, VolumeCreateRequest, VolumeListRequest, VolumeRemoveRequest};
use serde_json::{Value, json};

use super::each;
use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Create, list, inspect and remove the volumes of a node
///
/// A volume is a directory with a name. One service at most has it (`godwit run -v NAME:TARGET`): it moves with that
/// service, and stays on the node when the service is removed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: VolumeVerb,
}

#[derive(Debug, Subcommand)]
enum VolumeVerb {
    /// Create an empty volume; print its name
    Create(Create),
    /// List the volumes of this node and the services that have them
    #[command(visible_alias = "list")]
    Ls(List),
    /// Show volumes as JSON
    Inspect(Named),
    /// Remove volumes that no service has, with their files
    Rm(Named),
    /// Remove all volumes that no service has, with their files
    Prune(Prune),
}

#[derive(Debug, clap::Args)]
struct Create {
    /// Its name, unique in the cluster [default: made up]
    name: Option<String>,
}

#[derive(Debug, clap::Args)]
struct List {
    /// Only names
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
struct Named {
    /// Names of volumes
    #[arg(required = true, value_name = "VOLUME")]
    names: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Prune {
    /// Remove them; without it they are only listed
    #[arg(short, long)]
    force: bool,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        VolumeVerb::Create(args) => create(args, global).await,
        VolumeVerb::Ls(args) => list(args, global).await,
        VolumeVerb::Inspect(args) => inspect(args.names, global).await,
        VolumeVerb::Rm(args) => remove(args.names, global).await,
        VolumeVerb::Prune(args) => prune(args, global).await,
    }
}

async fn create(args: Create, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let request = VolumeCreateRequest { name: args.name.unwrap_or_default() };
    let answer = connection.node.volume_create(request).await;
    let volume = answer.map_err(|status| connection.explain(&status))?.into_inner();
    match global.json {
        true => output::json(&json!({ "name": volume.name, "path": volume.path }))?,
        false => output::line(&volume.name)?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn volumes(global: &Global) -> anyhow::Result<Vec<Volume>> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.volume_list(VolumeListRequest {}).await;
    Ok(answer.map_err(|status| connection.explain(&status))?.into_inner().volumes)
}

async fn list(args: List, global: &Global) -> anyhow::Result<ExitCode> {
    let volumes = volumes(global).await?;
    if global.json {
        output::json(&volumes.iter().map(shown).collect::<Vec<_>>())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(volumes.iter().map(|volume| &volume.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    table(volumes)?;
    Ok(ExitCode::SUCCESS)
}

fn table(volumes: Vec<Volume>) -> anyhow::Result<()> {
    let mut table = Table::new(["VOLUME", "SIZE", "SERVICE"]);
    for Volume { name, bytes, service, .. } in volumes {
        let service = if service.is_empty() { "-".into() } else { service };
        table.row([name, output::bytes(bytes), service]);
    }
    Ok(table.print()?)
}

fn shown(volume: &Volume) -> Value {
    let Volume { name, bytes, service, path } = volume;
    let service = (!service.is_empty()).then_some(service);
    json!({ "name": name, "bytes": bytes, "service": service, "path": path })
}

async fn inspect(names: Vec<String>, global: &Global) -> anyhow::Result<ExitCode> {
    let volumes = volumes(global).await?;
    let mut code = ExitCode::SUCCESS;
    for name in names {
        match volumes.iter().find(|volume| volume.name == name) {
            Some(volume) => output::json(&shown(volume))?,
            None => {
                output::note(&format!(
                    "Error: this node has no volume {name}; `godwit volume ls` lists those that it has"
                ));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

async fn remove(names: Vec<String>, global: &Global) -> anyhow::Result<ExitCode> {
    each::removed(names, global, async |node, name| node.volume_remove(VolumeRemoveRequest { name }).await)
        .await
}

async fn prune(args: Prune, global: &Global) -> anyhow::Result<ExitCode> {
    let mut unused = volumes(global).await?;
    unused.retain(|volume| volume.service.is_empty());
    if args.force {
        return remove(unused.into_iter().map(|volume| volume.name).collect(), global).await;
    }
    if unused.is_empty() {
        output::note("every volume of this node is a service's");
        return Ok(ExitCode::SUCCESS);
    }
    table(unused)?;
    anyhow::bail!("nothing was removed: `godwit volume prune --force` removes these volumes and their files")
}
