//! A Docker has its images in containerd's store, and another one in its own. Needs root and a Docker of release 29
//! (`make test-engines`), which can have either.

use std::fs;
use std::process::Command;

use godwit_lab::workload::Workload;
use godwit_tests::docker::Dockers;
use godwit_tests::wait_for;
use serde_json::Value;

use crate::engine_images::load_for_two_platforms;
use crate::engine_nodes::{Engine, IMAGE, Nodes};

/// A container of no image's weight.
const FEW_BYTES: u64 = 1 << 20;

/// Node a has containerd's store, and node b has the one that is wanted; nothing where this Docker has one store alone.
fn up(test: &str, is_own: bool) -> Option<Nodes> {
    let dockers = Dockers::new();
    if dockers.release() < 29 {
        println!("not tried: Docker {} has no two image stores; see `make test-engines`", dockers.release());
        return None;
    }
    let engine = Engine::Docker(if is_own { dockers.with_own_store("b") } else { dockers });
    Some(Nodes::up_with(engine, test, Workload::Redis, &[], |_| {}))
}

/// What Docker knows the image of a container by.
fn image_of(nodes: &Nodes, node: &str, name: &str) -> String {
    nodes.own(node, &["container", "inspect", "--format", "{{.Image}}", name]).trim().to_owned()
}

/// All images of a node, by their IDs.
fn images(nodes: &Nodes, node: &str) -> Vec<String> {
    let told = nodes.own(node, &["images", "--all", "--quiet", "--no-trunc"]);
    let mut ids: Vec<_> = told.lines().map(str::to_owned).collect();
    ids.sort();
    ids.dedup();
    ids
}

/// Starts a container on a node, which counts in its log, and gives it to godwit.
fn run(nodes: &Nodes, node: &str, name: &str, image: &str) {
    let counts = "n=0; while /bin/sleep 0.1; do n=$((n+1)); echo $n; done";
    nodes
        .own(node, &["run", "--detach", "--name", name, "--network", "none", image, "/bin/sh", "-c", counts]);
    nodes.bed.done(node, &["adopt", &format!("docker:{name}")]);
    nodes.own(node, &["exec", name, "/bin/sh", "-c", "echo kept >/changed"]);
}

/// Plain Docker does with a container what it does with one of its own.
fn is_managed(nodes: &Nodes, node: &str, name: &str) {
    assert_eq!(nodes.own(node, &["exec", name, "/bin/cat", "/changed"]), "kept\n");
    nodes.own(node, &["stop", "--time", "0", name]);
    let before = wait_for("its log from before the move", || {
        Some(nodes.own(node, &["logs", name])).filter(|log| log.starts_with("1\n2\n"))
    });
    nodes.own(node, &["start", name]);
    wait_for("it to count again", || {
        let after = nodes.own(node, &["logs", name]);
        after.strip_prefix(&before).is_some_and(|after| after.starts_with("1\n2\n")).then_some(())
    });
    assert_eq!(nodes.own(node, &["exec", name, "/bin/cat", "/changed"]), "kept\n");
}

