//! Directories of nodes in services that move: what becomes of each is said by the user, and what is said to be storage that
//! both nodes have is tried.
//!
//! The source puts a file into each such directory, named after the migration, and the destination looks for it under the same
//! path. Nothing is believed: two nodes may have different directories there.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use godwit_database::blocking::off_worker;
use godwit_engine::{Mount, MountKind, OnMove};
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use crate::service::Service;

/// What the name of such a file begins with.
const MARK: &str = ".godwit-";

fn mark(directory: &Path, migration: &str) -> PathBuf {
    directory.join(format!("{MARK}{migration}"))
}

/// A directory that both nodes have, and its place in the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) source: PathBuf,
    pub(crate) target: PathBuf,
}

/// Those of a service that it has bound.
pub(crate) fn bound(service: &Service) -> impl Iterator<Item = Shared> {
    service.mounts.iter().filter_map(|mount| match mount.bind()? {
        (source, OnMove::Shared) => Some(Shared { source: source.into(), target: mount.target.clone() }),
        (_, OnMove::Unsaid | OnMove::Skip | OnMove::Copy) => None,
    })
}

/// Volumes of its engine's that show storage which both nodes have, and where they are in the service.
pub(crate) fn volumes(service: &Service) -> impl Iterator<Item = (&str, &Path)> {
    service.mounts.iter().filter_map(|mount| match mount.engine_volume()? {
        (name, OnMove::Shared) => Some((name, mount.target.as_path())),
        (_, OnMove::Unsaid | OnMove::Skip | OnMove::Copy) => None,
    })
}

/// Why a service cannot move, where it is not said what becomes of its directories.
pub(crate) fn objections<'a>(service: &'a Service, to: &'a str) -> impl Iterator<Item = String> + 'a {
    service.mounts.iter().filter(|mount| mount.bind().is_some_and(|(_, on_move)| on_move == OnMove::Unsaid)).map(
        move |Mount { kind, target, .. }| {
            let source = match kind {
                MountKind::Bind { source, .. } => source.display().to_string(),
                MountKind::Tmpfs { .. } | MountKind::Volume { .. } | MountKind::EngineVolume { .. } => {
                    String::new()
                }
            };
            let to = if to.is_empty() { "its destination".to_owned() } else { format!("node {to}") };
            let target = target.display();
            format!("what is in {source}, which is mounted at {target}, does not move with it: say --mount {target}=shared if {to} has the same storage at that path, --mount {target}=skip if the service is to have there what {to} has, or --mount {target}=copy if the files are to go with it")
        },
    )
}

/// What is at a path of a service: its links lead nowhere but into its root directory.
pub(crate) fn inside(root: impl AsFd, path: &Path) -> io::Result<Metadata> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    File::from(openat2(root, path, how)?).metadata()
}

/// The files of a source, which go with this.
pub(crate) struct Marks {
    made: Vec<PathBuf>,
    /// What a daemon that is killed meanwhile finds again.
    note: PathBuf,
}

impl Marks {
    /// Puts one into each directory that is said to be storage of both nodes; the reason why not, in a sentence. `root` is the
    /// service's root directory.
    pub(crate) fn put(run: &Path, all: &[Shared], root: impl AsFd, migration: &str) -> Result<Self, String> {
        let mut marks = Self { made: Vec::new(), note: notes(run).join(migration) };
        let places: Vec<_> = all.iter().map(|shared| mark(&shared.source, migration)).collect();
        if places.is_empty() {
            return Ok(marks);
        }
        for Shared { source, target } in all {
            let same = fs::metadata(source).ok().zip(inside(&root, target).ok());
            if same.is_none_or(|(one, other)| (one.dev(), one.ino()) != (other.dev(), other.ino())) {
                let (source, target) = (source.display(), target.display());
                return Err(format!(
                    "what is at {source} now is not what the service has mounted at {target}; restart the service, so that it has that"
                ));
            }
        }
        let noted = || {
            fs::create_dir_all(notes(run))?;
            fs::write(&marks.note, serde_json::to_vec(&places)?)
        };
        let failed = |path: &Path, error: io::Error| {
            format!(
                "whether both nodes have the storage cannot be tried: cannot create {}: {error}",
                path.display()
            )
        };
        noted().map_err(|error| failed(&marks.note, error))?;
        for place in places {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&place);
            // Both of two mounts of one directory have it.
            match made.and_then(|file: File| file.sync_all()) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(&place, error)),
                _ => marks.made.push(place),
            }
        }
        Ok(marks)
    }

    /// What daemons that were killed have left. It goes with this.
    pub(crate) fn left(run: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(notes(run)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let left = entries.map(|entry| {
            let note = entry?.path();
            // One that was not written whole tells of none: they are made after it.
            let made = serde_json::from_slice(&fs::read(&note)?).unwrap_or_default();
            Ok(Self { made, note })
        });
        left.collect()
    }
}

