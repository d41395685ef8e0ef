//! Records of the cluster's store, which another node or program may have written: what is read keeps its meaning when
//! it is written again, and no request makes anything of it that cannot be read. An input is any bytes, and those of a
//! good record of which some are others: random bytes alone are hardly ever a record.
#![no_main]

use std::time::Duration;

use godwit_cluster::clock::BootTime;
use godwit_cluster::lease::{Observed, Still};
use godwit_cluster::promise::{Fence, RestartFrom, Settings};
use godwit_cluster::record::{MAX_COUNT, MAX_RECORD, NodeRecord, Record, ServiceRecord, State};
use godwit_cluster::rules::{self, LeaseRequest, Request, Step};
use godwit_cluster::store::{Key, Revision};
use godwit_names::NodeName;
use libfuzzer_sys::fuzz_target;
use ulid::Ulid;

fn is_readable<R: Record + PartialEq + std::fmt::Debug>(key: &Key, record: &R) {
    let bytes = record.encode();
    assert!(bytes.len() <= MAX_RECORD, "it is bounded");
    assert_eq!(&R::decode(key, &bytes).expect("its own bytes"), record);
}

/// A good record, of a kind that the number chooses.
fn good(kind: u8, epoch: u64, id: u128) -> ServiceRecord {
    let (owner, to) = ("owner".parse().expect("a name"), "to".parse().expect("a name"));
    let state = match kind % 3 {
        0 => State::Owned,
        1 => State::Moving { to, id: Ulid(id) },
        _ => State::Left,
    };
    let fence = if kind & 4 == 0 { Fence::Default } else { Fence::Strict };
    let restart_from = if kind & 8 == 0 { RestartFrom::None } else { RestartFrom::Image };
    let settings = Settings { fence, restart_from };
    ServiceRecord { id: Ulid(7), owner, epoch: epoch >> 1 | 1, begun: Ulid(8), state, settings }
}

/// Proof that a node's lease has stood still.
fn stood_still(node: &NodeName) -> Still {
    let (mut observed, now) = (Observed::default(), BootTime::since_boot(Duration::ZERO));
    observed.see(node, None, Revision::NONE, now);
    observed.stood_still(node, Duration::ZERO).expect("it was seen once")
}

fn service(bytes: &[u8], epoch: u64, id: Ulid) {
    let key = Key::service(&"s".parse().expect("a name"));
    let Ok(record) = ServiceRecord::decode(&key, bytes) else { return };
    is_readable(&key, &record);
    let (by, to, taker) =
        (record.owner.clone(), good(0, 1, 0).owner, "taker".parse::<NodeName>().expect("a name"));
    let may_run = match &record.state {
        State::Moving { to, .. } => vec![&record.owner, to],
        State::Owned | State::Left => vec![&record.owner],
    };
    let still = may_run.into_iter().map(stood_still).collect::<Vec<_>>();
    for epoch in [epoch, record.epoch] {
        for request in [
            Request::Claim { by: by.clone(), service: id, id, settings: record.settings },
            Request::HandOver { by: by.clone(), epoch, to: to.clone(), id },
            Request::Withdraw { by: by.clone(), epoch, id },
            Request::Confirm { by: by.clone(), epoch, id },
            Request::Release { by: by.clone(), epoch },
            Request::TakeOver { by: taker.clone(), epoch, id, still: still.clone() },
        ] {
            let taken = matches!(request, Request::TakeOver { .. })
                && epoch == record.epoch
                && record.settings.promise().taken_over
                && (record.begun != id && record.owner != taker && record.state != State::Left);
            assert!(!taken || record.epoch == MAX_COUNT || rules::service(Some(&record), &request).is_ok());
            if let Ok(Step::Write(next)) = rules::service(Some(&record), &request) {
                is_readable(&key, &next);
                assert!(next.epoch >= record.epoch, "epochs do not fall");
                assert!(
                    next.owner == record.owner || next.epoch > record.epoch,
                    "an owner has an epoch of its own"
                );
            }
        }
    }
}

fn node(bytes: &[u8], life: Ulid) {
    let key = Key::node(&"n".parse().expect("a name"));
    let Ok(record) = NodeRecord::decode(&key, bytes) else { return };
    is_readable(&key, &record);
    for request in [LeaseRequest::Begin { life }, LeaseRequest::Renew { life: record.life }] {
        if let Ok(Step::Write(next)) = rules::lease(Some(&record), &request) {
            is_readable(&key, &next);
            assert!(next.counter > record.counter, "counters rise");
        }
    }
}

fuzz_target!(|input: (u8, u64, u128, [(u8, u8); 3], &str, &[u8])| {
    let (kind, epoch, id, others, text, bytes) = input;
    if let Some(key) = Key::parse(text) {
        assert_eq!(key.to_string(), text);
    }
    let life = Ulid(id);
    let mut records = [good(kind, epoch, id).encode(), NodeRecord { life, counter: epoch >> 1 }.encode()];
    for record in &mut records {
        // Many places are beyond the end: there nothing is changed.
        for (at, other) in others {
            if let Some(byte) = record.get_mut(usize::from(at)) {
                *byte = other;
            }
        }
    }
    for bytes in records.iter().map(Vec::as_slice).chain([bytes]) {
        service(bytes, epoch, life);
        node(bytes, life);
    }
});
