//! Plain builds of each program for both instruction sets print the same, so that what they print can be asked of the
//! tool chain's builds. A kernel verifies its own result as well.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_isa_programs::catalogue::{Kind, Program, programs};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::Outcome;

/// A hundred times what the slowest takes on arm64 under emulation.
const LIMIT: Duration = Duration::from_secs(120);

fn plain(compiler: &Compiler, program: &Program) -> Result<Outcome> {
    let directory = tempfile::tempdir()?;
    let warnings = ["-Wall", "-Wextra", "-Werror"];
    let outcome =
        compiler.build(&program.sources, &directory.path().join("program"), &warnings)?.run(&[], LIMIT)?;
    match &outcome {
        Outcome::Ended { status: 0, errors, .. } if errors.is_empty() => Ok(outcome),
        _ => bail!("{} of {}: {outcome:?}", program.name, compiler.name),
    }
}

fn agree(kind: Kind) -> Result<()> {
    let all = programs(kind)?;
    ensure!(!all.is_empty(), "there are no programs of the kind {}", kind.name());
    let mut wrong = Vec::new();
    for program in &all {
        if !program.can_be_emulated() {
            plain(&Compiler::plain_x86_64(), program)?;
            continue;
        }
        // The machine has the C++ library of a cross compiler seldom: there two compilers are held against each other.
        let other = if kind == Kind::Cxx { Compiler::plain_gcc() } else { Compiler::plain_aarch64() };
        let arm = plain(&other, program)?;
        if program.wants_wide_library() {
            continue;
        }
        let intel = plain(&Compiler::plain_x86_64(), program)?;
        if !arm.same(&intel) {
            wrong.push(format!("{}: {}", program.name, arm.difference(&intel)));
        }
        if kind == Kind::Kernels {
            let Outcome::Ended { output, .. } = &arm else { bail!("{} did not end", program.name) };
            let text = std::str::from_utf8(output).context("a kernel prints text")?;
            ensure!(text.ends_with("\nverification: passed\n"), "{} prints {text}", program.name);
        }
    }
    ensure!(wrong.is_empty(), "arm64 prints otherwise than x86-64: {wrong:#?}");
    Ok(())
}

#[test]
fn kernels_agree_and_verify_their_results() -> Result<()> {
    agree(Kind::Kernels)
}

#[test]
fn programs_for_the_language_agree() -> Result<()> {
    agree(Kind::Language)
}

#[test]
fn programs_with_threads_agree() -> Result<()> {
    agree(Kind::Threads)
}

#[test]
fn programs_in_cxx_agree() -> Result<()> {
    agree(Kind::Cxx)
}

#[test]
fn programs_with_signals_agree() -> Result<()> {
    agree(Kind::Signals)
}
