//! CRIU's logs: the first error, and what it means to a user.
//!
//! A line is `(00.012345) Error (criu/sk-unix.c:859): unix: External socket is used…`; the first
//! error is the cause, the later ones are its echo.

use std::path::Path;

/// Most of a log that is looked at, in bytes: CRIU's most talkative logs of large trees stay below.
const READ_LIMIT: u64 = 8 << 20;

/// What marks an error line.
const ERROR_MARK: &str = "Error (";

/// Error lines that stand in logs of dumps and restores that work: no reason for anything.
///
/// Without CAP_SYS_RESOURCE CRIU may not raise its own limit of open files, and goes on.
const HARMLESS: &[&str] = &["rlimit: Can't setup RLIMIT_NOFILE for self"];

const OUTSIDE_SOCKET: &str = "a unix socket is connected to a process outside the container; \
                              do not mount sockets of the node into it";
const OUTSIDE_TERMINAL: &str =
    "the container uses a terminal whose other end is outside; start it without one";
const IO_URING: &str = "the service uses io_uring, which CRIU cannot dump; \
                        switch it off in the service's configuration";
const UNSUPPORTED_SOCKET: &str = "the service uses a kind of socket that CRIU cannot dump";

const TRACED: &str = "a process of the service is traced, by a debugger or by strace; end that first";
const WAITING_CONNECTION: &str = "a unix socket connection waits for the service to accept it, with data or \
                                  closed again, and CRIU cannot dump those; try again when it has";
const LOOPBACK: &str = "a connection inside the container carried data while it was dumped; try again when \
                        there is less traffic on it";
const DEVICE: &str = "the service has a device open that CRIU cannot dump; it can move when it has closed it";
const NESTED: &str =
    "a process of the service has namespaces of its own; switch the program's own sandbox off";
const MESSAGE_QUEUE: &str = "the service has a POSIX message queue, which CRIU cannot dump; it can move when it has closed and removed it";
const RESERVATION: &str = "a process has reserved more memory than this node has; build CRIU with scripts/setup-criu --build-series, whose patch `reservations` restores that, or configure the service to reserve less";

