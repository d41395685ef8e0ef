//! TAP devices that keep checksums and segmentation undone, as a virtual machine's network card does.
//!
//! Linux, Documentation/networking/tuntap.rst and include/uapi/linux/if_tun.h.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use super::frame;
use crate::{
    error::{Context, LabError},
    netns,
};

/// Checksums, and TCP segments of either version with and without ECN.
const OFFLOAD_TCP: libc::c_uint =
    libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
/// UDP segments of either version, Linux 6.2 and later (TUN_F_USO4 and TUN_F_USO6).
const OFFLOAD_UDP: libc::c_uint = 0x20 | 0x40;

nix::ioctl_write_ptr_bad!(tun_set_interface, libc::TUNSETIFF, libc::ifreq);
nix::ioctl_write_int_bad!(tun_set_offload, libc::TUNSETOFFLOAD);
nix::ioctl_write_ptr_bad!(tun_set_header_size, libc::TUNSETVNETHDRSZ, libc::c_int);
nix::ioctl_write_ptr_bad!(tun_set_little_endian, libc::TUNSETVNETLE, libc::c_int);

/// One end of an access link.
#[derive(Debug)]
pub(crate) struct Tap {
    file: File,
}

impl Tap {
    /// Makes the interface `name` in the network namespace at `namespace`. It lives as long as this.
    pub(crate) fn create(namespace: &Path, name: &str) -> Result<Self, LabError> {
        netns::inside(namespace, || Self::create_here(name))?
    }

    fn create_here(name: &str) -> Result<Self, LabError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .context("opening (is the kernel module tun there?)", "/dev/net/tun")?;
        configure(&file, name).context("making TAP device", name)?;
        Ok(Self { file })
    }

    /// The device's file, for an emulator, which sets it up as it needs it.
    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// Reads one frame with its header; none when there is no more.
    pub(crate) fn read<'b>(&mut self, buffer: &'b mut [u8]) -> io::Result<Option<&'b [u8]>> {
        match self.file.read(buffer) {
            Ok(length) => Ok(buffer.get(..length)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // The interface is down for now.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the host may hand over large frames, to be cut up here, or has to do that by itself.
    pub(crate) fn set_large(&mut self, large: bool) -> io::Result<()> {
        Ok(if large { offload_all(&self.file) } else { offload(&self.file, libc::TUN_F_CSUM) }?)
    }

    /// Hands a frame with its header to the host; false if its interface is down or it has no memory.
    pub(crate) fn write(&mut self, packet: &[u8]) -> bool {
        self.file.write(packet).is_ok_and(|length| length == packet.len())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn configure(file: &File, name: &str) -> io::Result<()> {
    // SAFETY: all-zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    let header = libc::c_int::try_from(frame::HEADER).map_err(io::Error::other)?;
    let one: libc::c_int = 1;
    let descriptor = file.as_raw_fd();
    // SAFETY: the descriptor is open, and each pointer is to a live value of the type the request reads.
    unsafe {
        tun_set_interface(descriptor, &raw const request)?;
        tun_set_header_size(descriptor, &raw const header)?;
        tun_set_little_endian(descriptor, &raw const one)?;
    }
    Ok(offload_all(file)?)
}

/// All that this kernel knows. Without segmentation the frames are small but the same.
fn offload_all(file: &File) -> nix::Result<()> {
    offload(file, OFFLOAD_TCP | OFFLOAD_UDP).or_else(|_| offload(file, OFFLOAD_TCP))
}

fn offload(file: &File, which: libc::c_uint) -> nix::Result<()> {
    let which = libc::c_int::try_from(which).unwrap_or_default();
    // SAFETY: the request takes a number, not a pointer.
    unsafe { tun_set_offload(file.as_raw_fd(), which) }.map(drop)
}
