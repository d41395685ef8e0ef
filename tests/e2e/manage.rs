//! What users of Podman and Docker do with a service beside moving it: a terminal in it, files to and from it, its figures,
//! signals, limits, and waiting for its end. Needs root.

use std::{
    fs,
    io::Write as _,
    net::{Ipv4Addr, UdpSocket},
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use godwit_lab::workload::{Preset, Workload};
use godwit_tests::{Bed, CLIENT, PATIENCE, wait_for};
use serde_json::Value;

const NAME: &str = "shell";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 96);

/// A shell's script in a service on node `a`, also of another engine.
fn up(test: &str, script: &str, flags: &[&str]) -> (Bed, Preset) {
    let bed = Bed::up(test);
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sh", "-c", script].map(str::to_owned).to_vec();
    bed.run("a", NAME, ADDRESS, &preset, flags);
    (bed, preset)
}

fn refused(bed: &Bed, node: &str, arguments: &[&str], words: &[&str]) {
    let said = bed.godwit(node, arguments);
    assert!(said.code != 0, "{arguments:?}: {said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "{arguments:?}: no {word:?} in {said:?}");
    }
}

fn inspect(bed: &Bed, node: &str) -> Value {
    bed.json(node, &["inspect", NAME])
}

/// A command of godwit that a user types at a terminal with 9 lines of 55 characters, which script(1) makes.
fn at_terminal(bed: &Bed, arguments: &[&str]) -> Child {
    let godwit = bed.command("a", arguments);
    let words = std::iter::once(godwit.get_program()).chain(godwit.get_args());
    let line: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let mut script = Command::new("script");
    // timeout(1) would keep the command out of the foreground of the terminal.
    let line = format!(
        "stty rows 9 cols 55; exec {}",
        line.join(" ").replacen("timeout", "timeout --foreground", 1)
    );
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env("TERM", "vt220");
    script.envs(godwit.get_envs().filter_map(|(name, value)| Some((name, value?))));
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_user_at_a_terminal_has_one_in_the_service_and_moves_are_refused_while_what_cannot_move_runs() {
    let (bed, _) = up("terminal", "exec sleep 100000", &[]);
    let mut typed = at_terminal(&bed, &["exec", "-it", NAME, "sh"]);
    let mut keyboard = typed.stdin.take().unwrap();
    let has =
        |command: &str| bed.done("a", &["exec", NAME, "ps"]).lines().any(|line| line.ends_with(command));
    wait_for("the shell on the terminal", || has(" sh").then_some(()));
    let migrate = ["migrate", NAME, "--to", "b"];
    let cannot = "1 command(s) that cannot move, started by `godwit exec` without a terminal or by its engine, still run in service shell";
    if bed.has_logs() {
        let mut piped = bed.command("a", &["exec", "-i", NAME, "cat"]).stdin(Stdio::piped()).spawn().unwrap();
        wait_for("the command without a terminal", || has(" cat").then_some(()));
        refused(&bed, "a", &migrate, &[cannot]);
        drop(piped.stdin.take());
        assert!(piped.wait().unwrap().success());
    } else {
        refused(&bed, "a", &migrate, &[cannot]);
    }
    keyboard
        .write_all(b"test -t 0 && test -t 1 && test -t 2 && stty size; echo is $TERM; sleep 88888\r")
        .unwrap();
    // Ctrl-C is the command's: the shell goes on.
    wait_for("the command on the terminal", || has(" sleep 88888").then_some(()));
    keyboard.write_all(b"\x03").unwrap();
    // Two commands of users at a time are none too many.
    let both: Vec<_> = (0..2).map(|_| bed.command("a", &["exec", NAME, "true"]).spawn().unwrap()).collect();
    assert!(both.into_iter().all(|mut command| command.wait().unwrap().success()));
    assert_eq!(bed.done("a", &["exec", "--user", "nobody", NAME, "id", "-u"]).trim(), "65534");
    keyboard.write_all(b"exit 7\r").unwrap();
    let shown = typed.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&shown.stdout);
    assert_eq!(shown.status.code(), Some(7), "{text}");
    assert!(text.contains("9 55\r\n") && text.contains("is vt220\r\n"), "{text}");
    drop(keyboard);
    bed.migrate(NAME, "a", "b");
    bed.migrate(NAME, "b", "a");
    if !bed.has_logs() {
        // Podman and Docker let a command go on whose user has left.
        return;
    }
    // A user who leaves takes the command along.
    let mut leaving = at_terminal(&bed, &["exec", "-it", NAME, "sleep", "99999"]);
    wait_for("the command", || has(" sleep 99999").then_some(()));
    leaving.kill().unwrap();
    leaving.wait().unwrap();
    wait_for("the command to be hung up", || (!has(" sleep 99999")).then_some(()));
    // Also one that does not read what was typed.
    let mut leaving = at_terminal(&bed, &["exec", "-it", NAME, "sleep", "99999"]);
    wait_for("the command", || has(" sleep 99999").then_some(()));
    let mut keyboard = leaving.stdin.take().unwrap();
    let typed = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok(length) = keyboard.write(&[b'x'; 4096]) {
                typed.fetch_add(length, Ordering::Relaxed);
            }
        });
        let (mut before, begun) = ((0, Instant::now()), Instant::now());
        // It is full when nothing is taken for a while. The writer ends with the command, whatever comes of this.
        while before.0 == 0 || before.1.elapsed() < Duration::from_millis(500) {
            let now = typed.load(Ordering::Relaxed);
            if now != before.0 {
                before = (now, Instant::now());
            }
            if begun.elapsed() > PATIENCE {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        leaving.kill().unwrap();
        leaving.wait().unwrap();
    });
    assert!(typed.into_inner() > 0);
    wait_for("the command to be hung up", || (!has(" sleep 99999")).then_some(()));
}

