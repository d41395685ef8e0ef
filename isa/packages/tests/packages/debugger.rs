//! What `-g` gives: gdb shows lines, arguments and variables of a program on both sets, and lines of what goes on after
//! a move.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::tools::{program, run};
use godwit_isa_packages::travel::SETS;

const SOURCE: &str = "#include <stdio.h>\n\
    struct point { int x, y; const char *name; };\n\
    struct point corners[2] = {{6, 7, \"even\"}, {6, 7, \"odd\"}};\n\
    volatile int total;\n\
    __attribute__((noinline)) int area(struct point *of, int factor) {\n\
        total += of->x * of->y;\n\
        of->x += factor & 1;\n\
        return total;\n\
    }\n\
    int main(void) {\n\
        int sum = 0;\n\
        for (int round = 1; round <= 20000; round++)\n\
            sum += area(&corners[round & 1], round);\n\
        printf(\"%d\\n\", sum);\n\
        return 0;\n\
    }\n";

/// What gdb is asked for, after it has stopped in `area`.
const QUESTIONS: [&str; 6] =
    ["info args", "print *of", "print corners[1].name", "print total", "up", "info symbol $pc"];

fn gdb(executable: &Path, begin: &[String]) -> Result<String> {
    let mut command = Command::new("gdb-multiarch");
    command.args(["-q", "-nx", "-batch", "-ex", "set pagination off", "-ex", "set startup-with-shell off"]);
    for line in begin.iter().map(String::as_str).chain(QUESTIONS) {
        command.args(["-ex", line]);
    }
    run(command.arg(executable))
}

fn shown(said: &str, set: &str) -> Result<()> {
    for part in [
        "area (of=0x",
        "factor=3) at seen.c:6",
        "factor = 3",
        "x = 7, y = 7",
        "name = 0x",
        "\"odd\"",
        "= 84",
        "in main () at seen.c:13",
    ] {
        ensure!(said.contains(part), "gdb does not show {part:?} on {set}: {said}");
    }
    Ok(())
}

/// Builds the program with `-g`, and gives what its executable for a set is called.
fn build(place: &Path) -> Result<impl Fn(&str) -> PathBuf> {
    std::fs::write(place.join("seen.c"), SOURCE)?;
    run(Command::new(program("godwit-cc")?).args(["-g", "-O1", "seen.c", "-o", "seen"]).current_dir(place))?;
    let place = place.to_owned();
    Ok(move |set: &str| place.join(format!("seen.{set}")))
}

/// What gdb says of the arm64 executable, which waits under qemu for a debugger, and what that program printed.
fn gdb_remote(executable: &Path, place: &Path, state: Option<&Path>, begin: &[String]) -> Result<String> {
    // A socket whose name is in the file system: no number that another may take.
    let socket = place.join("gdb");
    let mut command = Command::new(format!("qemu-{}-static", SETS[1]));
    command.arg("-g").arg(&socket).arg(executable).stdout(Stdio::piped());
    if let Some(state) = state {
        command.env("GODWIT_STATE_RESUME", state);
    }
    let mut qemu = command.spawn().context("cannot run qemu")?;
    let connected = || -> Result<String> {
        while !socket.exists() {
            ensure!(qemu_runs(qemu.id()), "qemu has ended");
            std::thread::yield_now();
        }
        let mut lines = vec![format!("target remote {}", socket.display())];
        lines.extend_from_slice(begin);
        lines.push("continue".to_owned());
        gdb(executable, &lines)
    };
    let said = connected();
    // gdb has killed it when it went; where it did not come so far, this does.
    let killed = qemu.kill();
    let mut output = String::new();
    BufReader::new(qemu.stdout.take().context("qemu has no output")?).read_line(&mut output)?;
    qemu.wait()?;
    let said = said?;
    killed.context("cannot end qemu")?;
    Ok(said)
}

#[test]
fn gdb_shows_lines_and_variables_on_both_sets() -> Result<()> {
    let place = tempfile::tempdir()?;
    let executable = build(place.path())?;
    let stop = "break area if factor == 3".to_owned();
    shown(&gdb(&executable(SETS[0]), &[stop.clone(), "run".to_owned()])?, SETS[0])?;
    shown(&gdb_remote(&executable(SETS[1]), place.path(), None, &[stop])?, SETS[1])
}

#[test]
fn gdb_shows_the_lines_of_what_goes_on_after_a_move() -> Result<()> {
    let place = tempfile::tempdir()?;
    let executable = build(place.path())?;
    let state = place.path().join("state");
    // The C library polls too, before `main`, while it reads the environment: far fewer times than this.
    let left = Command::new(executable(SETS[0]))
        .env_clear()
        .env("GODWIT_STATE_POLLS", "10000")
        .env("GODWIT_STATE_SAVE", &state)
        .status()
        .context("cannot run the program")?;
    ensure!(left.code() == Some(86), "the program does not leave, but ends with {left}");
    // `main` goes on in its clone, and calls `area` from there.
    let is_clone = |said: &str, set: &str| {
        for part in ["area (of=0x", "in main () at seen.c:13", "__gw_resume_main + "] {
            ensure!(said.contains(part), "gdb does not show {part:?} of a clone on {set}: {said}");
        }
        Ok(())
    };
    let stop = "break *area".to_owned();
    let resume = format!("set environment GODWIT_STATE_RESUME={}", state.display());
    is_clone(&gdb(&executable(SETS[0]), &[resume, stop.clone(), "run".to_owned()])?, SETS[0])?;
    is_clone(&gdb_remote(&executable(SETS[1]), place.path(), Some(&state), &[stop])?, SETS[1])
}

fn qemu_runs(process: u32) -> bool {
    // What has ended stays until it is waited for.
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}
