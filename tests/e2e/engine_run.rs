//! Services whose containers the user's engine makes (`godwit run --engine`): managed by plain `podman` and `docker` from the
//! start, moved, and gone without a trace where they could not be made. Needs root, Podman and Docker.

use std::fs;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_lab::workload::{RedisClient, RedisLoad, Workload};
use godwit_tests::hold::{MADE, STARTED};
use godwit_tests::victim::traces::{nothing_more, steady_traces};
use godwit_tests::{CLIENT, PATIENCE, wait_for};
use serde_json::Value;

use crate::engine_nodes::{ADDRESS, Engine, IMAGE, Nodes, is_tried};

/// A port of every node that leads to it.
const PORT: u16 = 16381;
/// Data in Redis.
const FILL: u64 = 8 << 20;

#[test]
fn redis_that_podman_was_told_to_make_moves_and_is_podmans_wherever_it_is() {
    made_and_moved("podman");
}

#[test]
fn redis_that_docker_was_told_to_make_moves_and_is_dockers_wherever_it_is() {
    made_and_moved("docker");
}

fn made_and_moved(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let nodes = Nodes::up(engine, "made", Workload::Redis, &[]);
    let publish = format!("{PORT}:6379");
    let mut more =
        vec!["--restart", "always", "--label", "tier=x", "--memory", "512m", "--publish", &publish];
    more.extend(nodes.preset.env.iter().flat_map(|entry| ["--env", entry]));
    more.extend(nodes.preset.user.iter().flat_map(|user| ["--user", user]));
    let command: Vec<_> = nodes.preset.command.iter().map(String::as_str).collect();
    assert_eq!(nodes.bed.done("a", &nodes.words(IMAGE, &more, &command)), "cache\n");
    nodes.is_at("a", "running");
    let shown = nodes.is_shown("a", "running");
    let inspected = nodes.inspect("a");
    assert_eq!((&shown["engine"], &shown["container_id"]), (&engine.into(), &inspected["Id"]));
    assert_eq!(shown["pid"], inspected["State"]["Pid"]);
    assert_eq!(shown["memory_bytes"], 512 << 20);
    assert_eq!(inspected["Config"]["Labels"]["tier"], "x");
    assert_eq!(inspected["Config"]["Hostname"], "cache");

    assert_eq!(nodes.own("a", &["ps", "--format", "{{.Image}}"]), format!("{IMAGE}\n"));

    let publishes = |node: &str| {
        let at = SocketAddrV4::new(nodes.bed.lab().config().address(node).unwrap(), PORT);
        RedisClient::connect(nodes.bed.lab(), CLIENT, at, PATIENCE).unwrap();
    };
    publishes("a");
    nodes.connect().fill(FILL).unwrap();
    let load = RedisLoad::start(nodes.bed.lab(), CLIENT, nodes.preset.at(ADDRESS), 1000).unwrap();
    nodes.bed.move_to_and_fro("cache", |number, here| {
        let lap = load.lap().unwrap();
        assert!(lap.is_clean(), "move {number}: {lap:?}");
        nodes.is_at(here, "running");
    });
    drop(load);
    let here = if nodes.listed("a").is_empty() { "b" } else { "a" };

    publishes(here);
    // Plain commands, there.
    assert_eq!(nodes.own(here, &["exec", "cache", "/bin/sh", "-c", "echo inside"]), "inside\n");
    assert_eq!(nodes.bed.done(here, &["exec", "cache", "/bin/sh", "-c", "echo inside"]), "inside\n");
    let words =
        ["exec", "--env", "KEY=a\nb", "--env", "WORD=c d", "cache", "/bin/sh", "-c", "echo \"$KEY $WORD\""];
    assert_eq!(nodes.bed.done(here, &words), "a\nb c d\n");
    assert_eq!(nodes.inspect(here)["Config"]["Labels"]["tier"], "x");
    let refused = nodes.bed.godwit(here, &["logs", "cache"]);
    assert!(refused.stderr.contains(&format!("{engine} logs")), "{refused:?}");
    nodes.own(here, &["stop", "--time", "3", "cache"]);
    nodes.is_shown(here, "stopped");
    nodes.own(here, &["start", "cache"]);
    nodes.is_shown(here, "running");
    nodes.connect();
    nodes.bed.done(here, &["stop", "cache"]);
    nodes.is_at(here, "exited");
    nodes.bed.done(here, &["start", "cache"]);
    nodes.is_at(here, "running");
    nodes.connect();
    // Its policy.
    let pid = nodes.bed.pid(here, "cache");
    let killed = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    wait_for("the engine to start it, and godwit to follow", || {
        (![0, pid].contains(&nodes.bed.pid(here, "cache"))).then_some(())
    });
    nodes.connect();
    nodes.bed.done(here, &["rm", "--force", "cache"]);
    assert_eq!((nodes.listed("a"), nodes.listed("b")), (String::new(), String::new()));
    nodes.down();
}

