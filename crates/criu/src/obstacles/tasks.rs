//! Processes in a state that CRIU cannot dump or restore, as `/proc/PID/status` tells it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use super::Obstacle;
use crate::status::{field, innermost};

const TRACED: &str = "and CRIU cannot dump a process that is traced; end the debugger or strace first";
const HEADLESS: &str =
    "and CRIU cannot dump that; the program has to keep its main thread (pthread_exit ends it)";
const LEADERLESS: &str =
    "and CRIU cannot make such a session again; end that process, or start it with setsid(1)";
const NESTED: &str =
    "and CRIU cannot dump namespaces inside those of the service; switch the program's own sandbox off";
const ROOT: &str = "and CRIU dumps no service whose first process has that; switch the program's own chroot(2) off, or start it as a child";
const TRAP: &str = "and CRIU cannot dump that; try again when it has taken the signal";

/// Namespaces of which all processes of a service must have the same: their names in `/proc/PID/ns`, and for people.
const SHARED_NAMESPACES: [(&str, &str); 6] = [
    ("pid", "PID"),
    ("user", "user"),
    ("ipc", "IPC"),
    ("uts", "UTS"),
    ("time", "time"),
    ("cgroup", "cgroup"),
];

/// What `/proc/PID/status` says of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) pid: u32,
    /// Parent, in the node's PID namespace.
    pub(super) parent: u32,
    /// PID in the innermost PID namespace that it is in.
    pub(super) inside: u32,
    /// The same of its session's leader.
    pub(super) session: u32,
    /// Of how many PID namespaces the node knows it.
    depth: usize,
    pub(super) name: String,
    pub(super) state: char,
    threads: u64,
}

#[cfg(test)]
impl Task {
    /// A process of a test.
    pub(super) fn example(pid: u32, parent: u32) -> Self {
        let (name, state) = ("example".into(), 'S');
        Self { pid, parent, inside: pid, session: 1, depth: 1, name, state, threads: 1 }
    }
}

/// What counts of each thread.
struct Thread {
    tracer: u32,
    /// Whether a SIGTRAP waits for it.
    has_trap: bool,
}

/// Reads the status of a process; none when it is gone.
pub(super) fn read(proc: &Path, pid: u32) -> Option<Task> {
    let text = fs::read(proc.join(pid.to_string()).join("status")).ok()?;
    parse(pid, &String::from_utf8_lossy(&text))
}

fn parse(pid: u32, text: &str) -> Option<Task> {
    let number = |name: &str| field(text, name)?.parse().ok();
    Some(Task {
        pid,
        parent: number("PPid")?,
        inside: innermost(text, "NSpid")?,
        session: innermost(text, "NSsid")?,
        depth: field(text, "NSpid")?.split_whitespace().count(),
        // The process gave itself this name, and a terminal may show it.
        name: field(text, "Name")?.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
        state: field(text, "State")?.chars().next()?,
        threads: field(text, "Threads")?.parse().ok()?,
    })
}

/// What stands in the way in the states of these processes.
pub(super) fn obstacles(proc: &Path, tasks: &[Task], main: u32) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let of_main = tasks.iter().find(|task| task.pid == main);
    for task in tasks {
        let mut add = |what: String, why| found.push(Obstacle::new(task, what, why));
        if task.state == 'Z' {
            if task.threads > 1 {
                add("continues in other threads although its main thread has ended".into(), HEADLESS);
            }
            continue;
        }
        let threads = threads(proc, task.pid);
        let own = |tracer: u32| proc.join("self/task").join(tracer.to_string()).exists();
        if let Some(thread) = threads.iter().find(|thread| thread.tracer != 0 && !own(thread.tracer)) {
            add(format!("is traced by process {}", thread.tracer), TRACED);
        }
        if threads.iter().any(|thread| thread.has_trap) {
            add("has a SIGTRAP waiting for it".into(), TRAP);
        }
        if task.pid == main && has_other_root(proc, main) {
            add("has another root directory than its container".into(), ROOT);
        }
        if let Some(main) = of_main
            && let Some(kind) = nested(proc, main, task)
        {
            let article = if kind == "IPC" { "an" } else { "a" };
            add(format!("has {article} {kind} namespace of its own"), NESTED);
        }
    }
    found.extend(leaderless(tasks, main).into_iter().map(|task| {
        let what = format!("lives on in session {}, whose leader is not one of its ancestors", task.session);
        Obstacle::new(task, what, LEADERLESS)
    }));
    found
}

