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
        "godwit builds no images: build one with `podman build` or `docker build`, save it as an OCI archive, and give that to `godwit run --image`; `godwit image pack` makes one of programs that godwit-cc has built",
    ),
    (
        "commit",
        "godwit makes no images of services: `godwit cp NAME:/ -` writes a service's files as a tar archive",
    ),
    (
        "compose",
        "godwit reads no compose files: have `docker compose` start the containers and `godwit adopt docker:NAME` each (docs/docker.md), or write a `godwit run` for each service",
    ),
    (
        "container",
        "write the verb alone: `godwit ps`, `godwit rm`, `godwit checkpoint NAME -o FILE`, `godwit restore FILE`",
    ),
    ("cordon", "`godwit node cordon NODE` has a node take no more services"),
    ("create", "a service is started when it is made: `godwit run`"),
    ("diff", "`godwit cp NAME:/PATH -` writes a service's files as a tar archive, which can be compared"),
    ("drain", "`godwit node drain NODE` moves the services of a node away"),
    ("export", "`godwit cp NAME:/ -` writes a service's files as a tar archive"),
    (
        "generate",
        "a service is started again with its node by `godwit run --restart always`; it needs no unit",
    ),
    (
        "healthcheck",
        "godwit has no health checks of its own: `godwit run --engine podman --health-cmd` has Podman make one, which moves with the container",
    ),
    ("history", "`godwit image ls --layers` lists the layers of images"),
    ("import", "`godwit run --rootfs DIR` takes a root filesystem from a directory"),
    ("info", "`godwit nodes` shows the nodes, `godwit doctor` what works on this one"),
    ("init", "a service is started when it is made: `godwit run`; `godwit cluster init` founds a cluster"),
    ("kube", "godwit reads no Kubernetes files: write a `godwit run` for each service"),
    (
        "load",
        "`godwit image import ARCHIVE` takes an image from an OCI archive, `godwit run --image ARCHIVE` runs one",
    ),
    (
        "login",
        "godwit pulls with skopeo: `skopeo login REGISTRY` logs in, and the logins of Podman and Docker count, too",
    ),
    ("logout", "godwit pulls with skopeo: `skopeo logout REGISTRY` logs out"),
    ("machine", "godwit runs on Linux itself; `godwit lab` makes machines to try it with"),
    (
        "manifest",
        "`godwit image pack` makes an image for several platforms, of programs that godwit-cc has built",
    ),
    ("mount", "`godwit cp NAME:/PATH .` copies files out of a service"),
    ("pause", "a service is frozen by a move alone; `godwit kill -s STOP NAME` stops its main process"),
    ("play", "godwit reads no Kubernetes files: write a `godwit run` for each service"),
    ("pod", "services reach each other by their network: `godwit run --network`"),
    ("port", "`godwit ps` shows published ports"),
    ("push", "godwit sends no images to a registry; layers go to another node with a service that moves"),
    (
        "rename",
        "a service is known in the whole cluster by its name, which stays: `godwit run --name` gives one to another service",
    ),
    ("rmi", "`godwit image rm IMAGE` removes an image, `godwit image prune` all that are unused"),
    ("save", "godwit has no images to save; layers go to another node with a service that moves"),
    ("search", "godwit pulls what is named, and searches no registry"),
    ("secret", "godwit keeps no secrets: mount a file (`godwit run -v PATH:TARGET:ro,move=skip`)"),
    (
        "system",
        "`godwit doctor` examines this node, `godwit image prune` and `godwit volume prune` free its disk",
    ),
    ("tag", "an image has the name that its registry knows it by: `godwit image ls`"),
    ("top", "`godwit exec NAME ps` where the image has ps, `godwit stats NAME` for what the service uses"),
    ("umount", "godwit mounts nothing for users"),
    ("uncordon", "`godwit node uncordon NODE` has a node take services again"),
    ("unmount", "godwit mounts nothing for users"),
    ("unpause", "`godwit kill -s CONT NAME` continues a main process that was stopped"),
    ("unshare", "godwitd runs as root, without user namespaces"),
    ("untag", "`godwit image rm IMAGE` removes an image with its name"),
];

