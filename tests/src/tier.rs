//! How much the end-to-end tests do.
//!
//! | | `make test` | `make test-full` (`GODWIT_TEST_FULL=1`) |
//! |---|---|---|
//! | a source against a destination in one process (`crates/migration/src/loopback/faults.rs`) | every fault, in two modes | every fault in each mode |
//! | faults in migrations | each fault in each phase, the mode rotates | each fault in each phase of each mode |
//! | services under load | each mode once | each mode in both directions, and `auto` |
//! | faults at random moments | 20 s | ten minutes |
//! | containers that an engine makes (`run --engine`), and moves of containers that end in vain | each point with one engine | with Podman and with Docker |
//! | benchmarks | of moves and of their parts | also of pauses, and of what copying costs a service |
//! | an upgrade from the last release (`release.rs` builds it) | not at all | node by node, with pages under way, and joins |
//! | metrics of nodes | Prometheus' own checks of metrics and alerts | and a Prometheus that scrapes two nodes |
//! | programs that change their memory | two modes each, 4 random programs | all modes, 200 random programs |
//! | crossings of such programs, in services, at random polls | 4 of some, by kind | 1,000 of all |
//! | services of the base (`isa/base`) that cross | a shell with children | and Redis, SQLite, nginx, lighttpd, mosquitto, aria2, Lua, gzip, GOCR |
//! | programs that change their instruction set | a selection (`ISA_SELECTION` of the Makefile) | all (`make test-isa-full`) |
//!
//! Both are deterministic: a test that fails once can be repeated.

/// The environment variable that asks for all combinations.
pub const VARIABLE: &str = "GODWIT_TEST_FULL";

/// Whether the tests run in all combinations.
#[must_use]
pub fn is_full() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "1")
}

/// How often a service moves to and fro. The number is even, so that the service ends where it began.
#[must_use]
pub fn moves() -> usize {
    if is_full() { 10 } else { 4 }
}
