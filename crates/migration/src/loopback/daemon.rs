//! A node's daemon: a runtime of its own, which can be killed at any step and is started again then.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use futures::FutureExt;
use godwit_engine::image::{Registries, Store};
use godwit_memory::tracker::Detected;
use godwit_names::ServiceName;
use godwit_policy::Mode;
use godwit_transfer::{Connection, Identity, ListenOptions, Listener};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::cluster::{Above, Names};
use super::engine::{Checkpointer, Containers};
use super::machine::Machine;
use super::means::{Directories, Network, Threads};
use super::script::Killed;
use super::wire::Wire;
use crate::ahead::KeptFiles;
use crate::arrivals::Arrivals;
use crate::binds::Binds;
use crate::destination;
use crate::doubt::Doubts;
use crate::journal::Journal;
use crate::link::{self, Link};
use crate::options::Options;
use crate::past_moves::PastMoves;
use crate::promised::Promised;
use crate::recovery;
use crate::report::Report;
use crate::resources::{LocalError, NodeResources};
use crate::retained::Retention;
use crate::service::Service;
use crate::source::Source;
use crate::waits::Waits;

/// How long a destination may get no further. It is reached only when something is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// A migration to be made.
#[derive(Clone)]
pub(super) struct Order {
    pub(super) service: Service,
    pub(super) options: Options,
}

/// The daemon of a node, from life to life.
pub(super) struct Daemon {
    machine: Arc<Machine>,
    peer: Arc<Machine>,
    wire: Arc<Wire>,
    identity: Identity,
    tracker: Detected,
    names: Names,
    stop: Notify,
    /// Tasks of connections, and of the migration.
    tasks: TaskTracker,
    /// Whether it has begun to take connections.
    serves: AtomicBool,
    /// What became of the order.
    pub(super) report: Mutex<Option<Result<Report, LocalError>>>,
}

/// Why a life of a daemon ended.
enum End {
    /// It was killed, or saw that it had to end.
    Dead,
    /// The test is over.
    Told,
}

impl Daemon {
    pub(super) fn new(
        machine: &Arc<Machine>,
        peer: &Arc<Machine>,
        wire: &Arc<Wire>,
        identity: Identity,
        tracker: Detected,
    ) -> Arc<Self> {
        Arc::new(Self {
            machine: Arc::clone(machine),
            peer: Arc::clone(peer),
            wire: Arc::clone(wire),
            identity,
            tracker,
            names: Names::default(),
            stop: Notify::new(),
            tasks: TaskTracker::new(),
            serves: AtomicBool::new(false),
            report: Mutex::default(),
        })
    }

    /// Starts it, with a migration to make if there is one; each time that it dies it is started again without.
    pub(super) fn start(self: &Arc<Self>, order: Option<Order>) -> JoinHandle<()> {
        let daemon = Arc::clone(self);
        std::thread::spawn(move || {
            let mut order = order;
            while let End::Dead = daemon.live(order.take()) {
                daemon.machine.script.note("| again |");
            }
        })
    }

    pub(super) fn stop(&self) {
        self.stop.notify_one();
    }

    /// Whether it takes connections.
    pub(super) fn serves(&self) -> bool {
        self.serves.load(Ordering::SeqCst)
    }

