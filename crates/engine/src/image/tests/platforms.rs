//! Of an image that is marked for crossing the blobs of its other platforms are kept, and of no other one.

use std::time::{Duration, SystemTime};

use godwit_isa_plan::image::{CROSSING, MARKED};

use super::*;
use crate::image::platforms::machine_of;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The set of this machine, and the other one.
fn sets() -> (&'static str, &'static str) {
    match machine_architecture() {
        "arm64" => ("arm64", "amd64"),
        _ => ("amd64", "arm64"),
    }
}

fn layer(name: &str) -> Vec<u8> {
    Tar::default().file(name, name).end()
}

/// A manifest's descriptor as an index has it.
fn on(mut descriptor: serde_json::Value, architecture: &str) -> serde_json::Value {
    descriptor["platform"] = serde_json::json!({"architecture": architecture, "os": "linux"});
    descriptor
}

fn marked(mut descriptor: serde_json::Value) -> serde_json::Value {
    descriptor["annotations"] = serde_json::json!({CROSSING: MARKED});
    descriptor
}

/// Two images with a layer in common, for this machine and for the other one.
fn pair(layout: &Written) -> (serde_json::Value, serde_json::Value) {
    let (own, other) = sets();
    let image = |set: &str| on(layout.image(&[layer("common"), layer(set)], set), set);
    (image(own), image(other))
}

/// Puts an index of these into the layout's.
fn nest(layout: &Written, mut inner: serde_json::Value) {
    inner["schemaVersion"] = 2.into();
    let inner = layout.blob(inner.to_string().as_bytes());
    layout.index(&[Written::descriptor(INDEX, &inner)]);
}

fn import(scratch: &TempDir, layout: &Written) -> (Store, Result<Image, ImageError>) {
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let imported = store.import_oci(&layout.path);
    (store, imported)
}

#[test]
fn of_a_marked_image_the_blobs_of_the_other_platform_are_kept_and_not_unpacked() {
    let (own, other) = sets();
    for (how, write) in [
        (
            "an index that is marked",
            (|layout, (a, b)| {
                nest(layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [b, a]}));
            }) as fn(&Written, (serde_json::Value, serde_json::Value)),
        ),
        ("manifests that are marked", |layout, (a, b)| {
            nest(layout, serde_json::json!({"manifests": [marked(a), marked(b)]}));
        }),
        ("no index beside the layout's", |layout, (a, b)| layout.index(&[marked(a), marked(b)])),
    ] {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        write(&layout, pair(&layout));
        let (store, imported) = import(&scratch, &layout);
        let image = imported.unwrap();
        let digests = |set: &str| [layer("common"), layer(set)].map(|layer| Digest::of(&layer));
        assert_eq!(image.layers, digests(own), "{how}");
        let [platform] = &image.platforms[..] else { panic!("{how}: {:?}", image.platforms) };
        assert_eq!(platform.machine, machine_of(other).unwrap(), "{how}");
        assert_eq!(platform.layers, digests(other), "{how}");
        assert!(platform.id.is_some() && platform.id != image.id, "{how}");
        let [common, top] = digests(other);
        assert!(store.has_layer(&common) && store.has_blob(&top) && !store.has_layer(&top), "{how}");
        // It is whole: what came from elsewhere would be unpacked in the same way.
        store.unpack(&top).unwrap();
        assert_eq!(fs::read_to_string(store.layer_path(&top).join(other)).unwrap(), other, "{how}");
    }
}

#[test]
fn of_an_image_that_is_not_marked_nothing_but_the_own_platform_is_kept() {
    let (_, other) = sets();
    for (how, write) in [
        (
            "no mark",
            (|layout, (a, b)| {
                nest(layout, serde_json::json!({"manifests": [a, b]}));
            }) as fn(&Written, (serde_json::Value, serde_json::Value)),
        ),
        ("a mark of another release", |layout, (a, b)| {
            nest(layout, serde_json::json!({"annotations": {CROSSING: "2"}, "manifests": [a, b]}));
        }),
        ("one that is marked beside one that is not", |layout, (a, b)| {
            nest(layout, serde_json::json!({"manifests": [a, marked(b)]}));
        }),
        ("one that does not say for what it is", |layout, (a, mut b)| {
            b.as_object_mut().unwrap().remove("platform").unwrap();
            nest(layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [a, b]}));
        }),
        ("one of another system", |layout, (a, mut b)| {
            b["platform"]["os"] = "windows".into();
            nest(layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [a, b]}));
        }),
        ("one of another set", |layout, (a, _)| {
            let riscv = on(layout.image(&[layer("riscv64")], "riscv64"), "riscv64");
            nest(layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [a, riscv]}));
        }),
    ] {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        write(&layout, pair(&layout));
        let (store, imported) = import(&scratch, &layout);
        assert_eq!(imported.unwrap().platforms, [], "{how}");
        assert_eq!(store.layers().unwrap().len(), 2, "{how}");
        assert!(!store.has_blob(&Digest::of(&layer(other))), "{how}");
    }
}

