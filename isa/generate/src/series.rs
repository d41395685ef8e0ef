//! A series of random programs, each built by several compilers, whose outputs are compared; and by godwit-cc, whose
//! build is put under stress.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::Outcome;
use godwit_isa_programs::stress::Traveller;

use crate::kind::Kind;

/// What a seed came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All builds printed the same.
    Equal,
    /// The first build, which is the reference, did not end in time: the seed says nothing.
    TimedOut,
    /// A build failed, or printed something else than the first: one line per compiler.
    Differs(Vec<String>),
}

/// What a series came to.
#[derive(Debug, Default)]
pub struct Summary {
    /// How many seeds had equal outputs.
    pub equal: usize,
    /// The seeds that were replaced by others, since their program runs too long.
    pub timed_out: Vec<u64>,
    /// The seeds with different outputs, and how.
    pub differing: Vec<(u64, Vec<String>)>,
}

/// What to try.
#[derive(Debug, Clone)]
pub struct Series<'a> {
    /// The kind of the programs.
    pub kind: Kind,
    /// The first is the reference.
    pub compilers: &'a [Compiler],
    /// For each run of the reference; the others get twenty times as much, since they may be stressed or emulated.
    pub limit: Duration,
    /// Builds for both sets what is put under stress besides, when there is one. The random choices follow from the
    /// program's seed.
    pub travels: Option<&'a Compiler>,
}

impl Series<'_> {
    /// Makes, builds and runs the program of one seed in `directory`, which it leaves its files in.
    ///
    /// # Errors
    /// When the program cannot be made, or a run cannot be started.
    pub fn try_seed(&self, seed: u64, directory: &Path) -> Result<Verdict> {
        let source = directory.join("program.c");
        std::fs::write(&source, self.kind.program(seed)?)
            .with_context(|| format!("cannot write {}", source.display()))?;
        let (reference, others) = self.compilers.split_first().context("there is no compiler")?;
        let sources = [source];
        let extra = self.kind.arguments();
        let expected = match reference.build(&sources, &directory.join(&reference.name), extra) {
            Ok(executable) => executable.run(&[], self.limit)?,
            Err(error) => return Ok(Verdict::Differs(vec![format!("{error:#}")])),
        };
        if expected == Outcome::TimedOut {
            return Ok(Verdict::TimedOut);
        }
        let mut wrong = Vec::new();
        for compiler in others {
            match compiler.build(&sources, &directory.join(&compiler.name), extra) {
                Ok(executable) => {
                    let found = executable.run(&[], self.limit * 20)?;
                    if !found.same(&expected) {
                        wrong.push(format!("{}: {}", compiler.name, found.difference(&expected)));
                    }
                }
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        if let Some(compiler) = self.travels {
            let program = directory.join("traveller");
            match compiler.build(&sources, &program, extra) {
                Ok(_) => {
                    // Programs with threads have pipes.
                    let stays = self.kind == Kind::Threads;
                    let traveller =
                        Traveller { program, arguments: Vec::new(), limit: self.limit * 20, stays };
                    wrong.extend(traveller.stress(&expected, &mut fastrand::Rng::with_seed(seed))?.wrong);
                }
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        Ok(if wrong.is_empty() { Verdict::Equal } else { Verdict::Differs(wrong) })
    }

    /// Tries seeds from `first` on until `count` of them have said something. `tell` hears of each.
    ///
    /// # Errors
    /// As [`Self::try_seed`]; and when more than three times `count` seeds in all run too long.
    pub fn run(&self, first: u64, count: usize, mut tell: impl FnMut(u64, &Verdict)) -> Result<Summary> {
        let mut summary = Summary::default();
        for seed in first.. {
            if summary.equal + summary.differing.len() == count {
                break;
            }
            let directory = tempfile::tempdir().context("cannot make a directory for a program")?;
            let verdict = self.try_seed(seed, directory.path()).with_context(|| format!("seed {seed}"))?;
            tell(seed, &verdict);
            match verdict {
                Verdict::Equal => summary.equal += 1,
                Verdict::TimedOut => summary.timed_out.push(seed),
                Verdict::Differs(how) => summary.differing.push((seed, how)),
            }
            ensure!(
                summary.timed_out.len() <= 3 * count,
                "of {} programs {} ran into the limit of {:?}: give them more time",
                summary.equal + summary.differing.len() + summary.timed_out.len(),
                summary.timed_out.len(),
                self.limit
            );
        }
        Ok(summary)
    }
}
