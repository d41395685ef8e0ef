//! What another node says of a container of Podman's: what is passed on reaches nothing of this node.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

const ID: &str = "c0";

/// A usual container, and what is changed of it.
#[derive(Debug, Arbitrary)]
struct Input<'a> {
    changes: Vec<(Vec<u8>, Change<'a>)>,
}

#[derive(Debug, Arbitrary)]
enum Change<'a> {
    /// To some JSON.
    Json(&'a str),
    Text(&'a str),
    Flag(bool),
    /// One more key of an object, or the same in another case.
    Key(&'a str, &'a str),
    More(&'a str),
    Gone,
}

fn usual() -> Value {
    json!({
        "config": {
            "id": ID, "name": "web", "rootfsImageID": "aa", "rootfsImageName": "web", "networkMode": "bridge",
            "labels": { "a": "b" },
            "newPortMappings": [{ "host_ip": "", "container_port": 80, "host_port": 80, "range": 1, "protocol": "tcp" }],
            "namedVolumes": [{ "volumeName": "v", "dest": "/v", "options": ["rw", "rbind"] }],
        },
        "spec": {
            "ociVersion": "1.0.2",
            "process": { "user": { "uid": 0, "gid": 0 }, "args": ["sh"], "cwd": "/" },
            "root": { "path": "/x" },
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"] },
                { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] },
                { "destination": "/t", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m"] },
                { "destination": "/etc/hosts", "type": "bind", "source": "/h", "options": ["bind"] },
                { "destination": "/v", "type": "bind", "source": "/v", "options": ["rbind"] },
            ],
            "annotations": { "io.podman.annotations.init": "FALSE" },
            "linux": {
                "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
                "namespaces": [
                    { "type": "pid" }, { "type": "network" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
                ],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            },
        },
    })
}

/// What these steps lead to.
fn at<'a>(mut value: &'a mut Value, steps: &[u8]) -> &'a mut Value {
    for step in steps.iter().take(8) {
        let length = match &*value {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            _ => 0,
        };
        if length == 0 {
            break;
        }
        let nth = usize::from(*step) % length;
        value = match value {
            Value::Array(list) => &mut list[nth],
            Value::Object(map) => map.values_mut().nth(nth).expect("one of them"),
            _ => unreachable!("it has none"),
        };
    }
    value
}

fn change(value: &mut Value, change: &Change<'_>) {
    let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
    match change {
        Change::Json(text) => *value = json(text),
        Change::Text(text) => *value = (*text).into(),
        Change::Flag(flag) => *value = (*flag).into(),
        Change::Key(key, content) => {
            if let Some(map) = value.as_object_mut() {
                map.insert((*key).to_owned(), json(content));
            }
        }
        Change::More(text) => {
            if let Some(list) = value.as_array_mut() {
                list.push(json(text));
            }
        }
        Change::Gone => *value = Value::Null,
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut definition = usual();
    for (steps, changed) in input.changes.iter().take(16) {
        change(at(&mut definition, steps), changed);
    }
    let Ok(Some(passed)) = godwit_engine::podman::passed_on(&definition, ID) else { return };
    let none = Vec::new();
    let list = |value: &Value| value.as_array().unwrap_or(&none).clone();
    let spec = &passed["spec"];
    assert!(spec.get("hooks").is_none());
    for mount in list(&spec["mounts"]) {
        assert_eq!(mount["source"], mount["type"], "{mount}");
        assert!(
            !list(&mount["options"]).iter().any(|option| option == "bind" || option == "rbind"),
            "{mount}"
        );
        assert!(mount["type"] == "tmpfs" || mount["destination"] != "/", "{mount}");
    }
    let linux = &spec["linux"];
    assert!(list(&linux["devices"]).is_empty());
    assert!(!list(&linux["resources"]["devices"]).iter().any(|rule| rule["allow"] == true));
    assert!(list(&linux["namespaces"]).iter().all(|namespace| namespace.get("path").is_none()));
    assert!(list(&linux["maskedPaths"]).contains(&"/proc/kcore".into()));
    for volume in list(&passed["config"]["namedVolumes"]) {
        let name = volume["volumeName"].as_str().expect("a name");
        assert!(!name.contains('/') && name != ".." && name != ".", "{name}");
    }
    // Of keys that differ by case alone Podman takes the last.
    for map in [&passed["config"], spec, linux, &linux["resources"]] {
        let keys: Vec<_> = map.as_object().into_iter().flatten().map(|(key, _)| key.to_lowercase()).collect();
        assert!(keys.iter().all(|key| keys.iter().filter(|other| *other == key).count() == 1), "{keys:?}");
    }
});
