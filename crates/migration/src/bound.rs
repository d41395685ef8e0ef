//! Directories of a node whose files go with a service that has them mounted. At the destination they are a volume: nobody
//! writes to a path there that another node has named. The directory itself stays as it is.
//!
//! What the service has mounted goes, and nothing that has come to be at its path since: the directory is opened once, and must
//! be that one.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_engine::{Engines, Mount, MountKind, OnMove};
use godwit_names::{MAX_NAME, VolumeName};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use crate::binds::Binds;
use crate::service::Service;
use crate::storage::inside;

/// Where the kernel shows itself, and where devices are: no files of a service.
const OF_THE_KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// A directory whose files go.
#[derive(Debug)]
pub(crate) struct Going {
    /// The volume that they are at the destination.
    pub(crate) volume: VolumeName,
    /// Its path.
    pub(crate) source: PathBuf,
    /// Where the service has it.
    pub(crate) target: PathBuf,
    /// The directory that was there, whatever is now.
    pub(crate) opened: OwnedFd,
}

/// Those of a service: the volume, the path on the node and the place in the service of each.
pub(crate) fn of(service: &Service) -> Vec<(VolumeName, &Path, &Path)> {
    let mut taken: BTreeSet<VolumeName> = service.volumes().cloned().collect();
    let copied = service.mounts.iter().filter_map(|mount| match mount.bind()? {
        (source, OnMove::Copy) => Some((source, mount.target.as_path())),
        (_, OnMove::Unsaid | OnMove::Skip | OnMove::Shared) => None,
    });
    let named = copied.filter_map(|(source, target)| {
        let name = name(service, target, &taken)?;
        taken.insert(name.clone());
        Some((name, source, target))
    });
    named.collect()
}

/// A name that tells the service and the place, and that no other volume of the service has.
fn name(service: &Service, target: &Path, taken: &BTreeSet<VolumeName>) -> Option<VolumeName> {
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
    let mut free =
        names.map_while(|name| VolumeName::try_from(name).ok()).filter(|name| !taken.contains(name));
    free.next()
}

/// The service with these directories as volumes.
///
/// # Errors
/// The engine's definition of its container is not understood.
pub(crate) fn with_volumes(service: Service) -> io::Result<Service> {
    let of: Vec<_> = of(&service).into_iter().map(|(name, _, target)| (name, target.to_owned())).collect();
    let name_at = |target: &Path| of.iter().find(|(_, at)| at == target).map(|(name, _)| name.clone());
    if let Some(kept) = service.kept.as_ref().filter(|_| !of.is_empty()) {
        // Its engine has its volumes.
        let kept = Some(Engines::with_volumes(kept, &of)?);
        let mounts = service.mounts.into_iter().filter(|mount| name_at(&mount.target).is_none()).collect();
        return Ok(Service { mounts, kept, ..service });
    }
    let mounts = service.mounts.into_iter().map(|mount| match name_at(&mount.target) {
        Some(name) => Mount { kind: MountKind::Volume { name }, ..mount },
        None => mount,
    });
    Ok(Service { mounts: mounts.collect(), ..service })
}

/// Opens those of a service, whose root directory is at `root`; or every reason why one cannot go.
pub(crate) fn opened(service: &Service, root: &Path, binds: &Binds) -> Result<Vec<Going>, Vec<String>> {
    let (mut found, mut reasons): (Vec<Going>, _) = (Vec::new(), Vec::new());
    for (volume, source, target) in of(service) {
        match open_one(source, target, root, binds) {
            Ok(opened) => {
                let (source, target) = (source.to_owned(), target.to_owned());
                found.push(Going { volume, source, target, opened });
            }
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

fn open_one(source: &Path, target: &Path, root: &Path, binds: &Binds) -> Result<OwnedFd, String> {
    let opened = open(source, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|error| format!("it cannot be opened: {error}"))?;
    let of_opened = |opened: OwnedFd| {
        let metadata = File::from(opened).metadata()?;
        Ok::<_, io::Error>((metadata.is_dir(), (metadata.dev(), metadata.ino())))
    };
    let (is_directory, identity) =
        opened.try_clone().and_then(of_opened).map_err(|error| format!("it cannot be looked at: {error}"))?;
    if !is_directory {
        return Err(format!(
            "it is no directory; say --mount {0}=skip if the destination has it, too, or mount its directory",
            target.display()
        ));
    }
    let has = inside(root, target)
        .map_err(|error| format!("the service's place of it cannot be found: {error}"))?;
    if identity != (has.dev(), has.ino()) {
        return Err("something else is at that path now; restart the service, so that it has that".into());
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
    let paths: Vec<_> =
        all.iter().filter_map(|going| Some((path_of(&going.opened).ok()?, going.target.display()))).collect();
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
        let volume = MountKind::Volume { name: "redis-srv-b".parse().unwrap() };
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
    fn what_cannot_be_copied_is_refused_by_name() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        ["root", "data/in", "state", "linked"].iter().for_each(|name| fs::create_dir_all(at(name)).unwrap());
        fs::write(at("file"), "").unwrap();
        let binds = Binds { allowed: Vec::new(), own: vec![at("state/own")] };
        // In this root, what is mounted is where it is.
        let of = |sources: &[PathBuf]| {
            let mounts = sources.iter().map(|source| bound(source, source.to_str().unwrap(), OnMove::Copy));
            opened(&with(mounts.collect()), Path::new("/"), &binds)
        };
        assert_eq!(of(&[at("data"), at("linked")]).unwrap().len(), 2);
        for (sources, words) in [
            (vec![at("file")], "it is no directory"),
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
        let why = opened(&moved, Path::new("/"), &binds).unwrap_err().join("; ");
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
