//! CRIU's logs: the first error, and what it means to a user.
//!
//! A line is `(00.012345) Error (criu/sk-unix.c:859): unix: External socket is used…`; mostly the first
//! error is the cause, and the later ones are its echo.

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
const NAMELESS_TERMINAL: &str = "a process has its session's terminal open as /dev/tty, and not by its own name, and \
                                 CRIU cannot dump that; end it, or let it keep the terminal itself open";
const IO_URING: &str = "the service uses io_uring, which CRIU cannot dump; \
                        switch it off in the service's configuration";
const UNSUPPORTED_SOCKET: &str = "the service uses a kind of socket that CRIU cannot dump; it can move when it has \
                                  closed it (multipath TCP of programs in Go: GODEBUG=multipathtcp=0)";

const TRACED: &str = "a process of the service is traced, by a debugger or by strace; end that first";
const STUCK: &str = "a process waits in the kernel, for a disk or a network filesystem, and cannot be stopped; try \
                     again when it has gone on";
const WAITING_CONNECTION: &str = "a unix socket connection waits for the service to accept it, with data or \
                                  closed again, and CRIU cannot dump those; try again when it has";
const LOOPBACK: &str = "a connection inside the container carried data while it was dumped; try again when \
                        there is less traffic on it";
const DEVICE: &str = "the service has a device open that CRIU cannot dump; it can move when it has closed it";
const NAME_ONLY: &str = "the service has a FIFO or the file of a socket open with O_PATH, which CRIU cannot dump; it can \
                         move when it has closed it";
const SECRET: &str = "the service has secret memory (memfd_secret(2)), which CRIU cannot dump; it can move when it has \
                      closed and unmapped it";
const NESTED: &str =
    "a process of the service has namespaces of its own; switch the program's own sandbox off";
const MESSAGE_QUEUE: &str = "the service has a POSIX message queue, which CRIU cannot dump; it can move when it has closed and removed it";
const RESERVATION: &str = "a process has reserved more memory than this node has; build CRIU with scripts/setup-criu --build-series, whose patch `reservations` restores that, or configure the service to reserve less";
const EPOLL: &str = "an epoll watches a file that its process has closed while another process has it open, and CRIU \
                     cannot dump that; the program has to remove it (EPOLL_CTL_DEL) before close(2)";
const VDSO: &str = "a process has unmapped the kernel's vDSO, as valgrind and rr do, and CRIU cannot restore \
                    that; start it without that tool";
const ADDRESS: &str = "a socket uses an address or a port that the destination does not have free; let the service use \
                       its own address";
const TAKEN: &str = "the number of a process or thread of the service is taken at the destination; try again";
const LABEL: &str =
    "the destination lacks the AppArmor profile or the SELinux label of the service; load it there";
const PROCESSOR: &str = "the destination's processor lacks a feature that the service may use; see Processor features in \
                         docs/limits.md";
const OTHER_NAME: &str = "the name of an open file was deleted, and its other name does not move with the service: it is in a directory of the node, or the file is only mapped; let the service open it by the other name, or delete that too";
const NOT_THE_SAME: &str = "a file that the service has open is not what it was when the service was dumped: where it is on storage that \
                            both nodes have, mount the same one on both, writable, and let nobody else change the file during a move";
const COMMAND: &str =
    "a process was started in the container from outside; wait until such commands have ended";

/// What a part of one of CRIU's messages means.
struct Hint {
    /// The part: text of CRIU's own, without anything that it puts in.
    message: &'static str,
    /// What must stand in the line besides, of what CRIU has put in.
    of: &'static str,
    meaning: &'static str,
}

const fn hint_for(message: &'static str, meaning: &'static str) -> Hint {
    Hint { message, of: "", meaning }
}

const fn hint_of(message: &'static str, of: &'static str, meaning: &'static str) -> Hint {
    Hint { message, of, meaning }
}

