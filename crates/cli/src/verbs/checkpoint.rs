//! `godwit checkpoint`: a service as a file.

mod series;

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use godwit_api::v1::{
    CheckpointInput, CheckpointKept, CheckpointStart, CheckpointWhole, checkpoint_input as input,
    checkpoint_output as output,
};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::{
    client::{ClientError, Connection},
    global::Global,
    interrupts::Interrupts,
    output as out, values,
};
use series::Series;

/// The shortest time from one file to the next.
const LEAST: Duration = Duration::from_secs(1);

/// Write a service with its memory into a file, from which `godwit restore` or Podman continues it
///
/// The service ends, and stays stopped, once the file is on the disk; with --leave-running it goes on. After a failure it goes
/// on, too. The file has all of the service's memory: only you can read it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit checkpoint redis -o redis.tar.zst
  godwit checkpoint redis -R -o before-the-upgrade.tar.zst
  godwit checkpoint redis --every 5m --keep 3 -o /backup
  godwit checkpoint web --compress none -o web.tar && podman container restore --import web.tar")]
pub(crate) struct Args {
    /// The service
    name: String,
    /// The file to write, whole or not at all; with --every the directory
    #[arg(short, long, value_name = "FILE", alias = "export", short_alias = 'e')]
    output: PathBuf,
    /// How the file is compressed
    #[arg(short, long, value_enum, value_name = "WAY", default_value = "zstd")]
    compress: Way,
    /// The service goes on
    #[arg(short = 'R', long)]
    leave_running: bool,
    /// Write established TCP connections into the file; else the service must have none
    #[arg(long)]
    tcp_established: bool,
    /// Leave volumes out of the file
    #[arg(long)]
    ignore_volumes: bool,
    /// Write one again and again, in this time, until Ctrl-C: SERVICE-TIME.tar.zst. The service goes on
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    every: Option<Duration>,
    /// Keep so many of these files, and remove older ones [default: all]
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
}

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Zstd,
    Gzip,
    None,
}

impl Way {
    /// What files end with.
    fn ending(self) -> &'static str {
        match self {
            Self::Zstd => ".tar.zst",
            Self::Gzip => ".tar.gz",
            Self::None => ".tar",
        }
    }
}

pub(crate) async fn run(mut args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let Some(every) = args.every else {
        write(&args, &args.output, global).await?;
        return Ok(ExitCode::SUCCESS);
    };
    if every < LEAST {
        bail!("--every is {} s at least", LEAST.as_secs());
    }
    args.leave_running = true;
    if !args.output.is_dir() {
        bail!("{} is no directory: --every writes its files into one", args.output.display());
    }
    let series = Series { directory: &args.output, service: &args.name, ending: args.compress.ending() };
    let mut interrupts = Interrupts::new()?;
    let mut clock = tokio::time::interval(every);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_first = true;
    loop {
        tokio::select! {
            _ = clock.tick() => {}
            () = interrupts.next() => return Ok(ExitCode::SUCCESS),
        }
        let file = series.file(SystemTime::now());
        let written = tokio::select! {
            written = write(&args, &file, global) => written,
            () = interrupts.next() => return Ok(ExitCode::SUCCESS),
        };
        match written {
            Ok(()) => {
                is_first = false;
                if let Some(keep) = args.keep {
                    let gone = series.prune(usize::try_from(keep).unwrap_or(usize::MAX));
                    let gone =
                        gone.with_context(|| format!("cannot remove files in {}", args.output.display()))?;
                    gone.iter().for_each(|file| out::note(&format!("{} is removed", file.display())));
                }
            }
            Err(error) if is_first || is_gone(&error) => return Err(error),
            // It may be moving, or have connections just now, or godwitd may be upgraded.
            Err(error) => out::note(&format!("Warning: {error:#}")),
        }
    }
}

/// Whether there is no such service any more.
fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Refused { code: Code::NotFound, .. }))
}

