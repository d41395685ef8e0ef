//! Restores that begin before there are images, with real runc and CRIU.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_engine::{BegunRestore, ContainerConfig, Engine, EngineError, OutputPipes, RestoreRequest};
use support::{LIMIT, Node, assert_nothing_left, dump, output, until};

/// A container that says each moment that it runs, and the pipes to which it says so.
async fn talker(node: &mut Node) -> (ContainerConfig, OutputPipes) {
    let config = node.container("web", "while true; do echo tick; usleep 10000; done");
    node.runc.run(&config).await.unwrap();
    until("it is up", || output(&config).contains("tick"));
    let pipes = node.runc.output_pipes(&config).await.unwrap();
    (config, pipes)
}

/// Where the container is to come, without its root filesystem; that is beside its place.
fn place(node: &mut Node, source: &ContainerConfig) -> (ContainerConfig, PathBuf) {
    let copy = node.copy_of(source);
    let beside = copy.directory.join("beside");
    std::fs::rename(&copy.rootfs, &beside).unwrap();
    (copy, beside)
}

fn put_in_place(beside: &Path, copy: &ContainerConfig) {
    std::fs::remove_dir(&copy.rootfs).unwrap();
    std::fs::rename(beside, &copy.rootfs).unwrap();
}

fn request(node: &Node, config: &ContainerConfig) -> RestoreRequest {
    RestoreRequest {
        config: config.clone(),
        images: node.path("images"),
        work: node.path("work"),
        lazy_pages: false,
    }
}

async fn begin(node: &Node, config: &ContainerConfig, pipes: OutputPipes) -> Box<dyn BegunRestore> {
    let beginning = node.runc.begin_restore(request(node, config), pipes);
    let begun = tokio::time::timeout(LIMIT, beginning).await.unwrap().unwrap();
    let left: Vec<_> =
        std::fs::read_dir(node.path("images")).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(left.is_empty(), "the place of the images is not empty: {left:?}");
    begun
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_began_before_the_dump_ends_as_any_other() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, pipes) = talker(&mut a).await;
    let (copy, beside) = place(&mut b, &source);
    let begun = begin(&b, &copy, pipes).await;
    let before = output(&source).len();
    until("the source goes on", || output(&source).len() > before);

    a.runc.freeze(&source).await.unwrap();
    put_in_place(&beside, &copy);
    dump(&a, &source, &b.path("images"), &a.path("work")).await.unwrap();
    let state = tokio::time::timeout(LIMIT, begun.finish()).await.unwrap().unwrap();
    assert_ne!(state.pid, 0);
    a.runc.delete(&source).await.unwrap();
    b.runc.cont(&copy, &[]).await.unwrap();
    until("its output is logged here", || output(&copy).contains("tick"));
    let root = std::fs::read_dir(format!("/proc/{}/root/bin", state.pid)).unwrap();
    assert!(root.count() > 1, "its root filesystem is the one that came later");

    tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
    assert_nothing_left(&b, &copy);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_one_that_is_given_up_at_any_time() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, pipes) = talker(&mut a).await;
    let (copy, beside) = place(&mut b, &source);
    let gone = |node: &Node| {
        for file in std::fs::read_dir(node.path("images")).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
    };
    for delay in [0, 3, 8, 15, 25, 40] {
        let delay = Duration::from_millis(delay);
        drop(tokio::time::timeout(delay, b.runc.begin_restore(request(&b, &copy), pipes)).await);
        tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
        gone(&b);
    }
    // While it waits; and without its end of the FIFO, as when a daemon is killed.
    drop(begin(&b, &copy, pipes).await);
    tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
    let waits = begin(&b, &copy, pipes).await;
    tokio::time::timeout(LIMIT, b.runc.delete(&copy)).await.unwrap().unwrap();
    assert!(waits.finish().await.is_err());
    put_in_place(&beside, &copy);
    assert_nothing_left(&b, &copy);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_other_streams_or_none_are_refused_and_leave_nothing() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, pipes) = talker(&mut a).await;
    a.runc.freeze(&source).await.unwrap();
    let (copy, beside) = place(&mut b, &source);
    let others = begin(&b, &copy, [pipes[0], pipes[1] + 1]).await;
    put_in_place(&beside, &copy);
    dump(&a, &source, &b.path("images"), &a.path("work")).await.unwrap();
    let Err(refused @ EngineError::Restore { .. }) = others.finish().await else { panic!("it was restored") };
    assert!(refused.to_string().contains("standard streams"), "{refused}");
    assert_nothing_left(&b, &copy);

    std::fs::remove_dir_all(b.path("images")).unwrap();
    let none = begin(&b, &copy, pipes).await;
    let Err(EngineError::Restore { .. }) = none.finish().await else { panic!("it was restored") };
    assert_nothing_left(&b, &copy);
    a.runc.thaw(&source).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runc_that_fails_does_so_before_there_are_images() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let (source, pipes) = talker(&mut a).await;
    let (mut copy, beside) = place(&mut b, &source);
    copy.network_namespace = "/run/netns/godwit-no-such-namespace".into();
    let beginning =
        tokio::time::timeout(LIMIT, b.runc.begin_restore(request(&b, &copy), pipes)).await.unwrap();
    let Err(failed @ EngineError::Restore { .. }) = beginning.map(drop) else { panic!("it waits") };
    assert!(failed.to_string().contains("godwit-no-such-namespace"), "{failed}");
    put_in_place(&beside, &copy);
    assert_nothing_left(&b, &copy);
}
