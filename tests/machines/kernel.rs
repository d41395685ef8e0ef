//! Tests of godwit's own on a kernel of Debian's, which has what this machine's may lack: WireGuard, Open vSwitch's
//! datapath, netem.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use godwit_lab::{Lab, Machine};
use godwit_tests::Bed;
use serde_json::Value;

use crate::{run, try_run};

/// Where the set-up scripts put godwit's own CRIU.
const CRIU: &str = "/usr/local/lib/godwit/bin";
/// Where a machine has the tests.
const TESTS: &str = "/srv/tests";

/// Machines without daemons.
fn up(test: &str, nodes: &[&str], machine: &str) -> Bed {
    Bed::up_with(test, |config| {
        config.nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
        config.daemons = false;
        let machine: Machine = machine.parse().unwrap();
        config.machines = nodes.iter().map(|node| ((*node).to_owned(), machine.clone())).collect();
    })
}

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
#[ignore = "boots virtual machines: make test-machines"]
fn machines_reach_each_other_and_what_they_run_is_reported() {
    let bed = up("kernel", &["a", "b"], "debian12");
    let lab = bed.lab();
    assert_eq!(run(lab, "a", "hostname"), "a\n");
    let ended = try_run(lab, "b", "echo out; echo error >&2; exit 3");
    assert_eq!(
        (ended.status.code(), &*ended.stdout, &*ended.stderr),
        (Some(3), &b"out\n"[..], &b"error\n"[..])
    );
    let words = ["a b", "", "it's", "$HOME", "*", "\\"];
    let printed = lab.command("a", "printf").unwrap().arg("%s|").args(words).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), "a b||it's|$HOME|*|\\|");
    run(lab, "a", &format!("ping -c 3 -W 20 {}", lab.address("b").unwrap()));
    // The modules that this is all about.
    for module in ["wireguard", "openvswitch", "sch_netem", "vxlan"] {
        run(lab, "a", &format!("modprobe {module}"));
    }
    // Machines that go on from one snapshot are not to choose the same keys.
    let random = ["a", "b"].map(|node| run(lab, node, "head -c 32 /dev/urandom | sha256sum"));
    assert_ne!(random[0], random[1]);
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn an_arm64_machine_is_on_the_same_switch() {
    let bed = Bed::up_with("arm64", |config| {
        config.daemons = false;
        config.machines.insert("b".to_owned(), "arm64".parse().unwrap());
    });
    let lab = bed.lab();
    assert_eq!(run(lab, "b", "uname -m"), "aarch64\n");
    // Node a is a namespace of this host.
    run(lab, "b", &format!("ping -c 3 -W 20 {}", lab.address("a").unwrap()));
    lab.cut_power("b").unwrap();
    lab.power_on("b").unwrap();
    run(lab, "b", &format!("ping -c 3 -W 20 {}", lab.address("a").unwrap()));
}

/// Runs tests in a machine, and prints what they print; whether all have passed.
fn passes(lab: &Lab, node: &str, name: &str, words: &str) -> bool {
    println!("     Running {name} in a machine with Linux {}", run(lab, node, "uname -r").trim());
    let script = format!("cd /tmp && {TESTS}/{name} --include-ignored {words}");
    let mut command = lab.command(node, "bash").unwrap();
    command.args(["-c", &script]).stdin(Stdio::null()).status().unwrap().success()
}

/// The network's own tests, among them those of WireGuard, which need a kernel that has it, and those of Open
/// vSwitch, here with the kernel's datapath. `GODWIT_MACHINE_TESTS='moves=openvswitch::a_service once,openvswitch'`
/// chooses executables and, of one, the tests whose names contain a word.
#[test]
#[ignore = "boots a virtual machine: make test-machines"]
fn the_networks_tests_pass_on_a_kernel_with_wireguard_and_open_vswitch() {
    let files = tempfile::tempdir().unwrap();
    let names = tests_of("godwit-network", &[], files.path());
    assert!(names.iter().any(|name| name == "wireguard"), "{names:?}");
    let bed = up("network", &["a"], "debian12");
    bed.lab().send("a", files.path(), Path::new(TESTS)).unwrap();
    let chosen = std::env::var("GODWIT_MACHINE_TESTS").unwrap_or_else(|_| names.join(","));
    let chosen: Vec<_> = chosen.split(',').map(|one| one.split_once('=').unwrap_or((one, ""))).collect();
    for (name, _) in &chosen {
        assert!(names.iter().any(|known| known == name), "{name} is none of {names:?}");
    }
    let passes = |name: &str, words: &str| passes(bed.lab(), "a", name, &format!("--test-threads 2 {words}"));
    let failed: Vec<_> = chosen.iter().filter(|(name, words)| !passes(name, words)).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Daemons that encrypt, in a lab inside the machine: a cluster founded with `auto`, moves, restarts.
#[test]
#[ignore = "boots a virtual machine: make test-machines"]
fn services_move_between_nodes_that_encrypt_by_the_kernels_wireguard() {
    let files = tempfile::tempdir().unwrap();
    let name = tests_of("godwit-tests", &["--test", "e2e"], files.path()).remove(0);
    for program in [
        "godwit",
        "godwitd",
        "godwit-shim",
        "godwit-runtime",
        "godwit-pager",
        "godwit-tar",
        "godwit-lab",
        "godwit-lab-link",
    ] {
        strip(&godwit_tests::programs().join(program), &files.path().join(program));
    }
    let criu = PathBuf::from(CRIU).join("criu");
    std::fs::copy(criu, files.path().join("criu")).expect("godwit's CRIU: run scripts/setup");
    let bed = up("wireguard", &["a"], "debian12:memory=2GiB");
    bed.lab().send("a", files.path(), Path::new(TESTS)).unwrap();
    run(bed.lab(), "a", &format!("mkdir -p {CRIU} && ln -s {TESTS}/criu {CRIU}/criu"));
    // One at a time: a daemon's start is waited for as long as on a real processor.
    let words = "--test-threads 1 network_faults::services_encrypted_by_wireguard network_faults::who_joins_a_cluster";
    assert!(passes(bed.lab(), "a", &name, words), "see above");
}
