//! A machine's life in its lab: start, identity, godwit, power, clock.

use std::{
    fmt::Write as _,
    fs,
    io::Read as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use super::{
    emulator::{self, Accelerator, Disk, Parts, Start},
    qmp::Monitor,
    shell, store,
};
use crate::{
    config::{PEER_PORT, SERVICE_SUBNET, UNDERLAY_PREFIX, UPLINK},
    error::{Context, LabError},
    handle::Lab,
    host,
    process::{self, Process},
    programs, registry,
    spec::Machine,
};

/// How long an emulator may take to end after SIGKILL.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// How long a machine from a snapshot may take to answer: under two seconds unless the host is very busy.
const RESUME: Duration = Duration::from_secs(300);
/// Hardware address of an uplink in a snapshot; each machine has one of its own when it goes on.
const NOBODY: [u8; 6] = [0x02, 0, 0, 0, 0, 1];
/// How long the server of a disk may take to listen.
const SERVER_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two looks at whether it does.
const PAUSE: Duration = Duration::from_millis(5);
/// What the file of a volatile disk has room for, sparse: its server does not let it grow. Images are of 8 GiB.
const VOLATILE_SIZE: u64 = 12 << 30;
/// Where its packages are while they are installed.
const PACKAGES: &str = "/var/tmp/godwit-packages";

/// Name of an emulator's pid record.
pub(crate) fn role(node: &str) -> String {
    format!("machine-{node}")
}

/// Name of the pid record of the server of a volatile disk.
fn disk_role(node: &str) -> String {
    format!("disk-{node}")
}

/// That something failed in a machine, or with it.
pub(crate) fn failed(lab: &Lab, node: &str, action: &'static str, reason: &str) -> LabError {
    LabError::Machine {
        lab: lab.name().to_owned(),
        node: node.to_owned(),
        action,
        reason: reason.to_owned(),
        console: lab.paths.machine_console(node),
    }
}

/// Starts a node's machine from its snapshot, which is made if there is none, and gives it its identity.
pub(crate) fn start(lab: &Lab, node: &str, machine: &Machine) -> Result<(), LabError> {
    for directory in [lab.paths.node_state(node), lab.paths.node_run(node)] {
        fs::create_dir_all(&directory).context("creating", directory.display())?;
    }
    let version = emulator::version(machine.architecture)?;
    let image = store::image(machine)?;
    let accelerator = emulator::accelerator(machine.architecture, &image)?;
    let link = lab.paths.machine_image(node);
    symlink(&image, &link).context("linking", link.display())?;
    let packages = match &lab.config.packages {
        Some(directory) => store::packages(directory, machine.architecture)?,
        None => Vec::new(),
    };
    let mut parts = emulator::shape(machine, accelerator);
    parts.extend([version, image.display().to_string()]);
    for package in &packages {
        parts.push(store::file_digest(package)?);
    }
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let snapshot = store::snapshot(&parts, |directory| {
        store::say(&format!("making a snapshot of a {machine} machine, once: this takes a minute"));
        make_disk(&directory.join("disk.qcow2"), &image.join("root.img"), "raw")?;
        save(lab, node, machine, accelerator, &packages, directory)
    })?;

    let disk = lab.paths.machine_disk(node);
    make_disk(&disk, &snapshot.join("disk.qcow2"), "qcow2")?;
    let address = hardware_address(lab, node)?;
    let memory = snapshot.join("memory");
    let mut emulator = emulate(lab, node, machine, accelerator, Start::Load(&memory), &disk, address)?;
    monitor(lab, node, &mut emulator)?
        .load(&snapshot.join("state"))
        .map_err(|error| failed(lab, node, "loading the snapshot of", &error.to_string()))?;
    shell::connect(lab, node, RESUME, || !is_on(lab, node))?;
    identify(lab, node, machine, address)
}

/// Boots a machine, installs godwit's packages, and saves it.
fn save(
    lab: &Lab,
    node: &str,
    machine: &Machine,
    accelerator: Accelerator,
    packages: &[PathBuf],
    directory: &Path,
) -> Result<(), LabError> {
    let disk = directory.join("disk.qcow2");
    let memory = directory.join("memory");
    let mut emulator = emulate(lab, node, machine, accelerator, Start::BootToSave(&memory), &disk, NOBODY)?;
    let mut monitor = monitor(lab, node, &mut emulator)?;
    shell::boot(lab, node, || !is_on(lab, node))?;
    // What a boot still does would be done again by each machine that goes on from here. One that has failed
    // units has booted, too; they are shown by `systemctl --failed`.
    shell::run(lab, node, "booting", "systemctl is-system-running --wait >/dev/null || true")?;
    if !packages.is_empty() {
        install(lab, node, packages)?;
    }
    shell::run(lab, node, "saving", "sync")?;
    let saved = monitor.save(&directory.join("state"));
    saved.map_err(|error| failed(lab, node, "saving", &error.to_string()))?;
    emulator.wait().context("waiting for", "the emulator")?;
    Ok(())
}

fn make_disk(disk: &Path, below: &Path, format: &str) -> Result<(), LabError> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", format, "-b"]).arg(below).arg(disk);
    let output = command
        .output()
        .map_err(|_| LabError::NoMachineProgram { name: "qemu-img".to_owned(), package: "qemu-utils" })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(std::io::Error::other(said)).context("making", disk.display())
}

