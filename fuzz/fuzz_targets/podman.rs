//! What another node says of a container of Podman's: what is passed on reaches nothing of this node.
#![no_main]

use godwit_fuzz::json::Input;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

const ID: &str = "c0";

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

fuzz_target!(|input: Input<'_>| {
    let mut definition = usual();
    input.change(&mut definition);
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
