//! Images from registries: pulled by skopeo, as the user who types, and handed to the node's daemon.
//!
//! ```text
//!  reference ──▶ skopeo inspect ──▶ manifest: which image is this machine's, which layers has the node already
//!                                   configuration: whether it has a health check, which no layout has
//!                skopeo copy    ──▶ layout directory ──▶ godwitd verifies, unpacks, and notes the reference
//! ```
//!
//! skopeo is of the project that Podman's own code is of. So credentials, credential helpers, mirrors, certificates and
//! signature policies are those that a machine has for Podman (`containers-auth.json(5)`, `containers-registries.conf(5)`,
//! `containers-policy.json(5)`), and no credential reaches godwitd.

mod health;
mod manifest;
mod skopeo;

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use godwit_api::v1::{Image, ImageAddRequest, ImageListRequest};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oci_spec::distribution::Reference;
use rustix::fs::FlockOperation;
use tempfile::TempDir;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::{Response, Status};

use crate::{client::Connection, interrupts::Interrupts, output};
use manifest::Descriptor;
use skopeo::{PullError, Skopeo};

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
    /// Each time; if that fails, what the node has is taken
    Newer,
    /// Never
    Never,
}

/// A reference as users of Docker write it, whole: `redis` is `docker.io/library/redis:latest`.
///
/// # Errors
/// If it is none.
pub(crate) fn reference(text: &str) -> anyhow::Result<Reference> {
    let bare = text.strip_prefix("docker://").unwrap_or(text);
    let reference: Reference = bare.parse().map_err(|error: oci_spec::distribution::ParseError| {
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

/// Brings images to a node.
pub(crate) struct Registry<'a> {
    pub(crate) connection: &'a mut Connection,
    pub(crate) interrupts: &'a mut Interrupts,
    pub(crate) reach: &'a Reach,
    /// Shows no progress.
    pub(crate) quiet: bool,
}

impl Registry<'_> {
    /// The image of a reference on this node, pulled if the policy wants it. `None`: the user interrupted the pull.
    pub(crate) async fn image(
        &mut self,
        reference: &Reference,
        policy: Policy,
    ) -> anyhow::Result<Option<Image>> {
        let answer = self.connection.node.image_list(ImageListRequest {}).await;
        let here = answer.map_err(|status| self.connection.explain(&status))?.into_inner();
        let known = here.images.into_iter().find(|image| is_known_by(image, reference));
        let layers: HashMap<_, _> =
            here.layers.into_iter().map(|layer| (layer.digest, layer.bytes)).collect();
        match (known, policy) {
            (Some(image), Policy::Missing | Policy::Never) => Ok(Some(image)),
            (None, Policy::Never) => {
                anyhow::bail!("this node has no image {reference}, and --pull never forbids to pull it")
            }
            (Some(image), Policy::Newer) => match self.pulled(reference, Some(&image), &layers).await {
                // What is forged is no reason to take what is older.
                Err(error) if !matches!(error.downcast_ref(), Some(PullError::Digest { .. })) => {
                    output::note(&format!("Warning: {error}; the image that this node has is taken"));
                    Ok(Some(image))
                }
                pulled => pulled,
            },
            (known, _) => self.pulled(reference, known.as_ref(), &layers).await,
        }
    }

    /// `here`: the layers that the node has, and their sizes.
    async fn pulled(
        &mut self,
        reference: &Reference,
        known: Option<&Image>,
        here: &HashMap<String, u64>,
    ) -> anyhow::Result<Option<Image>> {
        let skopeo = Skopeo::new(self.reach);
        let (top, layers) = (String::new(), Vec::new());
        let (others, modules, health_check) = (0, false, None);
        let mut pull = Pull { skopeo: &skopeo, reference, top, layers, others, modules, health_check };
        tokio::select! {
            biased;
            () = self.interrupts.next() => return Ok(None),
            looked = pull.look() => looked?,
        }
        if let Some(command) = &pull.health_check {
            output::note(&health::warning(reference, command));
        }
        let same = |known: &&Image| {
            known.digest == pull.top
                && known.reference == reference.to_string()
                // An earlier release has taken one platform alone.
                && known.platforms.len().max(1) > pull.others
                && (!pull.modules || !known.modules.is_empty())
        };
        if let Some(known) = known.filter(same) {
            return Ok(Some(known.clone()));
        }
        // One that is larger than what is here is another.
        let is_here = |layer: &Descriptor| here.get(&layer.digest).is_some_and(|bytes| layer.size <= *bytes);
        let (known, missing): (Vec<_>, Vec<_>) =
            std::mem::take(&mut pull.layers).into_iter().partition(is_here);
        let shown = Shown::begin(reference, &missing, known.len(), self.quiet);
        let mut added = self.copied(&pull, &known, &shown).await?;
        if let Some(Err(status)) = &added
            && status.code() == tonic::Code::Aborted
        {
            // A layer that the node had has gone meanwhile.
            added = self.copied(&pull, &[], &shown).await?;
        }
        shown.end();
        let Some(added) = added else { return Ok(None) };
        Ok(Some(added.map_err(|status| self.connection.explain(&status))?))
    }

    /// Copies an image without these layers to a directory, and hands it to the daemon. `None`: the user interrupted it.
    async fn copied(
        &mut self,
        pull: &Pull<'_>,
        known: &[Descriptor],
        shown: &Shown,
    ) -> anyhow::Result<Option<Result<Image, Status>>> {
        let scratch = Scratch::new()?;
        if !pull.copy(scratch.path(), known, self.interrupts, shown).await? {
            return Ok(None);
        }
        let request = ImageAddRequest {
            path: scratch.path().to_string_lossy().into_owned(),
            reference: pull.reference.to_string(),
            digest: pull.top.clone(),
        };
        tokio::select! {
            biased;
            () = self.interrupts.next() => Ok(None),
            added = self.connection.node.image_add(request) => Ok(Some(added.map(Response::into_inner))),
        }
    }
}

/// Whether an image is what a reference says: by its name, or by its digest.
fn is_known_by(image: &Image, reference: &Reference) -> bool {
    image.reference == reference.to_string()
        || reference.digest() == Some(&image.digest)
            && image.reference.parse::<Reference>().is_ok_and(|named| {
                (named.registry(), named.repository()) == (reference.registry(), reference.repository())
            })
}

/// One image on its way.
struct Pull<'a> {
    skopeo: &'a Skopeo<'a>,
    reference: &'a Reference,
    /// The digest of what the reference stands for: an index, or a manifest.
    top: String,
    /// Of the image for this machine, of those for other sets, and the modules.
    layers: Vec<Descriptor>,
    /// How many images for other instruction sets come with it.
    others: usize,
    /// Whether the neutral modules of its programs come with it.
    modules: bool,
    /// The command of its health check.
    health_check: Option<String>,
}

