//! Imports OCI archives and layout directories (image-spec v1.1, image-layout.md).
//!
//! ```text
//! oci-layout, index.json ──> [ index ──> ] manifest ──> config   (env, command, diff ids)
//!                                              └──────> layers   (tar, plain or compressed)
//! ```
//!
//! Of an image that is marked for crossing (`platforms.rs`) the blobs of its other platforms are taken as well.
//!
//! An archive is not extracted: its members are found by one pass over the tar's headers, and
//! read where they are. Every document and layer is checked against the size and digest of what
//! refers to it, every unpacked layer against its diff id.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use godwit_isa_plan::image::{CROSSING, MARKED, MODULES};
use oci_spec::OciSpecError;
use oci_spec::image::{
    Descriptor, Digest as OciDigest, ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout, Os,
};

use super::archive::{MemberKind, Reader, TarFault};
use super::platforms::{PlatformLayers, machine_of};
use super::{ArchiveFault, Digest, Image, ImageConfig, ImageError, LayerFault, Store, machine_architecture};
use crate::rootfs::MAX_LAYERS;

/// Largest index, manifest or configuration that is read, in bytes: what registries allow.
pub(super) const MAX_DOCUMENT: u64 = 4 << 20;
/// How deep indexes may be nested; real ones are nested once.
const MAX_NESTING: usize = 4;
/// Annotations that hold an image's name, the general one first.
const NAME_ANNOTATIONS: [&str; 2] = ["org.opencontainers.image.ref.name", "io.containerd.image.name"];
/// Media types of manifests, OCI's and Docker's of the same form.
const MANIFEST_TYPES: [&str; 2] =
    ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"];
/// Media types of indexes.
const INDEX_TYPES: [&str; 2] =
    ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"];
/// Media types of configurations.
const CONFIG_TYPES: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];
/// Media types of layers; which compression is used is told by the first bytes.
const LAYER_TYPES: [&str; 8] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
];

/// An image that was taken from an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The image.
    pub image: Image,
    /// The digest of what the archive's own index refers to: of the image's index, if that has several platforms.
    pub digest: Digest,
    /// The whole name that it has there, such as `docker.io/library/redis:7`; a tag alone is none.
    pub name: Option<String>,
}

impl Store {
    /// Imports the image for this machine from an OCI archive or layout directory, and unpacks
    /// its layers. When there are several images, `PATH:NAME` names one.
    pub fn import_oci(&self, path: &Path) -> Result<Image, ImageError> {
        self.import(path, false).map(|imported| imported.image)
    }

    /// As [`Store::import_oci`], with what the image is known by, and with its neutral modules.
    pub fn import_known(&self, path: &Path) -> Result<Imported, ImageError> {
        self.import(path, true)
    }

    fn import(&self, path: &Path, with_modules: bool) -> Result<Imported, ImageError> {
        let (location, wanted) = split_reference(path);
        let fault = |fault| ImageError::Archive { path: path.to_path_buf(), fault };
        let layout = Layout::open(&location).map_err(fault)?;
        let found = choose(&layout, wanted.as_deref()).map_err(fault)?;
        found.check_layers().map_err(fault)?;
        let others = other_platforms(&layout, &found).map_err(fault)?;
        let (diff_ids, layers) = (found.config.rootfs().diff_ids(), found.manifest.layers());
        let mut digests = Vec::with_capacity(layers.len());
        for (descriptor, diff_id) in layers.iter().zip(diff_ids) {
            let diff_id: Digest = diff_id
                .parse()
                .map_err(|_| fault(ArchiveFault::DigestAlgorithm { digest: diff_id.clone() }))?;
            digests.push(self.import_layer(path, &layout, descriptor, &diff_id)?);
        }
        let neutral = if with_modules { self.import_modules(path, &layout, &found, &others)? } else { None };
        let mut platforms = Vec::with_capacity(others.len());
        for (machine, other) in others {
            let layers = other.manifest.layers().iter();
            platforms.push(PlatformLayers {
                machine: machine.to_owned(),
                layers: layers
                    .map(|layer| self.import_blob(path, &layout, "layer", layer))
                    .collect::<Result<_, _>>()?,
                id: Some(sha256(other.manifest.config().digest()).map_err(fault)?),
            });
        }
        let image = Image {
            layers: digests,
            config: run_config(&found.config),
            architecture: found.config.architecture().to_string(),
            reference: found.name.unwrap_or_else(|| path.display().to_string()),
            id: Some(sha256(found.manifest.config().digest()).map_err(fault)?),
            platforms,
            neutral,
        };
        Ok(Imported { image, digest: sha256(found.top.digest()).map_err(fault)?, name: found.whole_name })
    }

