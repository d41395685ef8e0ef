//! Tests with nodes that are virtual machines, with kernels and a systemd of their own: `make test-machines` runs
//! them. Where there is no KVM they are emulated, and take minutes.
#![allow(clippy::unwrap_used, missing_docs)]

mod arm64;
mod crossing;
mod docker;
mod install;
mod kernel;
mod matrix;
mod moves;
mod podman;
mod power;

use std::process::{Output, Stdio};

use godwit_lab::{Lab, LabConfig, workload::Preset};
use godwit_tests::{
    Bed,
    machines::{PATIENCE, all_ready, packages},
    wait_for_within,
};

/// Makes nodes of a lab machines.
fn machines(config: &mut LabConfig, machines: &[(&str, &str)]) {
    config.packages = Some(packages());
    let read = machines.iter().map(|(node, machine)| (*node, machine.parse().unwrap()));
    for (node, machine) in read {
        config.machines.insert(node.to_owned(), machine);
    }
}

/// Runs a script of bash in a machine.
fn try_run(lab: &Lab, node: &str, script: &str) -> Output {
    lab.command(node, "bash").unwrap().args(["-c", script]).stdin(Stdio::null()).output().unwrap()
}

/// One that must succeed; what it printed.
fn run(lab: &Lab, node: &str, script: &str) -> String {
    let output = try_run(lab, node, script);
    let [said, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "in {node}, {script}: {said}{errors}");
    said
}

/// Puts what a service is made of where it is on the host.
fn send(bed: &Bed, node: &str, preset: &Preset) {
    bed.lab().send(node, &preset.rootfs, &preset.rootfs).unwrap_or_else(|error| panic!("{error}"));
}

/// Waits as long as a machine may take.
fn wait_for<T>(what: &str, found: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, found)
}
