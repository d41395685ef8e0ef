//! When the tombstone of a service or network that was removed is no longer needed.
//!
//! A node keeps a tombstone so that it does not learn of the removed one again from a member that does not know of the
//! removal. It is needed as long as a member may list the removed one:
//!
//! ```text
//! every second: this node ── what it knows, tombstones too ──▶ member
//!               this node ◀── what the member knows ────────── member
//! ```
//! A member that has answered has taken over the tombstones of what it had. When for [`AGREED`] all members have
//! answered and none has listed the removed one, no member can bring it back, and the tombstone is forgotten. Each node
//! decides that by itself. As long as one member is away nothing is forgotten. `godwit cluster remove` ends that: a
//! removed member forgets what it knew of others when it joins again.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::v1::{Network, Placement, SyncMessage};
use godwit_migration::resources::NodeResources;

use crate::state::{State, StateError};

/// How long all members must have answered without naming what was removed. Longer by far than an answer may be on
/// its way (5 s), so that none which was sent before the removal comes after the tombstone is gone.
const AGREED: Duration = Duration::from_secs(60);

/// Age from which a member's last word does not count: it is told and asked each second.
const FRESH: Duration = Duration::from_secs(10);

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Removed {
    Service { name: String, id: String },
    Network { name: String, id: String },
}

/// What a member last told.
#[derive(Debug)]
struct Word {
    at: Instant,
    /// Services that are not removed, by name: id, and whether the member speaks of itself.
    services: HashMap<String, (String, bool)>,
    /// Networks that are not removed, name and id.
    networks: HashSet<(String, String)>,
}

impl Word {
    /// Whether it could bring back what was removed. What another node says of a service of its own under the same
    /// name is another service.
    fn names(&self, removed: &Removed) -> bool {
        match removed {
            Removed::Service { name, id } => {
                self.services.get(name).is_some_and(|(told, of_itself)| told == id || !of_itself)
            }
            Removed::Network { name, id } => self.networks.contains(&(name.clone(), id.clone())),
        }
    }
}

/// What members last told, and since when they agree.
#[derive(Debug, Default)]
pub(crate) struct Tombstones(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    words: HashMap<String, Word>,
    agreed: HashMap<Removed, Instant>,
}

impl Tombstones {
    /// A member has told what it knows.
    pub(crate) fn hear(&self, from: &str, message: &SyncMessage) {
        self.hear_at(from, message, Instant::now());
    }

    fn hear_at(&self, from: &str, message: &SyncMessage, at: Instant) {
        let services = message.placements.iter().filter(|placement| !placement.removed);
        let services =
            services.map(|told| (told.service.clone(), (told.id.clone(), told.node == from))).collect();
        let networks = message.networks.iter().filter(|network| !network.removed);
        let networks = networks.map(|told| (told.name.clone(), told.id.clone())).collect();
        self.lock().words.insert(from.to_owned(), Word { at, services, networks });
    }

    /// Forgets the tombstones that are no longer needed. To be called each second.
    pub(crate) fn collect(&self, own: &str, state: &State, local: &NodeResources) -> Result<(), StateError> {
        let members = state.members()?.into_iter().map(|member| member.name);
        let others: Vec<_> = members.filter(|name| name != own).collect();
        let placements = state.placements()?.into_iter().filter(|placement| placement.removed);
        let networks = state.networks()?.into_iter().filter(|network| network.removed);
        let services = placements.map(|Placement { service: name, id, .. }| Removed::Service { name, id });
        let networks = networks.map(|Network { name, id, .. }| Removed::Network { name, id });
        for removed in self.due(&others, services.chain(networks), Instant::now()) {
            match removed {
                // What is to be done with an entry of the journal can depend on it.
                Removed::Service { id, .. }
                    if local.journal.unfinished_of(&id).map_or(true, |open| !open.is_empty()) => {}
                Removed::Service { name, id } => state.forget_removed_service(&name, &id)?,
                Removed::Network { name, id } => state.forget_removed_network(&name, &id)?,
            }
        }
        Ok(())
    }

    /// The tombstones that all others know.
    fn due(&self, others: &[String], there: impl Iterator<Item = Removed>, now: Instant) -> Vec<Removed> {
        let Seen { words, agreed } = &mut *self.lock();
        words.retain(|name, _| others.contains(name));
        let before = std::mem::take(agreed);
        let nobody_names = |removed: &Removed| {
            others.iter().all(|other| {
                words.get(other).is_some_and(|word| {
                    now.saturating_duration_since(word.at) <= FRESH && !word.names(removed)
                })
            })
        };
        let mut due = Vec::new();
        for removed in there.filter(nobody_names) {
            let since = before.get(&removed).copied().unwrap_or(now);
            if now.saturating_duration_since(since) >= AGREED {
                due.push(removed.clone());
            }
            agreed.insert(removed, since);
        }
        due
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        // Nothing that is done under the lock can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn placement(node: &str, id: &str, removed: bool) -> Placement {
        let (service, node) = ("web".into(), node.into());
        Placement { service, node, epoch: 1, id: id.into(), removed, ..Placement::default() }
    }

