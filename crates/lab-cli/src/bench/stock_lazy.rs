//! Stock post-copy: what a user gets from runc and CRIU without more programs.
//!
//! ```text
//!   source        runc checkpoint --lazy-pages ──▶ ready ─────────────── pages ──▶ ends, tasks gone
//!   link                                            ╲ images                 ╲
//!   destination                                      criu lazy-pages ─▶ runc restore --lazy-pages
//! ```
//!
//! As good as such a script gets, as for the cold baseline: everything is prepared before the freeze.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read as _},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_lab::Lab;
use serde_json::Value;

use super::stock::{Container, Figures, Output, Sides, Stock, answer_for, copy, found_again, path};
use crate::trial::{DESTINATION, SERVICE, SOURCE};

/// TCP port of CRIU's page server at the source.
const PAGES: &str = "7001";
/// How long the pages may take after the restore; what takes longer is a failure, with this reason.
const PATIENCE: Duration = Duration::from_secs(600);
/// What a pipe may hold at most, by the kernel's setting, and what CRIU's page server wants it to be:
/// it asks for a pipe of 4 MiB, does not look whether it got it, and gives up at the first request of
/// more than 16 pages if not. Root with CAP_SYS_RESOURCE gets it whatever the setting says; root in
/// many containers and virtual machines does not.
const PIPE_LIMIT: &str = "/proc/sys/fs/pipe-max-size";
const PIPE_WANTED: u64 = 4 << 20;
const PAUSE: Duration = Duration::from_millis(10);

/// A stock lazy migration of Redis under load.
pub(super) async fn run(stock: &Stock, lab: &Lab) -> anyhow::Result<Value> {
    stock.moved(lab, "stock-lazy", "postcopy", switch).await
}

fn switch(sides: &Sides, lab: &Lab) -> anyhow::Result<(Figures, Output)> {
    let (from, to) = (&sides.source, &sides.destination);
    let _limit = PipeLimit::raise()?;
    let begun = Instant::now();
    let mut server = Program::checkpoint(from, lab)?;
    copy(lab, &from.images(), &to.images())?;
    let mut client = Program::lazy_pages(to, lab)?;
    let output = to
        .restore_with(&to.images(), &["--lazy-pages"])
        .with_context(|| format!("criu lazy-pages says: {}", client.last_words()))?;
    answer_for(lab, SOURCE, false)?;
    answer_for(lab, DESTINATION, true)?;
    let frozen_ms = begun.elapsed().as_secs_f64() * 1e3;
    found_again(lab)?;
    client.finish(Instant::now() + PATIENCE)?;
    server.finish(Instant::now() + PATIENCE)?;
    Ok((Figures { frozen_ms, total_ms: begun.elapsed().as_secs_f64() * 1e3, bytes: None }, output))
}

/// Sets the limit back when it is dropped.
struct PipeLimit(Option<String>);

impl PipeLimit {
    fn raise() -> anyhow::Result<Self> {
        let before = fs::read_to_string(PIPE_LIMIT).context(PIPE_LIMIT)?;
        if before.trim().parse::<u64>()? >= PIPE_WANTED {
            return Ok(Self(None));
        }
        fs::write(PIPE_LIMIT, PIPE_WANTED.to_string()).context(PIPE_LIMIT)?;
        Ok(Self(Some(before)))
    }
}

impl Drop for PipeLimit {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // It was writable a moment ago.
            let _ = fs::write(PIPE_LIMIT, before);
        }
    }
}

/// A program that goes on beside this one; it is ended when it is dropped.
struct Program {
    name: &'static str,
    child: Child,
    log: std::path::PathBuf,
}

impl Program {
    /// Freezes and dumps all but the pages; returns when CRIU is ready to give those.
    fn checkpoint(container: &Container, lab: &Lab) -> anyhow::Result<Self> {
        fs::create_dir_all(container.images())?;
        // The page server listens in the node's namespace. The word that it is ready comes through
        // descriptor 9: the first ones are taken by runc and CRIU for themselves.
        let mut command = lab.command(SOURCE, "sh")?;
        command.args(["-c", "exec \"$@\" 9>&1 >&2", "sh", "runc", "--root"]);
        command.arg(container.directory.join("runc"));
        command.args(["checkpoint", "--tcp-established", "--lazy-pages", "--status-fd", "9"]);
        command.arg("--page-server").arg(format!("{}:{PAGES}", lab.address(SOURCE)?));
        command.arg("--image-path").arg(container.images());
        command.arg("--work-path").arg(container.work()).arg(SERVICE);
        let log = container.work().join("dump.log");
        let mut program = Self::start("runc checkpoint", command, log)?;
        program.ready()?;
        Ok(program)
    }

    /// The daemon that fetches pages; returns when it listens for the restore.
    fn lazy_pages(container: &Container, lab: &Lab) -> anyhow::Result<Self> {
        fs::create_dir_all(container.work())?;
        let mut command = lab.command(DESTINATION, "sh")?;
        command.args(["-c", "exec \"$@\" 9>&1 >&2", "sh", "criu", "lazy-pages", "--page-server"]);
        command.arg("--address").arg(lab.address(SOURCE)?.to_string()).args(["--port", PAGES]);
        command.arg("--images-dir").arg(container.images()).arg("--work-dir").arg(container.work());
        command.args(["--status-fd", "9", "-v2", "--log-file", "lazy-pages.log"]);
        let log = container.work().join("lazy-pages.log");
        let mut program = Self::start("criu lazy-pages", command, log)?;
        program.ready()?;
        Ok(program)
    }

    fn start(name: &'static str, mut command: Command, log: std::path::PathBuf) -> anyhow::Result<Self> {
        if let Some(directory) = log.parent() {
            fs::create_dir_all(directory)?;
        }
        let words = OpenOptions::new().create(true).append(true).open(log.with_extension("err"))?;
        command.env("PATH", path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(words);
        let child = command.spawn().with_context(|| format!("{name} cannot be run"))?;
        Ok(Self { name, child, log })
    }

    /// Waits for the byte that CRIU writes when it is ready.
    fn ready(&mut self) -> anyhow::Result<()> {
        let Some(mut status) = self.child.stdout.take() else { bail!("{} has no status", self.name) };
        match status.read_exact(&mut [0]) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let status = self.child.wait()?;
                bail!("{} ended with {status} before it was ready: {}", self.name, self.last_words())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it has done its work.
    fn finish(&mut self, deadline: Instant) -> anyhow::Result<()> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} ended with {status}: {}", self.name, self.last_words());
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{} was not done {} s after the restore: {}",
                self.name,
                PATIENCE.as_secs(),
                self.last_words()
            );
            thread::sleep(PAUSE);
        }
    }

    /// The end of its log, and of its standard error.
    fn last_words(&self) -> String {
        let text = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let all = text(self.log.clone()) + &text(self.log.with_extension("err"));
        let lines: Vec<_> = all.lines().filter(|line| line.contains("rror")).collect();
        lines[lines.len().saturating_sub(4)..].join("; ")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Gone already, mostly.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
