//! What the third member of a cluster can do to a service of the others, while it moves and afterwards: nothing, and
//! less when it has been removed. Needs root.

use std::{
    future::Future,
    net::SocketAddrV4,
    sync::Arc,
    time::{Duration, SystemTime},
};

use godwit_api::v1::{
    CaptureRequest, DecisionRequest, Member, MigrateRequest, NodeInfo, Placement, ServiceRequest,
    SyncMessage, peer_client::PeerClient,
};
use godwit_lab::LabConfig;
use godwit_migration::link::{Link, options};
use godwit_migration::message::{Join, Message, Open, PROTOCOL_VERSION, Purpose, Resume};
use godwit_tests::victim::{ADDRESS, NAME, Victim};
use godwit_tests::{Bed, compile, wait_for};
use godwit_transfer::{Alpn, ConnectOptions, Connection, Identity, NodeName};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tonic::{
    Code,
    transport::{Channel, Endpoint, Uri},
};

/// A lab of three nodes; users of each may act on its own services only, as by default.
fn three(config: &mut LabConfig) {
    config.nodes.push("c".into());
    config.programs.serve_arguments.extend(["--verbs-from", "none"].map(str::to_owned));
}

/// Does something in the place of node `c`, whose daemon is not asked.
fn as_c<T: Send>(bed: &Bed, work: impl AsyncFnOnce(Arc<Identity>) -> T + Send) -> T {
    let identity = Identity::load(&bed.lab().state("c").unwrap().join("identity")).unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    bed.lab().inside("c", || runtime().block_on(work(Arc::new(identity)))).unwrap()
}

fn address(bed: &Bed, node: &str) -> String {
    SocketAddrV4::new(bed.lab().address(node).unwrap(), 7117).to_string()
}

/// The API of node `to` for nodes.
async fn api(
    identity: &Arc<Identity>,
    to: &str,
    address: &str,
) -> Result<PeerClient<Channel>, tonic::transport::Error> {
    let (identity, to, address) = (Arc::clone(identity), NodeName::new(to).unwrap(), address.to_owned());
    let connect = move |_: Uri| {
        let (identity, to, address) = (Arc::clone(&identity), to.clone(), address.clone());
        async move {
            let stream =
                godwit_transfer::connect(&identity, &address, &to, Alpn::Peer, ConnectOptions::default())
                    .await;
            stream.map(TokioIo::new).map_err(std::io::Error::other)
        }
    };
    let endpoint = Endpoint::from_static("http://peer.godwit").timeout(Duration::from_secs(10));
    endpoint.connect_with_connector(tower::service_fn(connect)).await.map(PeerClient::new)
}

/// What node `to` answers to a first message on a connection for moves; nothing where it only closes.
async fn answer(identity: &Identity, to: &str, address: &str, message: Message) -> Option<String> {
    let node = NodeName::new(to).unwrap();
    let mut link = Link::new(Connection::open(identity, address, &node, &options()).await.unwrap());
    link.send(message).await.unwrap();
    let answer = match link.receive().await {
        Ok(Message::Refused(refused)) => Some(refused.reasons.join("; ")),
        Ok(Message::Abort(reason)) => Some(reason.reason),
        Ok(other) => panic!("node {to} answers {}", other.name()),
        Err(_) => None,
    };
    link.close().await;
    answer
}

/// The migration that is under way to node `b`, by its pager.
fn migration(bed: &Bed) -> String {
    let pagers = std::path::Path::new("/run/godwit/labs").join(bed.lab().name()).join("b/pagers");
    let names = std::fs::read_dir(pagers).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(names.len(), 1, "{names:?}");
    names.into_iter().next().unwrap()
}

/// The node that has the service, as a node sees it; and the service.
fn shown(bed: &Bed, node: &str) -> Option<Value> {
    bed.json::<Vec<Value>>(node, &["ps", "-a"]).into_iter().find(|service| service["name"] == NAME)
}

/// The cluster's nodes and their addresses, as a node sees them.
fn members(bed: &Bed, node: &str) -> Vec<(Value, Value)> {
    let nodes = bed.json::<Vec<Value>>(node, &["nodes"]);
    nodes.into_iter().map(|node| (node["name"].clone(), node["address"].clone())).collect()
}

