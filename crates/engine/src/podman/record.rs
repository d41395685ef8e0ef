//! What this node knows of a container that Podman keeps, in the container's directory: for the next life of godwitd.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::container::{ContainerConfig, EngineError, OutputPipes, io_error};

/// The file.
const FILE: &str = "podman.json";

/// The record. Where there is none, nothing of a container in Podman is godwit's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The container's ID.
    pub(super) id: String,
    /// Its life, where it has had one here.
    pub(super) life: Option<Life>,
    /// The upper directory of its root filesystem; empty while it waits.
    pub(super) upper: PathBuf,
    /// Its volumes; none while it waits.
    pub(super) volumes: Vec<Volume>,
    /// Podman's process that imports it, and when that began.
    #[serde(default)]
    pub(super) import: Option<(u32, u64)>,
    /// Networks of Podman's that it has left, and its address on each: it is put back on them unless it becomes a service.
    #[serde(default)]
    pub(super) networks: Vec<(String, String)>,
    /// Whether it runs on another node now, with its volumes.
    #[serde(default)]
    pub(super) departed: bool,
    /// Whether it goes with its service: not before it is one.
    pub(super) ours: bool,
    /// What is left where it waited: what Podman had made for it. Nothing once it runs.
    #[serde(default)]
    pub(super) left: Option<PathBuf>,
    /// Where what comes for it is put before Podman has a place for it; nothing once it has.
    pub(super) waiting: Option<PathBuf>,
}

/// A volume of Podman's, which moves with the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Volume {
    pub(super) name: String,
    /// The directory with its files; empty while it waits.
    pub(super) files: PathBuf,
    /// Whether it goes when its container is removed; one with a name that its user chose does not.
    pub(super) anonymous: bool,
}

/// One life of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Life {
    /// The main process.
    pub(super) pid: u32,
    /// When that began, in clock ticks since boot.
    pub(super) start: u64,
    /// Path of its cgroup below each hierarchy's root.
    pub(super) cgroup: String,
    /// The pipes that are its standard output and standard error.
    pub(super) pipes: OutputPipes,
    /// The process that reads them.
    pub(super) conmon: u32,
    /// When that began.
    pub(super) conmon_start: u64,
    /// Its root filesystem, as the node has it mounted.
    pub(super) root: PathBuf,
}

impl Record {
    /// That of a container; nothing where there is none, or one of another container.
    pub(super) fn read(config: &ContainerConfig) -> Result<Option<Self>, EngineError> {
        let path = config.directory.join(FILE);
        let failed = |source| io_error(&config.name, format!("read {}", path.display()), source);
        let record: Self = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| failed(error.into()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        Ok(config.kept.as_ref().is_some_and(|kept| kept.id == record.id).then_some(record))
    }

    /// That of a container which there must be.
    pub(super) fn of(config: &ContainerConfig) -> Result<Self, EngineError> {
        Self::read(config)?.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    pub(super) fn write(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let (path, half) = (config.directory.join(FILE), config.directory.join("podman.json.half"));
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

    pub(super) fn remove(config: &ContainerConfig) -> Result<(), EngineError> {
        let path = config.directory.join(FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error(&config.name, format!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }
}
