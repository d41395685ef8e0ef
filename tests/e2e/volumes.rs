//! Volumes: they move with the service that has them, outlive it, and are on one node at any time. Directories of the node in
//! a service that moves. Needs root.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use godwit_lab::workload::{Preset, Rootfs, Workload};
use godwit_tests::hold::Points;
use godwit_tests::victim::{Attempt, NAME, Victim};
use godwit_tests::{Bed, compile, wait_for};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 62);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 63);

/// The volumes of a node by name, with their services; empty: none.
fn volumes(bed: &Bed, node: &str) -> Vec<(String, String)> {
    let listed: Value = bed.json(node, &["volume", "ls", "--json"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let volumes = listed.as_array().unwrap().iter();
    volumes.map(|volume| (text(&volume["name"]), text(&volume["service"]))).collect()
}

fn named(name: &str, service: &str) -> Vec<(String, String)> {
    vec![(name.to_owned(), service.to_owned())]
}

/// Where the files of a volume are.
fn path(bed: &Bed, node: &str, volume: &str) -> PathBuf {
    let shown: Value = bed.json(node, &["volume", "inspect", volume]);
    shown["path"].as_str().unwrap().into()
}

fn refused(bed: &Bed, node: &str, arguments: &[&str], words: &[&str]) {
    let said = bed.godwit(node, arguments);
    assert!(said.code != 0, "{arguments:?}: {said:?}");
    for word in words {
        let is_said = said.stderr.contains(word) || said.stdout.contains(word);
        assert!(is_said, "{arguments:?}: no {word:?} in {said:?}");
    }
}

#[test]
fn a_volume_follows_its_service_and_outlives_it_on_the_node_where_that_ended() {
    let bed = Bed::up("volumes");
    let preset = bed.build(Workload::Redis);
    let data = ["-v", "store:/var/store"];
    bed.run("a", "one", ADDRESS, &preset, &data);
    assert_eq!(volumes(&bed, "a"), named("store", "one"));
    fs::write(path(&bed, "a", "store").join("file"), "of the first service").unwrap();

    // One service at most has it, in the whole cluster.
    let root = preset.rootfs.to_str().unwrap();
    let run = ["run", "--name", "two", "--rootfs", root, "-v", "store:/data", "redis-server"];
    refused(&bed, "a", &run, &["service one on node a has volume store"]);
    refused(&bed, "b", &run, &["service one on node a has volume store"]);
    refused(&bed, "b", &["volume", "create", "store"], &["service one on node a has volume store"]);
    refused(&bed, "a", &["volume", "rm", "store"], &["service one has volume store"]);

    // There is no other of its name that it could have elsewhere.
    let skip = ["migrate", "one", "--to", "b", "--mount", "/var/store=skip"];
    refused(
        &bed,
        "a",
        &skip,
        &["volume store at /var/store is godwit's own", "-v /PATH:/var/store:move=skip"],
    );
    bed.migrate("one", "a", "b");
    wait_for("the volume to be gone", || volumes(&bed, "a").is_empty().then_some(()));
    assert_eq!(volumes(&bed, "b"), named("store", "one"));
    bed.done("b", &["restart", "one"]);
    bed.done("b", &["rm", "--force", "one"]);
    assert_eq!(volumes(&bed, "b"), named("store", ""));
    let file = path(&bed, "b", "store").join("file");
    assert_eq!(fs::read_to_string(&file).unwrap(), "of the first service");

    // It is where it is: not made anew elsewhere.
    wait_for("node a to know that the name is free", || {
        bed.godwit("a", &run).stderr.contains("node b has a volume store").then_some(())
    });
    assert!(volumes(&bed, "a").is_empty());
    bed.run("b", "two", OTHER, &preset, &data);
    assert_eq!(fs::read_to_string(path(&bed, "b", "store").join("file")).unwrap(), "of the first service");
    bed.done("b", &["rm", "--force", "two"]);

    // A node that does not answer may have it.
    wait_for("node a to hear that the service is gone", || {
        (!bed.done("a", &["ps", "--all", "--quiet"]).contains("two")).then_some(())
    });
    bed.lab().stop_node("b").unwrap();
    refused(
        &bed,
        "a",
        &run,
        &["node b (", "cannot be asked, and may have volume store", "godwit volume create store"],
    );
    assert!(volumes(&bed, "a").is_empty());
    bed.lab().start_node("b").unwrap();

    // What is mounted in it would not move.
    bed.run("b", "two", OTHER, &preset, &data);
    let mounted = path(&bed, "b", "store").join("mounted");
    fs::create_dir(&mounted).unwrap();
    let none = None::<&str>;
    nix::mount::mount(none, &mounted, Some("tmpfs"), nix::mount::MsFlags::empty(), none).unwrap();
    refused(
        &bed,
        "b",
        &["migrate", "two", "--to", "a"],
        &["mounted", "another filesystem that is mounted there"],
    );
    fs::write(mounted.join("file"), "of another filesystem").unwrap();
    bed.done("b", &["rm", "--force", "two"]);
    refused(&bed, "b", &["volume", "rm", "store"], &["another filesystem that is mounted there"]);
    let mounted = path(&bed, "b", "store").join("mounted");
    assert_eq!(fs::read_to_string(mounted.join("file")).unwrap(), "of another filesystem");
    nix::mount::umount(&mounted).unwrap();

    // A start that fails gives it back.
    refused(&bed, "b", &[&run[..7], &["no-such-command"]].concat(), &["no-such-command"]);
    assert_eq!(volumes(&bed, "b"), named("store", ""));
    refused(&bed, "b", &["volume", "prune"], &["--force"]);
    assert_eq!(bed.done("b", &["volume", "prune", "--force"]).trim(), "store");
    assert!(!file.exists() && volumes(&bed, "b").is_empty());
    refused(&bed, "b", &["volume", "rm", "store"], &["no volume store"]);
    let made = bed.done("b", &["volume", "create"]);
    assert_eq!(volumes(&bed, "b"), named(made.trim(), ""));
}

#[test]
fn a_destination_that_has_a_volume_of_the_name_keeps_it() {
    let bed = Bed::up("volume-twice");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "one", ADDRESS, &preset, &["-v", "store:/var/store"]);
    // As if it had been made while the nodes could not ask each other.
    let there = bed.lab().state("b").unwrap().join("volumes/store");
    fs::create_dir_all(&there).unwrap();
    fs::write(there.join("file"), "of b").unwrap();
    refused(&bed, "a", &["check", "one", "--to", "b"], &["node b has a volume store"]);
    refused(
        &bed,
        "a",
        &["migrate", "one", "--to", "b"],
        &["node b has a volume store", "godwit volume rm store"],
    );
    assert_eq!(fs::read_to_string(there.join("file")).unwrap(), "of b");
    bed.done("b", &["volume", "rm", "store"]);
    bed.migrate("one", "a", "b");
    assert_eq!(volumes(&bed, "b"), named("store", "one"));
}

/// Redis with a volume, and a file in it.
fn victim(test: &str) -> Victim {
    let victim = Victim::up_with(test, |_, _| {}, |_| ["-v", "store:/var/store"].map(str::to_owned).into());
    fs::write(path(&victim.bed, "a", "store").join("file"), test).unwrap();
    victim
}

fn has_file(victim: &Victim, node: &str, test: &str) {
    assert_eq!(volumes(&victim.bed, node), named("store", NAME));
    let file = path(&victim.bed, node, "store").join("file");
    assert_eq!(fs::read_to_string(file).unwrap(), test);
}

#[test]
fn daemons_that_die_before_the_commit_leave_the_volume_at_the_source_and_no_copy() {
    let test = "volume-early";
    let victim = victim(test);
    let attempt = victim.begin_and_hold("destination.restored");
    let copy = path(&victim.bed, "b", "store").join("file");
    assert_eq!(fs::read_to_string(copy).unwrap(), test);
    victim.bed.lab().stop_node("b").unwrap();
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("destination.restored");
    attempt.end();
    victim.bed.lab().start_node("b").unwrap();
    victim.bed.lab().start_node("a").unwrap();
    victim.is_as_before();
    has_file(&victim, "a", test);
    wait_for("the copy to be gone", || volumes(&victim.bed, "b").is_empty().then_some(()));
    victim.moves_in_the_end();
}

#[test]
fn daemons_that_die_after_the_commit_leave_the_volume_at_the_destination_for_good() {
    for (point, test) in [("source.committed", "volume-source"), ("destination.committing", "volume-there")] {
        let victim = victim(test);
        let attempt = victim.begin_and_hold(point);
        victim.bed.lab().stop_node("a").unwrap();
        victim.bed.lab().stop_node("b").unwrap();
        victim.let_go(point);
        attempt.end();
        victim.bed.lab().start_node("a").unwrap();
        victim.bed.lab().start_node("b").unwrap();
        victim.runs_at("b");
        has_file(&victim, "b", test);
        wait_for("the volume to be gone", || volumes(&victim.bed, "a").is_empty().then_some(()));
        // It is no copy any more: it stays when its service goes.
        let file = path(&victim.bed, "b", "store").join("file");
        assert_eq!(fs::read_to_string(&file).unwrap(), test);
        victim.bed.done("b", &["rm", "--force", NAME]);
        assert_eq!(volumes(&victim.bed, "b"), named("store", ""));
        assert_eq!(fs::read_to_string(path(&victim.bed, "b", "store").join("file")).unwrap(), test);
    }
}

/// A service with a directory of the node at `/bound`, which lives as long as the connection.
fn bound(bed: &Bed, source: &Path) -> TcpStream {
    let rootfs = bed.scratch().join("root");
    Rootfs::new(&rootfs).unwrap();
    compile("queue.c", &rootfs.join("queue"));
    let command = ["/queue", "7000"].map(str::to_owned).into();
    let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: 7000 };
    let mount = format!("type=bind,src={},dst=/bound", source.display());
    bed.run("a", "bound", ADDRESS, &preset, &["--mount", &mount]);
    bed.connect(SocketAddrV4::new(ADDRESS, 7000))
}

