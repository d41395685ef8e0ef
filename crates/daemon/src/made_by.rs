//! `godwit run --engine podman|docker`: a service whose container the user's engine makes and keeps, and that is in godwit's
//! care before it runs.
//!
//! ```text
//! name, address, ports are reserved ─▶ image ─▶ network, open ─▶ the engine makes the container, and starts it in that ─▶ service
//! ```
//! From then on it is like one that was adopted ([`crate::adopt`]). The engine has no network for it: godwit's is there, and
//! open, before the program's first instruction. Whatever fails, nothing is left but the image, as after a pull.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1::{self as api, AdoptRequest, HealthCheck, Mount, RunRequest, run_request::Source};
use godwit_engine::foreign::making::{
    Wanted, WantedBind, WantedHealth, WantedImage, WantedRestart, WantedTmpfs, WantedVolume,
};
use godwit_engine::{EngineError, Keeper};
use godwit_migration::{Restart, Service, error_chain, failpoint};
use tonic::Status;

use crate::adopt::{as_found, describe, refused, say_of_mounts};
use crate::convert;
use crate::network::joined::join;
use crate::network::names;
use crate::node::Node;
use crate::services::{begun, owned, reserve, show};
use crate::status::internal;

/// Longest name of an image, bytes; registries allow 255 for a repository, and 128 for a tag.
const LONGEST_NAME: usize = 1024;

/// Longest command of a health check, bytes: an argument of a program has 128 KiB at most.
const LONGEST_CHECK: usize = 32 << 10;
/// Times of a health check, milliseconds: the shortest interval that Podman keeps, and a day.
const CHECK_TIMES: RangeInclusive<u64> = 100..=LONGEST_TIME;
const LONGEST_TIME: u64 = 24 * 3600 * 1000;
/// Failures in a row.
const CHECK_RETRIES: RangeInclusive<u64> = 1..=1000;

/// The engine that a request names; nothing for godwit's own.
pub(crate) fn keeper(request: &RunRequest) -> Result<Option<Keeper>, Status> {
    match request.engine.as_str() {
        "" | "runc" => Ok(None),
        other => Keeper::named(other).map(Some).ok_or_else(|| {
            Status::invalid_argument(format!("{other:?} is not an engine; give podman, docker or runc"))
        }),
    }
}

/// Has an engine make and start a container, as a service.
pub(crate) async fn run(
    node: &Arc<Node>,
    keeper: Keeper,
    mut request: RunRequest,
) -> Result<api::Service, Status> {
    let name = convert::service_name(&request.name)?;
    let image = image(keeper, &request)?;
    let mut wanted = wanted(keeper, &request)?;
    let said = binds_allowed(node, &request)?;
    let ports = convert::ports(&request.publish)?;
    // Its volumes are the engine's.
    request.mounts.clear();
    let (_, addresses, _occupied) = reserve(node, &name, &request, ports).await?;
    let of_service = AdoptRequest {
        publish: request.publish.clone(),
        labels: request.labels.clone(),
        hooks: request.hooks.clone(),
        aliases: request.aliases.clone(),
        mounts: said,
        ..AdoptRequest::default()
    };
    let maker = node.engines().makes(keeper);
    let promised = maker.promised(&name).map_err(internal)?;
    let service = Service { kept: Some(promised), ..describe(node, name, &of_service, &addresses)? };
    wanted.image = maker.image(&service.name, &image).await.map_err(refused)?;
    let service = match make(node, keeper, service.clone(), (&wanted, &of_service)).await {
        Ok(service) => service,
        Err((service, error)) => {
            if let Err(left) = node.local().clear(&service).await {
                tracing::error!(service = %service.name, error = %error_chain(&left), "cannot remove a service that was half made");
            }
            return Err(error);
        }
    };
    // It runs and is recorded: whatever fails from here on, it is watched, and the next life of godwitd does the rest.
    if let Err(error) = node.engines().adopts(keeper).own(&node.local().config(&service)) {
        tracing::error!(service = %service.name, error = %error_chain(&error), "a service that its engine has made is not settled");
    }
    begun(node, &service, "started", &format!("{} by {}", service.address, keeper.title()));
    show(node, owned(node, &service.name)?).await
}

