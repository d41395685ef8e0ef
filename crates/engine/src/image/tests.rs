//! Images made by the usual tools are imported; broken ones are refused with a sentence.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::*;

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A layout with one image `:one` of three layers, made by umoci.
fn layout(scratch: &Path) -> PathBuf {
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
        fs::write(root.join("gone/inner/file"), b"x").unwrap();
        fs::write(root.join("old"), b"old").unwrap();
        fs::hard_link(root.join("bin/tool"), root.join("bin/again")).unwrap();
    });
    layer(&|| {
        fs::remove_file(root.join("old")).unwrap();
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::create_dir(root.join("gone")).unwrap();
        fs::write(root.join("gone/new"), b"new").unwrap();
    });
    run(
        "umoci",
        &["config", "--image", &image, "--config.env", "A=b", "--config.cmd", "tool", "--config.user", "7"],
    );
    layout
}

#[test]
fn a_layout_of_umoci_is_imported() {
    let scratch = TempDir::new().unwrap();
    let layout = layout(scratch.path());
    let store = Store::open(&scratch.path().join("store")).unwrap();
    let image = store.import_oci(&layout).unwrap();
    println!("{image:#?}");
    run("find", &[scratch.path().to_str().unwrap()]);
    for layer in &image.layers {
        let output = Command::new("ls").arg("-laR").arg(store.layer_path(layer)).output().unwrap();
        println!("{}", String::from_utf8_lossy(&output.stdout));
    }
}