/// The first that occurs in an error line counts. Each message is one of CRIU's, as a test shows.
const HINTS: &[Hint] = &[
    hint_for("External socket is used", OUTSIDE_SOCKET),
    hint_for("Dangling connection", OUTSIDE_SOCKET),
    hint_for("unix: Unix socket ", OUTSIDE_SOCKET),
    hint_for("Can't dump half of stream unix connection", OUTSIDE_SOCKET),
    hint_for("Found dangling tty", OUTSIDE_TERMINAL),
    hint_for("Only one slave external peer", OUTSIDE_TERMINAL),
    hint_for("Unable to find a master for", OUTSIDE_TERMINAL),
    hint_for("ctty inheritance detected", NAMELESS_TERMINAL),
    hint_of("Can't dump file", "anon_inode:[io_uring]", IO_URING),
    hint_of("Unknown shit", "anon_inode:[io_uring]", IO_URING),
    // Linux refuses to hand an io_uring to CRIU at all.
    hint_of("send_fds failed (", "(-22)", IO_URING),
    hint_for(
        "Can't dump that handle",
        "the service watches files with inotify or fanotify, and CRIU cannot find them on overlayfs; \
         switch the watching off in the service's configuration, where it polls instead",
    ),
    hint_for("Non-empty write queue on an in-flight socket", WAITING_CONNECTION),
    hint_for("Found a closed in-flight socket", WAITING_CONNECTION),
    hint_for(
        "Can't find a session leader",
        "a process of the service lives on in a session whose leader has ended, and CRIU cannot make such a \
         session; end that process, or start it with setsid(1)",
    ),
    hint_for(
        "Zombies with threads are not supported",
        "the main thread of a process has ended while others continue, and CRIU cannot dump that; the program \
         has to keep its main thread",
    ),
    hint_for(
        "'s mountinfo",
        "the first process of the service has another root directory than its container, by chroot(2), and CRIU cannot dump that; switch that off in the program, or start it as a child",
    ),
    hint_for(" has bad size ", NOT_THE_SAME),
    hint_for(" has bad mode ", NOT_THE_SAME),
    hint_of("Can't open file ", "on restore: No such file", NOT_THE_SAME),
    hint_for(
        "has confined itself by Landlock",
        "a thread of the service has confined itself by Landlock, and would be free after a move; switch the \
         program's own sandbox off",
    ),
    hint_for("found while seizing", TRACED),
    hint_for("Timeout reached. Try to interrupt", STUCK),
    hint_for("Unseizable non-zombie", STUCK),
    hint_for("Unable to freeze cgroup", STUCK),
    hint_for(
        "suspending seccomp failed",
        "godwitd runs under a seccomp filter, or this kernel cannot suspend filters; start godwitd without one",
    ),
    hint_for(
        "with a pending SIGTRAP",
        "a process of the service has a SIGTRAP waiting for it; try again when it has taken it",
    ),
    hint_for(
        "Can't dump corked dgram socket",
        "a UDP or unix datagram socket holds back data (UDP_CORK, MSG_MORE); try again when it is sent",
    ),
    hint_of(" queue data (", "not-sent", LOOPBACK),
    hint_for("recv failed (", LOOPBACK),
    hint_of("Unable to map ANON_VMA: ", "Cannot allocate memory", RESERVATION),
    // ENOMEM
    hint_of(" mapping with ", "fffffffffffffff4", RESERVATION),
    hint_of(": Can't allocate ", "page-pipe: create_page_pipe", RESERVATION),
    hint_of(
        "Can't create memfd in victim: ",
        "Too many open files",
        "a process has reached its limit of open files, and CRIU must open some in it; raise the limit (RLIMIT_NOFILE), or give godwitd CAP_SYS_RESOURCE, so that it raises the limit for the dump",
    ),
    hint_of(
        "remote mmap() failed",
        "Cannot allocate memory",
        "a process has reached its limit of address space, and CRIU must map some in it; raise the limit (RLIMIT_AS), or give godwitd CAP_SYS_RESOURCE, so that it raises the limit for the dump",
    ),
    hint_of(" isn't empty", "mqueue", MESSAGE_QUEUE),
    hint_of("Can't lookup mount=", "path=/mq-", MESSAGE_QUEUE),
    hint_of("Can't lookup mount=", "path=/secretmem", SECRET),
    hint_of("Unknown shit", "/secretmem", SECRET),
    hint_for(
        "Can't lookup mount=",
        "the service has a file open that is on none of its container's mounts (any more), or a POSIX message queue; it can move when it has closed it",
    ),
    hint_of("Can't dump file", "anon_inode:bpf", "the service holds a BPF object, which CRIU cannot dump"),
    hint_of("Can't dump file", "anon_inode:[bpf", "the service holds a BPF object, which CRIU cannot dump"),
    hint_of(
        "Can't dump file",
        "anon_inode:[perf_event]",
        "the service uses perf events, which CRIU cannot dump",
    ),
    hint_of(
        "Can't dump file",
        "anon_inode:[userfaultfd]",
        "the service uses userfaultfd, which CRIU cannot dump",
    ),
    hint_of("Can't dump file", "(anon ", "the service uses a kernel object that CRIU cannot dump"),
    hint_of("Can't dump file", "(chr ", DEVICE),
    hint_for("Can't dump file", "the service has a file open whose kind CRIU cannot dump"),
    hint_for(
        "Can't handle non-regular mapping",
        "the service has a device mapped that CRIU cannot dump; it can move when it has unmapped it",
    ),
    hint_for("Unknown shit", "the service has a kernel object mapped that CRIU cannot dump"),
    hint_for(
        "PIDFD_THREAD",
        "the service has a pidfd of a thread, which CRIU cannot dump; it can move when it has closed it",
    ),
    hint_for(
        "is not a part of process tree",
        "the service has a pidfd of a process outside, which CRIU cannot dump; it can move when it has closed it",
    ),
    hint_for("Can't obtain piped data size", NAME_ONLY),
    hint_of("sockets: Can't get ", " opt: Bad file descriptor", NAME_ONLY),
    hint_for(
        "The packetized mode for pipes is not supported",
        "the service has a pipe in packet mode (O_DIRECT) open, which CRIU cannot dump; it can move when it has closed it",
    ),
    hint_for(
        "netlink: The socket has data to read",
        "a netlink socket of the service has messages that it has not read, and CRIU cannot dump those; try again when it has",
    ),
    hint_for(
        "has more than 32 groups",
        "a netlink socket of the service listens to groups beyond the 32nd, and CRIU cannot dump that; the service can move when it has closed it",
    ),
    hint_for(
        "is bound to groups but not to portid",
        "a netlink socket of the service listens to groups and has no port, and CRIU cannot dump that; the program has to bind(2) it, or the service can move when it has closed it",
    ),
    hint_for("Can't dump nested", NESTED),
    hint_for(
        "In-flight connection (l)",
        "connections wait for the service to accept them, and CRIU cannot dump those; try again when it has",
    ),
    hint_for("Unsupported proto", UNSUPPORTED_SOCKET),
    hint_for("Unsupported socket", UNSUPPORTED_SOCKET),
    hint_for("Unknown socket collected", UNSUPPORTED_SOCKET),
    hint_for(
        "Unaccessible path opened",
        "the name of an open file now belongs to another file; let the service close it, or open it by its new name",
    ),
    hint_for(
        "Can't dump ghost file",
        "a deleted file that is still open is larger than the limit for such files",
    ),
    hint_for("Can't create link remap", OTHER_NAME),
    hint_for("Can't link remap to", OTHER_NAME),
    hint_for(
        "doesn't have a proper root mount",
        "a mount inside the container comes from elsewhere on the node; declare it as a mount of the service",
    ),
    hint_for(
        "unreachable sharing",
        "a mount inside the container shares its events with a mount of the node",
    ),
    hint_for("A session leader of", COMMAND),
    hint_for("Can't find vDSO area in image", VDSO),
    hint_for("Can't bind inet socket", ADDRESS),
    hint_for("Can't connect inet socket back", ADDRESS),
    hint_of("Can't fork for", "File exists", TAKEN),
    hint_for("Thread pid mismatch", TAKEN),
    hint_for("mismatched lsm types", LABEL),
    hint_for("can't write lsm profile", LABEL),
    hint_for("FPU feature required", PROCESSOR),
    hint_for("capabilities do not match run time", PROCESSOR),
    hint_for(
        "Unable to restore capabilities",
        "godwitd has fewer capabilities than the service; give it those in its unit",
    ),
    // Whatever CRIU was writing.
    hint_of("", "No space left on device", "the tmpfs for the images is full"),
];

