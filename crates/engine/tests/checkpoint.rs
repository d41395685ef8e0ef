//! Freeze, dump, restore and go on, with real runc and CRIU.

#![allow(clippy::unwrap_used)]

#[path = "../../criu/tests/lazy/pager.rs"]
mod pager;
mod support;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_criu::images::lazy_areas;
use godwit_criu::{CriuError, DumpOptions, Memory};
use godwit_engine::runc::Runc;
use godwit_engine::runc::log::{LogReader, LogStream};
use godwit_engine::{
    ContainerConfig, ContainerStatus, Engine, EngineError, ExecRequest, Mount, MountKind, OnMove,
    RestoreRequest,
};
use support::{
    LIMIT, Node, assert_nothing_left, copy_files, criu, dump, dump_options, output, stopped, until,
};

/// A script that counts into a file as fast as it can, and says that it runs.
const COUNTER: &str = "echo begun; i=0; while true; do i=$((i+1)); echo $i > /tmp/count; done";

fn count(config: &ContainerConfig) -> u64 {
    let text = std::fs::read_to_string(config.rootfs.join("tmp/count"));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Runs a container that says that it is up.
async fn run_up(node: &Node, config: &ContainerConfig, word: &str) {
    node.runc.run(config).await.unwrap();
    until("it is up", || output(config).contains(word));
}

/// A container in which the counter runs.
async fn counter(node: &mut Node) -> ContainerConfig {
    let config = node.container("web", COUNTER);
    node.runc.run(&config).await.unwrap();
    goes_on(&config, 0);
    config
}

/// Waits until it has counted on from there.
fn goes_on(config: &ContainerConfig, from: u64) {
    until("the counter goes on", || count(config) > from + 10);
}

/// A container in which the counter ran until it was frozen, and how far it came.
async fn frozen_counter(node: &mut Node) -> (ContainerConfig, u64) {
    let config = counter(node).await;
    node.runc.freeze(&config).await.unwrap();
    let at = count(&config);
    (config, at)
}

/// To restore these images on a node, with all pages or without.
fn restoring(node: &Node, config: &ContainerConfig, images: PathBuf, lazy_pages: bool) -> RestoreRequest {
    RestoreRequest { config: config.clone(), images, work: node.path("work"), lazy_pages }
}

/// Freezes and dumps a container of one node, and restores it stopped on the other.
async fn move_stopped(
    from: &mut Node,
    to: &mut Node,
    source: &ContainerConfig,
) -> Result<ContainerConfig, EngineError> {
    from.runc.freeze(source).await?;
    let (images, work) = (from.path("images"), from.path("work"));
    dump(from, source, &images, &work).await.unwrap();
    let config = to.copy_of(source);
    let request = restoring(to, &config, images, false);
    tokio::time::timeout(LIMIT, to.runc.restore_stopped(&request)).await.unwrap()?;
    Ok(config)
}

/// Asserts that a dump fails, that the container is as it was before, and that it goes on.
async fn assert_refused(
    node: &Node,
    config: &ContainerConfig,
    result: Result<impl Sized, CriuError>,
) -> String {
    let Err(error @ CriuError::Dump { .. }) = result else { panic!("it was dumped") };
    assert_eq!(node.runc.state(config).await.unwrap().status, ContainerStatus::Paused);
    node.runc.thaw(config).await.unwrap();
    assert_eq!(node.runc.state(config).await.unwrap().status, ContainerStatus::Running);
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_container_does_not_run_before_it_is_continued() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, frozen_at) = frozen_counter(&mut a).await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    assert_eq!(a.runc.state(&source).await.unwrap().status, ContainerStatus::Paused);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(count(&source), frozen_at, "the source ran");
    assert_eq!(count(&copy), frozen_at, "the restored container ran before it was continued");

    b.runc.cont(&copy, &[]).await.unwrap();
    goes_on(&copy, frozen_at);
    assert_eq!(count(&source), frozen_at, "the source ran");
    a.runc.delete(&source).await.unwrap();
    assert!(matches!(a.runc.state(&source).await, Err(EngineError::NotFound(_))));
    let seen = count(&copy);
    goes_on(&copy, seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_can_be_restored_before_its_memory_is_there() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, frozen_at) = frozen_counter(&mut a).await;
    let (images, work) = (a.path("images"), a.path("work"));
    let options = dump_options(&a, &source, &images, &work).await;
    let pid = options.pid;
    criu().dump(DumpOptions { memory: Memory::Lazy, ..options }).await.unwrap();

    // The shell is alone in its container, as process 1.
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut pages = pager::Pages::new();
    for areas in lazy_areas(&images).unwrap() {
        assert_eq!(areas.pid, 1);
        for address in areas.ranges.into_iter().flat_map(|range| range.step_by(4096)) {
            let mut page = vec![0; 4096];
            memory.read_exact_at(&mut page, address).unwrap();
            pages.insert((1, address), page);
        }
    }
    let copy = b.copy_of(&source);
    let pager = pager::Pager::start(&b.path("work"), pages);
    let request = restoring(&b, &copy, images, true);
    tokio::time::timeout(LIMIT, b.runc.restore_stopped(&request)).await.unwrap().unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    goes_on(&copy, frozen_at);
    assert!(pager.stop() > 0, "no page came later");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_container_is_like_any_other() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let script = "trap 'echo bye; exit 4' TERM; while true; do echo tick; usleep 10000; done";
    let source = a.container("web", script);
    run_up(&a, &source, "tick").await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    a.runc.delete(&source).await.unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    until("its output is logged here", || output(&copy).contains("tick"));
    b.runc.signal(&copy, 15).await.unwrap();
    assert_eq!(tokio::time::timeout(LIMIT, b.runc.wait(&copy)).await.unwrap().unwrap(), 4);
    assert!(output(&copy).contains("bye"));
}

