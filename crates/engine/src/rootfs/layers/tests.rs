//! Layers are looked through as overlayfs does, and nothing outside of them is reached. The last two tests ask overlayfs
//! itself, as root; the others need no rights.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use rustix::fs::{CWD, Mode, OFlags, XattrFlags, makedev, mknodat, setxattr};
use tempfile::TempDir;

use super::*;
use crate::rootfs::Overlay;

/// Directories of layers, the lowest first, and the one of changes.
struct Layers {
    scratch: TempDir,
    lower: Vec<PathBuf>,
    upper: PathBuf,
}

impl Layers {
    fn new(count: usize) -> Self {
        let scratch = TempDir::new_in("/var/tmp").unwrap();
        let directory = |name: String| {
            let path = scratch.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let lower = (0..count).map(|number| directory(format!("layer-{number}"))).collect();
        let upper = directory("upper".to_owned());
        Self { scratch, lower, upper }
    }

    /// Puts a file with these contents into a layer.
    fn put(&self, layer: usize, path: &str, contents: &str) {
        put(&self.lower[layer], path, contents);
    }

    fn made(&self, layer: usize, path: &str) -> PathBuf {
        let path = self.lower[layer].join(path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn find(&self, path: &str) -> Option<String> {
        match file_of_layers(&self.lower, Some(&self.upper), path.as_bytes()).unwrap() {
            OfLayers::File(file) => Some(contents(file)),
            OfLayers::Absent => None,
            OfLayers::Changed => panic!("{path} has not changed"),
        }
    }

    fn is_changed(&self, path: &str) -> bool {
        let found = file_of_layers(&self.lower, Some(&self.upper), path.as_bytes()).unwrap();
        matches!(found, OfLayers::Changed)
    }
}

fn put(directory: &Path, path: &str, contents: &str) {
    let path = directory.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, contents).unwrap();
}

fn contents(mut file: File) -> String {
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

fn whiteout(path: &Path) {
    mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), makedev(0, 0)).unwrap();
}

fn mark(path: &Path, name: &str, value: &str) {
    setxattr(path, format!("user.overlay.{name}"), value.as_bytes(), XattrFlags::empty()).unwrap();
}

#[test]
fn the_topmost_layer_that_has_the_file_wins() {
    let layers = Layers::new(3);
    layers.put(0, "usr/bin/service", "lowest");
    layers.put(0, "usr/bin/old", "old");
    layers.put(1, "usr/bin/service", "middle");
    layers.made(2, "usr/bin");
    assert_eq!(layers.find("/usr/bin/service").as_deref(), Some("middle"));
    assert_eq!(layers.find("/usr/bin/old").as_deref(), Some("old"));
    layers.put(2, "usr/bin/service", "top");
    assert_eq!(layers.find("/usr/bin/service").as_deref(), Some("top"));
    assert_eq!(layers.find("/usr/bin/other"), None);
    assert_eq!(layers.find("/usr/bin"), None);
    assert_eq!(layers.find("/"), None);
    let OfLayers::File(file) = file_of_layers(&layers.lower, None, b"/usr/bin/service").unwrap() else {
        panic!("it is there")
    };
    assert_eq!(contents(file), "top");
    assert!(matches!(file_of_layers(&[], None, b"/usr/bin/service").unwrap(), OfLayers::Absent));
}

#[test]
fn a_whiteout_hides_what_is_below_and_not_what_is_above() {
    let layers = Layers::new(3);
    layers.put(0, "opt/tool", "first");
    layers.put(0, "srv/data/tool", "first");
    whiteout(&layers.made(1, "opt").join("tool"));
    whiteout(&layers.made(1, "srv").join("data"));
    assert_eq!(layers.find("/opt/tool"), None);
    assert_eq!(layers.find("/srv/data/tool"), None);
    layers.put(2, "opt/tool", "again");
    layers.put(2, "srv/data/other", "again");
    assert_eq!(layers.find("/opt/tool").as_deref(), Some("again"));
    assert_eq!(layers.find("/srv/data/other").as_deref(), Some("again"));
    assert_eq!(layers.find("/srv/data/tool"), None);
}

#[test]
fn a_whiteout_that_is_an_attribute_hides_too() {
    let layers = Layers::new(2);
    layers.put(0, "tool", "first");
    layers.put(1, "tool", "");
    assert_eq!(layers.find("/tool").as_deref(), Some(""));
    mark(&layers.lower[1].join("tool"), "whiteout", "y");
    assert_eq!(layers.find("/tool"), None);
}

#[test]
fn an_opaque_directory_hides_those_below_and_shows_its_own() {
    let layers = Layers::new(3);
    layers.put(0, "opt/one/tool", "first");
    layers.put(1, "opt/one/other", "second");
    layers.made(2, "opt/one");
    assert_eq!(layers.find("/opt/one/tool").as_deref(), Some("first"));
    // The value is another one where the directory only has whiteouts that are attributes.
    mark(&layers.lower[1].join("opt"), "opaque", "x");
    assert_eq!(layers.find("/opt/one/tool").as_deref(), Some("first"));
    mark(&layers.lower[1].join("opt"), "opaque", "y");
    assert_eq!(layers.find("/opt/one/tool"), None);
    assert_eq!(layers.find("/opt/one/other").as_deref(), Some("second"));
    mark(&layers.lower[2].join("opt/one"), "opaque", "y");
    assert_eq!(layers.find("/opt/one/other"), None);
}

#[test]
fn what_is_no_directory_hides_a_directory_below_and_what_is_no_file_a_file() {
    let layers = Layers::new(2);
    layers.put(0, "opt/tool", "first");
    layers.put(0, "bin", "first");
    for path in ["opt", "bin"] {
        let there = layers.lower[1].join(path);
        symlink("/elsewhere", &there).unwrap();
        assert_eq!(layers.find("/opt/tool").as_deref(), (path != "opt").then_some("first"));
        assert_eq!(layers.find("/bin").as_deref(), (path != "bin").then_some("first"));
        fs::remove_file(&there).unwrap();
    }
    layers.put(1, "opt", "a file");
    layers.made(1, "bin");
    assert_eq!(layers.find("/opt/tool"), None);
    assert_eq!(layers.find("/bin"), None);
}

#[test]
fn no_link_is_followed_in_the_layers_or_out_of_them() {
    let layers = Layers::new(1);
    put(layers.scratch.path(), "outside/tool", "outside");
    layers.put(0, "real/tool", "inside");
    let layer = &layers.lower[0];
    symlink("real", layer.join("inside")).unwrap();
    symlink("../outside", layer.join("above")).unwrap();
    symlink(layers.scratch.path().join("outside"), layer.join("absolute")).unwrap();
    symlink("tool", layer.join("real/link")).unwrap();
    symlink("/proc/self/root", layer.join("root")).unwrap();
    for path in ["/inside/tool", "/above/tool", "/absolute/tool", "/real/link", "/root/etc/passwd"] {
        assert_eq!(layers.find(path), None, "{path}");
    }
    assert_eq!(layers.find("/real/tool").as_deref(), Some("inside"));
}

#[test]
fn fifos_and_devices_are_not_opened() {
    let layers = Layers::new(1);
    let layer = &layers.lower[0];
    // To open it for reading would wait for a writer.
    mknodat(CWD, layer.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    std::os::unix::net::UnixListener::bind(layer.join("socket")).unwrap();
    assert_eq!(layers.find("/fifo"), None);
    assert_eq!(layers.find("/fifo/tool"), None);
    assert_eq!(layers.find("/socket"), None);
}

#[test]
fn what_lies_elsewhere_is_an_error_and_never_another_file() {
    for (path, name) in [("opt", "redirect"), ("opt/tool", "metacopy"), ("opt/tool", "redirect")] {
        let layers = Layers::new(2);
        layers.put(0, "opt/tool", "first");
        layers.put(1, "opt/tool", "second");
        mark(&layers.lower[1].join(path), name, "/elsewhere");
        let error = file_of_layers(&layers.lower, None, b"/opt/tool").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        let expected = format!("layer {} refers to another place for /opt/tool", layers.lower[1].display());
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn what_the_container_has_changed_is_told() {
    let changed = |change: &dyn Fn(&Path)| {
        let layers = Layers::new(1);
        layers.put(0, "opt/one/tool", "first");
        change(&layers.upper);
        layers.is_changed("/opt/one/tool")
    };
    let directory = |upper: &Path, path: &str| {
        fs::create_dir_all(upper.join(path)).unwrap();
        upper.join(path)
    };
    assert!(!changed(&|_| {}));
    assert!(!changed(&|upper| drop(directory(upper, "opt/one"))));
    assert!(!changed(&|upper| put(upper, "opt/one/other", "new")));
    assert!(!changed(&|upper| mark(&directory(upper, "opt"), "origin", "x")));

    assert!(changed(&|upper| put(upper, "opt/one/tool", "first")));
    assert!(changed(&|upper| drop(directory(upper, "opt/one/tool"))));
    assert!(changed(&|upper| whiteout(&directory(upper, "opt/one").join("tool"))));
    assert!(changed(&|upper| symlink("other", directory(upper, "opt/one").join("tool")).unwrap()));
    assert!(changed(&|upper| whiteout(&upper.join("opt"))));
    assert!(changed(&|upper| symlink("other", upper.join("opt")).unwrap()));
    assert!(changed(&|upper| put(upper, "opt/one", "a file")));
    assert!(changed(&|upper| mark(&directory(upper, "opt"), "opaque", "y")));
    assert!(changed(&|upper| mark(&directory(upper, "opt/one"), "redirect", "/two")));
}

#[test]
fn paths_that_the_kernel_does_not_tell_are_refused() {
    let layers = Layers::new(1);
    layers.put(0, "opt/tool", "first");
    put(layers.scratch.path(), "tool", "outside");
    let long = [b"/".to_vec(), vec![b'a'; 256]].concat();
    let deep = b"/a".repeat(2049);
    for path in [
        &b""[..],
        b"opt/tool",
        b"../tool",
        b"/../tool",
        b"/opt/../../tool",
        b"/opt/./tool",
        b"/opt//tool",
        b"//opt/tool",
        b"/opt/tool/",
        b"/opt/tool\0",
        b"/opt/tool\0/../tool",
        &long,
        &deep,
    ] {
        let error = file_of_layers(&layers.lower, Some(&layers.upper), path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().starts_with("there is no file "), "{error}");
    }
    // As long and as deep as they may be, and with any other byte.
    assert_eq!(layers.find(&format!("/{}", "a".repeat(255))), None);
    assert_eq!(layers.find(&"/a".repeat(2048)[..4096]), None);
    assert!(matches!(file_of_layers(&layers.lower, None, b"/\xff\n").unwrap(), OfLayers::Absent));
}

#[test]
fn a_layer_that_is_missing_is_an_error() {
    let mut layers = Layers::new(1);
    layers.lower.push(layers.scratch.path().join("missing"));
    let error = file_of_layers(&layers.lower, None, b"/tool").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    let error = file_of_layers(&layers.lower[..1], Some(&layers.lower[1]), b"/tool").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

/// Something at a name of a layer.
#[derive(Debug, Clone, Copy)]
enum Thing {
    File,
    Directory,
    Opaque,
    Whiteout,
    Link,
    Fifo,
}

const NAMES: [&str; 2] = ["a", "b"];

/// The two names, at three depths.
fn paths() -> Vec<String> {
    let mut all = vec![String::new()];
    let mut last = all.clone();
    for _ in 0..3 {
        last = last.iter().flat_map(|above| NAMES.map(|name| format!("{above}/{name}"))).collect();
        all.extend(last.clone());
    }
    all
}

fn make(layer: &Path, path: &str, thing: Thing, contents: &str) {
    let there = layer.join(path.trim_start_matches('/'));
    let parent = there.parent().unwrap();
    // What is in the way of an earlier thing is not made.
    if fs::create_dir_all(parent).is_err() {
        return;
    }
    if path.is_empty() {
        if matches!(thing, Thing::Opaque) {
            trusted(&there, "opaque", "y");
        }
        return;
    }
    if there.symlink_metadata().is_ok() {
        return;
    }
    match thing {
        Thing::File => fs::write(&there, contents).unwrap(),
        Thing::Directory => fs::create_dir(&there).unwrap(),
        Thing::Opaque => {
            fs::create_dir(&there).unwrap();
            trusted(&there, "opaque", "y");
        }
        Thing::Whiteout => whiteout(&there),
        Thing::Link => symlink(if path.ends_with('a') { "b" } else { "a" }, &there).unwrap(),
        Thing::Fifo => mknodat(CWD, &there, FileType::Fifo, Mode::RUSR, 0).unwrap(),
    }
}

fn trusted(path: &Path, name: &str, value: &str) {
    setxattr(path, format!("trusted.overlay.{name}"), value.as_bytes(), XattrFlags::empty()).unwrap();
}

/// What a mount shows, without following links.
fn shown(mounted: &Path, path: &str) -> Option<String> {
    let root = Root::open(mounted, Links::Refused).unwrap();
    let node = root.node_if_any(path.trim_start_matches('/').as_bytes());
    // A link in the middle is refused, and no file is there.
    let node = node.ok().flatten()?;
    let is_file = FileType::from_raw_mode(node.statx().unwrap().stx_mode.into()) == FileType::RegularFile;
    is_file.then(|| contents(File::open(node.magic()).unwrap()))
}

/// Unmounts when it is dropped.
struct Mounted(Overlay);

impl Mounted {
    fn new(layers: &Layers) -> Self {
        let path = |name: &str| layers.scratch.path().join(name);
        let (lower, upper) = (layers.lower.clone(), layers.upper.clone());
        let overlay = Overlay { lower, upper, work: path("work"), target: path("target") };
        overlay.mount().unwrap();
        Self(overlay)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.0.unmount();
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

fn things() -> impl Strategy<Value = Vec<(usize, prop::sample::Index, Thing)>> {
    use Thing::{Directory, Fifo, File, Link, Opaque, Whiteout};
    let thing = prop::sample::select(vec![File, File, Directory, Directory, Opaque, Whiteout, Link, Fifo]);
    prop::collection::vec((0..3_usize, any::<prop::sample::Index>(), thing), 1..24)
}

/// What a container does with its files.
#[derive(Debug, Clone, Copy)]
enum Change {
    Write,
    Remove,
    MakeDirectory,
    Rename,
    Mode,
}

fn change(root: &Path, path: &Path, other: &Path, change: Change) {
    let (path, other) = (root.join(path), root.join(other));
    // What cannot be done leaves all as it was.
    let _ = match change {
        Change::Write => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOFOLLOW;
            rustix::fs::open(&path, flags, Mode::RUSR)
                .and_then(|file| rustix::io::write(file, b"written").map(drop))
        }
        .map_err(io::Error::from),
        Change::Remove => fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path)),
        Change::MakeDirectory => fs::create_dir(&path),
        Change::Rename => fs::rename(&path, &other),
        Change::Mode => {
            rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW, Mode::empty())
                .and_then(|file| rustix::fs::fchmod(file, Mode::RWXU))
                .map_err(io::Error::from)
        }
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn all_layers_are_seen_as_overlayfs_shows_them(things in things()) {
        let layers = Layers::new(3);
        let paths = paths();
        for (number, (layer, path, thing)) in things.iter().enumerate() {
            make(&layers.lower[*layer], &paths[path.index(paths.len())], *thing, &number.to_string());
        }
        let mounted = Mounted::new(&layers);
        for path in paths.iter().filter(|path| !path.is_empty()) {
            prop_assert_eq!(layers.find(path), shown(&mounted.0.target, path), "{}", path);
        }
    }

    #[test]
    fn what_a_container_has_changed_is_told_or_is_as_it_was(
        things in things(),
        changes in prop::collection::vec((
            any::<prop::sample::Index>(),
            any::<prop::sample::Index>(),
            prop::sample::select(vec![
                Change::Write, Change::Remove, Change::MakeDirectory, Change::Rename, Change::Mode,
            ]),
        ), 1..8),
    ) {
        let layers = Layers::new(3);
        let paths = paths();
        for (number, (layer, path, thing)) in things.iter().enumerate() {
            make(&layers.lower[*layer], &paths[path.index(paths.len())], *thing, &number.to_string());
        }
        let mounted = Mounted::new(&layers);
        let at = |index: &prop::sample::Index| Path::new(&paths[index.index(paths.len())]).strip_prefix("/").ok();
        for (path, other, what) in &changes {
            if let (Some(path), Some(other)) = (at(path), at(other)) {
                change(&mounted.0.target, path, other, *what);
            }
        }
        for path in paths.iter().filter(|path| !path.is_empty()) {
            match file_of_layers(&layers.lower, Some(&layers.upper), path.as_bytes()).unwrap() {
                OfLayers::Changed => {}
                OfLayers::Absent => prop_assert_eq!(None, shown(&mounted.0.target, path), "{}", path),
                OfLayers::File(file) => {
                    prop_assert_eq!(Some(contents(file)), shown(&mounted.0.target, path), "{}", path);
                }
            }
        }
    }
}
