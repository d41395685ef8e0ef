//! Nodes of the last release beside nodes of the present one, and a cluster that is upgraded from one to the other while
//! its services run; what each refuses of the other, and the way back; and state files of a newer release. Needs root. The
//! last release is built where it is not there, so the tests that have it run in `make test-full` only.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::mpsc,
    thread,
};

use godwit_lab::{
    Lab, LabConfig,
    workload::{RedisClient, RedisLoad, Workload},
};
use godwit_migration::{
    link::{Link, options},
    message::{Accepted, Message, OLDEST_PROTOCOL_VERSION, Open, PROTOCOL_VERSION, Refused, Versions},
};
use godwit_tests::{
    Bed, CLIENT, MODES, PATIENCE, Said,
    podman::Podmans,
    release, tier,
    victim::{Attempt, NAME, UNKNOWN, Victim},
    wait_for,
};
use godwit_transfer::{Alpn, Identity, ListenOptions, Listener, NodeName};
use rusqlite::{Connection, params};
use rustix::{
    fs::{Mode, OFlags},
    pty::OpenptFlags,
};
use serde_json::Value;

const NODES: [&str; 3] = ["a", "b", "c"];
/// Of the Redis that moves.
const MOVES: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data in it.
const FILL: u64 = 16 << 20;
/// Requests of its client, a second.
const RATE: u32 = 250;
/// Of the Redis that stays on its node until all are upgraded, and the port by which it is published.
const STAYS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 11);
const PUBLISHED: u16 = 16379;
/// Pages follow a service that runs at the destination.
const PUSHING: &str = "source.pushing";

/// These programs on the given nodes.
fn install(config: &mut LabConfig, nodes: &[&str], programs: &Path) {
    let of_nodes = nodes.iter().map(|node| ((*node).to_owned(), programs.to_owned()));
    config.programs.of_nodes.extend(of_nodes);
}

/// The program that a node's daemon was started from.
fn daemon(lab: &Lab, node: &str) -> PathBuf {
    let status = Lab::status(lab.name()).unwrap();
    let daemon = status.hosts.into_iter().find(|host| host.name == node).and_then(|host| host.daemon);
    fs::read_link(format!("/proc/{}/exe", daemon.unwrap())).unwrap()
}

/// Puts the present programs in the place of a node's, as the manual says: with its services running.
fn upgrade(bed: &mut Bed, node: &str) {
    let before = daemon(bed.lab(), node);
    bed.install(node, None);
    bed.lab().restart_node(node).unwrap();
    assert_ne!(daemon(bed.lab(), node), before, "node {node} runs another program");
    for asked in bed.lab().config().nodes.clone() {
        wait_for(&format!("node {asked} to see all nodes ready"), || {
            let nodes: Vec<Value> = bed.json(&asked, &["nodes"]);
            nodes.iter().all(|node| node["state"] == "ready").then_some(())
        });
    }
}

/// What a node says of one of its own services.
fn inspect(bed: &Bed, node: &str, name: &str) -> Value {
    bed.json(node, &["inspect", name])
}

/// A Redis with a client that has one connection and never renews it.
struct Moving {
    data: RedisClient,
    load: RedisLoad,
    on: &'static str,
    moves: usize,
}

impl Moving {
    /// Moves it, each time in another mode; its client notices nothing.
    fn to(&mut self, bed: &Bed, node: &'static str) {
        let mode = MODES[self.moves % MODES.len()];
        bed.knows(self.on, "moves");
        bed.migrate_so("moves", self.on, node, &["--mode", mode]);
        println!("moved from {} to {node} ({mode})", self.on);
        (self.on, self.moves) = (node, self.moves + 1);
        self.is_content("a move");
        self.data.check_fill(FILL).unwrap();
    }

    fn is_content(&self, after: &str) {
        let lap = self.load.lap().unwrap();
        assert!(lap.is_clean() && lap.reconnects == 0, "{after}: {lap:?}");
    }
}

