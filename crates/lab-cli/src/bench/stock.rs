//! The same job with stock programs: `runc checkpoint`, a copy, `runc restore`.
//!
//! ```text
//!   client ── uplink0 ─ a ── svc0 ── service's namespace     before: a answers ARP for the address
//!                │
//!             uplink0 ─ b ── svc0 ── service's namespace     after: b does; same address and MAC
//! ```
//!
//! It is as good as such a script gets: everything is prepared before the freeze (root filesystem,
//! namespace and routes at the destination), and the client learns the new place at once.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddrV4, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{ChildStderr, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_lab::{
    Lab,
    workload::{LoadReport, Preset, Workload},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::trial::{ADDRESS, Clients, DESTINATION, SERVICE, SOURCE, blocking, left};

/// Where `scripts/setup` puts the CRIU that works here; runc takes the first in its path.
const LIBEXEC: &str = "/usr/local/lib/godwit/bin";
/// The service's, on both nodes.
const MAC: &str = "02:67:0a:58:00:0a";
const GATEWAY: &str = "10.88.0.1/16";
/// How long runc may take: a lazy restore whose pages do not come would wait for ever.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(1);
/// TCP port of the copy.
const COPY: u16 = 7000;

/// The floor: checkpoint and restore of an idle container, the sum of both.
pub(super) fn floor() -> anyhow::Result<Value> {
    let directory = Scratch::new("floor")?;
    let mut preset = Workload::Busybox.build(directory.0.join("rootfs"))?;
    preset.command = ["/bin/sleep", "100000"].map(str::to_owned).to_vec();
    let container = Container::prepare(&directory.0, "floor", &preset, None)?;
    let _first = container.run()?;
    let images = directory.0.join("images");
    let begun = Instant::now();
    container.checkpoint(&images)?;
    let _second = container.restore(&images)?;
    let frozen_ms = begun.elapsed().as_secs_f64() * 1e3;
    container.delete()?;
    Ok(baseline_report("floor", "cold", frozen_ms, None))
}

