//! Images from registries: pulled by skopeo, as the user who types, and handed to the node's daemon.
//!
//! ```text
//!  reference ──▶ skopeo inspect ──▶ manifest: which image is this machine's, which layers has the node already
//!                skopeo copy    ──▶ layout directory ──▶ godwitd verifies, unpacks, and notes the reference
//! ```
//!
//! skopeo is of the project that Podman's own code is of. So credentials, credential helpers, mirrors, certificates and
//! signature policies are those that a machine has for Podman (`containers-auth.json(5)`, `containers-registries.conf(5)`,
//! `containers-policy.json(5)`), and no credential reaches godwitd.

mod manifest;
mod skopeo;

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use godwit_api::v1::{Image, ImageAddRequest, ImageListRequest};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oci_spec::distribution::Reference;
use tempfile::TempDir;
use tokio::time::{Instant, MissedTickBehavior};

use crate::{client::Connection, interrupts::Interrupts, output};
use manifest::{Descriptor, Manifest};
use skopeo::Skopeo;

/// How often what has come is looked at.
const TICK: Duration = Duration::from_millis(100);
/// A pull of which nothing comes for this long has failed.
const PATIENCE: Duration = Duration::from_secs(180);

/// How a registry is reached.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Reach {
    /// File with the credentials for registries [default: those of Podman and Docker, as `skopeo login` writes them]
    #[arg(long, value_name = "FILE")]
    authfile: Option<PathBuf>,
    /// Directory with the certificates to reach the registry with: *.crt, *.cert, *.key
    #[arg(long, value_name = "DIR")]
    cert_dir: Option<PathBuf>,
    /// Whether the registry must have TLS and a certificate that is believed
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tls_verify: Option<bool>,
}

/// When a registry is asked for an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Policy {
    /// If the node does not have it
    Missing,
    /// Each time; it is pulled if it is another than the node has
    Always,
    /// Each time, and if the registry does not answer, what the node has is taken
    Newer,
    /// Never
    Never,
}

/// A reference as users of Docker write it, whole: `redis` is `docker.io/library/redis:latest`.
///
/// # Errors
/// If it is none.
pub(crate) fn reference(text: &str) -> anyhow::Result<Reference> {
    let reference: Reference = text.parse().map_err(|error: oci_spec::distribution::ParseError| {
        anyhow::anyhow!(
            "{text:?} is no image: {error}; write [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@DIGEST"
        )
    })?;
    Ok(match reference.digest() {
        // The digest says all.
        Some(digest) if reference.tag().is_some() => reference.clone_with_digest(digest.to_owned()),
        _ => reference,
    })
}

/// The image of a reference on this node, pulled if the policy wants it. `None`: the user interrupted the pull.
pub(crate) async fn image(
    connection: &mut Connection,
    reference: &Reference,
    policy: Policy,
    flags: &Reach,
    quiet: bool,
) -> anyhow::Result<Option<Image>> {
    let mut interrupts = Interrupts::new()?;
    tokio::select! {
        image = brought(connection, reference, policy, flags, quiet) => image.map(Some),
        () = interrupts.next() => Ok(None),
    }
}

async fn brought(
    connection: &mut Connection,
    reference: &Reference,
    policy: Policy,
    flags: &Reach,
    quiet: bool,
) -> anyhow::Result<Image> {
    let answer = connection.node.image_list(ImageListRequest {}).await;
    let here = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let wanted = reference.to_string();
    let known = here.images.into_iter().find(|image| image.reference == wanted);
    match (known, policy) {
        (Some(image), Policy::Missing | Policy::Never) => Ok(image),
        (None, Policy::Never) => {
            anyhow::bail!("this node has no image {wanted}, and --pull never forbids to pull it");
        }
        (known, _) => {
            let skopeo = Skopeo::new(flags);
            let top = match (skopeo.manifest(&wanted).await, known) {
                (Err(error), Some(image)) if policy == Policy::Newer => {
                    output::note(&format!("Warning: {error}; the image that this node has is taken"));
                    return Ok(image);
                }
                (Err(error), _) => return Err(error.into()),
                (Ok(top), Some(image)) if top.digest == image.digest => return Ok(image),
                (Ok(top), _) => top,
            };
            let layers: HashSet<_> = here.layers.into_iter().map(|layer| layer.digest).collect();
            Pull { connection, skopeo: &skopeo, reference, top, quiet }.run(&layers).await
        }
    }
}

/// One image on its way.
struct Pull<'a> {
    connection: &'a mut Connection,
    skopeo: &'a Skopeo<'a>,
    reference: &'a Reference,
    /// What the reference stands for: an index, or a manifest.
    top: Manifest,
    quiet: bool,
}

