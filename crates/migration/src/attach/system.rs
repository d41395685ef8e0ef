//! The real [`Attach`]: services on godwit's overlays, and in network namespaces that lie where the operator allows.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use godwit_criu::obstacles::UnixSockets;
use godwit_network::{
    Handed, NetworkError, Networks, admit_newcomers, bar_newcomers, check_namespace, enter,
    forget_connections, join_namespace, silence, unsilence,
};

use super::Attach;
use crate::listeners::{Listeners, Listening};
use crate::service::{Layout, Service};
use crate::terms::OverlayTerms;

/// What services of this node are plugged into.
#[derive(Debug)]
pub struct SystemNetwork {
    /// Networks.
    pub networks: Arc<Networks>,
    /// Where network namespaces of others are mounted that services may be plugged into.
    pub namespaces: PathBuf,
    /// Where services' own are.
    pub layout: Layout,
    /// Whether frames for a service are held during the pause; what drops them is for comparison only.
    pub holds: bool,
}

#[async_trait]
impl Attach for SystemNetwork {
    fn terms(&self) -> OverlayTerms {
        OverlayTerms::of(self.networks.first())
    }

    async fn plug(&self, service: &Service) -> Result<(), NetworkError> {
        if let Some(path) = service.network.namespace() {
            return self.check_namespace(path);
        }
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.create_endpoint(&endpoint).await?;
        }
        Ok(())
    }

    async fn join(&self, service: &Service, pid: u32) -> Result<bool, NetworkError> {
        match service.network.namespace() {
            None => join_namespace(&self.layout.namespace(service), pid).await,
            Some(_) => Ok(false),
        }
    }

    fn name_server(&self, service: &Service) -> Option<Ipv4Addr> {
        self.networks.name_server(*service.addresses().first()?)
    }

    async fn open(&self, service: &Service) -> Result<Handed, NetworkError> {
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

    async fn close(&self, service: &Service) -> Result<(), NetworkError> {
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.close(&endpoint).await?;
        }
        Ok(())
    }

    async fn hold_for(&self, service: &Service) -> Result<(), NetworkError> {
        if let Some(path) = service.network.namespace() {
            return silence(path).await;
        }
        for endpoint in service.endpoints().into_iter().filter(|_| self.holds) {
            self.networks.of(endpoint.address)?.hold(&endpoint)?;
        }
        Ok(())
    }

    async fn hold_no_more(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network.namespace() {
            None => Ok(()),
            Some(path) => unsilence(path).await,
        }
    }

    async fn bar_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        let endpoints = service.endpoints();
        if endpoints.is_empty() || !self.holds {
            return Ok(());
        }
        for endpoint in &endpoints {
            self.networks.of(endpoint.address)?.collect_newcomers(endpoint).await?;
        }
        match bar_newcomers(&self.layout.namespace(service)).await {
            // Then a connection that is being made at the freeze is reset, as it is by every restore.
            Err(NetworkError::NoNft(error)) => {
                tracing::debug!(%error, "connections are begun until the freeze");
                Ok(())
            }
            other => other,
        }
    }

    async fn admit_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        if service.endpoints().is_empty() {
            return Ok(());
        }
        admit_newcomers(&self.layout.namespace(service)).await
    }

    async fn steer(&self, service: &Service, vtep: Ipv4Addr) -> Result<(), NetworkError> {
        if let Some(path) = service.network.namespace() {
            return silence(path).await;
        }
        if !self.holds {
            return self.close(service).await;
        }
        for endpoint in service.endpoints() {
            self.networks.of(endpoint.address)?.steer(&endpoint, vtep).await?;
        }
        Ok(())
    }

    fn forget_connections(&self, pids: &[u32]) -> Result<(), NetworkError> {
        forget_connections(pids)
    }

    async fn unplug(&self, service: &Service) -> Result<(), NetworkError> {
        // The namespace goes with the last.
        for address in service.addresses() {
            // Nothing is plugged into a network that is not here.
            if let Ok(network) = self.networks.of(address) {
                network.remove_endpoint(&service.name, address).await?;
            }
        }
        Ok(())
    }

    fn check_namespace(&self, path: &Path) -> Result<(), NetworkError> {
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

    async fn listeners(&self, service: &Service) -> Result<io::Result<Box<dyn Listening>>, NetworkError> {
        let opened = enter(&self.layout.namespace(service), Listeners::open).await?;
        Ok(opened.map(|listeners| Box::new(listeners) as Box<dyn Listening>))
    }

    async fn unix_sockets(
        &self,
        service: &Service,
        main: u32,
    ) -> Result<io::Result<UnixSockets>, NetworkError> {
        let namespace = match service.kept {
            None => self.layout.namespace(service),
            // What its engine has made, whether godwit has it or has not yet.
            Some(_) => PathBuf::from(format!("/proc/{main}/ns/net")),
        };
        enter(&namespace, UnixSockets::open).await
    }
}
