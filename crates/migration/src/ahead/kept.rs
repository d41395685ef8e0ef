//! Directories of files of services that may come to this node: sent ahead of a move, or left by one that was aborted, or by
//! the service itself when it moved away.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_engine::tree::Snapshot;
use godwit_names::ServiceName;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::sync::OwnedMutexGuard;

use super::{MOST_NAMES, MOST_PATH_BYTES, OLDEST};
use crate::error::{LocalError, io_error};
use crate::service::Service;

/// What part of the disk's free bytes is used when the operator gave no bound.
const PART: u64 = 2;

/// When less than this part of the disk is free, all of it goes, unless so many bytes and names are.
const LOW: u64 = 20;
const ENOUGH: u64 = 2 << 30;
const ENOUGH_NAMES: u64 = 1 << 16;

/// What was brought in this time does not give way to a preparation.
const SPARED: Duration = Duration::from_secs(600);

/// How long a move waits for the end of a preparation, which its source has ended.
const ENDING: Duration = Duration::from_secs(20);

/// Beyond what is announced so much may come: the service continues to write.
const GROWTH: u64 = 1 << 30;
const NAMES_GROWTH: u64 = 1 << 16;

/// What a name takes on the disk beside its content, bytes: an inode, and a block of a small file or of a directory.
const OF_A_NAME: u64 = 4096;

/// The place of one service's files.
type Place = Arc<tokio::sync::Mutex<Option<Kept>>>;

/// All files that were sent ahead to this node.
#[derive(Debug)]
pub struct KeptFiles {
    /// The node's state.
    state: PathBuf,
    /// The operator's bound, bytes; none: half of what is free.
    most: Option<u64>,
    places: Mutex<HashMap<Key, Entry>>,
}

/// The node that sends them, and the service's id: a node has no word on what another one sends.
type Key = (String, String);

#[derive(Debug)]
struct Entry {
    place: Place,
    /// That it takes, as far as it has been measured.
    here: Taken,
    /// That it may take, while it is received.
    promised: Taken,
    since: Instant,
}

impl Entry {
    fn new(place: Place, here: Taken) -> Self {
        Self { place, here, promised: here, since: Instant::now() }
    }
}

/// What files take of a disk, about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) bytes: u64,
    /// Inodes.
    pub(crate) names: u64,
}

impl Taken {
    fn of(found: &Snapshot) -> Self {
        let names = found.entries();
        Self { bytes: found.bytes().saturating_add(names.saturating_mul(OF_A_NAME)), names }
    }

    fn plus(self, more: Self) -> Self {
        let (bytes, names) = (self.bytes.saturating_add(more.bytes), self.names.saturating_add(more.names));
        Self { bytes, names }
    }

    fn minus(self, less: Self) -> Self {
        let (bytes, names) = (self.bytes.saturating_sub(less.bytes), self.names.saturating_sub(less.names));
        Self { bytes, names }
    }
}

/// A disk.
#[derive(Debug)]
struct Space {
    free: Taken,
    all: Taken,
}

/// What room is asked for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    taken: Taken,
    /// Whether it is on the disk already, and not here.
    is_present: bool,
}

/// How much may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) bytes: u64,
    pub(crate) names: u64,
}

/// With what a running service may add: as much again, or so much; and no more than half of what would be left for others.
fn with_growth(announced: u64, growth: u64, most: u64) -> u64 {
    announced.saturating_add(announced.max(growth).min(most.saturating_sub(announced) / 2))
}

/// The files of one service.
#[derive(Debug)]
pub struct Kept {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: ServiceName,
    /// The node that sent them.
    pub source: String,
    /// The epoch that it would have here.
    epoch: u64,
    token: Vec<u8>,
    directory: Directory,
    /// Bytes of its files.
    bytes: u64,
    taken: Taken,
    /// Whether devices may be among them.
    devices: bool,
    /// Whether a round has come to it of which nobody has measured how much.
    is_unmeasured: bool,
}

/// A directory that goes when this is dropped.
#[derive(Debug)]
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        discard(std::mem::take(&mut self.0));
    }
}

/// Removes a directory; what cannot be removed goes with the next start.
fn discard(path: PathBuf) {
    let remove = move || match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::error!(path = %path.display(), %error, "cannot remove files that were sent ahead; the next start of godwitd tries again");
        }
        _ => {}
    };
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(remove)),
        Err(_) => remove(),
    }
}

