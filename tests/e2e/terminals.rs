//! Commands of `godwit exec` on a terminal whose service moves: the user at the terminal notices a pause. Needs root.

use std::{
    io::{Read as _, Write as _},
    net::Ipv4Addr,
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use godwit_lab::{LabConfig, workload::Workload};
use godwit_tests::{
    Bed,
    hold::{FOLLOW, Points},
    victim::Attempt,
    wait_for,
};
use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::OpenptFlags,
    termios::Winsize,
};

const NAME: &str = "shell";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 97);

fn up(test: &str) -> Bed {
    up_with(test, |_| ())
}

fn up_with(test: &str, change: impl FnOnce(&mut LabConfig)) -> Bed {
    let bed = Bed::up_with(test, change);
    start(&bed, &[]);
    bed
}

fn start(bed: &Bed, flags: &[&str]) {
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sh", "-c", "exec sleep 100000"].map(str::to_owned).to_vec();
    bed.run("a", NAME, ADDRESS, &preset, flags);
}

/// The service's first process.
fn main_of(bed: &Bed) -> Pid {
    let shown: serde_json::Value = bed.json("a", &["inspect", NAME]);
    Pid::from_raw(i32::try_from(shown["pid"].as_i64().unwrap()).unwrap()).unwrap()
}

/// A user on node `a` who runs a command of godwit at a terminal.
struct User {
    terminal: OwnedFd,
    godwit: Child,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Drop for User {
    fn drop(&mut self) {
        if thread::panicking() {
            let screen: String = self.screen().chars().take(5000).collect();
            eprintln!("--- the screen: {screen:?}");
        }
    }
}

impl User {
    fn runs(bed: &Bed, command: &[&str]) -> Self {
        Self::runs_so(bed, &[], command)
    }

    fn runs_so(bed: &Bed, how: &[&str], command: &[&str]) -> Self {
        let terminal =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        rustix::pty::unlockpt(&terminal).unwrap();
        let path = rustix::pty::ptsname(&terminal, Vec::new()).unwrap();
        let end =
            rustix::fs::open(path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let end = || Stdio::from(end.try_clone().unwrap());
        let godwit = bed.command("a", &[&["exec", "-it"], how, &[NAME], command].concat());
        let mut leader = Command::new("setsid");
        leader.args(["--ctty", "--wait"]).arg(godwit.get_program());
        // timeout(1) would keep the command out of the foreground of the terminal.
        leader.args((godwit.get_program() == "timeout").then_some("--foreground")).args(godwit.get_args());
        leader.envs(godwit.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("TERM", "vt220");
        resize(&terminal, 9, 55);
        let godwit = leader.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let user = Self { terminal, godwit, seen };
        let (mut screen, seen) =
            (std::fs::File::from(user.terminal.try_clone().unwrap()), Arc::clone(&user.seen));
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The terminal ends with its last program.
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                seen.lock().unwrap().extend_from_slice(&buffer[..length]);
            }
        });
        user
    }

    fn resizes(&self, rows: u16, columns: u16) {
        resize(&self.terminal, rows, columns);
    }

    fn types(&self, keys: &str) {
        std::fs::File::from(self.terminal.try_clone().unwrap()).write_all(keys.as_bytes()).unwrap();
    }

    fn screen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    fn sees(&self, what: &str) {
        wait_for(&format!("{what:?} on the screen"), || {
            let screen = self.screen();
            if !screen.contains(what) && screen.contains("godwit: ") {
                panic!("no {what:?}: {screen}");
            }
            screen.contains(what).then_some(())
        });
    }

    /// With what code the command has ended, and all that was on the screen.
    fn ended(&mut self) -> (Option<i32>, String) {
        wait_for("the end of the command", || self.godwit.try_wait().unwrap());
        let code = self.godwit.wait().unwrap().code();
        // What is still on its way to the screen: its reader ends with the last program.
        wait_for("the end of the screen", || (Arc::strong_count(&self.seen) == 1).then_some(()));
        (code, self.screen())
    }
}

fn resize(terminal: impl std::os::fd::AsFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size).unwrap();
}

fn runs(bed: &Bed, node: &str, command: &str) -> bool {
    bed.done(node, &["exec", NAME, "ps"]).lines().any(|line| line.ends_with(command))
}

