//! What another node says of a container of Docker's: what is passed on reaches nothing of this node.
#![no_main]

use godwit_fuzz::json::Input;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

fn usual() -> Value {
    json!({
        "name": "web",
        "image": ["web:1", format!("sha256:{}", "0a".repeat(32))],
        "config": {
            "Hostname": "h", "User": "", "Env": ["A=b"], "Cmd": ["sleep", "1"], "Labels": { "tier": "x" },
            "ExposedPorts": { "80/tcp": {} }, "Healthcheck": { "Test": ["CMD", "true"], "Interval": 1 },
        },
        "host": {
            "RestartPolicy": { "Name": "always", "MaximumRetryCount": 0 },
            "LogConfig": { "Type": "json-file", "Config": { "max-size": "1m" } },
            "IpcMode": "private", "SecurityOpt": ["no-new-privileges"], "Sysctls": { "net.core.somaxconn": "1" },
            "Tmpfs": { "/t": "size=1m" }, "Ulimits": [{ "Name": "nofile", "Hard": 1, "Soft": 1 }],
            "MaskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
        "volumes": [{ "name": "data", "target": "/data", "read_only": false }],
    })
}

/// What dockerd is given of `HostConfig`; it takes such names in any case.
const HOST: &[&str] = &[
    "CapAdd",
    "CapDrop",
    "CgroupnsMode",
    "CpuPeriod",
    "CpuQuota",
    "CpuShares",
    "CpusetCpus",
    "CpusetMems",
    "Dns",
    "DnsOptions",
    "DnsSearch",
    "ExtraHosts",
    "GroupAdd",
    "IpcMode",
    "LogConfig",
    "MaskedPaths",
    "Memory",
    "MemoryReservation",
    "MemorySwap",
    "MemorySwappiness",
    "Mounts",
    "NanoCpus",
    "NetworkMode",
    "OomKillDisable",
    "OomScoreAdj",
    "PidsLimit",
    "ReadonlyPaths",
    "ReadonlyRootfs",
    "RestartPolicy",
    "Runtime",
    "SecurityOpt",
    "ShmSize",
    "Sysctls",
    "Tmpfs",
    "Ulimits",
];

fuzz_target!(|input: Input<'_>| {
    let mut definition = usual();
    input.change(&mut definition);
    let Ok(Some(passed)) = godwit_engine::docker::passed_on(&definition) else { return };
    let none = Vec::new();
    let list = |value: &Value| value.as_array().unwrap_or(&none).clone();
    let host = passed["HostConfig"].as_object().expect("settings");
    assert!(host.keys().all(|name| HOST.contains(&name.as_str())), "{host:?}");
    assert_eq!((&host["NetworkMode"], &host["Runtime"]), (&json!("none"), &json!("godwit")));
    assert!(["", "private", "none"].map(Value::from).contains(&host["IpcMode"]));
    for mount in list(&host["Mounts"]) {
        let name = mount["Source"].as_str().expect("a name");
        assert!(mount["Type"] == "volume" && !name.contains('/') && !name.starts_with('.'), "{mount}");
        let target = mount["Target"].as_str().expect("a place");
        assert!(target.starts_with('/') && !target.contains("/.."), "{mount}");
    }
    for option in list(&host["SecurityOpt"]) {
        let option = option.as_str().expect("text");
        assert!(option.starts_with("no-new-privileges") || option.starts_with("seccomp"), "{option}");
    }
    for paths in [&host["MaskedPaths"], &host["ReadonlyPaths"]] {
        assert!(paths.is_null() || list(paths).len() > 3, "{paths}");
    }
    for (target, options) in host["Tmpfs"].as_object().into_iter().flatten() {
        let options = options.as_str().expect("text");
        let binds = |option: &str| matches!(option, "bind" | "rbind" | "remount" | "move");
        assert!(target.starts_with('/') && !options.split(',').any(binds), "{target}: {options}");
    }
});
