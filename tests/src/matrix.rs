//! Every fault in every phase of every mode of migration, and what must come of each.
//!
//! The cases are the product of [`Mode`]s, [`PHASES`] and [`Fault`]s; what is expected of a case is
//! worked out by [`Case::expected`]. `make test` takes a part of the product, see [`cases`]. One lab runs
//! several cases of one fault: the service goes to and fro, with one client that stays connected throughout.

use std::{
    collections::BTreeSet,
    fmt, fs,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    BUSY, crossing,
    hold::CROSSING,
    tier,
    victim::{Attempt, NAME, UNKNOWN, Victim},
    wait_for,
};

/// Data of the service: some hundred batches of pages.
const FILL: u64 = 16 << 20;

/// What a node has for services on their way to it where that is to be too little, in MiB, and what the
/// service grows by then.
const SCARCE: u64 = 96;

/// What is said of a service that was killed rather than let run on with holes in its memory.
const INCOMPLETE: &str = "its memory is not complete";

/// How the memory moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All of it while the service is frozen.
    Cold,
    /// In rounds before that.
    Precopy,
    /// After the commit.
    Postcopy,
    /// Once before, and what was written meanwhile after.
    Hybrid,
}

impl Mode {
    /// All of them; `auto` is one of these.
    pub const ALL: [Self; 4] = [Self::Cold, Self::Precopy, Self::Postcopy, Self::Hybrid];

    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }

    /// Memory is copied while the service runs at the source.
    fn copies(self) -> bool {
        matches!(self, Self::Precopy | Self::Hybrid)
    }

    /// Pages stay at the source beyond the commit.
    fn leaves(self) -> bool {
        matches!(self, Self::Postcopy | Self::Hybrid)
    }
}

/// What goes wrong, and is mended after a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing passes between the two nodes; later it does again.
    Cut,
    /// The source's daemon gets SIGKILL, and is started again.
    Source,
    /// The destination's daemon, likewise.
    Destination,
    /// The process that holds the pages at the destination gets SIGKILL.
    Pager,
    /// The same while the destination's daemon is down, which is started again.
    PagerUnseen,
    /// The service grows to more than the destination has memory for.
    Memory,
}

impl Fault {
    fn takes_pages(self) -> bool {
        matches!(self, Self::Pager | Self::PagerUnseen)
    }
}

/// A phase, by the point at its end where a migration can be held.
#[derive(Clone, Copy, Debug)]
struct Phase {
    point: &'static str,
    /// Whether the source has decided that the service is the destination's.
    committed: bool,
    /// The modes that come through it.
    of: fn(Mode) -> bool,
}

/// All phases, in order.
const PHASES: [Phase; 17] = [
    before("destination.reserved", any),
    before("destination.prepared", any),
    before("source.copying", Mode::copies),
    before("source.copied", Mode::copies),
    before("source.frozen", any),
    before("source.needed", any),
    before("source.sending", sends_frozen),
    before("destination.receiving", any),
    before("destination.received", any),
    before("destination.restoring", any),
    before("destination.restored", any),
    after("source.committed", any),
    after("destination.committing", any),
    after("destination.committed", any),
    after("source.serving", Mode::leaves),
    after("source.pushing", leaves_all),
    after("destination.filling", any),
];

/// Those of a service that goes on under other executables, beside them.
const PHASES_OF_CROSSING: [Phase; 2] = [before(CROSSING[0], any), before(CROSSING[1], any)];

fn phases() -> Vec<Phase> {
    let crossing = PHASES_OF_CROSSING.into_iter().filter(|_| crossing::is_wanted());
    PHASES.into_iter().chain(crossing).collect()
}

const fn before(point: &'static str, of: fn(Mode) -> bool) -> Phase {
    Phase { point, committed: false, of }
}

const fn after(point: &'static str, of: fn(Mode) -> bool) -> Phase {
    Phase { point, committed: true, of }
}

