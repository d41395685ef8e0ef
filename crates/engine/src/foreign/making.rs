//! An engine makes a container for godwit: what it is to be, and how it comes into godwit's care before it runs.
//!
//! ```text
//! a mark that all that follows is to go  ──▶ the engine makes it ──▶ its ID is noted ──▶ the engine starts it ──▶ it is found
//!                                             labelled with a token                      in a network that is there already
//! ```
//! Until it is a service, whatever fails and whoever ends meanwhile, what was made is removed: by its ID, and by the token where
//! godwit has not come to know the ID.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use godwit_names::ServiceName;

use super::record::Record;
use super::{Beside, END_LOOK, END_SEEN, Found, Keeps, UUID};
use crate::confinement::Ulimit;
use crate::container::{ContainerConfig, EngineError, Keeper, Kept, io_error};

/// How long an engine may take to get an image, from a registry or from godwit.
pub(crate) const PULL: Duration = Duration::from_secs(3600);

/// How long an engine may take to make a container on a busy disk.
pub(crate) const CREATION: Duration = Duration::from_secs(600);

/// Lines of what a container has written that an error tells.
pub(crate) const LAST_LINES: &str = "5";

/// An image for a new container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedImage {
    /// An OCI archive or layout directory.
    Archive(PathBuf),
    /// One that the engine has by this name, or knows where to get.
    Named(String),
}

/// A volume of the engine's, which makes it if there is none of that name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedVolume {
    /// Its name in the engine.
    pub name: String,
    /// Where it is mounted.
    pub target: String,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// A file or directory of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedBind {
    /// Its path on the node.
    pub source: String,
    /// Where it is mounted.
    pub target: String,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// A tmpfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedTmpfs {
    /// Where it is mounted.
    pub target: String,
    /// Limit in bytes; 0 for the kernel's.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl WantedTmpfs {
    /// Its options, as engines write them.
    pub(crate) fn options(&self) -> String {
        let mode = if self.read_only { "ro" } else { "rw" };
        match self.size_bytes {
            0 => mode.to_owned(),
            bytes => format!("{mode},size={bytes}"),
        }
    }
}

/// How an engine checks the health of a container. What is not said is as the image has it, or else the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WantedHealth {
    /// Not at all.
    pub none: bool,
    /// A line for the image's shell; empty for the image's command.
    pub command: String,
    /// Between two checks.
    pub interval: Option<Duration>,
    /// Until one has failed.
    pub timeout: Option<Duration>,
    /// After a start, until failures count.
    pub start_period: Option<Duration>,
    /// Failures in a row after which the container is unhealthy.
    pub retries: Option<u64>,
}

/// When an engine starts a container again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WantedRestart {
    /// Never.
    #[default]
    No,
    /// When it failed, at most so many times; 0 for no limit.
    OnFailure(u32),
    /// Whenever it ended by itself.
    Always,
}

/// A container that an engine is to make. What is not said is as the engine has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Its image, as the engine knows it.
    pub image: String,
    /// Words in place of the image's own command.
    pub command: Vec<String>,
    /// Words in place of the image's entrypoint.
    pub entrypoint: Option<Vec<String>>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Who runs it; empty for the image's.
    pub user: String,
    /// Where it starts; empty for the image's.
    pub workdir: String,
    /// Host name inside.
    pub hostname: String,
    /// Labels, `NAME=VALUE`.
    pub labels: Vec<String>,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// Most processes and threads; 0 for no limit.
    pub pids_limit: Option<u64>,
    /// Capabilities beside those that the engine gives.
    pub cap_add: Vec<String>,
    /// Capabilities of those that it does not get.
    pub cap_drop: Vec<String>,
    /// A seccomp profile as JSON, or `unconfined`; empty for the engine's.
    pub seccomp: String,
    /// Whether set-user-id programs and capabilities of files are without effect.
    pub no_new_privileges: bool,
    /// Whether the root filesystem refuses writes.
    pub read_only: bool,
    /// Limits of each process.
    pub ulimits: Vec<Ulimit>,
    /// When it is started again.
    pub restart: WantedRestart,
    /// How its health is checked; nothing for as the image says.
    pub health: Option<WantedHealth>,
    /// Volumes.
    pub volumes: Vec<WantedVolume>,
    /// Files and directories of the node.
    pub binds: Vec<WantedBind>,
    /// Filesystems in memory.
    pub tmpfs: Vec<WantedTmpfs>,
}

/// A limit as engines write it.
pub(crate) fn limit(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(-1)
}

