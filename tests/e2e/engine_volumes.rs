//! What becomes of the volumes of an engine's container when it moves: they go with it, or the container has what the engine
//! of each node has under the name. Needs root, Podman and Docker.

use std::fs;
use std::path::Path;

use godwit_lab::workload::Workload;
use godwit_tests::victim::Attempt;
use godwit_tests::{Report, wait_for};

use crate::engine_nodes::{COPIED, IMAGE, Nodes, is_tried};

#[test]
fn a_volume_of_podmans_goes_along_or_stays_as_it_is_said() {
    of_each_volume_it_is_said("podman");
}

#[test]
fn a_volume_of_dockers_goes_along_or_stays_as_it_is_said() {
    of_each_volume_it_is_said("docker");
}

/// The words that start a container with this name and these volumes.
fn started<'a>(nodes: &'a Nodes, name: &'a str, volumes: &[&'a str]) -> Vec<&'a str> {
    let mut words = vec!["run", "--detach", "--name", name, "--network", "none"];
    words.extend(volumes.iter().flat_map(|volume| ["--volume", volume]));
    words.extend(nodes.preset.env.iter().flat_map(|entry| ["--env", entry]));
    words.extend(nodes.preset.user.iter().flat_map(|user| ["--user", user]));
    words.push(IMAGE);
    words.extend(nodes.preset.command.iter().map(String::as_str));
    words
}

/// The names of the volumes of a node's engine.
fn volumes(nodes: &Nodes, node: &str) -> Vec<String> {
    let mut names: Vec<_> =
        nodes.own(node, &["volume", "ls", "--quiet"]).lines().map(str::to_owned).collect();
    names.sort();
    names
}

/// Makes a volume that shows a directory, as one of NFS would show that.
fn shows(nodes: &Nodes, node: &str, directory: &Path) {
    let device = format!("device={}", directory.display());
    let options = ["--opt", "type=none", "--opt", "o=bind", "--opt", &device];
    nodes.own(node, &[&["volume", "create"], &options[..], &["same"]].concat());
}

#[test]
fn files_of_podmans_that_were_sent_ahead_are_not_sent_again() {
    are_sent_ahead("podman");
}

#[test]
fn files_of_dockers_that_were_sent_ahead_are_not_sent_again() {
    are_sent_ahead("docker");
}

fn are_sent_ahead(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let nodes = Nodes::up(engine, "ahead", Workload::Redis, &[]);
    nodes.own("a", &started(&nodes, "cache", &["goes:/goes"]));
    let inside = |node: &str, script: &str| nodes.own(node, &["exec", "cache", "/bin/sh", "-c", script]);
    let sums = |node: &str| inside(node, "sha256sum /goes/* /large");
    const LARGE: u64 = 9_000_000;
    let noise = |file: &str| inside("a", &format!("head -c {LARGE} /dev/urandom >{file}"));
    noise("/goes/first");
    noise("/large");
    nodes.bed.done("a", &["adopt", &format!("{engine}:cache"), "--ip", "10.88.0.10"]);
    let text = nodes.bed.done("a", &["--json", "prepare", "cache", "--to", "b"]);
    let prepared: Report = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((prepared.outcome.as_str(), prepared.files_stay.as_str()), ("prepared", ""));
    assert!(prepared.retained_file_bytes >= 2 * LARGE, "{prepared:?}");
    // Nothing of it is the other engine's before the move, and the service goes on.
    assert_eq!((nodes.listed("b"), volumes(&nodes, "b")), (String::new(), Vec::new()));
    noise("/goes/second");
    inside("a", "echo more >>/goes/first; rm /large; echo other >/large");
    let before = sums("a");
    let moved = nodes.bed.migrate("cache", "a", "b");
    assert!(moved.retained_file_bytes >= 2 * LARGE, "{moved:?}");
    assert!((LARGE..2 * LARGE).contains(&moved.file_bytes), "{moved:?}");
    assert_eq!(sums("b"), before);
    // It is whole there: the engine starts it again, with the same files.
    nodes.own("b", &["restart", "--time", "0", "cache"]);
    wait_for("it to run again", || (nodes.listed("b") == "cache running\n").then_some(()));
    assert_eq!(sums("b"), before);
    nodes.down();
}

