//! Tests with nodes that are virtual machines, with kernels and a systemd of their own: `make test-machines` runs
//! them. Where there is no KVM they are emulated, and take minutes.
#![allow(clippy::unwrap_used, missing_docs)]

mod kernel;
mod moves;

use std::path::PathBuf;

use godwit_lab::LabConfig;

/// Godwit's packages, which the machines install: `make packages` builds them.
fn packages() -> PathBuf {
    let given = std::env::var_os("GODWIT_PACKAGES").map(PathBuf::from);
    given.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/packages"))
}

/// Makes nodes of a lab machines.
fn machines(config: &mut LabConfig, machines: &[(&str, &str)]) {
    config.packages = Some(packages());
    let read = machines.iter().map(|(node, machine)| (*node, machine.parse().unwrap()));
    for (node, machine) in read {
        config.machines.insert(node.to_owned(), machine);
    }
}
