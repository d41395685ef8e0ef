//! What can be wrong with a node's identity or a cluster's authority.

use std::{io, path::PathBuf};

use crate::node::{NodeName, NodeNameError};

/// Why an identity could not be made, installed or loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file or directory could not be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The node has no identity yet.
    #[error(
        "this node belongs to no cluster: {path} is missing; found a cluster with `godwit cluster init` or join one with `godwitd join TOKEN`"
    )]
    Missing {
        /// The file that is not there.
        path: PathBuf,
    },
    /// Others than the owner may read a private key.
    #[error(
        "the private key {path} can be read by others (mode {mode:o}); run `chmod 600 {path}`, and make a new identity if somebody may have read it"
    )]
    KeyExposed {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A CA is there already.
    #[error(
        "a cluster was founded here already: {path} exists; use it, or move it away if its cluster is gone"
    )]
    AuthorityExists {
        /// The file that is there.
        path: PathBuf,
    },
    /// This node has a certificate already.
    #[error("this node has an identity already: {path} exists; move it away to join another cluster")]
    IdentityExists {
        /// The file that is there.
        path: PathBuf,
    },
    /// A file or an answer is not the certificate or key it should be.
    #[error("{what} is not a valid PEM {kind}")]
    Invalid {
        /// The file, or what it was received as.
        what: String,
        /// Certificate, private key or request.
        kind: &'static str,
    },
    /// The certificate was not issued by the CA it came with.
    #[error("the certificate of node `{node}` was not issued by the CA that it came with")]
    NotIssued {
        /// The node's name in the certificate.
        node: NodeName,
        /// What the verifier said.
        source: rustls::Error,
    },
    /// The certificate names no node, or more than one.
    #[error(
        "{what} is not a node's certificate: it must carry exactly one name, <node>{}",
        crate::node::NODE_DOMAIN
    )]
    NoNode {
        /// The file, or what it was received as.
        what: String,
    },
    /// The certificate and the key do not belong together.
    #[error("the certificate of node `{node}` does not belong to the private key {path}")]
    KeyMismatch {
        /// The node's name in the certificate.
        node: NodeName,
        /// The key's file.
        path: PathBuf,
    },
    /// The request to be signed is not one, or its signature is wrong.
    #[error("the certificate request for node `{node}` cannot be granted")]
    Request {
        /// The node it is for.
        node: NodeName,
        /// What the parser said.
        source: rcgen::Error,
    },
    /// The cluster's name cannot be used.
    #[error(
        "`{name}` cannot be a cluster's name; use 1 to 64 letters, digits, dots, hyphens and underscores"
    )]
    ClusterName {
        /// The refused name, with its control characters escaped.
        name: String,
    },
    /// A certificate that came as a renewal is another node's.
    #[error("the renewed certificate of node `{own}` is for node `{other}`")]
    OtherNode {
        /// This node.
        own: NodeName,
        /// The node in the certificate.
        other: NodeName,
    },
    /// A certificate that came as a renewal does not last longer.
    #[error("the renewed certificate of node `{node}` does not last longer than the one it has")]
    NoLonger {
        /// This node.
        node: NodeName,
    },
    /// The CA has expired.
    #[error("the cluster's CA has expired; found a new cluster and let its nodes join it")]
    AuthorityExpired,
    /// A key or a certificate could not be made.
    #[error("cannot make a {what}")]
    Make {
        /// Key, request or certificate.
        what: &'static str,
        /// What the library said.
        source: rcgen::Error,
    },
    /// The operating system gave no random bytes.
    #[error("no serial number could be made for the certificate")]
    Random(#[source] io::Error),
    /// The clock is set before 1970.
    #[error("this machine's clock is before 1970; set it")]
    Clock,
    /// The node's name is not one.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
}
