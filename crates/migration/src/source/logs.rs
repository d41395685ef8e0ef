//! The service's log on its way: all of it while the service runs, and what has come since while it is frozen.
//!
//! The log has two files: the one that is written, and the older one, which a full log replaces. So what was sent is
//! known by the file itself, whatever its name is by now:
//!
//! | the file whose beginning is there | what is sent |
//! |---|---|
//! | is the log still | the rest of it |
//! | is the older file now | the rest of it, `LogRotated`, and the log |
//! | is gone, or shorter than it was | `LogRotated` twice, which clears both, and both files |
//!
//! Of a log that nobody keeps short only the latest entries are sent.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use godwit_engine::LogEntries;

use super::root::CHUNK;
use crate::message::Message;
use crate::resources::LocalError;

/// A log, and how much of it the destination has.
#[derive(Debug)]
pub(super) struct Logs {
    /// The older file, and the one that is written.
    paths: [PathBuf; 2],
    entries: LogEntries,
    /// The file whose beginning is the destination's log, held open so that no other one gets its number, and
    /// how many bytes of it that is.
    there: Option<(File, u64)>,
    /// Whether anything has been sent.
    begun: bool,
    /// About so many bytes are sent at most of what there is at the beginning.
    most: u64,
    /// Bytes that were sent since then.
    sent: u64,
}

/// What may be sent of a log's latest entries is so many times what was sent at first: then it begins anew.
const ANEW: u64 = 4;

/// The two files as they are at one moment.
struct Files {
    older: Option<File>,
    log: Option<File>,
}

/// What has to be done so that the destination has all.
enum Way {
    /// Send the rest of the log from here on.
    Rest(File, u64),
    /// Send the rest of what is the older file by now; then the log.
    Rotated(File, u64, Option<File>),
    /// Send both, from these places on.
    All(Files, [u64; 2]),
}

/// One thing to send.
enum Part {
    /// That the log is the older file from now on.
    Rotation,
    /// The older file, from here on.
    Older(File, u64),
    /// The log, from here on.
    Log(File, u64),
}

impl Way {
    /// In this order. What was `begun` is cleared where all is sent.
    fn parts(self, begun: bool) -> Vec<Part> {
        let log = |file: Option<File>| file.map(|file| Part::Log(file, 0));
        match self {
            Self::Rest(file, from) => vec![Part::Log(file, from)],
            Self::Rotated(older, from, new) => {
                [Part::Log(older, from), Part::Rotation].into_iter().chain(log(new)).collect()
            }
            Self::All(Files { older, log: new }, [of_older, of_log]) => {
                let clear = if begun { 2 } else { 0 };
                let cleared = std::iter::repeat_with(|| Part::Rotation).take(clear);
                let older = older.map(|file| Part::Older(file, of_older));
                cleared.chain(older).chain(new.map(|file| Part::Log(file, of_log))).collect()
            }
        }
    }
}

impl Logs {
    pub(super) fn new(paths: [PathBuf; 2]) -> Self {
        let entries = LogEntries::Lines;
        Self { paths, entries, there: None, begun: false, most: u64::MAX, sent: 0 }
    }

    /// Its entries are told apart so.
    pub(super) fn of(self, entries: LogEntries) -> Self {
        Self { entries, ..self }
    }

    /// Somebody waits: no more is sent than at first.
    pub(super) fn ending(self) -> Self {
        Self { sent: self.most.saturating_mul(ANEW - 1), ..self }
    }

    /// Only its latest entries, about so many bytes.
    pub(super) fn latest(self, most: u64) -> Self {
        Self { most, ..self }
    }

    /// How many bytes [`Logs::send`] would send now.
    pub(super) fn left(&self) -> Result<u64, LocalError> {
        let length = |file: &Option<File>| file.as_ref().map_or(Ok(0), length);
        let left = || {
            Ok(match self.way()? {
                Way::Rest(log, from) => self::length(&log)?.saturating_sub(from),
                Way::Rotated(older, from, log) => self::length(&older)?.saturating_sub(from) + length(&log)?,
                Way::All(Files { older, log }, [of_older, of_log]) => {
                    length(&older)?.saturating_sub(of_older) + length(&log)?.saturating_sub(of_log)
                }
            })
        };
        left().map_err(|error| self.failed(error))
    }

