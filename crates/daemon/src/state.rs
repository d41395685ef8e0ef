//! What a node knows, on disk: its services, where all services of the cluster are, its networks and
//! members, join tokens, and the last events. One SQLite file, `node.db`.

mod removals;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use godwit_api::v1::{Event, Member, Network, Placement};
use godwit_database::blocking::off_worker;
use godwit_database::file;
use godwit_database::schema::{self, SchemaError, Step};
use godwit_migration::Service;
use godwit_migration::journal::OTHERWISE;
pub(crate) use godwit_migration::journal::now_ms;
use godwit_names::ServiceName;
use rusqlite::{Connection, OptionalExtension, Params, Row, params};
use serde::de::DeserializeOwned;

/// Events that are stored; older ones are deleted.
const MAX_EVENTS: i64 = 10_000;

/// Why the state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// SQLite's answer.
    #[error("godwitd's database node.db cannot be used; check the disk that holds its state directory")]
    Database(#[from] rusqlite::Error),
    /// The file cannot be closed to other users.
    #[error("godwitd's database node.db cannot be made")]
    File(#[from] std::io::Error),
    /// A row that cannot be read.
    #[error("godwitd's database node.db holds a service that cannot be read")]
    Damaged(#[from] serde_json::Error),
    /// The file cannot be brought up to this version.
    #[error("godwitd's database node.db cannot be used by this version of godwit")]
    Schema(#[from] SchemaError),
    /// A name is another service's.
    #[error("this node has another service {0} already, or a later life of it")]
    Another(ServiceName),
}

/// A service this node owns, and how its main process ended, if it did.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    /// The service.
    pub service: Service,
    /// Exit code once it has ended.
    pub exit_code: Option<i32>,
    /// Why it has ended, when that is not the program's own doing.
    pub reason: String,
    /// A user stopped it, and has not started it since.
    pub stopped: bool,
    /// How often its policy started it again since a user did, or the machine.
    pub restarts: u32,
}

/// What the file has become from version to version; see [`schema`].
const STEPS: [Step; 5] = [
    Step {
        adds: "all that the node knows",
        sql: "CREATE TABLE IF NOT EXISTS service (
        name TEXT PRIMARY KEY, service TEXT NOT NULL, exit_code INTEGER, reason TEXT NOT NULL DEFAULT ''
    ) STRICT;
    CREATE TABLE IF NOT EXISTS placement (
        service TEXT PRIMARY KEY, id TEXT NOT NULL, address TEXT NOT NULL, node TEXT NOT NULL,
        epoch INTEGER NOT NULL, removed INTEGER NOT NULL, publish TEXT NOT NULL, more TEXT NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS network (
        name TEXT PRIMARY KEY, id TEXT NOT NULL, subnet TEXT NOT NULL, subnet6 TEXT NOT NULL,
        vni INTEGER NOT NULL, removed INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS member (
        name TEXT PRIMARY KEY, address TEXT NOT NULL, vtep TEXT NOT NULL, revision INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS token (
        secret_sha256 BLOB PRIMARY KEY, node TEXT NOT NULL, expires_ms INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS granted (
        node TEXT PRIMARY KEY, time_ms INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS setting (
        name TEXT PRIMARY KEY, value TEXT NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS event (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, node TEXT NOT NULL,
        subject TEXT NOT NULL, action TEXT NOT NULL, name TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT;",
    },
    // Release 0.2.0, the first one with this step, made the table of removals whenever it opened the file.
    Step {
        adds: "which services a user has stopped, how often their policy has started them, and which nodes were removed",
        sql: "ALTER TABLE service ADD COLUMN stopped INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE service ADD COLUMN restarts INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE IF NOT EXISTS removal (
        node TEXT PRIMARY KEY, until INTEGER NOT NULL, signature BLOB NOT NULL
    ) STRICT;",
    },
    // In the descriptions of services.
    Step { adds: "containers of other engines, volumes, and what becomes of bind mounts in a move", sql: "" },
    Step {
        adds: "further names of services",
        sql: "ALTER TABLE placement ADD COLUMN aliases TEXT NOT NULL DEFAULT '[]';",
    },
    Step {
        adds: "whether the node is cordoned",
        sql: "CREATE TABLE IF NOT EXISTS cordon (
        only INTEGER PRIMARY KEY CHECK (only = 1), time_ms INTEGER NOT NULL
    ) STRICT;",
    },
];

/// The newest version of the file.
#[cfg(test)]
pub(crate) const SCHEMA_VERSION: usize = STEPS.len();

/// The database of one node.
#[derive(Debug)]
pub(crate) struct State {
    database: Mutex<Connection>,
    /// How often a row of `placement` was changed.
    placements: Arc<AtomicU64>,
}

impl State {
    /// Opens or makes it. Writes are on the disk when their method returns.
    pub(crate) fn open(path: &Path) -> Result<Self, StateError> {
        file::own(path)?;
        let mut database = Connection::open(path)?;
        file::make_durable(&database)?;
        schema::upgrade(&mut database, &STEPS, Some(OTHERWISE))?;
        removals::put_right(&database)?;
        let placements = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&placements);
        database.update_hook(Some(move |_, _: &str, table: &str, _| {
            if table == "placement" {
                count.fetch_add(1, Ordering::Release);
            }
        }));
        Ok(Self { database: Mutex::new(database), placements })
    }

    /// Another number after each change of where services are.
    pub(crate) fn version_of_placements(&self) -> u64 {
        self.placements.load(Ordering::Acquire)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Connection> {
        // A panic while the lock was held cannot have left a half-made row: SQLite rolls it back.
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Inserts a service this node owns, or a later life of it; how the earlier one ended is forgotten. That a user
    /// stopped it counts for the epoch in which that was.
    ///
    /// # Errors
    /// [`StateError::Another`] when the name is another service's here, or its life here is a later one.
    pub(crate) fn put_service(&self, service: &Service) -> Result<(), StateError> {
        off_worker(|| {
            let text = serde_json::to_string(service)?;
            let rows = self.lock().execute(
                &format!(
                    "INSERT INTO service (name, service) VALUES (?3, ?4)
                 ON CONFLICT (name) DO UPDATE SET service = excluded.service, exit_code = NULL, reason = '',
                    restarts = 0, stopped = service.stopped AND json_extract(service.service, '$.epoch') = ?2
                 WHERE {UP_TO}"
                ),
                params![service.id, epoch(service), service.name.as_str(), text],
            )?;
            if rows == 1 { Ok(()) } else { Err(StateError::Another(service.name.clone())) }
        })
    }

    /// Records that a user stops a service, before it is stopped.
    pub(crate) fn set_stopped(&self, service: &Service) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                &format!("UPDATE service SET stopped = 1 WHERE name = ?3 AND {UP_TO}"),
                params![service.id, epoch(service), service.name.as_str()],
            )?;
            Ok(())
        })
    }

    /// Records that a service that was to be stopped runs on.
    pub(crate) fn set_running(&self, service: &Service) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                &format!("UPDATE service SET stopped = 0 WHERE name = ?3 AND exit_code IS NULL AND {UP_TO}"),
                params![service.id, epoch(service), service.name.as_str()],
            )?;
            Ok(())
        })
    }

    /// Records that a service that has ended is about to be started again, and how often its policy has done so; says
    /// whether it is here at this epoch, and has ended.
    pub(crate) fn set_started(&self, service: &Service, restarts: u32) -> Result<bool, StateError> {
        off_worker(|| {
            let text = serde_json::to_string(service)?;
            let rows = self.lock().execute(
                "UPDATE service SET service = ?4, exit_code = NULL, reason = '', stopped = 0, restarts = ?5
                 WHERE name = ?3 AND exit_code IS NOT NULL
                    AND json_extract(service.service, '$.id') = ?1 AND json_extract(service.service, '$.epoch') = ?2",
                params![service.id, epoch(service), service.name.as_str(), text, restarts],
            )?;
            Ok(rows == 1)
        })
    }

    /// Records that a service has other settings; whether it is here at this epoch.
    pub(crate) fn change_service(&self, service: &Service) -> Result<bool, StateError> {
        off_worker(|| {
            let text = serde_json::to_string(service)?;
            let rows = self.lock().execute(
                "UPDATE service SET service = ?4 WHERE name = ?3
                    AND json_extract(service.service, '$.id') = ?1 AND json_extract(service.service, '$.epoch') = ?2",
                params![service.id, epoch(service), service.name.as_str(), text],
            )?;
            Ok(rows == 1)
        })
    }

    /// Counts from 0 again how often a service was started by its policy: its machine was restarted.
    pub(crate) fn forget_restarts(&self, service: &Service) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                &format!("UPDATE service SET restarts = 0 WHERE name = ?3 AND {UP_TO}"),
                params![service.id, epoch(service), service.name.as_str()],
            )?;
            Ok(())
        })
    }

    /// Records how this life of a service, or an earlier one, ended.
    pub(crate) fn set_exit(&self, service: &Service, code: i32, reason: &str) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                &format!("UPDATE service SET exit_code = ?4, reason = ?5 WHERE name = ?3 AND {UP_TO}"),
                params![service.id, epoch(service), service.name.as_str(), code, reason],
            )?;
            Ok(())
        })
    }

    /// Forgets this life of a service, or an earlier one; whether it was here.
    pub(crate) fn remove_service(&self, service: &Service) -> Result<bool, StateError> {
        off_worker(|| {
            let rows = self.lock().execute(
                &format!("DELETE FROM service WHERE name = ?3 AND {UP_TO}"),
                params![service.id, epoch(service), service.name.as_str()],
            )?;
            Ok(rows > 0)
        })
    }

    /// One service this node owns.
    pub(crate) fn service(&self, name: &ServiceName) -> Result<Option<Owned>, StateError> {
        Ok(self.select_services("name = ?1", params![name.as_str()])?.pop())
    }

    /// All services this node owns, by name.
    pub(crate) fn services(&self) -> Result<Vec<Owned>, StateError> {
        self.select_services("1 ORDER BY name", params![])
    }

    /// Those that run and follow their clients.
    pub(crate) fn followers(&self) -> Result<Vec<Owned>, StateError> {
        self.select_services(
            "exit_code IS NULL AND json_extract(service, '$.follows') IS NOT NULL",
            params![],
        )
    }

    fn select_services(&self, which: &str, values: impl Params) -> Result<Vec<Owned>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database.prepare(&format!(
                "SELECT service, exit_code, reason, stopped, restarts FROM service WHERE {which}"
            ))?;
            let rows = statement
                .query_map(values, |row| {
                    Ok((row.get::<_, String>(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
                })?
                .collect::<Result<Vec<_>, _>>()?;
            rows.into_iter()
                .map(|(text, exit_code, reason, stopped, restarts)| {
                    let service = serde_json::from_str(&text)?;
                    Ok(Owned { service, exit_code, reason, stopped, restarts })
                })
                .collect()
        })
    }

    /// Takes over a placement if it is newer than what is known; whether it was. Of what one node says of a
    /// name the highest epoch counts, whichever service it is of: each begins above those that the node
    /// knew. Of services on two nodes the one that is there stays, until it is removed. Further names count as they are told last:
    /// a release that did not know them has noted none.
    pub(crate) fn put_placement(&self, new: &Placement) -> Result<bool, StateError> {
        off_worker(|| {
            let epoch = i64::try_from(new.epoch).unwrap_or(i64::MAX);
            let (publish, more) = (serde_json::to_string(&new.publish)?, serde_json::to_string(&new.more)?);
            let aliases = serde_json::to_string(&new.aliases)?;
            let rows = self.lock().execute(
            "INSERT INTO placement (service, id, address, node, epoch, removed, publish, more, aliases)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
             ON CONFLICT (service) DO UPDATE SET
                id = excluded.id, address = excluded.address, node = excluded.node,
                epoch = excluded.epoch, removed = excluded.removed, publish = excluded.publish,
                more = excluded.more, aliases = excluded.aliases
             WHERE (placement.id = excluded.id AND placement.node = excluded.node
                    AND (placement.epoch, placement.removed) = (excluded.epoch, excluded.removed)
                    AND placement.aliases <> excluded.aliases)
                OR (placement.id = excluded.id AND (excluded.epoch > placement.epoch
                    OR (excluded.epoch = placement.epoch AND excluded.removed > placement.removed)))
                OR (placement.id <> excluded.id AND placement.node = excluded.node
                    AND (excluded.epoch, excluded.id) > (placement.epoch, placement.id))
                OR (placement.node <> excluded.node AND placement.removed = 1 AND excluded.id > placement.id)",
            params![new.service, new.id, new.address, new.node, epoch, new.removed, publish, more, aliases],
        )?;
            Ok(rows > 0)
        })
    }

    /// The epoch for a new service of a name: above those of all that had it before.
    pub(crate) fn next_epoch(&self, name: &ServiceName) -> Result<u64, StateError> {
        let known = self.placement(name)?;
        Ok(known.map_or(1, |placement| placement.epoch.saturating_add(1)))
    }

    /// Where the service of a name is, or was, if it was removed.
    pub(crate) fn placement(&self, name: &ServiceName) -> Result<Option<Placement>, StateError> {
        Ok(self.select_placements("service = ?1", params![name.as_str()])?.pop())
    }

    /// Where all services are, including those removed.
    pub(crate) fn placements(&self) -> Result<Vec<Placement>, StateError> {
        self.select_placements("1 ORDER BY service", params![])
    }

    /// The services that have an address, that which was created first before the others.
    pub(crate) fn placements_at(&self, address: Ipv4Addr) -> Result<Vec<Placement>, StateError> {
        self.select_placements(
            "removed = 0 AND (address = ?1 OR EXISTS (SELECT 1 FROM json_each(more) WHERE value = ?1))
             ORDER BY id",
            params![address.to_string()],
        )
    }

    fn select_placements(&self, which: &str, values: impl Params) -> Result<Vec<Placement>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database.prepare(&format!(
            "SELECT service, id, address, node, epoch, removed, publish, more, aliases FROM placement WHERE {which}",
        ))?;
            let rows = statement.query_map(values, |row| {
                Ok(Placement {
                    publish: json_column(row, 6)?,
                    more: json_column(row, 7)?,
                    aliases: json_column(row, 8)?,
                    service: row.get(0)?,
                    id: row.get(1)?,
                    address: row.get(2)?,
                    node: row.get(3)?,
                    epoch: row.get::<_, i64>(4)?.unsigned_abs(),
                    removed: row.get(5)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Takes over a network if it is newer than what is known; whether it was. Of two that were made at the
    /// same time the one with the lower id stays, on every node.
    pub(crate) fn put_network(&self, new: &Network) -> Result<bool, StateError> {
        off_worker(|| {
            let rows = self.lock().execute(
            "INSERT INTO network (name, id, subnet, subnet6, vni, removed) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (name) DO UPDATE SET
                id = excluded.id, subnet = excluded.subnet, subnet6 = excluded.subnet6, vni = excluded.vni,
                removed = excluded.removed
             WHERE (network.id = excluded.id AND excluded.removed > network.removed)
                OR (network.removed = 1 AND excluded.id > network.id)
                OR (network.removed = 0 AND excluded.removed = 0 AND excluded.id < network.id)",
            params![new.name, new.id, new.subnet, new.subnet6, new.vni, new.removed],
        )?;
            Ok(rows > 0)
        })
    }

    /// The networks beside the first, including those removed.
    pub(crate) fn networks(&self) -> Result<Vec<Network>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database
                .prepare("SELECT name, id, subnet, subnet6, vni, removed FROM network ORDER BY name")?;
            let rows = statement.query_map([], |row| {
                Ok(Network {
                    name: row.get(0)?,
                    id: row.get(1)?,
                    subnet: row.get(2)?,
                    subnet6: row.get(3)?,
                    vni: row.get(4)?,
                    removed: row.get(5)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Takes over a member if it is newer than what is known; whether it was.
    pub(crate) fn put_member(&self, member: &Member) -> Result<bool, StateError> {
        off_worker(|| {
            let revision = i64::try_from(member.revision).unwrap_or(i64::MAX);
            let rows = self.lock().execute(
                "INSERT INTO member (name, address, vtep, revision) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (name) DO UPDATE SET
                address = excluded.address, vtep = excluded.vtep, revision = excluded.revision
             WHERE excluded.revision > member.revision",
                params![member.name, member.address, member.vtep, revision],
            )?;
            Ok(rows > 0)
        })
    }

    /// The cluster's members, this node among them.
    pub(crate) fn members(&self) -> Result<Vec<Member>, StateError> {
        self.select_members("1 ORDER BY name", params![])
    }

    /// One of them.
    pub(crate) fn member(&self, name: &str) -> Result<Option<Member>, StateError> {
        Ok(self.select_members("name = ?1", params![name])?.pop())
    }

    fn select_members(&self, which: &str, values: impl Params) -> Result<Vec<Member>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database
                .prepare(&format!("SELECT name, address, vtep, revision FROM member WHERE {which}"))?;
            let rows = statement.query_map(values, |row| {
                Ok(Member {
                    name: row.get(0)?,
                    address: row.get(1)?,
                    vtep: row.get(2)?,
                    revision: row.get::<_, i64>(3)?.unsigned_abs(),
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Stores the hash of a join token's secret until it is used or has expired.
    pub(crate) fn put_token(
        &self,
        secret_sha256: &[u8],
        node: &str,
        expires_ms: i64,
    ) -> Result<(), StateError> {
        off_worker(|| {
            let database = self.lock();
            database.execute("DELETE FROM token WHERE expires_ms < ?1", params![now_ms()])?;
            database.execute(
                "INSERT OR REPLACE INTO token (secret_sha256, node, expires_ms) VALUES (?1, ?2, ?3)",
                params![secret_sha256, node, expires_ms],
            )?;
            Ok(())
        })
    }

    /// Uses a token up; whether it was valid, and for this node. One that is shown for another stays.
    pub(crate) fn take_token(&self, secret_sha256: &[u8], node: &str) -> Result<bool, StateError> {
        off_worker(|| {
            let taken = self.lock().execute(
                "DELETE FROM token WHERE secret_sha256 = ?1 AND node = ?2 AND expires_ms >= ?3",
                params![secret_sha256, node, now_ms()],
            )?;
            Ok(taken > 0)
        })
    }

    /// Records that a node of this name was given a certificate now.
    pub(crate) fn put_granted(&self, node: &str) -> Result<(), StateError> {
        off_worker(|| {
            self.lock().execute(
                "INSERT OR REPLACE INTO granted (node, time_ms) VALUES (?1, ?2)",
                params![node, now_ms()],
            )?;
            Ok(())
        })
    }

    /// When a node of this name was given its certificate, if it was; milliseconds since 1970.
    pub(crate) fn granted(&self, node: &str) -> Result<Option<i64>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let found =
                database.query_row("SELECT time_ms FROM granted WHERE node = ?1", params![node], |row| {
                    row.get(0)
                });
            Ok(found.optional()?)
        })
    }

    /// Stores a setting of the cluster.
    pub(crate) fn put_settings(&self, settings: &BTreeMap<String, String>) -> Result<(), StateError> {
        off_worker(|| {
            let database = self.lock();
            for (name, value) in settings {
                database.execute(
                    "INSERT OR REPLACE INTO setting (name, value) VALUES (?1, ?2)",
                    params![name, value],
                )?;
            }
            Ok(())
        })
    }

    /// The settings of the cluster, by name.
    pub(crate) fn settings(&self) -> Result<BTreeMap<String, String>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database.prepare("SELECT name, value FROM setting")?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records whether the node takes no more services; whether that is new.
    pub(crate) fn set_cordoned(&self, cordoned: bool) -> Result<bool, StateError> {
        off_worker(|| {
            let database = self.lock();
            let changed = match cordoned {
                true => database.execute(
                    "INSERT OR IGNORE INTO cordon (only, time_ms) VALUES (1, ?1)",
                    params![now_ms()],
                )?,
                false => database.execute("DELETE FROM cordon", [])?,
            };
            Ok(changed > 0)
        })
    }

    /// Whether the node takes no more services.
    pub(crate) fn is_cordoned(&self) -> Result<bool, StateError> {
        off_worker(|| {
            Ok(self.lock().query_row("SELECT EXISTS (SELECT 1 FROM cordon)", [], |row| row.get(0))?)
        })
    }

    /// Stores an event.
    pub(crate) fn put_event(&self, event: &Event) -> Result<(), StateError> {
        off_worker(|| {
            let database = self.lock();
            database.execute(
            "INSERT INTO event (time_ms, node, subject, action, name, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![event.time_ms, event.node, event.subject, event.action, event.name, event.detail],
        )?;
            database.execute(
                "DELETE FROM event WHERE id <= (SELECT max(id) FROM event) - ?1",
                params![MAX_EVENTS],
            )?;
            Ok(())
        })
    }

    /// Events at or after a time, oldest first.
    pub(crate) fn events(&self, since_ms: i64) -> Result<Vec<Event>, StateError> {
        off_worker(|| {
            let database = self.lock();
            let mut statement = database.prepare(
            "SELECT time_ms, node, subject, action, name, detail FROM event WHERE time_ms >= ?1 ORDER BY id",
        )?;
            let rows = statement.query_map(params![since_ms], |row| {
                Ok(Event {
                    time_ms: row.get(0)?,
                    node: row.get(1)?,
                    subject: row.get(2)?,
                    action: row.get(3)?,
                    name: row.get(4)?,
                    detail: row.get(5)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }
}

/// The row is of the service with the id ?1, with the epoch ?2 or an earlier one.
const UP_TO: &str =
    "json_extract(service.service, '$.id') = ?1 AND json_extract(service.service, '$.epoch') <= ?2";

fn epoch(service: &Service) -> i64 {
    i64::try_from(service.epoch).unwrap_or(i64::MAX)
}

/// What a column holds as JSON.
fn json_column<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> Result<T, rusqlite::Error> {
    let text: String = row.get(column)?;
    serde_json::from_str(&text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, error.into())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
