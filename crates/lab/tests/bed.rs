//! Labs come up, do what they say, and leave nothing behind. Needs root.
// Some children are reaped by what is tested.
#![allow(clippy::unwrap_used, clippy::zombie_processes)]

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use godwit_lab::{Lab, LabConfig, LabError};
use nix::{
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A lab without daemons that is taken down at the end, also after a panic.
struct Guard(Lab);

impl Guard {
    fn up(name: &str) -> Self {
        Self::up_with(config(name))
    }

    fn up_with(config: LabConfig) -> Self {
        Self(Lab::up(&config).unwrap())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        match Lab::down(self.0.name()) {
            Ok(()) | Err(LabError::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn config(name: &str) -> LabConfig {
    let mut config = LabConfig::new(name, ["a", "b"]);
    config.daemons = false;
    config
}

/// All that is left of a lab of that name anywhere.
fn remains(name: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        if entry.file_name().to_str().unwrap().starts_with(&format!("gwl-{name}-")) {
            found.insert(entry.path().display().to_string());
        }
    }
    let needle = format!("/{name}/");
    for line in fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
        if line.contains(&needle) || line.contains(&format!("gwl-{name}-")) {
            found.insert(line.to_owned());
        }
    }
    for root in ["/var/lib/godwit/labs", "/run/godwit/labs"] {
        let path = Path::new(root).join(name);
        if path.exists() {
            found.insert(path.display().to_string());
        }
    }
    for hierarchy in hierarchies() {
        let path = hierarchy.join("godwit-lab").join(name);
        if path.exists() {
            found.insert(path.display().to_string());
        }
    }
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let cgroup = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if command.contains(&format!("gwl-{name}-")) || cgroup.contains(&format!("/godwit-lab/{name}")) {
            found.insert(format!("process {} {command}", entry.file_name().display()));
        }
    }
    found
}

fn hierarchies() -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("/sys/fs/cgroup")];
    found.extend(
        fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path()).filter(|p| p.is_dir()),
    );
    found
}

fn run(lab: &Lab, host: &str, command: &str) -> String {
    let output = lab.command(host, "sh").unwrap().args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Whether frames pass both ways: a port that nobody listens on refuses at once.
fn reaches(lab: &Lab, from: &str, to: &str) -> bool {
    reaches_within(lab, from, to, Duration::from_secs(30))
}

fn reaches_within(lab: &Lab, from: &str, to: &str, patience: Duration) -> bool {
    let target = SocketAddr::from((lab.address(to).unwrap(), 9));
    let tried = lab.inside(from, || TcpStream::connect_timeout(&target, patience)).unwrap();
    tried.unwrap_err().kind() == ErrorKind::ConnectionRefused
}

fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z"))
}

#[test]
fn hosts_reach_each_other_and_nothing_is_left_behind() {
    let guard = Guard::up("bed-plain");
    let lab = &guard.0;
    for (from, to) in [("a", "b"), ("b", "client"), ("client", "a")] {
        assert!(reaches(lab, from, to), "{from} {to}");
    }
    let route = run(lab, "client", "ip route get 10.88.0.10");
    assert!(route.contains("dev uplink0") && !route.contains("via"), "{route}");
    let status = Lab::status("bed-plain").unwrap();
    assert!(status.complete && status.link_program.is_some() && status.hosts.len() == 3);
    assert!(status.hosts.iter().all(|host| host.present && host.daemon.is_none()));
    assert!(Lab::list().contains(&"bed-plain".to_owned()));
    assert!(!remains("bed-plain").is_empty());
    Lab::down("bed-plain").unwrap();
    assert_eq!(remains("bed-plain"), BTreeSet::new());
    assert!(matches!(Lab::status("bed-plain"), Err(LabError::Unknown(_))));
    assert!(matches!(Lab::down("bed-plain"), Err(LabError::Unknown(_))));
}

#[test]
fn a_name_is_given_once() {
    let guard = Guard::up("bed-twice");
    let message = Lab::up(&config("bed-twice")).unwrap_err().to_string();
    assert_eq!(
        message,
        "lab bed-twice exists already; take it down with `godwit lab down bed-twice` or choose another name"
    );
    assert!(reaches(&guard.0, "a", "b"), "the refusal does not touch the lab");
}