/// A shell exchanges its descriptors for the time of each redirection: at a freeze in that instant
/// they are as they are here all the time.
#[tokio::test(flavor = "multi_thread")]
async fn output_goes_on_when_the_descriptors_are_exchanged() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let script = "exec 5>&1 1>&2 2>/dev/null; while true; do echo error; echo output >&5; usleep 10000; done";
    let source = a.container("web", script);
    run_up(&a, &source, "output").await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    a.runc.delete(&source).await.unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    for (stream, text) in [(LogStream::Stdout, "output\n"), (LogStream::Stderr, "error\n")] {
        let is_logged = || {
            let entries = LogReader::open(&Runc::log_path(&copy)).unwrap().read().unwrap();
            entries.iter().any(|entry| (entry.stream, entry.text()) == (stream, text.to_owned()))
        };
        until("its output is logged here", is_logged);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_moves_there_and_back() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let source = counter(&mut a).await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    a.runc.delete(&source).await.unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    let seen = count(&copy);
    goes_on(&copy, seen);

    std::fs::remove_dir_all(a.path("images")).unwrap();
    b.runc.freeze(&copy).await.unwrap();
    let frozen_at = count(&copy);
    let back = move_stopped(&mut b, &mut a, &copy).await.unwrap();
    b.runc.delete(&copy).await.unwrap();
    a.runc.cont(&back, &[]).await.unwrap();
    goes_on(&back, frozen_at);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_restore_leaves_nothing_and_the_source_goes_on() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, frozen_at) = frozen_counter(&mut a).await;
    let (images, work) = (a.path("images"), a.path("work"));
    dump(&a, &source, &images, &work).await.unwrap();
    let copy = b.copy_of(&source);
    // Files that CRIU opens early, late, and in between.
    for damaged in ["core-1.img", "mm-1.img", "files.img"] {
        let whole = std::fs::read(images.join(damaged)).unwrap();
        std::fs::write(images.join(damaged), &whole[..whole.len() / 2]).unwrap();
        let request = restoring(&b, &copy, images.clone(), false);
        let result = tokio::time::timeout(LIMIT, b.runc.restore_stopped(&request)).await.unwrap();
        assert!(matches!(result, Err(EngineError::Restore { .. })), "{damaged}: {result:?}");
        assert!(matches!(b.runc.state(&copy).await, Err(EngineError::NotFound(_))));
        assert!(!Path::new("/sys/fs/cgroup/freezer").join(&copy.cgroup).exists());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(b.directory.path().to_str().unwrap()), "{mounts}");
        assert!(copy.rootfs.join("bin/busybox").exists(), "the root file system was deleted");
        std::fs::write(images.join(damaged), whole).unwrap();
    }
    assert_eq!(count(&source), frozen_at, "the source ran");
    a.runc.thaw(&source).await.unwrap();
    goes_on(&source, frozen_at);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_or_restore_that_is_given_up_can_be_deleted_at_any_time() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, _) = frozen_counter(&mut a).await;
    let (images, work) = (a.path("images"), a.path("work"));
    let mut options = dump_options(&a, &source, &images, &work).await;
    options.log_level = 0;
    criu().dump(options).await.unwrap();
    let copy = b.copy_of(&source);
    let request = restoring(&b, &copy, images, false);
    for delay in [0, 3, 8, 15, 25, 40, 60, 90] {
        let delay = Duration::from_millis(delay);
        drop(tokio::time::timeout(delay, b.runc.restore_stopped(&request)).await);
        tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
        assert_nothing_left(&b, &copy);
        drop(tokio::time::timeout(delay, b.runc.run(&copy)).await);
        tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
        assert_nothing_left(&b, &copy);
    }
    let state = b.runc.run(&copy).await.unwrap();
    assert_ne!(state.pid, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_dump_says_why_and_the_container_goes_on() {
    let mut node = Node::new();
    let script = "exec 3>/tmp/gone; rm /tmp/gone; dd if=/dev/zero bs=1M count=2 >&3; echo up; sleep 1000";
    let config = node.container("ghost", script);
    std::os::unix::fs::symlink("busybox", config.rootfs.join("bin/dd")).unwrap();
    run_up(&node, &config, "up").await;
    node.runc.freeze(&config).await.unwrap();
    let mut options = dump_options(&node, &config, &node.path("images"), &node.path("work")).await;
    options.ghost_limit = 1 << 20;
    let error = assert_refused(&node, &config, criu().dump(options).await).await;
    assert!(error.contains("deleted file"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_the_node_is_refused_with_a_hint() {
    let mut node = Node::new();
    let sockets = node.path("sockets");
    let listener = std::os::unix::net::UnixListener::bind(sockets.join("s")).unwrap();
    let mut config = node.container_of("unix", &["/bin/guest", "unix", "/sockets/s"]);
    support::add_guest(&config);
    config.mounts.push(Mount {
        kind: MountKind::Bind { source: sockets, on_move: OnMove::Skip },
        target: "/sockets".into(),
        read_only: false,
    });
    run_up(&node, &config, "ready").await;
    node.runc.freeze(&config).await.unwrap();
    let result = dump(&node, &config, &node.path("images"), &node.path("work")).await;
    let error = assert_refused(&node, &config, result).await;
    assert!(error.contains("outside the container"), "{error}");
    drop(listener);
}

#[tokio::test(flavor = "multi_thread")]
async fn io_uring_is_refused_with_a_hint() {
    let mut node = Node::new();
    let mut config = node.container_of("ring", &["/bin/guest", "io_uring"]);
    // The default profile has no io_uring.
    config.confinement.seccomp = godwit_engine::seccomp::Seccomp::Unconfined;
    support::add_guest(&config);
    node.runc.run(&config).await.unwrap();
    let mut said = String::new();
    until("it says something", || {
        said = output(&config);
        !said.is_empty()
    });
    if !said.contains("ready") {
        // Switched off in this kernel: then no service can use it either.
        assert!(said.contains("io_uring:"), "{said}");
        return;
    }
    node.runc.freeze(&config).await.unwrap();
    let result = dump(&node, &config, &node.path("images"), &node.path("work")).await;
    let error = assert_refused(&node, &config, result).await;
    assert!(error.contains("io_uring"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_stays_stopped() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let inner = "i=0; while true; do i=$((i+1)); echo $i > /tmp/inner; usleep 1000; done";
    let script = format!("sh -c '{inner}' & kill -STOP $!; echo stopped $!; {COUNTER}");
    let source = a.container("web", &script);
    a.runc.run(&source).await.unwrap();
    goes_on(&source, 0);
    until("it says which process it stopped", || output(&source).contains("stopped"));
    until("the stopped process is stopped", || stopped(&a, &source).len() == 1);
    let before = stopped(&a, &source);
    assert!(output(&source).contains(&format!("stopped {}", before[0])));

    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    assert_eq!(a.runc.stopped_processes(&source).await.unwrap(), before, "forgotten while frozen");
    b.runc.cont(&copy, &before).await.unwrap();
    let seen = count(&copy);
    goes_on(&copy, seen);
    assert_eq!(b.runc.stopped_processes(&copy).await.unwrap(), before);

    // After a dump that comes to nothing it is stopped at the source, too.
    a.runc.thaw(&source).await.unwrap();
    let seen = count(&source);
    goes_on(&source, seen);
    // On its way from the freezer to its stop for an instant.
    until("the stopped process is stopped again", || stopped(&a, &source) == before);
    assert!(b.runc.memory_current(&copy).await.unwrap() > 0);
}

/// A process that the terminal's signal has stopped is stopped by it after a move, and where its move came to
/// nothing; neither it nor its parent sees anything in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_stays_stopped_by_the_same_signal() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let source = a.container_of("stopped", &["/bin/guest", "stopped"]);
    support::add_guest(&source);
    run_up(&a, &source, "ready").await;
    let before = stopped(&a, &source);
    assert_eq!(before.len(), 1);

    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    b.runc.cont(&copy, &before).await.unwrap();
    a.runc.thaw(&source).await.unwrap();
    let seen = format!("child {} {}\n", libc::CLD_STOPPED, libc::SIGTSTP);
    for (node, container, said) in [(&b, &copy, String::new()), (&a, &source, "ready\n".to_owned())] {
        // On its way from the freezer to its stop for an instant.
        until("the process is stopped", || stopped(node, container) == before);
        node.runc.signal(container, libc::SIGUSR1).await.unwrap();
        until("its parent says what it sees", || output(container).len() > said.len());
        assert_eq!(output(container), format!("{said}{seen}"));
        node.runc.signal(container, libc::SIGUSR2).await.unwrap();
        until("the process goes on", || output(container).contains("ran"));
        assert_eq!(output(container), format!("{said}{seen}continued\nran\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_open_file_and_tmpfs_move_along() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let script = "echo secret > /tmp/gone; exec 3</tmp/gone; rm /tmp/gone; echo kept > /mem/file; echo up; \
                  while [ ! -e /tmp/go ]; do usleep 10000; done; cat <&3; cat /mem/file /bound/file";
    let mut source = a.container("web", script);
    let bound = a.path("bound");
    std::fs::write(bound.join("file"), "bound\n").unwrap();
    source.mounts.push(Mount {
        kind: MountKind::Tmpfs { size_bytes: 1 << 20 },
        target: "/mem".into(),
        read_only: false,
    });
    source.mounts.push(Mount {
        kind: MountKind::Bind { source: bound, on_move: OnMove::Skip },
        target: "/bound".into(),
        read_only: true,
    });
    run_up(&a, &source, "up").await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    a.runc.delete(&source).await.unwrap();
    std::fs::write(copy.rootfs.join("tmp/go"), "").unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    assert_eq!(tokio::time::timeout(LIMIT, b.runc.wait(&copy)).await.unwrap().unwrap(), 0);
    assert_eq!(output(&copy), "secret\nkept\nbound\n");
}

/// Also in a tmpfs. Nothing is left of the names that CRIU makes for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_open_under_a_deleted_name_is_still_the_one_with_the_other_name() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let script = "mkdir /tmp/gone; echo begun > /tmp/gone/a; ln /tmp/gone/a /tmp/b; exec 3<>/tmp/gone/a; rm -r /tmp/gone; \
                  echo begun > /mem/a; ln /mem/a /mem/b; exec 4<>/mem/a; rm /mem/a; echo up; \
                  while [ ! -e /tmp/go ]; do usleep 10000; done; \
                  read line <&3; echo \"$line\"; read line <&4; echo \"$line\"; echo more >&3; echo more >&4; \
                  cat /tmp/b /mem/b; ls /tmp /mem";
    let mut source = a.container("web", script);
    source.mounts.push(Mount {
        kind: MountKind::Tmpfs { size_bytes: 1 << 20 },
        target: "/mem".into(),
        read_only: false,
    });
    run_up(&a, &source, "up").await;
    let copy = move_stopped(&mut a, &mut b, &source).await.unwrap();
    let names = |config: &ContainerConfig| -> Vec<_> {
        let entries = std::fs::read_dir(config.rootfs.join("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    assert_eq!([names(&source), names(&copy)], [["b"], ["b"]]);
    a.runc.thaw(&source).await.unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    for (node, config, said) in [(&b, &copy, ""), (&a, &source, "up\n")] {
        std::fs::write(config.rootfs.join("tmp/go"), "").unwrap();
        assert_eq!(tokio::time::timeout(LIMIT, node.runc.wait(config)).await.unwrap().unwrap(), 0);
        let files = "begun\nbegun\nbegun\nmore\nbegun\nmore\n/mem:\nb\n\n/tmp:\nb\ngo\n";
        assert_eq!(output(config), format!("{said}{files}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_that_nobody_waits_for_does_not_freeze_a_thawed_container() {
    let mut node = Node::new();
    let config = counter(&mut node).await;
    for delay in [0, 5, 30, 60, 100] {
        node.runc.freeze(&config).await.unwrap();
        let images = node.path(&format!("images{delay}"));
        let options = dump_options(&node, &config, &images, &node.path("work")).await;
        let given_up = tokio::time::timeout(Duration::from_millis(delay), criu().dump(options)).await;
        drop(given_up);
        node.runc.thaw(&config).await.unwrap();
        assert_eq!(node.runc.state(&config).await.unwrap().status, ContainerStatus::Running);
        let seen = count(&config);
        goes_on(&config, seen);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_beside_a_running_command_is_refused() {
    let mut node = Node::new();
    let config = counter(&mut node).await;
    let request =
        ExecRequest { command: vec!["cat".into()], env: vec![], user: None, workdir: None, terminal: None };
    let command = node.runc.exec(&config, &request).await.unwrap();
    while node.runc.exec_sessions(&config).await.unwrap() == 0 {
        tokio::task::yield_now().await;
    }
    node.runc.freeze(&config).await.unwrap();
    let refused = node.runc.dump_target(&config).await;
    assert!(matches!(refused, Err(EngineError::Occupied { commands: 1, .. })), "{refused:?}");
    node.runc.thaw(&config).await.unwrap();
    drop(command);
    until("the command has ended", || {
        let sessions = node.runc.exec_sessions(&config);
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(sessions)).unwrap() == 0
    });
    node.runc.freeze(&config).await.unwrap();
    dump(&node, &config, &node.path("images"), &node.path("work")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_established_connection_moves() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let lan = support::Lan::new(&[&a.namespace, &b.namespace]);
    let source = a.container("echo", "echo up; exec nc -l -p 7000 -e cat");
    run_up(&a, &source, "up").await;
    let mut client = lan.connect(7000);
    assert_eq!(client.ask("one"), "one");

    let copy = {
        let (images, work) = (a.path("images"), a.path("work"));
        a.runc.freeze(&source).await.unwrap();
        client.send("two");
        lan.close(0);
        dump(&a, &source, &images, &work).await.unwrap();
        let config = b.copy_of(&source);
        copy_files(&source, &config);
        let request = restoring(&b, &config, images, false);
        b.runc.restore_stopped(&request).await.unwrap();
        config
    };
    lan.open(1);
    b.runc.cont(&copy, &[]).await.unwrap();
    a.runc.delete(&source).await.unwrap();
    assert_eq!(client.receive(), "two");
    assert_eq!(client.ask("three"), "three");
}
