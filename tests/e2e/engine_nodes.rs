//! A lab with the same engine, Podman or Docker, on each node, for tests that are the same for both.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::Duration;

use godwit_lab::LabConfig;
use godwit_lab::workload::{Preset, RedisClient, Workload};
use godwit_tests::docker::Dockers;
use godwit_tests::hold::{MADE, Points, STARTED};
use godwit_tests::podman::Podmans;
use godwit_tests::{AGAIN, Bed, CLIENT, PATIENCE, is_passing, tier, wait_for, wait_for_within};
use rustix::process::Signal;
use serde_json::Value;

pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
pub(crate) const IMAGE: &str = "localhost/cache:1";

/// Where memory has been copied and the service is to be frozen next.
pub(crate) const COPIED: &str = "source.copied";
/// Where all has come and the engine restores it next.
pub(crate) const RECEIVED: &str = "destination.received";

/// The engine on each node of a lab.
pub(crate) enum Engine {
    Podman(Podmans),
    Docker(Dockers),
}

/// A lab with such an engine, and an image for it.
pub(crate) struct Nodes {
    // It ends before the lab, which ends what is in its network namespaces.
    pub(crate) engine: Engine,
    pub(crate) bed: Bed,
    pub(crate) points: Points,
    pub(crate) preset: Preset,
}

impl Nodes {
    /// `serve` are further arguments of the daemons.
    pub(crate) fn up(engine: &str, test: &str, workload: Workload, serve: &[&str]) -> Self {
        Self::up_on(engine, test, workload, serve, |_| {})
    }

    /// The same after something was done to the engines' directories, in which nothing is yet.
    pub(crate) fn up_on(
        engine: &str,
        test: &str,
        workload: Workload,
        serve: &[&str],
        prepare: impl FnOnce(&Engine),
    ) -> Self {
        Self::up_with(Engine::new(engine), test, workload, serve, prepare)
    }

    /// The same with these engines, which are not started yet.
    pub(crate) fn up_with(
        mut engine: Engine,
        test: &str,
        workload: Workload,
        serve: &[&str],
        prepare: impl FnOnce(&Engine),
    ) -> Self {
        let mut points = None;
        let bed = Bed::up_with(&format!("{}-{test}", engine.name()), |config| {
            engine.equip(config);
            points = Some(Points::among(config, &[MADE, STARTED, COPIED, RECEIVED]));
            config.programs.serve_arguments.extend(serve.iter().map(|word| (*word).to_owned()));
        });
        prepare(&engine);
        engine.start(&bed);
        let preset = bed.build(workload);
        match &engine {
            Engine::Podman(podmans) => podmans.image(&bed, &["a"], &preset, IMAGE),
            Engine::Docker(dockers) => dockers.image(&["a"], &preset, IMAGE),
        }
        Self { engine, bed, points: points.unwrap(), preset }
    }

    pub(crate) fn call(&self, node: &str, words: &[&str]) -> Output {
        match &self.engine {
            Engine::Podman(podmans) => podmans.call(&self.bed, node, words),
            Engine::Docker(dockers) => dockers.call(node, words),
        }
    }

