//! Locks on files: another process takes them again, or refuses with number and path.

#[path = "support/programs.rs"]
mod programs;
mod support;

use std::fs::File;
use std::path::Path;
use std::process::Output;

use godwit_isa_state::{LockKind, Set, StateFile};
use nix::fcntl::{FcntlArg, fcntl};

use programs::{capture, godwit_state, program, run, stderr};
use support::{LOCK, borders, seal};

const WAYS: [(Set, Set); 3] =
    [(Set::X86_64, Set::Aarch64), (Set::Aarch64, Set::X86_64), (Set::X86_64, Set::X86_64)];

fn captured(arguments: &[&str], set: Set, state: &Path) -> Vec<u8> {
    capture(program("locks"), set, 3000, state, arguments)
}

fn resumed(state: &Path, set: Set) -> Output {
    run(godwit_state()
        .args(["resume", "--set", set.name(), "--program"])
        .arg(&program("locks").prog)
        .arg(state))
}

#[test]
fn locks_are_taken_again_by_another_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let place = directory.path().to_str().expect("text");
    let whole = run(godwit_state().arg("run").arg(&program("locks").prog).args(["--", place]));
    assert_eq!(whole.status.code(), Some(5), "{}", stderr(&whole));
    let expected = String::from_utf8(whole.stdout).expect("text");
    for line in [
        "in front: 0, free",
        "written: 0, write from 2, 3 long",
        "between: 0, free",
        "read: 0, read from 7, 0 long",
        "description: 0, write from 100, 50 long",
        "its own: 0, free",
        "flock of another: -11",
        "flock of the same: 0",
        "and still: -11",
        "and then: 0",
    ] {
        assert!(expected.lines().any(|found| found == line), "{line} is not in: {expected}");
    }
    for (from, to) in WAYS {
        let mut said = captured(&[place], from, &state);
        let kinds: Vec<_> = StateFile::open(&state).expect("sound").locks().map(|lock| lock.kind).collect();
        for kind in [LockKind::Process, LockKind::Description, LockKind::Whole] {
            assert!(kinds.contains(&kind), "{from:?}: {kinds:?}");
        }
        let output = resumed(&state, to);
        assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
        said.extend(output.stdout);
        assert_eq!(String::from_utf8_lossy(&said), expected, "{from:?} to {to:?}");
    }
    let text = run(godwit_state().arg("inspect").arg(&state));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("for writing, 3 bytes from 2"), "{text}");
    assert!(text.contains("for reading, from 7 to the end"), "{text}");
}

#[test]
fn what_somebody_else_has_locked_meanwhile_is_refused_until_it_is_free() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let place = directory.path();
    captured(&[place.to_str().expect("text")], Set::X86_64, &state);
    let refused = |name: &str| {
        for set in Set::ALL {
            let output = resumed(&state, set);
            assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
            assert!(output.stdout.is_empty());
            let path = place.join(name);
            let why = format!(
                "a file ({}): another process has locked what the program had locked",
                path.display()
            );
            assert!(stderr(&output).contains(&why), "{}", stderr(&output));
        }
    };
    let flocked = File::open(place.join("b")).expect("it is there");
    flocked.lock().expect("nobody has it");
    refused("b");
    drop(flocked);
    let locked = File::options().read(true).write(true).open(place.join("a")).expect("it is there");
    let range = nix::libc::flock { l_type: 1, l_whence: 0, l_start: 4, l_len: 1, l_pid: 0 };
    fcntl(&locked, FcntlArg::F_SETLK(&range)).expect("nobody has it");
    refused("a");
    drop(locked);
    let output = resumed(&state, Set::Aarch64);
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
}

#[test]
fn a_lease_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let said = captured(&[directory.path().to_str().expect("text"), "lease"], Set::X86_64, &state);
    assert_eq!(String::from_utf8_lossy(&said), "lease: 0\n");
    let output = resumed(&state, Set::X86_64);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("descriptor 4, a file ("), "{}", stderr(&output));
    assert!(stderr(&output).contains("the program has a lease on it"), "{}", stderr(&output));
}

#[test]
fn forged_locks_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    captured(&[directory.path().to_str().expect("text")], Set::X86_64, &state);
    let sound = std::fs::read(&state).expect("it was written");
    let kind = |at: usize| u32::from_le_bytes(sound[at..at + 4].try_into().expect("four"));
    let at = borders(&sound).into_iter().take_while(|at| *at < sound.len()).find(|at| kind(*at) == LOCK);
    let at = at.expect("it has locks");
    let damaged = "lock is damaged";
    for (what, offset, value, ours, runtime) in [
        ("number", 4, u32::MAX, "an impossible number", damaged),
        ("address", 8, 1, "must be zero for its type", "an open file without a path"),
        ("kind", 24, 5, "of an unknown kind", damaged),
        ("marks", 28, 2, "unknown flags", damaged),
        ("begin", 36, u32::MAX, "behind the end of any file", damaged),
        ("length", 44, u32::MAX, "behind the end of any file", damaged),
        ("path", 64, 0, "a zero in its path", "path has a zero in it"),
        // Sound, but of another file.
        ("file", 48, 1, "", "in this process the number is of another file"),
        ("descriptor", 4, 250, "", "in this process the number is of another file"),
    ] {
        let mut file = sound.clone();
        file[at + offset..at + offset + 4].copy_from_slice(&u32::to_le_bytes(value));
        seal(&mut file);
        std::fs::write(&state, &file).expect("it is ours");
        let output = resumed(&state, Set::X86_64);
        assert_eq!(output.status.code(), Some(125), "{what}");
        assert!(output.stdout.is_empty(), "{what}");
        assert!(stderr(&output).contains(ours), "{what}: {}", stderr(&output));
        for set in Set::ALL {
            let output = program("locks").command(set).env("GODWIT_STATE_RESUME", &state).output();
            let output = output.expect("it starts");
            assert_eq!(output.status.code(), Some(125), "{what}: {}", stderr(&output));
            assert!(output.stdout.is_empty(), "{what}");
            assert!(stderr(&output).contains(runtime), "{what}: {}", stderr(&output));
        }
    }
}
