//! Labs with daemons: the nodes form a cluster, survive the death of a daemon, and all goes at the
//! end. Needs root and the workspace's programs (`cargo build`).
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use godwit_lab::{Lab, LabConfig, LabError, workload::Workload};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

struct Guard(Lab);

impl Drop for Guard {
    fn drop(&mut self) {
        match Lab::down(self.0.name()) {
            Ok(()) | Err(LabError::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn daemon(lab: &Lab, node: &str) -> Option<i32> {
    let status = Lab::status(lab.name()).unwrap();
    status.hosts.iter().find(|host| host.name == node).unwrap().daemon
}

#[test]
fn a_cluster_comes_up_survives_a_killed_daemon_and_goes() {
    let guard = Guard(Lab::up(&LabConfig::new("three", ["a", "b", "c"])).unwrap());
    let lab = &guard.0;
    let pids: Vec<i32> = ["a", "b", "c"].iter().map(|node| daemon(lab, node).unwrap()).collect();
    for node in ["a", "b", "c"] {
        assert!(lab.socket(node).unwrap().exists());
        assert!(lab.log(node).unwrap().exists());
        // It listens in its own namespace, on its own address.
        let peers = SocketAddr::from((lab.address(node).unwrap(), 7117));
        lab.inside("client", || TcpStream::connect_timeout(&peers, Duration::from_secs(5)).unwrap()).unwrap();
    }

    lab.stop_node("b").unwrap();
    assert_eq!(daemon(lab, "b"), None);
    lab.stop_node("b").unwrap();
    lab.start_node("b").unwrap();
    let again = daemon(lab, "b").unwrap();
    assert!(!pids.contains(&again));
    let message = lab.start_node("b").unwrap_err().to_string();
    assert!(message.contains(&format!("it runs already as process {again}")), "{message}");
    lab.restart_node("a").unwrap();

    let message = lab.stop_node("client").unwrap_err().to_string();
    assert!(message.contains("has no host client") || message.contains("no node client"), "{message}");

    let pids: Vec<i32> = ["a", "b", "c"].iter().map(|node| daemon(lab, node).unwrap()).collect();
    Lab::down("three").unwrap();
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
    for path in ["/run/godwit/labs/three", "/var/lib/godwit/labs/three"] {
        assert!(!Path::new(path).exists());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("/labs/three/") && !mounts.contains("gwl-three-"), "{mounts}");
}

#[test]
fn a_node_gets_other_programs_at_its_next_start_and_the_lab_remembers_them() {
    let mut guard = Guard(Lab::up(&LabConfig::new("two-programs", ["a", "b"])).unwrap());
    let lab = &mut guard.0;
    let directory = tempfile::tempdir().unwrap();
    let missing = lab.install("b", Some(directory.path())).unwrap_err();
    assert!(matches!(missing, LabError::NoProgram { name: "godwitd", .. }), "{missing}");
    let built = Path::new(env!("CARGO_BIN_EXE_godwit-lab-link")).parent().unwrap();
    for program in ["godwitd", "godwit-shim", "godwit-runtime", "godwit-pager", "godwit-tar"] {
        fs::copy(built.join(program), directory.path().join(program)).unwrap();
    }
    let started_from = |lab: &Lab, node: &str| {
        let program = fs::read_link(format!("/proc/{}/exe", daemon(lab, node).unwrap())).unwrap();
        program.parent().unwrap().to_owned()
    };
    lab.install("b", Some(directory.path())).unwrap();
    assert_eq!(started_from(lab, "b"), built, "a daemon that runs stays");
    let lab = &mut Lab::open("two-programs").unwrap();
    for node in ["a", "b"] {
        lab.restart_node(node).unwrap();
    }
    assert_eq!([started_from(lab, "a"), started_from(lab, "b")], [built, directory.path()]);
    lab.install("b", None).unwrap();
    lab.restart_node("b").unwrap();
    assert_eq!(started_from(lab, "b"), built);
    lab.install("client", None).unwrap_err();
}

/// Pids of the running processes whose command line or cgroup has `text` in it.
fn processes(text: &str) -> Vec<i32> {
    let pids =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let holds = |pid: &i32| {
        ["cmdline", "cgroup"].iter().any(|file| {
            let content = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&content).contains(text)
        })
    };
    // What has ended and waits for init to take notice does not count.
    let alive =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    pids.filter(holds).filter(alive).collect()
}

#[test]
fn services_go_with_their_lab_running_frozen_or_orphaned() {
    let guard = Guard(Lab::up(&LabConfig::new("cluster-svc", ["a"])).unwrap());
    let lab = &guard.0;
    let scratch = tempfile::tempdir().unwrap();
    let preset = Workload::Busybox.build(scratch.path().join("root")).unwrap();
    let godwit = Path::new(env!("CARGO_BIN_EXE_godwit-lab-link")).with_file_name("godwit");
    for service in ["running", "frozen", "orphaned"] {
        let mut run = Command::new(&godwit);
        run.args(["--lab", lab.name(), "--node", "a", "run", "--name", service, "--rootfs"])
            .arg(&preset.rootfs);
        let output = run.arg("--").args(&preset.command).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    // The source of an unfinished migration looks like this,
    let cgroup = Path::new("/godwit-lab/cluster-svc/a/frozen");
    let version_1 = PathBuf::from(format!("/sys/fs/cgroup/freezer{}/freezer.state", cgroup.display()));
    if version_1.exists() {
        fs::write(version_1, "FROZEN").unwrap();
    } else {
        fs::write(format!("/sys/fs/cgroup{}/cgroup.freeze", cgroup.display()), "1").unwrap();
    }
    // and this is left when both the daemon and a shim are killed.
    lab.stop_node("a").unwrap();
    let shims = processes("services/orphaned/");
    assert!(!shims.is_empty());
    for shim in shims {
        // Some of them may have ended with another.
        let _ = kill(Pid::from_raw(shim), Signal::SIGKILL);
    }
    assert!(processes("/godwit-lab/cluster-svc/a/").len() >= 3);

    Lab::down("cluster-svc").unwrap();
    assert_eq!(processes("cluster-svc"), Vec::<i32>::new());
    assert!(preset.rootfs.join("usr/bin/busybox").exists(), "what the service was made from stays");
    for path in ["/run/godwit/labs/cluster-svc", "/var/lib/godwit/labs/cluster-svc"] {
        assert!(!Path::new(path).exists());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("cluster-svc"), "{mounts}");
    for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        assert!(!hierarchy.path().join("godwit-lab/cluster-svc").exists());
    }
}

#[test]
fn a_daemon_that_cannot_start_fails_the_lab_with_its_own_words() {
    let mut config = LabConfig::new("cluster-bad", ["a"]);
    config.programs.serve_arguments = vec!["--no-such-option".to_owned()];
    let message = Lab::up(&config).unwrap_err().to_string();
    assert!(
        message.contains("node a of lab cluster-bad") && message.contains("--no-such-option"),
        "{message}"
    );
    assert!(!Lab::list().contains(&"cluster-bad".to_owned()));
}
