//! Docker makes a container for godwit, by its API.
//!
//! Docker has containers in network namespaces of its own alone, which it makes as it starts them. So the runtime is
//! [`RUNTIME`], as for a container that has come from another node, and puts the container into the namespace that godwit has
//! for it: the program has its network from its first instruction.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_names::ServiceName;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::mpsc;

use super::api::{ApiError, filtered};
use super::arrival::Named;
use super::definition::{ImageStore, restart_policy};
use super::image::told_error;
use super::{Docker, RUNTIME};
use crate::container::{ContainerConfig, EngineError, io_error};
use crate::foreign::archive::{PIECES, Pieces};
use crate::foreign::making::{CREATION, LAST_LINES, PULL, Wanted, WantedHealth, WantedImage, limit};
use crate::foreign::record::Record;
use crate::foreign::{ARRIVAL_LABEL, Keeps, SHORT, instructions, is_id};
use crate::image::{PackError, Packed};
use crate::resolver;

/// Volumes that dockerd names.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    #[serde(default)]
    volumes: Option<Vec<NamedVolume>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NamedVolume {
    name: String,
}

/// A health check as dockerd takes it, with times in nanoseconds; what is 0 is as the image has it.
fn health_check(of: &WantedHealth) -> Value {
    let test = match (of.none, of.command.as_str()) {
        (true, _) => json!(["NONE"]),
        (_, "") => Value::Null,
        (_, command) => json!(["CMD-SHELL", command]),
    };
    let time =
        |time: Option<Duration>| u64::try_from(time.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX);
    json!({
        "Test": test,
        "Interval": time(of.interval),
        "Timeout": time(of.timeout),
        "StartPeriod": time(of.start_period),
        "Retries": of.retries.unwrap_or(0),
    })
}

/// What dockerd is asked to create. What is not named is as dockerd has it.
fn document(wanted: &Wanted, name_server: Option<Ipv4Addr>, token: &str) -> Value {
    let list = |list: &[String]| if list.is_empty() { Value::Null } else { json!(list) };
    let labels = wanted.labels.iter().map(|label| label.split_once('=').unwrap_or((label, "")));
    let mut labels: BTreeMap<_, _> = labels.collect();
    labels.insert(ARRIVAL_LABEL, token);
    let mut security = Vec::new();
    if !wanted.seccomp.is_empty() {
        security.push(format!("seccomp={}", wanted.seccomp));
    }
    if wanted.no_new_privileges {
        security.push("no-new-privileges".to_owned());
    }
    let ulimits = wanted
        .ulimits
        .iter()
        .map(|of| json!({ "Name": of.name, "Soft": limit(of.soft), "Hard": limit(of.hard) }));
    let mounts = wanted.volumes.iter().map(|volume| {
        json!({
            "Type": "volume",
            "Source": volume.name,
            "Target": volume.target,
            "ReadOnly": volume.read_only,
            // Of one that is made for it alone.
            "VolumeOptions": { "Labels": { ARRIVAL_LABEL: token } },
        })
    });
    let binds = wanted.binds.iter().map(|bind| {
        json!({
            "Type": "bind",
            "Source": bind.source,
            "Target": bind.target,
            "ReadOnly": bind.read_only,
        })
    });
    let tmpfs: BTreeMap<_, _> =
        wanted.tmpfs.iter().map(|tmpfs| (tmpfs.target.as_str(), tmpfs.options())).collect();
    let (policy, most) = restart_policy(wanted.restart);
    // Without words: none, and not the image's.
    let entrypoint = wanted.entrypoint.as_ref().map(|words| match words.is_empty() {
        true => vec![String::new()],
        false => words.clone(),
    });
    json!({
        "Image": wanted.image,
        "Hostname": wanted.hostname,
        "User": wanted.user,
        "WorkingDir": wanted.workdir,
        "Env": list(&wanted.env),
        "Cmd": list(&wanted.command),
        "Entrypoint": entrypoint,
        "Labels": labels,
        "Healthcheck": wanted.health.as_ref().map(health_check),
        "HostConfig": {
            "NetworkMode": "none",
            "Dns": name_server.map(|server| [server]),
            "DnsOptions": name_server.map(|_| resolver::OPTIONS),
            "Runtime": RUNTIME,
            "RestartPolicy": { "Name": policy, "MaximumRetryCount": most },
            "Memory": limit(wanted.memory_bytes),
            "NanoCpus": i64::from(wanted.cpu_millis) * 1_000_000,
            "PidsLimit": wanted.pids_limit.map(|most| if most == 0 { -1 } else { limit(most) }),
            "CapAdd": list(&wanted.cap_add),
            "CapDrop": list(&wanted.cap_drop),
            "SecurityOpt": list(&security),
            "ReadonlyRootfs": wanted.read_only,
            "Ulimits": ulimits.collect::<Vec<_>>(),
            "Mounts": mounts.chain(binds).collect::<Vec<_>>(),
            "Tmpfs": tmpfs,
        },
    })
}