#[test]
fn what_becomes_of_a_bind_mount_is_said_and_shared_storage_is_tried() {
    let bed = Bed::up_with("binds", |config| {
        config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned));
    });
    let source = bed.scratch().join("bound");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "").unwrap();
    let _connection = bound(&bed, &source);
    let words = ["mounted at /bound", "--mount /bound=skip", "--mount /bound=shared", "--mount /bound=copy"];
    refused(&bed, "a", &["migrate", "bound", "--to", "b"], &words);
    let move_it = |from: &str, to: &str, what: &str| {
        bed.godwit(from, &["migrate", "bound", "--to", to, "--mount", &format!("/bound{what}")])
    };
    assert_eq!(move_it("a", "b", "=all").code, 2);
    let said = move_it("a", "b", "ed=skip");
    assert!(said.code == 1 && said.stderr.contains("no bind mount and no volume at /bounded"), "{said:?}");
    // Nodes of a lab share their files: it is what it is said to be, and nothing is left of the trial.
    let said = move_it("a", "b", "=shared");
    assert_eq!(said.code, 0, "{said:?}");
    let names: Vec<_> = fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"]);
    // What was said once holds from then on.
    bed.migrate("bound", "b", "a");
    // The service keeps what it has mounted, and that is not what is at the path now.
    let away = source.with_extension("away");
    fs::rename(&source, &away).unwrap();
    fs::create_dir(&source).unwrap();
    refused(
        &bed,
        "a",
        &["migrate", "bound", "--to", "b"],
        &["is not what the service has mounted at /bound"],
    );
    let said = move_it("a", "b", "=skip");
    assert_eq!(said.code, 0, "{said:?}");
}

