//! Services of this node that run while some of their pages are still at their source: how many pages, and whether the
//! source answers. Users see this.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_memory::PAGE_SIZE;
use godwit_memory::pager::Client;
use tokio::sync::Notify;

/// How long a pager is asked, which answers in microseconds.
const ANSWER: Duration = Duration::from_secs(1);

/// The pages that a service waits for, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The node that has them.
    pub source: String,
    /// How many bytes of them there still are.
    pub lacking_bytes: u64,
    /// Bytes of all pages of the service.
    pub total_bytes: u64,
    /// How long that node has not answered, if it does not.
    pub unreachable: Option<Duration>,
}

impl Wait {
    /// The wait of the named service in a sentence, with what can be done.
    #[must_use]
    pub fn sentence(&self, service: &str) -> String {
        let Self { source, lacking_bytes, total_bytes, unreachable } = self;
        let (lacking, total) = (lacking_bytes.div_ceil(1 << 20), total_bytes.div_ceil(1 << 20));
        match unreachable {
            None => format!(
                "{lacking} of {total} MiB of its memory are still on node {source}, and follow from there"
            ),
            Some(time) => format!(
                "waits for pages of node {source} ({lacking} of {total} MiB), unreachable for {} s: service {service} waits when it needs them, and continues when node {source} is back; if that never comes back, its memory is lost, and `godwit rm --force {service}` here removes it",
                time.as_secs()
            ),
        }
    }
}

#[derive(Debug)]
struct Entry {
    migration: String,
    source: String,
    client: Arc<Client>,
    lacking_bytes: u64,
    total_bytes: u64,
    silent: Option<Instant>,
}

/// All of them, by the service's name.
#[derive(Debug, Default)]
pub struct Waits {
    entries: Mutex<HashMap<String, Entry>>,
    /// Raised when a source has been silent for a while.
    silence: Notify,
}

impl Waits {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        // Every change under this lock is a single one.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A wait begins; it ends when what is returned is dropped.
    pub(crate) fn begin(
        &self,
        service: &str,
        migration: &str,
        source: &str,
        client: Arc<Client>,
    ) -> Waiting<'_> {
        let entry = Entry {
            migration: migration.to_owned(),
            source: source.to_owned(),
            client,
            lacking_bytes: 0,
            total_bytes: 0,
            silent: None,
        };
        self.lock().insert(service.to_owned(), entry);
        Waiting { waits: self, service: service.to_owned(), migration: migration.to_owned() }
    }

    /// Returns when the source of the named service's pages has been silent for [`UNREACHABLE`], with a sentence.
    pub(crate) async fn unreachable(&self, service: &str) -> String {
        loop {
            let raised = self.silence.notified();
            tokio::pin!(raised);
            // From here on no notification is missed.
            raised.as_mut().enable();
            if let Some(wait) = self.of(service).await
                && wait.unreachable.is_some_and(|time| time >= UNREACHABLE)
            {
                return wait.sentence(service);
            }
            raised.await;
        }
    }

    /// What the named service waits for now, if it does.
    pub async fn of(&self, service: &str) -> Option<Wait> {
        let client = self.lock().get(service).map(|entry| Arc::clone(&entry.client))?;
        let asked = tokio::task::spawn_blocking(move || client.state());
        let answer = tokio::time::timeout(ANSWER, asked).await;
        let mut entries = self.lock();
        let entry = entries.get_mut(service)?;
        // A pager that does not answer is as far as it was.
        if let Ok(Ok(Ok(state))) = answer {
            entry.lacking_bytes = state.pending.saturating_mul(PAGE_SIZE);
            entry.total_bytes = state.stored.saturating_add(state.pending).saturating_mul(PAGE_SIZE);
        }
        Some(Wait {
            source: entry.source.clone(),
            lacking_bytes: entry.lacking_bytes,
            total_bytes: entry.total_bytes,
            unreachable: entry.silent.map(|since| since.elapsed()),
        })
    }
}

/// How long a source that has pages of a service may be silent before users are told: a daemon that is restarted
/// comes back sooner.
pub(crate) const UNREACHABLE: Duration = Duration::from_secs(3);

/// A wait that has not ended.
pub(crate) struct Waiting<'a> {
    waits: &'a Waits,
    service: String,
    migration: String,
}

impl Waiting<'_> {
    /// The source has not talked for [`UNREACHABLE`].
    pub(crate) fn raise(&self) {
        self.waits.silence.notify_waiters();
    }

    /// The source talks, or does not any more.
    pub(crate) fn talks(&self, talks: bool) {
        if let Some(entry) = self.waits.lock().get_mut(&self.service) {
            entry.silent = if talks { None } else { entry.silent.or_else(|| Some(Instant::now())) };
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut entries = self.waits.lock();
        if entries.get(&self.service).is_some_and(|entry| entry.migration == self.migration) {
            entries.remove(&self.service);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_with_what_it_is_for_and_the_way_out() {
        let mut wait =
            Wait { source: "b".into(), lacking_bytes: 33 << 20, total_bytes: 41 << 20, unreachable: None };
        assert_eq!(
            wait.sentence("s"),
            "33 of 41 MiB of its memory are still on node b, and follow from there"
        );
        wait.unreachable = Some(Duration::from_millis(12_900));
        let told = wait.sentence("s");
        assert!(told.starts_with("waits for pages of node b (33 of 41 MiB), unreachable for 12 s"), "{told}");
        assert!(told.contains("`godwit rm --force s`"), "{told}");
    }
}
