//! GOCR reads the same text on a page in one piece, under captures and on a journey, on either set.

use std::process::Command;

use anyhow::{Result, ensure};
use godwit_isa_packages::base::GOCR;
use godwit_isa_packages::gocr::page;
use godwit_isa_packages::package::built;
use godwit_isa_packages::travel::{Every, SETS, changes, hopping, turning, whole};

use crate::support::{output, seed};

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn gocr_reads_the_same_under_captures_and_on_journeys() -> Result<()> {
    let program = built(GOCR)?.join("src/gocr");
    let place = tempfile::tempdir()?;
    let (picture, text) = page(16);
    std::fs::write(place.path().join("page.pgm"), picture)?;
    let read = |mut command: Command, what: &str| -> Result<std::process::Output> {
        let found = output(command.arg("page.pgm"), place.path())?;
        let said = String::from_utf8_lossy(&found.stdout);
        ensure!(found.status.success() && said == text, "{what}: {}: {said}", found.status);
        Ok(found)
    };
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    for set in SETS {
        read(whole(&program, set)?, set)?;
    }
    for most in [200, 5_000, 100_000] {
        let polls = random.u64(most / 2..=most);
        read(turning(&program, SETS[0], polls)?, &format!("captured every {polls} polls"))?;
    }
    let moved = changes(&mut read(hopping(&program, Every::Polls(400_000), seed)?, "on a journey")?)?;
    ensure!(moved >= 3, "it moved {moved} times only");
    Ok(())
}
