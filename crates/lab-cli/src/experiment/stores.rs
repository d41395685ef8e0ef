//! What `hcontainer-persistence` measures: services that hold data in memory, and write them to the disk when told to.
//!
//! ```text
//!   Redis    SAVE             ─▶ dump.rdb     ─▶ is loaded when Redis starts
//!   SQLite   .backup FILE     ─▶ backup.db    ─▶ .restore FILE
//! ```
//!
//! The shell of SQLite has its database in memory. It reads statements from one FIFO and answers in another one, for it must
//! have no connection when a checkpoint is made.

use std::{net::SocketAddrV4, time::Duration};

use anyhow::{Context as _, ensure};
use godwit_api::v1::run_request::Source;
use godwit_cli::client::Connection;
use godwit_lab::{
    Lab,
    config::CLIENT,
    workload::{RedisClient, resp::Reply},
};

use super::Args;
use crate::{
    redis,
    services::{self, Service},
    stage::godwit,
    trial::{ADDRESS, SERVICE, SOURCE},
};

/// How long a service may take to write or load a gigabyte.
const PATIENCE: Duration = Duration::from_secs(600);
/// Memory that Redis takes for a small key with its value of some ten bytes, approximately: a checkpoint of a million is some
/// 155 MB.
const SMALL_BYTES: u64 = 150;
/// Bytes of a row of the database, approximately: a page of 4 KiB holds 32.
const ROW_BYTES: u64 = 128;
/// Where an SQLite without a file of its own answers, and how it is asked.
const SQLITE: &str = "rm -f /srv/in /srv/out; mkfifo /srv/in /srv/out; \
                      exec sqlite3 -batch :memory: <>/srv/in 1<>/srv/out";

/// A service, and what its data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// Many values of some ten bytes.
    RedisSmall,
    /// Values of 16 KiB that do not compress.
    RedisLarge,
    /// Rows of some hundred bytes.
    Sqlite,
}

impl Store {
    pub(super) const ALL: [Self; 3] = [Self::RedisSmall, Self::RedisLarge, Self::Sqlite];

    /// As rows name it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::RedisSmall => "redis, small values",
            Self::RedisLarge => "redis, large values",
            Self::Sqlite => "sqlite",
        }
    }

    pub(super) fn image(self, args: &Args) -> anyhow::Result<Source> {
        match self {
            Self::RedisSmall | Self::RedisLarge => redis::image(&args.images),
            Self::Sqlite => services::image(&args.images, "sqlite"),
        }
    }

    /// The file that it writes.
    pub(super) const fn file(self) -> &'static str {
        match self {
            Self::RedisSmall | Self::RedisLarge => "dump.rdb",
            Self::Sqlite => "/srv/backup.db",
        }
    }

    /// Runs it on the lab's first node; where it listens.
    pub(super) async fn run(self, node: &Connection, image: &Source) -> anyhow::Result<SocketAddrV4> {
        match self {
            Self::RedisSmall | Self::RedisLarge => {
                let command =
                    [&redis::WITHOUT_SNAPSHOTS[..], &["--enable-debug-command", "yes"][..]].concat();
                redis::run(node, image, &command).await
            }
            Self::Sqlite => {
                let service = Service {
                    name: SERVICE,
                    address: ADDRESS,
                    source: image.clone(),
                    command: ["/bin/sh", "-c", SQLITE].map(str::to_owned).into(),
                    ulimits: Vec::new(),
                };
                service.run(node).await?;
                Ok(SocketAddrV4::new(ADDRESS, 0))
            }
        }
    }
}

/// A store that runs.
#[derive(Clone)]
pub(super) struct Running {
    pub(super) store: Store,
    pub(super) lab: Lab,
    pub(super) at: SocketAddrV4,
}

impl Running {
    /// Waits until Redis answers, which it does when it has loaded its data.
    fn redis(&self) -> anyhow::Result<RedisClient> {
        let mut client = RedisClient::connect(&self.lab, CLIENT, self.at, PATIENCE)?;
        client.set_patience(PATIENCE)?;
        Ok(client)
    }

    /// Has Redis do something.
    fn done(&self, words: &[&str]) -> anyhow::Result<()> {
        let answer = self.redis()?.call(words)?;
        let is_done = answer == Reply::Simple("OK".to_owned());
        ensure!(is_done, "Redis answers {} with {answer:?}", words.join(" "));
        Ok(())
    }

    /// The line with which SQLite answers these lines.
    fn sqlite(&self, lines: &str) -> anyhow::Result<String> {
        let ask = "printf '%s\\n' \"$1\" >/srv/in; read -r line </srv/out; printf '%s' \"$line\"";
        godwit(&self.lab, SOURCE, &["exec", SERVICE, "sh", "-c", ask, "ask", lines])
    }

    pub(super) fn fill(&self, bytes: u64) -> anyhow::Result<()> {
        match self.store {
            Store::RedisSmall => self.done(&["DEBUG", "POPULATE", &(bytes / SMALL_BYTES).to_string()]),
            Store::RedisLarge => Ok(self.redis()?.fill(bytes)?),
            Store::Sqlite => {
                let said = self.sqlite(&format!(
                    "create table data(number integer primary key, text);\n\
                     insert into data select value, hex(randomblob(58)) from generate_series(1, {});\n\
                     select 'filled';",
                    bytes / ROW_BYTES
                ))?;
                ensure!(said == "filled", "SQLite says {said:?} when it is filled");
                Ok(())
            }
        }
    }

    /// How many values there are.
    pub(super) fn count(&self) -> anyhow::Result<u64> {
        match self.store {
            Store::RedisSmall | Store::RedisLarge => match self.redis()?.call(&["DBSIZE"])? {
                Reply::Integer(keys) => Ok(u64::try_from(keys)?),
                other => anyhow::bail!("Redis answers DBSIZE with {other:?}"),
            },
            Store::Sqlite => {
                let said = self.sqlite("select count(*) from data;")?;
                said.parse().with_context(|| format!("the number of rows is {said:?}"))
            }
        }
    }

    /// Writes all to the file.
    pub(super) fn save(&self) -> anyhow::Result<()> {
        match self.store {
            Store::RedisSmall | Store::RedisLarge => self.done(&["SAVE"]),
            Store::Sqlite => {
                let said = self.sqlite(&format!(".backup {}\nselect 'saved';", self.store.file()))?;
                ensure!(said == "saved", "SQLite says {said:?} when it saves");
                Ok(())
            }
        }
    }

    /// Starts the service, and has it load the file; how many values there are then.
    pub(super) fn start(&self) -> anyhow::Result<u64> {
        godwit(&self.lab, SOURCE, &["start", SERVICE])?;
        if self.store == Store::Sqlite {
            let said = self.sqlite(&format!(".restore {}\nselect 'loaded';", self.store.file()))?;
            ensure!(said == "loaded", "SQLite says {said:?} when it loads");
        }
        self.count()
    }
}