/// Makes the container, and records the service; what there is of it on failure, too.
async fn make(
    node: &Arc<Node>,
    keeper: Keeper,
    mut service: Service,
    wanted: (&Wanted, &AdoptRequest),
) -> Result<Service, (Service, Status)> {
    match make_steps(node, keeper, &mut service, wanted).await {
        Ok(()) => Ok(service),
        Err(error) => Err((service, error)),
    }
}

async fn make_steps(
    node: &Arc<Node>,
    keeper: Keeper,
    service: &mut Service,
    (wanted, of_service): (&Wanted, &AdoptRequest),
) -> Result<(), Status> {
    let (local, maker) = (node.local(), node.engines().makes(keeper));
    // What an earlier service has left under the name must not mix with it.
    local.make_room(service).await.map_err(internal)?;
    local.begin_making(service).map_err(internal)?;
    local.make_directories(service, None).await.map_err(internal)?;
    // Open before the first instruction, so that a program that connects at once gets through.
    local.network.plug(service).await.map_err(internal)?;
    local.network.open(service).await.map_err(internal)?;
    names::try_out(node, service).await;
    let id = maker.make(&local.config(service), wanted).await.map_err(refused)?;
    if let Some(kept) = &mut service.kept {
        kept.id = id;
    }
    // The directory is that of this container from here on.
    local.make_directories(service, None).await.map_err(internal)?;
    failpoint::point("service.made").await;
    // Nobody else is to adopt it before it is a service.
    let _alone = node.adopting.lock().await;
    let found = maker.begin(&local.config(service)).await.map_err(refused)?;
    let pid = found.pid;
    *service = as_found(service.clone(), found);
    say_of_mounts(service, of_service)?;
    let taken = node.engines().adopts(keeper).take(&local.config(service)).await;
    match taken {
        Ok(state) if state.pid == pid => {}
        Ok(_) | Err(EngineError::NotFound(_)) => {
            return Err(Status::failed_precondition(format!(
                "the command of service {} has ended at once; try it with `{} run`, whose log stays",
                service.name,
                keeper.name()
            )));
        }
        Err(error) => return Err(refused(error)),
    }
    join(node, service, pid).await.map_err(internal)?;
    failpoint::point("service.started").await;
    node.state.put_service(service).map_err(internal)
}

/// The image that is wanted.
fn image(keeper: Keeper, request: &RunRequest) -> Result<WantedImage, Status> {
    let title = keeper.title();
    match &request.source {
        Some(Source::Image(path)) if Path::new(path).is_absolute() => Ok(WantedImage::Archive(path.into())),
        Some(Source::Reference(name)) => {
            let plain =
                |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic()) && !text.starts_with('-');
            if name.is_empty() || name.len() > LONGEST_NAME || !plain(name) {
                return Err(Status::invalid_argument(format!(
                    "{name:?} is not the name of an image, nor an absolute path"
                )));
            }
            Ok(WantedImage::Named(name.clone()))
        }
        Some(Source::Image(path)) => Err(Status::invalid_argument(format!("{path} is not an absolute path"))),
        Some(Source::Rootfs(_)) => Err(Status::invalid_argument(format!(
            "--rootfs is for godwit's own containers: {title} makes one from an image; give --image"
        ))),
        None => Err(Status::invalid_argument(format!(
            "{title} makes a container from an image: give --image, with an archive or the name of one"
        ))),
    }
}