/// Writes one file.
async fn write(args: &Args, path: &Path, global: &Global) -> anyhow::Result<()> {
    let mut file = NewFile::beside(path)?;
    let mut connection = Connection::open(global).await?;
    let (messages, requests) = mpsc::channel(1);
    let start = CheckpointStart {
        name: args.name.clone(),
        compress: format!("{:?}", args.compress).to_lowercase(),
        leave_running: args.leave_running,
        tcp_established: args.tcp_established,
        ignore_volumes: args.ignore_volumes,
    };
    messages.send(CheckpointInput { kind: Some(input::Kind::Start(start)) }).await?;
    let answer = connection.node.checkpoint(ReceiverStream::new(requests)).await;
    let mut pieces = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let mut whole = None;
    let mut has_ended = false;
    while let Some(message) = pieces.message().await.map_err(|status| connection.explain(&status))? {
        match message.kind {
            Some(output::Kind::Data(data)) if whole.is_none() => file.write(&data)?,
            Some(output::Kind::Whole(told)) => {
                file.keep(path)?;
                whole = Some(told);
                if !args.leave_running {
                    messages
                        .send(CheckpointInput { kind: Some(input::Kind::Kept(CheckpointKept {})) })
                        .await?;
                }
            }
            Some(output::Kind::Ended(_)) => has_ended = true,
            _ => bail!("the daemon violated the protocol of a checkpoint"),
        }
    }
    let Some(CheckpointWhole { image, frozen_us }) = whole else {
        bail!("the daemon ended before the archive was whole");
    };
    if !has_ended && !args.leave_running {
        bail!(
            "{} is whole, but the daemon did not say that service {} has ended; `godwit ps -a` shows it",
            path.display(),
            args.name
        );
    }
    if global.json {
        out::json(&json!({
            "service": args.name, "output": path, "bytes": file.bytes, "image": image, "frozen_us": frozen_us,
        }))?;
    } else {
        out::line(&path.display().to_string())?;
    }
    Ok(())
}

/// A file that gets its name once it is whole and on the disk; until then, and after a failure, what had the name stays. It has
/// no name before, so that nothing is left of it whatever happens; where the filesystem has no such files, another one.
struct NewFile {
    file: File,
    /// The other name, if it has that now.
    other: Option<PathBuf>,
    bytes: u64,
}

impl NewFile {
    /// One in the directory of this file.
    fn beside(path: &Path) -> anyhow::Result<Self> {
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => bail!("{} is there, and is no plain file", path.display()),
            _ => {}
        }
        if path.file_name().is_none() {
            bail!("{} is no name of a file", path.display());
        }
        let (flags, mode) = (OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
        let failed = || format!("cannot make a file in {}", directory(path).display());
        match rustix::fs::open(directory(path), flags, mode) {
            Ok(file) => Ok(Self { file: file.into(), other: None, bytes: 0 }),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let other = other_name(path);
                let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&other);
                Ok(Self { file: made.with_context(failed)?, other: Some(other), bytes: 0 })
            }
            Err(error) => Err(error).with_context(failed),
        }
    }

    fn write(&mut self, data: &[u8]) -> anyhow::Result<()> {
        self.file.write_all(data).context("cannot write the file")?;
        self.bytes += data.len() as u64;
        Ok(())
    }

    /// Gives it its name.
    fn keep(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut kept = || {
            self.file.sync_all()?;
            if self.other.is_none() {
                // rename(2) replaces what has the name, and linkat(2) does not.
                let (own, other) = (format!("/proc/self/fd/{}", self.file.as_raw_fd()), other_name(path));
                rustix::fs::linkat(CWD, own, CWD, &other, AtFlags::SYMLINK_FOLLOW)?;
                self.other = Some(other);
            }
            if let Some(other) = &self.other {
                std::fs::rename(other, path)?;
            }
            self.other = None;
            File::open(directory(path))?.sync_all()
        };
        let kept: io::Result<()> = kept();
        kept.with_context(|| format!("cannot put {} in its place", path.display()))
    }
}

/// The directory of a file.
fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A name beside that of a file.
fn other_name(path: &Path) -> PathBuf {
    let mut other = path.file_name().unwrap_or_default().to_os_string();
    other.push(format!(".{}.part", std::process::id()));
    path.with_file_name(other)
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.other.as_ref().map(std::fs::remove_file) {
            out::note(&format!("a part of the file is left: {error}"));
        }
    }
}
