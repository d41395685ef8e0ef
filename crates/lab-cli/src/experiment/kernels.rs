//! `hcontainer-overhead` and `hcontainer-emulation`: kernels of NPB and Phoenix, Linpack and Dhrystone, as clang builds them,
//! as godwit-cc does, and emulated.
//!
//! The paper's recompiled programs are from 9 % slower to 20 % faster than the original ones (figures 10 and 11), and
//! emulation is 2.2 to 18.9 times slower than native code (figure 12). Its NPB-bt is not among ours.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use godwit_isa_programs::{
    catalogue::{KERNEL_HEADER, KERNELS, Kernel},
    compile::Compiler,
    run::{Executable, Outcome},
};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{
    Args, Lines, Verdict,
    picture::{Paper, Picture, Row},
    quantile, scratch, values,
};
use crate::{
    picture::{BLUE, GREEN, ORANGE},
    trial::blocking,
};

/// Functions of a dozen instructions, which the paper does not have: their time is that of calls alone.
const LEFT_OUT: [&str; 2] = ["ackermann", "fib"];
/// The longest that a run may take, emulated.
const LONGEST: Duration = Duration::from_secs(600);
/// How a kernel's output ends when its result is that of the benchmark's definition.
const VERIFIED: &[u8] = b"verification: passed\n";

/// Builds that are compared.
pub(super) struct Comparison {
    name: &'static str,
    title: &'static str,
    runs: u32,
    builds: &'static [Build],
    /// How many times as long the first takes as the second.
    ratios: &'static [(Build, Build)],
    paper: Paper,
    goal: Goal,
}

enum Goal {
    /// So many times as long at most, and in the geometric mean.
    AtMost(f64, f64),
    /// So many times as long at least.
    AtLeast(f64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Build {
    Plain2,
    Plain3,
    Godwit2,
    Godwit3,
    /// The arm64 build on x86-64.
    Emulated,
}

pub(super) const OVERHEAD: Comparison = Comparison {
    name: "hcontainer-overhead",
    title: "Run time by that of clang's build: least, median, most",
    runs: 5,
    builds: &[Build::Plain2, Build::Godwit2, Build::Plain3, Build::Godwit3],
    ratios: &[(Build::Godwit2, Build::Plain2), (Build::Godwit3, Build::Plain3)],
    paper: Paper { label: "the paper: −20 % to +9 %", from: 0.8, to: 1.09 },
    goal: Goal::AtMost(1.05, 1.02),
};

pub(super) const EMULATION: Comparison = Comparison {
    name: "hcontainer-emulation",
    title: "Run time of an emulated build by that of godwit-cc's: least, median, most",
    runs: 3,
    builds: &[Build::Godwit2, Build::Emulated],
    ratios: &[(Build::Emulated, Build::Godwit2)],
    paper: Paper { label: "the paper: 2.2 to 18.9 times native", from: 2.2, to: 18.9 },
    goal: Goal::AtLeast(1.0),
};

impl Build {
    fn name(self) -> &'static str {
        match self {
            Self::Plain2 => "clang -O2",
            Self::Plain3 => "clang -O3",
            Self::Godwit2 => "godwit-cc -O2",
            Self::Godwit3 => "godwit-cc -O3",
            Self::Emulated => "arm64, emulated",
        }
    }

    fn colour(self) -> RGBColor {
        match self {
            Self::Godwit2 => BLUE,
            Self::Godwit3 => GREEN,
            _ => ORANGE,
        }
    }

    fn compiler(self, godwit: &Path) -> anyhow::Result<Compiler> {
        let godwit = |option: &str| {
            let path = godwit.to_str().context("the path of the compiler is no text")?;
            Ok(Compiler {
                name: self.name().to_owned(),
                command: vec![path.to_owned(), option.to_owned()],
                suffix: ".x86_64".to_owned(),
                runner: Vec::new(),
            })
        };
        match self {
            Self::Plain2 => Ok(Compiler::plain_musl(self.name(), "-O2")),
            Self::Plain3 => Ok(Compiler::plain_musl(self.name(), "-O3")),
            Self::Godwit2 => godwit("-O2"),
            Self::Godwit3 => godwit("-O3"),
            Self::Emulated => Ok(Compiler::plain_aarch64()),
        }
    }
}

fn kernels() -> impl Iterator<Item = &'static Kernel> {
    KERNELS.iter().filter(|kernel| !LEFT_OUT.contains(&kernel.name))
}

pub(super) async fn measure(
    args: &Args,
    lines: &mut Lines,
    comparison: &'static Comparison,
) -> anyhow::Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "what is compared was built for x86-64: run {} there",
        comparison.name
    );
    let runs = if args.quick { 1 } else { comparison.runs };
    for kernel in kernels() {
        let directory = scratch()?;
        let (place, compiler) = (directory.path().to_owned(), args.compiler.clone());
        let built = blocking(move || build(kernel, comparison.builds, &place, &compiler)).await?;
        // The first run of each brings its file into memory.
        for run in u32::from(args.quick)..=runs {
            for (build, executable) in &built {
                let executable = executable.clone();
                let seconds = blocking(move || seconds(kernel, &executable)).await?;
                if run > 0 {
                    lines.add(json!({
                        "experiment": comparison.name, "kernel": kernel.name, "size": kernel.size,
                        "build": build.name(), "run": run, "seconds": seconds,
                    }))?;
                }
            }
        }
    }
    Ok(())
}