fn notes(run: &Path) -> PathBuf {
    run.join("storage")
}

impl Drop for Marks {
    fn drop(&mut self) {
        // Storage of others may not answer.
        off_worker(|| {
            for path in self.made.iter().chain([&self.note]) {
                match fs::remove_file(path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        tracing::warn!(path = %path.display(), %error, "cannot remove a file by which shared storage was tried");
                    }
                    _ => {}
                }
            }
        });
    }
}

/// Why a directory of this node is not what the source has under its path.
pub(crate) fn objection(directory: &Path, migration: &str, (here, from): (&str, &str)) -> Option<String> {
    let found = off_worker(|| fs::symlink_metadata(mark(directory, migration)));
    let path = directory.display();
    match found {
        Ok(_) => None,
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Some(format!("whether {path} is the storage that node {from} has there cannot be tried: {error}"))
        }
        Err(_) => Some(format!(
            "{path} is not the storage that node {from} has there: a file that was put into it there is not in it here; mount the same storage at {path} on node {here}"
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    fn with(source: &Path, on_move: OnMove) -> Service {
        let kind = MountKind::Bind { source: source.into(), on_move };
        let mount = Mount { kind, target: "/data".into(), read_only: false };
        Service { mounts: vec![mount.clone(), mount], ..service() }
    }

    #[test]
    fn storage_is_shared_where_what_one_node_puts_there_the_other_sees() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        ["one", "other", "run"].iter().for_each(|name| fs::create_dir(at(name)).unwrap());
        // The service's root, where an absolute link leads to what is mounted.
        fs::create_dir_all(at("root/run")).unwrap();
        fs::rename(at("one"), at("root/run/one")).unwrap();
        std::os::unix::fs::symlink("root/run/one", at("one")).unwrap();
        std::os::unix::fs::symlink("/run/one", at("root/data")).unwrap();
        let service = with(&at("one"), OnMove::Shared);
        let shared: Vec<_> = bound(&service).collect();
        let marks = Marks::put(&at("run"), &shared, File::open(at("root")).unwrap(), "01M").unwrap();
        assert_eq!(objection(&at("one"), "01M", ("b", "a")), None);
        for (directory, migration) in [("other", "01M"), ("one", "01X"), ("nowhere", "01M")] {
            let why = objection(&at(directory), migration, ("b", "a")).unwrap();
            assert!(why.contains("is not the storage that node a has there"), "{why}");
        }
        drop(marks);
        assert_eq!(fs::read_dir(at("one")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(at("run/storage")).unwrap().count(), 0);
        // What the service has mounted counts, whatever is at its path now.
        fs::remove_file(at("one")).unwrap();
        fs::rename(at("other"), at("one")).unwrap();
        let why = Marks::put(&at("run"), &shared, File::open(at("root")).unwrap(), "01M").err().unwrap();
        assert!(why.contains("is not what the service has mounted at /data"), "{why}");
    }

    #[test]
    fn what_a_killed_daemon_has_put_there_the_next_one_removes() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        ["one", "run"].iter().for_each(|name| fs::create_dir(at(name)).unwrap());
        assert!(Marks::left(&at("run")).unwrap().is_empty());
        fs::write(at("one/kept"), "").unwrap();
        // In this root, what is mounted is where it is.
        let shared = [Shared { source: at("one"), target: at("one") }];
        std::mem::forget(Marks::put(&at("run"), &shared, File::open("/").unwrap(), "01M").unwrap());
        assert_eq!(fs::read_dir(at("one")).unwrap().count(), 2);
        drop(Marks::left(&at("run")).unwrap());
        assert_eq!(fs::read_dir(at("one")).unwrap().count(), 1);
        assert_eq!(fs::read_dir(at("run/storage")).unwrap().count(), 0);
    }

    #[test]
    fn of_each_directory_it_must_be_said_what_becomes_of_it() {
        let said = |on_move| objections(&with(Path::new("/srv"), on_move), "b").collect::<Vec<_>>();
        assert!(said(OnMove::Skip).is_empty() && said(OnMove::Shared).is_empty());
        let unsaid = said(OnMove::Unsaid);
        assert_eq!(unsaid.len(), 2);
        assert!(
            unsaid[0].contains("--mount /data=skip")
                && unsaid[0].contains("=copy")
                && unsaid[0].contains("node b"),
            "{}",
            unsaid[0]
        );
        // A file in the place of the directory.
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        let shared = [Shared { source: file.clone(), target: file.clone() }];
        let why = Marks::put(scratch.path(), &shared, File::open("/").unwrap(), "01M").err().unwrap();
        assert!(why.contains(&format!("cannot create {}/.godwit-01M", file.display())), "{why}");
        assert_eq!(fs::read_dir(scratch.path().join("storage")).unwrap().count(), 0);
    }
}
