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

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use nix::mount::{MsFlags, mount};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, openat2, renameat_with, statat,
};
use rustix::mount::{OpenTreeFlags, open_tree};
use serde::Deserialize;
use serde_json::{Value, json};

use super::command::{Call, failed, said};
use super::definition::{Definition, Here};
use super::record::{Record, Volume};
use super::{CGROUPS, COVER_KEY, Podman, RUNTIME, settings};
use crate::container::{
    BegunRestore, ContainerState, ContainerStatus, EngineError, OutputPipes, RestoreRequest, io_error,
};
use crate::processes::tmpfs::unescaped;
use crate::processes::{cgroup, process};
use crate::rootfs::Overlay;
use crate::runc::lifecycle::detach_all;
use crate::runc::restore::{self, Gate, StandIn};
use crate::runc::rights;

/// Podman waits four minutes for its runtime. So long godwit does.
const PATIENCE: Duration = Duration::from_secs(180);

/// Where what waits for a container is in Podman's storage: its changed files in [`UPPER`], its volumes in directories of
/// [`VOLUMES`].
pub(super) fn waiting_in(storage: &Path, id: &str) -> PathBuf {
    in_storage(storage).join(id)
}

/// What of Podman's storage is godwit's.
pub(super) fn in_storage(storage: &Path) -> PathBuf {
    storage.join("godwit")
}

/// Where the changed files of a container's root filesystem are among its files.
pub(super) const UPPER: &str = "diff";