async fn refused<T>(what: &str, code: Code, asked: impl Future<Output = Result<T, tonic::Status>>) {
    match asked.await {
        Ok(_) => panic!("{what} is done"),
        Err(status) => assert_eq!(status.code(), code, "{what}: {status}"),
    }
}

/// All that `c` may try, at nodes `a` and `b`.
fn tries_all(bed: &Bed, migration: &str, service: &Value) {
    let addresses = ["a", "b"].map(|node| (node, address(bed, node)));
    let own = address(bed, "c");
    let before = ["a", "b"].map(|node| members(bed, node));
    let id = service["id"].as_str().unwrap().to_owned();
    let offer = |changes: &[(&str, Value)]| {
        let mut service = service.clone();
        for (name, value) in changes {
            service[*name] = value.clone();
        }
        let (migration, protocol) = ("01HOSTILE".to_owned(), PROTOCOL_VERSION);
        let machine = std::env::consts::ARCH.to_owned();
        Message::Open(Open { protocol, migration, service: service.to_string(), machine, ..Open::default() })
    };
    let offers = [
        // The service itself, of a later life; under another name; and another one under its name.
        offer(&[("epoch", 1_000_000.into())]),
        offer(&[("epoch", 1_000_000.into()), ("name", "other".into()), ("address", "10.88.0.77".into())]),
        offer(&[("id", "01ANOTHER".into()), ("address", "10.88.0.77".into())]),
        offer(&[("id", "01ANOTHER".into()), ("name", "other".into())]),
    ];
    as_c(bed, async move |identity| {
        for (node, address) in &addresses {
            // It takes part in the migration: its conversation, its pages, its beginning and its end.
            let migration = migration.to_owned();
            let purposes = [Purpose::Pages, Purpose::Faults, Purpose::Unknown];
            let joins = purposes
                .map(|purpose| Message::Join(Join { migration: migration.clone(), purpose: purpose.into() }));
            let resume = Message::Resume(Resume { migration: migration.clone() });
            for message in joins.into_iter().chain([resume, Message::Commit, Message::Received]) {
                let name = message.name();
                let answer = answer(&identity, node, address, message).await;
                assert_eq!(answer, None, "{name} at {node}");
            }
            for message in offers.clone() {
                let answer = answer(&identity, node, address, message).await;
                let answer = answer.expect("a reason");
                assert!(answer.contains("redis") || answer.contains("10.88.0.10"), "{answer}");
            }
            let mut api = api(&identity, node, address).await.unwrap();
            // It decides, and acknowledges.
            for acknowledged in [false, true] {
                let request =
                    DecisionRequest { migration_id: migration.clone(), journal: String::new(), acknowledged };
                let answer = api.decision(request).await.unwrap().into_inner();
                assert_eq!(answer.decision(), godwit_api::v1::Decision::Unknown, "{answer:?}");
            }
            // It gives verbs.
            let name = || NAME.to_owned();
            let denied = Code::PermissionDenied;
            let migrate = MigrateRequest { name: name(), to: "c".into(), ..MigrateRequest::default() };
            refused("migrate", denied, api.migrate(migrate)).await;
            refused("cancel", denied, api.cancel(ServiceRequest { name: name() })).await;
            refused("connections", denied, api.connections(ServiceRequest { name: name() })).await;
            let capture =
                CaptureRequest { name: name(), address: ADDRESS.to_string(), ..CaptureRequest::default() };
            refused("capture", denied, api.capture(capture)).await;
            // It speaks for others, and takes the service.
            let info = |name: &str| Some(NodeInfo { name: name.into(), ..NodeInfo::default() });
            let as_another = SyncMessage { info: info("a"), ..SyncMessage::default() };
            refused("news of another", denied, api.sync(as_another)).await;
            for (owner, removed) in [("c", false), ("b", false), ("a", false), ("c", true), ("a", true)] {
                let placement = Placement {
                    service: name(),
                    address: ADDRESS.to_string(),
                    node: owner.into(),
                    epoch: 1 << 30,
                    removed,
                    id: id.clone(),
                    ..Placement::default()
                };
                let news = SyncMessage { placements: vec![placement], ..SyncMessage::default() };
                api.sync(news).await.unwrap();
            }
            // It tells of nodes: of the others at its own address, of itself at theirs, of a stranger.
            let moved = addresses.iter().map(|(other, _)| (*other, own.as_str()));
            let taken = addresses.iter().map(|(_, address)| ("c", address.as_str()));
            for (name, address) in moved.chain(taken).chain([("d", "10.99.0.77:7117")]) {
                let vtep = address.split(':').next().unwrap().to_owned();
                let revision = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
                let revision = u64::try_from(revision).unwrap();
                let member = Member { name: name.into(), address: address.into(), vtep, revision };
                api.sync(SyncMessage { members: vec![member], ..SyncMessage::default() }).await.unwrap();
            }
            // It has a service of its own, and looks at another's packets by that.
            let placed = Placement {
                service: "own".into(),
                address: ADDRESS.to_string(),
                node: "c".into(),
                epoch: 1,
                id: "01OWN".into(),
                ..Placement::default()
            };
            api.sync(SyncMessage { placements: vec![placed.clone()], ..SyncMessage::default() })
                .await
                .unwrap();
            let capture = CaptureRequest {
                name: "own".into(),
                address: ADDRESS.to_string(),
                ..CaptureRequest::default()
            };
            refused("capture of another's packets", denied, api.capture(capture)).await;
            let gone = Placement { removed: true, epoch: 2, ..placed };
            api.sync(SyncMessage { placements: vec![gone], ..SyncMessage::default() }).await.unwrap();
        }
    });
    assert_eq!(["a", "b"].map(|node| members(bed, node)), before);
}

