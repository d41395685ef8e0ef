//! CRIU's images on their way: a bounded tmpfs of the daemon's at both ends, and a stream between.
//!
//! CRIU writes into the source's tmpfs while this module follows its page files and sends what is
//! new; what is sent is given back to the system at once (a hole is punched), so the source holds
//! no second copy of the memory for longer than the wire needs. The destination fills its tmpfs,
//! and the restore consumes it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use godwit_criu::images::scale_windows;
use godwit_database::blocking::off_worker;
use inotify::{Event, EventMask, EventStream, Inotify, WatchMask};

use crate::message::{ImageData, ImageFile, Message};
use crate::mounts::Mounts;

/// What one message carries: large enough that framing costs nothing, small enough to share a wire.
const CHUNK: usize = 256 * 1024;

/// Most files an image directory may have: CRIU makes about ten a process.
const MAX_FILES: usize = 65_536;

/// Failed migrations whose CRIU logs are kept.
const KEPT_LOGS: usize = 16;

/// Room for what is not memory: a few KiB a process, and files that were deleted while open.
pub const KERNEL_STATE_BYTES: u64 = 320 << 20;

/// Why images could not be carried.
#[derive(Debug, thiserror::Error)]
pub enum ImagesError {
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A name that is not a plain file name, or not the announced name of a file.
    #[error("the source sent an image file with the name {0:?}, which is refused")]
    Name(String),
    /// More than was offered and reserved.
    #[error("the source sent more than the {limit} bytes of images it had announced")]
    TooMuch {
        /// The bound.
        limit: u64,
    },
    /// Something is missing.
    #[error("image {name} is {have} bytes long here and {want} at the source")]
    Incomplete {
        /// The file.
        name: String,
        /// Here.
        have: u64,
        /// There.
        want: u64,
    },
    /// An image of a connection is not what it should be.
    #[error(transparent)]
    Connection(#[from] godwit_criu::images::ImageError),
    /// The conversation ended while images were sent.
    #[error("the connection ended while images were sent")]
    Closed,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImagesError {
    let path = path.to_path_buf();
    move |source| ImagesError::Io { action, path, source }
}

/// A tmpfs with a bounded size that ends with [`ImageTmpfs::close`] (or at the next start of the daemon).
pub struct ImageTmpfs {
    mounts: Arc<dyn Mounts>,
    path: PathBuf,
    logs: PathBuf,
}

impl ImageTmpfs {
    /// Mounts a tmpfs of at most `bytes` at `path` for images; `logs` is an ordinary directory.
    pub fn open(mounts: &Arc<dyn Mounts>, path: &Path, logs: &Path, bytes: u64) -> Result<Self, ImagesError> {
        for directory in [path, logs] {
            fs::create_dir_all(directory).map_err(io_error("create", directory))?;
        }
        mounts.mount_memory(path, bytes).map_err(io_error("mount a tmpfs on", path))?;
        let tmpfs = Self { mounts: Arc::clone(mounts), path: path.to_path_buf(), logs: logs.to_path_buf() };
        let images = tmpfs.images();
        fs::create_dir(&images).map_err(io_error("create", &images))?;
        Ok(tmpfs)
    }

    /// Where images go.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.path.join("images")
    }

    /// Where the mappings of processes are told to a dump.
    #[must_use]
    pub fn mappings(&self) -> PathBuf {
        self.path.join("smaps")
    }

    /// Where CRIU's logs go.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.logs.clone()
    }

    /// Gives the memory back; CRIU's logs go too when all went `well`.
    pub fn close(self, well: bool) -> Result<(), ImagesError> {
        remove(self.mounts.as_ref(), &self.path)?;
        match self.logs.parent() {
            _ if well => fs::remove_dir_all(&self.logs).map_err(io_error("remove", &self.logs)),
            Some(all) => prune_logs(all),
            None => Ok(()),
        }
    }

    /// Gives the memory back, with CRIU's logs, where others [`remove`] later what could not be removed now.
    pub fn try_to_close(self) {
        // Unmounting may wait for the kernel's RCU.
        let path = self.path.clone();
        if let Err(error) = off_worker(|| self.close(true)) {
            tracing::warn!(path = %path.display(), error = %crate::error_chain(&error), "images that nobody needs are not removed yet");
        }
    }
}

