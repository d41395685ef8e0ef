//! What an archive may say of neutral modules, and what is refused.

use godwit_isa_plan::image::{CROSSING, MARKED, MODULES};

use super::*;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const MODULE: &str = "application/vnd.godwit.module.v1+llvm-bitcode";
const BITCODE: &[u8] = b"BC\xc0\xde";

/// A module's descriptor.
fn module(layout: &Written, path: &str) -> serde_json::Value {
    let mut descriptor = Written::descriptor(MODULE, &layout.blob(BITCODE));
    descriptor["annotations"] = serde_json::json!({
        "io.godwit.path": path, "io.godwit.layout": "0a".repeat(32), "io.godwit.toolchain": "0b".repeat(32),
    });
    descriptor
}

/// Imports an image with a manifest of these modules, whose descriptor is changed.
fn imported(
    modules: impl FnOnce(&Written) -> Vec<serde_json::Value>,
    change: impl FnOnce(&mut serde_json::Value, &mut serde_json::Value),
) -> Result<Option<Neutral>, String> {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let mut own = layout.image(&[simple_layer()], machine_architecture());
    own["platform"] = serde_json::json!({"architecture": machine_architecture(), "os": "linux"});
    let empty = Written::descriptor("application/vnd.oci.empty.v1+json", &layout.blob(b"{}"));
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": modules(&layout),
    });
    let mut beside = Written::descriptor(MANIFEST, &layout.blob(manifest.to_string().as_bytes()));
    beside["platform"] = serde_json::json!({"architecture": "unknown", "os": "unknown"});
    beside["annotations"] = serde_json::json!({MODULES: MARKED});
    let mut inner = serde_json::json!({"schemaVersion": 2, "annotations": {CROSSING: MARKED}});
    change(&mut inner, &mut beside);
    inner["manifests"] = serde_json::json!([own, beside]);
    layout.index(&[Written::descriptor(INDEX, &layout.blob(inner.to_string().as_bytes()))]);
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let known = store.import_known(&layout.path);
    known.map(|known| known.image.neutral).map_err(|error| error.to_string())
}

#[test]
fn modules_are_taken_where_the_index_says_that_its_services_cross() {
    let two = |layout: &Written| vec![module(layout, "/bin/a"), module(layout, "/srv/b/c")];
    let found = imported(two, |_, _| ()).unwrap().unwrap();
    assert_eq!((found.modules.len(), found.modules[1].path.as_str()), (2, "/srv/b/c"));
    assert_eq!((&found.modules[0].digest, found.modules[0].bytes), (&Digest::of(BITCODE), 4));
    assert_ne!(found.modules[0].identity(), [0; 32]);
    let unmarked = imported(two, |inner, _| drop(inner.as_object_mut().unwrap().remove("annotations")));
    assert_eq!(unmarked, Ok(None));
    assert_eq!(imported(two, |_, beside| beside["annotations"][MODULES] = "2".into()), Ok(None));
}

#[test]
fn modules_that_cannot_be_are_refused() {
    let refused = |modules: &dyn Fn(&Written) -> Vec<serde_json::Value>, words: &str| {
        let said = imported(modules, |_, _| ()).unwrap_err();
        assert!(said.contains(words), "{words}: {said}");
    };
    for path in ["", "bin/a", "/", "/bin/", "/bin//a", "/bin/../a", "/./a", &format!("/{}", "x".repeat(5000))]
    {
        refused(&|layout| vec![module(layout, path)], "it does not say of which program it is");
    }
    refused(&|layout| vec![module(layout, "/a"), module(layout, "/a")], "there are two for that program");
    refused(
        &|layout| (0..=MAX_MODULES).map(|nth| module(layout, &format!("/{nth}"))).collect(),
        "more modules",
    );
    let with = |key: &'static str, value: serde_json::Value| {
        move |layout: &Written| {
            let mut module = module(layout, "/a");
            module[key] = value.clone();
            vec![module]
        }
    };
    refused(&with("size", (257_u64 << 20).into()), "larger than a module may be");
    refused(&with("size", u64::MAX.into()), "larger than a module may be");
    refused(&with("size", (-1).into()), "is not valid");
    refused(&with("size", 5.into()), "bytes");
    refused(
        &with("mediaType", "application/vnd.oci.image.layer.v1.tar".into()),
        "of a type that is not known",
    );
    refused(&with("digest", Digest::of(b"none").to_string().into()), "module");
    for key in ["io.godwit.layout", "io.godwit.toolchain"] {
        for value in ["", "0a", &"0A".repeat(32), &"0g".repeat(32)] {
            let bound = |layout: &Written| {
                let mut module = module(layout, "/a");
                module["annotations"][key] = value.into();
                vec![module]
            };
            refused(&bound, "by what it is bound");
        }
    }
}
