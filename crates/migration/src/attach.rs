//! What a service is plugged into, at each step of its life here and of a move: one or several of godwit's
//! networks, or a network namespace that somebody else made, of which godwit moves nothing.
//!
//! | step | godwit's networks | a namespace of somebody else's |
//! |---|---|---|
//! | made | namespace, interface, closed port | must be there |
//! | open | frames pass; what was held is handed in | not silent |
//! | about to be frozen | no connection is begun | |
//! | frozen, about to leave | frames go to the destination | silent |
//! | on its way here | what comes is held | silent |
//! | has ended | closed, removed | as it is |
//! | has left | closed, removed | stays silent: it may still have the service's addresses |

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use godwit_engine::EngineError;
use godwit_network::{
    Handed, NetworkError, admit_newcomers, bar_newcomers, check_namespace, forget_connections, silence,
    unsilence,
};
use serde::{Deserialize, Serialize};

use crate::local::{Local, LocalError};
use crate::service::Service;

/// What a service is plugged into.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attachment {
    /// Networks of godwit's, on each of which it has an address that moves with it.
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
        if let Some(path) = service.network.namespace() {
            return self.check_namespace(path);
        }
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.create_endpoint(&endpoint).await?;
        }
        Ok(())
    }

    /// Lets its frames pass from here on.
    pub async fn open_network(&self, service: &Service) -> Result<Handed, NetworkError> {
        let mut handed = Handed::default();
        if let Some(path) = service.network.namespace() {
            unsilence(path).await?;
        }
        for endpoint in service.endpoints() {
            let here = self.networks.of(endpoint.address)?.open(&endpoint).await?;
            handed = Handed { frames: handed.frames + here.frames, dropped: handed.dropped + here.dropped };
        }
        Ok(handed)
    }

    /// Lets none pass any more.
    pub async fn close_network(&self, service: &Service) -> Result<(), NetworkError> {
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.close(&endpoint).await?;
        }
        Ok(())
    }

    /// The service is on its way here.
    pub(crate) async fn hold_for(&self, service: &Service) -> Result<(), NetworkError> {
        if let Some(path) = service.network.namespace() {
            return silence(path).await;
        }
        for endpoint in service.endpoints().into_iter().filter(|_| self.holds) {
            self.networks.of(endpoint.address)?.hold(&endpoint)?;
        }
        Ok(())
    }

    /// It was on its way here, and stays where it was.
    pub(crate) async fn hold_no_more(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => Ok(()),
            Some(path) => unsilence(path).await,
        }
    }

    /// The service is about to be frozen: nobody begins a connection to it any more, and who wants to has
    /// asked already when it goes on.
    pub(crate) async fn bar_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        let endpoints = service.endpoints();
        if endpoints.is_empty() || !self.holds {
            return Ok(());
        }
        for endpoint in &endpoints {
            self.networks.of(endpoint.address)?.collect_newcomers(endpoint).await?;
        }
        match bar_newcomers(&self.config(service).network_namespace).await {
            // Then a connection that is being made at the freeze is reset, as it is by every restore.
            Err(NetworkError::NoNft(error)) => {
                tracing::debug!(%error, "connections are begun until the freeze");
                Ok(())
            }
            other => other,
        }
    }

    /// It stays: they are let in again.
    pub(crate) async fn admit_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        if service.endpoints().is_empty() {
            return Ok(());
        }
        admit_newcomers(&self.config(service).network_namespace).await
    }

    /// The service is frozen, and on its way to the node at `vtep`.
    pub(crate) async fn steer(&self, service: &Service, vtep: Ipv4Addr) -> Result<(), NetworkError> {
        if let Some(path) = service.network.namespace() {
            return silence(path).await;
        }
        if !self.holds {
            return self.close_network(service).await;
        }
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.steer(&endpoint, vtep).await?;
        }
        Ok(())
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
        // The namespace goes with the last.
        for address in service.addresses() {
            // Nothing is plugged into a network that is not here.
            if let Ok(network) = self.networks.of(address) {
                network.remove_endpoint(&service.name, address).await?;
            }
        }
        Ok(())
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
