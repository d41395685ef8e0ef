//! Open files that have names: devices that CRIU cannot dump, deleted files that are too large, and files that are open in
//! name only (O_PATH).

use std::path::Path;

use super::files::{What, flags, information, shown};
use crate::GHOST_LIMIT_BYTES;
use crate::status::field;

pub(super) const DEVICE: &str = "which CRIU cannot dump; the service can move when it has closed it";
const GPU: &str = "and what a GPU holds cannot be dumped; the service can move when it has closed it, or be stopped \
                   and started anew elsewhere";
const GHOST: &str = "and one that large does not move along; the service can move when it has closed it";
const NAME_ONLY: &str =
    "and CRIU cannot dump that of a FIFO or of a socket; the service can move when it has closed it";

/// Majors of character devices that CRIU can dump: memory, and serial lines of two kinds.
const GOOD_MAJORS: [u32; 3] = [1, 188, 204];
/// Majors of pseudo terminals and of their masters.
const PSEUDO_TERMINALS: std::ops::RangeInclusive<u32> = 128..=143;
/// Of those, the terminals (their "slaves").
const TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;

/// Majors of devices of which CRIU can dump those below this minor: virtual terminals; `tty`, `console` and `ptmx`.
const GOOD_BELOW: [(u32, u32); 2] = [(4, 64), (5, 3)];

/// `/dev/tty`: whatever terminal the process has.
const ANY_TERMINAL: (u32, u32) = (5, 0);

/// autofs, which CRIU can dump among miscellaneous devices.
const AUTOFS: (u32, u32) = (10, 235);

/// TUN, which CRIU can restore where it has no interface.
const TUN: (u32, u32) = (10, 200);

/// Majors of GPUs: NVIDIA's own driver, and the kernel's (DRM).
const GPU_MAJORS: [u32; 2] = [195, 226];

/// Where devices of GPUs are whose majors differ from boot to boot.
const GPU_PATHS: [&str; 3] = ["/dev/nvidia", "/dev/kfd", "/dev/dri/"];

/// What an open file with a name is.
pub(super) enum Named {
    Bad(What),
    /// `/dev/tty`.
    AnyTerminal,
    /// A pseudo terminal by its own name.
    Terminal,
    /// None where it cannot be looked at.
    Other(Option<Found>),
}

/// What is open by this path in `/proc/PID/fd`, whose link tells its name.
pub(super) fn named(path: &Path, link: &str) -> Named {
    let Some(found) = stat(path) else { return Named::Other(None) };
    let name = shown(link.trim_end_matches(" (deleted)"));
    let bad = if let Some(number) = found.device {
        match number {
            ANY_TERMINAL if !found.is_block => return Named::AnyTerminal,
            (major, _) if !found.is_block && TERMINALS.contains(&major) => return Named::Terminal,
            TUN if !found.is_block => interface(path)
                .map(|interface| (format!("the network interface {interface} ({name})"), DEVICE)),
            _ => device(&name, number, found.is_block),
        }
    } else if found.is_fifo || found.is_socket {
        let kind = if found.is_fifo { "FIFO" } else { "socket" };
        let is_name_only = flags(path).is_some_and(|flags| flags & i64::from(libc::O_PATH) != 0);
        is_name_only.then(|| (format!("the name of the {kind} {name} (O_PATH)"), NAME_ONLY))
    } else {
        let bytes = found.blocks * 512;
        let is_large_ghost = found.is_file && found.links == 0 && bytes > GHOST_LIMIT_BYTES.into();
        is_large_ghost.then(|| (format!("the deleted file {name} of {} MiB", bytes >> 20), GHOST))
    };
    bad.map_or(Named::Other(Some(found)), Named::Bad)
}

/// What counts of an open file.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) is_file: bool,
    is_block: bool,
    is_fifo: bool,
    is_socket: bool,
    device: Option<(u32, u32)>,
    pub(super) links: u32,
    blocks: u64,
    /// Device and inode.
    pub(super) identity: (u64, u64),
    /// The number of the mount on which it was opened, from Linux 5.8 on.
    pub(super) mount: Option<u64>,
}