    fn import_layer(
        &self,
        path: &Path,
        layout: &Layout,
        descriptor: &Descriptor,
        diff_id: &Digest,
    ) -> Result<Digest, ImageError> {
        let fault = |fault| ImageError::Archive { path: path.to_path_buf(), fault };
        let digest = self.import_blob(path, layout, "layer", descriptor)?;
        match self.unpack_verified(&digest, diff_id) {
            Ok(()) => Ok(digest),
            Err(ImageError::Layer { digest: layer, fault: LayerFault::DiffId { expected, found } }) => {
                Err(fault(ArchiveFault::DiffId { layer, expected, found }))
            }
            Err(ImageError::Layer { digest: layer, fault: source }) => {
                Err(fault(ArchiveFault::Layer { layer, fault: source }))
            }
            Err(other) => Err(other),
        }
    }

    /// Takes a blob, of a layer say, verified by its digest, if it is not here.
    pub(super) fn import_blob(
        &self,
        path: &Path,
        layout: &Layout,
        what: &'static str,
        descriptor: &Descriptor,
    ) -> Result<Digest, ImageError> {
        let fault = |fault| ImageError::Archive { path: path.to_path_buf(), fault };
        let digest = sha256(descriptor.digest()).map_err(fault)?;
        let mut blob = layout.blob(what, descriptor).map_err(fault)?;
        if !self.has_blob(&digest) {
            let mut writer = self.new_blob_writer()?;
            let mut buffer = vec![0; 256 << 10];
            loop {
                let read = blob.read(&mut buffer).map_err(|source| {
                    fault(ArchiveFault::Read { member: format!("{what} {digest}"), source })
                })?;
                if read == 0 {
                    break;
                }
                io::Write::write_all(&mut writer, &buffer[..read])
                    .map_err(|error| self.fault(&format!("write {what} {digest}"), error))?;
            }
            writer.finish_as(&digest).map_err(|error| match error {
                ImageError::Mismatch { expected, received, .. } => {
                    fault(ArchiveFault::BlobDigest { what, expected, found: received })
                }
                other => other,
            })?;
        }
        Ok(digest)
    }
}

/// An image that was found in a layout.
pub(super) struct Found {
    /// What refers to its manifest.
    pub(super) descriptor: Descriptor,
    pub(super) manifest: ImageManifest,
    config: ImageConfiguration,
    /// What the layout's index refers to, at or above the manifest.
    top: Descriptor,
    name: Option<String>,
    whole_name: Option<String>,
    /// What refers to the index that its manifest is in, below the layout's own.
    pub(super) index: Option<Descriptor>,
    /// The manifest of neutral modules in the same index.
    pub(super) modules: Option<Descriptor>,
    /// Manifests beside it in its index that are marked as the same image for other platforms.
    beside: Vec<Descriptor>,
}

impl Found {
    /// The instruction set and the system that it is for.
    fn platform(&self) -> (String, String) {
        (self.config.architecture().to_string(), self.config.os().to_string())
    }

    /// Its layers are ones that can be unpacked, as many as the configuration has.
    pub(super) fn check_layers(&self) -> Result<(), ArchiveFault> {
        let (diff_ids, layers) = (self.config.rootfs().diff_ids().len(), self.manifest.layers());
        if diff_ids != layers.len() {
            return Err(ArchiveFault::LayerCount { diff_ids, layers: layers.len() });
        }
        if layers.len() > MAX_LAYERS {
            return Err(ArchiveFault::TooManyLayers { layers: layers.len(), limit: MAX_LAYERS });
        }
        layers.iter().try_for_each(|layer| check_type("layer", layer.media_type(), &LAYER_TYPES))
    }
}