#[test]
fn a_container_moves_between_two_kinds_of_image_stores_and_back() {
    let Some(nodes) = up("stores", true) else { return };
    run(&nodes, "a", "cache", IMAGE);
    let original = image_of(&nodes, "a", "cache");
    let at_first = images(&nodes, "a");
    let whole = nodes.bed.migrate_so("cache", "a", "b", &["--mode", "precopy"]).file_bytes;
    assert!(whole > FEW_BYTES, "{whole}");
    // There it is known by its configuration.
    let there = image_of(&nodes, "b", "cache");
    assert_ne!(there, original);
    assert_eq!(images(&nodes, "b"), [there.as_str()]);
    is_managed(&nodes, "b", "cache");
    // And back to what was there before.
    let back = nodes.bed.migrate_so("cache", "b", "a", &["--mode", "postcopy"]).file_bytes;
    assert!(back < FEW_BYTES, "{back}");
    assert_eq!((image_of(&nodes, "a", "cache"), images(&nodes, "a")), (original.clone(), at_first));
    is_managed(&nodes, "a", "cache");
    // Nor does it cross again.
    let again = nodes.bed.migrate_so("cache", "a", "b", &["--mode", "postcopy"]).file_bytes;
    assert!(again < FEW_BYTES, "{again}");
    assert_eq!(image_of(&nodes, "b", "cache"), there);

    // One that was made in Docker's own store, on layers of the other.
    let context = nodes.bed.scratch().join("context");
    fs::create_dir(&context).unwrap();
    let build = |dockerfile: String, name: &str| {
        fs::write(context.join("Dockerfile"), dockerfile).unwrap();
        nodes.own("b", &["build", "--quiet", "--tag", name, context.to_str().unwrap()]);
    };
    fs::write(context.join("more"), "more").unwrap();
    build(format!("FROM {there}\nCOPY more /more\nCOPY more /more\n"), "localhost/more:1");
    run(&nodes, "b", "more", "localhost/more:1");
    let own = image_of(&nodes, "b", "more");
    nodes.bed.migrate_so("more", "b", "a", &["--mode", "precopy"]);
    let made = image_of(&nodes, "a", "more");
    assert_ne!(made, own);
    assert_eq!(nodes.own("a", &["exec", "more", "/bin/cat", "/more"]), "more");
    is_managed(&nodes, "a", "more");
    // Its layers are there now, unpacked, and those alone cross that are on top of them.
    build("FROM localhost/more:1\nCOPY more /again\n".to_owned(), "localhost/again:1");
    run(&nodes, "b", "again", "localhost/again:1");
    let rest = nodes.bed.migrate_so("again", "b", "a", &["--mode", "postcopy"]).file_bytes;
    assert!(rest < FEW_BYTES, "{rest}");
    assert_eq!(nodes.own("a", &["exec", "again", "/bin/cat", "/more", "/again"]), "moremore");
    let back = nodes.bed.migrate_so("more", "a", "b", &["--mode", "postcopy"]).file_bytes;
    assert!(back < FEW_BYTES, "{back}");
    assert_eq!(image_of(&nodes, "b", "more"), own);
    is_managed(&nodes, "b", "more");

    // Docker can do with what has come whatever it could do with its own.
    let read = ["run", "--rm", "--network", "none", &made, "/bin/cat", "/more"];
    assert_eq!(nodes.own("a", &read), "more");
    let archive = nodes.bed.scratch().join("image.tar");
    nodes.own("a", &["save", "--output", archive.to_str().unwrap(), &made]);
    nodes.down();
}

#[test]
fn of_an_image_for_several_platforms_the_other_store_gets_the_one_that_the_container_has() {
    let Some(nodes) = up("two-ways", true) else { return };
    let id = load_for_two_platforms(&nodes);
    run(&nodes, "a", "cache", "localhost/two:1");
    assert_eq!(image_of(&nodes, "a", "cache"), id);
    nodes.bed.migrate("cache", "a", "b");
    is_managed(&nodes, "b", "cache");
    let back = nodes.bed.migrate("cache", "b", "a").file_bytes;
    assert!(back < FEW_BYTES, "{back}");
    // Another one has the same configuration there.
    assert_eq!(image_of(&nodes, "a", "cache"), id);
    is_managed(&nodes, "a", "cache");
    nodes.down();
}

#[test]
fn an_image_of_which_containerd_has_lost_a_file_is_refused_by_name_and_the_container_stays() {
    for is_own in [true, false] {
        let Some(nodes) = up(if is_own { "lost-own" } else { "lost" }, is_own) else { return };
        let Engine::Docker(dockers) = &nodes.engine else { panic!("another engine") };
        let archive = nodes.bed.scratch().join("image.tar");
        let archive = archive.to_str().unwrap();
        nodes.own("a", &["save", "--output", archive, IMAGE]);
        let list = Command::new("tar").args(["-xOf", archive, "manifest.json"]).output().unwrap().stdout;
        let list: Value = serde_json::from_slice(&list).unwrap();
        let layer = list[0]["Layers"][0].as_str().unwrap().replace("blobs/sha256/", "sha256:");
        run(&nodes, "a", "cache", IMAGE);
        if dockers.ctr("a", &["content", "rm", &layer]).is_none() {
            println!("not tried: ctr is not in PATH; the package containerd has it");
            return nodes.down();
        }
        let refused = nodes.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
        let told = format!("does not have the file {layer}");
        assert!(refused.code != 0 && refused.stderr.contains(&told), "{refused:?}");
        nodes.is_at("a", "running");
        assert_eq!(images(&nodes, "b"), [""; 0]);
        // With the image there it moves.
        nodes.own("b", &["load", "--quiet", "--input", archive]);
        nodes.bed.migrate("cache", "a", "b");
        is_managed(&nodes, "b", "cache");
        nodes.down();
    }
}