/// Verbs below `image`, `network`, `node` and `volume`: these, what is above them, what to type instead.
const BELOW: &[(&str, &str, &str)] = &[
    (
        "image",
        "build save tag untag sign",
        "godwit makes images of godwit-cc's programs alone (`godwit image pack`): skopeo(1) copies and signs images, `podman build` builds them",
    ),
    (
        "image",
        "diff history tree",
        "`godwit image inspect IMAGE` shows an image with its layers, `skopeo inspect docker://IMAGE` one of a registry",
    ),
    ("image", "exists", "`godwit image ls -q` lists the names of images, for grep(1)"),
    (
        "image",
        "load",
        "`godwit image import ARCHIVE` takes an image from an OCI archive, `godwit run --image ARCHIVE` runs one",
    ),
    ("image", "mount unmount", "`godwit cp NAME:/PATH .` copies files out of a service"),
    (
        "image",
        "push scp search",
        "godwit sends no images, and searches no registry; layers go to another node with a service that moves",
    ),
    ("image", "trust", "what is trusted is said in /etc/containers/policy.json (containers-policy.json(5))"),
    (
        "network",
        "connect disconnect",
        "a service has the networks that it was run with: `godwit run --network`",
    ),
    ("network", "exists", "`godwit network ls -q` lists the names of networks, for grep(1)"),
    ("network", "prune", "`godwit network rm NETWORK` removes a network that no service is on"),
    ("network", "reload", "godwitd puts rules back itself"),
    (
        "node",
        "update",
        "`godwit node drain NODE` moves its services away, and `godwit node uncordon NODE` ends that",
    ),
    ("node", "inspect", "`godwit nodes --json` has all that is known of the nodes"),
    ("node", "ps", "`godwit ps` shows the services of all nodes"),
    ("volume", "exists", "`godwit volume ls -q` lists the names of volumes, for grep(1)"),
    ("volume", "export", "`godwit cp NAME:/PATH -` writes the files of a service's volume as a tar archive"),
    ("volume", "import", "`godwit cp - NAME:/PATH` puts a tar archive into a service's volume"),
    ("volume", "mount reload unmount", "`godwit volume inspect VOLUME` has the path of the files"),
];