    /// Whether nothing that was asked of it is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.serves() && self.tasks.is_empty()
    }

    /// The names that are taken.
    pub(super) fn names(&self) -> BTreeSet<ServiceName> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn live(self: &Arc<Self>, order: Option<Order>) -> End {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let end = runtime.block_on(async {
            let local = Arc::new(self.local());
            let mut fatal = local.fatal.subscribe();
            self.machine.is_served_by(Some(&local), None);
            let work = self.tasks.spawn(Arc::clone(self).begin(Arc::clone(&local), order));
            let end = tokio::select! {
                biased;
                () = self.machine.script.kill.notified() => End::Dead,
                () = self.stop.notified() => End::Told,
                Ok(_) = fatal.wait_for(Option::is_some) => End::Dead,
                () = began(work) => End::Dead,
            };
            self.serves.store(false, Ordering::SeqCst);
            self.machine.is_served_by(None, None);
            end
        });
        // First all tasks are dropped, then threads are waited for.
        drop(runtime);
        end
    }

    fn local(self: &Arc<Self>) -> NodeResources {
        let machine = &self.machine;
        let layout = machine.layout.clone();
        let journal = Journal::open(&layout.state.join("journal.db")).unwrap();
        let script = Arc::clone(&machine.script);
        journal.observe(move |write| script.step(&format!("journal.{write}"), || ()).is_some());
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let above = Above {
            machine: Arc::clone(machine),
            peer: Arc::clone(&self.peer),
            wire: Arc::clone(&self.wire),
            identity: self.identity.clone(),
            names: Arc::clone(&self.names),
        };
        NodeResources {
            node: machine.name.clone(),
            engine: Arc::new(Containers(Arc::clone(machine))),
            network: Arc::new(Network(Arc::clone(machine))),
            standstills: Arc::new(Network(Arc::clone(machine))),
            mounts: Arc::new(Directories(Arc::clone(machine))),
            binds: Binds::default(),
            hooks: layout.state.join("hooks"),
            store: Arc::new(Store::open(&layout.state.join("images")).unwrap()),
            registries: Registries::default(),
            criu: Arc::new(Checkpointer(Arc::clone(machine))),
            journal,
            cluster: Arc::new(above),
            promised: Promised::up_to(0),
            patience: PATIENCE,
            arrivals: Arrivals::default(),
            retention: Retention::new(Some(0)),
            kept_files: Arc::new(KeptFiles::new(&layout.state, None)),
            sent_files: Arc::default(),
            past_moves: PastMoves::open(&layout.state.join("past_moves.json")),
            pagers: Arc::new(Threads(Arc::clone(machine))),
            userfaultfd: machine.lazy,
            delta_cache: 1 << 20,
            tracker: self.tracker.clone(),
            ending: CancellationToken::new(),
            doubts: Doubts::default(),
            waits: Waits::default(),
            fatal: watch::channel(None).0,
            layout,
        }
    }

    /// What a daemon does: ends what its last life left, then serves. No when it cannot begin.
    async fn begin(self: Arc<Self>, local: Arc<NodeResources>, order: Option<Order>) -> bool {
        if let Err(error) = recovery::recover(&local).await {
            // The service manager starts it again.
            self.machine.script.note(&format!("cannot begin: {}", crate::error_chain(&error)));
            return false;
        }
        let mut listener =
            Listener::bind(([127, 0, 0, 1], 0).into(), &self.identity, ListenOptions::default())
                .await
                .unwrap();
        self.machine.is_served_by(Some(&local), Some(listener.local_addr()));
        self.serves.store(true, Ordering::SeqCst);
        if let Some(order) = order {
            let moving = Arc::clone(&self).migrate(Arc::clone(&local), order);
            self.tasks.spawn(self.watched(moving));
        }
        // From here on it waits, which is not what the tasks are counted for.
        let serving = {
            let (daemon, local) = (Arc::clone(&self), Arc::clone(&local));
            async move {
                loop {
                    let accepted = listener.accept().await;
                    let local = Arc::clone(&local);
                    daemon.tasks.spawn(daemon.watched(async move {
                        if let Ok(connection) = Connection::accept(accepted, &link::options()).await {
                            destination::serve(local, Link::new(connection)).await;
                        }
                    }));
                }
            }
        };
        tokio::spawn(serving);
        true
    }

    /// A task that ends by a panic that nobody meant is an accusation.
    fn watched<F: Future<Output = ()> + Send>(&self, work: F) -> impl Future<Output = ()> + Send + use<F> {
        let machine = Arc::clone(&self.machine);
        async move {
            if let Err(panic) = AssertUnwindSafe(work).catch_unwind().await
                && !panic.is::<Killed>()
            {
                machine.accuse(format!("a task of node {} panicked", machine.name));
            }
        }
    }

    async fn migrate(self: Arc<Self>, local: Arc<NodeResources>, Order { service, options }: Order) {
        let (progress, _) = watch::channel(crate::Progress::default());
        let name = self.names.lock().unwrap_or_else(PoisonError::into_inner).insert(service.name.clone());
        assert!(name, "its name is free");
        let (cancel, to) = (self.machine.script.cancel.clone(), self.peer.name.clone());
        let source = |id: &str, options| {
            let (local, service) = (Arc::clone(&local), service.clone());
            Source::new(local, service, id.into(), to.clone(), options, progress.clone(), cancel.clone())
        };
        if options.prepares {
            // There is no room for pages, which ends it after the files.
            let report = source("01P", Options { mode: Mode::Precopy, ..options.clone() }).prepare().await;
            self.machine.script.note(&format!("| {} |", report.reason));
        }
        let source = source("01A", Options { prepares: false, ..options });
        let (report, rest) = source.run().await;
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
        if let Some(rest) = rest {
            rest.end().await;
        }
        self.names.lock().unwrap_or_else(PoisonError::into_inner).remove(&service.name);
    }
}

/// Returns when a daemon could not begin.
async fn began(begin: tokio::task::JoinHandle<bool>) {
    match begin.await {
        Ok(true) => std::future::pending().await,
        Ok(false) => {}
        Err(error) => match error.try_into_panic() {
            Ok(panic) if !panic.is::<Killed>() => std::panic::resume_unwind(panic),
            // Why it was killed is known elsewhere.
            _ => {}
        },
    }
}
