//! Containers that were started by a plain `podman run`: adopted, moved, and managed by plain `podman` afterwards. Needs
//! root and Podman.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::Duration;

use godwit_lab::LabConfig;
use godwit_lab::workload::{Preset, RedisClient, RedisLoad, Workload};
use godwit_tests::hold::Points;
use godwit_tests::podman::Podmans;
use godwit_tests::{Bed, CLIENT, PATIENCE, wait_for};
use serde_json::Value;

use crate::engine_nodes::begin;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
const IMAGE: &str = "localhost/redis:1";
/// Data in Redis.
const FILL: u64 = 32 << 20;

/// A lab with a Podman on each node, and Redis in the one on `a`.
struct Cache {
    bed: Bed,
    podmans: Podmans,
    points: Points,
    preset: Preset,
    /// Its ID in Podman.
    id: String,
}

impl Cache {
    fn up(test: &str, more: &[&str]) -> Self {
        let more = [&["--network", "none"], more].concat();
        let cache = Self::started(test, &more);
        let address = ADDRESS.to_string();
        assert_eq!(cache.bed.done("a", &["adopt", "podman:cache", "--ip", &address]), "cache\n");
        cache
    }

    /// Not adopted yet.
    fn started(test: &str, more: &[&str]) -> Self {
        Self::started_with(test, more, |_| {})
    }

    /// The same, with a change to the lab.
    fn started_with(test: &str, more: &[&str], change: impl FnOnce(&mut LabConfig)) -> Self {
        let podmans = Podmans::new();
        let mut points = None;
        let bed = Bed::up_with(test, |config| {
            podmans.equip(config);
            change(config);
            points = Some(Points::among(config, &HELD));
        });
        let preset = bed.build(Workload::Redis);
        podmans.image(&bed, &["a", "b"], &preset, IMAGE);
        let mut words = vec!["run", "--detach", "--name", "cache"];
        words.extend(more);
        words.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
        words.extend(preset.user.iter().flat_map(|user| ["--user", user]));
        words.push(IMAGE);
        words.extend(preset.command.iter().map(String::as_str));
        let id = podmans.done(&bed, "a", &words).trim().to_owned();
        Self { podmans, bed, points: points.unwrap(), preset, id }
    }

    fn connect(&self) -> RedisClient {
        RedisClient::connect(self.bed.lab(), CLIENT, self.preset.at(ADDRESS), PATIENCE).unwrap()
    }

    fn podman(&self, node: &str, words: &[&str]) -> String {
        self.podmans.done(&self.bed, node, words)
    }

    fn ends(&self, node: &str, words: &[&str]) {
        self.podmans.ends(&self.bed, node, words);
    }

    /// The containers of a node's Podman, and in which state they are.
    fn listed(&self, node: &str) -> String {
        let text = self.podman(node, &["ps", "--all", "--no-trunc", "--format", "json"]);
        let all: Vec<Value> = serde_json::from_str(&text).unwrap();
        let line = |of: &Value| {
            let field = |name: &str| of[name].as_str().unwrap().to_owned();
            format!(
                "{} {} {} {}\n",
                field("Id"),
                of["Names"][0].as_str().unwrap(),
                field("Image"),
                field("State")
            )
        };
        all.iter().map(line).collect()
    }

    /// One Podman has it, in this state, and the other does not.
    fn is_at(&self, node: &str, state: &str) {
        let (id, other) = (&self.id, if node == "a" { "b" } else { "a" });
        let wanted = (format!("{id} cache {IMAGE} {state}\n"), String::new());
        wait_for(&format!("Podman on {node} alone to have it {state}"), || {
            let now = (self.listed(node), self.listed(other));
            (now == wanted).then_some(())
        });
    }

    /// godwit has it in this state.
    fn is_shown(&self, node: &str, state: &str) -> Value {
        wait_for(&format!("godwit to show it {state}"), || {
            let shown: Value = self.bed.json(node, &["inspect", "cache"]);
            (shown["state"] == state).then_some(shown)
        })
    }

    fn inspect(&self, node: &str) -> Value {
        let all: Value = serde_json::from_str(&self.podman(node, &["inspect", "cache"])).unwrap();
        all[0].clone()
    }