#[test]
fn a_shell_moves_with_its_service_from_node_to_node_and_the_user_types_on() {
    let bed = up("terminal-moves");
    let mut user = User::runs(&bed, &["sh"]);
    user.types("word=kept; cd /tmp; sleep 77777 &\r");
    user.types("echo is $word, $(stty size)\r");
    user.sees("is kept, 9 55");
    // The beginning of a line is typed before the move.
    user.types("echo first $wo");
    user.sees("first $wo");
    bed.migrate(NAME, "a", "b");
    user.types("rd in $PWD\r");
    user.sees("first kept in /tmp");
    user.resizes(10, 60);
    wait_for("the size to be known", || {
        user.types("stty size\r");
        user.screen().contains("10 60").then_some(())
    });
    assert!(runs(&bed, "b", " sleep 77777"));
    for (number, (from, to, mode)) in [("b", "a", "precopy"), ("a", "b", "postcopy")].into_iter().enumerate()
    {
        bed.migrate_so(NAME, from, to, &["--mode", mode]);
        user.types(&format!("echo {number} $word {number} \"$(jobs)\"\r"));
        user.sees(&format!("{number} kept {number} [1]"));
    }
    // A program on the whole screen, and keys that are signals, too.
    user.types("vi file\r");
    user.sees("- file");
    user.types("ihello");
    user.sees("hello");
    bed.migrate_so(NAME, "b", "a", &["--mode", "hybrid"]);
    user.types(" again");
    user.sees("again");
    // It waits for the rest of a key's sequence after an Esc.
    user.types("\x1b");
    user.sees("- file [Modified]");
    user.types(":wq\r");
    user.types("sleep 66666\r");
    wait_for("the editor's end", || runs(&bed, "a", " sleep 66666").then_some(()));
    bed.migrate(NAME, "a", "b");
    user.types("\x03");
    wait_for("the end of what is interrupted", || (!runs(&bed, "b", " sleep 66666")).then_some(()));
    assert_eq!(bed.done("b", &["exec", NAME, "cat", "/tmp/file"]), "hello again\n");
    user.types("exit 7\r");
    let (code, screen) = user.ended();
    assert_eq!(code, Some(7), "{screen}");
    // Nothing is in the way of the next move.
    wait_for("the end of the terminal", || (!runs(&bed, "b", "godwit-exec")).then_some(()));
    bed.migrate(NAME, "b", "a");
}

#[test]
fn what_a_command_writes_while_it_moves_is_seen_in_order_and_whole() {
    let bed = up("terminal-writes");
    let script = "i=0; until [ -e /stop ]; do echo line $i.; i=$((i+1)); done; echo $i lines; exit 5";
    let mut user = User::runs(&bed, &["sh", "-c", script]);
    user.sees("line 100.");
    for (from, to) in [("a", "b"), ("b", "a")] {
        bed.migrate(NAME, from, to);
    }
    bed.done("a", &["exec", NAME, "touch", "/stop"]);
    let (code, screen) = user.ended();
    let lines: Vec<_> = screen.split("\r\n").filter(|line| line.starts_with("line ")).collect();
    for (number, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("line {number}."), "{}", &screen[screen.len().saturating_sub(500)..]);
    }
    assert!(screen.ends_with(&format!("\r\n{} lines\r\n", lines.len())), "{} lines", lines.len());
    assert_eq!(code, Some(5));
}

#[test]
fn what_was_typed_and_not_read_is_read_once_after_the_move() {
    let bed = up("terminal-typed");
    let script =
        "echo up; until [ -e /go ]; do usleep 10000; done; read one; read two; echo got $one, $two. $(id -u)";
    let mut user = User::runs_so(&bed, &["--user", "nobody"], &["sh", "-c", script]);
    user.sees("up\r\n");
    user.types("first\rseq");
    user.sees("seq");
    bed.migrate(NAME, "a", "b");
    // It is still a line that can be corrected.
    user.types("\x7fcond\r");
    bed.done("b", &["exec", NAME, "touch", "/go"]);
    user.sees("got first, second. 65534\r\n");
    let (code, screen) = user.ended();
    assert_eq!(code, Some(0), "{screen}");
    assert_eq!(screen.matches("first\r\n").count(), 1, "typed again, it is shown again: {screen}");
}

