//! Labs with daemons: the nodes form a cluster, survive the death of a daemon, and all goes at the
//! end. Needs root and the workspace's programs (`cargo build`).
#![allow(clippy::unwrap_used)]

use std::{fs, net::SocketAddr, net::TcpStream, path::Path, time::Duration};

use godwit_lab::{Lab, LabConfig, LabError};

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
    let guard = Guard(Lab::up(&LabConfig::new("cluster", ["a", "b", "c"])).unwrap());
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
    Lab::down("cluster").unwrap();
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
    for path in ["/run/godwit/labs/cluster", "/var/lib/godwit/labs/cluster"] {
        assert!(!Path::new(path).exists());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("/labs/cluster") && !mounts.contains("gwl-cluster-"), "{mounts}");
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
