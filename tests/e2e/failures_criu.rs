//! CRIU that cannot dump, cannot restore, hangs or is killed. Needs root.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
};

use godwit_lab::LabConfig;
use godwit_tests::{
    victim::{NAME, Victim},
    wait_for,
};

/// Where scripts/setup puts CRIU.
const CRIU: &str = "/usr/local/lib/godwit/bin/criu";

/// Where a move is held that has found nothing in the way.
const POINT: &str = "source.copied";

/// A CRIU that does as the word in the file `mode` says, on one node only and only where it is given
/// work (`swrk`): `broken` ends with an error, `killed` by SIGKILL, `hanging` never, and `older` says that it is one of an
/// older release. `started` tells that it has begun.
fn unreliable(config: &mut LabConfig, directory: &Path, node: &str) {
    let address = config.address(node).unwrap();
    let path = directory.join("criu");
    let here = directory.display();
    let older = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/older.py");
    let older = older.display();
    let script = format!(
        "#!/bin/sh\n\
         case \"$1 $(ip -4 -o addr show uplink0)\" in\n\
         swrk*{address}/*|--ps-socket*{address}/*)\n\
         \techo $$ > {here}/started\n\
         \tcase \"$(cat {here}/mode)\" in\n\
         \tbroken) echo 'a CRIU that is broken on purpose' >&2; exit 1 ;;\n\
         \tkilled) kill -KILL $$ ;;\n\
         \thanging) exec sleep 1000 ;;\n\
         \tolder) exec python3 {older} {CRIU} \"$@\" ;;\n\
         \tesac ;;\n\
         esac\n\
         exec {CRIU} \"$@\"\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(directory.join("mode"), "").unwrap();
    config.programs.criu = Some(path);
}

fn up_with_unreliable_criu(test: &str, node: &str) -> (Victim, PathBuf) {
    let mut at = PathBuf::new();
    let change = |config: &mut LabConfig, directory: &Path| {
        unreliable(config, directory, node);
        at = directory.to_owned();
    };
    let victim = Victim::up_with(test, change, |_| Vec::new());
    // A daemon asks CRIU for its version once, and refuses services without an answer.
    assert!(victim.bed.godwit(node, &["doctor"]).stdout.contains("criu"));
    (victim, at)
}

/// The CRIU of a node does as these words say, one after the other: each time the service is kept for
/// a reason that `right` accepts, and lives on. With a CRIU that works it moves in the end.
fn kept_by_each(victim: Victim, at: &Path, modes: &[&str], right: impl Fn(&str) -> bool) {
    for mode in modes {
        fs::write(at.join("mode"), mode).unwrap();
        let reason = victim.aborted();
        assert!(right(&reason), "{mode}: {reason}");
        victim.is_as_before();
    }
    fs::write(at.join("mode"), "").unwrap();
    victim.moves_in_the_end();
}

/// The CRIU of a node hangs: the migration can be cancelled, and the service lives on.
fn cancelled_while_criu_hangs(test: &str, node: &str) {
    let (victim, at) = up_with_unreliable_criu(test, node);
    fs::write(at.join("mode"), "hanging").unwrap();
    let attempt = victim.begin("a", "b");
    hangs(&at);
    assert_eq!(victim.bed.godwit("a", &["cancel", NAME]).code, 0);
    let reason = attempt.aborted();
    assert!(reason.contains("cancelled"), "{reason}");
    victim.is_as_before();
    fs::write(at.join("mode"), "").unwrap();
    victim.moves_in_the_end();
}

/// Waits until CRIU has begun to hang.
fn hangs(at: &Path) {
    let started = at.join("started");
    wait_for("a CRIU that hangs", || {
        let pid = fs::read_to_string(&started).ok()?.trim().to_owned();
        fs::read_to_string(format!("/proc/{pid}/comm")).ok().filter(|name| name == "sleep\n")
    });
}

#[test]
fn a_service_that_criu_cannot_dump_goes_on() {
    // A unix socket whose other end is outside of the container: CRIU refuses it.
    let victim = Victim::up_with(
        "no-dump",
        |config, _| config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned)),
        |preset| {
            preset.command.extend(["--unixsocket", "/outside/redis.sock"].map(str::to_owned));
            fs::create_dir_all(preset.rootfs.join("outside")).unwrap();
            let outside = tests_directory(preset);
            vec!["--mount".to_owned(), format!("type=bind,source={outside},target=/outside,move=skip")]
        },
    );
    let socket = PathBuf::from(tests_directory(&victim.preset)).join("redis.sock");
    let connect = || {
        let mut outside = UnixStream::connect(&socket).unwrap();
        is_answered(&mut outside);
        outside
    };
    let what = "connected to a process outside of the container";
    // Twice, the second time with what the first may have left.
    let mut outside = connect();
    for _ in 0..2 {
        drop(outside);
        let attempt = victim.begin_and_hold(POINT);
        outside = connect();
        victim.let_go(POINT);
        let reason = attempt.aborted();
        let says = [what, "CRIU said: ", "its log is "].iter().all(|words| reason.contains(words));
        assert!(says, "it must say what CRIU cannot dump: {reason}");
        victim.is_as_before();
    }
    // It is found before a move, too.
    let reason = victim.aborted();
    assert!(reason.contains(what) && !reason.contains("CRIU said"), "{reason}");
    victim.is_as_before();
    is_answered(&mut outside);
    drop(outside);
    victim.moves_in_the_end();
}

