//! The archive of an image that another node's engine has saved: what is passed on to the engine here is that image alone, in
//! an archive that can be read, without a name. An OCI layout has the layers of its image's ID. So has what goes from one of
//! Docker's stores to the other.
#![no_main]

use std::collections::HashMap;
use std::io::Read;

use ::tar::{Archive, EntryType};
use arbitrary::Arbitrary;
use godwit_engine::foreign::archive::{KnownBy, Store, by_configuration, nameless};
use godwit_engine::image::Digest;
use godwit_fuzz::{json, tar};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Bytes at the end of a tar stream.
const END: usize = 1024;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    /// Of the two lists, and of the manifest.
    lists: json::Input<'a>,
    /// Whether the list of the OCI names the manifest as it has become.
    named: bool,
    /// Whether containerd has the image, which knows it by its manifest.
    by_manifest: bool,
    /// Files with names that an image has.
    files: Vec<(u8, &'a [u8])>,
    /// Whether the layer comes, packed or as it is.
    layer: Option<bool>,
    /// Whether the lists come twice.
    twice: bool,
    members: Vec<tar::Member<'a>>,
    /// Bytes of the stream that are replaced in the end.
    edits: Vec<(u16, u8)>,
    cut: Option<u16>,
}

/// A layer, as its content and as the rest of its digest.
const LAYER: &[u8] = b"layer";

fn layer() -> String {
    Digest::of(LAYER).hex().to_owned()
}

/// The configuration of the image, whose digest is the ID.
fn config() -> String {
    json!({ "rootfs": { "diff_ids": [format!("sha256:{}", layer())] } }).to_string()
}

fn id() -> String {
    Digest::of(config().as_bytes()).hex().to_owned()
}

fn packed() -> Vec<u8> {
    zstd::encode_all(LAYER, 1).expect("a frame")
}

/// What goes to a Docker with another store is the image of the configuration, or nothing.
fn between_stores(stream: &[u8]) {
    // More than comes unless it is packed all too well.
    const ROOM: u64 = 1 << 20;
    for store in [Store::Docker, Store::Containerd(HashMap::new())] {
        let mut passed = Vec::new();
        let Ok(known_by) = by_configuration(stream, &mut passed, &id(), (&store, ROOM)) else { continue };
        let mut files = Vec::new();
        for entry in Archive::new(passed.as_slice()).entries().expect("an archive") {
            let mut entry = entry.expect("a member");
            assert_eq!(entry.header().entry_type(), EntryType::Regular);
            let path = entry.path().expect("a path").to_str().expect("text").to_owned();
            assert!(!path.starts_with('/') && !path.split('/').any(|part| part == ".."), "{path}");
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("its content");
            files.push((path, content));
        }
        let lists = files.iter().filter(|(path, _)| path == "manifest.json" || path == "index.json").count();
        assert_eq!(lists, 1);
        let (last, list) = files.last().expect("a list");
        let told: Value = serde_json::from_slice(list).expect("a list");
        match store {
            Store::Docker => {
                assert_eq!((last.as_str(), known_by), ("manifest.json", format!("sha256:{}", id())));
                let content = |path: &Value| &files.iter().find(|(name, _)| path == name).expect("a file").1;
                assert_eq!(content(&told[0]["Config"]), config().as_bytes());
                let layer = content(&told[0]["Layers"][0]).as_slice();
                let mut of_gzip = Vec::new();
                let is_gzip = flate2::bufread::MultiGzDecoder::new(layer).read_to_end(&mut of_gzip).is_ok();
                let of_zstd = zstd::decode_all(layer).unwrap_or_default();
                assert!(layer == LAYER || of_zstd == LAYER || (is_gzip && of_gzip == LAYER), "{layer:?}");
            }
            Store::Containerd(_) => {
                assert_eq!(
                    (last.as_str(), &told["manifests"][0]["digest"]),
                    ("index.json", &json!(known_by))
                );
                let of = |digest: &str| {
                    let content = files.iter().map(|(_, content)| content);
                    content.into_iter().find(|content| Digest::of(content).to_string() == digest)
                };
                let manifest = of(&known_by).expect("a manifest");
                let manifest: Value = serde_json::from_slice(manifest).expect("a manifest");
                let layers = manifest["layers"].as_array().expect("layers");
                assert!(layers.len() == 1 && layers[0]["digest"] == format!("sha256:{}", layer()));
                assert!(of(&format!("sha256:{}", layer())).is_some(), "the layer has come");
                assert_eq!(manifest["config"]["digest"], format!("sha256:{}", id()));
            }
        }
    }
}

fn name(number: u8) -> String {
    let (id, layer) = (id(), layer());
    match number % 6 {
        0 => format!("{id}.json"),
        1 => format!("{layer}.tar"),
        2 => format!("{layer}/layer.tar"),
        3 => format!("{layer}/VERSION"),
        4 => format!("blobs/sha256/{layer}"),
        _ => "oci-layout".to_owned(),
    }
}

