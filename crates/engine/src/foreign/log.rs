//! The log of a container, where its engine has that in files: Docker's drivers `json-file` and `local`, Podman's `k8s-file`.
//!
//! What a container that comes here has written elsewhere is put there as it is about to go on. It has written nothing here by
//! then, but its engine has opened the file.
//!
//! conmon appends to that file, and Podman shows all that is in it: so what has come is appended before. Docker since release 23
//! shows as many bytes of it, from its beginning, as it had when Docker opened it and as Docker has written since: so what has
//! come is the older file, which a full log replaces. Docker shows that whole, and first, where a container may have two files:
//! those that come here may.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::container::{Keeper, LogEntries, LogFiles};

/// The log of a container with this ID and this directory of the engine's. Nothing where the engine has it elsewhere.
pub(crate) fn of(keeper: Keeper, id: &str, directory: &Path) -> Option<LogFiles> {
    let places = match keeper {
        Keeper::Docker => vec![
            (format!("{id}-json.log"), LogEntries::Lines),
            ("local-logs/container.log".to_owned(), LogEntries::Framed),
        ],
        Keeper::Podman => vec![("ctr.log".to_owned(), LogEntries::Lines)],
    };
    let mut logs = places.into_iter().map(|(name, entries)| (directory.join(name), entries));
    let (log, entries) = logs.find(|(log, _)| log.is_file())?;
    let mut older = log.clone().into_os_string();
    older.push(".1");
    Some(LogFiles { paths: [older.into(), log], entries })
}

/// Puts what has come, in this order, into the log of the engine's, and removes it in any case. Nothing is put where the
/// engine has no such log, as with other drivers.
pub(crate) fn put(come: &[PathBuf; 2], keeper: Keeper, log: Option<&LogFiles>) -> io::Result<()> {
    let put = log.map_or(Ok(()), |log| bring(come, keeper, log));
    for path in come {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    put
}

fn bring(come: &[PathBuf; 2], keeper: Keeper, log: &LogFiles) -> io::Result<()> {
    let mut parts = Vec::new();
    for path in come {
        match File::open(path) {
            Ok(part) => parts.push(part),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    if parts.is_empty() {
        return Ok(());
    }
    let ([older, log], mut options) = (&log.paths, OpenOptions::new());
    let mut to = match keeper {
        Keeper::Docker => options.write(true).create_new(true).mode(0o640).open(older)?,
        Keeper::Podman => options.append(true).custom_flags(libc::O_NOFOLLOW).open(log)?,
    };
    for mut part in parts {
        io::copy(&mut part, &mut to)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    /// An engine's directory with a log in which the engine writes, and what has come.
    struct Both {
        directory: tempfile::TempDir,
        come: [PathBuf; 2],
    }

    impl Both {
        fn new(log: &str) -> (Self, File) {
            let directory = tempfile::tempdir().unwrap();
            let come = ["come.1", "come"].map(|name| directory.path().join(name));
            let log = directory.path().join(log);
            fs::create_dir_all(log.parent().unwrap()).unwrap();
            let engines = OpenOptions::new().append(true).create(true).open(log).unwrap();
            (Self { directory, come }, engines)
        }

        fn put(&self, keeper: Keeper) -> io::Result<()> {
            fs::write(&self.come[0], "one\n").unwrap();
            fs::write(&self.come[1], "two\n").unwrap();
            let put = put(&self.come, keeper, of(keeper, "0ab", self.directory.path()).as_ref());
            assert!(self.come.iter().all(|path| !path.exists()));
            put
        }

        fn read(&self, name: &str) -> String {
            fs::read_to_string(self.directory.path().join(name)).unwrap()
        }
    }

    #[test]
    fn what_has_come_is_dockers_older_file() {
        for log in ["0ab-json.log", "local-logs/container.log"] {
            let (both, mut engines) = Both::new(log);
            both.put(Keeper::Docker).unwrap();
            engines.write_all(b"three\n").unwrap();
            let older = format!("{log}.1");
            assert_eq!((both.read(&older), both.read(log)), ("one\ntwo\n".into(), "three\n".into()));
            // It is nobody's but this container's.
            assert!(both.put(Keeper::Docker).is_err());
            assert_eq!(both.read(&older), "one\ntwo\n");
        }
    }

    #[test]
    fn what_has_come_stands_before_what_podman_appends() {
        let (both, mut engines) = Both::new("ctr.log");
        both.put(Keeper::Podman).unwrap();
        engines.write_all(b"three\n").unwrap();
        assert_eq!(both.read("ctr.log"), "one\ntwo\nthree\n");
    }

    #[test]
    fn what_has_come_goes_where_nothing_takes_it() {
        // Another driver, and a link in the place of the file.
        let (both, _engines) = Both::new("other");
        both.put(Keeper::Docker).unwrap();
        both.put(Keeper::Podman).unwrap();
        symlink(both.directory.path().join("other"), both.directory.path().join("ctr.log")).unwrap();
        assert!(both.put(Keeper::Podman).is_err());
        assert_eq!(both.read("other"), "");
    }
}
