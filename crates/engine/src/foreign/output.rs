//! What a container writes, as its engine reads it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::container::OutputPipes;

/// How long its reader may take to read what a frozen container has written, and how often to look: nobody tells that.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
const SETTLE_LOOK: Duration = Duration::from_millis(1);

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

/// Whether a reader passes on there what it has read: a shim of containerd's does so to Docker, by FIFOs with names.
fn is_passed_on(path: &Path, link: &Path) -> bool {
    pipe_number(link).is_none() && fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
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

/// Returns when its reader has read all that a frozen container has written, or does not in time.
pub(super) async fn is_read(reader: u32, pipes: OutputPipes) -> io::Result<()> {
    let begin = Instant::now();
    while unread(reader, pipes)? > 0 && begin.elapsed() < SETTLE_LIMIT {
        tokio::time::sleep(SETTLE_LOOK).await;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_a_reader_has_passed_on_waits_until_it_is_read_there() {
        let directory = tempfile::tempdir().unwrap();
        let script = "mkfifo fifo && exec 3<>fifo && echo 1234 >&3 && echo written && read line";
        let mut shim = Command::new("/bin/sh");
        shim.args(["-c", script]).current_dir(&directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shim = shim.spawn().unwrap();
        BufReader::new(shim.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        assert_eq!(unread(shim.id(), [0, 0]).unwrap(), 5);
        let fifo = OpenOptions::new().read(true).open(directory.path().join("fifo")).unwrap();
        BufReader::new(fifo).read_line(&mut String::new()).unwrap();
        assert_eq!(unread(shim.id(), [0, 0]).unwrap(), 0);
        drop(shim.stdin.take());
        shim.wait().unwrap();
    }
}