/// Takes another root directory and comes back, or has a child that stays there.
const JAILED: &str = r#"
import os, signal, socket
def jailed():
    os.chroot("/jail")
    os.chdir("/")
server = socket.create_server(("0.0.0.0", 7000))
os.mkdir("/jail")
own = os.open("/", os.O_PATH)
connection = server.accept()[0]
while said := connection.recv(100):
    if said == b"in\n":
        jailed()
    elif said == b"out\n":
        os.fchdir(own)
        os.chroot(".")
    elif os.fork() == 0:
        jailed()
        connection.sendall(b"done\n")
        signal.pause()
    if said != b"child\n":
        connection.sendall(b"done\n")
"#;

#[test]
fn what_a_service_has_mounted_is_seen_also_where_its_process_has_another_root() {
    const POINT: &str = "source.copied";
    let mut points = None;
    let bed = Bed::up_with("bind-jailed", |config| {
        config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned));
        points = Some(Points::among(config, &[POINT]));
    });
    let points = points.unwrap();
    let source = bed.scratch().join("bound");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "of the node").unwrap();
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), JAILED).unwrap();
    let mount = format!("{}:/bound:move=shared", source.display());
    bed.run("a", "jailed", ADDRESS, &preset, &["-v", &mount, "--mount", "type=tmpfs,dst=/hidden"]);
    let mut connection = bed.connect(SocketAddrV4::new(ADDRESS, 7000));
    let mut tell = |word: &str| {
        let mut answer = [0; 5];
        connection.write_all(format!("{word}\n").as_bytes()).unwrap();
        connection.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"done\n");
    };
    let sees = |node: &str| {
        let copy = bed.scratch().join("copy");
        bed.done(node, &["cp", "jailed:/bound/file", copy.to_str().unwrap()]);
        assert_eq!(fs::read_to_string(copy).unwrap(), "of the node");
    };
    tell("in");
    sees("a");
    let other = "has another root directory than its container";
    refused(
        &bed,
        "a",
        &["migrate", "jailed", "--to", "b"],
        &[other, "switch the program's own chroot(2) off"],
    );
    tell("out");
    let attempt =
        Attempt::held(&points, POINT, || Attempt::begin(&bed, "jailed", "a", "b", &["--mode", "precopy"]));
    tell("in");
    points.let_go(POINT);
    let why = attempt.aborted();
    assert!(why.contains(other), "{why}");
    tell("out");
    tell("child");
    for (from, to) in [("a", "b"), ("b", "a")] {
        bed.migrate("jailed", from, to);
        sees(to);
    }
    tell("out");
}

