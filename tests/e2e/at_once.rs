//! Services that are started at the same time get in each other's way nowhere. Needs root.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddrV4},
    process::Stdio,
};

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, PATIENCE};
use serde::Deserialize;

/// Services.
const MANY: usize = 5;

#[derive(Deserialize)]
struct Shown {
    name: String,
    state: String,
    address: Ipv4Addr,
}

#[test]
fn services_that_are_started_at_once_have_an_address_each_at_which_they_answer() {
    let bed = Bed::up("at-once");
    let preset = bed.build(Workload::Redis);
    // Those at the other node choose from the same addresses.
    let nodes = ["a", "a", "a", "b", "b"];
    let names: Vec<_> = (0..MANY).map(|number| format!("s{number}")).collect();
    let runs: Vec<_> = names
        .iter()
        .zip(nodes)
        .map(|(name, node)| {
            let mut arguments = vec!["run", "--name", name, "--rootfs", preset.rootfs.to_str().unwrap()];
            arguments.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
            arguments.extend(preset.user.iter().flat_map(|user| ["--user", user]));
            arguments.push("--");
            arguments.extend(preset.command.iter().map(String::as_str));
            let mut command = bed.command(node, &arguments);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for (name, run) in names.iter().zip(runs) {
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut addresses = BTreeSet::new();
    for (name, node) in names.iter().zip(nodes) {
        let shown: Vec<Shown> = bed.json(node, &["ps", "-a"]);
        let shown = shown.into_iter().find(|shown| shown.name == *name).unwrap();
        assert_eq!(shown.state, "running", "{name}");
        assert!(addresses.insert(shown.address), "{name} has the address {} of another", shown.address);
        let port = preset.at(shown.address).port();
        let at = SocketAddrV4::new(shown.address, port);
        let mut client = RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
        assert_ne!(client.call(&["SET", "name", name]).unwrap(), Reply::Integer(0));
    }
}
