//! Containers go: when they have left for another node, when they come to nothing on their way here, and for good.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::command::{Call, SHORT};
use super::record::Record;
use super::{Podman, REMOVAL, VOLUME_LABEL, arrival, files};
use crate::container::{ContainerConfig, EngineError, io_error};
use crate::processes::process;

/// After so long Podman is helped: by then it has begun to end the container.
const HELP: Duration = Duration::from_secs(5);

/// How often to look whether an import has ended that is not waited for.
const IMPORT_LOOK: Duration = Duration::from_millis(20);

impl Podman {
    /// Ends a container and removes what belongs to it, or gives back one that has not become a service.
    pub(super) async fn remove(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let Some(record) = Record::read(config)? else { return Ok(()) };
        let (place, tree) = (self.place(&record.id), self.tree(&record.id));
        let io = |path: &Path| {
            let action = format!("remove {}", path.display());
            move |source| io_error(&config.name, action, source)
        };
        if !record.ours {
            if let Err(error) = self.join_networks(config, &record.networks).await {
                tracing::error!(container = %config.name, %error, "it is not put back on its networks");
            }
            files::unbind(&record, &tree).map_err(io(&tree))?;
            return Record::remove(config);
        }
        self.end_import(config, &record).await?;
        let own_cgroup = self.own_cgroup(&record.id);
        arrival::unbind_cgroup(&own_cgroup).map_err(io(&own_cgroup))?;
        // Podman notes that it ends the container before it does, and so starts it no more by its policy.
        let removing = self.remove_container(config);
        tokio::pin!(removing);
        match tokio::time::timeout(HELP, &mut removing).await {
            Ok(removed) => removed?,
            Err(_) => {
                // Not every runtime kills what is frozen.
                if record.life.is_some() {
                    self.processes.kill(&self.placed(config)?.0).await?;
                }
                removing.await?;
            }
        }
        if record.life.is_some() {
            self.processes.kill(&self.placed(config)?.0).await?;
        }
        files::unbind(&record, &tree).map_err(io(&tree))?;
        self.remove_volumes(config, &record).await?;
        // What has one of their names from here on is another's, however often the rest is tried.
        let record = Record { volumes: Vec::new(), departed: false, ..record };
        record.write(config)?;
        for path in record.waiting.iter().chain(&record.left).chain([&place]) {
            let removed = path.clone();
            let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(removed)).await;
            match removed.map_err(io::Error::other).and_then(|removed| removed) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(path)(error)),
                _ => {}
            }
        }
        Record::remove(config)
    }

    async fn remove_container(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let words = ["container", "rm", "--force", "--time", "0", "--ignore", "--"];
        match self.about(config, "remove", &words, REMOVAL).await {
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such container") => Ok(()),
            removed => removed.map(drop),
        }
    }

    /// Ends an import that is under way, and removes what it has made.
    pub(super) async fn end_import(
        &self,
        config: &ContainerConfig,
        record: &Record,
    ) -> Result<(), EngineError> {
        let Some((pid, start)) = record.import else { return Ok(()) };
        let fifo = self.place(&record.id).join("inventory");
        let io = |source| io_error(&config.name, "end its import".into(), source);
        let begin = Instant::now();
        while process::lives(pid, start) {
            // A CRIU that waits finds that there is nothing to wait for.
            match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(&fifo)
            {
                Err(error)
                    if error.kind() != ErrorKind::NotFound && error.raw_os_error() != Some(libc::ENXIO) =>
                {
                    return Err(io(error));
                }
                _ => {}
            }
            if begin.elapsed() > REMOVAL {
                return Err(io(ErrorKind::TimedOut.into()));
            }
            tokio::time::sleep(IMPORT_LOOK).await;
        }
        self.remove_container(config).await
    }

    /// Removes the volumes of a container that is not here any more, as far as they go with it: all of one that runs on another
    /// node with them, of others those without a name of their user's choice. One that another container uses stays.
    async fn remove_volumes(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        let of_container = record.volumes.iter().filter(|volume| record.departed || volume.anonymous);
        let mut names: Vec<_> = of_container.map(|volume| volume.name.clone()).collect();
        // Those that were made for an arrival which comes to nothing.
        if (record.waiting.is_some() || record.left.is_some())
            && let Ok((_, definition)) = self.kept(config)
        {
            for (volume, _) in definition.volumes().unwrap_or_default() {
                if self.has_volume(&config.name, volume).await? {
                    let found = self.volumes(&config.name, &[volume]).await?;
                    let made = found.iter().any(|found| found.labels.get(VOLUME_LABEL) == Some(&record.id));
                    names.extend(made.then(|| volume.to_owned()));
                }
            }
        }
        for name in names {
            let words = ["volume", "rm", "--", &name].map(OsStr::new).to_vec();
            let call = Call { name: &config.name, action: "remove a volume of", words, settings: None };
            match self.call(&call, SHORT).await {
                Ok(_) => {}
                Err(EngineError::Keeper { reason, .. }) if reason.contains("no such volume") => {}
                Err(EngineError::Keeper { reason, .. }) if reason.contains("being used") => {
                    tracing::warn!(container = %config.name, volume = name, reason, "a volume is left here");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