fn any(_: Mode) -> bool {
    true
}

/// So much stays that not all of it can have been asked for by the restore, as happens in mode hybrid.
fn leaves_all(mode: Mode) -> bool {
    mode == Mode::Postcopy
}

fn sends_frozen(mode: Mode) -> bool {
    !mode.leaves()
}

/// Where the service is in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// Where it was, as if nothing had been.
    Aborted,
    /// At the destination, with all it had.
    Moved,
    /// Ended at the destination, and godwit says so: its memory was not complete there.
    Lost,
    /// `Moved` or `Lost`: whether its memory was complete is up to chance.
    MovedOrLost,
}

/// One case.
#[derive(Clone, Copy, Debug)]
struct Case {
    mode: Mode,
    phase: Phase,
    fault: Fault,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:9} {:23} {:?}", self.mode.name(), self.phase.point, self.fault)
    }
}

/// The cases of a fault. In `make test` each phase meets it in one mode, which rotates from phase to phase and
/// from fault to fault: each pair of mode and phase, and of mode and fault, is there.
fn cases(fault: Fault) -> Vec<Case> {
    let mut cases = Vec::new();
    let phases = phases();
    for (number, phase) in phases.iter().copied().enumerate() {
        let modes: Vec<_> = Mode::ALL.into_iter().filter(|&mode| (phase.of)(mode)).collect();
        let turn = modes[(number + fault as usize) % modes.len()];
        for mode in modes {
            let case = Case { mode, phase, fault };
            let wanted = is_wanted(mode.name(), Mode::ALL.into_iter().map(Mode::name))
                && is_wanted(phase.point, phases.iter().map(|phase| phase.point));
            if case.is_possible() && wanted && (tier::is_full() || is_chosen() || mode == turn) {
                cases.push(case);
            }
        }
    }
    cases
}

/// Somebody looks into some of them, in every mode.
fn is_chosen() -> bool {
    std::env::var_os("GODWIT_MATRIX").is_some()
}

/// For people who look into some of them: modes and points named in `GODWIT_MATRIX`; without any, all.
fn is_wanted<'a>(name: &str, mut all: impl Iterator<Item = &'a str>) -> bool {
    let only = std::env::var("GODWIT_MATRIX").unwrap_or_default();
    let named = |name: &str| only.split(',').any(|word| word == name);
    named(name) || !all.any(named)
}

impl Case {
    /// There is something to go wrong.
    fn is_possible(&self) -> bool {
        // The pager is started for a service that has been let in.
        match self.fault {
            Fault::Pager | Fault::PagerUnseen => self.phase.point != "destination.reserved",
            // It grows while it runs, after it has been let in.
            Fault::Memory => matches!(self.phase.point, "destination.prepared" | "source.copied"),
            Fault::Cut | Fault::Source | Fault::Destination => true,
        }
    }

    /// Before the commit everything is undone. After it the service is the destination's, and what is
    /// mended goes on; only pages that were with the pager alone cannot be had again.
    fn expected(&self) -> Expected {
        match self.fault {
            _ if !self.phase.committed => Expected::Aborted,
            Fault::Pager | Fault::PagerUnseen if self.mode.leaves() && !self.may_run() => Expected::Lost,
            Fault::Pager | Fault::PagerUnseen => Expected::MovedOrLost,
            Fault::Cut | Fault::Source | Fault::Destination | Fault::Memory => Expected::Moved,
        }
    }

    /// The service may run at the destination, and ask for all the pages that it lacks.
    fn may_run(&self) -> bool {
        self.phase.point != "source.committed"
    }

    /// The source needs the destination again to come to an end.
    fn is_served(&self) -> bool {
        self.phase.committed && self.mode.leaves()
    }
}

