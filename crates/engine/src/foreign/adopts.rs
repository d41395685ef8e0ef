//! Containers come into godwit's care, [`Adopts`]: what is known of one, and what its engine is still to be told.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use godwit_names::ServiceName;

use super::keeps::{Beside, Keeps, Look};
use super::limits::Changes;
use super::record::{Record, Volume};
use super::renewed::Renewed;
use super::state;
use crate::confinement::User;
use crate::container::{ContainerConfig, ContainerState, EngineError, Keeper, Kept, Mount, io_error};
use crate::resolver;

/// The pauses before an engine is told again how to restart a container.
const POLICY_PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// A container of another engine that godwit is to move.
#[derive(Debug, Clone)]
pub struct Found {
    /// What makes it that engine's.
    pub kept: Kept,
    /// Its name there.
    pub name: String,
    /// Name of its image.
    pub image: String,
    /// ID of its image, `sha256:…`.
    pub image_id: String,
    /// The digest by which the registry of that name has it; none where the engine knows of no registry.
    pub image_digest: Option<String>,
    /// Its main process.
    pub pid: u32,
    /// Command with arguments.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Host name inside.
    pub hostname: String,
    /// Who runs it.
    pub user: User,
    /// Working directory inside.
    pub workdir: PathBuf,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// What it has of the node. Nobody has said what becomes of it in a move.
    pub mounts: Vec<Mount>,
    /// The engine's networks that it is on, and what it takes to put it on each again.
    pub networks: Vec<(String, String)>,
    /// Names by which others on them find it, beside its own.
    pub aliases: Vec<String>,
    /// Ports of the node that the engine has lead into it over them.
    pub ports: Vec<Port>,
}

/// A port of the node that leads into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The only address of the node that it is on; empty for all.
    pub address: String,
    /// That of the node.
    pub node: u16,
    /// That of the container.
    pub container: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
}

