//! What an interface leaves to the next one: whether frames are handed on with their check sums and
//! segments still to be made (ethtool(8), `linux/ethtool.h`). The one ioctl for it, and nothing else.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::NetworkError;

/// Sets whether the interface makes check sums itself. The kernel takes segmentation away with it.
const ETHTOOL_STXCSUM: u32 = 0x17;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// `struct ifreq`, whose second part is a union of 24 bytes of which ethtool uses a pointer.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    value: *mut Value,
    rest: [u8; 16],
}

/// Has the kernel give the interface, of the calling thread's network namespace, only frames that are cut
/// into segments and have their check sums.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn make_frames_whole(interface: &str) -> Result<(), NetworkError> {
    let failed = || NetworkError::system(format!("switch offloading off at {interface}"));
    let mut name = [0; libc::IFNAMSIZ];
    let Some(place) = name.get_mut(..interface.len()).filter(|place| place.len() < libc::IFNAMSIZ) else {
        return Err(failed()(io::Error::from(io::ErrorKind::InvalidInput)));
    };
    place.copy_from_slice(interface.as_bytes());
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(failed()(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was just opened, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut value = Value { command: ETHTOOL_STXCSUM, data: 0 };
    let mut request = Request { name, value: &raw mut value, rest: [0; 16] };
    // SAFETY: `request` and the `value` it points at are readable and writable during the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if done < 0 { Err(failed()(io::Error::last_os_error())) } else { Ok(()) }
}
