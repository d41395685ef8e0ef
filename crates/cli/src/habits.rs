//! What users of Podman and Docker type and godwit does not have, with what to type instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Verbs.
const VERBS: &[(&str, &str)] = &[
    (
        "attach",
        "a service runs detached: `godwit logs -f NAME` shows what it writes, `godwit exec -it NAME COMMAND` types into it",
    ),
    (
        "auto-update",
        "godwit does not change a service's image: remove the service and run it from the new image",
    ),
    (
        "build",
        "godwit builds no images: build one with `podman build` or `docker build`, save it as an OCI archive, and give that to `godwit run --image`",
    ),
    ("commit", "godwit makes no images: `godwit cp NAME:/ -` writes a service's files as a tar archive"),
    ("compose", "godwit reads no compose files: write a `godwit run` for each service"),
    (
        "container",
        "write the verb alone: `godwit ps`, `godwit rm`, `godwit checkpoint NAME -o FILE`, `godwit restore FILE`",
    ),
    ("create", "a service is started when it is made: `godwit run`"),
    ("diff", "`godwit cp NAME:/PATH -` writes a service's files as a tar archive, which can be compared"),
    ("export", "`godwit cp NAME:/ -` writes a service's files as a tar archive"),
    (
        "generate",
        "a service is started again with its node by `godwit run --restart always`; it needs no unit",
    ),
    (
        "healthcheck",
        "godwit has no health checks of its own: those of a container of Podman or Docker move with it (`godwit adopt`)",
    ),
    ("history", "`godwit image ls --layers` lists the layers of images"),
    ("import", "`godwit run --rootfs DIR` takes a root filesystem from a directory"),
    ("info", "`godwit nodes` shows the nodes, `godwit doctor` what works on this one"),
    ("init", "a service is started when it is made: `godwit run`; `godwit cluster init` founds a cluster"),
    ("kube", "godwit reads no Kubernetes files: write a `godwit run` for each service"),
    ("load", "an image is taken from its archive when a service is run: `godwit run --image ARCHIVE`"),
    (
        "login",
        "godwit pulls with skopeo: `skopeo login REGISTRY` logs in, and the logins of Podman and Docker count, too",
    ),
    ("logout", "godwit pulls with skopeo: `skopeo logout REGISTRY` logs out"),
    ("machine", "godwit runs on Linux itself; `godwit lab` makes machines to try it with"),
    ("manifest", "godwit makes no images"),
    ("mount", "`godwit cp NAME:/PATH .` copies files out of a service"),
    ("pause", "a service is frozen by a move alone; `godwit kill -s STOP NAME` stops its main process"),
    ("play", "godwit reads no Kubernetes files: write a `godwit run` for each service"),
    ("pod", "services reach each other by their network: `godwit run --network`"),
    ("port", "`godwit ps` shows published ports"),
    (
        "push",
        "godwit makes no images, and sends none to a registry; layers go to another node with a service that moves",
    ),
    (
        "rename",
        "a service is known in the whole cluster by its name, which stays: `godwit run --name` gives one to another service",
    ),
    ("rmi", "`godwit image rm IMAGE` removes an image, `godwit image prune` all that are unused"),
    ("save", "godwit makes no images; layers go to another node with a service that moves"),
    ("search", "godwit pulls what is named, and searches no registry"),
    ("secret", "godwit keeps no secrets: mount a file (`godwit run -v PATH:TARGET:ro,move=skip`)"),
    (
        "system",
        "`godwit doctor` examines this node, `godwit image prune` and `godwit volume prune` free its disk",
    ),
    ("tag", "an image has the name that its registry knows it by: `godwit image ls`"),
    ("top", "`godwit exec NAME ps` where the image has ps, `godwit stats NAME` for what the service uses"),
    ("umount", "godwit mounts nothing for users"),
    ("unmount", "godwit mounts nothing for users"),
    ("unpause", "`godwit kill -s CONT NAME` continues a main process that was stopped"),
    ("unshare", "godwitd runs as root, without user namespaces"),
    ("untag", "`godwit image rm IMAGE` removes an image with its name"),
];

