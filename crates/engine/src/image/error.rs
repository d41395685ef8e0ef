//! Why images cannot be imported, kept or unpacked, each as a sentence for the user.

use std::io;
use std::path::PathBuf;

use super::Digest;

/// Why an image operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The store's own files failed.
    #[error("image store {}: cannot {action}", store.display())]
    Store {
        /// Directory of the store.
        store: PathBuf,
        /// What was tried.
        action: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A blob is not in the store.
    #[error("blob {digest} is not in the image store {}; import the image or fetch the layer again", store.display())]
    NoBlob {
        /// Directory of the store.
        store: PathBuf,
        /// The blob.
        digest: Digest,
    },
    /// A received blob has not the length or digest it was announced with.
    #[error(
        "blob {expected}: {received_bytes} bytes with digest {received} came where {expected_bytes} bytes were announced; fetch it again"
    )]
    Mismatch {
        /// The digest announced.
        expected: Digest,
        /// The length announced.
        expected_bytes: u64,
        /// The digest of what came.
        received: Digest,
        /// How much came.
        received_bytes: u64,
    },
    /// A layer cannot be unpacked.
    #[error("layer {digest} cannot be unpacked: {fault}")]
    Layer {
        /// The layer's blob.
        digest: Digest,
        /// What is wrong with it.
        fault: LayerFault,
    },
    /// An image cannot be imported.
    #[error("image {}: {fault}", path.display())]
    Archive {
        /// What the user named.
        path: PathBuf,
        /// What is wrong with it.
        fault: ArchiveFault,
    },
    /// A directory cannot be used as a root filesystem.
    #[error("root filesystem {}: {fault}", path.display())]
    Rootfs {
        /// What the user named.
        path: PathBuf,
        /// What is wrong with it.
        fault: RootfsFault,
    },
}

/// What is wrong with an OCI archive or layout.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveFault {
    /// There is nothing.
    #[error("it does not exist; pass an OCI archive or layout directory")]
    Missing,
    /// It cannot be read.
    #[error("{member} cannot be read: {source}")]
    Read {
        /// What in it, or `it`.
        member: String,
        /// The system's answer.
        source: io::Error,
    },
    /// It is compressed as a whole.
    #[error("it is compressed with {with}; decompress it first")]
    Compressed {
        /// The compression.
        with: &'static str,
    },
    /// It is no tar.
    #[error("it is not a tar archive; pass an OCI archive or layout directory")]
    NotTar,
    /// The tar stops in the middle.
    #[error("the tar archive is cut off after {bytes} bytes; copy it again")]
    CutOff {
        /// Its length.
        bytes: u64,
    },
    /// It is a tar but breaks the form.
    #[error("the tar archive is damaged: {reason}; copy it again")]
    DamagedTar {
        /// What was found.
        reason: &'static str,
    },
    /// A neutral module is not what it should be.
    #[error("its neutral module for {path:?} is refused: {reason}; pack the image again")]
    Module {
        /// Of the program that it is of.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// It is what `docker save` made before it wrote OCI layouts.
    #[error(
        "it is a Docker archive, not an OCI archive; convert it with: skopeo copy docker-archive:FILE oci-archive:FILE"
    )]
    DockerArchive,
    /// A file of the layout is not there.
    #[error("it holds no {member}; pass an OCI archive or layout directory")]
    NoMember {
        /// The file.
        member: &'static str,
    },
    /// The layout's version is not one we know.
    #[error("its oci-layout says version {version:?}, and only 1.x is known; export the image again")]
    LayoutVersion {
        /// What it says.
        version: String,
    },
    /// A JSON document is not what it should be.
    #[error("its {member} is not valid: {source}; export the image again")]
    Document {
        /// The document.
        member: String,
        /// Where and why.
        source: oci_spec::OciSpecError,
    },
    /// A document is larger than any real one.
    #[error("its {member} has {bytes} bytes, more than the {limit} that are read; export the image again")]
    DocumentTooLarge {
        /// The document.
        member: String,
        /// Its size.
        bytes: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A blob that is referred to is not there.
    #[error("it refers to {digest} ({what}), which is missing; export the image again")]
    BlobMissing {
        /// The blob.
        digest: String,
        /// What the blob should be.
        what: &'static str,
    },
    /// A blob has another size than said.
    #[error("its {what} {digest} has {found} bytes where {expected} are announced; copy it again")]
    BlobSize {
        /// What the blob is.
        what: &'static str,
        /// The blob.
        digest: String,
        /// Announced.
        expected: u64,
        /// Found.
        found: u64,
    },
    /// A blob's content is not that of its digest.
    #[error("its {what} {expected} has the content of {found}; copy it again")]
    BlobDigest {
        /// What the blob is.
        what: &'static str,
        /// Announced.
        expected: Digest,
        /// Computed.
        found: Digest,
    },
    /// Another digest algorithm than SHA-256.
    #[error("it uses the digest {digest}, and only sha256 is known; export the image again")]
    DigestAlgorithm {
        /// The digest.
        digest: String,
    },
    /// A media type that is not known.
    #[error(
        "its {what} is of type {media_type}, which cannot be used; export it as an OCI image with tar layers"
    )]
    MediaType {
        /// What has the type.
        what: &'static str,
        /// The type.
        media_type: String,
    },
    /// There is no image for this machine.
    #[error("it is for {found}, and this machine needs {wanted}; get the image for {wanted}")]
    Architecture {
        /// What there is.
        found: String,
        /// What is needed.
        wanted: &'static str,
    },
    /// The index of an image of several platforms contradicts one of them.
    #[error("its index has an image for {said}, and the image says that it is for {found}; pack it again")]
    OtherPlatform {
        /// Of the index.
        said: String,
        /// Of the image.
        found: String,
    },
    /// There are several images.
    #[error("it holds several images ({names}); name one of them as PATH:NAME or export one alone")]
    Several {
        /// Their names.
        names: String,
    },
    /// The image that was named is not there.
    #[error("it holds no image named {wanted:?}, only {names}")]
    NoSuchReference {
        /// What was asked for.
        wanted: String,
        /// What there is.
        names: String,
    },
    /// The index lists nothing.
    #[error("its index lists no image; export the image again")]
    Empty,
    /// Indexes in indexes without end.
    #[error("its indexes are nested more than {limit} deep; export the image again")]
    Nested {
        /// What is allowed.
        limit: usize,
    },
    /// Configuration and manifest do not match.
    #[error("its configuration lists {diff_ids} layers and its manifest {layers}; export the image again")]
    LayerCount {
        /// In the configuration.
        diff_ids: usize,
        /// In the manifest.
        layers: usize,
    },
    /// More layers than overlayfs can stack.
    #[error("it has {layers} layers, and at most {limit} can be stacked; squash it")]
    TooManyLayers {
        /// How many.
        layers: usize,
        /// What is allowed.
        limit: usize,
    },
    /// A part of it is to be got from elsewhere.
    #[error("its {what} names other places that it is to come from; export the image whole")]
    Elsewhere {
        /// Which part.
        what: &'static str,
    },
    /// It would fill the disk of an engine.
    #[error(
        "it has {needed} bytes, and the disk with {} has {free} left; free some space", storage.display()
    )]
    Large {
        /// What it takes.
        needed: u64,
        /// What there is.
        free: u64,
        /// Where it would be.
        storage: PathBuf,
    },
    /// A layer cannot be unpacked.
    #[error("its layer {layer} cannot be unpacked: {fault}")]
    Layer {
        /// The layer's blob.
        layer: Digest,
        /// What is wrong with it.
        fault: LayerFault,
    },
    /// A layer's unpacked content is not what the configuration says.
    #[error(
        "its layer {layer} unpacks to {found} where its configuration says {expected}; export the image again"
    )]
    DiffId {
        /// The layer's blob.
        layer: Digest,
        /// What the configuration says.
        expected: Digest,
        /// What was computed.
        found: Digest,
    },
}

