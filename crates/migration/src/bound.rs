//! Directories of a node whose files go with a service that has them mounted, and single files that do. At the destination
//! they are a volume, of which a single file is mounted by its name in it: nobody writes to a path there that another node has
//! named. The directory or file itself stays as it is.
//!
//! What the service has mounted goes, and nothing that has come to be at its path since: the directory is opened once, and must
//! be that one.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_database::blocking::off_worker;
use godwit_engine::{Copied, Engines, Mount, MountKind, OnMove, is_file_name};
use godwit_names::{MAX_NAME, VolumeName};

use crate::binds::{Binds, open_source};
use crate::service::Service;
use crate::storage::inside;

/// Where the kernel shows itself, and where devices are: no files of a service.
const OF_THE_KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// A directory whose files go, or a file that does.
#[derive(Debug)]
pub(crate) struct Going {
    /// What they are at the destination.
    pub(crate) copied: Copied,
    /// Its path.
    pub(crate) source: PathBuf,
    /// The directory or file that was there, whatever is now.
    pub(crate) opened: OwnedFd,
}

/// One of a service: what it is at the destination, and its path on this node.
pub(crate) type Of<'a> = (Copied, &'a Path);

/// Those of a service.
///
/// # Errors
/// One has no name that a volume can have, or the definition of its engine's container is not understood; in a sentence.
pub(crate) fn of(service: &Service) -> Result<Vec<Of<'_>>, String> {
    let copied = service.mounts.iter().filter_map(|mount| match mount.bind()? {
        (source, OnMove::Copy) => Some((source, mount.target.as_path())),
        (_, OnMove::Unsaid | OnMove::Skip | OnMove::Shared) => None,
    });
    let copied: Vec<_> = copied.collect();
    if copied.is_empty() {
        return Ok(Vec::new());
    }
    let own = service.volumes().map(|name| name.as_str().to_owned());
    let mut taken: BTreeSet<String> = own.chain(of_engine(service)?).collect();
    let mut found = Vec::new();
    for (source, target) in copied {
        let name = name(service, target, &taken).ok_or_else(|| {
            format!(
                "no volume can have a name for what is mounted at {0}: `godwit rename` gives service {1} another, or say --mount {0}=skip",
                target.display(),
                service.name
            )
        })?;
        taken.insert(name.as_str().to_owned());
        let file = is_file(source).then(|| file_name(target));
        found.push((Copied { name, target: target.to_owned(), file }, source));
    }
    Ok(found)
}

/// The names of the volumes that a container of an engine of others has.
fn of_engine(service: &Service) -> Result<Vec<String>, String> {
    let Some(kept) = &service.kept else { return Ok(Vec::new()) };
    let volumes = Engines::volumes(kept)
        .map_err(|error| format!("the definition of its container is not understood: {error}"))?;
    Ok(volumes.iter().filter_map(Mount::engine_volume).map(|(name, _)| name.to_owned()).collect())
}

/// Whether it is a file. What is opened later is looked at again, and is to be of the same kind.
fn is_file(source: &Path) -> bool {
    off_worker(|| fs::metadata(source)).is_ok_and(|found| found.is_file())
}

/// What a file is called in its volume.
fn file_name(target: &Path) -> String {
    let name = target.file_name().and_then(OsStr::to_str).filter(|name| is_file_name(name));
    name.unwrap_or("file").to_owned()
}

/// A name that tells the service and the place, and that no other volume of the service has.
fn name(service: &Service, target: &Path, taken: &BTreeSet<String>) -> Option<VolumeName> {
    let target = target.to_string_lossy();
    let plain = |each: char| if each.is_ascii_alphanumeric() || "._-".contains(each) { each } else { '-' };
    let target: String = target.trim_matches('/').chars().map(plain).collect();
    let all: String = format!("{}-{target}", service.name);
    let names = (1..).map(|number| match number {
        1 => all.chars().take(MAX_NAME).collect::<String>(),
        _ => {
            let end = format!("-{number}");
            all.chars().take(MAX_NAME - end.len()).chain(end.chars()).collect()
        }
    });
    let mut free = names
        .take(taken.len() + 1)
        .filter_map(|name| VolumeName::try_from(name).ok())
        .filter(|name| !taken.contains(name.as_str()));
    free.next()
}

