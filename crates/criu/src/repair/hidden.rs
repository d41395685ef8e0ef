//! What a container does not see of `/proc` and `/sys`, or may not write there, where the kernels of two nodes have other
//! files.
//!
//! An engine covers such a file when it makes the container, or binds it on itself, read-only; what its kernel does not have
//! it passes over. CRIU makes the same mounts again, and no others: over a file that this kernel does not have it fails, and one
//! that only this kernel has would be open. So mounts over nothing go, and those that are missing come.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use prost::Message;

use super::mount::{self, Mount, with_those_within};
use crate::images::ImageError;

/// `PROC` and `SYSFS` of CRIU's `fstype`, and where a container has them.
const SHOWN: [(u32, &str); 2] = [(1, "/proc"), (2, "/sys")];

/// The highest number that CRIU takes for a mount.
const LAST: u32 = i32::MAX.unsigned_abs();

/// What is hidden, as paths.
#[derive(Debug)]
pub struct Hidden<'a> {
    /// Files and directories with an empty one over them.
    pub covered: Vec<&'a str>,
    /// What is bound on itself, read-only.
    pub read_only: Vec<&'a str>,
    /// The key of the empty file, in the images.
    pub file_key: &'a str,
    /// Empty directories are brought from outside, too, under the paths that they cover. Else they are of the container's own.
    pub brings_directories: bool,
}

/// What a kernel has at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here {
    /// Nothing.
    Nothing,
    /// A file.
    File,
    /// A directory.
    Directory,
}

impl Here {
    /// What this node's kernel has.
    #[must_use]
    pub fn at(path: &str) -> Self {
        match Path::new(path).metadata() {
            Ok(metadata) if metadata.is_dir() => Self::Directory,
            Err(error) if error.kind() == ErrorKind::NotFound => Self::Nothing,
            Ok(_) | Err(_) => Self::File,
        }
    }
}

/// Makes the mounts in the images of a dump those that hide as much on this kernel.
///
/// # Errors
/// The images cannot be read, are damaged, or cannot be written; or they have no mount from which one could be made that is
/// missing.
pub fn fit_kernel(images: &Path, hidden: &Hidden<'_>, here: impl Fn(&str) -> Here) -> Result<(), ImageError> {
    let namespaces = mount::namespaces(images)?;
    let mut last = 0;
    for image in &namespaces {
        mount::change(image, |_, mounts| {
            last = mounts.iter().filter_map(|mount| mount.id).fold(last, u32::max);
            Ok(None)
        })?;
    }
    let mut bare = None;
    for image in &namespaces {
        mount::change(image, |records, mounts| {
            let fitted = Fitted { hidden, mounts, here: &here };
            let gone = with_those_within(mounts, |mount| fitted.is_over_nothing(mount));
            let missing = fitted.missing();
            if gone.is_empty() && missing.is_empty() {
                return Ok(None);
            }
            let stays = |mount: &Mount| mount.id.is_none_or(|id| !gone.contains(&id));
            let kept = records.iter().zip(mounts).filter(|(_, mount)| stays(mount));
            let mut fit: Vec<Cow<'_, [u8]>> = kept.map(|(record, _)| Cow::Borrowed(*record)).collect();
            for (path, parent) in missing {
                let Some((like, change)) = fitted.made(path) else {
                    bare = Some(path.to_owned());
                    return Ok(None);
                };
                last = last
                    .checked_add(1)
                    .filter(|last| *last <= LAST)
                    .ok_or("a mount has the highest number")?;
                let change = Mount { id: Some(last), parent, shared: Some(0), master: Some(0), ..change };
                fit.push(Cow::Owned([records[like], change.encode_to_vec().as_slice()].concat()));
            }
            Ok(Some(fit))
        })?;
    }
    bare.map_or(Ok(()), |path| Err(ImageError::Bare { path }))
}

/// The mounts of a namespace, and what is to be hidden.
struct Fitted<'a, H> {
    hidden: &'a Hidden<'a>,
    mounts: &'a [Mount],
    here: &'a H,
}

