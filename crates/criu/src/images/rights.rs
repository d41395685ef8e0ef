//! What the processes and mounts in images would be allowed after a restore, beside what they may be.
//!
//! CRIU is root, and gives processes what their images say: credentials ([`credentials`]), filters of system
//! calls ([`system_calls`](super::system_calls)), open files and devices ([`devices`]), namespaces, mounts.
//! Images come from another node, so they are compared with what the container was defined with, before the
//! restore. The restore does not take more from the images than is looked at here: it finds the cgroup, and with it
//! which devices can be used, the network namespace and bind mounts of the node in its own definition.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use prost::Message;

use super::credentials::{self, Credentials};
use super::devices;
use super::system_calls::{Chains, Refused};
use super::{ImageError, ImageKind, process_tree, records, single};

/// Dead and zombie, of CRIU's `task_state`: no program is restored.
const ENDED: [u32; 2] = [2, 6];
/// `MS_RDONLY`.
const READ_ONLY: u32 = 1;
/// Of CRIU's `fstype`.
const PROC: u32 = 1;
const SYSFS: u32 = 2;
pub(super) const TMPFS: u32 = 5;
const DEVPTS: u32 = 6;
const MQUEUE: u32 = 14;

/// What a container was defined with.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Its bounding set: bit N for capability N of `linux/capability.h`.
    pub capabilities: u64,
    /// The user that its main process began as.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// Whether its processes gain nothing by files.
    pub no_new_privileges: bool,
    /// The system calls that its filter refuses; none without a filter.
    pub refused: Option<Refused>,
    /// Paths of `/proc` that must be read-only.
    pub read_only: Vec<String>,
    /// Whether `/proc` and `/sys` are mounts of the definition's own making.
    pub own_proc: bool,
}

/// `thread_core_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
struct ThreadCore {
    #[prost(message, optional, tag = "10")]
    credentials: Option<Credentials>,
    #[prost(uint32, optional, tag = "11")]
    seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    seccomp_filter: Option<u32>,
}

/// `task_core_entry`, as far as it says whether anything runs, and how older versions told of filters: a restore
/// prefers that to what the threads have.
#[derive(Clone, PartialEq, Eq, Message)]
struct TaskState {
    #[prost(uint32, required, tag = "1")]
    task_state: u32,
    #[prost(uint32, optional, tag = "11")]
    old_seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    old_seccomp_filter: Option<u32>,
}

/// `core_entry`, as far as it tells of rights.
#[derive(Clone, PartialEq, Eq, Message)]
struct CoreRights {
    #[prost(message, optional, tag = "3")]
    task: Option<TaskState>,
    #[prost(message, optional, tag = "5")]
    thread: Option<ThreadCore>,
}

/// `task_kobj_ids_entry`, the namespaces of a process.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct Ids {
    #[prost(uint32, optional, tag = "5")]
    pub(super) pid: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub(super) net: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub(super) ipc: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub(super) uts: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub(super) mnt: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) user: Option<u32>,
}

/// `inventory_entry`, as far as it tells of the node's own namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Inventory {
    #[prost(message, optional, tag = "3")]
    root_ids: Option<Ids>,
}

/// `mnt_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct MountEntry {
    #[prost(uint32, required, tag = "1")]
    pub(super) fstype: u32,
    #[prost(uint32, required, tag = "2")]
    pub(super) mnt_id: u32,
    #[prost(uint32, required, tag = "3")]
    pub(super) root_dev: u32,
    #[prost(uint32, required, tag = "4")]
    parent: u32,
    #[prost(uint32, required, tag = "5")]
    pub(super) flags: u32,
    #[prost(string, required, tag = "6")]
    root: String,
    #[prost(string, required, tag = "7")]
    mountpoint: String,
    #[prost(bool, optional, tag = "12")]
    with_plugin: Option<bool>,
    #[prost(bool, optional, tag = "13")]
    ext_mount: Option<bool>,
    #[prost(string, optional, tag = "18")]
    ext_key: Option<String>,
}

