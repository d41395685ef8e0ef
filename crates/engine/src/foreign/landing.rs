//! A container comes to an engine of this node: the engine starts what it takes for one of its own, and its runtime restores
//! what godwit has.
//!
//! ```text
//! begin   the engine ──▶ conmon or a shim ──▶ godwit-runtime ──▶ runc ──▶ CRIU, which opens the inventory: a FIFO
//!         (the service runs at its source, is frozen and dumped)
//! finish  the engine's root filesystem makes room for one with the changed files ──▶ the inventory ──▶ CRIU goes on
//! ```
//! So the engine makes all that belongs to the container, watches it from its first instruction here, and what is asked of the
//! engine later it answers as for any container.
//!
//! Changed files come before the engine has made a place for them. They wait in a directory of the engine's storage, so that
//! the two change names at the end. The engine has mounted the overlay by then, and what is changed below a mounted overlay is
//! stale; so it is mounted anew.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use godwit_criu::repair::{Here, Hidden, fit_kernel};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::file::FileOfVolume;
use super::record::{Record, Volume};
use super::{CGROUPS, Care, log};
use crate::container::{
    ContainerConfig, ContainerState, ContainerStatus, EngineError, LogFiles, OutputPipes, RestoreRequest,
    io_error,
};
use crate::files::{UPPER, VOLUMES, check_file, place_of};
use crate::processes::tmpfs::unescaped;
use crate::processes::{cgroup, process};
use crate::rootfs::Overlay;
use crate::runc::Runc;
use crate::runc::lifecycle::detach_all;
use crate::runc::provided::{COVER_KEY as DUMPED_COVER_KEY, RESTORE_KEY as COVER_KEY};
use crate::runc::restore::{self, Gate, StandIn};
use crate::runc::rights;
use crate::view::exchange;

/// Where what waits for a container is in an engine's storage: its changed files and its volumes, as one tree.
pub(super) fn waiting_in(storage: &Path, token: &str) -> PathBuf {
    in_storage(storage).join(token)
}

/// What of an engine's storage is godwit's.
pub(crate) fn in_storage(storage: &Path) -> PathBuf {
    storage.join("godwit")
}

/// The FIFO for which CRIU waits.
fn inventory_in(place: &Path) -> PathBuf {
    place.join("inventory")
}