#[test]
fn another_platform_that_is_broken_is_refused_as_the_own_one_is() {
    let (own, other) = sets();
    let refused = |change: fn(&Written, &mut serde_json::Value)| {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        let (a, mut b) = pair(&layout);
        change(&layout, &mut b);
        nest(&layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [a, b]}));
        let (_, imported) = import(&scratch, &layout);
        match imported.unwrap_err() {
            ImageError::Archive { fault, .. } => fault.to_string(),
            error => panic!("{error}"),
        }
    };
    let lacking =
        refused(|layout, _| fs::remove_file(layout.blob_path(&Digest::of(&layer(sets().1)))).unwrap());
    assert!(lacking.contains(&Digest::of(&layer(other)).to_string()), "{lacking}");
    let changed = refused(|layout, _| {
        let path = layout.blob_path(&Digest::of(&layer(sets().1)));
        let mut bytes = fs::read(&path).unwrap();
        bytes[600] ^= 1;
        fs::write(path, bytes).unwrap();
    });
    assert!(changed.contains(&Digest::of(&layer(other)).to_string()), "{changed}");
    let contradicting = refused(|layout, b| *b = on(layout.image(&[layer("x")], sets().0), sets().1));
    assert_eq!(
        contradicting,
        format!("its index has an image for {other}, and the image says that it is for {own}; pack it again")
    );
}

#[test]
fn an_image_is_known_by_the_digest_of_its_index_and_by_its_whole_name() {
    let known = |annotations: serde_json::Value| {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        let (a, b) = pair(&layout);
        // As buildx writes it, with what attests to an image.
        let attests = on(layout.image(&[layer("attests")], "unknown"), "unknown");
        let inner = serde_json::json!({
            "schemaVersion": 2, "annotations": {CROSSING: MARKED}, "manifests": [a, b, attests],
        });
        let inner = inner.to_string();
        let mut descriptor = Written::descriptor(INDEX, &layout.blob(inner.as_bytes()));
        descriptor["annotations"] = annotations;
        layout.index(&[descriptor]);
        let store = Store::open(&scratch.path().join("store")).unwrap();
        let known = store.import_known(&layout.path).unwrap();
        assert_eq!(known.digest, Digest::of(inner.as_bytes()));
        assert_eq!((known.image.platforms.len(), store.layers().unwrap().len()), (1, 3));
        known.name
    };
    const TAG: &str = "org.opencontainers.image.ref.name";
    const NAME: &str = "io.containerd.image.name";
    assert_eq!(
        known(serde_json::json!({TAG: "7", NAME: "docker.io/shop/web:7"})).unwrap(),
        "docker.io/shop/web:7"
    );
    assert_eq!(known(serde_json::json!({TAG: "web:7"})).unwrap(), "web:7");
    assert_eq!(known(serde_json::json!({TAG: "7"})), None);
    assert_eq!(known(serde_json::json!({})), None);
    assert_eq!(whole_reference("web").unwrap(), "docker.io/library/web:latest");
    assert!(whole_reference("no name").is_err());
}

#[test]
fn a_marked_image_has_its_name_while_the_other_platforms_blobs_are_there() {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let (a, b) = pair(&layout);
    nest(&layout, serde_json::json!({"annotations": {CROSSING: MARKED}, "manifests": [a, b]}));
    let (store, imported) = import(&scratch, &layout);
    let image = imported.unwrap();
    let named = store.name(Digest::of(b"index"), image.clone()).unwrap();
    assert_eq!(store.named(&image.reference).unwrap(), Some(named));
    let top = image.platforms[0].layers[1].clone();
    let mut collector = store.collector().unwrap();
    collector.remove(&top).unwrap();
    collector.delete().unwrap();
    assert_eq!(store.named(&image.reference).unwrap(), None);
    assert!(store.has_layer(&image.layers[1]));
}

#[test]
fn the_use_of_a_layer_that_is_not_unpacked_is_noted() {
    let scratch = scratch();
    let store = Store::open(scratch.path()).unwrap();
    let digest = put(&store, &simple_layer());
    let before = SystemTime::now() - Duration::from_secs(9 * 24 * 3600);
    let blob =
        File::options().write(true).open(scratch.path().join("blobs/sha256").join(digest.hex())).unwrap();
    blob.set_modified(before).unwrap();
    let last_used = || store.layers().unwrap()[0].last_used;
    assert_eq!(last_used(), before);
    store.touch(&digest).unwrap();
    assert!(last_used() > before);
}

#[test]
fn an_image_that_an_older_release_noted_has_no_other_platforms() {
    let noted = serde_json::json!({
        "layers": [Digest::of(b"x")], "config": {}, "architecture": "amd64", "reference": "one:1",
    });
    let image: Image = serde_json::from_value(noted).unwrap();
    assert_eq!(image.platforms, []);
    assert!(!serde_json::to_string(&image).unwrap().contains("platforms"));
}
