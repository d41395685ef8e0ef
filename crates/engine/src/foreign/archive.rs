//! Archives of images, on their way from an engine to another.
//!
//! One that comes from another node is passed on without names: users of this node would take it for the image that they know
//! by one, and an engine takes a name from the image that had it. So only what belongs to one image is passed on, and the lists
//! of images are written anew. One that goes to another node has no layers that are there.

mod by_configuration;
mod layout;
mod manifest;
mod timely;

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::Path;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

pub use self::by_configuration::{Store, by_configuration};
pub(crate) use self::layout::oci_layout;
use self::manifest::{Descriptor, Documents};
pub(crate) use self::timely::{PREPARED, SILENT, Timely};
use super::SHORT;

/// Bytes of a piece.
const PIECE: usize = 256 << 10;

/// Pieces that wait for whoever takes them.
pub(crate) const PIECES: usize = 8;

/// Largest list of images, and largest document of an image, bytes.
const LIST: u64 = 4 << 20;

/// Most files of an image.
const MOST_FILES: usize = 4096;

/// Where an OCI layout has its files by their content.
pub(crate) const BLOBS: &str = "blobs/sha256/";

/// Its list of images.
const INDEX: &str = "index.json";

/// What is in an archive.
enum Part<'a> {
    /// `manifest.json`, Docker's list of images.
    Manifest,
    /// `index.json`, that of the OCI.
    Index,
    /// A file of the image.
    File,
    Directory,
    /// A layer that is there under another name.
    Link(&'a str),
    /// What nobody needs, names among it.
    Other,
}

/// Whether this is the name of a file by its content.
fn is_digest(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn part<'a>(path: &str, kind: tar::EntryType, link: Option<&'a str>) -> Part<'a> {
    let of_digest = |name: &str, end: &str| name.strip_suffix(end).is_some_and(is_digest);
    let is_file = match path.split_once('/') {
        None => path == "oci-layout" || of_digest(path, ".json") || of_digest(path, ".tar"),
        Some(("blobs", _)) => path.strip_prefix(BLOBS).is_some_and(is_digest),
        // Docker's `VERSION` and `json` beside it are what an archive without a list is read by.
        Some((directory, file)) => is_digest(directory) && file == "layer.tar",
    };
    let links_to_layer = |link: &str| {
        link.strip_prefix("../").is_some_and(|link| of_digest(link, ".tar") || of_digest(link, "/layer.tar"))
    };
    match (kind, path, link) {
        (tar::EntryType::Regular, "manifest.json", _) => Part::Manifest,
        (tar::EntryType::Regular, INDEX, _) => Part::Index,
        (tar::EntryType::Regular, ..) if is_file => Part::File,
        (tar::EntryType::Symlink, _, Some(link))
            if path.ends_with("/layer.tar") && is_file && links_to_layer(link) =>
        {
            Part::Link(link)
        }
        (tar::EntryType::Directory, "blobs" | "blobs/sha256", _) => Part::Directory,
        (tar::EntryType::Directory, directory, _) if is_digest(directory) => Part::Directory,
        _ => Part::Other,
    }
}

/// Docker's list of images. An engine reads JSON without regard to case, and takes the last of two keys: nothing is passed on
/// that is not named here.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Manifest {
    config: String,
    #[serde(skip_deserializing)]
    repo_tags: (),
    layers: Vec<String>,
}

/// That of the OCI.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
}

impl Index {
    fn of(manifest: Descriptor) -> Self {
        Self { schema_version: 2, manifests: vec![manifest] }
    }
}

/// A list of images.
fn list(entry: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    entry.take(LIST + 1).read_to_end(&mut text)?;
    match text.len() as u64 > LIST {
        true => Err(io::Error::other("an archive with a longer list of images than one has")),
        false => Ok(text),
    }
}

fn not_one() -> io::Error {
    io::Error::other("an archive that is not one of one image")
}