/// The bare floor: CRIU's dump and restore of an idle process that is in no container, the sum of both.
pub(super) fn bare() -> anyhow::Result<Value> {
    let directory = Scratch::new("bare")?;
    // The leader of its session, else a dump would need the session's terminal.
    let mut process = Command::new("setsid");
    process.args(["sleep", "100000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = process.spawn().context("setsid cannot be run")?;
    let criu = |verb: &str, more: &[&str]| {
        let mut command = Command::new("criu");
        command.env("PATH", path()).arg(verb).arg("--images-dir").arg(&directory.0).args(more);
        run(&mut command)
    };
    let begun = Instant::now();
    if let Err(error) = criu("dump", &["--tree", &process.id().to_string()]) {
        process.kill()?;
        process.wait()?;
        return Err(error);
    }
    // CRIU has ended it. Its number is free for the restored one once it has been waited for.
    process.wait()?;
    criu("restore", &["--restore-detached"])?;
    let frozen_ms = begun.elapsed().as_secs_f64() * 1e3;
    // Restored, it has the number that it had.
    kill(Pid::from_raw(i32::try_from(process.id())?), Signal::SIGKILL)?;
    Ok(baseline_report("bare", "cold", frozen_ms, None))
}

/// The fields of a baseline's report: those of ours that it has.
fn baseline_report(series: &str, mode: &str, frozen_ms: f64, client: Option<&LoadReport>) -> Value {
    let downtime_ms = client.map_or(frozen_ms, |client| client.downtime_ms);
    json!({
        "series": series,
        "mode": mode,
        "outcome": "moved",
        "frozen_ms": frozen_ms,
        "downtime_ms": downtime_ms,
        "lost_ops": client.map_or(0, |client| client.lost_ops + client.wrong),
        "reconnects": client.map_or(0, |client| client.reconnects),
    })
}

/// A Redis under load that stock programs move.
pub(super) struct Stock {
    /// Data in it, bytes.
    pub(super) memory: u64,
    /// Its client's requests a second.
    pub(super) rate: u32,
}

impl Stock {
    /// A stock cold migration.
    pub(super) async fn cold(&self, lab: &Lab) -> anyhow::Result<Value> {
        self.moved(lab, "stock-cold", "cold", Sides::switch).await
    }

    /// A migration by `switch`, which returns what it took and the container's new output.
    pub(super) async fn moved(
        &self,
        lab: &Lab,
        series: &str,
        mode: &str,
        switch: impl FnOnce(&Sides, &Lab) -> anyhow::Result<(Figures, Output)> + Send + 'static,
    ) -> anyhow::Result<Value> {
        let base = lab.state(SOURCE)?.with_file_name("stock");
        let prepared = {
            let lab = lab.clone();
            blocking(move || Sides::prepare(&lab, &base)).await?
        };
        let clients =
            Clients::start(lab, prepared.preset.at(ADDRESS), (self.memory, self.rate), |_| Ok(())).await?;
        let before = left(lab, SOURCE).await?;
        let (moved, prepared) = {
            let lab = lab.clone();
            blocking(move || Ok((switch(&prepared, &lab), prepared))).await?
        };
        let (figures, _output) = match moved {
            Ok(moved) => moved,
            Err(error) => {
                blocking(move || prepared.delete()).await?;
                return Err(error);
            }
        };
        let link_bytes = left(lab, SOURCE).await?.saturating_sub(before);
        let client = clients.finish(|_| Ok(())).await;
        blocking(move || prepared.delete()).await?;
        let mut report = baseline_report(series, mode, figures.frozen_ms, Some(&client?));
        report["name"] = SERVICE.into();
        report["source"] = SOURCE.into();
        report["destination"] = DESTINATION.into();
        report["total_ms"] = figures.total_ms.into();
        // Where nobody counts what the programs send, the link does, with all headers.
        report["wire_bytes"] = figures.bytes.unwrap_or(link_bytes).into();
        report["link_bytes"] = link_bytes.into();
        Ok(report)
    }
}

/// What a stock migration took, in milliseconds, and the bytes it sent.
pub(super) struct Figures {
    pub(super) frozen_ms: f64,
    pub(super) total_ms: f64,
    pub(super) bytes: Option<u64>,
}

/// The container's standard output and error; while it is held, writing to them works.
pub(super) type Output = (Option<ChildStdout>, Option<ChildStderr>);

/// The container on the source, and everything but its state at the destination.
pub(super) struct Sides {
    pub(super) source: Container,
    pub(super) destination: Container,
    preset: Preset,
    _output: Output,
}

impl Sides {
    fn prepare(lab: &Lab, base: &Path) -> anyhow::Result<Self> {
        let mut containers = Vec::new();
        let mut preset = None;
        for node in [SOURCE, DESTINATION] {
            let directory = base.join(node);
            let built = Workload::Redis.build(directory.join("rootfs"))?;
            let namespace = service_network(lab, node)?;
            let name = format!("{}/stock/{node}", lab.name());
            containers.push(Container::prepare(&directory, &name, &built, Some(&namespace))?);
            preset.get_or_insert(built);
        }
        let (Some(destination), Some(source), Some(preset)) = (containers.pop(), containers.pop(), preset)
        else {
            bail!("a lab of two nodes is needed");
        };
        let output = source.run()?;
        answer_for(lab, SOURCE, true)?;
        Ok(Self { source, destination, preset, _output: output })
    }

    /// Freezes, copies, restores and switches over; the container's new output goes on with it.
    fn switch(&self, lab: &Lab) -> anyhow::Result<(Figures, Output)> {
        let begun = Instant::now();
        self.source.checkpoint(&self.source.images())?;
        let bytes = copy(lab, &self.source.images(), &self.destination.images())?;
        let output = self.destination.restore(&self.destination.images())?;
        answer_for(lab, SOURCE, false)?;
        answer_for(lab, DESTINATION, true)?;
        let frozen_ms = begun.elapsed().as_secs_f64() * 1e3;
        found_again(lab)?;
        let total_ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok((Figures { frozen_ms, total_ms, bytes: Some(bytes) }, output))
    }

    fn delete(&self) -> anyhow::Result<()> {
        self.destination.delete()?;
        self.source.delete()
    }
}

/// The service's namespace on a node, joined to it by a veth; returns its path.
fn service_network(lab: &Lab, node: &str) -> anyhow::Result<PathBuf> {
    let namespace = format!("gwl-{}-svc{node}", lab.name());
    run(Command::new("ip").args(["netns", "add", &namespace]))?;
    let inside = |words: &[&str]| run(Command::new("ip").args(["-n", &namespace]).args(words));
    ip(lab, node, &["link", "add", "svc0", "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
    ip(lab, node, &["address", "add", GATEWAY, "dev", "svc0"])?;
    ip(lab, node, &["link", "set", "svc0", "up"])?;
    inside(&["link", "set", "eth0", "address", MAC])?;
    inside(&["address", "add", &format!("{ADDRESS}/16"), "dev", "eth0"])?;
    inside(&["link", "set", "lo", "up"])?;
    inside(&["link", "set", "eth0", "up"])?;
    inside(&["route", "add", "default", "via", "10.88.0.1"])?;
    // Written by a program in the node's namespace, where /proc/sys/net shows that namespace.
    for (file, value) in [("ip_forward", "1"), ("neigh/uplink0/proxy_delay", "0")] {
        let script = format!("echo {value} > /proc/sys/net/ipv4/{file}");
        run(lab.command(node, "sh")?.args(["-c", &script]))?;
    }
    Ok(Path::new("/run/netns").join(namespace))
}

/// Tells the client at once that the service is elsewhere, as a gratuitous ARP would.
pub(super) fn found_again(lab: &Lab) -> anyhow::Result<()> {
    ip(lab, "client", &["neigh", "flush", "to", &ADDRESS.to_string(), "dev", "uplink0"])
}

/// Makes a node answer ARP for the service, or not.
pub(super) fn answer_for(lab: &Lab, node: &str, yes: bool) -> anyhow::Result<()> {
    let verb = if yes { "add" } else { "del" };
    ip(lab, node, &["neigh", verb, "proxy", &ADDRESS.to_string(), "dev", "uplink0"])
}

fn ip(lab: &Lab, host: &str, words: &[&str]) -> anyhow::Result<()> {
    run(lab.command(host, "ip")?.args(words))
}

/// Runs a program to its end; its standard error explains a failure.
fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("{} cannot be run", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{} ended with {}: {}",
        command.get_program().display(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Copies the images over one TCP connection of the lab; the bytes that went over it.
pub(super) fn copy(lab: &Lab, from: &Path, to: &Path) -> anyhow::Result<u64> {
    let address = SocketAddrV4::new(lab.address(DESTINATION)?, COPY);
    let listener = lab.inside(DESTINATION, || TcpListener::bind(address))??;
    let to = to.to_owned();
    let receiver = thread::spawn(move || receive(&listener, &to));
    let mut stream = lab.inside(SOURCE, || TcpStream::connect(address))??;
    let mut bytes = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (name, size) = (entry.file_name().into_encoded_bytes(), entry.metadata()?.len());
        stream.write_all(&u32::try_from(name.len())?.to_be_bytes())?;
        stream.write_all(&name)?;
        stream.write_all(&size.to_be_bytes())?;
        bytes += io::copy(&mut fs::File::open(entry.path())?, &mut stream)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    receiver.join().map_err(|_| anyhow::anyhow!("the receiver of the copy has failed"))??;
    Ok(bytes)
}

/// Each file is: length of its name (u32), its name, its size (u64), its bytes; big endian.
fn receive(listener: &TcpListener, to: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStringExt as _;
    fs::create_dir_all(to)?;
    let (mut stream, _) = listener.accept()?;
    let mut length = [0; 4];
    while stream.read(&mut length[..1])? == 1 {
        stream.read_exact(&mut length[1..])?;
        let mut name = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX)];
        stream.read_exact(&mut name)?;
        let mut size = [0; 8];
        stream.read_exact(&mut size)?;
        let mut file = fs::File::create(to.join(OsString::from_vec(name)))?;
        io::copy(&mut (&mut stream).take(u64::from_be_bytes(size)), &mut file)?;
    }
    Ok(())
}

/// This process's path, with the CRIU that works here before all others.
pub(super) fn path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([PathBuf::from(LIBEXEC)].into_iter().chain(env::split_paths(&path)));
    path.unwrap_or_else(|_| LIBEXEC.into())
}

/// A container of plain runc.
pub(super) struct Container {
    pub(super) directory: PathBuf,
}

impl Container {
    /// Writes the bundle: runc's own example of a configuration with what differs.
    fn prepare(
        directory: &Path,
        cgroup: &str,
        preset: &Preset,
        namespace: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let file = directory.join("config.json");
        let _ = fs::remove_file(&file);
        run(Command::new("runc").arg("spec").arg("--bundle").arg(directory))?;
        let mut config: Value = serde_json::from_slice(&fs::read(&file)?)?;
        config["process"]["terminal"] = false.into();
        config["process"]["args"] = json!(preset.command);
        config["process"]["env"] = json!(preset.env);
        config["root"] = json!({ "path": preset.rootfs, "readonly": false });
        config["linux"]["cgroupsPath"] = format!("/godwit-lab/{cgroup}").into();
        if let (Some(path), Some(all)) = (namespace, config["linux"]["namespaces"].as_array_mut()) {
            all.retain(|entry| entry["type"] != "network");
            all.push(json!({ "type": "network", "path": path }));
        }
        fs::write(&file, serde_json::to_vec(&config)?)?;
        Ok(Self { directory: directory.to_owned() })
    }

    pub(super) fn images(&self) -> PathBuf {
        self.directory.join("images")
    }

    fn runc(&self) -> Command {
        let mut command = Command::new("runc");
        command.env("PATH", path());
        command.arg("--root").arg(self.directory.join("runc"));
        command
    }

    /// Pipes, since an open file outside the container makes a dump fail.
    pub(super) fn detached(&self, mut command: Command, verb: &str) -> anyhow::Result<Output> {
        let log = self.directory.join("runc.log");
        command.args([SERVICE]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("runc cannot be run")?;
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() < deadline => thread::sleep(PAUSE),
                None => {
                    child.kill()?;
                    child.wait()?;
                    bail!("runc {verb} did not end within {} s", PATIENCE.as_secs());
                }
            }
        };
        ensure!(
            status.success(),
            "runc {verb} ended with {status}: {}",
            fs::read_to_string(log).unwrap_or_default().trim()
        );
        Ok((child.stdout.take(), child.stderr.take()))
    }

    fn run(&self) -> anyhow::Result<Output> {
        let mut command = self.runc();
        command.arg("--log").arg(self.directory.join("runc.log"));
        command.args(["run", "--detach", "--bundle"]).arg(&self.directory);
        self.detached(command, "run")
    }

    fn checkpoint(&self, images: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(images)?;
        let mut command = self.runc();
        command.args(["checkpoint", "--tcp-established", "--image-path"]).arg(images);
        run(command.arg("--work-path").arg(self.work()).arg(SERVICE))
    }

    fn restore(&self, images: &Path) -> anyhow::Result<Output> {
        self.restore_with(images, &[])
    }

    /// Restores with more flags.
    pub(super) fn restore_with(&self, images: &Path, flags: &[&str]) -> anyhow::Result<Output> {
        let mut command = self.runc();
        command.arg("--log").arg(self.directory.join("runc.log"));
        command.args(["restore", "--detach", "--tcp-established"]).args(flags);
        command.arg("--image-path").arg(images);
        command.arg("--work-path").arg(self.work()).arg("--bundle").arg(&self.directory);
        self.detached(command, "restore")
    }

    /// Where CRIU's logs and sockets are.
    pub(super) fn work(&self) -> PathBuf {
        self.directory.join("work")
    }

    fn delete(&self) -> anyhow::Result<()> {
        run(self.runc().args(["delete", "--force", SERVICE]))
    }
}

/// A directory that goes away.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> io::Result<Self> {
        let path = env::temp_dir().join(format!("godwit-bench-{name}-{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
