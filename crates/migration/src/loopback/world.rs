//! Two nodes and a service, which moves; and what has to be so when both have come to rest.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, PoisonError};
use std::time::{Duration, Instant};

use godwit_engine::image::{Digest, Store};
use godwit_engine::runc::Runc;
use godwit_engine::{Mount, MountKind, files};
use godwit_memory::tracker::{Backend, Detected};
use godwit_policy::Mode;
use godwit_transfer::{ClusterAuthority, Identity, NodeName};
use tempfile::TempDir;

use super::daemon::{Daemon, Order};
use super::machine::{Census, Machine, Plug};
use super::process::{Process, SEED};
use super::script::Deed;
use super::wire::{Cut, Slow, Wire};
use crate::incarnation::Incarnation;
use crate::options::Options;
use crate::report::{Outcome, Phase};
use crate::resources::ArrivalEnd;
use crate::service::{Layout, Service};

/// How long two nodes may take to come to rest. It is reached only when something is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// What its files hold.
const FILE: &str = "a line of the service\n";

/// More layers than cross at once, of a file each. To unpack them takes root.
static LAYERS: LazyLock<Vec<(Digest, Vec<u8>)>> = LazyLock::new(|| {
    let layer = |number: u8| {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(1);
        header.set_mode(0o644);
        archive.append_data(&mut header, "file", &[number][..]).unwrap();
        let blob = archive.into_inner().unwrap();
        (Digest::of(&blob), blob)
    };
    if rustix::process::geteuid().is_root() { (0..4).map(layer).collect() } else { Vec::new() }
});

/// Which of the two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// A connection is cut.
    Cut(Cut),
    /// A connection is slow.
    Slow(Slow),
    /// Something happens at a step of a node.
    Step(Side, usize, Deed),
    /// The user cancels when so many records have crossed.
    Cancel(usize),
    /// A node's daemon is killed when so many records have crossed.
    Crash(Side, usize),
    /// Both are, at once.
    CrashBoth(usize),
}

/// How the service moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) mode: Mode,
    /// Whether the destination restores before the pages are there.
    pub(super) lazy: bool,
    /// Whether the service reads all its memory as soon as it runs at the destination.
    pub(super) reads: bool,
    pub(super) tracker: Backend,
    /// How often its engine begins a command in it just when it is frozen.
    pub(super) begins: u32,
    /// Whether its files are sent ahead first.
    pub(super) ahead: bool,
}

/// What a conversation came to.
#[derive(Debug)]
pub(super) struct Ended {
    /// Whether the fault came to pass.
    pub(super) happened: bool,
    pub(super) moved: bool,
    /// What the report says, where there is one.
    pub(super) reason: String,
    /// Where it says that the frozen time went.
    pub(super) phases: Vec<Phase>,
    /// How long that is, milliseconds.
    pub(super) frozen_ms: f64,
    /// Bytes of files that were there before the move.
    pub(super) ahead: u64,
    /// How many connections were made.
    pub(super) connections: usize,
    /// What the destination has counted.
    pub(super) arrivals: Vec<ArrivalEnd>,
    pub(super) took: Duration,
}

struct World {
    _directory: TempDir,
    machines: [Arc<Machine>; 2],
    daemons: [Arc<Daemon>; 2],
    wire: Arc<Wire>,
    census: Arc<Census>,
    service: Service,
}

/// The nodes' identities: all worlds have the same.
static IDENTITIES: LazyLock<[Identity; 2]> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let [a, b] = ["a", "b"].map(|name| NodeName::new(name).unwrap());
    let authority = ClusterAuthority::create(&at("a"), "test").unwrap();
    let first = authority.issue_own(&at("a"), &a).unwrap();
    let request = Identity::create_request(&at("b"), &b).unwrap();
    let certificate = authority.issue(&b, &request).unwrap();
    [first, Identity::install(&at("b"), authority.pem(), &certificate).unwrap()]
});

/// A directory in memory, where there is one: what the journals write is on the disk, and that takes time.
fn directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn service() -> Service {
    Service {
        name: "s".parse().unwrap(),
        more: Vec::new(),
        layers: LAYERS.iter().map(|(digest, _)| digest.to_string()).collect(),
        mounts: vec![Mount {
            kind: MountKind::Volume { name: VOLUME.parse().unwrap(), file: None },
            target: "/data".into(),
            read_only: false,
        }],
        publish: Vec::new(),
        ..crate::service::tests::service()
    }
}

