//! Bad input: one clear sentence that names the thing and what to do, an exit code that is not
//! zero, and nothing half-made. Needs root.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use godwit_lab::{Lab, workload::Workload};
use godwit_tests::{Bed, Said, leftovers, programs};

/// A lab with a service `x` at 10.88.0.10 on `a`, and a root filesystem for others.
struct Shell {
    bed: Bed,
    rootfs: String,
}

impl Shell {
    fn up(test: &str) -> Self {
        let bed = Bed::up(test);
        let rootfs = bed.build(Workload::Busybox).rootfs.display().to_string();
        let shell = Self { bed, rootfs };
        shell.bed.done(
            "a",
            &[
                "run",
                "--name",
                "x",
                "--ip",
                "10.88.0.10",
                "--rootfs",
                &shell.rootfs,
                "--",
                "/bin/sh",
                "-c",
                "sleep 1000",
            ],
        );
        shell
    }

    /// Runs godwit, which must fail with this code and with one sentence that has all of `words`.
    fn fails(&self, node: &str, arguments: &[&str], code: i32, words: &[&str]) {
        let said = self.bed.godwit(node, arguments);
        fails(&format!("{arguments:?} on {node}"), &said, code, words);
    }

    /// The same for `godwit run` of a service `y` at 10.88.0.11, with `more` flags before the command;
    /// nothing of it may be left.
    fn run_fails(&self, more: &[&str], command: &[&str], code: i32, words: &[&str]) {
        let mut arguments = vec!["run"];
        for (flag, value) in [("--name", "y"), ("--ip", "10.88.0.11"), ("--rootfs", &self.rootfs)] {
            // An image is given instead of a root filesystem.
            let instead = flag == "--rootfs" && more.contains(&"--image");
            if !more.contains(&flag) && !instead {
                arguments.extend([flag, value]);
            }
        }
        arguments.extend(more);
        arguments.push("--");
        arguments.extend(command);
        let before = self.traces();
        self.fails("a", &arguments, code, words);
        assert_eq!(self.traces(), before, "{arguments:?} left something");
    }

    /// What node `a` has of services: files, mounts, interfaces, cgroups, and what it says itself.
    fn traces(&self) -> Vec<String> {
        let lab = self.bed.lab();
        let state = lab.state("a").unwrap();
        let run = Path::new("/run/godwit/labs").join(lab.name()).join("a");
        let mut traces = Vec::new();
        for directory in
            [state.join("services"), state.join("images/tmp"), run.join("netns"), run.join("runc")]
        {
            traces.extend(list(&directory));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let inside = format!("/{}/a/", lab.name());
        traces.extend(mounts.lines().filter(|line| line.contains(&inside)).map(str::to_owned));
        for hierarchy in list(Path::new("/sys/fs/cgroup")) {
            traces.extend(list(&Path::new(&hierarchy).join("godwit-lab").join(lab.name()).join("a")));
        }
        let links = lab.command("a", "ip").unwrap().args(["-o", "link"]).output().unwrap();
        let links = String::from_utf8(links.stdout).unwrap();
        traces.extend(links.lines().map(|line| line.split(' ').nth(1).unwrap().to_owned()));
        let shown: Vec<serde_json::Value> = self.bed.json("a", &["ps", "-a"]);
        traces.extend(shown.iter().map(|service| format!("{} {}", service["name"], service["state"])));
        traces.sort();
        traces
    }
}

fn list(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir() || path.is_file()).map(text).collect()
}

fn text(path: PathBuf) -> String {
    path.display().to_string()
}

