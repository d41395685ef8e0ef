//! Verbs that manage a service: what they send, and what they print.
#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;

use fake::Fake;
use godwit_api::v1::{Policy, policy_request::Change};
use serde_json::json;

#[tokio::test]
async fn kill_sends_the_signal_by_its_number() {
    let fake = Fake::start();
    let finished = fake.run(&["kill", "redis", "missing"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (1, "redis\n"), "{finished:?}");
    assert!(finished.stderr.contains("missing"), "{finished:?}");
    assert_eq!(fake.run(&["kill", "-s", "hup", "redis"]).await.code, 0);
    let asked: Vec<_> =
        fake.asked.kill.lock().unwrap().iter().map(|asked| (asked.name.clone(), asked.signal)).collect();
    assert_eq!(asked, [("redis".into(), 9), ("missing".into(), 9), ("redis".into(), 1)]);
    let refused = fake.run(&["kill", "-s", "NONE", "redis"]).await;
    assert!(refused.code == 2 && refused.stderr.contains("a signal's name"), "{refused:?}");
}

#[tokio::test]
async fn wait_prints_an_exit_code_for_each_service() {
    let fake = Fake::start();
    let finished = fake.run(&["wait", "killed", "redis"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (0, "137\n0\n"), "{finished:?}");
    let finished = fake.run(&["wait", "redis", "missing", "--json"]).await;
    assert_eq!(finished.code, 1, "{finished:?}");
    let expected = json!({ "name": "redis", "exit_code": 0, "reason": "stopped by `godwit stop`" });
    assert_eq!(finished.json(), expected);
}

#[tokio::test]
async fn update_sends_what_was_given_and_nothing_else() {
    let fake = Fake::start();
    let words = ["update", "-m", "0", "--cpus", "1.5", "--pids-limit", "-1", "redis", "web"];
    assert_eq!(fake.run(&words).await.stdout, "redis\nweb\n");
    assert_eq!(fake.run(&["update", "--restart", "always", "redis"]).await.code, 0);
    let asked = std::mem::take(&mut *fake.asked.update.lock().unwrap());
    let given: Vec<_> = asked
        .iter()
        .map(|asked| (asked.memory_bytes, asked.cpu_millis, asked.pids_limit, asked.restart.as_deref()))
        .collect();
    let limits = (Some(0), Some(1500), Some(0), None);
    assert_eq!(given, [limits, limits, (None, None, None, Some("always"))]);
    let nothing = fake.run(&["update", "redis"]).await;
    assert_eq!(nothing.code, 2, "{nothing:?}");
}

#[tokio::test]
async fn stats_show_the_share_of_a_cpu_between_two_looks() {
    let fake = Fake::start();
    let shown = fake.run(&["stats", "--no-stream", "redis", "web"]).await;
    let lines: Vec<Vec<_>> = shown
        .stdout
        .lines()
        .map(|line| line.split("  ").filter(|c| !c.is_empty()).map(str::trim).collect())
        .collect();
    assert_eq!(lines[0], ["NAME", "CPU", "MEMORY", "PIDS", "RECEIVED", "SENT", "READ", "WRITTEN"]);
    assert_eq!(lines[1], ["redis", "25.0 %", "3.0 MiB of 256.0 MiB", "4", "5.0 KiB", "6 B", "0 B", "7 B"]);
    assert_eq!(lines[2], ["web", "-", "-", "-", "-", "-", "-", "-"]);
    let asked = std::mem::take(&mut *fake.asked.stats.lock().unwrap());
    assert!(asked.len() == 2 && asked.iter().all(|asked| asked.names == ["redis", "web"]), "{asked:?}");
    let shown = fake.run(&["stats", "--no-stream", "--json"]).await.json();
    assert_eq!(
        (&shown[0]["cpu_percent"], &shown[0]["memory_limit_bytes"]),
        (&json!(25.0), &json!(256 << 20))
    );
    assert_eq!((&shown[1]["cpu_percent"], &shown[1]["memory_limit_bytes"]), (&json!(null), &json!(null)));
}

fn names(archive: &[u8]) -> Vec<String> {
    let mut archive = tar::Archive::new(archive);
    archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect()
}

#[tokio::test]
async fn cp_sends_files_of_this_machine_as_an_archive() {
    let fake = Fake::start();
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir(scratch.path().join("site")).unwrap();
    fs::write(scratch.path().join("site/index"), vec![7; 1 << 20]).unwrap();
    std::os::unix::fs::symlink("index", scratch.path().join("site/link")).unwrap();
    let site = scratch.path().join("site");
    let finished = fake.run(&["cp", site.to_str().unwrap(), "web:/srv"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (0, ""), "{finished:?}");
    let (start, archive) = fake.asked.copied.lock().unwrap().take().unwrap();
    assert_eq!(
        (start.name.as_str(), start.path.as_str(), start.contents, start.keep_owners),
        ("web", "/srv", false, false)
    );
    assert_eq!(names(&archive), ["site", "site/index", "site/link"]);
    let contents = format!("{}/.", site.display());
    assert_eq!(fake.run(&["cp", "--archive", &contents, "web:srv"]).await.code, 0);
    let (start, archive) = fake.asked.copied.lock().unwrap().take().unwrap();
    assert_eq!((start.path.as_str(), start.contents, start.keep_owners), ("/srv", true, true));
    assert_eq!(names(&archive), ["index", "link"]);
    for (source, destination, words) in [
        ("/none", "web:/srv", "cannot copy /none"),
        (site.to_str().unwrap(), "full:/x", "no space left"),
        ("a", "b", "neither a nor b is in a service"),
    ] {
        let finished = fake.run(&["cp", source, destination]).await;
        assert!(finished.code == 1 && finished.stderr.contains(words), "{finished:?}");
    }
}

#[tokio::test]
async fn cp_writes_files_of_a_service_to_this_machine_or_into_another_service() {
    let fake = Fake::start();
    let scratch = tempfile::tempdir().unwrap();
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(5);
    header.set_mode(0o640);
    header.set_mtime(1);
    builder.append_data(&mut header, "file", &b"hello"[..]).unwrap();
    let archive = builder.into_inner().unwrap();
    *fake.asked.archive.lock().unwrap() = archive.clone();
    let to = scratch.path().join("here");
    let finished = fake.run(&["cp", "web:/file", to.to_str().unwrap()]).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert_eq!(fs::read_to_string(&to).unwrap(), "hello");
    let raw = fake.run(&["cp", "web:/file", "-"]).await;
    assert_eq!(raw.stdout.as_bytes(), archive);
    assert_eq!(fake.run(&["cp", "web:/file", "redis:/srv"]).await.code, 0);
    let (start, passed_on) = fake.asked.copied.lock().unwrap().take().unwrap();
    assert_eq!((start.name.as_str(), passed_on), ("redis", archive));
    for (source, words) in
        [("web:/missing", "cannot find /missing"), ("web:/cut", "cannot read a file in /cut")]
    {
        let to = scratch.path().join("none");
        let finished = fake.run(&["cp", source, to.to_str().unwrap()]).await;
        assert!(finished.code == 1 && finished.stderr.contains(words), "{finished:?}");
        // A copy that is cut off is not taken for a whole one by the other service either.
        let finished = fake.run(&["cp", source, "redis:/srv"]).await;
        assert!(finished.code == 1 && finished.stderr.contains(words), "{finished:?}");
        assert!(fake.asked.copied.lock().unwrap().is_none());
    }
}

#[tokio::test]
async fn verbs_of_podman_that_there_are_not_are_refused_with_what_to_type() {
    let fake = Fake::start();
    let refused = fake.run(&["push", "redis"]).await;
    assert_eq!(refused.code, 2);
    assert!(
        refused.stderr.starts_with("Error: godwit has no `push`: ")
            && refused.stderr.contains("a service that moves"),
        "{refused:?}"
    );
    let listed = fake.run(&["images"]).await;
    assert_eq!((listed.code, listed.stdout), (0, fake.run(&["image", "ls"]).await.stdout));
}

#[tokio::test]
async fn run_with_rm_says_so() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["run", "--rm", "--name", "redis", "--rootfs", "/", "--", "true"]).await.code, 0);
    assert!(fake.asked.run.lock().unwrap().take().unwrap().remove);
    let both = fake.run(&["run", "--rm", "--restart", "always", "--rootfs", "/", "--", "true"]).await;
    assert_eq!(both.code, 2, "{both:?}");
}