#[test]
fn files_are_copied_into_a_service_out_of_it_and_move_with_it() {
    let (bed, _) = up("copies", "exec sleep 100000", &[]);
    let here = bed.scratch().join("site");
    fs::create_dir_all(here.join("deep")).unwrap();
    fs::write(here.join("index"), vec![b'x'; 3 << 20]).unwrap();
    fs::write(here.join("deep/page"), "one").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", here.join("link")).unwrap();
    let (site, back) = (here.to_str().unwrap(), bed.scratch().join("back"));
    bed.done("a", &["cp", site, &format!("{NAME}:/srv")]);
    bed.migrate(NAME, "a", "b");
    bed.done("b", &["cp", &format!("{NAME}:/srv/."), back.to_str().unwrap()]);
    let same = Command::new("diff")
        .args(["--recursive", "--no-dereference"])
        .arg(&here)
        .arg(&back)
        .output()
        .unwrap();
    assert!(same.status.success(), "{same:?}");
    // The service sees it as a file of its own, and a link leads to what is in the service.
    let copied = bed.done("b", &["exec", NAME, "cat", "/srv/deep/page"]);
    assert_eq!(copied, "one");
    bed.done("b", &["exec", NAME, "--", "sh", "-c", "echo inside > /root-file; ln -s /root-file /srv/to"]);
    bed.done("b", &["cp", &format!("{NAME}:/srv/to"), back.join("new").to_str().unwrap()]);
    assert_eq!(fs::read_to_string(back.join("new")).unwrap(), "inside\n");
    let archive = bed.command("b", &["cp", &format!("{NAME}:/srv"), "-"]).output().unwrap();
    let listed = {
        let mut tar = Command::new("tar")
            .args(["--list"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = tar.stdin.take().unwrap();
        let writer = thread::spawn(move || input.write_all(&archive.stdout));
        let listed = tar.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        String::from_utf8(listed.stdout).unwrap()
    };
    let mut listed: Vec<_> = listed.lines().collect();
    listed.sort_unstable();
    assert_eq!(listed, ["srv/", "srv/deep/", "srv/deep/page", "srv/index", "srv/link", "srv/to"]);
    // The whole of it, without what the kernel makes as it is read.
    let all = bed.command("b", &["cp", &format!("{NAME}:/"), "-"]).output().unwrap();
    assert!(all.status.success(), "{}", String::from_utf8_lossy(&all.stderr));
    let whole = String::from_utf8_lossy(&all.stdout);
    assert!(whole.contains("root-file") && whole.contains("proc/") && !whole.contains("proc/1"));
    for (source, destination, words) in [
        ("shell:/none", "/tmp/x", "cannot find /none of the service"),
        ("/none", "shell:/x", "cannot copy /none"),
        (site, "shell:/none/x/", "/none"),
        ("nobody:/x", "/tmp/x", "there is no service nobody"),
        ("shell:/srv", "shell:/other", "godwit exec shell cp"),
        ("shell:/proc/1/status", "/tmp/x", "is made by the kernel"),
    ] {
        refused(&bed, "b", &["cp", source, destination], &[words]);
    }
    refused(&bed, "a", &["cp", "shell:/srv", "/tmp/x"], &["service shell is on node b"]);
}

#[test]
fn files_of_a_service_that_has_ended_can_be_copied_and_those_of_its_mounts_are_named() {
    let bed = Bed::up("post-mortem");
    let root = bed.build(Workload::Busybox).rootfs;
    let script = "echo last words > /log; echo kept > /data/file; exit 3";
    let run = ["run", "--name", NAME, "--rootfs", root.to_str().unwrap(), "-v", "store:/data"];
    bed.done("a", &[&run[..], &["--", "sh", "-c", script]].concat());
    assert_eq!(bed.done("a", &["wait", NAME]), "3\n");
    let log = bed.scratch().join("log");
    bed.done("a", &["cp", "shell:/log", log.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(&log).unwrap(), "last words\n");
    bed.done("a", &["cp", log.to_str().unwrap(), "shell:/read"]);
    refused(
        &bed,
        "a",
        &["cp", "shell:/data/file", "/tmp/x"],
        &["does not run", "godwit volume inspect store"],
    );
    refused(&bed, "a", &["kill", NAME], &["is not running"]);
    refused(&bed, "a", &["stats", "--no-stream", NAME], &["is not running"]);
    bed.done("a", &["start", NAME]);
    assert_eq!(bed.done("a", &["wait", NAME]), "3\n");
    bed.done("a", &["rm", NAME]);
    let store = bed.json::<Value>("a", &["volume", "inspect", "store"]);
    let file = Path::new(store["path"].as_str().unwrap()).join("file");
    assert_eq!(fs::read_to_string(file).unwrap(), "kept\n");
}

/// Whether a command that timeout(1) has started has its connection to the daemon, beside the two ends of a pair that its
/// runtime has for signals.
fn is_asking(command: &Child) -> bool {
    let children =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", command.id())).unwrap_or_default();
    let Some(pid) = children.split_whitespace().next() else { return false };
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count() > 2
}

#[test]
fn who_waits_for_a_service_learns_how_it_ended_wherever_it_has_moved() {
    // The first process of a PID namespace ignores signals that it does not handle.
    let script = "trap 'exit 5' TERM; while :; do sleep 0.1; done";
    let (bed, _) = up("waits", script, &[]);
    let waiting =
        |node: &str| bed.command_within(600, node, &["wait", NAME]).stdout(Stdio::piped()).spawn().unwrap();
    let from_the_start = waiting("a");
    wait_for("the waiting command to ask", || is_asking(&from_the_start).then_some(()));
    bed.migrate(NAME, "a", "b");
    // Asked of a node that has had it.
    let from_afar = waiting("a");
    wait_for("the waiting command to ask", || is_asking(&from_afar).then_some(()));
    bed.migrate(NAME, "b", "a");
    bed.migrate(NAME, "a", "b");
    bed.done("b", &["kill", "--signal", "TERM", NAME]);
    for waiting in [from_the_start, from_afar, waiting("a"), waiting("b")] {
        let said = waiting.wait_with_output().unwrap();
        assert_eq!((said.status.code(), String::from_utf8_lossy(&said.stdout).as_ref()), (Some(0), "5\n"));
    }
    let both = bed.godwit("b", &["wait", NAME, "nobody"]);
    assert_eq!((both.code, both.stdout.as_str()), (1, "5\n"), "{both:?}");
}

#[test]
fn a_service_that_is_to_be_removed_at_its_end_is_gone_with_its_files_wherever_it_ends() {
    let (bed, mut preset) = up("run-rm", "trap 'exit 5' TERM; while :; do sleep 0.1; done", &["--rm"]);
    let waiting = bed.command_within(600, "a", &["wait", NAME]).stdout(Stdio::piped()).spawn().unwrap();
    bed.migrate(NAME, "a", "b");
    // A daemon's start is no end.
    bed.lab().restart_node("b").unwrap();
    assert_eq!(inspect(&bed, "b")["remove"], true);
    bed.done("b", &["kill", "-s", "TERM", NAME]);
    let said = waiting.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "5\n");
    let files = |node: &str| bed.lab().state(node).unwrap().join("services").join(NAME);
    let is_gone = |node: &str| {
        wait_for(&format!("the service to be gone from node {node}"), || {
            let listed = bed.done(node, &["ps", "--all", "--quiet"]);
            (listed.is_empty() && !files(node).exists()).then_some(())
        });
    };
    is_gone("b");
    is_gone("a");
    // Also where a user ends it, and where it ends while its daemon is not there.
    preset.command = ["sleep", "100000"].map(str::to_owned).to_vec();
    bed.run("a", NAME, ADDRESS, &preset, &["--rm"]);
    bed.done("a", &["stop", "--time", "0", NAME]);
    is_gone("a");
    bed.run("a", NAME, ADDRESS, &preset, &["--rm"]);
    let pid = bed.pid("a", NAME);
    bed.lab().stop_node("a").unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    bed.lab().start_node("a").unwrap();
    is_gone("a");
}

/// What a process's cgroup has in a file of a controller: of version 1, else of version 2.
fn limit(bed: &Bed, node: &str, controller: &str, files: [&str; 2]) -> String {
    let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", bed.pid(node, NAME))).unwrap();
    let path = |wanted: &str| {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == wanted).then(|| path.to_owned())
        })
    };
    let file = match path(controller) {
        Some(path) => format!("/sys/fs/cgroup/{controller}{path}/{}", files[0]),
        None => format!("/sys/fs/cgroup{}/{}", path("").unwrap(), files[1]),
    };
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}")).trim().to_owned()
}

