//! The tmpfs of a container that CRIU leaves to others: which there are, and how a restore brings them.
//!
//! CRIU puts all of a tmpfs into its images by tar(1), while the container is frozen. One that it is told to take for an
//! external mount it leaves alone, and a restore binds what is in its place at the destination. That a tmpfs is one does
//! not show in the images of other mounts, so it must be the only mount of its filesystem. What is below a mount in it
//! does not show either: only those that were there before the container ran may be there.
//!
//! A restore brings them with room for whatever order their contents come in ([`COMING_TMPFS_BYTES`]); [`limit`] gives
//! them their own limits before the container runs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags};
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick};

use super::mounts::MountNamespace;
use super::process::ProcessStatus;
use crate::beneath::{Links, Root};
use crate::container::{COMING_TMPFS_BYTES, ContainerConfig, DefinedTmpfs, RestoreRequest, Tmpfs};

/// By which images name the tmpfs of this number.
fn key(number: usize) -> String {
    format!("godwit-tmpfs-{number}")
}

/// The lines of CRIU's options by which a restore brings those that are not in its images; the others do no harm.
pub(crate) fn criu_options(request: &RestoreRequest) -> String {
    let line = |(number, path): (usize, std::path::PathBuf)| {
        format!("external \"mnt[{}]:{}\"\n", key(number), path.display())
    };
    request.tmpfs().into_iter().enumerate().map(line).collect()
}

/// Those that CRIU can leave alone now. `members` are the processes of the container, `pid` is its main one.
pub(crate) fn find(config: &ContainerConfig, pid: u32, members: &[u32]) -> io::Result<Vec<Tmpfs>> {
    if !share_their_mounts(pid, members)? {
        return Ok(Vec::new());
    }
    let container = MountNamespace::of(pid)?;
    let mounts: Vec<_> = container.mountinfo().lines().filter_map(Mounted::parse).collect();
    let inside = Root::of(container.as_fd().try_clone_to_owned()?, Links::Refused);
    let mut found = Vec::new();
    let mut used = BTreeSet::new();
    for (number, defined) in config.tmpfs().iter().enumerate() {
        let covered = |target: &str| is_from_the_start(config, &inside, target);
        let Some(device) = plain(defined, &mounts, covered) else { continue };
        let opened = open_root(&inside, defined, device);
        let opened = opened.and_then(|root| Ok((has_files(&root, &defined.target, covered)?, root)));
        let (has_files, root) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let (name, target) = (&config.name, defined.target.display());
                tracing::debug!(service = %name, %target, %error, "a tmpfs is left to CRIU");
                continue;
            }
        };
        if has_files {
            used.insert(device);
        }
        let external = (defined.target.to_string_lossy().into_owned(), key(number));
        let number = u32::try_from(number).map_err(io::Error::other)?;
        found.push((device, Tmpfs { number, external, root: Arc::new(root) }));
    }
    let unfit = if used.is_empty() { BTreeSet::new() } else { unfit(&used, members)? };
    Ok(found.into_iter().filter(|(device, _)| !unfit.contains(device)).map(|(_, tmpfs)| tmpfs).collect())
}

/// Gives those that a restore has brought the limits of the container's definition.
///
/// What cannot be limited is not: a service that is here for good must run.
pub(crate) fn limit(config: &ContainerConfig, processes: &[ProcessStatus]) {
    let Some(main) = processes.iter().find(|process| process.inner_pid == 1) else { return };
    let inside = MountNamespace::of(main.pid).map(|mounts| Root::of(mounts.into_root(), Links::Refused));
    for defined in config.tmpfs() {
        let limited = match &inside {
            Ok(inside) => limit_one(inside, &defined),
            // It has ended meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => return,
            Err(error) => {
                Err(io::Error::new(error.kind(), format!("the mounts of process {}: {error}", main.pid)))
            }
        };
        if let Err(error) = limited {
            let (name, target) = (&config.name, defined.target.display());
            tracing::warn!(service = %name, %target, %error, "a tmpfs cannot be given its limit, and may take more");
        }
    }
}

