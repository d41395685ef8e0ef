//! Shared memory whose pages come while its processes run.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use godwit_memory::pager::{Event, PagerError, Restored};
use godwit_memory::shared::{FIRST_SPACE, Kind, Replica};

use nix::sys::socket::{MsgFlags, recv, send};

use crate::child::{Child, Op, P, next_random, place};
use crate::connections::raw;
use crate::service::{Criu, Pager, put, tags};
use crate::{BASE, ELSEWHERE};

/// The space of the memory.
const SHARED: u32 = FIRST_SPACE + 5;

/// Pages of a huge page.
const HUGE: u64 = 512;

/// Shared memory on its way, and processes that have it.
struct Service {
    pager: Pager,
    memory: File,
    processes: Vec<Child>,
    pids: Vec<u32>,
}

impl Service {
    /// Memory of so many pages, all of which are to come, and processes that map it at [`BASE`].
    fn new(pages: u64, processes: usize) -> Self {
        let pager = Pager::new();
        let replica = Replica::new(&Kind::Anonymous, pages * P, None).unwrap();
        replica.allocate(&(0..pages * P)).unwrap();
        let memory = File::options().read(true).write(true).open(replica.path()).unwrap();
        pager.client.share(SHARED, Path::new(&replica.path()), pages * P).unwrap();
        pager.pending(SHARED, 0, pages);
        let processes: Vec<_> = (0..processes).map(|_| Child::new()).collect();
        for child in &processes {
            child.ask(Op::MapShared, BASE, pages, place(&memory));
        }
        let pid = |child: &Child| u32::try_from(child.ask(Op::Pid, 0, 0, 0)[0]).unwrap();
        let pids = processes.iter().map(pid).collect();
        Self { pager, memory, processes, pids }
    }

    /// CRIU is done.
    fn restore(&self) {
        let mut criu = Criu::connect(&self.pager);
        for (child, pid) in self.processes.iter().zip(&self.pids) {
            criu.process(i32::try_from(*pid).unwrap(), &child.ask_fd(Op::Uffd));
            child.ask(Op::Close, 0, 0, 0);
        }
        criu.finished();
        assert_eq!(self.pager.event(), Event::RestoreFinished);
    }

    /// It is, and they run.
    fn run(self) -> Self {
        self.restore();
        self.verify().unwrap();
        self.pager.client.push().unwrap();
        self
    }

    fn verify(&self) -> Result<(), PagerError> {
        let restored = |pid: &u32| Restored { space: *pid, pid: *pid };
        self.pager.client.verify(&self.pids.iter().map(restored).collect::<Vec<_>>())
    }

