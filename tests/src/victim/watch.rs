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
                if both_wait(&lab) && !restoring(&lab) && both_wait(&lab) {
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

/// Whether processes of the service wait for something on both nodes, as one that runs does most of the time. One
/// that is runnable tells nothing: CRIU lets a restored process go with a SIGSTOP, and it stops only when it gets a
/// processor. Mostly one of the nodes has no cgroup of the service, and a look that ends there takes a tenth of the
/// time.
fn both_wait(lab: &str) -> bool {
    let both = ["a", "b"].map(|node| cgroups(lab, node));
    both.iter().all(|cgroups| !cgroups.is_empty())
        && both.iter().all(|cgroups| is_any(cgroups, |state| state != "R"))
}

/// Whether a process of the service can run on a node: neither frozen, stopped nor dying.
pub(super) fn running(lab: &str, node: &str) -> bool {
    is_any(&cgroups(lab, node), |_| true)
}

/// Whether there is a process that can run, in such a state.
fn is_any(cgroups: &[PathBuf], wanted: impl Fn(&str) -> bool) -> bool {
    let frozen = cgroups.iter().any(|cgroup| {
        let state = |file: &str| fs::read_to_string(cgroup.join(file)).unwrap_or_default();
        matches!(state("freezer.state").trim(), "FROZEN" | "FREEZING") || state("cgroup.freeze").trim() == "1"
    });
    !frozen && pids(cgroups).iter().filter_map(|pid| state(pid)).any(|state| wanted(&state))
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

fn processes(lab: &str, node: &str) -> Vec<String> {
    let cgroups = cgroups(lab, node);
    pids(&cgroups)
        .iter()
        .map(|pid| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default())
        .collect()
}

/// The state of a process that can run; none when it is stopped, traced, dead, or has a SIGKILL on its way, so that no
/// instruction of it is executed, or is one of CRIU's, which has not become the service's: those live on for a moment
/// when CRIU itself is killed.
fn state(pid: &str) -> Option<String> {
    const PF_EXITING: u64 = 0x4;
    const PF_SIGNALED: u64 = 0x400;
    const SIGKILL: u64 = 1 << 8;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pending = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    if (pending("SigPnd:") | pending("ShdPnd:")) & SIGKILL != 0 {
        return None;
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?;
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    let idle = matches!(state, "T" | "t" | "Z" | "X") || flags & (PF_EXITING | PF_SIGNALED) != 0;
    (!idle && !name.ends_with("(criu")).then(|| state.to_owned())
}