#[tokio::test]
async fn policy_sends_what_was_given_and_says_what_the_service_does_from_now_on() {
    let fake = Fake::start();
    let set = fake.run(&["policy", "set", "web", "--follow-clients"]).await;
    let follows = "web follows its clients from a: they are content with a round trip of";
    assert_eq!((set.code, set.stdout), (0, format!("{follows} 20.0 ms\n")));
    let all = ["--follow-clients", "--latency", "500us", "--max-frozen-ms", "200", "--allow", "postcopy"];
    let set = fake.run(&[&["policy", "set", "web"][..], &all].concat()).await;
    let limits = "0.5 ms, frozen for at most 200 ms, pages may follow";
    assert_eq!((set.code, set.stdout), (0, format!("{follows} {limits}\n")));
    let clear = fake.run(&["policy", "clear", "web"]).await;
    assert_eq!((clear.code, clear.stdout.as_str()), (0, "web stays on a until it is told to move\n"));
    let missing = fake.run(&["policy", "clear", "missing"]).await;
    assert!(missing.code == 1 && missing.stderr.contains("no service named missing"), "{missing:?}");
    let asked = std::mem::take(&mut *fake.asked.policy.lock().unwrap());
    let asked: Vec<_> = asked.into_iter().map(|asked| (asked.name, asked.change)).collect();
    let policy = |latency_us, max_frozen_ms, allow_postcopy| {
        Some(Change::Set(Policy { latency_us, max_frozen_ms, allow_postcopy }))
    };
    assert_eq!(
        asked,
        [
            ("web".into(), policy(20_000, 0, false)),
            ("web".into(), policy(500, 200, true)),
            ("web".into(), Some(Change::Clear(true))),
            ("missing".into(), Some(Change::Clear(true))),
        ]
    );
}

