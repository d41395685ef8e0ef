//! SQLite databases that a service has open: the source finds where its processes remember their files, and the destination
//! corrects that before they run (`godwit-sqlite`).

use std::collections::BTreeMap;

use godwit_criu::obstacles::{self, Obstacle};
use godwit_memory::Space;
use godwit_memory::process::{Process, ProcessError};
use godwit_sqlite::{Database, Identity};
use serde::{Deserialize, Serialize};

const ROLLBACK: &str = "and SQLite writes to it no more after a move (\"attempt to write a readonly database\") until the program has opened it again, since its file gets another inode number there";
const WAL: &str = "and what the program opens of it after a move shares no locks with what it had open before, which can damage it, since its file gets another inode number there; have the program open all of it again";

/// Most databases of a service that are corrected: a message has an end.
const MOST: usize = 4096;

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

/// What a look at the processes of a service has found.
#[derive(Debug, Default)]
pub struct Found {
    /// What a copy of them has to have corrected.
    pub remembered: Vec<Remembered>,
    /// What becomes of the databases for which that cannot be, as sentences.
    pub warnings: Vec<String>,
}

/// Looks for databases that processes have open: not for an asynchronous thread. Nothing is corrected where a destination
/// cannot.
///
/// # Errors
/// A process cannot be looked at.
pub fn look(pids: &[i32], corrects: bool) -> Result<Found, ProcessError> {
    Ok(sorted(godwit_sqlite::databases(pids)?, corrects))
}

fn sorted(databases: Vec<Database>, corrects: bool) -> Found {
    let (mut remembered, mut bad) = (Vec::new(), Vec::new());
    for database in databases {
        if corrects && !database.places.is_empty() && remembered.len() < MOST {
            let Database { space: pid, descriptor, identity: Identity { device, inode }, places, .. } =
                database;
            remembered.push(Remembered { pid, descriptor, device, inode, places });
        } else {
            bad.push(Obstacle {
                pid: database.pid.unsigned_abs(),
                inside: database.space,
                name: database.program,
                what: format!("has the SQLite database {} open", database.path),
                why: if database.has_log { WAL } else { ROLLBACK },
            });
        }
    }
    Found { remembered, warnings: obstacles::sentences(&bad) }
}

/// Corrects what these processes, which do not run, remember; and says what cannot be corrected.
///
/// Pages that have yet to come are waited for: not for an asynchronous thread.
#[must_use]
pub fn correct(processes: &[u32], all: &[Remembered]) -> Vec<String> {
    if all.is_empty() {
        return Vec::new();
    }
    let opened = processes.iter().filter_map(|pid| Process::open(i32::try_from(*pid).ok()?).ok());
    let opened: BTreeMap<Space, Process> = opened.map(|process| (process.space(), process)).collect();
    let mut failed = Vec::new();
    for one in all {
        let corrected = match opened.get(&one.pid) {
            Some(process) => correct_one(process, one).map_err(|error| error.to_string()),
            None => Err("there is no such process here".to_owned()),
        };
        if let Err(why) = corrected {
            failed.push(format!(
                "what the process with PID {} in it remembers of an SQLite database (descriptor {}) cannot be corrected: {why}; have the program open its databases again",
                one.pid, one.descriptor
            ));
        }
    }
    failed
}

fn correct_one(process: &Process, one: &Remembered) -> Result<(), ProcessError> {
    // What is not open any more was closed before the freeze.
    let Some(now) = Identity::of_open_file(process, one.descriptor) else { return Ok(()) };
    let before = Identity { device: one.device, inode: one.inode };
    for &place in &one.places {
        // Nor is what has been freed since it was found.
        godwit_sqlite::correct(process, place, before, now)?;
    }
    Ok(())
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
            descriptor: 3,
            identity: Identity { device: 45, inode: 9 },
            has_log,
            places: places.to_vec(),
        }
    }

    #[test]
    fn a_database_is_warned_of_unless_it_is_found_and_the_destination_corrects_it() {
        let (found, lost, log) = (database(false, &[4096]), database(false, &[]), database(true, &[]));
        let all = [found.clone(), lost, log];
        let words = sorted(all.to_vec(), true).warnings;
        assert_eq!(words.len(), 2, "{words:?}");
        assert!(words[0].starts_with(
            "process 4711 (server, PID 7 in the service) has the SQLite database /data.db open, and SQLite writes"
        ));
        assert!(words[1].contains("shares no locks"), "{words:?}");
        let told = Remembered { pid: 7, descriptor: 3, device: 45, inode: 9, places: vec![4096] };
        assert_eq!(sorted(all.to_vec(), true).remembered, [told]);
        let Found { remembered, warnings } = sorted(all.to_vec(), false);
        assert_eq!((remembered.len(), warnings.len()), (0, 2), "{warnings:?}");
        assert!(warnings[0].ends_with("(and 1 more like this)"), "{warnings:?}");
        let Found { remembered, warnings } = sorted(vec![found; MOST + 2], true);
        assert_eq!((remembered.len(), warnings.len()), (MOST, 1), "{warnings:?}");
    }

    #[test]
    fn what_cannot_be_corrected_is_said() {
        let other = Remembered { pid: 7, descriptor: 3, ..Remembered::default() };
        let own = Process::open(i32::try_from(std::process::id()).unwrap_or_default());
        let space = own.map(|own| own.space()).unwrap_or_default();
        // A descriptor that is not open is nothing to correct.
        let closed =
            Remembered { pid: space, descriptor: i32::MAX, places: vec![0], ..Remembered::default() };
        let said = correct(&[std::process::id()], &[other, closed]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("PID 7 in it") && said[0].contains("there is no such process"), "{said:?}");
    }
}
