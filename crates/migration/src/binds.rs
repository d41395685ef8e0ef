//! Which directories of a node may be mounted into services.
//!
//! The user of a node is root there, and may name any directory for a new service. A service that comes from another
//! node gets only directories below those that this node's operator allows, since the other node chose the paths. No
//! service gets the directories of godwit itself, which hold the node's key.
//!
//! Paths are opened component by component, and no link is followed below an allowed directory: another service may
//! be able to write there, and must not make the path lead out.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_engine::{Identity, Mount};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use crate::storage::inside;

/// What a node's directories are protected by.
#[derive(Debug, Clone, Default)]
pub struct Binds {
    /// Below these, services from other nodes may have theirs.
    pub allowed: Vec<PathBuf>,
    /// The node's own.
    pub own: Vec<PathBuf>,
}

/// Something of this node that a service may have, as it was looked at. It is open, so that nothing else gets its number.
#[derive(Debug)]
pub struct Checked {
    source: PathBuf,
    identity: Identity,
    _opened: OwnedFd,
}

impl Checked {
    pub(crate) fn new(source: &Path, target: &Path, opened: OwnedFd) -> Result<Self, String> {
        let found = opened.try_clone().and_then(|opened| File::from(opened).metadata());
        let found = found.map_err(|error| format!("{} cannot be looked at: {error}", source.display()))?;
        let identity = Identity { target: target.to_owned(), device: found.dev(), inode: found.ino() };
        Ok(Self { source: source.to_owned(), identity, _opened: opened })
    }

    /// Why a service with this root directory has something else in its place, if it has.
    pub(crate) fn objection(&self, root: impl AsFd) -> Option<String> {
        let Self { source, identity: Identity { target, device, inode }, .. } = self;
        let (source, shown) = (source.display(), target.display());
        match inside(root, target) {
            Ok(found) if (found.dev(), found.ino()) == (*device, *inode) => None,
            Ok(_) => Some(format!(
                "what it has at {shown} is not what was at {source} when it was looked at: the path has changed meanwhile; try again"
            )),
            Err(error) => Some(format!("what it has at {shown}, of {source}, cannot be looked at: {error}")),
        }
    }
}

/// What the engine is to find where a service has these.
#[must_use]
pub fn identities(checked: &[Checked]) -> Vec<Identity> {
    checked.iter().map(|checked| checked.identity.clone()).collect()
}

impl Binds {
    /// Why a directory or file cannot be mounted into a service of this node, if it cannot.
    #[must_use]
    pub fn objection(&self, source: &Path) -> Option<String> {
        self.open(source).err()
    }

    /// Opens a directory or file that is to be mounted into a service of this node; or why it cannot.
    ///
    /// # Errors
    /// In a sentence.
    pub fn open(&self, source: &Path) -> Result<OwnedFd, String> {
        let opened = open_source(source).map_err(|_| {
            format!("{}, which is mounted into the service, does not exist there", source.display())
        })?;
        self.is_not_own(source, opened)
    }

