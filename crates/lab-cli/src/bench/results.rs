//! Results as they come in, one JSON document a line: on standard output, in a file, or both.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
};

use anyhow::Context as _;
use godwit_cli::output;
use serde_json::Value;

/// Collects results.
pub(super) struct Results {
    file: Option<File>,
    /// Whether the lines are what the user sees.
    lines: bool,
    pub(super) rows: Vec<Value>,
}

impl Results {
    /// Replaces the file, if one is given.
    pub(super) fn new(file: Option<&Path>, lines: bool) -> anyhow::Result<Self> {
        let create = |path: &Path| {
            if let Some(directory) = path.parent() {
                fs::create_dir_all(directory)?;
            }
            File::create(path)
        };
        let open =
            |path: &Path| create(path).with_context(|| format!("{} cannot be written", path.display()));
        Ok(Self { file: file.map(open).transpose()?, lines, rows: Vec::new() })
    }

    /// Adds a result at once: what was measured before an interruption is not lost.
    pub(super) fn add(&mut self, row: Value) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(format!("{row}\n").as_bytes())?;
        }
        if self.lines {
            output::json(&row)?;
        } else {
            let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
            output::note(&format!("run {}: {} {}", row["run"], text("series"), text("outcome")));
        }
        self.rows.push(row);
        Ok(())
    }
}

/// What memory took on the wire in one move for each byte of the pages that had to cross; stock programs
/// tell neither.
pub(super) fn page_ratio(row: &Value) -> Option<f64> {
    let pages = row["page_bytes"].as_f64().filter(|bytes| *bytes > 0.0)?;
    Some(row["memory_wire_bytes"].as_f64()? / pages)
}
