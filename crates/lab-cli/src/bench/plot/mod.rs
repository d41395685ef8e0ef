//! `godwit bench plot`: results into pictures (SVG) and a table (Markdown).
//!
//! ```text
//!   migrate.jsonl ──▶ groups of runs ──▶ downtime.svg   wire.svg   frozen.svg   timeline.svg
//!   cutover.jsonl                   ├──▶ cutover.svg
//!   wire.jsonl …                    └──▶ summary.md
//! ```

mod charts;
pub(super) mod data;
mod goals;
mod summary;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use godwit_cli::output;

use self::data::Data;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Results, as --out and --json of the other verbs write them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Directory for what is drawn
    #[arg(long, value_name = "DIR", default_value = "bench/results")]
    out: PathBuf,
}

/// Draws what both nodes did in the frozen time of moves.
pub(super) fn timeline(rows: Vec<serde_json::Value>, path: &Path) -> anyhow::Result<()> {
    let drawn = charts::timeline(&Data::new(rows), path);
    if drawn.with_context(|| format!("{} cannot be drawn", path.display()))? {
        output::note(&path.display().to_string());
        return Ok(());
    }
    bail!("there is no timeline to draw: no service moved between nodes that tell one")
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut rows = Vec::new();
    for file in &args.files {
        let text = fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let row = serde_json::from_str(line);
            rows.push(row.with_context(|| format!("{}, line {number} is not a result", file.display()))?);
        }
    }
    let data = Data::new(rows);
    if data.is_empty() {
        bail!("there is nothing to draw: no result of godwit bench is in these files");
    }
    fs::create_dir_all(&args.out).with_context(|| format!("{} cannot be made", args.out.display()))?;
    let written = |path: &Path| output::line(&path.display().to_string());
    for (name, draw) in charts::ALL {
        let path = args.out.join(name);
        if draw(&data, &path).with_context(|| format!("{} cannot be drawn", path.display()))? {
            written(&path)?;
        }
    }
    let path = args.out.join("summary.md");
    fs::write(&path, summary::text(&data))
        .with_context(|| format!("{} cannot be written", path.display()))?;
    written(&path)?;
    Ok(ExitCode::SUCCESS)
}
