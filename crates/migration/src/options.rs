//! What a user asks of a migration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use godwit_engine::OnMove;
use godwit_policy::Mode;

/// What the user asks of compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compress {
    /// As measured.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always LZ4.
    Lz4,
    /// Always Zstandard.
    Zstd,
}

impl Compress {
    /// Every choice, in the order in which they are told.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Off, Self::Lz4, Self::Zstd];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// The choice of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|compress| compress.name() == name)
    }
}

/// All of it.
#[derive(Debug, Clone)]
pub struct Options {
    /// How the memory moves.
    pub mode: Mode,
    /// Longest frozen time, as predicted before the freeze; else the migration is aborted.
    pub max_frozen: Option<Duration>,
    /// Most rounds of copying while the service runs.
    pub max_rounds: u32,
    /// Most bytes per second of pages.
    pub max_bandwidth: Option<u64>,
    /// Whether pages are compressed.
    pub compress: Compress,
    /// Whether the service may be slowed when it writes faster than the link carries.
    pub throttle: bool,
    /// Whether pages may follow after the commit, where the loss of the source loses the service.
    pub postcopy: bool,
    /// Connections for pages.
    pub streams: usize,
    /// Where the network namespace is at the destination, for a service in one that godwit did not create; by default
    /// where it is at the source.
    pub network: Option<PathBuf>,
    /// Whether it ends before the freeze, and what has crossed is retained for a migration that follows.
    pub prepares: bool,
    /// Whether it goes on under the destination's executables even where that has the same instruction set.
    pub cross: bool,
    /// Longest time in which its processes are to come to rest for that; else the migration is aborted.
    pub max_park: Duration,
    /// By their targets in the service, what becomes of directories of the node, for those of which that is to be said.
    pub binds: BTreeMap<PathBuf, OnMove>,
}

/// The options that count as long as pages are at the source, even over another connection or after a restart of the
/// daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ServeOptions {
    /// Connections for pages.
    // The word of version 0.1, in journals.
    #[serde(rename = "lanes")]
    pub streams: usize,
    /// Most bytes per second of pages.
    pub max_bandwidth: Option<u64>,
    /// Whether pages are compressed.
    pub compress: Compress,
}

impl Options {
    /// What counts after the commit, too.
    #[must_use]
    pub fn serving(&self) -> ServeOptions {
        ServeOptions { streams: self.streams, max_bandwidth: self.max_bandwidth, compress: self.compress }
    }
}

impl Default for ServeOptions {
    fn default() -> Self {
        Options::default().serving()
    }
}

/// Less than TCP waits at least before it sends again (RFC 6298, and Linux's 200 ms).
const MAX_PARK: Duration = Duration::from_millis(100);

/// Enough rounds for any service: each either gains a tenth or is the last but one.
const MAX_ROUNDS: u32 = 30;

/// Two streams keep a second core busy with TLS; more only share the link.
const STREAMS: usize = 2;

impl Default for Options {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            max_frozen: None,
            max_rounds: MAX_ROUNDS,
            max_bandwidth: None,
            compress: Compress::Auto,
            throttle: false,
            postcopy: false,
            streams: STREAMS,
            network: None,
            prepares: false,
            cross: false,
            max_park: MAX_PARK,
            binds: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_user_and_the_journal_name_compression_alike() {
        for compress in Compress::ALL {
            assert_eq!(Compress::parse(compress.name()), Some(compress));
            assert_eq!(serde_json::to_value(compress).unwrap(), compress.name());
        }
        assert_eq!(Compress::parse("gzip"), None);
    }
}
