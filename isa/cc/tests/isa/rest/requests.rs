//! Requests for rest in every order, and at moments at which a process has something else to do.

use std::thread;
use std::time::{Duration, Instant};

use godwit_crossing::{Record, Request};
use godwit_isa_tests::rest::{
    Tree, ask, ask_plainly, halt, is_pending, limit_queue, proceed, record, stands,
};

use super::{Stepping, build};

/// Far more than a process takes to hear a request on any machine.
const LONGEST: Duration = Duration::from_secs(60);

/// What another process can send.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// Rest with this number above that of the last one that is over.
    Rest(u32),
    /// Go on, with such a number.
    GoOn(u32),
    /// Signal 58 as kill(2) sends it.
    Plain,
}

/// What a process knows of requests, as isa/ABI.md, section 7, has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    begun: u32,
    over: u32,
}

impl Known {
    fn after(self, sent: &[Sent]) -> Self {
        let Self { over: base, .. } = self;
        sent.iter().fold(self, |Self { begun, over }, one| match *one {
            Sent::Rest(above) => Self { begun: begun.max(base + above), over },
            Sent::GoOn(above) => Self { begun, over: over.max(base + above) },
            Sent::Plain => Self { begun, over: over.max(if begun > over { begun } else { over + 1 }) },
        })
    }

    /// The number of the rest that it stands at.
    fn rests_at(self) -> Option<u64> {
        (self.begun > self.over).then_some(u64::from(self.begun))
    }
}

fn send(process: i32, sent: Sent, base: u32) {
    match sent {
        Sent::Rest(above) => ask(process, Request::SIGNAL, Request::Rest(base + above)),
        Sent::GoOn(above) => ask(process, Request::SIGNAL, Request::GoOn(base + above)),
        Sent::Plain => ask_plainly(process, Request::SIGNAL),
    }
    .expect("it is there");
}

/// Waits until a process says what is asked for; the kernel tells nobody.
fn until(process: i32, what: &str, is_so: impl Fn(&Record) -> bool) -> Record {
    let begun = Instant::now();
    loop {
        let record = record(process).expect("it is godwit-cc's").expect("it has not ended");
        if is_so(&record) {
            return record;
        }
        assert!(begun.elapsed() < LONGEST, "{what}: {record:?}");
        thread::sleep(Duration::from_micros(100));
    }
}

/// Waits until all that was sent has been heard, and the process is where that leads.
fn settles(process: i32, known: Known, what: &str) {
    let is_there = |record: &Record| {
        record.over == u64::from(known.over)
            && record.rest.map(|rest| rest.number) == known.rests_at()
            && stands(process).expect("it is there") == known.rests_at().is_some()
            && !is_pending(process, Request::SIGNAL).expect("it is there")
    };
    until(process, what, is_there);
}

/// All sequences of these that are so long.
fn sequences(alphabet: &[Sent], length: usize) -> Vec<Vec<Sent>> {
    (0..length).fold(vec![Vec::new()], |shorter, _| {
        let longer = |one: &Vec<Sent>| {
            alphabet.iter().map(|more| one.iter().copied().chain([*more]).collect()).collect::<Vec<_>>()
        };
        shorter.iter().flat_map(longer).collect()
    })
}

/// Sends sequences to a program that runs, and to one at rest, all while it is stopped, so that it hears them together.
fn in_every_order(arguments: &[&str], alphabet: &[Sent], longest: usize) {
    let (_directory, program) = build("steps");
    let mut running = Stepping::start(&program, arguments);
    let process = running.tree().root;
    let mut known = Known { begun: 0, over: 0 };
    let mut steps = 0;
    let all = (1..=longest).flat_map(|length| sequences(alphabet, length));
    for (sequence, rests_before) in all.flat_map(|one| [(one.clone(), false), (one, true)]) {
        let base = known.over;
        let what = format!("{sequence:?} after {base}, at rest before: {rests_before}");
        if rests_before {
            known = known.after(&[Sent::Rest(1)]);
            send(process, Sent::Rest(1), base);
            settles(process, known, &what);
        }
        halt(process).expect("it is ours");
        for &one in &sequence {
            send(process, one, base);
        }
        proceed(process).expect("it is ours");
        known = known.after(&sequence);
        settles(process, known, &what);
        if let Some(number) = known.rests_at() {
            let above = u32::try_from(number).expect("a number") - base;
            send(process, Sent::GoOn(above), base);
            known.over = base + above;
            settles(process, known, &what);
        }
        // As if nothing had been.
        steps += 1;
        running.step(steps);
    }
    running.finish();
}

#[test]
fn requests_come_to_the_same_in_every_order() {
    let alphabet = [Sent::Rest(1), Sent::Rest(2), Sent::GoOn(1), Sent::GoOn(2), Sent::Plain];
    in_every_order(&[], &alphabet, 3);
}

/// Several threads may handle them at once.
#[test]
fn requests_of_several_threads_come_to_the_same_in_every_order() {
    in_every_order(&["threads"], &[Sent::Rest(1), Sent::Rest(2), Sent::GoOn(1), Sent::GoOn(2)], 3);
}

