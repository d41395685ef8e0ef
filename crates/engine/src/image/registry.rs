//! Layers from registries: what a node lacks of the image of a service that comes to it, as far as its operator allows that.
//!
//! Another node names the image, so nothing is contacted but registries that are allowed by name. skopeo fetches, by this
//! machine's policy of signatures, mirrors, certificates and credentials, as root without any capability, into a directory
//! in the store's `tmp`. It is asked for the image by its digest, and a file of the right length stands for each layer that
//! is here: skopeo takes a blob that is in the directory for the blob.
//!
//! Of what has come only the layers that are lacking are taken, and each is verified as one from another node is. Whatever
//! fails, those that are whole are taken all the same.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use oci_spec::distribution::Reference;
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior};

use super::{Digest, ImageError, Store};

/// How long skopeo may bring nothing: a registry without a route answers with silence.
const SILENCE: Duration = Duration::from_secs(20);
/// How long it may take in all: the source waits, and has the layers.
const LONGEST: Duration = Duration::from_secs(600);
/// How often it is looked at what has come.
const TICK: Duration = Duration::from_millis(200);
/// What comes beside the layers, bytes: a manifest and a configuration, and what filesystems round up.
const DOCUMENTS: u64 = 16 << 20;
/// Largest configuration of an image, bytes.
const DOCUMENT: u64 = 4 << 20;
/// As much as is kept of what skopeo says, bytes.
const MAX_SAID: usize = 4 << 10;
/// How many layers are unpacked at once.
const AT_ONCE: usize = 3;
/// Root without capabilities can read what root owns, as credentials, and nothing brings them back. The kernel kills it when
/// the thread has ended that started it ([`start`]).
const UNPRIVILEGED: [&str; 7] =
    ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--pdeathsig", "KILL", "--"];

/// Why a registry did not give all that it was asked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FetchError {
    #[error("skopeo cannot be run: {0}; install the packages skopeo and util-linux")]
    Program(io::Error),
    #[error("skopeo says: {0}")]
    Refused(String),
    #[error("nothing came for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("it takes longer than {} s", .0.as_secs())]
    Slow(Duration),
    #[error("more than the {0} bytes came that the layers have")]
    Large(u64),
    #[error("cannot make a directory for what comes: {0}")]
    Scratch(io::Error),
    #[error("{MOST_RUNNING} other images are being fetched")]
    Busy,
    #[error("it has an image with the configuration {0} there, which is not that of the container")]
    Another(Digest),
    #[error("the engine cannot fetch it")]
    Engine(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("layer {digest} is not what it has to be: {cause}")]
    Layer { digest: Digest, cause: ImageError },
}

/// A name that no registry of an allowed one can have.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} does not name a registry; write its host as in references, such as registry.example.org or 192.0.2.1:5000"
)]
pub struct NotARegistry(String);

/// Images that are fetched at once.
const MOST_RUNNING: usize = 2;

/// How long skopeo's last words may take when it has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The registries that this node may ask for layers.
#[derive(Debug, Clone)]
pub struct Registries {
    allowed: BTreeSet<String>,
    /// What skopeo is started by and what it is, word by word.
    program: Vec<PathBuf>,
    silence: Duration,
    longest: Duration,
    /// Who asks for more has its layers from the source.
    running: Arc<Semaphore>,
}

/// An image of an allowed registry, by its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinned(String);

