//! Devices in the images: nodes that a restore would make, and open files of kinds that lead out of a container.
//!
//! Which devices can be opened is up to the cgroup. Nodes of others are refused all the same: they are nothing that a
//! service without CAP_MKNOD can have made.
//!
//! ```text
//!   files.img             file_entry: its kind, and the mode of a regular one
//!   ghost-file-N.img      ghost_file_entry: a file without a name, perhaps a device
//!   tmpfs-….tar.gz.img    what was in a tmpfs: see `archives`
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use prost::Message;

use super::rights::{Allowed, MountEntry, TMPFS, all_mounts};
use super::{FileEntry, ImageError, ImageKind, RegularFile, records};

/// `MS_NODEV`.
const NO_DEVICES: u32 = 4;
/// Of `linux/capability.h`.
const NET_ADMIN: u32 = 12;
const SYS_ADMIN: u32 = 21;
const MKNOD: u32 = 27;
const BPF: u32 = 39;
/// Of CRIU's `fd_types`.
const TUN: u32 = 15;
const EXTERNAL: u32 = 16;
const BPF_MAP: u32 = 19;
/// Those that this version does not know.
const LATER: u32 = 21;
/// Kinds of file in `st_mode`.
const KIND: u32 = 0o17_0000;
const CHARACTER: u32 = 0o2_0000;
const BLOCK: u32 = 0o6_0000;

/// A device, by the numbers of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// A block device; else a character device.
    pub is_block: bool,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

impl Device {
    /// Whether every container has it, or a service without capabilities can make it (the whiteout of overlayfs).
    #[must_use]
    pub fn is_given(self) -> bool {
        !self.is_block
            && matches!(
                (self.major, self.minor),
                (0, 0) | (1, 3 | 5 | 7 | 8 | 9) | (5, 0..=2) | (136..=143, _)
            )
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_block { "block" } else { "character" };
        write!(f, "the {kind} device {}:{}", self.major, self.minor)
    }
}

/// `ghost_file_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Ghost {
    #[prost(uint32, required, tag = "3")]
    mode: u32,
    #[prost(uint32, optional, tag = "6")]
    device: Option<u32>,
}

/// What is more than allowed, in sentences.
pub(super) fn excess(images: &Path, allowed: &Allowed) -> Result<Vec<String>, ImageError> {
    let holds = |capability: u32| allowed.capabilities >> capability & 1 != 0;
    let mut found = Vec::new();
    let path = images.join("files.img");
    let files: Vec<FileEntry> = records(&path, ImageKind::Files)?;
    if files.is_empty() {
        // Then a restore would look for the images of a CRIU of before 2018.
        return Err(ImageError::Damaged { path, reason: "it has no files".into() });
    }
    for FileEntry { kind, id, regular } in files {
        let why = match kind {
            TUN if !holds(NET_ADMIN) => Some("is a network device, which needs CAP_NET_ADMIN"),
            BPF_MAP if !holds(BPF) && !holds(SYS_ADMIN) => Some("is a BPF map, which needs CAP_BPF"),
            EXTERNAL => Some("belongs to a plug-in of CRIU"),
            0 | LATER.. => Some("is of an unknown kind"),
            _ => None,
        };
        found.extend(why.map(|why| format!("the open file {id} {why}")));
        if let Some(RegularFile { name, mode: Some(mode) }) = regular
            && mode & KIND == BLOCK
            && !holds(MKNOD)
        {
            let name = super::rights::shown(&String::from_utf8_lossy(&name));
            found.push(format!("the open file {id} ({name}) is a block device, which no container is given"));
        }
    }
    if holds(MKNOD) {
        return Ok(found);
    }
    let failed = |source| ImageError::Read { path: images.to_owned(), source };
    for entry in fs::read_dir(images).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("ghost-file-")
            && let Some(node) = ghost(&path)?
            && !node.is_given()
        {
            found.push(format!("the deleted file of {name} is {node}, which no container is given"));
        }
    }
    Ok(found)
}

/// The device that a file without a name is, if it is one.
fn ghost(path: &Path) -> Result<Option<Device>, ImageError> {
    /// More than its record has.
    const MOST: u64 = 4096;
    let damaged = |reason: String| ImageError::Damaged { path: path.to_owned(), reason };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MOST).read_to_end(&mut bytes))
        .map_err(|source| ImageError::Read { path: path.to_owned(), source })?;
    let head = ImageKind::Ghost.head_bytes();
    let rest = bytes
        .strip_prefix(&head[..])
        .ok_or_else(|| damaged("it is not an image of a deleted file".into()))?;
    let cut_off = || damaged("its record is cut off".into());
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(cut_off)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let ghost =
        Ghost::decode(rest.get(..length).ok_or_else(cut_off)?).map_err(|error| damaged(error.to_string()))?;
    let is_block = match ghost.mode & KIND {
        BLOCK => true,
        CHARACTER => false,
        _ => return Ok(None),
    };
    // As the kernel packs numbers for programs (`new_encode_dev`), which CRIU keeps.
    let device = ghost.device.unwrap_or(0);
    let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | (device >> 12 & 0xf_ff00));
    Ok(Some(Device { is_block, major, minor }))
}

