//! What the state keeps of members that were removed, and what is put right in a state that was told
//! nonsense.

use godwit_api::v1::Placement;
use godwit_database::blocking::off_worker;
use godwit_names::is_name;
use godwit_transfer::{NodeName, Removal};
use rusqlite::{Connection, params};

use super::{State, StateError};
use crate::trust::MAX_EPOCH;

/// Drops what earlier versions believed of anybody, and could never be replaced: entries under names that
/// cannot be, and those beyond all bounds. A member's own next word counts, whatever was said of it.
pub(super) fn put_right(database: &Connection) -> Result<(), StateError> {
    let names = |query: &str| -> Result<Vec<String>, StateError> {
        let mut statement = database.prepare(query)?;
        let rows = statement.query_map([], |row| row.get(0))?;
        Ok(rows.collect::<Result<_, _>>()?)
    };
    for name in names("SELECT name FROM member")? {
        if NodeName::new(&name).is_err() {
            database.execute("DELETE FROM member WHERE name = ?1", params![name])?;
        }
    }
    for name in names("SELECT service FROM placement")? {
        if !is_name(&name) {
            database.execute("DELETE FROM placement WHERE service = ?1", params![name])?;
        }
    }
    let most = i64::try_from(MAX_EPOCH).unwrap_or(i64::MAX);
    database.execute("DELETE FROM placement WHERE epoch > ?1 OR epoch < 0", params![most])?;
    database.execute("UPDATE member SET revision = 0", params![])?;
    Ok(())
}

impl State {
    /// Keeps the CA's word that a node was removed.
    pub(crate) fn put_removal(&self, removal: &Removal) -> Result<(), StateError> {
        off_worker(|| {
            let until = i64::try_from(removal.until).unwrap_or(i64::MAX);
            self.lock().execute(
                "INSERT INTO removal (node, until, signature) VALUES (?1, ?2, ?3)
             ON CONFLICT (node) DO UPDATE SET until = excluded.until, signature = excluded.signature
             WHERE excluded.until > removal.until",
                params![removal.node.as_str(), until, removal.signature],
            )?;
            Ok(())
        })
    }

