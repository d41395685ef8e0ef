//! The results as tables in a page: each between two comments, `<!-- begin NAME -->` and `<!-- end NAME -->`, so that
//! what stands around them is written by hand and the figures are not.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::capture::{Depth, Requests};
use crate::compilers::{ALIGNMENTS, PARTS};
use crate::measure::Timed;
use crate::packages::Compiled;
use crate::touched::Text;

/// Everything that has been measured; a part that was not run keeps what it was.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Results {
    /// When, on what.
    pub(crate) machine: String,
    pub(crate) kernels: Vec<Timed>,
    pub(crate) lua: Vec<Timed>,
    pub(crate) sqlite: Vec<Timed>,
    pub(crate) compiled: Vec<Compiled>,
    pub(crate) text: Vec<Text>,
    pub(crate) depths: Vec<Depth>,
    pub(crate) requests: Option<Requests>,
}

/// Functions of a few instructions, which measure where the linker put them as much as what they do.
pub(crate) fn is_apart(name: &str) -> bool {
    name == "fib" || name == "ackermann"
}

/// Puts all tables into the page.
///
/// # Errors
/// When the page has no place for one of them.
pub(crate) fn fill(page: &str, results: &Results) -> Result<String> {
    let tables = [
        ("machine", format!("{}\n", results.machine)),
        ("kernels", kernels(results)),
        ("alignments", alignments(results)),
        ("scripts", scripts(results)),
        ("text", text(results)),
        ("capture", capture(results)),
        ("compile", compile(results)),
    ];
    let mut page = page.to_owned();
    for (name, table) in tables {
        let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
        let from = page.find(&begin).with_context(|| format!("the page has no line {begin}"))? + begin.len();
        let to = page[from..].find(&end).with_context(|| format!("the page has no line {end}"))? + from;
        page.replace_range(from..to, &table);
    }
    Ok(page)
}

fn header(text: &mut String, names: &[&str]) {
    let _ = writeln!(text, "| {} |", names.join(" | "));
    let _ = writeln!(text, "| --- |{}", " ---: |".repeat(names.len() - 1));
}

/// A ratio to the plain build.
fn ratio(timed: &Timed, variant: &str) -> String {
    timed.ratio(variant).map_or_else(String::new, |ratio| format!("{ratio:.3}"))
}

fn mean(timed: &[&Timed], variant: &str) -> String {
    let ratios: Vec<f64> = timed.iter().filter_map(|timed| timed.ratio(variant)).collect();
    if ratios.is_empty() {
        return String::new();
    }
    format!("**{:.3}**", geometric_mean(&ratios))
}

fn geometric_mean(values: &[f64]) -> f64 {
    let count = u32::try_from(values.len()).map_or(f64::INFINITY, f64::from);
    (values.iter().map(|value| value.ln()).sum::<f64>() / count).exp()
}

/// Plain seconds, spread, and the ratio of each variant; then the geometric means.
fn ratios(text: &mut String, timed: &[&Timed], variants: &[&str]) {
    for one in timed {
        let Some(plain) = one.figures.first() else { continue };
        let all: Vec<String> = variants.iter().map(|variant| ratio(one, variant)).collect();
        let _ = writeln!(
            text,
            "| {} | {:.3} | {:.1} % | {} |",
            one.name,
            plain.median,
            plain.spread * 100.0,
            all.join(" | ")
        );
    }
    if timed.len() > 1 {
        let all: Vec<String> = variants.iter().map(|variant| mean(timed, variant)).collect();
        let _ = writeln!(text, "| geometric mean | | | {} |", all.join(" | "));
    }
}

fn kernels(results: &Results) -> String {
    let mut text = String::new();
    let variants: Vec<&str> = PARTS.iter().map(|(name, _)| *name).chain(["godwit"]).collect();
    let names: Vec<&str> =
        ["kernel", "plain, s", "spread"].into_iter().chain(variants.iter().copied()).collect();
    header(&mut text, &names);
    let counted: Vec<&Timed> = results.kernels.iter().filter(|one| !is_apart(&one.name)).collect();
    ratios(&mut text, &counted, &variants);
    text
}

fn alignments(results: &Results) -> String {
    let mut text = String::new();
    let variants: Vec<&str> = ALIGNMENTS
        .iter()
        .map(|(name, _)| *name)
        .chain(PARTS.iter().map(|(name, _)| *name))
        .chain(["godwit"])
        .collect();
    let names: Vec<&str> =
        ["function", "plain, s", "spread"].into_iter().chain(variants.iter().copied()).collect();
    header(&mut text, &names);
    for one in results.kernels.iter().filter(|one| is_apart(&one.name)) {
        ratios(&mut text, &[one], &variants);
    }
    text
}

