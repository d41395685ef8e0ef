//! Real nodes for the tests: runc, CRIU, the shim, a network namespace and busybox root file
//! systems, with unique names, removed when the value is dropped, also in a panic.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use godwit_criu::{Criu, CriuError, DumpOptions, DumpResult};
use godwit_engine::runc::log::LogReader;
use godwit_engine::runc::{Runc, RuncConfig};
use godwit_engine::{ContainerConfig, Engine, User};

/// How long anything may take on a busy machine before a test fails.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Builds the shim once and says where it is.
fn shim() -> PathBuf {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--offline", "--package", "godwit-shim"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(built.success(), "godwit-shim does not build");
        // target/debug/deps/test-… → target/debug/godwit-shim
        std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("godwit-shim")
    })
    .clone()
}

fn criu_path() -> PathBuf {
    std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from)
}

pub fn criu() -> Criu {
    Criu::new(criu_path())
}

/// Runs a program that must succeed.
pub fn must(program: &str, words: &[&str]) {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Waits until a condition holds that no event tells of.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LIMIT, "still not: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One node with its own runc root, directories, cgroups and network namespace.
pub struct Node {
    pub directory: tempfile::TempDir,
    pub namespace: String,
    pub runc: Runc,
    cgroup: String,
    containers: Vec<ContainerConfig>,
}

impl Node {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert!(nix::unistd::geteuid().is_root(), "these tests need root, runc and CRIU");
        // Before there is anything to clean up.
        let shim = shim();
        let id = format!("gwt{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = tempfile::Builder::new().prefix(&format!("{id}-")).tempdir().unwrap();
        must("ip", &["netns", "add", &id]);
        must("ip", &["-n", &id, "link", "set", "lo", "up"]);
        let programs = directory.path().join("programs");
        std::fs::create_dir(&programs).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_godwit-tar"), programs.join("tar")).unwrap();
        let runc = Runc::new(RuncConfig {
            runc: "/usr/sbin/runc".into(),
            criu: criu_path(),
            root: directory.path().join("runc"),
            shim,
            programs: Some(programs),
        });
        Self { directory, cgroup: format!("godwit-test-{id}"), namespace: id, runc, containers: Vec::new() }
    }

    /// A container on this node that runs a shell script in a busybox root file system.
    pub fn container(&mut self, name: &str, script: &str) -> ContainerConfig {
        self.container_of(name, &["/bin/sh", "-c", script])
    }

    pub fn container_of(&mut self, name: &str, command: &[&str]) -> ContainerConfig {
        let directory = self.directory.path().join(name);
        let rootfs = directory.join("rootfs");
        make_rootfs(&rootfs);
        let config = ContainerConfig {
            name: name.parse().unwrap(),
            directory,
            rootfs,
            network_namespace: format!("/run/netns/{}", self.namespace).into(),
            cgroup: format!("{}/{name}", self.cgroup),
            command: command.iter().map(|&word| word.into()).collect(),
            env: vec![],
            mounts: vec![],
            bound: Vec::new(),
            may_have: Vec::new(),
            memory_bytes: 0,
            cpu_millis: 0,
            hostname: name.into(),
            user: User::default(),
            workdir: "/".into(),
            confinement: godwit_engine::Confinement::default(),
            crosses: false,
            kept: None,
            name_server: None,
        };
        self.containers.push(config.clone());
        config
    }

    /// The same container as it would be on this node: its files copied, the rest this node's.
    pub fn copy_of(&mut self, other: &ContainerConfig) -> ContainerConfig {
        let mut config = ContainerConfig {
            directory: self.directory.path().join(&other.name),
            network_namespace: format!("/run/netns/{}", self.namespace).into(),
            cgroup: format!("{}/{}", self.cgroup, other.name),
            ..other.clone()
        };
        config.rootfs = config.directory.join("rootfs");
        self.containers.push(config.clone());
        copy_files(other, &config);
        config
    }

    pub fn path(&self, name: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}

/// Copies the root file system of one container to that of another.
pub fn copy_files(from: &ContainerConfig, to: &ContainerConfig) {
    std::fs::create_dir_all(&to.rootfs).unwrap();
    let from = format!("{}/.", from.rootfs.display());
    must("cp", &["-a", &from, to.rootfs.to_str().unwrap()]);
}

impl Drop for Node {
    fn drop(&mut self) {
        let (runc, containers) = (self.runc.clone(), std::mem::take(&mut self.containers));
        // A runtime of its own: the test's may be the one that panics.
        let cleaner = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for config in &containers {
                    if let Err(error) = runc.delete(config).await {
                        eprintln!("{} is left behind: {error}", config.name);
                    }
                }
            });
        });
        let _ = cleaner.join();
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
        let mounts = std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
        for mount in mounts.chain([PathBuf::from("/sys/fs/cgroup")]) {
            let _ = std::fs::remove_dir(mount.join(&self.cgroup));
        }
    }
}