impl Pull<'_> {
    /// Finds out what there is to pull. What has a digest is held against it: skopeo only shows these documents.
    async fn look(&mut self) -> Result<(), PullError> {
        let name = self.reference.to_string();
        let top = self.skopeo.manifest(&name, self.reference.digest()).await?;
        self.top.clone_from(&top.digest);
        let (mut others, mut modules) = (Vec::new(), None);
        let image = match top.of_this_machine(&name)? {
            Some(instance) => {
                let beside = top.crossing(&name, &instance)?;
                for other in beside.others {
                    others
                        .push(self.skopeo.manifest(&self.pinned(&other.digest), Some(&other.digest)).await?);
                }
                if let Some(of) = beside.modules {
                    modules = Some(self.skopeo.manifest(&self.pinned(&of.digest), Some(&of.digest)).await?);
                }
                self.skopeo.manifest(&self.pinned(&instance), Some(&instance)).await?
            }
            None => top,
        };
        (self.others, self.modules) = (others.len(), modules.is_some());
        self.layers = image.layers;
        for layer in others.into_iter().chain(modules).flat_map(|other| other.layers) {
            if !self.layers.iter().any(|own| own.digest == layer.digest) {
                self.layers.push(layer);
            }
        }
        if let Some(digest) = image.configuration {
            let document = self.skopeo.configuration(&self.pinned(&image.digest), &digest).await?;
            let command = health::command(&document);
            self.health_check =
                command.map_err(|cause| PullError::Configuration { reference: name, cause })?;
        }
        Ok(())
    }

    fn pinned(&self, digest: &str) -> String {
        self.reference.clone_with_digest(digest.to_owned()).to_string()
    }

    /// Has the image of this machine copied to a layout directory, but for layers that the node has. `false`: the user
    /// interrupted it.
    async fn copy(
        &self,
        directory: &Path,
        known: &[Descriptor],
        interrupts: &mut Interrupts,
        shown: &Shown,
    ) -> anyhow::Result<bool> {
        hold_places(directory, known).context("cannot prepare the directory that the image is pulled to")?;
        // What was looked at, also if the tag is given to another image just now.
        let (pinned, whole) = (self.pinned(&self.top), self.others > 0 || self.modules);
        let mut copy = self.skopeo.copy(&self.reference.to_string(), &pinned, whole, directory)?;
        let mut clock = tokio::time::interval(TICK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut came, mut at) = (0, Instant::now());
        loop {
            tokio::select! {
                biased;
                () = interrupts.next() => {
                    copy.kill().await?;
                    return Ok(false);
                }
                ended = copy.ended() => {
                    ended?;
                    return Ok(true);
                }
                _ = clock.tick() => {
                    let now = bytes_below(directory);
                    if now != came {
                        (came, at) = (now, Instant::now());
                        shown.at(came);
                    } else if at.elapsed() > PATIENCE {
                        copy.kill().await?;
                        return Err(PullError::Silent {
                            reference: self.reference.to_string(),
                            seconds: PATIENCE.as_secs(),
                        }
                        .into());
                    }
                }
            }
        }
    }
}