    /// Node b has nothing of it, in Podman or beside it.
    fn is_not_on_b(&self) {
        wait_for("Podman on b to have nothing of it", || {
            let volumes = self.podman("b", &["volume", "ls", "--quiet"]);
            let waiting = self.podmans.storage("b").join("godwit");
            let waits = std::fs::read_dir(waiting).map_or(0, Iterator::count);
            (self.listed("b").is_empty() && volumes.is_empty() && waits == 0).then_some(())
        });
        assert_eq!(self.podmans.of_runc("b"), "");
    }

    fn down(self) {
        self.podmans.clear(&self.bed);
    }
}

/// Where a move is held in these tests: each is another state of Podman at the destination.
const HELD: [&str; 5] = [
    "destination.reserved",
    "destination.prepared",
    "destination.received",
    "destination.restored",
    "source.committed",
];

#[test]
fn a_move_that_ends_before_its_commit_leaves_the_container_where_it_was_and_nothing_elsewhere() {
    let cache = Cache::up("pod-ends", &["--volume", "data:/data", "--restart", "always"]);
    let mut lasting = cache.connect();
    lasting.fill(1 << 20).unwrap();
    let pid = cache.bed.pid("a", "cache");
    let begin = |point: &str| begin(&cache.bed, &cache.points, point, &[]);
    let mut is_as_before = |point: &str| {
        cache.is_not_on_b();
        cache.is_shown("a", "running");
        assert_eq!(cache.bed.pid("a", "cache"), pid, "{point}");
        lasting.call(&["PING"]).unwrap();
    };
    for point in HELD.into_iter().take_while(|point| *point != "source.committed") {
        let moving = begin(point);
        cache.bed.done("a", &["cancel", "cache"]);
        let said = moving.wait_with_output().unwrap();
        assert_eq!(said.status.code(), Some(1), "{point}: {said:?}");
        cache.points.let_go(point);
        is_as_before(point);

        // The destination's daemon is killed, and finds what it had begun.
        let moving = begin(point);
        cache.bed.lab().stop_node("b").unwrap();
        let said = moving.wait_with_output().unwrap();
        assert_eq!(said.status.code(), Some(1), "{point}: {said:?}");
        cache.points.let_go(point);
        cache.bed.lab().start_node("b").unwrap();
        is_as_before(point);
    }
    // It is the destination's once it is committed, whatever becomes of the source's daemon.
    let moving = begin("source.committed");
    cache.bed.lab().stop_node("a").unwrap();
    cache.points.let_go("source.committed");
    cache.bed.lab().start_node("a").unwrap();
    moving.wait_with_output().unwrap();
    cache.is_at("b", "running");
    lasting.call(&["PING"]).unwrap();
    cache.down();
}

#[test]
fn a_container_of_podmans_moves_with_its_connections() {
    let cache = Cache::up("pod-moves", &[]);
    let shown = cache.is_shown("a", "running");
    assert_eq!(
        (shown["engine"].as_str(), shown["container_id"].as_str()),
        (Some("podman"), Some(&*cache.id))
    );
    cache.connect().fill(FILL).unwrap();
    let load = RedisLoad::start(cache.bed.lab(), CLIENT, cache.preset.at(ADDRESS), 1000).unwrap();
    cache.bed.move_to_and_fro("cache", |number, here| {
        let lap = load.lap().unwrap();
        assert!(lap.is_clean(), "move {number}: {lap:?}");
        cache.is_at(here, "running");
    });
    drop(load);
    cache.down();
}

#[test]
fn a_container_of_a_plain_podman_run_leaves_podmans_network_and_keeps_its_published_port() {
    const PORT: u16 = 16379;
    let cache = Cache::started("pod-plain", &["--publish", &format!("{PORT}:6379"), "--restart", "always"]);
    let publishes = |node: &str| {
        let at = SocketAddrV4::new(cache.bed.lab().config().address(node).unwrap(), PORT);
        RedisClient::connect(cache.bed.lab(), CLIENT, at, PATIENCE).unwrap()
    };
    publishes("a").fill(1 << 20).unwrap();
    let refused = cache.bed.godwit("a", &["adopt", "podman:cache"]);
    assert!(refused.code == 1 && refused.stderr.contains("Podman's network podman"), "{refused:?}");
    assert!(refused.stderr.contains("--leave-networks"), "{refused:?}");
    // It is where it was.
    publishes("a");
    let address = ADDRESS.to_string();
    cache.bed.done("a", &["adopt", "podman:cache", "--leave-networks", "--ip", &address]);
    publishes("a");
    let mut before = cache.connect();
    // Podman starts it again in another network namespace, in which the address is then.
    let pid = cache.bed.pid("a", "cache");
    let killed = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    wait_for("godwit to follow", || (![0, pid].contains(&cache.bed.pid("a", "cache"))).then_some(()));
    assert!(before.call(&["PING"]).is_err(), "that was another life");
    let mut lasting = cache.connect();
    cache.bed.migrate("cache", "a", "b");
    cache.is_at("b", "running");
    lasting.call(&["PING"]).unwrap();
    publishes("b");
    cache.down();
}

