//! The commit protocol, checked against all orders in which two nodes, their disks and the network can fail.
//!
//! A model of source, destination and both journals: every step that is one write or one action is a step of the
//! model, and between any two of them a daemon may die, a message may be lost, come late or come twice, a write may
//! fail, an attempt to remove something may fail, a journal may forget what is final, and a machine may come back
//! with an empty disk. The rules of the model are those of the program: [`older`], [`act`] and [`answer`].
//!
//! Two things must hold in every state: the service never runs twice, and it is never nowhere unless the disk of
//! its owner is gone. And where all is quiet, it runs. With each rule of earlier versions the model must find how
//! the service was lost or doubled; else it would show nothing.
#![allow(clippy::unwrap_used, missing_docs)]

use std::net::Ipv4Addr;
use std::time::Instant;

use godwit_migration::journal::{Entry, Older, Role, Stage, older};
use godwit_migration::recovery::{Act, act, answer};
use godwit_migration::{Attachment, Decision, Known, Service};
use stateright::{Checker, HasDiscoveries, Model, Property};

const TWICE: &str = "never two that run";
/// The second of these says the same where nothing more happens.
const LOST: [&str; 2] = ["never none, unless the disk of its owner is gone", "where all is quiet it runs"];

/// What the nodes do; all false is what they do now. Each other rule is one of an earlier version.
#[derive(Clone, Copy, Default)]
struct Rules {
    /// A commit is forgotten without the destination's acknowledgement.
    forgets_commits: bool,
    /// A source that does not know a migration says that it aborted it.
    unknown_is_aborted: bool,
    /// What an entry is about is found by name alone, an attempt that fails is left to the next start, and
    /// newer migrations do not end older entries.
    by_name: bool,
    /// An error of the commit's write counts as "not written", and the undo thaws before it writes.
    errors_are_no: bool,
}

/// How much happens at most.
#[derive(Clone, Copy)]
struct Bounds {
    moves: u8,
    crashes: u8,
    /// Writes or removals that fail.
    errors: u8,
    /// Disks that are replaced.
    disks: u8,
}

/// What a daemon is doing about an entry; forgotten when it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doing {
    Nothing,
    Talk,
    /// The source, between its commit and the word of it.
    Tell,
    Undo,
    LetGo,
    Drop,
    Ask,
    Own,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Row {
    migration: u8,
    role: Role,
    stage: Stage,
    epoch: u64,
    /// The identity of the source's journal.
    journal: u8,
    acknowledged: bool,
    doing: Doing,
}

/// What a machine has of the service, with the epoch that its directory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Held {
    Nothing,
    Running(u64),
    Frozen(u64),
    Stopped(u64),
}

impl Held {
    fn epoch(self) -> Option<u64> {
        match self {
            Self::Nothing => None,
            Self::Running(epoch) | Self::Frozen(epoch) | Self::Stopped(epoch) => Some(epoch),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    up: bool,
    journal: u8,
    rows: Vec<Row>,
    books: Known,
    held: Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Accepted,
    Images,
    Restored,
    Commit,
    Abort,
    Running,
    Committed,
    Aborted,
}

/// All that was ever said in a migration: it may come now, late, twice, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Said {
    epoch: u64,
    journal: u8,
    source: usize,
    messages: u16,
}

impl Said {
    fn has(self, message: Message) -> bool {
        self.messages & (1 << message as u16) != 0
    }

