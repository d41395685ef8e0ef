//! Services in doubt: restored and stopped here, while the source has not said whether it has committed. An operator
//! can decide where the source no longer can.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_names::ServiceName;
use tokio::sync::watch;

use crate::service::Service;

/// What an operator decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The service is this node's: it is let run here.
    Own,
    /// It is not: the copy here is dropped.
    Drop,
}

/// A doubt, for those who look at it.
#[derive(Debug, Clone)]
pub struct Doubt {
    /// The service.
    pub service: Service,
    /// The node that it came from.
    pub source: String,
    /// The migration.
    pub migration: String,
    /// Why its source cannot end the doubt; then an operator may.
    pub stuck: Option<String>,
}

impl Doubt {
    /// The doubt in a sentence, with what can be done.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { service, source, stuck, .. } = self;
        match stuck {
            None => format!("waits for node {source} to say whether the migration committed"),
            Some(why) => format!(
                "no node can say whether the migration from node {source} committed: {why}; make sure that the service does not run on node {source}, then decide here: `godwit resolve {0} --own` lets it run, `godwit resolve {0} --drop` removes this copy",
                service.name
            ),
        }
    }
}

#[derive(Debug)]
struct Entry {
    doubt: Doubt,
    verdict: watch::Sender<Option<Verdict>>,
}

/// All of them, by the service's name.
#[derive(Debug, Default)]
pub struct Doubts(Mutex<HashMap<ServiceName, Entry>>);

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceName, Entry>> {
        // Every change under this lock is a single one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A doubt begins; the receiver that is returned gets what an operator decides.
    pub(crate) fn begin(
        &self,
        service: &Service,
        migration: &str,
        source: &str,
    ) -> watch::Receiver<Option<Verdict>> {
        let mut entries = self.lock();
        if let Some(entry) = entries.get(&service.name).filter(|entry| entry.doubt.migration == migration) {
            return entry.verdict.subscribe();
        }
        let (verdict, decided) = watch::channel(None);
        let (service, source, migration) = (service.clone(), source.to_owned(), migration.to_owned());
        let name = service.name.clone();
        entries.insert(name, Entry { doubt: Doubt { service, source, migration, stuck: None }, verdict });
        decided
    }

    /// Why the source does not end it, or nothing where it does; whether that is news.
    pub(crate) fn note(&self, name: &str, stuck: Option<String>) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(name) else { return false };
        let news = entry.doubt.stuck.is_some() != stuck.is_some();
        entry.doubt.stuck = stuck;
        news
    }

    pub(crate) fn end(&self, name: &str) {
        self.lock().remove(name);
    }

    /// Whether a service of this name is in doubt.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// All doubts.
    #[must_use]
    pub fn all(&self) -> Vec<Doubt> {
        self.lock().values().map(|entry| entry.doubt.clone()).collect()
    }

    /// Decides by hand; or says why not, where the source answers and will decide itself.
    pub fn decide(&self, name: &str, verdict: Verdict) -> Result<(), String> {
        let entries = self.lock();
        let entry = entries.get(name).ok_or_else(|| {
            format!("no service {name} is in doubt on this node; `godwit ps -a` shows where one is")
        })?;
        let Doubt { source, stuck, .. } = &entry.doubt;
        if stuck.is_none() {
            return Err(format!(
                "service {name} needs no decision by hand: node {source} is being asked, and answers"
            ));
        }
        entry.verdict.send_replace(Some(verdict));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    #[test]
    fn only_a_doubt_that_its_source_does_not_end_is_decided_by_hand() {
        let doubts = Doubts::default();
        assert!(doubts.decide("redis", Verdict::Own).unwrap_err().contains("in doubt"));
        let decided = doubts.begin(&service(), "01A", "a");
        assert!(doubts.decide("redis", Verdict::Own).unwrap_err().contains("node a"));
        assert!(doubts.note("redis", Some("it has lost its journal".into())));
        assert!(!doubts.note("redis", Some("it has lost its journal".into())), "no news");
        let shown = doubts.all()[0].sentence();
        assert!(shown.contains("lost its journal") && shown.contains("resolve redis --own"), "{shown}");
        doubts.decide("redis", Verdict::Drop).unwrap();
        assert_eq!(*decided.borrow(), Some(Verdict::Drop));
        doubts.end("redis");
        assert!(!doubts.has("redis"));
    }
}
