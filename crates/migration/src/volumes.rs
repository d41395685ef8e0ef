//! Volumes: files with a name, which outlive the service that has them, and move with it.
//!
//! A volume that no service has is the directory `volumes/NAME` in the node's state. One that a service has is among the
//! service's files ([`godwit_engine::files`]). It comes there, and goes back, by rename(2): so at most one service has it.
//!
//! A service that runs on another node has its volumes there. What is left of them here, or has come of them so far, is a copy:
//! its directory is marked as one, and goes with the service's other files. Without the mark a volume stays.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_engine::files;
use godwit_names::{ServiceName, VolumeName};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::error::io_error;
use crate::incarnation::{COPY, Incarnation};
use crate::resources::{LocalError, NodeResources};
use crate::service::{Layout, Service};

/// Who looks for a volume finds it before or after it has changed its place.
static CHANGING: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A volume of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Its name.
    pub name: VolumeName,
    /// The service of this node that has it, or that it is coming with.
    pub service: Option<ServiceName>,
    /// The directory with its files.
    pub path: PathBuf,
}

impl NodeResources {
    /// The volume of this name.
    pub fn volume(&self, name: &VolumeName) -> Result<Option<Volume>, LocalError> {
        let _alone = alone();
        self.find(name)
    }

    fn find(&self, name: &VolumeName) -> Result<Option<Volume>, LocalError> {
        let services = names::<ServiceName>(&self.layout.services())?.into_iter();
        let of_services = services.filter_map(|service| {
            let path = self.volumes_of(&service)?.join(name);
            Some((Some(service), path))
        });
        let mut places = of_services.chain([(None, self.layout.volumes().join(name))]);
        let found = places.find(|(_, path)| is_directory(path));
        Ok(found.map(|(service, path)| Volume { name: name.clone(), service, path }))
    }

    /// Where the volumes of a service are, if it has any; nothing behind a link, which another node may have sent.
    fn volumes_of(&self, service: &ServiceName) -> Option<PathBuf> {
        let directory = files::volumes(&self.layout.service(service));
        (is_directory(directory.parent()?) && is_directory(&directory)).then_some(directory)
    }

    /// The volumes of this node, by name.
    pub fn volumes(&self) -> Result<Vec<Volume>, LocalError> {
        let _alone = alone();
        let mut found = Vec::new();
        let mut in_directory = |directory: PathBuf, service: Option<&ServiceName>| {
            for name in names(&directory)? {
                let path = directory.join(&name);
                found.push(Volume { name, service: service.cloned(), path });
            }
            Ok::<_, LocalError>(())
        };
        in_directory(self.layout.volumes(), None)?;
        for service in names(&self.layout.services())? {
            if let Some(directory) = self.volumes_of(&service) {
                in_directory(directory, Some(&service))?;
            }
        }
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Makes an empty volume.
    pub fn make_volume(&self, name: &VolumeName) -> Result<Volume, LocalError> {
        let _alone = alone();
        if let Some(found) = self.find(name)? {
            return Err(LocalError::VolumeExists { name: name.clone(), user: user(found.service.as_ref()) });
        }
        let path = self.layout.volumes().join(name);
        make(&path)?;
        Ok(Volume { name: name.clone(), service: None, path })
    }

    /// Removes a volume that no service has, with its files.
    pub fn remove_volume(&self, name: &VolumeName) -> Result<(), LocalError> {
        let going = {
            let _alone = alone();
            match self.find(name)? {
                None => return Err(LocalError::NoVolume { name: name.clone() }),
                Some(Volume { service: Some(service), .. }) => {
                    return Err(LocalError::VolumeTaken { name: name.clone(), service });
                }
                Some(Volume { path, .. }) => {
                    files::is_whole(&path)?;
                    // Its files go while there may be a volume of that name again.
                    let going = self.layout.volumes().join(going(name));
                    rename(&path, &going)?;
                    going
                }
            }
        };
        Ok(files::remove_volume(&going)?)
    }

    /// Removes, beside all else, what is left of volumes whose removal was interrupted. What cannot be removed is logged.
    pub fn clear_half_removed_volumes(&self) -> Result<(), LocalError> {
        let going = list(&self.layout.volumes())?.into_iter();
        let going: Vec<_> = going.filter(|entry| entry.to_string_lossy().starts_with(GOING)).collect();
        let all = self.layout.volumes();
        tokio::task::spawn_blocking(move || {
            for path in going.into_iter().map(|entry| all.join(entry)) {
                if let Err(error) = files::remove_volume(&path) {
                    let error = crate::error_chain(&error);
                    tracing::error!(path = %path.display(), %error, "cannot remove what is left of a volume");
                }
            }
        });
        Ok(())
    }

    /// Puts the service's volumes among its files. Of a new service those are made that are not there.
    pub fn take_volumes(&self, service: &Service, is_new: bool) -> Result<(), LocalError> {
        let _alone = alone();
        for name in service.volumes() {
            let place = files::volumes(&self.layout.service(&service.name)).join(name);
            if is_directory(&place) {
                continue;
            }
            match self.find(name)? {
                Some(Volume { service: Some(service), .. }) => {
                    return Err(LocalError::VolumeTaken { name: name.clone(), service });
                }
                Some(Volume { path, .. }) => {
                    let directory = place.parent().unwrap_or(&place);
                    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
                    rename(&path, &place)?;
                }
                None if is_new => make(&place)?,
                None => return Err(LocalError::NoVolume { name: name.clone() }),
            }
        }
        Ok(())
    }

    /// Puts into new volumes of the service what its image has in their places. Its root filesystem is mounted.
    pub async fn fill_volumes(&self, service: &Service) -> Result<(), LocalError> {
        let (root, directory) = (self.config(service).rootfs, self.layout.service(&service.name));
        let mounts = service.mounts.clone();
        let filled = tokio::task::spawn_blocking(move || {
            let scratch = directory.join("filling");
            mounts.iter().try_for_each(|mount| match mount.volume() {
                Some(name) => {
                    let volume = files::volumes(&directory).join(name);
                    files::fill_volume(&root, &mount.target, &volume, &scratch)
                }
                None => Ok(()),
            })
        });
        Ok(filled.await??)
    }

    /// Before a service is removed from this node: its volumes stay, unless they are a copy.
    pub(crate) fn give_volumes_back(&self, directory: &Path) -> Result<(), LocalError> {
        let _alone = alone();
        let copy = directory.join(COPY);
        if copy.try_exists().map_err(io_error("look for", &copy))? {
            return Ok(());
        }
        for name in names::<VolumeName>(&files::volumes(directory))? {
            let all = self.layout.volumes();
            fs::create_dir_all(&all).map_err(io_error("create", &all))?;
            rename(&files::volumes(directory).join(&name), &all.join(&name))?;
        }
        Ok(())
    }

    /// From here on what is here of the service's volumes is a copy of what is on another node.
    pub fn mark_volumes(&self, service: &Service) -> Result<(), LocalError> {
        let directory = self.layout.service(&service.name);
        if service.volumes().next().is_none()
            || !Incarnation::read(&directory)?.is_some_and(|here| here.is_up_to(service))
        {
            return Ok(());
        }
        let path = directory.join(COPY);
        File::create(&path).and_then(|file| file.sync_all()).map_err(io_error("create", &path))?;
        sync(&directory)
    }

    /// The service is this node's, and its volumes are.
    pub fn unmark_volumes(&self, service: &Service) -> Result<(), LocalError> {
        let directory = self.layout.service(&service.name);
        let path = directory.join(COPY);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove", &path)(error)),
            // Also where it was removed a moment before a crash.
            _ if service.volumes().next().is_some() && directory.exists() => sync(&directory),
            _ => Ok(()),
        }
    }
}

