//! The output of a program that may hang.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// An engine that yields nothing of an archive for so long hangs.
pub(crate) const SILENT: Duration = Duration::from_secs(300);

/// For so long it may prepare an archive before it yields anything of it: it copies the whole image.
pub(crate) const PREPARED: Duration = Duration::from_secs(1800);

/// Reads what comes within a time.
#[derive(Debug)]
pub(crate) struct Timely<R> {
    from: R,
    limit: Duration,
    /// Once it has yielded something.
    later: Duration,
}

impl<R: Read + AsFd> Timely<R> {
    /// The first of it has to come within one time, and each next piece within another.
    pub(crate) fn new(from: R, (first, later): (Duration, Duration)) -> Self {
        Self { from, limit: first, later }
    }
}

impl<R: Read + AsFd> Read for Timely<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = Timespec::try_from(self.limit).map_err(io::Error::other)?;
        // One signal more begins the time anew.
        match rustix::io::retry_on_intr(|| {
            poll(&mut [PollFd::from_borrowed_fd(self.from.as_fd(), PollFlags::IN)], Some(&limit))
        })? {
            0 => {
                let silent = format!("it has written nothing for {} s", self.limit.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, silent))
            }
            _ => {
                self.limit = self.later;
                self.from.read(buffer)
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_comes_in_time_is_read_and_what_does_not_is_an_error() {
        let (from, mut to) = std::io::pipe().unwrap();
        let mut timely = Timely::new(from, (Duration::from_secs(600), Duration::from_millis(10)));
        to.write_all(b"part").unwrap();
        let mut buffer = [0; 9];
        assert_eq!(timely.read(&mut buffer).unwrap(), 4);
        assert_eq!(timely.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(to);
        assert_eq!(timely.read(&mut buffer).unwrap(), 0);
    }
}
