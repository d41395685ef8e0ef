//! `godwit-lab`: labs, the demo and the benchmarks. `godwit lab …` and `godwit bench …` start it.
//!
//! ```text
//!   cli.rs      what can be typed: flags and verbs
//!   lab.rs      godwit lab: the test bed (crates/lab) as commands
//!   demo.rs     godwit lab demo
//!   follow/     godwit lab demo follow
//!   crossing.rs godwit lab demo crossing
//!   experiment/ godwit lab experiment
//!   bench/      godwit bench
//!   stage.rs    a lab for as long as something is done in it
//!   trial.rs    moves of a Redis under load, for demos and the benchmark
//!   services.rs services that can cross       redis.rs   one of them
//!   sums.rs     a service that can cross, and moves of it with crossing and without
//!   iperf.rs    what the link carries
//!   picture.rs  how pictures look
//! ```
//!
//! The connection to a daemon, the flags of a migration, tables and errors are godwit's own: `crates/cli`.

mod bench;
mod cli;
mod crossing;
mod demo;
mod experiment;
mod follow;
mod iperf;
mod lab;
mod picture;
mod redis;
mod services;
mod stage;
mod sums;
mod trial;

use std::process::ExitCode;

use godwit_cli::program;

/// Exit code when the program itself fails.
const FAILURE: u8 = 1;

fn main() -> ExitCode {
    match program::parse::<cli::Cli>(|_, _| None) {
        Ok(cli) => program::run(cli.verb.run(&cli.global), FAILURE),
        Err(code) => code,
    }
}