fn hardware_address(lab: &Lab, node: &str) -> Result<[u8; 6], LabError> {
    let [a, b, c, d] = lab.address(node)?.octets();
    Ok([0x02, 0, a, b, c, d])
}

fn emulate(
    lab: &Lab,
    node: &str,
    machine: &Machine,
    accelerator: Accelerator,
    start: Start<'_>,
    disk: &Path,
    address: [u8; 6],
) -> Result<Child, LabError> {
    let monitor = lab.paths.machine_monitor(node);
    // The last emulator's.
    let _ = fs::remove_file(&monitor);
    let mut command = lab.command_beside(node, emulator::program(machine.architecture))?;
    let socket = lab.paths.machine_disk_socket(node);
    let disk = if machine.volatile_disk && !matches!(start, Start::BootToSave(_)) {
        serve_disk(lab, node, disk, &socket)?;
        Disk::Served(&socket)
    } else {
        Disk::File(disk)
    };
    let parts = Parts {
        machine,
        accelerator,
        image: &lab.paths.machine_image(node),
        disk,
        start,
        address,
        tap: host::machine_uplink(&lab.paths, node)?,
        console: &lab.paths.machine_console(node),
        monitor: &monitor,
    };
    emulator::arguments(&mut command, &parts)?;
    command.stdout(Stdio::null());
    programs::start(lab, &role(node), command, &lab.paths.machine_log(node))
}

/// Starts the server of a volatile disk.
fn serve_disk(lab: &Lab, node: &str, disk: &Path, socket: &Path) -> Result<(), LabError> {
    // One of a machine that has switched itself off.
    if let Some(server) = registry::process(&lab.paths, &disk_role(node)) {
        process::kill(lab.name(), server, END_PATIENCE)?;
    }
    let pid = lab.paths.machine_disk_pid(node);
    for left in [socket, &pid] {
        let _ = fs::remove_file(left);
    }
    let file = fs::File::options().write(true).open(disk).context("opening", disk.display())?;
    file.set_len(VOLATILE_SIZE).context("setting the size of", disk.display())?;
    let mut command = lab.command_beside(node, emulator::DISK_SERVER)?;
    emulator::serve_disk(&mut command, disk, socket, &pid);
    // Its cache is there, without a name.
    let output =
        command.env("TMPDIR", lab.paths.node_state(node)).stdin(Stdio::null()).output().map_err(|_| {
            let name = emulator::DISK_SERVER.to_owned();
            LabError::NoMachineProgram { name, package: emulator::DISK_SERVER }
        })?;
    let wrong = || failed(lab, node, "serving the disk of", String::from_utf8_lossy(&output.stderr).trim());
    if !output.status.success() {
        return Err(wrong());
    }
    let begun = Instant::now();
    loop {
        let wrote = fs::read_to_string(&pid).unwrap_or_default();
        let server = wrote.strip_suffix('\n').and_then(|pid| Process::of(pid.parse().ok()?));
        match server {
            Some(server) => return registry::record_process(&lab.paths, &disk_role(node), &server),
            None if begun.elapsed() > SERVER_PATIENCE => return Err(wrong()),
            None => thread::sleep(PAUSE),
        }
    }
}