#[test]
fn a_move_that_ends_in_vain_leaves_the_terminal_as_it_was() {
    const POINT: &str = "source.restored";
    let mut points = None;
    let bed = up_with("terminal-stays", |config| points = Some(Points::among(config, &[POINT])));
    let points = points.unwrap();
    let script =
        "echo up; until [ -e /go ]; do usleep 10000; done; read one; read two; echo got $one, $two.; exit 3";
    let mut user = User::runs(&bed, &["sh", "-c", script]);
    user.sees("up\r\n");
    user.types("first\rse");
    user.sees("first\r\nse");
    let migrating = Attempt::held(&points, POINT, || Attempt::begin(&bed, NAME, "a", "b", &[]));
    // In the pause.
    user.types("cond\r");
    bed.done("a", &["cancel", NAME]);
    points.let_go(POINT);
    migrating.aborted();
    bed.done("a", &["exec", NAME, "touch", "/go"]);
    user.sees("got first, second.\r\n");
    let (code, screen) = user.ended();
    assert_eq!(code, Some(3), "{screen}");
    assert_eq!(screen.matches("first\r\n").count(), 1, "{screen}");
}

#[test]
fn a_service_that_moves_on_before_its_user_has_followed_brings_what_was_written_meanwhile() {
    let mut points = None;
    let bed = up_with("terminal-on", |config| points = Some(Points::among(config, &[FOLLOW])));
    let points = points.unwrap();
    let script = "echo up; until [ -e /go ]; do usleep 10000; done; echo on b; touch /said; read one; echo got $one.; exit 6";
    let mut user = User::runs(&bed, &["sh", "-c", script]);
    user.sees("up\r\n");
    points.hold(FOLLOW);
    bed.migrate(NAME, "a", "b");
    points.reached(FOLLOW);
    bed.done("b", &["exec", NAME, "touch", "/go"]);
    wait_for("its word", || {
        (bed.godwit("b", &["exec", NAME, "test", "-e", "/said"]).code == 0).then_some(())
    });
    bed.migrate(NAME, "b", "a");
    points.let_go(FOLLOW);
    user.sees("on b\r\n");
    user.types("it\r");
    let (code, screen) = user.ended();
    assert!(screen.contains("got it."), "{screen}");
    assert_eq!((code, screen.matches("on b").count()), (Some(6), 1), "{screen}");
}

#[test]
fn a_user_hears_of_the_end_of_a_service_that_is_killed_while_it_is_frozen() {
    const POINT: &str = "source.restored";
    let mut points = None;
    let bed = up_with("terminal-dies", |config| points = Some(Points::among(config, &[POINT])));
    let points = points.unwrap();
    let mut user = User::runs(&bed, &["sleep", "99999"]);
    wait_for("the command", || runs(&bed, "a", " sleep 99999").then_some(()));
    let migrating = Attempt::held(&points, POINT, || Attempt::begin(&bed, NAME, "a", "b", &[]));
    kill_process(main_of(&bed), Signal::KILL).unwrap();
    bed.done("a", &["cancel", NAME]);
    points.let_go(POINT);
    migrating.aborted();
    assert_eq!(user.ended().0, Some(137));
}

#[test]
fn a_command_has_the_terminal_alone_and_ends_with_the_life_of_its_service_that_starts_again() {
    let bed = Bed::up("terminal-life");
    start(&bed, &["--restart", "always"]);
    let mut user = User::runs(&bed, &["sh", "-c", "echo has $(ls /proc/self/fd)."]);
    // The last one is the directory that is listed.
    assert_eq!(user.ended(), (Some(0), "has 0 1 2 3.\r\n".to_owned()));
    let mut user = User::runs(&bed, &["sleep", "99999"]);
    wait_for("the command", || runs(&bed, "a", " sleep 99999").then_some(()));
    kill_process(main_of(&bed), Signal::KILL).unwrap();
    assert_eq!(user.ended().0, Some(137));
}

#[test]
fn a_terminal_that_is_full_takes_its_new_size() {
    let bed = up("terminal-full");
    let script =
        "stty -icanon -echo; echo up; until [ \"$(stty size)\" = '10 60' ]; do usleep 10000; done; exit 2";
    let mut user = User::runs(&bed, &["sh", "-c", script]);
    user.sees("up\r\n");
    // More than the kernel holds for a reader that does not read.
    user.types(&"x".repeat(40_000));
    user.resizes(10, 60);
    assert_eq!(user.ended().0, Some(2));
}

