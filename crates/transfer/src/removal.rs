//! Members that were removed from the cluster, and whose certificates are believed no more.
//!
//! A removal says: of this node no certificate is believed that was issued until then. The cluster's CA
//! signs it, so that it may come from anybody. A node that is let in again under the same name gets a
//! certificate that was issued later.
//!
//! Both verifiers between nodes (`verify`) ask [`Removals`], and so does every connection that is up, at each of its reads
//! and writes: a removed node is not heard any more, and nothing is sent to it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::certificate::{self, CLOCK_SKEW, Fingerprint, node_of};
use crate::node::NodeName;

/// What is signed begins with this, so that no other signature of the CA can pass for a removal.
const PURPOSE: &[u8] = b"godwit removal 1\0";

/// Longest signature: ECDSA with P-256 in DER has 72 bytes, and other CAs' keys are larger.
pub const MAX_SIGNATURE: usize = 1024;

/// Why a removal is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemovalError {
    /// The signature is not the CA's.
    #[error("the removal of node `{0}` was not signed by the cluster's CA")]
    Forged(NodeName),
}

/// The CA's word that a node was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// The node.
    pub node: NodeName,
    /// Its certificates that were issued until then are refused, in seconds since 1970.
    pub until: u64,
    /// The CA's signature.
    pub signature: Vec<u8>,
}

impl Removal {
    /// The bytes that the CA signs.
    pub(crate) fn words(ca: &CertificateDer<'_>, node: &NodeName, until: u64) -> Vec<u8> {
        let mut words = PURPOSE.to_vec();
        words.extend(Fingerprint::of(ca).as_bytes());
        words.extend(until.to_be_bytes());
        words.extend(node.as_str().as_bytes());
        words
    }

    /// Checks that this CA has signed it.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, ca: &CertificateDer<'_>) -> Result<(), RemovalError> {
        let forged = || RemovalError::Forged(self.node.clone());
        let (_, parsed) = X509Certificate::from_der(ca).map_err(|_| forged())?;
        let key = &parsed.public_key().subject_public_key.data;
        ring::signature::UnparsedPublicKey::new(&ring::signature::ECDSA_P256_SHA256_ASN1, key)
            .verify(&Self::words(ca, &self.node, self.until), &self.signature)
            .map_err(|_| forged())
    }
}

/// The removals that a node has heard of; clones share them.
#[derive(Clone, Default)]
pub struct Removals(Arc<Heard>);

#[derive(Default)]
struct Heard {
    until: RwLock<HashMap<NodeName, u64>>,
    /// Changes with each removal, so that a connection need not look each time.
    turn: AtomicU64,
}

impl fmt::Debug for Removals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Removals").field(&self.lock().len()).finish()
    }
}

impl Removals {
    fn lock(&self) -> std::sync::RwLockReadGuard<'_, HashMap<NodeName, u64>> {
        // One insertion is all that happens under the lock: nothing is half done.
        self.0.until.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses from now on what a removal, which was checked, names; whether that is news.
    pub fn add(&self, removal: &Removal) -> bool {
        let mut until = self.0.until.write().unwrap_or_else(PoisonError::into_inner);
        let known = until.entry(removal.node.clone()).or_default();
        let news = removal.until > *known;
        *known = removal.until.max(*known);
        drop(until);
        self.0.turn.fetch_add(1, Ordering::Release);
        news
    }

    /// Until when issued certificates of a node are refused, in seconds since 1970.
    #[must_use]
    pub fn of(&self, node: &NodeName) -> Option<u64> {
        self.lock().get(node).copied()
    }

    /// Whether a certificate is of a node that was removed after it was issued.
    #[must_use]
    pub fn refuses(&self, certificate: &CertificateDer<'_>) -> bool {
        Holder::of(certificate).is_some_and(|holder| self.refuses_holder(&holder))
    }

    fn refuses_holder(&self, holder: &Holder) -> bool {
        self.of(&holder.node).is_some_and(|until| holder.issued <= until)
    }
}

/// Who has a certificate, and since when.
#[derive(Debug, Clone)]
struct Holder {
    node: NodeName,
    /// Seconds since 1970.
    issued: u64,
}

impl Holder {
    fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (from, _) = certificate::validity(certificate, "the certificate").ok()?;
        Some(Self { node: node_of(certificate)?, issued: from.saturating_add(CLOCK_SKEW.as_secs()) })
    }
}

/// Whether the peer of a connection, by the certificate that it has shown, is still a member.
#[derive(Debug, Clone)]
pub struct Membership {
    removals: Removals,
    holder: Holder,
    seen: u64,
}

impl Membership {
    /// Of the peer that has shown this certificate.
    pub(crate) fn of(removals: &Removals, certificate: &CertificateDer<'_>) -> Option<Self> {
        Some(Self { removals: removals.clone(), holder: Holder::of(certificate)?, seen: u64::MAX })
    }

    /// Whether the peer was removed since its certificate was issued.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.removals.refuses_holder(&self.holder)
    }

    /// An error once the peer was removed.
    pub(crate) fn check(&mut self) -> std::io::Result<()> {
        let turn = self.removals.0.turn.load(Ordering::Acquire);
        if turn == self.seen {
            return Ok(());
        }
        if self.is_refused() {
            let words = format!("node {} was removed from the cluster", self.holder.node);
            return Err(std::io::Error::new(std::io::ErrorKind::ConnectionAborted, words));
        }
        self.seen = turn;
        Ok(())
    }
}
