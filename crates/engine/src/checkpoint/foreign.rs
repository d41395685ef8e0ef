//! CRIU's images, made to fit where they are restored.
//!
//! Podman, runc and godwit each bring some mounts from outside when they restore a container, under the mount's place as a key.
//! They differ in a few, which an archive therefore has as mounts of the container's own, or not at all:
//!
//! | place | godwit brings | runc under Podman brings | in an archive of godwit's |
//! |---|---|---|---|
//! | `/sys/firmware`, … | an empty directory | nothing: a tmpfs | a tmpfs |
//! | `/dev/shm` | nothing: a tmpfs | Podman's | a tmpfs |
//! | `/run/.containerenv` | nothing | Podman's | |
//! | `/sys/fs/cgroup` | nothing | what the node has | |
//! | `/proc/interrupts`, `/sys/devices/system/cpu/…` | nothing | a cover, since Podman 5 | |
//!
//! Whoever restores makes the cgroup: of that in which the container was nothing is said. godwit brings the network namespace, too, also where Podman brought none (`--network none`). The root directory has the image's mode under godwit, and 0555 under Podman: the images say none.

use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use godwit_criu::images::{bring_network, stay_in_cgroup};
use godwit_criu::repair::{Becomes, CONFINED, READ_ONLY, brought_mounts, forget_root_mode};

use super::ArchiveError;
use super::unpack::Unpacked;
use crate::container::DEV_BYTES;
use crate::runc::NETWORK_KEY;
use crate::runc::spec::{COVERED_DIRECTORIES, MASKED_FILES};

/// Largest `/dev/shm` that is taken over: it lies in memory twice for a moment.
const MOST_SHM: u64 = 1 << 30;

/// Makes the images of a container of godwit's fit for whoever restores them.
///
/// # Errors
/// They are not what a dump writes.
pub fn make_portable(images: &Path) -> Result<(), ArchiveError> {
    let empty = empty_archive().map_err(ArchiveError::io("write an empty archive"))?;
    forget_root_mode(images)?;
    stay_in_cgroup(images)?;
    Ok(brought_mounts(images, |place, is_external| {
        (is_external && COVERED_DIRECTORIES.contains(&place)).then_some(Becomes::Tmpfs {
            source: "tmpfs",
            options: "",
            flags: CONFINED | READ_ONLY,
            contents: &empty,
            is_only: false,
        })
    })?)
}

/// Makes the images of an archive, whoever made it, fit for godwit.
///
/// # Errors
/// They are not what a dump writes, or `/dev/shm` has too much.
pub fn make_own(unpacked: &Unpacked) -> Result<(), ArchiveError> {
    bring_network(&unpacked.images(), NETWORK_KEY)?;
    if unpacked.is_own() {
        return Ok(());
    }
    let shm = match unpacked.has(super::DEV_SHM) {
        true => compressed(&unpacked.path(super::DEV_SHM))?,
        false => empty_archive().map_err(ArchiveError::io("write an empty archive"))?,
    };
    let options = format!("mode=1777,size={DEV_BYTES}");
    forget_root_mode(&unpacked.images())?;
    Ok(brought_mounts(&unpacked.images(), |place, is_external| match place {
        "/run/.containerenv" if is_external => Some(Becomes::Nothing),
        "/sys/fs/cgroup" => Some(Becomes::Nothing),
        "/dev/shm" if is_external => Some(Becomes::Tmpfs {
            source: "shm",
            options: &options,
            flags: CONFINED,
            contents: &shm,
            is_only: true,
        }),
        _ if is_covered_by_them(place, is_external) => Some(Becomes::Nothing),
        _ => None,
    })?)
}

/// Whether something covers what godwit's containers see: of processors and their interrupts, of which nodes have more or fewer.
fn is_covered_by_them(place: &str, is_external: bool) -> bool {
    let is_of_node = ["/proc/", "/sys/"].iter().any(|tree| place.starts_with(tree));
    is_external && is_of_node && !MASKED_FILES.contains(&place)
        || place.starts_with("/sys/devices/system/cpu/")
}

/// A tar archive, by gzip, with nothing in it.
fn empty_archive() -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&[0; 1024])?;
    encoder.finish()
}

fn compressed(archive: &Path) -> Result<Vec<u8>, ArchiveError> {
    let failed = |source| ArchiveError::io(format!("read {}", archive.display()))(source);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let file = File::open(archive).map_err(failed)?;
    if io::copy(&mut file.take(MOST_SHM + 1), &mut encoder).map_err(failed)? > MOST_SHM {
        return Err(ArchiveError::Refused(format!("/dev/shm in it has more than {} MiB", MOST_SHM >> 20)));
    }
    encoder.finish().map_err(failed)
}
