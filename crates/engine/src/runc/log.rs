//! Reading a container's log: its end, since a time, and as it grows.
//!
//! The log is written by `godwit-shim`, one JSON object a line, and rotated to `<name>.1`; see
//! there for the format. What is no such line (a write cut off by a crash) is passed over.
//!
//! ```no_run
//! # async fn show(path: std::path::PathBuf) -> std::io::Result<()> {
//! use godwit_engine::runc::log::LogReader;
//! let mut log = LogReader::open(&path)?;
//! for entry in log.tail(10, None)? {
//!     print!("{}", entry.text());
//! }
//! loop {
//!     for entry in log.follow().await? {
//!         print!("{}", entry.text());
//!     }
//! }
//! # }
//! ```

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use serde::Deserialize;

/// Longest line taken, in bytes. The shim cuts the container's lines at 16 KiB, which JSON can
/// make six times as long.
const LINE_LIMIT: u64 = 256 << 10;

/// Most entries handed out at once, so that a large log is not held in memory as a whole.
const BATCH: usize = 1024;

/// Room for the kernel's messages: each has at most 16 bytes and a file name.
const EVENT_BUFFER: usize = 4096;

/// Which of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// When the shim wrote it, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Where the container wrote it.
    pub stream: LogStream,
    /// A line without its newline, or a part of one.
    pub data: Vec<u8>,
    /// Whether the line goes on in the stream's next entry.
    pub partial: bool,
    /// How many entries before this one were lost for want of space.
    pub lost: u64,
}

impl LogEntry {
    /// The output as the container wrote it, newline included; what is not UTF-8 is replaced.
    pub fn text(&self) -> String {
        let mut text = String::from_utf8_lossy(&self.data).into_owned();
        if !self.partial {
            text.push('\n');
        }
        text
    }
}

/// A line of the file.
#[derive(Debug, Deserialize)]
struct Record {
    time_ns: u64,
    stream: LogStream,
    data: Option<String>,
    data_base64: Option<String>,
    #[serde(default)]
    partial: bool,
    #[serde(default)]
    lost: u64,
}

/// A place in a container's log.
#[derive(Debug)]
pub struct LogReader {
    path: PathBuf,
    /// The files to read in their order; the last is the log itself.
    files: VecDeque<BufReader<File>>,
    changes: Option<Changes>,
}

struct Changes(inotify::EventStream<[u8; EVENT_BUFFER]>);

impl std::fmt::Debug for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Changes")
    }
}

impl LogReader {
    /// Opens a log at its beginning: that of the rotated file, where there is one. A log that does
    /// not exist yet is empty.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), files: files_after(path, None)?, changes: None })
    }

    /// The last lines, of those not older than `since_ns` when it is given. The reader stands
    /// after them.
    pub fn tail(&mut self, lines: usize, since_ns: Option<u64>) -> io::Result<Vec<LogEntry>> {
        let mut last = VecDeque::new();
        let mut held = 0;
        loop {
            let batch = self.read()?;
            if batch.is_empty() {
                return Ok(last.into());
            }
            for entry in batch.into_iter().filter(|entry| since_ns.is_none_or(|since| entry.time_ns >= since))
            {
                held += usize::from(!entry.partial);
                last.push_back(entry);
                while held > lines {
                    let gone: Option<LogEntry> = last.pop_front();
                    held -= usize::from(gone.is_some_and(|entry| !entry.partial));
                }
            }
            if lines == 0 {
                last.clear();
            }
        }
    }

    /// The next entries that are there, up to some number; empty at the end of the log.
    pub fn read(&mut self) -> io::Result<Vec<LogEntry>> {
        let mut entries = Vec::new();
        while entries.len() < BATCH {
            let Some(file) = self.files.front_mut() else {
                // None was there yet.
                self.files = files_after(&self.path, None)?;
                if self.files.is_empty() {
                    break;
                }
                continue;
            };
            match read_line(file)? {
                Line::Entry(entry) => entries.push(entry),
                Line::Damaged => {}
                Line::End => {
                    let is_last = self.files.len() == 1;
                    let next = match self.files.front() {
                        Some(file) if is_last => files_after(&self.path, Some(file.get_ref()))?,
                        _ => VecDeque::new(),
                    };
                    if is_last && next.is_empty() {
                        break;
                    }
                    // What was written before the rotation was seen is read now.
                    if let Some(file) = self.files.front_mut()
                        && let Line::Entry(entry) = read_line(file)?
                    {
                        entries.push(entry);
                        continue;
                    }
                    self.files.pop_front();
                    self.files.extend(next);
                }
            }
        }
        Ok(entries)
    }

    /// The next entries; waits for one when there are none. Does not end with the container: use
    /// it beside a wait for the container's end, and [`read`](Self::read) the rest then.
    ///
    /// Dropping the future loses nothing.
    pub async fn follow(&mut self) -> io::Result<Vec<LogEntry>> {
        // Watched before it is read, so that no change is missed between the two.
        if self.changes.is_none() {
            self.changes = Some(watch(&self.path)?);
        }
        loop {
            let entries = self.read()?;
            if !entries.is_empty() {
                return Ok(entries);
            }
            if let Some(Changes(changes)) = &mut self.changes {
                match changes.next().await {
                    Some(event) => drop(event?),
                    None => return Err(ErrorKind::UnexpectedEof.into()),
                }
            }
        }
    }
}