fn monitor(lab: &Lab, node: &str, emulator: &mut Child) -> Result<Monitor, LabError> {
    let socket = lab.paths.machine_monitor(node);
    Monitor::connect(&socket, || !matches!(emulator.try_wait(), Ok(None))).map_err(|error| {
        let said = programs::tail(&lab.paths.machine_log(node));
        failed(lab, node, "starting", if said.is_empty() { error.to_string() } else { said }.trim())
    })
}

/// Whether a node's machine has power.
pub(crate) fn is_on(lab: &Lab, node: &str) -> bool {
    registry::process(&lab.paths, &role(node)).is_some()
}

/// Gives a machine that went on from a snapshot its name, its address, the time, and randomness of its own.
fn identify(lab: &Lab, node: &str, machine: &Machine, address: [u8; 6]) -> Result<(), LabError> {
    let mut seed = [0_u8; 64];
    let source = "/dev/urandom";
    fs::File::open(source).and_then(|mut file| file.read_exact(&mut seed)).context("reading", source)?;
    let seed: String = seed.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "\\x{byte:02x}");
        text
    });
    let hardware = address.map(|byte| format!("{byte:02x}")).join(":");
    let underlay = lab.address(node)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    #[allow(clippy::cast_precision_loss)] // seconds of centuries fit
    let now = now.as_secs_f64() + machine.clock_ahead as f64;
    let script = format!(
        r#"set -e
date --utc --set=@{now:.3} >/dev/null
printf '{seed}' >/dev/urandom
# RNDRESEEDCRNG
perl -e 'open(my $random, ">", "/dev/urandom") or die $!; ioctl($random, 0x5207, 0) or die "reseeding: $!"'
printf '%s\n' {node} >/etc/hostname
hostname {node}
printf '127.0.0.1 localhost\n127.0.1.1 {node}\n' >/etc/hosts
# Without a router it is online at once: systemd of Debian 12 waits 12 s for one.
cat >/etc/systemd/network/20-uplink.network <<'END'
[Match]
Name={UPLINK}
[Link]
MACAddress={hardware}
[Network]
Address={underlay}/{UNDERLAY_PREFIX}
IPv6AcceptRA=no
END
ip link set {UPLINK} address {hardware} up
ip address add {underlay}/{UNDERLAY_PREFIX} dev {UPLINK}
# Its identity is to survive a power cut at once.
sync
"#
    );
    shell::run(lab, node, "setting up", &script).map(drop)
}