fn limit_one(inside: &Root, defined: &DefinedTmpfs) -> io::Result<()> {
    if defined.size_bytes == 0 {
        // It has come with the kernel's default.
        return Ok(());
    }
    let target = defined.target.as_os_str().as_bytes();
    let path = target.strip_prefix(b"/").unwrap_or(target);
    let root = match inside.open_at(path, OFlags::PATH | OFlags::DIRECTORY) {
        // Nothing was mounted there.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let now = rustix::fs::fstatfs(&root)?;
    let bytes = u128::from(now.f_blocks) * u128::try_from(now.f_bsize).unwrap_or(0);
    if now.f_type as i64 != TMPFS_MAGIC || bytes != u128::from(COMING_TMPFS_BYTES) {
        return Ok(());
    }
    let picked = fspick(root.as_fd(), "", FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC)?;
    fsconfig_set_string(picked.as_fd(), "size", defined.size_bytes.to_string())?;
    Ok(fsconfig_reconfigure(picked.as_fd())?)
}

/// What statfs(2) calls a tmpfs.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Whether all of the processes see the same mounts.
fn share_their_mounts(pid: u32, members: &[u32]) -> io::Result<bool> {
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let own = namespace(pid)?;
    // What has ended sees nothing.
    Ok(members.iter().all(|&member| namespace(member).map_or(true, |namespace| namespace == own)))
}

/// A line of `/proc/PID/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mounted<'a> {
    device: u64,
    root: &'a str,
    target: String,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mounted<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(2);
        let (major, minor) = mount.next()?.split_once(':')?;
        let (root, target) = (mount.next()?, unescaped(mount.next()?)?);
        let mut filesystem = filesystem.split(' ');
        let kind = filesystem.next()?;
        let options = filesystem.nth(1)?;
        let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
        Some(Self { device, root, target, kind, options })
    }
}

/// Without the octal numbers that the kernel writes for some characters.
pub(crate) fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('\\');
    let mut plain = parts.next()?.to_owned();
    for part in parts {
        let number = u8::from_str_radix(part.get(..3)?, 8).ok()?;
        plain.push(char::from(number));
        plain.push_str(part.get(3..)?);
    }
    Some(plain)
}

/// Whether a mount over a directory was made with the container.
fn is_from_the_start(config: &ContainerConfig, inside: &Root, target: &str) -> bool {
    let path = target.strip_prefix('/').unwrap_or(target);
    let defined = ["/dev/pts", "/dev/shm", "/dev/mqueue"].contains(&target)
        || config.mounts.iter().any(|mount| mount.target == Path::new(target));
    defined && inside.open_at(path.as_bytes(), OFlags::PATH | OFlags::DIRECTORY).is_ok()
}

/// The device of a tmpfs that is mounted as it was defined, once, if it is. In it there are only mounts that are `fine`.
fn plain(defined: &DefinedTmpfs, mounts: &[Mounted<'_>], fine: impl Fn(&str) -> bool) -> Option<u64> {
    let target = defined.target.to_str()?;
    // CRIU takes it for the end of the name.
    if target.contains(']') {
        return None;
    }
    let mut there = mounts.iter().filter(|mounted| mounted.target == target);
    let (Some(mounted), None) = (there.next(), there.next()) else { return None };
    let below = format!("{target}/");
    let alone = mounts.iter().all(|other| !other.target.starts_with(&below) || fine(&other.target))
        && mounts.iter().filter(|other| other.device == mounted.device).count() == 1;
    let limit = (defined.size_bytes != 0)
        .then(|| format!("size={}k", defined.size_bytes.next_multiple_of(4096) / 1024));
    let (size, others): (Vec<_>, Vec<_>) =
        mounted.options.split(',').partition(|option| option.starts_with("size="));
    let as_defined = mounted.kind == "tmpfs"
        && mounted.root == "/"
        && size.first().copied() == limit.as_deref()
        // Another option is none that the definition gives, and would be lost.
        && others.iter().all(|option| {
            ["rw", "inode32", "inode64"].contains(option) || Some(*option) == defined.mode
        });
    (alone && as_defined).then_some(mounted.device)
}

fn open_root(inside: &Root, defined: &DefinedTmpfs, device: u64) -> io::Result<OwnedFd> {
    let target = defined.target.as_os_str().as_bytes();
    let path = target.strip_prefix(b"/").unwrap_or(target);
    let root = inside.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOATIME)?;
    match rustix::fs::fstat(&root)?.st_dev == device {
        true => Ok(root),
        false => Err(io::Error::other("another filesystem is mounted there now")),
    }
}