/// The service with these directories and files as volumes.
///
/// # Errors
/// As [`of`].
pub(crate) fn with_volumes(service: Service) -> Result<Service, String> {
    let of: Vec<_> = of(&service)?.into_iter().map(|(copied, _)| copied).collect();
    let at = |target: &Path| of.iter().find(|copied| copied.target == target).cloned();
    if let Some(kept) = service.kept.as_ref().filter(|_| !of.is_empty()) {
        // Its engine has its volumes.
        let kept = Engines::with_volumes(kept, &of)
            .map_err(|error| format!("the definition of its container is not understood: {error}"))?;
        let mounts = service.mounts.into_iter().filter(|mount| at(&mount.target).is_none()).collect();
        return Ok(Service { mounts, kept: Some(kept), ..service });
    }
    let mounts = service.mounts.into_iter().map(|mount| match at(&mount.target) {
        Some(Copied { name, file, .. }) => Mount { kind: MountKind::Volume { name, file }, ..mount },
        None => mount,
    });
    Ok(Service { mounts: mounts.collect(), ..service })
}

/// Opens those of a service, whose root directory is `root`; or every reason why one cannot go.
pub(crate) fn opened(service: &Service, root: impl AsFd, binds: &Binds) -> Result<Vec<Going>, Vec<String>> {
    let (mut found, mut reasons): (Vec<Going>, _) = (Vec::new(), Vec::new());
    for (copied, source) in of(service).map_err(|why| vec![why])? {
        let target = copied.target.clone();
        match open_one(source, &copied, &root, binds) {
            Ok(opened) => found.push(Going { copied, source: source.to_owned(), opened }),
            Err(why) => reasons.push(format!(
                "what is in {}, which is mounted at {}, cannot be copied: {why}",
                source.display(),
                target.display()
            )),
        }
    }
    reasons.extend(overlaps(&found));
    if reasons.is_empty() { Ok(found) } else { Err(reasons) }
}

fn open_one(source: &Path, copied: &Copied, root: impl AsFd, binds: &Binds) -> Result<OwnedFd, String> {
    let target = copied.target.as_path();
    let opened = open_source(source).map_err(|error| format!("it cannot be opened: {error}"))?;
    let of_opened = |opened: OwnedFd| {
        let metadata = File::from(opened).metadata()?;
        Ok::<_, io::Error>((metadata.file_type(), (metadata.dev(), metadata.ino())))
    };
    let (kind, identity) =
        opened.try_clone().and_then(of_opened).map_err(|error| format!("it cannot be looked at: {error}"))?;
    if !kind.is_dir() && !kind.is_file() {
        return Err(format!(
            "it is neither a directory nor a file; say --mount {0}=skip if the destination has it, too",
            target.display()
        ));
    }
    let has = inside(root, target)
        .map_err(|error| format!("the service's place of it cannot be found: {error}"))?;
    if identity != (has.dev(), has.ino()) {
        return Err("something else is at that path now; restart the service, so that it has that".into());
    }
    if kind.is_file() != copied.file.is_some() {
        return Err("it has just changed".into());
    }
    let path = path_of(&opened).map_err(|error| format!("its path cannot be found: {error}"))?;
    let is_above = |kernel: &&str| path.starts_with(kernel) || Path::new(kernel).starts_with(&path);
    if let Some(kernel) = OF_THE_KERNEL.iter().find(|kernel| is_above(kernel)) {
        return Err(format!("it shows {kernel}, which is the node's"));
    }
    if let Some(why) = binds.objection(&path) {
        return Err(why);
    }
    let mounts = fs::read("/proc/self/mountinfo")
        .map_err(|error| format!("what is mounted in it cannot be found: {error}"))?;
    match mounted_below(&mounts, &path) {
        Some(place) => {
            Err(format!("another filesystem is mounted in it, at {}; unmount that first", place.display()))
        }
        None => Ok(opened),
    }
}

fn path_of(opened: &OwnedFd) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))
}

