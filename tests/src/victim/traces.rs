//! What a node holds of services and migrations, compared with what it held before.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::watch::cgroups;
use crate::{Bed, wait_for};

pub(super) fn run_directory(lab: &str, node: &str) -> PathBuf {
    Path::new("/run/godwit/labs").join(lab).join(node)
}

/// Everything a node holds of services and migrations.
fn traces(bed: &Bed, node: &str) -> BTreeSet<String> {
    let lab = bed.lab().name();
    let run = run_directory(lab, node);
    let state = bed.lab().state(node).unwrap();
    let mut traces = BTreeSet::new();
    let names = ["migrations", "pagers", "netns", "runc"].map(|name| run.join(name));
    for directory in names.into_iter().chain([state.join("services")]) {
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        traces.extend(entries.map(|entry| format!("file {}", entry.path().display())));
    }
    for directory in [&run, &state] {
        traces.extend(mounts_below(directory).into_iter().map(|mount| format!("mount {mount}")));
    }
    traces.extend(cgroups(lab, node).iter().map(|cgroup| format!("cgroup {}", cgroup.display())));
    let say = |arguments: &[&str]| {
        let mut command: Command = bed.lab().command(node, arguments[0]).unwrap();
        let output = command.args(&arguments[1..]).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for line in say(&["ip", "-o", "link"]).lines() {
        traces.insert(format!("interface {}", line.split(": ").nth(1).unwrap()));
    }
    for arguments in [
        &["ip", "neigh", "show", "nud", "permanent"][..],
        &["ip", "neigh", "show", "proxy"],
        &["bridge", "fdb", "show", "dev", "gwvx0"],
    ] {
        let text = say(arguments);
        let lines = text.lines().filter(|line| line.contains("10.88.") || line.contains("02:67:0a"));
        traces.extend(lines.map(|line| format!("forwarding {}", line.trim())));
    }
    let namespace = fs::metadata(bed.lab().namespace(node).unwrap()).map(|meta| identity(&meta)).unwrap();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(meta) = fs::metadata(entry.path().join("ns/net")) else { continue };
        let command = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let command = command.trim();
        let dead = fs::read_to_string(entry.path().join("stat")).is_ok_and(|stat| stat.contains(") Z "));
        // The daemon's own, and what it looks at its rules with, now and then.
        if identity(&meta) == namespace && !["godwitd", "nft"].contains(&command) && !dead {
            traces.insert(format!("process {command}"));
        }
    }
    traces
}

/// The same of a node at rest that holds what it must: it still changes something when a service has just been
/// made, or heard of.
pub fn steady_traces(bed: &Bed, node: &str, right: impl Fn(&BTreeSet<String>) -> bool) -> BTreeSet<String> {
    let mut last = BTreeSet::new();
    wait_for(&format!("node {node} to be at rest"), || {
        let before = std::mem::replace(&mut last, traces(bed, node));
        (before == last && right(&last)).then(|| last.clone())
    })
}

pub(super) fn identity(meta: &fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (meta.dev(), meta.ino())
}

pub(super) fn mounts_below(directory: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let below = format!("{}/", directory.display());
    let targets = table.lines().filter_map(|line| line.split(' ').nth(4));
    targets.filter(|target| target.starts_with(&below)).map(str::to_owned).collect()
}

/// Waits until a node holds what it held before, and no more.
pub fn nothing_more(bed: &Bed, node: &str, before: &BTreeSet<String>) {
    nothing_more_of(bed, node, before, |_| true);
}

/// The same but for forwarding entries, which every node has of every service.
pub(super) fn nothing_of_its_own(bed: &Bed, node: &str, before: &BTreeSet<String>) {
    nothing_more_of(bed, node, before, |trace| !trace.starts_with("forwarding"));
}

fn nothing_more_of(bed: &Bed, node: &str, before: &BTreeSet<String>, counts: impl Fn(&str) -> bool) {
    let mut last = (Vec::new(), Vec::new());
    let look = || {
        let now = traces(bed, node);
        let only = |left: &BTreeSet<String>, right: &BTreeSet<String>| -> Vec<String> {
            left.difference(right).filter(|trace| counts(trace)).cloned().collect()
        };
        let (more, less) = (only(&now, before), only(before, &now));
        let same = more.is_empty() && less.is_empty();
        if last != (more.clone(), less.clone()) {
            println!("node {node} has more: {more:#?}, lacks: {less:#?}");
            last = (more, less);
        }
        same.then_some(())
    };
    wait_for(&format!("an end of everything on node {node}"), look);
}
