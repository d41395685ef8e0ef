//! A service's sockets while its processes stand still. The kernel goes on sending for them: what timers say,
//! and what was waiting.
//!
//! - To itself, over the loopback interface, a service must not speak then: the two ends of such a connection are
//!   dumped one after the other, and restored one after the other, and have to fit together. An nftables table of
//!   the service's namespace drops such segments, but for those by which CRIU puts a FIN into a queue.
//! - What it says to others at its source meets a closed port.
//!
//! All of it is kept where a service may stay, and sent on when it does: nobody has to wait until a timer, which
//! may have doubled its time again and again, sends it another time.
//!
//! ```text
//!   Standing::prepare   before the freeze: the table is there, and does nothing
//!   Standing::hold      a mark on the loopback interface makes it drop; what is sent is kept
//!   Standing::let_go    the mark is gone; what was kept is sent
//!   forget_standing     the table is gone
//! ```
//!
//! The mark (the interface's group) takes some microseconds to set, and nft some milliseconds, for which no service
//! should be frozen.

use std::io;
use std::path::Path;

use nix::net::if_::if_nametoindex;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{Socket, SocketAddr as NetlinkAddress};

use crate::inside::interface;
use crate::packet::PacketSocket;
use crate::select::segments_sent;
use crate::{NetworkError, enter, nft};

/// The loopback interface's number, in every namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// Its group while it carries no TCP; 0 is every interface's by default.
const STILL: u32 = 0x6764_7769;
/// Comes before every other rule. CRIU marks what it sends itself with 0xc114 (`SOCCR_MARK`).
const TABLE: &str = "\
add table inet godwit-loopback
add chain inet godwit-loopback in { type filter hook prerouting priority -400; }
flush table inet godwit-loopback
add rule inet godwit-loopback in meta iifgroup 0x67647769 meta l4proto tcp meta mark != 0xc114 drop
";
/// Adding it first makes deleting it succeed in any case.
const NO_TABLE: &str = "add table inet godwit-loopback\ndelete table inet godwit-loopback\n";
/// How much memory the kernel may use for what an interface sent, in bytes (it doubles the figure).
const STORE: i32 = 16 << 20;

const RTM_SETLINK: u16 = 19;
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const REQUEST_AND_ACK: u16 = 5;
const IFLA_GROUP: u16 = 27;
/// Room for the answer to one request.
const ANSWER: usize = 4096;

/// A service's namespace in which nothing is lost that is said while it stands still. What was kept is dropped
/// with it; the table is [`forget_standing`]'s to remove.
#[derive(Debug)]
pub struct Standing {
    links: Socket,
    /// By the interface that sends them.
    kept: Vec<(u32, PacketSocket)>,
}

impl Standing {
    /// Makes ready, in the namespace that is mounted there, for a service that has interfaces of godwit's to so many
    /// networks. Nothing is held yet.
    ///
    /// Without nft what a service says to itself goes on. That has always been so, and is not said again.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or the kernel or nft refuses.
    pub async fn prepare(netns: &Path, networks: u8) -> Result<Self, NetworkError> {
        match nft::run_in(netns, "make a table to hold the loopback interface in", TABLE).await {
            Err(NetworkError::NoNft(error)) => {
                tracing::debug!(%error, "connections of a service to itself continue while it is frozen");
            }
            other => other?,
        }
        let open = move || {
            let links = links()?;
            let mut kept = vec![(LOOPBACK, PacketSocket::new()?)];
            for nth in 0..networks {
                kept.push((if_nametoindex(interface(nth).as_str())?, PacketSocket::new()?));
            }
            Ok(Self { links, kept })
        };
        let failed = NetworkError::system(format!("examine the namespace {}", netns.display()));
        enter(netns, open).await?.map_err(failed)
    }

    /// From here on what the service's sockets say to each other is dropped, and what they say at all is kept.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hold(&self) -> Result<(), NetworkError> {
        let hold = || {
            for (index, socket) in &self.kept {
                socket.collect_at(*index, &mut segments_sent(), STORE)?;
            }
            mark(&self.links, STILL)
        };
        hold().map_err(NetworkError::system("hold what a service's sockets send"))
    }

    /// What the service's sockets say to each other is dropped from here on. Nothing is kept.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hold_loopback(&self) -> Result<(), NetworkError> {
        mark(&self.links, STILL).map_err(NetworkError::system("hold the loopback interface of a service"))
    }

    /// What they say passes again.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn let_go(&self) -> Result<(), NetworkError> {
        mark(&self.links, 0).map_err(NetworkError::system("release the loopback interface of a service"))
    }

    /// Sends what was kept, in order; how many frames.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn send_kept(&self) -> Result<u64, NetworkError> {
        let send = || {
            let mut sent = 0;
            for (index, socket) in &self.kept {
                socket.collect_nothing()?;
                sent += socket.send_all(socket, *index)?;
            }
            Ok(sent)
        };
        send().map_err(NetworkError::system("send what a service's sockets sent while it was frozen"))
    }
}

/// Removes what [`Standing::prepare`] made and [`Standing::hold`] set in the namespace, whoever did; no error when
/// there is nothing.
///
/// # Errors
/// When the namespace cannot be entered, or the kernel or nft refuses.
pub async fn forget_standing(netns: &Path) -> Result<(), NetworkError> {
    let failed = NetworkError::system(format!("release the loopback interface in {}", netns.display()));
    enter(netns, || mark(&links()?, 0)).await?.map_err(failed)?;
    match nft::run_in(netns, "remove the table that holds the loopback interface in", NO_TABLE).await {
        // Then there was no table.
        Err(NetworkError::NoNft(_)) => Ok(()),
        other => other,
    }
}

/// What asks for changes of interfaces in the namespace of the calling thread.
fn links() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddress::new(0, 0))?;
    Ok(socket)
}

/// Sets the group of the loopback interface.
fn mark(links: &Socket, group: u32) -> io::Result<()> {
    // nlmsghdr, ifinfomsg, one attribute (rtnetlink(7)).
    let mut request = Vec::with_capacity(40);
    request.extend(40_u32.to_ne_bytes());
    request.extend(RTM_SETLINK.to_ne_bytes());
    request.extend(REQUEST_AND_ACK.to_ne_bytes());
    // Sequence number and port; then family and type.
    request.extend([0; 12]);
    request.extend(LOOPBACK.to_ne_bytes());
    // Flags, and which of them change.
    request.extend([0; 8]);
    request.extend(8_u16.to_ne_bytes());
    request.extend(IFLA_GROUP.to_ne_bytes());
    request.extend(group.to_ne_bytes());
    links.send(&request, 0)?;
    let mut answer = [0; ANSWER];
    let received = links.recv(&mut &mut answer[..], 0)?;
    let answer = answer.get(..received).unwrap_or_default();
    let kind = answer.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes);
    let errno = answer.get(16..20).and_then(|errno| errno.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, errno) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(errno)) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel answered something else than was asked",
        )),
    }
}