#[tokio::test]
async fn policy_set_wants_to_be_told_what_the_policy_is() {
    let fake = Fake::start();
    for (wrong, named) in [
        (&["policy", "set", "web"][..], "--follow-clients"),
        (&["policy", "set", "web", "--latency", "10ms"], "--follow-clients"),
        (&["policy", "set", "web", "--follow-clients", "--allow", "throttle"], "postcopy"),
        (&["policy", "set", "web", "--follow-clients", "--max-frozen-ms", "0"], "--max-frozen-ms"),
        (&["policy"], "show"),
    ] {
        let refused = fake.run(wrong).await;
        assert!(refused.code == 2 && refused.stderr.contains(named), "{wrong:?}: {refused:?}");
    }
    assert!(fake.asked.policy.lock().unwrap().is_empty());
}

#[tokio::test]
async fn policy_show_has_the_last_decision_as_place_explains_it() {
    let fake = Fake::start();
    let web = fake.run(&["policy", "show", "web"]).await;
    let lines: Vec<_> = web.stdout.lines().collect();
    assert_eq!(
        (web.code, lines),
        (
            0,
            vec![
                "web follows its clients from a: they are content with a round trip of 20.0 ms",
                "decided 2 h ago",
                "web stays on a: the move is not paid for yet: 0.8 of 1.6 client-seconds were lost so far, about 1 s more",
                "  others  c: the move costs 0.3 more than it gains",
                "warning: it writes much",
            ]
        )
    );
    let new = fake.run(&["policy", "show", "redis"]).await;
    assert!(new.code == 0 && new.stdout.ends_with(" 20.0 ms\nnothing has been decided yet\n"), "{new:?}");
    let alone = fake.run(&["policy", "show", "alone"]).await;
    assert_eq!((alone.code, alone.stdout.as_str()), (0, "alone stays on a until it is told to move\n"));
    let asked = std::mem::take(&mut *fake.asked.policy.lock().unwrap());
    assert!(asked.len() == 3 && asked.iter().all(|asked| asked.change.is_none()), "{asked:?}");
    let json = fake.run(&["policy", "show", "web", "--json"]).await.json();
    assert_eq!((&json["node"], &json["policy"]["latency_us"]), (&"a".into(), &0.into()));
    assert_eq!(json["last"]["reasons"][0]["kind"]["unpaid"]["left_ms"], 900);
}