/// Flags of `run`, and what to type instead.
const RUN: &[(&str, &str)] = &[
    (
        "-i --interactive",
        "a service runs detached: run it without, and type into it with `godwit exec -it NAME COMMAND`",
    ),
    (
        "-t --tty",
        "a service runs detached, without a terminal: run it without, and then `godwit exec -it NAME COMMAND`",
    ),
    ("-a --attach --sig-proxy", "a service runs detached: `godwit logs -f NAME` shows what it writes"),
    ("--detach-keys", "a terminal ends with its command; a service runs detached"),
    (
        "--add-host --no-hosts",
        "a service asks the name servers of the node that it is on: let them know the host",
    ),
    ("--annotation", "--label says something of a service"),
    ("--arch --os --platform --variant", "a node runs images of its own instruction set"),
    (
        "--blkio-weight --blkio-weight-device --device-read-bps --device-read-iops --device-write-bps --device-write-iops",
        "what moves with a service are limits of memory, CPUs and processes: --memory, --cpus, --pids-limit",
    ),
    (
        "--cgroup-conf --cgroup-parent --cgroupns --cgroups",
        "godwit places the cgroups of services itself, each in a cgroup namespace of its own",
    ),
    (
        "--chrootdirs --image-volume --passwd --passwd-entry",
        "a service has the files of its image, and what --volume and --mount add",
    ),
    (
        "--cidfile --conmon-pidfile --pidfile --pod-id-file",
        "godwit prints the service's name, which is its identity; `godwit inspect NAME` has the PID",
    ),
    (
        "--cpu-period --cpu-quota --cpu-rt-period --cpu-rt-runtime -c --cpu-shares",
        "a limit is given in CPUs: --cpus 1.5",
    ),
    ("--cpuset-cpus --cpuset-mems", "nodes have different processors: a limit is given in CPUs, --cpus 1.5"),
    ("--device --device-cgroup-rule", "devices belong to a node, and do not move"),
    (
        "--disable-content-trust",
        "what is trusted is said in /etc/containers/policy.json (containers-policy.json(5))",
    ),
    (
        "--dns --dns-option --dns-search",
        "a service asks its node, which knows the services on its networks and asks the node's own name servers for the rest",
    ),
    (
        "--env-host --env-merge --http-proxy --unsetenv --unsetenv-all",
        "a service has its image's environment, and what --env and --env-file say",
    ),
    (
        "-P --expose --publish-all",
        "the ports of a service are open on its networks; --publish opens one on the nodes",
    ),
    (
        "--gidmap --hostuser --subgidname --subuidname --uidmap --userns",
        "services run without user namespaces; --user and --cap-drop limit what they may do",
    ),
    ("--gpus", "the state of a GPU does not move"),
    ("--group-add", "--user UID:GID says as whom a service runs"),
    (
        "--health-on-failure --health-start-interval",
        "it is `podman run` or `docker run` that has it: `godwit adopt` takes the container as it is",
    ),
    ("--init --init-path", "name an init as the command: `godwit run … tini COMMAND`"),
    ("--ip6", "a service's IPv6 address is made from its IPv4 address: --ip, and `godwitd serve --subnet6`"),
    ("--ipc", "a service has an IPC namespace of its own, which moves with it"),
    ("--label-file", "--label says one, and can be given several times"),
    (
        "--link",
        "services on the same network find each other by name; --network-alias gives one a further name",
    ),
    (
        "--log-driver --log-opt",
        "godwit keeps a log for each service, which moves with it: `godwit logs NAME`",
    ),
    ("--mac-address", "a service's MAC address is made from its IP address, and moves with it"),
    ("--memory-reservation --memory-swap --memory-swappiness", "--memory limits memory; swap is not limited"),
    ("--net", "write --network"),
    ("--oom-kill-disable --oom-score-adj", "--memory limits a service's memory, and so whom the kernel ends"),
    ("--personality", "a service has its node's personality; setarch(8) can be the command"),
    ("--pid", "a service has a PID namespace of its own, which moves with it"),
    ("--pod --requires", "services reach each other by their network: --network"),
    ("--preserve-fds", "a service has standard input, output and error of its own"),
    (
        "--privileged",
        "a service that has the node's devices and namespaces cannot move: give what it needs, with --cap-add",
    ),
    ("-q --quiet", "run prints the service's name and nothing else"),
    ("--read-only-tmpfs", "write --mount type=tmpfs,dst=PATH for each directory that is to be written"),
    ("--replace", "`godwit rm -f NAME` removes the other one, first"),
    ("--rmi", "`godwit image rm IMAGE` removes an image that no service uses"),
    ("--sdnotify --systemd", "a service tells no service manager; its command can be an init"),
    ("--seccomp-policy", "write --security-opt seccomp=PROFILE"),
    ("--secret", "godwit keeps no secrets: mount a file (-v PATH:TARGET:ro)"),
    ("--shm-size", "/dev/shm has 64 MiB; another size: --mount type=tmpfs,dst=/dev/shm,size=256m"),
    ("--stop-signal", "`godwit kill -s SIGNAL NAME` sends any signal"),
    ("--stop-timeout", "`godwit stop -t SECONDS NAME` waits for as long"),
    ("--sysctl", "set it in the namespace of the service's network: `godwit run --network ns:PATH`"),
    ("--timeout", "timeout(1) can be the command: `godwit run … timeout SECONDS COMMAND`"),
    ("--tmpfs", "write --mount type=tmpfs,dst=PATH"),
    ("--tz", "write --env TZ=ZONE"),
    ("--umask", "a shell can be the command: sh -c 'umask 027; exec COMMAND'"),
    ("--uts", "--hostname names the service's host"),
    ("--volumes-from", "a volume is one service's at a time"),
];