/// What in a directory of images is more than a container was defined with, in sentences.
///
/// # Errors
/// They cannot be read, so that nothing is known.
pub fn excess(images: &Path, allowed: &Allowed) -> Result<Vec<String>, ImageError> {
    let mut found = Vec::new();
    let inventory: Inventory = single(&images.join("inventory.img"), ImageKind::Inventory)?;
    let mut mount_namespaces = BTreeMap::new();
    let mut chains = allowed.refused.as_ref().map(|refused| Chains::read(images, refused)).transpose()?;
    for process in process_tree(images)? {
        let pid = process.pid;
        let main: CoreRights = single(&images.join(format!("core-{pid}.img")), ImageKind::Core)?;
        if main.task.as_ref().is_some_and(|task| ENDED.contains(&task.task_state)) {
            continue;
        }
        let of_main =
            main.thread.as_ref().map_or((None, None), |core| (core.seccomp_mode, core.seccomp_filter));
        for thread in process.threads.iter().chain([&pid]) {
            let core: CoreRights = single(&images.join(format!("core-{thread}.img")), ImageKind::Core)?;
            let mut what = Vec::new();
            if core.task.is_some_and(|task| task.old_seccomp_mode.or(task.old_seccomp_filter).is_some()) {
                what.push("has its seccomp filter where CRIU had it before 2018".to_owned());
            }
            let core = core.thread.unwrap_or_default();
            what.extend(credentials::excess(core.credentials.as_ref(), allowed));
            if let Some(chains) = &mut chains {
                let has_none = matches!(core.seccomp_mode, None | Some(0)) && core.seccomp_filter.is_none();
                let given = has_none && *thread != pid && chains.are_for_all_threads(of_main.0, of_main.1);
                let own = (!given).then(|| chains.excess(core.seccomp_mode, core.seccomp_filter));
                what.extend(own.flatten());
            }
            found.extend(what.into_iter().map(|what| format!("thread {thread} of process {pid} {what}")));
        }
        let ids: Ids = single(&images.join(format!("ids-{pid}.img")), ImageKind::Ids)?;
        found.extend(
            namespace_excess(&ids, inventory.root_ids.as_ref()).map(|w| format!("process {pid} {w}")),
        );
        mount_namespaces.extend(ids.mnt.map(|id| (id, pid)));
    }
    for id in mount_namespaces.keys() {
        let mounts = mounts(images, *id)?;
        found.extend(mount_excess(&mounts, allowed));
    }
    found.extend(devices::excess(images, allowed)?);
    found.sort();
    found.dedup();
    Ok(found)
}

/// The mounts of a mount namespace.
fn mounts(images: &Path, namespace: u32) -> Result<Vec<MountEntry>, ImageError> {
    records(&images.join(format!("mountpoints-{namespace}.img")), ImageKind::Mountpoints)
}

/// The mounts of all processes.
pub(super) fn all_mounts(images: &Path) -> Result<Vec<MountEntry>, ImageError> {
    let mut namespaces = BTreeSet::new();
    for process in process_tree(images)? {
        let path = images.join(format!("ids-{}.img", process.pid));
        // One that has ended has none.
        if path.exists() {
            namespaces.extend(single::<Ids>(&path, ImageKind::Ids)?.mnt);
        }
    }
    let mut all = Vec::new();
    for namespace in namespaces {
        all.extend(mounts(images, namespace)?);
    }
    Ok(all)
}

fn namespace_excess(ids: &Ids, node: Option<&Ids>) -> Option<String> {
    let Some(node) = node else {
        return Some("may be in the node's namespaces: the images do not say".into());
    };
    let kinds = [
        ("PID", ids.pid, node.pid),
        ("network", ids.net, node.net),
        ("IPC", ids.ipc, node.ipc),
        ("UTS", ids.uts, node.uts),
        ("mount", ids.mnt, node.mnt),
    ];
    let own = kinds.into_iter().find(|(_, own, nodes)| own.is_none() || own == nodes);
    if let Some((kind, ..)) = own {
        return Some(format!("is not in the container's {kind} namespace, and would be in the node's"));
    }
    (ids.user != node.user).then(|| "has a user namespace of its own".to_owned())
}