impl Docker {
    /// Has an image here; what Docker knows it by.
    pub(super) async fn obtain_image(
        &self,
        name: &ServiceName,
        image: &WantedImage,
    ) -> Result<String, EngineError> {
        match image {
            WantedImage::Archive(path) => self.load_archive(name, path).await,
            WantedImage::Named(image) => {
                if self.image(name, image).await?.is_none() {
                    self.pull(name, image).await?;
                }
                Ok(image.clone())
            }
        }
    }

    /// Has the docker command pull an image: it knows its user's credentials, and dockerd does not.
    async fn pull(&self, name: &ServiceName, image: &str) -> Result<(), EngineError> {
        let mut command = self.command(&["pull", "--quiet", "--", image]);
        self.answer(name, "pull the image of", &mut command, PULL).await.map(drop)
    }

    /// A call of the docker command.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.config.docker);
        command.arg("--host").arg(format!("unix://{}", self.api.socket().display())).args(words);
        command.stdin(std::process::Stdio::null()).kill_on_drop(true);
        command
    }

    /// What it says, on both of its outputs.
    async fn answer(
        &self,
        name: &ServiceName,
        action: &'static str,
        command: &mut Command,
        limit: std::time::Duration,
    ) -> Result<String, EngineError> {
        let failed = |reason: String| self.care.failed(name, action, reason);
        let program = self.config.docker.display();
        let output = match tokio::time::timeout(limit, command.output()).await {
            Ok(output) => output.map_err(|error| {
                failed(format!("cannot run {program}: {error}; install Docker's command on this node"))
            })?,
            Err(_) => return Err(failed(ApiError::Silent(limit).to_string())),
        };
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        Err(failed(lines().next_back().unwrap_or("it gave no reason").to_owned()))
    }

    async fn load_archive(&self, name: &ServiceName, path: &Path) -> Result<String, EngineError> {
        let broken = |reason: String| self.care.failed(name, "load the image of", reason);
        let from = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || Packed::open(&from)).await;
        let packed = opened.map_err(|error| broken(error.to_string()))?;
        let packed = packed.map_err(|error| broken(error.to_string()))?;
        let info = self.info(name).await?;
        let id = match info.image_store() {
            ImageStore::Docker => packed.id().to_string(),
            ImageStore::Containerd => packed.digest().to_string(),
        };
        if self.image(name, &id).await?.is_some() {
            return Ok(id);
        }
        packed.fits(&info.docker_root_dir).map_err(|error| broken(error.to_string()))?;
        let (to, pieces) = mpsc::channel(PIECES);
        let packing = tokio::task::spawn_blocking(move || packed.write(Pieces::new(to)));
        let said = self.api.send("/images/load?quiet=1", pieces, PULL).await;
        let packed = packing.await.map_err(|error| broken(error.to_string()))?;
        if let Err(error @ PackError::Image(_)) = packed {
            return Err(broken(error.to_string()));
        }
        let said = said.map_err(self.failed(name, "load the image of"))?;
        if let Some(error) = told_error(&said) {
            return Err(broken(error.to_string()));
        }
        match self.image(name, &id).await?.is_some() {
            true => Ok(id),
            false => {
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                Err(broken(format!("it does not have the image {id} afterwards; it says {said:?}")))
            }
        }
    }

    /// Makes a container and the volumes that are not there; its ID.
    pub(super) async fn make_new(
        &self,
        config: &ContainerConfig,
        wanted: &Wanted,
        token: &str,
    ) -> Result<String, EngineError> {
        let failed = self.failed(&config.name, "create");
        let info = self.info(&config.name).await?;
        if let Some((wrong, mend)) = info.runtime_objection(&self.config.runtime, &self.care.run) {
            return Err(failed(ApiError::Broken(format!("{wrong}; {mend}"))));
        }
        let alone = Arc::clone(&self.creating).lock_owned().await;
        let (api, path) = (self.api.clone(), format!("/containers/create?name={}", config.name));
        let document = document(wanted, config.name_server, token);
        // Whoever waits for it: what it has made is known then.
        let creating = tokio::spawn(async move {
            let _alone = alone;
            api.post(&path, Some(&document), CREATION).await
        });
        let created = creating.await.unwrap_or_else(|error| Err(ApiError::Broken(error.to_string())));
        let Named { id } =
            serde_json::from_slice(&created.map_err(&failed)?).map_err(|error| failed(error.into()))?;
        if !is_id(&id) {
            return Err(failed(ApiError::Broken(format!("its ID is {id:?}"))));
        }
        self.instruct_starts(config, &id)?;
        Ok(id)
    }

    /// Has godwit-runtime put a container into godwit's network namespace whenever it starts.
    pub(super) fn instruct_starts(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let place = self.care.place(id);
        let task = json!({ "create": { "network_namespace": config.network_namespace } });
        let programs = (self.config.runc.as_path(), self.path_variable.as_os_str());
        instructions::instruct_further(&place, programs, id, &task).map_err(|source| {
            io_error(&config.name, format!("prepare Docker's starts in {}", place.display()), source)
        })
    }

    /// Removes what was made for a container that has not become a service.
    pub(super) async fn undo_creation(
        &self,
        config: &ContainerConfig,
        record: &Record,
    ) -> Result<(), EngineError> {
        // One that is being created is known then.
        drop(self.creating.lock().await);
        let label = format!("{ARRIVAL_LABEL}={}", record.token);
        let failed = self.failed(&config.name, "look for");
        let found: Vec<Named> =
            self.api.get(&filtered("/containers/json?all=1&", "label", &label)).await.map_err(&failed)?;
        for Named { id } in found.into_iter().filter(|found| is_id(&found.id)) {
            self.remove_container(config, &id, true).await?;
            let place = self.care.place(&id);
            match std::fs::remove_dir_all(&place) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(io_error(&config.name, format!("remove {}", place.display()), error));
                }
                _ => {}
            }
        }
        let volumes: Listed = self.api.get(&filtered("/volumes?", "label", &label)).await.map_err(&failed)?;
        for volume in volumes.volumes.into_iter().flatten() {
            self.remove_volume(config, &volume.name).await?;
        }
        Ok(())
    }

    /// The end of its log.
    pub(super) async fn end_of_log(&self, config: &ContainerConfig, id: &str) -> Result<String, EngineError> {
        let mut command = self.command(&["logs", "--tail", LAST_LINES, id]);
        self.answer(&config.name, "read the log of", &mut command, SHORT).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confinement::Ulimit;
    use crate::foreign::making::{WantedBind, WantedRestart, WantedTmpfs, WantedVolume};

    #[test]
    fn what_is_not_said_is_dockers() {
        let wanted = Wanted { image: "i".into(), hostname: "h".into(), ..Wanted::default() };
        let made = document(&wanted, None, "t");
        for setting in ["Env", "Cmd", "Entrypoint", "Healthcheck"] {
            assert_eq!(made[setting], Value::Null, "{setting}");
        }
        let host = &made["HostConfig"];
        for setting in ["Dns", "DnsOptions", "CapAdd", "CapDrop", "SecurityOpt", "PidsLimit"] {
            assert_eq!(host[setting], Value::Null, "{setting}");
        }
        assert_eq!((&host["NetworkMode"], &host["Runtime"]), (&json!("none"), &json!(RUNTIME)));
        assert_eq!(made["Labels"], json!({ ARRIVAL_LABEL: "t" }));
    }

    #[test]
    fn a_health_check_has_dockers_names_and_units() {
        let made = |health| document(&Wanted { health: Some(health), ..Wanted::default() }, None, "t");
        let check = WantedHealth {
            command: "redis-cli ping".into(),
            interval: Some(Duration::from_millis(250)),
            retries: Some(2),
            ..WantedHealth::default()
        };
        let told = &made(check)["Healthcheck"];
        assert_eq!(told["Test"], json!(["CMD-SHELL", "redis-cli ping"]));
        assert_eq!((&told["Interval"], &told["Retries"]), (&json!(250_000_000), &json!(2)));
        assert_eq!((&told["Timeout"], &told["StartPeriod"]), (&json!(0), &json!(0)));
        assert_eq!(made(WantedHealth::default())["Healthcheck"]["Test"], Value::Null);
        let none = WantedHealth { none: true, ..WantedHealth::default() };
        assert_eq!(made(none)["Healthcheck"]["Test"], json!(["NONE"]));
    }

    #[test]
    fn what_is_said_has_a_setting_of_dockers() {
        let wanted = Wanted {
            image: "i".into(),
            entrypoint: Some(Vec::new()),
            labels: vec!["tier=x=y".into(), "godwit.arrival=mine".into()],
            memory_bytes: 64,
            cpu_millis: 1050,
            pids_limit: Some(0),
            seccomp: "{}".into(),
            no_new_privileges: true,
            ulimits: vec![Ulimit { name: "core".into(), soft: 0, hard: u64::MAX }],
            restart: WantedRestart::Always,
            volumes: vec![WantedVolume { name: "v".into(), target: "/v".into(), read_only: true }],
            binds: vec![WantedBind { source: "/s".into(), target: "/b".into(), read_only: false }],
            tmpfs: vec![WantedTmpfs { target: "/t".into(), size_bytes: 0, read_only: true }],
            ..Wanted::default()
        };
        let made = document(&wanted, Some(Ipv4Addr::new(10, 88, 0, 1)), "t");
        assert_eq!(made["HostConfig"]["Dns"], json!(["10.88.0.1"]));
        assert_eq!(made["Entrypoint"], json!([""]));
        assert_eq!(made["Labels"], json!({ "tier": "x=y", ARRIVAL_LABEL: "t" }));
        let host = &made["HostConfig"];
        assert_eq!(host["NanoCpus"], 1_050_000_000);
        assert_eq!((&host["PidsLimit"], &host["Memory"]), (&json!(-1), &json!(64)));
        assert_eq!(host["SecurityOpt"], json!(["seccomp={}", "no-new-privileges"]));
        assert_eq!(host["Ulimits"], json!([{ "Name": "core", "Soft": 0, "Hard": -1 }]));
        assert_eq!(host["RestartPolicy"]["Name"], "unless-stopped");
        assert_eq!((&host["Mounts"][0]["Source"], &host["Tmpfs"]["/t"]), (&json!("v"), &json!("ro")));
        let bind = json!({ "Type": "bind", "Source": "/s", "Target": "/b", "ReadOnly": false });
        assert_eq!(host["Mounts"][1], bind);
    }
}