/// Whether there is a file, or a directory in which one may be, that is not covered. A `/dev` has none as a rule, so that
/// nobody needs to look at what the processes have open: they may have thousands of connections.
fn has_files(root: &OwnedFd, target: &Path, covered: impl Fn(&str) -> bool) -> io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(root)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        let is_covered = || covered(&target.join(OsStr::from_bytes(name)).to_string_lossy());
        match entry.file_type() {
            FileType::Directory if matches!(name, b"." | b"..") || is_covered() => {}
            FileType::Directory | FileType::RegularFile | FileType::Unknown => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

/// Those of these devices on which a file is
/// - open or mapped under a name that was deleted, and has another one: CRIU gives it a third one for the restore, which
///   would not be there;
/// - mapped to be shared and executed: CRIU changes such memory for a moment while it dumps;
/// - the program of a process, or held by a lease: a restore makes them such, and the kernel refuses that for a file
///   that is open for writing, as its content may still come.
fn unfit(devices: &BTreeSet<u64>, members: &[u32]) -> io::Result<BTreeSet<u64>> {
    let mut unfit = godwit_criu::not_external(members, devices);
    for pid in members {
        // A process that has ended has no program.
        if let Ok(program) = fs::metadata(format!("/proc/{pid}/exe")) {
            unfit.insert(program.dev());
        }
    }
    Ok(unfit)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MOUNTINFO: &str = "\
620 619 0:52 / / rw,relatime master:1 - overlay godwit rw,lowerdir=/l
621 620 0:60 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
622 621 0:61 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k,inode64
623 620 0:62 / /a\\040b rw,nosuid,nodev - tmpfs tmpfs rw,inode64
624 620 0:63 / /twice rw - tmpfs tmpfs rw,size=8k
625 620 0:63 /in /also rw - tmpfs tmpfs rw,size=8k
626 620 0:64 / /parent rw - tmpfs tmpfs rw,size=8k
627 626 0:65 / /parent/child rw - tmpfs tmpfs rw,size=8k
628 620 0:66 / /huge rw - tmpfs tmpfs rw,size=8k,huge=always
629 620 0:67 / /over rw - tmpfs tmpfs rw,size=8k
630 629 0:68 / /over rw - tmpfs tmpfs rw,size=8k
";

    #[test]
    fn only_a_tmpfs_as_it_was_defined_that_is_mounted_once_can_be_left_alone() {
        let mounts: Vec<_> = MOUNTINFO.lines().filter_map(Mounted::parse).collect();
        assert_eq!(mounts.len(), MOUNTINFO.lines().count());
        let found = |target: &str, size_bytes| {
            let mode = (target == "/dev").then_some("mode=755");
            plain(
                &DefinedTmpfs { source: "tmpfs", target: target.into(), size_bytes, mode },
                &mounts,
                |target| target == "/dev/shm",
            )
        };
        let device = |minor| Some(rustix::fs::makedev(0, minor));
        assert_eq!(found("/dev/shm", 64 << 20), device(61));
        assert_eq!(found("/dev", 64 << 20), device(60), "with what is mounted in it from the start");
        assert_eq!(found("/a b", 0), device(62));
        assert_eq!(found("/parent/child", 5000), device(65), "the kernel counts in pages");
        for (target, size) in [
            ("/dev/shm", 0),
            ("/dev/shm", 63 << 20),
            ("/a b", 8192),
            ("/twice", 8192),
            ("/parent", 8192),
            ("/huge", 8192),
            ("/over", 8192),
            ("/none", 0),
            ("/", 0),
        ] {
            assert_eq!(found(target, size), None, "{target} {size}");
        }
    }
}