#[test]
fn limits_and_restart_policy_change_at_once_and_move_with_the_service() {
    let script =
        "head -c 40000000 /dev/zero > /dev/shm/held; trap 'exit 5' TERM; while :; do sleep 0.1; done";
    let (bed, _) = up("limits", script, &["-m", "256m"]);
    let limits = |node: &str| {
        let memory = limit(&bed, node, "memory", ["memory.limit_in_bytes", "memory.max"]);
        let cpu = limit(&bed, node, "cpu", ["cpu.cfs_quota_us", "cpu.max"]);
        let pids = limit(&bed, node, "pids", ["pids.max", "pids.max"]);
        (memory, cpu.split(' ').next().unwrap().to_owned(), pids)
    };
    let are = |memory: u64, cpu: &str, pids: &str| (memory.to_string(), cpu.to_owned(), pids.to_owned());
    assert_eq!(limits("a").0, (256_u64 << 20).to_string());
    wait_for("the service to hold its memory", || {
        let held = bed.json::<Value>("a", &["stats", "--no-stream", NAME])[0]["memory_bytes"].as_u64();
        (held >= Some(40_000_000)).then_some(())
    });
    // What it has in use does not fit, and nothing changes.
    refused(
        &bed,
        "a",
        &["update", "-m", "32m", "--pids-limit", "99", NAME],
        &["bytes of memory in use, which a limit of 33554432 cannot hold"],
    );
    assert_eq!((limits("a").0, limits("a").2), ((256_u64 << 20).to_string(), "2048".to_owned()));
    bed.done("a", &["update", "-m", "128m", "--cpus", "0.5", "--pids-limit", "77", NAME]);
    let changed = are(128 << 20, "50000", "77");
    assert_eq!(limits("a"), changed);
    bed.migrate(NAME, "a", "b");
    assert_eq!(limits("b"), changed);
    let shown = inspect(&bed, "b");
    assert_eq!(
        (&shown["memory_bytes"], &shown["cpu_millis"], &shown["pids_limit"]),
        (&(128 << 20).into(), &500.into(), &77.into())
    );

    bed.done("b", &["update", "--cpus", "0", "--restart", "on-failure", NAME]);
    assert!(["-1", "max"].contains(&limits("b").1.as_str()), "{:?}", limits("b"));
    let first = inspect(&bed, "b")["pid"].clone();
    bed.done("b", &["kill", "-s", "TERM", NAME]);
    let again = wait_for("another life of the service", || {
        let shown = inspect(&bed, "b");
        (shown["state"] == "running" && shown["pid"] != 0 && shown["pid"] != first).then_some(shown)
    });
    assert_eq!((&again["restart"], &again["restarts"]), (&"on-failure".into(), &1.into()));
    // With the limits that it had at its end.
    assert_eq!(limits("b").0, changed.0);
    refused(&bed, "b", &["update", "--restart", "sometimes", NAME], &["is not a restart policy"]);
    refused(&bed, "b", &["update", "-m", "1k", NAME], &["too small"]);
}

