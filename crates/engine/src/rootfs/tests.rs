//! Root filesystems are mounted over any number of layers, and looked into without leaving them.
#![allow(clippy::unwrap_used)]

use std::fs;

use tempfile::TempDir;

use super::*;

#[test]
fn many_layers_are_stacked() {
    let scratch = TempDir::new().unwrap();
    let lower: Vec<_> = (0..120)
        .map(|n| {
            let layer = scratch.path().join(format!("layers/sha256/{n:064x}"));
            fs::create_dir_all(&layer).unwrap();
            fs::write(layer.join(format!("of-{n}")), b"x").unwrap();
            fs::write(layer.join("top"), n.to_string()).unwrap();
            layer
        })
        .collect();
    let path = |name: &str| scratch.path().join(name);
    let overlay = Overlay { lower, upper: path("upper"), work: path("work"), target: path("target") };
    overlay.mount().unwrap();
    assert_eq!(fs::read_to_string(path("target/top")).unwrap(), "119");
    overlay.unmount().unwrap();
}
