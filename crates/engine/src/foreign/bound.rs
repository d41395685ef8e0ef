//! What a container of another engine has of its node: files and directories that are mounted into it.
//!
//! An engine mounts what a definition says, as root. So a definition from another node may have only what its service has, too,
//! and that is looked at as for any service ([`Mount::bind`]).

use std::collections::BTreeSet;
use std::path::Path;

use crate::container::Mount;
use crate::processes::tmpfs::unescaped;

/// Where the kernel shows itself, and where devices are.
const OF_THE_KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Whether two mounts show the same of a node at the same place.
pub(crate) fn same(one: &Mount, other: &Mount) -> bool {
    let of = |mount: &Mount| mount.bind().map(|(source, _)| source.to_owned());
    of(one).is_some() && (of(one), &one.target, one.read_only) == (of(other), &other.target, other.read_only)
}

/// What speaks against a definition that has this of a node, these volumes of its engine's by name and place, and files in
/// these volumes, for a service that has that.
pub(crate) fn objections(
    defined: &[Mount],
    (volumes, of_files): (&[(String, String)], &[&str]),
    of_service: &[Mount],
) -> Vec<String> {
    let is_in = |mount: &Mount, all: &[Mount]| all.iter().any(|other| same(mount, other));
    let is_volume = |mount: &Mount| {
        let at = |(name, target): &(String, String)| {
            mount.engine_volume().is_some_and(|(its, _)| its == name) && mount.target == Path::new(target)
        };
        volumes.iter().any(at)
    };
    let mut found = Vec::new();
    // Whoever has the volume, too, could put a link in the place of the file.
    let stays = |name: &&str| {
        of_service.iter().filter_map(Mount::engine_volume).any(|(its, _)| its == *name)
            || volumes.iter().any(|(its, _)| its == *name)
    };
    if let Some(name) = of_files.iter().copied().find(stays) {
        found.push(format!("it has a file of volume {name} mounted, and the volume, too"));
    }
    for mount in of_service.iter().filter(|mount| !is_in(mount, defined) && !is_volume(mount)) {
        found
            .push(format!("its definition does not have what its service has on {}", mount.target.display()));
    }
    for mount in defined {
        let Some((source, _)) = mount.bind() else { continue };
        let (source, target) = (source.display(), mount.target.display());
        if !is_in(mount, of_service) {
            found.push(format!("it has {source} of the node mounted on {target}, and its service has not"));
        } else if mount.target == Path::new("/")
            || OF_THE_KERNEL.iter().any(|kernel| mount.target.starts_with(kernel))
        {
            found.push(format!(
                "it has {source} of the node mounted on {target}, where the kernel's files are"
            ));
        }
    }
    found
}

/// What speaks against a container with these mounts, `mountinfo` of its main process, of which these are of the node:
/// a filesystem in one of those that its definition, with mounts at these `places`, does not have.
pub(crate) fn mounted_below(mountinfo: &str, bound: &[Mount], places: &BTreeSet<String>) -> Option<String> {
    let mounted = mountinfo.lines().filter_map(|line| unescaped(line.split(' ').nth(4)?));
    let mut unknown = mounted.filter(|place| !places.contains(place)).filter_map(|place| {
        let is_above = |mount: &&Mount| Path::new(&place).starts_with(&mount.target);
        let (source, _) = bound.iter().find(is_above)?.bind()?;
        Some(format!(
            "another filesystem is mounted in {} of the node, at {place} in the container",
            source.display()
        ))
    });
    unknown.next()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::container::{MountKind, OnMove};

    fn mount(source: &str, target: &str) -> Mount {
        let kind = MountKind::Bind { source: source.into(), on_move: OnMove::Skip };
        Mount { kind, target: target.into(), read_only: false }
    }

    #[test]
    fn a_definition_has_what_its_service_has_and_nothing_of_the_kernels() {
        let data = mount("/srv", "/data");
        let unsaid = MountKind::Bind { source: "/srv".into(), on_move: OnMove::Unsaid };
        assert!(same(&data, &Mount { kind: unsaid, ..data.clone() }), "a definition says nothing of moves");
        let of = |defined: &[Mount], of_service: &[Mount]| objections(defined, (&[], &[]), of_service);
        assert!(of(&[], &[]).is_empty());
        assert!(of(std::slice::from_ref(&data), std::slice::from_ref(&data)).is_empty());
        let other = mount("/etc", "/data");
        let read_only = Mount { read_only: true, ..data.clone() };
        for wrong in [other, read_only, mount("/srv", "/other")] {
            assert_eq!(of(std::slice::from_ref(&data), std::slice::from_ref(&wrong)).len(), 2, "{wrong:?}");
        }
        // It would be believed to have its own /proc.
        let hidden = mount("/srv", "/proc");
        assert_eq!(of(&[], std::slice::from_ref(&hidden)).len(), 1);
        let volume = MountKind::Volume { name: "data".parse().unwrap(), file: None };
        assert_eq!(of(&[], &[Mount { kind: volume, ..data.clone() }]).len(), 1);
        // A volume that stays is one of the definition's.
        let stays = MountKind::EngineVolume { name: "store".into(), on_move: OnMove::Skip };
        let stays = [Mount { kind: stays, ..data }];
        let volume = |name: &str, target: &str| [(name.to_owned(), target.to_owned())];
        let with = |name: &str, target: &str| objections(&[], (&volume(name, target), &[]), &stays);
        assert_eq!(with("store", "/data"), [""; 0]);
        // A file in it may be a link by now.
        let file_of = |name| objections(&[], (&volume("store", "/data"), &[name]), &stays).len();
        assert_eq!((file_of("other"), file_of("store")), (0, 1));
        assert_eq!((with("other", "/data").len(), with("store", "/other").len()), (1, 1));
        for target in ["/", "/proc", "/sys/fs/cgroup", "/dev/shm"] {
            let kernels = mount("/srv", target);
            assert_eq!(
                of(std::slice::from_ref(&kernels), std::slice::from_ref(&kernels)).len(),
                1,
                "{target}"
            );
        }
    }

    #[test]
    fn a_filesystem_in_what_is_of_the_node_is_found() {
        let text = "1 0 0:1 / / rw - overlay overlay rw\n\
                    2 1 0:2 /d /data rw - ext4 /dev/x rw\n\
                    3 2 0:3 / /data/known rw - tmpfs tmpfs rw\n\
                    4 2 0:4 / /data/a\\040b rw - ext4 /dev/y rw\n";
        let places = BTreeSet::from(["/data".to_owned(), "/data/known".to_owned()]);
        let below = |target: &str| mounted_below(text, &[mount("/srv", target)], &places);
        assert!(below("/data").unwrap().contains("/srv of the node, at /data/a b"));
        assert_eq!(below("/other"), None);
    }
}