#[test]
fn a_cluster_of_the_last_release_is_upgraded_node_by_node_under_load() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let mut bed = Bed::up_with("upgrade", |config| {
        config.nodes.push("c".to_owned());
        install(config, &NODES, &old);
    });
    for node in NODES {
        assert!(daemon(bed.lab(), node).starts_with(&old));
    }
    let preset = bed.build(Workload::Redis);
    assert_eq!(bed.done("a", &["network", "create", "back"]), "back\n");
    bed.run(
        "b",
        "stays",
        STAYS,
        &preset,
        &["--publish", &format!("{PUBLISHED}:6379"), "--restart", "always"],
    );
    bed.run("a", "moves", MOVES, &preset, &[]);
    let connect = |at| RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
    let mut stays = connect(preset.at(STAYS));
    stays.fill(FILL).unwrap();
    let mut data = connect(preset.at(MOVES));
    data.fill(FILL).unwrap();
    let load = RedisLoad::start(bed.lab(), CLIENT, preset.at(MOVES), RATE).unwrap();
    let mut moving = Moving { data, load, on: "a", moves: 0 };
    let before = inspect(&bed, "b", "stays");
    // Pages that it leaves behind are retained by a daemon that is upgraded meanwhile.
    moving.to(&bed, "b");
    moving.to(&bed, "a");

    // Between the releases, in each mode and in both directions.
    upgrade(&mut bed, "c");
    moving.is_content("the upgrade of c");
    for _ in MODES {
        moving.to(&bed, "c");
        moving.to(&bed, "a");
    }
    // One upgraded node has services, which go on with the shims that they have.
    upgrade(&mut bed, "b");
    moving.is_content("the upgrade of b");
    let after = inspect(&bed, "b", "stays");
    for same in ["state", "pid", "id", "epoch", "address", "mac", "restart", "created_ms", "published"] {
        assert_eq!(after[same], before[same], "{same}");
    }
    moving.to(&bed, "b");
    // 0.2.0 cannot be asked.
    let asked = bed.godwit("b", &["check", "moves", "--to", "a"]);
    assert!(asked.code == 2 && asked.stdout.contains("as an older godwit does"), "{asked:?}");
    for node in ["a", "c", "b", "c", "a"] {
        moving.to(&bed, node);
    }
    // The last one, with the service under load on it.
    upgrade(&mut bed, "a");
    moving.is_content("the upgrade of a");
    for node in ["b", "c", "a"] {
        moving.to(&bed, node);
    }

    // What was begun with the old release is whole, and is the new one's to move, publish and end.
    stays.check_fill(FILL).unwrap();
    for node in NODES {
        let networks: Value = bed.json(node, &["network", "ls"]);
        assert_eq!(networks[1]["network"]["name"], "back", "{networks}");
        drop(bed.connect(SocketAddrV4::new(bed.lab().address(node).unwrap(), PUBLISHED)));
    }
    bed.migrate("stays", "b", "c");
    stays.check_fill(FILL).unwrap();
    let report = moving.load.stop().unwrap();
    assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent, report.answered);
    println!("{} moves, {} requests", moving.moves, report.sent);
    for (node, name) in [("a", "moves"), ("c", "stays")] {
        bed.done(node, &["stop", name]);
        assert_eq!(inspect(&bed, node, name)["state"], "stopped");
        bed.done(node, &["rm", name]);
    }
}

#[test]
fn nodes_of_both_releases_join_each_others_clusters() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    for (test, of_the_old) in [("join-old", "a"), ("join-new", "b")] {
        let bed = Bed::up_with(test, |config| install(config, &[of_the_old], &old));
        let new = if of_the_old == "a" { "b" } else { "a" };
        for node in bed.json::<Vec<Value>>(new, &["nodes"]) {
            // Release 0.2.0 speaks 3, and does not tell.
            let range =
                if node["name"] == new { [OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION] } else { [3, 3] };
            let shown = ["oldest_protocol", "newest_protocol"].map(|end| node[end].as_u64().unwrap());
            assert_eq!(shown, range.map(u64::from), "{node}");
        }
        let preset = bed.build(Workload::Busybox);
        bed.run("a", "moves", MOVES, &preset, &[]);
        bed.migrate("moves", "a", "b");
        bed.knows("b", "moves");
        bed.migrate("moves", "b", "a");
    }
}

