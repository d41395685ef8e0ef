//! Work of a migration on threads that may block: scanning the service's memory, and sending it.
//!
//! The task that waits for such work can be dropped: a user cancels, a connection breaks. The work itself continues. A
//! scan executes system calls in the service's processes, so the service must neither continue nor move again before the
//! last scan has ended: [`Jobs::end`] waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::JoinError;
use tokio_util::task::TaskTracker;

/// The work of one migration.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    running: TaskTracker,
    ending: Arc<AtomicBool>,
}

/// Whether the work is still wanted, for the thread that does it.
#[derive(Debug, Clone)]
pub(super) struct Wanted(Arc<AtomicBool>);

impl Wanted {
    /// It is.
    pub(super) fn is(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

impl Jobs {
    /// Whether any work is still wanted.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted(Arc::clone(&self.ending))
    }

    /// Works on a thread of its own, and returns what comes of it.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(Wanted) -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let wanted = self.wanted();
        self.running.spawn_blocking(move || work(wanted)).await
    }

    /// Returns when all work that was begun has ended, even if no task waits for it any more.
    pub(super) async fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        self.running.close();
        self.running.wait().await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_is_waited_for_at_the_end() {
        let jobs = Jobs::default();
        let (begun, began) = std::sync::mpsc::channel();
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let done = Arc::new(AtomicBool::new(false));
        let there = Arc::clone(&done);
        {
            let scanning = jobs.run(move |wanted| {
                begun.send(()).unwrap();
                gone.recv().unwrap();
                there.store(!wanted.is(), Ordering::SeqCst);
            });
            tokio::pin!(scanning);
            assert!(futures::poll!(&mut scanning).is_pending());
            began.recv().unwrap();
            // Cancelled.
        }
        let end = jobs.end();
        tokio::pin!(end);
        assert!(futures::poll!(&mut end).is_pending());
        go.send(()).unwrap();
        end.await;
        assert!(done.load(Ordering::SeqCst), "it has ended, and was told that it is not wanted");
    }
}
