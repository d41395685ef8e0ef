//! The container's log: one JSON object a line, written so that the container never waits for it.
//!
//! ```text
//! {"time_ns":1763694000000000000,"stream":"stdout","data":"hello"}
//! {"time_ns":…,"stream":"stderr","data_base64":"/w==","partial":true}
//! ```
//!
//! `data` is the line without its newline; `data_base64` stands in its place when the bytes are
//! not UTF-8. `partial` says that the line goes on in the next record of the stream. At the size
//! limit the file is renamed to `<name>.1`, in place of an older one. Records that cannot be
//! written (no space) are lost, and counted in the next one that can: `"lost":N`.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

/// Lines are written together, at most this many bytes: a write for each line makes a talkative
/// container wait for the shim.
const FLUSH_BYTES: usize = 64 << 10;

/// One line of the log.
#[derive(Debug, Serialize)]
pub(crate) struct Record<'a> {
    time_ns: u64,
    stream: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_base64: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    partial: bool,
    #[serde(skip_serializing_if = "is_zero")]
    lost: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The log file, its size and its losses.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    size: u64,
    max_bytes: u64,
    lost: u64,
    /// The losses that the first line to be written tells of.
    told: u64,
    /// Lines that [`Log::flush`] will write.
    pending: Vec<u8>,
    /// Whether the last write stopped inside a line.
    broken_line: bool,
}

impl Log {
    /// Opens the log to go on with it.
    pub(crate) fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = open_append(path)?;
        let size = file.metadata()?.len();
        Ok(Self {
            path: path.to_owned(),
            file,
            size,
            max_bytes,
            lost: 0,
            told: 0,
            pending: Vec::new(),
            broken_line: false,
        })
    }

    /// Takes one piece of a stream, to be written by [`Log::flush`].
    pub(crate) fn push(&mut self, stream: &str, bytes: &[u8], partial: bool) {
        let text = std::str::from_utf8(bytes).ok();
        let record = Record {
            time_ns: now_ns(),
            stream,
            data: text,
            data_base64: text.is_none().then(|| STANDARD.encode(bytes)),
            partial,
            lost: std::mem::take(&mut self.lost),
        };
        self.told += record.lost;
        // Into memory this cannot fail.
        if serde_json::to_writer(&mut self.pending, &record).is_ok() {
            self.pending.push(b'\n');
        }
        if self.pending.len() >= FLUSH_BYTES {
            self.flush();
        }
    }

    /// Writes the lines taken. Never fails: what cannot be written is counted as lost.
    pub(crate) fn flush(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.size > 0 && self.size.saturating_add(length(&self.pending)) > self.max_bytes {
            self.rotate();
        }
        if self.broken_line {
            self.pending.insert(0, b'\n');
        }
        let written = write_as_much_as_possible(&mut self.file, &self.pending);
        let (done, rest) = self.pending.split_at(written);
        self.size = self.size.saturating_add(length(done));
        let lines = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        self.lost += lines(rest);
        if lines(done) == u64::from(self.broken_line) {
            self.lost += self.told;
        }
        self.told = 0;
        self.broken_line = match done.last() {
            Some(&last) => last != b'\n',
            None => self.broken_line,
        };
        self.pending.clear();
    }

    /// Renames the log and begins a new one; on failure the old one goes on.
    fn rotate(&mut self) {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        if std::fs::rename(&self.path, &old).is_ok()
            && let Ok(file) = open_append(&self.path)
        {
            (self.file, self.size, self.broken_line) = (file, 0, false);
        }
    }
}

fn write_as_much_as_possible(file: &mut File, mut bytes: &[u8]) -> usize {
    let all = bytes.len();
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => break,
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    all - bytes.len()
}

fn open_append(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().append(true).create(true).mode(0o640).open(path)
}

/// Time since the epoch in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn bytes_that_are_not_text_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::open(&path, 1 << 20).unwrap();
        log.push("stdout", b"hello \"you\"", false);
        log.push("stderr", &[0xff, 0x00], true);
        log.flush();
        let lines = lines(&path);
        assert_eq!(lines[0]["data"], "hello \"you\"");
        assert!(lines[0].get("partial").is_none());
        assert_eq!(lines[1]["data_base64"], "/wA=");
        assert_eq!(lines[1]["partial"], true);
    }

    #[test]
    fn a_full_log_is_rotated_and_one_old_one_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::open(&path, 300).unwrap();
        for number in 0..20 {
            log.push("stdout", format!("line {number}").as_bytes(), false);
            log.flush();
        }
        let old = directory.path().join("log.1");
        assert!(std::fs::metadata(&path).unwrap().len() <= 300);
        assert!(std::fs::metadata(&old).unwrap().len() <= 300);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        assert_eq!(lines(&path).last().unwrap()["data"], "line 19");
    }

    #[test]
    fn records_that_find_no_space_are_counted() {
        let mut log = Log::open(Path::new("/dev/full"), u64::MAX).unwrap();
        log.push("stdout", b"a", false);
        log.push("stdout", b"b", false);
        log.flush();
        assert_eq!(log.lost, 2);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        log.file = File::options().append(true).open("/dev/full").unwrap();
        log.push("stdout", b"c", false);
        log.flush();
        assert_eq!(log.lost, 3);
        log.file = open_append(&path).unwrap();
        log.push("stdout", b"d", false);
        log.flush();
        assert_eq!(lines(&path)[0]["lost"], 3);
        assert_eq!(log.lost, 0);
    }
}