    fn say(&mut self, message: Message) {
        self.messages |= 1 << message as u16;
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    nodes: [Node; 2],
    /// By migration.
    wire: Vec<Said>,
    crashes: u8,
    errors: u8,
    disks: u8,
    /// The disk of a destination is gone that had said that its copy is complete.
    promised: bool,
    /// The disk of its owner is gone.
    lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Begin(usize),
    /// A source's request reaches the destination.
    Admit(usize, u8),
    /// The next step of what a node is doing about a migration.
    Step(usize, u8),
    /// A conversation ends, by a broken link or by the user's will.
    Break(usize, u8),
    /// The source's disk answers the commit with an error, though it has it (or not).
    CommitFails(usize, u8, bool),
    /// Something cannot be removed.
    Fails(usize, u8),
    /// The source answers a destination in doubt.
    Answer(usize, u8),
    /// The destination has said that it owns the service.
    Hear(usize, u8),
    Crash(usize),
    Start(usize, bool),
    Replace(usize),
}

struct Protocol {
    rules: Rules,
    bounds: Bounds,
}

fn row(node: &mut Node, migration: u8) -> Option<&mut Row> {
    node.rows.iter_mut().find(|row| row.migration == migration)
}

/// What the source's answer is made from.
fn entry(row: &Row) -> Entry {
    let service = Service {
        id: "1".into(),
        name: "s".parse().unwrap(),
        address: Ipv4Addr::UNSPECIFIED,
        more: Vec::new(),
        network: Attachment::Overlay,
        hooks: godwit_migration::hooks::Hooks::default(),
        epoch: row.epoch,
        image: String::new(),
        image_digest: None,
        image_id: None,
        platforms: Vec::new(),
        layers: Vec::new(),
        command: Vec::new(),
        env: Vec::new(),
        mounts: Vec::new(),
        memory_bytes: 0,
        cpu_millis: 0,
        publish: Vec::new(),
        hostname: String::new(),
        user: godwit_engine::User::default(),
        workdir: "/".into(),
        labels: Vec::new(),
        confinement: godwit_engine::Confinement::default(),
        kept: None,
        restart: godwit_migration::Restart::default(),
        remove: false,
        aliases: Vec::new(),
        follows: None,
        created_ms: 0,
        started_ms: 0,
    };
    Entry {
        id: row.migration.to_string(),
        role: row.role,
        peer: "peer".into(),
        peer_journal: String::new(),
        stage: row.stage,
        service,
        keep_stopped: Vec::new(),
        reason: String::new(),
    }
}

impl Protocol {
    /// A migration begins on a node: its row, unless an older one refuses.
    fn enter(&self, node: &mut Node, new: Row) -> Option<()> {
        if !self.rules.by_name {
            let rules = |row: &Row| older(row.role, row.stage, row.epoch, new.role, new.epoch);
            if node.rows.iter().any(|row| rules(row) == Older::Refuses) {
                return None;
            }
            for row in &mut node.rows {
                if let Older::Ends(stage) = older(row.role, row.stage, row.epoch, new.role, new.epoch) {
                    (row.stage, row.doing) = (stage, Doing::Nothing);
                }
            }
        }
        node.rows.push(new);
        Some(())
    }

    /// What clearing does for an entry with this epoch.
    fn clear(&self, node: &mut Node, epoch: u64) {
        if self.rules.by_name || node.held.epoch().is_some_and(|held| held <= epoch) {
            node.held = Held::Nothing;
        }
    }

