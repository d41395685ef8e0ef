//! A node as it is without its daemon: containers, network, mounts, pagers and state. What a daemon's end does not end.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use godwit_engine::ContainerConfig;
use godwit_names::ServiceName;
use tokio::sync::watch;

use super::process::{Process, SEED};
use super::script::Script;
use super::world::Way;
use crate::resources::{ArrivalEnd, NodeResources};
use crate::service::{Layout, Service};

/// A container.
#[derive(Debug, Clone)]
pub(super) struct Container {
    pub(super) process: Arc<Process>,
    /// By its freezer.
    pub(super) frozen: bool,
    /// Restored, and not let run.
    pub(super) stopped: bool,
    /// A checkpointer that did not end its work has left connections in repair mode.
    pub(super) in_repair: bool,
    pub(super) ended: watch::Sender<bool>,
}

/// A service's place in the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plug {
    pub(super) open: bool,
    pub(super) held: bool,
    pub(super) barred: bool,
    pub(super) steered: bool,
    /// Its sockets do not reach each other.
    pub(super) apart: bool,
}

/// What there is.
#[derive(Default)]
pub(super) struct There {
    pub(super) containers: BTreeMap<ServiceName, Container>,
    pub(super) plugs: BTreeMap<ServiceName, Plug>,
    pub(super) roots: BTreeSet<PathBuf>,
    pub(super) memories: BTreeSet<PathBuf>,
    /// By the inodes of their directories, which may be renamed.
    pub(super) pagers: BTreeMap<u64, JoinHandle<()>>,
    /// Services that were let run before all their pages had come, reading them.
    pub(super) readers: Vec<JoinHandle<()>>,
    /// Services that are this node's, by their ids.
    pub(super) own: HashMap<String, Service>,
    /// Where others are, by their ids, and since which epoch.
    pub(super) elsewhere: HashMap<String, (String, u64)>,
    /// How migrations to here have ended.
    pub(super) arrivals: Vec<ArrivalEnd>,
}

/// One node.
pub(super) struct Machine {
    pub(super) name: String,
    pub(super) layout: Layout,
    pub(super) script: Arc<Script>,
    there: Mutex<There>,
    /// The daemon that runs, and where it takes connections.
    daemon: Mutex<(Option<Arc<NodeResources>>, Option<SocketAddr>)>,
    /// All processes of the world, to see whether two run.
    census: Arc<Census>,
    /// Whether pages come after the restore.
    pub(super) lazy: bool,
    /// Whether a service reads all its memory as soon as it is let run.
    reads: bool,
    /// How many more commands its engine begins in a service just when that is frozen.
    begins: AtomicU32,
}

impl Machine {
    pub(super) fn new(name: &str, directory: &Path, census: &Arc<Census>, way: Way) -> Arc<Self> {
        let at = |part: &str| {
            let path = directory.join(name).join(part);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let layout = Layout {
            state: at("state"),
            run: at("run"),
            netns: at("run/netns"),
            cgroup_parent: "test".into(),
        };
        Arc::new(Self {
            name: name.into(),
            layout,
            script: Arc::default(),
            there: Mutex::default(),
            daemon: Mutex::default(),
            census: Arc::clone(census),
            lazy: way.lazy,
            reads: way.reads,
            begins: way.begins.into(),
        })
    }

    /// Nothing that panics on purpose does so while it holds this.
    pub(super) fn there(&self) -> MutexGuard<'_, There> {
        self.there.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn daemon(&self) -> Option<Arc<NodeResources>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// A daemon begins, takes connections, or ends.
    pub(super) fn is_served_by(&self, daemon: Option<&Arc<NodeResources>>, address: Option<SocketAddr>) {
        *self.daemon.lock().unwrap_or_else(PoisonError::into_inner) = (daemon.cloned(), address);
    }

    /// A container comes to be.
    pub(super) fn add(&self, config: &ContainerConfig, process: Arc<Process>, stopped: bool) {
        self.census.add(&process);
        let (frozen, in_repair, ended) = (false, false, watch::channel(false).0);
        let container = Container { process, frozen, stopped, in_repair, ended };
        self.there().containers.insert(config.name.clone(), container);
    }

    /// Whether a command of its engine's is in a service that is frozen now.
    pub(super) fn is_occupied(&self) -> bool {
        self.begins.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    /// Something was seen that must not be.
    pub(super) fn accuse(&self, what: String) {
        self.census.accuse(what);
    }

    /// A container's process goes on.
    pub(super) fn lets_run(&self, process: &Process) {
        process.go_on();
        self.census.look(&self.name);
    }

    /// A restored service runs, whose pages may still be on their way.
    pub(super) fn uses_its_memory(self: &Arc<Self>, process: Arc<Process>) {
        if !self.lazy || !self.reads {
            return;
        }
        let machine = Arc::clone(self);
        let reader = std::thread::spawn(move || {
            if let Some(what) = process.differs(SEED) {
                machine.accuse(what);
            }
        });
        self.there().readers.push(reader);
    }
}

/// All processes that there ever were.
#[derive(Debug, Default)]
pub(super) struct Census {
    processes: Mutex<Vec<std::sync::Weak<Process>>>,
    /// What must not have been seen.
    seen: Mutex<Vec<String>>,
}

impl Census {
    fn add(&self, process: &Arc<Process>) {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(process));
    }

    /// How many run.
    pub(super) fn running(&self) -> usize {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.iter().filter_map(std::sync::Weak::upgrade).filter(|process| process.runs()).count()
    }

    fn look(&self, node: &str) {
        let running = self.running();
        if running > 1 {
            self.accuse(format!("{running} processes run when the one of node {node} is let run"));
        }
    }

    pub(super) fn accuse(&self, what: String) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// What was seen that must not be.
    pub(super) fn accusations(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