/// Unmounts and removes a tmpfs left by an earlier life of the daemon; no error when there is none.
pub fn remove(mounts: &dyn Mounts, path: &Path) -> Result<(), ImagesError> {
    mounts.unmount_memory(path).map_err(io_error("unmount", path))?;
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Removes all but the newest of the directories of CRIU's logs that failed migrations left.
pub fn prune_logs(parent: &Path) -> Result<(), ImagesError> {
    let entries = match fs::read_dir(parent) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(io_error("list", parent))?,
    };
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(io_error("list", parent))?;
    // Migrations' ids sort by time.
    paths.sort();
    let old = paths.len().saturating_sub(KEPT_LOGS);
    paths[..old].iter().try_for_each(|path| fs::remove_dir_all(path).map_err(io_error("remove", path)))
}

/// What happens in a directory.
struct Watch(Option<EventStream<[u8; 4096]>>);

impl Watch {
    fn new(directory: &Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        inotify.watches().add(directory, WatchMask::MODIFY | WatchMask::CLOSE_WRITE)?;
        Ok(Self(Some(inotify.into_event_stream([0; 4096])?)))
    }

    async fn next(&mut self) -> Option<io::Result<Event<OsString>>> {
        self.0.as_mut()?.next().await
    }
}

impl Drop for Watch {
    /// In a thread of its own: close(2) of an inotify instance waits for a grace period of the kernel's RCU, up to 15 ms,
    /// and the service is frozen.
    fn drop(&mut self) {
        let events = self.0.take();
        std::thread::spawn(move || drop(events));
    }
}

/// Sends a directory of images while it is written.
pub struct Sender<'a> {
    directory: PathBuf,
    /// Is told how many bytes are sent.
    on_progress: &'a (dyn Fn(u64) + Send + Sync),
    outgoing: tokio::sync::mpsc::Sender<Message>,
    open: BTreeMap<String, (File, u64)>,
    bytes: u64,
}

impl<'a> Sender<'a> {
    /// Follows `directory`; `on_progress` is told the bytes sent so far, again and again.
    #[must_use]
    pub fn new(
        directory: &Path,
        outgoing: tokio::sync::mpsc::Sender<Message>,
        on_progress: &'a (dyn Fn(u64) + Send + Sync),
    ) -> Self {
        Self { directory: directory.to_path_buf(), on_progress, outgoing, open: BTreeMap::new(), bytes: 0 }
    }

    /// Sends page files and the image of the files as they grow, and TCP connections as they are written, so that the
    /// wire works while CRIU does. It never returns by itself: the caller cancels this future when CRIU has ended.
    pub async fn follow(&mut self) -> Result<std::convert::Infallible, ImagesError> {
        let directory = self.directory.clone();
        let mut events = Watch::new(&directory).map_err(io_error("watch", &directory))?;
        // What came before the watch.
        let mut names = file_names(&directory)?;
        loop {
            for name in names.drain(..).filter(|name| grows(name)) {
                self.send_new(&name).await?;
            }
            let event = match events.next().await {
                Some(event) => event.map_err(io_error("watch", &directory))?,
                None => return Err(ImagesError::Closed),
            };
            // Thousands of connections are thousands of files: only the one that an event names is read, or all of
            // them after too many events.
            if event.mask.contains(EventMask::Q_OVERFLOW) {
                names = file_names(&directory)?;
                continue;
            }
            let Some(name) = event.name.map(|name| name.to_string_lossy().into_owned()) else { continue };
            if event.mask.contains(EventMask::CLOSE_WRITE) && is_connection(&name) {
                self.send_new(&name).await?;
            }
            names.push(name);
        }
    }

    /// Sends all that is left of all files, and returns their final lengths.
    pub async fn finish(&mut self) -> Result<Vec<ImageFile>, ImagesError> {
        let mut files = Vec::new();
        for name in file_names(&self.directory.clone())? {
            let bytes = self.send_new(&name).await?;
            files.push(ImageFile { name, bytes });
        }
        Ok(files)
    }

