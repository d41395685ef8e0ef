//! `godwit pull`: brings images from registries to this node.

use std::process::ExitCode;

use crate::{
    client::Connection,
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output,
    registry::{self, Policy, Reach, Registry},
};

/// Bring images from registries to this node; print each with its digest
///
/// `redis` is docker.io/library/redis:latest, as Docker has it. Credentials are those of `skopeo login`, `podman login` and
/// `docker login`; mirrors, certificates and signatures are configured as for Podman (containers-registries.conf(5)).
/// Under sudo they are root's. Layers that the node has do not come again.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit pull redis:7
  godwit pull --tls-verify=false 10.0.0.5:5000/app")]
pub(crate) struct Args {
    /// Images: [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@DIGEST
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    registry: Reach,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let wanted = args.images.iter().map(|text| registry::reference(text));
    let wanted: Vec<_> = wanted.collect::<anyhow::Result<_>>()?;
    let mut connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    for reference in wanted {
        let mut registry = Registry {
            connection: &mut connection,
            interrupts: &mut interrupts,
            reach: &args.registry,
            quiet: args.quiet || global.json,
        };
        let Some(image) = registry.image(&reference, Policy::Always).await? else {
            return Ok(ExitCode::from(INTERRUPTED));
        };
        if global.json {
            output::json(&image)?;
        } else {
            output::line(&reference.clone_with_digest(image.digest).to_string())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
