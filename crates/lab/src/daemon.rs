//! The daemons of a lab: identity, start, readiness, and their sudden end.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use godwit_api::v1::{CreateTokenRequest, NodeInfo, NodesRequest, node_client::NodeClient};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::{
    config::{LabConfig, NetworkBackend, PEER_PORT, SERVICE_SUBNET, UPLINK},
    error::{Context, LabError},
    handle::Lab,
    machine, netns, openvswitch, process, programs, registry,
};

const PROGRAM: &str = "godwitd";
/// How long a daemon may take until it answers.
const PATIENCE: Duration = Duration::from_secs(120);
/// The same, for one in a machine that is emulated on a busy host.
const MACHINE_PATIENCE: Duration = Duration::from_secs(180);
/// How long a killed daemon may take to end.
const END_PATIENCE: Duration = Duration::from_secs(60);
/// First and longest pause between two attempts to reach a daemon that starts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// How long a join token is good for; it is used at once.
const TOKEN_SECONDS: u32 = 300;

/// Whether a node's programs are where they should be.
pub(crate) fn is_installed(config: &LabConfig, node: &str) -> Result<(), LabError> {
    programs::of_node(config, node, PROGRAM).map(|_| ())
}

/// Name of a daemon's pid record.
pub(crate) fn role(node: &str) -> String {
    format!("daemon-{node}")
}

/// Founds the cluster on the first node, lets the others join, and waits until all see each other.
pub(crate) fn start_cluster(lab: &Lab) -> Result<(), LabError> {
    let nodes = &lab.config.nodes;
    let Some((founder, others)) = nodes.split_first() else { return Ok(()) };
    found(lab, founder)?;
    wait_ready(lab, founder, 1)?;
    for node in others {
        let token = token(lab, founder, node)?;
        join(lab, node, &token)?;
    }
    nodes.iter().try_for_each(|node| wait_ready(lab, node, nodes.len()))
}

fn found(lab: &Lab, node: &str) -> Result<(), LabError> {
    if lab.machine(node).is_some() {
        return machine::node::found(lab, node);
    }
    prepare(lab, node)?;
    let mut command = godwitd(lab, node)?;
    command.arg("init").arg("--state").arg(lab.paths.node_state(node));
    command.args(["--cluster", lab.name(), "--node", node, "--listen", &listen(lab, node)?]);
    finish(lab, node, "init", command)?;
    serve(lab, node)
}

fn join(lab: &Lab, node: &str, token: &str) -> Result<(), LabError> {
    if lab.machine(node).is_some() {
        return machine::node::join(lab, node, token);
    }
    prepare(lab, node)?;
    let mut command = godwitd(lab, node)?;
    command.arg("join").arg("--state").arg(lab.paths.node_state(node));
    command.args(["--node", node, "--listen", &listen(lab, node)?, "--", token]);
    finish(lab, node, "join", command)?;
    serve(lab, node)
}

fn prepare(lab: &Lab, node: &str) -> Result<(), LabError> {
    for directory in [lab.paths.node_state(node), lab.paths.node_run(node)] {
        fs::create_dir_all(&directory).context("creating", directory.display())?;
    }
    match lab.config.network_backend {
        NetworkBackend::Kernel => Ok(()),
        NetworkBackend::OpenVswitch => openvswitch::start(lab, node),
    }
}

fn listen(lab: &Lab, node: &str) -> Result<String, LabError> {
    Ok(SocketAddr::new(IpAddr::V4(lab.address(node)?), PEER_PORT).to_string())
}

fn godwitd(lab: &Lab, node: &str) -> Result<Command, LabError> {
    lab.command(node, programs::of_node(&lab.config, node, PROGRAM)?)
}

/// The same by way of the command that the lab's daemons are started through, if there is one.
fn godwitd_through(lab: &Lab, node: &str) -> Result<Command, LabError> {
    let Some((first, words)) = lab.config.programs.serve_through.split_first() else {
        return godwitd(lab, node);
    };
    let mut command = lab.command(node, first)?;
    command.args(words).arg(programs::of_node(&lab.config, node, PROGRAM)?);
    Ok(command)
}

/// Runs a verb of the daemon that ends by itself.
fn finish(lab: &Lab, node: &str, verb: &str, mut command: Command) -> Result<(), LabError> {
    let output = command.stdin(Stdio::null()).output().context("running", PROGRAM)?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Program {
        program: format!("{PROGRAM} {verb} on node {node}"),
        lab: lab.name().to_owned(),
        status: output.status,
        output: programs::last_lines(&String::from_utf8_lossy(&output.stderr)),
    })
}