/// Two of them that are one, or one of which is in another: at the destination they would be two.
fn overlaps(all: &[Going]) -> Option<String> {
    let paths: Vec<_> = all
        .iter()
        .filter_map(|going| Some((path_of(&going.opened).ok()?, going.copied.target.display())))
        .collect();
    let pairs = paths
        .iter()
        .enumerate()
        .flat_map(|(nth, one)| paths.iter().skip(nth + 1).map(move |other| (one, other)));
    let mut touching =
        pairs.filter(|((one, _), (other, _))| one.starts_with(other) || other.starts_with(one));
    touching.next().map(|((one, at), (other, other_at))| {
        format!(
            "what is mounted at {at} and at {other_at} cannot be copied: {} and {} are one directory, or one is in the other, and copies of them would be two; have the files in one mount",
            one.display(),
            other.display()
        )
    })
}

/// The first place below a directory where something is mounted.
fn mounted_below(mountinfo: &[u8], directory: &Path) -> Option<PathBuf> {
    let places = mountinfo.split(|byte| *byte == b'\n').filter_map(|line| {
        let field = line.split(|byte| *byte == b' ').nth(4)?;
        Some(PathBuf::from(std::ffi::OsString::from_vec(unescaped(field))))
    });
    let mut below = places.filter(|place| place != directory && place.starts_with(directory));
    below.next()
}

