//! Files that a restore would find by no name: CRIU's images have the name and the mount of an open, mapped or watched file,
//! and of what has neither only the content of a file without any link.
//!
//! - A file of none of the service's mounts was received from outside (SCM_RIGHTS), or its mount is gone (MNT_DETACH).
//! - A deleted file that has links, and none that goes along: one of an image's layer, which overlayfs does not unlink.
//! - A watched file (inotify, fanotify) without a name, on overlayfs or in a tmpfs: CRIU looks for one, see
//!   [`crate::watches`]. Elsewhere it opens the file by its handle, and a deleted one moves with its content.
//! - A watched file of a file system that none of the service's mounts shows: what watches it was received from outside.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::Obstacle;
use super::devices::{self, Found};
use super::files::shown;
use super::tasks::Task;
use crate::linked::{Identity, Linked};
use crate::open_files::OpenFile;
use crate::places::Places;
use crate::{open_files, watches};

const ELSEWHERE: &str = "which is on none of its mounts, as one received from another container or from the node is; CRIU cannot dump that, and the service can move when it has closed it";
const ELSEWHERE_MAPPED: &str = "which is on none of its mounts, as one received from another container or from the node is; CRIU cannot dump that, and the service can move when it has unmapped it";
const DELETED: &str = "which has no other name that moves with the service, as a file of its image has none; CRIU cannot dump that, and the service can move when it has closed it";
const DELETED_MAPPED: &str = "which has no other name that moves with the service, as a file of its image has none; CRIU cannot dump that: start the process anew, as after each upgrade of programs and libraries that it uses";
const WATCHED_ELSEWHERE: &str = "as one does that was received from another container or from the node; CRIU cannot dump that, and the service can move when it has closed it";
const WATCHED: &str = "and CRIU cannot dump or restore that; the service can move when it has closed the file or ended the watch";

/// How `/proc` ends the name of a deleted file.
const GONE: &str = " (deleted)";

/// Beginnings of names of what the kernel keeps on mounts of its own, which CRIU can dump; and secret memory, which is told as
/// such.
const OF_KERNEL: [&str; 6] =
    ["/memfd:", "/dev/zero (deleted)", "/SYSV", "/[aio]", "/anon_hugepage", "/secretmem"];

/// overlayfs (`linux/magic.h`), of whose files CRIU opens none by its handle.
const OVERLAYFS_MAGIC: i64 = 0x794c_7630;

/// A file in use.
#[derive(Debug)]
struct File {
    /// The process, by its place in the order of calls.
    place: usize,
    /// The descriptor; none of a mapping.
    number: Option<i32>,
    name: String,
    found: Found,
}

impl File {
    fn is_gone(&self) -> bool {
        self.found.is_file && self.found.links > 0 && self.name.ends_with(GONE)
    }

    fn obstacle(&self, tasks: &[Task], deleted: &str, why: (&'static str, &'static str)) -> Option<Obstacle> {
        let name = shown(self.name.trim_end_matches(GONE));
        let (how, why) = match self.number {
            Some(number) => (format!("open (descriptor {number})"), why.0),
            None => ("mapped".to_owned(), why.1),
        };
        Some(Obstacle::new(tasks.get(self.place)?, format!("has the {deleted}file {name} {how}"), why))
    }
}

/// The files that processes have in use.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<File>);

impl Files {
    /// Notes an open one.
    pub(super) fn open(&mut self, place: usize, number: i32, link: &str, found: Option<Found>) {
        let of_kernel = OF_KERNEL.iter().any(|name| link.starts_with(name));
        if let Some(found) = found.filter(|_| !of_kernel) {
            self.0.push(File { place, number: Some(number), name: link.to_owned(), found });
        }
    }

