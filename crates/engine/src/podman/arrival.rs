//! A container comes to this node's Podman: Podman imports it as a checkpoint, and its runtime restores what godwit has.
//!
//! ```text
//! begin   podman container restore --import ──▶ conmon ──▶ godwit-runtime ──▶ runc ──▶ CRIU, which opens the inventory: a FIFO
//!         (the service runs at its source, is frozen and dumped)
//! finish  Podman's root filesystem makes room for one with the changed files ──▶ the inventory ──▶ CRIU goes on
//! ```
//! Podman believes that it restores a checkpoint of its own. So it makes all that belongs to the container, conmon watches
//! it from its first instruction here, and what is asked of Podman later it answers as for any container.
//!
//! Changed files come before Podman has made a place for them, in rounds that may take longer than Podman waits for a
//! runtime. They wait in a directory of Podman's storage, so that the two change names at the end. Podman has mounted the
//! overlay by then, and what is changed below a mounted overlay is stale; so it is mounted anew.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use async_trait::async_trait;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::mount::{OpenTreeFlags, open_tree};
use serde::Deserialize;
use serde_json::{Value, json};

use super::command::{Call, failed, said};
use super::definition::Definition;
use super::record::Record;
use super::{Podman, RUNTIME, settings};
use crate::container::{
    BegunRestore, ContainerState, ContainerStatus, EngineError, OutputPipes, RestoreRequest, io_error,
};
use crate::processes::process;
use crate::rootfs::Overlay;
use crate::runc::lifecycle::detach_all;
use crate::runc::restore::{self, Gate, StandIn};
use crate::runc::rights;

/// Where changed files wait in Podman's storage.
pub(super) fn waiting_in(storage: &Path, id: &str) -> PathBuf {
    storage.join("godwit").join(id).join("diff")
}

/// The file in which the runtime looks for what to do, beside itself.
pub(super) const INSTRUCTIONS: &str = "instructions.json";

/// The name under which Podman calls the runtime.
pub(super) const LINK: &str = "runtime";

/// The settings of such a call.
pub(super) const SETTINGS: &str = "containers.conf";

/// What the runtime tells when Podman has come to the restore.
#[derive(Debug, Deserialize)]
struct Arrived {
    bundle: PathBuf,
    pid_file: PathBuf,
}

/// A restore that waits for its inventory.
pub(super) struct Begun {
    podman: Podman,
    request: RestoreRequest,
    definition: Definition,
    descriptors: Vec<u8>,
    gate: File,
    importing: Importing,
    arrived: Arrived,
    /// The root filesystem that Podman has made, and mounted.
    root: PodmanRoot,
    cgroup: String,
}

/// A call of Podman that imports a checkpoint.
struct Importing(tokio::task::JoinHandle<io::Result<Output>>);

impl Importing {
    async fn ended(&mut self) -> io::Result<Output> {
        (&mut self.0).await.map_err(io::Error::other)?
    }
}

impl Podman {
    /// Makes a directory from which a call of Podman's takes its runtime.
    pub(super) fn step_in(
        &self,
        place: &Path,
        (id, runtime_name, standard): (&str, &str, bool),
        task: &Value,
    ) -> io::Result<()> {
        match fs::remove_dir_all(place) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(place)?;
        let link = place.join(LINK);
        symlink(&self.config.runtime, &link)?;
        let mut settings = settings::of_node()?;
        let runtime = settings::runtime(&settings, runtime_name);
        let runtime = runtime.unwrap_or_else(|| match runtime_name {
            RUNTIME => self.config.runc.clone(),
            other => other.into(),
        });
        let instructions = json!({ "runtime": runtime, "id": id, "task": task });
        fs::write(place.join(INSTRUCTIONS), instructions.to_string())?;
        settings::add_runtime(&mut settings, runtime_name, &link, standard);
        fs::write(place.join(SETTINGS), settings::text(&settings)?)
    }

