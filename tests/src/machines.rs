//! The end-to-end tests between machines: with `GODWIT_TEST_MACHINES=arm64` each node of a lab is one, of that kind
//! (docs/machines.md), with godwit's packages of `GODWIT_PACKAGES` installed. What services run is of Debian's packages for
//! their instruction set where that is not the host's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use godwit_lab::{
    Architecture, LabConfig,
    workload::{Preset, Workload},
};
use serde_json::Value;

use crate::{Bed, wait_for_within};

/// The environment variable that says what each node is.
pub const VARIABLE: &str = "GODWIT_TEST_MACHINES";
/// How long a machine that is emulated on a busy host may take for what a real one does at once.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Where this host's apt has its sources, of which the first that is there counts.
const SOURCES: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];
/// What no container needs: two thirds of the files, and each move would carry them.
const NEEDLESS: &str = "usr/share/doc usr/share/man usr/share/locale usr/share/perl usr/share/zoneinfo usr/lib/llvm* \
                        usr/lib/aarch64-linux-gnu/libLLVM* usr/lib/aarch64-linux-gnu/perl* usr/lib/aarch64-linux-gnu/gconv \
                        usr/lib/aarch64-linux-gnu/libz3* usr/lib/aarch64-linux-gnu/libperl* usr/share/i18n \
                        usr/lib/postgresql/*/lib/llvmjit* usr/lib/postgresql/*/lib/bitcode var/cache var/lib/apt var/lib/dpkg";

/// Godwit's packages, which the machines install: `make packages` builds them.
pub fn packages() -> PathBuf {
    let given = std::env::var_os("GODWIT_PACKAGES").map(PathBuf::from);
    given.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/packages"))
}

/// Makes all nodes machines, if that is wanted.
pub(crate) fn wanted(config: &mut LabConfig) {
    let Ok(kind) = std::env::var(VARIABLE) else { return };
    let machine = kind.parse().unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
    for node in config.nodes.clone() {
        config.machines.entry(node).or_insert_with(|| Clone::clone(&machine));
    }
    config.packages = Some(packages());
}

/// Waits until a node sees all nodes ready.
pub fn all_ready(bed: &Bed, node: &str) {
    let due = bed.lab().config().nodes.len();
    wait_for_within(PATIENCE, &format!("{due} ready nodes, as {node} sees them"), || {
        let said = bed.godwit(node, &["--json", "nodes"]);
        let nodes: Vec<Value> = serde_json::from_str(&said.stdout).ok()?;
        (nodes.iter().filter(|node| node["state"] == "ready").count() == due).then_some(())
    });
}

/// Whether what runs on a node is for arm64, and the host is not.
pub fn is_arm64(bed: &Bed, node: &str) -> bool {
    let machine = bed.lab().machine(node);
    machine.is_some_and(|machine| machine.architecture == Architecture::Arm64)
        && std::env::consts::ARCH != "aarch64"
}

/// What the host would run, with the programs and libraries of Debian's packages for arm64.
pub(crate) fn for_arm64(bed: &Bed, workload: Workload, host: Preset) -> Preset {
    let package = match workload {
        Workload::Redis => "redis-server",
        Workload::Mosquitto => "mosquitto",
        Workload::Nginx => "nginx-light",
        Workload::Postgres => "postgresql",
        Workload::Python => "python3-minimal,python3",
        Workload::Busybox => "busybox-static",
    };
    let root = unpack(bed, package);
    copy_texts(&host.rootfs, &root);
    Preset { rootfs: root, ..host }
}

/// Unpacks packages and all that they depend on, of the series that this host has, for arm64.
pub fn unpack(bed: &Bed, packages: &str) -> PathBuf {
    let root = bed.scratch().join(packages);
    let sources = SOURCES.into_iter().find(|file| Path::new(file).exists()).expect("sources of apt");
    let script = format!(
        "set -e; rm -rf {root}; . /etc/os-release; TMPDIR=/var/tmp mmdebstrap --quiet --mode=root --variant=extract \
         --architectures=arm64 --aptopt='APT::Sandbox::User \"root\"' --include=dash,{packages} $VERSION_CODENAME {root} {sources}
         cd {root}; rm -rf {NEEDLESS}
         # What maintainer scripts make in a new system.
         for directory in bin sbin lib; do [ -e $directory ] || ln -s usr/$directory $directory; done
         mkdir -p tmp proc sys dev etc; chmod 1777 tmp",
        root = root.display(),
    );
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{packages}: {}", String::from_utf8_lossy(&output.stderr));
    root
}

/// Copies directories and files that are no programs, such as settings.
fn copy_texts(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            fs::create_dir_all(&copy).unwrap();
            copy_texts(&path, &copy);
        } else if kind.is_file() && !fs::read(&path).unwrap().starts_with(b"\x7fELF") {
            // A link leads out of this tree.
            if fs::symlink_metadata(&copy).is_ok_and(|there| there.is_symlink()) {
                fs::remove_file(&copy).unwrap();
            }
            fs::copy(&path, &copy).unwrap();
        }
    }
}