impl KeptFiles {
    /// Keeps at most so many bytes below this state; none: half of what is free.
    #[must_use]
    pub fn new(state: &Path, most: Option<u64>) -> Self {
        Self { state: state.to_owned(), most, places: Mutex::default() }
    }

    fn directory(&self) -> PathBuf {
        self.state.join("prepared")
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        // Nothing can panic while the map is changed.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to remove what an earlier life of this daemon left. To be called before anything comes.
    pub fn clear_left(&self) -> Result<(), LocalError> {
        let directory = self.directory();
        let left = match fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            left => left.map_err(io_error("list", &directory))?,
        };
        for entry in left {
            discard(entry.map_err(io_error("list", &directory))?.path());
        }
        Ok(())
    }

    /// The place of a service's files from a node, for one; what is there of another incarnation of it goes. None where it is
    /// in use for too long.
    pub(crate) async fn hold(self: &Arc<Self>, service: &Service, source: &str) -> Option<Held> {
        let place = self.place(service, source);
        let kept = match Arc::clone(&place).try_lock_owned() {
            Ok(kept) => kept,
            Err(_) => tokio::time::timeout(ENDING, place.lock_owned()).await.ok()?,
        };
        Some(self.held(service, source, kept))
    }

    /// The entry's place, which is there from now on.
    fn place(&self, service: &Service, source: &str) -> Place {
        let new = || Entry::new(Place::default(), Taken::default());
        let key = (source.to_owned(), service.id.clone());
        Arc::clone(&self.lock().entry(key).or_insert_with(new).place)
    }

    fn held(self: &Arc<Self>, service: &Service, source: &str, kept: OwnedMutexGuard<Option<Kept>>) -> Held {
        let mut held = Held {
            all: Arc::clone(self),
            key: (source.to_owned(), service.id.clone()),
            name: service.name.clone(),
            epoch: service.epoch,
            devices: service.makes_devices(),
            kept: Some(kept),
        };
        let is_another = |kept: &Kept| kept.epoch != held.epoch || kept.devices != held.devices;
        if held.kept().is_some_and(is_another) {
            held.drop_it();
        }
        held
    }

