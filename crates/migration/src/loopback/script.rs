//! What goes wrong, and when: every call of a fake and every write of a journal is a step, and a fault happens at one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deed {
    /// The step is not done, and an error says so.
    Fail,
    /// The user cancels the migration.
    Cancel,
    /// The daemon of this node is killed, the step not done.
    CrashBefore,
    /// The daemon of this node is killed, the step done.
    CrashAfter,
}

/// A daemon that is killed unwinds with this; nobody reports it as a panic.
pub(super) struct Killed;

/// The steps of one node.
#[derive(Debug, Default)]
pub(super) struct Script {
    steps: AtomicUsize,
    /// What happens at the step of this number.
    fault: Mutex<Option<(usize, Deed)>>,
    happened: AtomicBool,
    /// The steps' names, for whoever looks for what went wrong.
    trace: Mutex<Vec<String>>,
    /// Raised when the daemon is to die.
    pub(super) kill: Notify,
    pub(super) cancel: CancellationToken,
}

impl Script {
    /// Something happens at a step.
    pub(super) fn expect(&self, step: usize, deed: Deed) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some((step, deed));
    }

    /// Whether it has.
    pub(super) fn has_happened(&self) -> bool {
        self.happened.load(Ordering::SeqCst)
    }

    /// It has, by other means.
    pub(super) fn happens(&self) {
        self.happened.store(true, Ordering::SeqCst);
    }

    pub(super) fn trace(&self) -> String {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner).join(" ")
    }

    /// Notes something between the steps.
    pub(super) fn note(&self, what: &str) {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner).push(what.to_owned());
    }

    /// Does a step; nothing where it fails.
    pub(super) fn step<T>(self: &Arc<Self>, name: &str, work: impl FnOnce() -> T) -> Option<T> {
        let number = self.steps.fetch_add(1, Ordering::SeqCst);
        let fault = *self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let deed = fault.filter(|(step, _)| *step == number).map(|(_, deed)| deed);
        self.note(&match deed {
            None => name.to_owned(),
            Some(deed) => format!("[{name}: {deed:?}]"),
        });
        if deed.is_some() {
            self.happens();
        }
        match deed {
            None => Some(work()),
            Some(Deed::Fail) => None,
            Some(Deed::Cancel) => {
                self.cancel.cancel();
                Some(work())
            }
            Some(Deed::CrashBefore) => self.die(),
            Some(Deed::CrashAfter) => {
                work();
                self.die()
            }
        }
    }

    /// The daemon is killed: this task goes no further, and the others are dropped.
    fn die(&self) -> ! {
        self.kill.notify_one();
        std::panic::resume_unwind(Box::new(Killed))
    }
}
