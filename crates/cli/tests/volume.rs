//! `godwit volume` against a daemon that answers what the test expects.
#![allow(clippy::unwrap_used, missing_docs)]

mod fake;

use fake::Fake;

#[tokio::test]
async fn volumes_are_listed_with_their_services_and_removed_only_when_that_was_asked_for() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["volume", "create", "data"]).await.stdout, "data\n");
    let table = fake.run(&["volume", "ls"]).await.stdout;
    let lines: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["VOLUME", "SIZE", "SERVICE"]);
    assert_eq!((lines[1][0], lines[1].last()), ("data", Some(&"web")));
    assert_eq!((lines[2][0], lines[2].last()), ("old", Some(&"-")));
    assert_eq!(fake.run(&["volume", "ls", "--json"]).await.json()[1]["path"], "/volumes/old");
    assert_eq!(fake.run(&["volume", "ls", "-q"]).await.stdout, "data\nold\n");
    assert_eq!(fake.run(&["volume", "inspect", "data"]).await.json()["service"], "web");
    let unknown = fake.run(&["volume", "inspect", "other"]).await;
    assert!(unknown.code == 1 && unknown.stderr.contains("no volume other"), "{unknown:?}");
    let refused = fake.run(&["volume", "rm", "data", "old"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("service web has volume data"), "{refused:?}");
    assert_eq!(refused.stdout, "old\n");
    let asked = fake.run(&["volume", "prune"]).await;
    assert!(asked.code == 1 && asked.stdout.contains("old") && !asked.stdout.contains("data"), "{asked:?}");
    assert!(asked.stderr.contains("godwit volume prune --force"), "{asked:?}");
    assert_eq!(fake.run(&["volume", "prune", "--force"]).await.stdout, "old\n");
}