/// What is wrong with a layer.
#[derive(Debug, thiserror::Error)]
pub enum LayerFault {
    /// It is no tar stream, compressed or not.
    #[error("it is not a tar archive, plain or compressed with gzip or zstd")]
    NotTar,
    /// It ends in the middle, or its compression is damaged.
    #[error("it is cut off or damaged after {bytes} unpacked bytes: {source}")]
    Damaged {
        /// How far it could be read.
        bytes: u64,
        /// What was found.
        source: io::Error,
    },
    /// A tar header breaks the form.
    #[error("its tar header at byte {offset} is damaged: {reason}")]
    Header {
        /// Where, in the unpacked stream.
        offset: u64,
        /// What was found.
        reason: &'static str,
    },
    /// A name is not allowed.
    #[error("its entry {path:?} is not allowed: {reason}")]
    Path {
        /// The name in the tar.
        path: String,
        /// Why not.
        reason: &'static str,
    },
    /// An entry cannot be made.
    #[error("its entry {path:?}: cannot {action}: {source}")]
    Entry {
        /// The name in the tar.
        path: String,
        /// What was tried.
        action: String,
        /// The system's answer.
        source: io::Error,
    },
    /// It is larger than is unpacked.
    #[error("it has more than {limit} {unit}, the most that is unpacked")]
    TooLarge {
        /// What is allowed.
        limit: u64,
        /// Of what.
        unit: &'static str,
    },
    /// The disk would be filled.
    #[error("the disk has less than {reserve} bytes left; free some space")]
    DiskFull {
        /// What is kept free.
        reserve: u64,
    },
    /// Its unpacked stream has another digest than asked for.
    #[error("its content is {found} where {expected} is asked for")]
    DiffId {
        /// Asked for.
        expected: Digest,
        /// Computed.
        found: Digest,
    },
}

/// What is wrong with a directory given as root filesystem.
#[derive(Debug, thiserror::Error)]
pub enum RootfsFault {
    /// There is nothing.
    #[error("it does not exist; pass the directory of a root filesystem")]
    Missing,
    /// It is a file or something else.
    #[error("it is not a directory; pass the directory of a root filesystem")]
    NotADirectory,
    /// There is nothing in it.
    #[error("it is empty; pass the directory of a root filesystem")]
    Empty,
    /// The store would be copied into itself.
    #[error("the image store {} is inside of it; pass a directory that does not hold godwit's state", store.display())]
    HoldsStore {
        /// Directory of the store.
        store: PathBuf,
    },
    /// Something in it cannot be read.
    #[error("{member} cannot be read: {source}")]
    Read {
        /// Path within.
        member: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Something changed while it was read.
    #[error("{member} changed while it was read; stop what writes to it and try again")]
    Changed {
        /// Path within.
        member: String,
    },
    /// Something in it cannot be kept in an archive.
    #[error("{member} cannot be kept in an archive: {reason}; rename or remove it")]
    NotKept {
        /// Path within.
        member: String,
        /// Why not.
        reason: &'static str,
    },
}
