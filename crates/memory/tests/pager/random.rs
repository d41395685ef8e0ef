//! Random histories of processes and of the daemon against a model, which is simple: every page has
//! one right contents in every process, whenever it comes.

use std::collections::BTreeMap;

use godwit_memory::pager::{Client, Event, Extent};

use crate::child::{Child, Op, P, next_random};
use crate::service::{Pager, put};
use crate::{BASE, ELSEWHERE, restored};

/// Says how many histories there are, or which one: `GODWIT_PAGER_SEEDS=100`, `GODWIT_PAGER_SEED=3`.
const COUNT: &str = "GODWIT_PAGER_SEEDS";
const ONE: &str = "GODWIT_PAGER_SEED";

/// Pages of the area at the beginning.
const PAGES: u64 = 20_000;

/// Operations of one history.
const STEPS: u64 = 400;

struct Process {
    child: Child,
    /// Tags of mapped pages.
    memory: BTreeMap<u64, u64>,
}

struct World {
    seed: u64,
    pager: Pager,
    /// What a page of the source holds.
    source: BTreeMap<u64, u64>,
    /// Pages that were not sent yet.
    unsent: Vec<u64>,
    processes: Vec<Process>,
    tag: u64,
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        next_random(&mut self.seed) % below
    }

    fn new_tag(&mut self) -> u64 {
        self.tag += 1;
        self.tag
    }

    /// Rounds of copying, then what is left for later.
    fn before(&mut self) {
        for _ in 0..self.random(30) + 5 {
            let (first, count) = (self.random(PAGES), self.random(2000) + 1);
            let count = count.min(PAGES - first);
            let addr = BASE + first * P;
            if self.random(5) == 0 {
                self.pager.zero(7, addr, count);
                for page in 0..count {
                    self.source.remove(&(addr + page * P));
                }
            } else {
                let tags: Vec<_> = (0..count).map(|_| self.new_tag()).collect();
                self.pager.put(7, addr, &tags);
                self.source.extend((0..count).map(|i| addr + i * P).zip(tags));
            }
        }
        for _ in 0..self.random(20) {
            let (first, count) = (self.random(PAGES), self.random(40) + 1);
            let count = count.min(PAGES - first);
            let addr = BASE + first * P;
            self.pager.pending(7, addr, count);
            for page in 0..count {
                let tag = if self.random(4) == 0 { 0 } else { self.new_tag() };
                self.source.insert(addr + page * P, tag);
                self.unsent.push(addr + page * P);
            }
        }
    }

    /// Some of what was left comes by itself.
    fn send(&mut self, count: u64) {
        for _ in 0..count {
            let Some(addr) = self.unsent.pop() else { return };
            send_page(&self.pager.client, addr, self.source[&addr]);
        }
    }

    /// A mapped run of a process, as far as it goes.
    fn mapped(&mut self, who: usize) -> Option<(u64, u64)> {
        let memory = &self.processes[who].memory;
        let nth = next_random(&mut self.seed) % (memory.len() as u64).max(1);
        let start = *memory.keys().nth(usize::try_from(nth).unwrap())?;
        let longest = next_random(&mut self.seed) % 60 + 1;
        let count = (0..longest).take_while(|i| memory.contains_key(&(start + i * P))).count() as u64;
        Some((start, count))
    }

    fn step(&mut self) {
        let who = usize::try_from(self.random(self.processes.len() as u64)).unwrap();
        let kind = self.random(100);
        let Some((start, count)) = self.mapped(who) else { return };
        match kind {
            0..30 => {
                let wanted: Vec<_> =
                    self.processes[who].memory.range(start..start + count * P).map(|(_, t)| *t).collect();
                let read = self.processes[who].child.ask(Op::Read, start, count, 0);
                assert_eq!(read, wanted, "process {who} at {start:#x}");
            }
            30..45 => {
                let tag = self.new_tag();
                self.processes[who].child.ask(Op::Write, start, 1, tag);
                self.processes[who].memory.insert(start, tag);
            }
            45..55 => {
                self.processes[who].child.ask(Op::DontNeed, start, count, 0);
                for (_, tag) in self.processes[who].memory.range_mut(start..start + count * P) {
                    *tag = 0;
                }
            }
            55..65 => {
                self.processes[who].child.ask(Op::Unmap, start, count, 0);
                self.processes[who].memory.retain(|at, _| !(start..start + count * P).contains(at));
                if self.random(2) == 0 {
                    self.processes[who].child.ask(Op::Map, start, count, 0);
                    self.processes[who].memory.extend((0..count).map(|i| (start + i * P, 0)));
                }
            }
            65..80 => {
                let to = [BASE, ELSEWHERE][usize::from(kind.is_multiple_of(2))] + self.random(PAGES) * P;
                let Process { child, memory } = &mut self.processes[who];
                if memory.range(to..to + count * P).next().is_some() {
                    return;
                }
                let moved = child.ask(Op::Remap, start, count, to);
                for (page, _) in (0..).zip(moved).filter(|(_, moved)| *moved == 1) {
                    let tag = memory.remove(&(start + page * P)).unwrap();
                    memory.insert(to + page * P, tag);
                }
            }
            80..85 if self.processes.len() < 8 => {
                let child = self.processes[who].child.another(Op::Fork);
                let memory = self.processes[who].memory.clone();
                self.processes.push(Process { child, memory });
            }
            85..87 if self.processes.len() > 2 => self.processes.swap_remove(who).child.exit(),
            _ => {
                let count = self.random(6);
                self.send(count);
            }
        }
    }

    fn check_all(&self) {
        for (who, process) in self.processes.iter().enumerate() {
            let mut pages = process.memory.iter().peekable();
            while let Some((&start, &tag)) = pages.next() {
                let mut wanted = vec![tag];
                while let Some((_, tag)) = pages.next_if(|(at, _)| **at == start + wanted.len() as u64 * P) {
                    wanted.push(*tag);
                }
                let read = process.child.ask(Op::Read, start, wanted.len() as u64, 0);
                assert!(read == wanted, "process {who} from {start:#x} on");
            }
        }
    }
}

