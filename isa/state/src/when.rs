//! When a program is to be captured, as flags that several verbs have.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::leg::Request;
use crate::values;

/// When to capture.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct When {
    /// Capture at the N-th poll; a program polls in its loops and before it calls itself
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) after_polls: Option<u64>,
    /// Capture when this time has passed: 250us, 10ms, 2s, 5m
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub(crate) after: Option<Duration>,
    /// Capture when godwit-state, or the program itself, gets this signal: USR1, SIGTERM, 10
    #[arg(long, value_name = "SIGNAL", value_parser = values::signal)]
    pub(crate) on_signal: Option<Signal>,
}

impl When {
    /// The request, if there is one.
    pub(crate) fn request(&self) -> Option<Request> {
        let polls = self.after_polls.map(Request::Polls);
        polls.or(self.after.map(Request::Time)).or(self.on_signal.map(Request::Signal))
    }
}