    /// Keeps a directory of files of a service that is not here, in the incarnation in which node `source` may send it here:
    /// nobody else uses it. Blocks. How many bytes it has; none where it stays where it is, and is of no use.
    pub(crate) fn take(
        self: &Arc<Self>,
        service: &Service,
        source: &str,
        path: &Path,
    ) -> Result<Option<u64>, String> {
        if self.most == Some(0) {
            return Ok(None);
        }
        let told = |error: &(dyn std::error::Error + 'static)| crate::error_chain(error);
        let found = Snapshot::scan_at_most(path, true, MOST_NAMES, MOST_PATH_BYTES);
        let found = found.map_err(|error| told(&error))?;
        let found = found.ok_or_else(|| format!("it has more than {MOST_NAMES} names"))?;
        let found = found.whole().map_err(|error| told(&error))?;
        // A preparation that is under way has the place.
        let Ok(kept) = self.place(service, source).try_lock_owned() else { return Ok(None) };
        let mut held = self.held(service, source, kept);
        if found.entries() <= 1 || held.kept().is_some() {
            return Ok(None);
        }
        let bytes = found.bytes();
        let wanted = Wanted { taken: Taken::of(&found), is_present: true };
        self.make_room(&held.key, wanted, SPARED)?;
        let begun = held.begin().map_err(|error| told(&error))?;
        fs::rename(path, begun.path()).map_err(|error| {
            format!("cannot rename {} to {}: {error}", path.display(), begun.path().display())
        })?;
        held.keep(begun);
        held.measured(&found);
        Ok(Some(bytes))
    }

    /// The token of a service's files that came from this node; nothing where there are none, or they are in use.
    #[cfg(test)]
    fn token(&self, service: &Service, source: &str) -> Vec<u8> {
        let key = (source.to_owned(), service.id.clone());
        let place = self.lock().get(&key).map(|entry| Arc::clone(&entry.place));
        let Some(Ok(kept)) = place.as_ref().map(|place| place.try_lock()) else { return Vec::new() };
        let of = kept.as_ref().filter(|kept| kept.epoch == service.epoch);
        of.map(|kept| kept.token.clone()).unwrap_or_default()
    }

    /// Bytes of all that are not in use.
    pub(crate) fn bytes(&self) -> u64 {
        let places = self.lock();
        let free = places.values().filter_map(|entry| entry.place.try_lock().ok());
        free.filter_map(|kept| Some(kept.as_ref()?.bytes)).fold(0, u64::saturating_add)
    }

    /// Of how many services there are files, and how many bytes they take on the disk, or may while they come.
    pub fn taken(&self) -> (usize, u64) {
        let places = self.lock();
        let bytes = places.values().map(|entry| entry.promised.bytes);
        (bytes.clone().filter(|bytes| *bytes > 0).count(), bytes.fold(0, u64::saturating_add))
    }

    /// The disk of this node's state.
    fn space(&self) -> io::Result<Space> {
        let stat = rustix::fs::statvfs(&self.state)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        // Where inodes are made as they are needed there is no number of them.
        let names = |names: u64| if stat.f_files == 0 { u64::MAX } else { names };
        Ok(Space {
            free: Taken { bytes: bytes(stat.f_bavail), names: names(stat.f_favail) },
            all: Taken { bytes: bytes(stat.f_blocks), names: names(stat.f_files) },
        })
    }

    /// Gives up all that are not in use and for which this does not hold.
    fn retain(&self, mut stays: impl FnMut(&Kept, Instant) -> bool) {
        self.lock().retain(|_, entry| match entry.place.try_lock() {
            // Another one may be about to use it.
            Ok(mut kept) if Arc::strong_count(&entry.place) == 1 => {
                if kept.as_ref().is_some_and(|kept| !stays(kept, entry.since)) {
                    *kept = None;
                }
                kept.is_some()
            }
            _ => true,
        });
    }

    /// Gives up the files of others than this service: there is no room for what it needs.
    pub(crate) fn give_up_but(&self, service: &str) {
        self.retain(|kept, _| kept.id == service);
    }

    /// The service is here, or will not come.
    pub fn forget(&self, service: &str) {
        self.retain(|kept, _| kept.id != service);
    }

    /// Whether there may be any.
    pub fn has_any(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Gives up what is old, what has no use by the caller's word, and all of it when little of the disk is free.
    pub fn relieve(&self, mut is_of_use: impl FnMut(&Kept) -> bool) {
        let is_full = match self.space() {
            Ok(Space { free, all }) => {
                free.bytes < (all.bytes / LOW).min(ENOUGH) || free.names < (all.names / LOW).min(ENOUGH_NAMES)
            }
            Err(error) => {
                tracing::error!(state = %self.state.display(), %error, "cannot ask for the free bytes of the disk");
                false
            }
        };
        let mut full = false;
        self.retain(|kept, since| {
            full |= is_full;
            !is_full && since.elapsed() < OLDEST && is_of_use(kept)
        });
        if full {
            tracing::info!("little of the disk is free: removing files that were sent ahead of moves");
        }
    }

    /// Makes room for files of a service, in place of those that are here: the oldest of others go, but not those that were
    /// brought in the time that is `spared`. How much may come; why there is no room, as a sentence.
    fn make_room(&self, own: &Key, wanted: Wanted, spared: Duration) -> Result<Room, String> {
        let mut places = self.lock();
        // What is on its way to others has been promised, and is not on the disk yet.
        let disk = self.space().map_err(|error| self.unknown(&error))?;
        let mut freed = Taken::default();
        loop {
            let sum = |is_own: bool, of: fn(&Entry) -> Taken| {
                let all = places.iter().filter(|(key, _)| (*key == own) == is_own);
                all.map(|(_, entry)| of(entry)).fold(Taken::default(), Taken::plus)
            };
            let (its, others) = (sum(true, |entry| entry.here), sum(false, |entry| entry.promised));
            let coming = sum(false, |entry| entry.promised.minus(entry.here));
            let its = if wanted.is_present { its.plus(wanted.taken) } else { its };
            let free = disk.free.plus(freed);
            let most = self
                .most
                .unwrap_or(free.bytes.saturating_add(its.bytes).saturating_add(others.bytes) / PART)
                .saturating_sub(others.bytes);
            // A part of the disk stays free in any case.
            let free = free.minus(coming).plus(its);
            let (bytes, names) = match wanted.is_present {
                true => (most, u64::MAX),
                false => (most.min(free.bytes / 10 * 9), free.names / 10 * 9),
            };
            if bytes >= wanted.taken.bytes && names >= wanted.taken.names {
                let room = Room {
                    bytes: with_growth(wanted.taken.bytes, GROWTH, bytes),
                    names: with_growth(wanted.taken.names, NAMES_GROWTH, names),
                };
                if let Some(entry) = places.get_mut(own) {
                    let promised = Taken { bytes: room.bytes, names: room.names };
                    entry.promised = if wanted.is_present { wanted.taken } else { promised };
                }
                return Ok(room);
            }
            let old = places.iter().filter(|(key, entry)| {
                *key != own
                    && entry.here.bytes > 0
                    && entry.since.elapsed() >= spared
                    && entry.place.try_lock().is_ok()
                    // Nobody is about to use it.
                    && Arc::strong_count(&entry.place) == 1
            });
            let oldest = old.min_by_key(|(_, entry)| entry.since).map(|(key, _)| key.clone());
            match oldest.and_then(|oldest| places.remove(&oldest)) {
                // Its files are removed in the background.
                Some(gone) => freed = freed.plus(gone.here),
                None if bytes < wanted.taken.bytes => {
                    return Err(format!(
                        "it has room for {} MiB of files that are sent ahead (godwitd serve --retained-files), and {} MiB are needed",
                        bytes >> 20,
                        wanted.taken.bytes.div_ceil(1 << 20)
                    ));
                }
                None => {
                    return Err(format!(
                        "the filesystem of its state {} has room for {names} names (inodes) of files that are sent ahead, and {} are needed",
                        self.state.display(),
                        wanted.taken.names
                    ));
                }
            }
        }
    }

    fn unknown(&self, error: &io::Error) -> String {
        format!("its state {} cannot be used: {error}", self.state.display())
    }

    /// Makes an empty directory from which the files can be taken to those of services.
    fn make(&self) -> Result<(PathBuf, Vec<u8>), LocalError> {
        let (directory, services) = (self.directory(), self.state.join("services"));
        // What came is for nobody else.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(io_error("create", &directory))?;
        fs::create_dir_all(&services).map_err(io_error("create", &services))?;
        let device = |path: &Path| fs::metadata(path).map(|of| of.dev()).map_err(io_error("look at", path));
        if device(&directory)? != device(&services)? {
            return Err(LocalError::Io {
                action: "send files ahead of a move into",
                path: services,
                source: io::Error::other("it is a filesystem of its own"),
            });
        }
        let random = RandomState::new();
        let token = [0_u64, 1].map(|number| random.hash_one(number).to_le_bytes()).concat();
        let name: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = directory.join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(io_error("create", &path))?;
        Ok((path, token))
    }
}

/// The place of a service's files, which nobody else has until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    all: Arc<KeptFiles>,
    key: Key,
    name: ServiceName,
    epoch: u64,
    devices: bool,
    /// There until this is dropped.
    kept: Option<OwnedMutexGuard<Option<Kept>>>,
}

impl Held {
    fn kept(&self) -> Option<&Kept> {
        self.kept.as_ref().and_then(|kept| kept.as_ref())
    }

