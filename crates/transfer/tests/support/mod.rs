//! A cluster of throw-away nodes for tests.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its own part

use std::net::SocketAddr;
use std::path::PathBuf;

use godwit_transfer::{ClusterAuthority, Identity, ListenOptions, Listener, NodeName};
use tempfile::TempDir;

pub(crate) fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

/// A cluster whose founding node is `a`.
pub(crate) struct Cluster {
    pub(crate) dir: TempDir,
    pub(crate) authority: ClusterAuthority,
    pub(crate) a: Identity,
}

impl Cluster {
    pub(crate) fn found() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let identity = dir.path().join("a");
        let authority = ClusterAuthority::create(&identity, "test").unwrap();
        let a = authority.issue_own(&identity, &node("a")).unwrap();
        Self { dir, authority, a }
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn node(&self, name: &str) -> Identity {
        let dir = self.dir(name);
        let request = Identity::create_request(&dir, &node(name)).unwrap();
        let certificate = self.authority.issue(&node(name), &request).unwrap();
        Identity::install(&dir, self.authority.pem(), &certificate).unwrap()
    }
}

pub(crate) fn localhost() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) async fn listen(identity: &Identity) -> Listener {
    Listener::bind(localhost(), identity, ListenOptions::default()).await.unwrap()
}