/// Runs all cases of a fault, in several labs at once.
pub fn run(fault: Fault) {
    let cases = cases(fault);
    // A cut link is noticed by its silence, and waiting costs no CPU.
    let in_one = match fault {
        Fault::Cut => 5,
        // A service that has grown is refused from then on.
        Fault::Memory => 1,
        _ => 16,
    };
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, cases) in cases.chunks(in_one).enumerate() {
            let name = format!("m{number}{fault:?}").to_lowercase();
            threads.push(scope.spawn(move || run_in_lab(&name[..name.len().min(12)], cases)));
        }
        let failed = threads.into_iter().filter_map(|thread| thread.join().err()).count();
        assert_eq!(failed, 0, "labs with a case that failed");
    });
}

fn run_in_lab(name: &str, cases: &[Case]) {
    // One after the other: a daemon has a certain time to begin to serve.
    static UP: Mutex<()> = Mutex::new(());
    let mut stand = {
        let _one = UP.lock().unwrap_or_else(PoisonError::into_inner);
        Stand::up(name, cases[0].fault)
    };
    for &case in cases {
        let begun = Instant::now();
        println!("{case}: {:?} is due", case.expected());
        stand.run(case);
        println!("{case}: {:?} ({} ms)", case.expected(), begun.elapsed().as_millis());
    }
}

/// What the one who asked for a migration heard of its end.
#[derive(Default)]
struct Ending {
    /// The reason in its report.
    said: String,
    /// Its outcome was `lost`.
    reported_lost: bool,
}

/// A lab with the service on one of its nodes.
struct Stand {
    victim: Victim,
    /// Where the service is, and the other node.
    at: [&'static str; 2],
    /// What the node with the service holds, and what one without.
    holdings: [BTreeSet<String>; 2],
}

impl Stand {
    fn up(name: &str, fault: Fault) -> Self {
        let victim = Victim::up_filled(name, FILL, |config, _| {
            if fault == Fault::Memory {
                let scarce = ["--incoming-memory".to_owned(), SCARCE.to_string()];
                config.programs.serve_arguments.extend(scarce);
            }
        });
        let holdings = ["a", "b"].map(|node| victim.holdings(node));
        Self { victim, at: ["a", "b"], holdings }
    }

    fn run(&mut self, case: Case) {
        let [from, to] = self.at;
        let Case { mode, phase, fault } = case;
        let victim = &mut self.victim;
        let log = victim.bed.lab().log(from).unwrap();
        let logged = fs::metadata(&log).unwrap().len();
        let mut attempt = victim.begin_with_and_hold(from, to, &["--mode", mode.name()], phase.point);
        let ending = match fault {
            Fault::Cut => {
                victim.bed.lab().cut("a", "b").unwrap();
                victim.let_go(phase.point);
                if case.is_served() {
                    // Or all pages had come by then.
                    wait_for("the source's trying again", || {
                        let text = fs::read_to_string(&log).unwrap();
                        let tries = text[usize::try_from(logged).unwrap()..].contains("trying again");
                        (tries || attempt.has_ended()).then_some(())
                    });
                    victim.bed.lab().heal("a", "b").unwrap();
                    finish(case, attempt)
                } else {
                    let ending = finish(case, attempt);
                    victim.bed.lab().heal("a", "b").unwrap();
                    ending
                }
            }
            Fault::Source => {
                victim.bed.lab().stop_node(from).unwrap();
                // Whoever had asked for it hears that its daemon has gone, unless it was over.
                let said = attempt.end();
                assert!(said.code == UNKNOWN || phase.committed, "{said:?}");
                victim.let_go(phase.point);
                victim.bed.lab().start_node(from).unwrap();
                Ending::default()
            }
            Fault::Destination | Fault::PagerUnseen => {
                victim.bed.lab().stop_node(to).unwrap();
                if fault.takes_pages() {
                    kill_pagers(case, victim.pagers(to));
                }
                victim.let_go(phase.point);
                if case.is_served() {
                    victim.bed.lab().start_node(to).unwrap();
                    finish(case, attempt)
                } else {
                    let ending = finish(case, attempt);
                    victim.bed.lab().start_node(to).unwrap();
                    ending
                }
            }
            Fault::Memory => {
                victim.grows(SCARCE << 20);
                victim.let_go(phase.point);
                let ending = finish(case, attempt);
                let said = &ending.said;
                let refused = said.contains(&format!("node {to} gave up")) && said.contains("allowed");
                assert!(refused || BUSY.iter().any(|busy| said.contains(busy)), "{said}");
                ending
            }
            Fault::Pager => {
                kill_pagers(case, victim.pagers(to));
                victim.let_go(phase.point);
                finish(case, attempt)
            }
        };
        self.ends_as(case, &ending);
    }

