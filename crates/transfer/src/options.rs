//! How connections are made and accepted: time limits, and limits on strangers.

use std::time::Duration;

use crate::socket::LinkOptions;

/// Limits on connections that have not shown a certificate yet.
#[derive(Debug, Clone, Copy)]
pub struct ListenOptions {
    /// How long a handshake may take: 10 s, a few round trips of the worst link.
    pub handshake_timeout: Duration,
    /// How many handshakes of members may be under way, and how many of strangers together with the room
    /// that is kept for members: 64.
    pub max_pending: usize,
    /// How many of them from one address: 16, more than the channels of one migration. Further
    /// connections from there are closed at once, so that one silent host cannot keep others out.
    pub max_pending_per_address: usize,
    /// How many of them from one prefix, /24 or /64, that is not of members: 32.
    pub max_pending_per_prefix: usize,
    /// How many are kept for members: 16.
    pub reserved: usize,
    /// How long a stranger's handshake takes at least before it makes place for another one: 1 s.
    pub patience: Duration,
    /// How a dead link is noticed.
    pub link: LinkOptions,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(10),
            max_pending: 64,
            max_pending_per_address: 16,
            max_pending_per_prefix: 32,
            reserved: 16,
            patience: Duration::from_secs(1),
            link: LinkOptions::default(),
        }
    }
}

/// How to reach another node.
#[derive(Debug, Clone, Copy)]
pub struct ConnectOptions {
    /// How long resolving, connecting and the handshake may take together.
    pub timeout: Duration,
    /// How a dead link is noticed.
    pub link: LinkOptions,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), link: LinkOptions::default() }
    }
}
