//! Images packed for an engine of others.

use std::io::Read;

use super::*;

/// Names and contents of a packed image's files.
fn files(packed: &Packed) -> Result<Vec<(String, Vec<u8>)>, PackError> {
    let mut archive = Vec::new();
    packed.write(&mut archive)?;
    let mut archive = tar::Archive::new(archive.as_slice());
    let read = |entry: std::io::Result<tar::Entry<'_, _>>| {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (entry.path().unwrap().to_str().unwrap().to_owned(), content)
    };
    Ok(archive.entries().unwrap().map(read).collect())
}

#[test]
fn one_image_is_packed_for_both_engines_and_without_its_name() {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    // One that it has twice, and one of another machine.
    let mut image = layout.image(&[simple_layer(), simple_layer()], machine_architecture());
    image["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "debian:latest"});
    let other = layout.image(&[Tar::default().file("x", "other").end()], "vax");
    layout.index(&[other, image.clone()]);
    let packed = Packed::open(&layout.path).unwrap();
    let files = files(&packed).unwrap();
    assert!(files.iter().all(|(_, content)| !String::from_utf8_lossy(content).contains("debian")));
    let document = |name: &str| {
        let (_, content) = files.iter().find(|(file, _)| file == name).unwrap();
        serde_json::from_slice::<serde_json::Value>(content).unwrap()
    };
    assert_eq!(document("oci-layout")["imageLayoutVersion"], "1.0.0");
    let index = document("index.json");
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1);
    assert_eq!(index["manifests"][0]["digest"], image["digest"]);
    let list = document("manifest.json");
    let layer = format!("blobs/sha256/{}", Digest::of(&simple_layer()).hex());
    assert_eq!(list[0]["Config"], format!("blobs/sha256/{}", packed.id().hex()));
    assert_eq!(list[0]["Layers"], serde_json::json!([layer, layer]));
    let blobs: Vec<_> = files.iter().filter(|(name, _)| name.starts_with("blobs/")).collect();
    assert_eq!(blobs.len(), 3, "a manifest, a configuration and a layer");
    for (name, content) in blobs {
        assert!(name.ends_with(Digest::of(content).hex()), "{name}");
    }
}

#[test]
fn a_layer_that_is_not_the_one_that_is_meant_is_found_as_it_is_packed() {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let image = layout.image(&[simple_layer()], machine_architecture());
    layout.index(&[image]);
    let packed = Packed::open(&layout.path).unwrap();
    let mut changed = simple_layer();
    changed[600] ^= 1;
    fs::write(layout.blob_path(&Digest::of(&simple_layer())), &changed).unwrap();
    let error = files(&packed).unwrap_err();
    assert!(matches!(error, PackError::Image(_)) && error.to_string().contains("layer"), "{error}");
}

#[test]
fn what_an_engine_would_get_elsewhere_or_not_unpack_is_refused() {
    const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let blob = layout.blob(&simple_layer());
    let id = blob.0.to_string();
    let with = |layer: serde_json::Value, diff_ids: &[String]| {
        layout.index(&[layout.image_of(vec![layer], diff_ids, machine_architecture())]);
        Packed::open(&layout.path)
    };
    let said = |found: Result<Packed, ImageError>| found.err().unwrap().to_string();
    let layer = || Written::descriptor(TAR, &blob);
    with(layer(), std::slice::from_ref(&id)).unwrap().fits(scratch.path()).unwrap();
    let mut elsewhere = layer();
    elsewhere["urls"] = serde_json::json!(["https://example.org/layer"]);
    assert!(said(with(elsewhere, std::slice::from_ref(&id))).contains("layer names other places"));
    assert!(said(with(layer(), &[])).contains("lists 0 layers and its manifest 1"));
    let encrypted = Written::descriptor(&format!("{TAR}+encrypted"), &blob);
    assert!(said(with(encrypted, std::slice::from_ref(&id))).contains("+encrypted"));
    let mut large = layer();
    large["size"] = (1_u64 << 60).into();
    let error = with(large, std::slice::from_ref(&id)).unwrap().fits(scratch.path()).unwrap_err();
    assert!(matches!(error, PackError::Image(_)) && error.to_string().contains("free some space"), "{error}");
}