    /// Has Podman begin the import.
    pub(super) async fn begin(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Begun, EngineError> {
        let config = &request.config;
        let (kept, definition) = self.kept(config)?;
        let place = self.place(&kept.id);
        let criu_config = place.join("criu.conf");
        let task = json!({ "restore": {
            "images": request.images,
            "work": request.work,
            "criu_config": criu_config,
            "without_huge_pages": request.lazy_pages,
        }});
        self.step_in(&place, (&kept.id, RUNTIME, true), &task)
            .map_err(request.io("prepare Podman's restore in", &place))?;
        fs::create_dir_all(&request.work).map_err(request.io("create", &request.work))?;
        fs::write(&criu_config, restore::criu_options(&request))
            .map_err(request.io("write", &criu_config))?;
        let by_systemd = self.storage(&config.name).await?.by_systemd;
        let parent =
            (!by_systemd).then(|| format!("{}/podman", self.config.cgroup_parent.trim_end_matches('/')));
        let archive = place.join("checkpoint.tar");
        let written = File::create(&archive)
            .and_then(|file| definition.write_archive(&config.network_namespace, parent.as_deref(), file));
        written.map_err(request.io("write", &archive))?;
        let fifo = place.join("inventory");
        let gate = Gate::new(&fifo).map_err(request.io("make", &fifo))?;
        let descriptors = restore::descriptors(pipes);
        let stand_in = StandIn::put(&request, &fifo, &descriptors)?;

        let words = ["container", "restore", "--tcp-established", "--file-locks", "--ignore-static-ip"];
        let more = ["--ignore-static-mac", "--import"];
        let mut words: Vec<&OsStr> = words.iter().chain(&more).map(OsStr::new).collect();
        words.push(archive.as_os_str());
        let settings = place.join(SETTINGS);
        let call = Call { name: &config.name, action: "restore", words, settings: Some(&settings) };
        let mut command = self.command(&call);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| self.not_started(&call, &error))?;
        // It ends by itself once the gate is closed.
        let mut importing = Importing(tokio::spawn(child.wait_with_output()));
        let gate = tokio::select! {
            opened = gate.opened() => opened.map_err(request.io("wait until CRIU opens", &fifo))?,
            ended = importing.ended() => {
                let output = ended.map_err(|error| self.not_started(&call, &error))?;
                return Err(self.restore_failed(&request, &call, &output));
            }
        };
        let path = place.join("arrived.json");
        let arrived: Arrived = read_json(&path).map_err(request.io("read", &path))?;
        let path = arrived.bundle.join("config.json");
        let bundle: Value = read_json(&path).map_err(request.io("read", &path))?;
        let root = PathBuf::from(bundle["root"]["path"].as_str().unwrap_or_default());
        let found = PodmanRoot::mounted_on(&root, &kept.id);
        let root = found.map_err(request.io("find how Podman has mounted", &root))?;
        let cgroup = cgroup_of(bundle["linux"]["cgroupsPath"].as_str().unwrap_or_default());
        stand_in.remove(&request)?;
        Ok(Begun {
            podman: self.clone(),
            definition,
            descriptors,
            gate,
            importing,
            arrived,
            root,
            cgroup,
            request,
        })
    }

    /// What failed in a restore, as well as it is known.
    fn restore_failed(&self, request: &RestoreRequest, call: &Call<'_>, output: &Output) -> EngineError {
        let criu_log = godwit_criu::log::read_lossy(&request.log());
        match godwit_criu::log::first_error_explained(&criu_log) {
            Some(reason) => request.refused(reason),
            None => failed(call, said(&output.stderr)),
        }
    }
}

