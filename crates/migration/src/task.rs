//! Tasks on which a service depends.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use tokio::sync::watch;

use crate::resources::NodeResources;

impl NodeResources {
    /// Starts work that has to end as intended. If it panics, a service may be frozen or half here, and only the
    /// journal knows: this daemon ends, and its next life goes on from there.
    pub fn spawn<W>(self: &Arc<Self>, work: impl FnOnce(Arc<Self>) -> W)
    where
        W: Future<Output = ()> + Send + 'static,
    {
        let (local, work) = (Arc::clone(self), work(Arc::clone(self)));
        tokio::spawn(async move { local.guard(work).await });
    }

    /// The same within a task.
    pub(crate) async fn guard(&self, work: impl Future<Output = ()> + Send) {
        guard(&self.fatal, work).await;
    }
}

async fn guard(fatal: &watch::Sender<Option<String>>, work: impl Future<Output = ()> + Send) {
    // Nothing is looked at that it may have left half changed.
    if AssertUnwindSafe(work).catch_unwind().await.is_err() {
        fatal.send_replace(Some(
            "a migration's task failed, which is a defect of godwit: the log says where, and only the journal knows how far the migration was".into(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_ends_when_the_task_of_a_migration_panics() {
        let (fatal, told) = watch::channel(None);
        guard(&fatal, async {}).await;
        assert_eq!(*told.borrow(), None);
        guard(&fatal, async { panic!("on purpose") }).await;
        assert!(told.borrow().as_ref().is_some_and(|why| why.contains("a defect of godwit")));
    }
}
