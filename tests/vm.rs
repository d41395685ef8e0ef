//! Tests on another kernel than this machine's, in virtual machines: `make test-vm` runs them. They are not
//! part of `make test`, since an emulated processor takes minutes for them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use godwit_tests::vm::{Vm, VmConfig};
use serde_json::Value;

/// How long all tests of one file of a crate may take, emulated.
const ONE_FILE: Duration = Duration::from_secs(900);

/// Where the set-up scripts put godwit's own CRIU.
const CRIU: &str = "/usr/local/lib/godwit/bin";

/// Copies a program, without what only a debugger needs.
fn strip(program: &Path, to: &Path) {
    let done = Command::new("strip").arg("-o").arg(to).arg(program).status().unwrap();
    assert!(done.success(), "{}", program.display());
}

/// Builds the tests of a crate that these words choose, and puts them into a directory, by their names.
fn tests_of(package: &str, words: &[&str], directory: &Path) -> Vec<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--no-run", "--message-format=json", "--package", package]).args(words);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let messages = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let built = messages.filter(|message| message["profile"]["test"] == true);
    let mut names: Vec<_> = built
        .filter_map(|message| {
            let (name, program) = (message["target"]["name"].as_str()?, message["executable"].as_str()?);
            strip(Path::new(program), &directory.join(name));
            Some(name.to_owned())
        })
        .collect();
    names.sort();
    names
}

#[test]
#[ignore = "boots virtual machines: make test-vm"]
fn machines_on_a_segment_reach_each_other_and_what_they_run_is_reported() {
    let address = |last| Ipv4Addr::new(10, 99, 0, last);
    let boot = |name: &str, last| Vm::boot(&VmConfig { address: Some(address(last)), ..VmConfig::new(name) });
    let (mut a, mut b) = (boot("a", 11), boot("b", 12));
    assert_eq!(a.run("hostname"), "a\n");
    assert_eq!(b.try_run("echo out; echo error >&2; exit 3", Duration::from_secs(60)).code, 3);
    a.run(&format!("ping -c 3 -W 20 {}", address(12)));
    // The modules that this is all about.
    for module in ["wireguard", "openvswitch", "sch_netem", "vxlan"] {
        a.run(&format!("modprobe {module}"));
    }
}

/// Runs tests in a machine, and prints what they print; whether all have passed.
fn passes(vm: &mut Vm, name: &str, words: &str) -> bool {
    println!("     Running {name} in a virtual machine with Linux {}", vm.run("uname -r").trim());
    let done = vm.try_run(&format!("cd /tmp && /test/{name} --include-ignored {words}"), ONE_FILE);
    println!("{}", done.output);
    done.code == 0
}

/// The network's own tests, among them those of WireGuard, which need a kernel that has it, and those of Open
/// vSwitch, here with the kernel's datapath.
#[test]
#[ignore = "boots a virtual machine: make test-vm"]
fn the_networks_tests_pass_on_a_kernel_with_wireguard_and_open_vswitch() {
    let files = tempfile::tempdir().unwrap();
    let names = tests_of("godwit-network", &[], files.path());
    assert!(names.iter().any(|name| name == "wireguard"), "{names:?}");
    let mut vm = Vm::boot(&VmConfig { files: Some(files.path().to_owned()), ..VmConfig::new("network") });
    let chosen = std::env::var("GODWIT_VM_TESTS").unwrap_or_default();
    let is_chosen = |name: &&String| chosen.is_empty() || chosen.split(',').any(|one| one == *name);
    let failed: Vec<_> =
        names.iter().filter(is_chosen).filter(|name| !passes(&mut vm, name, "--test-threads 2")).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Daemons that encrypt, in a lab inside the machine: a cluster founded with `auto`, moves, restarts.
#[test]
#[ignore = "boots a virtual machine: make test-vm"]
fn services_move_between_nodes_that_encrypt_by_the_kernels_wireguard() {
    let files = tempfile::tempdir().unwrap();
    let name = tests_of("godwit-tests", &["--test", "e2e"], files.path()).remove(0);
    for program in ["godwit", "godwitd", "godwit-shim", "godwit-pager", "godwit-lab", "godwit-lab-link"] {
        strip(&godwit_tests::programs().join(program), &files.path().join(program));
    }
    std::fs::copy(Path::new(CRIU).join("criu"), files.path().join("criu"))
        .expect("godwit's CRIU: run scripts/setup");
    let files = Some(files.path().to_owned());
    let mut vm = Vm::boot(&VmConfig { files, memory: 2048, ..VmConfig::new("lab") });
    vm.run(&format!("mkdir -p {CRIU} && ln -s /test/criu {CRIU}/criu"));
    // One at a time: a daemon's start is waited for as long as on a real processor.
    let words = "--test-threads 1 network_faults::services_encrypted_by_wireguard network_faults::who_joins_a_cluster";
    assert!(passes(&mut vm, &name, words), "see above");
}
