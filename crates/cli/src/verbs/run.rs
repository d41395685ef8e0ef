//! `godwit run`: create and start a service.

mod confinement;
mod health;

use std::{net::Ipv4Addr, process::ExitCode};

use clap::ArgGroup;
use godwit_api::v1::{Mount, PublishedPort, RunRequest, run_request::Source};

use crate::{
    client::Connection,
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output,
    registry::{self, Policy, Reach, Registry},
    values,
};

/// Create and start a service on this node; print its name
///
/// The service runs detached: `godwit logs` shows what it writes.
#[derive(Debug, clap::Args)]
#[command(
    group = ArgGroup::new("source").required(true).multiple(true).args(["rootfs", "image", "command"]),
    override_usage = "godwit run [OPTIONS] IMAGE [COMMAND]...\n       godwit run [OPTIONS] --image IMAGE|--rootfs DIR [--] [COMMAND]...",
    after_long_help = "\
Examples:
  godwit run --name redis --ip 10.88.0.10 redis:7
  godwit run --name cache redis:7 redis-server --save ''
  godwit run --name web --rootfs ./web -m 256m --cpus 1.5 -p 8080:80 -- nginx -g 'daemon off;'
  godwit run --name api --network front --network back:ip=10.89.0.5 ./api.tar
  godwit run --engine podman --name cache --restart always --health-cmd 'redis-cli ping' redis:7
  godwit run --name dns --image dns.tar --cap-drop ALL --cap-add NET_BIND_SERVICE --read-only named -f"
)]
pub(crate) struct Args {
    /// Name of the service, unique in the cluster [default: made from the image's or the command's]
    #[arg(long)]
    name: Option<String>,
    /// Address of the service, which moves with it [default: the next free one of its network]
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<Ipv4Addr>,
    /// Directory to take the root filesystem from
    #[arg(long, value_name = "DIR", value_parser = values::absolute_text)]
    rootfs: Option<String>,
    /// Image to take the root filesystem from, if it is not the first word after the flags: an OCI archive, an image layout
    /// directory, or a reference, [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@DIGEST, which is pulled if need be
    #[arg(long, value_name = "IMAGE", value_parser = values::image_or_file, conflicts_with = "rootfs")]
    image: Option<values::Image>,
    /// When to ask a registry for an image that has a reference
    #[arg(long, value_name = "WHEN", value_enum, default_value = "missing")]
    pull: Policy,
    #[command(flatten)]
    registry: Reach,
    /// Who makes the container and keeps it, so that its own commands manage it: podman or docker, which take a reference
    /// as their own, or runc, which is godwit itself
    #[arg(long, value_name = "ENGINE", default_value = "runc", value_parser = ["podman", "docker", "runc"])]
    engine: String,
    /// Environment of the command: NAME=VALUE, or NAME to pass on your own
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = values::env)]
    env: Vec<String>,
    /// File with NAME=VALUE or NAME on each line; --env overrides it; lines that begin with # are comments
    #[arg(long, value_name = "FILE")]
    env_file: Vec<std::path::PathBuf>,
    /// Mount into the container: type=volume,src=NAME,dst=PATH[,ro], type=bind,src=PATH,dst=PATH[,ro][,move=skip|shared|copy] or
    /// type=tmpfs,dst=PATH[,size=64m]
    #[arg(long, value_name = "MOUNT", value_parser = values::mount)]
    mount: Vec<Mount>,
    /// Volume, which is made if there is none of that name, or bind mount of a path: NAME|PATH:TARGET[:ro]
    #[arg(short, long, value_name = "SOURCE:TARGET", value_parser = values::volume)]
    volume: Vec<Mount>,
    /// Memory limit, for example 256m or 2GiB [default: none]
    #[arg(short, long, value_name = "SIZE", value_parser = values::size)]
    memory: Option<u64>,
    /// CPU limit, for example 1.5 [default: none]
    #[arg(long, value_name = "NUMBER", value_parser = values::cpus)]
    cpus: Option<u32>,
    /// Forward a port of the node to the service: HOST:CONTAINER[/udp]
    #[arg(short, long, value_name = "PORTS", value_parser = values::publish)]
    publish: Vec<PublishedPort>,
    /// Network of the service, NAME or NAME:ip=ADDRESS, once for each; the first has the default route. Or
    /// ns:PATH alone, a network namespace of yours [default: the network "default"]
    #[arg(long, value_name = "NETWORK")]
    network: Vec<String>,
    /// Name by which services on its networks find it, beside its own; can be given several times
    #[arg(long, value_name = "NAME")]
    network_alias: Vec<String>,
    /// Program in the nodes' directory of hooks to run at a point of a move: pre-freeze, post-resume, aborted
    #[arg(long, value_name = "POINT=NAME", value_parser = values::hook)]
    hook: Vec<(String, String)>,
    /// Host name inside the container [default: the service's name]
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// User that runs the command: UID, UID:GID, or a name that the image knows
    #[arg(short, long)]
    user: Option<String>,
    /// Directory inside the container that the command starts in
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// When to start it again, here and wherever it moves: no; on-failure or on-failure:N, when its exit code
    /// is not 0 (at most N times); always. Never after `godwit stop`
    #[arg(long, value_name = "POLICY", default_value = "no")]
    restart: String,
    /// Remove the service and its files once it has ended; its volumes stay
    #[arg(long, conflicts_with = "restart")]
    rm: bool,
    /// Label of the service, which inspect shows
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = values::label)]
    label: Vec<String>,
    /// Accepted as Podman has it: a service always runs detached
    #[arg(short, long)]
    detach: bool,
    #[command(flatten)]
    confinement: confinement::Flags,
    #[command(flatten)]
    health: health::Check,
    /// Image, and the command with its arguments [default: the image's own command]. After --image or --rootfs the
    /// command alone, after `--` if one of its words looks like a flag of godwit
    #[arg(trailing_var_arg = true, value_name = "IMAGE COMMAND")]
    command: Vec<String>,
}

