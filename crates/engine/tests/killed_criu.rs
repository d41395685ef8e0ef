//! What becomes of a container when CRIU does not come to its end as it should.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use godwit_criu::CriuError;
use godwit_engine::{ContainerConfig, ContainerStatus, Engine, EngineError};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::sockopt::TcpRepair;
use nix::sys::socket::{SockaddrStorage, getsockopt, setsockopt};
use nix::unistd::Pid;
use rustix::process::{Pid as RawPid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use support::{LIMIT, Lan, Node, criu, dump_options, output, stopped, until};

const COUNTER: &str = "i=0; while true; do i=$((i+1)); echo $i > /tmp/count; done";

fn count(config: &ContainerConfig) -> u64 {
    let text = std::fs::read_to_string(config.rootfs.join("tmp/count"));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn tracer(pid: u32) -> i32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("TracerPid:")).map_or(0, |pid| pid.trim().parse().unwrap())
}

/// A killed CRIU leaves the freezer open and the tasks running, or takes the container with it when
/// it dies between two steps of its injected code. That is why godwit never kills it; when it
/// happens, it is said, and the container is not left frozen for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_criu_is_reported_and_the_container_is_not_left_frozen() {
    let mut node = Node::new();
    for round in 0..6 {
        let config = node.container(&format!("web{round}"), COUNTER);
        let state = node.runc.run(&config).await.unwrap();
        until("the counter runs", || count(&config) > 10);
        node.runc.freeze(&config).await.unwrap();
        let (images, work) = (node.path(&format!("images{round}")), node.path("work"));
        let options = dump_options(&node, &config, &images, &work).await;
        let dump = tokio::spawn(async move { criu().dump(options).await });
        until("CRIU is at work", || tracer(state.pid) != 0 || dump.is_finished());
        tokio::time::sleep(Duration::from_millis(3 * round)).await;
        let criu = tracer(state.pid);
        // A fast CRIU may have ended before.
        let killed = criu != 0 && kill(Pid::from_raw(criu), Signal::SIGKILL).is_ok();
        let result = dump.await.unwrap();
        assert!(matches!(&result, Ok(_) | Err(CriuError::Died { .. })), "{result:?}");
        assert!(killed || result.is_ok(), "{result:?}");
        match node.runc.thaw(&config).await {
            Ok(()) | Err(EngineError::NotFound(_)) => {}
            Err(error) => panic!("{error}"),
        }
        let seen = count(&config);
        let ended = || config.directory.join("exit.json").exists();
        until("it goes on, or has ended", || count(&config) > seen + 10 || ended());
        if ended() {
            assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Stopped);
            assert!(node.runc.wait(&config).await.unwrap() > 128);
        }
        node.runc.delete(&config).await.unwrap();
    }
}

/// The socket of the container's main process that is connected.
fn connection(pid: u32) -> OwnedFd {
    let handle =
        pidfd_open(RawPid::from_raw(i32::try_from(pid).unwrap()).unwrap(), PidfdFlags::empty()).unwrap();
    let numbers = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| {
        let name = entry.unwrap().file_name();
        name.to_str().unwrap().parse().unwrap()
    });
    let mut files = numbers.map(|number| pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()).unwrap());
    files.find(|file| nix::sys::socket::getpeername::<SockaddrStorage>(file.as_raw_fd()).is_ok()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_a_killed_criu_has_left_in_repair_mode_goes_on() {
    let mut node = Node::new();
    let lan = Lan::new(&[&node.namespace]);
    let config = node.container("web", "exec nc -l -p 7000 -e cat");
    node.runc.run(&config).await.unwrap();
    let mut client = lan.connect(7000);
    client.send("before");
    assert_eq!(client.receive(), "before");
    let pid = node.runc.state(&config).await.unwrap().pid;
    let socket = connection(pid);
    let mode = || getsockopt(&socket, TcpRepair).unwrap();

    node.runc.freeze(&config).await.unwrap();
    setsockopt(&socket, TcpRepair, &1).unwrap();
    client.send("meanwhile");
    // A CRIU that came to an end has closed the freezer, and left nothing.
    node.runc.recover(&config).await.unwrap();
    assert_eq!(mode(), 1);
    // One that was killed has not closed it. Here the process is stopped, so that it does not make a call by chance.
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGSTOP).unwrap();
    thaw_by_hand(&node, &config).await;
    node.runc.recover(&config).await.unwrap();
    assert_eq!(mode(), 0);
    assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Paused);
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGCONT).unwrap();
    node.runc.thaw(&config).await.unwrap();
    assert_eq!(client.receive(), "meanwhile");
    client.send("after");
    assert_eq!(client.receive(), "after");
}

/// Opens the freezer as CRIU does.
async fn thaw_by_hand(node: &Node, config: &ContainerConfig) {
    let freezer = node.runc.dump_target(config).await.unwrap().freezer;
    let (v1, v2) = (freezer.join("freezer.state"), freezer.join("cgroup.freeze"));
    if v1.exists() {
        std::fs::write(v1, "THAWED").unwrap();
    } else {
        std::fs::write(v2, "0").unwrap();
    }
}

/// Frozen by another hand than the engine's, a stopped process makes CRIU wait for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_criu_that_can_only_go_on_after_a_thaw_is_thawed() {
    let mut node = Node::new();
    // CRIU cuts a sleep short, and that of BusyBox 1.37 then ends.
    let script = "sleep 1000 & kill -STOP $!; echo up; while true; do sleep 1000; done";
    let config = node.container("web", script);
    node.runc.run(&config).await.unwrap();
    until("it is up", || output(&config).contains("up"));
    until("the stopped process is stopped", || stopped(&node, &config).len() == 1);
    let freezer = node.runc.dump_target(&config).await.unwrap().freezer.join("freezer.state");
    if !freezer.exists() {
        // cgroup v2 freezes stopped processes in a way that can be traced.
        return;
    }
    std::fs::write(&freezer, "FROZEN").unwrap();
    let options = dump_options(&node, &config, &node.path("images"), &node.path("work")).await;
    let given_up = tokio::time::timeout(Duration::from_secs(1), criu().dump(options)).await;
    assert!(given_up.is_err(), "this kernel does not have the problem: {given_up:?}");
    tokio::time::timeout(LIMIT, node.runc.thaw(&config)).await.unwrap().unwrap();
    assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Running);
    // On its way from the freezer to its stop for an instant.
    until("the stopped process is stopped again", || stopped(&node, &config).len() == 1);
}