/// Where its volumes are among its files, each in a directory with its name.
pub(super) const VOLUMES: &str = "volumes";

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
    /// The volumes that it has made.
    volumes: Vec<Volume>,
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
        self.end_import(config, &Record::of(config)?).await?;
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
        let cover = place.join("empty");
        let covered =
            File::create(&cover).and_then(|file| file.set_permissions(Permissions::from_mode(0o444)));
        covered.map_err(request.io("create", &cover))?;
        let cover = format!("external \"mnt[{COVER_KEY}]:{}\"\n", cover.display());
        let own_cgroup = self.own_cgroup(&kept.id);
        let cgroups = format!("external \"mnt[{CGROUPS}]:{}\"\n", own_cgroup.display());
        fs::write(&criu_config, restore::criu_options(&request) + &cover + &cgroups)
            .map_err(request.io("write", &criu_config))?;
        let storage = self.storage(&config.name).await?;
        let parent = format!("{}/podman", self.config.cgroup_parent.trim_end_matches('/'));
        let here = Here {
            network_namespace: &config.network_namespace,
            cgroup_parent: (!storage.by_systemd).then_some(parent.as_str()),
            image: &self.image_name(config).await?,
            volumes: &storage.volumes,
        };
        let archive = place.join("checkpoint.tar");
        let written = File::create(&archive).and_then(|file| definition.write_archive(&here, file));
        written.map_err(request.io("write", &archive))?;
        let fifo = place.join("inventory");
        let gate = Gate::new(&fifo).map_err(request.io("make", &fifo))?;
        let descriptors = restore::descriptors(pipes);
        let stand_in = StandIn::put(&request, &fifo, &descriptors)?;

        let words = ["container", "restore", "--tcp-established", "--file-locks", "--ignore-static-ip"];
        let more = ["--ignore-static-mac", "--ignore-volumes", "--import"];
        let mut words: Vec<&OsStr> = words.iter().chain(&more).map(OsStr::new).collect();
        words.push(archive.as_os_str());
        let settings = place.join(SETTINGS);
        let call = Call { name: &config.name, action: "restore", words, settings: Some(&settings) };
        let mut command = self.command(&call);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| self.not_started(&call, &error))?;
        if let Some(import) = child.id().and_then(|pid| Some((pid, process::start_time(pid)?))) {
            Record { import: Some(import), ..Record::of(config)? }.write(config)?;
        }
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
        let found = PodmanRoot::mounted_on(&root, &kept.id, &storage.root);
        let root = found.map_err(request.io("find how Podman has mounted", &root))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(request.io("read", Path::new("/proc/self/mountinfo")))?;
        if let Some(objection) = overlay_objection(&mounts, &root.overlay.target) {
            return Err(request.refused(objection));
        }
        let volumes = volumes_in(&bundle, &definition);
        let volumes = volumes.map_err(request.io("find the volumes in", &path))?;
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
            volumes,
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

    fn patience(&self) -> Option<Duration> {
        Some(PATIENCE)
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        let Self {
            podman,
            request,
            definition,
            descriptors,
            gate,
            mut importing,
            arrived,
            root,
            volumes,
            cgroup: path,
        } = *self;
        let config = &request.config;
        if importing.0.is_finished() {
            // It waits for its runtime for four minutes.
            return Err(request.refused("Podman has not waited for it"));
        }
        godwit_criu::repair::repair(&request.images).map_err(|error| request.refused(error))?;
        rights::check_spec(&request, definition.spec())?;
        // runc would bring the node's own /dev/null, which root in the container could change.
        let masked = definition.masked();
        godwit_criu::repair::external_mounts(&request.images, &masked, COVER_KEY)
            .map_err(|error| request.refused(error))?;
        restore::same_descriptors(&request, &descriptors)?;
        detach_all(&root.criu).map_err(request.io("unmount", &root.criu))?;
        let record = Record::of(config)?;
        let waiting = record.waiting.clone().unwrap_or_default();
        root.take(&waiting.join(UPPER))
            .map_err(request.io("put its changed files into", &root.overlay.target))?;
        for volume in &volumes {
            let waiting = waiting.join(VOLUMES).join(&volume.name);
            exchange(&waiting, &volume.files).map_err(request.io("put the volume into", &volume.files))?;
        }
        let renamed: Vec<_> = volumes
            .iter()
            .map(|volume| volume.files.as_path())
            .chain([root.overlay.upper.as_path()])
            .flat_map(|path| [path.parent(), Some(&waiting), waiting.parent()])
            .flatten()
            .map(Path::to_owned)
            .collect();
        // On the disk before the commit, beside the restore.
        let synced = tokio::task::spawn_blocking(move || {
            renamed.iter().try_for_each(|path| File::open(path)?.sync_all())
        });
        restore::bind_root(&root.overlay.target, &root.criu)
            .map_err(request.io("mount the root on", &root.criu))?;
        let _links = restore::complete(&request, &root.overlay.target)?;
        let own_cgroup = podman.own_cgroup(kept_id(&request));
        if cgroup::is_unified() {
            let seen = Path::new(CGROUPS).join(path.trim_start_matches('/'));
            bind_cgroup(&seen, &own_cgroup).map_err(request.io("bind its cgroup on", &own_cgroup))?;
        }
        restore::hand_over(&request, gate)?;
        let settings = podman.place(kept_id(&request)).join(SETTINGS);
        let call =
            Call { name: &config.name, action: "restore", words: Vec::new(), settings: Some(&settings) };
        let output = importing.ended().await.map_err(|error| podman.not_started(&call, &error))?;
        unbind_cgroup(&own_cgroup).map_err(request.io("unmount", &own_cgroup))?;
        if !output.status.success() {
            return Err(podman.restore_failed(&request, &call, &output));
        }
        let pid = fs::read_to_string(&arrived.pid_file)
            .and_then(|text| text.trim().parse().map_err(io::Error::other))
            .map_err(request.io("read", &arrived.pid_file))?;
        let synced = synced.await.map_err(io::Error::other).and_then(|synced| synced);
        synced.map_err(request.io("bring to the disk", &waiting))?;
        // For conmon, whose calls of Podman need no other runtime.
        let plain = settings::of_node().and_then(|of_node| settings::text(&of_node));
        plain.and_then(|text| fs::write(&settings, text)).map_err(request.io("write", &settings))?;
        let life =
            podman.life(config, pid, process::parent(pid).unwrap_or(0), root.overlay.target.clone())?;
        let (life, upper) = (Some(life), root.overlay.upper.clone());
        Record { life, upper, volumes, import: None, left: Some(waiting), waiting: None, ..record }
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
    fn mounted_on(target: &Path, id: &str, storage: &Path) -> io::Result<Self> {
        let text = fs::read_to_string("/proc/self/mountinfo")?;
        Self::parse(&text, target, id, storage).ok_or_else(|| io::Error::other("no overlay is mounted there"))
    }

    fn parse(text: &str, target: &Path, id: &str, storage: &Path) -> Option<Self> {
        let mounted = |line: &str| {
            let mut fields = line.split(' ').skip(2);
            Some((fields.next()?.to_owned(), PathBuf::from(unescaped(fields.nth(1)?)?)))
        };
        let (line, overlay) =
            text.lines().rev().find_map(|line| Some((line, overlay_of(line, target, storage)?)))?;
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

/// Shows CRIU the cgroup that a container is to see. It takes no link for it.
fn bind_cgroup(cgroup: &Path, place: &Path) -> io::Result<()> {
    fs::create_dir_all(place)?;
    let none = None::<&str>;
    mount(Some(cgroup), place, none, MsFlags::MS_BIND, none)?;
    Ok(mount(none, place, none, MsFlags::MS_PRIVATE, none)?)
}

/// Removes that, and nothing in it.
pub(super) fn unbind_cgroup(place: &Path) -> io::Result<()> {
    detach_all(place)?;
    match fs::remove_dir(place) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The volumes of a container, and where Podman has them, by its OCI description.
fn volumes_in(bundle: &Value, definition: &Definition) -> io::Result<Vec<Volume>> {
    let mounts = bundle["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let volumes = definition.volumes().unwrap_or_default().into_iter();
    volumes
        .map(|(name, target)| {
            let mount = mounts.iter().find(|mount| mount["destination"] == target && mount["type"] == "bind");
            let files = mount.and_then(|mount| mount["source"].as_str()).map(PathBuf::from);
            let files = files.ok_or_else(|| io::Error::other(format!("nothing is mounted on {target}")))?;
            Ok(Volume { name: name.to_owned(), files, anonymous: false })
        })
        .collect()
}

/// Exchanges a directory that has come with one of Podman's, in its storage.
///
/// Podman has bound a part of its storage on itself, and no rename crosses mounts, even of the same filesystem. So both are
/// named in a view of the storage that has no mount in it. What has come may have links in it, which lead out of it.
fn exchange(waiting: &Path, own: &Path) -> io::Result<()> {
    let not_below = || io::Error::other("it is not in Podman's storage");
    let of_container = |path: &&Path| path.parent().is_some_and(|parent| parent.ends_with("godwit"));
    let storage = waiting.ancestors().find(of_container).and_then(|path| path.parent()?.parent());
    let storage = storage.ok_or_else(not_below)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let view = open_tree(CWD, storage, flags)?;
    let parent = |path: &Path| -> io::Result<(OwnedFd, OsString)> {
        let below = path.strip_prefix(storage).map_err(|_| not_below())?;
        let (parent, name) =
            (below.parent().ok_or_else(not_below)?, below.file_name().ok_or_else(not_below)?);
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok((openat2(&view, parent, directory, Mode::empty(), resolve)?, name.to_owned()))
    };
    let ((from, name), (to, own_name)) = (parent(waiting)?, parent(own)?);
    let come = statat(&from, &name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(come.st_mode) != FileType::Directory {
        return Err(io::Error::other("what has come for it is no directory"));
    }
    renameat_with(&from, &name, &to, &own_name, RenameFlags::EXCHANGE)?;
    Ok(())
}

/// The overlay that a line of mountinfo tells of, if it is the one mounted there.
fn overlay_of(line: &str, target: &Path, storage: &Path) -> Option<Overlay> {
    let (mounted, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split(' ');
    if Path::new(&unescaped(mounted.split(' ').nth(4)?)?) != target || filesystem.next()? != "overlay" {
        return None;
    }
    let options = filesystem.nth(1)?;
    let option =
        |name: &str| options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
    // Podman names what it has from the directory in which its containers are, where that has many layers.
    let base = storage.join("overlay");
    let path = |text: &str| Some(base.join(unescaped(text)?));
    let (upper, work) = (path(option("upperdir")?)?, path(option("workdir")?)?);
    let mut lower: Vec<_> = option("lowerdir")?.split(':').map(path).collect::<Option<_>>()?;
    lower.reverse();
    Some(Overlay { lower, upper, work, target: target.to_owned() })
}

/// What speaks against mounting an overlay anew that is mounted with these options: godwit's own mean something else.
pub(super) fn overlay_objection(mountinfo: &str, target: &Path) -> Option<String> {
    let is_there = |mounted: &str| {
        mounted.split(' ').nth(4).and_then(unescaped).is_some_and(|at| Path::new(&at) == target)
    };
    let options = mountinfo
        .lines()
        .rev()
        .filter_map(|line| line.split_once(" - "))
        .find(|(mounted, _)| is_there(mounted));
    let options = options?.1.split(' ').nth(2)?;
    let unfit = |option: &&str| {
        matches!(*option, "metacopy=on" | "redirect_dir=on" | "redirect_dir=follow" | "userxattr")
            || option.starts_with("context=")
    };
    let unfit = options.split(',').find(unfit)?;
    Some(format!("its root filesystem is mounted with {unfit}, with which godwit cannot mount it"))
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
    fn an_overlay_that_is_not_godwits_to_mount_is_told_by_its_options() {
        let line = |options: &str| {
            format!("71 63 0:57 / /m rw - overlay overlay rw,lowerdir=/l,{options},uuid=on\n")
        };
        assert_eq!(overlay_objection(&line("upperdir=/u"), Path::new("/m")), None);
        for option in ["metacopy=on", "redirect_dir=on", "context=x"] {
            assert!(overlay_objection(&line(option), Path::new("/m")).unwrap().contains(option));
        }
    }

    #[test]
    fn layers_are_found_in_the_words_of_mountinfo() {
        let line = "71 63 0:57 / /s/overlay/c/merged rw,relatime - overlay overlay \
                    rw,lowerdir=/s/overlay/l/A:l/B,upperdir=c/diff,workdir=/s/overlay/c/work,uuid=on";
        let text = format!(
            "{line}\n80 63 0:58 / /x/ID/criu-root rw - overlay overlay rw\n81 63 0:57 / /r/ID/criu-root rw - overlay overlay rw"
        );
        let whole =
            PodmanRoot::parse(&text, Path::new("/s/overlay/c/merged"), "ID", Path::new("/s")).unwrap();
        assert_eq!(whole.criu, Path::new("/r/ID/criu-root"));
        let found = whole.overlay;
        assert_eq!(found.lower, ["/s/overlay/l/B", "/s/overlay/l/A"].map(PathBuf::from));
        assert_eq!(found.upper, Path::new("/s/overlay/c/diff"));
        assert!(overlay_of(line, Path::new("/s/overlay/d/merged"), Path::new("/s")).is_none());
    }
}