/// The files that come after the one that was read, oldest first. What was rotated away unseen is
/// gone.
fn files_after(path: &Path, read: Option<&File>) -> io::Result<VecDeque<BufReader<File>>> {
    // The new file first: when a rotation comes between the two, it is seen as the old one as well.
    let new = open_if_there(path)?;
    let old = open_if_there(&rotated(path))?;
    let inode = |file: &File| Ok::<_, io::Error>(file.metadata()?.ino());
    let mut known = read.map(inode).transpose()?;
    let is_read = |file: &Option<File>| Ok::<_, io::Error>(file.as_ref().map(inode).transpose()? == known);
    if read.is_some() && is_read(&new)? {
        return Ok(VecDeque::new());
    }
    let old = if is_read(&old)? { None } else { old };
    known = old.as_ref().map(inode).transpose()?;
    let new = match new {
        Some(new) if Some(inode(&new)?) == known => None,
        new => new,
    };
    Ok(old.into_iter().chain(new).map(BufReader::new).collect())
}

/// Watches the directory of the log: the log itself changes its name.
fn watch(path: &Path) -> io::Result<Changes> {
    let inotify = Inotify::init()?;
    let directory = path.parent().unwrap_or(Path::new("."));
    inotify.watches().add(directory, WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVED_FROM)?;
    Ok(Changes(inotify.into_event_stream([0; EVENT_BUFFER])?))
}