#[test]
fn figures_of_a_service_are_those_of_its_processes() {
    let (bed, _) = up("figures", "sleep 100000 & while :; do :; done", &[]);
    let look = || bed.json::<Value>("a", &["stats", "--no-stream", NAME])[0].clone();
    let busy = wait_for("both processes", || Some(look()).filter(|shown| shown["pids"] == 2));
    assert_eq!(busy["name"], NAME);
    // A processor that it shares with others.
    assert!(busy["cpu_percent"].as_f64().is_some_and(|share| share > 0.0), "{busy}");
    assert!(busy["memory_bytes"].as_u64().is_some_and(|bytes| (4096..64 << 20).contains(&bytes)), "{busy}");
    let received = || look()["received_bytes"].as_u64().unwrap();
    let before = received();
    let socket = bed.lab().inside(CLIENT, || UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    wait_for("datagrams to be counted", || {
        // Nobody listens: that is said by ICMP to who sends again.
        let _ = socket.send_to(&[7; 1000], (ADDRESS, 9));
        (received() >= before + 1000).then_some(())
    });
    let cpu = |shown: &Value| shown["cpu_ns"].as_u64().unwrap();
    assert!(cpu(&look()) > cpu(&busy));
    // All that run, in a table.
    let table = bed.done("a", &["stats", "--no-stream"]);
    assert!(table.lines().count() == 2 && table.contains(NAME) && table.contains('%'), "{table}");
    assert_eq!(bed.done("b", &["stats", "--no-stream", "--json"]).trim(), "[]");
}