/// Plays a conversation to its end, with a fault, and returns when both nodes have come to rest.
///
/// # Errors
/// What is not as it has to be then.
pub(super) fn play(way: Way, fault: Fault) -> Result<Ended, String> {
    let begun = Instant::now();
    let world = World::new(way, fault);
    let options = Options { mode: way.mode, streams: 1, prepares: way.ahead, ..Options::default() };
    let order = Order { service: world.service.clone(), options };
    let [source, destination] = &world.daemons;
    let mut threads = vec![destination.start(None)];
    while !destination.serves() {
        std::thread::sleep(Duration::from_micros(100)); // no event tells
    }
    threads.push(source.start(Some(order)));
    let mut wrong = world.come_to_rest();
    let took = begun.elapsed();
    if wrong.is_empty() {
        world.daemons.iter().for_each(|daemon| daemon.stop());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for machine in &world.machines {
            let readers = std::mem::take(&mut machine.there().readers);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        }
        wrong = world.census.accusations();
    }
    let happened =
        world.wire.has_happened() || world.machines.iter().any(|machine| machine.script.has_happened());
    if wrong.is_empty() {
        let moved = !world.machines[1].there().own.is_empty();
        let (reason, phases) = (world.reason(), world.phases());
        let (connections, ahead) = (world.wire.connections(), world.ahead());
        let frozen_ms = world.frozen_ms();
        let arrivals = world.machines[1].there().arrivals.clone();
        return Ok(Ended { happened, moved, reason, phases, frozen_ms, ahead, connections, arrivals, took });
    }
    let mut text = format!("{way:?} {fault:?}, after {took:?}, with the report {:?}:\n", world.reason());
    for what in wrong {
        writeln!(text, "  {what}").unwrap();
    }
    for machine in &world.machines {
        writeln!(text, "  steps of {}: {}", machine.name, machine.script.trace()).unwrap();
    }
    Err(text)
}

impl World {
    fn new(way: Way, fault: Fault) -> Self {
        let (directory, census, service) = (directory(), Arc::<Census>::default(), service());
        let machines = ["a", "b"].map(|name| Machine::new(name, directory.path(), &census, way));
        let [a, b] = &machines;
        settle(a, &service);
        let side = |side| if side == Side::Source { a } else { b };
        let cut = if let Fault::Cut(cut) = fault { cut } else { Cut::Never };
        let slow = if let Fault::Slow(slow) = fault { Some(slow) } else { None };
        let mut deed: Option<(usize, Box<dyn FnOnce() + Send>)> = None;
        match fault {
            Fault::Nothing | Fault::Cut(_) | Fault::Slow(_) => {}
            Fault::Step(at, step, what) => side(at).script.expect(step, what),
            Fault::Cancel(record) => {
                let script = Arc::clone(&a.script);
                deed = Some((record, Box::new(move || script.cancel.cancel())));
            }
            Fault::Crash(at, record) => {
                let script = Arc::clone(&side(at).script);
                deed = Some((record, Box::new(move || script.kill.notify_one())));
            }
            Fault::CrashBoth(record) => {
                let scripts = [a, b].map(|machine| Arc::clone(&machine.script));
                deed = Some((
                    record,
                    Box::new(move || scripts.iter().for_each(|script| script.kill.notify_one())),
                ));
            }
        }
        let wire = Arc::new(Wire::new(b, cut, slow, deed));
        let tracker = Detected { backend: way.tracker, reasons: Vec::new() };
        let [first, second] = IDENTITIES.clone();
        let daemons =
            [Daemon::new(a, b, &wire, first, tracker.clone()), Daemon::new(b, a, &wire, second, tracker)];
        Self { _directory: directory, machines, daemons, wire, census, service }
    }

