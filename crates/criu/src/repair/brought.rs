//! Mounts that were to be brought from outside become the container's own, or go.
//!
//! The images of a move name mounts that each node brings itself. A checkpoint that stays as a file is restored where nobody
//! brings them: an empty directory over what shows the node becomes an empty tmpfs, as runc makes one over a masked path, and
//! what an engine had of its own there goes.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use prost::Message;

use super::mount::{self, Mount, with_those_within};
use crate::images::ImageError;

/// `TMPFS` of CRIU's `fstype`.
const TMPFS: u32 = 5;

/// The highest number of a filesystem without a block device: CRIU looks for the device of any other. As the kernel has it,
/// the major number is above the lower 20 bits.
const LAST_ANONYMOUS: u32 = (1 << 20) - 1;

/// MS_RDONLY of mount(2).
pub const READ_ONLY: u32 = 1;
/// MS_NOSUID, MS_NODEV and MS_NOEXEC of mount(2).
pub const CONFINED: u32 = 2 | 4 | 8;

/// What becomes of a mount from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Becomes<'a> {
    /// The container is without it.
    Nothing,
    /// A tmpfs.
    Tmpfs {
        /// What it is mounted as.
        source: &'a str,
        /// Its options, as mount(8) takes them.
        options: &'a str,
        /// Its flags, as mount(2) takes them.
        flags: u32,
        /// What is in it: a tar archive, by gzip.
        contents: &'a [u8],
        /// Whether no other mount may become one: what was one place would be two.
        is_only: bool,
    },
}

/// Changes the mounts in the images of a dump; `change` says what becomes of one at this place, nothing where it stays. A mount
/// that goes takes those with it that are mounted within it.
///
/// # Errors
/// The images cannot be read, are damaged, or cannot be written.
pub fn brought_mounts<'b>(
    images: &Path,
    change: impl Fn(&str, bool) -> Option<Becomes<'b>>,
) -> Result<(), ImageError> {
    let mut made = Made::default();
    for image in mount::namespaces(images)? {
        mount::change(&image, |records, mounts| changed(records, mounts, &change, &mut made).map(Some))?;
    }
    for (device, contents) in made.contents {
        let path = images.join(format!("tmpfs-dev-{device}.tar.gz.img"));
        let written = fs::OpenOptions::new().write(true).create_new(true).open(&path);
        let written = written.and_then(|mut file| std::io::Write::write_all(&mut file, contents));
        written.map_err(|source| ImageError::Write { path, source })?;
    }
    Ok(())
}

/// What has become a tmpfs, in all namespaces.
#[derive(Default)]
struct Made<'b> {
    /// The number of each, and what is in it.
    contents: Vec<(u32, &'b [u8])>,
    /// One of them is the only one.
    has_only: bool,
}