fn send_page(client: &Client, addr: u64, tag: u64) {
    if tag == 0 {
        client.zero(&[Extent { space: 7, addr, pages: 1 }]).unwrap();
    } else {
        put(client, 7, addr, &[tag]);
    }
}

fn history(seed: u64) {
    println!("seed {seed}");
    let mut world = World {
        seed,
        pager: Pager::new(),
        source: BTreeMap::new(),
        unsent: Vec::new(),
        processes: Vec::new(),
        tag: 0,
    };
    world.before();
    let child = restored(&world.pager, PAGES);
    let memory = (0..PAGES)
        .map(|i| BASE + i * P)
        .map(|at| (at, world.source.get(&at).copied().unwrap_or(0)))
        .collect();
    world.processes.push(Process { child, memory });
    // The daemon's answers to faults.
    let (client, events) = (world.pager.client.clone(), world.pager.events.take().unwrap());
    let source = world.source.clone();
    let answers = std::thread::spawn(move || {
        loop {
            match events.next().expect("the pager is gone") {
                Event::Fault { space: 7, addr } => send_page(&client, addr, source[&addr]),
                Event::Done => return,
                other => panic!("{other:?}"),
            }
        }
    });
    let start = world.random(STEPS / 4);
    for step in 0..STEPS {
        if step == start {
            world.pager.client.push().unwrap();
        }
        world.step();
    }
    world.send(u64::MAX);
    world.check_all();
    answers.join().unwrap();
    world.check_all();
    world.pager.wait_for_empty_store();
}

#[test]
fn every_process_reads_what_is_right_in_random_histories() {
    let number = |name| std::env::var(name).ok().map(|value: String| value.parse::<u64>().unwrap());
    if let Some(seed) = number(ONE) {
        return history(seed);
    }
    for seed in 0..number(COUNT).unwrap_or(5) {
        history(seed);
    }
}
