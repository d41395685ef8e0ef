//! The incarnation to which the directory of a service on this node belongs: id and epoch, in a file in it.
//!
//! Names are used again, and services come back. Killing, unmounting, unplugging and removing go by name; before any of
//! them, the record is compared with the incarnation that is meant. It is written before anything else is made in
//! the directory, and removed after all else.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use godwit_engine::{Confinement, Kept, User};
use godwit_names::ServiceName;
use serde::{Deserialize, Serialize};

use crate::error::LocalError;
use crate::restart::Restart;
use crate::service::{Attachment, Hooks, Service};

/// The record's name in the service's directory.
const FILE: &str = "incarnation";

/// The name there of the mark of a service that has come from another node, which chose its paths.
pub(crate) const CAME: &str = "came-from-another-node";

/// The name there of the mark that says that its [volumes](crate::volumes) are a copy.
pub(crate) const COPY: &str = "volumes-are-a-copy";

/// One life of a service on one node, and what has to be known to unplug it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incarnation {
    /// The service's id.
    pub id: String,
    /// Its epoch on this node.
    pub epoch: u64,
    address: Ipv4Addr,
    more: Vec<Ipv4Addr>,
    network: Attachment,
    /// Its engine and its ID there, where that is not godwit's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept: Option<Kept>,
}

impl Incarnation {
    /// That of a service with the epoch that it has on this node.
    #[must_use]
    pub fn of(service: &Service) -> Self {
        let Service { id, epoch, address, more, network, kept, .. } = service.clone();
        let kept = kept.map(|kept| Kept { definition: serde_json::Value::Null, ..kept });
        Self { id, epoch, address, more, network, kept }
    }

    /// Whether this is the service as it is meant, or an earlier life of it.
    #[must_use]
    pub fn is_up_to(&self, service: &Service) -> bool {
        self.id == service.id && self.epoch <= service.epoch
    }

    /// A service of this name with as much as clearing it needs.
    pub(crate) fn as_service(&self, name: &ServiceName) -> Service {
        let Self { id, epoch, address, more, network, kept } = self.clone();
        Service {
            id,
            epoch,
            address,
            more,
            network,
            kept,
            name: name.clone(),
            hooks: Hooks::default(),
            image: String::new(),
            image_digest: None,
            image_id: None,
            layers: Vec::new(),
            platforms: Vec::new(),
            command: Vec::new(),
            env: Vec::new(),
            mounts: Vec::new(),
            memory_bytes: 0,
            cpu_millis: 0,
            publish: Vec::new(),
            hostname: String::new(),
            user: User::default(),
            workdir: PathBuf::new(),
            labels: Vec::new(),
            confinement: Confinement::default(),
            restart: Restart::default(),
            remove: false,
            aliases: Vec::new(),
            follows: None,
            created_ms: 0,
            started_ms: 0,
        }
    }

    /// That of the directory; nothing where it has no record.
    pub(crate) fn read(directory: &Path) -> Result<Option<Self>, LocalError> {
        let path = directory.join(FILE);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|source| LocalError::Io {
                action: "understand",
                path,
                source: source.into(),
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(LocalError::Io { action: "read", path, source }),
        }
    }

    /// Makes it the record of the directory, on the disk.
    pub(crate) fn write(&self, directory: &Path) -> Result<(), LocalError> {
        let path = directory.join(FILE);
        let written = || {
            let new = directory.join(format!("{FILE}.new"));
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(directory)?.sync_all()
        };
        written().map_err(|source| LocalError::Io { action: "write", path: path.clone(), source })
    }

    /// Removes the directory: the record after all else, so that what could not be removed is still known; and before it the
    /// mark of a copy, so that a part of one is still known as such.
    pub(crate) fn remove(directory: &Path) -> std::io::Result<()> {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name() == FILE || entry.file_name() == COPY {
                continue;
            }
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        match fs::remove_file(directory.join(COPY)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::remove_dir_all(directory)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    #[test]
    fn a_record_is_found_as_it_was_written_and_goes_last() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("redis");
        Incarnation::remove(&directory).unwrap();
        fs::create_dir_all(directory.join("upper/data")).unwrap();
        assert_eq!(Incarnation::read(&directory).unwrap(), None);
        let here = Incarnation::of(&service());
        here.write(&directory).unwrap();
        assert_eq!(Incarnation::read(&directory).unwrap().as_ref(), Some(&here));
        let cleared = here.as_service(&service().name);
        assert_eq!((Incarnation::of(&cleared), cleared.addresses()), (here, service().addresses()));
        fs::write(directory.join(FILE), "half of it").unwrap();
        assert!(Incarnation::read(&directory).is_err(), "it is nobody's to remove");
        Incarnation::remove(&directory).unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn a_copy_of_which_a_part_is_left_is_known_as_a_copy() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("redis");
        let stays = directory.join("files/volumes/data");
        fs::create_dir_all(&stays).unwrap();
        Incarnation::of(&service()).write(&directory).unwrap();
        fs::write(directory.join(COPY), "").unwrap();
        // Nothing is removed that something is mounted on.
        nix::mount::mount(None::<&str>, &stays, Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>)
            .unwrap();
        let removed = Incarnation::remove(&directory);
        nix::mount::umount(&stays).unwrap();
        assert!(removed.is_err() && directory.join(COPY).exists() && directory.join(FILE).exists());
        Incarnation::remove(&directory).unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn a_later_life_or_another_service_is_not_what_is_meant() {
        let meant = service();
        let with = |id: &str, epoch| Incarnation::of(&Service { id: id.into(), epoch, ..service() });
        assert!(with(&meant.id, meant.epoch).is_up_to(&meant));
        assert!(with(&meant.id, meant.epoch - 1).is_up_to(&meant));
        assert!(!with(&meant.id, meant.epoch + 1).is_up_to(&meant));
        assert!(!with("02SERVICE", meant.epoch).is_up_to(&meant));
    }
}