/// Flags of other verbs: the verbs, the flags, what to type instead.
const FLAGS: &[(&[&str], &str, &str)] = &[
    (
        &["checkpoint", "kill", "restart", "rm", "stop"],
        "-a --all -f --filter",
        "name the services: `godwit ps -a -q` lists them",
    ),
    (&["start"], "--all -f --filter", "name the services: `godwit ps -a -q` lists them"),
    (&["restart"], "--running", "name the services: `godwit ps -q` lists those that run"),
    (
        &[
            "checkpoint",
            "exec",
            "inspect",
            "kill",
            "logs",
            "ps",
            "restart",
            "rm",
            "start",
            "stats",
            "stop",
            "wait",
        ],
        "-l --latest",
        "name the service: `godwit ps` lists them, with their ages",
    ),
    (&["kill", "restart", "rm", "stop"], "--cidfile", "a service is known by its name: `godwit run --name`"),
    (
        &[
            "image ls",
            "images",
            "inspect",
            "network ls",
            "ps",
            "stats",
            "version",
            "volume inspect",
            "volume ls",
        ],
        "-f --filter --format",
        "`--json` prints all that is known, for jq(1) to choose from",
    ),
    (
        &["events"],
        "-f --filter --format",
        "`godwit events --json` prints a line for each, for jq(1) to choose from",
    ),
    (
        &["events", "image ls", "images", "network ls", "ps", "stats"],
        "--no-trunc --digests",
        "nothing is cut off in the output of `--json`",
    ),
    (
        &["image ls", "images", "network ls", "ps", "volume ls"],
        "-n --noheading",
        "`-q` prints names alone, without a heading",
    ),
    (&["image ls", "images", "ps"], "--sort", "sort(1) orders lines: `godwit ps` is a table"),
    (&["ps"], "--last", "`godwit ps -a` lists all services, with their ages"),
    (&["inspect", "ps"], "-s --size", "`godwit stats NAME` shows what a service uses"),
    (&["ps"], "-w --watch", "watch(1) repeats a command: `watch godwit ps`"),
    (&["ps"], "--external --ns --pod -p --sync", "`godwit ps --json` prints all that is known of services"),
    (
        &["inspect"],
        "-t --type",
        "`godwit inspect` is about services; `godwit volume inspect` and `godwit network inspect` are about others",
    ),
    (
        &["image ls", "images"],
        "-a --all",
        "an image has no others beneath it: `godwit image ls --layers` lists layers",
    ),
    (&["image ls", "images"], "--history", "`godwit image ls --layers` lists layers"),
    (
        &["logs"],
        "--until",
        "`godwit logs --timestamps` shows the time of each line, at which awk(1) can stop",
    ),
    (&["events"], "--until", "`godwit events` shows the time of each line, at which awk(1) can stop"),
    (&["logs"], "--color --names", "`godwit logs` shows one service"),
    (
        &["exec"],
        "-d --detach",
        "a command ends with its user: run it as a service of its own, or have the service start it",
    ),
    (&["exec", "start"], "--detach-keys", "a terminal ends with its command; a service runs detached"),
    (&["exec"], "--preserve-fds", "a command has standard input, output and error: `godwit cp` brings files"),
    (&["exec"], "--privileged", "a command may what its service may: `godwit run --cap-add`"),
    (
        &["start"],
        "-a --attach -i --interactive --sig-proxy",
        "a service runs detached: `godwit logs -f NAME` shows what it writes",
    ),
    (&["rm"], "--depend", "services do not depend on each other: name each"),
    (&["image rm", "rm", "stop"], "-i --ignore", "`|| true` ignores a failure in a script"),
    (&["rm"], "-t --time", "`godwit stop -t SECONDS NAME` waits for as long before it"),
    (&["rm"], "-v --volumes", "a volume outlives its service: `godwit volume rm VOLUME` removes it"),
    (&["wait"], "--condition", "`godwit wait` waits for the end; `godwit events -f` tells of all else"),
    (&["wait"], "-i --interval", "`godwit wait` is told of the end, and asks for nothing"),
    (&["stats"], "-a --all", "a service that does not run uses nothing"),
    (&["stats"], "--no-reset", "`godwit stats --no-stream` shows the figures once"),
    (
        &["update"],
        "--blkio-weight --blkio-weight-device --cpu-period --cpu-quota --cpu-rt-period --cpu-rt-runtime -c --cpu-shares \
         --cpuset-cpus --cpuset-mems --device-read-bps --device-read-iops --device-write-bps --device-write-iops \
         --memory-reservation --memory-swap --memory-swappiness",
        "what moves with a service are limits of memory, CPUs and processes: --memory, --cpus, --pids-limit",
    ),
    (
        &["cp"],
        "--overwrite",
        "`godwit rm` is for services: `godwit exec NAME rm PATH` removes what is in the way",
    ),
    (&["pull"], "-a --all-tags", "name each image: `skopeo list-tags docker://IMAGE` lists tags"),
    (&["pull"], "--arch --os --platform --variant", "a node runs images of its own instruction set"),
    (&["pull"], "--creds", "`skopeo login REGISTRY` logs in, and keeps the password out of the command line"),
    (
        &["pull"],
        "--disable-content-trust",
        "what is trusted is said in /etc/containers/policy.json (containers-policy.json(5))",
    ),
    (&["checkpoint"], "--create-image", "`godwit checkpoint NAME -o FILE` writes a file"),
    (&["checkpoint", "restore"], "--file-locks", "file locks are always in the file"),
    (&["checkpoint", "restore"], "--ignore-rootfs", "a service goes on with the files that it had"),
    (
        &["checkpoint"],
        "-P --pre-checkpoint --with-previous",
        "`godwit migrate` sends memory in rounds; a file is written whole",
    ),
    (&["checkpoint", "restore"], "--print-stats", "`--json` prints the figures"),
    (
        &["restore"],
        "-a --all -l --latest -i --import --import-previous",
        "name the file: `godwit restore FILE`",
    ),
    (
        &["restore"],
        "--ignore-static-ip --ignore-static-mac",
        "`godwit restore --ip ADDRESS` gives it another address",
    ),
    (&["restore"], "-k --keep", "the file stays, and what a restore wrote is in the node's log"),
    (&["restore"], "--pod", "services reach each other by their network"),
    (
        &["volume create"],
        "-d --driver -l --label -o --opt",
        "a volume is a directory of the node, which moves with its service",
    ),
    (
        &["volume inspect", "volume rm", "image rm"],
        "-a --all",
        "name each; `prune` removes all that are unused",
    ),
    (
        &["volume rm"],
        "-f --force -t --time",
        "`godwit rm -f NAME` removes the service that has the volume, first",
    ),
    (&["volume prune", "image prune"], "--filter", "`rm` removes what is named"),
    (
        &["image rm"],
        "-f --force --no-prune",
        "what services use stays: `godwit rm -f NAME` removes a service, first",
    ),
    (
        &["image prune"],
        "-a --all --external -f --force",
        "`godwit image prune` removes all that no service uses, and does not ask",
    ),
    (
        &["network create"],
        "--disable-dns -d --driver --gateway --internal --ip-range --ipam-driver --ipv6 --label -o --opt",
        "a network is one on all nodes of the cluster: `godwit network create --help` shows what it can have",
    ),
    (&["network rm"], "-f --force -t --time", "`godwit rm -f NAME` removes the services of a network, first"),
];

