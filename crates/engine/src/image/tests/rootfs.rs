//! Directories as images.

use std::os::unix::fs::symlink;

use super::*;
use crate::tree;

/// A small root filesystem with one of everything but sockets.
fn fill(root: &Path) {
    fs::create_dir_all(root.join("bin/inner")).unwrap();
    fs::write(root.join("bin/run"), b"#!/bin/sh\n").unwrap();
    fs::write(root.join("bin/large"), vec![5; 700_001]).unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    fs::hard_link(root.join("bin/run"), root.join("again")).unwrap();
    symlink("bin/run", root.join("link")).unwrap();
    symlink("t".repeat(150), root.join("long-link")).unwrap();
    fs::write(root.join(format!("{}-long-name", "n".repeat(140))), b"x").unwrap();
    std::os::unix::fs::chown(root.join("empty"), Some(3_000_000_000), Some(2_097_152)).unwrap();
    let run_path = root.join("bin/run").display().to_string();
    run("chmod", &["6711", &run_path]);
    set_xattr(&root.join("bin/run"), "user.note", b"a\n=\0b");
    set_xattr(root, "trusted.note", b"v");
    run("mknod", &[root.join("null").to_str().unwrap(), "c", "1", "3"]);
    run("mkfifo", &[root.join("pipe").to_str().unwrap()]);
    for (time, name) in
        [("@1.5", "empty"), ("@-3.25", "pipe"), ("@9999999999.000000001", "null"), ("@0", "bin/large")]
    {
        run("touch", &["-d", time, root.join(name).to_str().unwrap()]);
    }
    File::create(root.join("holes")).unwrap().set_len(40 << 20).unwrap();
}

#[test]
fn a_directory_comes_back_as_a_layer() {
    let scratch = scratch();
    let root = scratch.path().join("root");
    fs::create_dir(&root).unwrap();
    fill(&root);
    let socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_rootfs(&root).unwrap();
    drop(socket);
    assert_eq!((image.layers.len(), image.config.clone()), (1, ImageConfig::default()));
    let layer = store.layer_path(&image.layers[0]);
    // A socket is not kept, and its directory's time says when it was made.
    let differences = tree::compare(&root, &layer).unwrap();
    let differences: Vec<String> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(differences, ["socket: only in the first"]);
    assert!(fs::metadata(layer.join("holes")).unwrap().blocks() < 8);
    // What other tools make of the blob.
    let (blob, length) = store.open_blob(&image.layers[0]).unwrap();
    assert_eq!(blob.metadata().unwrap().len(), length);
    let path = store.directory().join("blobs/sha256").join(image.layers[0].hex());
    let other = scratch.path().join("by-tar");
    fs::create_dir(&other).unwrap();
    let options = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf"];
    let from_to = [path.to_str().unwrap(), "-C", other.to_str().unwrap()];
    run("tar", &[&options[..], &from_to].concat());
    assert_eq!(tree::compare(&layer, &other).unwrap(), []);
}

#[test]
fn the_same_tree_gives_the_same_digest_and_another_tree_another() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name);
    fs::create_dir(path("root")).unwrap();
    fill(&path("root"));
    run("cp", &["-a", path("root").to_str().unwrap(), path("copy").to_str().unwrap()]);
    let store = Store::open(&path("store")).unwrap();
    let first = store.import_rootfs(&path("root")).unwrap();
    let other_store = Store::open(&path("other-store")).unwrap();
    let second = other_store.import_rootfs(&path("copy")).unwrap();
    assert_eq!(first.layers, second.layers);
    assert_eq!(store.import_rootfs(&path("root")).unwrap().layers, first.layers);
    run("chmod", &["700", path("copy/bin").to_str().unwrap()]);
    assert_ne!(store.import_rootfs(&path("copy")).unwrap().layers, first.layers);
}

#[test]
fn a_mounted_directory_becomes_an_empty_one() {
    let scratch = scratch();
    let root = scratch.path().join("root");
    fs::create_dir_all(root.join("mounted")).unwrap();
    fs::write(root.join("file"), b"x").unwrap();
    let mounted = root.join("mounted");
    rustix::mount::mount("none", &mounted, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    fs::write(mounted.join("inside"), b"x").unwrap();
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_rootfs(&root);
    rustix::mount::unmount(&mounted, rustix::mount::UnmountFlags::empty()).unwrap();
    let layer = store.layer_path(&image.unwrap().layers[0]);
    assert!(layer.join("file").is_file());
    assert_eq!(fs::read_dir(layer.join("mounted")).unwrap().count(), 0);
}

#[test]
fn what_is_no_root_filesystem_is_refused_with_a_sentence() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name);
    fs::create_dir_all(path("holds/state")).unwrap();
    fs::create_dir(path("empty")).unwrap();
    fs::create_dir(path("removal")).unwrap();
    fs::write(path("removal/.wh.name"), b"").unwrap();
    fs::write(path("file"), b"").unwrap();
    let store = Store::open(&path("holds/state/store")).unwrap();
    for (name, expected) in [
        ("missing", "it does not exist; pass the directory of a root filesystem"),
        ("file", "it is not a directory; pass the directory of a root filesystem"),
        ("empty", "it is empty; pass the directory of a root filesystem"),
        ("holds", "the image store"),
        ("removal", ".wh.name cannot be kept in an archive"),
    ] {
        let sentence = store.import_rootfs(&path(name)).unwrap_err().to_string();
        let start = format!("root filesystem {}: {expected}", path(name).display());
        assert!(sentence.starts_with(&start), "{sentence}");
        assert_eq!(fs::read_dir(store.directory().join("tmp")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(store.directory().join("blobs/sha256")).unwrap().count(), 0);
    }
}