    /// Returns when all is as it has to be, or with what is not.
    fn come_to_rest(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let seen = self.census.accusations();
            let wrong =
                if self.is_at_rest() { self.wrong() } else { vec!["it does not come to rest".into()] };
            // What was seen once does not go away.
            if !seen.is_empty() || begun.elapsed() > PATIENCE {
                return seen.into_iter().chain(wrong).collect();
            }
            if wrong.is_empty() {
                return self.wrong_memory();
            }
            std::thread::sleep(Duration::from_millis(1)); // no event tells all of it
        }
    }

    fn is_at_rest(&self) -> bool {
        self.daemons.iter().all(|daemon| daemon.is_idle())
    }

    /// Who owns the service according to the nodes' state.
    fn owners(&self) -> Vec<usize> {
        (0..2).filter(|at| self.machines[*at].there().own.contains_key(&self.service.id)).collect()
    }

    /// What is not as it has to be at rest.
    fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let owners = self.owners();
        let [owner] = owners[..] else { return vec![format!("the nodes {owners:?} own the service")] };
        if self.census.running() != 1 {
            wrong.push(format!("{} processes run", self.census.running()));
        }
        for (at, machine) in self.machines.iter().enumerate() {
            let mut is = |what: &str, right: bool| {
                if !right {
                    wrong.push(format!("node {}: {what}", machine.name));
                }
            };
            let (owns, layout) = (at == owner, &machine.layout);
            let came = machine.there().arrivals.iter().filter(|end| **end == ArrivalEnd::Moved).count();
            is("an arrival was counted that was none", came <= usize::from(owns && at == 1));
            match machine.daemon() {
                None => is("its daemon is down", false),
                Some(local) => {
                    let unfinished = local.journal.unfinished().unwrap();
                    let stages: Vec<_> = unfinished.iter().map(|entry| entry.stage).collect();
                    is(&format!("its journal has {stages:?} to end"), stages.is_empty());
                    is("its journal is undecided", !local.journal.is_undecided());
                    is("memory is still reserved", local.promised.is_nothing());
                    is("there are doubts", local.doubts.all().is_empty());
                }
            }
            let there = machine.there();
            is("its container", there.containers.len() == usize::from(owns));
            for container in there.containers.values() {
                is("its container is frozen or stopped", !container.frozen && !container.stopped);
                is("its process does not run", container.process.runs());
            }
            let open = Plug { open: true, ..Plug::default() };
            let plugs: Vec<_> = there.plugs.values().cloned().collect();
            is(&format!("the network is {plugs:?}"), plugs == vec![open; usize::from(owns)]);
            is("its root filesystems", there.roots.len() == usize::from(owns));
            is("memory is still mounted", there.memories.is_empty());
            let images = layout.state.join("images");
            is("half-made layers are left", is_empty(&images.join("tmp")));
            let stored = entries(&images.join("layers/sha256"));
            is("layers of its root filesystem", !owns || stored.len() == LAYERS.len());
            is("pagers are left", there.pagers.is_empty());
            is("names are taken", self.daemons[at].names().is_empty());
            is("directories of migrations are left", is_empty(&layout.run.join("migrations")));
            is("directories of pagers are left", is_empty(&layout.run.join("pagers")));
            let ahead = entries(&layout.state.join("prepared")).len();
            let known = machine.daemon().map(|daemon| daemon.kept_files.taken().0);
            is(
                &format!("{ahead} directories of files that may come, of which its daemon knows {known:?}"),
                ahead <= usize::from(at != owner) && known.is_none_or(|known| known == ahead),
            );
            let services = entries(&layout.state.join("services"));
            is("directories of services", services.len() == usize::from(owns));
            // It is the owner's without reservation, and nowhere else.
            let volumes = local_volumes(machine);
            is(
                &format!("its volumes are {volumes:?}"),
                volumes == vec![VOLUME.to_owned(); usize::from(owns)],
            );
            let directory = layout.service(&self.service.name);
            is("its volume is a copy", !directory.join("volumes-are-a-copy").exists());
            let epoch = there.own.get(&self.service.id).map(|own| own.epoch);
            let right = owns.then_some(self.service.epoch + u64::from(owner == 1));
            is(&format!("its epoch is {epoch:?}"), epoch == right);
            if owner == 1 && at == 0 {
                let led = there.elsewhere.get(&self.service.id).map(|(to, _)| to.as_str()) == Some("b");
                is("it does not know where the service is", led);
            }
        }
        let layout = &self.machines[owner].layout;
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        if text(layout.upper(&self.service).join("file")) != FILE {
            wrong.push("its file is not what it was".into());
        }
        if text(volume(layout, &self.service).join("file")) != FILE {
            wrong.push("the file of its volume is not what it was".into());
        }
        if text(Runc::log_path(&layout.container_config(&self.service))) != FILE {
            wrong.push("its log is not what it was".into());
        }
        wrong.extend(self.wrong_report(owner == 1));
        wrong
    }

    /// Whether the report, where there is one, tells what came of it.
    fn wrong_report(&self, moved: bool) -> Option<String> {
        match &*self.daemons[0].report.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => {
                let right = if moved { Outcome::Moved } else { Outcome::Aborted };
                let told = (report.outcome, &report.reason);
                (report.outcome != right).then(|| format!("the report says {told:?}"))
            }
            // It could neither be moved nor put back at once, and was put back later.
            Some(Err(_)) => moved.then(|| "the report is an error of a service that moved".into()),
            // The daemon was killed.
            None => None,
        }
    }

    fn reason(&self) -> String {
        match &*self.daemons[0].report.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => report.reason.clone(),
            Some(Err(error)) => crate::error_chain(error),
            None => String::new(),
        }
    }

    fn frozen_ms(&self) -> f64 {
        match &*self.daemons[0].report.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => report.frozen_ms,
            _ => 0.0,
        }
    }

    fn phases(&self) -> Vec<Phase> {
        match &*self.daemons[0].report.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => report.phases.clone(),
            _ => Vec::new(),
        }
    }

    fn ahead(&self) -> u64 {
        match &*self.daemons[0].report.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Ok(report)) => report.retained_file_bytes,
            _ => 0,
        }
    }

    fn wrong_memory(&self) -> Vec<String> {
        let all = self
            .machines
            .iter()
            .flat_map(|machine| machine.there().containers.values().cloned().collect::<Vec<_>>());
        all.filter_map(|container| container.process.differs(SEED)).collect()
    }
}

