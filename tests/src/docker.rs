//! A Docker for each node of a lab: a dockerd in the node's network namespace, with storage and sockets of its own.
//!
//! One of release 29 or later has images in containerd's store. On node a it starts a containerd by itself, and on node b it is
//! given one, as a distribution does, whose directories are not Docker's. A node can be given one with a store of its own.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use godwit_lab::LabConfig;
use godwit_lab::workload::Preset;
use rustix::process::{Pid, Signal, test_kill_process};
use serde_json::json;

use crate::{Bed, PATIENCE, programs, wait_for};

const NODES: [&str; 2] = ["a", "b"];

/// Lines of a dockerd's log that a failed test shows.
const LOG_TAIL: usize = 20;

/// The Dockers of a lab.
#[derive(Debug)]
pub struct Dockers {
    directory: tempfile::TempDir,
    release: u32,
    /// The node whose Docker has images in its own store, whatever the release.
    own_store: Option<&'static str>,
    daemons: Vec<Child>,
    /// That of node b, where it has one.
    containerd: Option<Child>,
}

impl Default for Dockers {
    fn default() -> Self {
        Self::new()
    }
}

impl Dockers {
    /// Those of a lab that is to be made.
    pub fn new() -> Self {
        let told = Command::new("dockerd").arg("--version").output().unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        let release = told.strip_prefix("Docker version ").and_then(|version| version.split('.').next());
        let release = release.and_then(|release| release.parse().ok());
        Self {
            directory: tempfile::tempdir().unwrap(),
            release: release.unwrap_or_else(|| panic!("{told}")),
            own_store: None,
            daemons: Vec::new(),
            containerd: None,
        }
    }

    /// The same, with images in Docker's own store on this node, whatever the release.
    #[must_use]
    pub fn with_own_store(mut self, node: &'static str) -> Self {
        self.own_store = Some(node);
        self
    }

    fn of_node(&self, node: &str) -> PathBuf {
        self.directory.path().join(node)
    }

    fn socket(&self, node: &str) -> PathBuf {
        self.of_node(node).join("sock")
    }

    /// Has the daemons of a lab use them.
    pub fn equip(&self, config: &mut LabConfig) {
        let own = self.directory.path().display();
        let through = format!(
            "node=$(ip netns identify)\nexec \"$@\" --docker-socket {own}/${{node##*-}}/sock --docker docker\n"
        );
        config.programs.serve_through = ["sh", "-c", &through, "sh"].map(str::to_owned).into();
    }

    /// Starts them. As a distribution's, they have no `live-restore`.
    pub fn start(&mut self, bed: &Bed) {
        for node in NODES {
            std::fs::create_dir_all(self.of_node(node)).unwrap();
            if node == "b" && self.release >= 29 {
                self.start_containerd(bed, node);
            }
            let daemon = self.serve(bed, node, false);
            self.daemons.push(daemon);
        }
        NODES.iter().for_each(|node| self.answers(node));
    }

