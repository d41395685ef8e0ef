//! Programs with threads in one process that changes its set: threads end with an exec, and are made again by the next
//! leg, in the same process.

use std::process::Command;

use anyhow::{Result, ensure};
use godwit_isa_packages::tools::{isa, program, run};
use godwit_isa_packages::travel::{Every, SETS, changes, hopping, whole};

use crate::support::{output, same, seed};

#[test]
#[ignore = "builds three programs: make test-isa-full"]
fn threads_that_compute_wait_and_meet_hop_with_their_process() -> Result<()> {
    let place = tempfile::tempdir()?;
    let seed = seed();
    // In `ends` the main thread ends before the others.
    for (name, every) in [("synchronise", "2ms"), ("blocked", "30ms"), ("ends", "2ms")] {
        run(Command::new(program("godwit-cc")?)
            .args(["-O2", "-std=gnu17", "-pthread", "-o", name])
            .arg(isa().join("programs/threads").join(name).with_extension("c"))
            .current_dir(&place))?;
        let path = place.path().join(name);
        let expected = output(&mut whole(&path, SETS[0])?, place.path())?;
        ensure!(expected.status.success() && !expected.stdout.is_empty(), "{name}: {expected:?}");
        let mut found = output(&mut hopping(&path, Every::Time(every), seed)?, place.path())?;
        let moved = changes(&mut found)?;
        same(&found, &expected, &format!("{name} after {moved} changes"))?;
        ensure!(moved >= 2, "{name} moved {moved} times only");
    }
    Ok(())
}