fn rotated(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

fn open_if_there(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

enum Line {
    Entry(LogEntry),
    Damaged,
    End,
}

/// Reads a line; a line without its newline yet is left for later.
fn read_line(file: &mut BufReader<File>) -> io::Result<Line> {
    let begin = file.stream_position()?;
    let mut line = Vec::new();
    let length = file.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line)?;
    if length == 0 {
        return Ok(Line::End);
    }
    if line.last() != Some(&b'\n') {
        let full = u64::try_from(length).is_ok_and(|length| length == LINE_LIMIT);
        if !full {
            file.seek(SeekFrom::Start(begin))?;
            return Ok(Line::End);
        }
    }
    Ok(parse(&line).map_or(Line::Damaged, Line::Entry))
}

fn parse(line: &[u8]) -> Option<LogEntry> {
    let record: Record = serde_json::from_slice(line).ok()?;
    let data = match (record.data, record.data_base64) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(base64)) => STANDARD.decode(base64).ok()?,
        (None, None) => return None,
    };
    let Record { time_ns, stream, partial, lost, .. } = record;
    Some(LogEntry { time_ns, stream, data, partial, lost })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn append(path: &Path, text: &str) {
        File::options().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn line(time: u64, data: &str) -> String {
        format!("{{\"time_ns\":{time},\"stream\":\"stdout\",\"data\":\"{data}\"}}\n")
    }

    fn texts(entries: &[LogEntry]) -> Vec<String> {
        entries.iter().map(|entry| String::from_utf8(entry.data.clone()).unwrap()).collect()
    }

    #[test]
    fn the_tail_is_the_last_lines_over_both_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        for time in 0..5 {
            append(&rotated(&path), &line(time, &format!("old {time}")));
        }
        append(&path, &line(9, "new"));
        let mut log = LogReader::open(&path).unwrap();
        assert_eq!(texts(&log.tail(3, None).unwrap()), ["old 3", "old 4", "new"]);
        assert!(log.read().unwrap().is_empty());
        let mut log = LogReader::open(&path).unwrap();
        assert_eq!(texts(&log.tail(10, Some(4)).unwrap()), ["old 4", "new"]);
        assert!(LogReader::open(&path).unwrap().tail(0, None).unwrap().is_empty());
    }

    #[test]
    fn a_partial_line_counts_with_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        append(&path, &line(1, "a"));
        append(&path, "{\"time_ns\":2,\"stream\":\"stderr\",\"data_base64\":\"/w==\",\"partial\":true}\n");
        append(&path, &line(3, "b"));
        let entries = LogReader::open(&path).unwrap().tail(1, None).unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].data.as_slice(), entries[0].stream), (&[0xff][..], LogStream::Stderr));
    }

    #[test]
    fn a_line_that_is_being_written_is_read_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let whole = line(1, "a");
        let (begin, end) = whole.split_at(10);
        append(&path, begin);
        let mut log = LogReader::open(&path).unwrap();
        assert!(log.read().unwrap().is_empty());
        append(&path, end);
        assert_eq!(texts(&log.read().unwrap()), ["a"]);
    }

    #[test]
    fn what_is_no_record_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        append(&path, "{\"time_ns\":1,\"stre\n\n[]\n");
        append(&path, &"x".repeat(usize::try_from(LINE_LIMIT).unwrap() + 5));
        append(&path, "\n");
        append(&path, &line(1, "a"));
        assert_eq!(texts(&LogReader::open(&path).unwrap().read().unwrap()), ["a"]);
    }

    #[test]
    fn a_reader_that_is_one_rotation_behind_reads_both_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        append(&path, &line(1, "a"));
        let mut log = LogReader::open(&path).unwrap();
        assert_eq!(texts(&log.read().unwrap()), ["a"]);
        for data in ["b", "c"] {
            std::fs::rename(&path, rotated(&path)).unwrap();
            append(&path, &line(2, data));
        }
        assert_eq!(texts(&log.read().unwrap()), ["b", "c"]);
        assert!(log.read().unwrap().is_empty());
    }

    #[test]
    fn a_log_that_begins_and_is_rotated_unseen_is_read_from_its_beginning() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = LogReader::open(&path).unwrap();
        assert!(log.read().unwrap().is_empty());
        append(&rotated(&path), &line(1, "a"));
        append(&path, &line(2, "b"));
        assert_eq!(texts(&log.read().unwrap()), ["a", "b"]);
    }

    #[tokio::test]
    async fn a_follower_sees_every_line_over_a_rotation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = LogReader::open(&path).unwrap();
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || {
                for number in 0..500 {
                    if number == 250 {
                        std::fs::rename(&path, rotated(&path)).unwrap();
                    }
                    append(&path, &line(number, &number.to_string()));
                }
            })
        };
        let mut seen = Vec::new();
        while seen.len() < 500 {
            seen.extend(texts(&log.follow().await.unwrap()));
        }
        writer.join().unwrap();
        assert_eq!(seen, (0..500).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn garbage_is_no_entry(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            prop_assert_eq!(parse(&bytes), None);
        }
    }
}