    /// Has the engine of a node do this; what it printed.
    pub(crate) fn own(&self, node: &str, words: &[&str]) -> String {
        let output = self.call(node, words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} {words:?} on {node}: {said}", self.engine.name());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Has the engine of a node hang, or go on.
    pub(crate) fn hang(&self, node: &str, hangs: bool) {
        match &self.engine {
            Engine::Podman(podmans) => podmans.hang(node, hangs),
            Engine::Docker(dockers) => dockers.signal(node, if hangs { Signal::STOP } else { Signal::CONT }),
        }
    }

    /// Kills the dockerd of a node and starts it again; with `live_restore` it leaves containers alone that run already.
    pub(crate) fn kill_dockerd(&mut self, node: &str, live_restore: bool) {
        let Engine::Docker(dockers) = &mut self.engine else { panic!("Podman has no daemon") };
        dockers.kill(&self.bed, node, live_restore);
    }

    /// The Dockers of the nodes.
    pub(crate) fn dockers(&self) -> &Dockers {
        let Engine::Docker(dockers) = &self.engine else { panic!("it is Podman") };
        dockers
    }

    /// The process of the service, as the engine of a node knows it.
    pub(crate) fn pid(&self, node: &str) -> u64 {
        self.inspect(node)["State"]["Pid"].as_u64().unwrap()
    }

    /// Waits until the engine of a node has started it again; its process then.
    pub(crate) fn next_life(&self, node: &str, before: u64) -> u64 {
        wait_for("its next life", || Some(self.pid(node)).filter(|pid| ![0, before].contains(pid)))
    }

    /// All that a container has written.
    pub(crate) fn log(&self, node: &str, name: &str) -> String {
        let output = self.call(node, &["logs", name]);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    /// The words of `godwit run` for the service `cache`.
    pub(crate) fn words<'a>(&'a self, image: &'a str, more: &[&'a str], command: &[&'a str]) -> Vec<&'a str> {
        let mut words = vec!["run", "--engine", self.engine.name(), "--name", "cache", "--image", image];
        words.extend(["--ip", "10.88.0.10"]);
        words.extend(more);
        words.push("--");
        words.extend(command);
        words
    }

    /// The containers of a node's engine, and in which state they are.
    pub(crate) fn listed(&self, node: &str) -> String {
        if matches!(self.engine, Engine::Docker(_)) {
            return self.own(node, &["ps", "--all", "--format", "{{.Names}} {{.State}}"]);
        }
        // Podman has another state for a format.
        let all: Vec<Value> =
            serde_json::from_str(&self.own(node, &["ps", "--all", "--format", "json"])).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        all.iter().map(|of| text(&of["Names"][0]) + " " + &text(&of["State"]) + "\n").collect()
    }

    /// One engine has it, in this state, and the other does not.
    pub(crate) fn is_at(&self, node: &str, state: &str) {
        let other = if node == "a" { "b" } else { "a" };
        let wanted = (format!("cache {state}\n"), String::new());
        wait_for(&format!("{} on {node} alone to have it {state}", self.engine.name()), || {
            ((self.listed(node), self.listed(other)) == wanted).then_some(())
        });
    }

    /// godwit has it in this state.
    pub(crate) fn is_shown(&self, node: &str, state: &str) -> Value {
        wait_for(&format!("godwit to show it {state}"), || {
            let shown: Value = self.bed.json(node, &["inspect", "cache"]);
            (shown["state"] == state).then_some(shown)
        })
    }

    pub(crate) fn inspect(&self, node: &str) -> Value {
        let all: Value = serde_json::from_str(&self.own(node, &["container", "inspect", "cache"])).unwrap();
        all[0].clone()
    }

    pub(crate) fn connect(&self) -> RedisClient {
        RedisClient::connect(self.bed.lab(), CLIENT, self.preset.at(ADDRESS), PATIENCE).unwrap()
    }

    pub(crate) fn down(self) {
        self.engine.clear(&self.bed);
    }
}

impl Engine {
    /// That of a lab which is to be made.
    pub(crate) fn new(name: &str) -> Self {
        match name {
            "podman" => Self::Podman(Podmans::new()),
            _ => Self::Docker(Dockers::new()),
        }
    }

    /// Has the daemons of the lab use it.
    pub(crate) fn equip(&self, config: &mut LabConfig) {
        match self {
            Self::Podman(podmans) => podmans.equip(config),
            Self::Docker(dockers) => dockers.equip(config),
        }
    }

    pub(crate) fn start(&mut self, bed: &Bed) {
        if let Self::Docker(dockers) = self {
            dockers.start(bed);
        }
    }

    /// Removes all of its containers.
    pub(crate) fn clear(&self, bed: &Bed) {
        match self {
            Self::Podman(podmans) => podmans.clear(bed),
            Self::Docker(dockers) => dockers.clear(),
        }
    }

    /// Where the engine of a node keeps what it has.
    pub(crate) fn storage(&self, node: &str) -> PathBuf {
        match self {
            Self::Podman(podmans) => podmans.storage(node),
            Self::Docker(dockers) => dockers.storage(node),
        }
    }

    /// A directory with all that the engine of a node keeps.
    pub(crate) fn disk(&self, node: &str) -> PathBuf {
        match self {
            Self::Podman(podmans) => podmans.storage(node),
            // containerd may have its own beside Docker's.
            Self::Docker(dockers) => dockers.storage(node).parent().unwrap().to_owned(),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Podman(_) => "podman",
            Self::Docker(_) => "docker",
        }
    }
}

/// Begins to move the service `cache` from node a to b with these flags, up to a point at which it is held. The destination may
/// still be putting away what a move before has left: then it is begun again.
pub(crate) fn begin(bed: &Bed, points: &Points, point: &str, flags: &[&str]) -> Child {
    points.hold(point);
    wait_for_within(AGAIN, &format!("a move that comes to {point}"), || {
        let mut command = bed.command("a", &[&["migrate", "cache", "--to", "b"], flags].concat());
        let mut moving = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while moving.try_wait().unwrap().is_none() {
            if points.has_reached(point) {
                return Some(moving);
            }
            thread::sleep(Duration::from_millis(20));
        }
        let said = moving.wait_with_output().unwrap();
        let refused = String::from_utf8_lossy(&said.stderr);
        assert!(is_passing(&refused), "{point}: {refused}");
        None
    })
}

/// Each is tried with both engines, and in the short run with one.
pub(crate) fn is_tried(engine: &str, in_short: &str) -> bool {
    tier::is_full() || engine == in_short
}
