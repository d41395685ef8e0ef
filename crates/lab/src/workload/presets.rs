//! The services that tests, the demo and benchmarks run, out of the distribution's packages.

use std::{
    ffi::{CStr, CString},
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, chdir, chroot, setgroups, setresgid, setresuid},
};

use super::rootfs::Rootfs;
use crate::error::{Context, LabError};

/// User ids inside the containers; any would do.
const MOSQUITTO: u32 = 1883;
const NGINX: u32 = 33;
const POSTGRES: u32 = 5432;
/// Data of the PostgreSQL in its container.
const POSTGRES_DATA: &str = "/var/lib/postgresql/data";

/// A service this machine's packages can provide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Redis, nothing written to disk; port 6379.
    Redis,
    /// The MQTT broker mosquitto, open to all; port 1883.
    Mosquitto,
    /// nginx with two workers and two static files (`/` and `/large`, 64 KiB); port 80.
    Nginx,
    /// PostgreSQL with an empty cluster, user `postgres` without a password; port 5432.
    Postgres,
    /// Python 3 with its standard library; the command runs `/program.py`, which the caller adds.
    Python,
    /// BusyBox with links for its commands; the command is a shell that sleeps.
    Busybox,
}

/// How to run a service in its root filesystem.
#[derive(Clone, Debug)]
pub struct Preset {
    /// Its root filesystem.
    pub rootfs: PathBuf,
    /// Its command.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs of its environment.
    pub env: Vec<String>,
    /// Its user; none: root.
    pub user: Option<String>,
    /// The TCP port it serves; 0: none.
    pub port: u16,
}

impl Preset {
    /// Where it is served when the container has this address.
    pub fn at(&self, address: Ipv4Addr) -> SocketAddrV4 {
        SocketAddrV4::new(address, self.port)
    }
}

impl FromStr for Workload {
    type Err = LabError;

    fn from_str(name: &str) -> Result<Self, LabError> {
        Ok(match name {
            "redis" => Self::Redis,
            "mosquitto" => Self::Mosquitto,
            "nginx" => Self::Nginx,
            "postgres" => Self::Postgres,
            "python" => Self::Python,
            "busybox" => Self::Busybox,
            _ => {
                return Err(LabError::Rootfs {
                    object: format!("the workload {name:?}"),
                    problem: "does not exist".to_owned(),
                    advice: "choose redis, mosquitto, nginx, postgres, python or busybox".to_owned(),
                });
            }
        })
    }
}

impl Workload {
    /// Builds the root filesystem in `directory`, which must not exist or be empty.
    ///
    /// # Errors
    /// A package is not installed, or a file cannot be written.
    pub fn build(self, directory: impl Into<PathBuf>) -> Result<Preset, LabError> {
        let rootfs = Rootfs::new(directory)?;
        match self {
            Self::Redis => redis(rootfs),
            Self::Mosquitto => mosquitto(rootfs),
            Self::Nginx => nginx(rootfs),
            Self::Postgres => postgres(rootfs),
            Self::Python => python(rootfs),
            Self::Busybox => busybox(rootfs),
        }
    }
}

fn preset(rootfs: &Rootfs, command: &[&str], port: u16) -> Preset {
    Preset {
        rootfs: rootfs.path().to_owned(),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        env: vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        user: None,
        port,
    }
}

fn redis(rootfs: Rootfs) -> Result<Preset, LabError> {
    let rootfs = rootfs.binary("/usr/bin/redis-server")?.binary("/usr/bin/redis-cli")?;
    let options =
        ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir", "/tmp"];
    let command: Vec<_> = ["/usr/bin/redis-server"].into_iter().chain(options).collect();
    Ok(preset(&rootfs, &command, 6379))
}

fn mosquitto(rootfs: Rootfs) -> Result<Preset, LabError> {
    let rootfs =
        rootfs.binary("/usr/sbin/mosquitto")?.user("mosquitto", MOSQUITTO, "/var/lib/mosquitto")?.file(
            "/etc/mosquitto.conf",
            "listener 1883 0.0.0.0\nallow_anonymous true\npersistence false\n\
             max_queued_messages 100000\nmax_inflight_messages 100\nlog_dest stdout\n",
        )?;
    Ok(preset(&rootfs, &["/usr/sbin/mosquitto", "-c", "/etc/mosquitto.conf"], 1883))
}

fn nginx(rootfs: Rootfs) -> Result<Preset, LabError> {
    let rootfs = rootfs
        .binary("/usr/sbin/nginx")?
        .user("www-data", NGINX, "/var/www")?
        .owned_directory("/var/lib/nginx", 0o755, NGINX)?
        .owned_directory("/var/log/nginx", 0o755, NGINX)?
        .file("/srv/index.html", "served by nginx\n")?
        .file("/srv/large", (0..=255).cycle().take(64 << 10).collect::<Vec<u8>>())?
        .file(
            "/etc/nginx/nginx.conf",
            "user www-data;\nworker_processes 2;\ndaemon off;\npid /run/nginx.pid;\nerror_log /dev/stderr notice;\n\
             events { worker_connections 1024; }\n\
             http {\n  access_log off;\n  default_type text/plain;\n  keepalive_requests 1000000000;\n  keepalive_timeout 1h;\n\
             \x20 server { listen 80; root /srv; }\n}\n",
        )?;
    Ok(preset(&rootfs, &["/usr/sbin/nginx", "-c", "/etc/nginx/nginx.conf"], 80))
}

/// The newest version's directory below `parent`, such as `/usr/lib/postgresql/15`.
fn newest_version(parent: &str) -> Result<String, LabError> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let versions = names.filter_map(|name| Some((name.parse::<u32>().ok()?, name)));
    versions.max().map(|(_, name)| name).ok_or_else(|| LabError::Rootfs {
        object: format!("a version of PostgreSQL below {parent}"),
        problem: "is not installed".to_owned(),
        advice: "run scripts/setup, or install the package postgresql".to_owned(),
    })
}

