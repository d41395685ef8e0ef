//! What is said: sentences and tables for people, JSON for programs.

use std::io::{self, Write};

use godwit_isa_state::{BuildIdentity, Set};
use serde::Serialize;

/// One line on standard error; when nobody reads it there is nobody to tell.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// One JSON document in a line on standard error, where it does not mix with the program's output.
pub(crate) fn report<T: Serialize>(value: &T) -> io::Result<()> {
    line(io::stderr().lock(), value)
}

/// One JSON document in a line on standard output.
pub(crate) fn json<T: Serialize>(value: &T) -> io::Result<()> {
    line(io::stdout().lock(), value)
}

fn line<T: Serialize>(mut to: impl Write, value: &T) -> io::Result<()> {
    serde_json::to_writer(&mut to, value)?;
    to.write_all(b"\n")?;
    to.flush()
}

/// How a program's run ended.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub(crate) enum Outcome {
    Captured { set: &'static str, state: String, build: String, bytes: u64, threads: usize },
    Ended { set: &'static str, status: i32 },
    Killed { set: &'static str, signal: i32 },
}

/// A run of many legs.
#[derive(Debug, Serialize)]
pub(crate) struct Journey {
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    /// How often it went on on another set.
    pub(crate) changes: u64,
}

/// The names of sets, for messages.
pub(crate) fn sets(sets: &[Set]) -> String {
    sets.iter().map(|set| set.name()).collect::<Vec<_>>().join(", ")
}

/// A build as JSON has it.
pub(crate) fn build(build: BuildIdentity) -> String {
    build.to_string()
}

/// Bytes as people read them.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut whole, mut rest, mut unit) = (bytes / 1024, bytes % 1024, 0);
    while whole >= 1024 && unit + 1 < UNITS.len() {
        (rest, whole, unit) = (whole % 1024, whole / 1024, unit + 1);
    }
    format!("{whole}.{} {}", rest * 10 / 1024, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1024), "1.0 KiB");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(64 << 20), "64.0 MiB");
        assert_eq!(size(3 << 40), "3.0 TiB");
    }
}
