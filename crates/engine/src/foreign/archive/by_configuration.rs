//! An image on its way between Dockers that know it by different IDs.
//!
//! What is the same for both is the configuration. It names the layers by their content as it is unpacked, and its digest is the
//! image's ID in Docker's own store.
//!
//! ```text
//!  Docker's own store                         containerd's
//!  layers as they are unpacked  ────────────▶ an OCI layout: its manifest, of which the ID is the digest, is made here
//!  manifest.json, made here     ◀──────────── layers as a registry had them, mostly compressed
//! ```
//! No list of the archive is believed: of its files those are the layers whose content is what the configuration names.

use std::cell::Cell;
use std::collections::HashMap;
use std::io::{self, Read, Write};

use flate2::write::MultiGzDecoder;
use zstd::stream::write::Decoder;

use super::layout::{LAYOUT, add_lists};
use super::manifest::layers_of;
use super::{BLOBS, MOST_FILES, Manifest, Part, add, each_part, list};
use crate::image::{Digest, Hashing};

/// Where the image is to be.
#[derive(Debug, Clone)]
pub enum Store {
    /// In Docker's own store, which unpacks layers.
    Docker,
    /// In containerd's, which has these files of it already, by their digests, with their sizes in bytes.
    Containerd(HashMap<String, u64>),
}

/// Writes an archive of the image of this configuration and nothing else, without names, for a Docker with this store, where it
/// takes so many bytes at most. Returns the ID that it has there. The list comes last, once all of the image has come.
///
/// # Errors
/// What is read is no archive of all that the image has, it has more than there is room for, or one of the two cannot be read or
/// written.
pub fn by_configuration(
    archive: impl Read,
    to: impl Write,
    configuration: &str,
    (store, room): (&Store, u64),
) -> io::Result<String> {
    let hex = configuration.strip_prefix("sha256:").unwrap_or(configuration);
    let path_of_text = format!("{BLOBS}{hex}");
    let mut copy = tar::Builder::new(to);
    let (mut files, mut text, left) = (HashMap::new(), None, Cell::new(room));
    each_part(archive, |part, path, size, mut content| {
        if !matches!(part, Part::File) || path == LAYOUT.0 {
            return Ok(());
        }
        if path == path_of_text || path.strip_suffix(".json") == Some(hex) {
            let found = list(&mut content)?;
            if Digest::of(&found).hex() != hex {
                return Err(io::Error::other(format!("an archive whose {path} is another")));
            }
            text = Some(found);
            return Ok(());
        }
        take_room(&left, size)?;
        let mut head = Vec::new();
        (&mut content).take(LONGEST_MAGIC).read_to_end(&mut head)?;
        let within = Hashing::new(Room(&left));
        let mut unpacking = Unpacking::of(&head, within)?;
        // Docker's own store writes none, and containerd would unpack it whatever room there is.
        if matches!(store, Store::Containerd(_)) && !matches!(unpacking, Unpacking::Plain(_)) {
            return Err(io::Error::other(format!("an archive whose {path} is compressed")));
        }
        add(&mut copy, path, size, Seen { from: head.chain(content), by: &mut unpacking })?;
        files.insert(unpacking.digest()?.to_string(), (path.to_owned(), size));
        Ok(())
    })?;
    let lacks = |what: &str| io::Error::other(format!("an archive without {what}"));
    let text = text.ok_or_else(|| lacks(&format!("the configuration sha256:{hex}")))?;
    let layers = layers_of(&text)?;
    if layers.len() > MOST_FILES {
        return Err(io::Error::other("an image with more layers than one has"));
    }
    let lacks_layer = |layer: &String| lacks(&format!("the layer {layer}"));
    add(&mut copy, &path_of_text, text.len() as u64, text.as_slice())?;
    let id = match store {
        Store::Docker => {
            let path = |layer: &String| Ok(files.get(layer).ok_or_else(|| lacks_layer(layer))?.0.clone());
            let layers = layers.iter().map(path).collect::<io::Result<_>>()?;
            let list = serde_json::to_vec(&[Manifest { config: path_of_text, repo_tags: (), layers }])?;
            add(&mut copy, "manifest.json", list.len() as u64, list.as_slice())?;
            hex.to_owned()
        }
        Store::Containerd(here) => {
            let part = |layer: &'_ String| {
                let size = files.get(layer).map(|(_, size)| size).or_else(|| here.get(layer));
                size.copied().ok_or_else(|| lacks_layer(layer))
            };
            let sizes = layers.iter().map(part).collect::<io::Result<Vec<_>>>()?;
            let digits = layers.iter().map(|layer| layer.strip_prefix("sha256:").unwrap_or(layer));
            add_lists(&mut copy, (hex, text.len() as u64), &digits.zip(sizes).collect::<Vec<_>>())?
        }
    };
    copy.into_inner()?.flush()?;
    Ok(format!("sha256:{id}"))
}

