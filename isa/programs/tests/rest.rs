//! Programs that come to rest at random moments of their run, and go on in place or from the resume entry as after a
//! restore, print what an undisturbed run prints.
#![cfg(target_arch = "x86_64")]

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fastrand::Rng;
use godwit_crossing::Request;
use godwit_isa_programs::catalogue::{Kind, Program, programs};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::Outcome;
use godwit_isa_tests::rest::{Tree, ask, asked_at_begin, halt, proceed, record};

/// A hundred times what the slowest takes.
const LIMIT: Duration = Duration::from_secs(120);
/// The longest time between two rests, in microseconds.
const BETWEEN: u64 = 300;
/// After so many rests a program is left alone, so that it ends.
const MOST: u32 = 200;
/// It comes to so many whatever happens: it is asked before it begins, and then while it is at rest.
const LEAST: u32 = 5;

/// A program that runs, and after a failure does so no more, least of all at rest.
struct Running {
    child: Child,
    tree: Tree,
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.tree.kill();
            let _ = self.child.wait();
        }
    }
}

/// Lets a process at rest go on in place and asks it for the next rest, both while it is stopped, so that it cannot end in
/// between. At its begin a program has one process and one thread.
fn rest_again(process: i32, number: u64) -> Result<()> {
    let number = u32::try_from(number)?;
    halt(process)?;
    ask(process, Request::SIGNAL, Request::GoOn(number))?;
    ask(process, Request::SIGNAL, Request::Rest(number + 1))?;
    proceed(process)?;
    let begun = Instant::now();
    // The kernel tells nobody.
    while record(process)?.context("it has ended")?.rest.is_none_or(|rest| rest.number <= number.into()) {
        ensure!(begun.elapsed() < LIMIT, "process {process} does not come to rest {}", number + 1);
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Runs a program with rests, and gives what it came to and how often it rested.
fn disturbed(program: &std::path::Path, random: &mut Rng) -> Result<(Outcome, u32)> {
    let (output, errors) = (program.with_extension("output"), program.with_extension("errors"));
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(File::create(&output)?).stderr(File::create(&errors)?);
    let child = asked_at_begin(&mut command).spawn()?;
    let tree = Tree::of(i32::try_from(child.id())?);
    let mut running = Running { child, tree: tree.clone() };
    let mut rests = 0;
    while rests < LEAST {
        let [(process, rest)] = tree.rest()?[..] else { bail!("it has ended after {rests} rests") };
        rests += 1;
        if rests < LEAST { rest_again(process, rest.number)? } else { tree.go_on()? }
    }
    while rests < MOST && running.child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_micros(random.u64(..BETWEEN)));
        if tree.rest()?.is_empty() {
            break;
        }
        rests += 1;
        if random.bool() { tree.restart()? } else { tree.go_on()? }
    }
    let status = running.child.wait()?.code().context("it was killed")?;
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

fn all_of(kind: Kind) -> Result<()> {
    let seed =
        std::env::var("GODWIT_ISA_SEED").ok().map_or_else(|| Ok(fastrand::u64(..)), |seed| seed.parse())?;
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    let mut wrong = Vec::new();
    for program in programs(kind)? {
        match try_one(&program, &mut random) {
            Ok(rests) => println!("{}: {rests} rests", program.name),
            Err(error) => wrong.push(format!("{}: {error:#}", program.name)),
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn programs_with_signals_rest_unnoticed() -> Result<()> {
    all_of(Kind::Signals)
}

#[test]
fn programs_with_threads_rest_unnoticed() -> Result<()> {
    all_of(Kind::Threads)
}