/// The name of the service's volume.
const VOLUME: &str = "data";

/// Where the service's volume is on a node that has it.
fn volume(layout: &Layout, service: &Service) -> PathBuf {
    files::volumes(&layout.service(&service.name)).join(VOLUME)
}

/// The volumes of a node, a service's or not.
fn local_volumes(machine: &Machine) -> Vec<String> {
    let of_services = entries(&machine.layout.services()).into_iter();
    let places = of_services.map(|service| files::volumes(&service)).chain([machine.layout.volumes()]);
    let found = places.flat_map(|place| entries(&place));
    found.map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned()).collect()
}

/// The service runs on a node.
fn settle(machine: &Arc<Machine>, service: &Service) {
    let layout = &machine.layout;
    let directory = layout.service(&service.name);
    let config = layout.container_config(service);
    for path in [layout.upper(service), volume(layout, service), config.directory.clone()] {
        std::fs::create_dir_all(path).unwrap();
    }
    Incarnation::of(service).write(&directory).unwrap();
    std::fs::write(layout.upper(service).join("file"), FILE).unwrap();
    std::fs::write(volume(layout, service).join("file"), FILE).unwrap();
    std::fs::write(Runc::log_path(&config), FILE).unwrap();
    let store = Store::open(&layout.state.join("images")).unwrap();
    for (digest, blob) in LAYERS.iter() {
        let mut writer = store.blob_writer(digest, blob.len() as u64).unwrap();
        writer.write_all(blob).unwrap();
        writer.finish().unwrap();
        store.unpack(digest).unwrap();
    }
    let process = Arc::new(Process::new());
    process.fill(SEED);
    machine.add(&config, process, false);
    let mut there = machine.there();
    there.plugs.insert(service.name.clone(), Plug { open: true, ..Plug::default() });
    there.roots.insert(config.rootfs);
    there.own.insert(service.id.clone(), service.clone());
}

fn entries(path: &Path) -> BTreeSet<PathBuf> {
    std::fs::read_dir(path)
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default()
}

fn is_empty(path: &Path) -> bool {
    entries(path).is_empty()
}
