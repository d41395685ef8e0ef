//! What the tests of packages share.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};

/// A number that decides where a test captures: printed with what fails, and taken from `GODWIT_ISA_SEED` when that is
/// set, to run a test again as it was.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("GODWIT_ISA_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(1..1 << 40));
    println!("GODWIT_ISA_SEED={seed}");
    seed
}

/// Runs a command in a directory, whatever comes of it.
pub(crate) fn output(command: &mut Command, directory: &Path) -> Result<Output> {
    command.current_dir(directory).output().with_context(|| format!("cannot run {command:?}"))
}

/// Status, output and complaints must be the same.
pub(crate) fn same(found: &Output, expected: &Output, what: &str) -> Result<()> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, wanted) = (text(&found.stdout), text(&expected.stdout));
    let differs = out.lines().zip(wanted.lines()).find(|(a, b)| a != b);
    ensure!(
        found.status == expected.status && out == wanted && found.stderr == expected.stderr,
        "{what}: {} instead of {}, first difference {differs:?}, {} and {} bytes; it said: {}",
        found.status,
        expected.status,
        out.len(),
        wanted.len(),
        text(&found.stderr)
    );
    Ok(())
}

/// Waits until the process that godwit-state has started has changed its set so often, which is seen from outside: on
/// arm64 it is qemu's program that runs; `program` is the name of the other set's.
pub(crate) fn wait_for_changes(
    supervisor: u32,
    program: &str,
    least: u64,
    lost: impl Fn() -> bool,
) -> Result<()> {
    let children = format!("/proc/{supervisor}/task/{supervisor}/children");
    let (mut changes, mut before) = (0, None);
    while changes < least {
        ensure!(!lost(), "a client has ended before its time");
        let listed = std::fs::read_to_string(&children).context("godwit-state has ended")?;
        let Some(child) = listed.split_whitespace().next() else {
            std::thread::yield_now();
            continue;
        };
        // A process that is between two executables has none for a moment.
        let Ok(executable) = std::fs::read_link(Path::new("/proc").join(child).join("exe")) else { continue };
        let name = executable.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with("qemu-") && !name.starts_with(program) {
            continue;
        }
        if before.as_ref().is_some_and(|before| *before != name) {
            changes += 1;
        }
        before = Some(name);
        // Nothing tells of a change of executables; two cores are few, so it is not looked at all the time.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Ok(())
}
