//! Two nodes and a client on a switch, each a network namespace of its own with names that no
//! other test has. Everything goes away with the [`World`], also when a test panics.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod openvswitch;
pub mod repair;
pub mod wire;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use godwit_network::{
    Backend, Handed, Networks, Overlay, OverlayConfig, Protocol, Published, ServiceEndpoint, enter_blocking,
    mac_of, underlay_address,
};

use openvswitch::OpenVswitch;

/// The switch that a test is run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    Kernel,
    OpenVswitch,
}

/// Makes each function a test for each switch: `kernel::NAME` and `openvswitch::NAME`.
#[allow(unused_macros)]
macro_rules! on_every_switch {
    ($($name:ident),+ $(,)?) => {
        mod kernel {
            $(#[test] fn $name() { super::$name(super::common::Switch::Kernel); })+
        }
        mod openvswitch {
            $(#[test] fn $name() { super::$name(super::common::Switch::OpenVswitch); })+
        }
    };
}
#[allow(unused_imports)]
pub(crate) use on_every_switch;

pub const UPLINK: &str = "uplink0";
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 100);
/// How long something may take that must happen.
pub const SOON: Duration = Duration::from_secs(60);
/// How long to look for something that must not happen. Answers here take less than 1 ms.
pub const A_WHILE: Duration = Duration::from_millis(300);

/// Runs a command that must succeed, and returns what it printed.
pub fn sh(line: &str) -> String {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A network namespace under `/run/netns`.
pub struct Host {
    pub name: String,
    pub path: PathBuf,
}

impl Host {
    fn new(world: &str, role: &str) -> Self {
        let name = format!("{world}-{role}");
        // Without IPv6, whose address detection would go on for a second and change the state.
        sh(&format!(
            "ip netns add {name} && ip -n {name} link set lo up &&
             ip netns exec {name} sysctl -qw net.ipv6.conf.default.disable_ipv6=1"
        ));
        let path = Path::new("/run/netns").join(&name);
        Self { name, path }
    }

    /// Runs a command in it that must succeed.
    pub fn sh(&self, line: &str) -> String {
        sh(&format!("ip netns exec {} {line}", self.name))
    }

    /// Runs a command in it that must succeed, wherever it is mounted.
    pub fn sh_inside(&self, line: &str) -> String {
        sh(&format!("nsenter --net={} {line}", self.path.display()))
    }

    /// Runs `f` on a thread in it.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        enter_blocking(&self.path, f).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).output();
    }
}

type Job = Box<dyn FnOnce(&tokio::runtime::Runtime, &mut Option<Networks>) + Send>;

/// A node: a host, and a thread in it that holds its overlay as a daemon would.
pub struct Node {
    pub vtep: Ipv4Addr,
    pub netns_dir: PathBuf,
    /// None: it has the kernel's bridge.
    pub openvswitch: Option<OpenVswitch>,
    jobs: Option<Sender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
    pub host: Host,
    scratch: tempfile::TempDir,
}

impl Node {
    fn new(host: Host, vtep: Ipv4Addr, switch: Switch) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let openvswitch = match switch {
            Switch::Kernel => None,
            Switch::OpenVswitch => Some(OpenVswitch::start(&host.name, scratch.path().join("openvswitch"))),
        };
        let (jobs, queue): (Sender<Job>, Receiver<Job>) = channel();
        let path = host.path.clone();
        let thread = thread::spawn(move || {
            enter_blocking(&path, move || {
                // With a thread of its own, which is in this namespace too: frames are passed on beside
                // what a test does.
                let mut runtime = tokio::runtime::Builder::new_multi_thread();
                let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
                let mut overlay = None;
                for job in queue {
                    job(&runtime, &mut overlay);
                }
                let _guard = runtime.enter();
                drop(overlay);
            })
            .unwrap();
        });
        let netns_dir = scratch.path().join("netns");
        Self { vtep, netns_dir, openvswitch, jobs: Some(jobs), thread: Some(thread), host, scratch }
    }

    fn submit<T: Send + 'static>(
        &self,
        f: impl FnOnce(&tokio::runtime::Runtime, &mut Option<Networks>) -> T + Send + 'static,
    ) -> T {
        let (done, result) = channel();
        let job: Job = Box::new(move |runtime, overlay| {
            let _ = done.send(f(runtime, overlay));
        });
        self.jobs.as_ref().unwrap().send(job).unwrap();
        result.recv().unwrap()
    }

    pub fn config(&self) -> OverlayConfig {
        OverlayConfig {
            netns_dir: self.netns_dir.clone(),
            backend: match &self.openvswitch {
                None => Backend::Kernel,
                Some(openvswitch) => Backend::OpenVswitch { run: Some(openvswitch.run.clone()) },
            },
            ..OverlayConfig::new("10.88.0.0/16".parse().unwrap(), UPLINK, self.vtep)
        }
    }

    /// Brings the overlay up with this configuration, forgetting the one held before.
    pub fn up_with(&self, config: OverlayConfig) -> Result<(), String> {
        self.submit(move |runtime, held| {
            runtime.block_on(async {
                *held = Some(Networks::new(Overlay::up(config).await.map_err(|e| describe(&e))?));
                Ok(())
            })
        })
    }

    /// Brings the overlay up, as a daemon that was just started.
    pub fn up(&self) {
        let vtep = self.submit(|runtime, _| runtime.block_on(underlay_address(UPLINK)).unwrap());
        assert_eq!(vtep, self.vtep);
        self.up_with(self.config()).unwrap();
    }

    /// The overlay is nobody's, as when a daemon has ended; it stays as it is.
    pub fn forget(&self) {
        self.submit(|runtime, held| {
            let _guard = runtime.enter();
            drop(held.take());
        });
    }

    /// Does something with the overlay.
    pub fn with<T, F>(&self, f: F) -> T
    where
        T: Send + 'static,
        F: AsyncFnOnce(&Overlay) -> T + Send + 'static,
    {
        self.submit(move |runtime, held| runtime.block_on(f(held.as_ref().unwrap().first())))
    }

    /// Does something with its networks.
    pub fn with_networks<T, F>(&self, f: F) -> T
    where
        T: Send + 'static,
        F: AsyncFnOnce(&Networks) -> T + Send + 'static,
    {
        self.submit(move |runtime, held| runtime.block_on(f(held.as_ref().unwrap())))
    }

    /// Does something with the network of a service's address.
    fn with_network_of<T, F>(&self, address: Ipv4Addr, f: F) -> T
    where
        T: Send + 'static,
        F: AsyncFnOnce(&Overlay) -> T + Send + 'static,
    {
        self.with_networks(async move |networks: &Networks| f(&*networks.of(address).unwrap()).await)
    }

    pub fn down(&self) {
        self.submit(|runtime, held| runtime.block_on(held.take().unwrap().first().down()).unwrap());
    }

    pub fn create(&self, service: &ServiceEndpoint) -> Host {
        self.try_create(service).unwrap();
        // Not owned: the node removes it.
        self.inside(&service.name)
    }

    /// The namespace of a service that it has.
    pub fn inside(&self, name: &str) -> Host {
        Host { name: format!("(service {name})"), path: self.netns_dir.join(name) }
    }

    pub fn try_create(&self, service: &ServiceEndpoint) -> Result<PathBuf, String> {
        let service = service.clone();
        // One that no network has is refused by the first.
        self.with_networks(async move |networks: &Networks| {
            let network = networks.of(service.address).unwrap_or_else(|_| Arc::clone(networks.first()));
            network.create_endpoint(&service).await.map(|endpoint| endpoint.netns).map_err(|e| describe(&e))
        })
    }

    pub fn open(&self, service: &ServiceEndpoint) -> Handed {
        let service = service.clone();
        self.with_network_of(service.address, async move |overlay: &Overlay| overlay.open(&service).await)
            .unwrap()
    }

    pub fn close(&self, service: &ServiceEndpoint) {
        let service = service.clone();
        self.with_network_of(service.address, async move |overlay: &Overlay| overlay.close(&service).await)
            .unwrap();
    }

    pub fn hold(&self, service: &ServiceEndpoint) {
        let service = service.clone();
        self.with_network_of(service.address, async move |overlay: &Overlay| overlay.hold(&service)).unwrap();
    }

    pub fn steer(&self, service: &ServiceEndpoint, vtep: Ipv4Addr) {
        let service = service.clone();
        self.with_network_of(service.address, async move |overlay: &Overlay| {
            overlay.steer(&service, vtep).await
        })
        .unwrap();
    }

    pub fn is_open(&self, service: &ServiceEndpoint) -> bool {
        let service = service.clone();
        self.with_network_of(service.address, async move |overlay: &Overlay| overlay.is_open(&service).await)
            .unwrap()
    }

    pub fn remove(&self, service: &ServiceEndpoint) {
        let (name, address) = (service.name.clone(), service.address);
        self.with_network_of(address, async move |overlay: &Overlay| {
            overlay.remove_endpoint(&name, address).await
        })
        .unwrap();
    }

    pub fn set_remote(&self, service: &ServiceEndpoint, vtep: Ipv4Addr) {
        let (address, mac) = (service.address, service.mac);
        self.with_network_of(address, async move |overlay: &Overlay| {
            overlay.set_remote(address, mac, vtep).await
        })
        .unwrap();
    }

    /// The port of a service on the bridge.
    pub fn port(&self, service: &ServiceEndpoint) -> String {
        let json = self.host.sh("ip -d link show type veth");
        let lines: Vec<_> = json.lines().collect();
        let alias = format!("alias godwit {} {}", service.address, service.name);
        let at = lines.iter().position(|line| line.trim() == alias).unwrap();
        let head = lines[..at].iter().rev().find(|line| !line.starts_with(' ')).unwrap();
        head.split([':', '@']).nth(1).unwrap().trim().to_owned()
    }

    /// Removes the switch behind the overlay's back.
    pub fn break_switch(&self) {
        match &self.openvswitch {
            None => self.host.sh("ip link del gw0"),
            Some(openvswitch) => openvswitch.sh("ovs-vsctl del-br gw0"),
        };
    }

    /// All of the host's network state that godwit could leave something in.
    pub fn state(&self) -> String {
        let script = "ip -o link | cut -d' ' -f2 | cut -d@ -f1; ip address show | grep inet; ip route show table all; \
                      ip neighbour show nud permanent; ip neighbour show proxy; bridge fdb show; nft list ruleset";
        let network = self.host.sh(&format!("sh -c \"{script}\""));
        let switch = self.openvswitch.as_ref().map(|openvswitch| {
            let flows = "ovs-ofctl -O OpenFlow14 --no-stats dump-flows";
            let bridges = openvswitch.sh("ovs-vsctl list-br");
            let of = |bridge: &str| {
                let ports = openvswitch.sh(&format!("ovs-vsctl list-ports {bridge}"));
                ports + &openvswitch.sh(&format!("{flows} {bridge} | grep -v xid | sort"))
            };
            bridges.lines().map(of).collect::<String>()
        });
        let files: Vec<_> =
            std::fs::read_dir(&self.netns_dir).into_iter().flatten().map(|f| f.unwrap().path()).collect();
        format!("{network}{switch:?}{files:?}\n{}", mounts_below(self.scratch.path()))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.thread.take().map(thread::JoinHandle::join);
        if thread::panicking()
            && let Some(openvswitch) = &self.openvswitch
        {
            let log = std::fs::read_to_string(openvswitch.run.join("log")).unwrap_or_default();
            let troubles: Vec<_> = log.lines().filter(|line| !line.contains("|INFO|")).collect();
            eprintln!("--- Open vSwitch of {}\n{}", self.host.name, troubles.join("\n"));
        }
        for file in std::fs::read_dir(&self.netns_dir).into_iter().flatten().flatten() {
            let _ = nix::mount::umount2(&file.path(), nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

fn mounts_below(path: &Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(path.to_str().unwrap())).collect::<Vec<_>>().join("\n")
}

/// An error with its sources, as a user sees it.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

pub struct World {
    pub a: Node,
    pub b: Node,
    pub client: Host,
    switch: Host,
}

impl World {
    /// The same with IPv6: hosts `fd99::b`, `fd99::c` (nodes) and `fd99::64` (client) on the switch, and services
    /// in `fd67:6f64::/96`.
    pub fn with_ipv6(switch: Switch) -> Self {
        let world = Self::bare(switch);
        for (host, number) in [(&world.a.host, "b"), (&world.b.host, "c"), (&world.client, "64")] {
            for setting in ["accept_dad=0", "disable_ipv6=0"] {
                host.sh(&format!("sysctl -qw net.ipv6.conf.{UPLINK}.{setting}"));
            }
            host.sh(&format!("ip address add fd99::{number}/64 dev {UPLINK} nodad"));
        }
        world.client.sh(&format!("ip -6 route add fd67:6f64::/96 dev {UPLINK}"));
        for node in [&world.a, &world.b] {
            let prefix6 = Some("fd67:6f64::/96".parse().unwrap());
            node.up_with(OverlayConfig { prefix6, ..node.config() }).unwrap();
        }
        world
    }

    /// Nodes `a` and `b` without their overlays, and a client, on one switch.
    pub fn bare(switch: Switch) -> Self {
        Self::bare_with(switch, switch)
    }

    /// The same, with a switch of its own at each node.
    pub fn bare_with(at_a: Switch, at_b: Switch) -> Self {
        let switches = [at_a, at_b];
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let world = format!("gwnet{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let switch = Host::new(&world, "sw");
        let s = &switch.name;
        // On its way through the switch no frame may meet the machine's packet filter.
        sh(&format!("ip -n {s} link add name br0 type bridge && ip -n {s} link set br0 up"));
        let join = |role: &str, address: Ipv4Addr| {
            let host = Host::new(&world, role);
            let h = &host.name;
            sh(&format!(
                "ip -n {s} link add name port-{role} type veth peer name {UPLINK} netns {h} &&
                 ip -n {s} link set port-{role} master br0 up && ip -n {h} link set {UPLINK} up &&
                 ip -n {h} address add {address}/24 dev {UPLINK}"
            ));
            host
        };
        let (at_a, at_b) = (Ipv4Addr::new(10, 99, 0, 11), Ipv4Addr::new(10, 99, 0, 12));
        let a = Node::new(join("a", at_a), at_a, switches[0]);
        let b = Node::new(join("b", at_b), at_b, switches[1]);
        let client = join("client", CLIENT);
        sh(&format!("ip -n {} route add 10.88.0.0/16 dev {UPLINK}", client.name));
        let world = Self { a, b, client, switch };
        for node in [&world.a, &world.b] {
            reachable(&world.client, node.vtep);
        }
        world
    }

    /// The same with both overlays up.
    pub fn new(switch: Switch) -> Self {
        Self::new_with(switch, switch)
    }

    /// The same, with a switch of its own at each node.
    pub fn new_with(at_a: Switch, at_b: Switch) -> Self {
        let world = Self::bare_with(at_a, at_b);
        world.a.up();
        world.b.up();
        world
    }
}

/// Waits until the switch carries frames to the address: a refused connection is an answer.
fn reachable(from: &Host, address: Ipv4Addr) {
    let end = Instant::now() + SOON;
    let answer = from.run(|| {
        loop {
            let tried = TcpStream::connect_timeout(&SocketAddr::from((address, 9)), Duration::from_secs(2));
            match tried {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return true,
                _ if Instant::now() > end => return false,
                _ => {}
            }
        }
    });
    assert!(answer, "{address} is not on the switch");
}

pub fn service(name: &str, last: u8) -> ServiceEndpoint {
    let address = Ipv4Addr::new(10, 88, 0, last);
    let (name, mac) = (name.parse().unwrap(), mac_of(address));
    ServiceEndpoint { name, address, mac, published: Vec::new(), nth: 0 }
}

pub fn published(name: &str, last: u8, host_port: u16, container_port: u16) -> ServiceEndpoint {
    let port = Published { host_port, container_port, protocol: Protocol::Tcp };
    ServiceEndpoint { published: vec![port], ..service(name, last) }
}

/// Answers every byte with the same byte, on every connection, until the namespace's sockets are
/// gone. Returns the address it listens at.
pub fn echo_server(namespace: &Host, address: impl Into<IpAddr>, port: u16) -> SocketAddr {
    let at = SocketAddr::new(address.into(), port);
    let listener = namespace.run(|| TcpListener::bind(at).unwrap());
    thread::spawn(move || {
        for connection in listener.incoming() {
            let Ok(mut connection) = connection else { return };
            thread::spawn(move || {
                let mut reader = connection.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut connection);
            });
        }
    });
    at
}

/// A UDP socket in a namespace, at an address that it has; reads wait for a while.
pub fn udp_at(namespace: &Host, at: (impl Into<IpAddr>, u16)) -> UdpSocket {
    let at = SocketAddr::new(at.0.into(), at.1);
    let socket = namespace.run(|| UdpSocket::bind(at).unwrap());
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

/// Opens a connection from a host.
pub fn connect(from: &Host, to: SocketAddr, patience: Duration) -> std::io::Result<TcpStream> {
    from.run(|| TcpStream::connect_timeout(&to, patience))
}

/// Sends bytes and says whether they come back in time.
pub fn echoes(connection: &mut TcpStream, bytes: &[u8], patience: Duration) -> bool {
    connection.write_all(bytes).unwrap();
    comes_back(connection, bytes, patience)
}

/// Whether these bytes arrive in time.
pub fn comes_back(connection: &mut TcpStream, bytes: &[u8], patience: Duration) -> bool {
    connection.set_read_timeout(Some(patience)).unwrap();
    let mut back = vec![0; bytes.len()];
    match connection.read_exact(&mut back) {
        Ok(()) => {
            assert_eq!(back, bytes);
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
            false
        }
    }
}