    /// Sends what the destination does not have, and says how many bytes that were. Blocks.
    pub(super) fn send<E: From<LocalError>>(
        &mut self,
        sink: &mut impl FnMut(Message) -> Result<(), E>,
    ) -> Result<u64, E> {
        let way = self.way().map_err(|error| self.failed(error))?;
        if matches!(way, Way::All(..)) {
            self.sent = 0;
        }
        let parts = way.parts(self.begun);
        self.begun = true;
        let mut sent = 0;
        for part in parts {
            let is_log = matches!(part, Part::Log(..));
            let (file, from, kind): (_, _, fn(Bytes) -> Message) = match part {
                Part::Rotation => {
                    sink(Message::LogRotated)?;
                    self.there = None;
                    continue;
                }
                Part::Older(file, from) => (file, from, Message::OldLogData),
                Part::Log(file, from) => (file, from, Message::LogData),
            };
            let mut at = from;
            while let Some(piece) = piece(&file, at).map_err(|error| self.failed(error))? {
                at += piece.len() as u64;
                sink(kind(piece))?;
            }
            sent += at - from;
            self.there = is_log.then_some((file, at));
        }
        self.sent = self.sent.saturating_add(sent);
        Ok(sent)
    }

    fn failed(&self, source: io::Error) -> LocalError {
        LocalError::Io { action: "read", path: self.paths[1].clone(), source }
    }

    fn way(&self) -> io::Result<Way> {
        let Files { older, log } = self.open()?;
        let Some((there, sent)) = &self.there else { return self.all(Files { older, log }) };
        let is_it = |file: &File| Ok::<_, io::Error>(same(file, there)? && length(file)? >= *sent);
        let is_few = |bytes: u64| self.sent.saturating_add(bytes) <= self.most.saturating_mul(ANEW);
        Ok(match (older, log) {
            (_, Some(log)) if is_it(&log)? && is_few(length(&log)?.saturating_sub(*sent)) => {
                Way::Rest(log, *sent)
            }
            (Some(older), log)
                if is_it(&older)?
                    && is_few(
                        length(&older)?.saturating_sub(*sent) + log.as_ref().map_or(Ok(0), length)?,
                    ) =>
            {
                Way::Rotated(older, *sent, log)
            }
            (older, log) => self.all(Files { older, log })?,
        })
    }

    /// All that is sent of these files.
    fn all(&self, Files { older, log }: Files) -> io::Result<Way> {
        let length = |file: &Option<File>| file.as_ref().map_or(Ok(0), length);
        let [of_older, of_log] = [length(&older)?, length(&log)?];
        let start = |file: &Option<File>, length: u64, most: u64| match (
            file,
            length.saturating_sub(most),
            self.entries,
        ) {
            // Who takes all of it only measures.
            (Some(file), from, LogEntries::Framed) if self.most < u64::MAX => framed(file, from, length),
            (Some(file), from, LogEntries::Lines) if from > 0 => line(file, from),
            _ => Ok(0),
        };
        let starts =
            [start(&older, of_older, self.most.saturating_sub(of_log))?, start(&log, of_log, self.most)?];
        Ok(Way::All(Files { older, log }, starts))
    }