fn take_room(left: &Cell<u64>, bytes: u64) -> io::Result<()> {
    let rest = left.get().checked_sub(bytes);
    left.set(
        rest.ok_or_else(|| io::Error::other("an archive of an image with more than there is room for"))?,
    );
    Ok(())
}

/// Takes what there is room for.
struct Room<'a>(&'a Cell<u64>);

impl Write for Room<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        take_room(self.0, data.len() as u64)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes by which dockerd tells what a layer is compressed with.
const LONGEST_MAGIC: u64 = 6;
const GZIP: &[u8] = &[0x1f, 0x8b, 0x08];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const BZIP2: &[u8] = b"BZh";
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];

/// What unpacks a layer as dockerd will, and hashes that.
enum Unpacking<'a> {
    Plain(Hashing<Room<'a>>),
    Gzip(MultiGzDecoder<Hashing<Room<'a>>>),
    Zstd(Decoder<'static, Hashing<Room<'a>>>),
}

impl<'a> Unpacking<'a> {
    /// What unpacks a layer that begins so.
    fn of(head: &[u8], to: Hashing<Room<'a>>) -> io::Result<Self> {
        let is_skipped = matches!(head, [first, 0x2a, 0x4d, 0x18, ..] if first & 0xf0 == 0x50);
        if head.starts_with(BZIP2) || head.starts_with(XZ) {
            return Err(io::Error::other("an archive with a layer that is compressed with bzip2 or xz"));
        }
        Ok(if head.starts_with(GZIP) {
            Self::Gzip(MultiGzDecoder::new(to))
        } else if head.starts_with(ZSTD) || is_skipped {
            Self::Zstd(Decoder::new(to)?)
        } else {
            Self::Plain(to)
        })
    }

    fn to(&mut self) -> &mut dyn Write {
        match self {
            Self::Plain(to) => to,
            Self::Gzip(to) => to,
            Self::Zstd(to) => to,
        }
    }

    /// The digest of what it has unpacked.
    fn digest(self) -> io::Result<Digest> {
        let hashing = match self {
            Self::Plain(to) => to,
            Self::Gzip(to) => to.finish()?,
            Self::Zstd(mut to) => {
                to.flush()?;
                to.into_inner()
            }
        };
        Ok(hashing.into_parts().1)
    }
}

/// Reads what is seen by another on the way.
struct Seen<'a, 'b, R> {
    from: R,
    by: &'a mut Unpacking<'b>,
}

impl<R: Read> Read for Seen<'_, '_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(into)?;
        self.by.to().write_all(&into[..read])?;
        Ok(read)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::{Value, json};

    use super::*;

    /// There is room enough.
    const MUCH: u64 = 1 << 30;

    fn digest(content: &[u8]) -> String {
        Digest::of(content).to_string()
    }

    fn blob(content: &[u8]) -> String {
        format!("{BLOBS}{}", Digest::of(content).hex())
    }

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(content).unwrap();
        packed.finish().unwrap()
    }

    /// The text of a configuration with these layers.
    fn configuration(layers: &[&[u8]]) -> Vec<u8> {
        let layers: Vec<_> = layers.iter().map(|layer| digest(layer)).collect();
        json!({ "os": "linux", "rootfs": { "type": "layers", "diff_ids": layers } }).to_string().into_bytes()
    }

    type Files = Vec<(String, Vec<u8>)>;

    fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (path, content) in files {
            add(&mut archive, path, content.len() as u64, content.as_slice()).unwrap();
        }
        archive.into_inner().unwrap()
    }

    /// The ID that comes of an archive, and what is passed on.
    fn passed(
        files: &[(String, Vec<u8>)],
        config: &[u8],
        store: &Store,
        room: u64,
    ) -> Result<(String, Files), String> {
        let mut copy = Vec::new();
        let id = by_configuration(archive(files).as_slice(), &mut copy, &digest(config), (store, room));
        let id = id.map_err(|error| error.to_string())?;
        let mut copy = tar::Archive::new(copy.as_slice());
        let read = |entry: io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (path, content)
        };
        Ok((id, copy.entries().unwrap().map(read).collect()))
    }

    fn containerd(here: &[&[u8]]) -> Store {
        Store::Containerd(here.iter().map(|layer| (digest(layer), layer.len() as u64)).collect())
    }

    #[test]
    fn what_containerd_has_becomes_an_archive_of_dockers_whose_layers_are_those_of_the_configuration() {
        let (lower, middle, upper) = (b"lower".as_slice(), b"middle".as_slice(), b"upper".as_slice());
        let config = configuration(&[lower, middle, upper, lower]);
        // In two parts each, and with one that is skipped.
        let packed = [gzip(b"low"), gzip(b"er")].concat();
        let frame = |part: &[u8]| zstd::encode_all(part, 1).unwrap();
        let zstd = [b"\x50\x2a\x4d\x18\x01\0\0\0x".to_vec(), frame(b"mid"), frame(b"dle")].concat();
        let files = [
            ("index.json".to_owned(), b"not read".to_vec()),
            ("manifest.json".to_owned(), b"not read".to_vec()),
            ("oci-layout".to_owned(), b"{}".to_vec()),
            ("x/y".to_owned(), b"not taken".to_vec()),
            (blob(b"{}"), b"{}".to_vec()),
            (blob(upper), upper.to_vec()),
            (blob(&zstd), zstd.clone()),
            (blob(&config), config.clone()),
            (blob(&packed), packed.clone()),
        ];
        let (id, found) = passed(&files, &config, &Store::Docker, MUCH).unwrap();
        assert_eq!(id, digest(&config));
        let (list, content) = found.last().unwrap();
        let told: Value = serde_json::from_slice(content).unwrap();
        let layers = [blob(&packed), blob(&zstd), blob(upper), blob(&packed)];
        let wanted = json!([{ "Config": blob(&config), "RepoTags": null, "Layers": layers }]);
        assert_eq!((list.as_str(), &told), ("manifest.json", &wanted));
        // As they came: Docker unpacks them.
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        let [document, upper, zstd, packed, config] =
            [blob(b"{}"), blob(upper), blob(&zstd), blob(&packed), blob(&config)];
        assert_eq!(names, [&document, &upper, &zstd, &packed, &config, "manifest.json"]);
        assert_eq!(found[3].1, [gzip(b"low"), gzip(b"er")].concat());
    }

    #[test]
    fn what_docker_has_becomes_an_oci_layout_that_containerd_knows_by_the_id_that_is_told() {
        let (lower, upper) = (b"lower".as_slice(), b"upper".as_slice());
        let config = configuration(&[lower, upper]);
        let hex = Digest::of(&config).hex().to_owned();
        // As older releases write it, and newer ones.
        let older = [
            (format!("{}/layer.tar", "0a".repeat(32)), upper.to_vec()),
            (format!("{hex}.json"), config.clone()),
        ];
        let newer = [(blob(&config), config.clone()), (blob(upper), upper.to_vec())];
        let mut ids = Vec::new();
        for files in [older, newer] {
            let (id, found) = passed(&files, &config, &containerd(&[lower]), MUCH).unwrap();
            let content = |path: &str| &found.iter().find(|(name, _)| name == path).unwrap().1;
            let index: Value = serde_json::from_slice(content("index.json")).unwrap();
            assert_eq!(
                (index["manifests"][0]["digest"].as_str(), found.last().unwrap().0.as_str()),
                (Some(&*id), "index.json")
            );
            assert!(index["manifests"][0].get("annotations").is_none(), "no name: {index}");
            let manifest = content(&id.replace("sha256:", BLOBS));
            assert_eq!(digest(manifest), id);
            let manifest: Value = serde_json::from_slice(manifest).unwrap();
            let told: Vec<_> = manifest["layers"]
                .as_array()
                .unwrap()
                .iter()
                .map(|of| (&of["digest"], &of["size"]))
                .collect();
            assert_eq!(told, [(&json!(digest(lower)), &json!(5)), (&json!(digest(upper)), &json!(5))]);
            assert_eq!(
                (&manifest["config"]["digest"], content(&blob(&config))),
                (&json!(digest(&config)), &config)
            );
            content("oci-layout");
            ids.push(id);
        }
        assert_eq!(ids[0], ids[1]);
    }

    #[test]
    fn an_image_that_is_not_that_of_the_configuration_is_refused() {
        let (layer, evil) = (b"layer".as_slice(), b"evil".as_slice());
        let config = configuration(&[layer]);
        let text = (blob(&config), config.clone());
        let refused = |files: &[(String, Vec<u8>)], store: &Store, room: u64, said: &str| {
            let told = passed(files, &config, store, room).unwrap_err();
            assert!(told.contains(said), "{said}: {told}");
        };
        let lacks = format!("without the layer {}", digest(layer));
        for store in [Store::Docker, containerd(&[])] {
            let of = |content: &[u8]| (blob(layer), content.to_vec());
            // Under the name of the layer there is another one, or none.
            refused(&[text.clone(), of(evil)], &store, MUCH, &lacks);
            refused(std::slice::from_ref(&text), &store, MUCH, &lacks);
            refused(&[of(layer)], &store, MUCH, "without the configuration");
            let other = configuration(&[evil]);
            refused(&[(blob(&config), other), of(evil)], &store, MUCH, "is another");
            refused(&[text.clone(), of(layer), of(evil)], &store, MUCH, "two files");
            refused(&[text.clone(), of(layer)], &store, 3, "more than there is room for");
            let whole = archive(&[of(layer), text.clone()]);
            let cut = by_configuration(&whole[..514], io::sink(), &digest(&config), (&store, MUCH));
            assert!(cut.is_err());
        }
        refused(&[text.clone(), (blob(layer), gzip(layer))], &containerd(&[]), MUCH, "is compressed");
        // A gigabyte of nothing, and what dockerd would unpack by other programs.
        let large = gzip(&vec![0; 1 << 20]);
        refused(
            &[text.clone(), (blob(&large), large)],
            &Store::Docker,
            1 << 19,
            "more than there is room for",
        );
        let zeros = zstd::encode_all(vec![0; 1 << 20].as_slice(), 1).unwrap();
        refused(
            &[text.clone(), (blob(&zeros), zeros)],
            &Store::Docker,
            1 << 19,
            "more than there is room for",
        );
        for packed in [b"BZh91AY".as_slice(), b"\xfd7zXZ\0\0"] {
            refused(&[(blob(packed), packed.to_vec())], &Store::Docker, MUCH, "bzip2 or xz");
        }
        let mut damaged = gzip(layer);
        damaged.truncate(damaged.len() - 4);
        assert!(passed(&[text, (blob(layer), damaged)], &config, &Store::Docker, MUCH).is_err());
    }

    #[test]
    fn a_layer_that_containerd_would_unpack_by_itself_is_refused() {
        for packed in [gzip(b"a bomb"), zstd::encode_all(b"a bomb".as_slice(), 1).unwrap()] {
            // Its configuration names it as it is.
            let config = configuration(&[&packed]);
            let files = [(blob(&config), config.clone()), (blob(&packed), packed)];
            let refused = passed(&files, &config, &containerd(&[]), MUCH).unwrap_err();
            assert!(refused.contains("is compressed"), "{refused}");
        }
    }

    #[test]
    fn a_configuration_with_more_layers_than_an_image_has_is_refused() {
        let layer = b"layer".as_slice();
        let config = configuration(&vec![layer; MOST_FILES + 1]);
        let files = [(blob(&config), config.clone()), (blob(layer), layer.to_vec())];
        let told = passed(&files, &config, &Store::Docker, MUCH).unwrap_err();
        assert!(told.contains("more layers than one has"), "{told}");
    }
}