/// All threads of a process that are there.
fn threads(proc: &Path, pid: u32) -> Vec<Thread> {
    let directory = proc.join(pid.to_string()).join("task");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let text = fs::read(entry.path().join("status")).ok()?;
            let text = String::from_utf8_lossy(&text);
            let set =
                |name| field(&text, name).and_then(|set| u64::from_str_radix(set, 16).ok()).unwrap_or(0);
            let trap = 1 << (libc::SIGTRAP - 1);
            Some(Thread {
                tracer: field(&text, "TracerPid")?.parse().ok()?,
                has_trap: (set("SigPnd") | set("ShdPnd")) & trap != 0,
            })
        })
        .collect()
}

/// Whether its root directory is not the one of its mount namespace, which the kernel shows as `/` to whoever is in another.
fn has_other_root(proc: &Path, pid: u32) -> bool {
    fs::read_link(proc.join(pid.to_string()).join("root")).is_ok_and(|root| root != Path::new("/"))
}

/// The kind of a namespace in which a process is, and the main process is not.
fn nested(proc: &Path, main: &Task, task: &Task) -> Option<&'static str> {
    if task.depth != main.depth {
        return Some("PID");
    }
    let namespace =
        |task: &Task, kind: &str| fs::read_link(proc.join(task.pid.to_string()).join("ns").join(kind)).ok();
    let differs =
        |kind| namespace(main, kind).zip(namespace(task, kind)).is_some_and(|(main, own)| main != own);
    SHARED_NAMESPACES.into_iter().find(|(kind, _)| differs(kind)).map(|(_, name)| name)
}