/// Looks at a file without asking the server of its filesystem, which may be frozen.
pub(super) fn stat(path: &Path) -> Option<Found> {
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let fields = rustix::fs::StatxFlags::BASIC_STATS | rustix::fs::StatxFlags::MNT_ID;
    let found = rustix::fs::statx(rustix::fs::CWD, path, flags, fields).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(found.stx_mode.into());
    Some(Found {
        is_file: kind.is_file(),
        is_block: kind.is_block_device(),
        is_fifo: kind.is_fifo(),
        is_socket: kind.is_socket(),
        device: (kind.is_block_device() || kind.is_char_device())
            .then_some((found.stx_rdev_major, found.stx_rdev_minor)),
        links: found.stx_nlink,
        blocks: found.stx_blocks,
        identity: (rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
        mount: rustix::fs::StatxFlags::from_bits_retain(found.stx_mask)
            .contains(rustix::fs::StatxFlags::MNT_ID)
            .then_some(found.stx_mnt_id),
    })
}

/// The interface of an open TUN device, by its path in `/proc/PID/fd`.
fn interface(path: &Path) -> Option<String> {
    let text = information(path)?;
    let name = field(&text, "iff")?;
    (!name.is_empty()).then(|| shown(name))
}

/// The device that is mapped from this path in `/proc/PID/map_files`. CRIU dumps none.
pub(super) fn mapped(path: &Path, name: &str) -> Option<What> {
    let (major, minor) = stat(path)?.device?;
    let why = if is_gpu(name, major) { GPU } else { DEVICE };
    Some((format!("the device {} ({major}:{minor})", shown(name)), why))
}

fn is_gpu(name: &str, major: u32) -> bool {
    GPU_MAJORS.contains(&major) || GPU_PATHS.iter().any(|path| name.starts_with(path))
}

/// A device, unless CRIU can dump it.
fn device(name: &str, (major, minor): (u32, u32), is_block: bool) -> Option<(String, &'static str)> {
    if is_block {
        return Some((format!("the block device {name} ({major}:{minor})"), DEVICE));
    }
    let can_be_dumped = GOOD_MAJORS.contains(&major)
        || PSEUDO_TERMINALS.contains(&major)
        || GOOD_BELOW.iter().any(|(good, below)| major == *good && minor < *below)
        || (major, minor) == AUTOFS;
    if can_be_dumped {
        return None;
    }
    let why = if is_gpu(name, major) { GPU } else { DEVICE };
    Some((format!("the device {name} ({major}:{minor})"), why))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn devices_that_can_be_dumped_are_passed_over() {
        for good in [(1, 3), (4, 63), (5, 0), (5, 2), (10, 235), (136, 7), (188, 0)] {
            assert_eq!(device("/dev/x", good, false), None, "{good:?}");
        }
        for bad in [(4, 64), (5, 3), (10, 229)] {
            assert_eq!(device("/dev/x", bad, false).unwrap().1, DEVICE, "{bad:?}");
        }
        assert_eq!(device("/dev/x", (1, 3), true).unwrap().1, DEVICE);
        for (name, number) in [("/dev/dri/card0", (226, 0)), ("/dev/nvidia-uvm", (511, 0)), ("/x", (195, 0))]
        {
            assert_eq!(device(name, number, false).unwrap().1, GPU, "{name}");
        }
    }

    #[test]
    fn a_tun_device_is_an_obstacle_with_an_interface() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        fs::create_dir(at("fd")).unwrap();
        fs::create_dir(at("fdinfo")).unwrap();
        for (number, text, expected) in
            [("3", "pos:\t0\niff:\ttun0\n", Some("tun0".to_owned())), ("4", "pos:\t0\niff:\t\n", None)]
        {
            fs::write(at("fdinfo").join(number), text).unwrap();
            assert_eq!(interface(&at("fd").join(number)), expected);
        }
        assert_eq!(interface(&at("fd/5")), None);
    }
}
