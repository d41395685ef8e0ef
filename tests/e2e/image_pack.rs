//! Images that `godwit image pack` makes of godwit-cc's programs: run, used by their service, and removed. Needs root, and
//! what `scripts/setup --isa` installs.

use std::fs;

use godwit_tests::Bed;
use godwit_tests::ledger::{ADDRESS, Client, NAME, PORT, program};
use serde_json::Value;

/// The layers of a node, each with its services.
fn layers(bed: &Bed, node: &str) -> Vec<(String, Value)> {
    let layers: Vec<Value> = bed.json(node, &["image", "ls", "--layers"]);
    let entry = |layer: &Value| (layer["digest"].as_str().unwrap().to_owned(), layer["services"].clone());
    layers.iter().map(entry).collect()
}

#[test]
fn a_packed_image_runs_crosses_and_has_the_layers_of_both_platforms_while_its_service_is_there() {
    let bed = Bed::up("pack");
    let program = program(&bed, "ledger");
    let files = bed.scratch().join("files");
    fs::create_dir_all(files.join("etc")).unwrap();
    fs::write(files.join("etc/motd"), "for both platforms\n").unwrap();
    let archive = bed.scratch().join("ledger.tar");
    let (archive, program, files) =
        (archive.to_str().unwrap(), program.to_str().unwrap(), files.to_str().unwrap());
    let port = PORT.to_string();
    let pack = ["image", "pack", "-o", archive, "--add", files, "--cmd", &port, "ledger:1", program];
    let said = bed.done("a", &pack);
    assert!(said.starts_with("ledger:1@sha256:"), "{said}");
    assert_eq!(bed.done("a", &pack), said);

    bed.done("a", &["run", "--name", NAME, "--ip", &ADDRESS.to_string(), "--image", archive]);
    let mut client = Client::connect(&bed);
    client.asks().unwrap();
    // The files, and the programs of each platform.
    let there = layers(&bed, "a");
    assert_eq!(there.len(), 3, "{there:?}");
    assert!(there.iter().all(|(_, services)| *services == serde_json::json!([NAME])), "{there:?}");
    assert_eq!(bed.done("a", &["image", "prune"]), "");
    for (digest, _) in &there {
        let refused = bed.godwit("a", &["image", "rm", digest]);
        assert!(refused.stderr.contains("is used by ledger"), "{}", refused.stderr);
    }

    bed.migrate_so(NAME, "a", "b", &["--cross"]);
    client.asks().unwrap();
    // Those of the other platform have gone along, so that the service can go on to a node of it.
    let came = layers(&bed, "b");
    assert_eq!(came.len(), 3, "{came:?}");
    assert!(there.iter().all(|layer| came.contains(layer)), "{came:?} and {there:?}");
    let pruned = bed.done("a", &["image", "prune"]);
    assert_eq!((pruned.lines().count(), layers(&bed, "a").len()), (3, 0), "{pruned}");
}
