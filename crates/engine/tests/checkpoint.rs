//! Freeze, dump, restore and go on, with real runc and CRIU.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use godwit_engine::{ContainerStatus, Engine, RestoreRequest};
use support::{Node, copy_files, dump, until};

/// A script that counts into a file as fast as it can, and says that it runs.
const COUNTER: &str = "echo begun; i=0; while true; do i=$((i+1)); echo $i > /tmp/count; done";

fn count(rootfs: &Path) -> u64 {
    std::fs::read_to_string(rootfs.join("tmp/count"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_container_does_not_run_before_it_is_continued() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let source = a.container("web", COUNTER);
    let begin = Instant::now();
    a.runc.run(&source).await.unwrap();
    eprintln!("run {:?}", begin.elapsed());
    until("the counter runs", || count(&source.rootfs) > 10);

    let begin = Instant::now();
    a.runc.freeze(&source).await.unwrap();
    eprintln!("freeze {:?}", begin.elapsed());
    let frozen_at = count(&source.rootfs);
    let (images, work) = (a.path("images"), a.path("work"));
    let begin = Instant::now();
    let result = dump(&a, &source, &images, &work).await.unwrap();
    eprintln!("dump {:?}: {result:?}", begin.elapsed());
    assert_eq!(a.runc.state(&source).await.unwrap().status, ContainerStatus::Paused);
    assert_eq!(count(&source.rootfs), frozen_at);

    let copy = b.copy_of(&source);
    copy_files(&source, &copy);
    let request = RestoreRequest { config: copy.clone(), images, work: b.path("work") };
    let begin = Instant::now();
    let state = b.runc.restore_stopped(&request).await.unwrap();
    eprintln!("restore {:?}", begin.elapsed());
    assert_ne!(state.pid, 0);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(count(&copy.rootfs), frozen_at, "the restored container ran before it was continued");

    let begin = Instant::now();
    b.runc.cont(&copy, &[]).await.unwrap();
    eprintln!("cont {:?}", begin.elapsed());
    until("the restored counter goes on", || count(&copy.rootfs) > frozen_at + 10);
    assert_eq!(count(&source.rootfs), frozen_at, "the source ran");
    let begin = Instant::now();
    a.runc.delete(&source).await.unwrap();
    eprintln!("delete {:?}", begin.elapsed());
    assert!(a.runc.state(&source).await.is_err());
    b.runc.delete(&copy).await.unwrap();
}