/// Where nothing else is in the log.
const LAST_HINTS: &[Hint] = &[
    // CRIU says no more when it does not find a file that an epoll watches.
    hint_for("Dump eventpoll (pid: ", EPOLL),
];

impl Hint {
    fn is_for(&self, line: &str) -> bool {
        line.contains(self.message) && line.contains(self.of)
    }
}

/// The error line of a log that tells most, without its time and source position: the first of which is known what it
/// means, else the first that is no echo of another.
pub fn first_error(log: &str) -> Option<String> {
    Some(cause(log)?.0.to_owned())
}

/// The same with what it means and what to do, where that is known: for a sentence of its own.
pub fn first_error_explained(log: &str) -> Option<String> {
    Some(match cause(log)? {
        (error, Some(hint)) => format!("{error} ({hint})"),
        (error, None) => error.to_owned(),
    })
}

/// What that error of a log means and what to do about it, as a part of a sentence.
pub fn hint(log: &str) -> Option<&'static str> {
    cause(log)?.1
}

fn cause(log: &str) -> Option<(&str, Option<&'static str>)> {
    let explained = |line, hints: &[Hint]| {
        hints.iter().find(|hint| hint.is_for(line)).map(|hint| (line, Some(hint.meaning)))
    };
    error_lines(log)
        .find_map(|line| explained(line, HINTS))
        .or_else(|| error_lines(log).find(|line| !is_echo(line)).map(|line| (line, None)))
        .or_else(|| error_lines(log).find_map(|line| explained(line, LAST_HINTS)))
        .or_else(|| error_lines(log).next().map(|line| (line, None)))
}

