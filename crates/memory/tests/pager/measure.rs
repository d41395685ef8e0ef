//! Figures: `cargo test --release -p godwit-memory --test pager measure -- --ignored --nocapture`.

use std::time::Instant;

use godwit_memory::pager::{Event, Stored};

use crate::child::{Op, P};
use crate::service::Pager;
use crate::{BASE, restored};

/// Pages of the push that is measured: 1 GiB.
const PAGES: u64 = 1 << 18;

/// Pages whose faults are measured beside it.
const FAULTS: u64 = 4000;

/// What takes longer was a fault, in ns.
const FAULT_NS: u64 = 2000;

/// Pages of one store and put: 1 MiB.
const BATCH: u64 = 256;

fn fill(pager: &Pager, addr: u64, pages: u64) {
    let bytes = vec![1; usize::try_from(BATCH * P).unwrap()];
    for batch in 0..pages / BATCH {
        let slot = pager.client.store(&bytes).unwrap();
        let entry = Stored { space: 7, addr: addr + batch * BATCH * P, pages: BATCH, slot };
        pager.client.put(&[entry]).unwrap();
    }
    pager.client.state().unwrap();
}

fn percentiles(mut times: Vec<u64>) -> String {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 1000] as f64 / 1000.0;
    format!("p50 {:.1} p99 {:.1} p99.9 {:.1} max {:.1} µs", at(500), at(990), at(999), at(1000))
}

#[test]
#[ignore = "measures"]
fn measure() {
    #[allow(clippy::cast_precision_loss)] // below 2^52
    let gigabytes = (PAGES * P) as f64 / 1e9;
    let pager = Pager::new();
    let start = Instant::now();
    fill(&pager, BASE, PAGES);
    println!("stored {:.2} GB/s", gigabytes / start.elapsed().as_secs_f64());
    let child = restored(&pager, PAGES);
    let start = Instant::now();
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    println!("pushed {:.2} GB/s", gigabytes / start.elapsed().as_secs_f64());
    drop((pager, child));

    let pager = Pager::new();
    fill(&pager, BASE, PAGES);
    let child = restored(&pager, PAGES);
    println!("faults, no push: {}", percentiles(child.ask(Op::Latency, BASE, FAULTS, 1)));
    drop((pager, child));

    // The process touches pages that are pushed last while the push goes on. A fault splits the run, so
    // that the push goes on with its neighbours: fewer faults are met than pages are touched.
    let pager = Pager::new();
    fill(&pager, BASE, PAGES);
    let child = restored(&pager, PAGES);
    let start = Instant::now();
    child.tell(Op::Latency, BASE + (PAGES - FAULTS) * P, FAULTS, 1);
    pager.client.push().unwrap();
    println!("push answered after {:?}", start.elapsed());
    let times = child.answer().0;
    let state = pager.client.state().unwrap();
    println!(
        "faults beside the push, {} of {FAULTS} touched pages, while {} were pushed: {}",
        state.faults,
        state.installed - state.faults,
        percentiles(times.into_iter().filter(|time| *time > FAULT_NS).collect())
    );
    pager.wait_for(&Event::Done);
    println!("pushed beside faults {:.2} GB/s", gigabytes / start.elapsed().as_secs_f64());
}