/// `definition` is godwit's: which flags it knows.
pub(crate) async fn run(args: Args, global: &Global, definition: &clap::Command) -> anyhow::Result<ExitCode> {
    let mut command = args.command;
    let health = args.health.of_engine(&args.engine)?;
    let image = match (args.image, &args.rootfs) {
        (None, None) => first_word(&mut command, definition)?,
        (image, _) => {
            check_command(&command, &std::env::args().collect::<Vec<_>>(), definition)?;
            image
        }
    };
    let mut env = Vec::new();
    for file in &args.env_file {
        env.extend(values::env_file(file)?);
    }
    let name = match args.name {
        Some(name) => name,
        None => values::invented_name(&named_after(image.as_ref(), &command))?,
    };
    let mut connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    let source = match (image, args.rootfs) {
        (Some(values::Image::Path(path)), _) => Some(Source::Image(path)),
        // The engine has it, or pulls it, with its own credentials.
        (Some(values::Image::Reference(text)), _) if args.engine != "runc" => Some(Source::Reference(text)),
        (Some(values::Image::Reference(text)), _) => {
            let mut registry = Registry {
                connection: &mut connection,
                interrupts: &mut interrupts,
                reach: &args.registry,
                quiet: global.json,
            };
            let image = match registry::reference(&text) {
                Ok(reference) => registry.image(&reference, args.pull).await,
                Err(error) => Err(error),
            };
            match image.map_err(|error| meant_a_file(error, &text))? {
                Some(image) => Some(Source::Reference(image.reference)),
                None => return Ok(ExitCode::from(INTERRUPTED)),
            }
        }
        (None, rootfs) => rootfs.map(Source::Rootfs),
    };
    let request = RunRequest {
        name,
        address: args.ip.map(|address| address.to_string()).unwrap_or_default(),
        source,
        command,
        engine: args.engine,
        env: env.into_iter().chain(args.env).filter(|entry| !entry.is_empty()).collect(),
        mounts: args.mount.into_iter().chain(args.volume).collect(),
        memory_bytes: args.memory.unwrap_or_default(),
        cpu_millis: args.cpus.unwrap_or_default(),
        publish: args.publish,
        hostname: args.hostname.unwrap_or_default(),
        user: args.user.unwrap_or_default(),
        workdir: args.workdir.unwrap_or_default(),
        labels: args.label,
        restart: args.restart,
        remove: args.rm,
        networks: args.network,
        aliases: args.network_alias,
        health,
        hooks: args.hook.into_iter().collect(),
        ..args.confinement.request()?
    };
    let stays = what_stays(&request);
    let making = async {
        match request.engine.as_str() {
            "runc" => connection.node.run(request).await,
            _ => connection.node.run_by_engine(request).await,
        }
    };
    let answer = tokio::select! {
        answer = making => answer,
        () = interrupts.next() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&output::service_json(&service))?;
    } else {
        output::line(&service.name)?;
    }
    if let Some(stays) = stays {
        output::note(&stays);
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes the image from the words after the flags: what is left is the command, as in Podman.
fn first_word(words: &mut Vec<String>, godwit: &clap::Command) -> anyhow::Result<Option<values::Image>> {
    let mut left = std::mem::take(words).into_iter();
    let image = left.next().map(|word| values::image(&word)).transpose()?;
    *words = left.collect();
    match words.first() {
        // As after --image.
        Some(word) if word == "--" => drop(words.remove(0)),
        Some(word) if is_flag(word, godwit) => anyhow::bail!(
            "{word} after the image may be for godwit or for the image's own program: put {word} before the image if it is for godwit, or `--` before {word} if it is not"
        ),
        _ => {}
    }
    Ok(image)
}

/// What a service is named after: an image in a registry has a name for people; a file may have any.
fn named_after(image: Option<&values::Image>, command: &[String]) -> String {
    match image {
        Some(values::Image::Reference(text)) => {
            let name = text.split('@').next().unwrap_or_default();
            let name = name.rsplit('/').next().unwrap_or_default();
            name.split(':').next().unwrap_or_default().to_owned()
        }
        _ => command.first().cloned().unwrap_or_default(),
    }
}

/// Who meant a file is told how files are written.
fn meant_a_file(error: anyhow::Error, text: &str) -> anyhow::Error {
    if std::path::Path::new(text).exists() {
        anyhow::anyhow!("{error:#}; the file of this name is meant by ./{text}")
    } else {
        error
    }
}

/// What of a service does not move with it, in a sentence.
fn what_stays(request: &RunRequest) -> Option<String> {
    let sources = request
        .mounts
        .iter()
        .filter(|mount| mount.kind == "bind" && mount.on_move.is_empty())
        .map(|mount| mount.source.as_str());
    let sources: Vec<_> = sources.collect();
    (!sources.is_empty()).then(|| {
        format!(
            "Note: what is in {} does not move with {}: each move needs to be told what becomes of it (`godwit migrate --mount`); a volume moves (`-v NAME:TARGET`)",
            sources.join(", "),
            request.name
        )
    })
}

/// Refuses a command that was given without `--` and has a word that may have been meant for godwit.
fn check_command(command: &[String], typed: &[String], godwit: &clap::Command) -> anyhow::Result<()> {
    let Some((program, words)) = command.split_first() else { return Ok(()) };
    // The command is what the command line ends with.
    let before = typed.len().checked_sub(command.len() + 1).and_then(|at| typed.get(at));
    if before.is_some_and(|word| word == "--") {
        return Ok(());
    }
    match words.iter().find(|word| is_flag(word, godwit)) {
        None => Ok(()),
        Some(word) => anyhow::bail!(
            "{word} after {program} may be for godwit or for {program}: put {word} before {program} if it is for godwit, or `--` before {program} if it is not"
        ),
    }
}

/// Whether a word is a flag of `godwit run`.
fn is_flag(word: &str, godwit: &clap::Command) -> bool {
    let run = godwit.find_subcommand("run").map(clap::Command::get_arguments).into_iter().flatten();
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    godwit.get_arguments().chain(run).any(|flag| {
        flag.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long))
            || flag.get_short().is_some_and(|short| {
                // `-p80:80` is `-p 80:80`.
                name.strip_prefix('-').is_some_and(|rest| rest.starts_with(short))
            })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{check_command, first_word};

    #[test]
    fn the_first_word_is_the_image_and_all_others_are_the_command() {
        let split = |line: &str| {
            let mut words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            let image = first_word(&mut words, &crate::definition());
            (image.map_err(|error| error.to_string()), words.join(" "))
        };
        for (line, command) in [
            ("redis", ""),
            ("redis redis-server --save x --name y", "redis-server --save x --name y"),
            ("redis -- --name x", "--name x"),
            ("redis --bind 0.0.0.0", "--bind 0.0.0.0"),
        ] {
            let (image, words) = split(line);
            assert_eq!(image.unwrap(), Some(crate::values::Image::Reference("redis".into())), "{line}");
            assert_eq!(words, command, "{line}");
        }
        for line in ["redis --name x", "redis -p80:80"] {
            assert!(split(line).0.unwrap_err().contains("before the image"), "{line}");
        }
    }

    fn said(line: &str) -> String {
        let typed: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let at = typed.iter().position(|word| word == "--").map_or(4, |dashes| dashes + 1);
        check_command(&typed[at..], &typed, &crate::definition())
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn a_command_without_dashes_is_taken_where_it_can_mean_one_thing_only() {
        for line in [
            "godwit run --image i sleep 100",
            "godwit run --image i nginx -g x",
            "godwit run --image i redis-server --bind 0.0.0.0",
            "godwit run --image i -- sleep --name x",
            "godwit run --image i -- ls -l",
            "godwit run --image i",
        ] {
            assert_eq!(said(line), "", "{line}");
        }
        for (line, word) in [
            ("godwit run --image i sleep 100 --name x", "--name"),
            ("godwit run --image i sleep --name=x", "--name=x"),
            ("godwit run --image i sleep 9 -p80:80", "-p80:80"),
            ("godwit run --image i sleep 9 --json", "--json"),
        ] {
            let said = said(line);
            assert!(said.contains(&format!("{word} after sleep")) && said.contains("`--`"), "{line}: {said}");
        }
    }
}
