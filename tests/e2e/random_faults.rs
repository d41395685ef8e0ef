//! Faults of every kind at random moments of moves. Needs root.
//!
//! `GODWIT_FAULT_SEED` chooses other faults, `GODWIT_FAULT_MINUTES` how long they come: 20 s in `make test`, ten
//! minutes in `make test-full`.

use std::{env, time::Duration};

use godwit_tests::{random_faults, tier};

#[test]
fn a_service_outlives_faults_of_every_kind_at_any_moment() {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seed = number("GODWIT_FAULT_SEED").unwrap_or(1);
    let usual = Duration::from_secs(if tier::is_full() { 600 } else { 20 });
    let time = number("GODWIT_FAULT_MINUTES").map_or(usual, |minutes| Duration::from_secs(60 * minutes));
    println!("to repeat: GODWIT_FAULT_SEED={seed}");
    println!("{} moves in {time:?}", random_faults::run("chaos", seed, time));
}
