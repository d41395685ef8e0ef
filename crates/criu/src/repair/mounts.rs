//! Repairs what a restore would make of mounts that are brought from outside.
//!
//! CRIU takes a mount for a copy of an earlier one of the same file system whose root it has or is below, and
//! then sets its flags only where they differ from that one's. A mount from outside is no copy: it is bound
//! anew, without any flag. So of two that are read-only the second would be writable after a restore. Here
//! their roots are made such that none is below another; nothing but that question reads them.
//!
//! Where systemd runs, mounts of a container follow those of the node from which they are bound (they are its *slaves*,
//! mount_namespaces(7)). CRIU would have them follow the other node's, and fails where nobody shares those. So they follow no
//! mount outside of the container any more.
//!
//! What covers files of `/proc` is dumped under the key `/dev/null`, under which runc's restore brings the
//! node's own device. It gets a key of its own.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;

use prost::Message;

use super::mount::{self, Mount};
use crate::images::ImageError;

/// MS_RDONLY, MS_NOSUID, MS_NODEV and MS_NOEXEC (mount(2)).
const COVER_FLAGS: u32 = 1 | 2 | 4 | 8;

/// Repairs the mounts in the images of a dump: those at one of the paths `covered` get the key `cover`.
pub fn external_mounts(images: &Path, covered: &[&str], cover: &str) -> Result<(), ImageError> {
    let namespaces = mount::namespaces(images)?;
    let mut shared = BTreeSet::new();
    for image in &namespaces {
        mount::change(image, |_, mounts| {
            shared.extend(mounts.iter().filter_map(|mount| mount.shared));
            Ok(None)
        })?;
    }
    let repairs = Repairs { covered, cover, shared };
    for image in &namespaces {
        mount::change(image, |records, mounts| Ok(Some(repairs.repaired(records, mounts))))?;
    }
    Ok(())
}

struct Repairs<'a> {
    covered: &'a [&'a str],
    cover: &'a str,
    /// The groups of mounts that share what is mounted in them, in all namespaces.
    shared: BTreeSet<u32>,
}

impl Repairs<'_> {
    /// The records of an image, each with the fields that overrule some of its own.
    fn repaired<'a>(&self, records: &[&'a [u8]], mounts: &[Mount]) -> Vec<Cow<'a, [u8]>> {
        // A mount that the container made of one from outside is a copy, and found by the root.
        let copied: BTreeSet<_> =
            mounts.iter().filter(|mount| mount.key.is_none()).map(|mount| mount.device).collect();
        let repaired = records.iter().zip(mounts).map(|(record, mount)| {
            let changed = self.change(mount, copied.contains(&mount.device)).encode_to_vec();
            Cow::Owned([*record, &changed].concat())
        });
        repaired.collect()
    }

    /// The fields that overrule those of a mount.
    fn change(&self, mount: &Mount, copied: bool) -> Mount {
        let mut change = Mount::default();
        // 0: none.
        if mount.master.is_some_and(|master| master != 0 && !self.shared.contains(&master)) {
            change.master = Some(0);
        }
        let (Some(_), Some(id)) = (&mount.key, mount.id) else { return change };
        let covers = self.covered.contains(&mount.place());
        if covers {
            change.key = Some(self.cover.to_owned());
            change.flags = Some(mount.flags.unwrap_or_default() | COVER_FLAGS);
        }
        if covers || !copied {
            change.root = Some(format!("/godwit-external-{id}-"));
        }
        change
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;
    use crate::images::{ImageKind, split};

    fn mount(id: u32, device: u32, root: &str, place: &str, key: Option<&str>) -> Mount {
        Mount {
            id: Some(id),
            device: Some(device),
            flags: Some(1),
            root: Some(root.into()),
            mountpoint: Some(place.into()),
            key: key.map(str::to_owned),
            ..Mount::default()
        }
    }

    fn image(mounts: &[Mount]) -> Vec<u8> {
        let mut bytes = [0x5456_4319_u32, 0x5556_3928].map(u32::to_le_bytes).concat();
        for mount in mounts {
            // Field 14, which is not known here.
            let record = [&mount.encode_to_vec()[..], &[0x72, 2, b'r', b'w']].concat();
            bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            bytes.extend(record);
        }
        bytes
    }

    fn repair(mounts: &[Mount]) -> Vec<Mount> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mountpoints-13.img");
        fs::write(&path, image(mounts)).unwrap();
        external_mounts(directory.path(), &["/proc/keys", "/proc/timer_list"], "cover").unwrap();
        let bytes = fs::read(&path).unwrap();
        let (_, records) = split(&bytes, ImageKind::Mountpoints).unwrap();
        assert!(records.iter().all(|record| record.windows(4).any(|bytes| bytes == [0x72, 2, b'r', b'w'])));
        records.iter().map(|record| Mount::decode(*record).unwrap()).collect()
    }

    #[test]
    fn of_mounts_from_outside_none_is_taken_for_a_copy_of_another() {
        let mounts = [
            mount(1, 5, "/", "./", None),
            mount(2, 8, "/data", "./a", Some("/a")),
            mount(3, 8, "/data/part", "./b", Some("/b")),
        ];
        let repaired = repair(&mounts);
        assert_eq!(repaired[0], mounts[0]);
        let roots = [repaired[1].root.as_deref().unwrap(), repaired[2].root.as_deref().unwrap()];
        assert!(!roots[0].starts_with(roots[1]) && !roots[1].starts_with(roots[0]), "{roots:?}");
        assert_eq!((repaired[1].key.as_deref(), repaired[1].flags), (Some("/a"), Some(1)));
    }

    #[test]
    fn a_mount_follows_those_of_the_container_and_no_other() {
        let follows = |id, shared, master, key| Mount {
            shared: Some(shared),
            master: Some(master),
            ..mount(id, id, "/", "./x", key)
        };
        let mounts = [
            follows(1, 7, 0, None),
            follows(2, 8, 30, None),
            follows(3, 0, 30, Some("/a")),
            follows(4, 0, 7, None),
            follows(5, 9, 8, Some("/b")),
        ];
        let repaired = repair(&mounts);
        let found: Vec<_> =
            repaired.iter().map(|mount| (mount.shared.unwrap(), mount.master.unwrap())).collect();
        assert_eq!(found, [(7, 0), (8, 0), (0, 0), (0, 7), (9, 8)]);
    }

    #[test]
    fn a_copy_that_the_container_made_is_still_found() {
        let mounts = [mount(2, 8, "/data", "./a", Some("/a")), mount(3, 8, "/data/part", "./b", None)];
        assert_eq!(repair(&mounts), mounts);
    }

    #[test]
    fn what_covers_files_is_read_only_under_a_key_of_its_own() {
        let repaired = repair(&[
            mount(1, 6, "/null", "./proc/keys", Some("/dev/null")),
            mount(2, 6, "/null", "./proc/timer_list", Some("/dev/null")),
            mount(3, 6, "/", "./dev", None),
        ]);
        for mount in &repaired[..2] {
            assert_eq!((mount.key.as_deref(), mount.flags), (Some("cover"), Some(15)));
        }
        assert_ne!(repaired[0].root, repaired[1].root);
        assert_eq!(repaired[2].key, None);
    }

    #[test]
    fn a_damaged_image_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut bytes = image(&[mount(1, 6, "/", "./", None)]);
        bytes.truncate(bytes.len() - 1);
        fs::write(directory.path().join("mountpoints-1.img"), bytes).unwrap();
        let message = external_mounts(directory.path(), &[], "x").unwrap_err().to_string();
        assert!(message.contains("mountpoints-1.img is damaged"), "{message}");
    }
}
