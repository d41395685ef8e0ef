//! `godwit image` against a daemon that answers what the test expects.
#![allow(clippy::unwrap_used, missing_docs)]

mod fake;

use fake::Fake;

#[tokio::test]
async fn images_and_layers_are_listed_and_removed() {
    let fake = Fake::start();
    let table = fake.run(&["images"]).await.stdout;
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let rows: Vec<_> = table.lines().skip(1).map(words).collect();
    assert!(
        rows[0].starts_with("docker.io/library/ledger:1 cdcdcdcdcdcd linux/amd64, linux/arm64 5.0 MiB"),
        "{table}"
    );
    assert!(rows[1].starts_with("docker.io/library/redis:7 abababababab linux/amd64 40.0 MiB"), "{table}");
    let listed = fake.run(&["image", "ls", "--json"]).await.json();
    assert_eq!(listed[1]["services"][0], "web");
    assert_eq!(listed[0]["platforms"][1]["machine"], "aarch64");
    let table = fake.run(&["image", "ls", "--layers"]).await.stdout;
    let row = table.lines().nth(1).unwrap();
    assert!(row.starts_with("0123456789ab  3.0 MiB") && row.ends_with("web"), "{table}");
    assert_eq!(fake.run(&["image", "ls", "--layers", "--json"]).await.json()[0]["bytes"], 3 << 20);
    let names = "docker.io/library/ledger:1\ndocker.io/library/redis:7\n";
    assert_eq!(fake.run(&["images", "-q"]).await.stdout, names);
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

#[tokio::test]
async fn images_are_inspected_by_any_of_their_names() {
    let fake = Fake::start();
    let digest = format!("sha256:{}", "cd".repeat(32));
    let pinned = format!("ledger@{digest}");
    for name in ["ledger:1", "docker.io/library/ledger:1", &pinned, &digest] {
        let shown = fake.run(&["image", "inspect", name]).await;
        let shown: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap();
        assert_eq!(shown.as_array().unwrap().len(), 1, "{name}");
        assert_eq!(shown[0]["platforms"][0]["architecture"], "amd64");
        assert_eq!(shown[0]["run"]["entrypoint"][0], "/bin/ledger");
    }
    let both = fake.run(&["--json", "image", "inspect", "redis:7", "ledger:1"]).await.json();
    assert_eq!((&both[0]["architecture"], &both[1]["digest"]), (&"amd64".into(), &digest.as_str().into()));
    for none in ["ledger", "shop/ledger:1", "ledger:2"] {
        let refused = fake.run(&["image", "inspect", none]).await;
        assert!(refused.code == 1 && refused.stderr.contains("this node has no image"), "{refused:?}");
    }
}

#[tokio::test]
async fn an_archive_is_imported_under_its_name_or_another() {
    let fake = Fake::start();
    let taken = fake.run(&["image", "import", "ledger.tar", "shop/ledger:2"]).await;
    let digest = "cd".repeat(32);
    assert_eq!(taken.stdout, format!("docker.io/shop/ledger:2@sha256:{digest}\n"), "{taken:?}");
    let nameless = fake.run(&["image", "import", "/srv/x.tar"]).await;
    assert!(nameless.code == 1 && nameless.stderr.contains("/srv/x.tar has no whole name"), "{nameless:?}");
    let wrong = fake.run(&["image", "import", "x.tar", "No Name"]).await;
    assert!(wrong.code != 0 && wrong.stderr.contains("is no image"), "{wrong:?}");
}

#[tokio::test]
async fn a_platform_is_added_by_any_of_its_names() {
    let fake = Fake::start();
    let digest = "cd".repeat(32);
    for platform in ["arm64", "linux/arm64", "aarch64"] {
        let added = fake.run(&["image", "add-platform", "ledger:1", platform]).await;
        assert_eq!(added.stdout, format!("docker.io/library/ledger:1@sha256:{digest}\n"), "{added:?}");
    }
    let busy = fake.run(&["image", "add-platform", "busy:1", "arm64"]).await;
    let words = "web does not have the platform yet";
    assert!(busy.code == 1 && busy.stderr.contains(words) && busy.stdout.contains("busy:1@"), "{busy:?}");
    let there = fake.run(&["image", "add-platform", "ledger:1", "amd64"]).await;
    assert!(there.code == 1 && there.stderr.contains("is for linux/amd64 already"), "{there:?}");
    let unknown = fake.run(&["image", "add-platform", "ledger:1", "riscv64"]).await;
    assert!(unknown.code != 0 && unknown.stderr.contains("amd64 and arm64"), "{unknown:?}");
}