/// The container that is wanted, or all that the engine cannot give it.
fn wanted(keeper: Keeper, request: &RunRequest) -> Result<Wanted, Status> {
    // The same words are right or wrong for every engine.
    convert::confinement(request)?;
    let restart = convert::restart(&request.restart)?;
    if request.remove && restart != Restart::No {
        return Err(convert::removed_or_restarted());
    }
    let (name, title) = (keeper.name(), keeper.title());
    let mut refused = Vec::new();
    if request.remove {
        refused.push(format!(
            "--rm, since {title} would remove it as it leaves for another node, too; `godwit rm` removes it"
        ));
    }
    if request.networks.iter().any(|network| network.starts_with("ns:")) {
        refused.push(
            "--network ns:, since it is in a network namespace of godwit's; give the name of a network"
                .into(),
        );
    }
    let health = request.health.as_ref().map(health).transpose()?;
    if keeper == Keeper::Podman
        && health.as_ref().is_some_and(|health| !health.none && health.command.is_empty())
    {
        refused.push(
            "--health-interval, --health-retries, --health-start-period or --health-timeout without --health-cmd, since it keeps them for a command that comes with them only"
                .into(),
        );
    }
    let (mut volumes, mut binds, mut tmpfs) = (Vec::new(), Vec::new(), Vec::new());
    for mount in &request.mounts {
        match mount.kind.as_str() {
            "volume" => volumes.push(volume(mount)?),
            "tmpfs" => tmpfs.push(in_memory(mount)?),
            "bind" => binds.push(bind(mount)?),
            other => {
                return Err(Status::invalid_argument(format!(
                    "mounts of type {other:?} are not known; use bind, tmpfs or volume"
                )));
            }
        }
    }
    if !refused.is_empty() {
        return Err(Status::invalid_argument(format!(
            "a service in a container of {title}'s (--engine {name}) cannot have {}",
            refused.join("; nor ")
        )));
    }
    // An argument of an engine ends there.
    let entrypoint = request.entrypoint.iter().flat_map(|entrypoint| &entrypoint.words);
    let words = [
        ("an environment variable", request.env.iter().collect::<Vec<_>>()),
        ("a label", request.labels.iter().collect()),
        ("a command", request.command.iter().chain(entrypoint).collect()),
        ("a working directory", vec![&request.workdir]),
        ("a user", vec![&request.user]),
        ("a health check", request.health.iter().map(|health| &health.command).collect()),
    ];
    if let Some((what, _)) = words.iter().find(|(_, words)| words.iter().any(|word| word.contains('\0'))) {
        return Err(Status::invalid_argument(format!("{what} cannot have a NUL byte in it")));
    }
    if let Some(pair) = request.env.iter().find(|pair| !pair.contains('=')) {
        return Err(Status::invalid_argument(format!("{pair:?} is not NAME=VALUE")));
    }
    Ok(Wanted {
        image: String::new(),
        command: request.command.clone(),
        entrypoint: request.entrypoint.clone().map(|entrypoint| entrypoint.words),
        env: request.env.clone(),
        user: request.user.clone(),
        workdir: request.workdir.clone(),
        hostname: convert::hostname(request),
        labels: request.labels.clone(),
        memory_bytes: request.memory_bytes,
        cpu_millis: request.cpu_millis,
        pids_limit: request.pids_limit,
        cap_add: request.cap_add.clone(),
        cap_drop: request.cap_drop.clone(),
        seccomp: request.seccomp.clone(),
        no_new_privileges: request.no_new_privileges,
        read_only: request.read_only,
        ulimits: request
            .ulimits
            .iter()
            .map(|limit| godwit_engine::Ulimit {
                name: limit.name.clone(),
                soft: limit.soft,
                hard: limit.hard,
            })
            .collect(),
        restart: wanted_restart(restart),
        health,
        volumes,
        binds,
        tmpfs,
    })
}