/// Docker's list, of this image alone.
fn manifest(text: &[u8], id: &str) -> io::Result<Vec<u8>> {
    let images: Vec<Manifest> = serde_json::from_slice(text)?;
    let [image] = images.as_slice() else { return Err(not_one()) };
    if image.config != format!("{id}.json") && image.config != format!("blobs/sha256/{id}") {
        return Err(io::Error::other(format!("an archive of the image {}, not of {id}", image.config)));
    }
    let is_file = |path: &String| matches!(part(path, tar::EntryType::Regular, None), Part::File);
    if !image.layers.iter().all(is_file) {
        return Err(io::Error::other("an archive of an image whose layers are not in it"));
    }
    Ok(serde_json::to_vec(&images)?)
}

/// Adds a file, of which all must come.
fn add(to: &mut tar::Builder<impl Write>, path: &str, size: u64, from: impl Read) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(size);
    let mut counted = Counted { from, bytes: 0 };
    to.append_data(&mut header, path, &mut counted)?;
    if counted.bytes == size { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Counts what is read.
struct Counted<R> {
    from: R,
    bytes: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(into)?;
        self.bytes += read as u64;
        Ok(read)
    }
}

/// Most bytes of headers before a file: names, and what extends them. All of it is read into memory.
const HEADERS: u64 = 1 << 20;

/// Reads as long as there is something left to be read.
struct Bounded<'a, R> {
    from: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.left.get()).unwrap_or(usize::MAX));
        if most == 0 && !into.is_empty() {
            return Err(io::Error::other("an archive with longer headers than an image has"));
        }
        let read = self.from.read(&mut into[..most])?;
        self.left.set(self.left.get().saturating_sub(read as u64));
        Ok(read)
    }
}

/// What the ID of an image is the digest of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownBy {
    /// Its configuration, which names its layers as they are unpacked.
    Configuration,
    /// Its manifest, or the list of its manifests: where containerd has it.
    Manifest,
}

/// Goes through an archive of an image, within bounds: what each file of it is, its path, its size in bytes, and its content.
/// The paths of all that is taken.
fn each_part(
    archive: impl Read,
    mut take: impl FnMut(Part<'_>, &str, u64, &mut dyn Read) -> io::Result<()>,
) -> io::Result<HashSet<String>> {
    let left = Cell::new(HEADERS);
    let mut archive = tar::Archive::new(Bounded { from: archive, left: &left });
    let mut seen = HashSet::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_gnu_sparse() {
            return Err(io::Error::other("an archive with a sparse file"));
        }
        // Its content, what fills that up, and the headers before the next one.
        left.set(entry.size().saturating_add(HEADERS));
        let path = entry.path()?.to_str().unwrap_or_default().trim_end_matches('/').to_owned();
        let link = entry.link_name()?.and_then(|link| link.to_str().map(str::to_owned));
        let part = part(&path, entry.header().entry_type(), link.as_deref());
        // An engine takes one of two, and not each the same.
        if !matches!(part, Part::Other) {
            if !seen.insert(path.clone()) {
                return Err(io::Error::other(format!("an archive with two files {path}")));
            }
            if seen.len() > MOST_FILES {
                return Err(io::Error::other("an archive with more files than an image has"));
            }
        }
        take(part, &path, entry.size(), &mut entry)?;
    }
    Ok(seen)
}