#[async_trait]
impl BegunRestore for Begun {
    fn charge(&self, pid: u32) -> Result<(), EngineError> {
        let config =
            crate::container::ContainerConfig { cgroup: self.cgroup.clone(), ..self.request.config.clone() };
        let cgroup = self.podman.processes.cgroup(&config)?;
        cgroup.charge(pid).map_err(|source| {
            io_error(&config.name, format!("put process {pid} into its memory cgroup"), source)
        })
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        let Self { podman, request, definition, descriptors, gate, mut importing, arrived, root, .. } = *self;
        let config = &request.config;
        godwit_criu::repair::repair(&request.images).map_err(|error| request.refused(error))?;
        rights::check_spec(&request, definition.spec())?;
        restore::same_descriptors(&request, &descriptors)?;
        detach_all(&root.criu).map_err(request.io("unmount", &root.criu))?;
        let record = Record::of(config)?;
        let waiting = record.waiting.clone().unwrap_or_default();
        root.take(&waiting).map_err(request.io("put its changed files into", &root.overlay.target))?;
        restore::bind_root(&root.overlay.target, &root.criu)
            .map_err(request.io("mount the root on", &root.criu))?;
        let _links = restore::complete(&request, &root.overlay.target)?;
        restore::hand_over(&request, gate)?;
        let settings = podman.place(kept_id(&request)).join(SETTINGS);
        let call =
            Call { name: &config.name, action: "restore", words: Vec::new(), settings: Some(&settings) };
        let output = importing.ended().await.map_err(|error| podman.not_started(&call, &error))?;
        if !output.status.success() {
            return Err(podman.restore_failed(&request, &call, &output));
        }
        let pid = fs::read_to_string(&arrived.pid_file)
            .and_then(|text| text.trim().parse().map_err(io::Error::other))
            .map_err(request.io("read", &arrived.pid_file))?;
        // For conmon, whose calls of Podman need no other runtime.
        let plain = settings::of_node().and_then(|of_node| settings::text(&of_node));
        plain.and_then(|text| fs::write(&settings, text)).map_err(request.io("write", &settings))?;
        let life =
            podman.life(config, pid, process::parent(pid).unwrap_or(0), root.overlay.target.clone())?;
        let id = kept_id(&request).to_owned();
        Record { id, life: Some(life), changed_files: root.overlay.upper.clone(), ours: true, waiting: None }
            .write(config)?;
        Ok(ContainerState { status: ContainerStatus::Running, pid, exit_code: None })
    }
}

