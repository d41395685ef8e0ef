//! Connections that the service has not accepted yet, and those that are still being made.
//!
//! The latter are completed before the freeze: new ones are held ([`crate::attach`]), and the others are there within a
//! round trip.
//!
//! They are in the queue of a listening socket and in no process, and CRIU can neither dump them nor restore them there
//! (it gives up: "In-flight connection"). A busy service has some now and then, until it calls accept(2). So when it
//! is frozen and no more can come, it runs on briefly, takes them, and is frozen again.

use std::io;
use std::time::{Duration, Instant};

use godwit_crossing::Set;
use godwit_engine::ContainerConfig;

use super::{Source, SourceError};
use crate::crossing::AtRest;
use crate::listeners::{Listening, Waiting};
use crate::resources::LocalError;

/// How long to wait for those that are being made: the round trip of a far client, or one on a busy machine. Whose
/// answer is older is not waited for: a SYN that the client never follows up, as scanners leave them, takes a minute to
/// go away.
const MAKING: Duration = Duration::from_millis(500);
/// Between two checks: there is no event to wait for.
const INTERVAL: Duration = Duration::from_millis(1);
/// How long it runs at first, and how long at last, each time twice as long: an eighth of a second in all.
/// A service that has not called accept(2) by then will not.
const RUNS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

impl Source {
    /// To be made before the freeze.
    pub(super) async fn listeners(&self, config: &ContainerConfig) -> Result<Box<dyn Listening>, LocalError> {
        let opened = self.local.network.listeners(&self.service).await?;
        opened.map_err(|source| failed(config, source))
    }

    /// Waits until no connection to the service is half made; for a while.
    pub(super) async fn settle_openings(
        &self,
        config: &ContainerConfig,
        listeners: &dyn Listening,
    ) -> Result<(), SourceError> {
        let begun = Instant::now();
        while listeners.being_made(MAKING).map_err(|source| failed(config, source))? {
            if begun.elapsed() > MAKING {
                tracing::debug!(service = %self.service.name, "connections are half made; if their clients do not begin anew, they will be reset");
                break;
            }
            tokio::time::sleep(INTERVAL).await;
        }
        Ok(())
    }

    /// Lets a frozen service whose port is closed accept what waits; it is frozen when this returns.
    pub(super) async fn accept_waiting(
        &self,
        config: &ContainerConfig,
        listeners: &dyn Listening,
        (crosses, at_rest): (Option<Set>, &mut Vec<AtRest>),
    ) -> Result<(), SourceError> {
        let mut runs = RUNS.0;
        while let Some(waiting) = listeners.waiting().map_err(|source| failed(config, source))? {
            if runs > RUNS.1 {
                let Waiting { port, connections } = waiting;
                return Err(SourceError::NotAccepted { port, connections });
            }
            tracing::debug!(service = %self.service.name, ?waiting, "connections wait to be accepted");
            self.let_run(config, crosses).await?;
            tokio::time::sleep(runs).await;
            *at_rest = self.freeze_again(config, crosses).await?;
            runs *= 2;
        }
        Ok(())
    }
}

fn failed(config: &ContainerConfig, source: io::Error) -> LocalError {
    let path = config.network_namespace.clone();
    LocalError::Io { action: "ask for the listening sockets of", path, source }
}