#[test]
fn a_health_check_that_podman_was_told_moves_with_its_container() {
    checked_and_moved("podman");
}

#[test]
fn a_health_check_that_docker_was_told_moves_with_its_container() {
    checked_and_moved("docker");
}

fn checked_and_moved(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let nodes = Nodes::up(engine, "healthy", Workload::Redis, &[]);
    let line = "redis-cli ping >>/checks";
    let mut more = vec!["--health-cmd", line, "--health-interval", "250ms", "--health-retries", "7"];
    more.extend(["--health-timeout", "20s", "--health-start-period", "1m30s"]);
    let command: Vec<_> = nodes.preset.command.iter().map(String::as_str).collect();
    nodes.bed.done("a", &nodes.words(IMAGE, &more, &command));
    let check = |node: &str| nodes.inspect(node)["Config"]["Healthcheck"].clone();
    let told = check("a");
    assert_eq!(told["Test"], serde_json::json!(["CMD-SHELL", line]), "{told}");
    for (setting, value) in [
        ("Interval", 250_000_000_u64),
        ("Retries", 7),
        ("Timeout", 20_000_000_000),
        ("StartPeriod", 90_000_000_000),
    ] {
        assert_eq!(told[setting], value, "{setting}: {told}");
    }
    let checks = |node: &str| {
        let lines = nodes.own(node, &["exec", "cache", "/bin/sh", "-c", "wc -l <>/checks"]);
        lines.trim().parse::<u32>().unwrap()
    };
    let is_healthy = |node: &str| {
        wait_for(&format!("{engine} on {node} to find it healthy"), || {
            // No systemd has Podman check what it has started in a lab.
            if engine == "podman" && node == "a" {
                // It fails as long as Redis does not listen.
                nodes.call(node, &["healthcheck", "run", "cache"]);
            }
            (nodes.inspect(node)["State"]["Health"]["Status"] == "healthy").then_some(())
        });
    };
    is_healthy("a");
    assert!(checks("a") > 0);
    nodes.bed.migrate("cache", "a", "b");
    nodes.is_at("b", "running");
    assert_eq!(check("b"), told);
    is_healthy("b");
    let before = checks("b");
    wait_for("a check there", || (checks("b") > before).then_some(()));
    nodes.bed.done("b", &["rm", "--force", "cache"]);

    // And none at all.
    nodes.bed.done("a", &nodes.words(IMAGE, &["--no-healthcheck"], &command));
    assert_eq!(check("a")["Test"], serde_json::json!(["NONE"]));
    nodes.down();
}

#[test]
fn a_program_that_podman_starts_has_its_network_from_its_first_instruction() {
    first_instruction("podman");
}

#[test]
fn a_program_that_docker_starts_has_its_network_from_its_first_instruction() {
    first_instruction("docker");
}

