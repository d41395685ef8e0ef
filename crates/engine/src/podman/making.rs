//! Podman makes a container for godwit: `podman create`, in the network namespace that godwit has for it.
//!
//! Podman has containers in namespaces that others have made, and starts them there again: a container that has come from
//! another node is in one of godwit's, too. So its program has its network from the first instruction of each of its lives.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use godwit_names::ServiceName;
use tokio::sync::mpsc;

use super::Podman;
use super::command::{Call, failed, said};
use crate::container::{ContainerConfig, EngineError, io_error};
use crate::foreign::archive::{PIECES, Pieces};
use crate::foreign::environment::Environment;
use crate::foreign::making::{
    CREATION, LAST_LINES, PULL, Wanted, WantedHealth, WantedImage, WantedRestart, limit,
};
use crate::foreign::record::Record;
use crate::foreign::{ARRIVAL_LABEL, Keeps, LONG, SHORT, is_id};
use crate::image::{PackError, Packed};
use crate::processes::process;
use crate::resolver;

/// How often to look whether a call has ended that is not waited for.
const LOOK: std::time::Duration = std::time::Duration::from_millis(20);

/// What `podman create` reads beside its words.
struct Beside {
    /// A profile of system calls.
    profile: PathBuf,
    /// What of the environment is in a file; nothing where nothing is.
    env: Option<PathBuf>,
}

impl Beside {
    /// In a directory of root's alone.
    fn write(place: &Path, wanted: &Wanted, environment: &Environment) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(place)?;
        let write = |name: &str, text: &str| {
            let path = place.join(name);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(text.as_bytes())?;
            Ok::<_, io::Error>(path)
        };
        let env = match environment.file.as_str() {
            "" => None,
            text => Some(write("env", text)?),
        };
        Ok(Self { profile: write("seccomp.json", &wanted.seccomp)?, env })
    }
}

/// The words of a health check.
fn health_words(of: &WantedHealth) -> Vec<String> {
    if of.none {
        return vec!["--no-healthcheck".to_owned()];
    }
    let mut words = Vec::new();
    if !of.command.is_empty() {
        // Podman takes a line of one word, or one that begins with CMD or NONE, for something else.
        let test = serde_json::json!(["CMD-SHELL", of.command]).to_string();
        words.extend(["--health-cmd".to_owned(), test]);
    }
    for (option, time) in [
        ("--health-interval", of.interval),
        ("--health-timeout", of.timeout),
        ("--health-start-period", of.start_period),
    ] {
        words
            .extend(time.into_iter().flat_map(|time| [option.to_owned(), format!("{}ms", time.as_millis())]));
    }
    words.extend(of.retries.into_iter().flat_map(|most| ["--health-retries".to_owned(), most.to_string()]));
    words
}