/// Docker's list, the one of the OCI, and the manifest, as an engine writes them.
fn usual() -> Value {
    let part = |hex: String| json!({ "mediaType": "x", "digest": format!("sha256:{hex}"), "size": 7 });
    json!([
        [{ "Config": format!("{}.json", id()), "RepoTags": ["debian:latest"], "Layers": [name(2)] }],
        {
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "", "size": 7,
                "annotations": { "org.opencontainers.image.ref.name": "debian:latest" },
            }],
        },
        { "schemaVersion": 2, "config": part(id()), "layers": [part(layer())] },
    ])
}

fuzz_target!(|input: Input<'_>| {
    let mut lists = usual();
    input.lists.change(&mut lists);
    let manifest = Digest::of(lists[2].to_string().as_bytes());
    if input.named
        && let Some(named) = lists.pointer_mut("/1/manifests/0/digest")
    {
        *named = manifest.to_string().into();
    }
    let text = |list: usize| lists[list].to_string().into_bytes();
    let mut files: Vec<_> =
        input.files.iter().map(|(number, content)| (name(*number), content.to_vec())).collect();
    if let Some(is_packed) = input.layer {
        files.push(match is_packed {
            true => (format!("blobs/sha256/{}", "0a".repeat(32)), packed()),
            false => (name(4), LAYER.to_vec()),
        });
    }
    for _ in 0..=u8::from(input.twice) {
        files.extend([("manifest.json".to_owned(), text(0)), ("index.json".to_owned(), text(1))]);
        let blob = |hex: &str| format!("blobs/sha256/{hex}");
        files.extend([(blob(manifest.hex()), text(2)), (blob(&id()), config().into_bytes())]);
    }
    let mut stream = tar::of_files(&files);
    stream.truncate(stream.len() - END);
    stream.extend(tar::stream(&input.members));
    for (at, byte) in &input.edits {
        let at = usize::from(*at) % stream.len();
        stream[at] = *byte;
    }
    stream.truncate(input.cut.map_or(stream.len(), usize::from));
    between_stores(&stream);
    let mut passed = Vec::new();
    let (id, known_by) = match input.by_manifest {
        true => (manifest.hex().to_owned(), KnownBy::Manifest),
        false => (id(), KnownBy::Configuration),
    };
    if nameless(stream.as_slice(), &mut passed, &id, known_by).is_err() {
        return;
    }
    let (mut lists, mut blobs, mut listed) = ([0; 2], HashMap::new(), None);
    for entry in Archive::new(passed.as_slice()).entries().expect("an archive") {
        let mut entry = entry.expect("a member");
        let path = entry.path().expect("a path").to_str().expect("text").to_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("its content");
        assert!(!path.starts_with('/') && !path.split('/').any(|part| part == ".."), "{path}");
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Directory => {}
            EntryType::Symlink => {
                let link = entry.link_name().expect("a link").expect("a target");
                let inside = link.to_str().and_then(|link| link.strip_prefix("../"));
                assert!(inside.is_some_and(|link| !link.contains("..")), "{path} -> {}", link.display());
            }
            other => panic!("{path} is {other:?}"),
        }
        assert_ne!(path, "repositories");
        let (list, of_one) = match path.as_str() {
            "manifest.json" => (0, "Config"),
            "index.json" => (1, "digest"),
            _ => {
                assert!(blobs.insert(path.clone(), content).is_none(), "{path} comes twice");
                continue;
            }
        };
        lists[list] += 1;
        let told: Value = serde_json::from_slice(&content).expect("a list");
        let images = if list == 0 { &told } else { &told["manifests"] };
        let [image] = images.as_array().expect("images").as_slice() else { panic!("not one: {told}") };
        assert!(image[of_one].is_string() && image["RepoTags"].is_null(), "{told}");
        assert!(image.get("annotations").is_none() && told.get("annotations").is_none(), "{told}");
        // Of keys that differ by case alone an engine takes the last.
        let keys: Vec<_> =
            image.as_object().expect("an image").keys().map(|key| key.to_lowercase()).collect();
        assert!(keys.iter().all(|key| keys.iter().filter(|other| *other == key).count() == 1), "{told}");
        if list == 1 {
            listed = image["digest"].as_str().map(|digest| digest.replace("sha256:", "blobs/sha256/"));
        } else {
            assert!(image["Config"].as_str().is_some_and(|config| config.contains(&id)), "{told}");
        }
    }
    assert!(lists.iter().all(|count| *count <= 1), "{lists:?}");
    // Whoever trusts the ID gets what it is the digest of, or its layers.
    if input.by_manifest {
        let listed = listed.expect("the list that is read");
        assert!(listed.ends_with(&id) && lists[0] == 0, "{listed}");
        assert_eq!(Digest::of(&blobs[&listed]).hex(), id);
    } else if let Some(listed) = listed {
        let manifest: Value = serde_json::from_slice(&blobs[&listed]).expect("a manifest");
        let layers: Vec<_> = manifest["layers"].as_array().expect("layers").iter().collect();
        assert_eq!(manifest["config"]["digest"], format!("sha256:{id}"), "{manifest}");
        assert!(layers.len() == 1 && layers[0]["digest"] == format!("sha256:{}", layer()), "{manifest}");
    }
});