    /// The token of what is here; nothing where nothing is.
    pub(crate) fn token(&self) -> Vec<u8> {
        self.kept().map(|kept| kept.token.clone()).unwrap_or_default()
    }

    /// How many names of it are here.
    pub(crate) fn names(&self) -> u64 {
        self.kept().map_or(0, |kept| kept.taken.names)
    }

    /// How many bytes of its files are here.
    pub(crate) fn bytes(&self) -> u64 {
        self.kept().map_or(0, |kept| kept.bytes)
    }

    /// The directory of what is here.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.kept().map(|kept| kept.directory.0.as_path())
    }

    /// What is here is of no use.
    pub(crate) fn drop_it(&mut self) {
        if let Some(kept) = &mut self.kept {
            **kept = None;
        }
    }

    /// Makes room for so much; how much may come. Why there is no room, as a sentence.
    pub(crate) fn make_room(&mut self, taken: Taken) -> Result<Room, String> {
        self.all.make_room(&self.key, Wanted { taken, is_present: false }, SPARED)
    }

    /// An empty directory, in place of what is here.
    pub(crate) fn begin(&mut self) -> Result<Begun, LocalError> {
        self.drop_it();
        let (path, token) = self.all.make()?;
        Ok(Begun { directory: Directory(path), token })
    }

