//! The end-to-end tests: one executable, so that several labs are up at once whatever file a test is in.
//! `make unit TEST_ARGS=redis` runs those whose path contains `redis`.
//!
//! A lab is named after the test's own word and the process, so that each word is used once.
#![allow(clippy::unwrap_used)]

mod at_once;
mod backends;
mod bench;
mod capture;
mod check;
mod checkpoint;
mod confinement;
mod connections;
mod demo;
mod docker;
mod doctored;
mod engine_faults;
mod engine_nodes;
mod engine_run;
mod engine_volumes;
mod failures_cancel;
mod failures_criu;
mod failures_daemon;
mod failures_link;
mod failures_matrix;
mod failures_refused;
mod failures_serving;
mod files;
mod frozen;
mod hooks;
mod huge_pages;
mod identity;
mod image;
mod ineligible;
mod input;
mod ipv6;
mod kept_files;
mod making;
mod manage;
mod members;
mod memory;
mod mosquitto;
mod namespaces;
mod network_faults;
mod networks;
mod newcomers;
mod nginx;
mod obstacles;
mod options;
mod podman;
mod ports;
mod postgres;
mod prepare;
mod python;
mod random_faults;
mod redis;
mod registry;
mod restarts;
mod shared;
mod stale;
mod terminals;
mod tmpfs;
mod unacknowledged;
mod upgrade;
mod volumes;
mod watches;
mod without;