impl std::fmt::Display for Pinned {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The digest by which the registry of an image's name has it, among what an engine knows it by (`NAME@DIGEST`): another one may
/// have it under another digest.
pub(crate) fn digest_at_registry(name: &str, known: &[String]) -> Option<String> {
    let name = name.parse::<Reference>().ok()?;
    let is_of =
        |other: &Reference| other.registry() == name.registry() && other.repository() == name.repository();
    let of_name = known.iter().filter_map(|other| other.parse::<Reference>().ok()).find(is_of)?;
    of_name.digest().map(str::to_owned)
}

/// What a registry gave.
#[derive(Debug)]
pub struct Fetched {
    /// The layers that are in the store now.
    pub layers: Vec<Digest>,
    /// Why others are not.
    pub failed: Option<FetchError>,
}

impl Default for Registries {
    /// None.
    fn default() -> Self {
        let program = UNPRIVILEGED.into_iter().chain(["skopeo"]).map(PathBuf::from).collect();
        let running = Arc::new(Semaphore::new(MOST_RUNNING));
        Self { allowed: BTreeSet::new(), program, silence: SILENCE, longest: LONGEST, running }
    }
}

impl Registries {
    /// These, by the hosts that references begin with.
    ///
    /// # Errors
    /// If one of them is no such host.
    pub fn these(hosts: impl IntoIterator<Item = String>) -> Result<Self, NotARegistry> {
        let mut allowed = BTreeSet::new();
        for host in hosts {
            // Else it would be the first part of a name at Docker's.
            let named = format!("{host}/image").parse::<Reference>();
            if !named.is_ok_and(|named| named.registry() == host) {
                return Err(NotARegistry(host));
            }
            allowed.insert(host);
        }
        Ok(Self { allowed, ..Self::default() })
    }

    /// The image that another node names by its reference and the digest of its manifest, or of an index of several, if its
    /// registry is allowed.
    #[must_use]
    pub fn allowed(&self, reference: &str, digest: &Digest) -> Option<Pinned> {
        let named = reference.parse::<Reference>().ok()?;
        let pinned = named.clone_with_digest(digest.to_string());
        self.allowed.contains(pinned.registry()).then(|| Pinned(pinned.to_string()))
    }

    /// The version of what fetches, or why it does not work; `None` where no registry is allowed.
    pub async fn probe(&self) -> Option<io::Result<String>> {
        let (first, others) = self.program.split_first().filter(|_| !self.allowed.is_empty())?;
        let mut command = Command::new(first);
        command.args(others).arg("--version").stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let asking = async {
            let (_stays, skopeo) = start(command).await?;
            skopeo.wait_with_output().await
        };
        Some(match tokio::time::timeout(self.silence, asking).await {
            Ok(Ok(output)) if output.status.success() => Ok(last_words(&output.stdout)),
            Ok(Ok(output)) => Err(io::Error::other(last_words(&output.stderr))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        })
    }

    /// Lets an engine of others fetch an image in its own way, if the registry has by that reference the image with this ID: the
    /// digest of its configuration, or that of the reference. What the engine has begun it ends, whether that is waited for or
    /// not: one that is killed may leave half an image.
    ///
    /// # Errors
    /// The registry does not answer or has another image, the engine cannot, it takes too long, or too many do so already.
    pub async fn by_engine<E: std::error::Error + Send + Sync + 'static>(
        &self,
        image: &Pinned,
        id: &Digest,
        fetching: impl Future<Output = Result<(), E>> + Send + 'static,
    ) -> Result<(), FetchError> {
        let Ok(one_of_few) = Arc::clone(&self.running).try_acquire_owned() else {
            return Err(FetchError::Busy);
        };
        let configuration = self.configuration(image).await?;
        if configuration != *id && !image.0.ends_with(&format!("@{id}")) {
            return Err(FetchError::Another(configuration));
        }
        let fetching = tokio::spawn(async move {
            let _one_of_few = one_of_few;
            fetching.await
        });
        let fetched = tokio::time::timeout(self.longest, fetching).await;
        let fetched = fetched.map_err(|_| FetchError::Slow(self.longest))?;
        let fetched = fetched.map_err(|error| FetchError::Engine(Box::new(error)))?;
        fetched.map_err(|error| FetchError::Engine(Box::new(error)))
    }