fn fails(what: &str, said: &Said, code: i32, words: &[&str]) {
    let Said { stderr, stdout, .. } = said;
    assert_eq!(said.code, code, "{what}: {stdout}{stderr}");
    assert!(stdout.is_empty(), "{what}: {stdout}");
    // What was mistyped is followed by how it is typed, after an empty line.
    let sentence = if code == 2 { stderr.split("\n\n").next().unwrap() } else { stderr.trim_end() };
    let lines = if code == 2 { 2 } else { 1 };
    assert!(stderr.starts_with("Error: ") && sentence.lines().count() <= lines, "{what}: {stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("Status {"), "{what}: {stderr}");
    for word in words {
        assert!(sentence.contains(word), "{what} must say {word:?}: {stderr}");
    }
}

#[test]
fn services_and_nodes_that_are_not_there() {
    let shell = Shell::up("in-unknown");
    let unknown = ["there is no service nothing", "`godwit ps -a` lists"];
    for verb in ["inspect", "logs", "stop", "rm", "cancel"] {
        shell.fails("a", &[verb, "nothing"], 1, &unknown);
    }
    for verb in ["inspect", "logs", "stop", "rm", "cancel"] {
        shell.fails("a", &[verb, "../x"], 1, &["\"../x\" cannot be a service's name"]);
    }
    shell.fails("a", &["exec", "nothing", "--", "ls"], 125, &unknown);
    shell.fails("a", &["migrate", "nothing", "--to", "b"], 1, &unknown);
    shell.fails(
        "a",
        &["migrate", "x", "--to", "nowhere"],
        1,
        &["there is no node nowhere", "`godwit nodes` lists"],
    );
    shell.fails(
        "a",
        &["migrate", "x", "--to", "a"],
        1,
        &["service x is on node a already", "`godwit nodes` lists"],
    );
    shell.fails("b", &["migrate", "x", "--to", "a"], 1, &["service x is on node a already"]);
    shell.fails("c", &["ps"], 1, &["has no node named c", "its nodes are a, b"]);
    for verb in ["stop", "rm", "logs"] {
        shell.fails("b", &[verb, "x"], 1, &["service x is on node a, not on b", "ask there"]);
    }
    shell.fails("a", &["--socket", "/nosuch", "ps"], 1, &["/nosuch", "start it"]);
    shell.fails("a", &["rm", "x"], 1, &["service x runs", "--force"]);
    shell.bed.done("a", &["stop", "--time", "1", "x"]);
    shell.fails(
        "a",
        &["migrate", "x", "--to", "b"],
        1,
        &["service x is stopped", "only a service that runs"],
    );
    shell.fails("a", &["exec", "x", "--", "ls"], 125, &["service x is not running"]);
}

#[test]
fn names_addresses_and_limits_that_cannot_be() {
    let shell = Shell::up("in-values");
    let sleep = ["/bin/sh", "-c", "sleep 1000"];
    let run = |more: &[&str], code, words: &[&str]| shell.run_fails(more, &sleep, code, words);
    run(&["--name", "x"], 125, &["the name x is taken by a service on node a"]);
    run(&["--ip", "10.88.0.10"], 125, &["the address 10.88.0.10 is taken by service x on node a"]);
    run(&["--ip", "10.77.0.10"], 125, &["10.77.0.10 is outside", "10.88.0.0/16", "choose one inside"]);
    run(&["--ip", "10.88.0.1"], 125, &["10.88.0.1 is the gateway", "choose another"]);
    run(&["--ip", "10.88.255.255"], 125, &["10.88.255.255", "broadcast", "choose another"]);
    run(&["--ip", "banana"], 2, &["banana", "--ip"]);
    for name in ["../y", "", "-y", "a/b", "with space", &"long".repeat(20)] {
        let name = format!("--name={name}");
        let arguments = [
            "run",
            &name,
            "--ip",
            "10.88.0.11",
            "--rootfs",
            &shell.rootfs,
            "--",
            "/bin/sh",
            "-c",
            "sleep 1000",
        ];
        shell.fails("a", &arguments, 125, &["cannot be a service's name", "use 1 to 63 letters"]);
    }
    run(&["--memory", "1m"], 125, &["1048576 bytes is too small", "at least 4 MiB"]);
    run(&["--memory", "lots"], 2, &["lots", "--memory", "256m"]);
    let missing = "type=bind,source=/nosuch,target=/x";
    run(&["--mount", missing], 125, &["/nosuch", "does not exist on this node"]);
    run(&["--mount", "banana"], 2, &["banana", "type=bind, type=volume or type=tmpfs"]);
    run(&["--publish", "0:80"], 2, &["0:80", "8080:80"]);
    run(&["--user", "nobody-here"], 125, &[&shell.rootfs, "nobody-here"]);
}

#[test]
fn root_filesystems_and_images_that_cannot_be_run() {
    let shell = Shell::up("in-images");
    let there = |command: &str| {
        let words = [
            &format!("root filesystem {}", shell.rootfs),
            "there is no command",
            command,
            "give a command that is there",
        ];
        shell.run_fails(&[], &[command], 125, &words);
    };
    there("/no/such/command");
    there("not-there");
    let scratch = |name: &str| text(shell.bed.scratch().join(name));
    let sh = ["/bin/sh"];
    let rootfs = |path: &str, words: &[&str]| {
        shell.run_fails(&["--rootfs", path], &sh, 125, &[words, &[path]].concat())
    };
    rootfs(&scratch("missing"), &["it does not exist", "pass the directory of a root filesystem"]);
    fs::create_dir(scratch("empty")).unwrap();
    rootfs(&scratch("empty"), &["it is empty"]);
    fs::write(scratch("file"), "x").unwrap();
    rootfs(&scratch("file"), &["directory"]);
    let image = |path: &str, words: &[&str]| {
        shell.run_fails(&["--image", path], &sh, 125, &[words, &[path]].concat())
    };
    image(&scratch("missing"), &["it does not exist", "pass an OCI archive or layout directory"]);
    image(&scratch("file"), &["it is not a tar archive"]);
    image(&scratch("empty"), &["OCI"]);
    // An archive of something else, and one that ends in the middle.
    let tar = |arguments: &[&str]| assert!(Command::new("tar").args(arguments).status().unwrap().success());
    tar(&["-cf", &scratch("other.tar"), "-C", &shell.rootfs, "bin"]);
    image(&scratch("other.tar"), &["OCI"]);
    let whole = fs::read(scratch("other.tar")).unwrap();
    fs::write(scratch("half.tar"), &whole[..whole.len() / 2 + 100]).unwrap();
    image(&scratch("half.tar"), &[]);
}

#[test]
fn labs_that_cannot_be_made() {
    let bed = Bed::up("in-labs");
    let name = bed.lab().name();
    let other = format!("{name}-z");
    let fails = |arguments: &[&str], code: i32, words: &[&str]| {
        fails(&format!("{arguments:?}"), &bed.godwit("a", arguments), code, words);
        assert!(
            !Lab::list().contains(&other) && leftovers::of(&other).is_empty(),
            "{arguments:?} left something"
        );
    };
    fails(&["lab", "up", "--name", name, "--nodes", "a,b"], 1, &[name, "exists already", "godwit lab down"]);
    fails(&["lab", "up", "--name", "Bad Name", "--nodes", "a"], 1, &["\"Bad Name\"", "lower-case letters"]);
    fails(&["lab", "up", "--name", &other, "--nodes", "a,a"], 1, &["node a is named twice"]);
    fails(&["lab", "up", "--name", &other, "--nodes", "client"], 1, &["\"client\" cannot name a lab node"]);
    fails(&["lab", "up", "--name", &other, "--nodes", "a", "--link", "fast"], 2, &["fast", "1gbit,1ms"]);
    fails(&["lab", "down", "nosuch"], 1, &["there is no lab nosuch"]);
    fails(&["lab", "status", "nosuch"], 1, &["there is no lab nosuch"]);
    fails(&["lab", "exec", "nohost", "--", "ls"], 1, &["has no host nohost", "a, b, client"]);
    assert!(Lab::status(name).unwrap().complete, "the lab itself is as it was");
}

#[test]
fn without_root_godwit_says_so_and_does_nothing() {
    let bed = Bed::up("in-root");
    let scratch = bed.scratch().display().to_string();
    // A copy: where this was built may be closed to others.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(directory.path(), open).unwrap();
    for program in ["godwit", "godwitd", "godwit-lab"] {
        fs::copy(programs().join(program), directory.path().join(program)).unwrap();
    }
    let nobody = |program: &str, arguments: &[&str], words: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(directory.path().join(program));
        command.args(arguments).env("GODWIT_LAB", bed.lab().name()).env("GODWIT_NODE", "a");
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = Said {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        fails(&format!("{program} {arguments:?} without root"), &said, 1, words);
    };
    nobody("godwit", &["ps"], &["root", "sudo"]);
    let other = format!("{}-z", bed.lab().name());
    nobody("godwit", &["lab", "up", "--name", &other, "--nodes", "a"], &["root", "sudo"]);
    assert!(leftovers::of(&other).is_empty());
    let serve =
        ["serve", "--node", "a", "--listen", "127.0.0.1:7117", "--state", &scratch, "--run", &scratch];
    nobody("godwitd", &serve, &["must run as root"]);
}

#[test]
fn without_criu_services_run_but_do_not_move_and_doctor_tells_why() {
    let bed = Bed::up_with("in-criu", |config| config.programs.criu = Some("/nonexistent/criu".into()));
    let preset = bed.build(Workload::Busybox);
    bed.run("a", "x", [10, 88, 0, 10].into(), &preset, &[]);
    let said = bed.godwit("a", &["migrate", "x", "--to", "b"]);
    assert_eq!(said.code, 1, "{said:?}");
    let last = said.stderr.lines().last().unwrap();
    assert!(
        last.starts_with(
            "Error: migration of x aborted, it stays on a: CRIU at /nonexistent/criu cannot be started"
        ),
        "{said:?}"
    );
    assert!(last.contains("godwit doctor") && !said.stderr.contains("freeze"), "{said:?}");
    let running: serde_json::Value = bed.json("a", &["inspect", "x"]);
    assert_eq!(running["state"], "running", "{running}");
    let said = bed.godwit("a", &["doctor"]);
    let line = said.stdout.lines().find(|line| line.contains("criu")).unwrap_or_default();
    assert!(line.contains("missing") && said.stdout.contains("scripts/setup"), "{said:?}");
    bed.done("a", &["rm", "--force", "x"]);
}
