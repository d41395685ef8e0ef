//! Builds a node out of its arguments: state, overlay, engine, CRIU, and what migrations work with.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use godwit_api::v1::Member;
use godwit_criu::Criu;
use godwit_engine::Engines;
use godwit_engine::docker::{Docker, DockerConfig};
use godwit_engine::image::{Registries, Store};
use godwit_engine::podman::{Podman, PodmanConfig};
use godwit_engine::runc::{Runc, RuncConfig};
use godwit_memory::tracker::{self, Backend, Detected};
use godwit_migration::ahead::KeptFiles;
use godwit_migration::arrivals::Arrivals;
use godwit_migration::attach::SystemNetwork;
use godwit_migration::binds::Binds;
use godwit_migration::journal::Journal;
use godwit_migration::mounts::SystemMounts;
use godwit_migration::pagers::PagerProgram;
use godwit_migration::past_moves::PastMoves;
use godwit_migration::promised::Promised;
use godwit_migration::resources::NodeResources;
use godwit_migration::retained::Retention;
use godwit_migration::standstill::Standstills;
use godwit_migration::{Doubts, Layout, Waits, error_chain};
use godwit_network::{Networks, Overlay, OverlayConfig};
use godwit_transfer::Identity;
use tokio_util::sync::CancellationToken;

use super::arguments::{AddressProbe, CriuPatches, CutOver, Dns, ServeArgs, Track, Userfaultfd};
use crate::cluster_view::ClusterView;
use crate::load::Load;
use crate::node::{Means, Node};
use crate::own::Own;
use crate::peers::Peers;
use crate::protection::{Surroundings, encrypt};
use crate::state::{State, now_ms};
use crate::{removals, restart};

/// VXLAN network id of the overlay.
const VNI: u32 = 88;

/// Where `scripts/setup` puts a CRIU that works on this kernel.
const CRIU: &str = "/usr/local/lib/godwit/bin/criu";

/// A node that nothing can reach yet. Its overlay is up.
pub(super) async fn build(
    args: &ServeArgs,
    own: &Own,
    state: Arc<State>,
    identity: Arc<Identity>,
) -> anyhow::Result<Arc<Node>> {
    removals::load(&state, &identity)?;
    let vtep = godwit_network::underlay_address(&own.uplink).await?;
    state.put_member(&Member {
        name: own.name.clone(),
        address: own.listen.to_string(),
        vtep: vtep.to_string(),
        revision: u64::try_from(now_ms()).unwrap_or(1),
    })?;
    let config = OverlayConfig {
        vni: VNI,
        port: args.vxlan_port,
        prefix6: args.subnet6,
        netns_dir: args.run.join("netns"),
        encryption: encrypt::of_node(args.encrypt, &state)?,
        backend: args.network_backend.into(),
        ..OverlayConfig::new(args.subnet, &own.uplink, vtep)
    };
    // Before the overlay takes its first frame.
    let (tunnel_port, probes) = (own.listen.port().checked_add(2), args.address_probe == AddressProbe::Auto);
    let network = Surroundings::raise(&config, &own.name, tunnel_port, probes, &state).await?;
    let overlay = Overlay::up(config).await?;
    let store = Store::open(&args.state.join("images"))?;
    let criu_path = match &args.criu {
        Some(path) => path.clone(),
        None => criu_beside(&own_file()?, Path::new(CRIU)),
    };
    let programs = criu_programs(&args.run)?;
    let engine = Runc::new(RuncConfig {
        runc: args.runc.clone(),
        criu: criu_path.clone(),
        root: args.run.join("runc"),
        shim: beside_us("godwit-shim")?,
        programs: Some(programs.clone()),
    });
    let podman = Podman::new(PodmanConfig {
        podman: args.podman.clone(),
        runtime: beside_us("godwit-runtime")?,
        runc: args.runc.clone(),
        criu: criu_path.clone(),
        programs: Some(programs.clone()),
        run: args.run.join("podman"),
        cgroup_parent: args.cgroup_parent.clone(),
    });
    let docker = Docker::new(DockerConfig {
        socket: args.docker_socket.clone(),
        docker: args.docker.clone(),
        runc: args.runc.clone(),
        criu: criu_path.clone(),
        programs: Some(programs.clone()),
        runtime: beside_us("godwit-runtime")?,
        run: args.run.join("docker"),
    });
    let engines = Engines { runc: engine, podman, docker };
    let criu = Criu::new(&criu_path).with_programs(Some(programs));
    let criu = match args.criu_patches {
        CriuPatches::Auto => criu,
        CriuPatches::Off => criu.as_stock(),
    };
    if let Err(error) = criu.warm_up().await {
        // It works without, only slower; a CRIU that does not work at all is said by the doctor.
        tracing::warn!(error = %error_chain(&error), "CRIU has no cache of the kernel's features, and probes for them at every dump and restore");
    }
    let certificate_validity = args.certificate_validity.map(Duration::from_secs);
    let mut node = Node::new(&own.name, state, Peers::new(identity), network);
    node.names.port = match args.dns {
        Dns::Off => None,
        Dns::Auto => {
            Some(own.listen.port().checked_add(3).context("the port of --listen must be below 65533")?)
        }
    };
    node.certificate_validity = certificate_validity;
    if let Some(busy) = args.busy_permille {
        node.load = Load::Fixed(busy);
    }
    let node = Arc::new(node);
    let holds = args.cutover == CutOver::Hold;
    let layout = Layout {
        state: args.state.clone(),
        run: args.run.clone(),
        netns: overlay.config().netns_dir.clone(),
        cgroup_parent: args.cgroup_parent.clone(),
    };
    let networks = Arc::new(Networks::new(overlay));
    let network = SystemNetwork {
        networks: Arc::clone(&networks),
        namespaces: args.namespaces.clone(),
        layout: layout.clone(),
        holds,
    };
    let local = NodeResources {
        node: own.name.clone(),
        layout: layout.clone(),
        engine: Arc::new(engines.clone()),
        network: Arc::new(network),
        standstills: Arc::new(Standstills::new(layout, holds)),
        mounts: Arc::new(SystemMounts),
        hooks: args.hooks.clone(),
        binds: Binds { allowed: args.allow_bind.clone(), own: vec![args.state.clone(), args.run.clone()] },
        store: Arc::new(store),
        registries: Registries::these(args.pull_layers.iter().cloned()).context("--pull-layers")?,
        journal: Journal::open(&args.state.join("journal.db"))?,
        cluster: Arc::new(ClusterView(Arc::downgrade(&node))),
        promised: Promised::up_to(args.incoming_memory << 20),
        patience: Duration::from_secs(args.patience),
        delta_cache: args.delta_cache << 20,
        arrivals: Arrivals::default(),
        retention: Retention::new(args.retained_memory.map(|mib| mib << 20)),
        kept_files: Arc::new(KeptFiles::new(&args.state, args.retained_files.map(|mib| mib << 20))),
        sent_files: Arc::default(),
        past_moves: PastMoves::open(&args.state.join("past_moves.json")),
        pagers: Arc::new(PagerProgram(beside_us("godwit-pager")?)),
        userfaultfd: args.userfaultfd == Userfaultfd::Auto && can_restore_lazily(&criu).await,
        tracker: tracker(args.tracker),
        ending: CancellationToken::new(),
        doubts: Doubts::default(),
        waits: Waits::default(),
        fatal: tokio::sync::watch::channel(None).0,
        criu: Arc::new(criu.clone()),
    };
    node.equip(Means { local: Arc::new(local), networks, criu, engines, by_policy: restart::by_policy });
    Ok(node)
}

