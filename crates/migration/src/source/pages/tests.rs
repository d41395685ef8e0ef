//! What is sent of memory that is written, given back and written again, and what comes of it at the
//! other end: a model of the destination takes every batch. The memory is this process's own.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::num::NonZeroUsize;

use godwit_memory::PAGE_SIZE;
use godwit_memory::batch::{Batch, Kind, Run, apply_deltas};
use godwit_memory::tracker::SpaceRound;
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

use super::*;

/// Pages of a region, which one stream has.
const REGION_PAGES: usize = 512;

#[repr(align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE]);

/// A source whose noted pages are chosen by number, and what its destination has.
struct Both {
    memory: Vec<Page>,
    process: Arc<Process>,
    pages: Pages,
    retained: HashMap<u64, [u8; PAGE]>,
    there: HashMap<u64, [u8; PAGE]>,
}

/// Pages of a batch, by number, in the order in which they were put in.
type Sent = Vec<(usize, Kind)>;

impl Both {
    /// With so many pages, all different, over so many streams.
    fn new(count: usize, streams: usize) -> Self {
        let mut memory = vec![Page([0; PAGE]); count];
        for (number, page) in memory.iter_mut().enumerate() {
            page.0 = content(number as u64);
        }
        let process = Arc::new(Process::open(i32::try_from(std::process::id()).unwrap()).unwrap());
        let pages = Pages::new(Backend::None, streams, Compress::Off, None, 1 << 20);
        Self { memory, process, pages, retained: HashMap::new(), there: HashMap::new() }
    }

    fn space(&self) -> Space {
        self.process.space()
    }

    fn address(&self, number: usize) -> u64 {
        self.memory[number].0.as_ptr() as u64
    }

    fn range(&self, number: usize) -> Range {
        self.address(number)..self.address(number) + PAGE_SIZE
    }

    /// The destination has retained this page as it is now.
    fn keep(&mut self, number: usize) {
        let address = self.address(number);
        let hash = self.pages.key.hash(&self.memory[number].0);
        self.pages.retained.set(self.process.space(), address, hash);
        self.retained.insert(address, self.memory[number].0);
    }

    fn todo(&mut self) -> &mut Todo {
        let process = Arc::clone(&self.process);
        self.pages.todo.entry(process.space()).or_insert_with(|| Todo::of(&process))
    }

    /// These pages were found written.
    fn wrote(&mut self, numbers: &[usize]) {
        for range in numbers.iter().map(|number| self.range(*number)).collect::<Vec<_>>() {
            self.todo().wrote(range);
        }
    }

    /// This page was found to be gone.
    fn gave_back(&mut self, number: usize) {
        let range = self.range(number);
        self.todo().gave_back(range);
    }

    /// The process has ended. Its number belongs to one that has these pages already.
    fn ended(&mut self, lives: &[usize]) {
        let lives = lives.iter().map(|number| self.range(*number)).collect();
        self.pages.ended.push(Ended { space: self.space(), owed: RangeSet::new(), lives });
    }

    /// A scan found these pages written, and those gone.
    fn scan(&mut self, written: &[usize], gone: &[usize]) {
        let ranges = |numbers: &[usize]| numbers.iter().map(|number| self.range(*number)).collect();
        let found = SpaceRound {
            space: self.space(),
            process: Arc::clone(&self.process),
            written: ranges(written),
            gone: ranges(gone),
            populated_pages: 0,
            executable: Vec::new(),
            unwatched: None,
        };
        self.pages.note(Round { spaces: vec![found], ended: Vec::new() }, Duration::from_secs(1));
    }

    /// A scan found that the process has ended.
    fn scan_none(&mut self) {
        let ended = vec![self.space()];
        self.pages.note(Round { spaces: Vec::new(), ended }, Duration::from_secs(1));
    }

    /// Another process has its number from now on.
    fn replace(&mut self) {
        self.process = Arc::new(Process::open(i32::try_from(std::process::id()).unwrap()).unwrap());
    }

    /// Sends what is noted, and lets the destination have it; each stream's batches.
    fn send(&mut self) -> Vec<Vec<Sent>> {
        self.send_in(State::Running)
    }

    fn send_in(&mut self, state: State) -> Vec<Vec<Sent>> {
        let (senders, receivers): (Vec<_>, Vec<_>) =
            self.pages.streams.iter().map(|_| mpsc::channel(64)).unzip();
        self.pages.send(&senders, state, &|_| ControlFlow::Continue(())).unwrap();
        drop(senders);
        let mut streams = Vec::new();
        for mut receiver in receivers {
            let mut batches = Vec::new();
            while let Some(message) = receiver.blocking_recv() {
                let Message::Pages(bytes) = message else { panic!("{}", message.name()) };
                batches.push(self.take(Batch::decode(bytes).unwrap()));
            }
            streams.push(batches);
        }
        streams
    }