/// Writes an archive of the image with this ID and nothing else, without names. An OCI layout gets its list last, once its layers
/// are known to be those of the ID, or what has the ID has come.
///
/// # Errors
/// What is read is no archive of that image alone, or one of the two cannot be read or written.
pub fn nameless(archive: impl Read, to: impl Write, id: &str, known_by: KnownBy) -> io::Result<()> {
    let id = id.strip_prefix("sha256:").unwrap_or(id);
    let mut copy = tar::Builder::new(to);
    let (mut documents, mut oci, mut has_list) = (Documents::default(), None, false);
    let mut seen = each_part(archive, |part, path, size, mut content| {
        let mut header = tar::Header::new_gnu();
        match (part, known_by) {
            // By these an engine knows no image that has another ID than its configuration has.
            (Part::Manifest | Part::Link(_), KnownBy::Manifest) | (Part::Other, _) => {}
            (Part::File, _) => match path.strip_prefix(BLOBS) {
                Some(digest) if size <= LIST => {
                    let mut text = Vec::new();
                    content.read_to_end(&mut text)?;
                    add(&mut copy, path, size, text.as_slice())?;
                    // Of what is known by its digest nothing else is read.
                    if known_by == KnownBy::Configuration || digest == id {
                        documents.keep(digest, text)?;
                    }
                }
                _ => add(&mut copy, path, size, content)?,
            },
            (Part::Directory, _) => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_mode(0o755);
                header.set_size(0);
                copy.append_data(&mut header, path, io::empty())?;
            }
            (Part::Link(link), _) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                copy.append_link(&mut header, path, link)?;
            }
            (Part::Manifest, _) => {
                let text = manifest(&list(&mut content)?, id)?;
                has_list = true;
                add(&mut copy, path, text.len() as u64, text.as_slice())?;
            }
            (Part::Index, _) => {
                let index: Index = serde_json::from_slice(&list(&mut content)?)?;
                oci = Some(<[_; 1]>::try_from(index.manifests).map_err(|_| not_one())?);
            }
        }
        Ok(())
    })?;
    if let (Some([named]), KnownBy::Manifest) = (&oci, known_by) {
        add_list(&mut copy, documents.by_digest(named, id)?)?;
        has_list = true;
    } else if let Some([named]) = oci {
        let (manifest, named) = documents.manifest(&named, id)?;
        let blob = format!("{BLOBS}{}", named.hex());
        if seen.insert(blob.clone()) {
            add(&mut copy, &blob, manifest.len() as u64, manifest.as_slice())?;
        } else if !documents.has(named.hex(), &manifest) {
            return Err(io::Error::other(format!("an archive whose file {blob} is another")));
        }
        add_list(&mut copy, named)?;
        has_list = true;
    }
    if !has_list {
        return Err(not_one());
    }
    copy.into_inner()?.flush()
}

/// Adds the list of an OCI layout with one image.
fn add_list(to: &mut tar::Builder<impl Write>, named: Descriptor) -> io::Result<()> {
    let index = serde_json::to_vec(&Index::of(named))?;
    add(to, INDEX, index.len() as u64, index.as_slice())
}

/// An archive that is passed on so, on a thread that may block; the ID of the image in it.
pub(crate) struct Passing(tokio::task::JoinHandle<io::Result<String>>);

impl Passing {
    fn begin(
        from: mpsc::Receiver<Bytes>,
        pass: impl FnOnce(&mut Incoming, Pieces) -> io::Result<String> + Send + 'static,
    ) -> (mpsc::Receiver<Bytes>, Self) {
        let (to, pieces) = mpsc::channel(PIECES);
        let passing = tokio::task::spawn_blocking(move || {
            let mut from = Incoming::new(from);
            let id = pass(&mut from, Pieces::new(to))?;
            // Who sends it is not to be interrupted by what follows the archive's end.
            io::copy(&mut from, &mut io::sink())?;
            Ok(id)
        });
        (pieces, Self(passing))
    }

    /// The ID of the image, `sha256:…`; nothing where the archive was not passed on to its end, and that is not its fault.
    pub(crate) async fn outcome(self) -> io::Result<Option<String>> {
        // An engine that has answered may neither take the rest nor say so.
        let Ok(passed) = tokio::time::timeout(SHORT, self.0).await else { return Ok(None) };
        match passed.map_err(io::Error::other).and_then(|passed| passed) {
            // Whoever takes it has a better reason.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
            passed => passed.map(Some),
        }
    }
}

/// The same for an archive in pieces; what comes of it in pieces.
pub(crate) fn without_names(
    from: mpsc::Receiver<Bytes>,
    id: String,
    known_by: KnownBy,
) -> (mpsc::Receiver<Bytes>, Passing) {
    Passing::begin(from, move |from, to| nameless(from, to, &id, known_by).map(|()| id))
}

/// [The same](by_configuration) for an archive in pieces; what comes of it in pieces.
pub(crate) fn between_stores(
    from: mpsc::Receiver<Bytes>,
    configuration: String,
    (store, room): (Store, u64),
) -> (mpsc::Receiver<Bytes>, Passing) {
    Passing::begin(from, move |from, to| by_configuration(from, to, &configuration, (&store, room)))
}