    /// The digest of the configuration that an image has for this machine.
    async fn configuration(&self, image: &Pinned) -> Result<Digest, FetchError> {
        let (first, others) =
            self.program.split_first().ok_or_else(|| FetchError::Program(io::ErrorKind::NotFound.into()))?;
        let mut command = Command::new(first);
        command.args(others).args(["inspect", "--raw", "--config", &format!("docker://{image}")]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let asking = async {
            let (_stays, mut skopeo) = start(command).await?;
            let (stdout, stderr) = (skopeo.stdout.take(), skopeo.stderr.take());
            let said = tokio::try_join!(read(stdout, DOCUMENT), read(stderr, MAX_SAID as u64))?;
            Ok::<_, io::Error>((skopeo.wait().await?, said))
        };
        let asked = tokio::time::timeout(self.silence, asking).await;
        let (status, (told, said)) =
            asked.map_err(|_| FetchError::Silent(self.silence))?.map_err(FetchError::Program)?;
        match status.success() {
            true => Ok(Digest::of(&told)),
            false => Err(FetchError::Refused(last_words(&said))),
        }
    }

    /// Fetches layers of an image into the store: those that are `lacking`, with the bytes of their blobs. Those that are
    /// `here` need not come.
    pub async fn fetch(
        &self,
        store: &Arc<Store>,
        image: &Pinned,
        lacking: &[(Digest, u64)],
        here: &[Digest],
    ) -> Fetched {
        let Ok(_one_of_few) = self.running.try_acquire() else {
            return Fetched { layers: Vec::new(), failed: Some(FetchError::Busy) };
        };
        let (scratch, mut failed) = match self.copied(store, image, lacking, here).await {
            Ok((scratch, failed)) => (scratch, failed),
            Err(error) => return Fetched { layers: Vec::new(), failed: Some(error) },
        };
        let blobs = scratch.path().join(BLOBS);
        let taking = lacking.iter().cloned().map(|(digest, bytes)| {
            let (store, blob) = (Arc::clone(store), blobs.join(digest.hex()));
            let taking = tokio::task::spawn_blocking({
                let digest = digest.clone();
                move || take(&store, &blob, &digest, bytes)
            });
            async move { (digest, taking.await.unwrap_or(Ok(false))) }
        });
        let taken: Vec<_> = futures::stream::iter(taking).buffer_unordered(AT_ONCE).collect().await;
        let mut layers = Vec::new();
        for (digest, taken) in taken {
            match taken {
                Ok(true) => layers.push(digest),
                Ok(false) => {}
                Err(cause) => failed = Some(FetchError::Layer { digest, cause }),
            }
        }
        Fetched { layers, failed }
    }

    /// Has skopeo copy the image to a directory; what has come may be a part of it.
    async fn copied(
        &self,
        store: &Store,
        image: &Pinned,
        lacking: &[(Digest, u64)],
        here: &[Digest],
    ) -> Result<(TempDir, Option<FetchError>), FetchError> {
        let scratch = TempDir::with_prefix_in("pull", store.directory().join("tmp"));
        let scratch = scratch.map_err(FetchError::Scratch)?;
        hold_places(store, &scratch.path().join(BLOBS), here).map_err(FetchError::Scratch)?;
        let most = lacking.iter().map(|(_, bytes)| *bytes).fold(DOCUMENTS, u64::saturating_add);
        let (_stays, skopeo) = self.start(image, scratch.path()).await.map_err(FetchError::Program)?;
        let failed = self.watch(skopeo, scratch.path(), most).await.err();
        Ok((scratch, failed))
    }

    async fn start(&self, image: &Pinned, directory: &Path) -> io::Result<(Stays, Child)> {
        let mut layout = std::ffi::OsString::from("oci:");
        layout.push(directory);
        let (first, others) =
            self.program.split_first().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let mut command = Command::new(first);
        command.args(others).args(["copy", "--quiet", "--retry-times", "1"]);
        // They were verified, if the machine's policy wants that; a layout has no place for them. Layers stay as they are.
        command.args(["--remove-signatures", "--dest-oci-accept-uncompressed-layers"]);
        command.arg(format!("docker://{image}")).arg(layout);
        command.current_dir(directory).env("TMPDIR", directory).process_group(0).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        start(command).await
    }

    /// Returns when it has ended; ends it where it brings too much, or nothing.
    async fn watch(&self, mut skopeo: Child, directory: &Path, most: u64) -> Result<(), FetchError> {
        let stderr = skopeo.stderr.take();
        let mut talking = tokio::spawn(async move {
            let mut said = Vec::new();
            let Some(mut stderr) = stderr else { return said };
            let mut piece = [0; 1024];
            // What it says last counts.
            while let Ok(read @ 1..) = stderr.read(&mut piece).await {
                said.extend_from_slice(&piece[..read]);
                said.drain(..said.len().saturating_sub(MAX_SAID));
            }
            said
        });
        let begun = Instant::now();
        let (mut came, mut at) = (0, begun);
        let mut clock = tokio::time::interval(TICK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let failed = loop {
            tokio::select! {
                biased;
                ended = skopeo.wait() => match ended {
                    Ok(status) if status.success() => return Ok(()),
                    Ok(_) => break None,
                    Err(error) => break Some(FetchError::Program(error)),
                },
                _ = clock.tick() => {
                    let now = bytes_below(directory);
                    if now != came {
                        (came, at) = (now, Instant::now());
                    }
                    if came > most {
                        break Some(FetchError::Large(most));
                    } else if at.elapsed() > self.silence {
                        break Some(FetchError::Silent(self.silence));
                    } else if begun.elapsed() > self.longest {
                        break Some(FetchError::Slow(self.longest));
                    }
                }
            }
        };
        match failed {
            None => {
                // What skopeo has begun may still have its standard error.
                let said = tokio::time::timeout(LAST_WORDS, &mut talking).await;
                talking.abort();
                Err(FetchError::Refused(last_words(&said.ok().and_then(Result::ok).unwrap_or_default())))
            }
            Some(failed) => {
                // Nothing of it writes any more when what has come is looked at.
                skopeo.kill().await.map_err(FetchError::Program)?;
                talking.abort();
                Err(failed)
            }
        }
    }
}

/// As long as this is there, so is the thread that has started a program.
pub(super) struct Stays {
    _until: std::sync::mpsc::Sender<()>,
}

/// Starts a program on a thread of its own, which ends with what is returned beside it, or with this process. A program that
/// has asked for that (PR_SET_PDEATHSIG) ends then. Of tokio's threads any may end before.
pub(super) async fn start(mut command: Command) -> io::Result<(Stays, Child)> {
    let runtime = tokio::runtime::Handle::current();
    let (until, ended) = std::sync::mpsc::channel();
    let (started, starting) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("fetches".into()).spawn(move || {
        let child = {
            let _in_runtime = runtime.enter();
            command.spawn()
        };
        // Nobody may wait for it any more; then it has ended with this.
        if started.send(child).is_ok() {
            // An error: the other end has gone.
            let _ = ended.recv();
        }
    })?;
    let child = starting.await.map_err(|_| io::Error::other("the thread that starts it has ended"))?;
    Ok((Stays { _until: until }, child?))
}

/// What a program writes, or its beginning.
pub(super) async fn read(from: Option<impl AsyncReadExt + Unpin>, most: u64) -> io::Result<Vec<u8>> {
    let mut said = Vec::new();
    if let Some(from) = from {
        from.take(most).read_to_end(&mut said).await?;
    }
    Ok(said)
}

/// Where a layout has its blobs.
const BLOBS: &str = "blobs/sha256";

/// Makes an empty file of the right length for each layer that need not come.
fn hold_places(store: &Store, blobs: &Path, here: &[Digest]) -> io::Result<()> {
    fs::create_dir_all(blobs)?;
    for digest in here {
        // One whose blob has gone comes again, and is not taken.
        if let Ok((_, bytes)) = store.open_blob(digest) {
            File::create(blobs.join(digest.hex()))?.set_len(bytes)?;
        }
    }
    Ok(())
}

/// Takes a layer into the store, if its blob has come.
fn take(store: &Store, blob: &Path, digest: &Digest, bytes: u64) -> Result<bool, ImageError> {
    let fault = |error| store.fault(&format!("take layer {digest} from its registry"), error);
    // What another program has made need not be a file.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let mut file = match File::options().read(true).custom_flags(flags).open(blob) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(fault(error)),
    };
    if !file.metadata().map_err(fault)?.is_file() {
        return Err(fault(io::Error::from(io::ErrorKind::InvalidData)));
    }
    // Nothing removes it before the move that wants it is told.
    let _hold = store.hold();
    let mut writer = store.blob_writer(digest, bytes)?;
    io::copy(&mut file, &mut writer).map_err(fault)?;
    writer.finish()?;
    // Not three times on the disk while it is unpacked.
    fs::remove_file(blob).map_err(fault)?;
    store.unpack(digest)?;
    Ok(true)
}

/// What the files of a layout take on the disk, without what a filesystem has put by for their ends: skopeo makes them in the directory, and moves them to their places.
fn bytes_below(directory: &Path) -> u64 {
    let files = [directory.to_owned(), directory.join(BLOBS)].into_iter().flat_map(fs::read_dir);
    // A file may just be given its name.
    files
        .flatten()
        .flatten()
        .filter_map(|file| file.metadata().ok())
        .map(|file| (file.blocks() * 512).min(file.len()))
        .sum()
}

/// The message of the last line of skopeo's log, `time="…" level=fatal msg="…"`, without what a terminal would not show as
/// text: a registry has chosen some of its words.
fn last_words(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
    let message = line.split_once("msg=").map_or(line, |(_, message)| message.trim_matches('"'));
    message.chars().filter(|c| c.is_ascii() && !c.is_ascii_control()).take(500).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const IMAGE: &str = "registry.example.org/shop/web:7";

    /// Registries with a program in place of skopeo: a script that finds the layout's directory in `$D`.
    fn registries(scratch: &Path, script: &str) -> Registries {
        let program = scratch.join("skopeo");
        let text =
            format!("#!/bin/sh\nfor word; do case $word in oci:*) D=${{word#oci:}};; esac; done\n{script}\n");
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let registries = Registries::these(["registry.example.org".to_owned()]).unwrap();
        // By its shell: a child of another test may still have it open for writing.
        let program = vec!["/bin/sh".into(), program];
        Registries { program, silence: Duration::from_secs(8), ..registries }
    }

    fn pinned(registries: &Registries) -> Pinned {
        registries.allowed(IMAGE, &Digest::of(b"manifest")).unwrap()
    }

    /// A layer with one file.
    fn layer(content: &str) -> (Digest, Vec<u8>) {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, "file", content.as_bytes()).unwrap();
        let bytes = archive.into_inner().unwrap();
        (Digest::of(&bytes), bytes)
    }

