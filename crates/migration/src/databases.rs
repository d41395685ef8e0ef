//! SQLite databases that a service has open: the source finds where its processes remember their files, and the destination
//! corrects that before they run (`godwit-sqlite`).

use std::collections::BTreeMap;

use godwit_criu::obstacles::{self, Obstacle};
use godwit_memory::Space;
use godwit_memory::process::{Process, ProcessError};
use godwit_sqlite::{Database, Identity};
use serde::{Deserialize, Serialize};

const ROLLBACK: &str = "whose file gets another inode number by a move, and SQLite may write to it no more then (\"attempt to write a readonly database\") until the program has opened it again; one that is opened through the VFS unix-dotfile or unix-none does not notice";
const WAL: &str = "whose file gets another inode number by a move, and what the program opens of it then may share no locks with what it had open before, which can damage it; have the program open all of it again";

/// Most databases of a service that are corrected, and most places of all of them: a message has an end.
const MOST: usize = 1024;
const MOST_PLACES: usize = 4096;

/// Part of `ImagesEnd`, and of the file of a checkpoint.
#[derive(Clone, PartialEq, prost::Message, Serialize, Deserialize)]
pub struct Remembered {
    /// The process, by its PID inside of the service.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// A descriptor by which it has the file open.
    #[prost(int32, tag = "2")]
    pub descriptor: i32,
    /// The device by which it knows the file.
    #[prost(uint64, tag = "3")]
    pub device: u64,
    /// The inode number by which it knows the file.
    #[prost(uint64, tag = "4")]
    pub inode: u64,
    /// Where in its memory that is.
    #[prost(fixed64, repeated, tag = "5")]
    pub places: Vec<u64>,
}

/// What a look at the processes of a service that runs has found.
#[derive(Debug, Clone, Default)]
pub struct Look {
    databases: Vec<Database>,
    /// Why processes could not be looked at, as sentences.
    failed: Vec<String>,
}

/// What is to be done about the databases of a service.
#[derive(Debug, Default)]
pub struct Found {
    /// What a copy of its processes has to have corrected.
    pub remembered: Vec<Remembered>,
    /// What becomes of the databases for which that cannot be, as sentences.
    pub warnings: Vec<String>,
}

/// Looks for databases that processes have open, while that is `wanted`: not for an asynchronous thread.
#[must_use]
pub fn look(pids: &[i32], wanted: &dyn Fn() -> bool) -> Look {
    let mut look = Look::default();
    for &pid in pids {
        match godwit_sqlite::databases(pid, wanted) {
            Ok(databases) => look.databases.extend(databases),
            Err(error) => look.note(&error),
        }
    }
    look
}

impl Look {
    /// Looks again, once the service is frozen, at what was found: what has been closed since is not corrected. Some
    /// microseconds for each database.
    #[must_use]
    pub fn settled(mut self) -> Self {
        let mut databases = std::mem::take(&mut self.databases);
        databases.retain_mut(|database| {
            database.settle().unwrap_or_else(|error| self.note(&error));
            !database.descriptors.is_empty()
        });
        Self { databases, ..self }
    }

    fn note(&mut self, error: &ProcessError) {
        // What has ended has nothing open.
        if !matches!(error, ProcessError::Gone { .. }) {
            let error = crate::error_chain(error);
            self.failed.push(format!("its open SQLite databases cannot be looked for: {error}"));
        }
    }

    /// What is to be done. Nothing is corrected where a destination cannot.
    #[must_use]
    pub fn found(self, corrects: bool) -> Found {
        let (mut remembered, mut bad, mut all) = (Vec::new(), Vec::new(), 0);
        for database in self.databases {
            all += database.places.len();
            let fits = remembered.len() < MOST && all <= MOST_PLACES;
            if let (true, [descriptor, ..], [_, ..]) =
                (corrects && fits, &database.descriptors[..], &database.places[..])
            {
                let Identity { device, inode } = database.identity;
                let (pid, descriptor) = (database.space, *descriptor);
                remembered.push(Remembered { pid, descriptor, device, inode, places: database.places });
            } else if database.is_writable {
                bad.push(Obstacle {
                    pid: database.pid.unsigned_abs(),
                    inside: database.space,
                    name: database.program,
                    what: format!("has the SQLite database {} open", database.path),
                    why: if database.has_log { WAL } else { ROLLBACK },
                });
            }
        }
        let warnings = obstacles::sentences(&bad).into_iter().chain(self.failed).collect();
        Found { remembered, warnings }
    }
}

