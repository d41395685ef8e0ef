//! Mounts that every container gets beside those it asks for: name resolution, and an empty
//! directory and an empty file over what shows the node.
//!
//! `/etc/hostname`, `/etc/hosts` and `/etc/resolv.conf` are bind mounts of files that are written
//! anew at each start and restore, as Podman and Docker do it. They depend on the container, not
//! on the node, but for the name servers.
//!
//! runc makes no mounts of its user's inside `/proc`. What is covered there is covered by a hook
//! ([`cover`]) when the container is made, and by CRIU ([`criu_option`]) when it is restored: its dump says
//! that these mounts are to be brought from outside, under the key that runc has for them.

use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use godwit_criu::repair::Hidden;

use super::spec::{COVERED_DIRECTORIES, MASKED_FILES, READ_ONLY_PATHS};
use crate::container::{ContainerConfig, Identity, Mount, MountKind, OnMove};
use crate::resolver;

/// The files with name resolution, and what is in them.
fn files(config: &ContainerConfig) -> [(&'static str, String); 3] {
    let name = &config.hostname;
    let address =
        address_in(&config.network_namespace).map_or("127.0.1.1".to_owned(), |address| address.to_string());
    [
        ("hostname", format!("{name}\n")),
        ("hosts", format!("127.0.0.1 localhost\n::1 localhost ip6-localhost\n{address} {name}\n")),
        ("resolv.conf", resolver::text(config.name_server)),
    ]
}

fn directory(config: &ContainerConfig) -> PathBuf {
    config.directory.join("provided")
}

/// The key in CRIU's images of the file that covers others, as runc's own dumps and older versions of godwit
/// have it. runc's restore brings the node's `/dev/null` under it, whatever else it is told.
pub(crate) const COVER_KEY: &str = "/dev/null";

/// The key that takes its place before a restore.
pub(crate) const RESTORE_KEY: &str = "godwit-empty-file";

/// The empty file that covers files which show the node.
fn empty_file(config: &ContainerConfig) -> PathBuf {
    directory(config).join("empty-file")
}

/// The command that covers [`MASKED_FILES`] in a container that is being made.
pub(super) fn cover(config: &ContainerConfig, shim: &Path) -> Vec<OsString> {
    let empty = empty_file(config);
    let words = [shim.as_os_str(), "--cover".as_ref(), empty.as_os_str(), config.rootfs.as_os_str()];
    words.into_iter().chain(MASKED_FILES.iter().map(OsStr::new)).map(OsStr::to_owned).collect()
}

/// The command that compares what a container that is being made has of the node with what it is to have; nothing where it has
/// nothing.
pub(super) fn same(config: &ContainerConfig, shim: &Path) -> Vec<OsString> {
    if config.bound.is_empty() {
        return Vec::new();
    }
    let words = [shim.as_os_str(), "--same".as_ref(), config.rootfs.as_os_str()];
    let wanted = config.bound.iter().map(|Identity { target, device, inode }| {
        let mut word = OsString::from(format!("{device}:{inode}:"));
        word.push(target);
        word
    });
    words.into_iter().map(OsStr::to_owned).chain(wanted).collect()
}

/// The line of CRIU's options by which a restore brings the same.
pub(super) fn criu_option(config: &ContainerConfig) -> String {
    format!("external \"mnt[{RESTORE_KEY}]:{}\"\n", empty_file(config).display())
}

/// Writes the files and the empty directory that the mounts need.
pub(super) fn write(config: &ContainerConfig) -> io::Result<()> {
    std::fs::create_dir_all(directory(config).join("empty"))?;
    std::fs::File::create(empty_file(config))?.set_permissions(Permissions::from_mode(0o444))?;
    files(config).iter().try_for_each(|(name, content)| std::fs::write(directory(config).join(name), content))
}

/// The mounts; with `all` those too that this node's kernel has no use for, which the dump of
/// another node may have.
pub(super) fn mounts(config: &ContainerConfig, all: bool) -> Vec<Mount> {
    let bind = |source: PathBuf, target: PathBuf, read_only| Mount {
        kind: MountKind::Bind { source, on_move: OnMove::Unsaid },
        target,
        read_only,
    };
    let names = ["hostname", "hosts", "resolv.conf"];
    let resolution =
        names.iter().map(|name| bind(directory(config).join(name), Path::new("/etc").join(name), false));
    let covered = COVERED_DIRECTORIES
        .iter()
        .filter(|path| all || Path::new(path).is_dir())
        .map(|path| bind(directory(config).join("empty"), path.into(), true));
    let own = |mount: &Mount| config.mounts.iter().any(|own| own.target == mount.target);
    resolution.chain(covered).filter(|mount| !own(mount)).collect()
}

/// What a container does not see or write, but where it has a mount of its own.
pub(super) fn hidden(config: &ContainerConfig) -> Hidden<'static> {
    let is_own = |path: &&&str| config.mounts.iter().any(|own| own.target == Path::new(path));
    let all = MASKED_FILES.iter().chain(COVERED_DIRECTORIES).filter(|path| !is_own(path));
    Hidden {
        covered: all.copied().collect(),
        read_only: READ_ONLY_PATHS.to_vec(),
        file_key: COVER_KEY,
        brings_directories: true,
    }
}

/// The first address of a network namespace that is not a loopback or link-local one.
fn address_in(namespace: &Path) -> Option<IpAddr> {
    let namespace = std::fs::File::open(namespace).ok()?;
    // A thread of its own: it stays in the other namespace for the rest of its life.
    let reader = std::thread::spawn(move || {
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
        nix::ifaddrs::getifaddrs().ok()?.find_map(|interface| {
            let address = interface.address?.as_sockaddr_in()?.ip();
            (!address.is_loopback() && !address.is_link_local()).then_some(IpAddr::V4(address))
        })
    });
    reader.join().ok()?
}
