//! The log of a container, where its engine has that in files: Docker's drivers `json-file` and `local`, Podman's `k8s-file`.
//!
//! What a container that comes here has written elsewhere is put there as it is about to go on. It has written nothing here by
//! then, but its engine has opened the file.
//!
//! conmon appends to that file, and Podman shows all that is in it: so what has come is appended before. Docker since release 23
//! shows as many bytes of it, from its beginning, as it had when Docker opened it and as Docker has written since: so what has
//! come is the older file, which a full log replaces. Docker shows that whole, and first, where a container may have two files:
//! those that come here may. Its entries are whole: behind one that is not Docker finds no other.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::container::{Keeper, LogEntries, LogFiles};

/// No engine writes a longer entry, bytes: Docker and conmon divide longer lines.
const LONGEST_ENTRY: u32 = 1 << 20;

/// The log of a container with this ID in this storage of its engine's. Nothing where the engine has it elsewhere.
pub(crate) fn of(keeper: Keeper, id: &str, storage: &Path) -> Option<LogFiles> {
    let (directory, places) = match keeper {
        Keeper::Docker => (
            storage.join("containers").join(id),
            vec![
                (format!("{id}-json.log"), LogEntries::Lines),
                ("local-logs/container.log".to_owned(), LogEntries::Framed),
            ],
        ),
        Keeper::Podman => (
            storage.join("overlay-containers").join(id).join("userdata"),
            vec![("ctr.log".to_owned(), LogEntries::Lines)],
        ),
    };
    let mut logs = places.into_iter().map(|(name, entries)| (directory.join(name), entries));
    let (log, entries) = logs.find(|(log, _)| log.is_file())?;
    Some(LogFiles { paths: [beside(&log, ".1"), log], entries })
}

/// Puts what has come, in this order, into the log of the engine's, and removes it in any case. Nothing is put where the
/// engine has no such log, as with other drivers. Blocks.
///
/// What it returns is still to be brought to the disk.
pub(crate) fn put(come: &[PathBuf; 2], keeper: Keeper, log: Option<&LogFiles>) -> io::Result<Option<File>> {
    let put = log.map_or(Ok(None), |log| bring(come, keeper, log));
    let [older, newer] = come.each_ref().map(|path| removed(path));
    put.and_then(|put| older.and(newer).map(|()| put))
}