    /// Keeps what has come into a directory that was empty.
    pub(crate) fn keep(&mut self, Begun { directory, token }: Begun) {
        let ((source, id), name) = (self.key.clone(), self.name.clone());
        let (epoch, devices) = (self.epoch, self.devices);
        let of = Kept {
            id,
            name,
            source,
            epoch,
            token,
            directory,
            bytes: 0,
            taken: Taken::default(),
            devices,
            is_unmeasured: true,
        };
        if let Some(kept) = &mut self.kept {
            **kept = Some(of);
        }
    }

    /// A round comes to what is here, which is of no use until it has been measured.
    pub(crate) fn changes(&mut self) {
        if let Some(kept) = self.kept.as_mut().and_then(|kept| kept.as_mut()) {
            kept.is_unmeasured = true;
        }
    }

    /// Looks how much has come, of which there may be at most so much. Blocks. Why it cannot be kept, as a sentence.
    pub(crate) fn measure(&mut self, most: u64) -> Result<u64, String> {
        let Some(kept) = self.kept() else { return Ok(0) };
        let found = Snapshot::scan_at_most(&kept.directory.0, true, MOST_NAMES, MOST_PATH_BYTES);
        match found.map_err(|error| crate::error_chain(&error))? {
            None => Err(format!("it has more than {MOST_NAMES} names, which are not sent ahead")),
            Some(found) if found.bytes() > most => {
                Err(format!("it has more than the {} MiB for which there is room", most >> 20))
            }
            Some(found) => {
                self.measured(&found);
                Ok(found.bytes())
            }
        }
    }

    fn measured(&mut self, found: &Snapshot) {
        if let Some(kept) = self.kept.as_mut().and_then(|kept| kept.as_mut()) {
            (kept.bytes, kept.taken, kept.is_unmeasured) = (found.bytes(), Taken::of(found), false);
        }
    }

    /// Puts what is here in the place of this directory, which is empty.
    pub(crate) fn put_in(mut self, place: &Path) -> Result<(), LocalError> {
        let Some(kept) = self.kept.as_mut().and_then(|kept| kept.take()) else { return Ok(()) };
        fs::remove_dir(place).map_err(io_error("remove the empty directory", place))?;
        let renamed = renameat_with(CWD, &kept.directory.0, CWD, place, RenameFlags::NOREPLACE);
        renamed.map_err(io::Error::from).map_err(io_error("put files that were sent ahead into", place))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(mut kept) = self.kept.take() else { return };
        if kept.as_ref().is_some_and(|kept| kept.is_unmeasured) {
            *kept = None;
        }
        let mut places = self.all.lock();
        // It may have given way, and another one has come to be in its place.
        if places
            .get(&self.key)
            .is_some_and(|entry| !Arc::ptr_eq(&entry.place, OwnedMutexGuard::mutex(&kept)))
        {
            *kept = None;
            return;
        }
        match kept.as_ref() {
            Some(of) => {
                let place = Arc::clone(OwnedMutexGuard::mutex(&kept));
                places.insert(self.key.clone(), Entry::new(place, of.taken));
            }
            // The map's, and this one.
            None if Arc::strong_count(OwnedMutexGuard::mutex(&kept)) <= 2 => drop(places.remove(&self.key)),
            None => {
                if let Some(entry) = places.get_mut(&self.key) {
                    (entry.here, entry.promised) = (Taken::default(), Taken::default());
                }
            }
        }
    }
}

/// A directory into which the first round comes; it goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Begun {
    directory: Directory,
    token: Vec<u8>,
}