    /// Bytes of images sent so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    async fn send_new(&mut self, name: &str) -> Result<u64, ImagesError> {
        let path = self.directory.join(name);
        if !self.open.contains_key(name) {
            if is_connection(name) {
                scale_windows(&path)?;
            }
            let file =
                OpenOptions::new().read(true).write(true).open(&path).map_err(io_error("open", &path))?;
            self.open.insert(name.to_string(), (file, 0));
        }
        let Some((file, offset)) = self.open.get_mut(name) else { return Err(ImagesError::Closed) };
        let length = file.metadata().map_err(io_error("read the length of", &path))?.len();
        if length == 0 {
            // An empty file is part of the images too.
            let data = ImageData { name: name.to_string(), offset: 0, data: Bytes::new() };
            self.outgoing.send(Message::ImageData(data)).await.map_err(|_| ImagesError::Closed)?;
        }
        while *offset < length {
            let want = usize::try_from(length - *offset).unwrap_or(CHUNK).min(CHUNK);
            let mut buffer = vec![0; want];
            file.read_exact_at(&mut buffer, *offset).map_err(io_error("read", &path))?;
            let data = ImageData { name: name.to_string(), offset: *offset, data: buffer.into() };
            self.outgoing.send(Message::ImageData(data)).await.map_err(|_| ImagesError::Closed)?;
            punch(file, *offset, want).map_err(io_error("give back memory of", &path))?;
            *offset += want as u64;
            self.bytes += want as u64;
            (self.on_progress)(self.bytes);
        }
        Ok(length)
    }
}

/// CRIU appends to these and never reads or changes them again. With thousands of connections the image of the files
/// is the largest of the others.
fn grows(name: &str) -> bool {
    name.starts_with("pages-") || name == "files.img"
}

/// An image that is written at once and never again.
fn is_connection(name: &str) -> bool {
    name.starts_with("tcp-stream-")
}

/// Gives the memory of a sent stretch back to the system.
fn punch(file: &File, offset: u64, length: usize) -> io::Result<()> {
    use nix::fcntl::{FallocateFlags, fallocate};
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let signed = |n: u64| i64::try_from(n).map_err(io::Error::other);
    fallocate(file, flags, signed(offset)?, signed(length as u64)?).map_err(io::Error::from)
}