/// `PATH:NAME` when there is no file of that whole name.
pub(super) fn split_reference(path: &Path) -> (PathBuf, Option<String>) {
    let text = path.to_str().filter(|_| !path.exists());
    match text.and_then(|text| text.rsplit_once(':')) {
        Some((location, name)) if !name.contains('/') && Path::new(location).exists() => {
            (location.into(), Some(name.into()))
        }
        _ => (path.to_path_buf(), None),
    }
}

/// Finds the one image for this machine.
pub(super) fn choose(layout: &Layout, wanted: Option<&str>) -> Result<Found, ArchiveFault> {
    let index: ImageIndex =
        parse("index.json", ImageIndex::from_reader(&layout.document("index.json")?[..]))?;
    let mut named: Vec<(Option<String>, &Descriptor)> =
        index.manifests().iter().map(|descriptor| (name_of(descriptor), descriptor)).collect();
    let names = |named: &[(Option<String>, &Descriptor)]| {
        let names: Vec<String> = named
            .iter()
            .map(|(name, descriptor)| name.clone().unwrap_or_else(|| descriptor.digest().to_string()))
            .collect();
        names.join(", ")
    };
    if let Some(wanted) = wanted {
        let all = names(&named);
        named.retain(|(name, descriptor)| {
            name.as_deref() == Some(wanted) || descriptor.digest().to_string() == wanted
        });
        if named.is_empty() {
            return Err(ArchiveFault::NoSuchReference { wanted: wanted.to_owned(), names: all });
        }
    }
    let mut passed = Passed::default();
    let mut found: Vec<(Found, (Option<String>, &Descriptor))> = Vec::new();
    for (name, descriptor) in named {
        if found.iter().any(|(_, (_, other))| other.digest() == descriptor.digest()) {
            continue;
        }
        if let Some(mut image) = find(layout, descriptor, 0, &mut passed)? {
            image.name.clone_from(&name);
            image.whole_name = whole_name_of(descriptor);
            image.top = descriptor.clone();
            if image.descriptor.digest() == descriptor.digest() {
                image.beside = marked_beside(&index, descriptor);
                image.beside.retain(|other| name_of(other) == name);
            }
            found.push((image, (name, descriptor)));
        }
    }
    if found.len() > 1 {
        let named: Vec<_> = found.into_iter().map(|(_, named)| named).collect();
        return Err(ArchiveFault::Several { names: names(&named) });
    }
    match found.pop() {
        Some((image, _)) => Ok(image),
        None if passed.others.is_empty() => Err(ArchiveFault::Empty),
        None => {
            let mut others = passed.others;
            others.sort();
            others.dedup();
            Err(ArchiveFault::Architecture { found: others.join(", "), wanted: machine_architecture() })
        }
    }
}

/// What a search has passed over.
#[derive(Default)]
struct Passed {
    /// Machines of the images that are for others.
    others: Vec<String>,
    /// Documents that led to no image: an archive may refer to the same ones again and again.
    documents: HashSet<OciDigest>,
}

/// The first image for this machine at or below a descriptor; the rest goes to `passed`.
fn find(
    layout: &Layout,
    descriptor: &Descriptor,
    depth: usize,
    passed: &mut Passed,
) -> Result<Option<Found>, ArchiveFault> {
    if let Some(platform) = descriptor.platform() {
        let (architecture, system) = (platform.architecture().to_string(), platform.os().to_string());
        if architecture == "unknown" {
            // Attestations are stored so.
            return Ok(None);
        }
        if architecture != machine_architecture() || system != "linux" {
            passed.others.push(platform_name(&architecture, &system));
            return Ok(None);
        }
    }
    if passed.documents.contains(descriptor.digest()) {
        return Ok(None);
    }
    let media_type = descriptor.media_type().to_string();
    if INDEX_TYPES.contains(&media_type.as_str()) {
        if depth == MAX_NESTING {
            return Err(ArchiveFault::Nested { limit: MAX_NESTING });
        }
        let bytes = layout.referred("index", descriptor)?;
        let index = parse(&format!("index {}", descriptor.digest()), ImageIndex::from_reader(&bytes[..]))?;
        for inner in index.manifests() {
            if let Some(mut found) = find(layout, inner, depth + 1, passed)? {
                if found.descriptor.digest() == inner.digest() {
                    found.beside = marked_beside(&index, inner);
                    found.modules = modules_beside(&index, inner);
                    found.index = Some(descriptor.clone());
                }
                return Ok(Some(found));
            }
        }
        passed.documents.insert(descriptor.digest().clone());
        return Ok(None);
    }
    let found = read_image(layout, descriptor)?;
    let (architecture, system) = found.platform();
    if architecture != machine_architecture() || system != "linux" {
        passed.others.push(platform_name(&architecture, &system));
        passed.documents.insert(descriptor.digest().clone());
        return Ok(None);
    }
    Ok(Some(found))
}