/// Corrects what these processes, which do not run, remember; and says what cannot be corrected.
///
/// Pages that have yet to come are waited for: not for an asynchronous thread.
#[must_use]
pub fn correct(processes: &[u32], all: &[Remembered]) -> Option<String> {
    let opened = processes.iter().filter_map(|pid| Process::open(i32::try_from(*pid).ok()?).ok());
    let opened: BTreeMap<Space, Process> = opened.map(|process| (process.space(), process)).collect();
    let mut failed = all.iter().filter_map(|one| {
        let why = match opened.get(&one.pid) {
            Some(process) => correct_one(process, one).err()?,
            None => "there is no such process here".to_owned(),
        };
        Some(format!(
            "what the process with PID {} in it remembers of an SQLite database (descriptor {}) is not corrected: {why}",
            one.pid, one.descriptor
        ))
    });
    let first = failed.next()?;
    let more = match failed.count() {
        0 => String::new(),
        more => format!(" (and {more} more like this)"),
    };
    Some(format!("{first}{more}; have the program open its databases again"))
}

fn correct_one(process: &Process, one: &Remembered) -> Result<(), String> {
    let now = Identity::of_open_file(process, one.descriptor);
    let now = now.ok_or("it does not have that file open")?;
    let before = Identity { device: one.device, inode: one.inode };
    let mut corrected = 0;
    for &place in &one.places {
        let is_corrected = godwit_sqlite::correct(process, place, before, now);
        corrected += usize::from(is_corrected.map_err(|error| crate::error_chain(&error))?);
    }
    if corrected == 0 { Err("it is not where it was".to_owned()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(has_log: bool, places: &[u64]) -> Database {
        Database {
            pid: 4711,
            space: 7,
            program: "server".into(),
            path: "/data.db".into(),
            descriptors: vec![3, 5],
            identity: Identity { device: 45, inode: 9 },
            is_writable: true,
            has_log,
            places: places.to_vec(),
        }
    }

    fn found(databases: Vec<Database>, corrects: bool) -> Found {
        Look { databases, failed: Vec::new() }.found(corrects)
    }

    #[test]
    fn a_database_is_warned_of_unless_it_is_found_and_the_destination_corrects_it() {
        let (known, lost, log) = (database(false, &[4096]), database(false, &[]), database(true, &[]));
        let read = Database { is_writable: false, ..lost.clone() };
        let all = [known.clone(), lost, log, read];
        let Found { remembered, warnings } = found(all.to_vec(), true);
        let told = Remembered { pid: 7, descriptor: 3, device: 45, inode: 9, places: vec![4096] };
        assert_eq!((remembered, warnings.len()), (vec![told], 2), "{warnings:?}");
        assert!(warnings[0].starts_with(
            "process 4711 (server, PID 7 in the service) has the SQLite database /data.db open, whose file"
        ));
        assert!(warnings[1].contains("share no locks"), "{warnings:?}");
        let Found { remembered, warnings } = found(all.to_vec(), false);
        assert_eq!((remembered.len(), warnings.len()), (0, 2), "{warnings:?}");
        assert!(warnings[0].ends_with("(and 1 more like this)"), "{warnings:?}");
        let Found { remembered, warnings } = found(vec![known.clone(); MOST + 2], true);
        assert_eq!((remembered.len(), warnings.len()), (MOST, 1), "{warnings:?}");
        let many = database(false, &[0; MOST_PLACES]);
        assert_eq!(found(vec![many, known], true).remembered.len(), 1);
    }

    #[test]
    fn what_has_ended_is_not_looked_for() {
        let look =
            Look { databases: vec![Database { pid: i32::MAX, ..database(false, &[]) }], failed: Vec::new() };
        let look = look.settled();
        assert!(look.failed.is_empty(), "{look:?}");
        assert!(super::look(&[i32::MAX], &|| true).found(true).warnings.is_empty());
    }

    #[test]
    fn what_cannot_be_corrected_is_said_in_one_sentence() {
        let other = Remembered { pid: u32::MAX, descriptor: 3, ..Remembered::default() };
        let own = Process::open(i32::try_from(std::process::id()).unwrap_or_default());
        let space = own.map(|own| own.space()).unwrap_or_default();
        let closed =
            Remembered { pid: space, descriptor: i32::MAX, places: vec![0], ..Remembered::default() };
        let said = correct(&[std::process::id()], &[other.clone(), closed.clone()]).unwrap_or_default();
        assert!(said.contains("no such process here (and 1 more like this)"), "{said}");
        let said = correct(&[std::process::id()], &[closed]).unwrap_or_default();
        assert!(said.contains("does not have that file open; have the program"), "{said}");
        assert_eq!(correct(&[], &[]), None);
    }
}
