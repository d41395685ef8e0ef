//! `godwit node` against a daemon that answers what the test expects.
#![allow(clippy::unwrap_used, missing_docs)]

mod fake;

use std::process::Stdio;

use fake::Fake;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};

#[tokio::test]
async fn a_node_is_cordoned_and_takes_services_again() {
    let fake = Fake::start();
    let cordoned = fake.run(&["node", "cordon", "c"]).await;
    let said = "c is cordoned: it takes no more services, and 1 is on it\n";
    assert_eq!((cordoned.code, cordoned.stdout.as_str()), (0, said), "{cordoned:?}");
    let lifted = fake.run(&["node", "uncordon", "c"]).await;
    assert_eq!((lifted.code, lifted.stdout.as_str()), (0, "c takes services\n"), "{lifted:?}");
    let told = fake.run(&["node", "cordon", "c", "--json"]).await.json();
    assert_eq!(told, json!({ "node": "c", "cordoned": true, "changed": true, "services": ["web"] }));
    let unknown = fake.run(&["node", "cordon", "missing"]).await;
    assert!(unknown.code == 1 && unknown.stderr.contains("there is no node missing"), "{unknown:?}");
    let asked = std::mem::take(&mut *fake.asked.cordon.lock().unwrap());
    let asked: Vec<_> = asked.iter().map(|asked| (asked.node.as_str(), asked.lift)).collect();
    assert_eq!(asked, [("c", false), ("c", true), ("c", false), ("missing", false)]);
}

#[tokio::test]
async fn the_other_names_of_verbs_do_the_same() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["node", "ls", "-q"]).await.stdout, fake.run(&["nodes", "-q"]).await.stdout);
    let removed = fake.run(&["node", "rm", "c"]).await;
    assert!(removed.code == 0 && removed.stdout.contains("node c is removed"), "{removed:?}");
}

#[tokio::test]
async fn drain_says_where_each_service_has_gone_and_which_stay() {
    let fake = Fake::start();
    let words = ["node", "drain", "a", "--to", "b", "--allow", "postcopy", "--max-frozen-ms", "200"];
    let drained = fake.run(&words).await;
    assert_eq!(
        (drained.code, drained.stdout.as_str()),
        (
            1,
            "a is cordoned: it takes no more services, and 4 are on it\n\
             redis moved to b: cold, frozen for 512.3 ms, 1.93 s in all\n\
             alone stays on a: no other node can take it\n  \
             others  c: it is cordoned\n\
             busy stays: service busy is being checked\n\
             not running, and still on a: old\n\
             a is not drained: 1 service has moved, 2 services stay (alone, busy)\n"
        ),
        "{drained:?}"
    );
    assert!(drained.stderr.contains("waiting for redis: something else"), "{drained:?}");
    let asked = fake.asked.drain.lock().unwrap().pop().unwrap();
    let how = asked.r#move.unwrap();
    assert_eq!((asked.node.as_str(), how.to.as_str(), how.max_frozen_ms), ("a", "b", 200));
    assert!(how.allow_postcopy && how.name.is_empty());

    let empty = fake.run(&["node", "drain", "b"]).await;
    assert_eq!(empty.code, 0, "{empty:?}");
    assert!(empty.stdout.ends_with("b is drained: 0 services have moved\n"), "{empty:?}");
}

#[tokio::test]
async fn drain_tells_programs_each_step_and_the_services_at_the_end() {
    let fake = Fake::start();
    let drained = fake.run(&["node", "drain", "a", "--json"]).await;
    assert_eq!(drained.code, 1, "{drained:?}");
    let lines = drained.json_lines();
    let events: Vec<_> = lines.iter().filter_map(|line| line["event"].as_str()).collect();
    assert_eq!(events, ["cordoned", "waits", "placed", "progress", "report", "placed", "stays"]);
    assert_eq!(lines[3]["name"], "redis");
    let last = lines.last().unwrap();
    assert_eq!(last["stay"], json!(["alone", "busy"]), "{last}");
    assert_eq!(
        (&last["moved"], &last["stopped"], &last["lost"]),
        (&json!(["redis"]), &json!(["old"]), &json!([]))
    );
}

#[tokio::test]
async fn a_drain_that_does_not_end_well_says_what_is_left_to_do() {
    let fake = Fake::start();
    let lost = fake.run(&["node", "drain", "lost"]).await;
    assert!(lost.code == 1 && lost.stderr.contains("redis was lost on b: its pages are gone"), "{lost:?}");
    assert!(lost.stdout.ends_with("0 services have moved, 1 service was lost (redis)\n"), "{lost:?}");
    let lifted = fake.run(&["node", "drain", "lifted"]).await;
    assert!(lifted.code == 1 && lifted.stderr.is_empty(), "{lifted:?}");
    assert!(
        lifted.stdout.ends_with("lifted was uncordoned while it was drained: 0 services have moved\n"),
        "{lifted:?}"
    );
    let ended = fake.run(&["node", "drain", "ends"]).await;
    let left = "ends stays cordoned: `godwit node drain ends` goes on, `godwit node uncordon ends`";
    assert!(ended.code == 1 && ended.stderr.contains("godwitd ends"), "{ended:?}");
    assert!(ended.stderr.contains(left), "{ended:?}");
    let refused = fake.run(&["node", "drain", "missing"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("there is no node missing"), "{refused:?}");
    assert!(!refused.stderr.contains("cordoned"), "{refused:?}");

    let mut left = fake.godwit(&["node", "drain", "slow"]);
    let mut left = left.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(left.stdout.take().unwrap()).lines();
    assert!(lines.next_line().await.unwrap().unwrap().contains("slow is cordoned"));
    let id = nix::unistd::Pid::from_raw(left.id().unwrap().try_into().unwrap());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGINT).unwrap();
    let left = left.wait_with_output().await.unwrap();
    assert_eq!(left.status.code(), Some(130));
    let said = String::from_utf8(left.stderr).unwrap();
    assert!(said.contains("what moves goes on to its end") && said.contains("slow stays cordoned"), "{said}");
}
