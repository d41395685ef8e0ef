//! Random programs print the same on both instruction sets, so that a difference in a build of the tool chain is one of
//! the tool chain; a build that is wrong is found; and builds of godwit-cc do not tell that they moved.

use std::time::Duration;

use anyhow::{Result, ensure};
use godwit_isa_generate::kind::Kind;
use godwit_isa_generate::series::{Series, Verdict};
use godwit_isa_programs::compile::Compiler;

const LIMIT: Duration = Duration::from_secs(5);

fn equal_on_both(kind: Kind, first: u64, count: usize) -> Result<()> {
    let compilers = [kind.reference(), Compiler::plain_aarch64()];
    let series = Series { kind, compilers: &compilers, limit: LIMIT, travels: None };
    let summary = series.run(first, count, |seed, verdict| println!("{kind:?} seed {seed}: {verdict:?}"))?;
    ensure!(summary.differing.is_empty(), "seeds that differ: {:#?}", summary.differing);
    ensure!(summary.equal == count, "{} of {count} were compared", summary.equal);
    Ok(())
}

#[test]
fn programs_of_csmith_are_equal_on_both_sets() -> Result<()> {
    equal_on_both(Kind::Csmith, 1, 8)
}

#[test]
fn programs_with_variable_arguments_are_equal_on_both_sets() -> Result<()> {
    equal_on_both(Kind::Varargs, 1, 10)
}

#[test]
fn programs_of_floating_point_are_equal_on_both_sets() -> Result<()> {
    equal_on_both(Kind::Floats, 1, 10)
}

#[test]
fn programs_with_threads_are_equal_on_both_sets() -> Result<()> {
    equal_on_both(Kind::Threads, 1, 10)
}

/// Builds of godwit-cc, captured in place and moved from set to set at random polls and times.
fn do_not_tell(kind: Kind, first: u64, count: usize) -> Result<()> {
    let (reference, godwit) = ([kind.reference()], Compiler::godwit()?);
    let series = Series { kind, compilers: &reference, limit: LIMIT, travels: Some(&godwit) };
    let summary = series.run(first, count, |seed, verdict| println!("{kind:?} seed {seed}: {verdict:?}"))?;
    ensure!(summary.differing.is_empty(), "seeds that differ: {:#?}", summary.differing);
    ensure!(summary.equal == count, "{} of {count} were compared", summary.equal);
    Ok(())
}

#[test]
fn some_random_programs_do_not_tell_that_they_moved() -> Result<()> {
    do_not_tell(Kind::Csmith, 1, 4)?;
    do_not_tell(Kind::Varargs, 1, 2)?;
    do_not_tell(Kind::Floats, 1, 2)?;
    do_not_tell(Kind::Threads, 1, 2)
}

#[test]
#[ignore = "half an hour: make test-isa-full"]
fn three_hundred_programs_of_csmith_do_not_tell_that_they_moved() -> Result<()> {
    do_not_tell(Kind::Csmith, 1000, 300)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_with_variable_arguments_do_not_tell_that_they_moved() -> Result<()> {
    do_not_tell(Kind::Varargs, 1000, 50)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_of_floating_point_do_not_tell_that_they_moved() -> Result<()> {
    do_not_tell(Kind::Floats, 1000, 50)
}

#[test]
#[ignore = "minutes: make test-isa-full"]
fn programs_with_threads_do_not_tell_that_they_moved() -> Result<()> {
    do_not_tell(Kind::Threads, 1000, 50)
}

#[test]
fn a_compiler_that_breaks_floating_point_is_found() -> Result<()> {
    let mut fast = Compiler::plain_x86_64();
    fast.name = "fast".to_owned();
    // With it the compiler takes 1/x for a product and changes the order of sums.
    fast.command.push("-ffast-math".to_owned());
    let compilers = [Compiler::plain_x86_64(), fast];
    let series = Series { kind: Kind::Floats, compilers: &compilers, limit: LIMIT, travels: None };
    let summary = series.run(1, 3, |_, _| {})?;
    ensure!(!summary.differing.is_empty(), "three programs print the same with -ffast-math");
    Ok(())
}

#[test]
fn a_program_that_runs_too_long_says_nothing() -> Result<()> {
    let compilers = [Compiler::plain_x86_64(), Compiler::plain_x86_64()];
    let series = Series {
        kind: Kind::Threads,
        compilers: &compilers,
        limit: Duration::from_nanos(1000),
        travels: None,
    };
    let directory = tempfile::tempdir()?;
    let verdict = series.try_seed(1, directory.path())?;
    ensure!(verdict == Verdict::TimedOut, "the verdict is {verdict:?}");
    Ok(())
}
