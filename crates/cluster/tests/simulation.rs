//! Nodes, a store and all that can happen between them, many times over, each by a seed.
//!
//! A run: four nodes move four services, one of each promise, for some minutes of virtual time. Nodes crash and start again
//! with their disks, lose the store, have clocks of different rates. Requests are late, lost or doubled. The store
//! restarts. Then all is calm, and each service that is owned must run. The history of the run is checked.
//!
//! `GODWIT_HISTORY_SEED=7` runs that seed alone. `GODWIT_HISTORY_SECONDS=120` runs new seeds for so long, half of them with
//! SQLite; `GODWIT_HISTORY_STORE=sqlite` or `memory` has all of them use that store.
#![allow(clippy::unwrap_used)]

#[path = "simulation/broken.rs"]
mod broken;
#[path = "simulation/model.rs"]
mod model;
#[path = "simulation/node.rs"]
mod node;
#[path = "simulation/world.rs"]
mod world;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::executor::{LocalPool, LocalSpawner};
use futures::future::{AbortHandle, abortable};
use futures::task::LocalSpawnExt;
use godwit_cluster::Cluster;
use godwit_cluster::history::{Checked, Violation};
use godwit_cluster::promise::{Fence, RestartFrom, Settings};
use godwit_cluster::record::State;
use godwit_cluster::sqlite::SqliteStore;
use godwit_cluster::store::Store;
use godwit_names::{NodeName, ServiceName};

use crate::broken::{Breaking, Broken};
use crate::node::Node;
use crate::world::{LIMIT, World};

/// How long things break.
const STORM: Duration = Duration::from_secs(240);

/// How long nothing breaks afterwards: nodes come back, and what was left open is settled.
const CALM: Duration = Duration::from_secs(120);

/// Seeds of a test of what is not broken.
const SEEDS: u64 = 40;

/// Seeds within which each broken one must be found.
const ENOUGH: u64 = 1000;

/// What came of a run.
struct Outcome {
    checked: Result<Checked, Violation>,
    /// Services that are owned and do not run, after the calm.
    idle: Vec<String>,
}

fn services() -> Vec<(ServiceName, Settings)> {
    let settings = |fence, restart_from| Settings { fence, restart_from };
    [
        ("plain", settings(Fence::Default, RestartFrom::None)),
        ("restarted", settings(Fence::Default, RestartFrom::Checkpoint)),
        ("strict", settings(Fence::Strict, RestartFrom::None)),
        ("fenced", settings(Fence::Strict, RestartFrom::Image)),
    ]
    .map(|(name, settings)| (name.parse().unwrap(), settings))
    .to_vec()
}

/// A node's tasks, which end with it.
struct Machine {
    node: Rc<Node>,
    tasks: Vec<AbortHandle>,
}

impl Machine {
    fn spawn(&mut self, spawner: &LocalSpawner, task: impl Future<Output = ()> + 'static) {
        let (task, handle) = abortable(task);
        // It ends by itself, or it is aborted.
        spawner.spawn_local(async { task.await.unwrap_or(()) }).unwrap();
        self.tasks.push(handle);
    }

    fn start(&mut self, spawner: &LocalSpawner) {
        self.node.start();
        self.spawn(spawner, Rc::clone(&self.node).keep_lease());
        self.spawn(spawner, Rc::clone(&self.node).watch_lapse());
        self.spawn(spawner, Rc::clone(&self.node).observe());
        for (service, settings) in services() {
            self.spawn(spawner, Rc::clone(&self.node).keep_service(service, settings));
        }
    }

    fn is_up(&self) -> bool {
        !self.tasks.is_empty()
    }

    fn crash(&mut self) {
        self.tasks.drain(..).for_each(|task| task.abort());
        self.node.crash();
    }
}

/// Breaks things until the storm ends, and then mends them.
async fn storm(world: World, mut machines: Vec<Machine>, spawner: LocalSpawner) {
    let mut ends: Vec<(Duration, usize)> = Vec::new();
    let mut cuts: Vec<(Duration, usize)> = Vec::new();
    let random =
        |range: std::ops::Range<u64>| Duration::from_millis(world.random(|random| random.u64(range)));
    while world.now() < STORM {
        world.sleep(random(200..6000)).await;
        // What broke is mended when its time has come: a node starts, and its link works.
        let now = world.now();
        for (_, at) in ends.extract_if(.., |(end, _)| *end <= now) {
            mend(&world, &mut machines[at], &spawner);
        }
        for (_, at) in cuts.extract_if(.., |(begin, _)| *begin <= now) {
            world.cut(&machines[at].node.name);
        }
        let at = world.random(|random| random.usize(..machines.len()));
        let until = now + random(500..35_000);
        match world.random(|random| random.u32(..100)) {
            0..20 if machines[at].is_up() => {
                machines[at].crash();
                ends.push((until, at));
            }
            20..40 => {
                world.cut(&machines[at].node.name);
                ends.push((until, at));
            }
            // A link that breaks after it was slow: the last answers came late.
            40..55 => {
                world.slow(&machines[at].node.name);
                let begin = now + random(2000..8000);
                cuts.push((begin, at));
                ends.push((begin + random(500..35_000), at));
            }
            55..65 => world.end_store(),
            _ => world.open_store(),
        }
    }
    world.calm();
    for machine in &mut machines {
        mend(&world, machine, &spawner);
    }
    // The tasks end when their handles do not: they go on until the time is over.
    std::future::pending::<()>().await;
}