    fn step(&self, state: &mut State, at: usize, migration: u8) -> Option<()> {
        let State { nodes, wire, promised, lost, .. } = state;
        let node = &mut nodes[at];
        let settling = node.rows.iter().any(|row| row.doing == Doing::Own);
        let mut row = row(node, migration)?.clone();
        let said = wire[usize::from(migration)];
        let sent = |message| said.has(message);
        let mut says = None;
        match (row.role, row.doing, row.stage) {
            (Role::Source, Doing::Talk, Stage::Started) if sent(Message::Accepted) && !settling => {
                row.stage = Stage::Frozen;
            }
            (Role::Source, Doing::Talk, Stage::Frozen) => match node.held {
                Held::Running(epoch) => {
                    node.held = Held::Frozen(epoch);
                    says = Some(Message::Images);
                }
                _ if sent(Message::Restored) => {
                    (row.stage, row.doing) = (Stage::Committed, Doing::Tell);
                    *lost |= *promised;
                    if !self.rules.by_name {
                        for other in &mut node.rows {
                            let arrival = other.role == Role::Destination && other.stage == Stage::Committed;
                            if arrival && other.epoch <= row.epoch {
                                (other.stage, other.doing) = (Stage::Done, Doing::Nothing);
                            }
                        }
                    }
                }
                _ => return None,
            },
            (Role::Source, Doing::Tell, _) => {
                says = Some(Message::Commit);
                row.doing = Doing::LetGo;
            }
            (Role::Source, Doing::Undo, stage) => {
                let here = node.held.epoch() == Some(row.epoch);
                match node.held {
                    Held::Frozen(epoch) if here && (stage == Stage::Undoing || self.rules.errors_are_no) => {
                        node.held = Held::Running(epoch);
                    }
                    _ if stage != Stage::Undoing && !self.rules.errors_are_no => {
                        row.stage = Stage::Undoing;
                        says = Some(Message::Abort);
                    }
                    _ => {
                        (row.stage, row.doing) = (Stage::Aborted, Doing::Nothing);
                        says = Some(Message::Abort);
                    }
                }
            }
            (Role::Source, Doing::LetGo, _) => {
                let mine = |here: u64| here <= row.epoch || self.rules.by_name;
                let holds = node.held.epoch().is_some_and(mine);
                if node.books.here.is_some_and(mine) {
                    node.books = Known { here: None, elsewhere: Some(row.epoch + 1) };
                } else if holds {
                    self.clear(node, row.epoch);
                } else {
                    let known = row.acknowledged || self.rules.forgets_commits;
                    row.stage = if known { Stage::Done } else { Stage::Released };
                    row.doing = Doing::Nothing;
                }
            }
            (Role::Destination, Doing::Talk, Stage::Reserved) => {
                if node.held == Held::Stopped(row.epoch) {
                    row.stage = Stage::Restored;
                    says = Some(Message::Restored);
                } else if sent(Message::Abort) {
                    row.doing = Doing::Drop;
                } else if sent(Message::Images) {
                    self.clear(node, row.epoch);
                    if node.held != Held::Nothing {
                        return None;
                    }
                    node.held = Held::Stopped(row.epoch);
                } else {
                    return None;
                }
            }
            (Role::Destination, Doing::Talk, Stage::Restored) if sent(Message::Commit) => {
                row.doing = Doing::Own;
            }
            (Role::Destination, Doing::Talk, Stage::Restored) if sent(Message::Abort) => {
                row.doing = Doing::Drop;
            }
            (Role::Destination, Doing::Ask, _) if sent(Message::Committed) => row.doing = Doing::Own,
            (Role::Destination, Doing::Ask, _) if sent(Message::Aborted) => row.doing = Doing::Drop,
            (Role::Destination, Doing::Own, stage) => match node.held {
                Held::Stopped(epoch) if epoch == row.epoch => node.held = Held::Running(epoch),
                _ if stage == Stage::Restored => row.stage = Stage::Committed,
                _ if node.books.here != Some(row.epoch) => {
                    node.books = Known { here: Some(row.epoch), elsewhere: None };
                }
                _ if !sent(Message::Running) => says = Some(Message::Running),
                _ => (row.stage, row.doing) = (Stage::Done, Doing::Nothing),
            },
            (Role::Destination, Doing::Drop, _) => {
                let holds = node.held.epoch().is_some_and(|held| held <= row.epoch || self.rules.by_name);
                if holds {
                    self.clear(node, row.epoch);
                } else {
                    (row.stage, row.doing) = (Stage::Dropped, Doing::Nothing);
                }
            }
            _ => return None,
        }
        *self::row(node, migration)? = row;
        if let Some(message) = says {
            wire[usize::from(migration)].say(message);
        }
        Some(())
    }

    fn start(&self, node: &mut Node, forgets: bool) {
        node.up = true;
        if forgets {
            node.rows.retain(|row| !row.stage.is_final());
        }
        let known = if self.rules.by_name { Known::default() } else { node.books };
        for row in node.rows.iter_mut().filter(|row| row.stage.is_open()) {
            match act(row.role, row.stage, row.epoch, known) {
                Act::PutBack => row.doing = Doing::Undo,
                Act::LetGo | Act::Serve => row.doing = Doing::LetGo,
                Act::Drop => row.doing = Doing::Drop,
                Act::Ask => row.doing = Doing::Ask,
                Act::TakeOver => row.doing = Doing::Own,
                Act::End(stage) => row.stage = stage,
            }
        }
    }

