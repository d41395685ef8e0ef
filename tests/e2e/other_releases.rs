//! What nodes of two releases refuse each other: features that the last release lacks, and versions of the protocol that
//! only one of them speaks. Needs root. The last release is built where it is not there, so the tests that have it run in
//! `make test-full` only.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4},
    process::{Child, Stdio},
    sync::mpsc,
    thread,
};

use godwit_lab::workload::Workload;
use godwit_migration::{
    link::{Link, options},
    message::{Accepted, Message, OLDEST_PROTOCOL_VERSION, Open, PROTOCOL_VERSION, Refused, Versions},
};
use godwit_tests::{Bed, PATIENCE, Said, podman::Podmans, release, tier, victim::Victim};
use godwit_transfer::{Alpn, Identity, ListenOptions, Listener, NodeName};
use rustix::{
    fs::{Mode, OFlags},
    pty::OpenptFlags,
};

use crate::upgrade::{inspect, install};

/// A command of `godwit exec` on a terminal, which has begun.
struct OnTerminal {
    terminal: fs::File,
    godwit: Child,
}

impl OnTerminal {
    fn begins(bed: &Bed, node: &str, service: &str) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = rustix::pty::openpt(flags).unwrap();
        rustix::pty::unlockpt(&terminal).unwrap();
        let end = rustix::fs::open(
            rustix::pty::ptsname(&terminal, Vec::new()).unwrap(),
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let end = end.unwrap();
        let stream = || Stdio::from(end.try_clone().unwrap());
        let mut command =
            bed.command(node, &["exec", "-it", service, "sh", "-c", "echo begun; exec sleep 100000"]);
        let godwit = command.stdin(stream()).stdout(stream()).stderr(stream()).spawn().unwrap();
        let mut begins = Self { terminal: fs::File::from(terminal), godwit };
        let (mut seen, mut buffer) = (String::new(), [0; 256]);
        while !seen.contains("begun") {
            let length = begins.terminal.read(&mut buffer).unwrap();
            seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        begins
    }

    /// The user interrupts it.
    fn end(mut self) {
        self.terminal.write_all(b"\x03").unwrap();
        self.godwit.wait().unwrap();
    }
}

/// Asks something of godwit on node `a` that is refused: each of the words is in what it says.
fn is_refused(bed: &Bed, asked: &[&str], words: &[&str]) {
    let said: Said = bed.godwit("a", asked);
    println!("{asked:?}: {} {}{}", said.code, said.stdout, said.stderr);
    assert_ne!(said.code, 0, "{asked:?}: {said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "{asked:?}: {word}: {said:?}");
    }
}

#[test]
fn what_the_last_release_lacks_is_refused_with_its_node_its_release_and_the_feature() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let release = old.file_name().unwrap().to_str().unwrap();
    let bed = Bed::up_with("lacks", |config| {
        install(config, &["b"], &old);
        config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned));
    });
    let storage = bed.scratch().join("storage");
    fs::create_dir(&storage).unwrap();
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sh", "-c", "exec sleep 100000"].map(str::to_owned).to_vec();
    let at = |last| Ipv4Addr::new(10, 88, 0, last);
    bed.run("a", "plain", at(10), &preset, &[]);
    bed.run("a", "keeps", at(11), &preset, &["-v", "data:/srv"]);
    let mount = format!("type=bind,src={},dst=/bound", storage.display());
    bed.run("a", "binds", at(12), &preset, &["--mount", &mount]);
    bed.run("b", "there", at(13), &preset, &[]);
    bed.run("a", "named", at(14), &preset, &["--network-alias", "other"]);
    bed.knows("a", "there");

    // Of a destination.
    let (godwit, moved) = (format!("godwit {release}"), ["migrate", "--to", "b"]);
    let too_old = format!("node b refuses: its {godwit} is too old for ");
    let refused = |more: &[&str], feature: &str| {
        is_refused(&bed, &[&moved, more].concat(), &[&format!("{too_old}{feature}")]);
    };
    refused(&["keeps"], "volumes; upgrade it");
    refused(&["binds", "--mount", "/bound=copy"], "volumes; upgrade it");
    refused(&["binds", "--mount", "/bound=shared"], "storage that nodes share; upgrade it");
    refused(&["named"], "services with a --network-alias; upgrade it");
    bed.done("a", &["policy", "set", "plain", "--follow-clients"]);
    refused(&["plain"], "services that follow their clients; upgrade it");
    bed.done("a", &["policy", "clear", "plain"]);
    let command = OnTerminal::begins(&bed, "a", "plain");
    refused(&["plain"], "commands of `godwit exec` on a terminal, and one runs in service plain");
    command.end();
    let closed = format!("node b ({godwit}) closed the connection without an answer");
    is_refused(&bed, &["prepare", "plain", "--to", "b"], &[&closed, "cannot be prepared for: upgrade it"]);
    let checked = bed.godwit("a", &["check", "plain", "--to", "b"]);
    assert!(checked.code == 2 && checked.stdout.contains(&closed), "{checked:?}");

    // Of a daemon that a newer godwit asks: it would make the container itself, and leave its health check out.
    let run =
        ["--node", "b", "run", "--engine", "podman", "--health-cmd", "true", "--image", "localhost/cache:1"];
    is_refused(&bed, &run, &["install the same godwit on both nodes"]);
    let add = ["--node", "b", "image", "add-platform", "shop/web:1", "arm64"];
    is_refused(&bed, &add, &["install the same godwit on both nodes"]);

    // Of the node that has the service.
    let owner = format!("service there is on node b, whose godwitd {release} is older and ");
    for (asked, feature) in [
        (&["prepare", "there", "--to", "a"][..], "prepares no moves"),
        (&["check", "there", "--to", "a"], "checks no moves"),
        (&["place", "there", "--dry-run"], "places no services"),
        (&["policy", "show", "there"], "has no policies"),
        (&["wait", "there"], "cannot be waited at"),
        // It would be passed over.
        (
            &["migrate", "there", "--to", "a", "--mount", "/bound=skip"],
            "does not know what becomes of mounts",
        ),
    ] {
        is_refused(&bed, asked, &[&format!("{owner}{feature}")]);
    }

    // Of a node.
    for (verb, feature) in [("cordon", "cannot be cordoned"), ("drain", "cannot be drained")] {
        let too_old = format!("godwitd {release} of node b is older and {feature}");
        is_refused(&bed, &["node", verb, "b"], &[&too_old]);
    }

    // All run where they were, and what both releases know is done.
    for (node, name) in [("a", "plain"), ("a", "keeps"), ("a", "binds"), ("a", "named"), ("b", "there")] {
        assert_eq!(inspect(&bed, node, name)["state"], "running", "{name}");
    }
    bed.migrate("plain", "a", "b");
    bed.migrate("there", "b", "a");
    bed.migrate_so("binds", "a", "b", &["--mount", "/bound=skip"]);
}

