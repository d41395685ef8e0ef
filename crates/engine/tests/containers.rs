//! Containers from their start to their end, with real runc.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::io::Read;
use std::time::Duration;

use godwit_engine::runc::Runc;
use godwit_engine::runc::log::{LogReader, LogStream};
use godwit_engine::{
    ContainerConfig, ContainerStatus, Engine, EngineError, ExecRequest, ExecStreams, TerminalSize,
};
use support::{LIMIT, Node, until};

/// The container's output as `(stream, text)`.
fn output(config: &ContainerConfig) -> Vec<(LogStream, String)> {
    let entries = LogReader::open(&Runc::log_path(config)).unwrap().read().unwrap();
    entries.iter().map(|entry| (entry.stream, entry.text())).collect()
}

fn says(config: &ContainerConfig, text: &str) -> bool {
    output(config).iter().any(|(_, line)| line.trim_end() == text)
}

async fn wait(node: &Node, config: &ContainerConfig) -> i32 {
    tokio::time::timeout(LIMIT, node.runc.wait(config)).await.expect("it does not end").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn output_and_exit_code_are_kept() {
    let mut node = Node::new();
    let config = node.container("one", "echo out; echo err >&2; printf half; exit 3");
    node.runc.run(&config).await.unwrap();
    assert_eq!(wait(&node, &config).await, 3);
    let state = node.runc.state(&config).await.unwrap();
    assert_eq!((state.status, state.pid, state.exit_code), (ContainerStatus::Stopped, 0, Some(3)));
    let lines = output(&config);
    assert!(lines.contains(&(LogStream::Stdout, "out\n".into())), "{lines:?}");
    assert!(lines.contains(&(LogStream::Stdout, "half".into())), "{lines:?}");
    assert!(lines.contains(&(LogStream::Stderr, "err\n".into())), "{lines:?}");
    node.runc.delete(&config).await.unwrap();
    assert!(matches!(node.runc.state(&config).await, Err(EngineError::NotFound(_))));
    assert!(says(&config, "out"), "the log went with the container");
    node.runc.delete(&config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn much_output_is_complete() {
    let mut node = Node::new();
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done";
    let config = node.container("much", script);
    node.runc.run(&config).await.unwrap();
    assert_eq!(wait(&node, &config).await, 0);
    let mut log = LogReader::open(&Runc::log_path(&config)).unwrap();
    let last = log.tail(20_001, None).unwrap();
    assert_eq!(last.len(), 20_000);
    assert!(last.iter().enumerate().all(|(number, entry)| entry.text() == format!("line {number}\n")));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_frozen_container_has_written_is_in_its_log_when_that_is_asked_for() {
    let mut node = Node::new();
    let script = "while [ ! -e /go ]; do usleep 1000; done; echo whole; echo err >&2; printf part; \
                  touch /said; exec sleep 1000";
    let config = node.container("settled", script);
    node.runc.run(&config).await.unwrap();
    // Its shim does not come to it.
    let shim = std::fs::read_to_string(config.directory.join("shim.lock")).unwrap();
    support::must("kill", &["-STOP", shim.trim()]);
    File::create(config.rootfs.join("go")).unwrap();
    until("it has written", || config.rootfs.join("said").exists());
    node.runc.freeze(&config).await.unwrap();
    assert_eq!(output(&config), []);
    support::must("kill", &["-CONT", shim.trim()]);
    node.runc.settle_log(&config).await.unwrap();
    let mut lines = output(&config);
    lines.sort_by(|(_, one), (_, other)| one.cmp(other));
    let right = [
        (LogStream::Stderr, "err\n".to_owned()),
        (LogStream::Stdout, "part".into()),
        (LogStream::Stdout, "whole\n".into()),
    ];
    assert_eq!(lines, right);
    // Nobody is asked where there is nobody.
    node.runc.thaw(&config).await.unwrap();
    node.runc.signal(&config, 9).await.unwrap();
    assert_eq!(wait(&node, &config).await, 137);
    until("its shim ends", || !std::path::Path::new("/proc").join(shim.trim()).exists());
    node.runc.settle_log(&config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn standard_input_is_at_its_end() {
    let mut node = Node::new();
    let config = node.container("input", "cat; echo end");
    node.runc.run(&config).await.unwrap();
    assert_eq!(wait(&node, &config).await, 0);
    assert!(says(&config, "end"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_is_told_by_the_exit_code() {
    let mut node = Node::new();
    let config = node.container("signal", "echo up; exec sleep 1000");
    node.runc.run(&config).await.unwrap();
    until("it is up", || says(&config, "up"));
    node.runc.signal(&config, 9).await.unwrap();
    assert_eq!(wait(&node, &config).await, 137);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_command_is_named_and_leaves_nothing() {
    let mut node = Node::new();
    let config = node.container_of("missing", &["no-such-command", "x"]);
    let error = node.runc.run(&config).await.unwrap_err();
    assert!(
        matches!(&error, EngineError::Command { command, .. } if command == "no-such-command"),
        "{error}"
    );
    assert!(error.to_string().contains("not found"), "{error}");
    assert!(matches!(node.runc.state(&config).await, Err(EngineError::NotFound(_))));
    assert!(!std::path::Path::new("/sys/fs/cgroup/freezer").join(&config.cgroup).exists());
    let config = node.container_of("directory", &["/etc"]);
    let error = node.runc.run(&config).await.unwrap_err();
    assert!(matches!(error, EngineError::Command { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_needs_nobody_who_started_it() {
    let mut node = Node::new();
    let config = node.container("alone", "i=0; while true; do i=$((i+1)); echo tick $i; usleep 5000; done");
    // Started from a runtime that ends with all its tasks, as a daemon that crashes.
    let (runc, started) = (node.runc.clone(), config.clone());
    let starter = std::thread::spawn(move || {
        tokio::runtime::Runtime::new().unwrap().block_on(async { runc.run(&started).await.unwrap() })
    });
    let state = starter.join().unwrap();
    let text = std::fs::read_to_string(config.directory.join("shim.lock")).unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", text.trim())).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    assert_ne!(fields[1], std::process::id().to_string(), "the shim is a child of its starter");
    assert_eq!(fields[3], text.trim(), "the shim has no session of its own");
    let seen = output(&config).len();
    until("it logs on", || output(&config).len() > seen + 5);
    assert_eq!(node.runc.run(&config).await.unwrap().pid, state.pid, "it was started a second time");
    node.runc.signal(&config, 9).await.unwrap();
    assert_eq!(wait(&node, &config).await, 137);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_sees_output_as_it_comes() {
    let mut node = Node::new();
    let config = node.container("follow", "for i in 1 2 3; do echo $i; usleep 50000; done; sleep 1000");
    let mut log = LogReader::open(&Runc::log_path(&config)).unwrap();
    node.runc.run(&config).await.unwrap();
    let mut text = String::new();
    while text != "1\n2\n3\n" {
        let entries = tokio::time::timeout(LIMIT, log.follow()).await.expect("output is missing").unwrap();
        text.extend(entries.iter().map(|entry| entry.text()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_shim_is_reported_and_the_container_can_be_removed() {
    let mut node = Node::new();
    let config = node.container("orphan", "exec sleep 1000");
    node.runc.run(&config).await.unwrap();
    let waiter = {
        let (runc, config) = (node.runc.clone(), config.clone());
        tokio::spawn(async move { runc.wait(&config).await })
    };
    let shim: i32 =
        std::fs::read_to_string(config.directory.join("shim.lock")).unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Running);
    node.runc.delete(&config).await.unwrap();
    let error = tokio::time::timeout(LIMIT, waiter).await.unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("godwit-shim"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_container_is_deleted() {
    let mut node = Node::new();
    let config = node.container("frozen", "sleep 1000 & sleep 1000");
    node.runc.run(&config).await.unwrap();
    node.runc.freeze(&config).await.unwrap();
    assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Paused);
    tokio::time::timeout(LIMIT, node.runc.delete(&config)).await.unwrap().unwrap();
    assert!(matches!(node.runc.state(&config).await, Err(EngineError::NotFound(_))));
    assert!(!std::path::Path::new("/sys/fs/cgroup/freezer").join(&config.cgroup).exists());
    assert_eq!(node.runc.wait(&config).await.unwrap(), 137);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thawed_container_goes_on() {
    let mut node = Node::new();
    let config = node.container("thaw", "i=0; while true; do i=$((i+1)); echo $i; usleep 1000; done");
    node.runc.run(&config).await.unwrap();
    until("it runs", || output(&config).len() > 5);
    node.runc.freeze(&config).await.unwrap();
    node.runc.freeze(&config).await.unwrap();
    // The shim logs what was in the pipe.
    node.runc.settle_log(&config).await.unwrap();
    let seen = output(&config).len();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(output(&config).len(), seen, "it runs although it is frozen");
    node.runc.thaw(&config).await.unwrap();
    node.runc.thaw(&config).await.unwrap();
    until("it goes on", || output(&config).len() > seen + 5);
    assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_set_in_the_cgroup() {
    let mut node = Node::new();
    let mut config = node.container("limits", "sleep 1000");
    (config.memory_bytes, config.cpu_millis) = (64 << 20, 500);
    node.runc.run(&config).await.unwrap();
    let read = |v1: &str, v2: &str| {
        let root = std::path::Path::new("/sys/fs/cgroup");
        let (controller, file) = v1.split_once('/').unwrap();
        let path = root.join(controller).join(&config.cgroup).join(file);
        let text = std::fs::read_to_string(path)
            .unwrap_or_else(|_| std::fs::read_to_string(root.join(&config.cgroup).join(v2)).unwrap());
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(read("memory/memory.limit_in_bytes", "memory.max"), 64 << 20);
    assert_eq!(read("cpu/cpu.cfs_quota_us", "cpu.max"), 50_000);
    let memory = node.runc.memory_current(&config).await.unwrap();
    assert!((4096..64 << 20).contains(&memory), "{memory}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_resolved_inside() {
    let mut node = Node::new();
    support::must(
        "ip",
        &["-n", &node.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"],
    );
    support::must("ip", &["-n", &node.namespace, "addr", "add", "192.0.2.7/24", "dev", "eth0"]);
    let config = node.container("names", "cat /etc/hostname /etc/hosts");
    node.runc.run(&config).await.unwrap();
    assert_eq!(wait(&node, &config).await, 0);
    assert!(says(&config, "names") && says(&config, "192.0.2.7 names"), "{:?}", output(&config));
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_run_inside_and_are_counted() {
    let mut node = Node::new();
    let config = node.container("exec", "echo up; sleep 1000 & exec sleep 1000");
    node.runc.run(&config).await.unwrap();
    until("it is up", || says(&config, "up"));
    assert_eq!(node.runc.exec_sessions(&config).await.unwrap(), 0);
    let request = |script: &str| ExecRequest {
        command: vec!["sh".into(), "-c".into(), script.into()],
        env: vec!["WORD=hello".into()],
        user: Some("7:8".into()),
        workdir: Some("/tmp".into()),
        terminal: None,
    };
    let script = "read line; echo $WORD $line $(id -u) $PWD; exit 5";
    let mut command = node.runc.exec(&config, &request(script)).await.unwrap();
    until("it is counted", || {
        let sessions = node.runc.exec_sessions(&config);
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(sessions)).unwrap() == 1
    });
    let ExecStreams::Pipes { stdin, stdout, .. } = command.streams else { panic!("a terminal") };
    nix::unistd::write(&stdin, b"you\n").unwrap();
    let mut text = String::new();
    File::from(stdout).read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello you 7 /tmp\n");
    assert_eq!(command.child.wait().await.unwrap().code(), Some(5));
    assert_eq!(node.runc.exec_sessions(&config).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_on_a_terminal_has_the_size_of_its_users_and_is_hung_up_when_that_one_leaves() {
    let mut node = Node::new();
    let config = node.container("terminal", "echo up; exec sleep 1000");
    node.runc.run(&config).await.unwrap();
    until("it is up", || says(&config, "up"));
    let request = |script: &str| ExecRequest {
        command: vec!["sh".into(), "-c".into(), script.into()],
        env: vec![],
        user: None,
        workdir: None,
        terminal: Some(TerminalSize { rows: 7, columns: 33 }),
    };
    let script = "stty size; trap 'stty size; exit 5' WINCH; while :; do read line; echo got $line; done";
    let mut command = node.runc.exec(&config, &request(script)).await.unwrap();
    let ExecStreams::Terminal(terminal) = command.streams else { panic!("pipes") };
    let (mut said, mut buffer) = (String::new(), [0; 256]);
    let mut hear = async |word: &str| {
        while !said.contains(word) {
            let read = tokio::time::timeout(support::LIMIT, terminal.read(&mut buffer)).await;
            let read = read.unwrap_or_else(|_| panic!("{word} was not said: {said}")).unwrap();
            assert!(read > 0, "{word}: {said}");
            said.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
    };
    hear("7 33").await;
    terminal.write_all(b"one\r").await.unwrap();
    hear("got one").await;
    terminal.resize(TerminalSize { rows: 8, columns: 44 }).unwrap();
    // runc passes the size on when it has the signal, and the shell runs its handler between two lines.
    while command.child.try_wait().unwrap().is_none() {
        let _ = terminal.write_all(b"\r").await;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    hear("8 44").await;
    assert_eq!(command.child.wait().await.unwrap().code(), Some(5));
    let command = node.runc.exec(&config, &request("echo up; exec sleep 1000")).await.unwrap();
    until("it is counted", || {
        let sessions = node.runc.exec_sessions(&config);
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(sessions)).unwrap() == 1
    });
    drop(command.streams);
    until("it has ended", || {
        let sessions = node.runc.exec_sessions(&config);
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(sessions)).unwrap() == 0
    });
}