#[test]
fn labs_with_the_same_addresses_do_not_meet() {
    let (one, two) = (Guard::up("bed-one"), Guard::up("bed-two"));
    let address = one.0.address("a").unwrap();
    assert_eq!(address, two.0.address("a").unwrap());
    for lab in [&one.0, &two.0] {
        let name = lab.name().to_owned();
        let listener = lab.inside("a", || std::net::TcpListener::bind((address, 9000)).unwrap()).unwrap();
        let greeting = std::thread::scope(|scope| {
            scope.spawn(|| {
                use std::io::Write;
                listener.accept().unwrap().0.write_all(name.as_bytes()).unwrap();
            });
            let stream =
                lab.inside("client", || std::net::TcpStream::connect((address, 9000)).unwrap()).unwrap();
            std::io::read_to_string(stream).unwrap()
        });
        assert_eq!(greeting, name);
    }
    Lab::down("bed-one").unwrap();
    assert!(reaches(&two.0, "a", "b"), "the other lab is still there");
}

#[test]
fn commands_run_where_they_are_told_and_their_status_comes_back() {
    let guard = Guard::up("bed-exec");
    let lab = Lab::open("bed-exec").unwrap();
    assert_eq!(run(&lab, "a", "echo $GODWIT_LAB $GODWIT_NODE"), "bed-exec a\n");
    assert_eq!(run(&lab, "client", "echo $GODWIT_LAB ${GODWIT_NODE-none}"), "bed-exec none\n");
    assert!(run(&lab, "b", "ip -o -4 address show dev uplink0").contains("10.99.0.12/24"));
    let words = ["sh", "-c", "exit 7"].map(str::to_owned);
    assert_eq!(lab.exec("a", &words).unwrap().code(), Some(7));
    let message = lab.exec("c", &words).unwrap_err().to_string();
    assert_eq!(message, "lab bed-exec has no host c; its hosts are a, b, client");
    let message = lab.exec("a", &["/no/such/program".to_owned()]).unwrap_err().to_string();
    assert!(message.contains("/no/such/program"), "{message}");
    drop(guard);
}

#[test]
fn a_cut_holds_between_two_hosts_only_until_healed() {
    let guard = Guard::up("bed-cut");
    let lab = &guard.0;
    assert!(reaches(lab, "a", "b"));
    lab.cut("a", "b").unwrap();
    let is_cut = |from: &str, to: &str| !reaches_within(lab, from, to, Duration::from_millis(700));
    assert!(is_cut("a", "b") && is_cut("b", "a"));
    assert!(reaches(lab, "a", "client") && reaches(lab, "client", "b"));
    assert_eq!(Lab::status("bed-cut").unwrap().cuts, [("a".to_owned(), "b".to_owned())]);
    lab.heal("b", "a").unwrap();
    assert!(reaches(lab, "a", "b") && reaches(lab, "b", "a"));
    let message = lab.cut("a", "x").unwrap_err().to_string();
    assert!(message.contains("a and x are not two hosts"), "{message}");
}

