//! `godwit checkpoint`: a service as a file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
use tokio_stream::wrappers::ReceiverStream;

use crate::{client::Connection, global::Global, output as out};

/// Write a service with its memory into a file, from which `godwit restore` or Podman continues it
///
/// The service ends, and stays stopped, once the file is on the disk; with --leave-running it goes on. After a failure it goes
/// on, too. The file has all of the service's memory: only you can read it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit checkpoint redis -o redis.tar.zst
  godwit checkpoint redis -R -o before-the-upgrade.tar.zst
  godwit checkpoint web --compress none -o web.tar && podman container restore --import web.tar")]
pub(crate) struct Args {
    /// The service
    name: String,
    /// The file to write, whole or not at all
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
}

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Zstd,
    Gzip,
    None,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut file = NewFile::beside(&args.output)?;
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
                file.keep(&args.output)?;
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
            args.output.display(),
            args.name
        );
    }
    if global.json {
        out::json(&json!({
            "service": args.name, "output": args.output, "bytes": file.bytes, "image": image, "frozen_us": frozen_us,
        }))?;
    } else {
        out::line(&args.output.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
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
