//! What the store has of nodes and services: their records as bytes, and back.
//!
//! ```text
//! node/NAME      version 1, life (16 bytes), counter
//! service/NAME   version 1, service id, owner, epoch, how the epoch began, settings,
//!                state: owned │ moving (destination, move) │ left
//! ```
//! A record is a protobuf message, so that fields can be added. But a godwit that does not know a field drops it when it writes
//! the record again. So each new field raises the version, and a godwit refuses a version that it does not know. Another node or another program may have written the bytes:
//! each field has a bound, and what is not the encoding of a record is an error that names the key.

use godwit_names::NodeName;
use prost::Message as _;
use ulid::Ulid;

use crate::promise::{Fence, RestartFrom, Settings};
use crate::store::Key;

/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// Longest record in bytes. The longest that is written has less than 300: two names of 63 and three ids.
pub const MAX_RECORD: usize = 1024;

/// Highest epoch and counter: what is left above cannot be reached by adding one, so a sum never wraps.
pub const MAX_COUNT: u64 = u64::MAX >> 1;

/// A node, as the others see it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeRecord {
    /// Made anew at each start of its daemon: an earlier life cannot renew the lease of a later one.
    pub life: Ulid,
    /// The lease: the node raises it for as long as it lives and reaches the store. No time is in it.
    pub counter: u64,
}

/// Where a service is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServiceRecord {
    /// The service that has the name: made once when it is created.
    pub id: Ulid,
    /// The node that may run it.
    pub owner: NodeName,
    /// Counts the owners from 1, over all services that have had the name.
    pub epoch: u64,
    /// The claim, the move or the take-over that began the epoch: by it a node recognizes its own change.
    pub begun: Ulid,
    /// Whether it is moving.
    pub state: State,
    /// What it promises.
    pub settings: Settings,
}

/// What an owner does with its service.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum State {
    /// It runs the service.
    Owned,
    /// It moves it. The commit makes the destination the owner, in the next epoch.
    Moving {
        /// The destination.
        to: NodeName,
        /// The move.
        id: Ulid,
    },
    /// It has removed the service. The name is free; its epoch goes on.
    Left,
}

/// Why the bytes of a key are not a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A later release wrote it.
    #[error(
        "the record of {key} in the cluster's store has version {found}, and this godwit knows only {VERSION}; install a newer godwit on this node"
    )]
    Version {
        /// The record.
        key: Key,
        /// Its version.
        found: u32,
    },
    /// No release wrote it.
    #[error(
        "the record of {key} in the cluster's store is damaged: {what}; look on each node with `godwit ps` what runs under its name, and remove the record if nothing does"
    )]
    Damaged {
        /// The record.
        key: Key,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// A record that a key of the store can have.
pub trait Record: Sized {
    /// What rises with each change that another node makes of it: the epoch, or the counter.
    fn count(&self) -> u64;

    /// Its bytes in the store.
    fn encode(&self) -> Vec<u8>;

    /// Reads them.
    ///
    /// # Errors
    /// They are not such a record, or one of a version that is not known here.
    fn decode(key: &Key, bytes: &[u8]) -> Result<Self, RecordError>;
}

#[derive(Clone, PartialEq, prost::Message)]
struct NodeWire {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(bytes = "vec", tag = "2")]
    life: Vec<u8>,
    #[prost(uint64, tag = "3")]
    counter: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ServiceWire {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(bytes = "vec", tag = "2")]
    id: Vec<u8>,
    #[prost(string, tag = "3")]
    owner: String,
    #[prost(uint64, tag = "4")]
    epoch: u64,
    #[prost(bytes = "vec", tag = "5")]
    begun: Vec<u8>,
    #[prost(uint32, tag = "6")]
    fence: u32,
    #[prost(uint32, tag = "7")]
    restart_from: u32,
    #[prost(uint32, tag = "8")]
    state: u32,
    #[prost(string, tag = "9")]
    to: String,
    #[prost(bytes = "vec", tag = "10")]
    moving: Vec<u8>,
}

/// Numbers of states, fences and sources of a restart. 0 is none: a field that was left out is noticed.
const OWNED: u32 = 1;
const MOVING: u32 = 2;
const LEFT: u32 = 3;
const FENCES: [(u32, Fence); 2] = [(1, Fence::Default), (2, Fence::Strict)];
const RESTARTS: [(u32, RestartFrom); 3] =
    [(1, RestartFrom::None), (2, RestartFrom::Checkpoint), (3, RestartFrom::Image)];