/// Whether a line says only that something failed of which another has told.
fn is_echo(line: &str) -> bool {
    let is_of_step = ["Dump ", "Collect "].iter().any(|step| line.starts_with(step))
        && line.contains(" (pid: ")
        && line.contains(") failed with ");
    is_of_step || line.ends_with(" FAILED.")
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
            ("Can't handle non-regular mapping on 12's map 7f00", "device mapped"),
            ("inet: Unsupported proto 262 for socket 12", "GODEBUG"),
            ("pidfd: pidfd pid 12 is not a part of process tree..", "outside"),
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
            ("Can't lookup mount=20 for fd=3 path=/test_queue", "message queue"),
            ("Can't lookup mount=20 for fd=3 path=/secretmem (deleted)", "memfd_secret"),
            ("Unknown shit 100600 (/secretmem (deleted))", "memfd_secret"),
            ("remote mmap() failed: Cannot allocate memory", "RLIMIT_AS"),
            ("tty: ctty inheritance detected sid/pgrp 5, no PTY peer with sid needed", "/dev/tty"),
            ("Can't obtain piped data size", "O_PATH"),
            ("sockets: Can't get 1:39 opt: Bad file descriptor", "O_PATH"),
            ("The packetized mode for pipes is not supported yet", "O_DIRECT"),
            ("netlink: The socket has data to read", "try again"),
            ("netlink: The netlink socket 0x12 is bound to groups but not to portid", "bind(2)"),
            ("vdso: Can't find vDSO area in image", "valgrind"),
            ("Timeout reached. Try to interrupt: 1", "disk"),
            ("Unseizable non-zombie 12 found, state D, err -1/0", "disk"),
            ("Unable to freeze cgroup /x (5 x 100ms attempts, timeout: 10s)", "disk"),
            ("suspending seccomp failed: Operation not permitted", "godwitd"),
            ("Can't fork for 12: File exists", "number"),
            ("can't write lsm profile -2", "AppArmor"),
            ("cpu: CPU instruction capabilities do not match run time", "Processor features"),
            ("Can't bind inet socket back: Cannot assign requested address", "address"),
            ("Can't restore 7f0000000000 mapping with fffffffffffffff4", "reserve less"),
            ("Unable to restore capabilities: -1", "unit"),
            ("Can't write x: No space left on device", "full"),
            ("Dump eventpoll (pid: 12) failed with -1", "EPOLL_CTL_DEL"),
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

    #[test]
    fn the_error_that_tells_most_is_the_reason() {
        let log = |lines: &[&str]| -> String {
            lines.iter().map(|line| format!("(00.1) Error (criu/a.c:1): {line}\n")).collect()
        };
        let groups = "netlink: The netlink socket 0x12 has more than 32 groups";
        let all = log(&["netlink: 8 1", groups, "Dump files (pid: 1) failed with -1", "Dumping FAILED."]);
        assert_eq!(first_error(&all).unwrap(), groups);
        // An echo comes before what has no hint, too.
        let echo = "Dump eventpoll (pid: 1) failed with -1";
        assert_eq!(first_error(&log(&[echo, "something new"])).unwrap(), "something new");
        assert_eq!(hint(&log(&[echo, "something new"])), None);
        assert_eq!(first_error(&log(&[echo, "Dumping FAILED."])).unwrap(), echo);
        assert_eq!(first_error(&log(&["Dumping FAILED."])).unwrap(), "Dumping FAILED.");
    }

    /// The text between what is put into the error messages of a CRIU: they are in its program as they are in its source,
    /// and start as they do in a log.
    fn texts(program: &[u8]) -> Vec<String> {
        const START: &str = "Error (%s:%d): ";
        let formats = program.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
        let formats = formats.filter_map(|text| Some(text.split_once(START)?.1));
        let mut all = Vec::new();
        for format in formats {
            let mut pieces = format.split('%');
            all.extend(pieces.next().map(str::to_owned));
            // After its flags, width and length, a conversion ends with a letter.
            all.extend(pieces.map(|piece| {
                let rest = piece.trim_start_matches(|c: char| "-+ #0.*123456789hlzjt".contains(c));
                rest.chars().next().map_or("", |letter| &rest[letter.len_utf8()..]).to_owned()
            }));
        }
        all
    }

    #[test]
    fn text_of_messages_is_what_stands_between_conversions() {
        let program = b"\x7fELF\0Error (%s:%d): Pid %d has %#08lx%zub\n\0Warn  (%s:%d): no\0";
        assert_eq!(texts(program), ["Pid ", " has ", "", "b\n"]);
    }

    /// The CRIU that scripts/setup has installed. One of another release, or without the patches, may lack some.
    #[test]
    fn each_hint_is_for_a_message_of_criu() {
        let given = std::env::var_os("GODWIT_CRIU");
        let path = given.clone().unwrap_or("/usr/local/lib/godwit/bin/criu".into());
        // `make check` runs where nothing is set up.
        if given.is_none() && !Path::new(&path).exists() {
            eprintln!(
                "no CRIU is installed: the hints are not compared with its messages; scripts/setup installs one"
            );
            return;
        }
        let program = std::fs::read(&path).unwrap();
        let texts = texts(&program);
        let is_known = |hint: &&Hint| {
            let is_of_kernel = hint.message.is_empty() && hint.of == "No space left on device";
            is_of_kernel || texts.iter().any(|text| text.contains(hint.message) && !hint.message.is_empty())
        };
        let all = || HINTS.iter().chain(LAST_HINTS);
        let unknown: Vec<_> = all().filter(|hint| !is_known(hint)).map(|hint| hint.message).collect();
        let version = std::process::Command::new(&path).arg("--version").output().unwrap().stdout;
        let series = include_str!("../../../packaging/criu/series");
        let release = series.lines().find_map(|line| line.strip_prefix("release ")).unwrap();
        let is_that_release = String::from_utf8_lossy(&version).contains(&format!("{release}+godwit"));
        let most = if is_that_release { 0 } else { all().count() / 4 };
        assert!(unknown.len() <= most, "CRIU has no such messages: {unknown:?}");
    }
}