fn mend(world: &World, machine: &mut Machine, spawner: &LocalSpawner) {
    world.mend(&machine.node.name);
    if !machine.is_up() {
        let earlier = machine.node.life();
        machine.start(spawner);
        if world.random(|random| random.u32(..100)) < 30 {
            machine.spawn(spawner, Rc::clone(&machine.node).linger(earlier));
        }
    }
}

fn simulate(seed: u64, broken: Option<Broken>, opens: Box<dyn Fn() -> Arc<dyn Store>>) -> Outcome {
    let world = World::new(seed, opens);
    let names: Vec<NodeName> = ["a", "b", "c", "d"].iter().map(|name| name.parse().unwrap()).collect();
    let nodes: Vec<_> = names.iter().map(|name| Node::new(&world, name, &names, broken)).collect();
    let mut pool = LocalPool::new();
    let spawner = pool.spawner();
    let mut machines: Vec<_> =
        nodes.iter().map(|node| Machine { node: Rc::clone(node), tasks: Vec::new() }).collect();
    machines.iter_mut().for_each(|machine| machine.start(&spawner));
    spawner.spawn_local(storm(world.clone(), machines, spawner.clone())).unwrap();
    pool.run_until_stalled();
    while world.step(STORM + CALM) {
        pool.run_until_stalled();
    }
    let checked = world.history(|history| history.check());
    let idle = if checked.is_ok() { idle(&world, &nodes, &mut pool) } else { Vec::new() };
    Outcome { checked, idle }
}

/// Services whose owner does not run them, although all is well.
fn idle(world: &World, nodes: &[Rc<Node>], pool: &mut LocalPool) -> Vec<String> {
    let reader = "reader".parse().unwrap();
    let cluster = Cluster::new(world.link(&reader));
    let (sender, receiver) = std::sync::mpsc::channel();
    let reading = async move { sender.send(cluster.services(None, 100).await).unwrap() };
    pool.spawner().spawn_local(reading).unwrap();
    let list = loop {
        pool.run_until_stalled();
        if let Ok(list) = receiver.try_recv() {
            break list.unwrap();
        }
        assert!(world.step(Duration::MAX), "the store answers in the calm");
    };
    let records = list.listed.into_iter().map(|listed| (listed.key, listed.record.unwrap()));
    let owned = records.filter(|(_, record)| record.state != State::Left);
    let is_idle = |record: &godwit_cluster::record::ServiceRecord, service: &ServiceName| {
        !nodes.iter().any(|node| node.name == record.owner && node.runs(service))
    };
    owned
        .filter(|(key, record)| is_idle(record, &key.name().parse().unwrap()))
        .map(|(key, record)| format!("{key}: {record:?}"))
        .collect()
}

fn in_memory(broken: Option<Broken>) -> Box<dyn Fn() -> Arc<dyn Store>> {
    let store: Arc<dyn Store> = Arc::new(Breaking::new(broken));
    Box::new(move || Arc::clone(&store))
}

fn in_sqlite(directory: &tempfile::TempDir) -> Box<dyn Fn() -> Arc<dyn Store>> {
    let path = directory.path().join("cluster.db");
    Box::new(move || Arc::new(SqliteStore::open(&path).unwrap()))
}

/// Runs a seed in which nothing is broken.
fn is_kept(seed: u64, sqlite: bool) -> Checked {
    let directory = sqlite.then(|| tempfile::tempdir().unwrap());
    let opens = directory.as_ref().map_or_else(|| in_memory(None), in_sqlite);
    let outcome = simulate(seed, None, opens);
    let checked =
        outcome.checked.unwrap_or_else(|violation| panic!("GODWIT_HISTORY_SEED={seed}: {violation}"));
    assert!(outcome.idle.is_empty(), "GODWIT_HISTORY_SEED={seed}: owned and not run: {:#?}", outcome.idle);
    checked
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|number| number.parse().unwrap())
}

/// Which stores are used: whether it is SQLite, of each.
fn stores() -> Vec<bool> {
    match std::env::var("GODWIT_HISTORY_STORE").ok().as_deref() {
        None => vec![false, true],
        Some("memory") => vec![false],
        Some("sqlite") => vec![true],
        Some(other) => panic!("GODWIT_HISTORY_STORE={other} is neither sqlite nor memory"),
    }
}

fn add(sum: &mut Checked, one: Checked) {
    sum.operations += one.operations;
    sum.unknown += one.unknown;
    sum.epochs += one.epochs;
    sum.taken_over += one.taken_over;
    sum.runs += one.runs;
}