    fn take(&mut self, batch: Batch) -> Sent {
        assert_eq!(batch.space, self.space());
        let (first, mut sent) = (self.address(0), Vec::new());
        for Run { range, kind, data } in batch.runs {
            let mut whole = data.as_chunks::<PAGE>().0.iter();
            let mut contents = Vec::new();
            for address in (range.start..range.end).step_by(PAGE) {
                contents.push(match kind {
                    Kind::Data => *whole.next().unwrap(),
                    Kind::Retained => self.retained[&address],
                    Kind::Delta => self.there[&address],
                    Kind::Zero => [0; PAGE],
                });
            }
            if kind == Kind::Delta {
                let mut bytes = contents.concat();
                apply_deltas(&data, &mut bytes).unwrap();
                contents = bytes.as_chunks::<PAGE>().0.to_vec();
            }
            for (address, content) in (range.start..range.end).step_by(PAGE).zip(contents) {
                self.there.insert(address, content);
                // Whole regions are named when a process ends, also around the pages of a test.
                let number = address.checked_sub(first).map(|bytes| usize::try_from(bytes).unwrap() / PAGE);
                sent.extend(number.filter(|number| *number < self.memory.len()).map(|number| (number, kind)));
            }
        }
        sent
    }

    /// What the destination has of a page; what never came reads as zero.
    fn has(&self, number: usize) -> [u8; PAGE] {
        self.there.get(&self.address(number)).copied().unwrap_or([0; PAGE])
    }

    /// It has all pages as they are.
    fn agrees(&self) {
        for (number, page) in self.memory.iter().enumerate() {
            assert!(self.has(number) == page.0, "page {number}");
        }
    }
}

/// A page that compresses with no other.
fn content(seed: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    for (index, word) in (0..).zip(page.as_chunks_mut::<8>().0) {
        *word = xxhash_rust::xxh3::xxh3_64(&[seed, index].map(u64::to_le_bytes).concat()).to_le_bytes();
    }
    page
}

#[test]
fn kept_pages_differences_and_data_go_in_one_batch_and_all_arrive() {
    use Kind::{Data, Delta, Retained};
    let mut both = Both::new(5, 1);
    both.keep(0);
    both.keep(1);
    both.wrote(&[0, 1, 2, 3, 4]);
    assert_eq!(both.send(), [[vec![(0, Retained), (1, Retained), (2, Data), (3, Data), (4, Data)]]]);
    both.agrees();

    // What was only named is whole at the source, but not remembered there: no difference yet.
    let before = both.memory[0].0;
    both.memory[0].0[7] ^= 1;
    both.memory[2].0[7] ^= 1;
    both.wrote(&[0, 1, 2, 3, 4]);
    assert_eq!(both.send(), [[vec![(0, Data), (2, Data)]]]);
    both.agrees();

    // The first is again what was retained, and named again.
    both.memory[0].0 = before;
    both.memory[1].0 = content(100);
    both.memory[2].0[9] ^= 1;
    both.memory[4].0 = [0; PAGE];
    both.wrote(&[0, 1, 2, 3, 4]);
    assert_eq!(both.send(), [[vec![(0, Retained), (1, Data), (2, Delta), (4, Kind::Zero)]]]);
    both.agrees();

    // Its difference to what was sent before it was named would be to the wrong page.
    both.memory[0].0[11] ^= 1;
    both.memory[1].0[11] ^= 1;
    both.memory[2].0[11] ^= 1;
    both.memory[4].0 = content(101);
    both.wrote(&[0, 1, 2, 4]);
    assert_eq!(both.send(), [[vec![(0, Data), (1, Delta), (2, Delta), (4, Data)]]]);
    both.agrees();

    // And so on: a difference where the page before is remembered, else all of it.
    both.memory[0].0[12] ^= 1;
    both.memory[4].0[12] ^= 1;
    both.wrote(&[0, 4]);
    assert_eq!(both.send(), [[vec![(0, Delta), (4, Data)]]]);
    both.agrees();
}

