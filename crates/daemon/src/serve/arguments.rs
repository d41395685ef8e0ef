//! What `godwitd serve` is called with.

use std::net::SocketAddr;
use std::path::PathBuf;

use godwit_network::{Prefix6, Subnet};

use crate::protection::encrypt::Encrypt;
use crate::unit;

/// How `godwitd serve` was called.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServeArgs {
    /// Directory for what must survive a restart of the machine
    #[arg(long, default_value = unit::STATE)]
    pub state: PathBuf,
    /// Directory for what need not; the socket is in it
    #[arg(long, default_value = "/run/godwit")]
    pub run: PathBuf,
    /// Name of this node; another than in its certificate is refused [default: the one in the certificate]
    #[arg(long, alias = "node")]
    pub name: Option<String>,
    /// Address and port at which other nodes reach this one; the next port serves new nodes [default: as the node was
    /// founded or has joined]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Interface that carries the overlay and on which clients reach services [default: as the node was founded or has
    /// joined]
    #[arg(long, value_name = "INTERFACE")]
    pub uplink: Option<String>,
    /// The switch that services are plugged into
    #[arg(long, value_enum, default_value_t = NetworkBackend::Kernel)]
    pub network_backend: NetworkBackend,
    /// Addresses of services, the same on all nodes
    #[arg(long, default_value = "10.88.0.0/16")]
    pub subnet: Subnet,
    /// Prefix for services' IPv6 addresses, the same on all nodes, such as fd67:6f64::/96 [default: they have
    /// IPv4 addresses only]
    #[arg(long, value_name = "PREFIX/96")]
    pub subnet6: Option<Prefix6>,
    /// UDP port at which nodes take the overlay's frames, the same on all nodes
    #[arg(long, default_value_t = 4789, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub vxlan_port: u16,
    /// Encryption of services' packets between nodes, the same on all nodes [default: as the cluster was
    /// founded, or off]
    #[arg(long, value_enum)]
    pub encrypt: Option<Encrypt>,
    /// Whether to probe the uplink for a service's address (ARP) before the service is admitted
    #[arg(long, value_enum, default_value_t = AddressProbe::Auto)]
    pub address_probe: AddressProbe,
    /// Whether services find each other by name: the gateway of each network serves DNS to them
    #[arg(long, value_enum, default_value_t = Dns::Auto)]
    pub dns: Dns,
    /// CRIU [default: the one in godwitd's own directory, else /usr/local/lib/godwit/bin/criu]
    #[arg(long, env = "GODWIT_CRIU", value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// runc
    #[arg(long, default_value = "runc")]
    pub runc: PathBuf,
    /// Podman, for containers that `godwit adopt` takes, and for those that come here
    #[arg(long, default_value = "podman", value_name = "PATH")]
    pub podman: PathBuf,
    /// Docker's command, for commands in its containers
    #[arg(long, default_value = "docker", value_name = "PATH")]
    pub docker: PathBuf,
    /// Socket of dockerd, for containers that `godwit adopt` takes, and for those that come here
    #[arg(long, default_value = "/run/docker.sock", value_name = "PATH")]
    pub docker_socket: PathBuf,
    /// cgroup below each hierarchy's root under which services live
    #[arg(long, default_value = "/godwit")]
    pub cgroup_parent: String,
    /// The most memory that services on their way to this node may need, in MiB; 0: what is free
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub incoming_memory: u64,
    /// How long a destination may make no progress with a frozen service before the move is rolled back, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub patience: u64,
    /// Memory of each migration for the contents of pages that are sent repeatedly, so that only their deltas cross,
    /// in MiB
    #[arg(long, alias = "agent-memory", default_value_t = 256, value_name = "MIB")]
    pub delta_cache: usize,
    /// Memory for the retained pages of services that left, in MiB, so that they come back faster [default: a
    /// quarter of what is free]
    #[arg(long, alias = "keep-memory", value_name = "MIB")]
    pub retained_memory: Option<u64>,
    /// Disk for files of services that may come here, sent ahead (`godwit prepare`) or left by a service or an aborted
    /// move, in MiB [default: half of what is free]
    #[arg(long, value_name = "MIB")]
    pub retained_files: Option<u64>,
    /// How long unused image layers stay, in hours, so that a service comes back faster; when the disk runs short
    /// they are removed earlier
    #[arg(long, default_value_t = 168, value_name = "HOURS")]
    pub keep_layers: u32,
    /// Registries from which this node fetches layers of services that come to it, by the hosts that references begin with
    /// [default: none; layers come from the node that the service leaves]
    #[arg(long, value_name = "REGISTRY,...", value_delimiter = ',')]
    pub pull_layers: Vec<String>,
    /// How written pages are found
    #[arg(long, value_enum, default_value_t = Track::Auto)]
    pub tracker: Track,
    /// Whether services may resume here before their pages are in place
    #[arg(long, value_enum, default_value_t = Userfaultfd::Auto)]
    pub userfaultfd: Userfaultfd,
    /// Whether the features of godwit's patches to CRIU are used
    #[arg(long, value_enum, default_value_t = CriuPatches::Auto)]
    pub criu_patches: CriuPatches,
    /// Directory of the network namespaces that godwit did not create and that services may use
    #[arg(long, default_value = "/run/netns", value_name = "DIR")]
    pub namespaces: PathBuf,
    /// Directory of the programs that services may name as hooks
    #[arg(long, default_value = "/etc/godwit/hooks", value_name = "DIR")]
    pub hooks: PathBuf,
    /// Directory of this node from which services from other nodes may mount directories; may be given several times
    /// [default: none]
    #[arg(long, value_name = "DIR")]
    pub allow_bind: Vec<PathBuf>,
    /// Other nodes whose users may migrate, cancel, capture and list the connections of this node's services: all, none,
    /// or these
    #[arg(long, value_name = "all|none|NODE,...", default_value = "none", value_delimiter = ',')]
    pub verbs_from: Vec<String>,
    /// Address and port at which Prometheus reads this node's metrics, by HTTP without authentication: one of loopback or of a
    /// management network [default: none]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// The busy share of the processors that this node tells, in thousandths: for nodes that share a machine
    #[arg(long, hide = true, value_name = "N", value_parser = clap::value_parser!(u32).range(..=1000))]
    pub busy_permille: Option<u32>,
    /// How long certificates last that this node issues, in seconds
    #[arg(long, hide = true)]
    pub certificate_validity: Option<u64>,
    /// What becomes of frames for a service that is on its way from here: dropping them is for comparison
    #[arg(long, value_enum, default_value_t = CutOver::Hold, hide = true)]
    pub cutover: CutOver,
    /// File descriptor that gets one byte when the node serves
    #[arg(long, hide = true)]
    pub ready_fd: Option<i32>,
}

