//! Services that are being made on this node: a mark in their directory, there before anything else of them and until
//! the node's state has them. A daemon that starts clears what its last life was still making.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

use godwit_database::blocking::off_worker;
use godwit_names::ServiceName;

use crate::error::io_error;
use crate::incarnation::Incarnation;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;
use crate::storage::Marks;

/// The mark's name in the service's directory.
const MARK: &str = "being-made";

impl NodeResources {
    /// A new service is made next.
    pub fn begin_making(&self, service: &Service) -> Result<(), LocalError> {
        let directory = self.layout.service(&service.name);
        fs::create_dir_all(&directory).map_err(io_error("create", &directory))?;
        let path = directory.join(MARK);
        File::create(&path).map(drop).map_err(io_error("create", &path))
    }

    /// The state of this node has it.
    pub fn made(&self, service: &Service) -> Result<(), LocalError> {
        unmark(&self.layout.service(&service.name))
    }

    /// Clears every service that this daemon was making when it last ended, and begins to remove the files by which it tried
    /// shared storage. What cannot be cleared is logged, and stays
    /// until a service of its name is made, or this daemon starts again.
    pub async fn clear_half_made(&self) -> Result<(), LocalError> {
        match Marks::left(&self.layout.run) {
            // Storage of others may not answer.
            Ok(left) => drop(tokio::task::spawn_blocking(move || drop(left))),
            Err(error) => {
                tracing::error!(%error, "cannot find the files by which shared storage was tried");
            }
        }
        let all = self.layout.services();
        let entries = match fs::read_dir(&all) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(io_error("list", &all))?,
        };
        for entry in entries {
            let entry = entry.map_err(io_error("list", &all))?;
            let directory = entry.path();
            if !directory.join(MARK).exists() {
                continue;
            }
            if let Err(error) = self.clear_if_half_made(&directory).await {
                let directory = directory.display();
                tracing::error!(%directory, error = %crate::error_chain(&error), "cannot remove a service that was being created when godwitd ended");
            }
        }
        Ok(())
    }

    async fn clear_if_half_made(&self, directory: &Path) -> Result<(), LocalError> {
        let name = directory.file_name().unwrap_or_default().to_string_lossy().parse::<ServiceName>();
        let name = name.map_err(|error| {
            io_error("take the name of a service from", directory)(std::io::Error::other(error))
        })?;
        let Some(left) = Incarnation::read(directory)? else {
            return Incarnation::remove(directory).map_err(io_error("remove", directory));
        };
        let service = left.as_service(&name);
        if self.cluster.known(&service)?.here.is_some() {
            // It had all but lost its marks.
            off_worker(|| self.unmark_volumes(&service))?;
            return unmark(directory);
        }
        tracing::warn!(service = %name, id = left.id, "it was being created when godwitd ended, and is removed");
        self.clear(&service).await
    }
}

fn unmark(directory: &Path) -> Result<(), LocalError> {
    let path = directory.join(MARK);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove", &path)(error)),
        _ => Ok(()),
    }
}