    #[test]
    fn an_image_has_the_digest_of_the_registry_that_its_name_means() {
        let (own, other) = (Digest::of(b"own"), Digest::of(b"other"));
        let known = |names: &[&str]| -> Vec<String> {
            let digests = [&other, &own];
            names.iter().zip(digests).map(|(name, digest)| format!("{name}@{digest}")).collect()
        };
        let found = |name: &str, names: &[&str]| digest_at_registry(name, &known(names));
        let is_own = Some(own.to_string());
        assert_eq!(
            found("registry.example.org/web:7", &["registry.example.org/shop", "registry.example.org/web"]),
            is_own
        );
        // As Docker shortens names.
        assert_eq!(found("docker.io/library/redis:7", &["quay.io/library/redis", "redis"]), is_own);
        assert_eq!(found("redis:7", &["quay.io/redis", "docker.io/library/redis"]), is_own);
        for name in ["localhost/web:7", "", &other.to_string()] {
            assert_eq!(
                found(name, &["registry.example.org/web", "registry.example.org/web"]),
                None,
                "{name}"
            );
        }
    }

    /// A registry whose image has this configuration, asked for an image with an ID.
    async fn asked(
        configuration: &str,
        id: &Digest,
        fetched: Result<(), io::Error>,
    ) -> Result<(), FetchError> {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let registries = registries(scratch.path(), &format!("printf '%s' '{configuration}'"));
        registries.by_engine(&pinned(&registries), id, async { fetched }).await
    }

