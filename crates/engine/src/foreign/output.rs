//! What a container writes, as its engine reads it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::container::OutputPipes;

/// How long its engine may take to write down what a frozen container has written, and how often to look: nobody tells that.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
const SETTLE_LOOK: Duration = Duration::from_millis(1);

/// A log that stays the same for so many looks has all: dockerd may still hold what it has read from the FIFOs. CRIU dumps
/// meanwhile.
const SETTLED_LOOKS: u32 = 20;

/// The pipes that a container was started with as standard output and standard error: those that its engine's process reads, conmon or a
/// shim of containerd's. The main
/// process may have others there by now.
pub(super) fn pipes(pid: u32, reader: u32) -> io::Result<OutputPipes> {
    let (mut read, mut written) = (Vec::new(), Vec::new());
    for (path, link) in descriptors(reader)? {
        let Some(number) = pipe_number(&link) else { continue };
        let descriptor: u32 =
            path.file_name().and_then(|name| name.to_str()?.parse().ok()).unwrap_or(u32::MAX);
        let flags = fs::read_to_string(format!("/proc/{reader}/fdinfo/{descriptor}")).unwrap_or_default();
        match is_read_only(&flags) {
            true => read.push((descriptor, number)),
            false => written.push(number),
        }
    }
    // A pipe of which it has both ends is its own.
    read.retain(|(_, number)| !written.contains(number));
    read.sort_unstable();
    let own = |number: u32| {
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
        pipe_number(&link).filter(|own| read.iter().any(|(_, pipe)| pipe == own))
    };
    match (own(1), own(2), read.as_slice()) {
        (Some(stdout), Some(stderr), _) => Ok([stdout, stderr]),
        // conmon makes that of the standard output first.
        (_, _, [(_, stdout), (_, stderr)]) => Ok([*stdout, *stderr]),
        _ => Err(io::Error::other(format!("reader (process {reader}) reads {} pipes, not two", read.len()))),
    }
}

/// Whether what `/proc/PID/fdinfo/N` says is of a descriptor that is only read.
fn is_read_only(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 == 0)
}

fn pipe_number(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

/// The descriptors of a process, and what they are.
fn descriptors(pid: u32) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    entries
        .map(|entry| {
            let path = entry?.path();
            match fs::read_link(&path) {
                Ok(link) => Ok(Some((path, link))),
                // It was closed.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
        .filter_map(Result::transpose)
        .collect()
}

/// Whether a reader passes on there what it has read: a shim of containerd's does so to Docker, by FIFOs with such names. It
/// and conmon have other FIFOs, too.
fn is_passed_on(path: &Path, link: &Path) -> bool {
    let name = link.to_string_lossy();
    (name.ends_with("/init-stdout") || name.ends_with("/init-stderr"))
        && fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

/// Bytes that wait in pipes for their reader, or behind it.
fn unread(reader: u32, pipes: OutputPipes) -> io::Result<u64> {
    let mut bytes = 0;
    for (path, link) in descriptors(reader)? {
        let is_read_there = pipe_number(&link).is_some_and(|number| pipes.contains(&number));
        if is_read_there || is_passed_on(&path, &link) {
            let pipe = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened?,
            };
            let mut waiting: libc::c_int = 0;
            // SAFETY: writes one int, which outlives the call.
            if unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut waiting) } == -1 {
                return Err(io::Error::last_os_error());
            }
            bytes += u64::try_from(waiting).unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// Returns when all that a frozen container has written is in this log, or is not in time.
pub(super) async fn is_logged(reader: u32, pipes: OutputPipes, log: &Path) -> io::Result<()> {
    let begin = Instant::now();
    let (mut before, mut same) = (None, 0);
    while same < SETTLED_LOOKS && begin.elapsed() < SETTLE_LIMIT {
        tokio::time::sleep(SETTLE_LOOK).await;
        let now = match unread(reader, pipes)? {
            0 => written(log)?,
            _ => None,
        };
        same = if now.is_some() && now == before { same + 1 } else { 0 };
        before = now;
    }
    Ok(())
}

/// Which file the log is, and its length, bytes. Nothing while it is rotated.
fn written(log: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::metadata(log) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(|found| Some((found.ino(), found.len()))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process in this directory, once it has written into these FIFOs of its own.
    struct Shim(Child);

    impl Shim {
        fn with(fifos: [&str; 2], directory: &Path) -> Self {
            let [one, other] = fifos;
            let script = format!(
                "mkfifo {one} {other} && exec 3<>{one} 4<>{other} && echo 1234 >&3 && echo 12 >&4 && echo written && read line"
            );
            let mut shim = Command::new("/bin/sh");
            shim.args(["-c", &script]).current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut shim = shim.spawn().unwrap();
            BufReader::new(shim.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
            Self(shim)
        }
    }

    impl Drop for Shim {
        fn drop(&mut self) {
            drop(self.0.stdin.take());
            self.0.wait().unwrap();
        }
    }

    fn read_line(fifo: &Path) {
        BufReader::new(File::open(fifo).unwrap()).read_line(&mut String::new()).unwrap();
    }

    #[test]
    fn what_a_reader_has_passed_on_waits_until_it_is_read_there() {
        let directory = tempfile::tempdir().unwrap();
        let shim = Shim::with(["init-stdout", "init-stderr"], directory.path());
        assert_eq!(unread(shim.0.id(), [0, 0]).unwrap(), 8);
        read_line(&directory.path().join("init-stdout"));
        assert_eq!(unread(shim.0.id(), [0, 0]).unwrap(), 3);
    }

    #[test]
    fn what_waits_in_other_fifos_of_a_reader_is_not_the_containers() {
        let directory = tempfile::tempdir().unwrap();
        let shim = Shim::with(["log", "ctl"], directory.path());
        assert_eq!(unread(shim.0.id(), [0, 0]).unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_is_waited_for_until_it_is_in_the_log() {
        let directory = tempfile::tempdir().unwrap();
        let shim = Shim::with(["init-stdout", "init-stderr"], directory.path());
        let [log, rotated] = ["log", "log.1"].map(|name| directory.path().join(name));
        fs::write(&log, "one\n").unwrap();
        let logged = is_logged(shim.0.id(), [0, 0], &log);
        tokio::pin!(logged);
        let few = SETTLED_LOOKS / 2;
        let steps: [&dyn Fn(); 5] = [
            &|| {},
            &|| read_line(&directory.path().join("init-stdout")),
            &|| read_line(&directory.path().join("init-stderr")),
            &|| fs::write(&log, "one\ntwo\n").unwrap(),
            &|| fs::rename(&log, &rotated).unwrap(),
        ];
        for step in steps {
            step();
            assert!(tokio::time::timeout(SETTLE_LOOK * few, &mut logged).await.is_err(), "it is not settled");
        }
        fs::write(&log, "").unwrap();
        logged.await.unwrap();
    }
}