fn build(
    kernel: &Kernel,
    builds: &[Build],
    place: &Path,
    godwit: &Path,
) -> anyhow::Result<Vec<(Build, Executable)>> {
    let source = place.join(format!("{}.c", kernel.name));
    for (path, text) in [(&source, kernel.source), (&place.join("kernel.h"), KERNEL_HEADER)] {
        fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let sources: [PathBuf; 1] = [source];
    let built = builds.iter().enumerate().map(|(number, build)| {
        let output = place.join(number.to_string());
        Ok((*build, build.compiler(godwit)?.build(&sources, &output, &[])?))
    });
    built.collect()
}

fn seconds(kernel: &Kernel, executable: &Executable) -> anyhow::Result<f64> {
    let (outcome, time) = executable.timed(&[kernel.size], LONGEST)?;
    match &outcome {
        Outcome::Ended { status: 0, output, .. } if output.ends_with(VERIFIED) => Ok(time.as_secs_f64()),
        Outcome::TimedOut => bail!("{} did not end within {} s", kernel.name, LONGEST.as_secs()),
        Outcome::Ended { status, output, errors } => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            bail!("{} ended with status {status}: {} {}", kernel.name, text(output), text(errors))
        }
    }
}

/// How many times as long a build of a kernel takes as the median of another one, in order.
fn ratios(rows: &[Value], kernel: &str, (of, by): (Build, Build)) -> Vec<f64> {
    let seconds =
        |build: Build| values(rows, &[("kernel", kernel.into()), ("build", build.name().into())], "seconds");
    let by = quantile(&seconds(by), 0.5);
    by.map(|by| seconds(of).into_iter().map(|seconds| seconds / by).collect()).unwrap_or_default()
}

pub(super) fn tell(rows: &[Value], path: &Path, comparison: &Comparison) -> anyhow::Result<Vec<Verdict>> {
    let (mut drawn, mut verdicts) = (Vec::new(), Vec::new());
    let verdict = |what: String, found: Option<f64>, most: Option<f64>, least: Option<f64>| {
        let is_within =
            |found: f64| most.is_none_or(|most| found <= most) && least.is_none_or(|least| found >= least);
        let goal =
            most.map(|most| format!("at most {most}")).or(least.map(|least| format!("at least {least}")));
        Verdict {
            what,
            goal: goal.unwrap_or_default(),
            found: found.map(|found| format!("{found:.3}")).unwrap_or_default(),
            holds: found.is_some_and(is_within),
        }
    };
    let (each, mean, least) = match comparison.goal {
        Goal::AtMost(each, mean) => (Some(each), Some(mean), None),
        Goal::AtLeast(least) => (None, None, Some(least)),
    };
    for &(of, by) in comparison.ratios {
        let mut medians = Vec::new();
        for kernel in kernels() {
            let found = ratios(rows, kernel.name, (of, by));
            let label = format!("{}: {}", kernel.name, of.name());
            drawn.extend(Row::of(label.clone(), of.colour(), &found));
            let median = quantile(&found, 0.5);
            medians.extend(median);
            verdicts.push(verdict(format!("{label}, by {}", by.name()), median, each, least));
        }
        let logs: f64 = medians.iter().map(|ratio| ratio.ln()).sum();
        #[allow(clippy::cast_precision_loss)]
        let geometric = (!medians.is_empty()).then(|| (logs / medians.len() as f64).exp());
        let what = format!("geometric mean of {}, by {}", of.name(), by.name());
        verdicts.push(verdict(what, geometric, mean, least));
    }
    let picture = Picture {
        title: comparison.title,
        unit: "×",
        rows: drawn,
        paper: Some(comparison.paper),
        goal: each,
    };
    picture.draw(path)?;
    Ok(verdicts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(seconds: &[(Build, f64)]) -> Vec<Value> {
        let row = |(build, seconds): &(Build, f64)| json!({"kernel": "cg", "build": build.name(), "seconds": seconds});
        seconds.iter().map(row).collect()
    }

    fn judged(seconds: &[(Build, f64)], comparison: &Comparison) -> anyhow::Result<Vec<(String, bool)>> {
        let scratch = tempfile::tempdir()?;
        let verdicts = tell(&rows(seconds), &scratch.path().join("x.svg"), comparison)?;
        // Of the other kernels there is nothing, which holds nowhere.
        let found = verdicts.into_iter().filter(|verdict| !verdict.found.is_empty());
        Ok(found.map(|verdict| (verdict.found, verdict.holds)).collect())
    }

    #[test]
    fn a_build_is_judged_by_the_median_of_the_plain_one() -> anyhow::Result<()> {
        use Build::{Godwit2, Plain2};
        let seconds = [(Plain2, 1.0), (Plain2, 2.0), (Plain2, 9.0), (Godwit2, 2.08)];
        // 2.08 by 2 is less than 1.05, and the mean of this one is more than 1.02.
        let expected = [("1.040".to_owned(), true), ("1.040".to_owned(), false)];
        assert_eq!(judged(&seconds, &OVERHEAD)?, expected);
        Ok(())
    }

    #[test]
    fn emulation_is_to_be_slower() -> anyhow::Result<()> {
        use Build::{Emulated, Godwit2};
        let slower = judged(&[(Godwit2, 2.0), (Emulated, 8.0)], &EMULATION)?;
        assert_eq!(slower, [("4.000".to_owned(), true), ("4.000".to_owned(), true)]);
        let faster = judged(&[(Godwit2, 2.0), (Emulated, 1.0)], &EMULATION)?;
        assert_eq!(faster, [("0.500".to_owned(), false), ("0.500".to_owned(), false)]);
        Ok(())
    }
}