    /// All nodes that were removed.
    pub(crate) fn removals(&self) -> Result<Vec<Removal>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement =
                database.prepare("SELECT node, until, signature FROM removal ORDER BY node")?;
            let rows = statement.query_map([], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?.unsigned_abs(), row.get(2)?))
            })?;
            let rows: Vec<_> = rows.collect::<Result<_, _>>()?;
            let removal = |(node, until, signature): (String, u64, Vec<u8>)| {
                NodeName::new(&node).ok().map(|node| Removal { node, until, signature })
            };
            Ok(rows.into_iter().filter_map(removal).collect())
        })
    }

    /// Forgets a member, its certificate and tokens for its name; whether it was one.
    pub(crate) fn remove_member(&self, name: &str) -> Result<bool, StateError> {
        off_worker(|| {
            let database = self.lock();
            database.execute("DELETE FROM granted WHERE node = ?1", params![name])?;
            database.execute("DELETE FROM token WHERE node = ?1", params![name])?;
            Ok(database.execute("DELETE FROM member WHERE name = ?1", params![name])? > 0)
        })
    }

    /// Forgets where a service of a name is.
    pub(crate) fn forget_placement(&self, name: &str) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute("DELETE FROM placement WHERE service = ?1", params![name])?;
            Ok(())
        })
    }

    /// Forgets that a service was removed.
    pub(crate) fn forget_removed_service(&self, name: &str, id: &str) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                "DELETE FROM placement WHERE service = ?1 AND id = ?2 AND removed = 1",
                params![name, id],
            )?;
            Ok(())
        })
    }

    /// Forgets that a network was removed.
    pub(crate) fn forget_removed_network(&self, name: &str, id: &str) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                "DELETE FROM network WHERE name = ?1 AND id = ?2 AND removed = 1",
                params![name, id],
            )?;
            Ok(())
        })
    }

    /// Forgets what was heard of other nodes' services, and of networks: this node joins a cluster, perhaps again,
    /// and much may have been removed there since.
    pub(crate) fn forget_hearsay(&self, own: &str) -> Result<(), StateError> {
        off_worker(|| {
            let database = self.lock();
            database.execute("DELETE FROM placement WHERE node <> ?1", params![own])?;
            database.execute("DELETE FROM network", params![])?;
            Ok(())
        })
    }

    /// Takes over a placement whatever was known before: its node is a member no more.
    pub(crate) fn replace_placement(&self, new: &Placement) -> Result<(), StateError> {
        self.forget_placement(&new.service)?;
        self.put_placement(new)?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_api::v1::Member;

    use super::*;
    use crate::state::now_ms;

    #[test]
    fn what_a_hostile_member_left_is_gone_at_the_next_start_and_the_members_own_word_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.db");
        let state = State::open(&path).unwrap();
        let member = |name: &str, address: &str, revision: u64| Member {
            name: name.into(),
            address: address.into(),
            vtep: "10.99.0.13".into(),
            revision,
        };
        let placement = |service: &str, epoch: u64| Placement {
            service: service.into(),
            node: "c".into(),
            epoch,
            id: "1".into(),
            ..Placement::default()
        };
        let poisoned = u64::try_from(i64::MAX).unwrap();
        for name in ["a", "", "../../x", "x\ny"] {
            state.put_member(&member(name, "10.99.0.13:9999", poisoned)).unwrap();
        }
        for (service, epoch) in [("dev", poisoned), ("a/b", 1), ("good", 3)] {
            state.put_placement(&placement(service, epoch)).unwrap();
        }
        drop(state);
        let state = State::open(&path).unwrap();
        let names: Vec<_> = state.members().unwrap().into_iter().map(|member| member.name).collect();
        assert_eq!(names, ["a"]);
        let own = member("a", "10.99.0.11:7117", u64::try_from(now_ms()).unwrap());
        assert!(state.put_member(&own).unwrap(), "its own word");
        assert_eq!(state.members().unwrap(), [own]);
        assert_eq!(state.placements().unwrap(), [placement("good", 3)]);
    }

    #[test]
    fn only_what_was_removed_is_forgotten_and_what_is_hearsay_when_a_node_joins_again() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        let placement = |service: &str, node: &str, removed| Placement {
            service: service.into(),
            node: node.into(),
            epoch: 1,
            id: "1".into(),
            removed,
            ..Placement::default()
        };
        let (gone, live) = (placement("gone", "b", true), placement("live", "b", false));
        let own = placement("own", "a", false);
        for one in [&gone, &live, &own] {
            state.put_placement(one).unwrap();
        }
        let network = |name: &str, removed| godwit_api::v1::Network {
            name: name.into(),
            id: "1".into(),
            removed,
            ..Default::default()
        };
        let (back, front) = (network("back", true), network("front", false));
        for one in [&back, &front] {
            state.put_network(one).unwrap();
        }
        for (name, id) in [("gone", "2"), ("live", "1"), ("gone", "1")] {
            state.forget_removed_service(name, id).unwrap();
            assert_eq!(state.placements().unwrap().len(), if (name, id) == ("gone", "1") { 2 } else { 3 });
        }
        for name in ["back", "front"] {
            state.forget_removed_network(name, "1").unwrap();
        }
        assert_eq!(state.networks().unwrap(), [front]);
        state.forget_hearsay("a").unwrap();
        assert_eq!(state.placements().unwrap(), [own]);
        assert!(state.networks().unwrap().is_empty());
    }

    #[test]
    fn a_removed_members_certificate_and_tokens_are_forgotten_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        state.put_member(&Member { name: "b".into(), revision: 1, ..Member::default() }).unwrap();
        state.put_granted("b").unwrap();
        state.put_token(b"secret", "b", now_ms() + 60_000).unwrap();
        assert!(state.remove_member("b").unwrap());
        assert!(!state.remove_member("b").unwrap());
        assert_eq!(state.granted("b").unwrap(), None);
        assert!(!state.take_token(b"secret", "b").unwrap());
        let removal = |until| Removal { node: NodeName::new("b").unwrap(), until, signature: vec![7] };
        for until in [5, 9, 7] {
            state.put_removal(&removal(until)).unwrap();
        }
        assert_eq!(state.removals().unwrap(), [removal(9)]);
    }
}
