//! `godwit image` against a daemon that answers what the test expects.
#![allow(clippy::unwrap_used, missing_docs)]

mod fake;

use fake::Fake;

#[tokio::test]
async fn images_and_layers_are_listed_and_removed() {
    let fake = Fake::start();
    let table = fake.run(&["images"]).await.stdout;
    let row = table.lines().nth(1).unwrap();
    assert!(row.starts_with("docker.io/library/redis:7  abababababab  linux/amd64  40.0 MiB"), "{table}");
    assert_eq!(fake.run(&["image", "ls", "--json"]).await.json()[0]["services"][0], "web");
    let table = fake.run(&["image", "ls", "--layers"]).await.stdout;
    let row = table.lines().nth(1).unwrap();
    assert!(row.starts_with("0123456789ab  3.0 MiB") && row.ends_with("web"), "{table}");
    assert_eq!(fake.run(&["image", "ls", "--layers", "--json"]).await.json()[0]["bytes"], 3 << 20);
    assert_eq!(fake.run(&["images", "-q"]).await.stdout, "docker.io/library/redis:7\n");
    assert!(fake.run(&["image", "ls", "--layers", "-q"]).await.stdout.starts_with("sha256:0123456789ab"));
    let pruned = fake.run(&["image", "prune"]).await;
    assert_eq!(
        (pruned.code, pruned.stdout.as_str()),
        (0, "docker.io/library/redis:7\n0123456789ab\n"),
        "{pruned:?}"
    );
    assert!(pruned.stderr.contains("3.0 MiB freed"), "{pruned:?}");
    let refused = fake.run(&["image", "rm", "0123"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("layer 0123 is used by web"), "{refused:?}");
}
