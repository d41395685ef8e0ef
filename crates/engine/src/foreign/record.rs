//! What this node knows of a container that another engine keeps, in the container's directory: for the next life of
//! godwitd.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::container::{ContainerConfig, EngineError, OutputPipes, io_error};

/// The file.
const FILE: &str = "kept.json";

/// Held from the reading of a record to its writing.
static CHANGING: Mutex<()> = Mutex::new(());

/// The record. Where there is none, nothing of a container in an engine of others is godwit's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Record {
    /// The ID that the container was adopted with.
    pub(crate) of: String,
    /// What stood for that ID before an engine of this node had made the container; empty where it was there already.
    pub(crate) made_as: String,
    /// Its ID in this node's engine; empty while that has none.
    pub(crate) id: String,
    /// By which what is made here for it is known, and nothing else: a label that nobody can guess.
    pub(crate) token: String,
    /// The cgroup in which its restore waits.
    pub(crate) landing: Option<String>,
    /// Whether its engine is still to be told how to restart it.
    pub(crate) owes_policy: bool,
    /// Whether its limits have changed here since its engine made it, which starts it with those that it had.
    pub(crate) limited: bool,
    /// The main process with which it came here, and when that began; of one that its engine has started nothing.
    pub(crate) came: Option<(u32, u64)>,
    /// Its life, where it has had one here.
    pub(crate) life: Option<Life>,
    /// The upper directory of its root filesystem; empty while it waits.
    pub(crate) upper: PathBuf,
    /// Where its engine keeps volumes, and what godwit has of them; one whose upper directory is in it may not say so.
    pub(crate) storage: Option<PathBuf>,
    /// Its volumes; none while it waits.
    pub(crate) volumes: Vec<Volume>,
    /// Whether it is being made here: then it goes with all that was made for it, unless it becomes a service.
    pub(crate) making: bool,
    /// The engine's process that imports or makes it, and when that began.
    pub(crate) import: Option<(u32, u64)>,
    /// Networks of its engine's that it has left, and what its engine needs to put it back: it is put back on them unless it becomes a service.
    pub(crate) networks: Vec<(String, String)>,
    /// Whether it is to be on none of them.
    pub(crate) leaves: bool,
    /// Whether it runs on another node now, with its volumes.
    pub(crate) departed: bool,
    /// Whether it goes with its service: not before it is one.
    pub(crate) ours: bool,
    /// Whether it has come for good, and its volumes are its own.
    pub(crate) settled: bool,
    /// What is left where it waited: what the engine had made for it. Nothing once that is removed.
    pub(crate) left: Option<PathBuf>,
    /// Where what comes for it is put before the engine has a place for it; nothing once it has.
    pub(crate) waiting: Option<PathBuf>,
}

/// A volume of an engine's, which moves with the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Volume {
    pub(crate) name: String,
    /// The directory with its files; empty while it waits.
    pub(crate) files: PathBuf,
    /// Whether it goes when its container is removed; one with a name that its user chose does not.
    pub(crate) anonymous: bool,
}

/// One life of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Life {
    /// The main process.
    pub(crate) pid: u32,
    /// When that began, in clock ticks since boot.
    pub(crate) start: u64,
    /// Path of its cgroup below each hierarchy's root.
    pub(crate) cgroup: String,
    /// The pipes that are its standard output and standard error.
    pub(crate) pipes: OutputPipes,
    /// The process that reads them.
    pub(crate) reader: u32,
    /// When that began.
    pub(crate) reader_start: u64,
    /// Its root filesystem, as the node has it mounted.
    pub(crate) root: PathBuf,
}

impl Record {
    /// That of a container; nothing where there is none, or one of another container.
    pub(crate) fn read(config: &ContainerConfig) -> Result<Option<Self>, EngineError> {
        let path = config.directory.join(FILE);
        let failed = |source| io_error(&config.name, format!("read {}", path.display()), source);
        let record: Self = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| failed(error.into()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let is_its = |id: &str| id == record.of || !record.made_as.is_empty() && id == record.made_as;
        Ok(config.kept.as_ref().is_some_and(|kept| is_its(&kept.id)).then_some(record))
    }

    /// That of a container which there must be.
    pub(crate) fn of(config: &ContainerConfig) -> Result<Self, EngineError> {
        Self::read(config)?.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    /// Changes that of a container which there must be; what it is then.
    pub(crate) fn change(
        config: &ContainerConfig,
        change: impl FnOnce(&mut Self),
    ) -> Result<Self, EngineError> {
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = Self::of(config)?;
        change(&mut record);
        record.put(config)?;
        Ok(record)
    }

    /// The same, or begins one.
    pub(crate) fn change_or_begin(
        config: &ContainerConfig,
        begin: impl FnOnce() -> Self,
        change: impl FnOnce(&mut Self),
    ) -> Result<Self, EngineError> {
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = Self::read(config)?.unwrap_or_else(begin);
        change(&mut record);
        record.put(config)?;
        Ok(record)
    }

    /// Begins one, whatever there was.
    pub(crate) fn begin(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        self.put(config)
    }

    fn put(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let (path, half) = (config.directory.join(FILE), config.directory.join("kept.json.half"));
        let written = serde_json::to_vec(self).map_err(io::Error::from).and_then(|text| {
            std::fs::create_dir_all(&config.directory)?;
            let mut file = File::create(&half)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&half, &path)?;
            File::open(&config.directory)?.sync_all()
        });
        written.map_err(|source| io_error(&config.name, format!("write {}", path.display()), source))
    }

    pub(crate) fn remove(config: &ContainerConfig) -> Result<(), EngineError> {
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let path = config.directory.join(FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error(&config.name, format!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }
}