/// Ends a CRIU that waits: it finds that there is nothing to wait for. Nothing happens where none does.
pub(crate) fn end_waiting(place: &Path) -> io::Result<()> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    match OpenOptions::new().write(true).custom_flags(flags).open(inventory_in(place)) {
        Err(error) if error.kind() != ErrorKind::NotFound && error.raw_os_error() != Some(libc::ENXIO) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// What the runtime tells when the engine has come to the restore.
#[derive(Debug, Deserialize)]
struct Arrived {
    bundle: PathBuf,
    pid_file: PathBuf,
}

/// What godwit has for a restore, before the engine begins it.
pub(crate) struct Prepared {
    place: PathBuf,
    descriptors: Vec<u8>,
    gate: Gate,
    stand_in: StandIn,
}

/// A restore that waits for its inventory.
pub(crate) struct Landing {
    care: Care,
    request: RestoreRequest,
    storage: PathBuf,
    descriptors: Vec<u8>,
    gate: File,
    arrived: Arrived,
    /// The OCI description that the engine has given the runtime.
    bundle: Value,
    /// The root filesystem that the engine has made, and mounted.
    root: MountedRoot,
    /// The volumes that it has made, and where it is to have each.
    volumes: Vec<Volume>,
    targets: Vec<PathBuf>,
    /// Those of which it has a file.
    files: Vec<FileOfVolume>,
    cgroup: String,
}

/// A restore that goes on.
pub(crate) struct Landed {
    care: Care,
    request: RestoreRequest,
    arrived: Arrived,
    root: MountedRoot,
    volumes: Vec<Volume>,
    waiting: PathBuf,
    own_cgroup: PathBuf,
    /// The container in its cgroup there, and its limit of processes, which is lifted for CRIU.
    cgroup: (ContainerConfig, u64),
    storage: PathBuf,
    synced: tokio::task::JoinHandle<io::Result<()>>,
    _links: godwit_criu::repair::Links,
}

impl Prepared {
    /// The task of the runtime: a restore.
    pub(crate) fn task(place: &Path, request: &RestoreRequest, network_namespace: Option<&Path>) -> Value {
        json!({ "restore": {
            "images": request.images,
            "work": request.work,
            "criu_config": Self::criu_config(place),
            "without_huge_pages": request.lazy_pages,
            "network_namespace": network_namespace,
        }})
    }

    fn criu_config(place: &Path) -> PathBuf {
        place.join("criu.conf")
    }

    /// Puts what runc and CRIU find before there are images into a directory with [instructions](super::instructions).
    pub(crate) fn new(
        care: &Care,
        place: &Path,
        request: &RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Self, EngineError> {
        fs::create_dir_all(&request.work).map_err(request.io("create", &request.work))?;
        let cover = place.join("empty");
        let covered =
            File::create(&cover).and_then(|file| file.set_permissions(Permissions::from_mode(0o444)));
        covered.map_err(request.io("create", &cover))?;
        let cover = format!("external \"mnt[{COVER_KEY}]:{}\"\n", cover.display());
        let own_cgroup = care.own_cgroup(&request.config);
        let cgroups = format!("external \"mnt[{CGROUPS}]:{}\"\n", own_cgroup.display());
        let criu_config = Self::criu_config(place);
        fs::write(&criu_config, restore::criu_options(request) + &cover + &cgroups)
            .map_err(request.io("write", &criu_config))?;
        let fifo = inventory_in(place);
        let gate = Gate::new(&fifo).map_err(request.io("make", &fifo))?;
        let descriptors = restore::descriptors(pipes);
        let stand_in = StandIn::put(request, &fifo, &descriptors)?;
        Ok(Self { place: place.to_owned(), descriptors, gate, stand_in })
    }

    /// Waits until CRIU waits. `ended` is the engine's failure.
    pub(crate) async fn opened(
        self,
        (care, request, storage): (&Care, &RestoreRequest, &Path),
        (volumes, files): (&[(String, String)], &[FileOfVolume]),
        ended: impl Future<Output = EngineError>,
    ) -> Result<Landing, EngineError> {
        let Self { place, descriptors, gate, stand_in } = self;
        let gate = tokio::select! {
            opened = gate.opened() => opened.map_err(request.io("wait until CRIU opens", &inventory_in(&place)))?,
            error = ended => return Err(error),
        };
        let path = place.join("arrived.json");
        let arrived: Arrived = read_json(&path).map_err(request.io("read", &path))?;
        let path = arrived.bundle.join("config.json");
        let bundle: Value = read_json(&path).map_err(request.io("read", &path))?;
        let root = PathBuf::from(bundle["root"]["path"].as_str().unwrap_or_default());
        let id = Record::of(&request.config)?.id;
        let found = MountedRoot::on(&root, &id, storage);
        let root = found.map_err(request.io("find how its engine has mounted", &root))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(request.io("read", Path::new("/proc/self/mountinfo")))?;
        if let Some(objection) = overlay_objection(&mounts, &root.overlay.target) {
            return Err(request.refused(objection));
        }
        // Others are here, and are what the container has here.
        let coming = volumes.iter().filter(|(name, _)| request.config.stays(name).is_none());
        let coming: Vec<_> = coming.cloned().collect();
        let targets = coming.iter().map(|(_, target)| target.into()).collect();
        let volumes = volumes_in(&bundle, &coming, files);
        let volumes = volumes.map_err(request.io("find the volumes in", &path))?;
        let cgroup = cgroup_of(bundle["linux"]["cgroupsPath"].as_str().unwrap_or_default());
        if !cgroup.contains(&id) {
            return Err(request.refused(format!("its engine has put it into the cgroup {cgroup:?}")));
        }
        // An engine may forget of what it has started.
        Record::change(&request.config, |record| record.landing = Some(cgroup.clone()))?;
        stand_in.remove(request)?;
        let (care, request) = (care.clone(), request.clone());
        let storage = storage.to_owned();
        Ok(Landing {
            care,
            request,
            storage,
            descriptors,
            gate,
            arrived,
            bundle,
            root,
            volumes,
            targets,
            files: files.to_vec(),
            cgroup,
        })
    }
}

impl Landing {
    pub(crate) fn request(&self) -> &RestoreRequest {
        &self.request
    }

    /// Begins to put what the container has written elsewhere into the log of its engine, which has nothing of it yet; drops
    /// it where there is none that takes it. The container matters more than that, and does not wait for the disk.
    ///
    /// The channel ends as soon as the log can be read there.
    pub(crate) fn put_log(&self, log: Option<LogFiles>) -> oneshot::Receiver<()> {
        let (config, keeper) = (&self.request.config, self.care.keeper);
        let (come, name) = (Runc::log_paths(config), config.name.clone());
        let (is_put, put) = oneshot::channel();
        self.care.logging.spawn_blocking(move || {
            let put = log::put(&come, keeper, log.as_ref());
            drop(is_put);
            let synced = put.and_then(|put| put.map_or(Ok(()), |put| put.sync_all()));
            if let Err(error) = synced {
                tracing::warn!(container = %name, %error, "its log from before the move is not whole here");
            }
        });
        put
    }

    /// Puts a process into the memory cgroup of the container.
    pub(crate) fn charge(&self, pid: u32) -> Result<(), EngineError> {
        let config = ContainerConfig { cgroup: self.cgroup.clone(), ..self.request.config.clone() };
        let cgroup = self.care.processes.cgroup(&config)?;
        cgroup.charge(pid).map_err(|source| {
            io_error(&config.name, format!("put process {pid} into its memory cgroup"), source)
        })
    }

    /// Lets CRIU go on with the images and the files that are there now. The container may have what `spec` allows, an OCI
    /// description; nothing stands for that of the engine.
    pub(crate) fn go_on(self, spec: Option<&Value>) -> Result<Landed, EngineError> {
        let Self {
            care,
            request,
            storage,
            descriptors,
            gate,
            arrived,
            bundle,
            root,
            volumes,
            targets,
            files,
            cgroup: path,
        } = self;
        let spec = spec.unwrap_or(&bundle);
        godwit_criu::repair::repair(&request.images).map_err(|error| request.refused(error))?;
        let paths = |list: &str| -> Vec<&str> {
            spec["linux"][list].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
        };
        let masked = paths("maskedPaths");
        let hidden = Hidden {
            covered: masked.clone(),
            read_only: paths("readonlyPaths"),
            file_key: DUMPED_COVER_KEY,
            brings_directories: false,
        };
        fit_kernel(&request.images, &hidden, Here::at).map_err(|error| request.refused(error))?;
        rights::check_spec(&request, spec)?;
        // runc would bring the node's own /dev/null, which root in the container could change.
        godwit_criu::repair::external_mounts(&request.images, &masked, COVER_KEY)
            .map_err(|error| request.refused(error))?;
        restore::same_descriptors(&request, &descriptors)?;
        detach_all(&root.criu).map_err(request.io("unmount", &root.criu))?;
        let record = Record::of(&request.config)?;
        let waiting = record.waiting.clone().unwrap_or_default();
        root.take(&storage, &waiting.join(UPPER))
            .map_err(request.io("put its changed files into", &root.overlay.target))?;
        for volume in &volumes {
            let waiting = waiting.join(VOLUMES).join(&volume.name);
            if let Some(file) = files.iter().find(|file| file.volume == volume.name) {
                // The engine follows a link in its place.
                check_file(&waiting, &file.file).map_err(request.io("find the file in", &waiting))?;
            }
            exchange(&storage, &waiting, &volume.files)
                .map_err(request.io("put the volume into", &volume.files))?;
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
        let place = |(target, volume): (&PathBuf, &Volume)| {
            Ok((place_of(&root.overlay.target, target)?, volume.files.clone()))
        };
        let is_directory = |(_, volume): &(_, &Volume)| files.iter().all(|file| file.volume != volume.name);
        let places: io::Result<Vec<_>> =
            targets.iter().zip(&volumes).filter(is_directory).map(place).collect();
        let places = places.map_err(request.io("find the places of volumes in", &root.overlay.target))?;
        let links = restore::complete(&request, &root.overlay.target, &places)?;
        let own_cgroup = care.own_cgroup(&request.config);
        if cgroup::is_unified() {
            let seen = Path::new(CGROUPS).join(path.trim_start_matches('/'));
            bind_cgroup(&seen, &own_cgroup).map_err(request.io("bind its cgroup on", &own_cgroup))?;
        }
        let namespace = &request.config.network_namespace;
        set_parameters(namespace, &bundle).map_err(request.io("set kernel parameters in", namespace))?;
        let processes = bundle["linux"]["resources"]["pids"]["limit"].as_u64().unwrap_or(0);
        let cgroup = (ContainerConfig { cgroup: path, ..request.config.clone() }, processes);
        limit_processes(&care, &cgroup, 0)?;
        restore::hand_over(&request, gate)?;
        Ok(Landed {
            storage,
            cgroup,
            care,
            request,
            arrived,
            root,
            volumes,
            waiting,
            own_cgroup,
            synced,
            _links: links,
        })
    }
}

impl Landed {
    /// What is to be done whether the engine has succeeded or not.
    pub(crate) fn put_away(&self) -> Result<(), EngineError> {
        unbind_cgroup(&self.own_cgroup).map_err(self.request.io("unmount", &self.own_cgroup))
    }

    /// The engine has it run.
    pub(crate) async fn done(self) -> Result<ContainerState, EngineError> {
        let Self { care, request, arrived, root, volumes, waiting, cgroup, storage, synced, .. } = self;
        let config = &request.config;
        limit_processes(&care, &cgroup, cgroup.1)?;
        let pid = fs::read_to_string(&arrived.pid_file)
            .and_then(|text| text.trim().parse().map_err(io::Error::other))
            .map_err(request.io("read", &arrived.pid_file))?;
        let synced = synced.await.map_err(io::Error::other).and_then(|synced| synced);
        synced.map_err(request.io("bring to the disk", &waiting))?;
        let reader = process::parent(pid).unwrap_or(0);
        let life = care.life(config, (pid, reader), root.overlay.target.clone())?;
        let upper = root.overlay.upper.clone();
        Record::change(config, |record| {
            record.came = Some((life.pid, life.start));
            (record.life, record.upper, record.volumes) = (Some(life), upper, volumes);
            record.storage = Some(storage);
            (record.import, record.landing, record.waiting) = (None, None, None);
            record.left = Some(waiting);
        })?;
        Ok(ContainerState { status: ContainerStatus::Running, pid, exit_code: None })
    }
}

/// Limits the processes of a container whose engine has done so. One without a limit is left as it is.
fn limit_processes(
    care: &Care,
    (config, limit): &(ContainerConfig, u64),
    now: u64,
) -> Result<(), EngineError> {
    if *limit == 0 {
        return Ok(());
    }
    let limited = care.processes.cgroup(config)?.limit_processes(now);
    limited.map_err(|source| io_error(&config.name, "limit its processes".into(), source))
}

/// Sets the kernel parameters of the network that an OCI description has: a runtime sets them in namespaces that it makes.
fn set_parameters(namespace: &Path, bundle: &Value) -> io::Result<()> {
    let parameters = bundle["linux"]["sysctl"].as_object().into_iter().flatten();
    let mut set = Vec::new();
    for (name, value) in parameters.filter(|(name, _)| name.starts_with("net.")) {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        let plain = path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/_-".contains(&byte));
        let (Some(value), true) = (value.as_str(), plain && !path.contains("//")) else {
            return Err(io::Error::other(format!("{name} is not a kernel parameter")));
        };
        set.push((path, value.to_owned()));
    }
    if set.is_empty() {
        return Ok(());
    }
    let namespace = File::open(namespace)?;
    // A thread of its own is in that namespace, and ends with it.
    let setting = std::thread::spawn(move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET)?;
        for (path, value) in set {
            let written = OpenOptions::new()
                .write(true)
                .open(&path)
                .and_then(|mut file| file.write_all(value.as_bytes()));
            match written {
                // This kernel does not have it in namespaces.
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(io::Error::new(error.kind(), format!("{path}: {error}")));
                }
                _ => {}
            }
        }
        Ok(())
    });
    setting.join().map_err(|_| io::Error::other("a thread has failed"))?
}