/// Parts of CRIU's messages, and what they mean. The first that occurs in an error line counts.
const HINTS: &[(&str, &str)] = &[
    ("External socket is used", OUTSIDE_SOCKET),
    ("Dangling connection", OUTSIDE_SOCKET),
    ("unix: Unix socket ", OUTSIDE_SOCKET),
    ("Can't dump half of stream unix connection", OUTSIDE_SOCKET),
    ("Found dangling tty", OUTSIDE_TERMINAL),
    ("Unable to dump external tty", OUTSIDE_TERMINAL),
    ("Found slave peer index", OUTSIDE_TERMINAL),
    ("anon_inode:[io_uring]", IO_URING),
    // Linux refuses to hand an io_uring to CRIU at all.
    ("send_fds failed (-22)", IO_URING),
    (
        "Can't dump that handle",
        "the service watches files with inotify or fanotify, and CRIU cannot find them on overlayfs; \
         switch the watching off in the service's configuration, where it polls instead",
    ),
    ("Non-empty write queue on an in-flight socket", WAITING_CONNECTION),
    ("Found a closed in-flight socket", WAITING_CONNECTION),
    (
        "Can't find a session leader",
        "a process of the service lives on in a session whose leader has ended, and CRIU cannot make such a \
         session; end that process, or start it with setsid(1)",
    ),
    (
        "Zombies with threads are not supported",
        "the main thread of a process has ended while others continue, and CRIU cannot dump that; the program \
         has to keep its main thread",
    ),
    (
        "'s mountinfo",
        "the first process of the service has another root directory than its container, by chroot(2), and CRIU cannot dump that; switch that off in the program, or start it as a child",
    ),
    ("found while seizing", TRACED),
    (
        "with a pending SIGTRAP",
        "a process of the service has a SIGTRAP waiting for it; try again when it has taken it",
    ),
    (
        "Can't dump corked dgram socket",
        "a UDP or unix datagram socket holds back data (UDP_CORK, MSG_MORE); try again when it is sent",
    ),
    ("Can't restore not-sent send queue data", LOOPBACK),
    ("recv failed (", LOOPBACK),
    ("Unable to map ANON_VMA: Cannot allocate memory", RESERVATION),
    ("page-pipe: create_page_pipe: Can't allocate", RESERVATION),
    (
        "Can't create memfd in victim: Too many open files",
        "a process has reached its limit of open files, and CRIU must open some in it; raise the limit (RLIMIT_NOFILE), or give godwitd CAP_SYS_RESOURCE, so that it raises the limit for the dump",
    ),
    ("mqueue isn't empty", MESSAGE_QUEUE),
    ("path=/mq-", MESSAGE_QUEUE),
    ("anon_inode:bpf", "the service holds a BPF object, which CRIU cannot dump"),
    ("anon_inode:[bpf", "the service holds a BPF object, which CRIU cannot dump"),
    ("anon_inode:[perf_event]", "the service uses perf events, which CRIU cannot dump"),
    ("anon_inode:[userfaultfd]", "the service uses userfaultfd, which CRIU cannot dump"),
    ("Unknown anon inode", "the service uses a kernel object that CRIU cannot dump"),
    ("(chr ", DEVICE),
    ("Can't dump file", "the service has a file open whose kind CRIU cannot dump"),
    (
        "PIDFD_THREAD",
        "the service has a pidfd of a thread, which CRIU cannot dump; it can move when it has closed it",
    ),
    ("Can't dump nested", NESTED),
    ("SCTP", "the service uses SCTP, which CRIU cannot dump"),
    (
        "In-flight connection (l)",
        "connections wait for the service to accept them, and CRIU cannot dump those; try again when it has",
    ),
    ("Unsupported proto", UNSUPPORTED_SOCKET),
    ("Unsupported socket", UNSUPPORTED_SOCKET),
    ("Unknown socket collected", UNSUPPORTED_SOCKET),
    ("sockets: Can't dump", UNSUPPORTED_SOCKET),
    (
        "Unaccessible path opened",
        "the name of an open file now belongs to another file; let the service close it, or open it by its new name",
    ),
    ("ghost file", "a deleted file that is still open is larger than the limit for such files"),
    (
        "Can't create link remap",
        "the name of an open file was deleted, and its other name does not move with the service: it is in a directory of the node, or the file is only mapped; let the service open it by the other name, or delete that too",
    ),
    (
        "doesn't have a proper root mount",
        "a mount inside the container comes from elsewhere on the node; declare it as a mount of the service",
    ),
    ("unreachable sharing", "a mount inside the container shares its events with a mount of the node"),
    ("Unable to interrupt task", "a process could not be stopped for the dump; is it traced by a debugger?"),
    (
        "is not in a task's session",
        "a process was started in the container from outside; wait until such commands have ended",
    ),
    (
        "A session leader of",
        "a process was started in the container from outside; wait until such commands have ended",
    ),
    ("No space left on device", "the tmpfs for the images is full"),
];

/// The first error line of a log, without its time and source position.
pub fn first_error(log: &str) -> Option<String> {
    error_lines(log).next().map(str::to_owned)
}

/// The same with what it means and what to do, where that is known: for a sentence of its own.
pub fn first_error_explained(log: &str) -> Option<String> {
    let error = first_error(log)?;
    Some(match hint(log) {
        Some(hint) => format!("{error} ({hint})"),
        None => error,
    })
}

/// What the first known error of a log means and what to do about it, as a part of a sentence.
pub fn hint(log: &str) -> Option<&'static str> {
    error_lines(log)
        .find_map(|line| HINTS.iter().find(|(part, _)| line.contains(part)).map(|(_, meaning)| *meaning))
}

