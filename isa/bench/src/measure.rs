//! One program, built in several ways, and its builds run in turn.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_programs::run::{Executable, Outcome};
use serde::{Deserialize, Serialize};

use crate::elf;

/// The longest that a run may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// A way to build, and how often what it makes is run.
#[derive(Debug, Clone)]
pub(crate) struct Variant {
    pub(crate) compiler: Compiler,
    pub(crate) runs: usize,
}

/// A variant that has been built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) runs: usize,
    pub(crate) executable: Executable,
    /// Bytes of all sections with code.
    pub(crate) text: u64,
}

/// What the runs of one build came to: seconds of whole processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) variant: String,
    pub(crate) runs: usize,
    pub(crate) median: f64,
    /// From the least to the largest, as a part of the median.
    pub(crate) spread: f64,
}

/// What a program took in all its builds; the first is the one to compare with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Timed {
    pub(crate) name: String,
    pub(crate) size: String,
    pub(crate) figures: Vec<Figure>,
}

impl Timed {
    /// How often as long as the first build another one takes.
    pub(crate) fn ratio(&self, variant: &str) -> Option<f64> {
        let figure = self.figures.iter().find(|figure| figure.variant == variant)?;
        Some(figure.median / self.figures.first()?.median)
    }
}

/// Builds a program in all ways.
///
/// # Errors
/// When a compiler fails.
pub(crate) fn build(
    variants: &[Variant],
    sources: &[PathBuf],
    flags: &[&str],
    directory: &Path,
) -> Result<Vec<Built>> {
    variants
        .iter()
        .map(|Variant { compiler, runs }| {
            let executable = compiler.build(sources, &directory.join(&compiler.name), flags)?;
            let text = text(&executable.path)?;
            Ok(Built { name: compiler.name.clone(), runs: *runs, executable, text })
        })
        .collect()
}

/// Runs all builds in turn, so that what disturbs the machine disturbs all of them.
///
/// # Errors
/// When a run fails, when `agreed` finds no result in what it prints, or when two builds print different results.
pub(crate) fn time(
    name: &str,
    size: &str,
    builds: &[Built],
    arguments: &[&str],
    agreed: fn(&[u8]) -> Option<&[u8]>,
) -> Result<Timed> {
    let mut times = vec![Vec::new(); builds.len()];
    let mut expected: Option<Vec<u8>> = None;
    // The first round brings files into memory, and is not counted.
    let rounds = builds.iter().map(|build| build.runs).max().context("no builds are asked for")?;
    ensure!(rounds > 0, "no runs are asked for");
    for round in 0..=rounds {
        for (build, times) in builds.iter().zip(&mut times) {
            if round > build.runs {
                continue;
            }
            let (outcome, time) = build.executable.timed(arguments, LIMIT)?;
            let result = match &outcome {
                Outcome::Ended { status: 0, output, .. } => agreed(output),
                _ => None,
            };
            let result =
                result.with_context(|| format!("{name} as built by {} fails: {outcome:?}", build.name))?;
            match &expected {
                Some(first) if first != result => bail!("the builds of {name} print different results"),
                _ => expected = Some(result.to_vec()),
            }
            if round > 0 {
                times.push(time.as_secs_f64());
            }
        }
    }
    let figures = builds
        .iter()
        .zip(times)
        .map(|(build, times)| {
            let (median, spread) = summarise(times);
            Figure { variant: build.name.clone(), runs: build.runs, median, spread }
        })
        .collect();
    Ok(Timed { name: name.to_owned(), size: size.to_owned(), figures })
}

/// Bytes of all sections with code.
///
/// # Errors
/// When the file is no executable.
pub(crate) fn text(path: &Path) -> Result<u64> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    elf::executable_bytes(&bytes)
        .with_context(|| format!("{} is not an executable for Linux", path.display()))
}

/// Median, and the distance from the least to the largest as a part of it.
pub(crate) fn summarise(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let (least, largest) = (times[0], times[times.len() - 1]);
    let middle = times.len() / 2;
    let median =
        if times.len() % 2 == 1 { times[middle] } else { f64::midpoint(times[middle - 1], times[middle]) };
    (median, (largest - least) / median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_odd_and_of_an_even_number_of_runs() {
        assert_eq!(summarise(vec![5.0, 1.0, 2.0]), (2.0, 2.0));
        assert_eq!(summarise(vec![4.0, 1.0, 2.0, 3.0]), (2.5, 1.2));
    }

    #[test]
    fn a_ratio_is_that_to_the_first_build() {
        let figure = |variant: &str, median| Figure { variant: variant.into(), runs: 1, median, spread: 0.0 };
        let timed = Timed {
            name: "is".into(),
            size: "1".into(),
            figures: vec![figure("plain", 2.0), figure("godwit", 3.0)],
        };
        assert_eq!(timed.ratio("godwit"), Some(1.5));
        assert_eq!(timed.ratio("other"), None);
    }
}
