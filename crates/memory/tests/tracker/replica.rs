//! What a receiver would hold that applies all scans in order, compared with the processes.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use godwit_memory::Space;
use godwit_memory::process::{AreaKind, Piece, Process, Reader};
use godwit_memory::tracker::{Round, Tracker};

const PAGE: usize = 4096;

static ZERO: [u8; PAGE] = [0; PAGE];

/// Areas larger than this are not compared byte by byte.
const HUGE: u64 = 1 << 30;

pub(crate) struct Replica {
    spaces: BTreeMap<Space, BTreeMap<u64, Vec<u8>>>,
    reader: Reader,
}

impl Replica {
    pub(crate) fn new() -> Self {
        Self { spaces: BTreeMap::new(), reader: Reader::new() }
    }

    /// Makes a scan and applies it.
    pub(crate) fn scan(&mut self, tracker: &mut Tracker, pids: &[i32], frozen: bool) -> Round {
        let round = tracker.round(pids, frozen).expect("a scan");
        for space in &round.ended {
            assert!(self.spaces.remove(space).is_some(), "space {space} was never there");
        }
        for found in &round.spaces {
            let pages = self.spaces.entry(found.space).or_default();
            for range in &found.gone {
                for page in range.clone().step_by(PAGE) {
                    pages.remove(&page);
                }
            }
            for range in &found.written {
                let mut pieces = self.reader.pieces(&found.process, range.clone());
                while let Some(piece) = pieces.next() {
                    match piece {
                        Ok(Piece::Data { start, bytes }) => {
                            for (page, bytes) in (start..).step_by(PAGE).zip(bytes.chunks(4096)) {
                                pages.insert(page, bytes.to_vec());
                            }
                        }
                        Ok(Piece::Vanished(range)) => {
                            for page in range.step_by(PAGE) {
                                pages.remove(&page);
                            }
                        }
                        // The next scan says that it ended.
                        Err(_) if !frozen => break,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
        round
    }

    pub(crate) fn pages(&self, space: Space) -> usize {
        self.spaces.get(&space).map_or(0, BTreeMap::len)
    }

    /// Asserts that the replica is what these processes, which do not run, hold.
    pub(crate) fn assert_equals(&self, pids: &[i32]) {
        assert_eq!(self.spaces.len(), pids.len(), "as many spaces as processes");
        for &pid in pids {
            let process = Process::open(pid).expect("it lives");
            let pages = self.spaces.get(&process.space()).expect("the space is known");
            let memory = File::open(format!("/proc/{pid}/mem")).expect("its memory");
            let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("its page tables");
            let mut inside = 0;
            let areas = process.areas().expect("areas");
            for area in areas.iter().filter(|area| area.kind == AreaKind::Private) {
                inside += pages.range(area.range.clone()).count();
                if area.range.end - area.range.start > HUGE {
                    continue;
                }
                let count = usize::try_from((area.range.end - area.range.start) / 4096).expect("few pages");
                let mut entries = vec![0; count * 8];
                pagemap.read_exact_at(&mut entries, area.range.start / 4096 * 8).expect("its page tables");
                let mut page = vec![0; PAGE];
                for (address, entry) in area.range.clone().step_by(PAGE).zip(entries.chunks(8)) {
                    page.fill(0);
                    // Present or swapped; guard pages are among them and cannot be read.
                    if entry[7] & 0xc0 != 0 && memory.read_exact_at(&mut page, address).is_err() {
                        page.fill(0);
                    }
                    let sent = pages.get(&address).map_or(&ZERO[..], Vec::as_slice);
                    assert!(
                        sent == page,
                        "process {pid}, page {address:#x} of {area:x?}, entry {entry:x?}: not what was sent ({})",
                        if pages.contains_key(&address) { "once" } else { "never" },
                    );
                }
            }
            assert_eq!(inside, pages.len(), "process {pid}: pages that are carried by others, or not there");
        }
    }
}
