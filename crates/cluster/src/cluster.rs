//! The store as nodes use it: each change reads a record, asks a rule what follows, and swaps.
//!
//! ```text
//!            ┌──────────────── differs: with what is there ───────────┐
//!            ▼                                                        │
//!  read ── rule ── write ──► swap ──────────────────────────────────────── done ──► Ok
//!            │ already ──► Ok  │ no answer                            ▲
//!            │ refused ──► Err └──► read back: is it there by now? ───┘
//! ```
//! A swap without an answer may be done later. So it is never taken as not done: the record is read, and if it is as before,
//! the same swap is sent again. Both compare the same revision, and at most one of them is done.
//!
//! That goes on from call to call. A call whose outcome is unknown leaves a swap behind, and what a later call does not reach
//! says nothing about that swap. So a caller says whether it asked before ([`Earlier`]). Two things alone settle it: the
//! answer `Ok`, and a record that has gone on since.
//!
//! A node makes one change of a service at a time: what it finds of its own in a record is of the change under way.

use godwit_names::{NodeName, ServiceName};

use crate::record::{NodeRecord, Record, RecordError, ServiceRecord};
use crate::rules::{self, LeaseRequest, Refusal, Request, Step};
use crate::store::{
    Cause, Compare, Entry, Folder, Key, ReadError, Revision, Store, Swap, SwapError, SwapLimit, Swapped,
    Write,
};

/// Swaps of one change before it gives up: another node changes the same record at most as often as a service moves.
const ATTEMPTS: usize = 16;

/// Why a change was not made, or may have been made.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// A rule refuses it: it is not done.
    #[error("{key}: {refusal}")]
    Refused {
        /// The record.
        key: Key,
        /// Why.
        refusal: Refusal,
    },
    /// The store did not take it: it is not done.
    #[error("{key} is not changed in the cluster's store")]
    NotDone {
        /// The record.
        key: Key,
        /// Why.
        #[source]
        source: Cause,
    },
    /// The record cannot be read: nothing is done to it.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// No store would take such a change: it is not done.
    #[error(transparent)]
    Limit(#[from] SwapLimit),
    /// Unknown: it is done, will be done, or will not. Asking again with [`Earlier::Unknown`] settles it, as soon as it ends
    /// with `Ok` or another error than this one.
    #[error("{key} may be changed in the cluster's store, or will be: the store does not answer; ask again")]
    Unknown {
        /// The record.
        key: Key,
        /// Why.
        #[source]
        source: Cause,
    },
    /// The store has lost what it had acknowledged: what it says of this service is not of now. This call has changed nothing, but
    /// nothing follows from that: a node goes on as if the store were silent.
    #[error("{key} is older in the cluster's store than what this node knows of it: {refusal}")]
    Behind {
        /// The record.
        key: Key,
        /// Which epochs they know.
        refusal: Refusal,
    },
    /// The record has gone on: the change was made and others followed it, or it was not and will not be.
    #[error(
        "{key} has changed in the cluster's store since the store left this node without an answer: {refusal}"
    )]
    Superseded {
        /// The record.
        key: Key,
        /// What the present record says to the request.
        refusal: Refusal,
    },
}

/// Whether a request was made before, by this life of the daemon or an earlier one, without a known outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Earlier {
    /// It was never made: nothing of it is on its way.
    None,
    /// It was made, or may have been: its change may be done at any time.
    Unknown,
}

impl ChangeError {
    /// Whether it is certain that the request has changed nothing, and will change nothing: neither by this call nor by the
    /// earlier ones that the caller told of ([`Earlier`]).
    #[must_use]
    pub fn is_certain(&self) -> bool {
        !matches!(self, Self::Unknown { .. } | Self::Superseded { .. } | Self::Behind { .. })
    }
}

/// Why a record was not read.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The store does not answer.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The bytes are not a record.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// A record with its revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held<R> {
    /// The record.
    pub record: R,
    /// That of the swap that wrote it.
    pub revision: Revision,
}

/// A key with its record. A record that cannot be read does not hide the others.
#[derive(Debug)]
pub struct Listed<R> {
    /// The key.
    pub key: Key,
    /// That of the swap that wrote it.
    pub revision: Revision,
    /// The record.
    pub record: Result<R, RecordError>,
}

/// A page of a list.
#[derive(Debug)]
pub struct List<R> {
    /// In the order of their names.
    pub listed: Vec<Listed<R>>,
    /// That of the store; a watch begins with that of the first page.
    pub revision: Revision,
    /// There are further ones after the last.
    pub more: bool,
}

