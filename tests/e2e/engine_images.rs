//! Images of containers that engines keep: only layers cross that the other node's engine lacks. Needs root and the engines.
//! The same of Podman is in `podman.rs`.

use std::fs;

use godwit_lab::workload::Workload;

use crate::engine_nodes::{IMAGE, Nodes};

#[test]
fn layers_that_the_other_docker_has_do_not_cross() {
    let nodes = Nodes::up("docker", "image", Workload::Redis, &[]);
    let image = |node: &str, name: &str| nodes.own(node, &["image", "inspect", "--format", "{{.Id}}", name]);
    let run = |name: &str, image: &str| {
        nodes
            .own("a", &["run", "--detach", "--name", name, "--network", "none", image, "/bin/sleep", "1000"]);
        nodes.bed.done("a", &["adopt", &format!("docker:{name}")]);
    };
    run("base", IMAGE);
    // Node b has nothing.
    let bytes = nodes.bed.migrate("base", "a", "b").file_bytes;
    // As Docker counts it, or what containerd has of it, which is compressed.
    let size: u64 =
        nodes.own("a", &["image", "inspect", "--format", "{{.Size}}", IMAGE]).trim().parse().unwrap();
    assert!(bytes >= size / 5, "{bytes} of {size}");

    // Two further layers of a few bytes, one of them as often again: Docker's archive has a link for it.
    let dockerfile = "FROM localhost/cache:1\nCOPY more /more\nCOPY more /more\nCOPY other /other\n";
    let context = nodes.bed.scratch().join("context");
    fs::create_dir(&context).unwrap();
    for (name, text) in [("Dockerfile", dockerfile), ("more", "more"), ("other", "other")] {
        fs::write(context.join(name), text).unwrap();
    }
    nodes.own("a", &["build", "--quiet", "--tag", "localhost/more:1", context.to_str().unwrap()]);
    run("more", "localhost/more:1");
    let rest = nodes.bed.migrate("more", "a", "b");
    assert!(rest.file_bytes < bytes / 2, "{} of {bytes}", rest.file_bytes);
    assert_eq!(nodes.own("b", &["exec", "more", "/bin/cat", "/more", "/other"]), "moreother");
    let of_container = nodes.own("b", &["container", "inspect", "--format", "{{.Image}}", "more"]);
    assert_eq!(of_container, image("a", "localhost/more:1"));

    // All layers are there, and the image is not: another command.
    fs::write(context.join("Dockerfile"), "FROM localhost/more:1\nCMD [\"/bin/true\"]\n").unwrap();
    nodes.own("a", &["build", "--quiet", "--tag", "localhost/same:1", context.to_str().unwrap()]);
    run("same", "localhost/same:1");
    let rest = nodes.bed.migrate("same", "a", "b");
    assert!(rest.file_bytes < bytes / 2, "{} of {bytes}", rest.file_bytes);
    assert_eq!(nodes.own("b", &["exec", "same", "/bin/cat", "/more", "/other"]), "moreother");

    // Docker on b can do with what has come whatever it could do with its own.
    nodes.own(
        "b",
        &["run", "--rm", "--network", "none", image("a", "localhost/more:1").trim(), "/bin/cat", "/more"],
    );
    nodes.down();
}