#[test]
fn a_terminal_of_another_life_of_godwitd_is_in_the_way_of_a_checkpoint() {
    let bed = up("terminal-old");
    let mut user = User::runs(&bed, &["sleep", "99999"]);
    wait_for("the command", || runs(&bed, "a", " sleep 99999").then_some(()));
    let monitor = bed.done("a", &["exec", NAME, "pidof", "godwit-exec"]);
    // It would hang up after half a minute.
    bed.done("a", &["exec", NAME, "kill", "-STOP", monitor.trim()]);
    bed.lab().restart_node("a").unwrap();
    user.godwit.wait().unwrap();
    let file = bed.scratch().join("file");
    let said = bed.godwit("a", &["checkpoint", NAME, "-o", file.to_str().unwrap()]);
    assert!(said.code != 0 && said.stderr.contains("1 further commands"), "{said:?}");
    bed.done("a", &["exec", NAME, "kill", "-KILL", monitor.trim()]);
    wait_for("the end of godwit-exec", || {
        let stat = bed.godwit("a", &["exec", NAME, "cat", &format!("/proc/{}/stat", monitor.trim())]);
        (stat.code != 0 || stat.stdout.contains(") Z ")).then_some(())
    });
    bed.done("a", &["checkpoint", NAME, "-o", file.to_str().unwrap()]);
}

#[test]
fn a_shell_in_a_shell_is_refused_by_name_and_a_checkpoint_is_while_somebody_is_at_a_terminal() {
    let bed = up("terminal-nested");
    let mut user = User::runs(&bed, &["sh"]);
    user.types("sh\r");
    user.types("echo in $((1+1))\r");
    user.sees("in 2");
    let refused = |arguments: &[&str], words: &[&str]| {
        let said = bed.godwit("a", arguments);
        assert_ne!(said.code, 0, "{said:?}");
        assert!(words.iter().all(|word| said.stderr.contains(word)), "{said:?}");
    };
    refused(&["migrate", NAME, "--to", "b"], &["has /dev/tty open", "end the shell in the shell"]);
    user.types("exit\r");
    user.types("echo out $((1+1))\r");
    user.sees("out 2");
    let file = bed.scratch().join("file");
    refused(&["checkpoint", NAME, "-o", file.to_str().unwrap()], &["1 further commands"]);
    bed.migrate(NAME, "a", "b");
    user.types("exit 4\r");
    assert_eq!(user.ended().0, Some(4));
}

#[test]
fn a_user_who_leaves_after_a_move_hangs_the_command_up_and_a_service_that_stops_ends_it() {
    let mut points = None;
    let bed = up_with("terminal-leaves", |config| points = Some(Points::among(config, &[FOLLOW])));
    let points = points.unwrap();
    let mut user = User::runs(&bed, &["sleep", "99999"]);
    wait_for("the command", || runs(&bed, "a", " sleep 99999").then_some(()));
    bed.migrate(NAME, "a", "b");
    assert!(runs(&bed, "b", " sleep 99999"));
    // timeout(1) passes it on.
    let timeout = rustix::process::Pid::from_child(&user.godwit);
    rustix::process::kill_process(timeout, rustix::process::Signal::TERM).unwrap();
    user.godwit.wait().unwrap();
    wait_for("the command to be hung up", || (!runs(&bed, "b", " sleep 99999")).then_some(()));
    bed.migrate(NAME, "b", "a");
    let mut user = User::runs(&bed, &["sleep", "88888"]);
    wait_for("the command", || runs(&bed, "a", " sleep 88888").then_some(()));
    points.hold(FOLLOW);
    bed.migrate(NAME, "a", "b");
    points.reached(FOLLOW);
    // Before its user is there.
    bed.done("b", &["kill", NAME]);
    let has_stopped = || bed.done("b", &["ps", "--all"]).contains("stopped").then_some(());
    wait_for("the end of the service", has_stopped);
    points.let_go(FOLLOW);
    assert_eq!(user.ended().0, Some(137));
}