fn make_rootfs(rootfs: &Path) {
    for directory in ["bin", "etc", "proc", "dev", "sys", "tmp", "run", "root"] {
        std::fs::create_dir_all(rootfs.join(directory)).unwrap();
    }
    std::fs::copy("/bin/busybox", rootfs.join("bin/busybox")).unwrap();
    for applet in [
        "sh", "sleep", "cat", "echo", "true", "kill", "nc", "ps", "date", "rm", "mv", "ln", "ls", "mkdir",
        "usleep", "id",
    ] {
        std::os::unix::fs::symlink("busybox", rootfs.join("bin").join(applet)).unwrap();
    }
}

/// Builds a guest program from `guest.c`, which needs no libraries, into a container's `/bin`.
pub fn add_guest(config: &ContainerConfig) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/guest.c");
    let program = config.rootfs.join("bin/guest");
    must("cc", &["-static", "-O1", "-o", program.to_str().unwrap(), source.to_str().unwrap()]);
}

/// All the container has written, both streams together.
pub fn output(config: &ContainerConfig) -> String {
    let entries = LogReader::open(&Runc::log_path(config)).unwrap().read().unwrap();
    entries.iter().map(|entry| entry.text()).collect()
}

/// The processes that are stopped now, for [`until`].
pub fn stopped(node: &Node, config: &ContainerConfig) -> Vec<u32> {
    let stopped = node.runc.stopped_processes(config);
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(stopped)).unwrap()
}

/// Dumps a container that is frozen, with its extra files.
pub async fn dump(
    node: &Node,
    config: &ContainerConfig,
    images: &Path,
    work: &Path,
) -> Result<DumpResult, CriuError> {
    criu().dump(dump_options(node, config, images, work).await).await
}

pub async fn dump_options(node: &Node, config: &ContainerConfig, images: &Path, work: &Path) -> DumpOptions {
    let target = node.runc.dump_target(config).await.unwrap();
    for (name, content) in &target.extra_files {
        std::fs::write(images.join(name), content).unwrap();
    }
    DumpOptions {
        external_mounts: target.external_mounts,
        external_network: Some(target.network_namespace.1),
        freezer: Some(target.freezer),
        ..DumpOptions::new(target.pid, target.root, images, work)
    }
}

/// A client in a namespace of its own, with a bridge to some nodes that all have the same address
/// and MAC; one node's port is open at a time.
pub struct Lan {
    namespace: String,
}

/// A line-based conversation with a server.
pub struct Client(BufReader<TcpStream>);

impl Lan {
    /// Joins these network namespaces; the port of the first is open.
    pub fn new(nodes: &[&str]) -> Self {
        let namespace = format!("{}c", nodes[0]);
        must("ip", &["netns", "add", &namespace]);
        let lan = Self { namespace };
        let ip = |words: &str| must("ip", &words.split(' ').collect::<Vec<_>>());
        let here = &lan.namespace;
        ip(&format!("-n {here} link add br0 type bridge"));
        ip(&format!("-n {here} addr add 192.0.2.1/24 dev br0"));
        ip(&format!("-n {here} link set br0 up"));
        for (number, node) in nodes.iter().enumerate() {
            ip(&format!("-n {here} link add port{number} type veth peer name eth0 netns {node}"));
            ip(&format!("-n {here} link set port{number} master br0"));
            ip(&format!("-n {node} link set eth0 address 02:67:c0:00:02:07"));
            ip(&format!("-n {node} addr add 192.0.2.7/24 dev eth0"));
            ip(&format!("-n {node} link set eth0 up"));
        }
        lan.open(0);
        lan
    }

    pub fn open(&self, port: usize) {
        must("ip", &["-n", &self.namespace, "link", "set", &format!("port{port}"), "up"]);
    }

    pub fn close(&self, port: usize) {
        must("ip", &["-n", &self.namespace, "link", "set", &format!("port{port}"), "down"]);
    }

    pub fn connect(&self, port: u16) -> Client {
        let namespace = std::fs::File::open(format!("/run/netns/{}", self.namespace)).unwrap();
        let connect = std::thread::spawn(move || {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let begin = Instant::now();
            loop {
                match TcpStream::connect_timeout(&([192, 0, 2, 7], port).into(), LIMIT) {
                    Ok(stream) => return stream,
                    Err(error) => assert!(begin.elapsed() < LIMIT, "{error}"),
                }
            }
        });
        let stream = connect.join().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client(BufReader::new(stream))
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
    }
}

impl Client {
    pub fn send(&mut self, line: &str) {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub fn receive(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.receive()
    }
}

/// Asserts that a deleted container has left no process, cgroup, mount or runc state.
pub fn assert_nothing_left(node: &Node, config: &ContainerConfig) {
    assert!(!Path::new("/sys/fs/cgroup/freezer").join(&config.cgroup).exists());
    let place = node.directory.path().to_str().unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(place), "{mounts}");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        assert!(!words.contains(place), "{words}");
    }
    assert!(config.rootfs.join("bin/busybox").exists(), "the root file system was deleted");
}