/// A health check for an engine.
fn health(of: &HealthCheck) -> Result<WantedHealth, Status> {
    let within = |flag: &str, value: Option<u64>, range: RangeInclusive<u64>, unit: &str| match value {
        Some(value) if !range.contains(&value) => Err(Status::invalid_argument(format!(
            "{flag} is {value}{unit}: give {}{unit} to {}{unit}",
            range.start(),
            range.end()
        ))),
        value => Ok(value),
    };
    let time =
        |flag, value, range| Ok::<_, Status>(within(flag, value, range, " ms")?.map(Duration::from_millis));
    let wanted = WantedHealth {
        none: of.none,
        command: of.command.clone(),
        interval: time("--health-interval", of.interval_ms, CHECK_TIMES)?,
        timeout: time("--health-timeout", of.timeout_ms, CHECK_TIMES)?,
        start_period: time("--health-start-period", of.start_period_ms, 0..=LONGEST_TIME)?,
        retries: within("--health-retries", of.retries.map(u64::from), CHECK_RETRIES, "")?,
    };
    if wanted.none && wanted != (WantedHealth { none: true, ..WantedHealth::default() }) {
        return Err(Status::invalid_argument("--no-healthcheck leaves nothing to check: give it alone"));
    }
    // Podman is told it as JSON, in which each has six bytes.
    if wanted.command.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t')) {
        return Err(Status::invalid_argument("the command of --health-cmd has control characters"));
    }
    if wanted.command.len() > LONGEST_CHECK {
        return Err(Status::invalid_argument(format!(
            "the command of --health-cmd has {} bytes: give {LONGEST_CHECK} at most, or put it into a script of the image",
            wanted.command.len()
        )));
    }
    Ok(wanted)
}

/// A policy for an engine.
pub(crate) fn wanted_restart(restart: Restart) -> WantedRestart {
    match restart {
        Restart::No => WantedRestart::No,
        Restart::OnFailure(most) => WantedRestart::OnFailure(most),
        Restart::Always => WantedRestart::Always,
    }
}

/// What is mounted is a word of an engine's, in which a colon has a meaning.
fn target(mount: &Mount) -> Result<String, Status> {
    let path = &mount.target;
    let plain = path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."));
    if path.starts_with('/') && plain && !path.contains([':', ',', '\0']) {
        return Ok(path.clone());
    }
    Err(Status::invalid_argument(format!(
        "the target {path:?} of a mount must be an absolute path without '..', ':' and ','"
    )))
}

fn volume(mount: &Mount) -> Result<WantedVolume, Status> {
    let name = convert::volume_name(&mount.source)?.to_string();
    Ok(WantedVolume { name, target: target(mount)?, read_only: mount.read_only })
}

fn bind(mount: &Mount) -> Result<WantedBind, Status> {
    if mount.source.contains([':', '\0']) {
        return Err(Status::invalid_argument(format!(
            "the source {:?} of a mount must be an absolute path without ':'",
            mount.source
        )));
    }
    Ok(WantedBind { source: mount.source.clone(), target: target(mount)?, read_only: mount.read_only })
}

/// What is said of the moves of what it is to have of the node, by target; an error where it cannot have that.
fn binds_allowed(node: &Node, request: &RunRequest) -> Result<HashMap<String, String>, Status> {
    let mut said = HashMap::new();
    for mount in request.mounts.iter().filter(|mount| mount.kind == "bind") {
        let checked = convert::mount(mount)?;
        if let Some((source, _)) = checked.bind()
            && let Some(objection) = node.local().binds.objection(source)
        {
            return Err(Status::invalid_argument(objection));
        }
        if !mount.on_move.is_empty() {
            said.insert(mount.target.clone(), mount.on_move.clone());
        }
    }
    Ok(said)
}