impl<'a, H: Fn(&str) -> Here> Fitted<'a, H> {
    /// The kernel's own file system at `/proc` or `/sys` of this path.
    fn file_system(&self, path: &str) -> Option<&'a Mount> {
        let (fstype, place) = SHOWN.into_iter().find(|(_, place)| Path::new(path).starts_with(place))?;
        let mut there = self.mounts.iter().filter(|mount| mount.place() == place);
        let is_it = |mount: &&Mount| mount.fstype == Some(fstype) && mount.key.is_none();
        // With a second one it is not known which is seen.
        there.next().filter(is_it).filter(|_| there.next().is_none())
    }

    fn covers(&self, mount: &Mount) -> bool {
        self.hidden.covered.contains(&mount.place())
    }

    /// Whether this is a part of `/proc`, bound on itself.
    fn is_bound(&self, mount: &Mount) -> bool {
        let place = mount.place();
        let below = || place.strip_prefix(SHOWN[0].1);
        self.hidden.read_only.contains(&place)
            && mount.fstype == Some(SHOWN[0].0)
            && mount.root.as_deref() == below()
    }

    fn is_over_nothing(&self, mount: &Mount) -> bool {
        let hides = self.covers(mount) || self.is_bound(mount);
        hides
            && (self.here)(mount.place()) == Here::Nothing
            && self.file_system(mount.place()).is_some_and(|shown| shown.id == mount.parent)
    }

    /// What this kernel has and nothing hides, and the mount in which it is. A namespace in which nothing is hidden is one that a
    /// process has made for itself, or of a container that sees all.
    fn missing(&self) -> Vec<(&'a str, Option<u32>)> {
        let some = |paths: &'a [&'a str], is_so: &dyn Fn(&Mount) -> bool| {
            if self.mounts.iter().any(is_so) { paths } else { &[] }
        };
        let covered = some(&self.hidden.covered, &|mount| self.covers(mount));
        let bound = some(&self.hidden.read_only, &|mount| self.is_bound(mount));
        let bare = covered.iter().chain(bound).copied().filter(|path| {
            (self.here)(path) != Here::Nothing && !self.mounts.iter().any(|mount| mount.place() == *path)
        });
        bare.filter_map(|path| Some((path, self.file_system(path)?.id))).collect()
    }

    /// The record from which a mount at this path can be made, and what is other in it.
    fn made(&self, path: &str) -> Option<(usize, Mount)> {
        let find = |is_like: &dyn Fn(&Mount) -> bool| self.mounts.iter().position(is_like);
        let is_file = |mount: &Mount| mount.key.as_deref() == Some(self.hidden.file_key);
        let is_covered = self.hidden.covered.contains(&path);
        let (like, change) = match (is_covered, (self.here)(path)) {
            (false, _) => {
                let root = path.strip_prefix(SHOWN[0].1).map(str::to_owned);
                (find(&|mount| self.is_bound(mount))?, Mount { root, ..Mount::default() })
            }
            (true, Here::Directory) if self.hidden.brings_directories => {
                // No part of another mount, and no other of it.
                let (root, key) = (Some(path.to_owned()), Some(path.to_owned()));
                (find(&|mount| self.covers(mount))?, Mount { root, key, ..Mount::default() })
            }
            // An empty tmpfs, which is mounted a second time.
            (true, Here::Directory) => {
                (find(&|mount| self.covers(mount) && mount.key.is_none())?, Mount::default())
            }
            (true, _) => (find(&|mount| self.covers(mount) && is_file(mount))?, Mount::default()),
        };
        // CRIU's paths may be relative.
        let relative = self.mounts[like].mountpoint.as_deref().is_some_and(|at| at.starts_with('.'));
        let mountpoint = Some(format!("{}{path}", if relative { "." } else { "" }));
        Some((like, Mount { mountpoint, ..change }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;
    use crate::images::{ImageKind, split};

    const PROC: u32 = 1;
    const SYSFS: u32 = 2;
    const TMPFS: u32 = 5;

    fn mount(fstype: u32, id: u32, parent: u32, place: &str, root: &str, key: Option<&str>) -> Mount {
        Mount {
            fstype: Some(fstype),
            id: Some(id),
            device: Some(fstype),
            parent: Some(parent),
            flags: Some(15),
            root: Some(root.into()),
            mountpoint: Some(format!(".{place}")),
            shared: Some(7),
            key: key.map(str::to_owned),
            ..Mount::default()
        }
    }

    /// Those of a container, with some of its covers.
    fn container() -> Vec<Mount> {
        vec![
            mount(17, 1, 0, "/", "/", None),
            mount(PROC, 2, 1, "/proc", "/", None),
            mount(SYSFS, 3, 1, "/sys", "/", None),
            mount(PROC, 4, 2, "/proc/sys", "/sys", None),
            mount(PROC, 5, 2, "/proc/sysrq-trigger", "/sysrq-trigger", None),
            mount(TMPFS, 6, 2, "/proc/keys", "/null", Some("/dev/null")),
            mount(TMPFS, 7, 2, "/proc/kcore", "/null", Some("/dev/null")),
        ]
    }

    fn fit(namespaces: &[Vec<Mount>], has: &[(&str, Here)]) -> Result<Vec<Vec<Mount>>, ImageError> {
        fit_of(true, namespaces, has)
    }

    fn fit_of(
        brings_directories: bool,
        namespaces: &[Vec<Mount>],
        has: &[(&str, Here)],
    ) -> Result<Vec<Vec<Mount>>, ImageError> {
        let directory = tempfile::tempdir().unwrap();
        let path = |number: usize| directory.path().join(format!("mountpoints-{number}.img"));
        for (number, mounts) in namespaces.iter().enumerate() {
            let mut bytes = [0x5456_4319_u32, 0x5556_3928].map(u32::to_le_bytes).concat();
            for mount in mounts {
                bytes.extend(u32::try_from(mount.encoded_len()).unwrap().to_le_bytes());
                bytes.extend(mount.encode_to_vec());
            }
            fs::write(path(number), bytes).unwrap();
        }
        let hidden = Hidden {
            covered: vec!["/proc/keys", "/proc/kcore", "/proc/acpi", "/sys/firmware"],
            read_only: vec!["/proc/sys", "/proc/sysrq-trigger"],
            file_key: "/dev/null",
            brings_directories,
        };
        let here =
            |path: &str| has.iter().find(|(here, _)| *here == path).map_or(Here::Nothing, |(_, what)| *what);
        fit_kernel(directory.path(), &hidden, here)?;
        let read = |number| {
            let bytes = fs::read(path(number)).unwrap();
            let (_, records) = split(&bytes, ImageKind::Mountpoints).unwrap();
            records.iter().map(|record| Mount::decode(*record).unwrap()).collect()
        };
        Ok((0..namespaces.len()).map(read).collect())
    }

    const ALL: [(&str, Here); 4] = [
        ("/proc/keys", Here::File),
        ("/proc/kcore", Here::File),
        ("/proc/sys", Here::Directory),
        ("/proc/sysrq-trigger", Here::File),
    ];

    #[test]
    fn mounts_over_what_this_kernel_has_stay_as_they_are() {
        assert_eq!(fit(&[container()], &ALL).unwrap(), [container()]);
    }

    #[test]
    fn mounts_over_nothing_go_with_those_in_them() {
        let mut mounts = container();
        mounts.push(mount(TMPFS, 8, 7, "/proc/kcore/x", "/", None));
        // Of the container's own, at the same path of another file system.
        let elsewhere = mount(TMPFS, 9, 1, "/proc/kcore", "/null", Some("/dev/null"));
        let fitted = fit(&[mounts.clone()], &[ALL[0], ALL[2]]).unwrap();
        let ids: Vec<_> = fitted[0].iter().map(|mount| mount.id.unwrap()).collect();
        assert_eq!(ids, [1, 2, 3, 4, 6]);
        mounts.push(elsewhere.clone());
        assert!(fit(&[mounts], &[ALL[0], ALL[2]]).unwrap()[0].contains(&elsewhere));
    }

    #[test]
    fn what_only_this_kernel_has_is_hidden_as_the_rest_is() {
        let mut mounts = container();
        mounts.retain(|mount| !["/proc/kcore", "/proc/sysrq-trigger"].contains(&mount.place()));
        mounts.push(mount(TMPFS, 9, 3, "/sys/firmware", "/x", Some("/sys/firmware")));
        let has = [&ALL[..], &[("/proc/acpi", Here::Directory), ("/sys/firmware", Here::Directory)]].concat();
        // In each namespace, with a number that none has.
        let other =
            vec![mount(PROC, 20, 1, "/proc", "/", None), mount(PROC, 21, 20, "/proc/sys", "/sys", None)];
        let fitted = fit(&[mounts.clone()], &has).unwrap();
        let new = |id, like: &Mount, place: &str, change: Mount| Mount {
            id: Some(id),
            mountpoint: Some(format!(".{place}")),
            parent: Some(2),
            shared: Some(0),
            master: Some(0),
            root: change.root.or(like.root.clone()),
            key: change.key.or(like.key.clone()),
            ..like.clone()
        };
        let made = [
            new(10, &mounts[4], "/proc/kcore", Mount::default()),
            new(
                11,
                &mounts[4],
                "/proc/acpi",
                Mount { key: Some("/proc/acpi".into()), root: Some("/proc/acpi".into()), ..Mount::default() },
            ),
            new(
                12,
                &mounts[3],
                "/proc/sysrq-trigger",
                Mount { root: Some("/sysrq-trigger".into()), ..Mount::default() },
            ),
        ];
        assert_eq!(fitted[0], [&mounts[..], &made].concat());
        let fitted = fit(&[mounts, other], &ALL[1..]).unwrap();
        let ids =
            |namespace: usize| fitted[namespace].iter().map(|mount| mount.id.unwrap()).collect::<Vec<_>>();
        assert_eq!((ids(0), ids(1)), (vec![1, 2, 3, 4, 22, 23], vec![20, 21, 24]));
    }

    #[test]
    fn a_namespace_in_which_nothing_is_hidden_stays_as_it_is() {
        let mounts = [vec![mount(17, 1, 0, "/", "/", None), mount(PROC, 2, 1, "/proc", "/", None)]];
        assert_eq!(fit(&mounts, &ALL).unwrap(), mounts);
        // Nor where the node's own is brought, or two lie over one another.
        let mut brought = container();
        brought[1].key = Some("/proc".into());
        assert_eq!(fit(&[brought.clone()], &[]).unwrap(), [brought]);
        let mut twice = container();
        twice.push(mount(PROC, 9, 2, "/proc", "/", None));
        assert_eq!(fit(&[twice.clone()], &[]).unwrap(), [twice]);
    }

    #[test]
    fn an_empty_directory_of_its_own_is_mounted_a_second_time() {
        let mut mounts = container();
        mounts.push(mount(TMPFS, 8, 3, "/sys/firmware", "/", None));
        let has = [&ALL[..], &[("/proc/acpi", Here::Directory), ("/sys/firmware", Here::Directory)]].concat();
        let fitted = fit_of(false, &[mounts], &has).unwrap();
        let second = fitted[0].last().unwrap();
        assert_eq!((second.id, second.parent, second.place()), (Some(9), Some(2), "/proc/acpi"));
        assert_eq!((second.device, &second.key, second.root.as_deref()), (Some(TMPFS), &None, Some("/")));
    }

    #[test]
    fn what_cannot_be_hidden_is_named() {
        let has = [&ALL[..], &[("/proc/acpi", Here::Directory)]].concat();
        let message = fit_of(false, &[container()], &has).unwrap_err().to_string();
        assert!(message.contains("/proc/acpi"), "{message}");
        let mut last = container();
        last[6].id = Some(LAST);
        last.remove(4);
        assert!(fit(&[last], &ALL).unwrap_err().to_string().contains("highest number"));
    }
}