fn mount_excess(mounts: &[MountEntry], allowed: &Allowed) -> Vec<String> {
    let mut found = Vec::new();
    let is_read_only = |mount: &MountEntry| mount.flags & READ_ONLY != 0;
    for mount in mounts {
        let at = shown(&mount.mountpoint);
        // Those of the node are in the definition, or CRIU does not find their key there.
        let external = mount.ext_mount == Some(true) || mount.ext_key.as_ref().is_some_and(|k| !k.is_empty());
        if mount.with_plugin == Some(true) {
            found.push(format!("the mount at {at} belongs to a plug-in of CRIU"));
        } else if external || mount.mountpoint == "/" {
        } else if ![PROC, SYSFS, TMPFS, DEVPTS, MQUEUE].contains(&mount.fstype) {
            found.push(format!("the mount at {at} is of a file system that a container is not given"));
        } else if mount.fstype == SYSFS && !is_read_only(mount) && !allowed.own_proc {
            found.push(format!("/sys at {at} can be written to"));
        } else if mount.fstype == PROC
            && mount.mountpoint != "/proc"
            && !is_read_only(mount)
            && !allowed.own_proc
        {
            found.push(format!("/proc at {at} can be written to"));
        }
    }
    if allowed.own_proc {
        return found;
    }
    let mut proc = mounts.iter().filter(|mount| mount.mountpoint == "/proc");
    match (proc.next(), proc.next()) {
        (None, _) => {}
        // Instead of it: a tmpfs or a volume of the container's own.
        (Some(other), None) if other.fstype != PROC => {}
        (Some(_), Some(_)) => found.push("two mounts are at /proc".into()),
        (Some(proc), None) => {
            let covered = |path: &String| {
                mounts.iter().any(|m| {
                    m.mountpoint == *path && m.parent == proc.mnt_id && is_read_only(m) && m.root != "/"
                })
            };
            let bare = allowed.read_only.iter().filter(|path| !covered(path));
            found.extend(bare.map(|path| format!("{path} can be written to")));
        }
    }
    found
}