/// The words of `podman create`, in which no value of the environment is: whoever lists processes would see it.
fn words(
    wanted: &Wanted,
    (name, namespace, token): (&str, &Path, &str),
    name_server: Option<Ipv4Addr>,
    environment: &Environment,
    beside: &Beside,
) -> Vec<String> {
    let mut words: Vec<String> = ["container", "create", "--pull", "never"].map(str::to_owned).to_vec();
    let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
    add("--name", name.to_owned());
    add("--network", format!("ns:{}", namespace.display()));
    if let Some(server) = name_server {
        add("--dns", server.to_string());
        for option in resolver::OPTIONS {
            add("--dns-option", option.into());
        }
    }
    add("--hostname", wanted.hostname.clone());
    for label in &wanted.labels {
        add("--label", label.clone());
    }
    // The last of a name counts.
    add("--label", format!("{ARRIVAL_LABEL}={token}"));
    if let Some(file) = &beside.env {
        add("--env-file", file.to_string_lossy().into_owned());
    }
    for (name, _) in &environment.passed {
        add("--env", name.clone());
    }
    if let Some(words) = &wanted.entrypoint {
        add("--entrypoint", serde_json::json!(words).to_string());
    }
    if !wanted.user.is_empty() {
        add("--user", wanted.user.clone());
    }
    if !wanted.workdir.is_empty() {
        add("--workdir", wanted.workdir.clone());
    }
    if wanted.memory_bytes > 0 {
        add("--memory", format!("{}b", wanted.memory_bytes));
    }
    if wanted.cpu_millis > 0 {
        add("--cpus", format!("{}.{:03}", wanted.cpu_millis / 1000, wanted.cpu_millis % 1000));
    }
    if let Some(most) = wanted.pids_limit {
        let most = if most == 0 { -1 } else { limit(most) };
        add("--pids-limit", most.to_string());
    }
    for capability in &wanted.cap_add {
        add("--cap-add", capability.clone());
    }
    for capability in &wanted.cap_drop {
        add("--cap-drop", capability.clone());
    }
    match wanted.seccomp.as_str() {
        "" => {}
        "unconfined" => add("--security-opt", "seccomp=unconfined".into()),
        _ => add("--security-opt", format!("seccomp={}", beside.profile.display())),
    }
    if wanted.no_new_privileges {
        add("--security-opt", "no-new-privileges".into());
    }
    for of in &wanted.ulimits {
        add("--ulimit", format!("{}={}:{}", of.name, limit(of.soft), limit(of.hard)));
    }
    match wanted.restart {
        WantedRestart::No => {}
        WantedRestart::OnFailure(0) => add("--restart", "on-failure".into()),
        WantedRestart::OnFailure(most) => add("--restart", format!("on-failure:{most}")),
        WantedRestart::Always => add("--restart", "always".into()),
    }
    for volume in &wanted.volumes {
        let mode = if volume.read_only { ":ro" } else { "" };
        add("--volume", format!("{}:{}{mode}", volume.name, volume.target));
    }
    for bind in &wanted.binds {
        let mode = if bind.read_only { ":ro" } else { "" };
        add("--volume", format!("{}:{}{mode}", bind.source, bind.target));
    }
    for tmpfs in &wanted.tmpfs {
        add("--tmpfs", format!("{}:{}", tmpfs.target, tmpfs.options()));
    }
    if wanted.read_only {
        // Podman's own would put a tmpfs on some directories.
        words.extend(["--read-only".to_owned(), "--read-only-tmpfs=false".to_owned()]);
    }
    words.extend(wanted.health.iter().flat_map(health_words));
    words.extend(["--".to_owned(), wanted.image.clone()]);
    words.extend(wanted.command.iter().cloned());
    words
}