impl Pull<'_> {
    /// `here`: the digests of the layers that the node has.
    async fn run(mut self, here: &HashSet<String>) -> anyhow::Result<Image> {
        let layers = match self.top.of_this_machine(&self.reference.to_string())? {
            Some(instance) => self.skopeo.manifest(&self.pinned(&instance)).await?.layers,
            None => self.top.layers.clone(),
        };
        let (known, missing): (Vec<_>, Vec<_>) =
            layers.into_iter().partition(|layer| here.contains(&layer.digest));
        let bytes: u64 = missing.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        let shown = Shown::begin(self.reference, missing.len(), known.len(), bytes, self.quiet);
        let directory = scratch()?;
        self.copy(directory.path(), &known, &shown).await?;
        let added = match self.add(directory.path()).await {
            Err(status) if !known.is_empty() && status.code() == tonic::Code::InvalidArgument => {
                // A layer that the node had may have gone meanwhile.
                let whole = scratch()?;
                self.copy(whole.path(), &[], &shown).await?;
                self.add(whole.path()).await
            }
            added => added,
        };
        shown.end();
        Ok(added.map_err(|status| self.connection.explain(&status))?)
    }

    fn pinned(&self, digest: &str) -> String {
        self.reference.clone_with_digest(digest.to_owned()).to_string()
    }

    /// Has the image of this machine copied to a layout directory, but for layers that the node has.
    async fn copy(&self, directory: &Path, known: &[Descriptor], shown: &Shown) -> anyhow::Result<()> {
        hold_places(directory, known).context("cannot prepare the directory that the image is pulled to")?;
        // What was looked at, also if the tag is given to another image just now.
        let mut copy =
            self.skopeo.copy(&self.reference.to_string(), &self.pinned(&self.top.digest), directory)?;
        let mut clock = tokio::time::interval(TICK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut came, mut at) = (0, Instant::now());
        loop {
            tokio::select! {
                ended = copy.ended() => return Ok(ended?),
                _ = clock.tick() => {
                    let now = bytes_below(directory);
                    if now != came {
                        (came, at) = (now, Instant::now());
                        shown.at(came);
                    } else if at.elapsed() > PATIENCE {
                        anyhow::bail!(
                            "{} cannot be pulled: nothing has come from the registry for {} s",
                            self.reference,
                            PATIENCE.as_secs()
                        );
                    }
                }
            }
        }
    }

    async fn add(&mut self, directory: &Path) -> Result<Image, tonic::Status> {
        let request = ImageAddRequest {
            path: directory.to_string_lossy().into_owned(),
            reference: self.reference.to_string(),
            digest: self.top.digest.clone(),
        };
        Ok(self.connection.node.image_add(request).await?.into_inner())
    }
}

/// Where large files go that need not outlive a restart, as Podman has it.
fn scratch() -> anyhow::Result<TempDir> {
    let parent = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    tempfile::Builder::new()
        .prefix("godwit-pull-")
        .tempdir_in(&parent)
        .with_context(|| format!("cannot make a directory in {} to pull the image to", parent.display()))
}

/// Makes an empty file of the right length for each layer that need not come: skopeo takes a blob that is in the layout
/// for the blob, and godwitd reads none that it has.
fn hold_places(directory: &Path, known: &[Descriptor]) -> io::Result<()> {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    for layer in known {
        if let Some(hex) = layer.digest.strip_prefix("sha256:") {
            File::create(blobs.join(hex))?.set_len(layer.size)?;
        }
    }
    Ok(())
}

/// What the files of a layout take on the disk: skopeo makes them in the directory, and moves them to their places.
fn bytes_below(directory: &Path) -> u64 {
    let files = [directory.to_owned(), directory.join("blobs/sha256")].into_iter().flat_map(fs::read_dir);
    // A file may just be given its name.
    files.flatten().flatten().filter_map(|file| file.metadata().ok()).map(|file| file.blocks() * 512).sum()
}

/// What the user sees: a bar on a terminal, else a line.
struct Shown(Option<ProgressBar>);

impl Shown {
    fn begin(reference: &Reference, missing: usize, known: usize, bytes: u64, quiet: bool) -> Self {
        if quiet {
            return Self(None);
        }
        let layers = |count: usize| if count == 1 { "layer" } else { "layers" };
        let known = if known == 0 { String::new() } else { format!("; {known} more are here") };
        let what =
            format!("Pulling {reference}: {} in {missing} {}{known}", output::bytes(bytes), layers(missing));
        if !output::watched() {
            output::note(&what);
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {binary_bytes} {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        bar.enable_steady_tick(TICK);
        Self(Some(bar))
    }

    fn at(&self, bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(bytes);
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::reference;

    #[test]
    fn references_are_whole_as_docker_has_them() {
        for (typed, whole) in [
            ("redis", "docker.io/library/redis:latest"),
            ("redis:7", "docker.io/library/redis:7"),
            ("user/app", "docker.io/user/app:latest"),
            ("localhost/app", "localhost/app:latest"),
            ("10.0.0.1:5000/a/b:1", "10.0.0.1:5000/a/b:1"),
        ] {
            assert_eq!(reference(typed).unwrap().to_string(), whole, "{typed}");
        }
        let digest = format!("sha256:{}", "ab".repeat(32));
        let pinned = reference(&format!("quay.io/x/y:1@{digest}")).unwrap().to_string();
        assert_eq!(pinned, format!("quay.io/x/y@{digest}"), "the digest says all");
        for wrong in ["", "a b", "-x", "x@sha256:12", "../x"] {
            let said = reference(wrong).unwrap_err().to_string();
            assert!(said.contains("[:TAG]"), "{wrong}: {said}");
        }
    }
}
