//! Broken archives: one sentence each, which names the archive and the thing, and nothing unpacked.

use proptest::prelude::*;

use super::*;

/// Imports and gives the sentence, which must begin with the name of the archive.
fn refusal(store: &Store, path: &Path) -> String {
    let sentence = store.import_oci(path).unwrap_err().to_string();
    let start = format!("image {}: ", path.display());
    assert!(sentence.starts_with(&start), "{sentence}");
    assert!(!sentence.contains('\n'), "{sentence}");
    assert_eq!(fs::read_dir(store.directory().join("tmp")).unwrap().count(), 0);
    sentence[start.len()..].to_owned()
}

/// A way to break a layout, and what the sentence must say.
type Case = (&'static str, fn(&Written), &'static str);

#[test]
fn each_broken_layout_is_named() {
    const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
    let cases: &[Case] = &[
        (
            "no oci-layout",
            |layout| fs::remove_file(layout.path.join("oci-layout")).unwrap(),
            "it holds no oci-layout",
        ),
        (
            "no index",
            |layout| fs::remove_file(layout.path.join("index.json")).unwrap(),
            "it holds no index.json",
        ),
        (
            "other version",
            |layout| {
                fs::write(layout.path.join("oci-layout"), r#"{"imageLayoutVersion":"2.0"}"#).unwrap();
            },
            "says version \"2.0\"",
        ),
        (
            "index is no JSON",
            |layout| fs::write(layout.path.join("index.json"), b"{").unwrap(),
            "its index.json is not valid",
        ),
        (
            "index is huge",
            |layout| {
                File::create(layout.path.join("index.json")).unwrap().set_len(1 << 40).unwrap();
            },
            "its index.json has 1099511627776 bytes",
        ),
        ("index lists nothing", |layout| layout.index(&[]), "its index lists no image"),
        (
            "other machine",
            |layout| layout.index(&[layout.image(&[simple_layer()], "s390x")]),
            "it is for s390x, and this machine needs",
        ),
        (
            "manifest missing",
            |layout| {
                layout.index(&[Written::descriptor(
                    "application/vnd.oci.image.manifest.v1+json",
                    &(Digest::of(b"x"), 1),
                )]);
            },
            "(manifest), which is missing",
        ),
        (
            "manifest of another size",
            |layout| {
                let mut manifest = layout.image(&[simple_layer()], machine_architecture());
                manifest["size"] = 5.into();
                layout.index(&[manifest]);
            },
            "bytes where 5 are announced",
        ),
        (
            "manifest of another content",
            |layout| {
                let manifest = layout.image(&[simple_layer()], machine_architecture());
                let digest: Digest = manifest["digest"].as_str().unwrap().parse().unwrap();
                let mut bytes = fs::read(layout.blob_path(&digest)).unwrap();
                bytes[5] ^= 1;
                fs::write(layout.blob_path(&digest), bytes).unwrap();
                layout.index(&[manifest]);
            },
            "has the content of sha256:",
        ),
        (
            "manifest is no JSON",
            |layout| {
                let blob = layout.blob(b"none");
                layout.index(&[Written::descriptor("application/vnd.oci.image.manifest.v1+json", &blob)]);
            },
            "its manifest sha256:",
        ),
        (
            "manifest of an unknown type",
            |layout| {
                layout.index(&[Written::descriptor("text/plain", &layout.blob(b"none"))]);
            },
            "its manifest is of type text/plain",
        ),
        (
            "indexes without end",
            |layout| {
                let mut descriptor = layout.image(&[simple_layer()], machine_architecture());
                for _ in 0..6 {
                    let index = serde_json::json!({"schemaVersion": 2, "manifests": [descriptor]});
                    let blob = layout.blob(index.to_string().as_bytes());
                    descriptor = Written::descriptor("application/vnd.oci.image.index.v1+json", &blob);
                }
                layout.index(&[descriptor]);
            },
            "nested more than 4 deep",
        ),
        (
            "other digest algorithm",
            |layout| {
                let mut manifest = layout.image(&[simple_layer()], machine_architecture());
                manifest["digest"] = format!("sha512:{}", "0".repeat(128)).into();
                layout.index(&[manifest]);
            },
            "it uses the digest sha512:",
        ),
        (
            "digest that leads out",
            |layout| {
                let mut manifest = layout.image(&[simple_layer()], machine_architecture());
                manifest["digest"] = "sha256:../../../../etc/passwd".into();
                layout.index(&[manifest]);
            },
            "its index.json is not valid",
        ),
        (
            "layer missing",
            |layout| {
                layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
                fs::remove_file(layout.blob_path(&Digest::of(&simple_layer()))).unwrap();
            },
            "(layer), which is missing",
        ),
        (
            "layer of another size",
            |layout| {
                layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
                fs::write(layout.blob_path(&Digest::of(&simple_layer())), b"short").unwrap();
            },
            "has 5 bytes where",
        ),
        (
            "layer of another content",
            |layout| {
                layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
                let mut bytes = simple_layer();
                bytes[1030] ^= 1;
                fs::write(layout.blob_path(&Digest::of(&simple_layer())), bytes).unwrap();
            },
            "its layer sha256:",
        ),
        (
            "layer of an unknown type",
            |layout| {
                let layer = Written::descriptor(
                    "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
                    &layout.blob(b"x"),
                );
                layout.index(&[layout.image_of(
                    vec![layer],
                    &[Digest::of(b"x").to_string()],
                    machine_architecture(),
                )]);
            },
            "its layer is of type application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
        ),
        (
            "layer that is no tar",
            |layout| {
                let layer = Written::descriptor(LAYER, &layout.blob(&[b'x'; 5000]));
                layout.index(&[layout.image_of(
                    vec![layer],
                    &[Digest::of(&[b'x'; 5000]).to_string()],
                    machine_architecture(),
                )]);
            },
            "is not a tar archive, plain or compressed",
        ),
        (
            "layer cut off",
            |layout| {
                layout.index(&[layout.image(&[simple_layer()[..1300].to_vec()], machine_architecture())])
            },
            "is cut off or damaged after",
        ),
        (
            "layer with damaged gzip",
            |layout| {
                let bytes = [&[0x1f, 0x8b, 8, 0][..], &[9; 500]].concat();
                let layer = Written::descriptor(LAYER, &layout.blob(&bytes));
                layout.index(&[layout.image_of(
                    vec![layer],
                    &[Digest::of(b"").to_string()],
                    machine_architecture(),
                )]);
            },
            "is cut off or damaged after",
        ),
        (
            "layer with another diff id",
            |layout| {
                let layer = Written::descriptor(LAYER, &layout.blob(&simple_layer()));
                layout.index(&[layout.image_of(
                    vec![layer],
                    &[Digest::of(b"other").to_string()],
                    machine_architecture(),
                )]);
            },
            "unpacks to sha256:",
        ),
        (
            "more diff ids than layers",
            |layout| {
                layout.index(&[layout.image_of(
                    vec![],
                    &[Digest::of(b"other").to_string()],
                    machine_architecture(),
                )]);
            },
            "its configuration lists 1 layers and its manifest 0",
        ),
        (
            "too many layers",
            |layout| {
                let layers = vec![Written::descriptor(LAYER, &layout.blob(&simple_layer())); 201];
                let diff_ids = vec![Digest::of(&simple_layer()).to_string(); 201];
                layout.index(&[layout.image_of(layers, &diff_ids, machine_architecture())]);
            },
            "it has 201 layers, and at most 200",
        ),
        (
            "layer that leaves its directory",
            |layout| {
                let layer = Tar::default().file("../outside", "x").end();
                layout.index(&[layout.image(&[layer], machine_architecture())]);
            },
            "its entry \"../outside\" is not allowed",
        ),
    ];
    for (name, break_it, expected) in cases {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
        break_it(&layout);
        let store = Store::open(&scratch.path().join("store")).unwrap();
        let sentence = refusal(&store, &layout.path);
        assert!(sentence.contains(expected), "{name}: {sentence}");
        assert_eq!(fs::read_dir(store.directory().join("layers/sha256")).unwrap().count(), 0, "{name}");
        // The same as an archive.
        let archive = scratch.path().join("archive.tar");
        run("tar", &["--sparse", "-C", layout.path.to_str().unwrap(), "-cf", archive.to_str().unwrap(), "."]);
        if *name != "index is huge" {
            let sentence = refusal(&store, &archive);
            assert!(sentence.contains(expected), "{name} in an archive: {sentence}");
        }
    }
}

#[test]
fn an_index_that_multiplies_is_searched_once() {
    const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let mut descriptor = layout.image(&[simple_layer()], "s390x");
    // 300 times 300 times 300 manifests in a few kilobytes.
    for _ in 0..3 {
        let index = serde_json::json!({"schemaVersion": 2, "manifests": vec![descriptor; 300]});
        descriptor = Written::descriptor(INDEX, &layout.blob(index.to_string().as_bytes()));
    }
    layout.index(&[descriptor]);
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let path = layout.path.clone();
    std::thread::spawn(move || sender.send(refusal(&store, &path)));
    let sentence = receiver.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert!(sentence.contains("it is for s390x, and this machine needs"), "{sentence}");
}

#[test]
fn a_file_that_is_no_archive_is_named() {
    let scratch = scratch();
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let path = |name: &str| scratch.path().join(name);
    let layout = Written::new(path("layout"));
    layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
    run("tar", &["-C", layout.path.to_str().unwrap(), "-cf", path("good.tar").to_str().unwrap(), "."]);
    store.import_oci(&path("good.tar")).unwrap();
    let good = fs::read(path("good.tar")).unwrap();
    fs::write(path("text"), "no archive ".repeat(100)).unwrap();
    fs::write(path("short"), "no").unwrap();
    fs::write(path("empty"), "").unwrap();
    fs::write(path("cut"), &good[..good.len() / 2]).unwrap();
    fs::write(path("cut-in-header"), &good[..700]).unwrap();
    run("gzip", &["-k", path("good.tar").to_str().unwrap()]);
    fs::create_dir(path("directory")).unwrap();
    let mut damaged = good.clone();
    let second = good.windows(6).enumerate().filter(|(_, window)| *window == b"ustar ").nth(1).unwrap().0;
    damaged[second - 200] ^= 0xff;
    fs::write(path("damaged"), damaged).unwrap();
    for (name, expected) in [
        ("missing", "it does not exist; pass an OCI archive or layout directory"),
        ("text", "it is not a tar archive; pass an OCI archive or layout directory"),
        ("short", "it is cut off"),
        ("empty", "it is not a tar archive"),
        ("cut", "the tar archive is cut off after"),
        ("cut-in-header", "the tar archive is cut off after"),
        ("damaged", "the tar archive is damaged: its checksum is wrong; copy it again"),
        ("good.tar.gz", "it is compressed with gzip; decompress it first"),
        ("directory", "it holds no oci-layout; pass an OCI archive or layout directory"),
    ] {
        let sentence = refusal(&store, &path(name));
        let expected = if name == "short" { "it is not a tar archive" } else { expected };
        assert!(sentence.contains(expected), "{name}: {sentence}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn an_archive_with_flipped_bytes_is_imported_or_refused(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let scratch = scratch();
        let layout = Written::new(scratch.path().join("layout"));
        layout.index(&[layout.image(&[simple_layer()], machine_architecture())]);
        let archive = scratch.path().join("archive.tar");
        run("tar", &["-C", layout.path.to_str().unwrap(), "-cf", archive.to_str().unwrap(), "."]);
        let mut bytes = fs::read(&archive).unwrap();
        for (place, value) in flips {
            let at = place.index(bytes.len());
            bytes[at] ^= value;
        }
        fs::write(&archive, bytes).unwrap();
        let store = Store::open(&scratch.path().join("store")).unwrap();
        if let Err(error) = store.import_oci(&archive) {
            prop_assert!(error.to_string().starts_with("image "), "{}", error);
        }
        prop_assert_eq!(fs::read_dir(store.directory().join("tmp")).unwrap().count(), 0);
    }
}