/// A field of mountinfo, in which some characters are written as three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    let mut rest = field;
    while let Some((first, more)) = rest.split_first() {
        let digits =
            more.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                text.push(byte);
                rest = more.get(3..).unwrap_or_default();
            }
            None => {
                text.push(*first);
                rest = more;
            }
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_engine::{Keeper, Kept};

    use super::*;
    use crate::service::tests::service;

    fn bound(source: &Path, target: &str, on_move: OnMove) -> Mount {
        let kind = MountKind::Bind { source: source.into(), on_move };
        Mount { kind, target: target.into(), read_only: true }
    }

    fn with(mounts: Vec<Mount>) -> Service {
        Service { mounts, ..service() }
    }

    #[test]
    fn a_directory_becomes_a_volume_with_a_name_of_its_own() {
        let volume = MountKind::Volume { name: "redis-srv-b".parse().unwrap(), file: None };
        let srv = Path::new("/srv");
        let before = with(vec![
            Mount { kind: volume, target: "/other".into(), read_only: false },
            bound(srv, "/srv/b", OnMove::Copy),
            bound(srv, "/srv-b", OnMove::Copy),
            bound(srv, &format!("/{}", "ä".repeat(99)), OnMove::Copy),
            bound(srv, "/stays", OnMove::Skip),
        ]);
        let after = with_volumes(before.clone()).unwrap();
        let names: Vec<_> = after.volumes().map(|name| name.as_str().to_owned()).collect();
        assert_eq!(names[..3], ["redis-srv-b", "redis-srv-b-2", "redis-srv-b-3"]);
        assert_eq!(names[3].len(), MAX_NAME);
        assert_eq!(after.mounts[4], before.mounts[4]);
        assert!(after.mounts[1].read_only, "as it was");
        assert_eq!(with_volumes(after.clone()).unwrap(), after, "they are volumes from then on");
    }

    #[test]
    fn of_a_container_that_another_engine_keeps_it_becomes_a_volume_of_the_engines() {
        let definition = serde_json::json!({
            "name": "web", "image": ["web:1", ""], "config": {}, "host": {}, "volumes": [],
            "binds": [{ "source": "/srv", "target": "/data", "read_only": false }],
        });
        let kept = Kept { keeper: Keeper::Docker, id: String::new(), definition };
        let before =
            Service { kept: Some(kept), ..with(vec![bound(Path::new("/srv"), "/data", OnMove::Copy)]) };
        let after = with_volumes(before.clone()).unwrap();
        assert!(after.mounts.is_empty(), "its engine has its volumes");
        let definition = after.kept.unwrap().definition;
        assert_eq!(definition["volumes"][0]["name"], "redis-data");
        assert!(definition.get("binds").is_none());
        let broken = Kept { keeper: Keeper::Podman, id: String::new(), definition: serde_json::Value::Null };
        assert!(with_volumes(Service { kept: Some(broken), ..before }).is_err());
    }

    #[test]
    fn a_file_becomes_a_file_in_a_volume_of_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("conf");
        fs::write(&file, "").unwrap();
        let before = with(vec![
            bound(&file, "/etc/app.conf", OnMove::Copy),
            bound(&file, "/etc/\u{e4}", OnMove::Copy),
        ]);
        let after = with_volumes(before).unwrap();
        let files: Vec<_> = after
            .files_of_volumes()
            .map(|(name, file)| (name.as_str().to_owned(), file.to_owned()))
            .collect();
        let named = |name: &str, file: &str| (name.to_owned(), file.to_owned());
        assert_eq!(files, [named("redis-etc-app.conf", "app.conf"), named("redis-etc--", "file")]);
        assert_eq!(with_volumes(after.clone()).unwrap(), after, "they are volumes from then on");
    }

    #[test]
    fn a_copy_has_no_name_of_a_volume_that_the_container_has_from_its_engine() {
        let definition = serde_json::json!({
            "name": "web", "image": ["web:1", ""], "config": {}, "host": {},
            "volumes": [{ "name": "redis-data", "target": "/own", "read_only": false }],
            "binds": [{ "source": "/srv", "target": "/data", "read_only": true }],
        });
        let kept = Kept { keeper: Keeper::Docker, id: String::new(), definition };
        let service =
            Service { kept: Some(kept), ..with(vec![bound(Path::new("/srv"), "/data", OnMove::Copy)]) };
        let definition = with_volumes(service).unwrap().kept.unwrap().definition;
        let names = [&definition["volumes"][0]["name"], &definition["volumes"][1]["name"]];
        assert_eq!(names, ["redis-data", "redis-data-2"]);
    }

    #[test]
    fn what_cannot_be_copied_is_refused_by_name() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        ["root", "data/in", "state", "linked"].iter().for_each(|name| fs::create_dir_all(at(name)).unwrap());
        fs::write(at("file"), "").unwrap();
        let binds = Binds { allowed: Vec::new(), own: vec![at("state/own")] };
        // In this root, what is mounted is where it is.
        let root = File::open("/").unwrap();
        let of = |sources: &[PathBuf]| {
            let mounts = sources.iter().map(|source| bound(source, source.to_str().unwrap(), OnMove::Copy));
            opened(&with(mounts.collect()), &root, &binds)
        };
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let all = of(&[at("data"), at("linked"), at("file")]).unwrap();
        let files: Vec<_> = all.iter().map(|going| going.copied.file.as_deref()).collect();
        assert_eq!(files, [None, None, Some("file")]);
        for (sources, words) in [
            (vec![at("socket")], "neither a directory nor a file"),
            (vec![at("nowhere")], "it cannot be opened"),
            (vec![at("state")], "godwit's own"),
            (vec!["/".into()], "it shows /proc, which is the node's"),
            (vec!["/proc/sys".into()], "it shows /proc, which is the node's"),
            (vec!["/dev".into()], "it shows /dev, which is the node's"),
            (vec![at("data"), at("data/in")], "or one is in the other"),
            (vec![at("data"), at("data")], "are one directory"),
        ] {
            let why = of(&sources).unwrap_err().join("; ");
            let is_named = sources.iter().all(|source| why.contains(source.to_str().unwrap()));
            assert!(why.contains(words) && is_named, "{why}");
        }
        // What the service has mounted counts, whatever is at its path now.
        let moved = with(vec![bound(&at("linked"), at("data").to_str().unwrap(), OnMove::Copy)]);
        let why = opened(&moved, &root, &binds).unwrap_err().join("; ");
        assert!(why.contains("something else is at that path now"), "{why}");
    }

    #[test]
    fn a_mount_in_the_directory_is_found_whatever_its_name() {
        let mountinfo = b"1 2 0:3 / /srv rw - tmpfs t rw\n1 2 0:3 / /srv/a\\040b/c rw - tmpfs t rw\n";
        let below = |directory: &str| mounted_below(mountinfo, Path::new(directory));
        assert_eq!(below("/srv/a b"), Some("/srv/a b/c".into()));
        assert_eq!(below("/srv"), Some("/srv/a b/c".into()));
        assert_eq!(below("/srv/a"), None);
        assert_eq!(below("/srv/a b/c"), None);
        assert_eq!(unescaped(br"a\x\1"), br"a\x\1");
    }
}