/// The archives (tar, by gzip) that a restore unpacks into file systems of the container's where nodes are devices.
///
/// # Errors
/// The images cannot be read.
pub fn archives(images: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let mut names = BTreeSet::new();
    for MountEntry { fstype, flags, root_dev, mnt_id, .. } in all_mounts(images)? {
        if fstype == TMPFS && flags & NO_DEVICES == 0 {
            // The second is the name that a CRIU of before 2016 gave it.
            names.extend([format!("tmpfs-dev-{root_dev}.tar.gz.img"), format!("tmpfs-{mnt_id}.tar.gz.img")]);
        }
    }
    Ok(names.into_iter().map(|name| images.join(name)).filter(|path| path.exists()).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::super::tests::image;
    use super::super::{ProcessTreeEntry, rights};
    use super::*;

    fn entry(kind: u32, mode: u32) -> FileEntry {
        FileEntry { kind, id: 7, regular: Some(RegularFile { name: b"/dev/x".to_vec(), mode: Some(mode) }) }
    }

    /// An image of the files with one of the most ordinary kind.
    pub(in super::super) fn a_file() -> Vec<u8> {
        image(ImageKind::Files, &[entry(1, 0o10_0644)])
    }

    fn excess_of(
        files: &[FileEntry],
        ghosts: &[Ghost],
        capabilities: u64,
    ) -> Result<Vec<String>, ImageError> {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
        write("files.img", &image(ImageKind::Files, files));
        for (number, ghost) in ghosts.iter().enumerate() {
            let bytes = [image(ImageKind::Ghost, &[*ghost]), b"contents".repeat(1000)].concat();
            write(&format!("ghost-file-{number:x}.img"), &bytes);
        }
        excess(directory.path(), &Allowed { capabilities, ..Allowed::default() })
    }

    #[test]
    fn files_that_lead_out_of_the_container_are_named() {
        let null = entry(1, 0o2_0666);
        let ordinary: Vec<_> =
            (1..=14).chain([17, 18, 20]).map(|kind| entry(kind, 0o10_0644)).chain([null]).collect();
        assert_eq!(excess_of(&ordinary, &[], 0).unwrap(), Vec::<String>::new());
        let all = 1 << NET_ADMIN | 1 << BPF | 1 << MKNOD;
        for (file, words, takes_capability) in [
            (entry(TUN, 0), "open file 7 is a network device", true),
            (entry(BPF_MAP, 0), "open file 7 is a BPF map", true),
            (entry(1, 0o6_0660), "open file 7 (/dev/x) is a block device", true),
            (entry(EXTERNAL, 0), "open file 7 belongs to a plug-in of CRIU", false),
            (entry(0, 0), "of an unknown kind", false),
            (entry(65_535, 0), "of an unknown kind", false),
        ] {
            let found = excess_of(std::slice::from_ref(&file), &[], 0).unwrap();
            assert!(matches!(&found[..], [one] if one.contains(words)), "{words}: {found:?}");
            assert_eq!(excess_of(&[file], &[], all).unwrap().is_empty(), takes_capability, "{words}");
        }
        assert!(excess_of(&[], &[], 0).unwrap_err().to_string().contains("it has no files"));
    }

    #[test]
    fn deleted_files_that_are_devices_of_the_node_are_named() {
        let ghost = |mode, device| Ghost { mode, device: Some(device) };
        let own = [ghost(0o10_0644, 0x801), ghost(0o2_0666, 0x103), ghost(0o1_0600, 0)];
        assert_eq!(excess_of(&[entry(1, 0)], &own, 0).unwrap(), Vec::<String>::new());
        let memory = [ghost(0o10_0644, 0), ghost(0o2_0666, 0x101)];
        let found = excess_of(&[entry(1, 0)], &memory, 0).unwrap();
        assert_eq!(
            found,
            ["the deleted file of ghost-file-1.img is the character device 1:1, which no container is given"]
        );
        // Its numbers are packed: 259:70000.
        let disk = [ghost(0o6_0600, 0x1111_0370)];
        assert!(excess_of(&[entry(1, 0)], &disk, 0).unwrap()[0].contains("the block device 259:70000"));
        assert_eq!(excess_of(&[entry(1, 0)], &disk, 1 << MKNOD).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn archives_are_those_of_file_systems_where_nodes_are_devices() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
        let tree = ProcessTreeEntry { pid: 1, ppid: 0, pgid: 1, sid: 1, threads: vec![1] };
        write("pstree.img", &image(ImageKind::ProcessTree, &[tree]));
        rights::tests::write_mounts(
            directory.path(),
            &[(TMPFS, 4, 71, 2), (TMPFS, 5, 72, 6), (TMPFS, 6, 73, 2)],
        );
        for name in ["tmpfs-dev-71", "tmpfs-dev-72", "tmpfs-6", "tmpfs-dev-99"] {
            write(&format!("{name}.tar.gz.img"), b"");
        }
        let found = archives(directory.path()).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["tmpfs-6.tar.gz.img", "tmpfs-dev-71.tar.gz.img"]);
    }
}