/// Copies an archive without some of its files.
pub(crate) fn without(
    archive: impl Read,
    is_left_out: impl Fn(&Path) -> bool,
    to: impl Write,
) -> io::Result<()> {
    let (mut archive, mut copy) = (tar::Archive::new(archive), tar::Builder::new(to));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if is_left_out(&path) {
            continue;
        }
        let mut header = entry.header().clone();
        copy.append_data(&mut header, path, &mut entry)?;
    }
    copy.into_inner()?.flush()
}

/// The files of layers in an archive of Docker's.
#[derive(Debug, Default)]
pub(crate) struct LayerFiles {
    /// From the lowest layer to the uppermost.
    paths: Vec<String>,
    /// Those that others are links to.
    linked: HashSet<String>,
}

impl LayerFiles {
    /// Reads an archive of one image to its end, where the list is.
    pub(crate) fn of(archive: impl Read) -> io::Result<Self> {
        let (mut archive, mut files) = (tar::Archive::new(archive), Self::default());
        for entry in archive.entries()? {
            let entry = entry?;
            let path = entry.path()?.to_str().unwrap_or_default().to_owned();
            if let Some(link) = entry.link_name()? {
                let target = link.to_str().and_then(|link| link.strip_prefix("../"));
                files.linked.extend(target.map(str::to_owned));
            } else if path == "manifest.json" {
                let images: Vec<Manifest> = serde_json::from_reader(entry.take(LIST))?;
                let [image] = <[_; 1]>::try_from(images).map_err(|_| not_one())?;
                files.paths = image.layers;
            }
        }
        Ok(files)
    }

    /// The files of the lowest layers, so many, which no other layer needs.
    pub(crate) fn lowest(&self, layers: usize) -> HashSet<String> {
        let (lowest, others) = self.paths.split_at(layers.min(self.paths.len()));
        let is_free = |path: &&String| !others.contains(path) && !self.linked.contains(*path);
        lowest.iter().filter(is_free).cloned().collect()
    }
}

/// Reads what comes in pieces.
pub(crate) struct Incoming {
    from: mpsc::Receiver<Bytes>,
    piece: Bytes,
}

impl Incoming {
    pub(crate) fn new(from: mpsc::Receiver<Bytes>) -> Self {
        Self { from, piece: Bytes::new() }
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.from.blocking_recv() {
                Some(piece) => self.piece = piece,
                None => return Ok(0),
            }
        }
        let taken = self.piece.split_to(self.piece.len().min(into.len()));
        into[..taken.len()].copy_from_slice(&taken);
        Ok(taken.len())
    }
}

/// Sends what is written, in pieces.
pub(crate) struct Pieces {
    to: mpsc::Sender<Bytes>,
    piece: Vec<u8>,
}

impl Pieces {
    pub(crate) fn new(to: mpsc::Sender<Bytes>) -> Self {
        Self { to, piece: Vec::with_capacity(PIECE) }
    }
}