fn of_each_volume_it_is_said(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let storage = tempfile::tempdir_in("/var/tmp").unwrap();
    let nodes = Nodes::up(engine, "vols", Workload::Redis, &["--allow-bind", "/"]);
    shows(&nodes, "a", storage.path());
    nodes.own("a", &started(&nodes, "cache", &["own:/own", "same:/same", "goes:/goes"]));
    let inside = |node: &str, script: &str| nodes.own(node, &["exec", "cache", "/bin/sh", "-c", script]);
    let refused = |node: &str, words: &[&str], said: &[&str]| {
        let told = nodes.bed.godwit(node, words);
        assert!(told.code == 1, "{words:?}: {told:?}");
        assert!(said.iter().all(|said| (told.stderr.clone() + &told.stdout).contains(said)), "{told:?}");
    };
    let container = format!("{engine}:cache");
    let adopt = ["adopt", &container, "--ip", "10.88.0.10"];
    refused("a", &adopt, &["its volume same is not one of"]);
    let unknown = [&adopt[..], &["--mount", "/same=shared", "--mount", "/none=skip"]].concat();
    refused("a", &unknown, &["neither something of the node nor a volume mounted at /none"]);
    nodes.bed.done("a", &[&adopt[..], &["--mount", "/same=shared"]].concat());
    assert_eq!(nodes.is_shown("a", "running")["mounts"][0]["on_move"], "shared");
    inside("a", "echo 1 >/own/file; echo 2 >/same/file; echo 3 >/goes/file");

    // Storage is not believed to be shared: it is tried.
    let go = ["migrate", "cache", "--to", "b", "--mount", "/own=skip"];
    refused("a", &["check", "cache", "--to", "b"], &["has no volume same there"]);
    refused("a", &go, &["has no volume same there"]);
    let other = tempfile::tempdir_in("/var/tmp").unwrap();
    shows(&nodes, "b", other.path());
    // An engine mounts it for the container alone.
    refused("a", &go, &["volume same", "is not the storage that node a has there"]);
    wait_for("what was made for it to be gone", || {
        (volumes(&nodes, "b") == ["same"] && nodes.listed("b").is_empty()).then_some(())
    });
    nodes.own("b", &["volume", "rm", "same"]);
    shows(&nodes, "b", storage.path());

    // What was said holds for the way back.
    let mut client = nodes.connect();
    nodes.bed.migrate_so("cache", "a", "b", &["--mount", "/own=skip"]);
    client.call(&["PING"]).unwrap();
    assert_eq!(inside("b", "cat /same/file /goes/file; ls /own"), "2\n3\n");
    inside("b", "echo more >>/same/file; echo more >>/goes/file; echo of b >/own/file");
    wait_for("what goes to be gone", || (volumes(&nodes, "a") == ["own", "same"]).then_some(()));
    assert_eq!(volumes(&nodes, "b"), ["goes", "own", "same"]);
    assert!(nodes.listed("a").is_empty());
    nodes.bed.migrate_so("cache", "b", "a", &[]);
    client.call(&["PING"]).unwrap();
    let all = "cat /own/file /same/file /goes/file";
    assert_eq!(inside("a", all), "1\n2\nmore\n3\nmore\n");
    wait_for("what goes to be gone", || (volumes(&nodes, "b") == ["own", "same"]).then_some(()));
    assert_eq!(fs::read_to_string(storage.path().join("file")).unwrap(), "2\nmore\n");
    // It starts again with them.
    nodes.own("a", &["restart", "--time", "1", "cache"]);
    nodes.is_shown("a", "running");
    assert_eq!(inside("a", all), "1\n2\nmore\n3\nmore\n");

    // From here on it goes along, over nothing that is there; and what cannot go stays.
    let copy = ["migrate", "cache", "--to", "b", "--mount", "/own=copy"];
    refused("a", &copy, &["a volume own there already"]);
    assert_eq!(fs::read_to_string(storage.path().join("file")).unwrap(), "2\nmore\n");
    refused("a", &[&copy[..4], &["--mount", "/same=copy"]].concat(), &["its volume same is not one of"]);
    nodes.own("b", &["volume", "rm", "own"]);
    nodes.bed.migrate_so("cache", "a", "b", &["--mount", "/own=copy"]);
    assert_eq!(inside("b", all), "1\n2\nmore\n3\nmore\n");
    wait_for("what goes to be gone", || (volumes(&nodes, "a") == ["same"]).then_some(()));
    nodes.bed.done("b", &["rm", "--force", "cache"]);
    assert_eq!(volumes(&nodes, "b"), ["goes", "own", "same"]);
    let names: Vec<_> =
        fs::read_dir(storage.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"], "nothing is left of the trials");
    nodes.down();
}

#[test]
fn a_file_of_the_node_goes_along_with_a_container_of_podmans() {
    a_file_goes_along("podman");
}

#[test]
fn a_file_of_the_node_goes_along_with_a_container_of_dockers() {
    a_file_goes_along("docker");
}

fn a_file_goes_along(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("app.conf");
    fs::write(&file, "of the node\n").unwrap();
    let nodes = Nodes::up(engine, "file", Workload::Redis, &[]);
    let bound = format!("{}:/etc/app.conf:ro", file.display());
    nodes.own("a", &started(&nodes, "cache", &[&bound]));
    let container = format!("{engine}:cache");
    nodes.bed.done("a", &["adopt", &container, "--ip", "10.88.0.10", "--mount", "/etc/app.conf=copy"]);
    // The engine's volume of the name is somebody else's.
    nodes.own("a", &["volume", "create", "cache-etc-app.conf"]);
    let said = nodes.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    let remedy = format!("`{engine} volume rm cache-etc-app.conf`");
    assert!(said.code == 1 && said.stderr.contains(&remedy), "{said:?}");
    nodes.own("a", &["volume", "rm", "cache-etc-app.conf"]);

    let mut client = nodes.connect();
    let read = ["exec", "cache", "/bin/sh", "-c", "cat /etc/app.conf; echo x >/etc/app.conf || echo kept"];
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        nodes.bed.migrate_so("cache", from, to, &["--mount", "/etc/app.conf=copy"]);
        client.call(&["PING"]).unwrap();
        assert_eq!(nodes.own(to, &read), "of the node\nkept\n");
        assert_eq!(volumes(&nodes, to), ["cache-etc-app.conf"]);
        wait_for("the copy to be on one node", || volumes(&nodes, from).is_empty().then_some(()));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "of the node\n");
    nodes.own("b", &["restart", "--time", "1", "cache"]);
    nodes.is_shown("b", "running");
    assert_eq!(nodes.own("b", &read), "of the node\nkept\n");
    nodes.bed.done("b", &["rm", "--force", "cache"]);
    assert_eq!(volumes(&nodes, "b"), ["cache-etc-app.conf"]);
    nodes.down();
}