/// The rules that a cluster applies. There is one good set of them; tests break them one by one.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Of services.
    pub service: fn(Option<&ServiceRecord>, &Request) -> Result<Step<ServiceRecord>, Refusal>,
    /// Of nodes.
    pub lease: fn(Option<&NodeRecord>, &LeaseRequest) -> Result<Step<NodeRecord>, Refusal>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { service: rules::service, lease: rules::lease }
    }
}

/// A store with the rules of ownership.
#[derive(Debug)]
pub struct Cluster<S> {
    store: S,
    rules: Rules,
}

impl<S: Store> Cluster<S> {
    /// The records in a store.
    pub fn new(store: S) -> Self {
        Self::with_rules(store, Rules::default())
    }

    /// With other rules than the good ones.
    pub fn with_rules(store: S, rules: Rules) -> Self {
        Self { store, rules }
    }

    /// The store, for watches.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// A service's record.
    ///
    /// # Errors
    /// The store does not answer, or the record cannot be read.
    pub async fn service(&self, name: &ServiceName) -> Result<Option<Held<ServiceRecord>>, LookError> {
        self.look(&Key::service(name)).await
    }

    /// A node's record.
    ///
    /// # Errors
    /// The store does not answer, or the record cannot be read.
    pub async fn node(&self, name: &NodeName) -> Result<Option<Held<NodeRecord>>, LookError> {
        self.look(&Key::node(name)).await
    }

    async fn look<R: Record>(&self, key: &Key) -> Result<Option<Held<R>>, LookError> {
        Ok(held(key, self.store.get(key).await?)?)
    }

    /// A page of services, after this one.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn services(
        &self,
        after: Option<&ServiceName>,
        limit: usize,
    ) -> Result<List<ServiceRecord>, ReadError> {
        self.list(Folder::Services, after.map(ServiceName::as_str), limit).await
    }

    /// A page of nodes, after this one.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn nodes(&self, after: Option<&NodeName>, limit: usize) -> Result<List<NodeRecord>, ReadError> {
        self.list(Folder::Nodes, after.map(NodeName::as_str), limit).await
    }

    async fn list<R: Record>(
        &self,
        folder: Folder,
        after: Option<&str>,
        limit: usize,
    ) -> Result<List<R>, ReadError> {
        let page = self.store.range(folder, after, limit).await?;
        let read = |entry: Entry| Listed {
            record: R::decode(&entry.key, &entry.value),
            key: entry.key,
            revision: entry.revision,
        };
        Ok(List {
            listed: page.entries.into_iter().map(read).collect(),
            revision: page.revision,
            more: page.more,
        })
    }

    /// Changes a service's record. A request that was made before finds itself done, and is answered with the present record.
    /// That may be further by now: what was claimed or confirmed may be [`State::Moving`](crate::record::State::Moving), or
    /// [`State::Left`](crate::record::State::Left). So a caller acts on the record, not on `Ok`.
    ///
    /// # Errors
    /// It is refused, or the store does not answer; [`ChangeError::is_certain`] says whether nothing was changed.
    pub async fn change(
        &self,
        name: &ServiceName,
        request: &Request,
        earlier: Earlier,
    ) -> Result<Held<ServiceRecord>, ChangeError> {
        let guards = request.still().iter().map(|still| (still.node(), still.compare())).collect();
        let before = match earlier {
            Earlier::None => Sent::Nothing,
            Earlier::Unknown => Sent::Count(request.makes()),
        };
        let rule = |record: Option<&ServiceRecord>| (self.rules.service)(record, request);
        self.settle(Key::service(name), guards, before, rule).await
    }

    /// Begins or renews a node's lease.
    ///
    /// # Errors
    /// It is refused, or the store does not answer. The counter may be raised even so, but the lease is not renewed:
    /// when it was raised is not known.
    pub async fn lease(
        &self,
        name: &NodeName,
        request: &LeaseRequest,
    ) -> Result<Held<NodeRecord>, ChangeError> {
        let rule = |record: Option<&NodeRecord>| (self.rules.lease)(record, request);
        self.settle(Key::node(name), Vec::new(), Sent::Nothing, rule).await
    }

    /// Reads, asks the rule and swaps until one of them has the last word. What the guards compare must not have changed.
    async fn settle<R: Record>(
        &self,
        key: Key,
        guards: Vec<(&NodeName, Compare)>,
        mut sent: Sent,
        rule: impl Fn(Option<&R>) -> Result<Step<R>, Refusal>,
    ) -> Result<Held<R>, ChangeError> {
        // An earlier swap has no answer, for this reason.
        let mut doubt: Option<Cause> = None;
        let mut moved: Option<Refusal> = None;
        let mut found = match self.store.get(&key).await {
            Ok(found) => found,
            Err(error) => return Err(sent.silence(key, error.into())),
        };
        for _ in 0..ATTEMPTS {
            let (now, revision) = match held::<R>(&key, found) {
                Ok(Some(held)) => (Some(held.record), held.revision),
                Ok(None) => (None, Revision::NONE),
                Err(error) if sent == Sent::Nothing => return Err(error.into()),
                Err(error) => return Err(ChangeError::Unknown { key, source: error.into() }),
            };
            let record = match (rule(now.as_ref()), moved.take(), now) {
                (Ok(Step::Write(record)), None, _) => record,
                // A guard that has changed does not change back: no swap of this call can be done any more.
                (Ok(Step::Write(_)), Some(refusal), _) => return Err(ChangeError::Refused { key, refusal }),
                (Ok(Step::Already), _, Some(record)) => return Ok(Held { record, revision }),
                (Ok(Step::Already), _, None) => return Err(refused::<R>(key, Refusal::Missing, None, sent)),
                (Err(refusal), _, now) => return Err(refused(key, refusal, now, sent)),
            };
            let mut compares = vec![Compare { key: key.clone(), revision }];
            compares.extend(guards.iter().map(|(_, compare)| compare.clone()));
            let swap = match Swap::new(compares, vec![Write::Put(key.clone(), record.encode())]) {
                Ok(swap) => swap,
                Err(error) if sent == Sent::Nothing => return Err(error.into()),
                Err(error) => return Err(ChangeError::Unknown { key, source: error.into() }),
            };
            found = match self.store.swap(&swap).await {
                Ok(Swapped::Done(revision)) => return Ok(Held { record, revision }),
                Ok(Swapped::Differs(there)) => {
                    let mut there = there.into_iter();
                    let found = there.next().flatten();
                    let changed = guards.iter().zip(there).find(|((_, compare), entry)| {
                        entry.as_ref().map_or(Revision::NONE, |entry| entry.revision) != compare.revision
                    });
                    moved = changed.map(|((node, _), _)| Refusal::Alive((*node).clone()));
                    found
                }
                Err(SwapError::NotDone(source)) if doubt.is_none() => return Err(sent.silence(key, source)),
                Err(SwapError::NotDone(source) | SwapError::Unknown(source)) => {
                    doubt = Some(source);
                    match self.store.get(&key).await {
                        Ok(found) => found,
                        Err(error) => return Err(ChangeError::Unknown { key, source: error.into() }),
                    }
                }
            };
            sent = Sent::Count(Some(record.count()));
        }
        Err(ChangeError::Unknown { key, source: doubt.unwrap_or_else(|| Box::new(Changing)) })
    }
}