/// The image of a manifest.
fn read_image(layout: &Layout, descriptor: &Descriptor) -> Result<Found, ArchiveFault> {
    check_type("manifest", descriptor.media_type(), &MANIFEST_TYPES)?;
    let bytes = layout.referred("manifest", descriptor)?;
    let manifest =
        parse(&format!("manifest {}", descriptor.digest()), ImageManifest::from_reader(&bytes[..]))?;
    check_type("configuration", manifest.config().media_type(), &CONFIG_TYPES)?;
    let bytes = layout.referred("configuration", manifest.config())?;
    let name = format!("configuration {}", manifest.config().digest());
    let config = parse(&name, ImageConfiguration::from_reader(&bytes[..]))?;
    let (own, top) = (descriptor.clone(), descriptor.clone());
    Ok(Found {
        descriptor: own,
        manifest,
        config,
        top,
        name: None,
        whole_name: None,
        index: None,
        modules: None,
        beside: Vec::new(),
    })
}

/// Of an index with an image, the manifests that are marked as the same image for other platforms.
fn marked_beside(index: &ImageIndex, own: &Descriptor) -> Vec<Descriptor> {
    let all = is_marked(index.annotations(), CROSSING);
    if !all && !is_marked(own.annotations(), CROSSING) {
        return Vec::new();
    }
    let beside = index.manifests().iter().filter(|other| *other != own);
    beside.filter(|other| all || is_marked(other.annotations(), CROSSING)).cloned().collect()
}

/// Of an index with an image that is marked for crossing, the manifest of its neutral modules.
fn modules_beside(index: &ImageIndex, own: &Descriptor) -> Option<Descriptor> {
    if !is_marked(index.annotations(), CROSSING) && !is_marked(own.annotations(), CROSSING) {
        return None;
    }
    index.manifests().iter().find(|other| is_marked(other.annotations(), MODULES)).cloned()
}

fn is_marked(annotations: &Option<HashMap<String, String>>, key: &str) -> bool {
    annotations.as_ref().and_then(|all| all.get(key)).is_some_and(|value| value == MARKED)
}