#[test]
fn podman_manages_what_came_to_it_as_if_it_had_been_started_there() {
    let labels = ["--label", "tier=x", "--restart", "always", "--stop-timeout", "3", "--env", "COLOUR=blue"];
    let cache = Cache::up("pod-owns", &labels);
    let first = cache.inspect("a");
    cache.podman("a", &["exec", "cache", "/bin/sh", "-c", "echo 1 >/changed; echo before >/proc/1/fd/1"]);
    wait_for("a line in its log", || cache.podman("a", &["logs", "cache"]).contains("before").then_some(()));
    let log = cache.podman("a", &["logs", "--timestamps", "cache"]);
    cache.bed.migrate("cache", "a", "b");
    cache.is_at("b", "running");

    // What was said of it at its start is known here, and nothing of the other node.
    let there = cache.inspect("b");
    for field in ["Id", "Name", "Args", "Image", "ImageName", "RestartCount"] {
        assert_eq!(there[field], first[field], "{field}");
    }
    assert_eq!(there["Config"]["Labels"], first["Config"]["Labels"]);
    assert_eq!(there["Config"]["Env"], first["Config"]["Env"]);
    assert_eq!(there["Config"]["StopTimeout"], 3);
    assert_eq!(there["HostConfig"]["RestartPolicy"]["Name"], "always");
    let told = there.to_string();
    let of_a = first["GraphDriver"]["Data"]["UpperDir"].as_str().unwrap().split("root/").next().unwrap();
    assert!(!told.replace(&there["Config"]["CreateCommand"].to_string(), "").contains(of_a), "{told}");

    // Commands in it, by either.
    let read = ["exec", "cache", "/bin/sh", "-c", "cat /changed; echo $COLOUR"];
    assert_eq!(cache.podman("b", &read), "1\nblue\n");
    assert_eq!(cache.bed.done("b", &read), "1\nblue\n");
    cache.podman("b", &["cp", "cache:/changed", cache.bed.scratch().join("copy").to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(cache.bed.scratch().join("copy")).unwrap(), "1\n");
    // Its log, which goes on.
    let there_now = cache.podman("b", &["logs", "--timestamps", "cache"]);
    assert!(log.contains("Ready to accept") && there_now.starts_with(&log), "{log}---{there_now}");
    let write = ["exec", "cache", "/bin/sh", "-c", "echo hello >/proc/1/fd/1"];
    cache.podman("b", &write);
    wait_for("a line in its log", || cache.podman("b", &["logs", "cache"]).contains("hello").then_some(()));
    let refused = cache.bed.godwit("b", &["logs", "cache"]);
    assert!(
        refused.code == 1 && refused.stderr.contains(&format!("podman logs {}", cache.id)),
        "{refused:?}"
    );

    // Its restart policy is Podman's, and the address is there again.
    let pid = |node: &str| cache.inspect(node)["State"]["Pid"].as_u64().unwrap();
    let before = pid("b");
    let killed = rustix::process::Pid::from_raw(i32::try_from(before).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    wait_for("Podman to start it again", || (![0, before].contains(&pid("b"))).then_some(()));
    wait_for("godwit to follow", || (cache.bed.pid("b", "cache") == pid("b")).then_some(()));
    cache.connect();

    // Stopped and started by Podman.
    cache.podman("b", &["stop", "cache"]);
    cache.is_at("b", "exited");
    cache.is_shown("b", "stopped");
    cache.podman("b", &["start", "cache"]);
    cache.is_shown("b", "running");
    cache.connect();
    assert_eq!(cache.podman("b", &read), "1\nblue\n");

    // And by godwit.
    cache.bed.done("b", &["stop", "cache"]);
    cache.is_at("b", "exited");
    cache.is_shown("b", "stopped");
    cache.bed.done("b", &["start", "cache"]);
    cache.is_at("b", "running");
    cache.connect();
    // By one, and then by the other.
    cache.bed.done("b", &["stop", "cache"]);
    cache.podman("b", &["start", "cache"]);
    cache.is_shown("b", "running");
    cache.connect();

    // It goes on, and back.
    cache.bed.migrate("cache", "b", "a");
    cache.is_at("a", "running");
    assert_eq!(cache.podman("a", &read), "1\nblue\n");
    cache.connect();

    // Removed behind godwit's back, and then there.
    cache.ends("a", &["rm", "--force", "--ignore", "cache"]);
    wait_for("godwit to know", || {
        let shown: Value = cache.bed.json("a", &["inspect", "cache"]);
        shown["reason"].as_str().unwrap().contains("removed").then_some(())
    });
    cache.bed.done("a", &["rm", "cache"]);
    assert_eq!((cache.listed("a"), cache.listed("b")), (String::new(), String::new()));
    cache.down();
}

/// No systemd runs Podman's checks in a lab: those that come are godwit's.
#[test]
fn health_checks_of_a_container_that_has_come_go_on_until_podman_starts_it_again() {
    let check = ["--health-cmd", "echo checked >>/checks", "--health-interval", "250ms"];
    let cache = Cache::up("pod-health", &check);
    let checks = |node: &str| cache.podman(node, &["exec", "cache", "/bin/sh", "-c", "wc -l <>/checks"]);
    let checks = |node: &str| checks(node).trim().parse::<u32>().unwrap();
    let health = |node: &str| cache.inspect(node)["State"]["Health"]["Status"].as_str().map(str::to_owned);
    let goes_on = |node: &str| {
        wait_for("Podman to know its health", || (health(node).as_deref() == Some("healthy")).then_some(()));
        let before = checks(node);
        wait_for("the next check", || (checks(node) > before).then_some(()));
    };
    assert_eq!(checks("a"), 0);
    let mut lasting = cache.connect();
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "cold")] {
        cache.bed.migrate_so("cache", from, to, &["--mode", mode]);
        goes_on(to);
        lasting.call(&["PING"]).unwrap();
    }
    // Also after another start of godwitd.
    cache.bed.lab().stop_node("b").unwrap();
    cache.bed.lab().start_node("b").unwrap();
    goes_on("b");
    // From its next start on Podman has them.
    cache.ends("b", &["restart", "--time", "0", "cache"]);
    cache.is_shown("b", "running");
    let again = cache.inspect("b")["State"]["Pid"].clone();
    wait_for("godwit to know the new life", || {
        (cache.bed.json::<Value>("b", &["inspect", "cache"])["pid"] == again).then_some(())
    });
    // One that godwit had begun before may have ended in it.
    cache.podman("b", &["exec", "cache", "/bin/sh", "-c", "echo >/checks"]);
    // Four intervals: nothing tells that something does not happen.
    thread::sleep(Duration::from_secs(1));
    assert_eq!(checks("b"), 1);
    cache.down();
}