    /// Both files as they are at one moment: opened again when the log was rotated in between.
    fn open(&self) -> io::Result<Files> {
        let [older, log] = &self.paths;
        loop {
            let files = Files { log: open(log)?, older: open(older)? };
            let now = open(log)?;
            let unchanged = match (&files.log, &now) {
                (Some(before), Some(now)) => same(before, now)?,
                (None, None) => true,
                _ => false,
            };
            if unchanged {
                return Ok(files);
            }
        }
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn length(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.len())
}

fn same(one: &File, other: &File) -> io::Result<bool> {
    let [one, other] = [one.metadata()?, other.metadata()?];
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Where the first line behind this place begins, or the file ends.
fn line(file: &File, mut at: u64) -> io::Result<u64> {
    while let Some(piece) = piece(file, at)? {
        if let Some(end) = piece.iter().position(|byte| *byte == b'\n') {
            return Ok(at + end as u64 + 1);
        }
        at += piece.len() as u64;
    }
    Ok(at)
}

/// Where the latest framed entries begin, at this place or behind it: those behind one that a full disk has cut, if there is
/// one. At the end, too, one may be cut.
fn framed(mut file: &File, from: u64, length: u64) -> io::Result<u64> {
    let mut latest = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(length - from).read_to_end(&mut latest)?;
    let whole = (1..=latest.len()).rev().find(|end| last_framed(&latest[..*end]).is_some());
    let mut at = whole.unwrap_or(latest.len());
    while let Some(begin) = last_framed(&latest[..at]) {
        at = begin;
    }
    Ok(from + at as u64)
}

/// Where the last framed entry of these bytes begins, if they end with a whole one.
fn last_framed(bytes: &[u8]) -> Option<usize> {
    let behind = bytes.last_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*behind)).ok()?;
    let begin = bytes.len().checked_sub(length.checked_add(8)?)?;
    // None is empty, and zeros are what a power cut leaves.
    (length > 0 && bytes[begin..].first_chunk() == Some(behind)).then_some(begin)
}