/// The sentence for a command line that clap does not understand, if it is a habit of users of Podman or Docker.
pub(crate) fn instead(error: &clap::Error, words: &[String]) -> Option<String> {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let is_in = |habits: &str, word: &str| habits.split_whitespace().any(|habit| habit == word);
    let find = |table: &[(&str, &'static str)], word: &str| {
        table.iter().find(|(habits, _)| is_in(habits, word)).map(|(_, instead)| *instead)
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let below = said(ContextKind::InvalidSubcommand)?;
            let Some(above) = verb(words) else {
                return Some(format!("godwit has no `{below}`: {}", find(VERBS, below)?));
            };
            let meant = |(verb, habits, _): &&(&str, &str, &str)| *verb == above && is_in(habits, below);
            let (.., instead) = BELOW.iter().find(meant)?;
            Some(format!("godwit has no `{above} {below}`: {instead}"))
        }
        ErrorKind::UnknownArgument => {
            let (verb, flag) = (verb(words)?, said(ContextKind::InvalidArg)?);
            let instead = if verb == "run" {
                find(RUN, flag)?
            } else {
                let meant = |(verbs, flags, _): &&(&[&str], &str, &str)| {
                    verbs.contains(&verb.as_str()) && is_in(flags, flag)
                };
                FLAGS.iter().find(meant).map(|(.., instead)| *instead)?
            };
            Some(format!("godwit {verb} has no {flag}: {instead}"))
        }
        _ => None,
    }
}

