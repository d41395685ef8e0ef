//! `godwit image`: the layers of images that a node has.

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{ImageLayer, ImageListRequest, ImageRemoveRequest};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Hexadecimal digits of a digest in a table.
const SHOWN_DIGITS: usize = 12;

/// List and remove the image layers of a node
///
/// Layers come with `godwit run` and with services that arrive. Unused layers stay for some time, so that a service
/// that comes back does not send them again. Then godwitd removes them (`godwitd serve --keep-layers`), earlier when
/// the disk runs short.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: ImageVerb,
}

#[derive(Debug, Subcommand)]
enum ImageVerb {
    /// List the layers of this node and the services that use them
    #[command(visible_alias = "list")]
    Ls,
    /// Remove layers that no service uses
    Rm(Remove),
    /// Remove all layers that no service uses
    Prune,
}

#[derive(Debug, clap::Args)]
struct Remove {
    /// Digests, or their beginnings
    #[arg(required = true, value_name = "LAYER")]
    layers: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        ImageVerb::Ls => list(global).await,
        ImageVerb::Rm(args) => remove(args.layers, global).await,
        ImageVerb::Prune => remove(Vec::new(), global).await,
    }
}

pub(crate) async fn list(global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.image_list(ImageListRequest {}).await;
    let layers = answer.map_err(|status| connection.explain(&status))?.into_inner().layers;
    if global.json {
        output::json(&layers)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(["LAYER", "SIZE", "LAST USED", "SERVICES"]);
    for layer in layers {
        table.row([
            short(&layer),
            output::bytes(layer.bytes),
            output::age(layer.last_used_ms),
            if layer.services.is_empty() { "-".into() } else { layer.services.join(", ") },
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

async fn remove(layers: Vec<String>, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.image_remove(ImageRemoveRequest { layers }).await;
    let removed = answer.map_err(|status| connection.explain(&status))?.into_inner().removed;
    if global.json {
        output::json(&removed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let bytes = removed.iter().map(|layer| layer.bytes).sum();
    for layer in &removed {
        output::line(&short(layer))?;
    }
    output::note(&format!("{} freed", output::bytes(bytes)));
    Ok(ExitCode::SUCCESS)
}

fn short(layer: &ImageLayer) -> String {
    let hex = layer.digest.strip_prefix("sha256:").unwrap_or(&layer.digest);
    hex.chars().take(SHOWN_DIGITS).collect()
}
