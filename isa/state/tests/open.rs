//! What programs have open while they are captured: files that another process opens again, and what only the process
//! itself can keep.

#[path = "support/programs.rs"]
mod programs;

use std::path::Path;
use std::process::Output;

use godwit_isa_state::Set;

use programs::{godwit_state, program, report, run, stderr};

const WAYS: [(Set, Set); 3] =
    [(Set::X86_64, Set::Aarch64), (Set::Aarch64, Set::X86_64), (Set::X86_64, Set::X86_64)];

/// Captures `files` while it works.
fn captured(arguments: &[&str], set: Set, state: &Path) -> Vec<u8> {
    programs::capture(program("files"), set, 3000, state, arguments)
}

fn resumed(state: &Path, set: Set) -> Output {
    run(godwit_state()
        .args(["resume", "--set", set.name(), "--program"])
        .arg(&program("files").prog)
        .arg(state)
        .current_dir("/"))
}

#[test]
fn another_process_has_the_same_files_open_at_the_same_places() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let place = directory.path().to_str().expect("text");
    let whole = run(godwit_state().arg("run").arg(&program("files").prog).args(["--", place]));
    assert_eq!(whole.status.code(), Some(5), "{}", stderr(&whole));
    let expected = String::from_utf8(whole.stdout).expect("text");
    // What the program is to find is what it would have found, which is looked at by itself.
    for line in [
        "read 34",
        "a is 3: flags 2 0, at 5",
        "alone is 5: flags 800 0, at 0",
        "high is 200: flags 401 1, at 19",
        "null is 7: flags 1 1, at 0",
        "in place, umask 17",
        "the next is 9",
        "4 entries",
        "on output",
    ] {
        assert!(expected.lines().any(|found| found == line), "{line} is not in: {expected}");
    }
    let log = std::fs::read(directory.path().join("log")).expect("it was written");
    assert_eq!(log, b"first\nsecond\nthird\n");
    for (from, to) in WAYS {
        let mut said = captured(&[place], from, &state);
        let output = resumed(&state, to);
        assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
        said.extend(output.stdout);
        assert_eq!(String::from_utf8_lossy(&said), expected, "{from:?} to {to:?}");
        assert_eq!(std::fs::read(directory.path().join("log")).expect("it is there"), log);
    }
}

#[test]
fn inspect_tells_what_is_open_and_what_could_not_be_opened_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let place = directory.path().to_str().expect("text");
    for set in Set::ALL {
        captured(&[place], set, &state);
        let output = run(godwit_state().arg("inspect").arg(&state).arg("--json"));
        let seen: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(seen["process"]["umask"], "027");
        assert_eq!(seen["process"]["directory"], place);
        let descriptors = seen["descriptors"].as_array().expect("a list");
        let of = |number: u64| descriptors.iter().find(|open| open["number"] == number).expect("listed");
        let numbers = descriptors.iter().map(|open| open["number"].as_u64().expect("a number"));
        let numbers: Vec<u64> = numbers.collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 200]);
        assert_eq!(of(1)["inherited"], true);
        assert_eq!((&of(2)["inherited"], &of(2)["shares"]), (&false.into(), &2.into()));
        // It was opened before 2 became the same, but 2 is the lowest.
        assert_eq!((&of(6)["shares"], &of(200)["shares"]), (&2.into(), &2.into()));
        assert_eq!((&of(0)["inherited"], &of(0)["shares"]), (&false.into(), &1.into()));
        assert_eq!((&of(4)["shares"], &of(5)["shares"]), (&3.into(), &5.into()));
        assert_eq!(
            (&of(3)["kind"], &of(3)["offset"], &of(3)["size"]),
            (&"file".into(), &3.into(), &10.into())
        );
        assert_eq!(of(7)["path"], "/dev/null");
        assert_eq!(of(8)["kind"], "directory");
        assert!(descriptors.iter().all(|open| open["refused"].is_null()), "{descriptors:?}");
        let text = run(godwit_state().arg("inspect").arg(&state));
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(text.contains("/dev/null") && text.contains("umask 027"), "{text}");
    }
    captured(&[place, "socket"], Set::X86_64, &state);
    let text = run(godwit_state().arg("inspect").arg(&state));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("cannot be opened again: it has another end"), "{text}");
}