#[test]
fn godwit_removes_what_it_adopted_and_nothing_that_it_did_not() {
    let cache = Cache::up("pod-removes", &[]);
    let (bed, podman) = (&cache.bed, |node: &str, words: &[&str]| cache.podman(node, words));
    // In godwit's care once.
    let twice = bed.godwit("a", &["adopt", "podman:cache", "--name", "other"]);
    assert!(twice.code == 1 && twice.stderr.contains("as service cache"), "{twice:?}");
    // A container in the way is not taken away.
    podman("b", &["create", "--name", "cache", "--network", "none", IMAGE, "/bin/true"]);
    let before = cache.listed("b");
    let refused = bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert!(
        refused.code == 1 && refused.stderr.contains("Podman has a container cache there already"),
        "{refused:?}"
    );
    assert_eq!(cache.listed("b"), before);
    podman("b", &["rm", "cache"]);
    cache.connect();

    podman("a", &["run", "--detach", "--name", "own", "--network", "none", IMAGE, "/bin/sleep", "1000"]);
    bed.done("a", &["rm", "--force", "cache"]);
    let left = podman("a", &["ps", "--all", "--format", "{{.Names}}"]);
    assert_eq!(left, "own\n");
    cache.down();
}

#[test]
fn an_image_comes_along_and_only_layers_that_are_not_there() {
    let cache = Cache::up("pod-image", &[]);
    let (bed, podman) = (&cache.bed, |node: &str, words: &[&str]| cache.podman(node, words));
    let image = |node: &str, name: &str| podman(node, &["image", "inspect", "--format", "{{.Id}}", name]);
    let of_cache = image("a", IMAGE);
    let state =
        |node: &str, name: &str| podman(node, &["inspect", "--format", "{{.State.Status}} {{.Image}}", name]);
    // Node b has nothing of it.
    podman("b", &["rmi", IMAGE]);
    let first = bed.migrate("cache", "a", "b");
    let bytes: u64 =
        podman("a", &["image", "inspect", "--format", "{{.Size}}", IMAGE]).trim().parse().unwrap();
    assert!(first.file_bytes >= bytes, "{} of {bytes}", first.file_bytes);
    assert_eq!(state("b", "cache"), format!("running {of_cache}"));
    cache.connect();
    // It has no name there that others would take it for.
    let named = podman("b", &["images", "--format", "{{.Names}}"]);
    assert!(!named.contains("redis"), "{named}");

    // Each with a further layer of a few bytes.
    for (name, format) in [("more", "oci"), ("other", "docker")] {
        let image_name = format!("localhost/{name}:1");
        podman("a", &["create", "--name", "base", "--network", "none", IMAGE, "/bin/true"]);
        podman("a", &["cp", "/etc/hostname", "base:/more"]);
        podman("a", &["commit", "--quiet", "--format", format, "base", &image_name]);
        podman("a", &["rm", "base"]);
        podman(
            "a",
            &["run", "--detach", "--name", name, "--network", "none", &image_name, "/bin/sleep", "1000"],
        );
        // A name that is another image's stays that one's.
        podman("b", &["tag", of_cache.trim(), &image_name]);
        bed.done("a", &["adopt", &format!("podman:{name}")]);
        let moved = bed.migrate(name, "a", "b");
        assert!(moved.file_bytes < bytes / 2, "{format}: {} of {bytes}", moved.file_bytes);
        assert_eq!(state("b", name), format!("running {}", image("a", &image_name)), "{format}");
        let more = podman("b", &["exec", name, "cat", "/more"]);
        assert_eq!(more, std::fs::read_to_string("/etc/hostname").unwrap(), "{format}");
        assert_eq!(image("b", &image_name), of_cache, "{format}");
    }
    cache.down();
}