/// Flags of `run`.
const RUN: &[(&str, &str)] = &[
    (
        "-i",
        "a service runs detached: run it without -i, and type into it with `godwit exec -it NAME COMMAND`",
    ),
    (
        "-t",
        "a service runs detached, without a terminal: run it without -t, and then `godwit exec -it NAME COMMAND`",
    ),
    (
        "--interactive",
        "a service runs detached: run it without, and type into it with `godwit exec -it NAME COMMAND`",
    ),
    (
        "--tty",
        "a service runs detached, without a terminal: run it without, and then `godwit exec -it NAME COMMAND`",
    ),
    ("--add-host", "a service asks the name servers of the node that it is on: let them know the host"),
    ("--attach", "a service runs detached: `godwit logs -f NAME` shows what it writes"),
    ("--cgroup-parent", "godwit places the cgroups of services itself"),
    ("--cidfile", "godwit prints the service's name, which is its identity"),
    ("--cpu-shares", "a limit is given in CPUs: --cpus 1.5"),
    ("--cpu-quota", "a limit is given in CPUs: --cpus 1.5"),
    ("--cpuset-cpus", "nodes have different processors: a limit is given in CPUs, --cpus 1.5"),
    ("--device", "devices belong to a node, and do not move"),
    ("--dns", "a service has its node's name servers, on each node that it moves to"),
    ("--expose", "the ports of a service are open on its networks; --publish opens one on the nodes"),
    ("--gpus", "the state of a GPU does not move"),
    (
        "--health-cmd",
        "godwit has no health checks of its own: those of a container of Podman or Docker move with it (`godwit adopt`)",
    ),
    ("--init", "name an init as the command: `godwit run … tini COMMAND`"),
    ("--ipc", "a service has an IPC namespace of its own, which moves with it"),
    ("--link", "services reach each other by their addresses on a network: --network, --ip"),
    ("--mac-address", "a service's MAC address is made from its IP address, and moves with it"),
    ("--memory-swap", "--memory limits memory; swap is not limited"),
    ("--net", "write --network"),
    ("--pid", "a service has a PID namespace of its own, which moves with it"),
    ("--pod", "services reach each other by their network: --network"),
    ("--platform", "a node runs images of its own instruction set"),
    (
        "--privileged",
        "a service that has the node's devices and namespaces cannot move: give what it needs, with --cap-add",
    ),
    ("--quiet", "run prints the service's name and nothing else"),
    ("--secret", "godwit keeps no secrets: mount a file (-v PATH:TARGET:ro)"),
    ("--shm-size", "/dev/shm has 64 MiB; another size: --mount type=tmpfs,dst=/dev/shm,size=256m"),
    ("--stop-signal", "`godwit kill -s SIGNAL NAME` sends any signal"),
    ("--stop-timeout", "`godwit stop -t SECONDS NAME` waits for as long"),
    ("--sysctl", "set it in the namespace of the service's network: `godwit run --network ns:PATH`"),
    ("--tmpfs", "write --mount type=tmpfs,dst=PATH"),
    ("--userns", "services run without user namespaces; --user and --cap-drop limit what they may do"),
    ("--uts", "--hostname names the service's host"),
    ("--volumes-from", "a volume is one service's at a time"),
];

/// The sentence for a command line that clap does not understand, if it is a habit of users of Podman or Docker.
pub(crate) fn instead(error: &clap::Error, words: &[String]) -> Option<String> {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let find = |table: &[(&str, &'static str)], word: &str| {
        table.iter().find(|(habit, _)| *habit == word).map(|(_, instead)| *instead)
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let verb = said(ContextKind::InvalidSubcommand)?;
            Some(format!("godwit has no `{verb}`: {}", find(VERBS, verb)?))
        }
        ErrorKind::UnknownArgument if words.iter().any(|word| word == "run") => {
            let flag = said(ContextKind::InvalidArg)?;
            // `--health-interval` is about what `--health-cmd` is about.
            let habit = if flag.starts_with("--health-") { "--health-cmd" } else { flag };
            Some(format!("godwit run has no {flag}: {}", find(RUN, habit)?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verbs of Podman 4.3 and those of Docker 28 that are about containers and images.
    const PODMAN: &str = "attach auto-update build commit container cp create diff events exec export generate healthcheck \
        history image images import info init inspect kill kube load login logout logs machine manifest mount network pause \
        play pod port ps pull push rename restart rm rmi run save search secret start stats stop system tag top umount \
        unmount unpause unshare untag update version volume wait compose checkpoint";

    fn said(line: &str) -> Option<String> {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let error = crate::definition().try_get_matches_from(&words).err()?;
        Some(instead(&error, &words).unwrap_or_else(|| error.to_string()))
    }

    #[test]
    fn every_verb_of_podman_is_one_of_godwit_or_is_refused_with_what_to_type_instead() {
        let definition = crate::definition();
        for verb in PODMAN.split_whitespace() {
            let has = definition.find_subcommand(verb).is_some();
            let habit = VERBS.iter().any(|(habit, _)| *habit == verb);
            assert!(has != habit, "{verb}: {has} {habit}");
            if habit {
                let sentence = said(&format!("godwit {verb} web")).unwrap_or_default();
                assert!(sentence.starts_with(&format!("godwit has no `{verb}`: ")), "{sentence}");
            }
        }
        assert!(said("godwit frobnicate").is_some_and(|sentence| sentence.contains("unrecognized")));
    }

    #[test]
    fn flags_of_run_that_there_are_not_are_refused_with_what_to_type_instead() {
        for (flag, _) in RUN {
            let sentence = said(&format!("godwit run --image i.tar {flag} x")).unwrap_or_default();
            assert!(sentence.starts_with(&format!("godwit run has no {flag}: ")), "{sentence}");
        }
        for (line, words) in [
            ("godwit run -it --image i.tar sh", "godwit exec -it"),
            ("godwit run --health-interval 1s --image i.tar sh", "godwit run has no --health-interval"),
            ("godwit run --frobnicate --image i.tar sh", "unexpected argument"),
            ("godwit ps --privileged", "unexpected argument"),
        ] {
            let sentence = said(line).unwrap_or_default();
            assert!(sentence.contains(words), "{line}: {sentence}");
        }
    }

    /// What is to be typed instead can be typed.
    #[test]
    fn verbs_that_are_named_exist() {
        let definition = crate::definition();
        for (habit, instead) in VERBS.iter().chain(RUN) {
            for command in instead.split('`').skip(1).step_by(2) {
                let mut words = command.split(' ');
                if words.next() == Some("godwit") {
                    let verb = words.next().unwrap_or_default();
                    assert!(definition.find_subcommand(verb).is_some(), "{habit}: {command}");
                }
            }
        }
    }
}
