//! `godwit lab` and `godwit bench`: how `godwit` finds `godwit-lab` and becomes it.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    process::{Command, Output},
};

/// A `godwit` in a directory of its own, so that each test says what is installed beside it.
struct Installed {
    directory: tempfile::TempDir,
}

impl Installed {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // A link, since a program that was just written cannot be started while another test forks.
        fs::hard_link(env!("CARGO_BIN_EXE_godwit"), directory.path().join("godwit")).unwrap();
        fs::create_dir(directory.path().join("path")).unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// With a directory of its own as the whole of $PATH.
    fn godwit(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.path("godwit"));
        command
            .args(arguments)
            .env("PATH", self.path("path"))
            .env_remove("GODWIT_NODE")
            .env_remove("GODWIT_LAB");
        command.output().unwrap()
    }

    fn says(&self, arguments: &[&str]) -> String {
        String::from_utf8(self.godwit(arguments).stdout).unwrap()
    }
}

#[test]
fn the_program_beside_godwit_gets_the_verb_and_all_flags() {
    let installed = Installed::new();
    symlink("/bin/echo", installed.path("godwit-lab")).unwrap();
    for (typed, given) in [
        (&["lab", "status"][..], "--lab default lab status"),
        (&["lab", "--help"], "--lab default lab --help"),
        (&["bench", "-h"], "--lab default bench -h"),
        (&["lab"], "--lab default lab"),
        (&["bench", "--name", "x", "plot", "--out", "y"], "--lab default bench --name x plot --out y"),
        (&["--json", "--lab", "x", "lab", "up", "--name", "y"], "--json --lab x lab up --name y"),
        (
            &["--node", "a", "--socket", "/s", "lab", "exec", "client", "--", "ls", "-l"],
            "--socket /s --node a --lab default lab exec client -- ls -l",
        ),
        (&["help", "lab", "up"], "help lab up"),
    ] {
        assert_eq!(installed.says(typed), format!("{given}\n"), "{typed:?}");
    }
}

/// As `make install` puts them: files in a directory of their own, a link to godwit among the user's programs.
#[test]
fn beside_godwit_is_where_its_file_is_and_not_a_link_to_it() {
    let installed = Installed::new();
    for program in ["godwit-lab", "godwitd"] {
        symlink("/bin/echo", installed.path(program)).unwrap();
    }
    symlink("../godwit", installed.path("path/godwit")).unwrap();
    for (typed, given) in [("lab", "--lab default lab\n"), ("cluster init", "init\n")] {
        let mut command = Command::new(installed.path("path/godwit"));
        command.args(typed.split(' ')).env("PATH", "").env_remove("GODWIT_NODE").env_remove("GODWIT_LAB");
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), given, "{typed}");
    }
}

#[test]
fn the_path_comes_after_the_program_beside_godwit_and_the_exit_status_is_passed_on() {
    let installed = Installed::new();
    // It refuses the first flag with an exit status of its own.
    symlink("/usr/bin/timeout", installed.path("path/godwit-lab")).unwrap();
    let output = installed.godwit(&["bench", "scan"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("'--lab'"));

    symlink("/bin/echo", installed.path("godwit-lab")).unwrap();
    let output = installed.godwit(&["bench", "scan"]);
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(0), &b"--lab default bench scan\n"[..])
    );
}

#[test]
fn where_it_is_not_installed_the_error_says_what_to_do() {
    let installed = Installed::new();
    for (typed, verb) in
        [(&["lab", "up"][..], "lab"), (&["bench", "--help"], "bench"), (&["help", "lab"], "lab")]
    {
        let output = installed.godwit(typed);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let beside = installed.directory.path().display();
        assert!(
            said.starts_with(&format!("Error: `godwit {verb}` needs the program godwit-lab, which is neither in {beside} nor in a directory of $PATH; install it beside godwit")),
            "{said}"
        );
    }
}

#[test]
fn without_it_help_man_pages_and_completions_know_the_verbs_by_name() {
    let installed = Installed::new();
    let help = installed.says(&["--help"]);
    for line in [
        "lab          Make nodes and a client host on this machine",
        "bench        Measure migrations in a lab",
    ] {
        assert!(help.contains(line), "{line}: {help}");
    }
    let pages = installed.path("man1");
    assert!(installed.godwit(&["man", pages.to_str().unwrap()]).status.success());
    assert!(pages.join("godwit-lab.1").exists() && pages.join("godwit-migrate.1").exists());
    assert!(installed.says(&["completions", "bash"]).contains("bench"));
}
