//! Archives and layouts that real tools made.

use super::*;
use crate::rootfs::Overlay;

/// A layout with an image `:one` of two layers, made by umoci: the second removes a file and a
/// directory's content.
fn umoci_layout(scratch: &Path) -> PathBuf {
    let layout = scratch.join("layout");
    let (image, bundle) = (format!("{}:one", layout.display()), scratch.join("bundle"));
    let bundle_text = bundle.display().to_string();
    run("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    run("umoci", &["new", "--image", &image]);
    let root = bundle.join("rootfs");
    let layer = |change: &dyn Fn()| {
        let _ = fs::remove_dir_all(&bundle);
        run("umoci", &["unpack", "--image", &image, &bundle_text]);
        change();
        run("umoci", &["repack", "--image", &image, &bundle_text]);
    };
    layer(&|| {
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::create_dir_all(root.join("gone/inner")).unwrap();
        fs::write(root.join("bin/tool"), b"#!/bin/sh\n").unwrap();
        run("chmod", &["4755", root.join("bin/tool").to_str().unwrap()]);
        fs::write(root.join("gone/inner/file"), b"x").unwrap();
        fs::write(root.join("old"), b"old").unwrap();
        fs::hard_link(root.join("bin/tool"), root.join("bin/again")).unwrap();
        std::os::unix::fs::chown(root.join("old"), Some(12), Some(34)).unwrap();
        std::os::unix::fs::symlink("/bin/tool", root.join("link")).unwrap();
        set_xattr(&root.join("bin"), "user.note", b"a\nb\0c");
    });
    layer(&|| {
        fs::remove_file(root.join("old")).unwrap();
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::create_dir(root.join("gone")).unwrap();
        fs::write(root.join("gone/new"), b"new").unwrap();
    });
    let config =
        ["config", "--image", &image, "--config.env", "A=b", "--config.cmd", "tool", "--config.user", "7:8"];
    run("umoci", &config);
    run(
        "umoci",
        &["config", "--image", &image, "--config.exposedports", "6379/tcp", "--config.workingdir", "/bin"],
    );
    run(
        "umoci",
        &["config", "--image", &image, "--config.label", "k=v", "--config.entrypoint", "/bin/again"],
    );
    layout
}

fn skopeo(arguments: &[&str]) {
    run("skopeo", &[&["--insecure-policy", "copy", "--quiet"], arguments].concat());
}

/// Checks the image of [`umoci_layout`] by what a container would see of it.
fn assert_imported(store: &Store, image: &Image, scratch: &Path) {
    assert_eq!(image.layers.len(), 2);
    assert_eq!(image.architecture, machine_architecture());
    let overlay = Overlay {
        lower: image.layers.iter().map(|layer| store.layer_path(layer)).collect(),
        upper: scratch.join("upper"),
        work: scratch.join("work"),
        target: scratch.join("target"),
    };
    overlay.mount().unwrap();
    let at = |name: &str| scratch.join("target").join(name);
    let look = || {
        let tool = fs::metadata(at("bin/tool"))?;
        let mut note = [0; 9];
        let length = rustix::fs::getxattr(at("bin"), "user.note", &mut note)?;
        let names = |directory: &str| -> std::io::Result<Vec<String>> {
            let entries = fs::read_dir(at(directory))?;
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            Ok(names)
        };
        Ok::<_, std::io::Error>((
            names("")?,
            names("gone")?,
            (tool.mode() & 0o7777, tool.ino() == fs::metadata(at("bin/again"))?.ino()),
            fs::read_link(at("link"))?,
            note[..length].to_vec(),
        ))
    };
    let found = look();
    overlay.unmount().unwrap();
    let (top, gone, tool, link, note) = found.unwrap();
    assert_eq!(top, ["bin", "gone", "link"]);
    assert_eq!(gone, ["new"]);
    assert_eq!(tool, (0o4755, true));
    assert_eq!(link, Path::new("/bin/tool"));
    assert_eq!(note, b"a\nb\0c");
}

#[test]
fn a_layout_of_umoci_is_imported() {
    let scratch = scratch();
    let layout = umoci_layout(scratch.path());
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_oci(&layout).unwrap();
    assert_imported(&store, &image, scratch.path());
    let config = ImageConfig {
        env: vec!["A=b".into()],
        entrypoint: vec!["/bin/again".into()],
        cmd: vec!["tool".into()],
        user: "7:8".into(),
        working_dir: "/bin".into(),
        exposed_ports: vec!["6379/tcp".into()],
        labels: [("k".into(), "v".into())].into(),
        stop_signal: String::new(),
    };
    assert_eq!((image.config, image.reference.as_str()), (config, "one"));
    let old = fs::metadata(store.layer_path(&image.layers[0]).join("old")).unwrap();
    assert_eq!((old.uid(), old.gid()), (12, 34));
}

#[test]
fn archives_and_compressions_of_skopeo_are_imported() {
    let scratch = scratch();
    let layout = umoci_layout(scratch.path());
    let source = format!("oci:{}:one", layout.display());
    let path = |name: &str| scratch.path().join(name);
    skopeo(&[&source, &format!("oci-archive:{}:name:tag", path("plain.tar").display())]);
    let zstd = ["--dest-compress-format", "zstd", "--dest-compress"];
    // A layout directory has its layers compressed anew only when they are plain at the source.
    skopeo(&["--dest-decompress", &source, &format!("dir:{}", path("plain-directory").display())]);
    let plain = format!("dir:{}", path("plain-directory").display());
    skopeo(&[&zstd[..], &[&plain, &format!("oci:{}:z", path("zstd").display())]].concat());
    for (name, reference) in [("plain.tar", "name:tag"), ("zstd", "z")] {
        let store = Store::open(&path(&format!("store-{name}"))).unwrap();
        let image = store.import_oci(&path(name)).unwrap();
        assert_eq!(image.reference, reference);
        let view = path(&format!("view-{name}"));
        fs::create_dir(&view).unwrap();
        assert_imported(&store, &image, &view);
    }
    let magic = fs::read_dir(path("zstd/blobs/sha256"))
        .unwrap()
        .any(|entry| fs::read(entry.unwrap().path()).unwrap().starts_with(&[0x28, 0xb5, 0x2f, 0xfd]));
    assert!(magic, "skopeo made no zstd layer");
}

#[test]
fn the_image_for_this_machine_is_taken_out_of_an_index_within_an_index() {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let platform = |mut descriptor: serde_json::Value, architecture: &str| {
        descriptor["platform"] = serde_json::json!({"architecture": architecture, "os": "linux"});
        descriptor
    };
    let other = layout.image(&[Tar::default().file("other", "x").end()], "s390x");
    let ours = layout.image(&[simple_layer()], machine_architecture());
    let attestation = layout.image(&[Tar::default().file("attestation", "x").end()], "unknown");
    let inner = serde_json::json!({"schemaVersion": 2, "manifests": [
        platform(attestation, "unknown"), platform(other, "s390x"), platform(ours, machine_architecture()),
    ]});
    let inner = layout.blob(inner.to_string().as_bytes());
    let mut inner = Written::descriptor("application/vnd.oci.image.index.v1+json", &inner);
    inner["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "many"});
    layout.index(&[inner]);
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_oci(&layout.path).unwrap();
    assert_eq!((image.reference.as_str(), image.layers), ("many", vec![Digest::of(&simple_layer())]));
    assert_eq!(image.config.cmd, ["run"]);
    assert!(store.layer_path(&Digest::of(&simple_layer())).join("bin/run").is_file());
}

#[test]
fn one_of_several_images_is_named_after_the_path() {
    let scratch = scratch();
    let layout = Written::new(scratch.path().join("layout"));
    let named = |name: &str| {
        let layer = Tar::default().file(name, name).end();
        let mut descriptor = layout.image(std::slice::from_ref(&layer), machine_architecture());
        descriptor["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": name});
        (descriptor, Digest::of(&layer))
    };
    let ((one, _), (two, two_layer)) = (named("one"), named("two"));
    layout.index(&[one, two]);
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let path = layout.path.display();
    let image = store.import_oci(Path::new(&format!("{path}:two"))).unwrap();
    assert_eq!((image.layers, image.reference.as_str()), (vec![two_layer], "two"));
    let several = store.import_oci(&layout.path).unwrap_err().to_string();
    assert_eq!(
        several,
        format!(
            "image {path}: it holds several images (one, two); name one of them as PATH:NAME or export one alone"
        )
    );
    let wrong = store.import_oci(Path::new(&format!("{path}:three"))).unwrap_err().to_string();
    assert_eq!(wrong, format!("image {path}:three: it holds no image named \"three\", only one, two"));
}

#[test]
fn a_docker_archive_is_refused_with_the_way_to_convert_it() {
    let scratch = scratch();
    let layout = umoci_layout(scratch.path());
    let archive = scratch.path().join("docker.tar");
    skopeo(&[&format!("oci:{}:one", layout.display()), &format!("docker-archive:{}:a:b", archive.display())]);
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let error = store.import_oci(&archive).unwrap_err().to_string();
    assert!(error.contains("docker.tar: it is a Docker archive") && error.contains("skopeo copy"), "{error}");
}