#[test]
fn a_process_that_ended_leaves_zeroes_but_where_its_successor_has_pages_already() {
    // More than one region, so that both streams have some of it.
    let mut both = Both::new(REGION_PAGES + 2, 2);
    let last = REGION_PAGES + 1;
    both.wrote(&[0, 1, last]);
    both.send();
    // Written again, so that the source remembers it for differences.
    both.memory[1].0[3] ^= 1;
    both.wrote(&[1]);
    both.send();
    assert!(both.has(1) == both.memory[1].0);

    // The successor has written what its predecessor had there: that is known of the predecessor only.
    both.ended(&[1]);
    both.wrote(&[1]);
    let streams = both.send();
    let sent: Vec<_> = streams.iter().flatten().flatten().copied().collect();
    let of =
        |number: usize| sent.iter().filter(|(n, _)| *n == number).map(|(_, kind)| *kind).collect::<Vec<_>>();
    assert_eq!(of(0), [Kind::Zero]);
    assert_eq!(of(1), [Kind::Data], "never empty in between, and no difference to another process's page");
    assert_eq!(of(last), [Kind::Zero]);
    assert!(
        streams.iter().all(|batches| !batches.is_empty()),
        "each stream forgets its own pages: {streams:?}"
    );
    assert!(both.has(0) == [0; PAGE] && both.has(last) == [0; PAGE] && both.has(1) == both.memory[1].0);

    // The successor ends as well: only what it had is told of, and nothing is told twice.
    both.ended(&[]);
    let sent: Vec<_> = both.send().into_iter().flatten().flatten().collect();
    assert!(sent.contains(&(1, Kind::Zero)) && !sent.contains(&(last, Kind::Zero)), "{sent:?}");
    assert!(both.has(1) == [0; PAGE]);
    both.ended(&[]);
    assert_eq!(both.send().concat(), Vec::<Sent>::new());
}

#[test]
fn what_was_noted_of_a_process_is_gone_when_another_one_has_its_number() {
    let mut both = Both::new(5, 1);
    both.scan(&[0, 1, 2], &[]);
    both.send();
    // Two scans with nothing sent between them, as before and behind the freeze: the first process has
    // given the page 0 back and written 3 and 4, and the other one has 1 and 4.
    both.scan(&[3, 4], &[0]);
    both.replace();
    both.scan(&[1, 4], &[2, 3]);
    both.send();
    for number in [0, 2, 3] {
        both.memory[number].0 = [0; PAGE];
    }
    both.agrees();
}

#[test]
fn what_the_destination_was_told_of_a_process_that_has_ended_is_taken_back() {
    let mut both = Both::new(REGION_PAGES + 2, 2);
    let last = REGION_PAGES + 1;
    both.scan(&[0, last], &[]);
    assert_eq!(pages_of(&both.pages.unnamed().spaces[&both.space()].1), 2);
    both.scan_none();
    let mut sent: Vec<_> = both.send().into_iter().flatten().flatten().collect();
    sent.sort_by_key(|(number, _)| *number);
    assert_eq!(sent, [(0, Kind::Zero), (last, Kind::Zero)]);
}

#[test]
fn a_successor_that_ends_before_its_pages_were_read_leaves_none_of_its_predecessor() {
    let mut both = Both::new(2, 1);
    both.wrote(&[0, 1]);
    both.send();
    both.ended(&[1]);
    both.send();
    assert!(both.has(0) == [0; PAGE] && both.has(1) == both.memory[1].0, "it is still to come");
    both.ended(&[]);
    both.send();
    assert!(both.has(1) == [0; PAGE]);
}

#[test]
fn a_page_that_was_given_back_crosses_again_with_what_it_held_before() {
    let mut both = Both::new(2, 1);
    both.wrote(&[0, 1]);
    both.send();
    both.gave_back(0);
    both.wrote(&[1]);
    assert_eq!(both.send(), [[vec![(0, Kind::Zero)]]], "the other one is as it was");
    assert!(both.has(0) == [0; PAGE]);
    both.wrote(&[0]);
    assert_eq!(both.send(), [[vec![(0, Kind::Data)]]]);
    both.agrees();
}

#[test]
fn a_page_is_named_once_unless_it_is_written_again() {
    let mut both = Both::new(8, 1);
    both.wrote(&[0, 1, 5]);
    let named = |both: &mut Both| {
        let first = both.address(0);
        let unnamed = both.pages.unnamed();
        let ranges = unnamed.spaces.values().flat_map(|(_, set)| set.iter());
        ranges
            .map(|range| ((range.start - first) / PAGE_SIZE, (range.end - first) / PAGE_SIZE))
            .collect::<Vec<_>>()
    };
    assert_eq!(named(&mut both), [(0, 2), (5, 6)]);
    assert_eq!(named(&mut both), []);
    both.wrote(&[1, 7]);
    assert_eq!(named(&mut both), [(1, 2), (7, 8)]);
    // Another process with its number has other pages, of which nobody was told.
    both.pages.todo.clear();
    both.wrote(&[5]);
    assert_eq!(named(&mut both), [(5, 6)]);
}