#[test]
fn podman_makes_a_container_with_directories_of_the_node_which_are_copied_or_stay() {
    made_with_directories("podman");
}

#[test]
fn docker_makes_a_container_with_directories_of_the_node_which_are_copied_or_stay() {
    made_with_directories("docker");
}

fn made_with_directories(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    for name in ["copied", "own"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("copied") + "/file", "1\n").unwrap();
    fs::write(at("conf"), "2\n").unwrap();
    let allowed = directory.path().display().to_string();
    let nodes = Nodes::up(engine, "dirs", Workload::Redis, &["--allow-bind", &allowed]);
    let command: Vec<_> = nodes.preset.command.iter().map(String::as_str).collect();
    let mut more: Vec<&str> = nodes.preset.env.iter().flat_map(|entry| ["--env", entry]).collect();
    more.extend(nodes.preset.user.iter().flat_map(|user| ["--user", user]));
    // What cannot be given leaves nothing.
    let state = nodes.bed.lab().state("a").unwrap();
    let own = format!("{}:/data", state.display());
    let nowhere = format!("{}:/data", at("nowhere"));
    for (flag, words) in [(&own, "godwit's own"), (&nowhere, "does not exist on this node")] {
        let said = nodes.bed.godwit("a", &nodes.words(IMAGE, &[&more[..], &["-v", flag]].concat(), &command));
        assert!(said.code != 0 && said.stderr.contains(words), "{said:?}");
        assert!(nodes.listed("a").is_empty());
    }
    let flags = [
        format!("{}:/copied:move=copy", at("copied")),
        format!("{}:/etc/app.conf:ro,move=copy", at("conf")),
        format!("{}:/own", at("own")),
    ];
    more.extend(flags.iter().flat_map(|flag| ["-v", flag]));
    assert_eq!(nodes.bed.done("a", &nodes.words(IMAGE, &more, &command)), "cache\n");
    let said = nodes.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert!(said.code == 1 && said.stderr.contains("--mount /own=skip"), "{said:?}");
    let write = ["exec", "cache", "/bin/sh", "-c", "echo more >>/copied/file; echo 3 >/own/file"];
    nodes.own("a", &write);
    let mut client = nodes.connect();
    for (from, to, how) in [("a", "b", &["--mount", "/own=skip"][..]), ("b", "a", &[])] {
        nodes.bed.migrate_so("cache", from, to, how);
        client.call(&["PING"]).unwrap();
        let read = ["exec", "cache", "/bin/sh", "-c", "cat /copied/file /etc/app.conf /own/file"];
        assert_eq!(nodes.own(to, &read), "1\nmore\n2\n3\n");
        assert_eq!(volumes(&nodes, to), ["cache-copied", "cache-etc-app.conf"]);
        wait_for("the copies to be on one node", || volumes(&nodes, from).is_empty().then_some(()));
    }
    // Where a path leads elsewhere than when it was looked at, the move ends before its commit.
    let attempt = Attempt::held(&nodes.points, COPIED, || {
        Attempt::begin(&nodes.bed, "cache", "a", "b", &["--mode", "precopy"])
    });
    fs::rename(at("own"), at("away")).unwrap();
    fs::create_dir(at("own")).unwrap();
    nodes.points.let_go(COPIED);
    let why = attempt.aborted();
    assert!(why.contains("/own") && why.contains("the path has changed meanwhile"), "{why}");
    fs::remove_dir(at("own")).unwrap();
    fs::rename(at("away"), at("own")).unwrap();
    nodes.is_at("a", "running");
    client.call(&["PING"]).unwrap();
    wait_for("the copies to be on one node", || volumes(&nodes, "b").is_empty().then_some(()));
    nodes.own("a", &["restart", "--time", "1", "cache"]);
    nodes.is_shown("a", "running");
    assert_eq!(nodes.own("a", &["exec", "cache", "cat", "/copied/file"]), "1\nmore\n");
    nodes.down();
}