    /// Notes what a process has mapped, of which `directory` is that in `/proc`.
    pub(super) fn mapped(&mut self, place: usize, directory: &Path) {
        let maps = fs::read(directory.join("maps")).unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        let mut known = HashSet::new();
        for line in maps.lines() {
            // 7f00-7f01 r--p 00000000 fe:00 11829540      /the name
            let Some(name) = line.find('/').map(|at| &line[at..]) else { continue };
            let mut words = line.split_whitespace();
            let (Some(range), Some(file)) = (words.next(), words.nth(2).zip(words.next())) else { continue };
            if OF_KERNEL.iter().any(|of| name.starts_with(of)) || !known.insert((file, name)) {
                continue;
            }
            // What has no name at all may be of another driver of the kernel.
            let found = devices::stat(&directory.join("map_files").join(range));
            if let Some(found) = found.filter(|found| found.links > 0 || name.rfind('/') != Some(0)) {
                self.0.push(File { place, number: None, name: name.to_owned(), found });
            }
        }
    }
}

/// Those that are on no mount of these processes.
pub(super) fn elsewhere(proc: &Path, tasks: &[Task], files: &Files) -> Vec<Obstacle> {
    let mut mounts = BTreeMap::new();
    let mut namespaces = HashSet::new();
    for task in tasks {
        let directory = proc.join(task.pid.to_string());
        // Each shows what is below its own root directory.
        let seen = (fs::read_link(directory.join("ns/mnt")).ok(), fs::read_link(directory.join("root")).ok());
        if namespaces.insert(seen) {
            mounts.extend(mounts_of(&directory));
        }
    }
    if mounts.is_empty() {
        return Vec::new();
    }
    let is_elsewhere = |file: &&File| file.found.mount.is_some_and(|mount| !mounts.contains_key(&mount));
    let of_each = files.0.iter().filter(is_elsewhere);
    let mut found: Vec<_> =
        of_each.filter_map(|file| file.obstacle(tasks, "", (ELSEWHERE, ELSEWHERE_MAPPED))).collect();
    let devices: HashSet<_> = mounts.values().map(|mount| mount.device).collect();
    let pids: Vec<_> = tasks.iter().map(|task| task.pid).collect();
    let watching = open_files::of(&pids).into_iter().filter(OpenFile::watches);
    let watching =
        watching.filter(|file| watches::devices(file).iter().any(|device| !devices.contains(device)));
    found.extend(watching.filter_map(|file| {
        let what = "watches a file that is on none of its mounts";
        Some(Obstacle::new(of(tasks, &file)?, watcher(what, &file), WATCHED_ELSEWHERE))
    }));
    found
}

/// The process that has a file open.
fn of<'a>(tasks: &'a [Task], file: &OpenFile) -> Option<&'a Task> {
    tasks.iter().find(|task| task.pid == file.pid)
}

/// The same with what watches, and its descriptor.
fn watcher(what: &str, file: &OpenFile) -> String {
    let kind = if file.link.to_string_lossy().contains("fanotify") { "fanotify" } else { "inotify" };
    format!("{what} ({kind}, descriptor {})", file.number.to_string_lossy())
}

/// A mount of a process.
struct Mounted {
    /// The device of its file system, as the kernel writes it.
    device: u64,
    /// The file system's type.
    kind: String,
    point: PathBuf,
}

/// The mounts that a process shows, by their numbers.
fn mounts_of(directory: &Path) -> BTreeMap<u64, Mounted> {
    let text = fs::read_to_string(directory.join("mountinfo")).unwrap_or_default();
    let mount = |line: &str| {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ');
        let number = fields.next()?.parse().ok()?;
        let (major, minor) = fields.nth(1)?.split_once(':')?;
        let device = watches::device(major.parse().ok()?, minor.parse().ok()?);
        let (kind, point) = (system.split(' ').next()?.to_owned(), PathBuf::from(fields.nth(1)?));
        Some((number, Mounted { device, kind, point }))
    };
    text.lines().filter_map(mount).collect()
}

