//! Taking a lab down, whatever state it is in.
//!
//! The order matters: processes first, because they hold and make everything else; then mounts,
//! because removing files must never reach through one; then namespaces, cgroups and files.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    config::{CGROUP_ROOT, NETNS_ROOT, Paths, RUN_ROOT, STATE_ROOT, parse_netns_name},
    error::{Context, LabError},
    files,
    handle::Lab,
    mounts, netns,
    process::{Belonging, kill_all, unkillable},
    registry::{self, Lock},
};

/// How long a killed process may take to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the kernel may take to let go of an empty cgroup.
const CGROUP_PATIENCE: Duration = Duration::from_secs(5);

/// Takes down the lab `name`, under its lock.
pub(crate) fn down(name: &str) -> Result<(), LabError> {
    let paths = Paths::new(name);
    let lock = Lock::take(&paths, name)?;
    let nothing = !Lab::list().iter().any(|lab| lab == name) && cgroup_roots(&paths).is_empty();
    if nothing {
        return Err(LabError::Unknown(name.to_owned()));
    }
    let cleared = clear(name, &paths);
    drop(lock);
    cleared
}

/// Removes everything that belongs to the lab.
pub(crate) fn clear(name: &str, paths: &Paths) -> Result<(), LabError> {
    let spaces: Vec<PathBuf> = netns::names()
        .into_iter()
        .filter(|space| parse_netns_name(space).is_some_and(|(lab, _)| lab == name))
        .map(|space| Path::new(NETNS_ROOT).join(space))
        .collect();
    end_processes(name, paths, &spaces)?;
    registry::reap(paths);
    for directory in [paths.run(), paths.state()] {
        mounts::unmount_below(&directory)?;
    }
    for space in &spaces {
        netns::remove(space)?;
    }
    for root in cgroup_roots(paths) {
        remove_cgroup(&root).context("removing cgroup", root.display())?;
        // The parent of all labs, unless it is another lab's too.
        let _ = root.parent().map(fs::remove_dir);
    }
    files::remove_tree(&paths.run())?;
    // Last: the registry and the lock are there until everything else is gone.
    files::remove_tree(&paths.state())?;
    for root in [RUN_ROOT, STATE_ROOT] {
        // Only when they are empty; nobody else's files are touched.
        let _ = fs::remove_dir(root);
        let _ = Path::new(root).parent().map(fs::remove_dir);
    }
    Ok(())
}

fn end_processes(name: &str, paths: &Paths, spaces: &[PathBuf]) -> Result<(), LabError> {
    // Namespaces of services are mounted below the lab's directories.
    let mut files: Vec<PathBuf> = spaces.to_vec();
    for directory in [paths.run(), paths.state()] {
        files.extend(mounts::below(&directory)?);
    }
    let namespaces: HashSet<_> = files.iter().filter_map(|file| netns::identity(file)).collect();
    let belonging = Belonging { namespaces, cgroup: paths.cgroup(), recorded: registry::processes(paths) };
    // What is being killed may start others until it is dead: look until a look finds nothing.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = belonging.find();
        if found.is_empty() {
            return Ok(());
        }
        let left = kill_all(&found, PATIENCE, || thaw(paths));
        if let Some(process) = left.first().filter(|_| Instant::now() >= deadline) {
            return Err(unkillable(name, *process, PATIENCE));
        }
    }
}

/// The lab's cgroup in every hierarchy that has it.
fn cgroup_roots(paths: &Paths) -> Vec<PathBuf> {
    let below = paths.cgroup();
    let mounted = Path::new("/sys/fs/cgroup");
    // Version 2 alone is mounted right there; version 1 has one directory for each hierarchy.
    let children = fs::read_dir(mounted).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut hierarchies: Vec<PathBuf> =
        children.filter(|path| path.is_dir() && !path.ends_with(CGROUP_ROOT)).collect();
    hierarchies.push(mounted.to_owned());
    hierarchies.into_iter().map(|root| root.join(&below)).filter(|root| root.is_dir()).collect()
}

/// All cgroups at `root` and below, parents before children.
fn cgroups(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![root.to_owned()];
    let mut next = 0;
    while let Some(directory) = found.get(next).cloned() {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        found.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
        next += 1;
    }
    found
}

/// Thaws every frozen cgroup of the lab; a frozen task does not see its SIGKILL.
fn thaw(paths: &Paths) {
    for cgroup in cgroup_roots(paths).iter().flat_map(|root| cgroups(root)) {
        for (file, value) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let file = cgroup.join(file);
            if file.exists() {
                // A cgroup that has gone meanwhile holds nothing back.
                let _ = fs::write(file, value);
            }
        }
    }
}

fn remove_cgroup(root: &Path) -> io::Result<()> {
    let deadline = Instant::now() + CGROUP_PATIENCE;
    for cgroup in cgroups(root).iter().rev() {
        loop {
            match fs::remove_dir(cgroup) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                // The last task has ended but is not yet taken off; the kernel tells nobody in version 1.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(5));
                }
                other => break other?,
            }
        }
    }
    Ok(())
}