/// How engines make containers for godwit.
#[async_trait]
pub trait Makes: Send + Sync {
    /// What stands for a container before there is one.
    ///
    /// # Errors
    /// When there are no random numbers.
    fn promised(&self, name: &ServiceName) -> Result<Kept, EngineError>;
    /// Has the engine have an image, which it loads or fetches if it must; what it knows it by.
    async fn image(&self, name: &ServiceName, image: &WantedImage) -> Result<String, EngineError>;
    /// Has the engine make the container that was promised, which does not run yet; its ID. From here on [`Engine::delete`]
    /// removes all that was made, until [`Adopts::own`].
    ///
    /// [`Engine::delete`]: crate::Engine::delete
    /// [`Adopts::own`]: super::Adopts::own
    async fn make(&self, config: &ContainerConfig, wanted: &Wanted) -> Result<String, EngineError>;
    /// Has the engine start it, and finds it as [`Adopts::find`](super::Adopts::find) does.
    async fn begin(&self, config: &ContainerConfig) -> Result<Found, EngineError>;
}

#[async_trait]
impl<K: Keeps + Clone + 'static> Makes for K {
    fn promised(&self, name: &ServiceName) -> Result<Kept, EngineError> {
        let number = || {
            let text = fs::read_to_string(UUID);
            text.map_err(|source| io_error(name, format!("read {UUID}"), source))
        };
        let digits = [number()?, number()?].concat();
        let id = digits.chars().filter(char::is_ascii_hexdigit).collect();
        Ok(Kept { keeper: self.care().keeper, id, definition: serde_json::Value::Null })
    }

    async fn image(&self, name: &ServiceName, image: &WantedImage) -> Result<String, EngineError> {
        self.have_image(name, image).await
    }

    async fn make(&self, config: &ContainerConfig, wanted: &Wanted) -> Result<String, EngineError> {
        let promised = self.care().kept(config)?.id.clone();
        let volumes: Vec<_> = wanted.volumes.iter().map(|volume| volume.name.clone()).collect();
        admit(self, config, &volumes, 0).await?;
        let record = Record {
            of: promised.clone(),
            made_as: promised.clone(),
            token: promised.clone(),
            ours: true,
            making: true,
            ..Record::default()
        };
        // First, so that what is made is removed.
        record.begin(config)?;
        let id = self.make_it(config, wanted, &promised).await?;
        Record::change(config, |record| (record.of, record.id) = (id.clone(), id.clone()))?;
        Ok(id)
    }

    async fn begin(&self, config: &ContainerConfig) -> Result<Found, EngineError> {
        let Record { id, .. } = Record::of(config)?;
        // Somebody may have begun to use one of them meanwhile, and two programs would write to it at once.
        let volumes = self.volumes_of(&config.name, &id).await?;
        let volumes: Vec<_> = volumes.into_iter().map(|volume| volume.name).collect();
        admit(self, config, &volumes, 1).await?;
        self.start_it(config, &id).await?;
        let beside = Beside { namespace: Some(&config.network_namespace), stay: None };
        let found = self.find_one(&config.name, &id, false, beside).await;
        if found.is_ok() {
            return found;
        }
        let begin = Instant::now();
        loop {
            match self.look(&config.name, &id).await {
                // It says why in its log, which goes with it.
                Ok(Some(look)) if !look.running => {
                    let words = self.last_words(config, &id).await.unwrap_or_default();
                    let why = ended(self.care().keeper, look.exit_code, &words);
                    return Err(self.care().failed(&config.name, "keep", why));
                }
                // Its engine learns a moment later that it has ended.
                Ok(Some(look)) if has_ended(look.pid) && begin.elapsed() < END_SEEN => {
                    tokio::time::sleep(END_LOOK).await;
                }
                _ => return found,
            }
        }
    }
}

/// Whether a process is gone or ends: it has given its namespaces back then.
fn has_ended(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/ns/mnt")).is_err()
}

/// Refuses a container that has not run with these volumes, each of which as many containers may have.
async fn admit(
    keeps: &impl Keeps,
    config: &ContainerConfig,
    volumes: &[String],
    users: usize,
) -> Result<(), EngineError> {
    let objections = keeps.speaks_against_new(&config.name, volumes, users).await?;
    match objections.is_empty() {
        true => Ok(()),
        false => Err(keeps.care().failed(&config.name, "make", objections.join("; "))),
    }
}

/// What a user is told whose container has ended before it was a service.
fn ended(keeper: Keeper, code: i32, words: &str) -> String {
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let wrote = match words.is_empty() {
        true => "it wrote nothing".to_owned(),
        false => format!("its last words: {words}"),
    };
    format!(
        "its command has ended at once, with exit code {code}, and {} has nothing of it any more; {wrote}",
        keeper.title()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_options_are_as_engines_write_them() {
        assert_eq!((limit(5), limit(u64::MAX)), (5, -1));
        let tmpfs =
            |size_bytes, read_only| WantedTmpfs { target: "/t".into(), size_bytes, read_only }.options();
        assert_eq!((tmpfs(0, false), tmpfs(64, true)), ("rw".into(), "ro,size=64".into()));
        let told = ended(Keeper::Podman, 1, "a\n  b\n");
        assert!(told.contains("code 1") && told.ends_with("last words: a b"), "{told}");
    }
}
