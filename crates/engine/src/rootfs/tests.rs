//! Root filesystems are mounted over any number of layers, and looked into without leaving them.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::confinement::User;

fn scratch() -> TempDir {
    TempDir::new_in("/var/tmp").unwrap()
}

/// Unmounts when a test ends, however it ends.
struct Mounted(Overlay);

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.0.unmount();
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

/// An overlay of so many layers, below directories with this name.
fn overlay(scratch: &TempDir, layers: usize, name: &str) -> Mounted {
    let lower = (0..layers).map(|number| {
        let layer = scratch.path().join(name).join(format!("layers/sha256/{number:064x}"));
        fs::create_dir_all(&layer).unwrap();
        fs::write(layer.join(format!("of-{number}")), b"x").unwrap();
        fs::write(layer.join("top"), number.to_string()).unwrap();
        layer
    });
    let lower = lower.collect();
    let path = |part: &str| scratch.path().join(name).join(part);
    Mounted(Overlay { lower, upper: path("upper"), work: path("work"), target: path("target") })
}

fn assert_stacked(overlay: &Overlay, layers: usize) {
    assert!(overlay.is_mounted().unwrap());
    assert_eq!(fs::read_to_string(overlay.target.join("top")).unwrap(), (layers - 1).to_string());
    assert_eq!(fs::read_dir(&overlay.target).unwrap().count(), layers + 1);
    fs::write(overlay.target.join("top"), "written").unwrap();
    fs::remove_file(overlay.target.join("of-0")).unwrap();
    assert_eq!(fs::read_to_string(overlay.upper.join("top")).unwrap(), "written");
    assert_eq!(fs::read_to_string(overlay.lower[layers - 1].join("top")).unwrap(), (layers - 1).to_string());
}

#[test]
fn a_hundred_and_twenty_layers_are_stacked_in_order() {
    let scratch = scratch();
    let mounted = overlay(&scratch, 120, "container");
    mounted.0.mount().unwrap();
    assert_stacked(&mounted.0, 120);
}

#[test]
fn the_most_layers_are_stacked_in_the_way_of_kernels_before_6_5() {
    let scratch = scratch();
    let mounted = overlay(&scratch, MAX_LAYERS, "container");
    for directory in [&mounted.0.upper, &mounted.0.work, &mounted.0.target] {
        fs::create_dir_all(directory).unwrap();
    }
    mounted.0.mount_by_options().unwrap();
    assert_stacked(&mounted.0, MAX_LAYERS);
}

#[test]
fn paths_that_are_long_or_hold_separators_can_be_mounted() {
    for name in ["with:colon,comma\\and space", &"long".repeat(60)] {
        let scratch = scratch();
        let mounted = overlay(&scratch, 3, name);
        mounted.0.mount().unwrap();
        assert_stacked(&mounted.0, 3);
    }
}