    fn is_not_own(&self, source: &Path, opened: OwnedFd) -> Result<OwnedFd, String> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))
            .map_err(|error| format!("where {} leads cannot be found: {error}", source.display()))?;
        let touches = |own: &PathBuf| {
            let own = own.canonicalize().unwrap_or_else(|_| own.clone());
            path.starts_with(&own) || own.starts_with(&path)
        };
        match self.own.iter().find(|own| touches(own)) {
            None => Ok(opened),
            Some(own) => Err(format!(
                "{} cannot be mounted into a service: it shows {}, which is godwit's own",
                source.display(),
                own.display()
            )),
        }
    }

    /// The same for a service that comes from another node to node `here`.
    #[must_use]
    pub fn foreign_objection(&self, source: &Path, here: &str) -> Option<String> {
        self.open_foreign(source, here).err()
    }

    /// Opens what is to be mounted into a service that comes from another node to node `here`; or why it cannot.
    ///
    /// # Errors
    /// In a sentence.
    pub fn open_foreign(&self, source: &Path, here: &str) -> Result<OwnedFd, String> {
        if !source.exists() {
            return self.open(source);
        }
        let opened = self.allowed.iter().find_map(|allowed| open_below(allowed, source)).ok_or_else(|| {
            format!(
                "{}, which is mounted into the service, is not below a directory that node {here} allows for services from other nodes, or a link is on the way there; start godwitd there with --allow-bind DIR",
                source.display()
            )
        })?;
        self.is_not_own(source, opened)
    }

    /// All that a service is to have of node `here`, which may have come from another; or every reason against it.
    ///
    /// # Errors
    /// In sentences.
    pub fn checked(&self, mounts: &[Mount], has_come: bool, here: &str) -> Result<Vec<Checked>, Vec<String>> {
        let (mut found, mut reasons) = (Vec::new(), Vec::new());
        for mount in mounts {
            let Some((source, _)) = mount.bind() else { continue };
            let opened = if has_come { self.open_foreign(source, here) } else { self.open(source) };
            match opened.and_then(|opened| Checked::new(source, &mount.target, opened)) {
                Ok(checked) => found.push(checked),
                Err(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() { Ok(found) } else { Err(reasons) }
    }
}

impl Binds {
    /// Opens a volume that an engine of this node has, which a service that comes is to have as it is; or why it cannot.
    ///
    /// # Errors
    /// In a sentence.
    pub fn open_volume(
        &self,
        (engine, volume): (&str, &str),
        place: &Path,
        here: &str,
    ) -> Result<OwnedFd, String> {
        match self.allowed.iter().find_map(|allowed| open_below(allowed, place)) {
            Some(opened) => self.is_not_own(place, opened),
            None => {
                let place = place.display();
                Err(format!(
                    "the volume {volume} that {engine} has there is not one that node {here} allows for services from other nodes; start godwitd there with --allow-bind {place}, or remove the volume"
                ))
            }
        }
    }
}

/// Opens, as a path, what is to be mounted into a service.
pub(crate) fn open_source(source: &Path) -> nix::Result<OwnedFd> {
    mounted(|flags| open(source, flags, Mode::empty()))
}

/// What is opened as a path; of a directory that which the kernel mounts there on demand (autofs), as it does when the
/// directory is mounted elsewhere.
fn mounted(open: impl Fn(OFlag) -> nix::Result<OwnedFd>) -> nix::Result<OwnedFd> {
    let path = OFlag::O_PATH | OFlag::O_CLOEXEC;
    match open(path | OFlag::O_DIRECTORY) {
        Err(Errno::ENOTDIR) => open(path),
        opened => opened,
    }
}

/// Opens a file of a volume, in whose place the service may have put something else.
///
/// # Errors
/// In a sentence.
pub(crate) fn open_file(volume: &Path, file: &str) -> Result<OwnedFd, String> {
    let path = volume.join(file);
    let opened =
        open_below(volume, &path).ok_or_else(|| format!("{} is not a file any more", path.display()))?;
    match opened.try_clone().and_then(|opened| File::from(opened).metadata()) {
        Ok(found) if found.is_file() => Ok(opened),
        Ok(_) => Err(format!("{} is not a file any more", path.display())),
        Err(error) => Err(format!("{} cannot be looked at: {error}", path.display())),
    }
}

/// What is below a directory, where the path leads there without a link.
fn open_below(directory: &Path, path: &Path) -> Option<OwnedFd> {
    let beneath = path.strip_prefix(directory).ok()?;
    let root = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    if beneath.as_os_str().is_empty() {
        return Some(root);
    }
    let how = OpenHow::new().resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    mounted(|flags| openat2(&root, beneath, how.flags(flags))).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use godwit_engine::{MountKind, OnMove};
    use nix::mount::{MsFlags, mount};
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn what_has_taken_the_place_of_a_file_of_a_volume_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "x").unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        symlink("/", at("root")).unwrap();
        symlink("file", at("near")).unwrap();
        open_file(directory.path(), "file").unwrap();
        for other in ["directory", "root", "near", "gone"] {
            assert!(
                open_file(directory.path(), other).unwrap_err().contains("not a file any more"),
                "{other}"
            );
        }
    }

    const ON_DEMAND: &str = "GODWIT_TEST_ON_DEMAND";

    /// Not a test: what the next one runs, as the kernel mounts nothing for the process group of an automounter.
    #[test]
    #[ignore = "run by another test"]
    fn looks_at_what_is_mounted_on_demand() {
        let Some(place) = std::env::var_os(ON_DEMAND).map(PathBuf::from) else { return };
        let binds = Binds { allowed: vec![place.parent().unwrap().to_owned()], own: Vec::new() };
        for opened in [binds.open(&place), binds.open_foreign(&place, "b")] {
            let opened = opened.unwrap();
            assert!(Path::new(&format!("/proc/self/fd/{}/there", opened.as_raw_fd())).exists());
        }
    }

    #[test]
    fn of_a_directory_that_the_kernel_mounts_on_demand_what_is_mounted_is_looked_at() {
        if !nix::unistd::geteuid().is_root() {
            return println!("only root mounts autofs");
        }
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("place");
        std::fs::create_dir(&place).unwrap();
        let there = place.clone();
        // In a thread, and a mount namespace, of its own.
        let automounter = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let (packets, kernel) = nix::unistd::pipe().unwrap();
            let number = kernel.as_raw_fd();
            let options = format!("fd={number},pgrp={},minproto=5,maxproto=5,direct", nix::unistd::getpgrp());
            match mount(Some("on-demand"), &there, Some("autofs"), MsFlags::empty(), Some(options.as_str())) {
                Err(Errno::ENODEV) => return println!("this kernel has no autofs"),
                mounted => mounted.unwrap(),
            }
            drop(kernel);
            let covered = File::open(&there).unwrap();
            let mut looking = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "binds::tests::looks_at_what_is_mounted_on_demand", "--ignored"])
                .env(ON_DEMAND, &there)
                .process_group(0)
                .spawn()
                .unwrap();
            let mut packet = [0; 4096];
            let mut asked = [PollFd::new(packets.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut asked, PollTimeout::from(60_000_u16)).unwrap(), 1, "nobody looked");
            assert!(File::from(packets).read(&mut packet).unwrap() >= 12);
            mount(Some("there"), &there, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            std::fs::write(there.join("there"), b"").unwrap();
            let token = i32::from_ne_bytes(packet[8..12].try_into().unwrap());
            // SAFETY: AUTOFS_IOC_READY takes a number.
            unsafe { ready(covered.as_raw_fd(), token) }.unwrap();
            assert!(looking.wait().unwrap().success());
        });
        automounter.join().unwrap();
    }

    nix::ioctl_write_int_bad!(ready, nix::request_code_none!(0x93, 0x60));

    #[test]
    fn a_service_from_elsewhere_gets_what_the_operator_allows_and_nothing_by_links() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["shared/data/deep", "other", "state/identity"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        symlink(at("other"), at("shared/link")).unwrap();
        symlink("../other", at("shared/data/up")).unwrap();
        let binds = Binds { allowed: vec![at("shared")], own: vec![at("state")] };
        for good in ["shared", "shared/data", "shared/data/deep"] {
            assert_eq!(binds.foreign_objection(&at(good), "b"), None, "{good}");
        }
        for bad in ["other", "shared/link", "shared/data/up", "shared/../other", "shared-2", "state"] {
            assert!(binds.foreign_objection(&at(bad), "b").is_some(), "{bad}");
        }
        assert!(Binds::default().foreign_objection(&at("shared"), "b").is_some(), "none is the default");
    }

    #[test]
    fn a_volume_that_an_engine_has_here_is_given_to_a_service_from_elsewhere_only_where_that_is_allowed() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("volumes/data/_data");
        std::fs::create_dir_all(&place).unwrap();
        let of = |binds: &Binds| binds.open_volume(("Docker", "data"), &place, "b").err();
        let why = of(&Binds::default()).unwrap();
        for words in ["volume data that Docker has", &format!("--allow-bind {}", place.display())] {
            assert!(why.contains(words), "{words}: {why}");
        }
        assert_eq!(of(&Binds { allowed: vec![place.clone()], own: Vec::new() }), None);
        let own = Binds { allowed: vec!["/".into()], own: vec![directory.path().into()] };
        assert!(of(&own).unwrap().contains("godwit's own"));
    }

    #[test]
    fn what_is_at_the_place_of_a_mount_is_compared_with_what_was_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        ["data", "other"].iter().for_each(|name| std::fs::create_dir(at(name)).unwrap());
        let binds = Binds { allowed: vec![directory.path().into()], own: Vec::new() };
        let kind = MountKind::Bind { source: at("data"), on_move: OnMove::Skip };
        // In this root, what is mounted is where it is.
        let root = File::open("/").unwrap();
        let mounts = [Mount { kind, target: at("data"), read_only: false }];
        let checked = binds.checked(&mounts, true, "b").unwrap();
        assert_eq!(checked[0].objection(&root), None);
        std::fs::rename(at("data"), at("away")).unwrap();
        assert!(checked[0].objection(&root).unwrap().contains("cannot be looked at"));
        symlink(at("other"), at("data")).unwrap();
        assert!(checked[0].objection(&root).unwrap().contains("the path has changed meanwhile"));
        assert_eq!(binds.checked(&mounts, true, "b").unwrap_err().len(), 1, "a link is on the way");
        let again = binds.checked(&mounts, false, "b").unwrap();
        assert_eq!(identities(&again)[0].inode, std::fs::metadata(at("other")).unwrap().ino());
    }

    #[test]
    fn nobody_gets_the_nodes_own_directories() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        std::fs::create_dir_all(state.join("identity")).unwrap();
        symlink(&state, directory.path().join("link")).unwrap();
        let binds = Binds { allowed: vec!["/".into()], own: vec![state.clone()] };
        let sources = [state.clone(), state.join("identity"), directory.path().into(), "/".into()];
        for source in sources.into_iter().chain([directory.path().join("link")]) {
            assert!(binds.objection(&source).is_some(), "{}", source.display());
            assert!(binds.foreign_objection(&source, "b").is_some(), "{}", source.display());
        }
        assert_eq!(binds.objection(Path::new("/usr")), None);
    }
}