/// Installs godwit as its users do.
fn install(lab: &Lab, node: &str, packages: &[PathBuf]) -> Result<(), LabError> {
    for package in packages {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        let content = fs::read(package).context("reading", package.display())?;
        let line = format!("mkdir -p {PACKAGES} && cat >{PACKAGES}/{}", quoted(&name));
        let output = shell::feed(lab, node, &line, &content)?;
        if !output.status.success() {
            return Err(failed(lab, node, "copying packages to", &String::from_utf8_lossy(&output.stderr)));
        }
    }
    let script = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -qq install -y {PACKAGES}/*.deb </dev/null; rm -rf {PACKAGES}"
    );
    shell::run(lab, node, "installing godwit in", &script).map(drop)
}

/// For a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Writes a daemon's options where its unit reads them.
fn configure_daemon(lab: &Lab, node: &str) -> Result<(), LabError> {
    let given = &lab.config.programs;
    let mut options = vec![
        format!("--subnet {}/{}", SERVICE_SUBNET.0, SERVICE_SUBNET.1),
        format!("--network-backend {}", lab.config.network_backend),
    ];
    if !given.serve_arguments.iter().any(|argument| argument == "--verbs-from") {
        options.push("--verbs-from all".to_owned());
    }
    options.extend(given.serve_arguments.iter().cloned());
    let mut content = format!("GODWITD_OPTIONS={}\n", quoted(&options.join(" ")));
    for (name, value) in &given.serve_environment {
        let _ = writeln!(content, "{name}={}", quoted(value));
    }
    let output = shell::feed(lab, node, "cat >/etc/default/godwitd && sync", content.as_bytes())?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(lab, node, "configuring godwitd of", &String::from_utf8_lossy(&output.stderr)))
}

fn identity_flags(lab: &Lab, node: &str) -> Result<String, LabError> {
    Ok(format!("--name {node} --listen {}:{PEER_PORT} --uplink {UPLINK}", lab.address(node)?))
}

/// Founds the cluster there.
pub(crate) fn found(lab: &Lab, node: &str) -> Result<(), LabError> {
    configure_daemon(lab, node)?;
    let flags = identity_flags(lab, node)?;
    let script = format!("godwit cluster init --cluster {} {flags} 2>&1", lab.name());
    shell::run(lab, node, "founding the cluster on", &script).map(drop)
}

/// Joins it to the cluster.
pub(crate) fn join(lab: &Lab, node: &str, token: &str) -> Result<(), LabError> {
    configure_daemon(lab, node)?;
    let line = format!("godwit cluster join {} - 2>&1", identity_flags(lab, node)?);
    let output = shell::feed(lab, node, &line, format!("{token}\n").as_bytes())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Err(failed(lab, node, "joining the cluster from", &programs::last_lines(&said)))
}

/// That its daemon does not get ready, with what it wrote.
pub(crate) fn not_ready(lab: &Lab, node: &str, patience: Duration, reason: &str) -> LabError {
    let journal =
        shell::run(lab, node, "reading the log of", "journalctl --unit godwitd --lines 12 --no-pager");
    let journal = journal.unwrap_or_else(|error| error.to_string());
    let reason = format!("after {} s {reason}. The end of its log: {journal}", patience.as_secs());
    failed(lab, node, "waiting for godwitd on", &reason)
}

/// Starts its daemon.
pub(crate) fn start_daemon(lab: &Lab, node: &str) -> Result<(), LabError> {
    shell::run(lab, node, "starting godwitd on", "systemctl start godwitd 2>&1").map(drop)
}

/// Ends its daemon by SIGKILL; the unit would start it again.
pub(crate) fn kill_daemon(lab: &Lab, node: &str) -> Result<(), LabError> {
    let script = "systemctl kill --kill-who=main --signal=KILL godwitd; systemctl stop godwitd 2>&1";
    shell::run(lab, node, "killing godwitd on", script).map(drop)
}

/// Takes its power away; the cache of a volatile disk goes with it.
pub(crate) fn cut_power(lab: &Lab, node: &str) -> Result<(), LabError> {
    let Some(emulator) = registry::process(&lab.paths, &role(node)) else {
        return Err(failed(lab, node, "cutting the power of", "it has none"));
    };
    // The machine first: it must not see its disk fail.
    let mut parts = vec![emulator];
    parts.extend(registry::process(&lab.paths, &disk_role(node)));
    match process::kill_all(&parts, END_PATIENCE, || {}).first() {
        None => Ok(()),
        Some(left) => Err(process::unkillable(lab.name(), *left, END_PATIENCE)),
    }
}

/// Boots it from its disk, and waits until it answers.
pub(crate) fn power_on(lab: &Lab, node: &str, machine: &Machine) -> Result<(), LabError> {
    if is_on(lab, node) {
        return Err(failed(lab, node, "booting", "it has power already"));
    }
    let accelerator = emulator::accelerator(machine.architecture, &lab.paths.machine_image(node))?;
    let address = hardware_address(lab, node)?;
    let disk = lab.paths.machine_disk(node);
    let mut emulator = emulate(lab, node, machine, accelerator, Start::Boot, &disk, address)?;
    monitor(lab, node, &mut emulator)?;
    shell::boot(lab, node, || !is_on(lab, node))?;
    let script = format!("/usr/lib/systemd/systemd-networkd-wait-online --interface={UPLINK} --timeout=120");
    shell::run(lab, node, "waiting for the uplink of", &script).map(drop)
}

/// Sets its clock ahead by so many seconds.
pub(crate) fn shift_clock(lab: &Lab, node: &str, seconds: i64) -> Result<(), LabError> {
    let script = format!("date --utc --set='{seconds:+} seconds' >/dev/null");
    shell::run(lab, node, "setting the clock of", &script).map(drop)
}