#[test]
fn a_third_member_can_do_nothing_to_a_service_that_moves_between_two_others() {
    let patient = |config: &mut godwit_lab::LabConfig, _: &std::path::Path| {
        three(config);
        // It is frozen while all is tried, and one offer is answered after a quarter of a minute.
        config.programs.serve_arguments.extend(["--patience", "300"].map(str::to_owned));
    };
    let victim = Victim::up_with("third", patient, |_| Vec::new());
    // The service as its definition goes over the wire.
    let database = victim.bed.lab().state("a").unwrap().join("node.db");
    let service = service_in(&database);
    let before = ["a", "b"].map(|node| members(&victim.bed, node));
    let own_address = victim.bed.lab().address("c").unwrap().to_string();
    for node in ["b", "c"] {
        wait_for(&format!("node {node} to know the service"), || {
            shown(&victim.bed, node).is_some_and(|shown| shown["node"] == "a").then_some(())
        });
    }
    // Restored at b and not committed: whoever could take part would decide now.
    let attempt = victim.begin_with_and_hold(
        "a",
        "b",
        &["--mode", "postcopy", "--allow", "postcopy"],
        "destination.restored",
    );
    let migration = migration(&victim.bed);
    tries_all(&victim.bed, &migration, &service);
    // Committed, and pages stay at a.
    victim.hold("source.serving");
    victim.let_go("destination.restored");
    victim.reached("source.serving");
    tries_all(&victim.bed, &migration, &service);
    victim.let_go("source.serving");
    attempt.moved();
    tries_all(&victim.bed, &migration, &service);
    for node in ["a", "b", "c"] {
        wait_for(&format!("node {node} to know where the service is"), || {
            shown(&victim.bed, node).is_some_and(|shown| shown["node"] == "b").then_some(())
        });
    }
    // Of the nodes that it told of nothing has come since, neither here nor in the packet filter.
    for (node, before) in ["a", "b"].into_iter().zip(before) {
        assert_eq!(members(&victim.bed, node), before, "at {node}");
        let filter =
            victim.bed.lab().command(node, "nft").unwrap().args(["list", "ruleset"]).output().unwrap();
        let filter = String::from_utf8(filter.stdout).unwrap();
        assert!(filter.contains(&own_address) && !filter.contains("10.99.0.77"), "at {node}:\n{filter}");
    }
    victim.ends_at_b();
}

/// The only service in a node's state, as JSON.
fn service_in(database: &std::path::Path) -> Value {
    let said = std::process::Command::new("python3")
        .args(["-c", "import sqlite3, sys; print(sqlite3.connect('file:' + sys.argv[1] + '?mode=ro', uri=True).execute(sys.argv[2]).fetchone()[0])"])
        .arg(database)
        .arg("SELECT service FROM service")
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    serde_json::from_slice(&said.stdout).unwrap()
}

