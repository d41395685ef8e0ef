//! `godwit image`: the images and the layers that a node has, and images of godwit-cc's programs.

mod pack;

use std::process::ExitCode;

use clap::Subcommand;
use godwit_api::v1::{ImageListRequest, ImageListResponse, ImageRemoveRequest, ImageRemoveResponse};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
    registry,
};

/// Hexadecimal digits of a digest in a table.
const SHOWN_DIGITS: usize = 12;

/// List and remove the images and layers of a node, and pack images
///
/// Images come with `godwit pull` and `godwit run`, layers also with services that arrive. What was pulled stays until the
/// disk runs short. Other unused layers stay for some time, so that a service that comes back does not send them again.
/// Then godwitd removes them (`godwitd serve --keep-layers`), earlier when the disk runs short.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: ImageVerb,
}

#[derive(Debug, Subcommand)]
enum ImageVerb {
    /// List the images of this node and the services that run them
    #[command(visible_alias = "list")]
    Ls(List),
    /// Remove images and layers; what services use stays
    Rm(Remove),
    /// Remove all images and layers that no service uses
    Prune,
    /// Make an image of programs that godwit-cc has built, for both of its instruction sets
    ///
    /// It is an OCI archive for `godwit run --image`. Its service can cross to a node of the other instruction set. The same
    /// programs and files give the same archive. No daemon is needed.
    Pack(pack::Args),
}

#[derive(Debug, clap::Args)]
struct List {
    #[command(flatten)]
    images: Images,
    /// List layers, also those of services that arrived or were run from a file
    #[arg(long)]
    layers: bool,
}

/// Which part of the list of images.
#[derive(Debug, clap::Args)]
pub(crate) struct Images {
    /// Only names; of layers only digests
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
struct Remove {
    /// Images, digests of layers, or their beginnings
    #[arg(required = true, value_name = "IMAGE|LAYER")]
    layers: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match args.verb {
        ImageVerb::Ls(List { layers: false, images: args }) => images(args, global).await,
        ImageVerb::Ls(List { layers: true, images: args }) => layers(args, global).await,
        ImageVerb::Rm(args) => remove(args.layers, global).await,
        ImageVerb::Prune => remove(Vec::new(), global).await,
        ImageVerb::Pack(args) => pack::run(args, global),
    }
}

async fn list(global: &Global) -> anyhow::Result<ImageListResponse> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.image_list(ImageListRequest {}).await;
    Ok(answer.map_err(|status| connection.explain(&status))?.into_inner())
}

/// `godwit images`.
pub(crate) async fn images(args: Images, global: &Global) -> anyhow::Result<ExitCode> {
    let images = list(global).await?.images;
    if global.json {
        output::json(&images)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(images.iter().map(|image| &image.reference))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(["IMAGE", "DIGEST", "PLATFORM", "SIZE", "PULLED", "SERVICES"]);
    for image in images {
        table.row([
            image.reference,
            short(&image.digest),
            format!("linux/{}", image.architecture),
            output::bytes(image.bytes),
            output::age(image.pulled_ms),
            none_as_dash(&image.services),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

async fn layers(args: Images, global: &Global) -> anyhow::Result<ExitCode> {
    let layers = list(global).await?.layers;
    if global.json {
        output::json(&layers)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.quiet {
        output::names(layers.iter().map(|layer| &layer.digest))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(["LAYER", "SIZE", "LAST USED", "SERVICES"]);
    for layer in layers {
        table.row([
            short(&layer.digest),
            output::bytes(layer.bytes),
            output::age(layer.last_used_ms),
            none_as_dash(&layer.services),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

/// An image is meant by any of its names; what is none may be a layer's digest.
fn meant(text: String) -> String {
    let is_digest = text.starts_with("sha256:") || text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match registry::reference(&text) {
        Ok(reference) if !is_digest => reference.to_string(),
        _ => text,
    }
}

async fn remove(layers: Vec<String>, global: &Global) -> anyhow::Result<ExitCode> {
    let layers = layers.into_iter().map(meant).collect();
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.image_remove(ImageRemoveRequest { layers }).await;
    let ImageRemoveResponse { removed, names } =
        answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&ImageRemoveResponse { removed, names })?;
        return Ok(ExitCode::SUCCESS);
    }
    let bytes = removed.iter().map(|layer| layer.bytes).sum();
    for name in &names {
        output::line(name)?;
    }
    for layer in &removed {
        output::line(&short(&layer.digest))?;
    }
    output::note(&format!("{} freed", output::bytes(bytes)));
    Ok(ExitCode::SUCCESS)
}

fn none_as_dash(services: &[String]) -> String {
    if services.is_empty() { "-".into() } else { services.join(", ") }
}

fn short(digest: &str) -> String {
    let hex = digest.strip_prefix("sha256:").unwrap_or(digest);
    hex.chars().take(SHOWN_DIGITS).collect()
}