/// A service that runs on `b` while `a` has sent only the first of its pages; both are of the last release.
fn served(test: &str, old: &Path) -> (Victim, Attempt) {
    let victim = Victim::up_with(test, |config, _| install(config, &["a", "b"], old), |_| Vec::new());
    let attempt = victim.begin_with_and_hold("a", "b", &["--mode", "postcopy"], PUSHING);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.node == "b"));
    (victim, attempt)
}

#[test]
fn a_pager_of_the_last_release_is_served_to_its_end() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let (mut victim, attempt) = served("upgrade-dest", &old);
    let pagers = victim.pagers("b");
    assert!(!pagers.is_empty(), "it awaits pages");
    upgrade(&mut victim.bed, "b");
    assert_eq!(victim.pagers("b"), pagers, "they are those of before");
    victim.let_go(PUSHING);
    attempt.moved_well();
    victim.has_its_data();
    victim.ends_at_b();
}

#[test]
fn a_source_of_the_last_release_that_is_upgraded_serves_the_pages_that_it_owes() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let (mut victim, attempt) = served("upgrade-src", &old);
    upgrade(&mut victim.bed, "a");
    victim.let_go(PUSHING);
    // The daemon that was asked has ended.
    assert_eq!(attempt.end().code, UNKNOWN);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.reason.is_empty()));
    victim.has_its_data();
    upgrade(&mut victim.bed, "b");
    victim.bed.migrate(NAME, "b", "a");
    victim.ends_at_a();
}

/// What a release that does not exist yet has made of a state file of node `a`.
fn step_of_a_newer_release(victim: &Victim, file: &str) {
    let database = Connection::open(victim.bed.lab().state("a").unwrap().join(file)).unwrap();
    let known: u32 = database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    let adds = "which services are to be moved at night";
    let row = params![known + 1, "9.1.0", adds];
    database.execute("INSERT INTO schema_step (number, release, adds) VALUES (?1, ?2, ?3)", row).unwrap();
    database.pragma_update(None, "user_version", known + 1).unwrap();
}

/// The same undone, as by a copy of before.
fn back(victim: &Victim, file: &str) {
    let database = Connection::open(victim.bed.lab().state("a").unwrap().join(file)).unwrap();
    let newer: u32 = database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    database.execute("DELETE FROM schema_step WHERE number = ?1", params![newer]).unwrap();
    database.pragma_update(None, "user_version", newer - 1).unwrap();
}

#[test]
fn a_downgrade_says_what_it_would_lose_and_the_services_go_on() {
    let victim = Victim::up("downgrade");
    for file in ["node.db", "journal.db"] {
        victim.bed.lab().stop_node("a").unwrap();
        step_of_a_newer_release(&victim, file);
        let said = victim.bed.lab().start_node("a").unwrap_err().to_string();
        for word in [
            file,
            "written by godwit 9.1.0",
            "would lose which services are to be moved at night",
            "install godwit 9.1.0 again",
        ] {
            assert!(said.contains(word), "{file}: {word}: {said}");
        }
        back(&victim, file);
        victim.bed.lab().start_node("a").unwrap();
        victim.runs_at("a");
    }
    victim.moves_in_the_end();
}

/// The databases of a node, which an upgrade converts.
const DATABASES: [&str; 2] = ["node.db", "journal.db"];

/// The files of a node's databases, with what SQLite has beside them.
fn database_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_one = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        DATABASES.iter().any(|database| name.starts_with(database))
    };
    entries.filter(is_one).collect()
}

