//! Containers that were started by a plain `docker run`: adopted, moved, and managed by plain `docker` afterwards. Needs root
//! and Docker.

use std::net::{Ipv4Addr, SocketAddrV4};

use godwit_lab::LabConfig;
use godwit_lab::workload::{Preset, RedisClient, RedisLoad, Workload};
use godwit_tests::docker::Dockers;
use godwit_tests::hold::Points;
use godwit_tests::{Bed, CLIENT, PATIENCE, tier, wait_for};
use serde_json::Value;

use crate::engine_nodes::begin;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
const IMAGE: &str = "redis:1";
/// Data in Redis.
const FILL: u64 = 32 << 20;

/// A lab with a Docker on each node, and Redis in the one on `a`.
struct Cache {
    // It ends before the lab, which ends what is in its network namespaces.
    dockers: Dockers,
    bed: Bed,
    points: Points,
    preset: Preset,
}

/// Where a move is held in these tests: each is another state of Docker at the destination.
const HELD: [&str; 5] = [
    "destination.reserved",
    "destination.prepared",
    "destination.received",
    "destination.restored",
    "source.committed",
];

impl Cache {
    fn up(test: &str, more: &[&str]) -> Self {
        let more = [&["--network", "none"], more].concat();
        let cache = Self::started(test, &more);
        let address = ADDRESS.to_string();
        let before = cache.inspect("a")["State"].clone();
        assert_eq!(cache.bed.done("a", &["adopt", "docker:cache", "--ip", &address]), "cache\n");
        let adopted = cache.inspect("a")["State"].clone();
        for field in ["Pid", "StartedAt"] {
            assert_eq!(adopted[field], before[field], "it is not started again for that");
        }
        cache
    }

    /// Not adopted yet.
    fn started(test: &str, more: &[&str]) -> Self {
        Self::started_with(test, more, |_| {})
    }

    /// The same, with a change to the lab.
    fn started_with(test: &str, more: &[&str], change: impl FnOnce(&mut LabConfig)) -> Self {
        let cache = Self::with_image(test, change);
        let mut words = vec!["run", "--detach", "--name", "cache"];
        words.extend(more);
        words.extend(cache.preset.env.iter().flat_map(|entry| ["--env", entry]));
        words.extend(cache.preset.user.iter().flat_map(|user| ["--user", user]));
        words.push(IMAGE);
        words.extend(cache.preset.command.iter().map(String::as_str));
        cache.docker("a", &words);
        cache
    }

    /// Without a container.
    fn with_image(test: &str, change: impl FnOnce(&mut LabConfig)) -> Self {
        let mut dockers = Dockers::new();
        let mut points = None;
        let bed = Bed::up_with(test, |config| {
            dockers.equip(config);
            change(config);
            points = Some(Points::among(config, &HELD));
        });
        dockers.start(&bed);
        let preset = bed.build(Workload::Redis);
        dockers.image(&["a"], &preset, IMAGE);
        Self { dockers, bed, points: points.unwrap(), preset }
    }

    fn connect(&self) -> RedisClient {
        RedisClient::connect(self.bed.lab(), CLIENT, self.preset.at(ADDRESS), PATIENCE).unwrap()
    }

    fn docker(&self, node: &str, words: &[&str]) -> String {
        self.dockers.done(node, words)
    }

    /// The containers of a node's Docker, and in which state they are.
    fn listed(&self, node: &str) -> String {
        self.docker(node, &["ps", "--all", "--format", "{{.Names}} {{.State}}"])
    }

