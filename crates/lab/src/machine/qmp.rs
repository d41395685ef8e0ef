//! The few words of QEMU's monitor protocol (QEMU, docs/interop/qmp-spec) that a snapshot takes.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two looks at a socket that is not there yet, and at a state that is being saved or loaded.
const PAUSE: Duration = Duration::from_millis(10);

/// A connection to a machine's monitor.
#[derive(Debug)]
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to an emulator that has just been started, unless `ended` says that it is gone.
    pub(crate) fn connect(socket: &Path, mut ended: impl FnMut() -> bool) -> io::Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if ended() || Instant::now() >= deadline => return Err(error),
                Err(_) => thread::sleep(PAUSE),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.read()?;
        monitor.run("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Saves the state of a stopped machine into a file, all but its memory, which is in a file of its own.
    pub(crate) fn save(&mut self, state: &Path) -> io::Result<()> {
        self.leave_memory_out()?;
        self.run("stop", &json!({}))?;
        self.run("migrate", &json!({ "uri": format!("exec:cat >'{}'", state.display()) }))?;
        self.wait_for_state()?;
        // The connection ends with it.
        self.run("quit", &json!({})).map(drop)
    }

    /// Loads such a state into a machine that waits for one, and lets it go on.
    pub(crate) fn load(&mut self, state: &Path) -> io::Result<()> {
        self.leave_memory_out()?;
        self.run("migrate-incoming", &json!({ "uri": format!("exec:cat '{}'", state.display()) }))?;
        self.wait_for_state()?;
        self.run("cont", &json!({})).map(drop)
    }

    fn leave_memory_out(&mut self) -> io::Result<()> {
        let capability = json!({ "capability": "x-ignore-shared", "state": true });
        self.run("migrate-set-capabilities", &json!({ "capabilities": [capability] })).map(drop)
    }

    fn wait_for_state(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.run("query-migrate", &json!({}))?;
            match answer["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => return Err(io::Error::other(answer.to_string())),
                _ if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
                _ => thread::sleep(PAUSE),
            }
        }
    }

    fn run(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            // Between the answers there are events.
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("{command}: {error}")));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}