#[test]
fn what_lies_in_a_range_is_found_with_its_borders_cut() {
    let set: RangeSet<u64> = [0..10, 20..30, 40..50].into_iter().collect();
    let found = |range: Range| within(&set, &range).collect::<Vec<_>>();
    assert_eq!(found(5..45), [5..10, 20..30, 40..45]);
    assert_eq!(found(22..45), [22..30, 40..45]);
    assert!(found(10..20).is_empty());
}

#[test]
fn sending_ends_when_it_is_not_wanted_any_more() {
    // Two batches.
    let mut both = Both::new(100, 1);
    both.wrote(&(0..100).collect::<Vec<_>>());
    let (sender, mut receiver) = mpsc::channel(4);
    let sent = both.pages.send(&[sender], State::Running, &|_| ControlFlow::Break(()));
    assert!(matches!(sent, Err(PagesError::Stopped)));
    assert!(receiver.blocking_recv().is_some());
    assert!(receiver.blocking_recv().is_none(), "nothing more is sent");
}

#[test]
fn a_sending_thread_that_panics_is_not_taken_for_a_connection_that_is_closed() {
    let mut both = Both::new(1, 1);
    both.wrote(&[0]);
    let (sender, _receiver) = mpsc::channel(4);
    let sent = both.pages.send(&[sender], State::Running, &|_| panic!("nobody counts to {}", 7));
    let error = sent.unwrap_err();
    assert!(
        matches!(&error, PagesError::Panic(_)) && error.to_string().contains("nobody counts to 7"),
        "{error}"
    );
}

/// So many pages of this process that are noted and cannot be read: those of a file behind its end.
fn hole(pages: usize) -> Range {
    let length = NonZeroUsize::new(pages * PAGE).unwrap();
    let empty = tempfile::tempfile().unwrap();
    // SAFETY: a new mapping, of which nobody else knows, and which nobody reads.
    let start = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, empty, 0) }.unwrap();
    let start = start.as_ptr().addr() as u64;
    start..start + (pages * PAGE) as u64
}

#[test]
fn a_page_of_a_frozen_process_that_is_gone_when_its_turn_comes_is_told_of() {
    // The destination was told that all three come, and waits for them.
    let mut both = Both::new(1, 1);
    let gone = hole(2);
    both.wrote(&[0]);
    both.todo().wrote(gone.clone());
    assert_eq!(both.pages.unnamed().pages(), 3);
    both.send_in(State::Frozen);
    both.agrees();
    for page in gone.step_by(PAGE) {
        assert!(both.there.get(&page) == Some(&[0; PAGE]), "it waits for the page at {page:#x}");
    }
}

#[test]
fn what_is_gone_goes_before_all_that_may_come_after_a_restore() {
    let mut both = Both::new(3, 1);
    both.wrote(&[0, 1, 2]);
    both.send();
    both.memory[1].0 = [0; PAGE];
    both.gave_back(1);
    both.wrote(&[2]);
    assert!(both.pages.has_gone());
    assert_eq!(both.send_in(State::Needed), [[[(1, Kind::Zero)]]]);
    assert!(!both.pages.has_gone());
    assert_eq!(both.send_in(State::Dumping), [[[(2, Kind::Data)]]]);
    both.agrees();
}

#[test]
fn executable_pages_that_an_earlier_scan_has_noted_are_read_after_the_dump() {
    let mut both = Both::new(2, 1);
    both.scan(&[0, 1], &[]);
    both.scan(&[], &[]);
    let executable = both.range(0);
    both.todo().executable.insert(executable);
    assert_eq!(both.send_in(State::Dumping), [[[(1, Kind::Data)]]]);
    assert_eq!(both.send_in(State::Frozen), [[[(0, Kind::Data)]]]);
    both.agrees();
}

#[test]
fn what_an_ended_process_had_is_gone_before_a_restore() {
    let mut both = Both::new(2, 1);
    both.wrote(&[0, 1]);
    both.send();
    both.memory.iter_mut().for_each(|page| page.0 = [0; PAGE]);
    both.scan_none();
    assert!(both.pages.has_gone());
    both.send_in(State::Needed);
    both.agrees();
    assert!(!both.pages.has_gone());
}

#[test]
fn a_page_of_a_running_process_that_is_gone_is_left_to_the_next_scan() {
    let mut both = Both::new(1, 1);
    both.todo().wrote(hole(1));
    both.send();
    assert_eq!(both.there.len(), 0);
}

#[test]
fn what_has_content_is_never_taken_for_gone() {
    let both = Both::new(2, 1);
    is_empty(&both.process, &hole(1)).unwrap();
    let page = both.address(1);
    let error = is_empty(&both.process, &(both.range(1))).unwrap_err().to_string();
    assert!(error.contains(&format!("{page:#x}")) && error.contains("cannot be read"), "{error}");
}