/// Leaves `--podman` out of what the daemon of node `b` is started with.
const WITHOUT_PODMAN: &str = r#"
if [ "$GODWIT_NODE" = b ]; then
    for word; do
        shift
        case $word in
            --podman) skip=1 ;;
            *) if [ "$skip" ]; then skip=; else set -- "$@" "$word"; fi ;;
        esac
    done
fi
exec "$@"
"#;

#[test]
fn a_container_of_another_engine_stays_where_the_last_release_is_asked_to_take_it() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let podmans = Podmans::new();
    let bed = Bed::up_with("lacks-engines", |config| {
        install(config, &["b"], &old);
        podmans.equip(config);
        config.programs.serve_through = ["sh", "-c", WITHOUT_PODMAN, "sh"].map(str::to_owned).into();
    });
    let (preset, image) = (bed.build(Workload::Busybox), "localhost/sleeps:1");
    podmans.image(&bed, &["a"], &preset, image);
    let words = ["run", "--detach", "--name", "kept", "--network", "none", image, "sleep", "100000"];
    podmans.done(&bed, "a", &words);
    bed.done("a", &["adopt", "podman:kept", "--ip", "10.88.0.10"]);
    let release = old.file_name().unwrap().to_str().unwrap();
    let reason = format!("node b refuses: its godwit {release} is too old for containers of other engines");
    is_refused(&bed, &["migrate", "kept", "--to", "b"], &[&reason]);
    assert_eq!(inspect(&bed, "a", "kept")["state"], "running");
    podmans.clear(&bed);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn identity(bed: &Bed, node: &str) -> Identity {
    Identity::load(&bed.lab().state(node).unwrap().join("identity")).unwrap()
}

/// Where a node takes connections of others.
fn address(bed: &Bed, node: &str) -> String {
    SocketAddrV4::new(bed.lab().address(node).unwrap(), 7117).to_string()
}