/// Everything in a database, in words.
fn contents(path: &Path) -> Vec<String> {
    let database = Connection::open(path).unwrap();
    let rows = |sql: &str| -> Vec<String> {
        let mut statement = database.prepare(sql).unwrap();
        let columns = statement.column_count();
        let row = |row: &rusqlite::Row<'_>| {
            let values = (0..columns).map(|column| row.get_ref(column).map(|value| format!("{value:?}")));
            Ok(values.collect::<Result<Vec<_>, _>>()?.join(" "))
        };
        statement.query_map([], row).unwrap().map(Result::unwrap).collect()
    };
    let mut tables =
        database.prepare("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").unwrap();
    let tables: Vec<String> = tables.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    let of_tables = tables.iter().flat_map(|table| {
        rows(&format!("SELECT * FROM {table}")).into_iter().map(move |row| format!("{table}: {row}"))
    });
    rows("PRAGMA user_version").into_iter().chain(of_tables).collect()
}

/// What a database says that it holds since the steps which a release that knows only the first `known` would lose.
fn would_lose(path: &Path, known: usize) -> Vec<String> {
    let database = Connection::open(path).unwrap();
    let mut adds = database.prepare("SELECT adds FROM schema_step WHERE number > ?1").unwrap();
    adds.query_map([known], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_node_goes_back_to_the_last_release_with_the_copies_of_its_databases_only() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let mut victim =
        Victim::up_with("goes-back", |config, _| install(config, &["a", "b"], &old), |_| Vec::new());
    let state = victim.bed.lab().state("a").unwrap();
    let version = |database: &str| -> usize {
        let database = Connection::open(state.join(database)).unwrap();
        database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    };
    // As the manual says: the copies are made while the daemon does not run.
    victim.bed.lab().stop_node("a").unwrap();
    let copy = tempfile::tempdir().unwrap();
    for file in database_files(&state) {
        fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
    }
    let known = DATABASES.map(version);
    victim.bed.install("a", None);
    victim.bed.lab().start_node("a").unwrap();
    victim.runs_at("a");

    // The old release knows numbers alone, so the new one says at the upgrade what a way back would lose.
    let log = fs::read_to_string(victim.bed.lab().log("a").unwrap()).unwrap();
    for (database, known) in DATABASES.into_iter().zip(known) {
        let lost = would_lose(&state.join(database), known);
        assert!(!lost.is_empty(), "{database} was converted");
        let said = log.lines().find(|line| line.contains("would lose") && line.contains(database));
        let said = said.unwrap_or_else(|| panic!("nothing is said of {database}: {log}"));
        for word in lost.iter().map(String::as_str).chain([format!("knows only {known} ").as_str()]) {
            assert!(said.contains(word), "{database}: {word}: {said}");
        }
    }

    // Without the copies: it does not start, names the file and both versions, and leaves all as it was.
    let (new, newer) = (daemon(victim.bed.lab(), "a"), DATABASES.map(version));
    victim.bed.lab().stop_node("a").unwrap();
    let before = DATABASES.map(|database| contents(&state.join(database)));
    victim.bed.install("a", Some(&old));
    let said = victim.bed.lab().start_node("a").unwrap_err().to_string();
    // What it says at last: its log has the words of the newer one as well.
    let said = said.rsplit("Error: ").next().unwrap();
    println!("{said}");
    let named = DATABASES.iter().position(|database| said.contains(database));
    let named = named.unwrap_or_else(|| panic!("no file is named: {said}"));
    for word in [
        format!("schema version {}", newer[named]),
        format!("knows only {}", known[named]),
        "install the newer godwit again".to_owned(),
    ] {
        assert!(said.contains(&word), "{word}: {said}");
    }
    assert_eq!(DATABASES.map(|database| contents(&state.join(database))), before, "nothing is changed");
    victim.has_its_data();

    // One way on: the newer release again, as if nothing had been.
    victim.bed.install("a", None);
    victim.bed.lab().start_node("a").unwrap();
    assert_eq!(daemon(victim.bed.lab(), "a"), new);
    victim.runs_at("a");

    // The other one: the copies, under the service that runs.
    victim.bed.lab().stop_node("a").unwrap();
    for file in database_files(&state) {
        fs::remove_file(file).unwrap();
    }
    for file in database_files(copy.path()) {
        fs::copy(&file, state.join(file.file_name().unwrap())).unwrap();
    }
    victim.bed.install("a", Some(&old));
    victim.bed.lab().start_node("a").unwrap();
    assert!(daemon(victim.bed.lab(), "a").starts_with(&old));
    assert_eq!(DATABASES.map(version), known);
    victim.runs_at("a");
    // It is the old release's as before, and can be upgraded another time.
    victim.bed.migrate(NAME, "a", "b");
    victim.runs_at("b");
    victim.bed.migrate(NAME, "b", "a");
    upgrade(&mut victim.bed, "a");
    assert_eq!(DATABASES.map(version), newer);
    victim.runs_at("a");
    victim.has_its_data();
    victim.moves_in_the_end();
}

/// A command of `godwit exec` on a terminal, which has begun.
struct OnTerminal {
    terminal: fs::File,
    godwit: Child,
}

impl OnTerminal {
    fn begins(bed: &Bed, node: &str, service: &str) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = rustix::pty::openpt(flags).unwrap();
        rustix::pty::unlockpt(&terminal).unwrap();
        let end = rustix::fs::open(
            rustix::pty::ptsname(&terminal, Vec::new()).unwrap(),
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let end = end.unwrap();
        let stream = || Stdio::from(end.try_clone().unwrap());
        let mut command =
            bed.command(node, &["exec", "-it", service, "sh", "-c", "echo begun; exec sleep 100000"]);
        let godwit = command.stdin(stream()).stdout(stream()).stderr(stream()).spawn().unwrap();
        let mut begins = Self { terminal: fs::File::from(terminal), godwit };
        let (mut seen, mut buffer) = (String::new(), [0; 256]);
        while !seen.contains("begun") {
            let length = begins.terminal.read(&mut buffer).unwrap();
            seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        begins
    }

    /// The user interrupts it.
    fn end(mut self) {
        self.terminal.write_all(b"\x03").unwrap();
        self.godwit.wait().unwrap();
    }
}

/// Asks something of godwit on node `a` that is refused: each of the words is in what it says.
fn is_refused(bed: &Bed, asked: &[&str], words: &[&str]) {
    let said: Said = bed.godwit("a", asked);
    println!("{asked:?}: {} {}{}", said.code, said.stdout, said.stderr);
    assert_ne!(said.code, 0, "{asked:?}: {said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "{asked:?}: {word}: {said:?}");
    }
}

#[test]
fn what_the_last_release_lacks_is_refused_with_its_node_its_release_and_the_feature() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let release = old.file_name().unwrap().to_str().unwrap();
    let bed = Bed::up_with("lacks", |config| {
        install(config, &["b"], &old);
        config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned));
    });
    let storage = bed.scratch().join("storage");
    fs::create_dir(&storage).unwrap();
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sh", "-c", "exec sleep 100000"].map(str::to_owned).to_vec();
    let at = |last| Ipv4Addr::new(10, 88, 0, last);
    bed.run("a", "plain", at(10), &preset, &[]);
    bed.run("a", "keeps", at(11), &preset, &["-v", "data:/srv"]);
    let mount = format!("type=bind,src={},dst=/bound", storage.display());
    bed.run("a", "binds", at(12), &preset, &["--mount", &mount]);
    bed.run("b", "there", at(13), &preset, &[]);
    bed.knows("a", "there");

    // Of a destination.
    let (godwit, moved) = (format!("godwit {release}"), ["migrate", "--to", "b"]);
    let too_old = format!("node b refuses: its {godwit} is too old for ");
    let refused = |more: &[&str], feature: &str| {
        is_refused(&bed, &[&moved, more].concat(), &[&format!("{too_old}{feature}")]);
    };
    refused(&["keeps"], "volumes; upgrade it");
    refused(&["binds", "--mount", "/bound=copy"], "volumes; upgrade it");
    refused(&["binds", "--mount", "/bound=shared"], "storage that nodes share; upgrade it");
    let command = OnTerminal::begins(&bed, "a", "plain");
    refused(&["plain"], "commands of `godwit exec` on a terminal, and one runs in service plain");
    command.end();
    let closed = format!("node b ({godwit}) closed the connection without an answer");
    is_refused(&bed, &["prepare", "plain", "--to", "b"], &[&closed, "cannot be prepared for: upgrade it"]);
    let checked = bed.godwit("a", &["check", "plain", "--to", "b"]);
    assert!(checked.code == 2 && checked.stdout.contains(&closed), "{checked:?}");

    // Of the node that has the service.
    let owner = format!("service there is on node b, whose godwitd {release} is older and ");
    for (asked, feature) in [
        (&["prepare", "there", "--to", "a"][..], "prepares no moves"),
        (&["check", "there", "--to", "a"], "checks no moves"),
        (&["wait", "there"], "cannot be waited at"),
        // It would be passed over.
        (
            &["migrate", "there", "--to", "a", "--mount", "/bound=skip"],
            "does not know what becomes of mounts",
        ),
    ] {
        is_refused(&bed, asked, &[&format!("{owner}{feature}")]);
    }

    // All run where they were, and what both releases know is done.
    for (node, name) in [("a", "plain"), ("a", "keeps"), ("a", "binds"), ("b", "there")] {
        assert_eq!(inspect(&bed, node, name)["state"], "running", "{name}");
    }
    bed.migrate("plain", "a", "b");
    bed.migrate("there", "b", "a");
    bed.migrate_so("binds", "a", "b", &["--mount", "/bound=skip"]);
}