    #[tokio::test]
    async fn an_engine_fetches_only_what_the_registry_says_is_the_image() {
        let own = Digest::of(b"{}");
        asked("{}", &own, Ok(())).await.unwrap();
        // Where the ID is that of the reference.
        asked("{}", &Digest::of(b"manifest"), Ok(())).await.unwrap();
        let other = asked("{\"another\":1}", &own, Err(io::Error::other("it was asked"))).await;
        assert!(matches!(other, Err(FetchError::Another(_))), "{other:?}");
        let failed = asked("{}", &own, Err(io::Error::other("no room"))).await;
        assert!(matches!(failed, Err(FetchError::Engine(_))), "{failed:?}");
    }

    #[tokio::test]
    async fn what_an_engine_has_begun_to_fetch_it_ends_and_few_do_so_at_once() {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let registries = registries(scratch.path(), "printf '{}'");
        let (image, own) = (pinned(&registries), Digest::of(b"{}"));
        let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let (go_on, wait) = tokio::sync::watch::channel(());
        for _ in 0..MOST_RUNNING {
            let (ended, mut wait) = (ended.clone(), wait.clone());
            let (begun, has_begun) = tokio::sync::oneshot::channel();
            let fetching = async move {
                begun.send(()).unwrap();
                wait.changed().await.unwrap();
                ended.send(()).unwrap();
                Ok::<_, io::Error>(())
            };
            // Who asks for it gives up.
            tokio::select! {
                _ = registries.by_engine(&image, &own, fetching) => panic!("it waits"),
                begun = has_begun => begun.unwrap(),
            }
        }
        let more = registries.by_engine(&image, &own, async { Ok::<_, io::Error>(()) }).await;
        assert!(matches!(more, Err(FetchError::Busy)), "{more:?}");
        go_on.send(()).unwrap();
        for _ in 0..MOST_RUNNING {
            ends.recv().await.unwrap();
        }
    }

