//! Shared memory of an arriving service: the streams' pages are written straight into what its processes will map.
//!
//! Where the service has a memory limit, a process in its cgroup is charged for the pages ([`Filler`]): without a limit the
//! daemon is, which is quicker.
//!
//! It is held here until the restored processes have it, or nobody needs it. Ends this daemon before that, it is gone, and
//! with it the move.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_memory::Space;
use godwit_memory::batch::{Batch, Kind, Run};
use godwit_memory::shared::{FIRST_SPACE, Filler, Replica};

use super::PageReceiverError;
use crate::message::{Segments, SharedSegment};

/// Most segments that are held: each takes a descriptor.
const MOST: usize = 1024;

/// The segments of a service.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Segmented>>);

#[derive(Debug, Default)]
struct Segmented {
    held: BTreeMap<Space, Arc<Held>>,
    /// To which they are charged.
    filler: Option<Arc<Filler>>,
}

/// One of them.
#[derive(Debug)]
struct Held {
    told: SharedSegment,
    replica: Replica,
    /// Bytes of memory that it took when it was last written to.
    allocated: AtomicU64,
}

/// Whether the pages of this space are shared memory.
pub(super) fn is_shared(space: Space) -> bool {
    space >= FIRST_SPACE
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Segmented> {
        // It is changed in single steps.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a filler is charged for them.
    pub(crate) fn is_charged(&self) -> bool {
        self.lock().filler.is_some()
    }

    /// Charges this filler for all that is made from now on.
    pub(crate) fn charge_to(&self, filler: Arc<Filler>) {
        self.lock().filler = Some(filler);
    }

    /// Ends the filler, if there is one. Pages that come later and were not there before are charged to this process.
    pub(crate) fn end_filler(&self) -> Result<(), PageReceiverError> {
        let (held, filler) = {
            let mut segmented = self.lock();
            (segmented.held.values().cloned().collect::<Vec<_>>(), segmented.filler.take())
        };
        let Some(filler) = filler else { return Ok(()) };
        // The streams must not find that it has gone.
        let charged = held.iter().try_for_each(|held| held.replica.charge_to(None));
        filler.end();
        charged.map_err(PageReceiverError::Shared)
    }

    /// Makes those that are named and not there, and gives up those that are not named.
    pub(crate) fn make(&self, segments: Segments) -> Result<(), PageReceiverError> {
        if segments.all.len() > MOST {
            return Err(PageReceiverError::Protocol("more segments of shared memory than a service has"));
        }
        let mut segmented = self.lock();
        let Segmented { held, filler } = &mut *segmented;
        let mut now = BTreeMap::new();
        for told in segments.all {
            if !is_shared(told.space) {
                return Err(PageReceiverError::Protocol(
                    "a segment of shared memory in the space of a process",
                ));
            }
            let segment = match held.remove(&told.space) {
                Some(before) if before.told == told => before,
                Some(_) => return Err(PageReceiverError::Protocol("a segment that has become another")),
                None => {
                    let replica = Replica::new(&told.kind(), told.size).map_err(PageReceiverError::Shared)?;
                    if filler.is_some() {
                        replica.charge_to(filler.as_ref()).map_err(PageReceiverError::Shared)?;
                    }
                    Arc::new(Held { told, replica, allocated: AtomicU64::new(0) })
                }
            };
            if now.insert(segment.told.space, segment).is_some() {
                return Err(PageReceiverError::Protocol("a segment of shared memory twice"));
            }
        }
        *held = now;
        Ok(())
    }

    /// Bytes of memory that they take.
    pub(super) fn bytes(&self) -> u64 {
        self.lock()
            .held
            .values()
            .map(|held| held.allocated.load(Ordering::Relaxed))
            .fold(0, u64::saturating_add)
    }

    /// Makes them known to CRIU in a directory that is not there yet.
    pub(crate) fn link_in(&self, directory: &Path) -> Result<(), PageReceiverError> {
        let link = || {
            std::fs::create_dir(directory)?;
            self.lock().held.values().try_for_each(|held| {
                symlink(held.replica.path(), directory.join(held.told.inode.to_string()))
            })
        };
        link().map_err(|source| PageReceiverError::Directory { directory: directory.to_owned(), source })
    }

    /// Puts pages into place; at most so many bytes of them in all segments.
    pub(super) fn store(&self, batch: Batch, most: u64) -> Result<(), PageReceiverError> {
        let Batch { space, runs } = batch;
        let held = self.lock().held.get(&space).cloned();
        let held = held.ok_or(PageReceiverError::Protocol("pages of a segment that it did not name"))?;
        for Run { range, kind, data } in runs {
            match kind {
                Kind::Zero => held.replica.clear(&range),
                Kind::Data => held.replica.write(range.start, &data),
                Kind::Retained | Kind::Delta => {
                    return Err(PageReceiverError::Protocol("pages of shared memory by their name"));
                }
            }
            .map_err(PageReceiverError::Shared)?;
        }
        let allocated = held.replica.allocated().map_err(PageReceiverError::Shared)?;
        held.allocated.store(allocated, Ordering::Relaxed);
        let bytes = self.bytes();
        if bytes > most { Err(PageReceiverError::TooMuch { bytes, most }) } else { Ok(()) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_memory::PAGE_SIZE;

    use super::*;

    fn segment(space: Space, size: u64) -> SharedSegment {
        SharedSegment { space: FIRST_SPACE + space, inode: 7, size, name: None, sealable: false }
    }

    fn named(all: &[SharedSegment]) -> Segments {
        Segments { all: all.to_vec() }
    }

    fn batch(space: Space, page: u64, kind: Kind) -> Batch {
        let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
        let data = if kind == Kind::Data { vec![5; 4096] } else { Vec::new() };
        Batch { space: FIRST_SPACE + space, runs: vec![Run { range, kind, data: data.into() }] }
    }

    #[test]
    fn pages_come_into_the_segment_that_the_restore_is_told_of() {
        let shared = Shared::default();
        shared.make(named(&[segment(0, 8192)])).unwrap();
        shared.store(batch(0, 1, Kind::Data), 1 << 30).unwrap();
        // One that is named again stays as it is.
        shared.make(named(&[segment(0, 8192), SharedSegment { inode: 8, ..segment(1, 4096) }])).unwrap();
        assert_eq!(shared.bytes(), 4096);
        let work = tempfile::tempdir().unwrap();
        let (some, none) = (work.path().join("some"), work.path().join("none"));
        shared.link_in(&some).unwrap();
        assert_eq!(std::fs::read(some.join("7")).unwrap(), [[0; 4096], [5; 4096]].concat());
        shared.store(batch(0, 1, Kind::Zero), 1 << 30).unwrap();
        assert_eq!(std::fs::read(some.join("7")).unwrap(), [0; 8192]);
        shared.make(named(&[])).unwrap();
        shared.link_in(&none).unwrap();
        assert_eq!(std::fs::read_dir(none).unwrap().count(), 0);
    }

    #[test]
    fn what_no_source_sends_is_refused() {
        let shared = Shared::default();
        let a_process = SharedSegment { space: 1, ..segment(0, 4096) };
        let no_size = segment(0, 0);
        for bad in [vec![a_process], vec![no_size], vec![segment(0, 4096); 2], vec![segment(0, u64::MAX)]] {
            assert!(shared.make(named(&bad)).is_err(), "{bad:?}");
        }
        shared.make(named(&[segment(0, 4096)])).unwrap();
        assert!(shared.make(named(&[segment(0, 8192)])).is_err());
        let shared = Shared::default();
        shared.make(named(&[segment(0, 8192)])).unwrap();
        for bad in [batch(1, 0, Kind::Data), batch(0, 2, Kind::Data), batch(0, 0, Kind::Retained)] {
            assert!(shared.store(bad, 1 << 30).is_err());
        }
        let error = shared.store(batch(0, 0, Kind::Data), 4095).unwrap_err();
        assert!(matches!(error, PageReceiverError::TooMuch { bytes: 4096, most: 4095 }), "{error}");
    }
}