/// Leaves `--podman` out of what the daemon of node `b` is started with.
const WITHOUT_PODMAN: &str = r#"
if [ "$GODWIT_NODE" = b ]; then
    for word; do
        shift
        case $word in
            --podman) skip=1 ;;
            *) if [ "$skip" ]; then skip=; else set -- "$@" "$word"; fi ;;
        esac
    done
fi
exec "$@"
"#;

#[test]
fn a_container_of_another_engine_stays_where_the_last_release_is_asked_to_take_it() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let podmans = Podmans::new();
    let bed = Bed::up_with("lacks-engines", |config| {
        install(config, &["b"], &old);
        podmans.equip(config);
        config.programs.serve_through = ["sh", "-c", WITHOUT_PODMAN, "sh"].map(str::to_owned).into();
    });
    let (preset, image) = (bed.build(Workload::Busybox), "localhost/sleeps:1");
    podmans.image(&bed, &["a"], &preset, image);
    let words = ["run", "--detach", "--name", "kept", "--network", "none", image, "sleep", "100000"];
    podmans.done(&bed, "a", &words);
    bed.done("a", &["adopt", "podman:kept", "--ip", "10.88.0.10"]);
    let release = old.file_name().unwrap().to_str().unwrap();
    let reason = format!("node b refuses: its godwit {release} is too old for containers of other engines");
    is_refused(&bed, &["migrate", "kept", "--to", "b"], &[&reason]);
    assert_eq!(inspect(&bed, "a", "kept")["state"], "running");
    podmans.clear(&bed);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn identity(bed: &Bed, node: &str) -> Identity {
    Identity::load(&bed.lab().state(node).unwrap().join("identity")).unwrap()
}