/// The images beside one for the other machines that services cross to, one for each.
fn other_platforms(layout: &Layout, own: &Found) -> Result<Vec<(&'static str, Found)>, ArchiveFault> {
    let mut found: Vec<(&'static str, Found)> = Vec::new();
    for descriptor in &own.beside {
        // One that does not say for what it is counts for nothing: so no more are read than there are machines.
        let Some(platform) = descriptor.platform().as_ref().filter(|platform| *platform.os() == Os::Linux)
        else {
            continue;
        };
        let said = platform.architecture().to_string();
        let Some(machine) = machine_of(&said) else { continue };
        if said == own.platform().0 || found.iter().any(|(other, _)| *other == machine) {
            continue;
        }
        let image = read_image(layout, descriptor)?;
        let (architecture, system) = image.platform();
        if architecture != said || system != "linux" {
            return Err(ArchiveFault::OtherPlatform { said, found: platform_name(&architecture, &system) });
        }
        image.check_layers()?;
        found.push((machine, image));
    }
    Ok(found)
}

fn platform_name(architecture: &str, system: &str) -> String {
    if system == "linux" { architecture.to_owned() } else { format!("{system}/{architecture}") }
}

fn name_of(descriptor: &Descriptor) -> Option<String> {
    let annotations = descriptor.annotations().as_ref()?;
    NAME_ANNOTATIONS.iter().find_map(|key| annotations.get(*key)).filter(|name| !name.is_empty()).cloned()
}

/// A name with more than a tag, which is all that some programs put there.
fn whole_name_of(descriptor: &Descriptor) -> Option<String> {
    let annotations = descriptor.annotations().as_ref()?;
    let mut names = NAME_ANNOTATIONS.iter().rev().filter_map(|key| annotations.get(*key));
    names.find(|name| name.contains([':', '/'])).cloned()
}

pub(super) fn check_type(what: &'static str, found: &MediaType, known: &[&str]) -> Result<(), ArchiveFault> {
    let media_type = found.to_string();
    if known.contains(&media_type.as_str()) {
        Ok(())
    } else {
        Err(ArchiveFault::MediaType { what, media_type })
    }
}

pub(super) fn sha256(digest: &OciDigest) -> Result<Digest, ArchiveFault> {
    let text = digest.to_string();
    text.parse().map_err(|_| ArchiveFault::DigestAlgorithm { digest: text })
}

pub(super) fn parse<T>(member: &str, parsed: Result<T, OciSpecError>) -> Result<T, ArchiveFault> {
    parsed.map_err(|source| ArchiveFault::Document { member: member.to_owned(), source })
}

fn run_config(configuration: &ImageConfiguration) -> ImageConfig {
    let Some(config) = configuration.config() else { return ImageConfig::default() };
    let list = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut exposed_ports = list(config.exposed_ports());
    exposed_ports.sort();
    ImageConfig {
        env: list(config.env()),
        entrypoint: list(config.entrypoint()),
        cmd: list(config.cmd()),
        user: text(config.user()),
        working_dir: text(config.working_dir()),
        exposed_ports,
        labels: config.labels().clone().unwrap_or_default().into_iter().collect(),
        stop_signal: text(config.stop_signal()),
    }
}

/// What a file of a layout holds, and its size in bytes.
type Content = (Box<dyn Read>, u64);

/// The files of a layout, wherever they are.
pub(super) enum Layout {
    Directory(PathBuf),
    Archive {
        file: File,
        /// Offset and size of each member.
        members: HashMap<String, (u64, u64)>,
    },
}

impl Layout {
    /// Opens a layout and checks that it says it is one.
    pub(super) fn open(path: &Path) -> Result<Self, ArchiveFault> {
        let read = |source| ArchiveFault::Read { member: "it".into(), source };
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ArchiveFault::Missing),
            Err(error) => return Err(read(error)),
        };
        let layout = if metadata.is_dir() {
            Self::Directory(path.to_path_buf())
        } else if metadata.is_file() {
            let file = File::open(path).map_err(read)?;
            let members = members(file.try_clone().map_err(read)?, metadata.len())?;
            Self::Archive { file, members }
        } else {
            return Err(ArchiveFault::NotTar);
        };
        if layout.member("index.json")?.is_none() && layout.member("manifest.json")?.is_some() {
            return Err(ArchiveFault::DockerArchive);
        }
        let version = parse("oci-layout", OciLayout::from_reader(&layout.document("oci-layout")?[..]))?;
        if version.image_layout_version().starts_with("1.") {
            Ok(layout)
        } else {
            Err(ArchiveFault::LayoutVersion { version: version.image_layout_version().clone() })
        }
    }

    /// One file of the layout with its size; none when it is not there.
    fn member(&self, name: &str) -> Result<Option<Content>, ArchiveFault> {
        let read = |source| ArchiveFault::Read { member: name.to_owned(), source };
        match self {
            Self::Directory(directory) => {
                // A FIFO would wait for a writer.
                let opened =
                    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(directory.join(name));
                let file = match opened {
                    Ok(file) => file,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(read(error)),
                };
                let metadata = file.metadata().map_err(read)?;
                if !metadata.is_file() {
                    return Err(read(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "it is not a regular file",
                    )));
                }
                Ok(Some((Box::new(file), metadata.len())))
            }
            Self::Archive { file, members } => {
                let Some((offset, size)) = members.get(name) else { return Ok(None) };
                let mut file = file.try_clone().map_err(read)?;
                file.seek(SeekFrom::Start(*offset)).map_err(read)?;
                Ok(Some((Box::new(file.take(*size)), *size)))
            }
        }
    }

    /// A document of the layout that nothing refers to.
    fn document(&self, name: &'static str) -> Result<Vec<u8>, ArchiveFault> {
        let (reader, bytes) = self.member(name)?.ok_or(ArchiveFault::NoMember { member: name })?;
        read_document(name, reader, bytes)
    }

    /// The document a descriptor refers to, verified.
    pub(super) fn referred(
        &self,
        what: &'static str,
        descriptor: &Descriptor,
    ) -> Result<Vec<u8>, ArchiveFault> {
        let expected = sha256(descriptor.digest())?;
        let reader = self.blob(what, descriptor)?;
        let content = read_document(&format!("{what} {expected}"), reader, descriptor.size())?;
        let found = Digest::of(&content);
        if found == expected { Ok(content) } else { Err(ArchiveFault::BlobDigest { what, expected, found }) }
    }

    /// The blob a descriptor refers to; its size is verified, its digest not yet.
    pub(super) fn blob(
        &self,
        what: &'static str,
        descriptor: &Descriptor,
    ) -> Result<Box<dyn Read>, ArchiveFault> {
        let digest = sha256(descriptor.digest())?;
        let Some((reader, found)) = self.member(&format!("blobs/sha256/{}", digest.hex()))? else {
            return Err(ArchiveFault::BlobMissing { digest: digest.to_string(), what });
        };
        if found == descriptor.size() {
            Ok(reader)
        } else {
            let (digest, expected) = (digest.to_string(), descriptor.size());
            Err(ArchiveFault::BlobSize { what, digest, expected, found })
        }
    }
}

