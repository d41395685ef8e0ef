//! The log of a container, where its engine has that in a file: Docker's driver `json-file`, Podman's `k8s-file`.
//!
//! The engine opens the file as the container starts, and appends to it. Nothing has been written when a container that comes
//! here is about to go on; so what it wrote elsewhere is put in front then. A Docker since release 23 remembers how much it has
//! written itself, and reads no more: it gets nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::container::Keeper;

/// The older file of a log and the one that is written, of a container with this ID and this directory of the engine's.
pub(crate) fn files(keeper: Keeper, id: &str, directory: &Path) -> [PathBuf; 2] {
    let log = match keeper {
        Keeper::Docker => directory.join(format!("{id}-json.log")),
        Keeper::Podman => directory.join("ctr.log"),
    };
    let mut older = log.clone().into_os_string();
    older.push(".1");
    [older.into(), log]
}

/// Puts what has come, in this order, into the file of the engine's, and removes it in any case. Nothing is put where the
/// engine has no such file, as with other drivers.
pub(crate) fn put(come: &[PathBuf; 2], log: Option<&Path>) -> io::Result<()> {
    let put = append(come, log);
    for path in come {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    put
}

fn append(come: &[PathBuf; 2], log: Option<&Path>) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let opened = log.map(|log| options.append(true).custom_flags(libc::O_NOFOLLOW).open(log));
    let mut to = match opened.transpose() {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        opened => opened?,
    };
    let Some(to) = &mut to else { return Ok(()) };
    for path in come {
        let mut from = match File::open(path) {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        io::copy(&mut from, to)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_has_come_stands_before_what_the_engine_appends() {
        let directory = tempfile::tempdir().unwrap();
        let come = ["log.1", "log"].map(|name| directory.path().join(name));
        let bring = || {
            fs::write(&come[0], "one\n").unwrap();
            fs::write(&come[1], "two\n").unwrap();
        };
        let [older, log] = files(Keeper::Docker, "0ab", directory.path());
        assert!(log.ends_with("0ab-json.log") && older.ends_with("0ab-json.log.1"), "{log:?}");
        let mut engines = OpenOptions::new().append(true).create(true).open(&log).unwrap();
        bring();
        put(&come, Some(&log)).unwrap();
        engines.write_all(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\ntwo\nthree\n");
        assert!(come.iter().all(|path| !path.exists()));
        put(&come, Some(&log)).unwrap();

        // None that takes it, another driver, and a link in the place of the file.
        bring();
        put(&come, None).unwrap();
        assert!(come.iter().all(|path| !path.exists()));
        let elsewhere = files(Keeper::Podman, "0ab", directory.path())[1].clone();
        bring();
        put(&come, Some(&elsewhere)).unwrap();
        assert!(!elsewhere.exists() && come.iter().all(|path| !path.exists()));
        std::os::unix::fs::symlink(&log, &elsewhere).unwrap();
        bring();
        assert!(put(&come, Some(&elsewhere)).is_err() && come.iter().all(|path| !path.exists()));
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\ntwo\nthree\n");
    }
}