/// The next piece of a file; none at its end.
fn piece(file: &File, at: u64) -> io::Result<Option<Bytes>> {
    let mut buffer = vec![0; CHUNK];
    let mut filled = 0;
    while filled < CHUNK {
        match file.read_at(&mut buffer[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(filled);
    Ok((filled > 0).then(|| buffer.into()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    /// A log here, and what came of it there.
    struct Both {
        _directory: tempfile::TempDir,
        paths: [PathBuf; 2],
        logs: Logs,
        there: [Vec<u8>; 2],
    }

    impl Both {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let paths = ["log.1", "log"].map(|name| directory.path().join(name));
            let logs = Logs::new(paths.clone());
            Self { _directory: directory, paths, logs, there: Default::default() }
        }

        fn write(&self, text: &[u8]) {
            let mut log = File::options().append(true).create(true).open(&self.paths[1]).unwrap();
            log.write_all(text).unwrap();
        }

        fn rotate(&self) {
            fs::rename(&self.paths[1], &self.paths[0]).unwrap();
        }

        /// Sends; what is there is what is here then. The bytes that crossed.
        fn send(&mut self) -> u64 {
            let left = self.logs.left().unwrap();
            let [older, log] = &mut self.there;
            let sent = self.logs.send(&mut |message| {
                match message {
                    Message::OldLogData(data) => older.extend(data),
                    Message::LogData(data) => log.extend(data),
                    Message::LogRotated => *older = std::mem::take(log),
                    other => panic!("{}", other.name()),
                }
                Ok::<_, LocalError>(())
            });
            let sent = sent.unwrap();
            assert_eq!(sent, left);
            assert_eq!(self.logs.left().unwrap(), 0);
            let here = self.paths.each_ref().map(|path| fs::read(path).unwrap_or_default());
            assert!(self.there == here, "{} and {} bytes", self.there[0].len(), self.there[1].len());
            sent
        }
    }

    #[test]
    fn only_what_has_come_since_crosses_again() {
        let mut both = Both::new();
        assert_eq!(both.send(), 0, "there is no log yet");
        both.write(b"old");
        both.rotate();
        both.write(&vec![7; 3 * CHUNK + 5]);
        assert_eq!(both.send(), 3 + 3 * CHUNK as u64 + 5);
        both.write(b"tail");
        assert_eq!(both.send(), 4);
        assert_eq!(both.send(), 0);
    }

    #[test]
    fn a_log_that_is_rotated_on_the_way_is_rotated_there() {
        let mut both = Both::new();
        both.write(b"older");
        both.rotate();
        both.write(b"first");
        both.send();
        both.write(b" line");
        both.rotate();
        both.write(b"second");
        assert_eq!(both.send(), 11);
        both.rotate();
        both.write(b"third");
        assert_eq!(both.send(), 5);
    }

    #[test]
    fn a_log_of_which_nothing_is_left_that_was_sent_crosses_anew() {
        let mut both = Both::new();
        both.write(b"first");
        both.send();
        for text in [b"second", b"third!"] {
            both.rotate();
            both.write(text);
        }
        assert_eq!(both.send(), 12);
        // Somebody has emptied it.
        fs::write(&both.paths[1], b"x").unwrap();
        assert_eq!(both.send(), 7);
    }

    #[test]
    fn of_a_log_that_nobody_keeps_short_the_latest_lines_cross() {
        let mut both = Both::new();
        both.logs = Logs::new(both.paths.clone()).latest(12);
        let mut there = Vec::new();
        let mut crosses = |logs: &mut Logs| {
            let left = logs.left().unwrap();
            let sent = logs.send(&mut |message| {
                match message {
                    Message::OldLogData(data) | Message::LogData(data) => there.extend(data),
                    Message::LogRotated => there.clear(),
                    other => panic!("{}", other.name()),
                }
                Ok::<_, LocalError>(())
            });
            assert_eq!(sent.unwrap(), left);
            String::from_utf8(there.clone()).unwrap()
        };
        both.write(b"one\ntwo\nthree\n");
        both.rotate();
        both.write(b"four\n");
        assert_eq!(crosses(&mut both.logs), "three\nfour\n");
        both.write(b"five\n");
        assert_eq!(crosses(&mut both.logs), "three\nfour\nfive\n");
        // Much more than what it has sent at first: it begins anew.
        both.write(&b"more lines\n".repeat(9));
        assert_eq!(crosses(&mut both.logs), "more lines\n");
    }

    fn entry(text: &str) -> Vec<u8> {
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        [&length, text.as_bytes(), &length].concat()
    }

    /// What crosses of a log with framed entries at first.
    fn crosses(logs: &mut Logs) -> Vec<u8> {
        let mut there = Vec::new();
        let sent = logs.send(&mut |message| {
            let (Message::LogData(data) | Message::OldLogData(data)) = message else {
                panic!("{}", message.name())
            };
            there.extend(data);
            Ok::<_, LocalError>(())
        });
        assert_eq!(sent.unwrap(), there.len() as u64);
        there
    }

    #[test]
    fn of_a_log_with_framed_entries_whole_ones_cross() {
        let mut both = Both::new();
        both.logs = Logs::new(both.paths.clone()).latest(30).of(LogEntries::Framed);
        for text in ["one", "two\nlines", "three\n\n"] {
            both.write(&entry(text));
        }
        let mut there = crosses(&mut both.logs);
        both.write(&entry("four"));
        there.extend(crosses(&mut both.logs));
        assert_eq!(there, [entry("three\n\n"), entry("four")].concat());
    }

    #[test]
    fn what_stands_behind_a_framed_entry_that_is_torn_crosses() {
        for most in [1 << 20, 60] {
            for cut in 1..entry("torn").len() {
                let both = Both::new();
                both.write(&entry(&"old".repeat(30)));
                both.write(&entry("torn")[..cut]);
                let [two, three] = ["two", "three"].map(entry);
                both.write(&[&two[..], &three].concat());
                // It is being written, or a full disk has cut it.
                both.write(&entry("last")[..cut]);
                let mut logs = Logs::new(both.paths.clone()).latest(most).of(LogEntries::Framed);
                let there = crosses(&mut logs);
                assert_eq!(there, [&two[..], &three, &entry("last")[..cut]].concat(), "{cut}");
            }
        }
    }

    #[test]
    fn of_a_log_without_a_whole_framed_entry_nothing_crosses() {
        let mut both = Both::new();
        both.write(&entry("one"));
        both.rotate();
        both.write(&[0; 40]);
        both.logs = Logs::new(both.paths.clone()).latest(40).of(LogEntries::Framed);
        assert_eq!(crosses(&mut both.logs), b"");
    }
}