/// The verb that these words are for, as `volume rm`.
fn verb(words: &[String]) -> Option<String> {
    let found = crate::definition().ignore_errors(true).try_get_matches_from(words).ok()?;
    let (mut verbs, mut level) = (Vec::new(), &found);
    while let Some((verb, below)) = level.subcommand() {
        verbs.push(verb);
        level = below;
    }
    (!verbs.is_empty()).then(|| verbs.join(" "))
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
        for flag in RUN.iter().flat_map(|(flags, _)| flags.split_whitespace()) {
            let sentence = said(&format!("godwit run --image i.tar {flag} x")).unwrap_or_default();
            assert!(sentence.starts_with(&format!("godwit run has no {flag}: ")), "{sentence}");
        }
        for (line, words) in [
            ("godwit run -it --image i.tar sh", "godwit exec -it"),
            ("godwit run --health-on-failure kill --image i.tar sh", "godwit run has no --health-on-failure"),
            ("godwit run --frobnicate --image i.tar sh", "unexpected argument"),
            ("godwit ps --privileged", "unexpected argument"),
        ] {
            let sentence = said(line).unwrap_or_default();
            assert!(sentence.contains(words), "{line}: {sentence}");
        }
    }

    #[test]
    fn verbs_below_others_are_refused_with_what_to_type_instead() {
        // Podman 4.3's.
        for (above, verbs) in [
            (
                "image",
                "build diff exists history import inspect list load mount prune pull push rm save scp search sign tag tree trust unmount untag",
            ),
            ("volume", "create exists export import inspect ls mount prune reload rm unmount"),
            ("network", "connect create disconnect exists inspect ls prune reload rm"),
            // Docker's.
            ("node", "inspect ls ps rm update"),
        ] {
            let definition = crate::definition();
            let level = definition.find_subcommand(above).unwrap_or_else(|| panic!("no {above}"));
            for verb in verbs.split_whitespace() {
                if level.find_subcommand(verb).is_none() {
                    let sentence = said(&format!("godwit {above} {verb} x")).unwrap_or_default();
                    assert!(sentence.starts_with(&format!("godwit has no `{above} {verb}`: ")), "{sentence}");
                }
            }
        }
        assert!(said("godwit volume frobnicate").is_some_and(|sentence| sentence.contains("unrecognized")));
    }

    /// Podman 4.3's flags of the verbs that godwit has, too, but for `-h`, which asks for help here.
    const PODMAN_FLAGS: &[(&str, &str)] = &[
        (
            "run",
            "--add-host --annotation --arch -a --attach --authfile --blkio-weight --blkio-weight-device --cap-add --cap-drop --cgroup-conf --cgroup-parent --cgroupns --cgroups --chrootdirs --cidfile --conmon-pidfile --cpu-period --cpu-quota --cpu-rt-period --cpu-rt-runtime -c --cpu-shares --cpus --cpuset-cpus --cpuset-mems -d --detach --detach-keys --device --device-cgroup-rule --device-read-bps --device-read-iops --device-write-bps --device-write-iops --disable-content-trust --dns --dns-option --dns-search --entrypoint -e --env --env-file --env-host --env-merge --expose --gidmap --group-add --health-cmd --health-interval --health-on-failure --health-retries --health-start-period --health-timeout --hostname --hostuser --http-proxy --image-volume --init --init-path -i --interactive --ip --ip6 --ipc -l --label --label-file --log-driver --log-opt --mac-address -m --memory --memory-reservation --memory-swap --memory-swappiness --mount --name --network --network-alias --no-healthcheck --no-hosts --oom-kill-disable --oom-score-adj --os --passwd --passwd-entry --personality --pid --pidfile --pids-limit --platform --pod --pod-id-file --preserve-fds --privileged -p --publish -P --publish-all --pull -q --quiet --read-only --read-only-tmpfs --replace --requires --restart --rm --rmi --rootfs --sdnotify --seccomp-policy --secret --security-opt --shm-size --sig-proxy --stop-signal --stop-timeout --subgidname --subuidname --sysctl --systemd --timeout --tls-verify --tmpfs -t --tty --tz --uidmap --ulimit --umask --unsetenv --unsetenv-all -u --user --userns --uts --variant -v --volume --volumes-from -w --workdir",
        ),
        (
            "exec",
            "-d --detach --detach-keys -e --env --env-file -i --interactive -l --latest --preserve-fds --privileged -t --tty -u --user -w --workdir",
        ),
        (
            "ps",
            "-a --all --external -f --filter --format -n --last -l --latest --no-trunc --noheading --ns -p --pod -q --quiet -s --size --sort --sync -w --watch",
        ),
        ("logs", "--color -f --follow -l --latest -n --names --since --tail -t --timestamps --until"),
        (
            "rm",
            "-a --all --cidfile --depend --filter -f --force -i --ignore -l --latest -t --time -v --volumes",
        ),
        ("stop", "-a --all --cidfile -f --filter -i --ignore -l --latest -t --time"),
        ("start", "--all -a --attach --detach-keys -f --filter -i --interactive -l --latest --sig-proxy"),
        ("restart", "-a --all --cidfile -f --filter -l --latest --running -t --time"),
        ("kill", "-a --all --cidfile -l --latest -s --signal"),
        ("wait", "--condition -i --interval -l --latest"),
        ("stats", "-a --all --format -i --interval -l --latest --no-reset --no-stream --no-trunc"),
        (
            "update",
            "--blkio-weight --cpu-period --cpu-quota -c --cpu-shares --cpus --cpuset-cpus -m --memory --memory-swap",
        ),
        ("inspect", "-f --format -l --latest -s --size -t --type"),
        ("cp", "-a --archive --overwrite"),
        ("events", "-f --filter --format --no-trunc --since --until"),
        (
            "pull",
            "-a --all-tags --arch --authfile --cert-dir --creds --disable-content-trust --os --platform -q --quiet --tls-verify --variant",
        ),
        (
            "images",
            "-a --all --digests -f --filter --format --history --no-trunc -n --noheading -q --quiet --sort",
        ),
        (
            "image ls",
            "-a --all --digests -f --filter --format --history --no-trunc -n --noheading -q --quiet --sort",
        ),
        ("image rm", "-a --all -f --force -i --ignore --no-prune"),
        ("image prune", "-a --all --external --filter -f --force"),
        ("version", "-f --format"),
        (
            "checkpoint",
            "-a --all -c --compress --create-image -e --export --file-locks --ignore-rootfs --ignore-volumes -l --latest -R --leave-running -P --pre-checkpoint --print-stats --tcp-established --with-previous",
        ),
        (
            "restore",
            "-a --all --file-locks --ignore-rootfs --ignore-static-ip --ignore-static-mac --ignore-volumes -i --import --import-previous -k --keep -l --latest -n --name --pod --print-stats -p --publish --tcp-established",
        ),
        ("volume create", "-d --driver -l --label -o --opt"),
        ("volume ls", "-f --filter --format --noheading -q --quiet"),
        ("volume inspect", "-a --all -f --format"),
        ("volume rm", "-a --all -f --force -t --time"),
        ("volume prune", "--filter -f --force"),
        (
            "network create",
            "--disable-dns -d --driver --gateway --internal --ip-range --ipam-driver --ipv6 --label -o --opt --subnet",
        ),
        ("network ls", "-f --filter --format --no-trunc --noheading -q --quiet"),
        ("network rm", "-f --force -t --time"),
    ];

    #[test]
    fn every_flag_of_podmans_is_one_of_godwits_or_is_refused_with_what_to_type_instead() {
        let definition = crate::definition();
        for (verb, flags) in PODMAN_FLAGS {
            let found = verb.split(' ').try_fold(&definition, |level, verb| level.find_subcommand(verb));
            let found = found.unwrap_or_else(|| panic!("no {verb}"));
            for flag in flags.split_whitespace() {
                let has = found.get_arguments().any(|argument| {
                    let long = argument.get_long_and_visible_aliases().unwrap_or_default();
                    let hidden = argument.get_all_aliases().unwrap_or_default();
                    let short = argument.get_short_and_visible_aliases().unwrap_or_default();
                    let hidden_short = argument.get_all_short_aliases().unwrap_or_default();
                    match flag.strip_prefix("--") {
                        Some(name) => long.contains(&name) || hidden.contains(&name),
                        None => short.iter().chain(&hidden_short).any(|name| flag.ends_with(*name)),
                    }
                });
                if !has {
                    let image = if *verb == "run" { "--image i.tar " } else { "" };
                    let sentence = said(&format!("godwit {verb} {image}{flag} x")).unwrap_or_default();
                    assert!(sentence.starts_with(&format!("godwit {verb} has no {flag}: ")), "{sentence}");
                }
            }
        }
        for (line, words) in [
            ("godwit --node ps volume rm -f x", "godwit volume rm has no -f: "),
            ("godwit ps -af x", "godwit ps has no -f: "),
            ("godwit start -a x", "godwit logs -f NAME"),
            ("godwit exec -it -d x sh", "godwit exec has no -d: "),
            ("godwit stop --frobnicate x", "unexpected argument"),
        ] {
            let sentence = said(line).unwrap_or_default();
            assert!(sentence.contains(words), "{line}: {sentence}");
        }
    }

    /// What is to be typed instead can be typed.
    #[test]
    fn verbs_that_are_named_exist() {
        let definition = crate::definition();
        let flags = FLAGS.iter().map(|(_, flags, instead)| (flags, instead));
        let flags = flags.chain(BELOW.iter().map(|(_, verbs, instead)| (verbs, instead)));
        for (habit, instead) in VERBS.iter().chain(RUN).map(|(habit, instead)| (habit, instead)).chain(flags)
        {
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
