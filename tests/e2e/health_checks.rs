//! Health checks of images, which a layout loses on the way from a registry. Needs root.

use std::{fs, net::Ipv4Addr};

use godwit_tests::Bed;
use serde_json::{Value, json};

use crate::registry::{Registry, layout, tool};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 86);
const CHECK: &str = "wget -q -O /dev/null localhost/version";

#[test]
fn whoever_pulls_an_image_with_a_health_check_hears_that_it_is_not_applied_and_what_does() {
    let bed = Bed::up("health-check");
    let source = format!("oci:{}:1", layout(&bed).display());
    let registry = Registry::start(&bed);
    let authfile = format!("--dest-authfile={}", registry.authfile.display());
    // As Docker pushes it: a Dockerfile with HEALTHCHECK.
    let image = bed.scratch().join("docker");
    let directory = format!("dir:{}", image.display());
    tool("skopeo", &["copy", "--quiet", "--format=v2s2", &source, &directory]);
    let path = image.join("manifest.json");
    let push = |name: &str| {
        let target = format!("docker://{}", registry.reference(name));
        tool("skopeo", &["copy", "--quiet", "--dest-tls-verify=false", &authfile, &directory, &target]);
    };
    push("plain");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let hex = manifest["config"]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(image.join(hex)).unwrap()).unwrap();
    config["config"]["Healthcheck"] = json!({"Test": ["CMD-SHELL", CHECK], "Interval": 30_000_000_000_u64});
    let (document, scratch) = (config.to_string(), image.join("config"));
    fs::write(&scratch, &document).unwrap();
    let hex = tool("sha256sum", &[scratch.to_str().unwrap()])[..64].to_owned();
    fs::rename(scratch, image.join(&hex)).unwrap();
    manifest["config"]["digest"] = format!("sha256:{hex}").into();
    manifest["config"]["size"] = document.len().into();
    fs::write(&path, manifest.to_string()).unwrap();
    push("checked");

    let [plain, authfile] = registry.reached();
    let words = format!("has a health check ({CHECK}), which godwit does not apply");
    for (name, is_told) in [("plain", false), ("checked", true)] {
        let pulled = bed.godwit("a", &["pull", &plain, &authfile, &registry.reference(name)]);
        assert_eq!((pulled.code, pulled.stderr.contains(&words)), (0, is_told), "{pulled:?}");
        assert_eq!(pulled.stderr.contains("--engine podman"), is_told, "{pulled:?}");
    }
    let (address, reference) = (ADDRESS.to_string(), registry.reference("checked"));
    let flags = ["run", &plain, &authfile, "--pull", "always", "--ip", &address, "--name", "web"];
    let run = bed.godwit("a", &[&flags[..], &[&reference]].concat());
    assert!(run.code == 0 && run.stderr.contains(&words) && run.stdout == "web\n", "{run:?}");
}
