//! Images for two platforms: from a registry and from archives of other programs, listed, used by services that are restarted,
//! moved, checkpointed and restored, and removed; and registries that lie. Needs root, and what `scripts/setup --isa` installs.

use std::fs;
use std::path::{Path, PathBuf};

use godwit_tests::Bed;
use godwit_tests::ledger::{ADDRESS, Client, NAME, PORT, program};
use serde_json::{Value, json};

use crate::registry::{Registry, digest_of, tool};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// This machine's platform and the other one, as OCI calls them.
const OWN: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
const OTHER: &str = if cfg!(target_arch = "aarch64") { "amd64" } else { "arm64" };

/// Packs an image of the program at a path, with a file that all of them have; the archive and the image's digest.
fn packed(bed: &Bed, name: &str, program: &Path, path: &str) -> (PathBuf, String) {
    let files = bed.scratch().join("files");
    fs::create_dir_all(files.join("etc")).unwrap();
    fs::write(files.join("etc/motd"), "for both platforms\n").unwrap();
    let archive = bed.scratch().join(format!("{name}.tar"));
    let (to, files, port) = (archive.to_str().unwrap(), files.to_str().unwrap(), PORT.to_string());
    let name = format!("shop/{name}:1");
    let program = format!("{}={path}", program.display());
    let said = bed.done("a", &["image", "pack", "-o", to, "--add", files, "--cmd", &port, &name, &program]);
    let digest = said.trim_end().split_once('@').unwrap().1.to_owned();
    (archive, digest)
}

/// What `image inspect` shows of one image.
fn shown(bed: &Bed, node: &str, image: &str) -> Value {
    let shown: Vec<Value> = bed.json(node, &["image", "inspect", image]);
    assert_eq!(shown.len(), 1);
    shown.into_iter().next().unwrap()
}

/// Digests of the layers that a node has.
fn layers(bed: &Bed, node: &str) -> Vec<String> {
    let layers: Vec<Value> = bed.json(node, &["image", "ls", "--layers"]);
    let mut digests: Vec<_> =
        layers.iter().map(|layer| layer["digest"].as_str().unwrap().to_owned()).collect();
    digests.sort();
    digests
}

/// The platforms of the service as its node shows them: the node's own first, each with its layers.
fn has_both(bed: &Bed, node: &str, image: &Value) {
    let service: Value = bed.json(node, &["inspect", NAME]);
    let of = |value: &Value| -> Vec<(Value, Value, Value)> {
        let all = value["platforms"].as_array().unwrap().iter();
        all.map(|one| (one["architecture"].clone(), one["id"].clone(), one["layers"].clone())).collect()
    };
    assert_eq!(of(&service), of(image), "{service}");
    assert_eq!(service["layers"], service["platforms"][0]["layers"]);
}

