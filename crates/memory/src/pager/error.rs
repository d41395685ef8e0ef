//! Why the pager, or the conversation with it, failed.

use std::io;
use std::path::PathBuf;

/// Why the pager, or the conversation with it, failed.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// A file of the pager cannot be used.
    #[error("cannot {action} {path} of the pager; check that its directory exists and is writable")]
    File {
        /// What was tried, e.g. `bind`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The system refuses something that the pager is made of.
    #[error("the pager cannot {action}; run `godwit doctor` to see what is missing")]
    System {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Another pager lives in the directory.
    #[error("a pager lives in {directory} already; connect to it, or abandon it first")]
    Running {
        /// The directory.
        directory: PathBuf,
    },
    /// The program did not come up.
    #[error("the pager {binary} did not start: {reason}")]
    Start {
        /// The program.
        binary: PathBuf,
        /// What it said.
        reason: String,
    },
    /// The connection is gone.
    #[error("the connection to the pager in {directory} is gone; connect again, or see its log")]
    Gone {
        /// The pager's directory.
        directory: PathBuf,
    },
    /// The pager lives but does not answer.
    #[error("the pager in {directory} has not answered for {seconds} s; see its log")]
    Silent {
        /// The pager's directory.
        directory: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The pager said something that the protocol does not allow.
    #[error(
        "the pager in {directory} gave an invalid answer: {reason}; daemon and pager must be of one version"
    )]
    Answer {
        /// The pager's directory.
        directory: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The pager is of another version, with which this one cannot speak. It lives, and serves what it has.
    #[error("the pager in {directory} is of a version of godwit with which this one cannot speak: {reason}")]
    Version {
        /// The pager's directory.
        directory: PathBuf,
        /// What it said.
        reason: String,
    },
    /// The pager refuses a request.
    #[error("the pager in {directory} refuses: {reason}")]
    Refused {
        /// The pager's directory.
        directory: PathBuf,
        /// Its reason.
        reason: String,
    },
    /// The store cannot take the pages.
    #[error("the page store of the pager in {directory} cannot take {bytes} bytes")]
    Store {
        /// The pager's directory.
        directory: PathBuf,
        /// How much it was to take.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}
