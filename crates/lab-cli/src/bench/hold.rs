//! A pause that is made longer: a move is held once all of it is at the destination, before the commit
//! (`GODWIT_FAILPOINTS`).

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;

/// Where moves are held.
const POINT: &str = "destination.restored";
/// Between two looks whether one is.
const LOOK: Duration = Duration::from_millis(2);

/// Holds each move of a lab for so long.
#[derive(Debug)]
pub(super) struct Hold {
    directory: PathBuf,
    time: Duration,
}

impl Hold {
    /// None for no time.
    pub(super) fn new(lab: &str, time: Duration) -> anyhow::Result<Option<Self>> {
        if time.is_zero() {
            return Ok(None);
        }
        let directory = std::env::temp_dir().join(format!("godwit-bench-{lab}-{}", std::process::id()));
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(Some(Self { directory, time }))
    }

    /// What daemons are told.
    pub(super) fn environment(&self) -> (String, String) {
        ("GODWIT_FAILPOINTS".to_owned(), format!("{POINT}=wait:{}", self.directory.display()))
    }

    /// Returns once a move has been held, and goes on, or when nobody waits for that any more.
    pub(super) async fn hold(&self) -> anyhow::Result<()> {
        let reached = self.directory.join(format!("{POINT}.reached"));
        while !reached.exists() {
            tokio::time::sleep(LOOK).await;
        }
        let until = Instant::now() + self.time;
        tokio::time::sleep_until(until.into()).await;
        fs::write(self.directory.join(format!("{POINT}.go")), b"").context("cannot let a move go on")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // It is in the directory for temporary files.
        let _ = fs::remove_dir_all(&self.directory);
    }
}
