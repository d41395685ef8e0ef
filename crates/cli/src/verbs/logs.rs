//! `godwit logs`: what a service wrote to its standard output and error.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use godwit_api::v1::{LogEntry, LogsRequest};
use serde::Serialize;

use crate::{client::Connection, global::Global, output, values};

/// Show what a service wrote to its standard output and error
///
/// The log moves with the service. Its standard error goes to godwit's standard error.
/// With --json each entry is a line: time, stream, data.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Continue with what the service writes from now on
    #[arg(short, long)]
    follow: bool,
    /// Only the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<u32>,
    /// Only entries since this time: 10m, 2h (ago), seconds since 1970, or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = values::moment)]
    since: Option<i64>,
    /// Put the time in front of each line
    #[arg(short, long)]
    timestamps: bool,
    /// The service
    name: String,
}

/// One entry as JSON; data that is not UTF-8 has U+FFFD in its place.
#[derive(Serialize)]
struct JsonEntry<'a> {
    time: String,
    time_ns: i64,
    stream: &'a str,
    data: &'a str,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let request = LogsRequest {
        name: args.name,
        follow: args.follow,
        tail: args.tail.map_or(-1, i64::from),
        since_ms: args.since.unwrap_or_default(),
    };
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.logs(request).await;
    let mut entries = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let mut stdout = Printer { out: io::stdout(), timestamps: args.timestamps, inside_line: false };
    let mut stderr = Printer { out: io::stderr(), timestamps: args.timestamps, inside_line: false };
    while let Some(entry) = entries.message().await.map_err(|status| connection.explain(&status))? {
        if global.json {
            output::json(&JsonEntry {
                time: output::rfc3339(entry.time_ns, 9),
                time_ns: entry.time_ns,
                stream: &entry.stream,
                data: &String::from_utf8_lossy(&entry.data),
            })?;
        } else if entry.stream == "stderr" {
            stderr.print(&entry)?;
        } else {
            stdout.print(&entry)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes one stream's entries, which need not be whole lines.
struct Printer<W> {
    out: W,
    timestamps: bool,
    inside_line: bool,
}

impl<W: Write> Printer<W> {
    fn print(&mut self, entry: &LogEntry) -> io::Result<()> {
        if !self.timestamps {
            self.out.write_all(&entry.data)?;
            return self.out.flush();
        }
        for line in entry.data.split_inclusive(|byte| *byte == b'\n') {
            if !self.inside_line {
                write!(self.out, "{} ", output::rfc3339(entry.time_ns, 9))?;
            }
            self.out.write_all(line)?;
            self.inside_line = !line.ends_with(b"\n");
        }
        self.out.flush()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_in_two_entries_has_one_time() {
        let mut printer = Printer { out: Vec::new(), timestamps: true, inside_line: false };
        for (time_ns, data) in [(0, &b"one\ntw"[..]), (1, b"o\nthree"), (2, b"\n\n")] {
            printer.print(&LogEntry { time_ns, stream: "stdout".into(), data: data.into() }).unwrap();
        }
        let at = |ns| format!("1970-01-01T00:00:00.00000000{ns}Z");
        assert_eq!(
            String::from_utf8(printer.out).unwrap(),
            format!("{} one\n{} two\n{} three\n{} \n", at(0), at(0), at(1), at(2))
        );
    }
}
