//! A stranger's installation: the lines of README.md, run as they stand from a third host, on two machines that have no
//! godwit; then an upgrade and a purge under a running service.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use godwit_lab::{
    Lab, Machine,
    workload::{RedisClient, Workload, resp::Reply},
};
use godwit_tests::{Bed, CLIENT};

use crate::{PATIENCE, packages, run, try_run, wait_for};

/// The address in README.md.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Above the block of lines in README.md.
const TITLE: &str = "## Install it";
/// As the issue of the installation promises.
const MOST_LINES: usize = 10;
/// By what the machines of labs let root in.
const KEY: &str = "/var/cache/godwit/machines/key";

/// The block of lines in README.md that installs godwit.
fn script() -> String {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let text = fs::read_to_string(readme).unwrap();
    let section = text.split_once(TITLE).unwrap().1;
    let block = section.split("```").nth(1).unwrap().trim().to_owned();
    assert!(block.lines().count() <= MOST_LINES, "{block}");
    block
}

fn done(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What the reader of README.md has: the packages of an architecture and an image of Redis, in one directory.
fn workplace(bed: &Bed) -> PathBuf {
    let place = bed.scratch().join("workplace");
    fs::create_dir(&place).unwrap();
    for entry in fs::read_dir(packages()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if ["godwit_", "godwit-criu_"].iter().any(|start| name.starts_with(start))
            && name.ends_with("_amd64.deb")
        {
            fs::copy(&path, place.join(name)).unwrap();
        }
    }
    let preset = bed.build(Workload::Redis);
    let (layout, bundle) = (bed.scratch().join("layout"), bed.scratch().join("bundle"));
    let tag = format!("{}:latest", layout.display());
    done(Command::new("umoci").args(["init", "--layout"]).arg(&layout));
    done(Command::new("umoci").args(["new", "--image", &tag]));
    done(Command::new("umoci").args(["unpack", "--image", &tag]).arg(&bundle));
    done(Command::new("cp").arg("-a").arg(preset.rootfs.join(".")).arg(bundle.join("rootfs")));
    done(Command::new("umoci").args(["repack", "--image", &tag]).arg(&bundle));
    let archive = format!("oci-archive:{}:latest", place.join("redis.tar").display());
    done(Command::new("skopeo").args(["copy", &format!("oci:{tag}"), &archive]));
    place
}

/// ssh and scp of a user who reaches the machines by their names: a directory for PATH.
fn ssh(bed: &Bed) -> PathBuf {
    let directory = bed.scratch().join("bin");
    fs::create_dir(&directory).unwrap();
    let mut config = String::new();
    for node in ["a", "b"] {
        config += &format!("Host {node}\n  HostName {}\n", bed.lab().address(node).unwrap());
    }
    config += &format!(
        "Host *\n  IdentityFile {KEY}\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    );
    let config_path = directory.join("config");
    fs::write(&config_path, config).unwrap();
    for program in ["ssh", "scp"] {
        let path = directory.join(program);
        fs::write(&path, format!("#!/bin/sh\nexec /usr/bin/{program} -F {} \"$@\"\n", config_path.display()))
            .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    directory
}

/// The same package with a higher version, in a directory.
fn newer(package: &Path, scratch: &Path) -> PathBuf {
    let (tree, newer) = (scratch.join("tree"), scratch.join("newer"));
    fs::create_dir(&newer).unwrap();
    done(Command::new("dpkg-deb").arg("--raw-extract").arg(package).arg(&tree));
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control).unwrap();
    let version = text.lines().find(|line| line.starts_with("Version: ")).unwrap();
    fs::write(&control, text.replace(version, &format!("{version}+newer"))).unwrap();
    done(
        Command::new("dpkg-deb")
            .args(["--root-owner-group", "--build"])
            .arg(&tree)
            .arg(newer.join("newer.deb")),
    );
    newer
}

fn daemon(lab: &Lab) -> String {
    run(lab, "b", "systemctl show --property MainPID --value godwitd")
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn the_lines_of_the_readme_make_a_cluster_whose_services_outlive_upgrades_and_purges() {
    let script = script();
    let bed = Bed::up_with("install", |config| {
        config.daemons = false;
        let machine: Machine = "debian13/amd64".parse().unwrap();
        config.machines = ["a", "b"].map(|node| (node.to_owned(), machine.clone())).into();
    });
    let lab = bed.lab();
    for node in ["a", "b"] {
        assert!(!try_run(lab, node, "command -v godwit").status.success(), "{node} has godwit already");
        // The default route of a usual machine.
        run(lab, node, &format!("ip route add default via {}", lab.address(CLIENT).unwrap()));
    }
    let place = workplace(&bed);
    let mut command = bed.on_client("bash");
    let path = format!("{}:{}", ssh(&bed).display(), std::env::var("PATH").unwrap());
    let output =
        command.args(["-euxo", "pipefail", "-c", &script]).current_dir(&place).env("PATH", path).output();
    let output = output.unwrap();
    let [said, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    println!("{said}{errors}");
    assert!(output.status.success() && said.ends_with("PONG\n"), "see above");
    assert!(run(lab, "b", "pidof redis-server").trim().parse::<u32>().is_ok(), "it runs at the second node");

    // An upgrade.
    let at = std::net::SocketAddrV4::new(ADDRESS, 6379);
    let mut client = RedisClient::connect(lab, CLIENT, at, PATIENCE).unwrap();
    let mut number = 0;
    let mut count = || {
        number += 1;
        assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(number));
    };
    count();
    let package = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path());
    let package = package.into_iter().find(|path| path.to_str().unwrap().contains("/godwit_")).unwrap();
    let newer = newer(&package, bed.scratch());
    lab.send("b", &newer, Path::new("/root/newer")).unwrap();
    let (processes, before) = (run(lab, "b", "pidof redis-server"), daemon(lab));
    run(
        lab,
        "b",
        "DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes /root/newer/newer.deb </dev/null",
    );
    assert_ne!(daemon(lab), before, "the upgrade has not restarted godwitd");
    assert!(run(lab, "b", "dpkg-query --show godwit").trim().ends_with("+newer"));
    count();
    assert_eq!(run(lab, "b", "pidof redis-server"), processes, "the service has not outlived the upgrade");
    // It can move still.
    wait_for("the service to move from the newer godwitd", || {
        let moved = try_run(lab, "b", "godwit migrate redis --to a").status.success();
        let shown = run(lab, "b", "godwit ps");
        // A service of another node is shown as remote.
        assert!(shown.contains(if moved { "remote" } else { "running" }), "{shown}");
        moved.then_some(())
    });
    count();

    // A purge at the node that has it.
    let processes = run(lab, "a", "pidof redis-server");
    let said = run(lab, "a", "apt-get purge --yes godwit 2>&1 </dev/null");
    assert!(said.contains("run on, without godwitd") && said.contains("redis"), "{said}");
    assert!(said.contains("/var/lib/godwit stays"), "{said}");
    run(lab, "a", "test -e /var/lib/godwit/identity/node.pem && ! pidof godwitd && ! command -v godwit");
    count();
    assert_eq!(run(lab, "a", "pidof redis-server"), processes, "the service has not outlived the purge");
}