    /// Checks how it ended, on both nodes.
    fn ends_as(&mut self, case: Case, ending: &Ending) {
        let said = &ending.said;
        let [from, to] = self.at;
        let moved = match case.expected() {
            Expected::Aborted => false,
            Expected::Moved => true,
            Expected::Lost => {
                assert!(said.contains(INCOMPLETE), "{said}");
                return self.is_lost();
            }
            Expected::MovedOrLost => {
                wait_for("an end of its arrival", || self.victim.pagers(to).is_empty().then_some(()));
                let stopped = self.victim.shown(to, |shown| {
                    shown.is_some_and(|shown| shown.node == to && shown.state != "migrating")
                });
                if stopped.is_some_and(|shown| shown.state == "stopped") {
                    return self.is_lost();
                }
                assert!(!ending.reported_lost, "it runs: {said}");
                true
            }
        };
        if moved {
            self.at = [to, from];
        }
        self.victim.runs_at(self.at[0]);
        self.holds_nothing_more();
        self.victim.has_its_data();
    }

    /// The service has ended, godwit says why, and another one can take its place.
    fn is_lost(&mut self) {
        let [_, to] = self.at;
        let shown =
            self.victim.shown(to, |shown| shown.is_some_and(|shown| shown.state == "stopped")).unwrap();
        assert!(shown.reason.contains(INCOMPLETE), "{shown:?}");
        self.victim.never_ran_twice();
        self.victim.bed.done(to, &["rm", NAME]);
        for node in self.at {
            self.victim.shown(node, |shown| shown.is_none());
            wait_for("an end of the service everywhere", || {
                (self.victim.holdings(node) == self.holdings[1]).then_some(())
            });
        }
        self.at = ["a", "b"];
        self.victim.renew("a");
    }

    /// Each node holds what it held when nothing was under way.
    fn holds_nothing_more(&self) {
        for (node, due) in self.at.into_iter().zip(&self.holdings) {
            let mut last = BTreeSet::new();
            wait_for("an end of everything that belongs to a migration", || {
                let now = self.victim.holdings(node);
                if now != last {
                    let more: Vec<_> = now.difference(due).collect();
                    let less: Vec<_> = due.difference(&now).collect();
                    if !(more.is_empty() && less.is_empty()) {
                        println!("node {node} has more: {more:?}, lacks: {less:?}");
                    }
                    last.clone_from(&now);
                }
                (now == *due).then_some(())
            });
        }
    }
}

fn kill_pagers(case: Case, pagers: Vec<Pid>) {
    // One that has filled the service may have ended.
    assert!(pagers.len() == 1 || case.expected() == Expected::MovedOrLost, "{pagers:?}");
    for pager in pagers {
        // It may end by itself right now.
        let _ = kill_process(pager, Signal::KILL);
    }
}

/// The end of the attempt, as it must be; what its report adds.
fn finish(case: Case, attempt: Attempt) -> Ending {
    let (reported_lost, said) = match case.expected() {
        Expected::Aborted => (false, attempt.aborted()),
        Expected::Moved => (false, attempt.moved()),
        Expected::Lost => (true, attempt.lost()),
        // What is lost after the source has let go is in no report.
        Expected::MovedOrLost => attempt.moved_or_lost(),
    };
    Ending { said, reported_lost }
}