impl Begun {
    pub(crate) fn path(&self) -> &Path {
        &self.directory.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::service::tests::service;

    const MIB: u64 = 1 << 20;

    fn kept(most: u64) -> (TempDir, Arc<KeptFiles>) {
        let state = tempfile::tempdir().unwrap();
        let kept = Arc::new(KeptFiles::new(state.path(), Some(most)));
        (state, kept)
    }

    fn named(id: &str) -> Service {
        Service { id: id.into(), ..service() }
    }

    /// Files of a service come, so many bytes.
    async fn bring(all: &Arc<KeptFiles>, id: &str, bytes: u64) -> Result<u64, String> {
        let mut held = all.hold(&named(id), "a").await.unwrap();
        let room = held.make_room(Taken { bytes, names: 2 })?.bytes;
        let begun = held.begin().unwrap();
        fs::write(begun.path().join("file"), vec![7; usize::try_from(bytes).unwrap()]).unwrap();
        held.keep(begun);
        held.measure(room)
    }

    fn directories(state: &TempDir) -> usize {
        fs::read_dir(state.path().join("prepared")).map_or(0, Iterator::count)
    }

    // Without a runtime in which it could be done later, what goes is gone at once.
    fn now<T>(work: impl Future<Output = T>) -> T {
        futures::executor::block_on(work)
    }

    fn token(all: &KeptFiles, id: &str) -> Vec<u8> {
        all.token(&named(id), "a")
    }

    #[tokio::test]
    async fn what_came_is_for_one_service_of_one_node_in_one_incarnation() {
        let (state, all) = kept(100 * MIB);
        assert_eq!(bring(&all, "one", MIB).await, Ok(MIB));
        let first = token(&all, "one");
        assert!(!first.is_empty() && token(&all, "two").is_empty());
        assert!(all.token(&named("one"), "c").is_empty());
        let later = Service { epoch: service().epoch + 1, ..named("one") };
        assert!(all.token(&later, "a").is_empty());
        let held = all.hold(&named("one"), "a").await.unwrap();
        assert!(
            held.token() == first && held.bytes() == MIB && token(&all, "one").is_empty(),
            "it is in use"
        );
        drop(held);
        // The next one has another token.
        assert_eq!(bring(&all, "one", MIB).await, Ok(MIB));
        assert_ne!(token(&all, "one"), first);
        drop(all.hold(&later, "a").await.unwrap());
        assert!(!all.has_any());
        drop((state, all));
    }

    #[test]
    fn there_is_as_much_as_there_is_room_for_and_what_is_new_is_spared() {
        // Names take room, too.
        let (state, all) = kept(10 * MIB + 16 * OF_A_NAME);
        assert_eq!(now(bring(&all, "one", 4 * MIB)), Ok(4 * MIB));
        assert_eq!(now(bring(&all, "two", 4 * MIB)), Ok(4 * MIB));
        let refused = now(bring(&all, "three", 4 * MIB)).unwrap_err();
        assert!(refused.contains("room for 2 MiB") && refused.contains("4 MiB are needed"), "{refused}");
        assert_eq!((all.bytes(), directories(&state)), (8 * MIB, 2));
        // Its own files give way, and old ones of others.
        assert_eq!(now(bring(&all, "one", 6 * MIB)), Ok(6 * MIB));
        let three = now(all.hold(&named("three"), "a")).unwrap();
        let wanted = Wanted { taken: Taken { bytes: 4 * MIB, names: 2 }, is_present: false };
        let room = all.make_room(&("a".into(), "three".into()), wanted, Duration::ZERO).unwrap();
        assert!((4 * MIB..5 * MIB).contains(&room.bytes), "the oldest has gone: {room:?}");
        assert!(token(&all, "two").is_empty() && !token(&all, "one").is_empty());
        drop(three);
        assert_eq!(directories(&state), 1);
    }

    #[test]
    fn what_is_promised_to_several_at_once_is_there_once() {
        let (_state, all) = kept(u64::MAX);
        let free = all.space().unwrap().free;
        let part = Taken { bytes: free.bytes / 5 * 3, names: 2 };
        let mut one = now(all.hold(&named("one"), "a")).unwrap();
        let room = one.make_room(part).unwrap();
        assert!(room.bytes >= part.bytes && room.bytes <= free.bytes / 10 * 9, "{room:?} of {free:?}");
        // Nothing of it has come, and most of the disk is free still.
        let mut two = now(all.hold(&named("two"), "a")).unwrap();
        let refused = two.make_room(part).unwrap_err();
        assert!(refused.contains("it has room for"), "{refused}");
        // A small one is not refused for what the first may still grow by.
        assert!(two.make_room(Taken { bytes: free.bytes / 100, names: 2 }).is_ok());
        drop(one);
        assert!(two.make_room(part).is_ok());
    }

    #[test]
    fn names_take_inodes_which_are_counted_as_bytes_are() {
        let (_state, all) = kept(u64::MAX);
        let Taken { names, .. } = all.space().unwrap().free;
        if names == u64::MAX {
            println!("this filesystem has as many inodes as it needs");
            return;
        }
        let part = Taken { bytes: MIB, names: names / 5 * 3 };
        let mut one = now(all.hold(&named("one"), "a")).unwrap();
        assert!((part.names..names).contains(&one.make_room(part).unwrap().names));
        let mut two = now(all.hold(&named("two"), "a")).unwrap();
        let refused = two.make_room(part).unwrap_err();
        assert!(refused.contains("inodes") && refused.contains(&part.names.to_string()), "{refused}");
    }

    #[test]
    fn files_of_a_service_that_is_not_here_are_taken_as_they_are() {
        let (state, all) = kept(100 * MIB);
        let place = state.path().join("services/redis/upper");
        let files = |bytes: usize| {
            fs::create_dir_all(place.join("deep")).unwrap();
            fs::write(place.join("deep/file"), vec![7; bytes]).unwrap();
        };
        files(1 << 20);
        assert_eq!(all.take(&named("one"), "a", &place), Ok(Some(MIB)));
        let first = token(&all, "one");
        assert!(!place.exists() && !first.is_empty() && all.bytes() == MIB);
        assert_eq!(all.taken(), (1, MIB + 3 * OF_A_NAME));
        // What is there already is not lost to what comes later, nor is nothing something.
        files(1);
        assert_eq!(all.take(&named("one"), "a", &place), Ok(None));
        assert!(place.exists() && token(&all, "one") == first);
        fs::remove_dir_all(&place).unwrap();
        fs::create_dir(&place).unwrap();
        assert_eq!(all.take(&named("two"), "a", &place), Ok(None));
        assert!(token(&all, "two").is_empty());
        // There is no room, or the operator wants none.
        files(100 << 20);
        assert!(all.take(&named("two"), "a", &place).unwrap_err().contains("it has room for 98 MiB"));
        let none = Arc::new(KeptFiles::new(state.path(), Some(0)));
        assert_eq!(none.take(&named("two"), "a", &place), Ok(None));
        assert!(place.join("deep/file").exists() && directories(&state) == 1);
    }

    #[test]
    fn more_than_there_is_room_for_does_not_stay() {
        let (state, all) = kept(100 * MIB);
        let mut held = now(all.hold(&named("one"), "a")).unwrap();
        held.make_room(Taken { bytes: MIB, names: 2 }).unwrap();
        let begun = held.begin().unwrap();
        fs::write(begun.path().join("file"), vec![7; 1 << 20]).unwrap();
        held.keep(begun);
        assert!(held.measure(MIB - 1).unwrap_err().contains("more than the 0 MiB"));
        held.drop_it();
        drop(held);
        assert!(!all.has_any() && directories(&state) == 0);
        // Nor does what was not whole.
        let mut held = now(all.hold(&named("one"), "a")).unwrap();
        drop(held.begin().unwrap());
        assert_eq!(directories(&state), 0);
    }

    #[test]
    fn it_takes_the_place_of_an_empty_directory_only() {
        let (state, all) = kept(100 * MIB);
        now(bring(&all, "one", MIB)).unwrap();
        let place = state.path().join("place");
        fs::create_dir_all(place.join("something")).unwrap();
        assert!(now(all.hold(&named("one"), "a")).unwrap().put_in(&place).is_err());
        assert!(place.join("something").exists() && directories(&state) == 0);
        now(bring(&all, "one", MIB)).unwrap();
        fs::remove_dir(place.join("something")).unwrap();
        now(all.hold(&named("one"), "a")).unwrap().put_in(&place).unwrap();
        assert_eq!(fs::metadata(place.join("file")).unwrap().len(), MIB);
        assert!(directories(&state) == 0 && !all.has_any());
    }

    #[test]
    fn what_is_of_no_use_goes_and_what_an_earlier_life_left() {
        let (state, all) = kept(100 * MIB);
        now(bring(&all, "one", MIB)).unwrap();
        now(bring(&all, "two", MIB)).unwrap();
        all.relieve(|kept| kept.id == "two");
        assert!(token(&all, "one").is_empty() && !token(&all, "two").is_empty());
        assert_eq!(directories(&state), 1);
        all.give_up_but("two");
        assert_eq!(directories(&state), 1);
        all.forget("two");
        assert_eq!(directories(&state), 0);
        fs::create_dir_all(state.path().join("prepared/left/deep")).unwrap();
        all.clear_left().unwrap();
        assert_eq!(directories(&state), 0);
    }
}