/// The connection lives, and the service has accepted it.
fn is_answered(connection: &mut UnixStream) {
    connection.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    connection.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+PONG\r\n");
}

/// A directory beside the root filesystem, the same for every call.
fn tests_directory(preset: &godwit_lab::workload::Preset) -> String {
    let directory = preset.rootfs.with_extension("outside");
    fs::create_dir_all(&directory).unwrap();
    directory.display().to_string()
}

#[test]
fn a_dump_that_fails_at_once_or_is_killed_leaves_the_service_where_it_was() {
    let (victim, at) = up_with_unreliable_criu("dead-dump", "a");
    kept_by_each(victim, &at, &["broken", "killed"], |reason| reason.contains("CRIU"));
}

#[test]
fn a_dump_that_hangs_can_be_cancelled() {
    cancelled_while_criu_hangs("hung-dump", "a");
}

#[test]
fn a_restore_that_fails_at_once_or_is_killed_leaves_the_service_where_it_was() {
    let (victim, at) = up_with_unreliable_criu("no-restore", "b");
    kept_by_each(victim, &at, &["broken", "killed"], |reason| reason.contains("node b gave up"));
}

#[test]
fn a_destination_without_a_working_criu_refuses() {
    let (victim, at) = up_with_unreliable_criu("no-criu", "b");
    victim.bed.lab().restart_node("b").unwrap();
    let named = format!("CRIU at {}", at.join("criu").display());
    kept_by_each(victim, &at, &["broken", "hanging"], |reason| {
        reason.starts_with("node b refuses: ")
            && reason.contains(&named)
            && reason.contains("`godwit doctor`")
    });
}

/// Such a one may restore what ends at once by a signal: it does not know what today's kernels and C libraries have.
#[test]
fn a_node_with_a_criu_that_is_too_old_refuses_and_sends_nothing() {
    for (test, node) in [("old-there", "b"), ("old-here", "a")] {
        let (victim, at) = up_with_unreliable_criu(test, node);
        // Before it is asked the first time.
        fs::write(at.join("mode"), "older").unwrap();
        victim.bed.lab().restart_node(node).unwrap();
        let named = format!("CRIU at {} is version 4.0, older than 4.1;", at.join("criu").display());
        let doctor = victim.bed.godwit(node, &["doctor"]);
        assert!(doctor.code == 1 && doctor.stdout.contains("version 4.0, older than 4.1"), "{doctor:?}");
        kept_by_each(victim, &at, &["older"], |reason| reason.contains(&named));
    }
}

#[test]
fn a_restore_that_hangs_can_be_cancelled() {
    cancelled_while_criu_hangs("hung-restore", "b");
}

#[test]
fn a_restore_that_fails_half_way_leaves_the_service_where_it_was() {
    // The program is a file of the host that is another one when the restore maps it.
    let victim = Victim::up_with(
        "half-restore",
        |config, _| config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned)),
        |preset| {
            let program = format!("{}/redis-server", tests_directory(preset));
            fs::copy(preset.rootfs.join("usr/bin/redis-server"), &program).unwrap();
            vec![
                "--mount".to_owned(),
                format!("type=bind,source={program},target=/usr/bin/redis-server,move=skip"),
            ]
        },
    );
    let program = PathBuf::from(tests_directory(&victim.preset)).join("redis-server");
    let kept = program.with_extension("kept");
    let attempt = victim.begin_and_hold("destination.received");
    fs::copy(&program, program.with_extension("new")).unwrap();
    fs::rename(&program, &kept).unwrap();
    fs::rename(program.with_extension("new"), &program).unwrap();
    fs::File::options().append(true).open(&program).unwrap().write_all(b"longer").unwrap();
    victim.let_go("destination.received");
    let reason = attempt.aborted();
    assert!(reason.contains("node b gave up"), "{reason}");
    assert!(reason.contains("redis-server"), "it must name the file: {reason}");
    let (_, log) = reason.rsplit_once("its log is ").unwrap_or_else(|| panic!("{reason}"));
    let log = fs::read_to_string(log.split([' ', ';']).next().unwrap()).unwrap();
    assert!(log.contains("redis-server"), "{reason}");
    victim.is_as_before();
    fs::rename(&kept, &program).unwrap();
    victim.moves_in_the_end();
}
