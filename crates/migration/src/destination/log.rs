//! Takes over a service's log: its older file, and the one that is written. Each piece is in its file before the next one is
//! taken; other tasks of the thread run meanwhile.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use godwit_database::blocking::off_worker;

use super::DestinationError;
use crate::message::Message;
use crate::resources::LocalError;

/// Most bytes of log that are taken over, for each of its two files: the shim rotates far below.
const MAX_LOG_BYTES: u64 = 64 << 20;

/// The log's files here, the older one first, and how much of each has come.
pub(super) struct LogWriter {
    paths: [PathBuf; 2],
    written: [u64; 2],
}

impl LogWriter {
    pub(super) fn new(paths: [PathBuf; 2]) -> Self {
        Self { paths, written: [0; 2] }
    }

    /// Takes a piece of the log, or the message that it was rotated.
    pub(super) fn take(&mut self, piece: &Message) -> Result<(), DestinationError> {
        off_worker(|| match piece {
            Message::OldLogData(data) => self.write(0, data),
            Message::LogData(data) => self.write(1, data),
            Message::LogRotated => self.rotate(),
            _ => Err(DestinationError::Protocol("something other than a log")),
        })
    }

    fn write(&mut self, which: usize, data: &[u8]) -> Result<(), DestinationError> {
        let (path, written) = (&self.paths[which], &mut self.written[which]);
        *written += data.len() as u64;
        if *written > MAX_LOG_BYTES {
            return Err(DestinationError::Protocol("a log that is too long"));
        }
        let mut options = OpenOptions::new();
        let opened = options.create(true).append(true).mode(0o600).open(path);
        opened
            .and_then(|mut file| file.write_all(data))
            .map_err(|source| LocalError::Io { action: "write", path: path.clone(), source }.into())
    }

    /// What came of the log is its older file from now on, even where nothing came.
    fn rotate(&mut self) -> Result<(), DestinationError> {
        let [older, log] = &self.paths;
        let gone = |result: std::io::Result<()>| match result {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            other => other.map(|()| true),
        };
        let rotated = match gone(std::fs::rename(log, older)) {
            Ok(false) => gone(std::fs::remove_file(older)),
            renamed => renamed,
        };
        self.written = [self.written[1], 0];
        rotated
            .map(drop)
            .map_err(|source| LocalError::Io { action: "rotate", path: log.clone(), source }.into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_log_that_is_rotated_on_its_way_here_has_its_older_file() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["log.1", "log"].map(|name| directory.path().join(name));
        let mut writer = LogWriter::new(paths.clone());
        let is = |older: Option<&str>, log: Option<&str>| {
            let read = |path: &PathBuf| std::fs::read_to_string(path).ok();
            assert_eq!(paths.each_ref().map(read), [older, log].map(|text| text.map(str::to_owned)));
        };
        let old = |text: &'static str| Message::OldLogData(Bytes::from(text));
        let new = |text: &'static str| Message::LogData(Bytes::from(text));
        for piece in [old("a"), new("b"), new("c")] {
            writer.take(&piece).unwrap();
        }
        is(Some("a"), Some("bc"));
        writer.take(&Message::LogRotated).unwrap();
        is(Some("bc"), None);
        writer.take(&new("d")).unwrap();
        is(Some("bc"), Some("d"));
        // Twice: all is to come anew.
        writer.take(&Message::LogRotated).unwrap();
        writer.take(&Message::LogRotated).unwrap();
        is(None, None);
    }

    /// A pipe without a reader stands for a slow disk.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_while_a_piece_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["log.1", "log"].map(|name| directory.path().join(name));
        nix::unistd::mkfifo(&paths[1], nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (go, gone) = std::sync::mpsc::channel();
        let slow = paths[1].clone();
        let reader = std::thread::spawn(move || {
            // It is reached only when something is broken.
            let others_ran = gone.recv_timeout(Duration::from_secs(20)).is_ok();
            (others_ran, std::fs::read_to_string(slow).unwrap())
        });
        let (begun, began) = tokio::sync::oneshot::channel();
        let writing = tokio::spawn(async move {
            begun.send(()).unwrap();
            LogWriter::new(paths).take(&Message::LogData(Bytes::from("x"))).unwrap();
        });
        began.await.unwrap();
        // The only worker is the writing task's.
        tokio::spawn(async move { go.send(()) });
        writing.await.unwrap();
        assert_eq!(reader.join().unwrap(), (true, "x".to_owned()));
    }

    #[test]
    fn a_log_without_end_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = LogWriter::new(["log.1", "log"].map(|name| directory.path().join(name)));
        writer.written = [0, MAX_LOG_BYTES];
        assert!(writer.take(&Message::LogData(Bytes::from("x"))).is_err());
    }
}