/// As much of a text of somebody else's as an error shows.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(64).collect::<String>().escape_debug().to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::super::ProcessTreeEntry;
    use super::super::tests::image;
    use super::*;

    const OWN: u64 = 0x8004_05fb;

    fn allowed() -> Allowed {
        let refused = Some(super::super::system_calls::tests::one());
        Allowed { capabilities: OWN, read_only: vec!["/proc/sys".into()], refused, ..Allowed::default() }
    }

    /// The images of one process with one thread more.
    struct Images {
        credentials: Credentials,
        thread: Credentials,
        ids: Ids,
        mounts: Vec<MountEntry>,
        task: TaskState,
        /// Mode and filter of the main thread, and of the second one.
        main_filter: (Option<u32>, Option<u32>),
        filter: (Option<u32>, Option<u32>),
    }

    fn mount(fstype: u32, id: u32, parent: u32, flags: u32, root: &str, at: &str) -> MountEntry {
        let (root, mountpoint) = (root.into(), at.into());
        MountEntry { fstype, mnt_id: id, parent, flags, root, mountpoint, ..MountEntry::default() }
    }

    /// The mounts (kind, id, device, flags) of process 1.
    pub(in super::super) fn write_mounts(images: &Path, mounts: &[(u32, u32, u32, u32)]) {
        let ids = Ids { mnt: Some(16), ..Ids::default() };
        std::fs::write(images.join("ids-1.img"), image(ImageKind::Ids, &[ids])).unwrap();
        let entries: Vec<_> = mounts
            .iter()
            .map(|(fstype, id, device, flags)| MountEntry {
                root_dev: *device,
                ..mount(*fstype, *id, 1, *flags, "/", "/x")
            })
            .collect();
        std::fs::write(images.join("mountpoints-16.img"), image(ImageKind::Mountpoints, &entries)).unwrap();
    }

    fn good() -> Images {
        let own = vec![u32::try_from(OWN).unwrap(), 0];
        let credentials = Credentials {
            inheritable: vec![0, 0],
            permitted: own.clone(),
            effective: own.clone(),
            bounding: own,
            ..Credentials::default()
        };
        let ids =
            Ids { pid: Some(12), net: Some(13), ipc: Some(14), uts: Some(15), mnt: Some(16), user: Some(7) };
        let overlay = 17;
        let mounts = vec![
            mount(overlay, 1, 0, 0, "/", "/"),
            mount(PROC, 2, 1, 14, "/", "/proc"),
            mount(PROC, 3, 2, 15, "/sys", "/proc/sys"),
            mount(TMPFS, 4, 1, 2, "/", "/dev"),
            mount(SYSFS, 5, 1, 15, "/", "/sys"),
            MountEntry { ext_key: Some("/data".into()), ..mount(16, 6, 1, 0, "/x", "/data") },
        ];
        let task = TaskState { task_state: 1, ..TaskState::default() };
        Images {
            thread: credentials.clone(),
            credentials,
            ids,
            mounts,
            task,
            main_filter: (Some(2), Some(0)),
            filter: (None, None),
        }
    }

    fn excess_of(images: Images) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(directory.path().join(name), bytes).unwrap();
        let node =
            Ids { pid: Some(2), net: Some(3), ipc: Some(4), uts: Some(5), mnt: Some(6), user: Some(7) };
        write("inventory.img", image(ImageKind::Inventory, &[Inventory { root_ids: Some(node) }]));
        let tree = ProcessTreeEntry { pid: 1, ppid: 0, pgid: 1, sid: 1, threads: vec![1, 9] };
        write("pstree.img", image(ImageKind::ProcessTree, &[tree]));
        let core = |task, credentials, (seccomp_mode, seccomp_filter)| CoreRights {
            task,
            thread: Some(ThreadCore { credentials: Some(credentials), seccomp_mode, seccomp_filter }),
        };
        write(
            "core-1.img",
            image(ImageKind::Core, &[core(Some(images.task), images.credentials, images.main_filter)]),
        );
        write("core-9.img", image(ImageKind::Core, &[core(None, images.thread, images.filter)]));
        write("ids-1.img", image(ImageKind::Ids, &[images.ids]));
        if let Some(id) = images.ids.mnt {
            write(&format!("mountpoints-{id}.img"), image(ImageKind::Mountpoints, &images.mounts));
        }
        write("seccomp.img", super::super::system_calls::tests::refusing_one());
        write("files.img", super::super::devices::tests::a_file());
        excess(directory.path(), &allowed()).unwrap()
    }

    #[test]
    fn what_a_container_was_given_is_no_excess() {
        assert_eq!(excess_of(good()), Vec::<String>::new());
    }

    #[test]
    fn each_excess_is_found_and_named() {
        type Spoil = fn(&mut Images);
        let spoilt: [(&str, Spoil); 21] = [
            ("process 1 has capabilities in its effective", |i| i.credentials.effective = vec![!0, 0x1ff]),
            ("thread 9 of process 1 has capabilities in its permitted", |i| i.thread.permitted[1] = 1),
            ("its bounding set", |i| i.credentials.bounding[0] |= 1 << 21),
            ("its inheritable set", |i| i.credentials.inheritable[0] = 1 << 21),
            ("its ambient set", |i| i.credentials.ambient = vec![1 << 21]),
            ("its ambient set", |i| i.credentials.ambient = vec![0, 0, 1]),
            ("thread 9 of process 1 has no seccomp filter", |i| i.filter = (Some(1), None)),
            ("thread 9 of process 1 has no seccomp filter", |i| i.main_filter = (None, None)),
            ("thread 9 of process 1 has a seccomp filter 1 that no image contains", |i| {
                i.filter = (Some(2), Some(1))
            }),
            ("where CRIU had it before 2018", |i| i.task.old_seccomp_mode = Some(0)),
            ("container's PID namespace", |i| i.ids.pid = Some(2)),
            ("container's network namespace", |i| i.ids.net = None),
            ("container's UTS namespace", |i| i.ids.uts = Some(5)),
            ("a user namespace of its own", |i| i.ids.user = Some(8)),
            ("/mnt is of a file system", |i| i.mounts.push(mount(16, 7, 1, 0, "/", "/mnt"))),
            ("/sys at /sys can be written to", |i| i.mounts[4].flags = 14),
            ("/proc/sys can be written to", |i| i.mounts[2].flags = 14),
            ("/proc/sys can be written to", |i| drop(i.mounts.remove(2))),
            ("/proc at /mnt can be written to", |i| i.mounts.push(mount(PROC, 7, 1, 0, "/", "/mnt"))),
            ("two mounts are at /proc", |i| i.mounts.push(mount(PROC, 7, 1, 0, "/", "/proc"))),
            ("/proc at /x can be written to", |i| i.mounts[1].mountpoint = "/x".into()),
        ];
        for (words, spoil) in spoilt {
            let mut images = good();
            spoil(&mut images);
            let found = excess_of(images);
            assert!(found.iter().any(|sentence| sentence.contains(words)), "{words}: {found:?}");
        }
    }
}