impl Layout {
    /// Where the volumes are that no service has.
    #[must_use]
    pub fn volumes(&self) -> PathBuf {
        self.state.join("volumes")
    }
}

/// What the name of a volume begins with whose files are being removed: no name of a volume does.
const GOING: &str = ".removed-";

/// A name that nothing has.
fn going(name: &VolumeName) -> String {
    format!("{GOING}{name}-{}", ulid::Ulid::new())
}

/// Who has a volume, in words.
fn user(service: Option<&ServiceName>) -> String {
    service.map_or_else(|| "no service has it".into(), |service| format!("service {service} has it"))
}

/// What is in a directory that need not be there.
fn list(directory: &Path) -> Result<Vec<std::ffi::OsString>, LocalError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("list", directory))?,
    };
    entries.map(|entry| entry.map(|entry| entry.file_name()).map_err(io_error("list", directory))).collect()
}

/// What of it has a name of this kind.
fn names<N: TryFrom<String>>(directory: &Path) -> Result<Vec<N>, LocalError> {
    let entries = list(directory)?.into_iter();
    Ok(entries.filter_map(|name| name.into_string().ok()?.try_into().ok()).collect())
}

/// Makes the directory of a new volume, on the disk.
fn make(path: &Path) -> Result<(), LocalError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(io_error("create", parent))?;
    fs::DirBuilder::new().mode(0o755).create(path).map_err(io_error("create", path))?;
    sync(parent)
}

/// Gives a directory another place, on the disk; nothing may be there.
fn rename(from: &Path, to: &Path) -> Result<(), LocalError> {
    let renamed = renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(io::Error::from);
    renamed.map_err(io_error("put a volume into", to))?;
    [to, from].into_iter().filter_map(Path::parent).try_for_each(sync)
}

/// Not one behind a link.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

fn sync(directory: &Path) -> Result<(), LocalError> {
    File::open(directory).and_then(|file| file.sync_all()).map_err(io_error("write to the disk", directory))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_changes_its_place_only_where_nothing_is_in_it() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        make(&at("free/data")).unwrap();
        fs::write(at("free/data/file"), "content").unwrap();
        fs::create_dir_all(at("service")).unwrap();
        rename(&at("free/data"), &at("service/data")).unwrap();
        assert_eq!(fs::read_to_string(at("service/data/file")).unwrap(), "content");
        make(&at("free/data")).unwrap();
        assert!(rename(&at("service/data"), &at("free/data")).is_err());
        assert!(at("service/data/file").exists());
        assert!(make(&at("free/data")).is_err(), "it is there");
    }

    #[test]
    fn what_is_being_removed_is_no_volume() {
        let scratch = tempfile::tempdir().unwrap();
        let name: VolumeName = "data".parse().unwrap();
        let going = going(&name);
        assert_ne!(going, super::going(&name));
        fs::create_dir(scratch.path().join(&going)).unwrap();
        make(&scratch.path().join(&name)).unwrap();
        assert_eq!(names::<VolumeName>(scratch.path()).unwrap(), [name]);
        assert_eq!(list(scratch.path()).unwrap().len(), 2);
        assert!(names::<VolumeName>(&scratch.path().join("nowhere")).unwrap().is_empty());
    }
}