/// The lines of an answer that lists IDs or names.
fn lines(output: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(output);
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

impl Podman {
    /// Has an image here; what Podman knows it by.
    pub(super) async fn obtain_image(
        &self,
        name: &ServiceName,
        image: &WantedImage,
    ) -> Result<String, EngineError> {
        match image {
            WantedImage::Archive(path) => self.load_archive(name, path).await,
            WantedImage::Named(image) => {
                if !self.knows_image(name, image).await? {
                    let words = ["pull", "--quiet", "--", image].map(OsStr::new).to_vec();
                    let call = Call { name, action: "pull the image of", words, settings: None };
                    self.call(&call, PULL).await?;
                }
                Ok(image.clone())
            }
        }
    }

    async fn knows_image(&self, name: &ServiceName, image: &str) -> Result<bool, EngineError> {
        let words = ["image", "exists", "--", image].map(OsStr::new).to_vec();
        let call = Call { name, action: "find the image of", words, settings: None };
        self.exists(&call).await
    }

    async fn load_archive(&self, name: &ServiceName, path: &Path) -> Result<String, EngineError> {
        let words = ["load", "--quiet"].map(OsStr::new).to_vec();
        let call = Call { name, action: "load the image of", words, settings: None };
        let broken = |error: &dyn std::fmt::Display| failed(&call, error.to_string());
        let from = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || Packed::open(&from)).await;
        let packed = opened.map_err(|error| broken(&error))?.map_err(|error| broken(&error))?;
        let id = packed.id().hex().to_owned();
        if self.has_image(name, &id).await? {
            return Ok(id);
        }
        packed.fits(&self.storage(name).await?.root).map_err(|error| broken(&error))?;
        let (to, mut pieces) = mpsc::channel(PIECES);
        let packing = tokio::task::spawn_blocking(move || {
            // All that is sent was sent when it returns.
            packed.write(Pieces::new(to))
        });
        let (fed, output) = self.feed(&call, &mut pieces).await?;
        drop(pieces);
        let packed = packing.await.map_err(|error| broken(&error))?;
        if let Err(error @ PackError::Image(_)) = packed {
            return Err(broken(&error));
        }
        let output = output.map_err(|error| broken(&error))?;
        if !output.status.success() {
            return Err(failed(&call, said(&output.stderr)));
        }
        fed.map_err(|error| broken(&error))?;
        packed.map_err(|error| broken(&error))?;
        match self.has_image(name, &id).await? {
            true => Ok(id),
            false => Err(failed(&call, format!("it does not have the image {id} afterwards"))),
        }
    }

    /// Makes a container and the volumes that are not there; its ID.
    pub(super) async fn create(
        &self,
        config: &ContainerConfig,
        wanted: &Wanted,
        token: &str,
    ) -> Result<String, EngineError> {
        let environment = Environment::of(&wanted.env)
            .map_err(|objection| self.care.failed(&config.name, "create", objection))?;
        for volume in &wanted.volumes {
            if !self.has_volume(&config.name, &volume.name).await? {
                let label = format!("{ARRIVAL_LABEL}={token}");
                let words = ["volume", "create", "--label", &label, "--", &volume.name].map(OsStr::new);
                let words = words.to_vec();
                let call = Call { name: &config.name, action: "make a volume of", words, settings: None };
                self.call(&call, SHORT).await?;
            }
        }
        let place = self.care.place(token);
        let beside = Beside::write(&place, wanted, &environment).map_err(|source| {
            io_error(&config.name, format!("write what Podman is to read in {}", place.display()), source)
        })?;
        let named = (config.name.as_str(), config.network_namespace.as_path(), token);
        let words = words(wanted, named, config.name_server, &environment, &beside);
        let created = self.create_by(config, &words, &environment).await;
        self.forget(config, token)?;
        created
    }

    /// Removes what `podman create` was given beside its words, with the secrets that are in it.
    fn forget(&self, config: &ContainerConfig, token: &str) -> Result<(), EngineError> {
        if !is_id(token) {
            return Ok(());
        }
        let place = self.care.place(token);
        match fs::remove_dir_all(&place) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(io_error(&config.name, format!("remove {}", place.display()), error))
            }
            _ => Ok(()),
        }
    }

    async fn create_by(
        &self,
        config: &ContainerConfig,
        words: &[String],
        environment: &Environment,
    ) -> Result<String, EngineError> {
        let words = words.iter().map(OsStr::new).collect();
        let call = Call { name: &config.name, action: "create", words, settings: None };
        let mut command = self.command(&call);
        let passed = environment.passed.iter().map(|(name, value)| (name, value));
        command.envs(passed);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| self.not_started(&call, &error))?;
        if let Some(making) = child.id().and_then(|pid| Some((pid, process::start_time(pid)?))) {
            Record::change(config, |record| record.import = Some(making))?;
        }
        let output = match tokio::time::timeout(CREATION, child.wait_with_output()).await {
            Ok(output) => output.map_err(|error| failed(&call, error.to_string()))?,
            Err(_) => {
                return Err(failed(&call, format!("it has not answered for {} s", CREATION.as_secs())));
            }
        };
        if !output.status.success() {
            return Err(failed(&call, said(&output.stderr)));
        }
        let told = lines(&output.stdout);
        match told.last() {
            Some(id) if is_id(id) => Ok(id.clone()),
            _ => Err(failed(&call, format!("its answer is not understood: {told:?}"))),
        }
    }

    /// Removes what was made for a container that has not become a service.
    pub(super) async fn undo_creation(
        &self,
        config: &ContainerConfig,
        record: &Record,
    ) -> Result<(), EngineError> {
        // First: whatever else cannot be undone, its secrets are not left.
        self.forget(config, &record.token)?;
        if let Some((pid, start)) = record.import {
            let begin = Instant::now();
            while process::lives(pid, start) {
                if begin.elapsed() > LONG {
                    let late = ErrorKind::TimedOut.into();
                    return Err(io_error(&config.name, "wait for the end of its creation".into(), late));
                }
                tokio::time::sleep(LOOK).await;
            }
        }
        let label = format!("label={ARRIVAL_LABEL}={}", record.token);
        let list = |words: Vec<&'static str>| {
            let label = label.clone();
            async move {
                let words = words.into_iter().chain(["--filter", &label]).map(OsStr::new).collect();
                let call = Call { name: &config.name, action: "look for", words, settings: None };
                Ok::<_, EngineError>(lines(&self.call(&call, SHORT).await?.stdout))
            }
        };
        for id in list(vec!["ps", "--all", "--quiet", "--no-trunc"]).await?.iter().filter(|id| is_id(id)) {
            let words = ["container", "rm", "--force", "--volumes", "--time", "0", "--ignore", "--"];
            self.about((config, id), "remove", &words, LONG).await?;
        }
        for volume in list(vec!["volume", "ls", "--quiet"]).await? {
            self.remove_volume(config, &volume).await?;
        }
        Ok(())
    }

    /// The end of its log.
    pub(super) async fn end_of_log(&self, config: &ContainerConfig, id: &str) -> Result<String, EngineError> {
        let output =
            self.about((config, id), "read the log of", &["logs", "--tail", LAST_LINES, "--"], SHORT).await?;
        let text = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::confinement::Ulimit;
    use crate::foreign::making::{WantedBind, WantedTmpfs, WantedVolume};
    use crate::podman::PodmanConfig;

    fn said(wanted: &Wanted) -> String {
        let beside = Beside { profile: "/p".into(), env: None };
        let environment = Environment::of(&wanted.env).unwrap();
        words(wanted, ("web", Path::new("/n"), "t"), None, &environment, &beside).join(" ")
    }

    #[test]
    fn what_is_not_said_is_podmans() {
        let wanted = Wanted { image: "i".into(), hostname: "h".into(), ..Wanted::default() };
        assert_eq!(
            said(&wanted),
            "container create --pull never --name web --network ns:/n --hostname h --label godwit.arrival=t -- i"
        );
    }

    #[test]
    fn what_is_said_has_a_word_of_podmans() {
        let wanted = Wanted {
            image: "i".into(),
            command: vec!["sleep".into(), "--x".into()],
            entrypoint: Some(Vec::new()),
            env: vec!["A=b\nc".into()],
            user: "1:2".into(),
            workdir: "/w".into(),
            labels: vec!["godwit.arrival=mine".into()],
            memory_bytes: 64,
            cpu_millis: 1050,
            pids_limit: Some(0),
            cap_add: vec!["NET_ADMIN".into()],
            cap_drop: vec!["ALL".into()],
            seccomp: "{}".into(),
            no_new_privileges: true,
            read_only: true,
            ulimits: vec![Ulimit { name: "core".into(), soft: 0, hard: u64::MAX }],
            restart: WantedRestart::OnFailure(3),
            volumes: vec![WantedVolume { name: "v".into(), target: "/v".into(), read_only: true }],
            binds: vec![WantedBind { source: "/s".into(), target: "/b".into(), read_only: true }],
            tmpfs: vec![WantedTmpfs { target: "/t".into(), size_bytes: 4096, read_only: false }],
            ..Wanted::default()
        };
        let said = said(&wanted);
        for words in [
            "--label godwit.arrival=mine --label godwit.arrival=t ",
            "--env A --entrypoint",
            "--entrypoint [] ",
            "--user 1:2 --workdir /w --memory 64b --cpus 1.050 --pids-limit -1 ",
            "--cap-add NET_ADMIN --cap-drop ALL ",
            "--security-opt seccomp=/p --security-opt no-new-privileges ",
            "--ulimit core=0:-1 --restart on-failure:3 ",
            "--volume v:/v:ro --volume /s:/b:ro --tmpfs /t:rw,size=4096 --read-only --read-only-tmpfs=false -- i sleep --x",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }

    #[test]
    fn a_health_check_is_in_podmans_words() {
        let check = WantedHealth {
            command: "none \"x\"".into(),
            interval: Some(Duration::from_secs(2)),
            timeout: Some(Duration::from_millis(1500)),
            start_period: Some(Duration::ZERO),
            retries: Some(4),
            ..WantedHealth::default()
        };
        assert_eq!(
            said(&Wanted { health: Some(check), ..Wanted::default() }).split_once("--health-cmd ").unwrap().1,
            r#"["CMD-SHELL","none \"x\""] --health-interval 2000ms --health-timeout 1500ms --health-start-period 0ms --health-retries 4 -- "#
        );
        let none = WantedHealth { none: true, ..WantedHealth::default() };
        assert!(said(&Wanted { health: Some(none), ..Wanted::default() }).contains(" --no-healthcheck -- "));
    }

    #[test]
    fn an_environment_is_in_a_file_of_roots_and_no_value_of_it_in_words() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let env = ["SECRET= \"a b\" #", "B=", "KEY=begin\nend"].map(str::to_owned).to_vec();
        let wanted = Wanted { env, ..Wanted::default() };
        let environment = Environment::of(&wanted.env).unwrap();
        let beside = Beside::write(&directory.path().join("p"), &wanted, &environment).unwrap();
        let words = words(
            &wanted,
            ("web", Path::new("/n"), "t"),
            Some(Ipv4Addr::new(10, 88, 0, 1)),
            &environment,
            &beside,
        )
        .join(" ");
        let file = beside.env.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "SECRET= \"a b\" #\nB=\n");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(words.contains(&format!("--env-file {} --env KEY ", file.display())), "{words}");
        assert!(!words.contains("SECRET") && !words.contains("begin"), "{words}");
    }

    #[tokio::test]
    async fn secrets_are_gone_even_where_podman_does_nothing_any_more() {
        let directory = tempfile::tempdir().unwrap();
        let podman = Podman::new(PodmanConfig {
            podman: "/bin/false".into(),
            runtime: PathBuf::new(),
            runc: PathBuf::new(),
            criu: PathBuf::new(),
            programs: None,
            run: directory.path().into(),
            cgroup_parent: String::new(),
        });
        let config = ContainerConfig {
            name: "web".parse().unwrap(),
            directory: directory.path().into(),
            rootfs: PathBuf::new(),
            network_namespace: PathBuf::new(),
            cgroup: String::new(),
            command: Vec::new(),
            env: Vec::new(),
            mounts: Vec::new(),
            bound: Vec::new(),
            may_have: Vec::new(),
            memory_bytes: 0,
            cpu_millis: 0,
            hostname: String::new(),
            user: crate::confinement::User::default(),
            workdir: PathBuf::new(),
            confinement: crate::confinement::Confinement::default(),
            crosses: false,
            kept: None,
            name_server: None,
        };
        let wanted = Wanted { env: vec!["SECRET=x".into()], ..Wanted::default() };
        let token = "0a".repeat(32);
        let place = podman.care.place(&token);
        Beside::write(&place, &wanted, &Environment::of(&wanted.env).unwrap()).unwrap();
        assert!(place.join("env").exists());
        let record = Record { token, making: true, ..Record::default() };
        podman.undo_creation(&config, &record).await.unwrap_err();
        assert!(!place.exists());
        // What has no token has no place, and not the one of all.
        podman.undo_creation(&config, &Record::default()).await.unwrap_err();
        assert!(directory.path().exists());
    }
}
