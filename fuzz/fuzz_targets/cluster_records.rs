//! Records of the cluster's store, which another node or program may have written: what is read keeps its meaning when
//! it is written again, and no request makes anything of it that cannot be read.
#![no_main]

use godwit_cluster::record::{MAX_RECORD, NodeRecord, Record, ServiceRecord};
use godwit_cluster::rules::{self, LeaseRequest, Request, Step};
use godwit_cluster::store::Key;
use libfuzzer_sys::fuzz_target;
use ulid::Ulid;

fn is_readable<R: Record + PartialEq + std::fmt::Debug>(key: &Key, record: &R) {
    let bytes = record.encode();
    assert!(bytes.len() <= MAX_RECORD, "it is bounded");
    assert_eq!(&R::decode(key, &bytes).expect("its own bytes"), record);
}

fuzz_target!(|input: (&str, u64, u128, &[u8])| {
    let (text, epoch, id, bytes) = input;
    if let Some(key) = Key::parse(text) {
        assert_eq!(key.to_string(), text);
    }
    let (service, node) =
        (Key::service(&"s".parse().expect("a name")), Key::node(&"n".parse().expect("a name")));
    if let Ok(record) = ServiceRecord::decode(&service, bytes) {
        is_readable(&service, &record);
        let (by, to, id) = (record.owner.clone(), "to".parse().expect("a name"), Ulid(id));
        for epoch in [epoch, record.epoch] {
            for request in [
                Request::Claim { by: by.clone(), service: id, id, settings: record.settings },
                Request::HandOver { by: by.clone(), epoch, to: Clone::clone(&to), id },
                Request::Withdraw { by: by.clone(), epoch, id },
                Request::Confirm { by: by.clone(), epoch, id },
                Request::Release { by: by.clone(), epoch },
                Request::TakeOver { by: Clone::clone(&to), epoch, id, still: Vec::new() },
            ] {
                if let Ok(Step::Write(next)) = rules::service(Some(&record), &request) {
                    is_readable(&service, &next);
                    assert!(next.epoch >= record.epoch, "epochs do not fall");
                }
            }
        }
    }
    if let Ok(record) = NodeRecord::decode(&node, bytes) {
        is_readable(&node, &record);
        for request in [LeaseRequest::Begin { life: Ulid(id) }, LeaseRequest::Renew { life: record.life }] {
            if let Ok(Step::Write(next)) = rules::lease(Some(&record), &request) {
                is_readable(&node, &next);
                assert!(next.counter > record.counter, "counters rise");
            }
        }
    }
});