#[test]
fn both_platforms_come_from_a_registry_stay_with_the_service_and_go_with_the_image() {
    let bed = Bed::up("platforms");
    let program = program(&bed, "ledger");
    let registry = Registry::start(&bed);
    let [plain, authfile] = registry.reached();
    let pushed = ["ledger", "other"].map(|name| {
        let (archive, digest) = packed(&bed, name, &program, &format!("/bin/{name}"));
        registry.push_archive(&archive, &format!("{name}:1"));
        (registry.reference(&format!("{name}:1")), archive, digest)
    });
    let [(image, archive, digest), (second, ..)] = &pushed;
    let pull = |image: &str| bed.godwit("a", &["image", "pull", &plain, &authfile, image]);

    let said = pull(image);
    assert!(said.code == 0 && said.stderr.contains(" in 3 layers"), "{said:?}");
    assert_eq!(said.stdout, format!("{}@{digest}\n", registry.reference("ledger")));
    let here = shown(&bed, "a", image);
    let platforms: Vec<_> =
        here["platforms"].as_array().unwrap().iter().map(|one| &one["architecture"]).collect();
    assert_eq!(
        (platforms, here["digest"].as_str().unwrap()),
        (vec![&json!(OWN), &json!(OTHER)], digest.as_str())
    );
    assert_eq!((layers(&bed, "a").len(), &here["run"]["cmd"][0]), (3, &PORT.to_string().into()));
    let table = bed.done("a", &["image", "ls"]);
    assert!(table.contains(&format!("linux/{OWN}, linux/{OTHER}")), "{table}");
    // It is known, and of another image what is here does not come again.
    let again = pull(image);
    assert!(again.code == 0 && !again.stderr.contains("Pulling"), "{again:?}");
    let said = pull(second);
    assert!(said.code == 0 && said.stderr.contains(" in 2 layers; 1 more are here"), "{said:?}");
    assert_eq!(layers(&bed, "a").len(), 5);

    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", NAME, "--ip", &address, image]);
    let mut client = Client::connect(&bed);
    client.asks().unwrap();
    has_both(&bed, "a", &here);
    bed.lab().restart_node("a").unwrap();
    client.asks().unwrap();
    has_both(&bed, "a", &here);
    let used = here["platforms"][1]["layers"][1].as_str().unwrap();
    let refused = bed.godwit("a", &["image", "rm", used]);
    assert!(refused.code == 1 && refused.stderr.contains(&format!("is used by {NAME}")), "{refused:?}");

    // Sent ahead, moved, and back from a file: on the node that has the image, and on one that is given it.
    bed.done("a", &["prepare", NAME, "--to", "b"]);
    assert_eq!(layers(&bed, "b").len(), 3);
    bed.migrate_so(NAME, "a", "b", &["--cross", "--max-park-ms", "20000"]);
    client.asks().unwrap();
    has_both(&bed, "b", &here);
    let file = bed.scratch().join("ledger.tar.zst");
    let file = file.to_str().unwrap();
    drop(client);
    bed.done("b", &["checkpoint", NAME, "--tcp-established", "-o", file]);
    bed.done("b", &["rm", "--force", NAME]);
    bed.done("a", &["restore", "--tcp-established", file]);
    has_both(&bed, "a", &here);
    bed.done("a", &["rm", "--force", NAME]);
    assert_eq!(bed.done("b", &["image", "prune"]).lines().count(), 3);
    bed.done("b", &["restore", "--tcp-established", "--image", archive.to_str().unwrap(), file]);
    has_both(&bed, "b", &here);
    bed.migrate_so(NAME, "b", "a", &["--cross", "--max-park-ms", "20000"]);
    has_both(&bed, "a", &here);

    // What the service or the other image needs stays.
    let removed: Value = bed.json("a", &["image", "rm", image]);
    assert_eq!(
        (removed["removed"].as_array().unwrap().len(), &removed["names"][0]),
        (0, &image.as_str().into())
    );
    has_both(&bed, "a", &here);
    bed.done("a", &["rm", "--force", NAME]);
    bed.done("a", &["pull", &plain, &authfile, image]);
    let removed: Value = bed.json("a", &["image", "rm", image]);
    assert_eq!(removed["removed"].as_array().unwrap().len(), 2, "{removed}");
    let left = shown(&bed, "a", second);
    assert_eq!((left["platforms"].as_array().unwrap().len(), layers(&bed, "a").len()), (2, 3));
    bed.done("a", &["image", "rm", second]);
    assert_eq!(layers(&bed, "a"), [""; 0]);
}

#[test]
fn an_archive_of_another_program_is_imported_with_both_platforms() {
    let bed = Bed::up("import");
    let program = program(&bed, "ledger");
    let (archive, digest) = packed(&bed, "ledger", &program, "/bin/ledger");
    let said = bed.done("a", &["image", "import", archive.to_str().unwrap()]);
    assert_eq!(said, format!("docker.io/shop/ledger:1@{digest}\n"));
    let here = shown(&bed, "a", "shop/ledger:1");
    // As skopeo writes it: the name is a tag.
    let copy = bed.scratch().join("copy.tar");
    let (from, to) =
        (format!("oci-archive:{}", archive.display()), format!("oci-archive:{}:7", copy.display()));
    tool("skopeo", &["copy", "--all", "--preserve-digests", &from, &to]);
    let copy = copy.to_str().unwrap();
    let nameless = bed.godwit("a", &["image", "import", copy]);
    assert!(nameless.code == 1 && nameless.stderr.contains("has no whole name there"), "{nameless:?}");
    let said = bed.done("a", &["image", "import", copy, "shop/copy:7"]);
    assert_eq!(said, format!("docker.io/shop/copy:7@{digest}\n"));
    let copied = shown(&bed, "a", "shop/copy:7");
    assert_eq!((&copied["platforms"], layers(&bed, "a").len()), (&here["platforms"], 3));
    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", NAME, "--ip", &address, "--pull", "never", "shop/copy:7"]);
    Client::connect(&bed).asks().unwrap();
    has_both(&bed, "a", &here);
}

/// Changes the document of an index or a manifest.
type Lie = fn(&mut Value);