/// The bytes of one key, for errors that name it.
struct Reading<'a>(&'a Key);

impl Reading<'_> {
    fn damaged(&self, what: &'static str) -> RecordError {
        RecordError::Damaged { key: self.0.clone(), what }
    }

    fn message<W: prost::Message + Default>(&self, bytes: &[u8]) -> Result<W, RecordError> {
        if bytes.len() > MAX_RECORD {
            return Err(self.damaged("it is too long"));
        }
        W::decode(bytes).map_err(|_| self.damaged("it is not a protobuf message of its kind"))
    }

    fn version(&self, found: u32) -> Result<(), RecordError> {
        match found {
            VERSION => Ok(()),
            0 => Err(self.damaged("it has no version")),
            found => Err(RecordError::Version { key: self.0.clone(), found }),
        }
    }

    fn id(&self, bytes: &[u8]) -> Result<Ulid, RecordError> {
        bytes.try_into().map(Ulid::from_bytes).map_err(|_| self.damaged("an id does not have 16 bytes"))
    }

    fn name(&self, text: String) -> Result<NodeName, RecordError> {
        text.try_into().map_err(|_| self.damaged("a node's name is not one"))
    }

    fn one_of<T: Copy>(&self, known: &[(u32, T)], number: u32) -> Result<T, RecordError> {
        let found = known.iter().find(|(known, _)| *known == number);
        found.map(|(_, value)| *value).ok_or_else(|| self.damaged("a setting has an unknown value"))
    }
}

/// The number of a setting; the tables have all of them.
fn number_of<T: PartialEq>(known: &[(u32, T)], wanted: &T) -> u32 {
    known.iter().find(|(_, value)| value == wanted).map_or(0, |(number, _)| *number)
}

impl Record for NodeRecord {
    fn count(&self) -> u64 {
        self.counter
    }

    fn encode(&self) -> Vec<u8> {
        NodeWire { version: VERSION, life: self.life.to_bytes().into(), counter: self.counter }
            .encode_to_vec()
    }

    fn decode(key: &Key, bytes: &[u8]) -> Result<Self, RecordError> {
        let reading = Reading(key);
        let wire: NodeWire = reading.message(bytes)?;
        reading.version(wire.version)?;
        if wire.counter > MAX_COUNT {
            return Err(reading.damaged("its counter is too high"));
        }
        Ok(Self { life: reading.id(&wire.life)?, counter: wire.counter })
    }
}

impl Record for ServiceRecord {
    fn count(&self) -> u64 {
        self.epoch
    }

    fn encode(&self) -> Vec<u8> {
        let (state, to, moving) = match &self.state {
            State::Owned => (OWNED, String::new(), Vec::new()),
            State::Moving { to, id } => (MOVING, to.to_string(), id.to_bytes().into()),
            State::Left => (LEFT, String::new(), Vec::new()),
        };
        ServiceWire {
            version: VERSION,
            id: self.id.to_bytes().into(),
            owner: self.owner.to_string(),
            epoch: self.epoch,
            begun: self.begun.to_bytes().into(),
            fence: number_of(&FENCES, &self.settings.fence),
            restart_from: number_of(&RESTARTS, &self.settings.restart_from),
            state,
            to,
            moving,
        }
        .encode_to_vec()
    }

