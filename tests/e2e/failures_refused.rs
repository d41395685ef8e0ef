//! Destinations that say no, each for its own reason. Needs root.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
};

use godwit_lab::LabConfig;
use godwit_migration::link::{Link, options};
use godwit_migration::message::{Message, Open, PROTOCOL_VERSION};
use godwit_tests::hold::inject;
use godwit_tests::victim::{ADDRESS, NAME, Victim};
use godwit_transfer::{Connection, Identity, NodeName};

const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 99);

#[test]
fn a_name_that_is_taken_at_the_destination() {
    let victim = Victim::up_split("name-taken", NAME, ELSEWHERE);
    for _ in 0..2 {
        let reason = victim.aborted();
        assert!(reason.starts_with("node b refuses: ") && reason.contains("redis"), "{reason}");
        victim.runs_at_a_whatever_b_says();
    }
    victim.bed.done("b", &["rm", "--force", NAME]);
    victim.bed.lab().heal("b", "client").unwrap();
    victim.moves_in_the_end();
}

#[test]
fn an_address_that_is_taken_at_the_destination() {
    let victim = Victim::up_split("addr-taken", "other", ADDRESS);
    let reason = victim.aborted();
    assert_eq!(reason, "node b refuses: the address 10.88.0.10 is taken by service other on node b");
    victim.runs_at_a_whatever_b_says();
    // Each node leads to its own until one is removed, and says that they are two.
    assert!(victim.data_found_from("a") && !victim.data_found_from("b"));
    let shown = victim.shown("a", |shown| shown.is_some_and(|shown| !shown.reason.is_empty()));
    let reason = shown.unwrap().reason;
    assert!(reason.contains("10.88.0.10 is also that of service other on node b"), "{reason}");
    victim.bed.done("b", &["rm", "--force", "other"]);
    assert!(victim.data_found_from("b"), "the node that has none of its own any more leads to the other");
    victim.shown("a", |shown| shown.is_some_and(|shown| shown.reason.is_empty()));
    victim.bed.lab().heal("b", "client").unwrap();
    victim.moves_in_the_end();
}

#[test]
fn no_memory_at_the_destination() {
    let victim = Victim::up_with(
        "no-memory",
        |config, _| config.programs.serve_arguments.extend(["--incoming-memory", "1"].map(str::to_owned)),
        |_| Vec::new(),
    );
    let reason = victim.aborted();
    assert!(reason.starts_with("node b refuses: node b has 1 MiB of memory"), "{reason}");
    victim.is_as_before();
    victim.ends_at_a();
}

/// A tmpfs of the given size over the images of a node.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn over_images_of_b(victim: &Victim, size: &str) -> Self {
        let lab = victim.bed.lab();
        lab.stop_node("b").unwrap();
        let images = lab.state("b").unwrap().join("images");
        let options = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "small"]).arg(&images).status();
        assert!(mounted.unwrap().success());
        lab.start_node("b").unwrap();
        Self(images)
    }

    fn end(self, victim: &Victim) {
        victim.bed.lab().stop_node("b").unwrap();
        assert!(Command::new("umount").arg(&self.0).status().unwrap().success());
        victim.bed.lab().start_node("b").unwrap();
    }
}

