//! Waiting for a disk or a lock in the middle of asynchronous code.
//!
//! A thread of tokio's that waits runs no other task meanwhile, and there are as many threads as processors. Two writes
//! to a slow disk would hold up the heartbeats of all migrations, and the other nodes would give this node up.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Does what may wait. Other threads, where there are any, run this thread's tasks meanwhile.
pub fn off_worker<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(work)
        }
        _ => work(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_while_one_waits() {
        let (go, gone) = std::sync::mpsc::channel();
        let (begun, began) = tokio::sync::oneshot::channel();
        let waits = tokio::spawn(async move {
            begun.send(()).unwrap();
            // It is reached only when something is broken.
            off_worker(|| gone.recv_timeout(Duration::from_secs(20)))
        });
        began.await.unwrap();
        // The only worker is the waiting task's.
        tokio::spawn(async move { go.send(()) });
        assert!(waits.await.unwrap().is_ok(), "the other task did not run");
    }
}
