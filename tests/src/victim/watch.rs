//! The processes of a service on both nodes, sampled all the time: they must never run on two.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{NAME, traces::identity};

/// Pause between two looks at the processes.
pub(super) const LOOK: Duration = Duration::from_millis(2);

/// Looks at the processes on both nodes all the time.
#[derive(Debug)]
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Option<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn blind() -> Self {
        Self { stop: Arc::default(), seen: Arc::default(), thread: None }
    }

    pub(super) fn start(lab: &str) -> Self {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let (ended, found, lab) = (Arc::clone(&stop), Arc::clone(&seen), lab.to_owned());
        let thread = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                // More than two looks, because two moments are not one: the service may move in
                // between, and what CRIU has not finished is no service yet.
                if both_run(&lab) && !restoring(&lab) && both_run(&lab) {
                    found.lock().unwrap().get_or_insert_with(|| {
                        format!(
                            "processes run on both nodes: {:?}",
                            ["a", "b"].map(|node| processes(&lab, node))
                        )
                    });
                }
                thread::sleep(LOOK);
            }
        });
        Self { stop, seen, thread: Some(thread) }
    }

    pub(super) fn check(&self) {
        let seen = self.seen.lock().unwrap().clone();
        assert!(seen.is_none(), "{}", seen.unwrap_or_default());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The cgroups of the service on a node, in every hierarchy.
pub(super) fn cgroups(lab: &str, node: &str) -> Vec<PathBuf> {
    static HIERARCHIES: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
        let root = Path::new("/sys/fs/cgroup");
        let below = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
        below.chain([root.to_owned()]).collect()
    });
    let service = Path::new("godwit-lab").join(lab).join(node).join(NAME);
    HIERARCHIES.iter().map(|root| root.join(&service)).filter(|path| path.is_dir()).collect()
}

/// Whether processes of the service can run on both nodes. Mostly one of the nodes has no cgroup of the service, and a
/// look that ends there takes a tenth of the time.
fn both_run(lab: &str) -> bool {
    let both = ["a", "b"].map(|node| cgroups(lab, node));
    both.iter().all(|cgroups| !cgroups.is_empty()) && both.iter().all(|cgroups| is_any(cgroups))
}

/// Whether a process of the service can run on a node: neither frozen, stopped nor dying.
pub(super) fn running(lab: &str, node: &str) -> bool {
    is_any(&cgroups(lab, node))
}

fn is_any(cgroups: &[PathBuf]) -> bool {
    let frozen = cgroups.iter().any(|cgroup| {
        let state = |file: &str| fs::read_to_string(cgroup.join(file)).unwrap_or_default();
        matches!(state("freezer.state").trim(), "FROZEN" | "FREEZING") || state("cgroup.freeze").trim() == "1"
    });
    !frozen && pids(cgroups).iter().any(|pid| can_run(pid))
}

/// Whether CRIU is at work on a node: until it ends, processes that it makes execute its own code.
fn restoring(lab: &str) -> bool {
    let namespaces = ["a", "b"].map(|node| {
        let path = Path::new("/run/netns").join(format!("gwl-{lab}-{node}"));
        fs::metadata(path).map(|meta| identity(&meta)).ok()
    });
    fs::read_dir("/proc").into_iter().flatten().flatten().any(|entry| {
        let command = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let inside = || fs::metadata(entry.path().join("ns/net")).map(|meta| identity(&meta)).ok();
        command.trim() == "criu" && namespaces.contains(&inside())
    })
}

pub(super) fn pids(cgroups: &[PathBuf]) -> BTreeSet<String> {
    let procs = cgroups.iter().filter_map(|cgroup| fs::read_to_string(cgroup.join("cgroup.procs")).ok());
    procs.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// What the kernel says of each process: enough to tell whether it could execute an instruction.
fn processes(lab: &str, node: &str) -> Vec<String> {
    let cgroups = cgroups(lab, node);
    let wanted = ["State:", "TracerPid:", "SigPnd:", "ShdPnd:", "SigBlk:", "voluntary_ctxt_switches:"];
    let of = |pid: &String| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let status = read("status");
        let status: Vec<_> =
            status.lines().filter(|line| wanted.iter().any(|name| line.starts_with(name))).collect();
        format!(
            "{} {status:?} syscall {} stack {:?}",
            read("stat").trim(),
            read("syscall").trim(),
            read("stack")
        )
    };
    pids(&cgroups).iter().map(of).collect()
}

/// Whether a process can execute an instruction. It cannot when it is stopped, traced or dead, or when a signal is
/// pending that stops or ends it before the next one: CRIU lets a restored process go with a SIGSTOP, which takes
/// effect when the process gets a processor. One of CRIU's own, which has not become the service's, does not count:
/// those live on for a moment when CRIU itself is killed. Nor does one that has its name already and still executes CRIU's
/// code, which blocks all signals; the service blocks no SIGTERM.
fn can_run(pid: &str) -> bool {
    const PF_EXITING: u64 = 0x4;
    const PF_SIGNALED: u64 = 0x400;
    const SIGKILL: u64 = 1 << 8;
    const SIGSTOP: u64 = 1 << 18;
    const SIGTERM: u64 = 1 << 14;
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let Some((name, fields)) = stat.rsplit_once(") ") else { return false };
    let mut fields = fields.split(' ');
    let before = fields.next();
    let flags: Option<u64> = fields.nth(5).and_then(|flags| flags.parse().ok());
    // The state once more, from the file that has the signals: it may have stopped in between.
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let now = field("State:").and_then(|state| state.split(' ').next());
    let pending = |name| field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    let (Some(before), Some(now), Some(flags)) = (before, now, flags) else { return false };
    let idle = [before, now].iter().any(|state| matches!(*state, "T" | "t" | "Z" | "X"));
    let ends = flags & (PF_EXITING | PF_SIGNALED) != 0;
    let held = (pending("SigPnd:") | pending("ShdPnd:")) & (SIGKILL | SIGSTOP) != 0;
    let is_criu = pending("SigBlk:") & SIGTERM != 0;
    !idle && !ends && !held && !is_criu && !name.ends_with("(criu")
}
