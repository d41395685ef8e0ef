//! Redis and PostgreSQL for machines of arm64: of Debian's packages, since the host's programs do not run there.

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use godwit_lab::workload::Preset;
use godwit_tests::{Bed, machines::unpack};

use crate::run;

/// User of PostgreSQL in its container; any would do.
const POSTGRES: u32 = 5432;
const DATA: &str = "/var/lib/postgresql/data";
fn preset(rootfs: PathBuf, command: &[&str], port: u16) -> Preset {
    let command = command.iter().map(|word| (*word).to_owned()).collect();
    Preset { rootfs, command, env: Vec::new(), user: None, port }
}

/// A Redis that writes nothing.
pub(crate) fn redis(bed: &Bed) -> Preset {
    let rootfs = unpack(bed, "redis-server");
    let options =
        ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir", "/tmp"];
    let command: Vec<_> = ["/usr/bin/redis-server"].into_iter().chain(options).collect();
    preset(rootfs, &command, 6379)
}

/// A PostgreSQL that has yet to be [initialized](initialize) in the machine.
pub(crate) fn postgres(bed: &Bed) -> Preset {
    let rootfs = unpack(bed, "postgresql");
    let user = format!("postgres:x:{POSTGRES}:{POSTGRES}::/var/lib/postgresql:/bin/sh\n");
    fs::write(rootfs.join("etc/passwd"), user).unwrap();
    fs::write(rootfs.join("etc/group"), format!("postgres:x:{POSTGRES}:\n")).unwrap();
    let data = rootfs.join(&DATA[1..]);
    fs::create_dir_all(&data).unwrap();
    chown(&data, Some(POSTGRES), Some(POSTGRES)).unwrap();
    let command = [&program(&rootfs, "postgres"), "-D", DATA, "-c", "listen_addresses=*"];
    let options = ["-c", "unix_socket_directories=/tmp", "-c", "jit=off"];
    let mut preset = preset(rootfs, &[&command[..], &options].concat(), 5432);
    preset.user = Some("postgres".to_owned());
    preset
}

/// Makes its empty cluster, where its root filesystem is on that node.
pub(crate) fn initialize(bed: &Bed, node: &str, preset: &Preset) {
    let initdb = program(&preset.rootfs, "initdb");
    let script = format!(
        "set -e; cd {root}; mount --bind /dev dev; trap 'umount {root}/dev' EXIT
         chroot --userspec={POSTGRES}:{POSTGRES} . {initdb} -D {DATA} -U postgres --auth=trust --locale=C --encoding=UTF8 -N
         echo 'host all all 0.0.0.0/0 trust' >>{root}{DATA}/pg_hba.conf",
        root = preset.rootfs.display(),
    );
    run(bed.lab(), node, &script);
}

/// A program of PostgreSQL, of which one version is there.
fn program(rootfs: &Path, name: &str) -> String {
    let versions: Vec<_> = fs::read_dir(rootfs.join("usr/lib/postgresql")).unwrap().collect();
    assert_eq!(versions.len(), 1, "versions of PostgreSQL");
    let version = versions[0].as_ref().unwrap().file_name();
    format!("/usr/lib/postgresql/{}/bin/{name}", version.to_str().unwrap())
}
