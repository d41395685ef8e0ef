//! How services of the node end and begin again: the tasks that watch them, users who end them, and those that wait to
//! be started again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_migration::{Service, error_chain, restart};
use godwit_names::ServiceName;
use tokio::sync::{broadcast, watch};
use tokio::task::AbortHandle;

use super::Node;

/// The reason of a service that a user stopped.
const STOPPED: &str = "stopped by `godwit stop`";

/// Ends that who waits for one may fall behind before it has to look.
pub(super) const ENDS: usize = 256;
/// How long the end of a service that was removed then is told to who asks late: whose link was broken meanwhile.
const REMEMBERED: Duration = Duration::from_secs(120);

/// How a life of a service has ended.
#[derive(Debug, Clone)]
pub(crate) struct End {
    /// The service's.
    pub id: String,
    pub exit_code: i32,
    /// When that is not the program's own doing.
    pub reason: String,
}

/// A task that waits for a service's end and records it. It can be called off until the service has ended, but not
/// while it records the end.
pub(super) struct Watcher {
    /// Tells it from those before it and after it.
    number: u64,
    task: AbortHandle,
    has_the_end: bool,
    /// Closed when it has noted the end, or was called off.
    over: watch::Receiver<()>,
}

impl Node {
    /// Watches for the end of a service that runs here.
    pub(crate) fn watch(self: &Arc<Self>, service: &Service) {
        let node = Arc::clone(self);
        let watched = service.clone();
        let (finish, over) = watch::channel(());
        // The task finds itself entered.
        let mut transient = self.transient();
        transient.watched += 1;
        // Another service may have had its name.
        transient.removed_at_end.retain(|(of, end, _)| *of != service.name || end.id == service.id);
        transient.seen.insert(service.id.clone());
        let number = transient.watched;
        let begun = Instant::now();
        let task = tokio::spawn(async move {
            let config = node.local().config(&watched);
            let (code, reason) = match node.local().engine.wait(&config).await {
                Ok(code) => (code, String::new()),
                Err(error) => (-1, error_chain(&error)),
            };
            if !node.take_end(&watched.name, number) {
                return;
            }
            let known = node.state.service(&watched.name).ok().flatten();
            if known.is_none_or(|owned| owned.service.id != watched.id || owned.exit_code.is_none()) {
                node.ended(&watched, code, &reason, begun.elapsed()).await;
            }
            // Else the task that ended it has said why.
            node.end_watch(&watched.name, number);
            drop(finish);
        });
        let watcher = Watcher { number, task: task.abort_handle(), has_the_end: false, over };
        if let Some(before) = transient.watchers.insert(service.name.clone(), watcher)
            && !before.has_the_end
        {
            before.task.abort();
        }
    }

    /// The watcher of this number has seen the end of its service; false if it was called off.
    fn take_end(&self, name: &ServiceName, number: u64) -> bool {
        let mut transient = self.transient();
        match transient.watchers.get_mut(name).filter(|watcher| watcher.number == number) {
            Some(watcher) => {
                watcher.has_the_end = true;
                true
            }
            None => false,
        }
    }

    fn end_watch(&self, name: &ServiceName, number: u64) {
        let mut transient = self.transient();
        if transient.watchers.get(name).is_some_and(|watcher| watcher.number == number) {
            transient.watchers.remove(name);
        }
    }

    /// Stops watching: the service leaves, or is being removed.
    pub(crate) fn unwatch(&self, name: &ServiceName) {
        let mut transient = self.transient();
        if transient.watchers.get(name).is_some_and(|watcher| !watcher.has_the_end)
            && let Some(watcher) = transient.watchers.remove(name)
        {
            watcher.task.abort();
        }
    }

    /// Ends of services of this node, from now on.
    pub(crate) fn ends(&self) -> broadcast::Receiver<End> {
        self.ends.subscribe()
    }

    /// How a service has ended that was removed at its end, if that was not long ago.
    pub(crate) fn removed_at_end(&self, name: &ServiceName) -> Option<End> {
        let transient = self.transient();
        let of_name =
            |(of, _, when): &&(ServiceName, End, Instant)| of == name && when.elapsed() < REMEMBERED;
        transient.removed_at_end.iter().rev().find(of_name).map(|(_, end, _)| end.clone())
    }

    /// Tells those who wait for the end of a service, and those who ask late for one that is removed now.
    pub(crate) fn note_end(&self, service: &Service, exit_code: i32, reason: &str) {
        let end = End { id: service.id.clone(), exit_code, reason: reason.to_owned() };
        if service.remove {
            let mut transient = self.transient();
            transient.removed_at_end.push_back((service.name.clone(), end.clone(), Instant::now()));
            if transient.removed_at_end.len() > ENDS {
                transient.removed_at_end.pop_front();
            }
        }
        // Nobody may wait for it.
        let _ = self.ends.send(end);
    }