    /// Starts the dockerd of a node; with `live_restore` it leaves containers alone that run already.
    fn serve(&self, bed: &Bed, node: &str, live_restore: bool) -> Child {
        let own = self.of_node(node);
        let state = Path::new("/run/godwit/labs").join(bed.lab().name()).join(node).join("docker");
        // No limits that a container here may not have.
        let limit = |name: &str| json!({ "Name": name, "Soft": 20000, "Hard": 20000 });
        let mut settings = json!({
            "runtimes": { "godwit": { "path": programs().join("godwit-runtime"), "runtimeArgs": ["--state", state] } },
            "insecure-registries": ["10.99.0.0/16"],
            "default-ulimits": { "nofile": limit("nofile"), "nproc": limit("nproc") },
            "live-restore": live_restore,
        });
        if self.own_store == Some(node) {
            settings["features"] = json!({ "containerd-snapshotter": false });
        }
        let file = own.join("daemon.json");
        std::fs::write(&file, settings.to_string()).unwrap();
        let log = File::options().create(true).append(true).open(own.join("log")).unwrap();
        let mut command = bed.lab().command(node, "dockerd").unwrap();
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        command
            .arg(option("config-file", file))
            .arg(option("data-root", own.join("root")))
            .arg(option("exec-root", own.join("exec")))
            .arg(option("pidfile", own.join("pid")))
            .arg(format!("--host=unix://{}", self.socket(node).display()))
            .arg(format!("--cgroup-parent=/godwit-lab/{}/{node}/docker", bed.lab().name()))
            .arg("--bip=10.77.0.1/24");
        let containerd = self.containerd_of(node).join("sock");
        if containerd.exists() {
            command.arg(option("containerd", containerd));
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Waits until the dockerd of a node answers.
    pub fn answers(&self, node: &str) {
        wait_for(&format!("dockerd on {node}"), || self.call(node, &["info"]).status.success().then_some(()));
    }

    /// Kills the dockerd of a node, with a containerd that it has started itself, and starts it again.
    pub fn kill(&mut self, bed: &Bed, node: &str, live_restore: bool) {
        let at = Self::position(node);
        let own = self.own_containerd(node);
        self.daemons[at].kill().unwrap();
        self.daemons[at].wait().unwrap();
        // The kernel kills it with dockerd. The next one would take it for its own as long as it is there.
        wait_for("its containerd to end", || {
            own.is_none_or(|pid| test_kill_process(pid).is_err()).then_some(())
        });
        self.daemons[at] = self.serve(bed, node, live_restore);
    }

    /// The containerd that the dockerd of a node has started.
    fn own_containerd(&self, node: &str) -> Option<Pid> {
        let text = std::fs::read_to_string(self.of_node(node).join("exec/containerd/containerd.pid")).ok()?;
        Pid::from_raw(text.trim().parse().unwrap())
    }

    /// The release that these are.
    pub fn release(&self) -> u32 {
        self.release
    }

    /// Where a containerd has all that it has, if the Docker of a node does not start one by itself.
    fn containerd_of(&self, node: &str) -> PathBuf {
        self.of_node(node).join("containerd")
    }

    /// Starts a containerd beside the Docker of a node.
    fn start_containerd(&mut self, bed: &Bed, node: &str) {
        let own = self.containerd_of(node);
        std::fs::create_dir(&own).unwrap();
        let socket = own.join("sock");
        let log = File::create(own.join("log")).unwrap();
        let mut command = bed.lab().command(node, "containerd").unwrap();
        command.arg("--root").arg(own.join("root")).arg("--state").arg(own.join("state"));
        command.arg("--address").arg(&socket).stdin(Stdio::null());
        self.containerd = Some(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
        wait_for("containerd", || socket.exists().then_some(()));
    }

    /// A call of containerd's own command about what is Docker's on a node; nothing where that is not installed.
    pub fn ctr(&self, node: &str, words: &[&str]) -> Option<String> {
        let socket = match node {
            "b" => self.of_node(node).join("containerd/sock"),
            _ => self.of_node(node).join("exec/containerd/containerd.sock"),
        };
        let mut command = Command::new("ctr");
        command.arg("--address").arg(socket).args(["--namespace", "moby"]).args(words).stdin(Stdio::null());
        let output = match command.output() {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            output => output.unwrap(),
        };
        assert!(output.status.success(), "ctr {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8(output.stdout).unwrap())
    }

    /// Has the dockerd of a node forget godwit's runtime. It would keep those that it has if its settings named none.
    pub fn forget_runtimes(&self, node: &str) {
        let settings = json!({ "runtimes": { "other": { "path": "/bin/false" } } });
        std::fs::write(self.of_node(node).join("daemon.json"), settings.to_string()).unwrap();
        self.signal(node, Signal::HUP);
    }

    fn position(node: &str) -> usize {
        NODES.iter().position(|known| *known == node).unwrap()
    }

    /// Sends the dockerd of a node a signal.
    pub fn signal(&self, node: &str, signal: Signal) {
        let daemon = Pid::from_child(&self.daemons[Self::position(node)]);
        rustix::process::kill_process(daemon, signal).unwrap();
    }

    /// Sends the containerd that the Docker of a node has its images in a signal.
    pub fn signal_containerd(&self, node: &str, signal: Signal) {
        let given = self.containerd.as_ref().filter(|_| node == "b").map(Pid::from_child);
        let containerd = given.or_else(|| self.own_containerd(node)).unwrap();
        rustix::process::kill_process(containerd, signal).unwrap();
    }

    /// A call of the Docker of a node.
    pub fn command(&self, node: &str, words: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", self.socket(node).display()));
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Calls the Docker of a node, whatever comes of it.
    pub fn call(&self, node: &str, words: &[&str]) -> Output {
        self.command(node, words).output().unwrap()
    }

    /// Calls the Docker of a node, which must do what it is asked; what it printed.
    pub fn done(&self, node: &str, words: &[&str]) -> String {
        let output = self.call(node, words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "docker {words:?} on {node}: {said}\n{}", self.log(node));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Has Compose do this with the Docker of a node; what it printed.
    pub fn compose(&self, node: &str, file: &Path, words: &[&str]) -> String {
        let mut command = Command::new("docker-compose");
        command.env("DOCKER_HOST", format!("unix://{}", self.socket(node).display()));
        command.args(["--project-name", "shop", "--file"]).arg(file).args(words).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "docker-compose {words:?} on {node}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The end of the log of a node's dockerd.
    fn log(&self, node: &str) -> String {
        let text = std::fs::read_to_string(self.of_node(node).join("log")).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(LOG_TAIL).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Where the Docker of a node keeps what it has.
    pub fn storage(&self, node: &str) -> PathBuf {
        self.of_node(node).join("root")
    }

    /// The containers that runc has for the Docker of a node.
    pub fn of_runc(&self, node: &str) -> String {
        let roots = ["runtime-runc", "runtime-godwit"]
            .map(|root| self.of_node(node).join("exec").join(root).join("moby"));
        let names = roots.into_iter().flat_map(|root| std::fs::read_dir(root).into_iter().flatten());
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap() + "\n").collect()
    }

    /// Makes an image of a preset, with a shell, which these nodes have then.
    pub fn image(&self, nodes: &[&str], preset: &Preset, name: &str) {
        let layer = self.directory.path().join("layer.tar");
        let bin = preset.rootfs.join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::copy("/bin/busybox", bin.join("busybox")).unwrap();
        for name in ["cat", "sh", "sleep", "true"] {
            let _ = std::fs::remove_file(bin.join(name));
            std::os::unix::fs::symlink("busybox", bin.join(name)).unwrap();
        }
        let mut packed = Command::new("tar");
        packed.arg("-C").arg(&preset.rootfs).arg("-cf").arg(&layer).arg(".");
        assert!(packed.status().unwrap().success());
        // One ID for all of them.
        let (first, others) = nodes.split_first().unwrap();
        self.done(first, &["import", layer.to_str().unwrap(), name]);
        std::fs::remove_file(&layer).unwrap();
        for node in others {
            let archive = self.directory.path().join("image.tar");
            self.done(first, &["save", "--output", archive.to_str().unwrap(), name]);
            self.done(node, &["load", "--quiet", "--input", archive.to_str().unwrap()]);
            std::fs::remove_file(archive).unwrap();
        }
    }

    /// Removes all containers, before the lab goes.
    pub fn clear(&self) {
        for node in NODES {
            let all = self.done(node, &["ps", "--all", "--quiet"]);
            let mut words = vec!["rm", "--force"];
            words.extend(all.lines());
            if words.len() > 2 {
                self.done(node, &words);
            }
        }
    }

    fn end(&mut self) {
        for mut daemon in std::mem::take(&mut self.daemons).into_iter().chain(self.containerd.take()) {
            let pid = Pid::from_child(&daemon);
            // One that a failed test has stopped hears nothing else.
            let _ = rustix::process::kill_process(pid, Signal::CONT);
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            // It waits for its containers' end for seconds.
            let begin = Instant::now();
            while daemon.try_wait().is_ok_and(|ended| ended.is_none()) && begin.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let places = text.lines().filter_map(|line| line.split(' ').nth(4));
        for place in places.filter(|place| Path::new(place).starts_with(self.directory.path())) {
            // It may have gone with another.
            let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Drop for Dockers {
    /// After a test that failed, its containers are killed with the lab.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in NODES {
                eprintln!("--- end of the log of dockerd on {node}\n{}", self.log(node));
            }
        }
        self.end();
    }
}
