//! Files and directories of the node in a container's description.
//!
//! A path in a description is mounted by Podman as root. So those of another node's are an objection, unless this node has
//! allowed them: the service that comes names them, too, and they are looked at there.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use serde_json::{Value, json};

use super::definition::{Definition, OWN_MOUNTS, is_volume_option, of_kernel};
use crate::container::{Copied, Mount, MountKind, OnMove};
use crate::foreign::file::FileOfVolume;
use crate::foreign::is_target;

/// What a mount of an OCI description binds of the node; nothing where it is something else, or is bound in a way of its own.
pub(super) fn of(mount: &Value) -> Option<Mount> {
    let (source, target) = (mount["source"].as_str()?, mount["destination"].as_str()?);
    let options: Vec<_> = mount["options"].as_array()?.iter().map(Value::as_str).collect::<Option<_>>()?;
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    let is_path = Path::new(source).is_absolute() && Path::new(source).components().all(is_plain);
    // What is mounted there later would not move.
    let is_kept = |option: &&str| is_volume_option(option) && !option.ends_with("slave");
    let is_bind = mount["type"] == "bind" && options.iter().all(is_kept);
    (is_bind && is_path && is_target(target)).then(|| Mount {
        kind: MountKind::Bind { source: source.into(), on_move: OnMove::Unsaid },
        target: target.into(),
        read_only: options.contains(&"ro"),
    })
}

/// Such a mount with nothing else in it.
pub(super) fn plain(mount: &Value) -> Option<Value> {
    of(mount)?;
    let (source, target) = (&mount["source"], &mount["destination"]);
    Some(json!({ "type": "bind", "source": source, "destination": target, "options": mount["options"] }))
}

impl Definition {
    /// What it has of the node that it is on.
    pub(super) fn binds(&self) -> Vec<Mount> {
        let volumes = self.volumes().unwrap_or_default();
        let mounts = self.spec["mounts"].as_array().into_iter().flatten();
        let others = mounts.filter(|mount| {
            let target = mount["destination"].as_str().unwrap_or_default();
            let is_volume = volumes.iter().any(|(_, of_volume)| *of_volume == target);
            !is_volume && !OWN_MOUNTS.contains(&target) && of_kernel(mount).is_none()
        });
        others.filter_map(of).collect()
    }

    /// Where it has mounts.
    pub(super) fn places(&self) -> BTreeSet<String> {
        let mounts = self.spec["mounts"].as_array().into_iter().flatten();
        mounts.filter_map(|mount| Some(mount["destination"].as_str()?.to_owned())).collect()
    }

    /// The same with volumes of Podman's in the place of these.
    pub(crate) fn with_volumes(mut self, volumes: &[Copied]) -> Self {
        let mut named =
            self.config.get("namedVolumes").and_then(Value::as_array).cloned().unwrap_or_default();
        for Copied { name, target, file } in volumes {
            let Some(mounts) = self.spec["mounts"].as_array_mut() else { continue };
            let is_it = |mount: &Value| of(mount).is_some_and(|bound| bound.target == *target);
            let Some(at) = mounts.iter().position(is_it) else { continue };
            let mount = mounts.remove(at);
            if let Some(file) = file {
                self.files.push(FileOfVolume {
                    volume: name.to_string(),
                    file: file.clone(),
                    target: mount["destination"].as_str().unwrap_or_default().to_owned(),
                    read_only: of(&mount).is_some_and(|bound| bound.read_only),
                });
                continue;
            }
            named.push(json!({
                "volumeName": name, "dest": mount["destination"], "options": mount["options"],
            }));
        }
        self.config.insert("namedVolumes".into(), named.into());
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::foreign::bound;

    fn mount() -> Value {
        json!({ "type": "bind", "source": "/srv/data", "destination": "/data", "options": ["rbind", "ro", "rprivate"] })
    }

    #[test]
    fn only_a_plain_path_on_a_plain_path_is_bound() {
        let found = of(&mount()).unwrap();
        assert_eq!((found.target.to_str(), found.read_only), (Some("/data"), true));
        let other = |path: &str, value: Value| {
            let mut changed = mount();
            *changed.pointer_mut(path).unwrap() = value;
            changed
        };
        for (path, value) in [
            ("/type", json!("overlay")),
            ("/source", json!("srv")),
            ("/source", json!("/srv/../etc")),
            ("/destination", json!("/data/../etc")),
            ("/options/0", json!("upperdir=/")),
            ("/options/0", json!(7)),
            ("/options/2", json!("rslave")),
        ] {
            assert_eq!(of(&other(path, value.clone())), None, "{path}: {value}");
        }
        for (path, value) in
            [("/source", json!("/etc")), ("/destination", json!("/etc")), ("/options/1", json!("rw"))]
        {
            let changed = of(&other(path, value)).unwrap();
            assert!(!bound::same(&changed, &found), "{path}");
        }
    }

    #[test]
    fn what_is_copied_is_a_volume_of_podmans() {
        let config = br#"{ "namedVolumes": [{ "volumeName": "own", "dest": "/own", "options": [] }] }"#;
        let own = json!({ "type": "bind", "source": "/v", "destination": "/own", "options": ["rbind"] });
        let spec = json!({ "ociVersion": "1.0.2", "root": { "path": "" }, "mounts": [mount(), own] });
        let definition = Definition::of(config, spec.to_string().as_bytes()).unwrap();
        assert_eq!(definition.binds(), [of(&mount()).unwrap()]);
        let copied = definition.with_volumes(&[Copied {
            name: "web-data".parse().unwrap(),
            target: "/data".into(),
            file: None,
        }]);
        assert!(copied.binds().is_empty());
        assert_eq!(copied.volumes().unwrap(), [("own", "/own"), ("web-data", "/data")]);
        assert_eq!(copied.config["namedVolumes"][1]["options"], mount()["options"]);
    }
}
