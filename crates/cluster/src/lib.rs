//! What the nodes of a cluster agree on: who owns a service, and who lives.
//!
//! ```text
//!  godwitd ── asks ──► cluster   reads, asks a rule, swaps; reads back what has no answer
//!                        │ ├──► rules     which record may follow which; promise: what the settings promise
//!                        │ └──► lease     counters that stand still, by one clock
//!                        │         ├──► clock    goes on while the machine is suspended
//!                        │         └──► record   what the store has, as bytes
//!                        ▼
//!                      store (trait): get, range, swap, watch
//!                        └── sqlite: one file
//!
//!  tests: history ──► specification ──► linear     what was asked and answered, and whether one owner after another
//!                                                  explains it
//! ```
//! The promises:
//!
//! - **One owner at every instant.** An owner has an epoch. The next epoch begins with a swap that compares the record, so
//!   one node at most begins it ([`rules`]). What that means for the copies that run depends on the service's settings
//!   ([`promise`]).
//!   A strict service that other nodes take over needs more than this crate before *one copy* can be promised of it: a guard
//!   outside of godwitd that freezes it when the lease lapses, since its containers outlive godwitd.
//! - **No clock of two nodes is compared** ([`lease`]).
//! - **Silence is not an answer.** A swap without an answer may be done later; its type says so ([`store::SwapError`]), and
//!   [`cluster`] finds out.
//! - **Losing the store stops no service**, but one whose settings ask for it.
//! - **Bytes in the store may be anybody's** ([`record`]).
//!
//! `tests/simulation.rs` runs nodes that crash, lose messages and have clocks of different rates, and checks their
//! histories.

pub mod clock;
pub mod cluster;
pub mod history;
pub mod lease;
pub mod linear;
pub mod promise;
pub mod record;
pub mod rules;
pub mod specification;
pub mod sqlite;
pub mod store;

pub use cluster::{ChangeError, Cluster};
