//! Why CRIU could not do what it was asked.

use std::path::PathBuf;

/// Why CRIU could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// The binary does not start.
    #[error("CRIU at {path} cannot be started; run `godwit doctor` to see what is missing")]
    Start {
        /// The binary.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A directory or file for CRIU cannot be used.
    #[error("cannot {action} {path} for CRIU")]
    File {
        /// What was tried, e.g. `open directory`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The conversation with CRIU broke.
    #[error("the conversation with CRIU at {path} broke while {action}; {}", see(log.as_deref()))]
    Talk {
        /// The binary.
        path: PathBuf,
        /// What was under way.
        action: &'static str,
        /// CRIU's log, where it writes one.
        log: Option<PathBuf>,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// CRIU said something that its protocol does not allow.
    #[error("CRIU at {path} gave an invalid answer: {reason}; use CRIU 4.1 or newer")]
    Answer {
        /// The binary.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// This process is under a filter of system calls, which CRIU and what it restores inherit. The kernel lets such a process
    /// lift no other's filter, as CRIU does for a dump and a restore.
    #[error(
        "CRIU at {path} cannot work: godwitd is under a filter of system calls (Seccomp in /proc/PID/status), and the kernel lets CRIU lift none of a service's then; a profile of the container that godwitd is in sets one, and so do SystemCallFilter=, MemoryDenyWriteExecute= and others of its systemd unit: start it without these"
    )]
    Filtered {
        /// The binary.
        path: PathBuf,
    },
    /// It is older than godwit needs.
    #[error(
        "CRIU at {path} is version {version}, older than {}; install the godwit-criu of this godwit, or run scripts/setup",
        crate::OLDEST_VERSION
    )]
    Old {
        /// The binary.
        path: PathBuf,
        /// What it says that it is.
        version: crate::Version,
    },
    /// `criu check` found this kernel wanting.
    #[error("CRIU at {path} cannot work on this kernel: {reason}")]
    Check {
        /// The binary.
        path: PathBuf,
        /// The first error it printed.
        reason: String,
    },
    /// The process tree could not be dumped; it is as it was before.
    #[error("CRIU cannot dump process {pid}: {reason}{}; its log is {log}", hint.map(|h| format!(" ({h})")).unwrap_or_default())]
    Dump {
        /// Root of the process tree.
        pid: u32,
        /// The first error in CRIU's log.
        reason: String,
        /// What this means and what to do, when it is a known case.
        hint: Option<&'static str>,
        /// CRIU's log.
        log: PathBuf,
    },
    /// CRIU ended without an answer: it was killed, or crashed. The process tree may run although
    /// its freezer was frozen, and connections may be in repair mode ([`remains`](crate::remains)). Without the
    /// patch `killed-tracer` it may also have ended, or have CRIU's code in it.
    #[error(
        "CRIU ended ({status}) while it dumped process {pid}; check whether it still runs; CRIU's log is {log}"
    )]
    Died {
        /// Root of the process tree.
        pid: u32,
        /// How it ended.
        status: String,
        /// CRIU's log.
        log: PathBuf,
    },
}

/// Where to look for what CRIU itself had to say.
fn see(log: Option<&std::path::Path>) -> String {
    match log {
        Some(log) => format!("its log is {}", log.display()),
        None => "`godwit doctor` shows whether it works at all".into(),
    }
}