/// Processes in sessions that a restore cannot make: CRIU makes a session by starting its leader first and
/// forking its other members from there. So the leader must be among a process's ancestors, or have been,
/// so that the process is now the main process's child: for those CRIU starts a leader that ends again.
fn leaderless(tasks: &[Task], main: u32) -> Vec<&Task> {
    let by_pid: HashMap<u32, &Task> = tasks.iter().map(|task| (task.pid, task)).collect();
    let by_inside: HashMap<u32, &Task> = tasks.iter().map(|task| (task.inside, task)).collect();
    let Some(main) = by_pid.get(&main).copied() else { return Vec::new() };
    // Between the main process and such a child, CRIU starts one in that session.
    let is_adopted =
        |task: &Task| task.parent == main.pid && task.session != main.session && task.session != task.inside;
    let can_be_made = |task: &Task| {
        // Those from other PID namespaces are another matter.
        if task.session == 0 || task.session == task.inside || task.depth != main.depth {
            return true;
        }
        if task.pid == main.pid || task.parent == main.pid {
            return true;
        }
        let Some(mut at) = by_pid.get(&task.parent).copied() else { return true };
        if at.session == task.session {
            return true;
        }
        for _ in tasks {
            if at.inside == task.session || (is_adopted(at) && at.session == task.session) {
                return true;
            }
            if at.pid == main.pid {
                return false;
            }
            at = if is_adopted(at) {
                by_inside.get(&at.session).copied().unwrap_or(main)
            } else {
                let Some(parent) = by_pid.get(&at.parent) else { return true };
                parent
            };
        }
        true
    };
    tasks.iter().filter(|task| !can_be_made(task)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A `/proc` of files.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        /// Adds a process with one thread. PIDs inside are a hundred less.
        fn add(&self, pid: u32, parent: u32, session: u32, more: &str) -> &Self {
            let (inside, leader) = (pid - 100, if session == 0 { 0 } else { session + 100 });
            let mut text = format!("Name:\tpro\u{1b}gram\nPPid:\t{parent}\nNSsid:\t{leader}\t{session}\n");
            let pids = format!("NSpid:\t{pid}\t{inside}");
            let mut lines = vec![
                &pids,
                "State:\tS (sleeping)",
                "TracerPid:\t0",
                "Threads:\t1",
                "SigPnd:\t00",
                "ShdPnd:\t00",
            ];
            for line in more.lines() {
                let name = line.split(':').next().unwrap();
                lines.retain(|old| !old.starts_with(name));
                lines.push(line);
            }
            text.push_str(&lines.join("\n"));
            let directory = self.0.path().join(pid.to_string());
            fs::create_dir_all(directory.join("task").join(pid.to_string())).unwrap();
            fs::create_dir_all(directory.join("ns")).unwrap();
            fs::write(directory.join("status"), &text).unwrap();
            fs::write(directory.join("task").join(pid.to_string()).join("status"), &text).unwrap();
            self
        }

        fn check(&self, main: u32) -> Vec<Obstacle> {
            let mut pids: Vec<u32> = fs::read_dir(self.0.path())
                .unwrap()
                .filter_map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().ok())
                .collect();
            pids.sort_unstable();
            // One that has ended meanwhile.
            pids.push(999);
            let tasks: Vec<_> = pids.into_iter().filter_map(|pid| read(self.0.path(), pid)).collect();
            obstacles(self.0.path(), &tasks, main)
        }

        fn found(&self) -> Vec<(u32, &'static str)> {
            self.check(101).into_iter().map(|obstacle| (obstacle.pid, obstacle.why)).collect()
        }
    }

    #[test]
    fn a_process_that_is_traced_is_found_and_not_one_that_godwit_traces() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "").add(102, 101, 1, "TracerPid:\t55").add(103, 101, 1, "TracerPid:\t77");
        fs::create_dir_all(proc.0.path().join("self/task/77")).unwrap();
        assert_eq!(proc.found(), [(102, TRACED)]);
        assert_eq!(
            proc.check(101)[0].to_string(),
            format!("process 102 (pro?gram, PID 2 in the service) is traced by process 55, {TRACED}")
        );
    }

    #[test]
    fn a_thread_that_is_traced_counts_as_its_process() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "").add(102, 101, 1, "TracerPid:\t55");
        let at = |path: &str| proc.0.path().join(path);
        fs::rename(at("102/task/102"), at("101/task/102")).unwrap();
        fs::remove_dir_all(at("102")).unwrap();
        assert_eq!(proc.found(), [(101, TRACED)]);
    }

    #[test]
    fn a_main_thread_that_ended_before_the_others_is_found_and_a_plain_zombie_is_none() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "").add(102, 101, 1, "State:\tZ (zombie)\nThreads:\t3");
        proc.add(103, 101, 1, "State:\tZ (zombie)");
        assert_eq!(proc.found(), [(102, HEADLESS)]);
    }

    #[test]
    fn a_sigtrap_that_waits_is_found() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "SigPnd:\t0000000000000010").add(102, 101, 1, "ShdPnd:\t0000000000000020");
        assert_eq!(proc.found(), [(101, TRAP)]);
    }

    #[test]
    fn a_namespace_inside_those_of_the_service_is_found() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "").add(102, 101, 1, "").add(103, 101, 1, "NSpid:\t103\t3\t1");
        for (pid, user) in [(101, "user:[1]"), (102, "user:[2]"), (103, "user:[1]")] {
            symlink(user, proc.0.path().join(format!("{pid}/ns/user"))).unwrap();
        }
        assert_eq!(proc.found(), [(102, NESTED), (103, NESTED)]);
        assert!(proc.check(101)[0].what.contains("user namespace"));
    }

    #[test]
    fn another_root_is_in_the_way_where_the_first_process_has_it() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "").add(102, 101, 1, "");
        let root = |pid: u32, path: &str| {
            let link = proc.0.path().join(format!("{pid}/root"));
            let _ = fs::remove_file(&link);
            symlink(path, link).unwrap();
        };
        root(101, "/");
        root(102, "/jail");
        assert_eq!(proc.found(), []);
        root(101, "/var/lib/empty");
        assert_eq!(proc.found(), [(101, ROOT)]);
    }

    #[test]
    fn a_session_can_be_made_if_its_leader_is_or_was_an_ancestor() {
        let proc = Fake::new();
        proc.add(101, 1, 1, "");
        // A session of its own, with a child in it.
        proc.add(102, 101, 2, "").add(103, 102, 2, "");
        // A daemon's child: its leader has ended, and the main process has adopted it; so has it a child there,
        // and one that was born there.
        proc.add(105, 101, 4, "").add(106, 105, 4, "").add(107, 106, 7, "").add(108, 107, 4, "");
        // Born before its parent made a session; the leader is the main process.
        proc.add(110, 102, 1, "");
        assert_eq!(proc.found(), []);
        // The leader, 9, is gone, and the parent is in another session and not the main process.
        proc.add(111, 102, 9, "");
        // The leader lives, elsewhere.
        proc.add(112, 107, 2, "");
        assert_eq!(proc.found(), [(111, LEADERLESS), (112, LEADERLESS)]);
    }
}