#[test]
fn volumes_move_with_their_container_and_stay_when_it_is_removed() {
    let cache = Cache::up("pod-volumes", &["--volume", "store:/data", "--volume", "/scratch"]);
    let (bed, podman) = (&cache.bed, |node: &str, words: &[&str]| cache.podman(node, words));
    let volumes = |node: &str| {
        podman(node, &["volume", "ls", "--quiet"]).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let write =
        "echo 1 >/data/file; mkdir -m 700 /data/dir; echo 2 >/scratch/file; exec 3>>/data/open; echo 3 >&3";
    podman("a", &["exec", "cache", "/bin/sh", "-c", write]);
    assert_eq!(volumes("a").len(), 2);
    for (number, (from, to)) in [("a", "b"), ("b", "a")].into_iter().enumerate() {
        let mode = ["precopy", "postcopy"][number];
        bed.migrate_so("cache", from, to, &["--mode", mode]);
        cache.is_at(to, "running");
        let read = "cat /data/file /scratch/file /data/open; echo more >>/data/open";
        let more = "more\n".repeat(number);
        assert_eq!(podman(to, &["exec", "cache", "/bin/sh", "-c", read]), format!("1\n2\n3\n{more}"));
        wait_for("the volumes to be on one node", || {
            (volumes(from).is_empty() && volumes(to).len() == 2).then_some(())
        });
        let place = podman(to, &["volume", "inspect", "--format", "{{.Mountpoint}}", "store"]);
        let mode = std::fs::metadata(format!("{}/dir", place.trim())).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700);
    }
    // Nothing is put over a volume that is there.
    podman("b", &["volume", "create", "store"]);
    let refused = bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("a volume store there already"), "{refused:?}");
    podman("b", &["volume", "rm", "store"]);
    // Its user's data outlives it, as with podman rm.
    bed.done("a", &["rm", "--force", "cache"]);
    assert!(volumes("a").contains(&"store".to_owned()));
    cache.down();
}

