//! Images of containers that engines keep: only layers cross that the other node's engine lacks. Needs root and the engines.
//! The same of Podman is in `podman.rs`.

use std::fs;
use std::path::Path;
use std::process::Command;

use godwit_lab::workload::Workload;
use serde_json::{Value, json};

use crate::engine_nodes::{Engine, IMAGE, Nodes};

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

/// An OCI layout of one image becomes one of an image for this machine's platform and another, which is not in it; its ID.
fn for_two_platforms(layout: &Path, name: &str) -> String {
    let read =
        |file: &str| -> Value { serde_json::from_slice(&fs::read(layout.join(file)).unwrap()).unwrap() };
    let mut own = read("index.json")["manifests"][0].clone();
    let manifest = read(&format!("blobs/{}", own["digest"].as_str().unwrap().replace(':', "/")));
    let config = manifest["config"]["digest"].as_str().unwrap().replace(':', "/");
    let architecture = read(&format!("blobs/{config}"))["architecture"].clone();
    own.as_object_mut().unwrap().remove("annotations");
    own["platform"] = json!({ "architecture": architecture, "os": "linux" });
    let mut other = own.clone();
    other["digest"] = format!("sha256:{}", "a".repeat(64)).into();
    other["platform"]["architecture"] = "riscv64".into();
    let kind = "application/vnd.oci.image.index.v1+json";
    let list = json!({ "schemaVersion": 2, "mediaType": kind, "manifests": [own, other] }).to_string();
    fs::write(layout.join("list"), &list).unwrap();
    let sum = Command::new("sha256sum").arg(layout.join("list")).output().unwrap().stdout;
    let hex = String::from_utf8(sum).unwrap()[..64].to_owned();
    fs::rename(layout.join("list"), layout.join("blobs/sha256").join(&hex)).unwrap();
    let named = json!({
        "mediaType": kind, "digest": format!("sha256:{hex}"), "size": list.len(),
        "annotations": { "io.containerd.image.name": name },
    });
    let index = json!({ "schemaVersion": 2, "manifests": [named] });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::remove_file(layout.join("manifest.json")).unwrap();
    format!("sha256:{hex}")
}

/// Gives Docker on node a an image `localhost/two:1` for this machine's platform and another; its ID.
pub(crate) fn load_for_two_platforms(nodes: &Nodes) -> String {
    let layout = nodes.bed.scratch().join("layout");
    fs::create_dir(&layout).unwrap();
    let archive = nodes.bed.scratch().join("image.tar");
    let archive_text = archive.to_str().unwrap();
    let tar = |words: &[&str]| {
        let packed = Command::new("tar").arg("-C").arg(&layout).args(words).status().unwrap();
        assert!(packed.success(), "{words:?}");
    };
    nodes.own("a", &["save", "--output", archive_text, IMAGE]);
    tar(&["-xf", archive_text]);
    let id = for_two_platforms(&layout, "localhost/two:1");
    tar(&["-cf", archive_text, "."]);
    nodes.own("a", &["load", "--quiet", "--input", archive_text]);
    id
}

/// Where containerd has images (`make test-engines`): Docker's own store knows nothing of lists of manifests.
#[test]
fn an_image_for_several_platforms_crosses_between_dockers_with_the_one_that_is_there() {
    let nodes = Nodes::up("docker", "index", Workload::Redis, &[]);
    if matches!(&nodes.engine, Engine::Docker(dockers) if dockers.release() < 29) {
        return nodes.down();
    }
    let id = load_for_two_platforms(&nodes);
    nodes.own(
        "a",
        &["run", "--detach", "--name", "two", "--network", "none", "localhost/two:1", "/bin/sleep", "1000"],
    );
    nodes.bed.done("a", &["adopt", "docker:two"]);
    nodes.bed.migrate("two", "a", "b");
    let of_container = nodes.own("b", &["container", "inspect", "--format", "{{.Image}}", "two"]);
    assert_eq!(of_container.trim(), id);
    // And back, where it is: nothing of it crosses again.
    let back = nodes.bed.migrate("two", "b", "a");
    assert!(back.file_bytes < 1 << 20, "{}", back.file_bytes);
    nodes.down();
}