/// An image layout with an entrypoint.
fn layout(nodes: &Nodes) -> PathBuf {
    let tool = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {said}");
    };
    let (layout, bundle) = (nodes.bed.scratch().join("layout"), nodes.bed.scratch().join("bundle"));
    let (tag, bundle_text) = (format!("{}:latest", layout.display()), bundle.to_str().unwrap());
    tool("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    tool("umoci", &["new", "--image", &tag]);
    tool("umoci", &["unpack", "--image", &tag, bundle_text]);
    let root = bundle.join("rootfs");
    tool("cp", &["-a", &format!("{}/.", nodes.preset.rootfs.display()), root.to_str().unwrap()]);
    for directory in ["data", "scratch"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    tool("umoci", &["repack", "--image", &tag, bundle_text]);
    tool(
        "umoci",
        &["config", "--image", &tag, "--config.entrypoint", "/bin/sh", "--config.entrypoint", "-c"],
    );
    layout
}

fn first_instruction(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let nodes = Nodes::up(engine, "first", Workload::Busybox, &["--subnet6", "fd67:6f64::/96"]);
    let layout = layout(&nodes);
    nodes.bed.done("a", &["network", "create", "back", "--subnet", "10.89.0.0/24"]);
    let command = "busybox ip -o addr; echo color \"$COLOUR\"; echo \"<$KEY>\"; touch /data/file /scratch/file; touch /x; while :; do sleep 1; done";
    let more = [
        ["--volume", "data:/data"],
        ["--mount", "type=tmpfs,dst=/scratch,size=1m"],
        ["--env", "COLOUR=\"blue\" #1"],
        ["--env", "KEY=begin\nend"],
        ["--cap-drop", "ALL"],
        ["--security-opt", "no-new-privileges"],
        ["--pids-limit", "50"],
        ["--ulimit", "core=0"],
        // Podman forgets its settings for these then, and a container here may not have more.
        ["--ulimit", "nofile=20000"],
        ["--ulimit", "nproc=20000"],
        ["--restart", "on-failure:3"],
        ["--network", "default:ip=10.88.0.10"],
        ["--network", "back:ip=10.89.0.5"],
    ];
    let mut words = vec![
        "run",
        "--engine",
        engine,
        "--name",
        "cache",
        "--image",
        layout.to_str().unwrap(),
        "--read-only",
    ];
    words.extend(more.concat());
    words.extend(["--", command]);
    nodes.bed.done("a", &words);
    let shown = nodes.is_shown("a", "running");
    // The last words on standard error and on standard output, which an engine reads apart.
    let lives = |said: &str, times: usize| {
        ["Read-only", "<begin\nend>"].iter().all(|last| said.matches(last).count() == times)
    };
    let said = wait_for("what it writes", || Some(nodes.log("a", "cache")).filter(|said| lives(said, 1)));
    let addresses = ["10.88.0.10/", "10.89.0.5/", shown["address6"].as_str().unwrap()];
    assert!(addresses[2].starts_with("fd67:"), "{shown}");
    for address in &addresses {
        assert!(said.contains(address), "{address}: {said}");
    }
    assert!(said.contains("color \"blue\" #1") && said.contains("<begin\nend>"), "{said}");
    assert_eq!(nodes.own("a", &["volume", "ls", "--format", "{{.Name}}"]), "data\n");
    // From the first instruction of its next life, too, for which the engine knows of no network.
    nodes.own("a", &["restart", "--time", "0", "cache"]);
    wait_for("godwit to follow", || {
        (![Value::Null, 0.into(), shown["pid"].clone()].contains(&nodes.is_shown("a", "running")["pid"]))
            .then_some(())
    });
    let again =
        wait_for("what it writes again", || Some(nodes.log("a", "cache")).filter(|said| lives(said, 2)));
    for address in &addresses {
        assert_eq!(again.matches(address).count(), 2, "{address}: {again}");
    }
    // It comes, with its image, to a node that has none.
    nodes.bed.migrate("cache", "a", "b");
    nodes.is_at("b", "running");
    assert_eq!(nodes.own("b", &["exec", "cache", "/bin/ls", "/data"]), "file\n");
    // So it is there, also when the node has forgotten what is below /run/godwit for it. What it wrote on a may have come.
    let had = nodes.log("b", "cache").matches("Read-only").count();
    for times in [1, 2] {
        let first = nodes.bed.pid("b", "cache");
        nodes.own("b", &["restart", "--time", "0", "cache"]);
        let there = wait_for("what it writes there", || {
            Some(nodes.log("b", "cache")).filter(|said| lives(said, had + times))
        });
        for address in &addresses {
            assert_eq!(there.matches(address).count(), had + times, "{address}: {there}");
        }
        wait_for("godwit to follow", || (![0, first].contains(&nodes.bed.pid("b", "cache"))).then_some(()));
        if let (Engine::Docker(_), 1) = (&nodes.engine, times) {
            let id = nodes.inspect("b")["Id"].as_str().unwrap().to_owned();
            let place = Path::new("/run/godwit/labs").join(nodes.bed.lab().name()).join("b/docker").join(id);
            fs::remove_dir_all(place).unwrap();
            nodes.bed.lab().restart_node("b").unwrap();
        }
    }
    nodes.bed.done("b", &["rm", "--force", "cache"]);
    // The image that it was made from is there, as after a pull.
    nodes.bed.done("a", &nodes.words(layout.to_str().unwrap(), &[], &["sleep 1000"]));
    nodes.is_at("a", "running");
    nodes.down();
}

#[test]
fn limits_of_a_container_of_podmans_change_and_move() {
    limits_change("podman");
}

#[test]
fn limits_of_a_container_of_dockers_change_and_move() {
    limits_change("docker");
}

/// Memory, and CPU time in a period, that a service may have here: of cgroups of version 1, else of version 2. Nothing while
/// it is started again.
fn limits(nodes: &Nodes, node: &str) -> Option<(String, String)> {
    let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", nodes.bed.pid(node, "cache"))).ok()?;
    let path = |wanted: &str| {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == wanted).then(|| path.to_owned())
        })
    };
    let read = |controller: &str, files: [&str; 2]| {
        let file = match path(controller) {
            Some(path) => format!("/sys/fs/cgroup/{controller}{path}/{}", files[0]),
            None => format!("/sys/fs/cgroup{}/{}", path("")?, files[1]),
        };
        Some(fs::read_to_string(file).ok()?.split_whitespace().next()?.to_owned())
    };
    let memory = read("memory", ["memory.limit_in_bytes", "memory.max"])?;
    Some((memory, read("cpu", ["cpu.cfs_quota_us", "cpu.max"])?))
}