    struct Bench {
        scratch: TempDir,
        store: Arc<Store>,
    }

    impl Bench {
        fn new() -> Self {
            let scratch = TempDir::new_in("/var/tmp").unwrap();
            let store = Arc::new(Store::open(&scratch.path().join("images")).unwrap());
            Self { scratch, store }
        }

        /// Puts a blob where the script finds it, and says how it copies that.
        fn offers(&self, name: &str, digest: &Digest, bytes: &[u8]) -> String {
            let path = self.scratch.path().join(name);
            fs::write(&path, bytes).unwrap();
            format!("cp {} $D/{BLOBS}/{}", path.display(), digest.hex())
        }

        async fn fetch(&self, script: &str, lacking: &[(Digest, u64)], here: &[Digest]) -> Fetched {
            let registries = registries(self.scratch.path(), script);
            let fetched = registries.fetch(&self.store, &pinned(&registries), lacking, here).await;
            let left = fs::read_dir(self.store.directory().join("tmp")).unwrap().count();
            assert_eq!(left, 0, "nothing half-made is left: {fetched:?}");
            fetched
        }
    }

    #[test]
    fn only_registries_that_are_named_are_asked_and_by_digest() {
        let digest = Digest::of(b"manifest");
        let asked = |hosts: &[&str], reference: &str| {
            let registries = Registries::these(hosts.iter().map(|&host| host.to_owned())).unwrap();
            registries.allowed(reference, &digest).map(|pinned| pinned.to_string())
        };
        let hosts = ["registry.example.org", "192.0.2.1:5000", "docker.io"];
        assert_eq!(asked(&hosts, IMAGE).unwrap(), format!("registry.example.org/shop/web@{digest}"));
        assert_eq!(asked(&hosts, "redis").unwrap(), format!("docker.io/library/redis@{digest}"));
        assert_eq!(asked(&hosts, "192.0.2.1:5000/web").unwrap(), format!("192.0.2.1:5000/web@{digest}"));
        for other in [
            "registry.example.org:5000/shop/web",
            "192.0.2.1/web",
            "evil.example.org/registry.example.org/web",
            "registry.example.org@evil.example.org/web",
            "registry.example.org.evil.example/web",
            "/srv/images/web.tar",
            "-x",
            "",
        ] {
            assert_eq!(asked(&hosts, other), None, "{other}");
        }
        assert_eq!(asked(&[], IMAGE), None);
        for wrong in ["", "registry", "a b", "http://registry.example.org", "registry.example.org/shop", "-x"]
        {
            let refused = Registries::these([wrong.to_owned()]).unwrap_err().to_string();
            assert!(refused.contains("does not name a registry"), "{wrong}: {refused}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn layers_come_and_those_that_are_here_need_not() {
        let bench = Bench::new();
        let ((here, here_bytes), (new, new_bytes)) = (layer("here"), layer("new"));
        let mut writer = bench.store.blob_writer(&here, here_bytes.len() as u64).unwrap();
        writer.write_all(&here_bytes).unwrap();
        writer.finish().unwrap();
        let copies = bench.offers("new", &new, &new_bytes);
        // As skopeo does, it looks for what is in the layout, and brings a configuration that nobody wants.
        let script = format!(
            "test $(stat -c %s $D/{BLOBS}/{}) = {} || exit 7\necho config > $D/{BLOBS}/00\n{copies}",
            here.hex(),
            here_bytes.len(),
        );
        let lacking = [(new.clone(), new_bytes.len() as u64)];
        let fetched = bench.fetch(&script, &lacking, &[here]).await;
        assert!(fetched.failed.is_none(), "{fetched:?}");
        assert_eq!(fetched.layers, std::slice::from_ref(&new));
        assert_eq!(fs::read_to_string(bench.store.layer_path(&new).join("file")).unwrap(), "new");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_whole_counts_and_all_else_is_left_to_the_source() {
        let bench = Bench::new();
        let ((good, good_bytes), (bad, bad_bytes)) = (layer("good"), layer("bad"));
        let lacking = [(good.clone(), good_bytes.len() as u64), (bad.clone(), bad_bytes.len() as u64)];
        let copies = bench.offers("good", &good, &good_bytes);
        // One is another than it is called, of the same length, and longer.
        for (name, bytes) in [("same", vec![7; bad_bytes.len()]), ("longer", vec![7; bad_bytes.len() + 1])] {
            let lies = bench.offers(name, &bad, &bytes);
            let fetched = bench.fetch(&format!("{copies}\n{lies}"), &lacking, &[]).await;
            assert_eq!(fetched.layers, std::slice::from_ref(&good));
            assert!(matches!(fetched.failed, Some(FetchError::Layer { .. })), "{fetched:?}");
            assert!(!bench.store.has_blob(&bad) && !bench.store.has_layer(&bad));
        }
        // A link out of the directory is not followed.
        let link = format!("{copies}\nln -s /etc/passwd $D/{BLOBS}/{}", bad.hex());
        let fetched = bench.fetch(&link, &lacking, &[]).await;
        assert!(fetched.layers == [good.clone()] && fetched.failed.is_some(), "{fetched:?}");
        // It fails when one has come, or brings nothing, or does not end.
        let says =
            format!("{copies}\necho 'time=\"x\" level=fatal msg=\"manifest \x1b[2Junknown\"' >&2; exit 1");
        let fetched = bench.fetch(&says, &lacking, &[]).await;
        assert_eq!(fetched.layers, std::slice::from_ref(&good));
        assert_eq!(fetched.failed.unwrap().to_string(), "skopeo says: manifest [2Junknown");
        let fetched = bench.fetch(&format!("{copies}\nexec sleep 1000"), &lacking, &[]).await;
        assert!(matches!(fetched.failed, Some(FetchError::Silent(_))), "{fetched:?}");
        assert_eq!(fetched.layers, [good]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_registry_that_sends_more_than_the_layers_have_is_left() {
        let bench = Bench::new();
        let (digest, bytes) = layer("new");
        let lacking = [(digest, bytes.len() as u64)];
        let fetched = bench.fetch("exec cat /dev/zero > $D/endless", &lacking, &[]).await;
        assert!(matches!(fetched.failed, Some(FetchError::Large(_))), "{fetched:?}");
        assert_eq!(fetched.layers, []);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn without_skopeo_all_comes_from_the_source() {
        let bench = Bench::new();
        let mut registries = registries(bench.scratch.path(), "");
        assert!(registries.probe().await.unwrap().is_ok());
        assert!(Registries::default().probe().await.is_none(), "it is of no use");
        registries.program = vec!["/nonexistent/skopeo".into()];
        assert!(registries.probe().await.unwrap().is_err());
        let (digest, bytes) = layer("new");
        let lacking = [(digest, bytes.len() as u64)];
        let fetched = registries.fetch(&bench.store, &pinned(&registries), &lacking, &[]).await;
        assert!(matches!(fetched.failed, Some(FetchError::Program(_))), "{fetched:?}");
    }
}