#[test]
fn what_cannot_be_opened_again_is_refused_by_number_kind_and_path() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let place = directory.path().to_str().expect("text");
    let cases = [
        ("pipe", "descriptor 3, a pipe (pipe:["),
        ("socket", "descriptor 3, a socket (socket:["),
        (
            "epoll",
            "descriptor 3, an object of the kernel (anon_inode:[eventpoll]): it cannot be opened again",
        ),
        ("deleted", "/gone (deleted)): it was deleted while it was open"),
    ];
    for set in Set::ALL {
        for (what, sentence) in cases {
            captured(&[place, what], set, &state);
            let output = resumed(&state, Set::X86_64);
            assert_eq!(output.status.code(), Some(125), "{what}");
            assert!(output.stdout.is_empty());
            assert!(stderr(&output).contains(sentence), "{what}: {}", stderr(&output));
        }
    }
}

#[test]
fn files_that_changed_since_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let inside = directory.path().join("inside");
    let file = inside.join("a");
    type Change<'a> = &'a dyn Fn() -> std::io::Result<()>;
    let changes: [(Change<'_>, &str); 4] = [
        (&|| std::fs::write(&file, "short"), "it is shorter than it was when the state was written"),
        (
            &|| {
                std::fs::write(inside.join("b"), "0123456789")
                    .and_then(|()| std::fs::rename(inside.join("b"), &file))
            },
            "another one stands there now",
        ),
        (&|| std::fs::remove_file(&file), "it is not there any more"),
        (&|| std::fs::remove_dir_all(&inside), "cannot enter its working directory"),
    ];
    for (change, sentence) in changes {
        std::fs::create_dir_all(&inside).expect("there is room");
        captured(&[inside.to_str().expect("text")], Set::X86_64, &state);
        change().expect("it can be changed");
        for set in Set::ALL {
            let output = resumed(&state, set);
            assert_eq!(output.status.code(), Some(125), "{sentence}");
            assert!(stderr(&output).contains(sentence), "{sentence}: {}", stderr(&output));
            assert!(stderr(&output).contains(inside.to_str().expect("text")), "{}", stderr(&output));
        }
    }
}

#[test]
fn a_program_that_hops_keeps_all_that_only_the_kernel_has() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    let objects = program("objects");
    let whole = run(godwit_state().arg("run").arg(&objects.prog).arg("--").arg(&file));
    assert_eq!(whole.status.code(), Some(5), "{}", stderr(&whole));
    assert_eq!(String::from_utf8_lossy(&whole.stdout).lines().count(), 1);
    let seed = fastrand::u64(..);
    for how in [["--every-polls", "400"], ["--every", "3ms"]] {
        let output = run(godwit_state()
            .args(["--json", "hop", "--seed", &seed.to_string()])
            .args(how)
            .arg(&objects.prog)
            .arg("--")
            .arg(&file));
        assert_eq!(output.status.code(), Some(5), "seed {seed}, {how:?}: {}", stderr(&output));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&whole.stdout),
            "seed {seed}, {how:?}"
        );
        let report = report(&output);
        assert!(report["changes"].as_u64().expect("a number") >= 3, "seed {seed}, {how:?}: {report}");
    }
}

#[test]
fn memory_shared_with_a_file_is_refused_and_a_copy_of_one_travels() {
    let directory = tempfile::tempdir().expect("a directory");
    let (file, state) = (directory.path().join("file"), directory.path().join("state"));
    let shared = program("shared");
    for (from, to) in WAYS {
        let first = run(godwit_state()
            .args(["run", "--after-polls", "1500", "--set", from.name()])
            .arg(&shared.prog)
            .arg("--state")
            .arg(&state)
            .arg("--")
            .arg(&file));
        assert_eq!(first.status.code(), Some(86), "{}", stderr(&first));
        // Said once, though asked for twice.
        let sentence = "memory shared with a file that it can write (mmap with MAP_SHARED)";
        assert_eq!(stderr(&first).matches(sentence).count(), 1, "{}", stderr(&first));
        // A copy does not look into the file again.
        std::fs::write(&file, "another!").expect("it is ours");
        let second = run(godwit_state()
            .args(["resume", "--set", to.name(), "--program"])
            .arg(&shared.prog)
            .arg(&state));
        assert_eq!(second.status.code(), Some(5), "{}", stderr(&second));
        let said = String::from_utf8_lossy(&[first.stdout, second.stdout].concat()).into_owned();
        assert!(
            said.starts_with("shared: -19\nshared: -19\nwritable: -19\nwork ")
                && said.ends_with("copy Contents, own x, read contents\n"),
            "{said}"
        );
        std::fs::remove_file(&file).expect("it is there");
    }
}