fn scripts(results: &Results) -> String {
    let mut text = String::new();
    header(&mut text, &["program", "plain, s", "spread", "one-program", "godwit"]);
    ratios(&mut text, &results.lua.iter().collect::<Vec<_>>(), &["one-program", "godwit"]);
    ratios(&mut text, &results.sqlite.iter().collect::<Vec<_>>(), &["one-program", "godwit"]);
    text
}

#[expect(clippy::cast_precision_loss, reason = "sizes of programs are far below 2^52")]
fn times(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

fn text(results: &Results) -> String {
    let mut text = String::new();
    header(
        &mut text,
        &[
            "program",
            "all text: plain, KB",
            "godwit, KB",
            "times",
            "touched: plain, KB",
            "godwit, KB",
            "times",
        ],
    );
    for one in &results.text {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {} | {} | {:.2} |",
            one.name,
            one.plain / 1024,
            one.godwit / 1024,
            times(one.godwit, one.plain),
            one.plain_touched / 1024,
            one.godwit_touched / 1024,
            times(one.godwit_touched, one.plain_touched)
        );
    }
    text
}

fn capture(results: &Results) -> String {
    let mut text = String::new();
    header(&mut text, &["what", "ms", "aim"]);
    for one in &results.depths {
        let aim = if one.frames <= 50 { 1 } else { 10 };
        let _ = writeln!(text, "| request to parked, {} frames | {:.3} | {aim} |", one.frames, one.capture);
        let _ = writeln!(
            text,
            "| capture and resume in place, {} frames | {:.3} | {} |",
            one.frames,
            one.there_and_back,
            2 * aim
        );
    }
    if let Some(all) = &results.requests {
        let _ = writeln!(
            text,
            "| request to parked, {} requests to the kernels, median | {:.3} | |",
            all.requests, all.median
        );
        let _ = writeln!(text, "| the same, 99th percentile | {:.3} | 5 |", all.p99);
        let _ = writeln!(text, "| the same, longest ({}) | {:.3} | |", all.slowest, all.most);
    }
    text
}

fn compile(results: &Results) -> String {
    let mut text = String::new();
    header(&mut text, &["compiler", "s", "times", "most memory at once, MB"]);
    let Some(plain) = results.compiled.first() else { return text };
    for one in &results.compiled {
        let _ = writeln!(
            text,
            "| {} | {:.1} | {:.2} | {} |",
            one.variant,
            one.seconds,
            one.seconds / plain.seconds,
            one.megabytes
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Figure;

    fn timed(name: &str, ratio: f64) -> Timed {
        let figure =
            |variant: &str, median| Figure { variant: variant.into(), runs: 5, median, spread: 0.01 };
        Timed {
            name: name.into(),
            size: "7".into(),
            figures: vec![figure("plain", 2.0), figure("godwit", 2.0 * ratio)],
        }
    }

    #[test]
    fn the_mean_is_geometric_and_leaves_fib_out() {
        let results = Results {
            kernels: vec![timed("fib", 9.0), timed("is", 0.5), timed("mg", 2.0)],
            ..Results::default()
        };
        let table = kernels(&results);
        assert!(table.ends_with("| geometric mean | | |  |  |  |  | **1.000** |\n"), "{table}");
        assert!(!table.contains("fib"), "{table}");
        assert!(alignments(&results).contains("| fib | 2.000 | 1.0 % |"), "{}", alignments(&results));
    }

    #[test]
    fn tables_go_between_their_comments_and_nothing_else_changes() {
        let names = ["machine", "kernels", "alignments", "scripts", "text", "capture", "compile"];
        let page: String = names
            .iter()
            .map(|name| format!("about {name}\n<!-- begin {name} -->\nold\n<!-- end {name} -->\n"))
            .collect();
        let results = Results { machine: "this one".into(), ..Results::default() };
        let filled = fill(&page, &results).expect("all tables have a place");
        assert!(
            filled.contains("<!-- begin machine -->\nthis one\n<!-- end machine -->\nabout kernels"),
            "{filled}"
        );
        assert!(!filled.contains("old"), "{filled}");
        assert_eq!(fill(&filled, &results).expect("again"), filled);
        let error = fill("nothing", &results).expect_err("there is no place").to_string();
        assert!(error.contains("begin machine"), "{error}");
    }
}