/// How containers come into godwit's care.
#[async_trait]
pub trait Adopts: Send + Sync {
    /// Finds a container by name or ID that runs and that godwit can move. Where it is on networks of its engine's, it must be
    /// one that leaves them. Volumes at the places `stay` do not go with it.
    ///
    /// # Errors
    /// The engine has no such container, it does not run, or something speaks against moving it: all that does.
    async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        stay: &BTreeSet<PathBuf>,
    ) -> Result<Found, EngineError>;
    /// The ID of a container, whether it runs or not; nothing where the engine has none of this name or ID.
    async fn id_of(&self, name: &ServiceName, container: &str) -> Result<Option<String>, EngineError>;
    /// Notes what this node has to know of a container to move it. It stays what it is, whatever becomes of a service that is
    /// being made of it, until [`Adopts::own`].
    async fn take(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError>;
    /// Takes a container off networks of its engine's: their interfaces go, and the ports that lead into it over them. It is
    /// put back on them when it is removed from godwit's care before [`Adopts::own`].
    async fn leave_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError>;
    /// Has a container that runs ask the DNS server of its network, if it has one. Where its user has named others, it keeps those.
    async fn tell_names(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// What an earlier life of godwit has noted of a container, which it has forgotten, is no reason to remove it.
    fn disown(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// A container is this node's, and is removed with its service.
    fn settle(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// The same, and its engine is told how to start and restart it, where it does not know yet.
    fn own(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// Has the engine change limits and restart policy; what it makes the container from elsewhere, from here on.
    ///
    /// # Errors
    /// The engine cannot change one of them, and has changed none.
    async fn change(
        &self,
        config: &ContainerConfig,
        changes: &Changes,
    ) -> Result<serde_json::Value, EngineError>;
    /// Has the engine give a container the limits and the policy of its definition again, after a change that does not count.
    /// A limit that the definition has not stays.
    async fn change_back(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// A container as its engine has it now: users may have renamed it there, or changed its limits and policy.
    ///
    /// # Errors
    /// It was given something there that does not move.
    async fn renewed(&self, config: &ContainerConfig) -> Result<Renewed, EngineError>;
    /// The ID of a container in this node's engine; nothing where it is not here.
    fn id_here(&self, config: &ContainerConfig) -> Result<Option<String>, EngineError>;
}

/// What a user is told whose container is on its engine's networks.
#[must_use]
pub fn on_networks(keeper: Keeper, networks: &[(String, String)]) -> String {
    let names: Vec<_> = networks.iter().map(|(name, _)| name.as_str()).collect();
    format!(
        "it is on {}'s network {}, whose addresses do not move; with --leave-networks it gets an address of godwit's in their place, and keeps its names; connections that are open end",
        keeper.title(),
        names.join(", ")
    )
}

/// Notes the life that a container has now.
async fn note(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
    look: &Look,
) -> Result<(), EngineError> {
    let care = keeps.care();
    let life = match look.running {
        true => Some(care.life(config, (look.pid, look.reader), look.merged.clone())?),
        false => None,
    };
    let of = care.kept(config)?.id.clone();
    let mut volumes = keeps.volumes_of(&config.name, &look.id).await?;
    for file in keeps.inside(config)?.files {
        // The engine does not know that the container has it.
        match keeps.place_of_volume(&config.name, &file.volume).await? {
            Some(place) => volumes.push(Volume { name: file.volume, files: place.path, anonymous: false }),
            None => {
                tracing::warn!(container = %config.name, volume = file.volume, "the volume with a file of it is not there any more");
            }
        }
    }
    let storage = keeps.storage_of(&config.name).await?;
    let begin = || Record { of, id: look.id.clone(), ..Record::default() };
    let record = Record::change_or_begin(config, begin, |record| {
        (record.life, record.volumes, record.storage) = (life, volumes, Some(storage));
        // Not every engine tells that of one that does not run.
        if !look.upper.as_os_str().is_empty() {
            record.upper.clone_from(&look.upper);
        }
        (record.import, record.waiting, record.landing) = (None, None, None);
        // What runs here is here for good.
        record.settled = true;
    })?;
    forget_files(config, &record);
    Ok(())
}

/// Removes what an engine had made where files have come. Nobody waits for it; what is not removed goes with the container.
fn forget_files(config: &ContainerConfig, record: &Record) {
    let Some(left) = record.left.clone() else { return };
    let config = config.clone();
    tokio::task::spawn_blocking(move || {
        let forget = |record: &mut Record| record.left = record.left.take().filter(|other| *other != left);
        let forgotten = match fs::remove_dir_all(&left) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.to_string()),
            _ => Record::change(&config, forget).map(drop).map_err(|error| error.to_string()),
        };
        if let Err(error) = forgotten {
            tracing::debug!(container = %config.name, path = %left.display(), error, "what was left is not removed yet");
        }
    });
}

/// Tells an engine how to restart a container, again until it succeeds. The container's record says so until then.
fn tell_policy<K: Keeps + Clone + 'static>(keeps: &K, config: &ContainerConfig, token: String) {
    let (keeps, config) = (keeps.clone(), config.clone());
    tokio::spawn(async move {
        let [mut pause, longest] = POLICY_PAUSES;
        loop {
            {
                let _alone = keeps.care().telling.lock().await;
                let Ok(Some(record)) = Record::read(&config) else { return };
                // Another arrival tells by itself.
                if !record.owes_policy || !record.settled || record.departed || record.token != token {
                    return;
                }
                let told = match keeps.set_policy(&config, &record.id).await {
                    Ok(()) => Record::change(&config, |record| record.owes_policy = false).map(drop),
                    Err(error) => Err(error),
                };
                let Err(error) = told else { return };
                tracing::warn!(container = %config.name, %error, "its engine does not know yet how to restart it");
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    });
}

#[async_trait]
impl<K: Keeps + Clone + 'static> Adopts for K {
    async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        stay: &BTreeSet<PathBuf>,
    ) -> Result<Found, EngineError> {
        let beside = Beside { namespace: None, stay: Some(stay) };
        self.find_one(name, container, leaves_networks, beside).await
    }

    async fn id_of(&self, name: &ServiceName, container: &str) -> Result<Option<String>, EngineError> {
        Ok(self.look(name, container).await?.map(|look| look.id))
    }

    async fn take(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let kept = self.care().kept(config)?;
        let record = Record::read(config)?;
        let id = record.as_ref().map_or(&kept.id, |record| &record.id);
        let look = self.look(&config.name, id).await?;
        let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        // Its engine may have put it on them again when it started it.
        if record.as_ref().is_some_and(|record| record.leaves) {
            for (network, _) in &look.networks {
                self.leave(config, id, network).await?;
            }
        }
        note(self, config, &look).await?;
        if look.running
            && record.is_some_and(|record| record.limited)
            && let Err(error) = self.hold_limits(config, &look.id).await
        {
            tracing::error!(container = %config.name, %error, "it has other limits than are recorded");
        }
        state(self, config).await
    }

    async fn leave_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError> {
        if networks.is_empty() {
            return Ok(());
        }
        let record = Record::change(config, |record| {
            (record.networks, record.leaves) = (networks.to_vec(), true);
        })?;
        for (network, _) in networks {
            self.leave(config, &record.id, network).await?;
        }
        Ok(())
    }

    async fn tell_names(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let Some(server) = config.name_server else { return Ok(()) };
        let look = self.look(&config.name, &Record::of(config)?.id).await?;
        let Some(file) = look.and_then(|look| look.resolver) else { return Ok(()) };
        resolver::write(&file, server)
            .map_err(|source| io_error(&config.name, format!("write {}", file.display()), source))
    }

    fn disown(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let is_here = Record::read(config)?.is_some_and(|record| record.waiting.is_none());
        if is_here {
            Record::change(config, |record| (record.ours, record.networks) = (false, Vec::new()))?;
        }
        Ok(())
    }

    fn settle(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        match Record::read(config)? {
            Some(record) if !record.ours || !record.settled || record.making => {
                let settled = Record::change(config, |record| {
                    (record.ours, record.settled, record.networks) = (true, true, Vec::new());
                    record.making = false;
                })?;
                forget_files(config, &settled);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn own(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.settle(config)?;
        let Some(record) = Record::read(config)? else { return Ok(()) };
        self.prepare_starts(config, &record)?;
        if record.owes_policy {
            tell_policy(self, config, record.token);
        }
        Ok(())
    }

    async fn change(
        &self,
        config: &ContainerConfig,
        changes: &Changes,
    ) -> Result<serde_json::Value, EngineError> {
        self.change_it(config, &Record::of(config)?.id, changes).await
    }

    async fn change_back(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let id = Record::of(config)?.id;
        self.hold_limits(config, &id).await
    }

    async fn renewed(&self, config: &ContainerConfig) -> Result<Renewed, EngineError> {
        let renewed = self.renew_it(config, &Record::of(config)?.id).await?;
        renewed.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    fn id_here(&self, config: &ContainerConfig) -> Result<Option<String>, EngineError> {
        Ok(Record::read(config)?.map(|record| record.id).filter(|id| !id.is_empty()))
    }
}