/// The log as text; empty when it cannot be read.
pub fn read_lossy(path: &Path) -> String {
    use std::io::Read;
    let mut bytes = Vec::new();
    // A log that is missing says as much as an empty one: the caller has CRIU's answer as well.
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(READ_LIMIT).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn error_lines(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter_map(|line| {
        let (_, rest) = line.split_once(ERROR_MARK)?;
        let text = rest.split_once("): ").map_or(rest, |(_, text)| text).trim();
        let counts = !text.is_empty() && !HARMLESS.iter().any(|harmless| text.starts_with(harmless));
        counts.then_some(text)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LOG: &str = "\
(00.001) Warn  (criu/kerndat.c:1): something\n\
(00.017) Error (criu/sk-unix.c:859): unix: External socket is used. Consider using --ext-unix-sk option.\n\
(00.018) Error (criu/cr-dump.c:2098): Dumping FAILED.\n";

    #[test]
    fn the_first_error_is_given_without_its_place() {
        assert_eq!(
            first_error(LOG).unwrap(),
            "unix: External socket is used. Consider using --ext-unix-sk option."
        );
        assert_eq!(first_error("(00.1) Warn (a.c:1): no\n"), None);
    }

    #[test]
    fn what_goes_wrong_in_every_log_is_no_reason() {
        let log =
            format!("(00.0) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: No\n{LOG}");
        assert_eq!(first_error(&log), first_error(LOG));
    }

    #[test]
    fn a_known_error_comes_with_a_hint() {
        assert!(hint(LOG).unwrap().contains("outside the container"));
        assert_eq!(hint("(00.018) Error (criu/cr-dump.c:2098): Dumping FAILED.\n"), None);
    }

    /// Each message as CRIU 4.2 writes it, and a word of its remedy.
    #[test]
    fn what_services_have_met_is_explained() {
        for (message, remedy) in [
            ("unix: Unix socket 12 not found", "outside the container"),
            ("fsnotify: \tCan't dump that handle", "inotify"),
            ("Non-empty write queue on an in-flight socket 0x12", "try again"),
            ("unix: Found a closed in-flight socket to 0x12", "try again"),
            ("Can't find a session leader for 15", "setsid"),
            ("Zombies with threads are not supported", "main thread"),
            ("zombie 16296 (comm ) found while seizing", "traced"),
            ("Can't dump the 12 thread with a pending SIGTRAP.", "SIGTRAP"),
            ("Can't dump file 5 of that type [20600] (chr 10:229)", "device"),
            ("Can't dump file 5 of that type [600] (anon anon_inode:bpf-prog)", "BPF"),
            ("pidfd: PIDFD_THREAD flag is currently not supported", "closed it"),
            ("Can't dump nested ipc namespace for 470007", "sandbox"),
            ("inet: Can't dump corked dgram socket 12", "try again"),
            (
                "Can't restore not-sent send queue data (-1), want (0-1012:4147904:1012): Broken pipe",
                "connection",
            ),
            ("recv failed (6227751, want 6239015): Invalid argument", "connection"),
            ("Unable to map ANON_VMA: Cannot allocate memory", "reserve less"),
            ("Can't create memfd in victim: Too many open files", "RLIMIT_NOFILE"),
            ("Can't lookup mount=183 for fd=3 path=/mq-27-0", "message queue"),
            ("mqueue isn't empty", "message queue"),
            ("Unknown shit 600 (anon_inode:[io_uring])", "io_uring"),
            ("Can't create link remap for /b. Use link-remap option.", "other name"),
        ] {
            let log = format!("(00.01) Error (criu/some.c:1): {message}\n");
            let hint = hint(&log).unwrap_or_else(|| panic!("{message}"));
            assert!(hint.contains(remedy), "{message}: {hint}");
        }
    }

    #[test]
    fn a_missing_log_is_an_empty_one() {
        assert_eq!(read_lossy(Path::new("/nonexistent/dump.log")), "");
    }
}