    fn asked(&self) -> u64 {
        match self.pager.event() {
            Event::Fault { space: SHARED, addr } => addr / P,
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, page: u64, tags: &[u64]) {
        self.pager.put(SHARED, page * P, tags);
    }
}

#[test]
fn pages_of_shared_memory_come_once_for_all_processes() {
    let service = Service::new(100, 2).run();
    let (pager, [one, other]) = (&service.pager, &service.processes[..]) else { unreachable!() };
    let wanted = tags(1, 0, 100, 0);
    one.tell(Op::Read, BASE + 3 * P, 1, 0);
    assert_eq!(service.asked(), 3);
    other.tell(Op::Write, BASE + 3 * P, 1, 7);
    assert!(!other.answers_within(50) && !one.answers_within(0));
    service.send(3, &wanted[3..4]);
    other.answer();
    assert!([7, wanted[3]].contains(&one.answer().0[0]));
    // What came twice does not come over what was written.
    service.send(3, &wanted[3..4]);
    assert_eq!(one.ask(Op::Read, BASE + 3 * P, 1, 0), [7]);
    let fork = other.another(Op::Fork);
    fork.tell(Op::Read, BASE + 50 * P, 1, 0);
    assert_eq!(service.asked(), 50);
    service.send(0, &wanted[..3]);
    service.send(4, &wanted[4..]);
    assert_eq!(fork.answer().0, wanted[50..51]);
    pager.wait_for(&Event::Done);
    for child in [one, other, &fork] {
        let read = child.ask(Op::Read, BASE, 100, 0);
        assert!(read[..3] == wanted[..3] && read[3] == 7 && read[4..] == wanted[4..]);
    }
    let state = pager.client.state().unwrap();
    assert_eq!((state.pending, state.stored, state.spaces), (0, 0, 0));
    pager.wait_for_empty_store();
}

#[test]
fn what_the_service_has_given_back_does_not_come() {
    let service = Service::new(20, 2).run();
    let [one, other] = &service.processes[..] else { unreachable!() };
    let wanted = tags(1, 0, 20, 0);
    // Somebody waits for what another gives back.
    other.tell(Op::Read, BASE + 5 * P, 1, 0);
    assert_eq!(service.asked(), 5);
    one.ask(Op::Remove, BASE + 4 * P, 4, 0);
    assert_eq!(one.ask(Op::Read, BASE + 5 * P, 1, 0), [0]);
    assert_eq!(other.answer().0, [0]);
    one.ask(Op::Write, BASE + 6 * P, 1, 9);
    // A mapping that is dropped loses nothing.
    one.ask(Op::DontNeed, BASE + 10 * P, 2, 0);
    service.send(0, &wanted);
    service.pager.wait_for(&Event::Done);
    let mut right = wanted.clone();
    right[4..8].copy_from_slice(&[0, 0, 9, 0]);
    for child in [one, other] {
        assert_eq!(child.ask(Op::Read, BASE, 20, 0), right);
    }
}

#[test]
fn pages_that_are_collapsed_moved_or_mapped_twice_come_all_the_same() {
    let service = Service::new(3 * HUGE, 1).run();
    let child = &service.processes[0];
    let wanted = tags(1, 0, 3 * HUGE, 0);
    // The kernel may make a huge page of placeholders, but must not map it unasked.
    child.ask(Op::Collapse, BASE, HUGE, 0);
    child.tell(Op::Read, BASE, 1, 0);
    assert_eq!(service.asked(), 0);
    service.send(0, &wanted[..1]);
    assert_eq!(child.answer().0, wanted[..1]);
    child.ask(Op::Remap, BASE + HUGE * P, 10, ELSEWHERE);
    child.tell(Op::Read, ELSEWHERE + 2 * P, 1, 0);
    assert_eq!(service.asked(), HUGE + 2);
    let at = usize::try_from(HUGE).unwrap();
    service.send(HUGE + 2, &wanted[at + 2..at + 3]);
    assert_eq!(child.answer().0, wanted[at + 2..at + 3]);
    // Of a second mapping the kernel tells no length: who touches it waits for all.
    child.ask(Op::Duplicate, BASE + 2 * HUGE * P, 10, ELSEWHERE + HUGE * P);
    child.tell(Op::Read, ELSEWHERE + HUGE * P, 10, 0);
    assert!(!child.answers_within(50));
    for (page, tag) in (0..).zip(&wanted).filter(|(page, _)| ![0, HUGE + 2].contains(page)) {
        service.send(page, &[*tag]);
    }
    assert_eq!(child.answer().0, wanted[2 * at..2 * at + 10]);
    service.pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, HUGE, 0), wanted[..at]);
    assert_eq!(child.ask(Op::Read, ELSEWHERE, 10, 0), wanted[at..at + 10]);
    assert_eq!(child.ask(Op::Read, BASE + 2 * HUGE * P, HUGE, 0), wanted[2 * at..]);
}

/// Whether the pager speaks with a client of the first version.
fn speaks_with_the_first(pager: &Pager) -> bool {
    let socket = raw(pager);
    send(socket.as_raw_fd(), &[0x08, 1, 0x12, 2, 0x08, 1], MsgFlags::MSG_NOSIGNAL).unwrap();
    let mut answer = [0; 1000];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
    !String::from_utf8_lossy(&answer[..length]).contains("the pager speaks 2 to 2")
}

#[test]
fn a_daemon_that_does_not_know_of_shared_memory_is_refused_until_all_is_there() {
    let mut service = Service::new(2, 1).run();
    assert!(!speaks_with_the_first(&service.pager));
    service.pager.reconnect();
    service.send(0, &[5, 6]);
    service.pager.wait_for(&Event::Done);
    assert!(speaks_with_the_first(&service.pager));
    assert_eq!(service.processes[0].ask(Op::Read, BASE, 2, 0), [5, 6]);
}

#[test]
fn a_process_that_could_not_wait_for_pages_is_not_let_run() {
    let service = Service::new(10, 2);
    let mut criu = Criu::connect(&service.pager);
    let pid = service.pids[0];
    criu.process(i32::try_from(pid).unwrap(), &service.processes[0].ask_fd(Op::Uffd));
    criu.finished();
    assert_eq!(service.pager.event(), Event::RestoreFinished);
    let Err(PagerError::Refused { reason, .. }) = service.verify() else { panic!("it may run") };
    assert!(reason.contains(&format!("process {}", service.pids[1])), "{reason}");
}

#[test]
fn a_process_that_has_placeholders_in_place_is_not_let_run() {
    let service = Service::new(10, 1);
    service.processes[0].ask(Op::Lock, BASE + 4 * P, 1, 0);
    service.restore();
    let Err(PagerError::Refused { reason, .. }) = service.verify() else { panic!("it may run") };
    assert!(reason.contains(&format!("a page at {:#x}", BASE + 4 * P)), "{reason}");
}

