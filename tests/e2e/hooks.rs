//! Hooks of a service whose migration is met by a crash: whoever was told of the freeze is told of the end.
//! Needs root.

use std::net::Ipv4Addr;

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::hooks::{EVERY_MOMENT, Hooks};
use godwit_tests::{Bed, CLIENT, PATIENCE, hold::Points, victim::Attempt, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 90);
const FROZEN: &str = "source.frozen";
const COMMITTED: &str = "destination.committed";

#[test]
fn who_was_told_of_the_freeze_is_told_of_the_end_although_a_daemon_was_killed() {
    let (hooks, mut points) = (Hooks::default(), None);
    let bed = Bed::up_with("hooks", |config| {
        config.programs.serve_arguments.extend(hooks.arguments());
        points = Some(Points::among(config, &[FROZEN, COMMITTED]));
    });
    let points = points.unwrap();
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &EVERY_MOMENT);
    let mut client = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(1));

    let killed_at = |point: &str, node: &str| {
        let attempt = Attempt::held(&points, point, || Attempt::begin(&bed, "redis", "a", "b", &[]));
        bed.lab().stop_node(node).unwrap();
        points.let_go(point);
        bed.lab().start_node(node).unwrap();
        attempt.end();
    };
    killed_at(FROZEN, "a");
    wait_for("the hook of the source", || (hooks.moments() == ["pre-freeze", "aborted"]).then_some(()));
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(2));

    // The other node may still be dropping its copy.
    killed_at(COMMITTED, "b");
    let all = ["pre-freeze", "aborted", "pre-freeze", "post-resume"];
    wait_for("the hook of the destination", || (hooks.moments() == all).then_some(()));
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(3));
    let last = hooks.states().pop().unwrap();
    assert_eq!(last["annotations"]["godwit.source"], "a", "{last}");
}