fn limits_change(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let nodes = Nodes::up(engine, "limits", Workload::Busybox, &[]);
    nodes.bed.done("a", &nodes.words(IMAGE, &["--memory", "64m"], &["/bin/sleep", "1000"]));
    assert_eq!(limits(&nodes, "a").unwrap().0, (64 << 20).to_string());
    let refused = |more: &[&str], why: &str| {
        let said = nodes.bed.godwit("a", &[&["update"], more, &["cache"]].concat());
        assert!(said.code == 1 && said.stderr.contains(why), "{said:?}");
    };
    refused(&["--memory", "0"], "cannot lift a memory limit");
    if engine == "podman" {
        refused(&["--restart", "always"], "--restart");
        refused(&["--pids-limit", "5"], "--pids-limit");
    } else {
        nodes.bed.done("a", &["update", "--restart", "on-failure:3", "--pids-limit", "50", "cache"]);
    }
    nodes.bed.done("a", &["update", "--memory", "96m", "--cpus", "0.5", "cache"]);
    let changed = Some(((96 << 20).to_string(), "50000".to_owned()));
    assert_eq!(limits(&nodes, "a"), changed);
    // Also in its next life there, by the engine and by godwit.
    let first = nodes.bed.pid("a", "cache");
    nodes.own("a", &["restart", "--time", "0", "cache"]);
    wait_for("godwit to follow", || (![0, first].contains(&nodes.bed.pid("a", "cache"))).then_some(()));
    wait_for("its limits", || (limits(&nodes, "a") == changed).then_some(()));
    nodes.bed.done("a", &["stop", "--time", "0", "cache"]);
    nodes.bed.done("a", &["start", "cache"]);
    assert_eq!(limits(&nodes, "a"), changed);
    // And elsewhere, of which the engine there knows.
    nodes.bed.migrate("cache", "a", "b");
    assert_eq!(limits(&nodes, "b"), changed);
    let shown = nodes.is_shown("b", "running");
    assert_eq!((&shown["memory_bytes"], &shown["cpu_millis"]), (&(96 << 20).into(), &500.into()));
    assert_eq!(nodes.inspect("b")["HostConfig"]["Memory"], 96 << 20);
    if engine == "docker" {
        wait_for("its restart policy", || {
            let policy = nodes.inspect("b")["HostConfig"]["RestartPolicy"].clone();
            (policy["Name"] == "on-failure" && policy["MaximumRetryCount"] == 3).then_some(())
        });
        assert_eq!(nodes.inspect("b")["HostConfig"]["PidsLimit"], 50);
    }
    nodes.own("b", &["restart", "--time", "0", "cache"]);
    wait_for("its limits", || (limits(&nodes, "b") == changed).then_some(()));
    // One that its user has removed has none.
    nodes.own("b", &["rm", "--force", "cache"]);
    nodes.is_shown("b", "stopped");
    let said = nodes.bed.godwit("b", &["update", "--memory", "97m", "cache"]);
    assert!(said.code == 1 && said.stderr.to_lowercase().contains("no such container"), "{said:?}");
    nodes.down();
}

#[test]
fn nothing_is_left_where_podman_cannot_make_a_service() {
    nothing_left("podman");
}

#[test]
fn nothing_is_left_where_docker_cannot_make_a_service() {
    nothing_left("docker");
}