    /// One Docker has it, in this state, and the other does not.
    fn is_at(&self, node: &str, state: &str) {
        let other = if node == "a" { "b" } else { "a" };
        let wanted = (format!("cache {state}\n"), String::new());
        wait_for(&format!("Docker on {node} alone to have it {state}"), || {
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
        let all: Value = serde_json::from_str(&self.docker(node, &["inspect", "cache"])).unwrap();
        all[0].clone()
    }

    /// Node b has nothing of it, in Docker or beside it, but this container of a user's.
    fn is_not_on_b(&self, own: &str) {
        wait_for("Docker on b to have nothing of it", || {
            let volumes = self.docker("b", &["volume", "ls", "--quiet"]);
            let waiting = self.dockers.storage("b").join("godwit");
            let waits = std::fs::read_dir(waiting).map_or(0, Iterator::count);
            let containers = self.docker("b", &["ps", "--all", "--quiet", "--no-trunc"]);
            let runs = self.dockers.of_runc("b");
            (containers == own && volumes.is_empty() && waits == 0 && runs == own).then_some(())
        });
    }

    /// With times, a log begins so, once the disk has taken it: the service does not wait for that.
    fn has_log(&self, node: &str, name: &str, beginning: &str) {
        wait_for("its log", || {
            self.docker(node, &["logs", "--timestamps", name]).starts_with(beginning).then_some(())
        });
    }

    fn down(self) {
        self.dockers.clear();
    }
}

#[test]
fn a_container_of_dockers_moves_with_its_connections() {
    let cache = Cache::up("dock-moves", &[]);
    let shown = cache.is_shown("a", "running");
    assert_eq!(shown["engine"], "docker");
    assert_eq!(shown["container_id"], cache.inspect("a")["Id"]);
    cache.connect().fill(FILL).unwrap();
    let load = RedisLoad::start(cache.bed.lab(), CLIENT, cache.preset.at(ADDRESS), 1000).unwrap();
    cache.bed.move_to_and_fro("cache", |number, here| {
        let lap = load.lap().unwrap();
        assert!(lap.is_clean(), "move {number}: {lap:?}");
        cache.is_at(here, "running");
        assert_eq!(cache.is_shown(here, "running")["container_id"], cache.inspect(here)["Id"]);
    });
    drop(load);
    cache.down();
}

#[test]
fn docker_manages_what_came_to_it_as_if_it_had_been_started_there() {
    let labels = ["--label", "tier=x", "--restart", "always", "--stop-timeout", "3", "--env", "COLOUR=blue"];
    let cache = Cache::up("dock-owns", &labels);
    let first = cache.inspect("a");
    cache.docker("a", &["exec", "cache", "/bin/sh", "-c", "echo 1 >/changed; echo before >/proc/1/fd/1"]);
    wait_for("a line in its log", || cache.docker("a", &["logs", "cache"]).contains("before").then_some(()));
    let log = cache.docker("a", &["logs", "--timestamps", "cache"]);
    cache.bed.migrate("cache", "a", "b");
    cache.is_at("b", "running");

    // What was said of it at its start is known here, and nothing of the other node.
    let there = cache.inspect("b");
    for field in ["Name", "Path", "Args", "Image", "RestartCount"] {
        assert_eq!(there[field], first[field], "{field}");
    }
    for field in ["Env", "Cmd", "Hostname", "StopTimeout", "User"] {
        assert_eq!(there["Config"][field], first["Config"][field], "{field}");
    }
    assert_eq!(there["Config"]["Labels"]["tier"], "x");
    wait_for("its restart policy", || {
        (cache.inspect("b")["HostConfig"]["RestartPolicy"]["Name"] == "always").then_some(())
    });
    assert!(!there.to_string().contains(cache.dockers.storage("a").to_str().unwrap()), "{there}");

    // Commands in it, by either.
    let read = ["exec", "cache", "/bin/sh", "-c", "cat /changed; echo $COLOUR"];
    assert_eq!(cache.docker("b", &read), "1\nblue\n");
    assert_eq!(cache.bed.done("b", &read), "1\nblue\n");
    // Its log, which goes on.
    assert!(log.contains("Ready to accept"), "{log}");
    cache.has_log("b", "cache", &log);
    cache.docker("b", &["exec", "cache", "/bin/sh", "-c", "echo hello >/proc/1/fd/1"]);
    wait_for("a line in its log", || cache.docker("b", &["logs", "cache"]).contains("hello").then_some(()));
    let refused = cache.bed.godwit("b", &["logs", "cache"]);
    let command = format!("docker logs {}", there["Id"].as_str().unwrap());
    assert!(refused.code == 1 && refused.stderr.contains(&command), "{refused:?}");

    // Its restart policy is Docker's, and the address is there again.
    let pid = |node: &str| cache.inspect(node)["State"]["Pid"].as_u64().unwrap();
    let before = pid("b");
    let killed = rustix::process::Pid::from_raw(i32::try_from(before).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    wait_for("Docker to start it again", || (![0, before].contains(&pid("b"))).then_some(()));
    wait_for("godwit to follow", || (cache.bed.pid("b", "cache") == pid("b")).then_some(()));
    cache.connect();

    // Stopped and started by Docker, by godwit, and by one and then the other.
    cache.docker("b", &["stop", "cache"]);
    cache.is_at("b", "exited");
    cache.is_shown("b", "stopped");
    cache.docker("b", &["start", "cache"]);
    cache.is_shown("b", "running");
    cache.connect();
    assert_eq!(cache.docker("b", &read), "1\nblue\n");
    cache.bed.done("b", &["stop", "cache"]);
    cache.is_at("b", "exited");
    cache.is_shown("b", "stopped");
    cache.bed.done("b", &["start", "cache"]);
    cache.is_at("b", "running");
    cache.connect();
    cache.bed.done("b", &["stop", "cache"]);
    cache.docker("b", &["start", "cache"]);
    cache.is_shown("b", "running");
    cache.connect();

    // It goes on, and back.
    let log = cache.docker("b", &["logs", "--timestamps", "cache"]);
    cache.bed.migrate("cache", "b", "a");
    cache.is_at("a", "running");
    cache.has_log("a", "cache", &log);
    assert_eq!(cache.docker("a", &read), "1\nblue\n");
    cache.connect();

    // Removed behind godwit's back, and then there.
    cache.docker("a", &["rm", "--force", "cache"]);
    wait_for("godwit to know", || {
        let shown: Value = cache.bed.json("a", &["inspect", "cache"]);
        shown["reason"].as_str().unwrap().contains("removed").then_some(())
    });
    cache.bed.done("a", &["rm", "cache"]);
    assert_eq!((cache.listed("a"), cache.listed("b")), (String::new(), String::new()));
    cache.down();
}

/// One each that counts: its log is to be whole.
#[test]
fn what_a_container_wrote_is_in_its_log_once_wherever_it_is() {
    const COUNT: &str = "i=0; while :; do echo $i; i=$((i + 1)); /bin/sleep 0.01; done";
    let cache = Cache::with_image("dock-logs", |_| {});
    let numbers = |node: &str, name: &str| -> Vec<u32> {
        let log = cache.docker(node, &["logs", name]);
        let numbers: Vec<u32> = log.lines().map(|line| line.parse().unwrap()).collect();
        if let Some(gap) = numbers.windows(2).position(|two| two[1] != two[0] + 1) {
            let around = &numbers[gap.saturating_sub(5)..numbers.len().min(gap + 6)];
            panic!("{name} on {node}, {} numbers: {around:?}", numbers.len());
        }
        numbers
    };
    let options: [&[&str]; 3] = [&[], &["--log-opt", "max-file=1"], &["--log-driver", "local"]];
    for (number, options) in options.into_iter().enumerate() {
        let name = format!("counts-{number}");
        let ip = format!("10.88.0.{}", 20 + number);
        let run = ["run", "--detach", "--name", &name, "--network", "none"];
        cache.docker("a", &[&run[..], options, &[IMAGE, "/bin/sh", "-c", COUNT]].concat());
        cache.bed.done("a", &["adopt", &format!("docker:{name}"), "--ip", &ip]);
        for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
            wait_for("it to count", || numbers(from, &name).last().copied());
            let before = cache.docker(from, &["logs", "--timestamps", &name]);
            cache.bed.migrate(&name, from, to);
            cache.has_log(to, &name, &before);
            let last = numbers(to, &name).last().copied().unwrap();
            let counted = wait_for("it to count on", || {
                let counted = numbers(to, &name);
                (counted.last() > Some(&last)).then_some(counted)
            });
            assert_eq!(counted.first(), Some(&0), "{name}");
        }
    }
    cache.down();
}

#[test]
fn the_log_of_a_container_is_rotated_on_where_it_has_moved_to() {
    /// So many numbers are about two files, and none are written between.
    const COUNT: &str = "i=0; while :; do \
                         n=0; while [ $n -lt 500 ]; do echo $i; i=$((i + 1)); n=$((n + 1)); done; \
                         while [ ! -e /more ]; do /bin/sleep 0.05; done; rm /more; done";
    let cache = Cache::with_image("dock-rotates", |_| {});
    let log = |node: &str, words: &[&str]| cache.docker(node, &[&["logs"], words, &["counts"]].concat());
    let text =
        |numbers: std::ops::Range<u32>| numbers.map(|number| format!("{number}\n")).collect::<String>();
    let ends = |node: &str, last: &str| {
        wait_for("it to have counted", || {
            let log = log(node, &[]);
            log.ends_with(last).then_some(log)
        })
    };
    let run = ["run", "--detach", "--name", "counts", "--network", "none"];
    let options = ["--log-opt", "max-size=20k", "--log-opt", "max-file=3"];
    cache.docker("a", &[&run[..], &options, &[IMAGE, "/bin/sh", "-c", COUNT]].concat());
    cache.bed.done("a", &["adopt", "docker:counts", "--ip", &ADDRESS.to_string()]);
    assert_eq!(ends("a", "\n499\n"), text(0..500));
    let stamped = log("a", &["--timestamps"]);
    cache.bed.migrate("counts", "a", "b");

    // All, and parts.
    cache.has_log("b", "counts", &stamped);
    assert_eq!(log("b", &["--timestamps"]), stamped);
    assert_eq!(log("b", &["--tail", "400"]), text(100..500));
    let (since, _) = stamped.lines().nth(250).unwrap().split_once(' ').unwrap();
    assert_eq!(log("b", &["--since", since]), text(250..500));

    // It fills its files here as it did there: of three the oldest goes.
    let count = || cache.docker("b", &["exec", "counts", "/bin/sh", "-c", ">/more"]);
    count();
    assert_eq!(ends("b", "\n999\n"), text(0..1000));
    count();
    let kept = ends("b", "\n1499\n");
    assert!(text(0..1500).ends_with(&kept) && kept.len() < text(0..1500).len(), "{kept}");
    // The two latest files move.
    cache.bed.migrate("counts", "b", "a");
    let moved = ends("a", "\n1499\n");
    assert!(kept.ends_with(&moved) && moved.contains("\n1300\n"), "{moved}");
    let followed = cache.bed.scratch().join("followed");
    let mut follow = cache.dockers.command("a", &["logs", "--follow", "--tail", "2", "counts"]);
    let mut follow = follow.stdout(std::fs::File::create(&followed).unwrap()).spawn().unwrap();
    let follows = |wanted: &str| {
        let is_there = || (std::fs::read_to_string(&followed).unwrap() == wanted).then_some(());
        wait_for("the log to be followed", is_there);
    };
    follows("1498\n1499\n");
    cache.docker("a", &["exec", "counts", "/bin/sh", "-c", "echo more >/proc/1/fd/1"]);
    follows("1498\n1499\nmore\n");
    follow.kill().unwrap();
    follow.wait().unwrap();
    cache.down();
}

#[test]
fn a_container_of_a_plain_docker_run_leaves_dockers_network_and_keeps_its_published_port_and_volumes() {
    const PORT: u16 = 16380;
    let publish = format!("{PORT}:6379");
    let cache = Cache::started(
        "dock-plain",
        &["--publish", &publish, "--restart", "always", "--volume", "store:/data", "--volume", "/scratch"],
    );
    let publishes = |node: &str| {
        let at = SocketAddrV4::new(cache.bed.lab().config().address(node).unwrap(), PORT);
        RedisClient::connect(cache.bed.lab(), CLIENT, at, PATIENCE).unwrap()
    };
    publishes("a").fill(1 << 20).unwrap();
    let write = "echo 1 >/data/file; echo 2 >/scratch/file";
    cache.docker("a", &["exec", "cache", "/bin/sh", "-c", write]);
    let refused = cache.bed.godwit("a", &["adopt", "docker:cache"]);
    assert!(refused.code == 1 && refused.stderr.contains("Docker's network bridge"), "{refused:?}");
    assert!(refused.stderr.contains("--leave-networks"), "{refused:?}");
    // It is where it was.
    publishes("a");
    let address = ADDRESS.to_string();
    cache.bed.done("a", &["adopt", "docker:cache", "--leave-networks", "--ip", &address]);
    publishes("a");
    let mut before = cache.connect();
    // Docker starts it again, in another network namespace, in which the address is then.
    let pid = cache.bed.pid("a", "cache");
    let killed = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    wait_for("godwit to follow", || (![0, pid].contains(&cache.bed.pid("a", "cache"))).then_some(()));
    assert!(before.call(&["PING"]).is_err(), "that was another life");
    let mut lasting = cache.connect();
    let volumes = |node: &str| cache.docker(node, &["volume", "ls", "--quiet"]).lines().count();
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy")] {
        cache.bed.migrate_so("cache", from, to, &["--mode", mode]);
        cache.is_at(to, "running");
        lasting.call(&["PING"]).unwrap();
        publishes(to);
        let read = ["exec", "cache", "/bin/sh", "-c", "cat /data/file /scratch/file"];
        assert_eq!(cache.docker(to, &read), "1\n2\n");
        wait_for("the volumes to be on one node", || ((volumes(from), volumes(to)) == (0, 2)).then_some(()));
    }
    cache.down();
}

#[test]
fn what_cannot_move_is_refused_by_name_and_stays_dockers() {
    let cache = Cache::up("dock-refuses", &[]);
    let sleep = [IMAGE, "/bin/sleep", "1000"];
    let first = ["run", "--detach", "--name", "first", "--network", "none", "--volume", "both:/data"];
    cache.docker("a", &[&first[..], &sleep].concat());
    let cases: [(&str, &[&str], &str); 9] = [
        ("uts", &["--uts", "host"], "UTS namespace"),
        ("shared", &["--volume", "both:/data"], "another container uses its volume both"),
        ("tty", &["--tty"], "terminal"),
        ("input", &["--interactive"], "standard input"),
        ("pids", &["--pid", "host"], "PID namespace"),
        ("ipc", &["--ipc", "host"], "IPC namespace"),
        ("device", &["--device", "/dev/fuse"], "devices of the node"),
        ("host", &["--security-opt", "systempaths=unconfined"], "systempaths"),
        ("gone", &["--rm"], "removed when it ends"),
    ];
    for (name, options, reason) in cases {
        let words = ["run", "--detach", "--name", name, "--network", "none"];
        cache.docker("a", &[&words[..], options, &sleep].concat());
        let refused = cache.bed.godwit("a", &["adopt", &format!("docker:{name}")]);
        assert!(refused.code == 1 && refused.stderr.contains(reason), "{name}: {refused:?}");
        let state = cache.docker("a", &["inspect", "--format", "{{.State.Status}}", name]);
        assert_eq!(state, "running\n", "{name}");
    }
    cache.docker("a", &[&["run", "--detach", "--name", "nodes", "--network", "host"][..], &sleep].concat());
    let refused = cache.bed.godwit("a", &["adopt", "docker:nodes"]);
    assert!(refused.code == 1 && refused.stderr.contains("its network is \"host\""), "{refused:?}");
    let refused = cache.bed.godwit("a", &["adopt", "docker:none"]);
    assert!(refused.code == 1 && refused.stderr.contains("no container none"), "{refused:?}");
    // In godwit's care once.
    let twice = cache.bed.godwit("a", &["adopt", "docker:cache", "--name", "other"]);
    assert!(twice.code == 1 && twice.stderr.contains("as service cache"), "{twice:?}");
    // A container in the way is not taken away.
    cache.dockers.image(&["a", "b"], &cache.preset, "other:1");
    cache.docker("b", &["create", "--name", "cache", "--network", "none", "other:1", "/bin/true"]);
    let refused = cache.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    let reason = "Docker has a container cache there already";
    assert!(refused.code == 1 && refused.stderr.contains(reason), "{refused:?}");
    assert_eq!(cache.listed("b"), "cache created\n");
    cache.connect();
    cache.down();
}

#[test]
fn a_move_that_ends_before_its_commit_leaves_the_container_where_it_was_and_nothing_elsewhere() {
    // The short run has the same of Podman.
    if !tier::is_full() {
        return;
    }
    let cache = Cache::up("dock-ends", &["--volume", "data:/data", "--restart", "always"]);
    let mut lasting = cache.connect();
    lasting.fill(1 << 20).unwrap();
    let pid = cache.bed.pid("a", "cache");
    // A user's container that says it had been on its way, as one from `docker commit` does.
    cache.dockers.image(&["b"], &cache.preset, "other:1");
    let label = format!("godwit.arrival={}", cache.inspect("a")["Id"].as_str().unwrap());
    let words = ["run", "--detach", "--name", "own", "--network", "none", "--label", &label];
    let own = cache.docker("b", &[&words[..], &["other:1", "/bin/sleep", "1000"]].concat());
    let begin = |point: &str| begin(&cache.bed, &cache.points, point, &[]);
    let mut is_as_before = |point: &str| {
        cache.is_not_on_b(&own);
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
    // Until the commit Docker would not start it by itself. After it, it is the destination's, whatever becomes of the source's
    // daemon.
    let moving = begin("source.committed");
    let policy = || cache.inspect("b")["HostConfig"]["RestartPolicy"]["Name"].as_str().unwrap().to_owned();
    assert_eq!(policy(), "no");
    cache.bed.lab().stop_node("a").unwrap();
    cache.points.let_go("source.committed");
    cache.bed.lab().start_node("a").unwrap();
    moving.wait_with_output().unwrap();
    wait_for("Docker on a to have nothing of it", || cache.listed("a").is_empty().then_some(()));
    wait_for("its restart policy", || (policy() == "always").then_some(()));
    lasting.call(&["PING"]).unwrap();
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
    let cache = Cache::started_with("dock-binds", &more, |config| {
        let allowed = directory.path().display().to_string();
        config.programs.serve_arguments.extend(["--allow-bind".to_owned(), allowed]);
    });
    let address = ADDRESS.to_string();
    let adopt = ["adopt", "docker:cache", "--ip", &address, "--mount", "/copied=copy"];
    let refused = cache.bed.godwit("a", &[&adopt[..], &["--mount", "/none=skip"]].concat());
    assert!(refused.code != 0 && refused.stderr.contains("mounted at /none"), "{refused:?}");
    cache.bed.done("a", &[&adopt[..], &["--mount", "/own=skip"]].concat());
    let write = "echo 1 >/copied/file; echo 2 >/same/file; echo 3 >/own/file";
    cache.docker("a", &["exec", "cache", "/bin/sh", "-c", write]);
    let refused = cache.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("--mount /same=shared"), "{refused:?}");
    let mut client = cache.connect();
    let volumes = |node: &str| cache.docker(node, &["volume", "ls", "--quiet"]);
    for (from, to, how) in [("a", "b", &["--mount", "/same=shared"][..]), ("b", "a", &[])] {
        cache.bed.migrate_so("cache", from, to, how);
        cache.is_at(to, "running");
        client.call(&["PING"]).unwrap();
        let read =
            ["exec", "cache", "/bin/sh", "-c", "cat /copied/file /same/file /own/file; echo 1 >/copied/file"];
        assert_eq!(cache.docker(to, &read), "1\n2\n3\n");
        assert_eq!(volumes(to), "cache-copied\n");
        wait_for("the volume to be on one node", || volumes(from).is_empty().then_some(()));
        cache.docker(to, &["exec", "cache", "/bin/sh", "-c", "echo more >/copied/more"]);
    }
    assert!(!directory.path().join("copied/more").exists(), "it is no longer the container's");
    // It starts again with what it has here.
    cache.docker("a", &["restart", "--time", "1", "cache"]);
    let read = ["exec", "cache", "/bin/sh", "-c", "cat /copied/more /same/file"];
    wait_for("it to run again", || (cache.is_shown("a", "running")["state"] == "running").then_some(()));
    assert_eq!(cache.docker("a", &read), "more\n2\n");
    cache.down();
}

#[test]
fn a_container_is_moved_between_its_health_checks_which_go_on() {
    let check = ["--health-cmd", "echo checked >>/checks", "--health-interval", "250ms"];
    let cache = Cache::up("dock-health", &check);
    let checks = |node: &str| cache.docker(node, &["exec", "cache", "/bin/sh", "-c", "wc -l </checks"]);
    let checks = |node: &str| checks(node).trim().parse::<u32>().unwrap();
    let health = |node: &str| cache.inspect(node)["State"]["Health"]["Status"].as_str().map(str::to_owned);
    wait_for("the first check", || (health("a").as_deref() == Some("healthy")).then_some(()));
    let mut lasting = cache.connect();
    for (from, to, mode) in
        [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "cold"), ("b", "a", "hybrid")]
    {
        cache.bed.migrate_so("cache", from, to, &["--mode", mode]);
        wait_for("a check there", || (health(to).as_deref() == Some("healthy")).then_some(()));
        let before = checks(to);
        wait_for("the next check", || (checks(to) > before).then_some(()));
        lasting.call(&["PING"]).unwrap();
    }
    cache.down();
}