fn postgres(rootfs: Rootfs) -> Result<Preset, LabError> {
    let version = newest_version("/usr/lib/postgresql")?;
    let programs = format!("/usr/lib/postgresql/{version}/bin");
    // Compilation of queries is left out: it needs a compiler of more than a hundred megabytes.
    let rootfs = rootfs
        .binary(format!("{programs}/postgres"))?
        .binary(format!("{programs}/initdb"))?
        .binary("/bin/sh")?
        .tree(format!("/usr/lib/postgresql/{version}/lib"), &["bitcode", "llvmjit.so", "pgxs"])?
        .tree(format!("/usr/share/postgresql/{version}"), &["man", "locale"])?
        .user("postgres", POSTGRES, "/var/lib/postgresql")?
        .owned_directory(POSTGRES_DATA, 0o700, POSTGRES)?;
    let options =
        ["-D", POSTGRES_DATA, "-U", "postgres", "--auth=trust", "--locale=C", "--encoding=UTF8", "-N"];
    let output = run_inside(rootfs.path(), POSTGRES, &format!("{programs}/initdb"), &options)?;
    if !output.status.success() {
        return Err(LabError::Rootfs {
            object: "an empty PostgreSQL cluster".to_owned(),
            problem: format!("initdb could not make: {}", String::from_utf8_lossy(&output.stderr).trim()),
            advice: "read the message of initdb".to_owned(),
        });
    }
    append(
        &rootfs.path().join(POSTGRES_DATA.trim_start_matches('/')),
        "pg_hba.conf",
        "host all all 0.0.0.0/0 trust\n",
    )?;
    let command = [
        &format!("{programs}/postgres"),
        "-D",
        POSTGRES_DATA,
        "-c",
        "listen_addresses=*",
        "-c",
        "unix_socket_directories=/tmp",
        "-c",
        "jit=off",
    ];
    Ok(Preset { user: Some("postgres".to_owned()), ..preset(&rootfs, &command, 5432) })
}

fn append(directory: &Path, file: &str, text: &str) -> Result<(), LabError> {
    use std::io::Write;
    let path = directory.join(file);
    let opened = fs::File::options().append(true).open(&path);
    opened.and_then(|mut file| file.write_all(text.as_bytes())).context("writing", path.display())
}

/// Runs a program with `root` as its root directory and this machine's `/dev/null` in it, as user
/// and group `id`.
fn run_inside(
    root: &Path,
    id: u32,
    program: &str,
    arguments: &[&str],
) -> Result<std::process::Output, LabError> {
    let c_string = |path: &Path| {
        let text = CString::new(path.as_os_str().as_encoded_bytes()).map_err(std::io::Error::from);
        text.context("running in", root.display())
    };
    // A device node made here would be dead below a file system without devices, as `/tmp` is from
    // Debian 13 on.
    let null_file = root.join("dev/null");
    fs::write(&null_file, "").context("making", null_file.display())?;
    let (path, null) = (c_string(root)?, c_string(&null_file)?);
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", "/usr/bin").env("TZ", "GMT").stdin(Stdio::null());
    // SAFETY: bare system calls, safe between fork and exec; the paths were made before.
    unsafe {
        command.pre_exec(move || {
            let none = None::<&CStr>;
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(none, c"/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
            mount(Some(c"/dev/null"), null.as_c_str(), none, MsFlags::MS_BIND, none)?;
            chroot(path.as_c_str())?;
            chdir(c"/")?;
            let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
            setgroups(&[group])?;
            setresgid(group, group, group)?;
            setresuid(user, user, user)?;
            Ok(())
        });
    }
    let output = command.output().context("running", program);
    fs::remove_file(&null_file).context("removing", null_file.display())?;
    output
}

fn python(rootfs: Rootfs) -> Result<Preset, LabError> {
    let program = fs::canonicalize("/usr/bin/python3").context("looking for", "/usr/bin/python3")?;
    let version = program.file_name().and_then(|name| name.to_str()).unwrap_or("python3").to_owned();
    // What only builds and teaches; the first holds the interpreter's static library.
    let config = fs::read_dir(format!("/usr/lib/{version}")).into_iter().flatten().flatten();
    let config = config
        .filter_map(|entry| entry.file_name().into_string().ok())
        .find(|name| name.starts_with("config-"));
    let config = config.unwrap_or_default();
    let without =
        [config.as_str(), "test", "tests", "dist-packages", "idlelib", "ensurepip", "pydoc_data", "lib2to3"];
    let rootfs = rootfs
        .binary(&program)?
        .link("/usr/bin/python3", &version)?
        .tree(format!("/usr/lib/{version}"), &without)?;
    let mut preset = preset(&rootfs, &["/usr/bin/python3", "-u", "/program.py"], 0);
    preset.env.push("PYTHONDONTWRITEBYTECODE=1".to_owned());
    Ok(preset)
}

fn busybox(rootfs: Rootfs) -> Result<Preset, LabError> {
    let output = Command::new("/usr/bin/busybox").arg("--list").stdin(Stdio::null()).output();
    let output = output.context("running", "/usr/bin/busybox")?;
    let mut rootfs = rootfs.binary("/usr/bin/busybox")?;
    for name in String::from_utf8_lossy(&output.stdout).lines().filter(|name| *name != "busybox") {
        rootfs = rootfs.link(Path::new("/usr/bin").join(name), "busybox")?;
    }
    Ok(preset(&rootfs, &["/bin/sh", "-c", "while :; do sleep 3600; done"], 0))
}
