//! What a service is plugged into, at each step of its life here and of a move: the overlay, or a network
//! namespace that somebody else made, of which godwit moves nothing.
//!
//! | step | overlay | a namespace of somebody else's |
//! |---|---|---|
//! | made | namespace, interface, closed port | must be there |
//! | open | frames pass; what was held is handed in | not silent |
//! | frozen, about to leave | frames go to the destination | silent |
//! | on its way here | what comes is held | silent |
//! | has ended | closed, removed | as it is |
//! | has left | closed, removed | stays silent: it may still have the service's addresses |

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use godwit_engine::EngineError;
use godwit_network::{Handed, NetworkError, check_namespace, forget_connections, silence, unsilence};
use serde::{Deserialize, Serialize};

use crate::local::{Local, LocalError};
use crate::service::Service;

/// What a service is plugged into.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attachment {
    /// The overlay, where it has an address that moves with it.
    #[default]
    Overlay,
    /// The network namespace that is mounted here, which is somebody else's.
    Namespace(PathBuf),
}

impl Attachment {
    /// The namespace, if it is somebody else's.
    #[must_use]
    pub fn namespace(&self) -> Option<&Path> {
        match self {
            Self::Overlay => None,
            Self::Namespace(path) => Some(path),
        }
    }
}

impl Local {
    /// Makes the service's place in the network, closed.
    pub async fn plug(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => self.overlay.create_endpoint(&service.endpoint()).await.map(drop),
            Some(path) => self.check_namespace(path),
        }
    }

    /// Lets its frames pass from here on.
    pub async fn open_network(&self, service: &Service) -> Result<Handed, NetworkError> {
        match service.network.namespace() {
            None => self.overlay.open(&service.endpoint()).await,
            Some(path) => unsilence(path).await.map(|()| Handed::default()),
        }
    }

    /// Lets none pass any more.
    pub async fn close_network(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => self.overlay.close(&service.endpoint()).await,
            Some(_) => Ok(()),
        }
    }

    /// The service is on its way here.
    pub(crate) async fn hold_for(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None if !self.holds => Ok(()),
            None => self.overlay.hold(&service.endpoint()),
            Some(path) => silence(path).await,
        }
    }

    /// It was on its way here, and stays where it was.
    pub(crate) async fn hold_no_more(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => Ok(()),
            Some(path) => unsilence(path).await,
        }
    }

    /// The service is frozen, and on its way to the node at `vtep`.
    pub(crate) async fn steer(&self, service: &Service, vtep: Ipv4Addr) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None if !self.holds => self.overlay.close(&service.endpoint()).await,
            None => self.overlay.steer(&service.endpoint(), vtep).await,
            Some(path) => silence(path).await,
        }
    }

    /// The service's processes, if there are any, are about to be killed here, since they are elsewhere.
    pub(crate) async fn forget_connections(&self, service: &Service) -> Result<(), LocalError> {
        if service.network.namespace().is_none() {
            // They go with their namespace.
            return Ok(());
        }
        match self.engine.processes(&self.config(service)).await {
            Ok(pids) => Ok(forget_connections(&pids)?),
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Nothing of the service is here any more.
    pub(crate) async fn unplug(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => self.overlay.remove_endpoint(&service.name, service.address).await,
            Some(_) => Ok(()),
        }
    }

    /// Whether a service may be plugged into a namespace of somebody else's: it lies in the directory that
    /// the operator names for such, and is one. Peers name paths, too.
    pub fn check_namespace(&self, path: &Path) -> Result<(), NetworkError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.parent() != Some(self.namespaces.as_path())
            || name.is_empty()
            || self.namespaces.join(name) != *path
        {
            return Err(NetworkError::NamespaceElsewhere {
                path: path.to_owned(),
                directory: self.namespaces.clone(),
            });
        }
        check_namespace(path)
    }
}