/// The file of this program, which the kernel tells without links.
fn own_file() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own path")
}

/// The CRIU that was installed with godwitd, else that of `scripts/setup`.
fn criu_beside(own: &Path, other: &Path) -> PathBuf {
    let beside = own.with_file_name("criu");
    if beside.exists() { beside } else { other.to_owned() }
}

/// A program of ours that lies beside this one.
fn beside_us(name: &str) -> anyhow::Result<PathBuf> {
    let path = own_file()?.with_file_name(name);
    if path.exists() {
        Ok(path)
    } else {
        bail!("{} is missing; install all of godwit's programs together", path.display())
    }
}

/// A directory with the programs that CRIU is to find before those of the same names elsewhere: our `tar`.
fn criu_programs(run: &Path) -> anyhow::Result<PathBuf> {
    let directory = run.join("criu-programs");
    let (tar, ours) = (directory.join("tar"), beside_us("godwit-tar")?);
    let made = std::fs::create_dir_all(&directory).and_then(|()| match std::fs::remove_file(&tar) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(ours, &tar),
    });
    made.with_context(|| format!("making {}", tar.display()))?;
    Ok(directory)
}

/// What finds written pages here.
fn tracker(wanted: Track) -> Detected {
    let forced = |backend| Detected { backend, reasons: vec!["set by --tracker".into()] };
    match wanted {
        Track::Auto => tracker::detect(),
        Track::Uffd => forced(Backend::Uffd),
        Track::SoftDirty => forced(Backend::SoftDirty),
        Track::None => forced(Backend::None),
    }
}

/// Whether processes can be restored here before their pages are in place.
async fn can_restore_lazily(criu: &Criu) -> bool {
    let reason = match tokio::time::timeout(CRIU_ANSWER, criu.features()).await {
        Ok(Ok(features)) if features.lazy_pages => return true,
        Ok(Ok(_)) => "this kernel does not allow userfaultfd, or CRIU was built without it".to_owned(),
        Ok(Err(error)) => error_chain(&error),
        Err(_) => "CRIU does not answer".to_owned(),
    };
    tracing::warn!(%reason, "services that arrive are restored from images, with all their pages");
    false
}

/// How long CRIU may take to tell what it can do. It does so in milliseconds, and on an emulated or very busy processor
/// in seconds: a node that concludes too early restores services without post-copy until its daemon is restarted.
const CRIU_ANSWER: Duration = Duration::from_secs(20);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_criu_beside_godwitd_is_taken_before_the_other() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("godwitd");
        assert_eq!(criu_beside(&own, Path::new(CRIU)), Path::new(CRIU));
        // scripts/setup makes a link where the distribution's works.
        std::os::unix::fs::symlink("/bin/true", directory.path().join("criu")).unwrap();
        assert_eq!(criu_beside(&own, Path::new(CRIU)), directory.path().join("criu"));
    }
}
