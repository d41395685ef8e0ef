//! An OCI archive from anywhere: documents changed before their digests are taken, so that the
//! changes are looked at, and the tar around them changed after.
#![no_main]

use std::cell::RefCell;
use std::fs;

use arbitrary::Arbitrary;
use godwit_engine::image::{Digest, Imported, MAX_MODULES, Store, machine_architecture};
use godwit_fuzz::{Scratch, tar};
use godwit_isa_plan::image::{CROSSING, MARKED, MODULES};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Texts that mean something in the documents.
const WORDS: [&str; 16] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "sha512:00",
    "sha256:../../../outside/secret",
    "platform",
    "annotations",
    "manifests",
    "unknown",
    "null",
    "18446744073709551616",
    "-1",
    "[",
    "}",
    "\u{0}",
];

#[derive(Debug, Arbitrary)]
enum Edit<'a> {
    Byte(u16, u8),
    Text { at: u16, removed: u8, text: &'a [u8] },
    Word { at: u16, removed: u8, word: u8 },
}

#[derive(Debug, Arbitrary)]
struct Written<'a> {
    layers: Vec<Vec<tar::Member<'a>>>,
    /// Of the configuration, manifest, inner index, index, layout and manifest of modules.
    edits: [Vec<Edit<'a>>; 6],
    nested: bool,
    /// Neutral modules, in an inner index that is marked for crossing.
    modules: Option<Vec<&'a [u8]>>,
    /// Of the tar's bytes.
    damage: Vec<(u32, u8)>,
    cut: Option<u16>,
    wanted: Option<&'a str>,
}

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Written(Written<'a>),
    Members(Vec<tar::Member<'a>>),
    Raw(&'a [u8]),
}

fn edited(document: &Value, edits: &[Edit<'_>]) -> Vec<u8> {
    let mut bytes = document.to_string().into_bytes();
    for edit in edits {
        let place = |at: &u16| usize::from(*at) % (bytes.len() + 1);
        let (at, removed, text) = match edit {
            Edit::Byte(at, byte) => (place(at), 1, std::slice::from_ref(byte)),
            Edit::Text { at, removed, text } => (place(at), usize::from(*removed), *text),
            Edit::Word { at, removed, word } => {
                (place(at), usize::from(*removed), WORDS[usize::from(*word) % WORDS.len()].as_bytes())
            }
        };
        let end = (at + removed).min(bytes.len());
        bytes.splice(at..end, text.iter().copied());
    }
    bytes
}

/// Puts a blob into the archive and describes it.
fn blob(files: &mut Vec<(String, Vec<u8>)>, media_type: &str, bytes: Vec<u8>) -> Value {
    let digest = Digest::of(&bytes);
    let descriptor = json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()});
    files.push((format!("blobs/sha256/{}", digest.hex()), bytes));
    descriptor
}

/// The manifest of neutral modules, as an index refers to it.
fn modules_manifest(files: &mut Vec<(String, Vec<u8>)>, modules: &[&[u8]], edits: &[Edit<'_>]) -> Value {
    let layers: Vec<_> = modules
        .iter()
        .enumerate()
        .map(|(nth, bytes)| {
            let media_type = "application/vnd.godwit.module.v1+llvm-bitcode";
            let mut module = blob(files, media_type, bytes.to_vec());
            module["annotations"] = json!({
                "io.godwit.path": format!("/bin/{nth}"),
                "io.godwit.layout": "0a".repeat(32), "io.godwit.toolchain": "0b".repeat(32),
            });
            module
        })
        .collect();
    let empty = blob(files, "application/vnd.oci.empty.v1+json", b"{}".to_vec());
    let manifest = json!({"schemaVersion": 2, "mediaType": WORDS[1], "config": empty, "layers": layers});
    let mut descriptor = blob(files, WORDS[1], edited(&manifest, edits));
    descriptor["platform"] = json!({"architecture": "unknown", "os": "unknown"});
    descriptor["annotations"] = json!({MODULES: MARKED});
    descriptor
}

fn archive(written: &Written<'_>) -> Vec<u8> {
    let mut files = Vec::new();
    let (mut diff_ids, mut layers) = (Vec::new(), Vec::new());
    for members in &written.layers {
        let layer = tar::stream(members);
        diff_ids.push(Digest::of(&layer).to_string());
        layers.push(blob(&mut files, "application/vnd.oci.image.layer.v1.tar", layer));
    }
    let config = json!({
        "architecture": machine_architecture(), "os": "linux",
        "config": {"Cmd": ["run"], "Env": ["A=b"], "ExposedPorts": {"80/tcp": {}}, "Labels": {"a": "b"}},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = edited(&config, &written.edits[0]);
    let config = blob(&mut files, WORDS[2], config);
    let manifest = json!({"schemaVersion": 2, "mediaType": WORDS[1], "config": config, "layers": layers});
    let mut descriptor = blob(&mut files, WORDS[1], edited(&manifest, &written.edits[1]));
    if written.nested {
        let mut index = json!({"schemaVersion": 2, "manifests": [descriptor]});
        if let Some(modules) = &written.modules {
            let beside = modules_manifest(&mut files, modules, &written.edits[5]);
            index["manifests"].as_array_mut().expect("a list").push(beside);
            index["annotations"] = json!({CROSSING: MARKED});
        }
        descriptor = blob(&mut files, WORDS[0], edited(&index, &written.edits[2]));
    }
    let index = json!({"schemaVersion": 2, "manifests": [descriptor]});
    files.push(("index.json".into(), edited(&index, &written.edits[3])));
    files.push(("oci-layout".into(), edited(&json!({"imageLayoutVersion": "1.0.0"}), &written.edits[4])));
    let mut bytes = tar::of_files(&files);
    for (at, byte) in &written.damage {
        let at = usize::try_from(*at).expect("32 bits") % bytes.len();
        bytes[at] = *byte;
    }
    bytes.truncate(written.cut.map_or(bytes.len(), usize::from));
    bytes
}

thread_local! {
    static STORE: RefCell<Option<(Scratch, Store)>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input<'_>| {
    STORE.with_borrow_mut(|kept| {
        let (scratch, store) = kept.get_or_insert_with(|| {
            let scratch = Scratch::new();
            let store = Store::open(&scratch.inside().join("store")).expect("a store");
            (scratch, store)
        });
        let path = scratch.inside().join("image.tar");
        let (bytes, wanted) = match &input {
            Input::Written(written) => (archive(written), written.wanted),
            Input::Members(members) => (tar::stream(members), None),
            Input::Raw(bytes) => (bytes.to_vec(), None),
        };
        fs::write(&path, bytes).expect("a file");
        let named = wanted.map_or_else(|| path.clone(), |name| format!("{}:{name}", path.display()).into());
        let imported = store.import_known(&named);
        if let Ok(Imported { image, .. }) = &imported {
            assert!(image.layers.iter().all(|layer| store.has_layer(layer)));
            assert!(image.blobs().all(|blob| store.has_blob(blob)));
        } else if let Input::Written(written) = &input {
            let is_plain = written.edits.iter().all(Vec::is_empty) && written.damage.is_empty();
            let is_whole = written.cut.is_none() && written.wanted.is_none() && written.layers.is_empty()
                // There are more than an image may have.
                && written.modules.as_ref().is_none_or(|modules| modules.len() <= MAX_MODULES);
            assert!(!(is_plain && is_whole), "a right image was refused: {imported:?}");
        }
        scratch.assert_outside_untouched();
        let mut collector = store.collector().expect("that nobody uses the store");
        for layer in store.layers().expect("the layers") {
            collector.remove(&layer.digest).expect("that a layer can be removed");
        }
        collector.delete().expect("that layers can be deleted");
        for part in ["tmp", "layers/sha256", "blobs/sha256", "diff_ids/sha256"] {
            let left = fs::read_dir(store.directory().join(part)).expect("the store").count();
            assert_eq!(left, 0, "something is left in {part}");
        }
    });
});