    fn decode(key: &Key, bytes: &[u8]) -> Result<Self, RecordError> {
        let reading = Reading(key);
        let wire: ServiceWire = reading.message(bytes)?;
        reading.version(wire.version)?;
        if !(1..=MAX_COUNT).contains(&wire.epoch) {
            return Err(reading.damaged("its epoch is 0 or too high"));
        }
        let moves = !wire.to.is_empty() || !wire.moving.is_empty();
        let owner = reading.name(wire.owner)?;
        let state = match (wire.state, moves) {
            (OWNED, false) => State::Owned,
            (LEFT, false) => State::Left,
            (MOVING, _) => State::Moving { to: reading.name(wire.to)?, id: reading.id(&wire.moving)? },
            _ => return Err(reading.damaged("its state is unknown, or a destination does not belong to it")),
        };
        if matches!(&state, State::Moving { to, .. } if *to == owner) {
            return Err(reading.damaged("it moves to its own node"));
        }
        Ok(Self {
            id: reading.id(&wire.id)?,
            owner,
            epoch: wire.epoch,
            begun: reading.id(&wire.begun)?,
            state,
            settings: Settings {
                fence: reading.one_of(&FENCES, wire.fence)?,
                restart_from: reading.one_of(&RESTARTS, wire.restart_from)?,
            },
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> Key {
        Key::service(&"web".parse().unwrap())
    }

    fn wire() -> ServiceWire {
        let id = Ulid(7).to_bytes().to_vec();
        ServiceWire {
            version: 1,
            id: id.clone(),
            owner: "a".into(),
            epoch: 3,
            begun: id.clone(),
            fence: 1,
            restart_from: 1,
            state: MOVING,
            to: "b".into(),
            moving: id,
        }
    }

    fn read(wire: &ServiceWire) -> Result<ServiceRecord, RecordError> {
        ServiceRecord::decode(&key(), &wire.encode_to_vec())
    }

    #[test]
    fn a_record_of_a_later_release_is_refused_by_its_version() {
        let error = read(&ServiceWire { version: 9, ..wire() }).unwrap_err();
        assert_eq!(error, RecordError::Version { key: key(), found: 9 });
        assert!(error.to_string().contains("service/web"), "{error}");
        let node = NodeWire { version: 2, life: vec![0; 16], counter: 1 }.encode_to_vec();
        assert!(matches!(NodeRecord::decode(&key(), &node), Err(RecordError::Version { found: 2, .. })));
    }

    #[test]
    fn each_field_has_its_bounds() {
        assert!(read(&wire()).is_ok());
        let long = "x".repeat(64);
        for (broken, why) in [
            (ServiceWire { version: 0, ..wire() }, "no version"),
            (ServiceWire { epoch: 0, ..wire() }, "epoch"),
            (ServiceWire { epoch: MAX_COUNT + 1, ..wire() }, "epoch"),
            (ServiceWire { owner: String::new(), ..wire() }, "name"),
            (ServiceWire { owner: "../a".into(), ..wire() }, "name"),
            (ServiceWire { to: long, ..wire() }, "name"),
            (ServiceWire { to: "a".into(), ..wire() }, "its own node"),
            (ServiceWire { id: vec![0; 15], ..wire() }, "16 bytes"),
            (ServiceWire { moving: vec![], ..wire() }, "16 bytes"),
            (ServiceWire { fence: 0, ..wire() }, "setting"),
            (ServiceWire { restart_from: 4, ..wire() }, "setting"),
            (ServiceWire { state: OWNED, ..wire() }, "does not belong"),
            (ServiceWire { state: 4, ..wire() }, "state"),
            (ServiceWire { owner: "x".repeat(MAX_RECORD), ..wire() }, "too long"),
        ] {
            let error = read(&broken).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("service/web"), "{error}");
        }
        let node = |counter| NodeWire { version: 1, life: vec![0; 16], counter }.encode_to_vec();
        assert!(NodeRecord::decode(&key(), &node(MAX_COUNT)).is_ok());
        assert!(NodeRecord::decode(&key(), &node(MAX_COUNT + 1)).is_err());
    }

    proptest! {
        #[test]
        fn a_record_is_read_as_it_was_written(
            (owner, to) in ("[a-m]{1,63}", "[n-z]{1,63}"), epoch in 1..=MAX_COUNT, ids: [u128; 3],
            state in 0..3, fence in 0..2_usize, restart in 0..3_usize,
        ) {
            let record = ServiceRecord {
                id: Ulid(ids[0]),
                owner: owner.parse().unwrap(),
                epoch,
                begun: Ulid(ids[1]),
                state: match state {
                    0 => State::Owned,
                    1 => State::Left,
                    _ => State::Moving { to: to.parse().unwrap(), id: Ulid(ids[2]) },
                },
                settings: Settings { fence: FENCES[fence].1, restart_from: RESTARTS[restart].1 },
            };
            let bytes = record.encode();
            prop_assert!(bytes.len() <= MAX_RECORD);
            prop_assert_eq!(ServiceRecord::decode(&key(), &bytes).unwrap(), record);
        }

        #[test]
        fn what_anybody_wrote_is_a_record_or_an_error(bytes: Vec<u8>) {
            if let Ok(record) = ServiceRecord::decode(&key(), &bytes) {
                prop_assert_eq!(ServiceRecord::decode(&key(), &record.encode()).unwrap(), record);
            }
        }
    }
}
