//! Redis and PostgreSQL for machines of arm64: of Debian's packages, since the host's programs do not run there.

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::Command,
};

use godwit_lab::workload::Preset;
use godwit_tests::Bed;

use crate::run;

/// User of PostgreSQL in its container; any would do.
const POSTGRES: u32 = 5432;
const DATA: &str = "/var/lib/postgresql/data";
/// Where this host's apt has its sources, of which the first that is there counts.
const SOURCES: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];
/// What no container needs: two thirds of the files, and each move would carry them.
const NEEDLESS: &str = "usr/share/doc usr/share/man usr/share/locale usr/share/perl usr/share/zoneinfo usr/lib/llvm* \
                        usr/lib/aarch64-linux-gnu/libLLVM* usr/lib/aarch64-linux-gnu/perl* usr/lib/aarch64-linux-gnu/gconv \
                        usr/lib/aarch64-linux-gnu/libz3* usr/lib/aarch64-linux-gnu/libperl* usr/share/i18n \
                        usr/lib/postgresql/*/lib/llvmjit* usr/lib/postgresql/*/lib/bitcode var/cache var/lib/apt var/lib/dpkg";

/// Unpacks a package and all that it depends on, of the series that this host has.
fn unpack(bed: &Bed, package: &str) -> PathBuf {
    let root = bed.scratch().join(package);
    let sources = SOURCES.into_iter().find(|file| Path::new(file).exists()).expect("sources of apt");
    let script = format!(
        "set -e; rm -rf {root}; . /etc/os-release; TMPDIR=/var/tmp mmdebstrap --quiet --mode=root --variant=extract \
         --architectures=arm64 --aptopt='APT::Sandbox::User \"root\"' --include=dash,{package} $VERSION_CODENAME {root} {sources}
         cd {root}; rm -rf {NEEDLESS}
         # What maintainer scripts make in a new system.
         for directory in bin sbin lib; do [ -e $directory ] || ln -s usr/$directory $directory; done
         mkdir -p tmp proc sys dev etc; chmod 1777 tmp",
        root = root.display(),
    );
    let output = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{package}: {}", String::from_utf8_lossy(&output.stderr));
    root
}

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
