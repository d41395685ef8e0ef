//! What an earlier move has left in a node's state destroys nothing that the node has now: letting go is tried
//! again while the daemon lives, and a daemon that starts compares identities before it removes anything. And a
//! list of the cluster that names a service which is nowhere can be put right. Needs root.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use godwit_lab::workload::Workload;
use godwit_tests::{
    Bed, CLIENT,
    victim::{NAME, UNKNOWN, Victim},
    wait_for,
};

/// A runc that cannot delete as long as the file that is returned is there.
fn up_with_unreliable_runc(test: &str) -> (Victim, PathBuf) {
    let mut broken = PathBuf::new();
    let victim = Victim::up_with(
        test,
        |config, directory| {
            broken = directory.join("broken");
            let path = directory.join("runc");
            let script = format!(
                "#!/bin/sh\n\
                 case \" $* \" in\n\
                 *' delete '*) [ ! -e {0} ] || {{ echo 'a runc that is broken on purpose' >&2; exit 1; }} ;;\n\
                 esac\n\
                 exec runc \"$@\"\n",
                broken.display()
            );
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            config.programs.runc = Some(path);
        },
        |_| Vec::new(),
    );
    (victim, broken)
}

#[test]
fn a_service_that_came_back_outlives_what_was_left_of_its_move_away() {
    let (mut victim, broken) = up_with_unreliable_runc("came-back");
    fs::write(&broken, "").unwrap();
    let reason = victim.begin("a", "b").moved();
    assert!(reason.contains("broken on purpose"), "{reason}");
    fs::remove_file(&broken).unwrap();
    victim.runs_at("b");
    // Node a takes it back as soon as it has let go of what it held, which needs nobody to restart anything.
    victim.bed.migrate(NAME, "b", "a");
    victim.runs_at("a");
    victim.bed.lab().restart_node("a").unwrap();
    victim.runs_at("a");
    victim.has_its_data();
    victim.ends_at_a();
}

#[test]
fn a_source_that_has_lost_its_journal_does_not_have_the_only_copy_dropped() {
    let victim = Victim::up("lost-journal");
    let attempt = victim.begin_and_hold("source.committed");
    victim.bed.lab().stop_node("a").unwrap();
    let state = victim.bed.lab().state("a").unwrap();
    for file in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        // The last two are there only as long as SQLite needs them.
        let _ = fs::remove_file(state.join(file));
    }
    assert!(!state.join("journal.db").exists());
    victim.let_go("source.committed");
    attempt.end();
    victim.bed.lab().start_node("a").unwrap();
    let stuck = |reason: &str| reason.contains("resolve redis") && reason.contains("journal");
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt" && stuck(&shown.reason)));
    // The doubt and what is known of it outlive the daemon that has it.
    victim.bed.lab().restart_node("b").unwrap();
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt" && stuck(&shown.reason)));
    assert!(victim.bed.done("b", &["events"]).contains("godwit resolve redis --own"));
    // Node a holds it frozen, and does not know why.
    victim.bed.done("a", &["rm", "--force", NAME]);
    assert_eq!(victim.bed.done("b", &["resolve", "--own", NAME]), format!("{NAME}\n"));
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running"));
    assert!(victim.data_found_from(CLIENT));
    victim.never_ran_twice();
}

#[test]
fn where_nobody_knows_whether_the_commit_is_on_the_disk_the_service_stays_frozen_until_it_is_known() {
    let mut victim = Victim::up_with(
        "commit-error",
        |config, _| {
            let faults =
                config.programs.serve_environment.iter_mut().find(|(name, _)| name == "GODWIT_FAILPOINTS");
            // The bytes are on the disk, which answers with an error, and then does not answer at all.
            faults.unwrap().1.push_str(",journal.committed=error,journal.reading=error");
        },
        |_| Vec::new(),
    );
    let said = victim.begin("a", "b").end();
    assert!([1, UNKNOWN].contains(&said.code), "{said:?}");
    victim.has_ended("a");
    // Whether it could still tell the user is a matter of luck.
    let log = fs::read_to_string(victim.bed.lab().log("a").unwrap()).unwrap();
    assert!(log.lines().last().unwrap().contains("stays frozen"), "{log}");
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    victim.never_ran_twice();
    // The disk is well again, and has the commit.
    victim.bed.lab().start_node("a").unwrap();
    victim.runs_at("b");
    victim.has_its_data();
    victim.ends_at_b();
}

/// All files of a node's database, as far as they are there.
fn copy_database(from: &Path, to: &Path) {
    for file in ["node.db", "node.db-wal", "node.db-shm"] {
        let _ = fs::remove_file(to.join(file));
        if from.join(file).exists() {
            fs::copy(from.join(file), to.join(file)).unwrap();
        }
    }
}

#[test]
fn a_service_that_is_on_the_list_only_can_be_taken_off_it() {
    let address = Ipv4Addr::new(10, 88, 0, 20);
    let bed = Bed::up("only-listed");
    let preset = bed.build(Workload::Redis);
    let (state, kept) = (bed.lab().state("b").unwrap(), tempfile::tempdir().unwrap());
    bed.lab().stop_node("b").unwrap();
    copy_database(&state, kept.path());
    bed.lab().start_node("b").unwrap();
    bed.run("b", "s", address, &preset, &[]);
    bed.knows("a", "s");
    // Node b gets a disk of before it had the service.
    bed.lab().stop_node("b").unwrap();
    copy_database(kept.path(), &state);
    bed.lab().start_node("b").unwrap();
    let told = wait_for("node b to hear what the list says", || {
        let said = bed.godwit("b", &["rm", "s"]);
        (said.code == 1 && said.stderr.contains("godwit rm --force s")).then_some(said.stderr)
    });
    assert!(told.contains("list"), "{told}");
    bed.done("b", &["rm", "--force", "s"]);
    wait_for("node a to hear that it is gone", || {
        (bed.godwit("a", &["inspect", "s"]).code != 0).then_some(())
    });
    bed.run("a", "s", address, &preset, &[]);
}