fn bring(come: &[PathBuf; 2], keeper: Keeper, log: &LogFiles) -> io::Result<Option<File>> {
    let mut parts = Vec::new();
    for path in come {
        match File::open(path) {
            Ok(part) => parts.push(part),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    if parts.is_empty() {
        return Ok(None);
    }
    match keeper {
        Keeper::Docker => become_older(parts, log).map(Some),
        Keeper::Podman => append(parts, log).map(Some),
    }
}

/// Makes the older file of what has come, whole or not at all.
fn become_older(parts: Vec<File>, log: &LogFiles) -> io::Result<File> {
    let [older, _] = &log.paths;
    let coming = beside(older, ".coming");
    let made = OpenOptions::new().write(true).create_new(true).mode(0o640).open(&coming)?;
    let is_entry = match log.entries {
        // Docker shows nothing behind a line that it cannot read.
        LogEntries::Lines => is_of_json_file,
        LogEntries::Framed => |_: &[u8]| true,
    };
    let written = copy(parts, &made, log.entries, is_entry)
        // Unlike a renaming, this replaces no file which Docker has made meanwhile.
        .and_then(|()| fs::hard_link(&coming, older));
    let removed = fs::remove_file(&coming);
    written.and(removed).map(|()| made)
}

/// Appends what has come, whole or not at all.
fn append(parts: Vec<File>, log: &LogFiles) -> io::Result<File> {
    let to = OpenOptions::new().append(true).custom_flags(libc::O_NOFOLLOW).open(&log.paths[1])?;
    let before = to.metadata()?.len();
    match copy(parts, &to, log.entries, |_| true) {
        Ok(()) => Ok(to),
        Err(error) => to.set_len(before).and(Err(error)),
    }
}

/// Copies the whole entries of each part: a full disk may have cut the last one. What follows one without an end is not told
/// apart.
fn copy(parts: Vec<File>, to: &File, entries: LogEntries, is_entry: fn(&[u8]) -> bool) -> io::Result<()> {
    let (mut to, mut entry) = (BufWriter::new(to), Vec::new());
    for part in parts {
        let mut part = BufReader::new(part);
        while next(&mut part, entries, &mut entry)? {
            if is_entry(&entry) {
                to.write_all(&entry)?;
            }
        }
    }
    to.flush()
}

/// Reads the next entry, if there is a whole one.
fn next(part: &mut impl BufRead, entries: LogEntries, entry: &mut Vec<u8>) -> io::Result<bool> {
    entry.clear();
    match entries {
        LogEntries::Lines => {
            part.take(LONGEST_ENTRY.into()).read_until(b'\n', entry)?;
            Ok(entry.ends_with(b"\n"))
        }
        LogEntries::Framed => {
            part.take(4).read_to_end(entry)?;
            let Some(before) = entry.first_chunk().copied() else { return Ok(false) };
            let length = u32::from_be_bytes(before);
            // None is empty, and zeros are what a power cut leaves.
            if length == 0 || length > LONGEST_ENTRY {
                return Ok(false);
            }
            part.take(u64::from(length) + 4).read_to_end(entry)?;
            Ok(entry.len() == length as usize + 8 && entry.ends_with(&before))
        }
    }
}

fn is_of_json_file(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    #[allow(dead_code)]
    struct Line<'a> {
        #[serde(borrow)]
        log: Cow<'a, str>,
        #[serde(borrow)]
        stream: Cow<'a, str>,
        #[serde(borrow)]
        time: Cow<'a, str>,
    }
    serde_json::from_slice::<Line>(line).is_ok()
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut beside = path.to_owned().into_os_string();
    beside.push(ending);
    beside.into()
}

fn removed(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const DOCKERS: [&str; 2] = ["containers/0ab/0ab-json.log", "containers/0ab/local-logs/container.log"];
    const PODMANS: &str = "overlay-containers/0ab/userdata/ctr.log";

    /// An engine's storage with a log in which the engine writes, and what has come.
    struct Both {
        storage: tempfile::TempDir,
        come: [PathBuf; 2],
    }

    impl Both {
        fn new(log: &str) -> (Self, File) {
            let storage = tempfile::tempdir().unwrap();
            let come = ["come.1", "come"].map(|name| storage.path().join(name));
            let log = storage.path().join(log);
            fs::create_dir_all(log.parent().unwrap()).unwrap();
            let engines = OpenOptions::new().append(true).create(true).open(log).unwrap();
            (Self { storage, come }, engines)
        }

        fn put(&self, keeper: Keeper, come: [&[u8]; 2]) -> io::Result<()> {
            for (path, content) in self.come.iter().zip(come) {
                fs::write(path, content).unwrap();
            }
            let put = put(&self.come, keeper, of(keeper, "0ab", self.storage.path()).as_ref());
            assert!(self.come.iter().all(|path| !path.exists()));
            put.map(drop)
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.storage.path().join(name)).unwrap()
        }
    }

    fn entry(log: &str, text: &str) -> Vec<u8> {
        if log.ends_with("-json.log") {
            return format!("{{\"log\":\"{text}\\n\",\"stream\":\"stdout\",\"time\":\"now\"}}\n").into();
        }
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        [&length, text.as_bytes(), &length].concat()
    }

    #[test]
    fn what_has_come_is_dockers_older_file() {
        for log in DOCKERS {
            let (both, mut engines) = Both::new(log);
            let [one, two, three] = ["one", "two", "three"].map(|text| entry(log, text));
            both.put(Keeper::Docker, [&one, &two]).unwrap();
            engines.write_all(&three).unwrap();
            let older = format!("{log}.1");
            assert_eq!((both.read(&older), both.read(log)), ([&one[..], &two].concat(), three));
            // It is nobody's but this container's.
            assert!(both.put(Keeper::Docker, [&two, &one]).is_err());
            assert_eq!(both.read(&older), [one, two].concat());
            let files = both.storage.path().join(log).parent().unwrap().read_dir().unwrap();
            assert_eq!(files.count(), 2, "nothing is left of what was refused");
        }
    }

    #[test]
    fn of_what_has_come_docker_gets_whole_entries() {
        for log in DOCKERS {
            let [one, two, three] = ["one", "two", "three"].map(|text| entry(log, text));
            for cut in 1..one.len() {
                let (both, _engines) = Both::new(log);
                let (first, second) = ([&one[..], &two[..cut.min(two.len() - 1)]].concat(), &three[..]);
                both.put(Keeper::Docker, [&first, second]).unwrap();
                let older = both.read(&format!("{log}.1"));
                assert_eq!(older, [&one[..], second].concat(), "{log} cut at {cut}");
            }
            // A disk that was full for a while, and what is no log.
            let (both, _engines) = Both::new(log);
            let garbage = [b"\xff\xff\xff\xff{\"log\":1}\n", &two[..5], b"\n"].concat();
            both.put(Keeper::Docker, [&garbage, &one]).unwrap();
            assert_eq!(both.read(&format!("{log}.1")), one, "{log}");
        }
        // The lines behind one that is torn are told apart.
        let (both, _engines) = Both::new(DOCKERS[0]);
        let [one, two] = ["one", "two"].map(|text| entry(DOCKERS[0], text));
        both.put(Keeper::Docker, [&[&one[..9], &two, &one].concat(), &two]).unwrap();
        assert_eq!(both.read(&format!("{}.1", DOCKERS[0])), [one, two].concat());
    }

    #[test]
    fn an_endless_entry_is_none() {
        let longest = LONGEST_ENTRY as usize;
        let lines = vec![b'x'; 2 * longest];
        let frame = [&(LONGEST_ENTRY + 1).to_be_bytes()[..], &lines].concat();
        for (entries, part) in [(LogEntries::Lines, lines), (LogEntries::Framed, frame)] {
            let mut entry = Vec::new();
            assert!(!next(&mut &part[..], entries, &mut entry).unwrap());
            assert!(entry.len() <= longest);
        }
    }

    /// A directory in the place of one of them stands for a failure.
    #[test]
    fn what_has_come_goes_as_far_as_it_can() {
        for failing in [0, 1] {
            let (both, _engines) = Both::new("other");
            fs::create_dir(&both.come[failing]).unwrap();
            fs::write(&both.come[1 - failing], "x").unwrap();
            assert!(put(&both.come, Keeper::Docker, None).is_err());
            assert!(!both.come[1 - failing].exists());
        }
    }

    /// A directory cannot be read.
    #[test]
    fn what_fails_on_its_way_leaves_the_log_as_it_was() {
        for (keeper, log) in [(Keeper::Docker, DOCKERS[1]), (Keeper::Podman, PODMANS)] {
            let (both, mut engines) = Both::new(log);
            engines.write_all(b"engine\n").unwrap();
            fs::write(&both.come[0], [entry(log, "one"), b"\n".to_vec()].concat()).unwrap();
            fs::create_dir(&both.come[1]).unwrap();
            assert!(put(&both.come, keeper, of(keeper, "0ab", both.storage.path()).as_ref()).is_err());
            assert_eq!(both.read(log), b"engine\n");
            let files = both.storage.path().join(log).parent().unwrap().read_dir().unwrap();
            assert_eq!(files.count(), 1, "{log}");
        }
    }

    #[test]
    fn what_has_come_stands_before_what_podman_appends() {
        let (both, mut engines) = Both::new(PODMANS);
        both.put(Keeper::Podman, [b"one\n", b"two\ntorn"]).unwrap();
        engines.write_all(b"three\n").unwrap();
        assert_eq!(both.read(PODMANS), b"one\ntwo\nthree\n");
    }

    #[test]
    fn what_has_come_goes_where_nothing_takes_it() {
        // Another driver, and a link in the place of the file.
        let (both, _engines) = Both::new("overlay-containers/0ab/userdata/other");
        let come: [&[u8]; 2] = [b"one\n", b"two\n"];
        both.put(Keeper::Docker, come).unwrap();
        both.put(Keeper::Podman, come).unwrap();
        let directory = both.storage.path().join("overlay-containers/0ab/userdata");
        symlink(directory.join("other"), directory.join("ctr.log")).unwrap();
        assert!(both.put(Keeper::Podman, come).is_err());
        assert_eq!(both.read("overlay-containers/0ab/userdata/other"), b"");
    }
}
