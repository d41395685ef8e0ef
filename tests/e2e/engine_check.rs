//! `godwit check` of a container of Podman's or Docker's that is not adopted: whether it can be and could move, and nothing of it
//! changes. Needs root, Podman and Docker.

use std::path::Path;

use godwit_lab::workload::{Preset, Rootfs, Workload};
use godwit_tests::{Said, compile, wait_for};
use serde_json::Value;

use crate::engine_nodes::{ADDRESS, Engine, IMAGE, Nodes};

/// An image with `queue.c`.
const QUEUE: &str = "localhost/queue:1";

/// Opens a POSIX message queue, which no service can take along, and holds it.
const HOLDS_QUEUE: &str = "/queue 7000 & until /bin/busybox grep -q :1B58 /proc/net/tcp; do :; done; (echo open; exec sleep 1000) | /bin/busybox nc 127.0.0.1 7000";

fn told(said: &Said) -> Value {
    serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"))
}

/// A list of sentences in it, as one text.
fn sentences(told: &Value, list: &str) -> String {
    let all = told[list].as_array().unwrap().iter();
    all.map(|sentence| sentence.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Has the engine start `cache` on node a, without a network.
fn start(nodes: &Nodes) {
    let preset = &nodes.preset;
    let mut words = vec!["run", "--detach", "--name", "cache", "--network", "none"];
    words.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
    words.extend(preset.user.iter().flat_map(|user| ["--user", user]));
    words.push(IMAGE);
    words.extend(preset.command.iter().map(String::as_str));
    nodes.own("a", &words);
}

/// Node a has nothing of a service of this name, and no process of the container's a tracker.
fn nothing_is_left(nodes: &Nodes, name: &str, pid: u64) {
    assert_eq!(nodes.bed.done("a", &["ps", "--all", "--quiet"]), "");
    let lab = nodes.bed.lab();
    let directory = lab.state("a").unwrap().join("services").join(name);
    assert!(directory.parent().unwrap().is_dir() && !directory.exists(), "{}", directory.display());
    let run = Path::new("/run/godwit/labs").join(lab.name()).join("a");
    assert!(run.is_dir());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let of_it = mounts.lines().find(|line| {
        let place = Path::new(line.split(' ').nth(4).unwrap());
        place.starts_with(&run) && place.to_string_lossy().contains(name)
    });
    assert_eq!(of_it, None);
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let open: Vec<_> = open.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(!open.is_empty());
    assert!(!open.iter().any(|file| file.to_string_lossy().contains("userfaultfd")), "{open:?}");
}

#[test]
fn a_container_of_podmans_is_checked_before_its_adoption_and_stays_what_it_is() {
    is_checked("podman");
}

#[test]
fn a_container_of_dockers_is_checked_before_its_adoption_and_stays_what_it_is() {
    is_checked("docker");
}

fn is_checked(engine: &str) {
    let nodes = Nodes::up(engine, "examined", Workload::Redis, &[]);
    start(&nodes);
    let container = format!("{engine}:cache");
    let inspect = || {
        let mut inspected = nodes.inspect("a");
        // Podman notes when it has described a container, and where it would have dumped it to.
        if engine == "podman" {
            let state = inspected["State"].as_object_mut().unwrap();
            state.retain(|field, _| !["FinishedAt", "CheckpointPath"].contains(&field.as_str()));
        }
        inspected
    };
    let before = (nodes.listed("a"), inspect());
    let pid = before.1["State"]["Pid"].as_u64().unwrap();
    let interfaces = || {
        let told = nodes.own("a", &["exec", "cache", "/bin/cat", "/proc/net/dev"]);
        told.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect::<Vec<_>>()
    };
    let had = interfaces();

    let alone = nodes.bed.godwit("a", &["--json", "check", &container, "--mode", "precopy"]);
    let answer = told(&alone);
    assert_eq!(
        (alone.code, &answer["name"], &answer["source"]),
        (0, &container.as_str().into(), &"a".into())
    );
    assert_eq!(
        (&answer["forecast"]["mode"], &answer["forecast"]["bandwidth"]),
        (&"precopy".into(), &Value::Null)
    );
    assert!(answer["forecast"]["written_bytes_per_second"].is_number(), "{answer}");
    let id = before.1["Id"].as_str().unwrap();
    let there = nodes.bed.check("a", &[&format!("{engine}:{id}"), "--to", "b"]);
    let forecast = told(&there)["forecast"].clone();
    assert_eq!(there.code, 0, "{there:?}");
    for figure in ["memory_bytes", "layer_bytes", "bandwidth", "wire_bytes", "frozen_ms", "total_ms"] {
        assert!(forecast[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure}: {forecast}");
    }
    let shown = nodes.bed.godwit("a", &["check", &container, "--to", "b"]);
    let verdict = format!("{container} can be adopted and move from a to b\n");
    assert!(shown.stdout.starts_with(&verdict), "{shown:?}");
    for (words, why) in [
        (vec![format!("{engine}:none")], "no container none"),
        (vec![format!("{engine}:")], "cannot be a service's name"),
        (vec![container.clone(), "--to".into(), "a".into()], "container cache is on node a already"),
        (vec![container.clone(), "--to".into(), "nowhere".into()], "there is no node nowhere"),
        (vec![container.clone(), "--mount".into(), "/none=skip".into()], "mounted at /none"),
    ] {
        let said = nodes.bed.godwit("a", &[&["check".to_owned()], &words[..]].concat());
        assert!(said.code == 1 && said.stdout.is_empty() && said.stderr.contains(why), "{words:?}: {said:?}");
    }
    nothing_is_left(&nodes, "cache", pid);
    // Docker shows the command that found the interfaces until it has noticed its end.
    wait_for("the engine to say the same of the container as before", || {
        ((nodes.listed("a"), inspect()) == before).then_some(())
    });
    assert_eq!(interfaces(), had);
    assert_eq!(nodes.listed("b"), "");

    // Nothing of that is in the way of an adoption, after which its service is checked.
    let address = ADDRESS.to_string();
    nodes.bed.done("a", &["adopt", &container, "--ip", &address]);
    let of_service = nodes.bed.check("a", &[&container, "--to", "b"]);
    assert_eq!((of_service.code, &told(&of_service)["name"]), (0, &"cache".into()), "{of_service:?}");
    nodes.bed.migrate("cache", "a", "b");
    nodes.is_at("b", "running");
    nodes.connect();
    nodes.down();
}

#[test]
fn what_keeps_a_container_of_podmans_from_its_adoption_or_a_move_is_named_before() {
    is_named("podman");
}

#[test]
fn what_keeps_a_container_of_dockers_from_its_adoption_or_a_move_is_named_before() {
    is_named("docker");
}

fn is_named(engine: &str) {
    let nodes = Nodes::up(engine, "unfit", Workload::Redis, &[]);
    let rootfs = nodes.bed.scratch().join("queue");
    Rootfs::new(&rootfs).unwrap();
    compile("queue.c", &rootfs.join("queue"));
    let preset = Preset { rootfs, command: Vec::new(), env: Vec::new(), user: None, port: 7000 };
    match &nodes.engine {
        Engine::Podman(podmans) => podmans.image(&nodes.bed, &["a"], &preset, QUEUE),
        Engine::Docker(dockers) => dockers.image(&["a"], &preset, QUEUE),
    }
    let run = |name: &str, options: &[&str], image: &str, command: &[&str]| {
        let words = ["run", "--detach", "--name", name];
        nodes.own("a", &[&words[..], options, &[image], command].concat());
    };
    let sleep = ["/bin/sleep", "1000"];
    let check = |name: &str, more: &[&str]| {
        let container = format!("{engine}:{name}");
        let said = nodes.bed.check("a", &[&[container.as_str(), "--to", "b"], more].concat());
        (said.code, told(&said))
    };

    // What an adoption refuses is told in its words, all of it.
    run("unfit", &["--network", "none", "--device", "/dev/fuse", "--rm"], IMAGE, &sleep);
    let (code, answer) = check("unfit", &[]);
    assert_eq!((code, &answer["forecast"]), (1, &Value::Null), "{answer}");
    let refused = nodes.bed.godwit("a", &["adopt", &format!("{engine}:unfit")]);
    let objections = answer["objections"].as_array().unwrap();
    assert!(
        objections.iter().all(|each| refused.stderr.contains(each.as_str().unwrap())),
        "{refused:?} {answer}"
    );
    for reason in ["devices of the node", "--rm"] {
        assert!(sentences(&answer, "objections").contains(reason), "{reason}: {answer}");
    }
    let shown = nodes.bed.godwit("a", &["check", &format!("{engine}:unfit")]);
    let verdict = format!("{engine}:unfit cannot be adopted and leave a:\n  it ");
    assert!(shown.code == 1 && shown.stdout.starts_with(&verdict), "{shown:?}");

    // What CRIU cannot dump, with the process and a remedy.
    run("queue", &["--network", "none"], QUEUE, &["/bin/sh", "-c", HOLDS_QUEUE]);
    let answer = wait_for("the queue to be open", || {
        let (code, answer) = check("queue", &[]);
        (code == 1).then_some(answer)
    });
    let obstacle = &answer["obstacles"][0];
    assert_eq!(
        (&obstacle["name"], &answer["objections"]),
        (&"queue".into(), &Value::Array(Vec::new())),
        "{answer}"
    );
    assert!(obstacle["what"].as_str().unwrap().contains("/held open"), "{answer}");
    assert!(obstacle["why"].as_str().unwrap().contains("mq_unlink"), "{answer}");

    // What its user has to say at the adoption or of the move.
    let published = ["--publish", "16399:7000"];
    run("plain", &published, IMAGE, &sleep);
    let (code, answer) = check("plain", &[]);
    assert!(code == 2 && sentences(&answer, "warnings").contains("--leave-networks"), "{answer}");
    let directory = nodes.bed.scratch().join("bound");
    std::fs::create_dir(&directory).unwrap();
    let bind = format!("{}:/data", directory.display());
    run("bound", &["--network", "none", "--volume", &bind], IMAGE, &sleep);
    let (code, answer) = check("bound", &[]);
    assert!(code == 1 && sentences(&answer, "objections").contains("say --mount /data=shared"), "{answer}");
    let (code, answer) = check("bound", &["--mount", "/data=copy"]);
    assert!(code == 2 && sentences(&answer, "warnings").contains("go with it"), "{answer}");
    // Its name is a service's.
    run("taken", &["--network", "none"], IMAGE, &sleep);
    nodes.bed.done("a", &["adopt", &format!("{engine}:plain"), "--name", "taken", "--leave-networks"]);
    let (code, answer) = check("taken", &[]);
    assert!(code == 1 && sentences(&answer, "objections").contains("--name"), "{answer}");
    nodes.own("a", &["stop", "--time", "0", "bound"]);
    let stopped = nodes.bed.godwit("a", &["check", &format!("{engine}:bound")]);
    assert!(stopped.code == 1 && stopped.stderr.contains("does not run; start it first"), "{stopped:?}");
    assert_eq!(nodes.bed.done("a", &["ps", "--all", "--quiet"]), "taken\n");

    // What is so of all of the engine's containers is told of the node.
    let doctor = || {
        let said = nodes.bed.godwit("b", &["--json", "doctor"]);
        let checks = told(&said)["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["name"] == engine).unwrap()
    };
    // An engine that is busy answers later.
    wait_for("an engine that is fit", || (doctor()["status"] == "ok").then_some(()));
    if let Engine::Docker(dockers) = &nodes.engine {
        dockers.forget_runtimes("b");
        let check = wait_for("dockerd to have read its settings", || {
            Some(doctor()).filter(|check| check["status"] == "degraded")
        });
        let has = |field: &str, words: &str| check[field].as_str().unwrap().contains(words);
        assert!(has("found", "does not know the runtime godwit") && has("advice", "daemon.json"), "{check}");
    }
    nodes.down();
}