/// Where a node takes connections of others.
fn address(bed: &Bed, node: &str) -> String {
    SocketAddrV4::new(bed.lab().address(node).unwrap(), 7117).to_string()
}

/// What node `b` answers to an offer of node `a` that speaks these versions, of a service that nobody can read.
fn answer_to(bed: &Bed, (oldest, newest): (u32, u32)) -> String {
    let (identity, address) = (identity(bed, "a"), address(bed, "b"));
    let converse = async {
        let node = NodeName::new("b").unwrap();
        let connection = godwit_transfer::Connection::open(&identity, &address, &node, &options()).await;
        let mut link = Link::new(connection.unwrap());
        let open = Open { protocol: oldest, newest_protocol: newest, service: "-".into(), ..Open::default() };
        link.send(Message::Open(open)).await.unwrap();
        let answer = match link.receive().await {
            Ok(Message::Refused(refused)) => refused.reasons.join("; "),
            Ok(other) => panic!("{}", other.name()),
            Err(error) => error.to_string(),
        };
        link.close().await;
        answer
    };
    bed.lab().inside("a", || runtime().block_on(converse)).unwrap()
}

#[test]
fn the_last_release_and_one_that_does_not_speak_its_version_refuse_each_other_and_name_both() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let bed = Bed::up_with("ranges-old", |config| install(config, &["b"], &old));
    // It speaks 3 alone: one that keeps 3 is heard out, whatever more that speaks.
    for newest in [0, 3, 4, 9] {
        let answer = answer_to(&bed, (3, newest));
        assert!(answer.contains("a service that cannot be read"), "3 to {newest}: {answer}");
    }
    for (oldest, newest) in [(4, 0), (4, 6), (9, 9), (1, 2)] {
        let answer = answer_to(&bed, (oldest, newest));
        let both = format!("it speaks version 3 of the migration protocol and node a version {oldest}");
        assert!(answer.contains(&both), "{oldest} to {newest}: {answer}");
    }
}