/// A directory that an image is pulled to, which goes with this program.
struct Scratch {
    directory: TempDir,
    /// Locked for as long as somebody uses the directory.
    _lock: File,
}

/// What names of such directories begin with.
const PREFIX: &str = "godwit-pull-";

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        // Where large files go that need not outlive a restart, as Podman has it. skopeo takes a colon for an end.
        let own =
            std::env::var_os("TMPDIR").filter(|path| !path.is_empty() && !path.as_bytes().contains(&b':'));
        let parent = own.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let context = || format!("cannot make a directory in {} to pull the image to", parent.display());
        sweep(&parent);
        let directory = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent).with_context(context)?;
        let lock = File::open(directory.path()).with_context(context)?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).with_context(context)?;
        Ok(Self { directory, _lock: lock })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes what pulls of this user have left that were killed.
fn sweep(parent: &Path) {
    let own = rustix::process::geteuid().as_raw();
    // What cannot be read or removed is no obstacle to a pull.
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().as_bytes().starts_with(PREFIX.as_bytes());
        // Another pull may remove its own just now.
        let Ok(metadata) = entry.metadata() else { continue };
        if !is_ours || !metadata.is_dir() || metadata.uid() != own {
            continue;
        }
        // One that was made just now may not be locked yet.
        let is_old = metadata.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > PATIENCE));
        if let Ok(directory) = File::open(entry.path())
            && is_old
            && rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
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
    fn begin(reference: &Reference, missing: &[Descriptor], known: usize, quiet: bool) -> Self {
        if quiet {
            return Self(None);
        }
        let bytes = missing.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        let missing = missing.len();
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
    use super::{Image, is_known_by, reference};

    #[test]
    fn an_image_is_known_by_its_name_and_by_its_digest() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let image = Image {
            reference: "docker.io/library/redis:7".into(),
            digest: digest.clone(),
            ..Image::default()
        };
        for (typed, known) in [
            ("redis:7".to_owned(), true),
            (format!("redis@{digest}"), true),
            ("redis".to_owned(), false),
            (format!("other/redis@{digest}"), false),
            (format!("quay.io/library/redis@{digest}"), false),
            (format!("redis@{}", digest.replace("ab", "cd")), false),
        ] {
            assert_eq!(is_known_by(&image, &reference(&typed).unwrap()), known, "{typed}");
        }
    }

    #[test]
    fn references_are_whole_as_docker_has_them() {
        for (typed, whole) in [
            ("redis", "docker.io/library/redis:latest"),
            ("redis:7", "docker.io/library/redis:7"),
            ("user/app", "docker.io/user/app:latest"),
            ("localhost/app", "localhost/app:latest"),
            ("docker://quay.io/x/y", "quay.io/x/y:latest"),
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