fn read_document(member: &str, reader: impl Read, bytes: u64) -> Result<Vec<u8>, ArchiveFault> {
    if bytes > MAX_DOCUMENT {
        return Err(ArchiveFault::DocumentTooLarge { member: member.to_owned(), bytes, limit: MAX_DOCUMENT });
    }
    let mut content = Vec::new();
    reader
        .take(MAX_DOCUMENT)
        .read_to_end(&mut content)
        .map_err(|source| ArchiveFault::Read { member: member.to_owned(), source })?;
    Ok(content)
}

/// Where each file of a tar is.
fn members(mut file: File, length: u64) -> Result<HashMap<String, (u64, u64)>, ArchiveFault> {
    let read = |source| ArchiveFault::Read { member: "it".into(), source };
    let mut magic = Vec::new();
    (&mut file).take(4).read_to_end(&mut magic).map_err(read)?;
    if magic.starts_with(&[0x1f, 0x8b]) {
        return Err(ArchiveFault::Compressed { with: "gzip" });
    }
    if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return Err(ArchiveFault::Compressed { with: "zstd" });
    }
    file.seek(SeekFrom::Start(0)).map_err(read)?;
    let mut reader = Reader::new(BufReader::new(file));
    let mut members = HashMap::new();
    while let Some(member) = reader.next().map_err(|fault| tar_fault(fault, length))? {
        if member.data_offset.checked_add(member.stored).is_none_or(|end| end > length) {
            return Err(ArchiveFault::CutOff { bytes: length });
        }
        if member.kind == MemberKind::File && member.sparse.is_none() {
            let name = String::from_utf8_lossy(&member.path).into_owned();
            let name = name.strip_prefix("./").unwrap_or(&name).to_owned();
            members.insert(name, (member.data_offset, member.stored));
        }
    }
    Ok(members)
}

fn tar_fault(fault: TarFault, length: u64) -> ArchiveFault {
    match fault {
        TarFault::NotTar => ArchiveFault::NotTar,
        TarFault::Header { reason, .. } => ArchiveFault::DamagedTar { reason },
        TarFault::Read { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof => {
            ArchiveFault::CutOff { bytes: length }
        }
        TarFault::Read { source, .. } => ArchiveFault::Read { member: "it".into(), source },
    }
}
