//! A container that Podman has started is to come into godwit's care: what it is, and what speaks against that.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_names::ServiceName;
use serde_json::{Value, json};

use super::command::{Call, Inspected};
use super::definition::Definition;
use super::{Podman, arrival};
use crate::confinement::User;
use crate::container::{EngineError, Keeper, Kept, io_error};
use crate::foreign::{Beside, Found, bound, landing, on_networks};
use crate::processes::mounts::MountNamespace;

impl Podman {
    pub(super) async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        beside: Beside<'_>,
    ) -> Result<Found, EngineError> {
        let refused = |reason: String| self.care.failed(name, "give godwit", reason);
        let Some(inspected) = self.inspect(name, container).await? else {
            return Err(refused(format!("it has no container {container}; `podman ps` lists them")));
        };
        if !inspected.state.running || inspected.state.paused {
            return Err(refused(format!("{} does not run; start it first", inspected.name)));
        }
        let mut definition = self.describe(name, &inspected).await?;
        if let Some(namespace) = beside.namespace {
            definition.in_own_namespace(namespace);
            definition.ask_network();
        }
        let of_node = definition.binds();
        let mut objections = definition.objections(&inspected.id, &of_node);
        if inspected.host_config.auto_remove {
            objections.push("it is removed when it ends (--rm), as it does for Podman when it moves".into());
        }
        objections.extend(driver_objection(&inspected.graph_driver.name));
        let stays: Vec<_> = definition.volumes_and_targets();
        let stays = stays.iter().filter(|(_, target)| beside.stays(target)).map(|(name, _)| name.as_str());
        let stays: Vec<_> = stays.collect();
        let volumes: Vec<_> = inspected.volumes().filter(|name| !stays.contains(name)).collect();
        let upper = &inspected.graph_driver.data.upper_dir;
        objections.extend(self.volume_objections(name, &volumes, upper, 1).await?);
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(|source| io_error(name, "read /proc/self/mountinfo".into(), source))?;
        objections.extend(landing::overlay_objection(&mounts, &inspected.graph_driver.data.merged_dir));
        let inside = MountNamespace::of(inspected.state.pid)
            .map_err(|source| io_error(name, "look at its mounts".into(), source))?;
        objections.extend(bound::mounted_below(inside.mountinfo(), &of_node, &definition.places()));
        let networks = inspected.networks();
        if !networks.is_empty() && !leaves_networks {
            objections.push(on_networks(Keeper::Podman, &networks));
        }
        if !objections.is_empty() {
            return Err(self.care.unfit(name, objections));
        }
        let ports = definition.ports();
        let image_digest = self.digest_of_image(name, definition.image()).await;
        let definition = definition.of_no_node();
        let process = &definition.spec()["process"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let texts =
            |value: &Value| -> Vec<String> { value.as_array().into_iter().flatten().map(text).collect() };
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap_or(0);
        let resources = &definition.spec()["linux"]["resources"];
        let (quota, period) = (resources["cpu"]["quota"].as_u64(), resources["cpu"]["period"].as_u64());
        let millis = quota.unwrap_or(0).saturating_mul(1000) / period.unwrap_or(100_000).max(1);
        Ok(Found {
            name: definition.name().to_owned(),
            image: definition.image().0.to_owned(),
            image_id: format!("sha256:{}", definition.image().1),
            image_digest,
            pid: inspected.state.pid,
            command: texts(&process["args"]),
            env: texts(&process["env"]),
            hostname: text(&definition.spec()["hostname"]),
            user: User {
                uid: number(&process["user"]["uid"]),
                gid: number(&process["user"]["gid"]),
                groups: process["user"]["additionalGids"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(number)
                    .collect(),
            },
            workdir: text(&process["cwd"]).into(),
            memory_bytes: resources["memory"]["limit"].as_u64().unwrap_or(0),
            cpu_millis: u32::try_from(millis).unwrap_or(0),
            mounts: of_node,
            networks,
            aliases: inspected.aliases(),
            ports,
            kept: Kept { keeper: Keeper::Podman, id: inspected.id, definition: definition.value() },
        })
    }

    /// What speaks against a container that has not run, with these volumes.
    pub(super) async fn against_new(
        &self,
        name: &ServiceName,
        volumes: &[String],
        most_users: usize,
    ) -> Result<Vec<String>, EngineError> {
        let storage = self.storage(name).await?;
        let mut here = Vec::new();
        for volume in volumes {
            if self.has_volume(name, volume).await? {
                here.push(volume.as_str());
            }
        }
        let of_volumes = self.volume_objections(name, &here, &storage.root, most_users).await?;
        Ok(driver_objection(&storage.driver).into_iter().chain(of_volumes).collect())
    }

    /// What speaks against moving the volumes of a container: each is to be on the filesystem of `storage`, and may have so
    /// many users.
    pub(super) async fn volume_objections(
        &self,
        name: &ServiceName,
        volumes: &[&str],
        storage: &Path,
        most_users: usize,
    ) -> Result<Vec<String>, EngineError> {
        let mut found = Vec::new();
        for volume in self.volumes(name, volumes).await? {
            if volume.driver != "local" || !volume.options.is_empty() {
                found.push(format!(
                    "its volume {} is not one of Podman's own driver without options",
                    volume.name
                ));
            }
            let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
            if device(&volume.mountpoint) != device(storage) {
                found.push(format!(
                    "its volume {} is on another filesystem than Podman's storage",
                    volume.name
                ));
            }
            if self.users_of_volume(name, &volume.name).await? > most_users {
                found.push(format!("another container uses its volume {}", volume.name));
            }
        }
        Ok(found)
    }

    /// Has Podman describe a container: in the archive of a checkpoint that dumps nothing and stops nothing.
    async fn describe(&self, name: &ServiceName, inspected: &Inspected) -> Result<Definition, EngineError> {
        let place = self.care.place(&format!("describe-{}", inspected.id));
        let io = |action: &'static str| {
            let (name, place) = (name.clone(), place.clone());
            move |source| io_error(&name, format!("{action} {}", place.display()), source)
        };
        self.step_in(&place, (&inspected.id, &inspected.runtime, false), &json!("describe"))
            .map_err(io("prepare Podman's call in"))?;
        let settings = place.join(arrival::SETTINGS);
        let words = ["container", "checkpoint", "--leave-running", "--ignore-rootfs", "--ignore-volumes"];
        // What follows the description in the archive, the log and all of /dev/shm, is not waited for.
        let more = ["--compress", "none", "--export", "/dev/stdout"];
        let mut words: Vec<&OsStr> = words.iter().chain(&more).map(OsStr::new).collect();
        words.push(inspected.id.as_ref());
        let call = Call { name, action: "describe", words, settings: Some(&settings) };
        let leftovers = Leftovers::before(&inspected.static_dir);
        let told = self.first_of(&call, Definition::in_archive).await;
        leftovers.remove();
        fs::remove_dir_all(&place).map_err(io("remove"))?;
        told
    }
}

/// What speaks against a storage driver of Podman's.
pub(super) fn driver_objection(driver: &str) -> Option<String> {
    (driver != "overlay").then(|| format!("its storage driver is {driver}; godwit moves overlay"))
}

/// What Podman leaves of a checkpoint in its directory of a container.
struct Leftovers(Vec<PathBuf>);

impl Leftovers {
    /// Those that are not there yet.
    fn before(directory: &Path) -> Self {
        let names = ["checkpoint", "devshm-checkpoint.tar", "network.status", "stats-dump"];
        let paths = names.iter().map(|name| directory.join(name));
        Self(paths.filter(|path| path.is_absolute() && fs::symlink_metadata(path).is_err()).collect())
    }

    fn remove(self) {
        for path in self.0 {
            // A directory only when it is empty.
            if let Err(error) = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path))
                && error.kind() != ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "what Podman has left of a checkpoint is not removed");
            }
        }
    }
}
