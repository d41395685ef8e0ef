//! Moves of one service, each with a fault at a moment of its own: whatever comes of the move, the service runs
//! at one node afterwards, with all of its data, and its client has lost nothing.
//!
//! ```text
//! the seed ──▶ [mode, fault, when, how long] ──▶ migrate ║ fault, mended ──▶ settled? ──▶ client, data, processes
//! ```
//! Only faults that no service may be lost by are among them: neither its processes nor its pager are killed.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use rustix::process::Signal;

use crate::{
    MODES, PATIENCE,
    disks::{Failing, Small},
    victim::{Attempt, NAME, Victim},
};

/// A move without a fault takes about as long on a machine with two busy cores.
const LATEST_MS: u64 = 1500;
/// Longer than the silence after which a link counts as cut.
const LONGEST_MS: u64 = 8000;
/// Data of the service.
const FILL: u64 = 16 << 20;
/// Room for the image and the databases of a node.
const DISK: u64 = 256 << 20;

/// What goes wrong, at which node where it is one.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    /// Nothing passes between the nodes for a while.
    Cut,
    /// The daemon gets SIGKILL, and is started again after a while.
    Killed(&'static str),
    /// It is told to end, and is started again after a while.
    Ended(&'static str),
    /// It gets SIGSTOP, and SIGCONT after a while.
    Stopped(&'static str),
    /// Both get SIGKILL, and are started again after a while.
    BothKilled,
    /// What CRIU has at work gets SIGKILL.
    Criu(&'static str),
    /// What runc has at work gets SIGKILL.
    Runc(&'static str),
    /// Its shims get SIGKILL: nobody takes the service's output any more.
    Shim(&'static str),
    /// `godwit cancel`.
    Cancelled,
    /// `godwit migrate` gets SIGKILL.
    Forgotten,
    /// Nothing more can be written to the disk of the node's state for a while.
    Full(&'static str),
    /// The daemon cannot read or write its databases for a while: with this error.
    Failing(&'static str, &'static str),
}

impl Fault {
    fn any(random: &mut Rng) -> Self {
        let node = if random.bool() { "a" } else { "b" };
        match random.u8(..13) {
            0 => Self::Nothing,
            1 => Self::Cut,
            2 => Self::Killed(node),
            3 => Self::Ended(node),
            4 => Self::Stopped(node),
            5 => Self::BothKilled,
            6 => Self::Criu(node),
            7 => Self::Runc(node),
            8 => Self::Cancelled,
            9 => Self::Forgotten,
            10 => Self::Full(node),
            11 => Self::Shim(node),
            _ => Self::Failing(node, if random.bool() { "EIO" } else { "ENOSPC" }),
        }
    }

    /// Brings it about and mends it after `lasting`.
    fn happen(self, victim: &Victim, disks: &[Small; 2], attempt: &Attempt, from: &str, lasting: Duration) {
        let lab = victim.bed.lab();
        match self {
            Self::Nothing => {}
            Self::Cut => {
                lab.cut("a", "b").unwrap();
                thread::sleep(lasting);
                lab.heal("a", "b").unwrap();
            }
            Self::Killed(node) => {
                lab.stop_node(node).unwrap();
                thread::sleep(lasting);
                lab.start_node(node).unwrap();
            }
            Self::Ended(node) => {
                victim.terminate(node);
                thread::sleep(lasting);
                victim.has_ended(node);
                lab.start_node(node).unwrap();
            }
            Self::Stopped(node) => {
                // A child that has not executed its program yet has its name.
                assert!(victim.signal(node, "godwitd", Signal::STOP) > 0);
                thread::sleep(lasting);
                victim.signal(node, "godwitd", Signal::CONT);
            }
            Self::BothKilled => {
                lab.stop_node("a").unwrap();
                lab.stop_node("b").unwrap();
                thread::sleep(lasting);
                lab.start_node("b").unwrap();
                lab.start_node("a").unwrap();
            }
            Self::Criu(node) => drop(victim.signal(node, "criu", Signal::KILL)),
            Self::Runc(node) => drop(victim.signal(node, "runc", Signal::KILL)),
            Self::Shim(node) => drop(victim.signal(node, "godwit-shim", Signal::KILL)),
            // It may be over, or too late.
            Self::Cancelled => drop(victim.bed.godwit(from, &["cancel", NAME])),
            Self::Forgotten => attempt.kill(),
            Self::Full(node) => {
                let full = disks[usize::from(node == "b")].fill();
                thread::sleep(lasting);
                drop(full);
            }
            Self::Failing(node, error) => {
                let state = lab.state(node).unwrap();
                let failing = Failing::of(victim.daemon(node), &state, error);
                thread::sleep(lasting);
                drop(failing);
            }
        }
    }
}

/// One move with its fault.
struct Trial {
    number: u32,
    mode: &'static str,
    from: &'static str,
    fault: Fault,
    after: Duration,
    lasting: Duration,
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, mode, from, fault, after, lasting } = self;
        write!(f, "{number}: {mode} from {from}, {fault:?} after {after:?} for {lasting:?}")
    }
}

/// Moves a service for `time`, and for one move at least; how many moves that were.
pub fn run(test: &str, seed: u64, time: Duration) -> u32 {
    let mut random = Rng::with_seed(seed);
    let mut disks = None;
    let mut victim = Victim::up_prepared(test, FILL, |bed| {
        disks = Some(["a", "b"].map(|node| Small::of(bed, node, DISK)));
    });
    let disks = disks.unwrap();
    let begun = Instant::now();
    let mut on = "a";
    let mut number = 0;
    while number == 0 || begun.elapsed() < time {
        number += 1;
        let trial = Trial {
            number,
            mode: MODES[random.usize(..MODES.len())],
            from: on,
            fault: Fault::any(&mut random),
            after: Duration::from_millis(random.u64(..LATEST_MS)),
            lasting: Duration::from_millis(random.u64(..LONGEST_MS)),
        };
        println!("{trial}");
        let to = if on == "a" { "b" } else { "a" };
        let attempt = victim.begin_with(on, to, &["--mode", trial.mode]);
        thread::sleep(trial.after);
        trial.fault.happen(&victim, &disks, &attempt, on, trial.lasting);
        on = settled(&victim, attempt);
        victim.runs_at(on);
        victim.has_its_data();
        victim.is_at_rest_on(on);
    }
    if on == "b" {
        victim.bed.migrate(NAME, "b", "a");
    }
    victim.is_as_before();
    number
}

/// Waits until both nodes say that the service runs at the same node; which.
fn settled(victim: &Victim, attempt: Attempt) -> &'static str {
    attempt.end();
    let begun = Instant::now();
    loop {
        // A daemon that cannot tell whether a move has committed ends.
        victim.revives();
        let told = ["a", "b"].map(|node| victim.told(node));
        for on in ["a", "b"] {
            let right = |asked: &str| if asked == on { "running" } else { "remote" };
            let agreed = ["a", "b"].into_iter().zip(&told).all(|(asked, told)| {
                told.iter().flatten().any(|told| told.node == on && told.state == right(asked))
            });
            if agreed {
                return on;
            }
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "the nodes do not agree where the service runs: {told:?}");
        thread::sleep(Duration::from_millis(50));
    }
}
