//! Which connections that have shown no certificate yet are admitted.
//!
//! Some are reserved for the addresses of the cluster's members: strangers that begin handshakes and
//! never end them must not keep members out. Among strangers no address, and no prefix as a site or a host
//! has it (/24 of IPv4, /64 of IPv6), gets all of them. Where all are taken, the handshake that has
//! lasted longest is ended for the next one: an honest one takes a few round trips.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use tokio::task::{AbortHandle, Id};

use crate::options::ListenOptions;

/// The addresses of the cluster's members, as far as they are known; clones share them.
#[derive(Debug, Clone, Default)]
pub struct KnownAddresses(Arc<RwLock<HashSet<IpAddr>>>);

impl KnownAddresses {
    /// Takes these in place of the earlier ones.
    pub fn set(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        let addresses = addresses.into_iter().map(|address| address.to_canonical()).collect();
        // One assignment is all that happens under the lock: nothing is half done.
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    fn contains(&self, address: IpAddr) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(&address)
    }
}

/// A handshake under way.
struct UnderWay {
    address: IpAddr,
    known: bool,
    since: Instant,
    abort: AbortHandle,
}

/// The handshakes under way.
#[derive(Default)]
pub(crate) struct Admission {
    known: KnownAddresses,
    under_way: HashMap<Id, UnderWay>,
}

/// What becomes of one more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may begin.
    Enter,
    /// It may begin, and this one ends.
    InPlaceOf(Id),
    /// It may not.
    Refuse(&'static str),
}

impl Admission {
    /// The addresses for which some are reserved.
    pub(crate) fn known(&self) -> &KnownAddresses {
        &self.known
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.under_way.len()
    }

    /// Whether one more from an address may begin.
    pub(crate) fn judge(&self, address: IpAddr, options: &ListenOptions, now: Instant) -> Verdict {
        let address = address.to_canonical();
        let all = || self.under_way.values();
        if all().filter(|one| one.address == address).count() >= options.max_pending_per_address {
            return Verdict::Refuse("too many unfinished handshakes from this address");
        }
        if self.known.contains(address) {
            return match all().filter(|one| one.known).count() < options.max_pending {
                true => Verdict::Enter,
                false => Verdict::Refuse("too many unfinished handshakes of members"),
            };
        }
        let near = |one: &UnderWay| prefix(one.address) == prefix(address);
        let strangers = || self.under_way.iter().filter(|(_, one)| !one.known);
        let most = options.max_pending.saturating_sub(options.reserved);
        let full = strangers().count() >= most;
        let crowded = strangers().filter(|(_, one)| near(one)).count() >= options.max_pending_per_prefix;
        if !full && !crowded {
            return Verdict::Enter;
        }
        let candidates = strangers().filter(|(_, one)| !crowded || near(one));
        match candidates.min_by_key(|(_, one)| one.since) {
            Some((id, one)) if now.saturating_duration_since(one.since) >= options.patience => {
                Verdict::InPlaceOf(*id)
            }
            _ => Verdict::Refuse("too many unfinished handshakes"),
        }
    }

    /// Notes one that has begun.
    pub(crate) fn enter(&mut self, id: Id, address: IpAddr, abort: AbortHandle) {
        let address = address.to_canonical();
        let known = self.known.contains(address);
        self.under_way.insert(id, UnderWay { address, known, since: Instant::now(), abort });
    }

    /// Ends one.
    pub(crate) fn end(&self, id: Id) {
        if let Some(one) = self.under_way.get(&id) {
            one.abort.abort();
        }
    }

    /// Forgets one that has ended.
    pub(crate) fn leave(&mut self, id: Id) {
        self.under_way.remove(&id);
    }
}

fn prefix(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(address) => u64::from(u32::from(address) >> 8),
        IpAddr::V6(address) => u64::try_from(u128::from(address) >> 64).unwrap_or(u64::MAX),
    }
}