/// Starts a node's daemon.
pub(crate) fn serve(lab: &Lab, node: &str) -> Result<(), LabError> {
    if lab.machine(node).is_some() {
        return machine::node::start_daemon(lab, node);
    }
    if let Some(running) = registry::process(&lab.paths, &role(node)) {
        return Err(LabError::Refused {
            node: node.to_owned(),
            request: "to start",
            message: format!("it runs already as process {}", running.pid),
        });
    }
    let given = &lab.config.programs;
    let log = lab.paths.log(node);
    let output =
        fs::File::options().create(true).append(true).open(&log).context("opening", log.display())?;
    let mut command = godwitd_through(lab, node)?;
    command.arg("serve").arg("--state").arg(lab.paths.node_state(node));
    command.arg("--run").arg(lab.paths.node_run(node));
    command.args(["--node", node, "--listen", &listen(lab, node)?, "--uplink", UPLINK]);
    command.args(["--subnet", &format!("{}/{}", SERVICE_SUBNET.0, SERVICE_SUBNET.1)]);
    command.args(["--network-backend", &lab.config.network_backend.to_string()]);
    command.arg("--cgroup-parent").arg(Path::new("/").join(lab.paths.cgroup()).join(node));
    for (option, path) in [("--criu", &given.criu), ("--runc", &given.runc)] {
        if let Some(path) = path {
            command.arg(option).arg(path);
        }
    }
    if !given.serve_arguments.iter().any(|argument| argument == "--verbs-from") {
        // All nodes are one person's.
        command.args(["--verbs-from", "all"]);
    }
    command.args(&given.serve_arguments).stdout(output);
    command.envs(given.serve_environment.iter().map(|(name, value)| (name, value)));
    programs::start(lab, &role(node), command, &log).map(|_| ())
}

/// Ends a node's daemon at once, if it runs.
pub(crate) fn kill(lab: &Lab, node: &str) -> Result<(), LabError> {
    if lab.machine(node).is_some() {
        return machine::node::kill_daemon(lab, node);
    }
    match registry::process(&lab.paths, &role(node)) {
        Some(process) => process::kill(lab.name(), process, END_PATIENCE),
        None => Ok(()),
    }
}

/// Waits until a node's daemon answers and sees at least `count` nodes ready.
pub(crate) fn wait_ready(lab: &Lab, node: &str, count: usize) -> Result<(), LabError> {
    let patience = if lab.machine(node).is_some() { MACHINE_PATIENCE } else { PATIENCE };
    let deadline = Instant::now() + patience;
    let mut pause = PAUSES.0;
    loop {
        let reason = match nodes(lab, node) {
            Ok(nodes) => {
                let ready = nodes.iter().filter(|node| node.state == "ready").count();
                if ready >= count {
                    return Ok(());
                }
                format!("it sees {ready} of {count} nodes ready")
            }
            Err(reason) => reason,
        };
        // A machine's is looked after by its systemd.
        if lab.machine(node).is_none() && registry::process(&lab.paths, &role(node)).is_none() {
            return Err(LabError::NotReady {
                node: node.to_owned(),
                lab: lab.name().to_owned(),
                seconds: 0,
                reason: format!("the daemon has ended: {}", programs::tail(&lab.paths.log(node))),
                log: lab.paths.log(node),
            });
        }
        if Instant::now() >= deadline && lab.machine(node).is_some() {
            return Err(machine::node::not_ready(lab, node, patience, &reason));
        }
        if Instant::now() >= deadline {
            return Err(LabError::NotReady {
                node: node.to_owned(),
                lab: lab.name().to_owned(),
                seconds: patience.as_secs(),
                reason,
                log: lab.paths.log(node),
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn nodes(lab: &Lab, node: &str) -> Result<Vec<NodeInfo>, String> {
    call(lab, node, async |mut client| Ok(client.nodes(NodesRequest {}).await?.into_inner().nodes))
}

fn token(lab: &Lab, founder: &str, node: &str) -> Result<String, LabError> {
    let request = CreateTokenRequest { node: node.to_owned(), valid_s: TOKEN_SECONDS, again: false };
    call(lab, founder, async |mut client| Ok(client.create_token(request).await?.into_inner().token))
        .map_err(|message| LabError::Refused { node: founder.to_owned(), request: "a join token", message })
}

/// One request to a node's daemon over its unix socket, from a thread of its own: the caller may be
/// inside an async runtime.
fn call<T: Send>(
    lab: &Lab,
    node: &str,
    request: impl AsyncFnOnce(NodeClient<Channel>) -> Result<T, tonic::Status> + Send,
) -> Result<T, String> {
    let socket = lab.paths.socket(node);
    netns::on_thread(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|error| error.to_string())?.block_on(async {
            let connector = tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
            });
            // The URI is not used: the connector knows where to go.
            let endpoint = Endpoint::from_static("http://godwitd").timeout(END_PATIENCE);
            let channel = endpoint.connect_with_connector(connector).await;
            let channel = channel.map_err(|error| format!("its socket does not answer: {error}"))?;
            request(NodeClient::new(channel)).await.map_err(|status| status.message().to_owned())
        })
    })
    .map_err(|error| error.to_string())?
}
