//! `godwit image`: the images and the layers that a node has, and images of godwit-cc's programs.

mod pack;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;
use godwit_api::v1::{
    Image, ImageAddPlatformRequest, ImageAddPlatformResponse, ImageAddRequest, ImageListRequest,
    ImageListResponse, ImageRemoveRequest, ImageRemoveResponse,
};

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
    registry, values,
    verbs::pull,
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
    /// Show everything this node knows of images, as JSON: their platforms, layers, and how they want to be run
    Inspect(Inspect),
    /// Bring images from registries to this node; the same as `godwit pull`
    Pull(pull::Args),
    /// Take an image from an OCI archive or image layout, so that `godwit run NAME` finds it; print it with its digest
    Import(Import),
    /// Make the executables of an image for a further platform, from the neutral modules of its programs
    ///
    /// The image needs them: `godwit image pack --modules`. The node needs godwit-cc, of the version that has built the
    /// programs. The image gets a new digest, and services of the node that run it can cross to the platform. It takes as long
    /// as godwit-cc takes to generate code: seconds, or minutes for a large program.
    AddPlatform(AddPlatform),
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

#[derive(Debug, clap::Args)]
struct Inspect {
    /// Images, by their reference or digest
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct AddPlatform {
    /// The image, by its reference
    image: String,
    /// Instruction set: amd64 or arm64
    #[arg(value_name = "PLATFORM", value_parser = architecture)]
    architecture: String,
}

/// An instruction set that is given as a platform of OCI's, or in the words of uname(1).
fn architecture(text: &str) -> Result<String, &'static str> {
    let said = text.strip_prefix("linux/").unwrap_or(text);
    match said {
        "amd64" | "x86_64" => Ok("amd64".into()),
        "arm64" | "aarch64" => Ok("arm64".into()),
        _ => Err("programs are built for amd64 and arm64"),
    }
}

#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit image import ./ledger.tar
  godwit image import ./build.tar shop/web:7")]
struct Import {
    /// An OCI archive, or the directory of an image layout; FILE:NAME names one of several images
    #[arg(value_name = "FILE", value_parser = values::absolute_text)]
    file: String,
    /// Name of the image here [default: the one that it has in the archive]
    name: Option<String>,
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
        ImageVerb::Inspect(args) => inspect(args.images, global).await,
        ImageVerb::Pull(args) => pull::run(args, global).await,
        ImageVerb::Import(args) => import(args, global).await,
        ImageVerb::AddPlatform(args) => add_platform(args, global).await,
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
            image.reference.clone(),
            short(&image.digest),
            platforms(&image),
            output::bytes(image.bytes),
            output::age(image.pulled_ms),
            none_as_dash(&image.services),
        ]);
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

/// Its platforms, the node's first. Older nodes tell their own alone.
fn platforms(image: &Image) -> String {
    let all = image.platforms.iter().map(|platform| &platform.architecture);
    let all: Vec<_> = all.map(|architecture| format!("linux/{architecture}")).collect();
    if all.is_empty() { format!("linux/{}", image.architecture) } else { all.join(", ") }
}

async fn inspect(wanted: Vec<String>, global: &Global) -> anyhow::Result<ExitCode> {
    let images = list(global).await?.images;
    let found = |text: String| {
        let name = meant(text.clone());
        let image = images.iter().find(|image| is_called(image, &name));
        image.ok_or_else(|| {
            anyhow::anyhow!(
                "this node has no image {name}; `godwit image ls` lists images, `godwit pull` brings one"
            )
        })
    };
    let found = wanted.into_iter().map(found).collect::<anyhow::Result<Vec<_>>>()?;
    if global.json {
        output::json(&found)?;
    } else {
        output::line(&format!("{:#}", serde_json::to_value(&found)?))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether an image is meant by this: its reference, with its digest in place of the tag or not, or its digest.
fn is_called(image: &Image, name: &str) -> bool {
    let Image { reference, digest, .. } = image;
    let bare = reference.rsplit_once('@').map_or(reference.as_str(), |(bare, _)| bare);
    let path = bare.rfind('/').map_or(0, |slash| slash + 1);
    let end = bare[path..].find(':').map_or(bare.len(), |end| path + end);
    name == reference || name == digest || name == format!("{}@{digest}", &bare[..end])
}

async fn import(args: Import, global: &Global) -> anyhow::Result<ExitCode> {
    let reference = args.name.map(|name| registry::reference(&name)).transpose()?;
    let request = ImageAddRequest {
        path: args.file,
        reference: reference.map(|reference| reference.to_string()).unwrap_or_default(),
        digest: String::new(),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.image_add(request).await;
    tell(&answer.map_err(|status| connection.explain(&status))?.into_inner(), global)
}

async fn add_platform(args: AddPlatform, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let (reference, architecture) = (registry::reference(&args.image)?.to_string(), args.architecture);
    let request = ImageAddPlatformRequest { reference, architecture };
    let answer = connection.node.image_add_platform(request).await;
    let ImageAddPlatformResponse { image, left_out } =
        answer.map_err(|status| connection.explain(&status))?.into_inner();
    let image = image.context("the daemon does not say which image it is now")?;
    for service in &left_out {
        output::note(&format!(
            "{service} does not have the platform yet, since another operation on it is under way; repeat the command when that has ended"
        ));
    }
    tell(&image, global)?;
    Ok(if left_out.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// An image with its digest.
fn tell(image: &Image, global: &Global) -> anyhow::Result<ExitCode> {
    if global.json {
        output::json(image)?;
    } else {
        output::line(&format!("{}@{}", image.reference, image.digest))?;
    }
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
