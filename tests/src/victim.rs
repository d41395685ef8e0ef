//! A service with a client that must not notice anything, and what godwit has to show when a
//! migration of it fails.
//!
//! ```text
//!   load    the open-loop client: every answer checked, one connection, never renewed
//!   watch   samples the processes on both nodes: they must never run on two
//!   points  where a migration can be held
//!   traces  what a node holds of services and migrations, compared with what it held before
//! ```

pub mod traces;
mod watch;

use std::{
    collections::BTreeSet,
    fs,
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use godwit_lab::{
    LabConfig,
    workload::{Preset, RedisClient, RedisLoad, Workload, resp::Reply},
};
use serde::Deserialize;

use self::{
    traces::{identity, mounts_below, nothing_more, nothing_of_its_own, run_directory, steady_traces},
    watch::{Watch, cgroups, pids, running},
};
use crate::{BUSY, Bed, CLIENT, PATIENCE, Report, Said, TRIES, hold::Points, wait_for, wait_for_within};

/// The service's name.
pub const NAME: &str = "redis";
/// Its address.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data in it, unless a test wants more.
pub const FILL: u64 = 4 << 20;
/// Requests a second.
const RATE: u32 = 250;
/// How long a migration may take on a busy machine until it is held, or ends.
pub const HELD: Duration = Duration::from_secs(120);
/// Waits until `node` has been told by `other` that a service is there.
fn hears_of_a_service(bed: &Bed, node: &str, other: &str) {
    #[derive(Deserialize)]
    struct Told {
        name: String,
        services: u32,
    }
    wait_for(&format!("node {node} to hear of the service on {other}"), || {
        let told: Vec<Told> = serde_json::from_str(&bed.godwit(node, &["--json", "nodes"]).stdout).ok()?;
        told.into_iter().find(|told| told.name == other && told.services > 0)
    });
}

/// A service as `godwit ps` shows it.
#[derive(Clone, Debug, Deserialize)]
pub struct Shown {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub node: String,
    /// `running`, `stopped`, `migrating`, `in-doubt`, `remote`.
    pub state: String,
    /// Why, where that needs a word.
    pub reason: String,
}

/// A Redis on node `a` with a client.
#[derive(Debug)]
pub struct Victim {
    load: Option<RedisLoad>,
    data: RedisClient,
    fill: u64,
    watch: Watch,
    before: [BTreeSet<String>; 2],
    /// The lab.
    pub bed: Bed,
    /// What runs in it.
    pub preset: Preset,
    points: Points,
    _directory: tempfile::TempDir,
}

/// The exit code of a `godwit migrate` whose daemon has gone.
pub const UNKNOWN: i32 = 4;

/// A `godwit migrate` under way.
#[derive(Debug)]
pub struct Attempt(Child);

impl Victim {
    /// Redis on `a` and its client, in a lab of the test's own.
    pub fn up(test: &str) -> Self {
        Self::up_with(test, |_, _| {}, |_| Vec::new())
    }

    /// The same with changes to the lab (given a directory that lives as long), and with more flags
    /// of `godwit run` made when the root filesystem is there.
    pub fn up_with(
        test: &str,
        change: impl FnOnce(&mut LabConfig, &Path),
        flags: impl FnOnce(&mut Preset) -> Vec<String>,
    ) -> Self {
        Self::up_beside(test, change, |_| {}, flags, None, FILL)
    }

    /// The same with so many bytes of data in it.
    pub fn up_filled(test: &str, fill: u64, change: impl FnOnce(&mut LabConfig, &Path)) -> Self {
        Self::up_beside(test, change, |_| {}, |_| Vec::new(), None, fill)
    }

    /// The same after something was done to the nodes, which have no service yet.
    pub fn up_prepared(test: &str, fill: u64, prepare: impl FnOnce(&Bed)) -> Self {
        Self::up_beside(test, |_, _| {}, prepare, |_| Vec::new(), None, fill)
    }

    /// Redis on `a` and, begun while the nodes could not ask each other, another service on `b` of the
    /// given name and address. The client cannot reach `b`, so that it knows one owner of an address.
    pub fn up_split(test: &str, name: &str, address: Ipv4Addr) -> Self {
        Self::up_beside(test, |_, _| {}, |_| {}, |_| Vec::new(), Some((name, address)), FILL)
    }

    fn up_beside(
        test: &str,
        change: impl FnOnce(&mut LabConfig, &Path),
        prepare: impl FnOnce(&Bed),
        flags: impl FnOnce(&mut Preset) -> Vec<String>,
        beside: Option<(&str, Ipv4Addr)>,
        fill: u64,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut points = None;
        let bed = Bed::up_with(test, |config| {
            points = Some(Points::of(config));
            change(config, directory.path());
        });
        let points = points.unwrap();
        prepare(&bed);
        let mut preset = bed.build(Workload::Redis);
        let flags = flags(&mut preset);
        let before = ["a", "b"].map(|node| steady_traces(&bed, node, |_| true));
        if beside.is_some() {
            bed.lab().cut("a", "b").unwrap();
            bed.lab().cut("b", CLIENT).unwrap();
        }
        bed.run("a", NAME, ADDRESS, &preset, &flags.iter().map(String::as_str).collect::<Vec<_>>());
        if let Some((name, address)) = beside {
            bed.run("b", name, address, &preset, &[]);
            bed.lab().heal("a", "b").unwrap();
            // Each knows of the other's service before anything is asked of its own.
            for (node, other) in [("a", "b"), ("b", "a")] {
                hears_of_a_service(&bed, node, other);
            }
        }
        let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
        data.fill(fill).unwrap();
        let load = RedisLoad::start(bed.lab(), CLIENT, preset.at(ADDRESS), RATE).unwrap();
        // Two services of one name are two, not one that runs twice.
        let watch = match beside {
            Some((NAME, _)) => Watch::blind(),
            _ => Watch::start(bed.lab().name()),
        };
        let mut victim =
            Self { load: Some(load), data, fill, watch, before, bed, preset, points, _directory: directory };
        if beside.is_none() {
            // Node b has heard of it: its forwarding entries belong to what it held before.
            victim
                .shown("b", |shown| shown.is_some_and(|shown| shown.state == "remote" && shown.node == "a"));
            let address = ADDRESS.to_string();
            victim.before[1] = steady_traces(&victim.bed, "b", |traces| {
                traces.iter().any(|trace| trace.starts_with("forwarding") && trace.contains(&address))
            });
        }
        victim
    }

    /// The next migration that comes to this point waits there.
    pub fn hold(&self, point: &str) {
        self.points.hold(point);
    }

    /// Waits until a migration is held at this point.
    pub fn reached(&self, point: &str) {
        self.points.reached(point);
    }

    /// What is held at this point goes on.
    pub fn let_go(&self, point: &str) {
        self.points.let_go(point);
    }

    /// Starts `godwit --json migrate` from `from` to `to`.
    pub fn begin(&self, from: &str, to: &str) -> Attempt {
        self.begin_with(from, to, &[])
    }

    /// The same with more flags.
    pub fn begin_with(&self, from: &str, to: &str, flags: &[&str]) -> Attempt {
        Attempt::begin(&self.bed, NAME, from, to, flags)
    }

    /// Starts a migration from `a` to `b` that is held at `point` when this returns.
    pub fn begin_and_hold(&self, point: &str) -> Attempt {
        self.begin_with_and_hold("a", "b", &[], point)
    }

    /// Starts a migration that will be held at `point`, without waiting until it is.
    pub fn begin_and_watch(&self, from: &str, to: &str, point: &str) -> Attempt {
        self.hold(point);
        self.begin(from, to)
    }

    /// Whether a migration is held, or was, since this point was last to be held at.
    pub fn has_reached(&self, point: &str) -> bool {
        self.points.has_reached(point)
    }

    /// Migrates from `a` to `b`, which must fail for another reason than a busy machine; why, in godwit's words.
    pub fn aborted(&self) -> String {
        let mut tries = 1..TRIES;
        loop {
            let reason = self.begin("a", "b").aborted();
            if !is_excused(&reason) || tries.next().is_none() {
                return reason;
            }
        }
    }

    /// What `godwit ps` on `node` says of the service, once `right` accepts it.
    pub fn shown(&self, node: &str, right: impl Fn(Option<&Shown>) -> bool) -> Option<Shown> {
        let mut last = None;
        wait_for(&format!("the right answer of `godwit ps` on node {node}"), || {
            let shown = self.told(node)?;
            if last.as_ref().map(|shown: &Option<Shown>| format!("{shown:?}")) != Some(format!("{shown:?}")) {
                println!("node {node} shows {shown:?}");
                last = Some(shown.clone());
            }
            right(shown.as_ref()).then_some(shown)
        })
    }

    /// What `godwit ps` on `node` says of the service now; nothing at all where it does not answer.
    pub fn told(&self, node: &str) -> Option<Option<Shown>> {
        let said = self.bed.godwit(node, &["--json", "ps", "-a"]);
        let shown: Vec<Shown> = serde_json::from_str(&said.stdout).ok()?;
        Some(shown.into_iter().find(|shown| shown.name == NAME))
    }

    /// The service runs at `node` and there only, its client has lost nothing, and both nodes say so.
    pub fn runs_at(&self, node: &str) {
        self.client_is_content();
        for asked in ["a", "b"] {
            let state = if asked == node { "running" } else { "remote" };
            self.shown(asked, |shown| shown.is_some_and(|shown| shown.state == state && shown.node == node));
        }
        assert!(running(self.bed.lab().name(), node), "no process of it runs on {node}");
        self.watch.check();
    }

    /// The client has been answered everything that it asked.
    fn client_is_content(&self) {
        let lap = self.load.as_ref().unwrap().lap().unwrap();
        assert!(lap.is_clean() && lap.reconnects == 0, "{lap:?}");
    }

    /// All data are in the service, byte for byte: a page that was lost would read as zero.
    pub fn has_its_data(&mut self) {
        self.data.check_fill(self.fill).unwrap();
    }

    /// Whether a client on `host` finds the data at the service's address, or an empty service.
    pub fn data_found_from(&self, host: &str) -> bool {
        let at = self.preset.at(ADDRESS);
        let mut client = RedisClient::connect(self.bed.lab(), host, at, PATIENCE).unwrap();
        client.call(&["DBSIZE"]).unwrap() != Reply::Integer(0)
    }

    /// Puts so many bytes of further data into it, beyond those that it has.
    pub fn grows(&mut self, bytes: u64) {
        self.fill += bytes;
        self.data.fill(self.fill).unwrap();
    }

    /// After the service was lost and removed: another one on `node`, with a client of its own.
    pub fn renew(&mut self, node: &str) {
        // What became of its last requests is not known to anybody.
        drop(self.load.take());
        self.bed.run(node, NAME, ADDRESS, &self.preset, &[]);
        let at = self.preset.at(ADDRESS);
        self.data = RedisClient::connect(self.bed.lab(), CLIENT, at, PATIENCE).unwrap();
        self.data.fill(self.fill).unwrap();
        self.load = Some(RedisLoad::start(self.bed.lab(), CLIENT, at, RATE).unwrap());
    }

    /// What a node holds of services and migrations, without what all nodes know of a service of
    /// another; comparable with another node's.
    pub fn holdings(&self, node: &str) -> BTreeSet<String> {
        let (own, any) = [node, "NODE"].map(|node| format!("/{}/{node}/", self.bed.lab().name())).into();
        let traces = steady_traces(&self.bed, node, |_| true).into_iter();
        traces.filter(|trace| !trace.starts_with("forwarding")).map(|t| t.replace(&own, &any)).collect()
    }

    /// Tells the daemon of a node to end, as systemd does; it is waited for with [`Self::has_ended`].
    pub fn terminate(&self, node: &str) -> rustix::process::Pid {
        let pid = daemon(&self.bed, node).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        pid
    }

    /// Sends a signal to all of a node's own processes of this name; to how many.
    pub fn signal(&self, node: &str, program: &str, signal: rustix::process::Signal) -> usize {
        let all = programs_of(&self.bed, node, program);
        // One that has ended meanwhile needs none.
        all.into_iter().filter(|pid| rustix::process::kill_process(*pid, signal).is_ok()).count()
    }

    /// Starts the daemons that do not run: some faults end them.
    pub fn revives(&self) {
        for node in ["a", "b"] {
            if daemon(&self.bed, node).is_none() {
                self.bed.lab().start_node(node).unwrap();
            }
        }
    }

    /// The daemon of a node, which runs.
    pub fn daemon(&self, node: &str) -> rustix::process::Pid {
        daemon(&self.bed, node).unwrap()
    }

    /// Neither node holds anything of a migration, nor the one on which the service is not anything of that.
    pub fn is_at_rest_on(&self, node: &str) {
        for (one, before) in ["a", "b"].into_iter().zip(&self.before) {
            let state = self.bed.lab().state(one).unwrap();
            wait_for(&format!("the journal on {one} to be closed"), || {
                (unfinished(&state) == 0).then_some(())
            });
            match one == node {
                true => self.no_migration_on(one),
                false => nothing_of_its_own(&self.bed, one, before),
            }
        }
    }

    /// Waits for the end of a node's daemon that was told to.
    pub fn has_ended(&self, node: &str) {
        wait_for(&format!("the end of godwitd on {node}"), || {
            daemon(&self.bed, node).is_none().then_some(())
        });
    }

    /// Kills all processes of the service on a node, frozen or not.
    pub fn kill_processes(&self, node: &str) {
        let cgroups = cgroups(self.bed.lab().name(), node);
        let pids: Vec<_> = pids(&cgroups).iter().filter_map(|pid| pid.parse().ok()).collect();
        for pid in pids.into_iter().filter_map(rustix::process::Pid::from_raw) {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        for cgroup in &cgroups {
            // Only the freezer of version 1 keeps them from dying. Nothing of them is executed.
            let _ = fs::write(cgroup.join("freezer.state"), "THAWED");
        }
        wait_for("the end of the processes", || self::pids(&cgroups).is_empty().then_some(()));
    }

    /// No node holds anything of the service, which was removed.
    pub fn is_gone(mut self) {
        drop(self.load.take());
        for (node, before) in ["a", "b"].into_iter().zip(&self.before) {
            self.shown(node, |shown| shown.is_none());
            nothing_of_its_own(&self.bed, node, before);
        }
        self.watch.check();
    }

    /// The pagers that live on a node.
    pub fn pagers(&self, node: &str) -> Vec<rustix::process::Pid> {
        let pagers = run_directory(self.bed.lab().name(), node).join("pagers");
        let entries = fs::read_dir(pagers).into_iter().flatten().flatten();
        let locks = entries.filter_map(|entry| fs::read_to_string(entry.path().join("pager.lock")).ok());
        locks.filter_map(|pid| rustix::process::Pid::from_raw(pid.trim().parse().ok()?)).collect()
    }

    /// No process of it ran at both nodes at once.
    pub fn never_ran_twice(&self) {
        self.watch.check();
    }

    /// The service runs at `a` as before, though `b` may not know.
    pub fn runs_at_a_whatever_b_says(&self) {
        self.client_is_content();
        self.shown("a", |shown| shown.is_some_and(|shown| shown.state == "running"));
        self.watch.check();
    }

    /// Node `b` holds nothing more than before the service was sent to it.
    pub fn nothing_is_left_on_b(&self) {
        nothing_more(&self.bed, "b", &self.before[1]);
    }

    /// A node holds nothing of a migration: neither its images nor processes that wait for it.
    pub fn no_migration_on(&self, node: &str) {
        let lab = self.bed.lab().name();
        let room = run_directory(lab, node).join("migrations");
        wait_for(&format!("the end of the images on {node}"), || {
            let left = fs::read_dir(&room).map_or(0, Iterator::count);
            (left == 0 && mounts_below(&room).is_empty()).then_some(())
        });
    }

    /// The same from `from` to `to` with more flags.
    pub fn begin_with_and_hold(&self, from: &str, to: &str, flags: &[&str], point: &str) -> Attempt {
        Attempt::held(&self.points, point, || self.begin_with(from, to, flags))
    }

    /// After a migration that failed: everything is as it was, and the client has seen nothing.
    pub fn is_as_before(&self) {
        self.runs_at("a");
        self.no_migration_on("a");
        self.nothing_is_left_on_b();
    }

    /// Runs to the end: the service can be moved from `a` now, with all of its data.
    pub fn moves_in_the_end(self) {
        self.bed.migrate(NAME, "a", "b");
        self.ends_at_b();
    }

    /// The service is on `a` for good, and its client has lost nothing.
    pub fn ends_at_a(mut self) {
        self.runs_at("a");
        let report = self.load.take().unwrap().stop().unwrap();
        assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
        assert_eq!(report.sent, report.answered);
        self.data.check_fill(self.fill).unwrap();
        self.watch.check();
    }

    /// The service is on `b` for good: `a` holds nothing of it, and its client has lost nothing.
    pub fn ends_at_b(mut self) {
        self.runs_at("b");
        let report = self.load.take().unwrap().stop().unwrap();
        assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
        assert_eq!(report.sent, report.answered);
        self.data.check_fill(self.fill).unwrap();
        // Its own forwarding entries stay on a; all else goes.
        nothing_of_its_own(&self.bed, "a", &self.before[0]);
        self.watch.check();
    }
}

impl Attempt {
    /// Starts `godwit --json migrate` of a service with these flags.
    pub fn begin(bed: &Bed, name: &str, from: &str, to: &str, flags: &[&str]) -> Self {
        let arguments = [&["--json", "migrate", name, "--to", to], flags].concat();
        Self::of(bed.command(from, &arguments))
    }

    /// Begins a migration that is held at `point` when this returns. One that a busy machine aborts before that is begun
    /// again, as soon as the destination has noticed that it has ended.
    pub fn held(points: &Points, point: &str, begin: impl Fn() -> Self) -> Self {
        points.hold(point);
        for _ in 0..TRIES {
            let mut attempt = begin();
            let ended = wait_for_within(HELD, &format!("point {point} of the migration, or its end"), || {
                let ended = attempt.0.try_wait().unwrap();
                (ended.is_some() || points.has_reached(point)).then_some(ended)
            });
            match ended {
                None => return attempt,
                // The source has let go of a service that needs nothing more of it. The destination comes there yet.
                Some(status) if status.success() => {
                    points.reached(point);
                    return attempt;
                }
                Some(_) => {}
            }
            let reason = attempt.aborted();
            assert!(is_excused(&reason), "{reason}");
        }
        panic!("the migration was aborted {TRIES} times before point {point}, because the machine was busy")
    }

    /// Runs a command of godwit that migrates a service, with `--json`.
    pub fn of(mut command: Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Sends godwit a signal, as a terminal would.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.program().unwrap(), signal).unwrap();
    }

    /// Ends godwit by SIGKILL, if it runs still.
    pub fn kill(&self) {
        if let Some(pid) = self.program() {
            // It may have ended since.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// godwit itself, and not `timeout`, which would pass a signal on to it and to its whole group: that is twice.
    fn program(&self) -> Option<rustix::process::Pid> {
        let children = format!("/proc/{0}/task/{0}/children", self.0.id());
        rustix::process::Pid::from_raw(fs::read_to_string(children).ok()?.trim().parse().ok()?)
    }

    /// Whether it is over.
    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    pub fn end(self) -> Said {
        let output = self.0.wait_with_output().unwrap();
        let said = Said {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        println!("migrate: {} {}{}", said.code, said.stdout, said.stderr);
        said
    }

    /// Waits for its end, which must be an aborted migration with exit code 1; why.
    pub fn aborted(self) -> String {
        self.kept_with(1)
    }

    /// The same with another exit code.
    pub fn kept_with(self, code: i32) -> String {
        let (said, report) = self.report("aborted", code);
        let sentence = said.stderr.lines().last().unwrap_or_default();
        assert!(sentence.starts_with("Error: ") && sentence.contains(&report.reason), "{said:?}");
        report.reason
    }

    /// Waits for its end, which must be a service that moved; what the report adds.
    pub fn moved(self) -> String {
        self.report("moved", 0).1.reason
    }

    /// The same, where there is nothing to add but what a busy machine can cause.
    pub fn moved_well(self) {
        let reason = self.moved();
        assert!(reason.is_empty() || is_excused(&reason), "{reason}");
    }

    /// Waits for its end, which must be a service that was lost at the destination; why.
    pub fn lost(self) -> String {
        let (said, report) = self.report("lost", 3);
        let sentence =
            format!("Error: {} was lost on {}: {}", report.name, report.destination, report.reason);
        assert_eq!(said.stderr.lines().last(), Some(sentence.as_str()), "{said:?}");
        report.reason
    }

    /// Waits for its end after the commit: whether the service was lost, and what the report adds.
    pub fn moved_or_lost(self) -> (bool, String) {
        let said = self.end();
        let report = said.report();
        let outcome = (report.outcome.as_str(), said.code);
        assert!([("moved", 0), ("lost", 3)].contains(&outcome), "{said:?}");
        (outcome.0 == "lost", report.reason)
    }

    /// Waits for its end, which must have this outcome and exit code; what it said, and its report.
    pub fn report(self, outcome: &str, code: i32) -> (Said, Report) {
        let said = self.end();
        assert_eq!(said.code, code, "{said:?}");
        let report = said.report();
        assert_eq!(report.outcome, outcome, "{report:?}");
        (said, report)
    }
}

/// Whether a migration was aborted for no other reason than a busy machine: a machine that runs a dozen labs at once does not
/// always keep to the time for heartbeats, and the destination of the attempt before may not have noticed that it has ended.
pub(crate) fn is_excused(reason: &str) -> bool {
    BUSY.iter().any(|busy| reason.contains(busy))
        || (reason.contains(" refuses") && reason.contains("earlier migration"))
}

/// The daemon of a node.
pub fn daemon(bed: &Bed, node: &str) -> Option<rustix::process::Pid> {
    programs_of(bed, node, "godwitd").first().copied()
}

/// How many migrations the journal in a node's state has that are not at their end.
fn unfinished(state: &Path) -> u32 {
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let journal = rusqlite::Connection::open_with_flags(state.join("journal.db"), flags).unwrap();
    let open = "SELECT count(*) FROM migration WHERE stage NOT IN ('aborted', 'dropped', 'done', 'released')";
    journal.query_row(open, [], |row| row.get(0)).unwrap()
}

/// The processes of a node itself, not of its services, that have this name and live.
pub fn programs_of(bed: &Bed, node: &str, program: &str) -> Vec<rustix::process::Pid> {
    let namespace = fs::metadata(bed.lab().namespace(node).unwrap()).map(|meta| identity(&meta)).unwrap();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let inside = identity(&fs::metadata(entry.path().join("ns/net")).ok()?) == namespace;
        let named = fs::read_to_string(entry.path().join("comm")).ok()?.trim() == program;
        let dead = fs::read_to_string(entry.path().join("stat")).ok()?.contains(") Z ");
        let pid = entry.file_name().to_str()?.parse().ok()?;
        rustix::process::Pid::from_raw(pid).filter(|_| inside && named && !dead)
    });
    found.collect()
}