/// Others changed the record again and again.
#[derive(Debug, thiserror::Error)]
#[error("other nodes changed it {ATTEMPTS} times meanwhile")]
struct Changing;

fn held<R: Record>(key: &Key, entry: Option<Entry>) -> Result<Option<Held<R>>, RecordError> {
    entry
        .map(|entry| Ok(Held { record: R::decode(key, &entry.value)?, revision: entry.revision }))
        .transpose()
}

/// What may be on its way to the store of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Nothing,
    /// A swap that writes a record with this count, or, where that depends on what was there, with any.
    Count(Option<u64>),
}

impl Sent {
    /// The store does not answer, and has not got what was to be sent now.
    fn silence(self, key: Key, source: Cause) -> ChangeError {
        if self == Self::Nothing {
            ChangeError::NotDone { key, source }
        } else {
            ChangeError::Unknown { key, source }
        }
    }
}

/// A refusal. What was sent before it compared a record that the rule did not refuse, so it will not be done any more. It may
/// have been done even if it was answered that it differs: a connection may have delivered it twice. But as long as no later
/// owner is there, only this node can have changed what it wrote, and has not.
fn refused<R: Record>(key: Key, refusal: Refusal, now: Option<R>, sent: Sent) -> ChangeError {
    if matches!(refusal, Refusal::Behind { .. }) {
        return ChangeError::Behind { key, refusal };
    }
    let followed = match sent {
        Sent::Nothing => false,
        Sent::Count(None) => true,
        Sent::Count(Some(count)) => now.is_none_or(|now| now.count() > count),
    };
    if followed { ChangeError::Superseded { key, refusal } } else { ChangeError::Refused { key, refusal } }
}

#[cfg(test)]
#[path = "cluster/tests.rs"]
mod tests;
