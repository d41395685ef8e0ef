//! Values to text for the user: tables, JSON, sizes and times.

use std::{
    io::{self, IsTerminal as _, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use godwit_api::v1::{Service, ServiceState};
use serde::Serialize;
use tabwriter::TabWriter;

/// Prints one JSON document on a line of its own.
///
/// # Errors
/// If standard output cannot be written to; so with all that print here.
pub fn json<T: Serialize>(value: &T) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// A service as JSON: the API's fields, with the state as a word.
pub(crate) fn service_json(service: &Service) -> serde_json::Value {
    let mut value = serde_json::to_value(service).unwrap_or_default();
    value["state"] = state(service.state()).into();
    value
}

/// The word for a state, the same in tables and JSON.
pub(crate) fn state(state: ServiceState) -> &'static str {
    match state {
        ServiceState::Unspecified => "unknown",
        ServiceState::Running => "running",
        ServiceState::Stopped => "stopped",
        ServiceState::Migrating => "migrating",
        ServiceState::InDoubt => "in-doubt",
        ServiceState::Remote => "remote",
        ServiceState::Restarting => "restarting",
    }
}

/// A table whose columns are as wide as their widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with a line of headings.
    #[must_use]
    pub fn new<'a>(headings: impl IntoIterator<Item = &'a str>) -> Self {
        Self { rows: vec![headings.into_iter().map(str::to_owned).collect()] }
    }

    /// A table of names and values, without headings.
    #[must_use]
    pub fn plain() -> Self {
        Self { rows: Vec::new() }
    }

    /// Adds a line.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        // A tab or line break in a cell would break the table.
        self.rows.push(cells.into_iter().map(|cell| cell.replace(['\t', '\n', '\r'], " ")).collect());
    }

    /// Prints it.
    ///
    /// # Errors
    /// If standard output cannot be written to.
    pub fn print(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(self.render()?.as_bytes())?;
        out.flush()
    }

    fn render(&self) -> io::Result<String> {
        let mut writer = TabWriter::new(Vec::new()).padding(2);
        for row in &self.rows {
            writeln!(writer, "{}", row.join("\t"))?;
        }
        let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.lines().map(|line| format!("{}\n", line.trim_end())).collect())
    }
}

/// Prints one line.
///
/// # Errors
/// If standard output cannot be written to.
pub fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Prints names, a line each.
///
/// # Errors
/// If standard output cannot be written to.
pub fn names<'a>(names: impl IntoIterator<Item = &'a String>) -> io::Result<()> {
    names.into_iter().try_for_each(|name| line(name))
}

/// Says something on standard error; whether anybody hears it changes nothing.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Is somebody watching standard error?
pub(crate) fn watched() -> bool {
    io::stderr().is_terminal()
}

/// `201.3 MiB`.
pub(crate) fn bytes_per_second(rate: f64) -> String {
    // Bandwidth is told in powers of ten, as links are.
    format!("{:.1} MB/s", rate / 1e6)
}

/// A size in powers of 1024.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[allow(clippy::cast_precision_loss)]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // From 1023.95 on it would be printed as 1024.0 of the smaller unit.
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

/// `512.3 ms`, `1.93 s`.
#[must_use]
pub fn millis(ms: f64) -> String {
    if ms < 1000.0 { format!("{ms:.1} ms") } else { format!("{:.2} s", ms / 1000.0) }
}

/// How long ago, in the largest unit that fits: `3 minutes ago`; empty for "never".
pub(crate) fn age(then_ms: i64) -> String {
    if then_ms <= 0 {
        return String::new();
    }
    let seconds = seconds_since(then_ms);
    let (number, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{number} {unit}{} ago", if number == 1 { "" } else { "s" })
}

/// Whole seconds since a moment after 1970; 0 for one that is still to come, as clocks of nodes differ.
pub(crate) fn seconds_since(then_ms: i64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let then = u128::try_from(then_ms).unwrap_or_default();
    u64::try_from(now.saturating_sub(then) / 1000).unwrap_or(u64::MAX)
}

/// A number of seconds in one unit, rounded: `2 s`, `12 min`, `3 h`.
pub(crate) fn span(seconds: u64) -> String {
    let whole = |unit: u64| seconds.saturating_add(unit / 2) / unit;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3570 => format!("{} min", whole(60)),
        _ => format!("{} h", whole(3600)),
    }
}

/// Nanoseconds since 1970 as RFC 3339 in UTC, with `digits` decimal places (3 or 9).
pub(crate) fn rfc3339(nanos: i64, digits: usize) -> String {
    let (seconds, fraction) = (nanos.div_euclid(1_000_000_000), nanos.rem_euclid(1_000_000_000));
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil_from_days(days);
    let fraction = format!("{fraction:09}");
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{}Z",
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60,
        &fraction[..digits.min(9)]
    )
}

/// The Gregorian date of a day counted from 1970-01-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, of_year - (153 * shifted + 2) / 5 + 1)
}

/// A command as one would type it.
pub(crate) fn command(words: &[String]) -> String {
    let quoted = words.iter().map(|word| {
        let plain = !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./:=@%+,".contains(c));
        if plain { word.clone() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Shortens a text for a table's cell.
pub(crate) fn shorten(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    text.chars().take(length.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_a_reader_expects() {
        for (given, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (201 << 20, "201.0 MiB"),
            ((1 << 30) - 1, "1.0 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(given), expected);
        }
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(rfc3339(0, 3), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(1_709_210_096_789_000_001, 9), "2024-02-29T12:34:56.789000001Z");
        assert_eq!(rfc3339(-1, 3), "1969-12-31T23:59:59.999Z");
        assert_eq!(rfc3339(4_107_542_400_000_000_000, 3), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn a_time_reads_back_as_what_was_written() {
        for ms in [0, 951_782_400_123, 1_709_210_096_789, 4_107_542_399_999] {
            assert_eq!(crate::values::moment(&rfc3339(ms * 1_000_000, 3)), Ok(ms));
        }
    }

    #[test]
    fn a_tab_in_a_cell_does_not_break_the_table() {
        let mut table = Table::new(["A", "LONGER"]);
        table.row(["x\ty".to_owned(), "1".to_owned()]);
        table.row(["wide cell".to_owned(), String::new()]);
        assert_eq!(table.render().unwrap(), "A          LONGER\nx y        1\nwide cell\n");
    }

    #[test]
    fn commands_are_printed_as_one_would_type_them() {
        let words = ["sh", "-c", "echo it's", ""].map(str::to_owned);
        assert_eq!(command(&words), r"sh -c 'echo it'\''s' ''");
    }

    #[test]
    fn ages_have_one_unit() {
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        assert_eq!(age(now - 61_000), "1 minute ago");
        assert_eq!(age(now - 7_300_000), "2 hours ago");
        assert_eq!(age(0), "");
        // The clock of the node that decided may be ahead of this one.
        assert_eq!((seconds_since(now + 60_000), seconds_since(now - 2_500) >= 2), (0, true));
    }

    #[test]
    fn spans_are_rounded_to_one_unit() {
        for (given, expected) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (119, "2 min"),
            (720, "12 min"),
            (3569, "59 min"),
            (3570, "1 h"),
            (7800, "2 h"),
        ] {
            assert_eq!(span(given), expected);
        }
    }
}
