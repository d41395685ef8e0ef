//! What the kernel counts of TCP in a network namespace: what a pause costs those who send.

use std::{fs, io};

use crate::{
    error::{Context, LabError},
    handle::Lab,
};

/// Counts since the namespace was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounters {
    /// Retransmission time-outs (`TCPTimeouts`).
    pub timeouts: u64,
    /// Segments sent again for whatever reason (`RetransSegs`).
    pub retransmissions: u64,
    /// Of these, what was sent to learn of a loss before the time-out (`TCPLossProbes`, RFC 8985).
    pub loss_probes: u64,
    /// Of these, openings of connections and answers to them (`TCPSynRetrans`).
    pub openings: u64,
    /// Resets that came (`EstabResets`).
    pub resets: u64,
    /// Segments that were dropped because they seemed to be older than others (`PAWSEstab`, RFC 7323).
    pub outdated: u64,
}

impl TcpCounters {
    /// Of the network namespace in which a process is.
    ///
    /// # Errors
    /// There is no such process, or the kernel counts other things.
    pub fn of_process(pid: u32) -> Result<Self, LabError> {
        Self::below(&format!("/proc/{pid}/net"))
    }

    /// What was counted since then.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            timeouts: self.timeouts.saturating_sub(earlier.timeouts),
            retransmissions: self.retransmissions.saturating_sub(earlier.retransmissions),
            loss_probes: self.loss_probes.saturating_sub(earlier.loss_probes),
            openings: self.openings.saturating_sub(earlier.openings),
            resets: self.resets.saturating_sub(earlier.resets),
            outdated: self.outdated.saturating_sub(earlier.outdated),
        }
    }

    fn below(directory: &str) -> Result<Self, LabError> {
        let read = |name: &str| {
            let path = format!("{directory}/{name}");
            fs::read_to_string(&path).context("reading", path)
        };
        let (extended, plain) = (read("netstat")?, read("snmp")?);
        let unknown = || io::Error::new(io::ErrorKind::InvalidData, "a counter is missing");
        Self::of(&extended, &plain).ok_or_else(unknown).context("reading the counters of TCP in", directory)
    }

    fn of(extended: &str, plain: &str) -> Option<Self> {
        Some(Self {
            timeouts: counter(extended, "TcpExt:", "TCPTimeouts")?,
            retransmissions: counter(plain, "Tcp:", "RetransSegs")?,
            loss_probes: counter(extended, "TcpExt:", "TCPLossProbes")?,
            openings: counter(extended, "TcpExt:", "TCPSynRetrans")?,
            resets: counter(plain, "Tcp:", "EstabResets")?,
            outdated: counter(extended, "TcpExt:", "PAWSEstab")?,
        })
    }
}

impl Lab {
    /// What is counted on a host.
    ///
    /// # Errors
    /// There is no such host, its namespace is gone, or the kernel counts other things.
    pub fn tcp_counters(&self, host: &str) -> Result<TcpCounters, LabError> {
        // `/proc/net` would be the namespace of this process's first thread.
        self.inside(host, || TcpCounters::below("/proc/thread-self/net"))?
    }
}

/// A counter of a group: a line of names, and a line of figures in the same order.
fn counter(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(group));
    let (names, figures) = (lines.next()?, lines.next()?);
    let place = names.split_whitespace().position(|known| known == name)?;
    figures.split_whitespace().nth(place)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_names_in_their_groups() {
        let extended = "TcpExt: PAWSEstab TCPTimeouts TCPLossProbes TCPSynRetrans\n\
            TcpExt: 1 22 3 4\nIpExt: TCPTimeouts\nIpExt: 5\n";
        let plain = "Ip: RetransSegs\nIp: 9\nTcp: EstabResets RetransSegs\nTcp: 6 77\n";
        let expected = TcpCounters {
            timeouts: 22,
            retransmissions: 77,
            loss_probes: 3,
            openings: 4,
            resets: 6,
            outdated: 1,
        };
        assert_eq!(TcpCounters::of(extended, plain), Some(expected));
        assert_eq!(TcpCounters::of(plain, extended), None);
    }

    #[test]
    fn this_kernel_counts_them() {
        TcpCounters::of_process(std::process::id()).unwrap();
    }
}