    fn says(placements: &[Placement]) -> SyncMessage {
        SyncMessage { placements: placements.to_vec(), ..SyncMessage::default() }
    }

    fn web(id: &str) -> Removed {
        Removed::Service { name: "web".into(), id: id.into() }
    }

    /// Node a, with the members b and c, second by second.
    struct Cluster {
        tombstones: Tombstones,
        now: Instant,
        others: Vec<String>,
    }

    impl Cluster {
        fn new() -> Self {
            let others = ["b", "c"].map(str::to_owned).into();
            Self { tombstones: Tombstones::default(), now: Instant::now(), others }
        }

        /// What is due after so many seconds in which these members say these things.
        fn after(&mut self, seconds: u64, said: &[(&str, &SyncMessage)], there: &[Removed]) -> Vec<Removed> {
            let mut due = Vec::new();
            for _ in 0..seconds {
                self.now += Duration::from_secs(1);
                for (from, message) in said {
                    self.tombstones.hear_at(from, message, self.now);
                }
                due = self.tombstones.due(&self.others, there.iter().cloned(), self.now);
            }
            due
        }
    }

    #[test]
    fn a_tombstone_is_forgotten_when_all_members_have_not_named_the_service_for_a_while() {
        let mut cluster = Cluster::new();
        let (gone, nothing) = (says(&[placement("b", "1", true)]), says(&[]));
        assert_eq!(cluster.after(50, &[("b", &gone), ("c", &nothing)], &[web("1")]), []);
        assert_eq!(cluster.after(20, &[("b", &gone), ("c", &nothing)], &[web("1")]), [web("1")]);
    }

    #[test]
    fn a_member_that_was_away_keeps_the_tombstone_until_it_has_heard_of_the_removal() {
        let mut cluster = Cluster::new();
        let (gone, live) = (says(&[placement("b", "1", true)]), says(&[placement("b", "1", false)]));
        assert_eq!(cluster.after(10_000, &[("b", &gone)], &[web("1")]), [], "c has never been heard of");
        assert_eq!(cluster.after(100, &[("b", &gone), ("c", &live)], &[web("1")]), [], "c still lists it");
        assert_eq!(cluster.after(50, &[("b", &gone), ("c", &gone)], &[web("1")]), []);
        assert_eq!(cluster.after(100, &[("b", &gone)], &[web("1")]), [], "c is away again");
        assert_eq!(cluster.after(59, &[("b", &gone), ("c", &gone)], &[web("1")]), [], "from the beginning");
        assert_eq!(cluster.after(5, &[("b", &gone), ("c", &gone)], &[web("1")]), [web("1")]);
    }

    #[test]
    fn a_member_that_was_removed_from_the_cluster_is_not_waited_for() {
        let mut cluster = Cluster::new();
        cluster.after(5, &[("c", &says(&[placement("b", "1", false)]))], &[web("1")]);
        cluster.others = vec!["b".into()];
        assert_eq!(cluster.after(70, &[("b", &says(&[]))], &[web("1")]), [web("1")]);
        cluster.others.clear();
        assert_eq!(cluster.after(70, &[], &[web("2")]), [web("2")], "a node alone");
    }

    #[test]
    fn another_service_of_the_name_counts_only_of_its_own_node() {
        let mut cluster = Cluster::new();
        let own = says(&[placement("c", "0", false)]);
        let b = ("b", &says(&[]));
        assert_eq!(cluster.after(70, &[b, ("c", &own)], &[web("1")]), [web("1")]);
        let of_b = says(&[placement("b", "0", false)]);
        assert_eq!(cluster.after(70, &[b, ("c", &of_b)], &[web("1")]), []);
    }

    #[test]
    fn networks_are_forgotten_likewise() {
        let network =
            |removed| Network { name: "back".into(), id: "1".into(), vni: 7, removed, ..Network::default() };
        let says = |removed| SyncMessage { networks: vec![network(removed)], ..SyncMessage::default() };
        let (live, gone) = (says(false), says(true));
        let back = Removed::Network { name: "back".into(), id: "1".into() };
        let mut cluster = Cluster::new();
        let there = std::slice::from_ref(&back);
        assert_eq!(cluster.after(70, &[("b", &gone), ("c", &live)], there), []);
        assert_eq!(cluster.after(70, &[("b", &gone), ("c", &gone)], there), there);
    }
}
