//! A session of psql on the client host.

use std::{
    io::{BufRead, BufReader, Write},
    net::Ipv4Addr,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Duration,
};

use crate::{Bed, wait_for_within};

/// Ends the answer to a statement.
const END: &str = "-- end of the answer --";

/// A psql on the client host that stays connected.
#[derive(Debug)]
pub struct Psql {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Psql {
    /// Connects when the server is ready, for which it waits so long.
    pub fn connect(bed: &Bed, address: Ipv4Addr, patience: Duration) -> Self {
        let address = address.to_string();
        wait_for_within(patience, "PostgreSQL's readiness", || {
            let mut ready = bed.on_client("pg_isready");
            let ready = ready.args(["-q", "-U", "postgres", "-h", &address]).status().unwrap();
            ready.success().then_some(())
        });
        let mut command = bed.on_client("psql");
        command.args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "-v", "ON_ERROR_STOP=1"]);
        command.args(["-h", &address, "-U", "postgres"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    /// Sends a statement, whose answer will be read later.
    pub fn ask(&mut self, statement: &str) {
        writeln!(self.input, "{statement};\nSELECT '{END}';").unwrap();
    }

    /// The rows of the statement that was asked.
    pub fn answer(&mut self) -> Vec<String> {
        let mut rows = Vec::new();
        loop {
            let mut line = String::new();
            let length = self.output.read_line(&mut line).unwrap();
            assert!(length > 0, "psql ended after {rows:?}; its error is above");
            match line.trim_end() {
                END => return rows,
                row => rows.push(row.to_owned()),
            }
        }
    }

    /// Sends a statement; its rows.
    pub fn query(&mut self, statement: &str) -> Vec<String> {
        self.ask(statement);
        self.answer()
    }

    /// Ends it; an error of any statement would have ended it before, with another code.
    pub fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}