impl Write for Pieces {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let taken = data.len().min(PIECE - self.piece.len());
        self.piece.extend(data.iter().take(taken));
        if self.piece.len() == PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.to.blocking_send(piece.into()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::image::Digest;

    const OCI: &str = "application/vnd.oci.image.manifest.v1+json";

    pub(super) fn archive(entries: &[(&str, &str)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (name, content) in entries {
            let mut header = tar::Header::new_gnu();
            match content.strip_prefix("-> ") {
                Some(link) => {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_size(0);
                    archive.append_link(&mut header, name, link).unwrap();
                }
                None => {
                    header.set_size(content.len() as u64);
                    archive.append_data(&mut header, name, content.as_bytes()).unwrap();
                }
            }
        }
        archive.into_inner().unwrap()
    }

    fn passed(entries: &[(&str, &str)], id: &str) -> io::Result<Vec<(String, String)>> {
        passed_as(entries, id, KnownBy::Configuration)
    }

    fn passed_as(entries: &[(&str, &str)], id: &str, known_by: KnownBy) -> io::Result<Vec<(String, String)>> {
        let mut copy = Vec::new();
        nameless(archive(entries).as_slice(), &mut copy, id, known_by)?;
        let mut copy = tar::Archive::new(copy.as_slice());
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            (path, content)
        };
        Ok(copy.entries().unwrap().map(read).collect())
    }

    #[test]
    fn an_image_of_docker_comes_without_a_name_and_nothing_else_with_it() {
        let (id, layer) = ("0a".repeat(32), "0b".repeat(32));
        let manifest = format!(
            r#"[{{"Config":"{id}.json","RepoTags":["debian:latest"],"Layers":["{layer}/layer.tar"]}}]"#
        );
        let (config, tar, link) =
            (format!("{id}.json"), format!("{layer}/layer.tar"), format!("{id}/layer.tar"));
        let to_layer = format!("-> ../{layer}/layer.tar");
        let entries = [
            (&*tar, "layer"),
            (&*link, &*to_layer),
            (&*config, "{}"),
            ("manifest.json", &*manifest),
            ("repositories", r#"{"debian":{"latest":"x"}}"#),
            ("x/manifest.json", "[]"),
            ("x/y", "z"),
        ];
        let found = passed(&entries, &format!("sha256:{id}")).unwrap();
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, [&*tar, &*link, &*config, "manifest.json"]);
        let list: Value = serde_json::from_str(&found[3].1).unwrap();
        assert_eq!((&list[0]["RepoTags"], &list[0]["Layers"][0]), (&Value::Null, &Value::from(tar.clone())));

        // Nor by keys in another case.
        let hidden =
            manifest.replace(r#""RepoTags""#, r#""repotags""#).replace("}]", r#","config":"x.json"}]"#);
        let found = passed(&[("manifest.json", &hidden)], &id).unwrap();
        assert!(!found[0].1.contains("debian") && !found[0].1.contains("x.json"), "{found:?}");

        // Another image, more than one, or two lists.
        let other = format!("sha256:{}", "0c".repeat(32));
        assert!(passed(&entries, &other).unwrap_err().to_string().contains("not of 0c"));
        let two = manifest.replace("}]", "},{}]");
        assert!(passed(&[("manifest.json", &two)], &id).is_err());
        assert!(passed(&[("manifest.json", &manifest), ("manifest.json", &manifest)], &id).is_err());
        // Links that lead elsewhere are left out.
        for to in ["-> /etc/shadow", "-> ../../x", "-> ../x/layer.tar"] {
            let found = passed(&[(&link, to), ("manifest.json", &manifest)], &id).unwrap();
            assert_eq!(found.len(), 1, "{to}: {found:?}");
        }
        // By these Docker would read an archive without a list, whatever images that has.
        let old =
            [(&*format!("{layer}/json"), "{}"), (&*format!("{layer}/VERSION"), "1.0"), (&*tar, "layer")];
        assert!(passed(&old, &id).unwrap_err().to_string().contains("not one of one image"));
    }

    #[test]
    fn an_image_of_the_oci_comes_without_a_name() {
        let digest = |text: &str| Digest::of(text.as_bytes()).to_string();
        let blob = |text: &str| format!("{BLOBS}{}", Digest::of(text.as_bytes()).hex());
        let config = json!({ "rootfs": { "diff_ids": [digest("layer")] } }).to_string();
        let part = |text: &str| json!({ "mediaType": "m", "digest": digest(text), "size": 1 });
        let manifest = |layer: &str| {
            json!({ "schemaVersion": 2, "config": part(&config), "layers": [part(layer)] }).to_string()
        };
        let list_of = |manifest: &str| {
            let named = format!(r#""mediaType":"{OCI}","digest":"{}","size":1"#, digest(manifest));
            let more = r#""Annotations":{"org.opencontainers.image.ref.name":"debian"}"#;
            format!(
                r#"{{"schemaVersion":2,"manifests":[{{{named},{more}}}],"annotations":{{}},"Manifests":[{{}},{{}}]}}"#
            )
        };
        let passed_with = |manifest: &str, twice: &str| {
            let list = list_of(manifest);
            let (of_manifest, of_config, layer) = (blob(manifest), blob(&config), blob("layer"));
            let entries = [
                ("index.json", &*list),
                ("oci-layout", "{}"),
                (&of_manifest, manifest),
                (&layer, "layer"),
                (&of_config, &config),
                (twice, "x"),
            ];
            passed(&entries, &digest(&config))
        };
        let right = manifest("layer");
        let found = passed_with(&right, "index").unwrap();
        // The list comes last, when it is known what it lists, and names what has just come before it.
        let [.., (path, made), (list, index)] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((list.as_str(), path), ("index.json", &blob(made)));
        let told: Value = serde_json::from_str(index).unwrap();
        let named = json!({ "mediaType": OCI, "digest": digest(made), "size": made.len() });
        assert_eq!(told, json!({ "schemaVersion": 2, "manifests": [named] }));

        // Nothing is in its place.
        let (path, right) = (path.clone(), manifest("layer"));
        let (list, of_manifest, of_config) = (list_of(&right), blob(&right), blob(&config));
        let entries: [(&str, &str); 4] =
            [("index.json", &list), (&of_manifest, &right), (&of_config, &config), (&path, "{}")];
        let told = passed(&entries, &digest(&config)).unwrap_err().to_string();
        assert!(told.contains("is another"), "{told}");

        // Under an ID that is trusted comes nothing but its layers.
        let told = passed_with(&manifest("evil"), "index").unwrap_err().to_string();
        assert!(told.contains("other layers than its image has"), "{told}");
        for twice in [blob("layer"), "oci-layout".to_owned(), "index.json".to_owned()] {
            let told = passed_with(&right, &twice).unwrap_err().to_string();
            assert!(told.contains("two files"), "{told}");
        }
    }

    #[test]
    fn an_image_that_containerd_has_comes_as_it_is_and_without_a_name() {
        const LIST: &str = "application/vnd.oci.image.index.v1+json";
        let digest = |text: &str| Digest::of(text.as_bytes()).to_string();
        let blob = |text: &str| format!("{BLOBS}{}", Digest::of(text.as_bytes()).hex());
        let [platforms, manifest, layer] = [r#"{"manifests":[]}"#, r#"{"layers":[]}"#, "layer"];
        let index = |kind: &str, of: &str| {
            let named = json!({ "mediaType": kind, "digest": digest(of), "size": 7,
                "annotations": { "io.containerd.image.name": "docker.io/library/debian:latest" } });
            json!({ "schemaVersion": 2, "manifests": [named] }).to_string()
        };
        let (of_platforms, of_manifest, of_layer) = (blob(platforms), blob(manifest), blob(layer));
        let passed = |index: &str, id: &str| {
            let entries = [
                (of_platforms.as_str(), platforms),
                (&of_manifest, manifest),
                (&of_layer, layer),
                ("index.json", index),
                ("manifest.json", r#"[{"Config":"x","RepoTags":["debian:latest"],"Layers":[]}]"#),
                ("oci-layout", "{}"),
            ];
            passed_as(&entries, &digest(id), KnownBy::Manifest).map_err(|error| error.to_string())
        };
        let found = passed(&index(LIST, platforms), platforms).unwrap();
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, [&of_platforms, &of_manifest, &of_layer, "oci-layout", "index.json"]);
        let named = json!({ "mediaType": LIST, "digest": digest(platforms), "size": platforms.len() });
        let told: Value = serde_json::from_str(&found[4].1).unwrap();
        assert_eq!(told, json!({ "schemaVersion": 2, "manifests": [named] }));
        assert!(passed(&index(OCI, manifest), manifest).is_ok());
        // Another image, something that is none, or one that has not come.
        let refused = |index: &str, id: &str, said: &str| {
            let told = passed(index, id).unwrap_err();
            assert!(told.contains(said), "{told}");
        };
        refused(&index(OCI, manifest), platforms, "not of ");
        refused(&index("application/vnd.oci.image.config.v1+json", manifest), manifest, "of the type");
        refused(&index(OCI, "other"), "other", "without the document");
        refused(r#"{"schemaVersion":2,"manifests":[]}"#, manifest, "not one of one image");
    }

    #[test]
    fn an_archive_whose_headers_would_fill_the_memory_is_not_read() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let endless = header.as_bytes().chain(io::repeat(b'a'));
        let told = nameless(endless, io::sink(), "x", KnownBy::Configuration).unwrap_err().to_string();
        assert!(told.contains("longer headers"), "{told}");
        header.set_entry_type(tar::EntryType::GNUSparse);
        header.set_cksum();
        assert!(nameless(header.as_bytes().as_slice(), io::sink(), "x", KnownBy::Configuration).is_err());
    }

    #[test]
    fn an_archive_that_is_cut_off_is_none() {
        let blob = format!("{BLOBS}{}", "0a".repeat(32));
        let whole = archive(&[(&blob, &"x".repeat(2000))]);
        assert!(nameless(&whole[..1000], io::sink(), "x", KnownBy::Configuration).is_err());
    }

    /// The names of what is in an archive.
    pub(super) fn names(archive: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(archive);
        let name =
            |entry: io::Result<tar::Entry<'_, _>>| entry.unwrap().path().unwrap().display().to_string();
        archive.entries().unwrap().map(name).collect()
    }

    #[test]
    fn what_is_left_out_is_not_in_the_copy_and_all_else_is() {
        let whole = archive(&[("oci-layout", "1"), ("x/aa", "2"), ("x/bb", "3"), ("aa", "-> x/aa")]);
        let mut rest = Vec::new();
        without(whole.as_slice(), |path| path == Path::new("x/aa"), &mut rest).unwrap();
        assert_eq!(names(&rest), ["oci-layout", "x/bb", "aa"]);
        let mut rest = tar::Archive::new(rest.as_slice());
        let link = rest.entries().unwrap().last().unwrap().unwrap();
        assert_eq!(link.link_name().unwrap().unwrap(), Path::new("x/aa"));
    }

    #[test]
    fn the_files_of_the_lowest_layers_are_found_but_those_that_others_need() {
        let list = |layers: &[&str]| {
            serde_json::json!([{"Config": "c", "RepoTags": ["x:1"], "Layers": layers}]).to_string()
        };
        let lowest = |entries: &[(&str, &str)], layers: usize| {
            let files = LayerFiles::of(archive(entries).as_slice()).unwrap();
            let mut lowest: Vec<_> = files.lowest(layers).into_iter().collect();
            lowest.sort();
            lowest
        };
        let plain = list(&["c/layer.tar", "a/layer.tar", "b/layer.tar"]);
        let entries = [("a/layer.tar", "1"), ("b/layer.tar", "2"), ("manifest.json", &*plain)];
        assert_eq!(lowest(&entries, 0), [""; 0]);
        assert_eq!(lowest(&entries, 2), ["a/layer.tar", "c/layer.tar"]);
        assert_eq!(lowest(&entries, 9).len(), 3);
        // The same content further up, as a link or as the same file.
        let entries = [("b/layer.tar", "-> ../a/layer.tar"), ("manifest.json", &*plain)];
        assert_eq!(lowest(&entries, 2), ["c/layer.tar"]);
        let twice = list(&["a/layer.tar", "b/layer.tar", "a/layer.tar"]);
        assert_eq!(lowest(&[("manifest.json", &twice)], 2), ["b/layer.tar"]);
        // Not of one image, or cut off.
        let two = "[{\"Config\":\"c\",\"Layers\":[]},{\"Config\":\"c\",\"Layers\":[]}]";
        assert!(LayerFiles::of(archive(&[("manifest.json", two)]).as_slice()).is_err());
        let whole = archive(&[("a/layer.tar", "1"), ("manifest.json", &*plain)]);
        assert!(LayerFiles::of(&whole[..600]).is_err());
    }

    #[tokio::test]
    async fn pieces_are_all_that_was_written_in_order() {
        let (to, mut from) = mpsc::channel(1);
        let data: Vec<u8> = (0..3 * PIECE / 2).map(|n| u8::try_from(n % 251).unwrap()).collect();
        let written = data.clone();
        let writing = tokio::task::spawn_blocking(move || {
            let mut pieces = Pieces::new(to);
            pieces.write_all(&written).unwrap();
            pieces.flush().unwrap();
        });
        let mut all = Vec::new();
        while let Some(piece) = from.recv().await {
            assert!(piece.len() <= PIECE);
            all.extend_from_slice(&piece);
        }
        writing.await.unwrap();
        assert_eq!(all, data);
    }
}
