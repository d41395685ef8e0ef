//! Each program of the catalogue, built by godwit-cc, prints what a plain build prints, however often it changes the
//! instruction set. `GODWIT_ISA_SEED` repeats a run.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_programs::catalogue::{Kind, Program, programs};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::Outcome;
use godwit_isa_programs::stress::{Traveller, Tried, seed};

/// A hundred times what the slowest process takes under emulation.
const LIMIT: Duration = Duration::from_secs(120);

/// A part of each thing that can be saved: what `make test` has time for.
const SELECTION: [(Kind, &[&str]); 5] = [
    (Kind::Language, &["callbacks", "goto", "int128", "jumps", "loops_left", "sorting", "varargs"]),
    (Kind::Kernels, &["ft", "kmeans"]),
    (Kind::Threads, &["cancel", "ends", "inheritance", "synchronise"]),
    (Kind::Cxx, &["exceptions", "jumps", "terminates", "threads"]),
    (
        Kind::Signals,
        &["faults_left", "handlers", "interrupts", "jumps_out", "past_the_end", "pending", "time_outs"],
    ),
];

fn stress(program: &Program, random: &mut fastrand::Rng) -> Result<Vec<String>> {
    let directory = tempfile::tempdir()?;
    let reference =
        if program.wants_wide_library() { Compiler::plain_aarch64() } else { Compiler::plain_x86_64() };
    let expected =
        reference.build(&program.sources, &directory.path().join("plain"), &[])?.run(&[], LIMIT)?;
    ensure!(
        matches!(&expected, Outcome::Ended { status: 0, .. }),
        "the plain build of {} ends with {expected:?}",
        program.name
    );
    let path = directory.path().join(&program.name);
    Compiler::godwit()?.build(&program.sources, &path, &[])?;
    let stays = program.has_kernel_objects();
    let tried =
        Traveller { program: path, arguments: Vec::new(), limit: LIMIT, stays }.stress(&expected, random)?;
    println!("{}: {tried}", program.name);
    Ok(tried.wrong.into_iter().map(|wrong| format!("{}: {wrong}", program.name)).collect())
}

fn stress_all(kind: Kind, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let seed = seed();
    println!("GODWIT_ISA_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut wrong = Vec::new();
    let all: Vec<_> = programs(kind)?.into_iter().filter(|program| wanted(&program.name)).collect();
    ensure!(!all.is_empty(), "there are no such programs of the kind {}", kind.name());
    for program in &all {
        // Programs are equal in this, so that one can be repeated alone.
        let lines = stress(program, &mut random.fork()).with_context(|| program.name.clone())?;
        wrong.extend(lines);
    }
    ensure!(wrong.is_empty(), "with GODWIT_ISA_SEED={seed}: {wrong:#?}");
    Ok(())
}

#[test]
fn a_selection_of_programs_does_not_tell_that_it_moved() -> Result<()> {
    for (kind, names) in SELECTION {
        stress_all(kind, |name| names.contains(&name))?;
    }
    Ok(())
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn kernels_do_not_tell_that_they_moved() -> Result<()> {
    stress_all(Kind::Kernels, |_| true)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_for_the_language_do_not_tell_that_they_moved() -> Result<()> {
    stress_all(Kind::Language, |_| true)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_with_threads_do_not_tell_that_they_moved() -> Result<()> {
    stress_all(Kind::Threads, |_| true)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_with_signals_do_not_tell_that_they_moved() -> Result<()> {
    stress_all(Kind::Signals, |_| true)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_in_cxx_do_not_tell_that_they_moved() -> Result<()> {
    stress_all(Kind::Cxx, |_| true)
}

/// So many that all slots' memory, the state file and the stop of all of them count.
#[test]
fn a_thousand_threads_move_together() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let many = programs(Kind::Threads)?.into_iter().find(|program| program.name == "many");
    let many = many.context("the program \"many\" is not there")?;
    let count = "1000";
    let plain = Compiler::plain_x86_64().build(&many.sources, &directory.path().join("plain"), &[])?;
    let expected = plain.run(&[count], LIMIT)?;
    let path = directory.path().join("many");
    Compiler::godwit()?.build(&many.sources, &path, &[])?;
    let traveller =
        Traveller { program: path, arguments: vec![count.to_owned()], limit: LIMIT, stays: false };
    let seed = seed();
    println!("GODWIT_ISA_SEED={seed}");
    let mut tried = Tried::default();
    traveller.travel(&mut tried, 3, &expected, &mut fastrand::Rng::with_seed(seed))?;
    println!("{tried}");
    ensure!(tried.wrong.is_empty(), "with GODWIT_ISA_SEED={seed}: {:#?}", tried.wrong);
    Ok(())
}
