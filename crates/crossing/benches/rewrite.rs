//! How long the images of a process take to be rewritten: a part of the time in which a service is frozen.
#![allow(missing_docs)]

#[path = "../tests/fixtures/mod.rs"]
mod fixtures;

use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use godwit_criu::images::ProcessImages;
use godwit_crossing::{Node, Program, Records, Set, Target, rewrite};

fn a_process_of_two_threads(criterion: &mut Criterion) {
    let images = ProcessImages::new(fixtures::images(), fixtures::pages());
    let records = Records::from([(fixtures::PID, fixtures::record())]);
    for (set, machine) in Set::ALL.into_iter().zip(fixtures::MACHINES) {
        let program = Program::decode(&fixtures::executable(machine), fixtures::MODE).expect("it is whole");
        let node = Node { set, page_bytes: 4096, address_end: 1 << 47 };
        let target = Target {
            node,
            programs: BTreeMap::from([(fixtures::PATH.to_vec(), program)]),
            knows_filters: false,
        };
        criterion.bench_function(&format!("a process of two threads to {}", set.name()), |bencher| {
            bencher.iter(|| rewrite(black_box(&images), &records, &target).expect("it fits"));
        });
    }
}

criterion_group!(benches, a_process_of_two_threads);
criterion_main!(benches);