#[test]
fn the_root_directory_has_owner_and_mode_of_the_topmost_layer() {
    let scratch = scratch();
    let mounted = overlay(&scratch, 2, "container");
    let overlay = &mounted.0;
    fs::set_permissions(&overlay.lower[1], fs::Permissions::from_mode(0o1751)).unwrap();
    std::os::unix::fs::chown(&overlay.lower[1], Some(11), Some(12)).unwrap();
    overlay.mount().unwrap();
    let root = fs::metadata(&overlay.target).unwrap();
    assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o1751, 11, 12));
    overlay.unmount().unwrap();
    fs::set_permissions(&overlay.upper, fs::Permissions::from_mode(0o700)).unwrap();
    overlay.mount().unwrap();
    assert_eq!(fs::metadata(&overlay.target).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn mounting_and_unmounting_again_changes_nothing() {
    let scratch = scratch();
    let mounted = overlay(&scratch, 2, "container");
    let overlay = &mounted.0;
    assert!(!overlay.is_mounted().unwrap());
    overlay.unmount().unwrap();
    overlay.mount().unwrap();
    fs::write(overlay.target.join("file"), b"x").unwrap();
    overlay.mount().unwrap();
    overlay.unmount().unwrap();
    assert!(!overlay.is_mounted().unwrap());
    assert!(!overlay.target.join("file").exists());
    overlay.unmount().unwrap();
    overlay.mount().unwrap();
    assert_eq!(fs::read(overlay.target.join("file")).unwrap(), b"x");
}

#[test]
fn a_root_filesystem_in_use_is_unmounted_and_what_is_mounted_in_it_too() {
    let scratch = scratch();
    let mounted = overlay(&scratch, 1, "container");
    let overlay = &mounted.0;
    overlay.mount().unwrap();
    let inside = overlay.target.join("inside");
    fs::create_dir(&inside).unwrap();
    rustix::mount::mount("none", &inside, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    let open = fs::File::open(overlay.target.join("top")).unwrap();
    overlay.unmount().unwrap();
    assert!(!overlay.is_mounted().unwrap() && !inside.exists());
    drop(open);
}

#[test]
fn a_mount_that_cannot_be_is_named() {
    let scratch = scratch();
    let mut mounted = overlay(&scratch, 2, "container");
    let target = mounted.0.target.display().to_string();
    let missing = scratch.path().join("missing");
    mounted.0.lower.push(missing.clone());
    let error = mounted.0.mount().unwrap_err();
    let start = format!("root filesystem {target}: cannot ");
    assert!(error.to_string().starts_with(&start), "{error}");
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
    mounted.0.lower = vec![missing; MAX_LAYERS + 1];
    let error = mounted.0.mount().unwrap_err().to_string();
    assert_eq!(
        error,
        format!("root filesystem {target}: 201 layers cannot be stacked, at most 200; squash the image")
    );
    assert!(!mounted.0.is_mounted().unwrap());
}

/// A root filesystem with accounts and programs, beside things it must not reach.
fn root(scratch: &TempDir) -> std::path::PathBuf {
    let root = scratch.path().join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken line\nredis:x:101:102::/var/lib/redis:/bin/sh\n\
                  high:x:4294967295:1::/:/bin/sh\n7:x:700:701::/:/bin/sh\n";
    fs::write(root.join("etc/passwd"), passwd).unwrap();
    let group =
        "root:x:0:\nredis:x:102:redis\nssl:x:110:other,redis\naudio:x:29:redis,other\nother:x:111:other\n";
    fs::write(root.join("etc/group"), group).unwrap();
    for directory in ["usr/bin", "opt"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (name, mode) in [("usr/bin/redis-server", 0o755), ("usr/bin/notes", 0o644), ("opt/tool", 0o100)] {
        fs::write(root.join(name), b"x").unwrap();
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::write(scratch.path().join("outside"), b"x").unwrap();
    fs::set_permissions(scratch.path().join("outside"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("/usr/bin", root.join("bin")).unwrap();
    symlink("/usr/bin/redis-server", root.join("opt/link")).unwrap();
    symlink("/usr/bin/nothing", root.join("opt/dangling")).unwrap();
    symlink("../../outside", root.join("opt/escape")).unwrap();
    symlink(scratch.path().join("outside"), root.join("opt/absolute-escape")).unwrap();
    root
}

fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
    User { uid, gid, groups: groups.to_vec() }
}

#[test]
fn users_are_resolved_by_the_accounts_of_the_root_filesystem() {
    let scratch = scratch();
    let root = root(&scratch);
    for (text, expected) in [
        ("", user(0, 0, &[])),
        ("root", user(0, 0, &[])),
        ("redis", user(101, 102, &[29, 110])),
        ("101", user(101, 102, &[29, 110])),
        ("redis:audio", user(101, 29, &[])),
        ("redis:55", user(101, 55, &[])),
        ("redis:", user(101, 102, &[29, 110])),
        ("12345", user(12345, 0, &[])),
        ("12345:12346", user(12345, 12346, &[])),
        // Whoever is called so.
        ("7", user(7, 0, &[])),
        (":audio", user(0, 29, &[])),
    ] {
        assert_eq!(resolve_user(&root, text).unwrap(), expected, "{text:?}");
    }
    for (text, expected) in [
        ("nobody", "there is no user \"nobody\" in its /etc/passwd"),
        ("redis:nogroup", "there is no group \"nogroup\" in its /etc/group"),
        ("-1", "there is no user \"-1\""),
        ("4294967295", "there is no user \"4294967295\""),
        ("high", "there is no user \"high\""),
        ("1:4294967295", "there is no group \"4294967295\""),
    ] {
        let error = resolve_user(&root, text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}

#[test]
fn accounts_are_never_read_from_outside_or_from_what_is_no_file() {
    let scratch = scratch();
    fs::write(scratch.path().join("passwd"), "intruder:x:5:5::/:/bin/sh\n").unwrap();
    for target in [
        scratch.path().join("passwd").as_path(),
        Path::new("../../passwd"),
        Path::new("../../../../../etc/passwd"),
    ] {
        let root = scratch.path().join("root");
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("etc")).unwrap();
        symlink(target, root.join("etc/passwd")).unwrap();
        // What the link means inside is itself or nothing; never the file outside.
        assert!(resolve_user(&root, "intruder").is_err(), "{}", target.display());
        let as_number = resolve_user(&root, "5");
        assert!(as_number.is_err() || as_number.is_ok_and(|found| found == user(5, 0, &[])));
    }
    let root = scratch.path().join("fifo");
    fs::create_dir_all(root.join("etc")).unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("etc/passwd"), mode).unwrap();
    assert_eq!(resolve_user(&root, "5:6").unwrap(), user(5, 6, &[]));
}

#[test]
fn commands_are_found_as_the_container_would_find_them() {
    let scratch = scratch();
    let root = root(&scratch);
    for (path, command, expected) in [
        ("", "redis-server", "/usr/bin/redis-server"),
        ("/opt:/bin", "redis-server", "/bin/redis-server"),
        ("/usr/bin:/opt", "tool", "/opt/tool"),
        ("", "/opt/link", "/opt/link"),
        ("", "/bin/redis-server", "/bin/redis-server"),
        ("", "opt/tool", "/opt/tool"),
    ] {
        assert_eq!(find_command(&root, path, command).unwrap(), expected, "{command}");
    }
    for (path, command, expected) in [
        ("", "nothing", "there is no command \"nothing\" (searched: /usr/local/sbin:"),
        ("/opt", "redis-server", "there is no command \"redis-server\" (searched: /opt)"),
        (
            "",
            "/no/such",
            "there is no command \"/no/such\" (searched: /no/such); give a command that is there",
        ),
        ("", "notes", "/usr/bin/notes is not executable"),
        ("", "/usr", "/usr is a directory"),
        ("", "/opt/dangling", "there is no command"),
        ("", "/opt/escape", "there is no command"),
        ("", "/opt/absolute-escape", "there is no command"),
        ("", "../outside", "there is no command"),
        ("", "", "there is no command"),
    ] {
        let error = find_command(&root, path, command).unwrap_err().to_string();
        assert!(error.starts_with(&format!("root filesystem {}: ", root.display())), "{error}");
        assert!(error.contains(expected), "{command}: {error}");
    }
}
