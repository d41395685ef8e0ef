//! Real nodes for the tests: runc, CRIU, the shim, a network namespace and busybox root file
//! systems, with unique names, removed when the value is dropped, also in a panic.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use godwit_criu::{Criu, CriuError, DumpOptions, DumpResult};
use godwit_engine::runc::{Runc, RuncConfig};
use godwit_engine::{ContainerConfig, Engine, User};

/// How long anything may take on a busy machine before a test fails.
pub const LIMIT: Duration = Duration::from_secs(20);

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
        let id = format!("gwt{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = tempfile::Builder::new().prefix(&format!("{id}-")).tempdir().unwrap();
        must("ip", &["netns", "add", &id]);
        must("ip", &["-n", &id, "link", "set", "lo", "up"]);
        let runc = Runc::new(RuncConfig {
            runc: "/usr/sbin/runc".into(),
            criu: criu_path(),
            root: directory.path().join("runc"),
            shim: shim(),
        });
        Self { directory, cgroup: format!("godwit-test/{id}"), namespace: id, runc, containers: Vec::new() }
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
            name: name.into(),
            directory,
            rootfs,
            network_namespace: format!("/run/netns/{}", self.namespace).into(),
            cgroup: format!("{}/{name}", self.cgroup),
            command: command.iter().map(|&word| word.into()).collect(),
            env: vec![],
            mounts: vec![],
            memory_bytes: 0,
            cpu_millis: 0,
            hostname: name.into(),
            user: User::default(),
            workdir: "/".into(),
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
            let _ = std::fs::remove_dir(mount.join("godwit-test"));
        }
    }
}

fn make_rootfs(rootfs: &Path) {
    for directory in ["bin", "etc", "proc", "dev", "sys", "tmp", "run", "root"] {
        std::fs::create_dir_all(rootfs.join(directory)).unwrap();
    }
    std::fs::copy("/bin/busybox", rootfs.join("bin/busybox")).unwrap();
    for applet in
        ["sh", "sleep", "cat", "echo", "true", "kill", "nc", "ps", "date", "rm", "mv", "usleep", "id"]
    {
        std::os::unix::fs::symlink("busybox", rootfs.join("bin").join(applet)).unwrap();
    }
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
