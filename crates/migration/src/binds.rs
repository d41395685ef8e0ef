//! Which directories of a node may be mounted into services.
//!
//! The user of a node is root there, and may name any directory for a new service. A service that comes from another
//! node gets only directories below those that this node's operator allows, since the other node chose the paths. No
//! service gets the directories of godwit itself, which hold the node's key.
//!
//! Paths are opened component by component, and no link is followed below an allowed directory: another service may
//! be able to write there, and must not make the path lead out.

use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

/// What a node's directories are protected by.
#[derive(Debug, Clone, Default)]
pub struct Binds {
    /// Below these, services from other nodes may have theirs.
    pub allowed: Vec<PathBuf>,
    /// The node's own.
    pub own: Vec<PathBuf>,
}

impl Binds {
    /// Why a directory or file cannot be mounted into a service of this node, if it cannot.
    #[must_use]
    pub fn objection(&self, source: &Path) -> Option<String> {
        let Ok(source) = source.canonicalize() else {
            return Some(format!(
                "{}, which is mounted into the service, does not exist there",
                source.display()
            ));
        };
        let touches = |own: &PathBuf| {
            let own = own.canonicalize().unwrap_or_else(|_| own.clone());
            source.starts_with(&own) || own.starts_with(&source)
        };
        self.own.iter().find(|own| touches(own)).map(|own| {
            format!(
                "{} cannot be mounted into a service: it shows {}, which is godwit's own",
                source.display(),
                own.display()
            )
        })
    }

    /// The same for a service that comes from another node to node `here`.
    #[must_use]
    pub fn foreign_objection(&self, source: &Path, here: &str) -> Option<String> {
        if !source.exists() {
            return self.objection(source);
        }
        if !self.allowed.iter().any(|allowed| is_below(allowed, source)) {
            return Some(format!(
                "{}, which is mounted into the service, is not below a directory that node {here} allows for services from other nodes, or a link is on the way there; start godwitd there with --allow-bind DIR",
                source.display()
            ));
        }
        self.objection(source)
    }
}

impl Binds {
    /// The same for a volume that an engine of this node has, which a service that comes is to have as it is.
    #[must_use]
    pub fn foreign_volume_objection(
        &self,
        (engine, volume): (&str, &str),
        place: &Path,
        here: &str,
    ) -> Option<String> {
        if self.allowed.iter().any(|allowed| is_below(allowed, place)) {
            return self.objection(place);
        }
        let place = place.display();
        Some(format!(
            "the volume {volume} that {engine} has there is not one that node {here} allows for services from other nodes; start godwitd there with --allow-bind {place}, or remove the volume"
        ))
    }
}

/// Whether a path leads to something below a directory without a link.
fn is_below(directory: &Path, path: &Path) -> bool {
    let Ok(beneath) = path.strip_prefix(directory) else { return false };
    let Ok(root) = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
    else {
        return false;
    };
    if beneath.as_os_str().is_empty() {
        return true;
    }
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(&root, beneath, how).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

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
        let of = |binds: &Binds| binds.foreign_volume_objection(("Docker", "data"), &place, "b");
        let why = of(&Binds::default()).unwrap();
        for words in ["volume data that Docker has", &format!("--allow-bind {}", place.display())] {
            assert!(why.contains(words), "{words}: {why}");
        }
        assert_eq!(of(&Binds { allowed: vec![place.clone()], own: Vec::new() }), None);
        let own = Binds { allowed: vec!["/".into()], own: vec![directory.path().into()] };
        assert!(of(&own).unwrap().contains("godwit's own"));
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