/// Does `deed` while a program in the place of node `b`, whose daemon does not run, answers the next offer of a service; the
/// offer, and what came of the deed.
fn while_b_answers<T>(
    bed: &Bed,
    answer: impl FnOnce(&Open) -> Message + Send,
    deed: impl FnOnce() -> T,
) -> (Open, T) {
    let (identity, address) = (identity(bed, "b"), address(bed, "b"));
    let (listens, listening) = mpsc::channel();
    let serve = async {
        let listener = Listener::bind(address.parse().unwrap(), &identity, ListenOptions::default());
        let mut listener = listener.await.unwrap();
        listens.send(()).unwrap();
        let accepted = loop {
            let accepted = listener.accept().await;
            // Node a has other questions as well.
            if accepted.alpn == Alpn::Data {
                break accepted;
            }
        };
        let connection = godwit_transfer::Connection::accept(accepted, &options()).await;
        let mut link = Link::new(connection.unwrap());
        let Ok(Message::Open(open)) = link.receive().await else { panic!("no offer") };
        link.send(answer(&open)).await.unwrap();
        // The other side closes it.
        while link.receive().await.is_ok() {}
        link.close().await;
        open
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            bed.lab()
                .inside("b", || runtime().block_on(async { tokio::time::timeout(PATIENCE * 4, serve).await }))
        });
        listening.recv().unwrap();
        let done = deed();
        (serving.join().unwrap().unwrap().expect("an offer in time"), done)
    })
}

#[test]
fn a_destination_of_another_range_is_refused_with_both_and_its_choice_is_not_believed() {
    let victim = Victim::up("ranges");
    victim.bed.lab().stop_node("b").unwrap();
    // A release that does not speak any of these versions any more.
    let newer = Versions::offered(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2);
    let refuses = |open: &Open| {
        let reason = newer.objection("b", Versions::offered(open.protocol, open.newest_protocol), "a");
        Message::Refused(Refused { reasons: vec![reason] })
    };
    let (open, reason) = while_b_answers(&victim.bed, refuses, || victim.begin("a", "b").aborted());
    // The whole range is offered: what the two have in common is for the destination to find.
    assert_eq!((open.protocol, open.newest_protocol), (OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION));
    assert_eq!(
        reason,
        format!(
            "node b refuses: it speaks {newer} of the migration protocol and node a {}; install a newer godwit on node a",
            Versions::OWN
        )
    );
    victim.runs_at_a_whatever_b_says();

    // It accepts, in versions that this one did not offer.
    for protocol in [OLDEST_PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
        let accepts = |_: &Open| Message::Accepted(Accepted { protocol, ..Accepted::default() });
        let (_, reason) = while_b_answers(&victim.bed, accepts, || victim.begin("a", "b").aborted());
        assert!(reason.contains("node b") && reason.contains("that was not offered"), "{protocol}: {reason}");
        victim.runs_at_a_whatever_b_says();
    }
    victim.bed.lab().start_node("b").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}