#[test]
fn one_owner_at_every_instant_whatever_breaks() {
    if let Some(seed) = number("GODWIT_HISTORY_SEED") {
        for sqlite in stores() {
            println!("seed {seed}, sqlite {sqlite}: {:?}", is_kept(seed, sqlite));
        }
        return;
    }
    let mut sum = Checked::default();
    let Some(seconds) = number("GODWIT_HISTORY_SECONDS") else {
        (0..SEEDS).for_each(|seed| add(&mut sum, is_kept(seed, false)));
        println!("{SEEDS} seeds: {sum:?}");
        // What is checked has happened: a simulation in which nothing goes wrong finds nothing.
        assert!(sum.operations > 50_000 && sum.unknown > 500, "{sum:?}");
        assert!(sum.epochs > 1000 && sum.taken_over > 100 && sum.runs > sum.epochs, "{sum:?}");
        return;
    };
    let (end, stores) = (Instant::now() + Duration::from_secs(seconds), stores());
    let mut seeds = [0_u64; 2];
    for sqlite in stores.into_iter().cycle() {
        add(&mut sum, is_kept(fastrand::u64(..), sqlite));
        seeds[usize::from(sqlite)] += 1;
        if Instant::now() >= end {
            break;
        }
    }
    let [memory, sqlite] = seeds;
    println!(
        "{memory} seeds in memory and {sqlite} in SQLite, {:?} each, in {seconds} s: {sum:?}",
        STORM + CALM
    );
    assert!(memory + sqlite > 0 && sum.unknown > 0, "{sum:?}");
}

#[test]
fn the_store_in_a_file_keeps_the_same_promises_and_a_seed_gives_the_same_history() {
    for seed in [1_000_001, 1_000_002] {
        let checked = is_kept(seed, true);
        assert_eq!(checked, is_kept(seed, false), "seed {seed}: both stores answer alike");
        assert!(checked.operations > 1000, "{checked:?}");
    }
}

/// The first seed that shows what is broken.
fn is_found(broken: Broken) -> (u64, Violation) {
    (0..ENOUGH)
        .find_map(|seed| {
            simulate(seed, Some(broken), in_memory(Some(broken))).checked.err().map(|found| (seed, found))
        })
        .unwrap_or_else(|| panic!("{broken:?} is not found in {ENOUGH} seeds"))
}

macro_rules! found {
    ($($name:ident: $broken:ident $(as $violation:ident)?,)*) => {
        const FOUND: &[Broken] = &[$(Broken::$broken),*];
        $(#[test]
        fn $name() {
            let (seed, violation) = is_found(Broken::$broken);
            println!("{:?}, seed {seed}: {violation}", Broken::$broken);
            $(assert!(matches!(violation, Violation::$violation { .. }), "{violation}");)?
        })*
    };
}

found! {
    a_store_without_comparisons_is_found: NoCompare,
    a_store_that_compares_only_the_first_key_is_found: FirstKeyOnly as TwoCopies,
    a_store_that_loses_what_it_acknowledged_is_found: LostWrite,
    a_store_that_compares_with_what_was_is_found: StaleCompare,
    a_store_that_reads_what_was_is_found: StaleRead as Contradiction,
    a_store_that_does_a_doubled_request_twice_is_found: DoneTwice,
    a_rule_that_confirms_any_move_is_found: ConfirmsAnyMove as Contradiction,
    a_rule_that_withdraws_a_confirmed_move_is_found: WithdrawsConfirmed as Contradiction,
    a_take_over_without_its_counter_is_found: NoCounter as TwoCopies,
    a_take_over_that_ignores_the_destination_is_found: IgnoresDestination,
    a_lease_that_an_earlier_life_renews_is_found: StaleLife as Contradiction,
    a_take_over_before_the_limit_is_found: EarlyTakeOver as TwoCopies,
    silence_taken_for_a_refusal_is_found: SilenceIsRefusal,
    a_source_that_rolls_back_on_silence_is_found: RollsBackOnSilence as TwoCopies,
    a_source_that_rolls_back_though_it_asked_before_is_found: RollsBackOnNotDone as TwoCopies,
    a_strict_service_that_goes_forward_on_silence_is_found: StrictGoesForward as TwoCopies,
    a_strict_service_that_outlives_its_lease_is_found: RunsOnAfterLapse as TwoCopies,
    a_strict_service_that_runs_again_unverified_is_found: RunsUnverified as TwoCopies,
    a_strict_service_that_starts_unverified_is_found: StartsUnverified as TwoCopies,
    an_owner_that_runs_on_when_it_is_lost_is_found: RunsOnWhenLost as TwoCopies,
    a_lease_counted_from_its_answer_is_found: LeaseFromAnswer as TwoCopies,
}

#[test]
fn each_broken_one_has_a_test() {
    assert_eq!(FOUND, Broken::ALL);
    assert!(LIMIT > world::TIMEOUT);
}