fn changed<'a, 'b>(
    records: &[&'a [u8]],
    mounts: &[Mount],
    change: &impl Fn(&str, bool) -> Option<Becomes<'b>>,
    made: &mut Made<'b>,
) -> Result<Vec<Cow<'a, [u8]>>, String> {
    let gone: BTreeSet<_> = with_those_within(mounts, |mount| {
        mount.place() != "/" && change(mount.place(), mount.key.is_some()) == Some(Becomes::Nothing)
    });
    let anonymous = mounts.iter().filter_map(|mount| mount.device).filter(|device| *device <= LAST_ANONYMOUS);
    let mut free = anonymous.max().unwrap_or(0);
    let mut changed = Vec::with_capacity(records.len());
    for (record, mount) in records.iter().zip(mounts) {
        if mount.id.is_some_and(|id| gone.contains(&id)) {
            continue;
        }
        let becomes = change(mount.place(), mount.key.is_some());
        let Some(Becomes::Tmpfs { source, options, flags, contents, is_only }) = becomes else {
            changed.push(Cow::Borrowed(*record));
            continue;
        };
        if is_only && made.has_only {
            return Err(format!("{} is mounted from outside more than once", mount.place()));
        }
        made.has_only |= is_only;
        // Another file system than all others.
        free += 1;
        if free > LAST_ANONYMOUS {
            return Err("a mount has the highest device number".into());
        }
        let own_mount = Mount {
            fstype: Some(TMPFS),
            device: Some(free),
            flags: Some(flags),
            root: Some("/".into()),
            source: Some(source.to_owned()),
            options: Some(options.to_owned()),
            shared: Some(0),
            master: Some(0),
            filesystem_flags: Some(0),
            key: None,
            ..mount.clone()
        };
        made.contents.push((free, contents));
        changed.push(Cow::Owned(own_mount.encode_to_vec()));
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::images::{ImageKind, split};

    fn mount(id: u32, parent: u32, place: &str, key: Option<&str>) -> Mount {
        Mount {
            fstype: Some(0),
            id: Some(id),
            device: Some(id + 100),
            parent: Some(parent),
            flags: Some(9),
            root: Some("/node".into()),
            mountpoint: Some(place.into()),
            source: Some("x".into()),
            options: Some(String::new()),
            key: key.map(str::to_owned),
            ..Mount::default()
        }
    }

    fn write(path: &Path, mounts: &[Mount]) {
        let mut bytes = [0x5456_4319_u32, 0x5556_3928].map(u32::to_le_bytes).concat();
        for mount in mounts {
            let record = mount.encode_to_vec();
            bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            bytes.extend(record);
        }
        fs::write(path, bytes).unwrap();
    }

    fn change<'b>(
        mounts: &[Mount],
        change: impl Fn(&str, bool) -> Option<Becomes<'b>>,
    ) -> (Vec<Mount>, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mountpoints-13.img");
        write(&path, mounts);
        brought_mounts(directory.path(), change).unwrap();
        let bytes = fs::read(&path).unwrap();
        let (_, records) = split(&bytes, ImageKind::Mountpoints).unwrap();
        let mut files: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        (records.iter().map(|record| Mount::decode(*record).unwrap()).collect(), files)
    }

    #[test]
    fn what_goes_takes_with_it_what_is_mounted_within() {
        let all = [
            mount(4, 3, "./sys/fs/cgroup/pids", Some("/sys/fs/cgroup/pids")),
            mount(3, 2, "./sys/fs/cgroup", None),
            mount(2, 1, "./sys", None),
            mount(1, 0, "/", None),
        ];
        let (left, _) = change(&all, |place, _| (place == "/sys/fs/cgroup").then_some(Becomes::Nothing));
        assert_eq!(left, all[2..]);
        let (left, _) = change(&all, |place, _| (place == "/").then_some(Becomes::Nothing));
        assert_eq!(left, all, "the root stays");
    }

    #[test]
    fn a_mount_from_outside_becomes_a_tmpfs_with_contents_of_its_own() {
        let on_disk = Mount { device: Some(254 << 20), ..mount(3, 1, "/data", Some("/data")) };
        let all = [mount(2, 1, "/dev/shm", Some("/dev/shm")), mount(1, 0, "/", None), on_disk];
        let (left, files) = change(&all, |place, is_external| {
            (place == "/dev/shm" && is_external).then_some(Becomes::Tmpfs {
                source: "shm",
                options: "size=1k",
                flags: CONFINED,
                contents: b"archive",
                is_only: true,
            })
        });
        let changed = &left[0];
        assert_eq!((changed.fstype, changed.device, changed.flags), (Some(TMPFS), Some(103), Some(CONFINED)));
        assert_eq!((changed.key.as_deref(), changed.root.as_deref()), (None, Some("/")));
        assert_eq!((changed.id, changed.parent, changed.place()), (Some(2), Some(1), "/dev/shm"));
        assert_eq!(left[1..], all[1..]);
        assert_eq!(files, ["mountpoints-13.img", "tmpfs-dev-103.tar.gz.img"]);
    }

    #[test]
    fn what_is_to_be_one_is_refused_twice_whatever_the_namespace() {
        let shm = |_: &str, _| {
            let (source, options, flags) = ("shm", "", CONFINED);
            Some(Becomes::Tmpfs { source, options, flags, contents: b"archive", is_only: true })
        };
        let one = |id| mount(id, 1, "/dev/shm", Some("/dev/shm"));
        for images in [vec![vec![one(2), one(3)]], vec![vec![one(2)], vec![one(3)]]] {
            let directory = tempfile::tempdir().unwrap();
            for (number, mounts) in images.iter().enumerate() {
                write(&directory.path().join(format!("mountpoints-{number}.img")), mounts);
            }
            let error = brought_mounts(directory.path(), shm).unwrap_err().to_string();
            assert!(error.contains("/dev/shm is mounted from outside more than once"), "{error}");
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), images.len());
        }
    }
}
