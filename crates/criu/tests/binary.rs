//! Questions to a real CRIU; needs root.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use godwit_criu::{Criu, CriuError, DumpOptions, Memory, OLDEST_VERSION};

fn criu() -> Criu {
    Criu::new(std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from))
}

#[tokio::test]
async fn the_version_and_features_are_told() {
    assert!(criu().version().await.unwrap() >= OLDEST_VERSION);
    // Every kernel that godwit supports has userfaultfd.
    assert!(criu().features().await.unwrap().lazy_pages);
    criu().check().await.unwrap();
}

#[tokio::test]
async fn a_missing_binary_is_named() {
    let error = Criu::new("/nonexistent/criu").version().await.unwrap_err();
    assert!(matches!(&error, CriuError::Start { .. }), "{error}");
    assert!(error.to_string().contains("/nonexistent/criu"), "{error}");
}

#[tokio::test]
async fn a_program_that_is_no_criu_is_refused() {
    let error = Criu::new("/bin/true").version().await.unwrap_err();
    assert!(matches!(error, CriuError::Talk { .. }), "{error}");
}

#[tokio::test]
async fn a_process_that_is_gone_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    let result = criu().dump(DumpOptions::new(pid, "/", directory.path(), directory.path())).await;
    assert!(matches!(result, Err(CriuError::Dump { .. })), "{result:?}");
}

#[tokio::test]
async fn the_cache_of_the_kernel_is_there_after_a_warm_up() {
    criu().warm_up().await.unwrap();
    let made = std::fs::metadata("/run/criu.kdat").unwrap().modified().unwrap();
    criu().warm_up().await.unwrap();
    criu().stay_warm().await.unwrap();
    assert_eq!(std::fs::metadata("/run/criu.kdat").unwrap().modified().unwrap(), made, "it was made twice");
}

#[tokio::test]
async fn a_plain_process_is_dumped_and_lives_on() {
    let directory = tempfile::tempdir().unwrap();
    dump_sleep(directory.path(), Memory::Images).await;
    let inventory = godwit_criu::images::inventory(directory.path()).unwrap();
    assert_eq!(inventory.network_lock_method, Some(2));
    assert_eq!(godwit_criu::images::stopped_processes(directory.path()).unwrap(), []);
}

#[tokio::test]
async fn a_lazy_dump_ends_by_itself_and_has_fewer_pages() {
    let [plain, lazy] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    dump_sleep(plain.path(), Memory::Images).await;
    dump_sleep(lazy.path(), Memory::Lazy).await;
    let pages = |directory: &Path| std::fs::metadata(directory.join("pages-1.img")).unwrap().len();
    assert!(pages(lazy.path()) > 0);
    assert!(pages(lazy.path()) < pages(plain.path()));
}

async fn dump_sleep(directory: &Path, memory: Memory) {
    let mut child = std::process::Command::new("setsid")
        .args(["sleep", "1000"])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // A session's leader, and the program that it is to be.
    let stat = format!("/proc/{}/stat", child.id());
    while !std::fs::read_to_string(&stat).unwrap().contains("(sleep) S") {
        std::thread::yield_now();
    }
    let mut options = DumpOptions::new(child.id(), "/", directory, directory);
    options.memory = memory;
    let result = criu().dump(options).await;
    let lives = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    result.unwrap();
    assert!(lives);
}