    /// Closed when the end of a service that is watched has been noted; nothing where none is.
    pub(crate) fn noted(&self, name: &ServiceName) -> Option<watch::Receiver<()>> {
        self.transient().watchers.get(name).map(|watcher| watcher.over.clone())
    }

    /// A user ends a service, until what is returned is dropped: meanwhile its policy does not start it again.
    pub(crate) fn ending(self: &Arc<Self>, name: &ServiceName) -> Ending {
        self.ending_because(name, STOPPED)
    }

    /// The same for this reason.
    pub(crate) fn ending_because(self: &Arc<Self>, name: &ServiceName, reason: &'static str) -> Ending {
        self.transient().ending.insert(name.clone(), reason);
        Ending { node: Arc::clone(self), name: name.clone() }
    }

    /// A service is being started again, until what is returned is dropped.
    pub(crate) fn starting(self: &Arc<Self>, id: &str) -> Starting {
        self.transient().starting.insert(id.to_owned());
        Starting { node: Arc::clone(self), id: id.to_owned() }
    }

    /// Whether a service is being started again.
    pub(crate) fn is_starting(&self, id: &str) -> bool {
        self.transient().starting.contains(id)
    }

    /// A service is started by its policy after the pause that is returned; nothing if that is under way already.
    pub(crate) fn plan_start(&self, id: &str, ran: Duration) -> Option<Duration> {
        let mut transient = self.transient();
        if transient.due.contains_key(id) {
            return None;
        }
        let pauses = transient.pauses.entry(id.to_string()).or_insert(restart::PAUSES);
        let pause = restart::pause(pauses, ran);
        transient.due.insert(id.to_string(), Instant::now() + pause);
        Some(pause)
    }

    /// The only task that follows the engine of a service, until what is returned is dropped.
    pub(crate) async fn following(&self, id: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let alone = Arc::clone(self.transient().following.entry(id.to_owned()).or_default());
        alone.lock_owned().await
    }

    /// The start that was planned is made now, or will not be.
    pub(crate) fn end_plan(&self, id: &str) {
        self.transient().due.remove(id);
    }

    /// The next start begins with the first pause: a user has started it.
    pub(crate) fn forget_pause(&self, id: &str) {
        self.transient().pauses.remove(id);
    }

    /// A service is not this node's any more.
    pub(crate) fn forget_lives(&self, id: &str) {
        let mut transient = self.transient();
        transient.seen.remove(id);
        transient.pauses.remove(id);
        transient.due.remove(id);
        transient.following.remove(id);
    }

    /// Whether processes of a service have run here since this daemon was started.
    pub(crate) fn has_run(&self, id: &str) -> bool {
        self.transient().seen.contains(id)
    }

    /// When a service is started again by its policy, if it is to be.
    pub(crate) fn due(&self, id: &str) -> Option<Duration> {
        self.transient().due.get(id).map(|due| due.saturating_duration_since(Instant::now()))
    }

    /// Records the end of a service that has run for so long, tells it, and plans its next start where its policy wants
    /// one.
    pub(crate) async fn ended(self: &Arc<Self>, service: &Service, code: i32, reason: &str, ran: Duration) {
        let for_user = self.transient().ending.get(&service.name).copied();
        let (reason, for_user) = (for_user.unwrap_or(reason), for_user.is_some());
        if let Err(error) = self.state.set_exit(service, code, reason) {
            tracing::error!(service = %service.name, error = %error_chain(&error), "cannot record its exit status");
        }
        self.note_end(service, code, reason);
        if let Err(error) = self.local().network.close(service).await {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "its port cannot be closed");
        }
        if for_user {
            self.events.tell("service", "stopped", &service.name, &format!("exit code {code}"));
            if service.kept.is_some() || service.remove {
                // Its engine may start it for another user; or it is removed now.
                self.by_policy(service, ran);
            }
            return;
        }
        let detail = if reason.is_empty() { format!("exit code {code}") } else { reason.to_string() };
        self.events.tell("service", "died", &service.name, &detail);
        self.by_policy(service, ran);
    }
}

/// A service that is being started again.
pub(crate) struct Starting {
    node: Arc<Node>,
    id: String,
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.node.transient().starting.remove(&self.id);
    }
}

/// A service that is being ended for a user.
pub(crate) struct Ending {
    node: Arc<Node>,
    name: ServiceName,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.node.transient().ending.remove(&self.name);
    }
}