fn kept_id(request: &RestoreRequest) -> &str {
    request.config.kept.as_ref().map_or("", |kept| &kept.id)
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<T> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// The path below each hierarchy's root of a cgroup as the OCI description names it: a path, or for systemd
/// `SLICE:PREFIX:NAME`.
fn cgroup_of(described: &str) -> String {
    let mut parts = described.splitn(3, ':');
    let (Some(slice), Some(prefix), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
        return described.to_owned();
    };
    // A slice is below those whose names its own begins with.
    let stem = slice.strip_suffix(".slice").unwrap_or(slice);
    let mut path = String::new();
    for (at, _) in stem.match_indices('-').chain([(stem.len(), "")]) {
        path.push_str(&format!("/{}.slice", &stem[..at]));
    }
    format!("{path}/{prefix}-{name}.scope")
}

/// A root filesystem that Podman has mounted.
#[derive(Debug)]
struct PodmanRoot {
    overlay: Overlay,
    /// Where runc has bound it for CRIU.
    criu: PathBuf,
}

impl PodmanRoot {
    /// That of the container with this ID, which is mounted there.
    fn mounted_on(target: &Path, id: &str) -> io::Result<Self> {
        let text = fs::read_to_string("/proc/self/mountinfo")?;
        Self::parse(&text, target, id).ok_or_else(|| io::Error::other("no overlay is mounted there"))
    }

    fn parse(text: &str, target: &Path, id: &str) -> Option<Self> {
        let mounted = |line: &str| {
            let mut fields = line.split(' ').skip(2);
            Some((fields.next()?.to_owned(), PathBuf::from(fields.nth(1)?)))
        };
        let (line, overlay) = text.lines().rev().find_map(|line| Some((line, overlay_of(line, target)?)))?;
        let (device, _) = mounted(line)?;
        let end = Path::new(id).join("criu-root");
        let mut others = text.lines().rev().filter_map(mounted);
        let (_, criu) = others.find(|(other, place)| *other == device && place.ends_with(&end))?;
        Some(Self { overlay, criu })
    }

    /// Mounts it with the files that wait in a directory, and with nothing that is there now.
    fn take(&self, waiting: &Path) -> io::Result<()> {
        let Overlay { upper, work, target, .. } = &self.overlay;
        detach_all(target)?;
        exchange(waiting, upper)?;
        // What an overlay has worked in belongs to its upper directory.
        fs::remove_dir_all(work)?;
        fs::create_dir(work)?;
        self.overlay.mount().map_err(io::Error::other)
    }
}

/// Exchanges two directories of Podman's storage.
///
/// Podman has bound a part of its storage on itself, and no rename crosses mounts, even of the same filesystem. So both are
/// named in a view of the storage that has no mount in it.
fn exchange(waiting: &Path, upper: &Path) -> io::Result<()> {
    let storage = waiting.ancestors().nth(3).unwrap_or(Path::new("/"));
    let below = |path: &Path| path.strip_prefix(storage).map(Path::to_owned).map_err(io::Error::other);
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let view = open_tree(CWD, storage, flags)?;
    Ok(renameat_with(&view, below(waiting)?, &view, below(upper)?, RenameFlags::EXCHANGE)?)
}

/// The overlay that a line of mountinfo tells of, if it is the one mounted there.
fn overlay_of(line: &str, target: &Path) -> Option<Overlay> {
    let (mounted, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split(' ');
    if Path::new(mounted.split(' ').nth(4)?) != target || filesystem.next()? != "overlay" {
        return None;
    }
    let options = filesystem.nth(1)?;
    let option =
        |name: &str| options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
    let (upper, work) = (PathBuf::from(option("upperdir")?), PathBuf::from(option("workdir")?));
    // Podman names many layers from the directory in which its containers are.
    let base = upper.parent()?.parent()?.to_owned();
    let mut lower: Vec<_> = option("lowerdir")?.split(':').map(|layer| base.join(layer)).collect();
    lower.reverse();
    Some(Overlay { lower, upper, work, target: target.to_owned() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_of_systemd_is_below_its_slices() {
        assert_eq!(cgroup_of("/libpod_parent/libpod-1"), "/libpod_parent/libpod-1");
        assert_eq!(cgroup_of("machine.slice:libpod:1"), "/machine.slice/libpod-1.scope");
        assert_eq!(cgroup_of("a-b.slice:libpod:1"), "/a.slice/a-b.slice/libpod-1.scope");
    }

    #[test]
    fn layers_are_found_in_the_words_of_mountinfo() {
        let line = "71 63 0:57 / /s/overlay/c/merged rw,relatime - overlay overlay \
                    rw,lowerdir=/s/overlay/l/A:l/B,upperdir=/s/overlay/c/diff,workdir=/s/overlay/c/work,uuid=on";
        let text = format!(
            "{line}\n80 63 0:58 / /x/ID/criu-root rw - overlay overlay rw\n81 63 0:57 / /r/ID/criu-root rw - overlay overlay rw"
        );
        let whole = PodmanRoot::parse(&text, Path::new("/s/overlay/c/merged"), "ID").unwrap();
        assert_eq!(whole.criu, Path::new("/r/ID/criu-root"));
        let found = whole.overlay;
        assert_eq!(found.lower, ["/s/overlay/l/B", "/s/overlay/l/A"].map(PathBuf::from));
        assert_eq!(found.upper, Path::new("/s/overlay/c/diff"));
        assert!(overlay_of(line, Path::new("/s/overlay/d/merged")).is_none());
    }
}
