//! A TAP device with a given index, for the bridge's own interface to be made again: addresses, entries and
//! filters go by its index, and Open vSwitch takes a device that is there.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Makes the device, in the network namespace of the calling thread. It stays when nobody has it open.
pub(super) fn make(name: &str, index: u32) -> io::Result<()> {
    // SAFETY: ifreq is plain old data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the interface's name is too long"));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: the kernel reads an unsigned int there, during the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFINDEX, &raw const index) })?;
    // SAFETY: the kernel reads and writes an `ifreq` there, during the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    // SAFETY: it takes a number and no pointer.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST, 1) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
