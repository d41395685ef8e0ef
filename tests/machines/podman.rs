//! Podman as Debian has it: crun, systemd, cgroup v2 with a namespace of the container's own, and a network of Podman's.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4};

use godwit_tests::Bed;

use crate::{all_ready, machines, run, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 40);
/// Echoes what it is sent, and counts into a volume.
const PROGRAM: &str = "nc -ll -p 7 -e cat & i=0; while :; do i=$((i+1)); echo $i >/data/n; sleep 0.2; done";

#[test]
#[ignore = "it makes virtual machines: `make test-machines` runs it"]
fn a_container_of_debian_12s_podman_moves_to_and_fro() {
    drop(moves("m-podman12", "debian12"));
}

#[test]
#[ignore = "it makes virtual machines: `make test-machines` runs it"]
fn a_container_of_debian_13s_podman_moves_to_and_fro() {
    let bed = moves("m-podman13", "debian13");
    // Debian 12's Podman has no Quadlet.
    a_unit_is_adopted(&bed);
}

/// The unit of docs/podman.md, of an image that is there.
fn unit() -> String {
    let page = include_str!("../../docs/podman.md");
    let (_, unit) = page.split_once("```ini\n").unwrap();
    let (unit, _) = unit.split_once("```").unwrap();
    let program = "nc -ll -p 7 -e cat";
    let own = unit.replace("docker.io/library/redis:7", &format!("localhost/echo:1\nExec={program}"));
    assert_ne!(own, unit);
    own
}

fn a_unit_is_adopted(bed: &Bed) {
    let lab = bed.lab();
    // A machine of a lab boots without it.
    run(lab, "a", "rm /etc/systemd/system-generators/podman-system-generator");
    let write = format!(
        "mkdir -p /etc/containers/systemd; cat >/etc/containers/systemd/cache.container <<'END'\n{}END\nsystemctl daemon-reload && systemctl start cache",
        unit()
    );
    run(lab, "a", &write);
    bed.done("a", &["adopt", "podman:cache", "--ip", &ADDRESS.to_string()]);
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    bed.migrate_so("cache", "a", "b", &["--mode", "precopy"]);
    stream.write_all(b"moved").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"moved");
    assert_eq!(run(lab, "b", "podman ps --format '{{.Names}}'"), "cache\n");
    wait_for("the unit to be without its container", || {
        let said = run(lab, "a", "systemctl is-active cache; podman ps --all --quiet");
        (said == "failed\n").then_some(())
    });
    bed.done("b", &["rm", "--force", "cache"]);
}

fn moves(lab: &str, machine: &str) -> Bed {
    let bed = Bed::up_with(lab, |config| {
        // With one processor, as in `power.rs`.
        let machine = format!("{machine}:processors=1");
        machines(config, &[("a", &machine), ("b", &machine)]);
        // A machine that is emulated on a busy host is not hung.
        config.programs.serve_arguments.extend(["--patience", "300"].map(str::to_owned));
    });
    all_ready(&bed, "a");
    all_ready(&bed, "b");
    let lab = bed.lab();
    let image = "mkdir -p r/bin r/data && cp /bin/busybox r/bin/ && for name in sh nc cat sleep; do ln -sf busybox r/bin/$name; done \
                 && tar -C r -c . | podman import --quiet - localhost/echo:1";
    run(lab, "a", image);
    let start = format!(
        "podman run --detach --name echo --restart always --volume data:/data localhost/echo:1 /bin/sh -c '{PROGRAM}'"
    );
    run(lab, "a", &start);
    assert_eq!(run(lab, "a", "podman inspect --format '{{.OCIRuntime}}' echo"), "crun\n");
    bed.done("a", &["adopt", "podman:echo", "--leave-networks", "--ip", &ADDRESS.to_string()]);
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    let mut echoed = |text: &str| {
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = vec![0; text.len()];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, text.as_bytes());
    };
    echoed("before");
    run(lab, "a", "podman exec echo sh -c 'echo kept >/data/file; echo changed >/file'");
    // The shell counts, and a volume and a root filesystem are read.
    let count = |node: &str| -> u64 {
        let read = "podman exec echo sh -c 'cat /data/file /file; cat /data/n'";
        wait_for("a number in the volume", || {
            let said = run(lab, node, read);
            said.strip_prefix("kept\nchanged\n").and_then(|number| number.trim().parse().ok())
        })
    };
    let mut last = count("a");
    for (number, mode) in ["precopy", "postcopy", "cold", "hybrid"].into_iter().enumerate() {
        let (from, to) = if number % 2 == 0 { ("a", "b") } else { ("b", "a") };
        bed.migrate_so("echo", from, to, &["--mode", mode]);
        echoed(mode);
        let now = count(to);
        assert!(now > last, "{now} after {last}");
        last = now;
        assert_eq!(run(lab, to, "podman ps --filter status=running --format '{{.Names}}'"), "echo\n");
        wait_for("the other Podman to be without it", || {
            run(lab, from, "podman ps --all --quiet; podman volume ls --quiet").is_empty().then_some(())
        });
    }
    // It is Podman's to start again, and godwit's address is there again.
    run(lab, "a", "podman restart --time 1 echo");
    drop(stream);
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    stream.write_all(b"again").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    bed.done("a", &["rm", "--force", "echo"]);
    assert_eq!(run(lab, "a", "podman ps --all --quiet"), "");
    bed
}