/// Deleted and watched ones that have no name.
pub(super) fn obstacles(
    proc: &Path,
    tasks: &[Task],
    main: u32,
    places: &Places,
    files: &Files,
) -> Vec<Obstacle> {
    let pids: Vec<_> = tasks.iter().map(|task| task.pid).collect();
    let main = proc.join(main.to_string());
    let mounts = mounts_of(&main);
    let is_here = |file: &&File| file.found.mount.is_none_or(|mount| mounts.contains_key(&mount));
    let gone: Vec<_> = files.0.iter().filter(|file| file.is_gone()).filter(is_here).collect();
    let open = open_files::of(&pids);
    let mut found = Vec::new();
    if !gone.is_empty() {
        let linked = Linked::find(&open, places);
        let nameless = |file: &&&File| match file.number {
            Some(number) => linked.nameless.iter().filter_map(|at| open.get(*at)).any(|open| {
                tasks.get(file.place).is_some_and(|task| task.pid == open.pid)
                    && open.number == *number.to_string()
            }),
            None => !is_dumped(&linked, file.found.identity, mounts_kind(&mounts, file)),
        };
        let of_each = gone.iter().filter(nameless);
        found.extend(of_each.filter_map(|file| file.obstacle(tasks, "deleted ", (DELETED, DELETED_MAPPED))));
    }
    let tmpfs = mounts.values().filter(|mount| mount.kind == "tmpfs");
    let tmpfs: Vec<_> = tmpfs.map(|mount| inside(&main, &mount.point)).collect();
    let places = places.all().map(|(_, directory)| directory);
    let directories = places.filter(|place| is_overlay(place)).chain(tmpfs.iter().map(PathBuf::as_path));
    found.extend(watches::nameless(&open, directories).into_iter().filter_map(|at| {
        let watching: &OpenFile = open.get(at)?;
        let what = watcher("watches a file that was deleted, or that has no name in UTF-8", watching);
        Some(Obstacle::new(of(tasks, watching)?, what, WATCHED))
    }));
    found
}

fn is_overlay(directory: &Path) -> bool {
    super::files::filesystem(directory) == Some(OVERLAYFS_MAGIC)
}

/// Where a mount point inside is found from outside.
fn inside(main: &Path, point: &Path) -> PathBuf {
    main.join("root").join(point.strip_prefix("/").unwrap_or(point))
}

/// The type of the file system that a file is on.
fn mounts_kind<'a>(mounts: &'a BTreeMap<u64, Mounted>, file: &File) -> Option<&'a str> {
    file.found.mount.and_then(|mount| mounts.get(&mount)).map(|mount| mount.kind.as_str())
}

/// Whether CRIU finds a mapped file whose name was deleted: its other name is noted for a descriptor, or it is in a tmpfs,
/// whose files CRIU has.
fn is_dumped(linked: &Linked, identity: Identity, kind: Option<&str>) -> bool {
    linked.has(identity) || linked.can_be_dumped && kind == Some("tmpfs")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// What is told of files that this process has open, and of all that it has mapped; by the number of a descriptor.
    fn told(open: &[&fs::File], root: &Path) -> Vec<String> {
        let (proc, pid) = (Path::new("/proc"), std::process::id());
        let tasks = [Task::example(pid, 1)];
        let mut files = Files::default();
        for file in open {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let link = fs::read_link(&path).unwrap();
            files.open(0, file.as_raw_fd(), &link.to_string_lossy(), devices::stat(Path::new(&path)));
        }
        files.mapped(0, &proc.join(pid.to_string()));
        let mut found = elsewhere(proc, &tasks, &files);
        found.extend(obstacles(proc, &tasks, pid, &Places::new(root, &[]), &files));
        // Other tests watch files.
        found.into_iter().map(|obstacle| obstacle.what).filter(|what| !what.starts_with("watches")).collect()
    }

    #[test]
    fn a_deleted_file_is_told_where_no_other_name_of_it_goes_along() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        let open = |name: &str, other: &Path| {
            let file = fs::File::create(root.join(name)).unwrap();
            fs::hard_link(root.join(name), other).unwrap();
            fs::remove_file(root.join(name)).unwrap();
            file
        };
        let (kept, lost) =
            (open("kept", &root.join("other")), open("lost", &directory.path().join("outside")));
        let ghost = tempfile::tempfile_in(&root).unwrap();
        let memory = rustix::fs::memfd_create("lost", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        let plain = fs::File::open("/dev/null").unwrap();
        assert_eq!(told(&[&kept, &ghost, &memory, &plain], &root), Vec::<String>::new());
        let found = told(&[&kept, &ghost, &lost], &root);
        let expected = format!("has the deleted file {} open", root.join("lost").display());
        assert!(matches!(&found[..], [one] if one.starts_with(&expected)), "{found:?}");
    }
}