fn in_memory(mount: &Mount) -> Result<WantedTmpfs, Status> {
    Ok(WantedTmpfs { target: target(mount)?, size_bytes: mount.size_bytes, read_only: mount.read_only })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn mount(kind: &str, source: &str, target: &str) -> Mount {
        Mount { kind: kind.into(), source: source.into(), target: target.into(), ..Mount::default() }
    }

    fn refusal(request: &RunRequest) -> String {
        wanted(Keeper::Podman, request).unwrap_err().message().to_owned()
    }

    #[test]
    fn all_that_an_engine_cannot_give_is_named_at_once() {
        let request = RunRequest {
            name: "web".into(),
            remove: true,
            networks: vec!["ns:/run/netns/x".into()],
            ..RunRequest::default()
        };
        let said = refusal(&request);
        for words in ["--engine podman", "--rm", "--network ns:"] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }

    #[test]
    fn what_would_be_another_word_for_the_engine_is_refused() {
        for target in ["data", "/a/../b", "/a:ro", "/a,size=1", "/"] {
            let request = RunRequest { mounts: vec![mount("tmpfs", "", target)], ..RunRequest::default() };
            assert!(refusal(&request).contains("target"), "{target}");
        }
        let bound = mount("bind", "/srv:/etc", "/data");
        let request = RunRequest { mounts: vec![bound], ..RunRequest::default() };
        assert!(refusal(&request).contains("the source"));
        let image = |source: &str| {
            let is_path = source.starts_with('/');
            let source =
                Some(if is_path { Source::Image(source.into()) } else { Source::Reference(source.into()) });
            image(Keeper::Docker, &RunRequest { source, ..RunRequest::default() })
        };
        assert_eq!(image("/x.tar").unwrap(), WantedImage::Archive("/x.tar".into()));
        assert_eq!(image("quay.io/a/b:1").unwrap(), WantedImage::Named("quay.io/a/b:1".into()));
        for name in ["", "--all", "a b", "a\n"] {
            assert!(image(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn what_no_argument_can_have_in_it_is_refused() {
        let nul = || "A=\0".to_owned();
        let plain = RunRequest::default();
        for request in [
            RunRequest { env: vec![nul()], ..plain.clone() },
            RunRequest { labels: vec![nul()], ..plain.clone() },
            RunRequest { command: vec![nul()], ..plain.clone() },
            RunRequest { workdir: nul(), ..plain.clone() },
            RunRequest { user: nul(), ..plain.clone() },
        ] {
            let said = refusal(&request);
            assert!(said.contains("NUL"), "{said}");
        }
    }

    #[test]
    fn a_health_check_is_within_bounds_and_whole() {
        let of = |check: HealthCheck| RunRequest { health: Some(check), ..RunRequest::default() };
        let check = || HealthCheck { command: "true".into(), ..HealthCheck::default() };
        let most = LONGEST_TIME;
        let whole = HealthCheck {
            interval_ms: Some(100),
            timeout_ms: Some(most),
            start_period_ms: Some(0),
            retries: Some(1000),
            ..check()
        };
        let made = wanted(Keeper::Podman, &of(whole)).unwrap().health.unwrap();
        assert_eq!((made.interval, made.retries), (Some(Duration::from_millis(100)), Some(1000)));
        for (flag, check) in [
            ("--health-interval", HealthCheck { interval_ms: Some(99), ..check() }),
            ("--health-timeout", HealthCheck { timeout_ms: Some(most + 1), ..check() }),
            ("--health-start-period", HealthCheck { start_period_ms: Some(u64::MAX), ..check() }),
            ("--health-retries", HealthCheck { retries: Some(0), ..check() }),
            ("--health-cmd", HealthCheck { command: "x".repeat(LONGEST_CHECK + 1), ..check() }),
            ("--no-healthcheck", HealthCheck { none: true, ..check() }),
            ("control characters", HealthCheck { command: "a\0".into(), ..check() }),
            ("without --health-cmd", HealthCheck { retries: Some(2), ..HealthCheck::default() }),
        ] {
            let said = refusal(&of(check));
            assert!(said.contains(flag), "{flag}: {said}");
        }
        // Docker has the rest from the image.
        let rest = HealthCheck { retries: Some(2), ..HealthCheck::default() };
        assert_eq!(wanted(Keeper::Docker, &of(rest)).unwrap().health.unwrap().retries, Some(2));
        assert_eq!(wanted(Keeper::Podman, &RunRequest::default()).unwrap().health, None);
    }

    #[test]
    fn an_engine_is_one_that_there_is() {
        let named = |engine: &str| keeper(&RunRequest { engine: engine.into(), ..RunRequest::default() });
        assert_eq!(named("").unwrap(), None);
        assert_eq!(named("runc").unwrap(), None);
        assert_eq!(named("docker").unwrap(), Some(Keeper::Docker));
        assert!(named("lxc").unwrap_err().message().contains("podman, docker or runc"));
    }
}
