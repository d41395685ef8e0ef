//! Images are imported from what the usual tools write, layers unpacked as they were meant, and
//! whatever is broken refused with a sentence.
#![allow(clippy::unwrap_used)]

mod archives;
mod broken;
mod layers;
mod modules;
mod packed;
mod platforms;
mod rootfs;
mod store;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::*;

fn scratch() -> TempDir {
    TempDir::new_in("/var/tmp").unwrap()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output =
        output.unwrap_or_else(|error| panic!("{program} cannot be run ({error}); scripts/setup installs it"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// Puts bytes into a store as a blob.
fn put(store: &Store, bytes: &[u8]) -> Digest {
    let digest = Digest::of(bytes);
    let mut writer = store.blob_writer(&digest, bytes.len() as u64).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

/// A tar stream made entry by entry, also of what no tool would write.
#[derive(Default)]
struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    fn entry(mut self, name: &str, kind: u8, link: &str, data: &[u8]) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(data.len() as u64);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(7);
        header.set_cksum();
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, data: &str) -> Self {
        self.entry(name, b'0', "", data.as_bytes())
    }

    fn directory(self, name: &str) -> Self {
        self.entry(name, b'5', "", b"")
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.extend([0; 1024]);
        self.bytes
    }
}

/// A layout directory written document by document.
struct Written {
    path: PathBuf,
}

impl Written {
    fn new(path: PathBuf) -> Self {
        fs::create_dir_all(path.join("blobs/sha256")).unwrap();
        fs::write(path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self { path }
    }

    fn blob(&self, bytes: &[u8]) -> (Digest, usize) {
        let digest = Digest::of(bytes);
        fs::write(self.blob_path(&digest), bytes).unwrap();
        (digest, bytes.len())
    }

    fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.path.join("blobs/sha256").join(digest.hex())
    }

    fn descriptor(media_type: &str, (digest, size): &(Digest, usize)) -> serde_json::Value {
        serde_json::json!({"mediaType": media_type, "digest": digest.to_string(), "size": size})
    }

    /// An image of plain tar layers; its manifest's descriptor.
    fn image(&self, layers: &[Vec<u8>], architecture: &str) -> serde_json::Value {
        let diff_ids: Vec<String> = layers.iter().map(|layer| Digest::of(layer).to_string()).collect();
        let layers = layers
            .iter()
            .map(|layer| Self::descriptor("application/vnd.oci.image.layer.v1.tar", &self.blob(layer)));
        self.image_of(layers.collect(), &diff_ids, architecture)
    }

    fn image_of(
        &self,
        layers: Vec<serde_json::Value>,
        diff_ids: &[String],
        architecture: &str,
    ) -> serde_json::Value {
        let config = serde_json::json!({
            "architecture": architecture, "os": "linux", "config": {"Cmd": ["run"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = self.blob(config.to_string().as_bytes());
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": Self::descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": layers,
        });
        let manifest = self.blob(manifest.to_string().as_bytes());
        Self::descriptor("application/vnd.oci.image.manifest.v1+json", &manifest)
    }

    fn index(&self, manifests: &[serde_json::Value]) {
        let index = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
        fs::write(self.path.join("index.json"), index.to_string()).unwrap();
    }
}

fn simple_layer() -> Vec<u8> {
    Tar::default().directory("bin/").file("bin/run", "#!/bin/sh\n").end()
}