#[test]
fn the_files_of_a_bind_mount_go_with_the_service_as_a_volume_and_the_directory_stays() {
    // The destination allows no directory of its own: it needs none.
    let bed = Bed::up("bind-copy");
    let source = bed.scratch().join("bound");
    fs::create_dir_all(source.join("deep")).unwrap();
    fs::write(source.join("deep/file"), "of the node").unwrap();
    let _connection = bound(&bed, &source);
    let copy = ["migrate", "bound", "--to", "b", "--mount", "/bound=copy"];
    let check = ["check", "bound", "--to", "b", "--mount", "/bound=copy"];

    // What is mounted in it would not go.
    let none = None::<&str>;
    nix::mount::mount(none, &source.join("deep"), Some("tmpfs"), nix::mount::MsFlags::empty(), none).unwrap();
    let words = ["cannot be copied", "another filesystem is mounted in it", "bound/deep"];
    refused(&bed, "a", &check, &words);
    refused(&bed, "a", &copy, &words);
    nix::mount::umount(&source.join("deep")).unwrap();
    // Nor does anything else than what the service has.
    let away = source.with_extension("away");
    fs::rename(&source, &away).unwrap();
    fs::create_dir(&source).unwrap();
    refused(&bed, "a", &copy, &["something else is at that path now"]);
    fs::remove_dir(&source).unwrap();
    fs::rename(&away, &source).unwrap();
    // A volume of the name is somebody else's, on either node.
    for node in ["a", "b"] {
        bed.done(node, &["volume", "create", "bound-bound"]);
        refused(&bed, "a", &copy, &["volume bound-bound", "godwit volume rm bound-bound"]);
        bed.done(node, &["volume", "rm", "bound-bound"]);
    }

    let said = bed.check("a", &check[1..]);
    assert!(said.stdout.contains("go with it, as volume bound-bound at /bound"), "{said:?}");
    let said = bed.godwit("a", &copy);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(volumes(&bed, "b"), named("bound-bound", "bound"));
    let there = path(&bed, "b", "bound-bound").join("deep/file");
    assert_eq!(fs::read_to_string(&there).unwrap(), "of the node");
    fs::write(&there, "of the service").unwrap();
    assert_eq!(fs::read_to_string(source.join("deep/file")).unwrap(), "of the node");
    assert!(bed.done("a", &["events"]).contains("the directory stays here as it is"));

    // From then on it is a volume, whatever is said of a copy.
    let said = bed.godwit("b", &["migrate", "bound", "--to", "a", "--mount", "/bound=copy"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(volumes(&bed, "a"), named("bound-bound", "bound"));
    bed.done("a", &["restart", "bound"]);
    bed.done("a", &["rm", "--force", "bound"]);
    assert_eq!(volumes(&bed, "a"), named("bound-bound", ""));
    let here = path(&bed, "a", "bound-bound").join("deep/file");
    assert_eq!(fs::read_to_string(here).unwrap(), "of the service");
    assert_eq!(fs::read_to_string(source.join("deep/file")).unwrap(), "of the node");
}

#[test]
fn a_copy_of_a_bind_mount_that_is_not_committed_leaves_all_as_it_was() {
    let test = "bind-early";
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(directory.path().join("file"), test).unwrap();
    let flag = format!("{}:/bound:ro,move=copy", directory.path().display());
    let victim = Victim::up_with(test, |_, _| {}, |_| ["-v", &flag].map(str::to_owned).into());
    let attempt = victim.begin_and_hold("destination.restored");
    let volume = format!("{NAME}-bound");
    let copy = path(&victim.bed, "b", &volume).join("file");
    assert_eq!(fs::read_to_string(copy).unwrap(), test);
    victim.bed.lab().stop_node("b").unwrap();
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("destination.restored");
    attempt.end();
    victim.bed.lab().start_node("b").unwrap();
    victim.bed.lab().start_node("a").unwrap();
    victim.is_as_before();
    wait_for("the copy to be gone", || volumes(&victim.bed, "b").is_empty().then_some(()));
    let names: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"]);
    // It is read-only there, too.
    let shown = victim.bed.done("a", &["inspect", NAME]);
    assert!(shown.contains("\"copy\""), "{shown}");
    victim.moves_in_the_end();
}

#[test]
fn a_single_file_of_the_node_goes_with_the_service_from_node_to_node_and_stays_where_it_was() {
    // The destination allows no path of its own: it needs none.
    let bed = Bed::up("bind-file");
    let preset = bed.build(Workload::Redis);
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("app.conf");
    fs::write(&file, "of the node").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let read_only = format!("{}:/etc/app.conf:ro,move=copy", file.display());
    let written = directory.path().join("state");
    fs::write(&written, "1\n").unwrap();
    let own = format!("{}:/state:move=copy", written.display());
    bed.run("a", "one", ADDRESS, &preset, &["-v", &read_only, "-v", &own]);
    let said = bed.check("a", &["one", "--to", "b"]);
    assert!(said.stdout.contains("goes with it, as volume one-etc-app.conf at /etc/app.conf"), "{said:?}");
    // What the service has goes, and nothing else that has its name.
    let away = file.with_extension("away");
    fs::rename(&file, &away).unwrap();
    fs::write(&file, "another").unwrap();
    refused(&bed, "a", &["migrate", "one", "--to", "b"], &["something else is at that path now"]);
    fs::rename(&away, &file).unwrap();

    let names =
        || vec![("one-etc-app.conf".to_owned(), "one".to_owned()), ("one-state".into(), "one".into())];
    for (number, (from, to)) in [("a", "b"), ("b", "a"), ("a", "b")].into_iter().enumerate() {
        bed.migrate("one", from, to);
        let inside = PathBuf::from(format!("/proc/{}/root", bed.pid(to, "one")));
        let conf = inside.join("etc/app.conf");
        assert_eq!(fs::read_to_string(&conf).unwrap(), "of the node");
        assert_eq!(fs::metadata(&conf).unwrap().permissions().mode() & 0o7777, 0o640);
        assert!(fs::write(&conf, "x").unwrap_err().kind() == std::io::ErrorKind::ReadOnlyFilesystem);
        let text = fs::read_to_string(inside.join("state")).unwrap();
        assert_eq!(text.lines().count(), number + 1);
        fs::write(inside.join("state"), text + "more\n").unwrap();
        assert_eq!(volumes(&bed, to), names());
        wait_for("the copies to be on one node", || volumes(&bed, from).is_empty().then_some(()));
    }
    assert_eq!(fs::read_to_string(&written).unwrap(), "1\n");
    // The format of a checkpoint has volumes, and no files of them.
    let archive = directory.path().join("archive");
    let checkpoint = ["checkpoint", "one", "-o", archive.to_str().unwrap()];
    refused(&bed, "b", &checkpoint, &["the file app.conf of volume one-etc-app.conf"]);
    bed.done("b", &["restart", "one"]);
    let inside = PathBuf::from(format!("/proc/{}/root", bed.pid("b", "one")));
    assert_eq!(fs::read_to_string(inside.join("etc/app.conf")).unwrap(), "of the node");
    bed.done("b", &["rm", "--force", "one"]);
    let kept = path(&bed, "b", "one-state").join("state");
    assert_eq!(fs::read_to_string(kept).unwrap(), "1\nmore\nmore\nmore\n");
}

/// A directory with `in/data` and `elsewhere/data`, and what turns `in` into a link to the other and back.
struct Turned(tempfile::TempDir);

impl Turned {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        for name in ["in/data", "elsewhere/data"] {
            fs::create_dir_all(directory.path().join(name)).unwrap();
        }
        Self(directory)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn turn(&self) {
        fs::rename(self.at("in"), self.at("away")).unwrap();
        std::os::unix::fs::symlink(self.at("elsewhere"), self.at("in")).unwrap();
    }

    fn turn_back(&self) {
        fs::remove_file(self.at("in")).unwrap();
        fs::rename(self.at("away"), self.at("in")).unwrap();
    }

    fn allow(&self, config: &mut godwit_lab::LabConfig) {
        let allowed = ["--allow-bind".to_owned(), self.0.path().display().to_string()];
        config.programs.serve_arguments.extend(allowed);
    }

    fn flag(&self) -> String {
        format!("{}:/bound:move=skip", self.at("in/data").display())
    }
}

#[test]
fn a_move_ends_before_its_commit_where_a_path_leads_elsewhere_than_when_it_was_looked_at() {
    let turned = Turned::new();
    let flag = turned.flag();
    let victim = Victim::up_with(
        "bind-turned",
        |config, _| turned.allow(config),
        |_| ["-v", &flag].map(str::to_owned).into(),
    );
    let attempt = victim.begin_and_hold("destination.prepared");
    turned.turn();
    victim.let_go("destination.prepared");
    let why = attempt.aborted();
    assert!(why.contains("/bound") && why.contains("the path has changed meanwhile"), "{why}");
    turned.turn_back();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_service_that_has_come_starts_again_with_what_its_node_allows_and_nothing_else() {
    let turned = Turned::new();
    let bed = Bed::up_with("bind-again", |config| turned.allow(config));
    let preset = bed.build(Workload::Redis);
    bed.run("a", "one", ADDRESS, &preset, &["-v", &turned.flag()]);
    // Its own node's user may name any path.
    turned.turn();
    bed.done("a", &["restart", "one"]);
    turned.turn_back();
    bed.done("a", &["restart", "one"]);
    bed.migrate("one", "a", "b");
    turned.turn();
    refused(&bed, "b", &["restart", "one"], &["in/data", "a link is on the way there"]);
    turned.turn_back();
    bed.done("b", &["start", "one"]);
    fs::write(turned.at("in/data/file"), "of b").unwrap();
    let inside = format!("/proc/{}/root/bound/file", bed.pid("b", "one"));
    assert_eq!(fs::read_to_string(inside).unwrap(), "of b");
}
