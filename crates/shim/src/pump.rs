//! One output stream of the container: from its pipe, cut into lines, into the log.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{pipe2, read};

use crate::log::Log;

/// Wished size of the pipe in bytes: what the container can write while the shim waits for a slow
/// disk. 1 MiB is what the kernel allows by default (`/proc/sys/fs/pipe-max-size`).
const PIPE_BYTES: i32 = 1 << 20;

/// Longest record in bytes; longer lines are cut into partial ones. Docker and containerd cut at
/// the same length.
const RECORD_BYTES: usize = 16 << 10;

/// Most bytes taken from one stream before the other is looked at.
const TURN_BYTES: usize = 256 << 10;

/// The reading side of one stream.
#[derive(Debug)]
pub(crate) struct Stream {
    name: &'static str,
    /// None after the end of the stream.
    pipe: Option<OwnedFd>,
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
}

impl Stream {
    /// A new stream and the end of its pipe for the container.
    pub(crate) fn new(name: &'static str) -> io::Result<(Self, OwnedFd)> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        // The container's end stays blocking: it is another open file description.
        fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        // A smaller pipe works as well.
        let _ = fcntl(&reader, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        Ok((Self { name, pipe: Some(reader), line: Vec::new() }, writer))
    }

    /// The pipe to poll; none after its end.
    pub(crate) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Whether the beginning of a line waits for its end.
    pub(crate) fn has_partial_line(&self) -> bool {
        !self.line.is_empty()
    }

    /// Copies what the pipe holds into the log. Returns the bytes copied.
    pub(crate) fn pump(&mut self, log: &mut Log) -> usize {
        let mut buffer = [0; RECORD_BYTES];
        let mut copied = 0;
        while copied < TURN_BYTES {
            let Some(pipe) = &self.pipe else { break };
            match read(pipe, &mut buffer) {
                Ok(0) => {
                    self.flush(log);
                    self.pipe = None;
                }
                Ok(length) => {
                    copied += length;
                    self.take(buffer.get(..length).unwrap_or_default(), log);
                }
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break,
                Err(_) => self.pipe = None,
            }
        }
        log.flush();
        copied
    }

    /// Copies all that the pipe holds, of a container that does not write any more; of one that does, as
    /// much as a pipe can hold.
    pub(crate) fn pump_dry(&mut self, log: &mut Log) {
        let mut left = usize::try_from(PIPE_BYTES).unwrap_or_default() + TURN_BYTES;
        while left > 0 {
            match self.pump(log) {
                0 => break,
                copied => left = left.saturating_sub(copied),
            }
        }
    }

    /// Writes the beginning of a line that waits, as a partial record.
    pub(crate) fn flush(&mut self, log: &mut Log) {
        if !self.line.is_empty() {
            log.push(self.name, &self.line, true);
            log.flush();
            self.line.clear();
        }
    }

    fn take(&mut self, bytes: &[u8], log: &mut Log) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ends) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            self.line.extend_from_slice(text);
            while self.line.len() > RECORD_BYTES {
                let cut = character_boundary(&self.line, RECORD_BYTES);
                let rest = self.line.split_off(cut);
                log.push(self.name, &self.line, true);
                self.line = rest;
            }
            if ends {
                log.push(self.name, &self.line, false);
                self.line.clear();
            }
        }
    }
}

/// The last place at or before `limit` that is not inside a UTF-8 character.
fn character_boundary(bytes: &[u8], limit: usize) -> usize {
    let is_continuation = |index: usize| bytes.get(index).is_some_and(|byte| byte & 0xc0 == 0x80);
    (limit.saturating_sub(3)..=limit).rev().find(|&index| !is_continuation(index)).unwrap_or(limit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use nix::unistd::write;

    use super::*;

    fn log_of(writes: &[&[u8]]) -> Vec<(String, bool)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = Log::open(&path, u64::MAX).unwrap();
        let (mut stream, writer) = Stream::new("stdout").unwrap();
        for bytes in writes {
            write(&writer, bytes).unwrap();
            stream.pump(&mut log);
        }
        drop(writer);
        stream.pump(&mut log);
        assert!(stream.pipe().is_none());
        let text = std::fs::read_to_string(&path).unwrap();
        let record = |line| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            (value["data"].as_str().unwrap().to_owned(), value["partial"] == true)
        };
        text.lines().map(record).collect()
    }

    #[test]
    fn lines_are_joined_over_reads() {
        assert_eq!(
            log_of(&[b"one\ntw", b"o\n\nthree"]),
            [("one".into(), false), ("two".into(), false), (String::new(), false), ("three".into(), true)]
        );
    }

    #[test]
    fn a_long_line_is_cut_between_characters() {
        let long = format!("x{}\n", "é".repeat(RECORD_BYTES));
        let records = log_of(&[long.as_bytes()]);
        assert_eq!(records.len(), 3);
        assert_eq!(records.iter().map(|(_, partial)| *partial).collect::<Vec<_>>(), [true, true, false]);
        let joined: String = records.into_iter().map(|(text, _)| text).collect();
        assert_eq!(joined, long.trim_end());
    }
}
