//! Network namespaces that godwit did not create, for services whose network it does not move.
//!
//! All that godwit does in them is to keep them silent while a service of theirs is frozen, or has left
//! and somebody else has not yet taken its addresses away: an interface whose service is not there would
//! answer its clients with resets. An nftables table of its own drops everything but the loopback's.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpRepair;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::netns::{self, Found};
use crate::{NetworkError, nft};

/// Comes before every other rule, and before connections are tracked.
const SILENCE: &str = "\
add table inet godwit-silence
add chain inet godwit-silence in { type filter hook prerouting priority -400; }
add chain inet godwit-silence out { type filter hook output priority -400; }
flush table inet godwit-silence
add rule inet godwit-silence in iifname != \"lo\" drop
add rule inet godwit-silence out oifname != \"lo\" drop
";
/// Adding it first makes deleting it succeed in any case.
const SOUND: &str = "add table inet godwit-silence\ndelete table inet godwit-silence\n";

/// Whether a service may be in the namespace mounted there: it is one, and not this node's own.
///
/// # Errors
/// [`NetworkError::NoNamespace`] if not, and when it cannot be examined.
pub fn check_namespace(netns: &Path) -> Result<(), NetworkError> {
    let refused = |reason| NetworkError::NoNamespace { path: netns.to_owned(), reason };
    match netns::inspect(netns)? {
        Found::Namespace => {}
        Found::Nothing => return Err(refused("nothing is there")),
        Found::EmptyFile | Found::Other => return Err(refused("it is something else")),
    }
    let inode = |path: &Path| {
        let metadata = std::fs::metadata(path);
        metadata.map(|m| m.ino()).map_err(NetworkError::system(format!("examine {}", path.display())))
    };
    if inode(netns)? == inode(Path::new("/proc/self/ns/net"))? {
        return Err(refused("it is the node's own"));
    }
    Ok(())
}

/// From here on no packet enters or leaves the namespace.
///
/// # Errors
/// When it cannot be entered, or nft refuses.
pub async fn silence(netns: &Path) -> Result<(), NetworkError> {
    nft::run_in(netns, "silence", SILENCE).await
}

/// Packets enter and leave it again; no error when they did.
///
/// # Errors
/// As for [`silence`].
pub async fn unsilence(netns: &Path) -> Result<(), NetworkError> {
    nft::run_in(netns, "end the silence in", SOUND).await
}

/// Has the processes' TCP connections end without a packet when the processes end: their peers continue with the copy
/// that has them now, and the namespace, which stays, has their ports free again.
///
/// # Errors
/// When a process or its files cannot be examined; no error for one that has ended.
pub fn forget_connections(pids: &[u32]) -> Result<(), NetworkError> {
    for pid in pids {
        let gone = |error: &io::Error| {
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
        };
        match forget_connections_of(*pid) {
            Err(error) if !gone(&error) => {
                return Err(NetworkError::system(format!("take the connections of process {pid}"))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

fn forget_connections_of(pid: u32) -> io::Result<()> {
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::EINVAL)?;
    let process = pidfd_open(id, PidfdFlags::empty())?;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let is_socket =
            std::fs::read_link(entry.path())?.to_str().is_some_and(|to| to.starts_with("socket:"));
        if !is_socket {
            continue;
        }
        let socket = pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?;
        if let Err(error) = setsockopt(&socket, TcpRepair, &1) {
            // Not TCP; or listening, or not connected, with nobody to tell.
            let other = [Errno::ENOPROTOOPT, Errno::EOPNOTSUPP, Errno::EINVAL, Errno::EPERM];
            if !other.contains(&error) {
                return Err(error.into());
            }
        }
    }
    Ok(())
}
