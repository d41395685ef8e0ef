//! What a service is plugged into, at each step of its life here and of a move: one or several of godwit's
//! networks, or a network namespace that godwit did not create, of which it moves nothing.
//!
//! | step | godwit's networks | another namespace |
//! |---|---|---|
//! | made | namespace, interface, closed port | must be there |
//! | open | frames pass; held frames are delivered | not silent |
//! | about to be frozen | new connections are held | |
//! | frozen, about to leave | frames go to the destination | silent |
//! | on its way here | what comes is held | silent |
//! | has ended | closed, removed | as it is |
//! | has left | closed, removed | stays silent: it may still have the service's addresses |
//!
//! [`Attach`] does it: on a node [`SystemNetwork`].

mod system;

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use async_trait::async_trait;
use godwit_criu::obstacles::UnixSockets;
use godwit_network::{Handed, NetworkError};

use crate::listeners::Listening;
use crate::service::Service;
use crate::terms::OverlayTerms;
pub use system::SystemNetwork;

/// What a node does to its network for services.
#[async_trait]
pub trait Attach: Send + Sync {
    /// What its overlay and another node's must have in common.
    fn terms(&self) -> OverlayTerms;
    /// Makes the service's place in the network, closed.
    async fn plug(&self, service: &Service) -> Result<(), NetworkError>;
    /// Takes the network namespace that a process of the service is in, which its engine has made, for the service's own;
    /// whether it was not that already.
    async fn join(&self, service: &Service, pid: u32) -> Result<bool, NetworkError>;
    /// The DNS server that it is to ask for names here; none where it asks the node's own.
    fn name_server(&self, service: &Service) -> Option<Ipv4Addr>;
    /// Lets its frames pass from here on.
    async fn open(&self, service: &Service) -> Result<Handed, NetworkError>;
    /// Lets none pass any more.
    async fn close(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service is on its way here.
    async fn hold_for(&self, service: &Service) -> Result<(), NetworkError>;
    /// It was on its way here, and stays where it was.
    async fn hold_no_more(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service is about to be frozen: new connections to it are held, and begin after the resume.
    async fn bar_newcomers(&self, service: &Service) -> Result<(), NetworkError>;
    /// It stays: new connections are admitted again.
    async fn admit_newcomers(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service is frozen, and on its way to the node at `vtep`.
    async fn steer(&self, service: &Service, vtep: Ipv4Addr) -> Result<(), NetworkError>;
    /// These processes, in a namespace that godwit did not create, are about to be killed: their peers must not be told
    /// that the connections end.
    fn forget_connections(&self, pids: &[u32]) -> Result<(), NetworkError>;
    /// Nothing of the service is here any more.
    async fn unplug(&self, service: &Service) -> Result<(), NetworkError>;
    /// Whether a service may use a namespace that godwit did not create: the path is a namespace, and lies in the
    /// directory that the operator names for such. Peers name paths, too.
    fn check_namespace(&self, path: &Path) -> Result<(), NetworkError>;
    /// Its sockets that listen. What the kernel says is the inner result.
    async fn listeners(&self, service: &Service) -> Result<io::Result<Box<dyn Listening>>, NetworkError>;
    /// Its unix sockets, as well; `main` is its main process.
    async fn unix_sockets(
        &self,
        service: &Service,
        main: u32,
    ) -> Result<io::Result<UnixSockets>, NetworkError>;
}
