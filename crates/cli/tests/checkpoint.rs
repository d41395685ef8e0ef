//! `godwit checkpoint` and `godwit restore` against a fake daemon: the file is whole or not there.
#![allow(clippy::unwrap_used)]

mod fake;

use std::os::unix::fs::PermissionsExt as _;

use fake::Fake;

#[tokio::test]
async fn a_file_is_kept_before_the_service_ends() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("x.tar");
    std::fs::write(&file, "older").unwrap();
    let path = file.to_str().unwrap();
    let output =
        fake.run(&["checkpoint", "redis", "-o", path, "--compress", "gzip", "--tcp-established"]).await;
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(output.stdout, format!("{path}\n"));
    assert_eq!(std::fs::read(&file).unwrap(), b"archive of it");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let (start, kept) = fake.asked.checkpoint.lock().unwrap().clone().unwrap();
    assert!(kept && start.tcp_established && !start.leave_running);
    assert_eq!((start.name.as_str(), start.compress.as_str()), ("redis", "gzip"));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn a_service_that_goes_on_is_not_said_to_be_kept() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("x.tar");
    let output = fake.run(&["--json", "checkpoint", "redis", "-R", "-e", file.to_str().unwrap()]).await;
    assert_eq!(output.code, 0, "{output:?}");
    let told: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&told["bytes"], &told["image"]), (&13.into(), &"localhost/x:latest".into()));
    assert!(!fake.asked.checkpoint.lock().unwrap().as_ref().unwrap().1);
}

#[tokio::test]
async fn after_a_failure_what_had_the_name_stays_and_nothing_else() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("x.tar");
    std::fs::write(&file, "older").unwrap();
    let output = fake.run(&["checkpoint", "cut", "-o", file.to_str().unwrap()]).await;
    assert_eq!(output.code, 1);
    assert_eq!(output.stderr, "Error: CRIU cannot dump it\n");
    assert_eq!(std::fs::read(&file).unwrap(), b"older");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    let output = fake.run(&["checkpoint", "redis", "-o", directory.path().to_str().unwrap()]).await;
    assert!(output.stderr.contains("is no plain file"));
}

#[tokio::test]
async fn a_file_goes_to_the_daemon_as_it_is() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("x.tar");
    let content: Vec<u8> = (0..700_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    std::fs::write(&file, &content).unwrap();
    let path = file.to_str().unwrap();
    let output = fake.run(&["restore", path, "--name", "copy", "--ip", "10.88.0.9", "-p", "80:8080"]).await;
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(output.stdout, "copy\n");
    let (start, archive) = fake.asked.restored.lock().unwrap().clone().unwrap();
    assert_eq!((start.address.as_str(), start.publish[0].host_port), ("10.88.0.9", 80));
    assert_eq!(archive, content);
    let output = fake.run(&["restore", path, "--name", "taken"]).await;
    assert_eq!(output.stderr, "Error: the name taken is taken by a service on node b\n");
}

#[tokio::test]
async fn files_of_a_series_have_their_times_for_names_and_the_oldest_go() {
    let fake = Fake::start();
    let directory = tempfile::tempdir().unwrap();
    for old in ["redis-20200101T000000Z.tar", "redis-20210101T000000Z.tar"] {
        std::fs::write(directory.path().join(old), "").unwrap();
    }
    let path = directory.path().to_str().unwrap();
    let words = ["checkpoint", "redis", "-o", path, "--every", "1d", "--keep", "2", "--compress", "none"];
    let mut series =
        fake.godwit(&words).stdout(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines =
        tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(series.stdout.take().unwrap()));
    let first = lines.next_line().await.unwrap().unwrap();
    assert!(first.starts_with(&format!("{path}/redis-20")) && first.ends_with("Z.tar"), "{first}");
    assert_eq!(std::fs::read(&first).unwrap(), b"archive of it");
    while directory.path().join("redis-20200101T000000Z.tar").exists() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(directory.path().join("redis-20210101T000000Z.tar").exists());
    assert!(fake.asked.checkpoint.lock().unwrap().as_ref().unwrap().0.leave_running);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(series.id().unwrap()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert!(series.wait().await.unwrap().success());
    let refused = fake.run(&["checkpoint", "redis", "-o", &first, "--every", "1d"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("is no directory"), "{refused:?}");
}