#[test]
fn what_cannot_move_is_refused_by_name_and_stays_podmans() {
    let cache = Cache::up("pod-refuses", &[]);
    cache.podman("a", &["volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs", "odd"]);
    cache.podman(
        "a",
        &[
            "run",
            "--detach",
            "--name",
            "first",
            "--network",
            "none",
            "--volume",
            "both:/data",
            IMAGE,
            "/bin/sleep",
            "1000",
        ],
    );
    let cases: [(&str, &[&str], &str); 8] = [
        ("volume", &["--volume", "odd:/data"], "without options"),
        ("shared", &["--volume", "both:/data"], "another container uses its volume both"),
        ("tty", &["--tty"], "terminal"),
        ("privileged", &["--privileged"], "privileged"),
        ("pids", &["--pid", "host"], "pid namespace of the node"),
        ("ipc", &["--ipc", "host"], "ipc namespace of the node"),
        ("device", &["--device", "/dev/fuse"], "devices of the node"),
        ("gone", &["--rm"], "removed when it ends"),
    ];
    for (name, options, reason) in cases {
        let mut words = vec!["run", "--detach", "--name", name, "--network", "none"];
        words.extend(options);
        words.extend([IMAGE, "/bin/sleep", "1000"]);
        cache.podman("a", &words);
        let refused = cache.bed.godwit("a", &["adopt", &format!("podman:{name}")]);
        assert!(refused.code == 1 && refused.stderr.contains(reason), "{name}: {refused:?}");
        let state = cache.podman("a", &["inspect", "--format", "{{.State.Status}}", name]);
        assert_eq!(state, "running\n", "{name}");
    }
    for (container, reason) in
        [("podman:none", "no container none"), ("web", "podman:web"), ("lxc:web", "podman:")]
    {
        let refused = cache.bed.godwit("a", &["adopt", container]);
        assert!(refused.code != 0 && refused.stderr.contains(reason), "{container}: {refused:?}");
    }
    cache.ends("a", &["stop", "--time", "0", "pids"]);
    let refused = cache.bed.godwit("a", &["adopt", "podman:pids"]);
    assert!(refused.code == 1 && refused.stderr.contains("does not run"), "{refused:?}");
    cache.down();
}

#[test]
fn what_a_container_has_of_the_node_is_copied_or_stays_there() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let places = ["copied", "same", "own"];
    let binds = places.map(|name| {
        std::fs::create_dir(directory.path().join(name)).unwrap();
        format!("{}:/{name}", directory.path().join(name).display())
    });
    let mut more = vec!["--network", "none"];
    more.extend(binds.iter().flat_map(|bind| ["--volume", bind.as_str()]));
    let cache = Cache::started_with("pod-binds", &more, |config| {
        let allowed = directory.path().display().to_string();
        config.programs.serve_arguments.extend(["--allow-bind".to_owned(), allowed]);
    });
    let address = ADDRESS.to_string();
    let adopt = ["adopt", "podman:cache", "--ip", &address, "--mount", "/copied=copy"];
    let refused = cache.bed.godwit("a", &[&adopt[..], &["--mount", "/none=skip"]].concat());
    assert!(refused.code != 0 && refused.stderr.contains("mounted at /none"), "{refused:?}");
    cache.bed.done("a", &[&adopt[..], &["--mount", "/own=skip"]].concat());
    let write = "echo 1 >/copied/file; echo 2 >/same/file; echo 3 >/own/file";
    cache.podman("a", &["exec", "cache", "/bin/sh", "-c", write]);
    let refused = cache.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("--mount /same=shared"), "{refused:?}");
    let mut client = cache.connect();
    let volumes = |node: &str| cache.podman(node, &["volume", "ls", "--quiet"]);
    for (from, to, how) in [("a", "b", &["--mount", "/same=shared"][..]), ("b", "a", &[])] {
        cache.bed.migrate_so("cache", from, to, how);
        cache.is_at(to, "running");
        client.call(&["PING"]).unwrap();
        let read =
            ["exec", "cache", "/bin/sh", "-c", "cat /copied/file /same/file /own/file; echo 1 >/copied/file"];
        assert_eq!(cache.podman(to, &read), "1\n2\n3\n");
        assert_eq!(volumes(to), "cache-copied\n");
        wait_for("the volume to be on one node", || volumes(from).is_empty().then_some(()));
        cache.podman(to, &["exec", "cache", "/bin/sh", "-c", "echo more >/copied/more"]);
    }
    assert!(!directory.path().join("copied/more").exists(), "it is no longer the container's");
    // It starts again with what it has here.
    cache.ends("a", &["restart", "--time", "1", "cache"]);
    let read = ["exec", "cache", "/bin/sh", "-c", "cat /copied/more /same/file"];
    wait_for("it to run again", || (cache.is_shown("a", "running")["state"] == "running").then_some(()));
    assert_eq!(cache.podman("a", &read), "more\n2\n");
    cache.down();
}