fn file_names(directory: &Path) -> Result<Vec<String>, ImagesError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(io_error("list", directory))? {
        let entry = entry.map_err(io_error("list", directory))?;
        if entry.file_type().map_err(io_error("list", directory))?.is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Writes images that come from another node: only into its directory, and no more than its bound.
pub struct Receiver {
    directory: PathBuf,
    limit: u64,
    files: BTreeMap<String, File>,
    bytes: u64,
}

impl Receiver {
    /// Writes into `directory`, at most `limit` bytes.
    #[must_use]
    pub fn new(directory: &Path, limit: u64) -> Self {
        Self { directory: directory.to_path_buf(), limit, files: BTreeMap::new(), bytes: 0 }
    }

    /// Bytes that have come.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes one piece.
    pub fn apply(&mut self, piece: &ImageData) -> Result<(), ImagesError> {
        self.bytes = self.bytes.saturating_add(piece.data.len() as u64);
        let end = piece.offset.saturating_add(piece.data.len() as u64);
        if self.bytes > self.limit || end > self.limit {
            return Err(ImagesError::TooMuch { limit: self.limit });
        }
        let path = self.directory.join(&piece.name);
        if !self.files.contains_key(&piece.name) {
            if !is_image_name(&piece.name) {
                return Err(ImagesError::Name(piece.name.clone()));
            }
            if self.files.len() >= MAX_FILES {
                return Err(ImagesError::TooMuch { limit: self.limit });
            }
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
                .map_err(io_error("create", &path))?;
            self.files.insert(piece.name.clone(), file);
        }
        match self.files.get(&piece.name) {
            Some(file) => file.write_all_at(&piece.data, piece.offset).map_err(io_error("write", &path)),
            None => Err(ImagesError::Name(piece.name.clone())),
        }
    }

    /// Checks that every file is there with its final length, and no other.
    pub fn finish(self, files: &[ImageFile]) -> Result<(), ImagesError> {
        let mut announced = BTreeSet::new();
        for expected in files {
            if !announced.insert(&expected.name) {
                return Err(ImagesError::Name(expected.name.clone()));
            }
            let have = match self.files.get(&expected.name) {
                Some(file) => {
                    file.metadata().map_err(io_error("read the length of", &self.directory))?.size()
                }
                None => {
                    return Err(ImagesError::Incomplete {
                        name: expected.name.clone(),
                        have: 0,
                        want: expected.bytes,
                    });
                }
            };
            if have != expected.bytes {
                return Err(ImagesError::Incomplete {
                    name: expected.name.clone(),
                    have,
                    want: expected.bytes,
                });
            }
        }
        match self.files.keys().find(|name| !announced.contains(name)) {
            Some(extra) => Err(ImagesError::Name(extra.clone())),
            None => Ok(()),
        }
    }
}

/// A plain file name as CRIU and runc use them.
fn is_image_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 128
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_engine::DefinedTmpfs;
    use godwit_engine::rootfs::{Overlay, RootfsError};

    use super::*;

    fn piece(name: &str, offset: u64, data: &'static [u8]) -> ImageData {
        ImageData { name: name.into(), offset, data: Bytes::from_static(data) }
    }

    /// A directory is a directory.
    struct NoMounts;

    impl Mounts for NoMounts {
        fn mount_root(&self, _: &Overlay) -> Result<(), RootfsError> {
            Ok(())
        }

        fn unmount_root(&self, _: &Overlay) -> Result<(), RootfsError> {
            Ok(())
        }

        fn mount_memory(&self, _: &Path, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn mount_tmpfs(&self, _: &Path, _: &DefinedTmpfs) -> io::Result<()> {
            Ok(())
        }

        fn unmount_memory(&self, _: &Path) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_logs_of_the_latest_failures_are_retained_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let mounts: Arc<dyn Mounts> = Arc::new(NoMounts);
        let logs = dir.path().join("logs");
        let close = |number: usize, well| {
            let name = format!("{number:02}");
            let room =
                ImageTmpfs::open(&mounts, &dir.path().join("room"), &logs.join(name), 1 << 20).unwrap();
            fs::write(room.work().join("dump.log"), "why").unwrap();
            room.close(well).unwrap();
        };
        (0..=KEPT_LOGS).for_each(|number| close(number, false));
        close(KEPT_LOGS + 1, true);
        let mut left: Vec<_> = fs::read_dir(&logs)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let latest: Vec<_> = (1..=KEPT_LOGS).map(|number| format!("{number:02}")).collect();
        assert_eq!(left, latest);
    }

    #[test]
    fn names_that_leave_the_directory_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::new(dir.path(), 1 << 20);
        for name in ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", ".hidden", &"x".repeat(129)] {
            assert!(matches!(receiver.apply(&piece(name, 0, b"x")), Err(ImagesError::Name(_))), "{name:?}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn more_than_announced_is_refused_also_by_a_far_offset() {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::new(dir.path(), 8);
        receiver.apply(&piece("pages-1.img", 0, b"1234")).unwrap();
        assert!(matches!(
            receiver.apply(&piece("pages-1.img", u64::MAX, b"1")),
            Err(ImagesError::TooMuch { .. })
        ));
        assert!(matches!(
            receiver.apply(&piece("pages-1.img", 4, b"56789")),
            Err(ImagesError::TooMuch { .. })
        ));
    }

    #[test]
    fn a_missing_a_short_an_unannounced_and_a_twice_announced_file_are_seen() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes| ImageFile { name: name.into(), bytes };
        let make = |sub: &str| {
            let path = dir.path().join(sub);
            fs::create_dir(&path).unwrap();
            let mut receiver = Receiver::new(&path, 100);
            receiver.apply(&piece("a.img", 0, b"abc")).unwrap();
            receiver
        };
        assert!(make("1").finish(&[file("a.img", 3)]).is_ok());
        assert!(make("2").finish(&[file("a.img", 4)]).is_err());
        assert!(make("3").finish(&[file("a.img", 3), file("b.img", 0)]).is_err());
        assert!(make("4").finish(&[]).is_err());
        assert!(make("5").finish(&[file("a.img", 3), file("a.img", 3)]).is_err());
    }
}