fn nothing_left(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let nodes = Nodes::up(engine, "left", Workload::Busybox, &[]);
    let sleeps = ["/bin/sleep", "1000"];
    // What an engine leaves of its first container is not the service's, nor are programs that put it away.
    nodes.bed.done("a", &nodes.words(IMAGE, &[], &sleeps));
    nodes.bed.done("a", &["rm", "--force", "cache"]);
    let passing =
        |trace: &String| ["conmon", "podman"].iter().any(|name| *trace == format!("process {name}"));
    let before = steady_traces(&nodes.bed, "a", |traces| !traces.iter().any(passing));
    let volumes = || nodes.own("a", &["volume", "ls", "--quiet"]);
    let is_gone = |what: &str| {
        assert_eq!((nodes.listed("a").as_str(), volumes().as_str()), ("", ""), "{what}");
        assert_eq!(nodes.bed.godwit("a", &["inspect", "cache"]).code, 1, "{what}");
        nothing_more(&nodes.bed, "a", &before);
    };
    let refused = |more: &[&str], command: &[&str], why: &[&str]| {
        let said = nodes.bed.godwit("a", &nodes.words(IMAGE, more, command));
        assert_eq!(said.code, 125, "{said:?}");
        for words in why {
            assert!(said.stderr.contains(words), "{words}: {said:?}");
        }
        is_gone(why[0]);
    };
    let volume = ["--volume", "data:/data"];
    refused(&volume, &["/nonesuch"], &["nonesuch"]);
    wait_for("a start that is seen to end", || {
        let script = ["/bin/sh", "-c", "echo no luck >&2; exit 7"];
        let said = nodes.bed.godwit("a", &nodes.words(IMAGE, &volume, &script));
        assert_eq!(said.code, 125, "{said:?}");
        is_gone("exit code 7");
        // Its process may be seen to have gone before its engine tells how it ended.
        let told = ["exit code 7", "no luck"].iter().all(|words| said.stderr.contains(words));
        assert!(told || said.stderr.contains("has ended at once; try it with"), "{said:?}");
        told.then_some(())
    });
    refused(&[&volume[..], &["--rm"]].concat(), &sleeps, &["--rm", "godwit rm"]);
    refused(&["--volume", "/no/such:/srv"], &sleeps, &["/no/such", "does not exist on this node"]);
    let none = ["run", "--engine", engine, "--name", "cache", "--image", "localhost/none:1", "sleep"];
    let said = nodes.bed.godwit("a", &none);
    assert!(said.code == 125 && said.stderr.contains("pull the image of container cache"), "{said:?}");
    is_gone("no such image");

    // A container of a user's that has the name stays, and so does a volume.
    nodes.own("a", &["volume", "create", "data"]);
    nodes.own("a", &["run", "--detach", "--name", "cache", "--network", "none", IMAGE, "/bin/sleep", "1000"]);
    let id = nodes.inspect("a")["Id"].clone();
    let said = nodes.bed.godwit("a", &nodes.words(IMAGE, &volume, &sleeps));
    assert!(said.code == 125 && said.stderr.contains("already in use"), "{said:?}");
    assert_eq!((nodes.listed("a").as_str(), volumes().as_str()), ("cache running\n", "data\n"));
    assert_eq!(nodes.inspect("a")["Id"], id);
    // One whose volume another container has is never started: its program would write to what is another's.
    nodes.own("a", &["rm", "--force", "cache"]);
    let other = ["run", "--detach", "--name", "other", "--network", "none", "--volume", "data:/data", IMAGE];
    nodes.own("a", &[&other[..], &sleeps].concat());
    let writes = ["/bin/sh", "-c", "echo intruder >/data/file; sleep 1000"];
    let said = nodes.bed.godwit("a", &nodes.words(IMAGE, &volume, &writes));
    assert!(said.code == 125 && said.stderr.contains("another container uses its volume data"), "{said:?}");
    assert_eq!(nodes.listed("a"), "other running\n");
    assert_eq!(nodes.own("a", &["exec", "other", "/bin/ls", "/data"]), "");
    nodes.own("a", &["rm", "--force", "other"]);
    nodes.own("a", &["volume", "rm", "data"]);
    is_gone("one of a user's");

    // Its daemon dies meanwhile: the next one removes what there is, which has been made, or runs.
    for (point, state) in [(MADE, "created"), (STARTED, "running")] {
        nodes.points.hold(point);
        let mut running = nodes.bed.command("a", &nodes.words(IMAGE, &volume, &sleeps)).spawn().unwrap();
        nodes.points.reached(point);
        assert_eq!(nodes.listed("a"), format!("cache {state}\n"));
        nodes.bed.lab().stop_node("a").unwrap();
        assert!(!running.wait().unwrap().success());
        nodes.points.let_go(point);
        nodes.bed.lab().start_node("a").unwrap();
        wait_for("what was made to be gone", || {
            (nodes.listed("a").is_empty() && volumes().is_empty()).then_some(())
        });
        is_gone(point);
    }
    // The name, the address and the volume are free, and it stays when its daemon dies.
    nodes.bed.done("a", &nodes.words(IMAGE, &volume, &sleeps));
    nodes.bed.lab().restart_node("a").unwrap();
    nodes.is_shown("a", "running");
    nodes.is_at("a", "running");
    nodes.down();
}
