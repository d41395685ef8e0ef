//! What is refused before any program runs, each with a sentence that says what to do.

use std::path::Path;
use std::process::{Command, Output};

fn godwit_state(arguments: &[&str]) -> Output {
    godwit_state_with_path(arguments, &std::env::var_os("PATH").unwrap_or_default())
}

fn godwit_state_with_path(arguments: &[&str], path: &std::ffi::OsStr) -> Output {
    Command::new(env!("CARGO_BIN_EXE_godwit-state"))
        .args(arguments)
        .env("PATH", path)
        .output()
        .expect("it can be started")
}

/// Asserts a failure with these parts in its sentence.
fn fails(output: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(said.contains(part), "\"{part}\" is missing in: {said}");
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

#[test]
fn a_missing_executable_is_named() {
    let directory = directory();
    let prog = directory.path().join("prog");
    for set in ["x86_64", "aarch64"] {
        let file = format!("prog.{set}");
        fails(&godwit_state(&["run", text(&prog), "--set", set]), &[&file, "no executable", "godwit-ld"]);
        fails(&godwit_state(&["hop", text(&prog), "--every-polls", "5", "--sets", set]), &[&file]);
    }
}

#[test]
fn a_missing_qemu_is_named_with_its_package() {
    let directory = directory();
    let foreign = if std::env::consts::ARCH == "x86_64" { "aarch64" } else { "x86_64" };
    std::fs::write(directory.path().join(format!("prog.{foreign}")), "").expect("it is ours");
    let prog = directory.path().join("prog");
    // A directory in PATH that has the name, but nothing to execute.
    std::fs::write(directory.path().join(format!("qemu-{foreign}-static")), "").expect("it is ours");
    let output =
        godwit_state_with_path(&["run", text(&prog), "--set", foreign], directory.path().as_os_str());
    fails(
        &output,
        &[&format!("neither qemu-{foreign}-static nor qemu-{foreign}"), "the package qemu-user-static"],
    );
}

#[test]
fn what_is_not_made_by_the_tool_chain_is_refused() {
    let directory = directory();
    let prog = directory.path().join("prog");
    let path = directory.path().join(format!("prog.{}", std::env::consts::ARCH));
    std::fs::write(&path, "#!/bin/sh\necho ran\n").expect("it is ours");
    fails(&godwit_state(&["run", text(&prog)]), &["is not an executable", "godwit-cc"]);
    std::fs::copy("/bin/true", &path).expect("there is room");
    fails(&godwit_state(&["run", text(&prog)]), &["has no symbol __gw_build_identity", "do not strip it"]);
    if std::env::consts::ARCH == "x86_64" {
        // An executable of another set than its name says.
        let mut elf = std::fs::read("/bin/true").expect("every machine has it");
        elf[18] = 183;
        std::fs::write(&path, elf).expect("it is ours");
        fails(&godwit_state(&["run", text(&prog)]), &["not an executable for x86_64"]);
    }
}

#[test]
fn a_missing_state_is_named() {
    fails(&godwit_state(&["inspect", "/nowhere/a.state"]), &["cannot read the state file /nowhere/a.state"]);
    let directory = directory();
    fails(&godwit_state(&["inspect", text(directory.path())]), &["cannot read the state file", "directory"]);
}

#[test]
fn a_command_line_that_makes_no_sense_is_refused() {
    for arguments in [
        &["run"][..],
        &["run", "prog", "--after-polls", "0", "--state", "s"],
        &["run", "prog", "--after", "5", "--state", "s"],
        &["run", "prog", "--after", "5s", "--after-polls", "5", "--state", "s"],
        &["run", "prog", "--on-signal", "KILL", "--state", "s"],
        &["run", "prog", "--state", "s"],
        &["run", "prog", "--after", "5s"],
        &["run", "prog", "--set", "riscv64"],
        &["resume", "s"],
        &["hop", "prog", "--every-polls", "5", "--sets", ""],
    ] {
        let output = godwit_state(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains("error:"), "{arguments:?}: {said}");
    }
}

#[test]
fn help_and_man_pages_tell_every_verb() {
    let help = godwit_state(&["--help"]);
    assert!(help.status.success());
    let directory = directory();
    let man = godwit_state(&["man", text(directory.path())]);
    assert!(man.status.success(), "{man:?}");
    for verb in ["run", "resume", "hop", "inspect"] {
        assert!(String::from_utf8_lossy(&help.stdout).contains(verb), "{verb}");
        let page =
            std::fs::read_to_string(directory.path().join(format!("godwit-state-{verb}.1"))).expect("a page");
        assert!(page.contains("SYNOPSIS"), "{verb}");
    }
}