/// With the file that docs/docker.md has.
#[test]
fn a_stack_of_a_compose_file_moves_and_is_composes_wherever_it_is() {
    let cache = Cache::with_image("dock-compose", |_| {});
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/docker.md")).unwrap();
    let (_, text) = page.split_once("```yaml\n").unwrap();
    let (text, _) = text.split_once("```").unwrap();
    assert!(text.contains("image: redis:7\n"), "{text}");
    // Where there is no registry the image has another name, and no command of its own.
    let image = format!("image: {IMAGE}\n");
    let mut command = cache.preset.command.clone();
    command.extend(["--repl-diskless-sync-delay", "0"].map(str::to_owned));
    let own = format!("{image}    command: {command:?}\n    ports");
    let text = text.replace("image: redis:7\n    ports", &own).replace("image: redis:7\n", &image);
    let file = cache.bed.scratch().join("compose.yaml");
    std::fs::write(&file, text).unwrap();
    let compose = |node: &str, words: &[&str]| cache.dockers.compose(node, &file, words);
    compose("a", &["up", "--detach"]);
    let (bed, address) = (&cache.bed, Ipv4Addr::new(10, 89, 0, 10));
    bed.done("a", &["network", "create", "shop"]);
    // Who looks for the other first: until that one is adopted, Docker would let it wait for name servers that are not there.
    for (of, network) in [("replica", "shop"), ("cache", format!("shop:ip={address}").as_str())] {
        let container = format!("docker:{}", compose("a", &["ps", "-q", of]).trim());
        bed.done("a", &["adopt", &container, "--network", network, "--leave-networks"]);
    }
    let info =
        |node: &str, of: &str| cache.docker(node, &["exec", &format!("shop_{of}_1"), "redis-cli", "info"]);
    let linked = |node: &str| {
        let up = |line: &str| line.trim_end() == "master_link_status:up";
        wait_for("the replica to find the cache", || info(node, "replica").lines().any(up).then_some(()));
    };
    // How often replicas have connected.
    let syncs = |node: &str| -> Vec<String> {
        info(node, "cache").lines().filter(|line| line.starts_with("sync_")).map(str::to_owned).collect()
    };
    let is = |name: &str, state: &str| {
        wait_for(&format!("godwit to show {name} {state}"), || {
            let shown: Value = bed.json("b", &["inspect", name]);
            (shown["state"] == state).then_some(())
        });
    };
    linked("a");
    let at = SocketAddrV4::new(address, 6379);
    let mut lasting = RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
    lasting.fill(1 << 20).unwrap();
    let before = syncs("a");
    bed.migrate("shop_cache_1", "a", "b");
    linked("a");
    bed.migrate("shop_replica_1", "a", "b");
    lasting.call(&["SET", "after", "moves"]).unwrap();
    wait_for("the replica to have it", || {
        let words = ["exec", "shop_replica_1", "redis-cli", "get", "after"];
        (cache.docker("b", &words).trim_end() == "moves").then_some(())
    });
    assert_eq!(syncs("b"), before, "it is the same connection");

    // It is Compose's wherever it is, and finds the other anew.
    assert_eq!(compose("b", &["exec", "-T", "cache", "sh", "-c", "echo in"]), "in\n");
    let listed = compose("b", &["ps"]);
    assert_eq!(listed.matches(" Up ").count(), 2, "{listed}");
    compose("b", &["stop"]);
    is("shop_replica_1", "stopped");
    for name in ["shop_cache_1", "shop_replica_1"] {
        cache.docker("b", &["start", name]);
        is(name, "running");
    }
    linked("b");
    cache.down();
}
