//! Services that are being made: what is left when their node dies meanwhile, and names that have just become free.
//! Needs root.

use std::net::Ipv4Addr;

use godwit_lab::workload::Workload;
use godwit_tests::{
    Bed,
    hold::{Points, STARTED},
    victim::traces::{nothing_more, steady_traces},
};

const NAME: &str = "new";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 77);

#[test]
fn a_service_that_was_being_made_when_its_daemon_died_is_removed_by_the_next_one() {
    let mut points = None;
    let bed = Bed::up_with("half-made", |config| points = Some(Points::among(config, &[STARTED])));
    let points = points.unwrap();
    let preset = bed.build(Workload::Busybox);
    let before = steady_traces(&bed, "a", |_| true);
    points.hold(STARTED);
    let (root, address) = (preset.rootfs.to_str().unwrap(), ADDRESS.to_string());
    let run = ["run", "--name", NAME, "--ip", &address, "--rootfs", root, "--", "sleep", "1000"];
    let mut running = bed.command("a", &run).spawn().unwrap();
    points.reached(STARTED);
    let half_made = steady_traces(&bed, "a", |traces| traces.iter().any(|trace| trace.contains("services")));
    bed.lab().stop_node("a").unwrap();
    assert!(!running.wait().unwrap().success());
    points.let_go(STARTED);
    bed.lab().start_node("a").unwrap();
    assert!(half_made.contains("process godwit-shim"), "it ran: {half_made:?}");
    nothing_more(&bed, "a", &before);
    assert_eq!(bed.godwit("a", &["inspect", NAME]).code, 1);
    // And one that was made stays when its daemon dies.
    bed.done("a", &run);
    bed.lab().restart_node("a").unwrap();
    let shown: serde_json::Value = bed.json("a", &["inspect", NAME]);
    assert_eq!(shown["state"], "running");
}

#[test]
fn a_name_and_its_address_are_free_on_every_node_as_soon_as_the_service_is_removed() {
    let bed = Bed::up("free-name");
    let preset = bed.build(Workload::Busybox);
    let (root, address) = (preset.rootfs.to_str().unwrap(), ADDRESS.to_string());
    let run = ["run", "--name", NAME, "--ip", &address, "--rootfs", root, "--", "sleep", "1000"];
    for node in ["a", "b"].into_iter().cycle().take(8) {
        bed.done(node, &run);
        bed.done(node, &["rm", "--force", NAME]);
    }
}