/// Whether node `to` hears node `c` at all, on both kinds of connection.
fn hears_c(bed: &Bed, to: &str) -> [bool; 2] {
    let address = address(bed, to);
    as_c(bed, async move |identity| {
        let asked = match api(&identity, to, &address).await {
            Err(_) => false,
            Ok(mut api) => api.sync(SyncMessage::default()).await.is_ok(),
        };
        // In TLS 1.3 a client hears of the refusal of its certificate with the first answer.
        let node = NodeName::new(to).unwrap();
        let offered = match Connection::open(&identity, &address, &node, &options()).await {
            Err(_) => false,
            Ok(connection) => {
                let mut link = Link::new(connection);
                let open = Open { protocol: PROTOCOL_VERSION + 1, ..Open::default() };
                let sent = link.send(Message::Open(open)).await.is_ok();
                sent && matches!(link.receive().await, Ok(Message::Refused(_)))
            }
        };
        [asked, offered]
    })
}

#[test]
fn a_member_that_was_removed_is_refused_by_all_others_also_after_their_restart() {
    let bed = Bed::up_with("third-gone", three);
    for node in ["a", "b"] {
        assert_eq!(hears_c(&bed, node), [true, true], "{node}");
    }
    bed.done("a", &["cluster", "remove", "c"]);
    // b hears of it from a.
    for node in ["a", "b"] {
        wait_for(&format!("node {node} to refuse c"), || {
            (hears_c(&bed, node) == [false, false]).then_some(())
        });
    }
    // c can reach nobody, and does not become a member of anybody's again.
    wait_for("nobody to be in reach of c", || {
        let nodes = bed.json::<Vec<Value>>("c", &["nodes"]);
        let others = nodes.iter().filter(|node| node["name"] != "c");
        others.into_iter().all(|node| node["state"] == "unreachable").then_some(())
    });
    for node in ["a", "b"] {
        bed.lab().stop_node(node).unwrap();
    }
    // One alone, which nobody can tell of the removal again.
    bed.lab().start_node("b").unwrap();
    assert_eq!(hears_c(&bed, "b"), [false, false], "b after its restart");
    bed.lab().start_node("a").unwrap();
    assert_eq!(hears_c(&bed, "a"), [false, false], "a after its restart");
    for node in ["a", "b"] {
        let names: Vec<_> =
            bed.json::<Vec<Value>>(node, &["nodes"]).iter().map(|node| node["name"].clone()).collect();
        assert_eq!(names, ["a", "b"], "{node}");
    }
}

#[test]
fn verbs_from_other_nodes_are_taken_of_those_that_the_operator_names() {
    let bed = Bed::up_with("third-verbs", |config| {
        config.programs.serve_arguments.extend(["--verbs-from", "b"].map(str::to_owned));
    });
    let root = bed.scratch().join("root");
    std::fs::create_dir_all(&root).unwrap();
    compile("reserve.c", &root.join("reserve"));
    let arguments = ["run", "--name", "s", "--rootfs", root.to_str().unwrap(), "--", "/reserve", "uncounted"];
    bed.done("a", &arguments);
    bed.knows("b", "s");
    // Node a takes verbs of b's users.
    bed.done("b", &["migrate", "s", "--to", "b"]);
    wait_for("node a to hear of the move", || {
        let services = bed.json::<Vec<Value>>("a", &["ps", "-a"]);
        services.iter().any(|service| service["name"] == "s" && service["node"] == "b").then_some(())
    });
    // Node b takes none of a's.
    for verb in [&["migrate", "s", "--to", "a"][..], &["cancel", "s"], &["place", "s", "--dry-run"]] {
        let said = bed.godwit("a", verb);
        let words = ["node b does not accept", "from node a", "run it on node b", "--verbs-from a"];
        assert_eq!(said.code, 1, "{said:?}");
        assert!(words.iter().all(|word| said.stderr.contains(word)), "{said:?}");
    }
    bed.done("b", &["migrate", "s", "--to", "a"]);
}