/// What failed in a restore, as well as it is known: what the log of CRIU says, or else the engine.
pub(crate) fn failed(request: &RestoreRequest, engine: EngineError) -> EngineError {
    let criu_log = godwit_criu::log::read_lossy(&request.log());
    match godwit_criu::log::first_error_explained(&criu_log) {
        Some(reason) => request.refused(reason),
        None => engine,
    }
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

/// A root filesystem that an engine has mounted.
#[derive(Debug)]
struct MountedRoot {
    overlay: Overlay,
    /// Where runc has bound it for CRIU.
    criu: PathBuf,
}

impl MountedRoot {
    /// That of the container with this ID, which is mounted there.
    fn on(target: &Path, id: &str, storage: &Path) -> io::Result<Self> {
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
    fn take(&self, storage: &Path, waiting: &Path) -> io::Result<()> {
        let Overlay { upper, work, target, .. } = &self.overlay;
        detach_all(target)?;
        exchange(storage, waiting, upper)?;
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

/// The volumes of a container, by name and place, and where the engine has them, by its OCI description.
fn volumes_in(
    bundle: &Value,
    volumes: &[(String, String)],
    files_of: &[FileOfVolume],
) -> io::Result<Vec<Volume>> {
    let mounts = bundle["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let volumes = volumes.iter();
    volumes
        .map(|(name, target)| {
            let is_it = |mount: &&Value| mount["destination"] == target.as_str() && mount["type"] == "bind";
            let mount = mounts.iter().find(is_it);
            let files = mount.and_then(|mount| mount["source"].as_str()).map(PathBuf::from);
            let mut files =
                files.ok_or_else(|| io::Error::other(format!("nothing is mounted on {target}")))?;
            if let Some(of) = files_of.iter().find(|of| of.volume == *name) {
                let volume = files.parent().filter(|volume| of.path(volume) == files);
                let other = || io::Error::other(format!("another file is mounted on {target}"));
                files = volume.ok_or_else(other)?.to_owned();
            }
            Ok(Volume { name: name.clone(), files, anonymous: false })
        })
        .collect()
}

/// The overlay that a line of mountinfo tells of, if it is the one mounted there.
fn overlay_of(line: &str, target: &Path, storage: &Path) -> Option<Overlay> {
    let (mounted, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split(' ');
    if Path::new(&unescaped(mounted.split(' ').nth(4)?)?) != target || filesystem.next()? != "overlay" {
        return None;
    }
    let options = filesystem.nth(1)?;
    // The engine has it there for its containers.
    let of_container = target.parent()?;
    let base = of_container.parent().filter(|base| base.parent() == Some(storage))?;
    let upper = base.join(unescaped(option(options, "upperdir")?)?);
    // Engines name layers from the directory in which their containers are, where there are many. containerd has those
    // elsewhere.
    let base = upper.parent()?.parent()?.to_owned();
    let path = |text: &str| Some(base.join(unescaped(text)?));
    let work = path(option(options, "workdir")?)?;
    // One by one since Linux 6.5, where the engine knows that.
    let one_by_one = options.split(',').filter_map(|option| option.strip_prefix("lowerdir+="));
    let lower = option(options, "lowerdir").into_iter().flat_map(|all| all.split(':')).chain(one_by_one);
    let mut lower: Vec<_> = lower.map(path).collect::<Option<_>>()?;
    lower.reverse();
    Some(Overlay { lower, upper, work, target: target.to_owned() })
}

/// The value of an option of a mount.
fn option<'a>(options: &'a str, name: &str) -> Option<&'a str> {
    options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
}

/// The options of the filesystem that is mounted there.
fn options_at<'a>(mountinfo: &'a str, target: &Path) -> Option<&'a str> {
    let is_there = |mounted: &str| {
        mounted.split(' ').nth(4).and_then(unescaped).is_some_and(|at| Path::new(&at) == target)
    };
    let mut mounted = mountinfo.lines().rev().filter_map(|line| line.split_once(" - "));
    let (_, filesystem) = mounted.find(|(mounted, _)| is_there(mounted))?;
    filesystem.split(' ').nth(2)
}

/// The upper directory of the overlay that is mounted there, if that is named from the root.
pub(crate) fn upper_of(mountinfo: &str, target: &Path) -> Option<PathBuf> {
    let upper = PathBuf::from(unescaped(option(options_at(mountinfo, target)?, "upperdir")?)?);
    upper.is_absolute().then_some(upper)
}

/// What speaks against mounting an overlay anew that is mounted with these options: godwit's own mean something else.
pub(crate) fn overlay_objection(mountinfo: &str, target: &Path) -> Option<String> {
    let options = options_at(mountinfo, target)?;
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
            MountedRoot::parse(&text, Path::new("/s/overlay/c/merged"), "ID", Path::new("/s")).unwrap();
        assert_eq!(whole.criu, Path::new("/r/ID/criu-root"));
        let found = whole.overlay;
        assert_eq!(found.lower, ["/s/overlay/l/B", "/s/overlay/l/A"].map(PathBuf::from));
        assert_eq!(found.upper, Path::new("/s/overlay/c/diff"));
        assert!(overlay_of(line, Path::new("/s/overlay/d/merged"), Path::new("/s")).is_none());
    }

    #[test]
    fn layers_that_containerd_has_are_found_where_it_has_them() {
        let (target, storage) = (Path::new("/d/rootfs/overlayfs/ID"), Path::new("/d"));
        let line = |lower: &str| {
            format!(
                "71 63 0:57 / /d/rootfs/overlayfs/ID rw,relatime - overlay overlay \
                 rw,{lower},upperdir=/c/snapshots/9/fs,workdir=/c/snapshots/9/work,nouserxattr"
            )
        };
        // Whole, from where they are, and one by one.
        for lower in [
            "lowerdir=/c/snapshots/2/fs:/c/snapshots/1/fs",
            "lowerdir=2/fs:1/fs",
            "lowerdir+=/c/snapshots/2/fs,lowerdir+=/c/snapshots/1/fs",
        ] {
            let found = overlay_of(&line(lower), target, storage).unwrap();
            assert_eq!(found.lower, ["/c/snapshots/1/fs", "/c/snapshots/2/fs"].map(PathBuf::from), "{lower}");
            assert_eq!(found.work, Path::new("/c/snapshots/9/work"));
            assert_eq!(upper_of(&line(lower), target), Some(found.upper));
        }
        assert_eq!(upper_of(&line("lowerdir=1/fs"), Path::new("/d/rootfs/overlayfs/OTHER")), None);
    }
}