/// The names of [`godwit_network::Backend`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NetworkBackend {
    /// The kernel's bridge
    Kernel,
    /// Open vSwitch, whose daemons must run already (their sockets: OVS_RUNDIR)
    #[value(name = "openvswitch")]
    OpenVswitch,
}

impl From<NetworkBackend> for godwit_network::Backend {
    fn from(name: NetworkBackend) -> Self {
        match name {
            NetworkBackend::Kernel => Self::Kernel,
            // The programs find the sockets by this process's environment.
            NetworkBackend::OpenVswitch => Self::OpenVswitch { run: None },
        }
    }
}

/// The names of [`godwit_memory::tracker::Backend`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Track {
    /// The best that this kernel has
    Auto,
    /// userfaultfd and PAGEMAP_SCAN (Linux 6.7 and newer)
    Uffd,
    /// The soft-dirty bit (x86-64, where the kernel was built with it)
    SoftDirty,
    /// None: only modes cold and postcopy
    None,
}

/// Whether services find each other by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dns {
    /// By the DNS server of each network
    Auto,
    /// They have the name servers of their node
    Off,
}

/// Whether the uplink's hosts are asked for a service's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AddressProbe {
    /// Before a service is admitted
    Auto,
    /// Never, for an uplink with a router that answers for unused addresses
    Off,
}

/// Whether userfaultfd is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Userfaultfd {
    /// Where it works
    Auto,
    /// Never: services are restored from images
    Off,
}

/// Whether patches of CRIU are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CriuPatches {
    /// Where it has them
    Auto,
    /// Never: CRIU is used as if it had none
    Off,
}

/// What becomes of frames for a service during the frozen time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CutOver {
    /// They are held, and delivered where the service resumes
    Hold,
    /// They are dropped, as without godwit
    Drop,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_in_the_documentation() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/install.md");
        let page = std::fs::read_to_string(page).unwrap();
        let command = <ServeArgs as clap::Args>::augment_args(clap::Command::new("serve"));
        let flags =
            command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(clap::Arg::get_long);
        let missing: Vec<_> = flags
            .filter(|flag| !page.contains(&format!("`--{flag}`")) && !page.contains(&format!("`--{flag} ")))
            .collect();
        assert!(missing.is_empty(), "not in docs/install.md: {missing:?}");
    }

    #[test]
    fn no_flag_is_needed() {
        let command = <ServeArgs as clap::Args>::augment_args(clap::Command::new("serve"));
        let found = command.try_get_matches_from(["serve"]).unwrap();
        let args = <ServeArgs as clap::FromArgMatches>::from_arg_matches(&found).unwrap();
        assert_eq!((args.name, args.listen, args.uplink), (None, None, None));
    }

    #[test]
    fn flags_of_version_0_1_are_taken() {
        let command = <ServeArgs as clap::Args>::augment_args(clap::Command::new("serve"));
        let line = "serve --node a --listen 192.0.2.1:7117 --agent-memory 5 --keep-memory 6";
        let found = command.try_get_matches_from(line.split(' ')).unwrap();
        let args = <ServeArgs as clap::FromArgMatches>::from_arg_matches(&found).unwrap();
        assert_eq!((args.delta_cache, args.retained_memory), (5, Some(6)));
        assert_eq!((args.name.as_deref(), args.listen), (Some("a"), "192.0.2.1:7117".parse().ok()));
    }
}