#[test]
fn memory_that_no_process_has_any_more_is_not_waited_for() {
    let service = Service::new(10, 2);
    service.processes.iter().for_each(|child| drop(child.ask(Op::Unmap, BASE, 10, 0)));
    let service = service.run();
    service.pager.wait_for(&Event::Done);
    assert_eq!(service.pager.client.missing().unwrap(), []);
}

#[test]
fn memory_that_is_not_there_or_told_of_too_late_is_refused() {
    let pager = Pager::new();
    let replica = Replica::new(&Kind::Anonymous, 2 * P, None).unwrap();
    let share = |space, path: &str, size| pager.client.share(space, Path::new(path), size);
    for (space, path, size) in
        [(SHARED, "/nowhere", 2 * P), (SHARED, &replica.path(), P), (7, &replica.path(), 2 * P)]
    {
        assert!(matches!(share(space, path, size), Err(PagerError::Refused { .. })), "{space} {path} {size}");
    }
    share(SHARED, &replica.path(), 2 * P).unwrap();
    assert!(share(SHARED, &replica.path(), 2 * P).is_err());
    Criu::connect(&pager).finished();
    assert!(share(SHARED + 1, &replica.path(), 2 * P).is_err());
}

/// One history: what processes do with the memory while its pages come in any order, against a model.
fn history(mut seed: u64) {
    const PAGES: u64 = 2000;
    println!("seed {seed}");
    let mut service = Service::new(PAGES, 2).run();
    let source = tags(1, 0, PAGES, 0);
    let mut model = source.clone();
    let (client, events) = (service.pager.client.clone(), service.pager.events.take().unwrap());
    let sent = source.clone();
    let answers = std::thread::spawn(move || {
        loop {
            match events.next().expect("the pager is gone") {
                Event::Fault { space: SHARED, addr } => {
                    let page = usize::try_from(addr / P).unwrap();
                    put(&client, SHARED, addr, &sent[page..=page]);
                }
                Event::Done => return,
                other => panic!("{other:?}"),
            }
        }
    });
    let mut random = |below: u64| next_random(&mut seed) % below;
    let mut unsent = 0;
    for step in 0..400 {
        let who = usize::try_from(random(service.processes.len() as u64)).unwrap();
        let child = &service.processes[who];
        let (page, most) = (random(PAGES), random(60) + 1);
        let count = most.min(PAGES - page);
        let (first, end) = (usize::try_from(page).unwrap(), usize::try_from(page + count).unwrap());
        let at = BASE + page * P;
        match random(100) {
            0..35 => {
                assert_eq!(child.ask(Op::Read, at, count, 0), model[first..end], "process {who} at {page}")
            }
            35..55 => {
                child.ask(Op::Write, at, 1, step + 1);
                model[first] = step + 1;
            }
            55..65 => drop(child.ask(Op::DontNeed, at, count, 0)),
            65..75 => {
                child.ask(Op::Remove, at, count, 0);
                model[first..end].fill(0);
            }
            75..80 => {
                // There and back, over a hole where nothing else is.
                child.ask(Op::Remap, at, count, ELSEWHERE);
                assert_eq!(child.ask(Op::Read, ELSEWHERE, count, 0), model[first..end]);
                child.ask(Op::Remap, ELSEWHERE, count, at);
            }
            80..84 if service.processes.len() < 6 => {
                let fork = child.another(Op::Fork);
                service.processes.push(fork);
            }
            84..86 => drop(child.ask(Op::Collapse, BASE + page / HUGE * HUGE * P, HUGE, 0)),
            _ => {
                // Those at the end come in the end.
                for _ in 0..random(20) {
                    if unsent < PAGES - 100 {
                        let at = usize::try_from(unsent).unwrap();
                        put(&service.pager.client, SHARED, unsent * P, &source[at..=at]);
                        unsent += 1;
                    }
                }
            }
        }
    }
    for page in unsent..PAGES {
        let at = usize::try_from(page).unwrap();
        put(&service.pager.client, SHARED, page * P, &source[at..=at]);
    }
    answers.join().unwrap();
    for (who, child) in service.processes.iter().enumerate() {
        assert!(child.ask(Op::Read, BASE, PAGES, 0) == model, "process {who} in the end");
    }
    service.pager.wait_for_empty_store();
    assert_eq!(service.memory.metadata().unwrap().len(), PAGES * P);
}

#[test]
fn every_process_reads_what_is_right_in_random_histories_of_shared_memory() {
    let count = std::env::var("GODWIT_PAGER_SEEDS").map_or(3, |count| count.parse().unwrap());
    for seed in 0..count {
        history(seed);
    }
}
