//! Programs that come to rest at random moments of their run, and go on in place or from the resume entry as after a
//! restore, print what an undisturbed run prints.
#![cfg(target_arch = "x86_64")]

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use godwit_isa_programs::catalogue::{Kind, Program, programs};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::Outcome;
use godwit_isa_tests::rest::Tree;

/// A hundred times what the slowest takes.
const LIMIT: Duration = Duration::from_secs(120);
/// The longest time between two rests, in microseconds.
const BETWEEN: u64 = 300;
/// After so many rests a program is left alone, so that it ends.
const MOST: u32 = 200;

/// Runs a program with rests, and gives what it came to and how often it rested.
fn disturbed(program: &std::path::Path, random: &mut Rng) -> Result<(Outcome, u32)> {
    let (output, errors) = (program.with_extension("output"), program.with_extension("errors"));
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(File::create(&output)?).stderr(File::create(&errors)?);
    let mut child = command.spawn()?;
    let tree = Tree::of(i32::try_from(child.id())?);
    let mut rests = 0;
    while rests < MOST && child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_micros(random.u64(..BETWEEN)));
        if tree.rest()?.is_empty() {
            break;
        }
        rests += 1;
        if random.bool() { tree.restart()? } else { tree.go_on()? }
    }
    let status = child.wait()?.code().context("it was killed")?;
    Ok((Outcome::Ended { status, output: std::fs::read(output)?, errors: std::fs::read(errors)? }, rests))
}

fn try_one(program: &Program, random: &mut Rng) -> Result<u32> {
    let directory = tempfile::tempdir()?;
    let built = Compiler::godwit()?.build(&program.sources, &directory.path().join("program"), &[])?;
    let expected = built.run(&[], LIMIT)?;
    let (found, rests) = disturbed(&built.path, random)?;
    ensure!(found.same(&expected), "after {rests} rests {}", found.difference(&expected));
    Ok(rests)
}

fn all_of(kind: Kind, least: u32) -> Result<()> {
    let seed =
        std::env::var("GODWIT_ISA_SEED").ok().map_or_else(|| Ok(fastrand::u64(..)), |seed| seed.parse())?;
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    let mut wrong = Vec::new();
    let mut rests = 0;
    for program in programs(kind)? {
        match try_one(&program, &mut random) {
            Ok(more) => {
                println!("{}: {more} rests", program.name);
                rests += more;
            }
            Err(error) => wrong.push(format!("{}: {error:#}", program.name)),
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    ensure!(rests >= least, "{rests} rests are none to speak of");
    Ok(())
}

#[test]
fn programs_with_signals_rest_unnoticed() -> Result<()> {
    all_of(Kind::Signals, 50)
}

#[test]
fn programs_with_threads_rest_unnoticed() -> Result<()> {
    all_of(Kind::Threads, 20)
}