    fn answers(&self, state: &mut State, at: usize, migration: u8) -> Option<()> {
        let other = state.nodes[1 - at].rows.iter().find(|row| row.migration == migration)?;
        if other.role != Role::Destination || other.doing != Doing::Ask || !state.nodes[at].up {
            return None;
        }
        let own = state.nodes[at].journal;
        let asked = if self.rules.unknown_is_aborted { own } else { other.journal };
        let entry = row(&mut state.nodes[at], migration).map(|row| entry(row));
        let message = match answer(entry.as_ref(), "peer", &asked.to_string(), &own.to_string()) {
            Decision::Committed => Message::Committed,
            Decision::Aborted(_) => Message::Aborted,
            Decision::Unknown(_) if self.rules.unknown_is_aborted => Message::Aborted,
            Decision::Unknown(_) | Decision::Pending => return None,
        };
        state.wire[usize::from(migration)].say(message);
        Some(())
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let node = |here: Option<u64>, held| Node {
            up: true,
            journal: 0,
            rows: Vec::new(),
            books: Known { here, elsewhere: None },
            held,
        };
        let nodes = [node(Some(1), Held::Running(1)), node(None, Held::Nothing)];
        vec![State { nodes, wire: Vec::new(), crashes: 0, errors: 0, disks: 0, promised: false, lost: false }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for at in 0..2 {
            let node = &state.nodes[at];
            if !node.up {
                actions.push(Action::Start(at, false));
                if node.rows.iter().any(|row| row.stage.is_final()) {
                    actions.push(Action::Start(at, true));
                }
                if state.disks < self.bounds.disks {
                    actions.push(Action::Replace(at));
                }
                continue;
            }
            if state.crashes < self.bounds.crashes {
                actions.push(Action::Crash(at));
            }
            let begun = u8::try_from(state.wire.len()).unwrap();
            if begun < self.bounds.moves {
                actions.push(Action::Begin(at));
            }
            for migration in 0..begun {
                actions.push(Action::Admit(at, migration));
                actions.push(Action::Step(at, migration));
                actions.push(Action::Break(at, migration));
                actions.push(Action::Answer(at, migration));
                actions.push(Action::Hear(at, migration));
                if state.errors < self.bounds.errors {
                    actions.push(Action::CommitFails(at, migration, true));
                    actions.push(Action::CommitFails(at, migration, false));
                    actions.push(Action::Fails(at, migration));
                }
            }
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Begin(at) => {
                let (migration, node) = (u8::try_from(state.wire.len()).unwrap(), &mut state.nodes[at]);
                let epoch = node.books.here.filter(|epoch| node.held == Held::Running(*epoch))?;
                // A node has one conversation about a service; one that has just come may go on.
                let busy = |row: &Row| !matches!(row.doing, Doing::Nothing | Doing::Own);
                if node.rows.iter().any(busy) {
                    return None;
                }
                let (journal, role, stage) = (node.journal, Role::Source, Stage::Started);
                let doing = Doing::Talk;
                self.enter(node, Row { migration, role, stage, epoch, journal, acknowledged: false, doing })?;
                state.wire.push(Said { epoch: epoch + 1, journal, source: at, messages: 0 });
            }
            Action::Admit(at, migration) => {
                let said = &mut state.wire[usize::from(migration)];
                let node = &mut state.nodes[at];
                // The name is free, and nothing of it is known to be under way.
                let taken = node.rows.iter().any(|row| row.doing != Doing::Nothing);
                // A connection is of one life of both daemons.
                if said.source == at || taken || node.books.here.is_some() || said.has(Message::Accepted) {
                    return None;
                }
                said.say(Message::Accepted);
                let Said { epoch, journal, .. } = *said;
                let (role, stage, doing) = (Role::Destination, Stage::Reserved, Doing::Talk);
                self.enter(node, Row { migration, role, stage, epoch, journal, acknowledged: false, doing })?;
            }
            Action::Step(at, migration) => self.step(&mut state, at, migration)?,
            Action::Break(at, migration) => {
                let row = row(&mut state.nodes[at], migration).filter(|row| row.doing == Doing::Talk)?;
                row.doing = match (row.role, row.stage) {
                    (Role::Source, _) => Doing::Undo,
                    (Role::Destination, Stage::Restored) => Doing::Ask,
                    (Role::Destination, _) => Doing::Drop,
                };
            }
            Action::CommitFails(at, migration, written) => {
                let restored = state.wire[usize::from(migration)].has(Message::Restored);
                let node = &mut state.nodes[at];
                let frozen = matches!(node.held, Held::Frozen(_));
                let row = row(node, migration).filter(|row| {
                    row.role == Role::Source && row.doing == Doing::Talk && row.stage == Stage::Frozen
                })?;
                if !restored || !frozen {
                    return None;
                }
                if written {
                    row.stage = Stage::Committed;
                    state.lost |= state.promised;
                }
                if self.rules.errors_are_no {
                    // It runs on, and the disk does not take the undo either.
                    row.doing = Doing::Nothing;
                    node.held = Held::Running(row.epoch);
                } else {
                    // Nobody knows: the daemon ends, with the service frozen.
                    crash(node);
                }
                state.errors += 1;
            }
            Action::Fails(at, migration) => {
                let row = row(&mut state.nodes[at], migration)?;
                if !self.rules.by_name || !matches!(row.doing, Doing::LetGo | Doing::Drop) {
                    // It is tried again, which is the step itself.
                    return None;
                }
                row.doing = Doing::Nothing;
                state.errors += 1;
            }
            Action::Answer(at, migration) => self.answers(&mut state, at, migration)?,
            Action::Hear(at, migration) => {
                let heard = state.wire[usize::from(migration)].has(Message::Running);
                let row = row(&mut state.nodes[at], migration)?;
                if !heard || row.role != Role::Source || row.acknowledged || !row.stage.is_committed() {
                    return None;
                }
                row.acknowledged = true;
                if row.stage == Stage::Released {
                    row.stage = Stage::Done;
                }
            }
            Action::Crash(at) => {
                crash(&mut state.nodes[at]);
                state.crashes += 1;
            }
            Action::Start(at, forgets) => self.start(&mut state.nodes[at], forgets),
            Action::Replace(at) => {
                let node = &mut state.nodes[at];
                // What it owns goes with it: it has it in its books, and has not given it away.
                let given = |row: &Row| row.role == Role::Source && row.stage.is_committed();
                let here = node.books.here;
                let owns = here.is_some_and(|epoch| !node.rows.iter().any(|r| given(r) && r.epoch >= epoch));
                // Or it runs here, or was given to it, and the books do not have it yet.
                let arrived = matches!(node.held, Held::Running(_))
                    || node.rows.iter().any(|row| {
                        row.role == Role::Destination
                            && row.stage == Stage::Committed
                            && here != Some(row.epoch)
                    });
                let incoming =
                    node.rows.iter().any(|row| row.role == Role::Destination && row.stage == Stage::Restored);
                let given_here = incoming && state.nodes[1 - at].rows.iter().any(given);
                state.lost |= owns || arrived || given_here;
                state.promised |= incoming;
                let node = &mut state.nodes[at];
                let journal = node.journal + 1;
                *node = Node {
                    up: false,
                    journal,
                    rows: Vec::new(),
                    books: Known::default(),
                    held: Held::Nothing,
                };
                state.disks += 1;
            }
        }
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(TWICE, |_, state: &State| {
                state.nodes.iter().filter(|node| matches!(node.held, Held::Running(_))).count() <= 1
            }),
            Property::always(LOST[0], |_, state: &State| {
                let whole = |node: &Node| match node.held {
                    Held::Nothing => false,
                    Held::Running(_) | Held::Frozen(_) => true,
                    Held::Stopped(epoch) => node.rows.iter().any(|row| {
                        row.epoch == epoch && matches!(row.stage, Stage::Restored | Stage::Committed)
                    }),
                };
                state.lost || state.nodes.iter().any(whole)
            }),
            Property::always(LOST[1], |_, state: &State| {
                let quiet = |node: &Node| node.up && node.rows.iter().all(|row| row.doing == Doing::Nothing);
                let runs = |node: &Node| matches!(node.held, Held::Running(_));
                state.lost || !state.nodes.iter().all(quiet) || state.nodes.iter().any(runs)
            }),
            Property::sometimes("it moves, and its source forgets", |_, state: &State| {
                state.nodes[1].books.here == Some(2)
                    && state.nodes[0].rows.iter().all(|r| r.stage == Stage::Done)
            }),
            Property::sometimes(
                "it is in doubt for ever, where the source's disk is gone",
                |protocol, state: &State| {
                    protocol.bounds.disks == 0
                        || state.nodes[1].rows.iter().any(|row| row.doing == Doing::Ask)
                            && state.nodes[0].up
                            && state.nodes[0].rows.is_empty()
                            && !state.lost
                },
            ),
        ]
    }
}

fn crash(node: &mut Node) {
    node.up = false;
    for row in &mut node.rows {
        row.doing = Doing::Nothing;
    }
}

/// The names of what does not hold, and how many states there are.
fn check(rules: Rules, bounds: Bounds) -> (Vec<&'static str>, usize) {
    let begun = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // What does not hold ends the search; what holds is looked for everywhere.
    let model = Protocol { rules, bounds }.checker().finish_when(HasDiscoveries::AnyFailures);
    let checker = model.threads(threads).spawn_bfs().join();
    let states = checker.unique_state_count();
    println!("{states} states in {:?}", begun.elapsed());
    let failed: Vec<_> = checker
        .discoveries()
        .into_iter()
        .filter(|(name, _)| name.starts_with("never") || name.starts_with("where"))
        .map(|(name, path)| {
            println!("{name}: {:#?}", path.into_actions());
            name
        })
        .collect();
    if failed.is_empty() {
        checker.assert_properties();
    }
    (failed, states)
}

/// With one rule of an earlier version the model finds what was wrong with it.
fn finds(rules: Rules, bounds: Bounds, wrong: &[&str]) {
    let (failed, _) = check(rules, bounds);
    assert!(failed.iter().any(|name| wrong.contains(name)), "{wrong:?}: only {failed:?}");
}

#[test]
fn a_service_is_never_lost_or_doubled_whatever_dies_and_is_sent_when() {
    let (failed, states) = check(Rules::default(), Bounds { moves: 2, crashes: 2, errors: 1, disks: 0 });
    assert!(failed.is_empty(), "{failed:?}");
    assert!(states > 10_000, "{states} states are not all there are");
}

#[test]
fn a_disk_that_is_replaced_takes_nothing_but_what_was_its_own() {
    let (failed, states) = check(Rules::default(), Bounds { moves: 1, crashes: 2, errors: 1, disks: 1 });
    assert!(failed.is_empty(), "{failed:?}");
    assert!(states > 1_000, "{states} states are not all there are");
}

#[test]
fn a_commit_that_is_forgotten_unacknowledged_costs_the_service() {
    let rules = Rules { forgets_commits: true, unknown_is_aborted: true, ..Rules::default() };
    finds(rules, Bounds { moves: 1, crashes: 2, errors: 0, disks: 0 }, &LOST);
}

#[test]
fn an_answer_from_a_journal_that_does_not_know_costs_the_service() {
    let rules = Rules { unknown_is_aborted: true, ..Rules::default() };
    finds(rules, Bounds { moves: 1, crashes: 2, errors: 0, disks: 1 }, &LOST);
}

#[test]
fn an_entry_that_is_acted_upon_by_name_costs_the_service() {
    let rules = Rules { by_name: true, ..Rules::default() };
    finds(rules, Bounds { moves: 2, crashes: 1, errors: 1, disks: 0 }, &LOST);
}

#[test]
fn an_error_that_is_taken_for_not_written_doubles_the_service() {
    let rules = Rules { errors_are_no: true, ..Rules::default() };
    finds(rules, Bounds { moves: 1, crashes: 0, errors: 1, disks: 0 }, &[TWICE]);
}