#[test]
fn a_registry_that_lies_about_another_platform_leaves_nothing() {
    let bed = Bed::up("platform-lies");
    let program = program(&bed, "ledger");
    let (archive, digest) = packed(&bed, "ledger", &program, "/bin/ledger");
    let registry = Registry::start(&bed);
    registry.push_archive(&archive, "ledger:1");
    let [plain, authfile] = registry.reached();
    let refused = |image: &str, words: &str| {
        let said = bed.godwit("a", &["pull", &plain, &authfile, &registry.reference(image)]);
        assert!(said.code == 1 && said.stderr.contains(words), "{image}: {words}: {said:?}");
        assert_eq!(bed.done("a", &["image", "ls", "-q"]), "", "{image}");
        let tmp = bed.lab().state("a").unwrap().join("images/tmp");
        assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0, "{image}");
    };
    let index: Value = serde_json::from_slice(&registry.blob(&digest)).unwrap();
    let other = index["manifests"].as_array().unwrap().iter();
    let other = other.into_iter().find(|image| image["platform"]["architecture"] == OTHER).unwrap();
    let other = other["digest"].as_str().unwrap();
    let manifest: Value = serde_json::from_slice(&registry.blob(other)).unwrap();

    // Of the index.
    let lies: [(&str, Lie, &str); 5] = [
        ("size", |index| edit(index, |image| image["size"] = 7.into()), "cannot be pulled"),
        (
            "platform",
            |index| {
                let own = index["manifests"].as_array().unwrap().iter();
                let own =
                    own.into_iter().find(|image| image["platform"]["architecture"] == OWN).unwrap()["digest"]
                        .clone();
                let size = index["manifests"][0]["size"].clone();
                edit(index, |image| (image["digest"], image["size"]) = (own.clone(), size.clone()));
            },
            "the image says that it is for",
        ),
        (
            "missing",
            |index| edit(index, |image| image["digest"] = digest_of(b"nothing").into()),
            "manifest unknown",
        ),
        (
            "path",
            |index| edit(index, |image| image["digest"] = "sha256:../../../etc/passwd".into()),
            "cannot be pulled",
        ),
        (
            "many",
            |index| {
                let all = index["manifests"].as_array_mut().unwrap();
                let one = all[0].clone();
                all.resize(40, one);
            },
            "its index has 40 images",
        ),
    ];
    for (tag, lie, words) in lies {
        let mut index = index.clone();
        lie(&mut index);
        registry.plant("ledger", tag, INDEX, &index);
        refused(&format!("ledger:{tag}"), words);
    }
    // Of the other platform's manifest.
    let lies: [(&str, Lie, &str); 4] = [
        ("length", |manifest| manifest["layers"][1]["size"] = 7.into(), "bytes"),
        (
            "layer",
            |manifest| manifest["layers"][1]["digest"] = digest_of(b"nothing").into(),
            "cannot be pulled",
        ),
        ("fewer", |manifest| drop(manifest["layers"].as_array_mut().unwrap().pop()), "layers"),
        ("type", |manifest| manifest["layers"][1]["mediaType"] = "text/plain".into(), "text/plain"),
    ];
    for (tag, lie, words) in lies {
        let (mut index, mut manifest) = (index.clone(), manifest.clone());
        lie(&mut manifest);
        let (planted, bytes) = registry.plant("ledger", &format!("{tag}-{OTHER}"), MANIFEST, &manifest);
        edit(&mut index, |image| (image["digest"], image["size"]) = (planted.clone().into(), bytes.into()));
        registry.plant("ledger", tag, INDEX, &index);
        refused(&format!("ledger:{tag}"), words);
    }
    // Of what it has.
    let by_digest = format!("ledger@{digest}");
    let layer = manifest["layers"][1]["digest"].as_str().unwrap();
    for (blob, words) in [(layer, "Digest did not match"), (other, "it is not what was asked for")] {
        let good = registry.blob(blob);
        let mut bad = good.clone();
        // A document stays one.
        let at = good.iter().position(|byte| *byte == b'2').unwrap();
        bad[at] = b'1';
        registry.replace(blob, &bad);
        refused(&by_digest, words);
        registry.replace(blob, &good);
    }
    let said = bed.godwit("a", &["pull", &plain, &authfile, &registry.reference(&by_digest)]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(shown(&bed, "a", &registry.reference(&by_digest))["platforms"].as_array().unwrap().len(), 2);
}

/// Changes what an index says of the other platform's image.
fn edit(index: &mut Value, mut change: impl FnMut(&mut Value)) {
    for image in index["manifests"].as_array_mut().unwrap() {
        if image["platform"] == json!({"architecture": OTHER, "os": "linux"}) {
            change(image);
        }
    }
}
