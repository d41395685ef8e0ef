//! Finds whatever a lab of some name has left on this machine.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Namespaces, mounts, directories, cgroups and processes of a lab.
pub fn of(lab: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let prefix = format!("gwl-{lab}-");
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            found.insert(entry.path().display().to_string());
        }
    }
    let inside = format!("/{lab}/");
    for line in fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines() {
        if line.contains(&inside) || line.contains(&prefix) {
            found.insert(format!("mount {line}"));
        }
    }
    let roots = ["/var/lib/godwit/labs", "/run/godwit/labs"].map(PathBuf::from);
    let cgroups = hierarchies().into_iter().map(|hierarchy| hierarchy.join("godwit-lab"));
    for path in roots.into_iter().chain(cgroups).map(|root| root.join(lab)) {
        if path.exists() {
            found.insert(path.display().to_string());
        }
    }
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        // What is dead is only waiting for init to notice.
        let dead = fs::read_to_string(entry.path().join("stat")).is_ok_and(|stat| stat.contains(") Z "));
        if dead {
            continue;
        }
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let cgroup = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if command.contains(&prefix) || cgroup.contains(&format!("/godwit-lab/{lab}")) {
            found.insert(format!("process {} {command}", entry.file_name().display()));
        }
    }
    found
}

/// Where cgroups can be: the root of version 2, and each controller of version 1.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let below = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    below.filter(|path| path.is_dir()).chain([root.to_owned()]).collect()
}