#[test]
fn no_disk_at_the_destination() {
    let victim = Victim::up("no-disk");
    let disk = SmallDisk::over_images_of_b(&victim, "1m");
    let reason = victim.aborted();
    assert!(reason.starts_with("node b refuses: its disk has") && reason.contains("are needed"), "{reason}");
    disk.end(&victim);
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_disk_that_fills_up_on_the_way() {
    let victim = Victim::up("full-disk");
    let disk = SmallDisk::over_images_of_b(&victim, "128m");
    let attempt = victim.begin_and_hold("destination.reserved");
    let filler = fs::File::create(disk.0.join("filler")).unwrap();
    let free = rustix::fs::fstatvfs(&filler).unwrap();
    let all = free.f_bavail * free.f_frsize - (1 << 20);
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, all).unwrap();
    drop(filler);
    victim.let_go("destination.reserved");
    let reason = attempt.aborted();
    assert!(reason.contains("node b gave up") && reason.contains("No space left"), "{reason}");
    let left: Vec<_> = fs::read_dir(disk.0.join("tmp")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
    disk.end(&victim);
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn an_image_that_the_destination_lacks_and_the_source_cannot_send() {
    let victim = Victim::up("no-image");
    let images = victim.bed.lab().state("a").unwrap().join("images");
    let (blobs, away) = (images.join("blobs/sha256"), images.join("blobs/away"));
    fs::rename(&blobs, &away).unwrap();
    fs::create_dir(&blobs).unwrap();
    let reason = victim.aborted();
    assert!(
        reason.starts_with("node b refuses: layer sha256:")
            && reason.ends_with("is missing there and the source cannot send it"),
        "{reason}"
    );
    fs::remove_dir(&blobs).unwrap();
    fs::rename(&away, &blobs).unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_mount_whose_source_the_destination_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let shared = directory.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let mount = format!("type=bind,source={},target=/shared,move=skip", shared.display());
    let victim = Victim::up_with(
        "no-mount",
        |config, _| config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned)),
        |preset| {
            fs::create_dir(preset.rootfs.join("shared")).unwrap();
            vec!["--mount".to_owned(), mount]
        },
    );
    // Nodes of a lab share their files, so the source lacks it as well; it keeps what it has mounted.
    let away = shared.with_extension("away");
    fs::rename(&shared, &away).unwrap();
    let reason = victim.aborted();
    assert!(
        reason.starts_with("node b refuses: ")
            && reason.contains(&format!(
                "{}, which is mounted into the service, does not exist",
                shared.display()
            )),
        "{reason}"
    );
    fs::rename(&away, &shared).unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_destination_that_is_down() {
    let victim = Victim::up("down");
    victim.bed.lab().stop_node("b").unwrap();
    let reason = victim.aborted();
    assert!(reason.starts_with("node b cannot be reached"), "{reason}");
    victim.bed.lab().start_node("b").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

/// Speaks to node `b` as node `a` does, and returns its answer to one message.
fn ask_b(victim: &Victim, message: Message) -> String {
    let lab = victim.bed.lab();
    let identity = Identity::load(&lab.state("a").unwrap().join("identity")).unwrap();
    let address = format!("{}:7117", lab.address("b").unwrap());
    let converse = async {
        let node = NodeName::new("b").unwrap();
        let connection = Connection::open(&identity, &address, &node, &options()).await.unwrap();
        let mut link = Link::new(connection);
        link.send(message).await.unwrap();
        let answer = match link.receive().await {
            Ok(Message::Refused(refused)) => refused.reasons.join("; "),
            Ok(other) => panic!("{}", other.name()),
            Err(error) => error.to_string(),
        };
        link.close().await;
        answer
    };
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    lab.inside("a", || runtime().block_on(converse)).unwrap()
}

#[test]
fn another_version_of_the_protocol() {
    let victim = Victim::up("version");
    let protocol = PROTOCOL_VERSION + 1;
    let open = Open { protocol, migration: "01OTHER".into(), service: "not JSON".into(), ..Open::default() };
    let answer = ask_b(&victim, Message::Open(open));
    assert!(
        answer.contains(&format!("version {PROTOCOL_VERSION} of the migration protocol"))
            && answer.contains(&format!("version {protocol}"))
            && answer.ends_with("install a newer godwit on node b"),
        "{answer}"
    );
    // One that speaks this one too is heard out: what it says then is refused.
    let (oldest, newest_protocol) = (PROTOCOL_VERSION, protocol + 7);
    let open = Open { protocol: oldest, newest_protocol, service: "not JSON".into(), ..Open::default() };
    let answer = ask_b(&victim, Message::Open(open));
    assert!(!answer.contains("version"), "{answer}");
    // Nor is a message out of turn, or a name that would leave its directory, believed.
    ask_b(&victim, Message::Commit);
    let service = serde_json::json!({ "name": "../../x" }).to_string();
    ask_b(&victim, Message::Open(Open { protocol: PROTOCOL_VERSION, service, ..Open::default() }));
    assert!(!Path::new("/var/lib/godwit/labs/x").exists());
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_destination_that_cannot_write_its_journal_says_so() {
    let failing = |config: &mut LabConfig, _: &Path| inject(config, "journal.begin.destination");
    let victim = Victim::up_with("no-journal", failing, |_| Vec::new());
    let reason = victim.aborted();
    assert!(reason.starts_with("node b gave up: ") && reason.contains("fault"), "{reason}");
    victim.is_as_before();
    victim.ends_at_a();
}