/// What daemons and containers would leave: processes in namespaces, in frozen cgroups, with
/// mounts over each other, and a mount of something that must survive.
#[test]
fn processes_cgroups_and_mounts_of_a_lab_go_with_it() {
    let guard = Guard::up("bed-litter");
    let lab = &guard.0;
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("precious"), "x").unwrap();

    let in_namespace = lab.command("a", "sleep").unwrap().arg("1000").spawn().unwrap();
    // A service: its namespace is mounted below the run directory, its process is in a frozen cgroup.
    let run_directory = lab.socket("a").unwrap().parent().unwrap().to_owned();
    fs::create_dir_all(run_directory.join("netns")).unwrap();
    let namespace = run_directory.join("netns/service");
    fs::write(&namespace, "").unwrap();
    let mut service = Command::new("unshare");
    service.args(["--net", "sleep", "1000"]);
    let mut service = service.spawn().unwrap();
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let link = format!("/proc/{}/ns/net", service.id());
    let begun = Instant::now();
    while fs::read_link(&link).unwrap() == own {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    mount(Some(link.as_str()), &namespace, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    // Another that nothing but its cgroup ties to the lab.
    let frozen = frozen_process("bed-litter");

    let state = lab.state("a").unwrap();
    for directory in ["merged", "outside", "tmpfs"] {
        fs::create_dir_all(state.join(directory)).unwrap();
    }
    let tmpfs = state.join("tmpfs");
    mount(Some("tmpfs"), &tmpfs, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::create_dir(tmpfs.join("inner")).unwrap();
    mount(Some("tmpfs"), &tmpfs.join("inner"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    // Twice over the same place.
    mount(Some("tmpfs"), &tmpfs, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let bind = MsFlags::MS_BIND;
    mount(Some(outside.path()), &state.join("outside"), None::<&str>, bind, None::<&str>).unwrap();
    // Busy: somebody outside the lab has a file open in it.
    let _busy = fs::File::open(state.join("outside/precious")).unwrap();

    Lab::down("bed-litter").unwrap();
    assert_eq!(remains("bed-litter"), BTreeSet::new());
    assert!(outside.path().join("precious").exists());
    assert!(!alive(in_namespace.id()) && !alive(frozen));
    assert!(!alive(service.id()));
    // Ours, and reaped already.
    assert!(service.try_wait().is_err());
}

/// Starts a process in the lab's cgroup and freezes it, in version 1 or 2, whichever is there.
fn frozen_process(lab: &str) -> u32 {
    let child = Command::new("sleep").arg("1000").spawn().unwrap();
    let (hierarchy, file, value) = if Path::new("/sys/fs/cgroup/freezer").is_dir() {
        ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN")
    } else {
        ("/sys/fs/cgroup", "cgroup.freeze", "1")
    };
    let cgroup = Path::new(hierarchy).join("godwit-lab").join(lab).join("a/service");
    fs::create_dir_all(&cgroup).unwrap();
    fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).unwrap();
    fs::write(cgroup.join(file), value).unwrap();
    child.id()
}

#[test]
fn a_lab_whose_link_program_was_killed_can_be_taken_down() {
    let guard = Guard::up("bed-killed");
    let pid = Lab::status("bed-killed").unwrap().link_program.unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let begun = Instant::now();
    while Lab::status("bed-killed").unwrap().link_program.is_some() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    let message = guard.0.cut("a", "b").unwrap_err().to_string();
    assert!(message.contains("does not answer"), "{message}");
    Lab::down("bed-killed").unwrap();
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "it is reaped, as it was our child");
    assert_eq!(remains("bed-killed"), BTreeSet::new());
}

#[test]
fn remains_without_a_registry_are_seen_and_removed() {
    let guard = Guard::up("bed-lost");
    let sleeper = guard.0.command("b", "sleep").unwrap().arg("1000").spawn().unwrap();
    fs::remove_dir_all("/var/lib/godwit/labs/bed-lost").unwrap();
    fs::remove_dir_all("/run/godwit/labs/bed-lost").unwrap();
    assert!(Lab::list().contains(&"bed-lost".to_owned()));
    assert!(!Lab::status("bed-lost").unwrap().complete);
    assert!(matches!(Lab::up(&config("bed-lost")), Err(LabError::Exists(_))));
    Lab::down("bed-lost").unwrap();
    assert_eq!(remains("bed-lost"), BTreeSet::new());
    assert!(!alive(sleeper.id()));
    drop(Guard::up("bed-lost"));
}

#[test]
fn an_up_that_fails_takes_everything_back() {
    let mut config = config("bed-fails");
    // No programs there: the failure comes after the namespaces.
    config.programs.directory = Some("/usr/share".into());
    let message = Lab::up(&config).unwrap_err().to_string();
    assert!(message.contains("godwit-lab-link is not beside /usr/share"), "{message}");
    assert_eq!(remains("bed-fails"), BTreeSet::new());
}

#[test]
fn an_up_that_was_killed_half_way_is_taken_down() {
    // The link program hangs, so `up` waits for it; then `up` is killed.
    let programs = tempfile::tempdir().unwrap();
    let link = programs.path().join("godwit-lab-link");
    fs::write(&link, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    fs::set_permissions(&link, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_brings_up_a_lab", "--ignored", "--nocapture"])
        .env("BED_HELPER_PROGRAMS", programs.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = child.unwrap();
    let begun = Instant::now();
    while !Path::new("/run/godwit/labs/bed-half/pids/link").exists() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(matches!(Lab::down("bed-half"), Err(LabError::Busy(_))), "its maker is still at it");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!Lab::status("bed-half").unwrap().complete);
    Lab::down("bed-half").unwrap();
    assert_eq!(remains("bed-half"), BTreeSet::new());
}

/// Not a test: what the test above starts as a process that it can kill.
#[test]
#[ignore = "run by another test"]
fn helper_brings_up_a_lab() {
    let Some(programs) = std::env::var_os("BED_HELPER_PROGRAMS") else { return };
    let mut config = config("bed-half");
    config.programs.directory = Some(programs.into());
    Lab::up(&config).unwrap();
}

#[test]
fn others_than_root_are_told_so() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_is_not_root", "--ignored", "--nocapture"])
        .env("BED_HELPER", "1")
        .uid(65_534)
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(output.contains("labs need root"), "{output} {}", String::from_utf8_lossy(&child.stderr));
}

/// Not a test: see above.
#[test]
#[ignore = "run by another test"]
fn helper_is_not_root() {
    if std::env::var_os("BED_HELPER").is_some() {
        println!("{}", Lab::up(&config("bed-user")).unwrap_err());
    }
}