/// What node `b` answers to an offer of node `a` that speaks these versions, of a service that nobody can read.
fn answer_to(bed: &Bed, (oldest, newest): (u32, u32)) -> String {
    let (identity, address) = (identity(bed, "a"), address(bed, "b"));
    let converse = async {
        let node = NodeName::new("b").unwrap();
        let connection = godwit_transfer::Connection::open(&identity, &address, &node, &options()).await;
        let mut link = Link::new(connection.unwrap());
        let open = Open { protocol: oldest, newest_protocol: newest, service: "-".into(), ..Open::default() };
        link.send(Message::Open(open)).await.unwrap();
        let answer = match link.receive().await {
            Ok(Message::Refused(refused)) => refused.reasons.join("; "),
            Ok(other) => panic!("{}", other.name()),
            Err(error) => error.to_string(),
        };
        link.close().await;
        answer
    };
    bed.lab().inside("a", || runtime().block_on(converse)).unwrap()
}

#[test]
fn the_last_release_and_one_that_does_not_speak_its_version_refuse_each_other_and_name_both() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let bed = Bed::up_with("ranges-old", |config| install(config, &["b"], &old));
    // It speaks 3 alone: one that keeps 3 is heard out, whatever more that speaks.
    for newest in [0, 3, 4, 9] {
        let answer = answer_to(&bed, (3, newest));
        assert!(answer.contains("a service that cannot be read"), "3 to {newest}: {answer}");
    }
    for (oldest, newest) in [(4, 0), (4, 6), (9, 9), (1, 2)] {
        let answer = answer_to(&bed, (oldest, newest));
        let both = format!("it speaks version 3 of the migration protocol and node a version {oldest}");
        assert!(answer.contains(&both), "{oldest} to {newest}: {answer}");
    }
}

/// Does `deed` while a program in the place of node `b`, whose daemon does not run, answers the next offer of a service; the
/// offer, and what came of the deed.
fn while_b_answers<T>(
    bed: &Bed,
    answer: impl FnOnce(&Open) -> Message + Send,
    deed: impl FnOnce() -> T,
) -> (Open, T) {
    let (identity, address) = (identity(bed, "b"), address(bed, "b"));
    let (listens, listening) = mpsc::channel();
    let serve = async {
        let listener = Listener::bind(address.parse().unwrap(), &identity, ListenOptions::default());
        let mut listener = listener.await.unwrap();
        listens.send(()).unwrap();
        let accepted = loop {
            let accepted = listener.accept().await;
            // Node a has other questions as well.
            if accepted.alpn == Alpn::Data {
                break accepted;
            }
        };
        let connection = godwit_transfer::Connection::accept(accepted, &options()).await;
        let mut link = Link::new(connection.unwrap());
        let Ok(Message::Open(open)) = link.receive().await else { panic!("no offer") };
        link.send(answer(&open)).await.unwrap();
        // The other side closes it.
        while link.receive().await.is_ok() {}
        link.close().await;
        open
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            bed.lab()
                .inside("b", || runtime().block_on(async { tokio::time::timeout(PATIENCE * 4, serve).await }))
        });
        listening.recv().unwrap();
        let done = deed();
        (serving.join().unwrap().unwrap().expect("an offer in time"), done)
    })
}

#[test]
fn a_destination_of_another_range_is_refused_with_both_and_its_choice_is_not_believed() {
    let victim = Victim::up("ranges");
    victim.bed.lab().stop_node("b").unwrap();
    // A release that does not speak any of these versions any more.
    let newer = Versions::offered(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2);
    let refuses = |open: &Open| {
        let reason = newer.objection("b", Versions::offered(open.protocol, open.newest_protocol), "a");
        Message::Refused(Refused { reasons: vec![reason] })
    };
    let (open, reason) = while_b_answers(&victim.bed, refuses, || victim.begin("a", "b").aborted());
    // The whole range is offered: what the two have in common is for the destination to find.
    assert_eq!((open.protocol, open.newest_protocol), (OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION));
    assert_eq!(
        reason,
        format!(
            "node b refuses: it speaks {newer} of the migration protocol and node a {}; install a newer godwit on node a",
            Versions::OWN
        )
    );
    victim.runs_at_a_whatever_b_says();

    // It accepts, in versions that this one did not offer.
    for protocol in [OLDEST_PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
        let accepts = |_: &Open| Message::Accepted(Accepted { protocol, ..Accepted::default() });
        let (_, reason) = while_b_answers(&victim.bed, accepts, || victim.begin("a", "b").aborted());
        assert!(reason.contains("node b") && reason.contains("that was not offered"), "{protocol}: {reason}");
        victim.runs_at_a_whatever_b_says();
    }
    victim.bed.lab().start_node("b").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}