#[test]
fn a_process_that_was_never_asked_goes_on_undisturbed_and_comes_to_the_next_rest() {
    let (_directory, program) = build("steps");
    let mut running = Stepping::start(&program, &["threads"]);
    let tree = running.tree();
    for number in 1..=5 {
        let before = record(tree.root).expect("it is godwit-cc's").expect("it is there");
        let next = before.next().expect("there is a number");
        ask(tree.root, Request::SIGNAL, Request::GoOn(next)).expect("it is there");
        until(tree.root, "it does not hear it", |record| record.over == u64::from(next));
        running.step(2 * number - 1);
        let resting = tree.rest().expect("it comes to rest");
        assert_eq!(resting[0].1.number, u64::from(next) + 1);
        tree.go_on().expect("it goes on");
        running.step(2 * number);
    }
    running.finish();
}

#[test]
fn a_process_that_is_stopped_rests_when_it_is_continued() {
    let (_directory, program) = build("steps");
    let mut running = Stepping::start(&program, &["threads"]);
    let process = running.tree().root;
    halt(process).expect("it is ours");
    ask(process, Request::SIGNAL, Request::Rest(1)).expect("it is there");
    assert!(is_pending(process, Request::SIGNAL).expect("it is there"));
    assert_eq!(record(process).expect("it is godwit-cc's").and_then(|record| record.rest), None);
    proceed(process).expect("it is ours");
    until(process, "it does not rest", |record| record.rest.is_some());
    // At rest, too, it stops and stays where it is.
    halt(process).expect("it is ours");
    proceed(process).expect("it is ours");
    running.tree().rest().expect("it is at rest");
    assert_eq!(record(process).expect("it is godwit-cc's").map(|record| record.over), Some(0));
    running.tree().go_on().expect("it goes on");
    running.step(1);
    running.finish();
}

/// A number of rests of a program that is always about to do what its mode says.
fn rests_while(mode: &str, least_processes: usize) {
    const RESTS: u32 = 100;
    let (_directory, program) = build("steps");
    let mut running = Stepping::start(&program, &[mode]);
    let tree = running.tree();
    for number in 1..=RESTS {
        let resting = tree.rest().expect("all come to rest");
        if number > 1 {
            assert!(resting.len() >= least_processes, "{resting:?}");
        }
        tree.go_on().expect("all go on");
        running.step(number);
    }
    running.finish();
}

#[test]
fn a_process_that_forks_rests_with_its_children() {
    rests_while("forks", 1);
}

#[test]
fn a_process_that_starts_threads_rests_with_them() {
    rests_while("starts", 1);
}

/// The kernel refuses every queued signal then: those of the runtime to its threads, and *go on* from outside.
#[test]
fn a_process_whose_queue_of_signals_is_full_rests_and_goes_on() {
    let (_directory, program) = build("steps");
    let mut running = Stepping::start(&program, &["threads"]);
    let process = running.tree().root;
    for number in 1..=3 {
        halt(process).expect("it is ours");
        ask(process, Request::SIGNAL, Request::Rest(number)).expect("it is there");
        let limit = limit_queue(process, 0).expect("it is ours");
        proceed(process).expect("it is ours");
        let record = until(process, "it does not rest", |record| record.rest.is_some());
        assert_eq!(record.rest.map(|rest| rest.threads), Some(4));
        ask(process, Request::SIGNAL, Request::GoOn(number)).expect_err("the queue is full");
        ask_plainly(process, Request::SIGNAL).expect("it is there");
        until(process, "it does not go on", |record| record.over == u64::from(number));
        settles(process, Known { begun: number, over: number }, "it went on");
        running.step(number);
        limit_queue(process, limit).expect("it is ours");
    }
    assert_eq!(Tree::of(process).rest().expect("it comes to rest")[0].1.number, 4);
    running.tree().go_on().expect("it goes on");
    running.finish();
}

/// Nothing of a process is lost to a rest that its stacks have no room for: at the bottom of chains of calls whose clones
/// need more native stack than a slot has, and then more frames than its continuation buffer.
#[test]
fn a_chain_of_calls_that_is_too_deep_for_a_rest_outlives_it() {
    // 64 bytes of a native stack of 16 MiB for each; those of clones are larger.
    const DEEP: &str = "250000";
    let (_directory, program) = build("deep");
    let mut running = Stepping::start(&program, &[DEEP]);
    let tree = running.tree();
    tree.rest().expect("it comes to rest");
    tree.go_on().expect("it goes on");
    running.step(1);
    tree.rest().expect("it comes to rest");
    tree.restart().expect("it goes on");
    running.step(2);
    running.write(b"d");
    running.expect("ready\n");
    for number in 1..=3 {
        ask(tree.root, Request::SIGNAL, Request::Rest(number)).expect("it is there");
        settles(tree.root, Known { begun: number, over: number }, "it takes the rest back");
        running.step(2 + number);
    }
    running.finish();
}
