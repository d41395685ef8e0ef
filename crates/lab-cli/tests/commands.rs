//! The built `godwit-lab`: what it refuses, its help, the man pages and completions of both programs.
#![allow(missing_docs, clippy::unwrap_used)]

use std::process::Command;

/// What a command left.
#[derive(Debug)]
struct Finished {
    code: i32,
    stdout: String,
    stderr: String,
}

/// `godwit-lab ARGUMENTS`, without the environment of the shell that runs the tests.
fn lab(arguments: &[&str]) -> Finished {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit-lab"));
    let output = command.args(arguments).env_remove("GODWIT_NODE").env_remove("GODWIT_LAB").output().unwrap();
    Finished {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn a_way_that_cannot_be_is_refused_with_what_to_say() {
    let trace = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trace.path(), "0s 20mbit 25ms 0%\n0s 4mbit 25ms 0%\n").unwrap();
    let trace = trace.path().to_str().unwrap();
    for (words, code, said) in [
        (&["a", "b"][..], 1, "what is it to be like between a and b? Say so with --rate"),
        (&["--rate", "20mbit"], 1, "between which hosts? Name two"),
        (&["a", "b", "--trace", trace], 1, "line 2: it is not later than the line before"),
        (&["a", "b", "--trace", "/nowhere"], 1, "the trace /nowhere cannot be read"),
        (&["a", "b", "--loss", "5"], 2, "a loss is a percentage from 0% to 100%"),
        (&["a", "b", "--preset", "dsl"], 2, "the names are lan, office, wifi, wan, lte"),
        (&["a", "b", "--none", "--delay", "1ms"], 2, "cannot be used with"),
        (&["fast"], 1, "1gbit,1ms"),
        (&["a", "b", "--delay", "5ms", "--lab", "no-such-lab"], 1, "there is no lab no-such-lab"),
    ] {
        let arguments = [&["lab", "link"], words].concat();
        let finished = lab(&arguments);
        assert_eq!(finished.code, code, "{words:?}: {finished:?}");
        assert!(finished.stderr.contains(said), "{words:?}: {finished:?}");
    }
}

#[test]
fn help_and_errors_say_what_a_user_types() {
    let help = lab(&["lab", "--help"]);
    assert_eq!(help.code, 0, "{help:?}");
    assert!(help.stdout.contains("Usage: godwit lab [OPTIONS] <COMMAND>"), "{help:?}");
    let help = lab(&["help", "bench", "migrate"]);
    assert!(help.stdout.contains("Usage: godwit bench migrate"), "{help:?}");
    let wrong = lab(&["--lab", "x", "lab", "frob"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.stderr.starts_with("Error: unrecognized subcommand 'frob'"), "{wrong:?}");
    assert!(wrong.stderr.contains("Usage: godwit lab "), "{wrong:?}");
    let own = lab(&["--help"]);
    assert!(own.stdout.contains("Usage: godwit lab [OPTIONS] <COMMAND>\n       godwit bench"), "{own:?}");
    assert!(lab(&["--version"]).stdout.starts_with("godwit-lab "));
}

#[test]
fn man_pages_and_completions_are_those_of_both_programs() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("man1");
    assert_eq!(lab(&["man", pages.to_str().unwrap()]).code, 0);
    for (page, flag) in
        [("godwit-migrate", "max-frozen-ms"), ("godwit-lab-link", "jitter"), ("godwit-bench-migrate", "runs")]
    {
        let text = std::fs::read_to_string(pages.join(format!("{page}.1"))).unwrap();
        assert!(text.replace("\\-", "-").contains(&format!("--{flag}")), "{page}: {text}");
    }
    assert!(!pages.join("godwit-man-man.1").exists() && pages.join("godwit.1").exists());
    for shell in ["bash", "zsh", "fish"] {
        let script = lab(&["completions", shell]).stdout;
        for word in ["max-frozen-ms", "selftest", "jitter", "cutover"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}
