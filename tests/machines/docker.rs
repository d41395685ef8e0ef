//! Docker as Debian has it: started by systemd, which makes the cgroups (v2), and a network of Docker's.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

use godwit_tests::Bed;

use crate::{all_ready, machines, run, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 41);
/// Echoes what it is sent, and counts into a volume.
const PROGRAM: &str = "nc -ll -p 7 -e cat & i=0; while :; do i=$((i+1)); echo $i >/data/n; sleep 0.2; done";
/// As docs/docker.md tells it, of installed packages.
const RUNTIMES: &str = r#""runtimes": { "godwit": { "path": "/usr/lib/godwit/bin/godwit-runtime" } }"#;
/// As a Docker that is installed anew has it from release 29 on.
const CONTAINERD: &str = r#", "features": { "containerd-snapshotter": true }"#;

#[test]
#[ignore = "it makes virtual machines: `make test-machines` runs it"]
fn a_container_of_debian_12s_docker_moves_to_and_fro() {
    moves("m-docker12", "debian12", "");
}

#[test]
#[ignore = "it makes virtual machines: `make test-machines` runs it"]
fn a_container_of_debian_13s_docker_moves_to_and_fro() {
    moves("m-docker13", "debian13", "");
}

#[test]
#[ignore = "it makes virtual machines: `make test-machines` runs it"]
fn a_container_of_a_docker_with_containerds_image_store_moves_to_and_fro() {
    moves("m-containerd", "debian13", CONTAINERD);
}

/// Sends and gets back.
fn echoed(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, text.as_bytes());
}

fn moves(lab: &str, machine: &str, more: &str) {
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
    for node in ["a", "b"] {
        let start = format!(
            "mkdir -p /etc/docker; echo '{{ {RUNTIMES}{more} }}' >/etc/docker/daemon.json; systemctl enable --quiet --now docker"
        );
        run(lab, node, &start);
    }
    assert_eq!(run(lab, "a", "docker info --format '{{.CgroupDriver}} {{.CgroupVersion}}'"), "systemd 2\n");
    let driver = run(lab, "a", "docker info --format '{{.DriverStatus}}'");
    assert_eq!(driver.contains("io.containerd.snapshotter.v1"), !more.is_empty(), "{driver}");
    let image = "mkdir -p r/bin r/data && cp /bin/busybox r/bin/ && for name in sh nc cat sleep nslookup; do ln -sf busybox r/bin/$name; done \
                 && tar -C r -c . | docker import - echo:1";
    run(lab, "a", image);
    let start = format!(
        "docker run --detach --name echo --restart always --volume data:/data echo:1 /bin/sh -c '{PROGRAM}'"
    );
    run(lab, "a", &start);
    let life = "docker inspect --format '{{.State.Pid}} {{.State.StartedAt}}' echo";
    let before = run(lab, "a", life);
    bed.done("a", &["adopt", "docker:echo", "--leave-networks", "--ip", &ADDRESS.to_string()]);
    assert_eq!(run(lab, "a", life), before, "it is not started again for that");
    let finds_itself = |node: &str| {
        let told = run(lab, node, "docker exec echo /bin/nslookup echo");
        assert!(told.contains(&ADDRESS.to_string()), "{told}");
    };
    finds_itself("a");
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    echoed(&mut stream, "before");
    run(lab, "a", "docker exec echo sh -c 'echo kept >/data/file; echo changed >/file'");
    // The shell counts, and a volume and a root filesystem are read.
    let count = |node: &str| -> u64 {
        let read = "docker exec echo sh -c 'cat /data/file /file; cat /data/n'";
        wait_for("a number in the volume", || {
            let said = run(lab, node, read);
            said.strip_prefix("kept\nchanged\n").and_then(|number| number.trim().parse().ok())
        })
    };
    let mut last = count("a");
    for (number, mode) in ["precopy", "postcopy", "cold", "hybrid"].into_iter().enumerate() {
        let (from, to) = if number % 2 == 0 { ("a", "b") } else { ("b", "a") };
        bed.migrate_so("echo", from, to, &["--mode", mode]);
        echoed(&mut stream, mode);
        finds_itself(to);
        let now = count(to);
        assert!(now > last, "{now} after {last}");
        last = now;
        assert_eq!(run(lab, to, "docker ps --format '{{.Names}} {{.State}}'"), "echo running\n");
        wait_for("the other Docker to be without it", || {
            run(lab, from, "docker ps --all --quiet; docker volume ls --quiet").is_empty().then_some(())
        });
    }
    // It is Docker's to start again, and godwit's address is there again.
    run(lab, "a", "docker restart --time 1 echo");
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    echoed(&mut stream, "again");
    finds_itself("a");
    // Docker starts it after a reboot, before godwitd or after it.
    lab.cut_power("a").unwrap();
    lab.power_on("a").unwrap();
    all_ready(&bed, "a");
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, 7));
    echoed(&mut stream, "booted");
    wait_for("Docker to have its container ask godwit again", || {
        run(lab, "a", "docker exec echo /bin/cat /etc/resolv.conf")
            .contains("nameserver 10.88.0.1\n")
            .then_some(())
    });
    finds_itself("a");
    bed.migrate_so("echo", "a", "b", &["--mode", "precopy"]);
    echoed(&mut stream, "and moved");
    bed.done("b", &["rm", "--force", "echo"]);
    assert_eq!(run(lab, "b", "docker ps --all --quiet"), "");
}
