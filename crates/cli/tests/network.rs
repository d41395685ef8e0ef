//! `godwit network` against a daemon that answers what the test expects.
#![allow(clippy::unwrap_used, missing_docs)]

mod fake;

use fake::Fake;

#[tokio::test]
async fn the_network_is_shown_with_what_is_known_of_each_node() {
    let fake = Fake::start();
    let shown = fake.run(&["network", "inspect"]).await.stdout;
    for line in [
        "subnet      10.88.0.0/16, gateway 10.88.0.1 on gw0",
        "vxlan       network 88, UDP port 4789 on eth0",
        "network     default",
        "isolation   3 packets from one network to another dropped",
        "guard       known nodes only; 7 packets of others dropped",
        "encryption  tunnel; 0 packets refused, 0 not sent for lack of keys",
        "a*    10.99.0.11  -     -           self                    -         -",
        "b     10.99.0.11  1390  tunnel      encrypted               12 s old  345 packets",
        "d     10.99.0.11  1390  wireguard   encrypted               12 s old  3.0 MiB",
        "c     10.99.0.11  -     -           unknown (not heard of)  -         -",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    assert_eq!(fake.run(&["network", "inspect", "--json"]).await.json()["nodes"][1]["keys_age_s"], 12);
}

#[tokio::test]
async fn a_network_is_made_with_what_was_asked_for() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["network", "create", "back"]).await.stdout, "back\n");
    let asked = ["--subnet", "10.9.0.0/24", "--subnet6", "fd00::/96", "--vni", "99"];
    let made = fake.run(&[&["network", "create", "back", "--json"], asked.as_slice()].concat()).await.json();
    assert_eq!(made["subnet"], "10.9.0.0/24");
    assert_eq!((&made["subnet6"], &made["vni"]), (&"fd00::/96".into(), &99.into()));
    let refused = fake.run(&["network", "create", "back", "--vni", "16777216"]).await;
    assert_eq!(refused.code, 2, "{refused:?}");
}

#[tokio::test]
async fn networks_are_listed_with_their_services() {
    let fake = Fake::start();
    let table = fake.run(&["network", "ls"]).await.stdout;
    for line in [
        "NAME     SUBNET        IPV6  VNI  STATE           SERVICES",
        "default  10.88.0.0/16  -     88   up              db, web",
        "back     10.89.0.0/24  -     88   down (no port)  -",
    ] {
        assert!(table.lines().any(|shown| shown == line), "{line}: {table}");
    }
    assert_eq!(fake.run(&["network", "ls", "-q"]).await.stdout, "default\nback\n");
    let list = fake.run(&["network", "ls", "--json"]).await.json();
    assert_eq!(list[0]["services"][1], "web");
    assert_eq!(list[1]["network"]["subnet"], "10.89.0.0/24");
}

#[tokio::test]
async fn of_several_networks_those_that_can_be_are_removed() {
    let fake = Fake::start();
    let removed = fake.run(&["network", "rm", "front", "back"]).await;
    assert_eq!((removed.code, removed.stdout.as_str()), (1, "back\n"), "{removed:?}");
    assert!(removed.stderr.contains("there is no network front"), "{removed:?}");
}
