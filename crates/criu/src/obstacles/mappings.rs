//! What a process has mapped, or not, in its address space: `/proc/PID/maps`.

use std::fs;
use std::path::Path;

use super::Obstacle;
use super::devices;
use super::files::{What, is_secret_memory, object, secret_memory};
use super::tasks::Task;

const VDSO: &str =
    "and CRIU cannot restore that; start it without the tool that does this, as valgrind and rr do";

/// What the maps of a process show, except for what was found by its descriptors.
pub(super) fn obstacles(directory: &Path, task: &Task, found: &mut Vec<Obstacle>) {
    let maps = fs::read(directory.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    let mut mapped: Vec<What> = kinds(&maps).into_iter().filter_map(object).collect();
    mapped.extend(device(directory, &maps));
    mapped.extend(has_secret(directory, &maps).then(secret_memory));
    for (what, why) in mapped {
        // A ring, or memory, can be in use without a descriptor.
        if !found.iter().any(|obstacle| obstacle.pid == task.pid && obstacle.why == why) {
            found.push(Obstacle::new(task, format!("has {what} mapped"), why));
        }
    }
    if lacks_vdso(&maps) {
        found.push(Obstacle::new(task, "has unmapped the kernel's vDSO".into(), VDSO));
    }
}

/// The kinds of anonymous inodes that are mapped.
fn kinds(maps: &str) -> Vec<&str> {
    // The name is the sixth field, and the only one with such a word.
    let kinds = maps.lines().filter_map(|line| Some(line.split_once(" anon_inode:")?.1.trim()));
    let mut kinds: Vec<&str> = kinds.map(|kind| kind.trim_end_matches(" (deleted)")).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// A device that is mapped and CRIU cannot dump.
fn device(directory: &Path, maps: &str) -> Option<What> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let name = &rest[rest.find("/dev/")?..];
        // Most of what is there is no device.
        let is_none = ["/dev/zero", "/dev/shm/"].iter().any(|other| name.starts_with(other));
        if is_none { None } else { devices::mapped(&directory.join("map_files").join(range), name) }
    })
}

/// Whether secret memory is mapped (memfd_secret(2)).
fn has_secret(directory: &Path, maps: &str) -> bool {
    let mut named = maps.lines().filter(|line| line.contains(" /secretmem"));
    named.any(|line| {
        let range = line.split(' ').next().unwrap_or_default();
        is_secret_memory(&directory.join("map_files").join(range))
    })
}

/// Whether the code of the vDSO is missing where its data is there. A process with neither is restored without, and so is
/// one that has the code only; what is empty is the list of a process that has ended.
fn lacks_vdso(maps: &str) -> bool {
    let has =
        |name: &str| maps.lines().any(|line| line.rsplit(' ').next().is_some_and(|it| it.starts_with(name)));
    has("[vvar") && !has("[vdso]")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_mapped_device_is_found_where_no_descriptor_tells() {
        let directory = tempfile::tempdir().unwrap();
        let maps = "1000-2000 rw-s 00000000 00:05 7 /dev/zero (deleted)\n\
                    2000-3000 rw-s 00000000 00:19 8 /dev/shm/segment\n\
                    3000-4000 r--p 00000000 00:20 9 /opt/dev/file\n";
        let found = |more: &str| device(directory.path(), &format!("{maps}{more}")).map(|(what, _)| what);
        fs::create_dir(directory.path().join("map_files")).unwrap();
        symlink("/dev/null", directory.path().join("map_files/2000-3000")).unwrap();
        symlink(directory.path().join("map_files"), directory.path().join("map_files/3000-4000")).unwrap();
        symlink("/dev/full", directory.path().join("map_files/4000-5000")).unwrap();
        assert_eq!(found(""), None);
        let more = "4000-5000 rw-s 00000000 00:05 10 /dev/full\n";
        assert_eq!(found(more).as_deref(), Some("the device /dev/full (1:7)"));
    }

    #[test]
    fn a_vdso_that_is_missing_is_told_by_its_data() {
        let line =
            |name: &str| format!("7fff0000-7fff1000 r--p 00000000 00:00 0                          {name}\n");
        let of = |names: &[&str]| lacks_vdso(&names.iter().map(|name| line(name)).collect::<String>());
        assert!(of(&["[stack]", "[vvar]"]));
        for other in [&["[stack]", "[vvar]", "[vvar_vclock]", "[vdso]"][..], &["[vdso]"], &["[stack]"], &[]] {
            assert!(!of(other), "{other:?}");
        }
    }
}
