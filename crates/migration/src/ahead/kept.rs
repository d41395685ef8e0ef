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
use godwit_engine::view::rename_directory;
use godwit_names::ServiceName;
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

/// How long a move waits until what gives way to it is removed.
const REMOVING: Duration = Duration::from_secs(20);

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
        Self { bytes: found.bytes(), names: found.entries() }.with_names()
    }

    /// With what names take beside their content.
    fn with_names(self) -> Self {
        Self { bytes: self.bytes.saturating_add(self.names.saturating_mul(OF_A_NAME)), ..self }
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
    /// When the last round was measured.
    since: Instant,
}

/// A directory that goes when this is dropped.
#[derive(Debug)]
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        discard(std::mem::take(&mut self.0));
    }
}

/// Removes a directory in the background.
fn discard(path: PathBuf) {
    if path.as_os_str().is_empty() {
        return;
    }
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(move || remove(&path))),
        Err(_) => remove(&path),
    }
}

/// Removes a directory; what cannot be removed goes with the next start.
fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::error!(path = %path.display(), %error, "cannot remove files that were sent ahead; the next start of godwitd tries again");
        }
        _ => {}
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
        // A full disk must not stay full for it.
        if self.keeps_none() || self.is_full() {
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
    fn retain(&self, stays: impl FnMut(&Kept, Instant) -> bool) {
        self.take_but(stays, drop);
    }

    /// Takes all from their places that are not in use and for which this does not hold.
    fn take_but(&self, mut stays: impl FnMut(&Kept, Instant) -> bool, mut taken: impl FnMut(Kept)) {
        self.lock().retain(|_, entry| match entry.place.try_lock() {
            // Another one may be about to use it.
            Ok(mut kept) if Arc::strong_count(&entry.place) == 1 => {
                if kept.as_ref().is_some_and(|kept| !stays(kept, entry.since)) {
                    kept.take().into_iter().for_each(&mut taken);
                }
                kept.is_some()
            }
            _ => true,
        });
    }

    /// Gives up the files of others than this service: there is no room for what it needs. Returns when they are removed, or
    /// that takes long.
    pub(crate) async fn give_up_but(&self, service: &str) {
        let mut given_up = Vec::new();
        self.take_but(|kept, _| kept.id == service, |kept| given_up.push(kept));
        let removing = tokio::task::spawn_blocking(move || {
            given_up.iter_mut().for_each(|kept| remove(&std::mem::take(&mut kept.directory.0)));
        });
        if tokio::time::timeout(REMOVING, removing).await.is_err() {
            tracing::warn!("files that give way to a service are still being removed");
        }
    }

    /// Whether the operator wants none.
    pub(crate) fn keeps_none(&self) -> bool {
        self.most == Some(0)
    }

    /// The service is here, or will not come.
    pub fn forget(&self, service: &str) {
        self.retain(|kept, _| kept.id != service);
    }

    /// Whether little of the disk is free.
    fn is_full(&self) -> bool {
        match self.space() {
            Ok(Space { free, all }) => {
                free.bytes < (all.bytes / LOW).min(ENOUGH) || free.names < (all.names / LOW).min(ENOUGH_NAMES)
            }
            Err(error) => {
                tracing::error!(state = %self.state.display(), %error, "cannot ask for the free bytes of the disk");
                false
            }
        }
    }

    /// Whether there may be any.
    pub fn has_any(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Gives up what is old, what has no use by the caller's word, and all of it when little of the disk is free.
    pub fn relieve(&self, mut is_of_use: impl FnMut(&Kept) -> bool) {
        let is_full = self.is_full();
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
        // What is on its way to others has been promised. As much of it as is on the disk already counts twice.
        let disk = self.space().map_err(|error| self.unknown(&error))?;
        let mut freed = Taken::default();
        // Nothing goes before it is certain that this suffices.
        let mut gone: Vec<Key> = Vec::new();
        loop {
            let sum = |is_own: bool, of: fn(&Entry) -> Taken| {
                let all = places.iter().filter(|(key, _)| (*key == own) == is_own && !gone.contains(key));
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
                // Their files are removed in the background.
                places.retain(|key, _| !gone.contains(key));
                if let Some(entry) = places.get_mut(own) {
                    let promised = Taken { bytes: room.bytes, names: room.names };
                    entry.promised = if wanted.is_present { wanted.taken } else { promised };
                }
                return Ok(room);
            }
            let old = places.iter().filter(|(key, entry)| {
                *key != own
                    && !gone.contains(key)
                    && entry.here.bytes > 0
                    && entry.since.elapsed() >= spared
                    && entry.place.try_lock().is_ok()
                    // Nobody is about to use it.
                    && Arc::strong_count(&entry.place) == 1
            });
            let oldest = old.min_by_key(|(_, entry)| entry.since);
            match oldest.map(|(key, entry)| (key.clone(), entry.here)) {
                Some((key, here)) => {
                    freed = freed.plus(here);
                    gone.push(key);
                }
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

    /// The directory where they wait, which is there from now on.
    pub(crate) fn made_directory(&self) -> Result<PathBuf, LocalError> {
        let directory = self.directory();
        // What came is for nobody else.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(io_error("create", &directory))?;
        Ok(directory)
    }

    /// Makes an empty directory from which the files can be taken to those of services.
    fn make(&self) -> Result<(PathBuf, Vec<u8>), LocalError> {
        let (directory, services) = (self.made_directory()?, self.state.join("services"));
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
    pub(crate) fn make_room(&mut self, announced: Taken) -> Result<Room, String> {
        let taken = announced.with_names();
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
            since: Instant::now(),
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
            Some(found) if Taken::of(&found).bytes > most => {
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
            kept.since = Instant::now();
        }
    }

    /// Puts what is here in the place of this directory, which is empty.
    pub(crate) fn put_in(mut self, place: &Path) -> Result<(), LocalError> {
        let Some(kept) = self.kept.as_mut().and_then(|kept| kept.take()) else { return Ok(()) };
        fs::remove_dir(place).map_err(io_error("remove the empty directory", place))?;
        let renamed = rename_directory(&kept.directory.0, place);
        renamed.map_err(io_error("put files that were sent ahead into", place))
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
                // Who only looked at them makes them no younger.
                places.insert(self.key.clone(), Entry { since: of.since, ..Entry::new(place, of.taken) });
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
mod tests;
