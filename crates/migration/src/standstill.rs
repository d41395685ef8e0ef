//! What a service's sockets say while it stands still in a move, and what of it is said when it goes on:
//! [`Standing`] and [`Resend`] at each step.
//!
//! | step | at the source | at the destination |
//! |---|---|---|
//! | before the freeze | [`Local::stand_ready`] | [`Local::stand_ready`], [`Local::stand_apart`] |
//! | before the dump | [`Local::stand`] | |
//! | restored | | [`Local::look_at_doubts`] |
//! | the port is open | [`Local::speak`], [`Local::say_again`] | [`Local::speak`] |
//! | it runs | | [`Local::resend`] |
//! | next, or after a crash | [`Local::stand_down`] | [`Local::stand_down`] |
//! | it has left, or does not come | [`Local::stand_nowhere`] | [`Local::stand_nowhere`] |

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use godwit_criu::images::{Unacknowledged, unacknowledged};
use godwit_network::{InDoubt, NetworkError, Resend, Standing, forget_standing};
use tokio_util::task::AbortOnDropHandle;

use crate::attach::Attachment;
use crate::local::Local;
use crate::service::Service;

/// Services of this node that stand still, by their ids.
#[derive(Debug, Default)]
pub struct Standstills(Mutex<HashMap<String, Standstill>>);

#[derive(Debug)]
struct Standstill {
    standing: Standing,
    /// What is to be sent again.
    doubts: Option<AbortOnDropHandle<Option<Resend>>>,
}

impl Standstills {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Standstill>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what is kept of a service that is elsewhere from now on.
    pub(crate) fn forget(&self, service: &Service) {
        drop(self.lock().remove(&service.id));
    }
}

impl Local {
    /// Makes ready for a standstill that comes soon: nothing that takes milliseconds is left for it.
    pub(crate) async fn stand_ready(&self, service: &Service) -> Result<(), NetworkError> {
        // In a namespace of somebody else's nothing reaches an interface from which it could be kept.
        let networks = u8::try_from(service.endpoints().len()).unwrap_or(u8::MAX);
        let standing = Standing::prepare(&self.config(service).network_namespace, networks).await?;
        self.standstills.lock().insert(service.id.clone(), Standstill { standing, doubts: None });
        Ok(())
    }

    /// The service is dumped next: what its sockets say from here on is kept, and does not reach each other.
    pub(crate) fn stand(&self, service: &Service) -> Result<(), NetworkError> {
        match self.standstills.lock().get(&service.id) {
            Some(still) if self.holds => still.standing.hold(),
            Some(still) => still.standing.hold_loopback(),
            None => Ok(()),
        }
    }

    /// The service is restored here next: its sockets do not reach each other.
    pub(crate) fn stand_apart(&self, service: &Service) -> Result<(), NetworkError> {
        self.standstills.lock().get(&service.id).map_or(Ok(()), |still| still.standing.hold_loopback())
    }

    /// The service has been restored, and does not run: looks, beside what comes next, at what these images tell
    /// to have been in doubt.
    pub(crate) fn look_at_doubts(&self, service: &Service, images: Vec<Unacknowledged>) {
        if images.is_empty() || !self.holds {
            return;
        }
        let (netns, name) = (self.config(service).network_namespace, service.name.clone());
        let look = async move {
            let all = images.into_iter().map(in_doubt).collect();
            match Resend::prepare(&netns, all).await {
                Ok(resend) => Some(resend),
                Err(error) => {
                    say_that_clients_wait(&name, &error);
                    None
                }
            }
        };
        if let Some(still) = self.standstills.lock().get_mut(&service.id) {
            still.doubts = Some(AbortOnDropHandle::new(tokio::spawn(look)));
        }
    }

    /// The service goes on here: its sockets reach each other again.
    pub(crate) async fn speak(&self, service: &Service) -> Result<(), NetworkError> {
        if let Some(still) = self.standstills.lock().get(&service.id) {
            return still.standing.let_go();
        }
        // Another life of this daemon may have stopped them.
        forget(&self.config(service).network_namespace).await
    }

    /// Sends what was kept of a service that goes on where it was.
    pub(crate) fn say_again(&self, service: &Service) {
        let sent = self.standstills.lock().get(&service.id).map(|still| still.standing.send_kept());
        match sent {
            Some(Ok(frames)) => {
                tracing::debug!(service = %service.name, frames, "what it said is said again")
            }
            Some(Err(error)) => say_that_clients_wait(&service.name, &error),
            None => {}
        }
    }

    /// Sends again what is in doubt still, of a service that runs here, on a thread of its own.
    pub(crate) fn resend(&self, service: &Service) {
        let doubts = self.standstills.lock().get_mut(&service.id).and_then(|still| still.doubts.take());
        let Some(doubts) = doubts else { return };
        let name = service.name.clone();
        tokio::spawn(async move {
            // A panic has been told of, and has left nothing to send.
            let Ok(Some(resend)) = doubts.await else { return };
            let (looked_at, begun) = (resend.count(), Instant::now());
            match tokio::task::spawn_blocking(move || resend.send()).await {
                Ok(Ok(resent)) => {
                    tracing::debug!(
                        service = %name,
                        looked_at,
                        ?resent,
                        took = ?begun.elapsed(),
                        "what was in doubt is sent again"
                    )
                }
                Ok(Err(error)) => say_that_clients_wait(&name, &error),
                Err(_) => {}
            }
        });
    }

    /// The service runs here: takes away what its standstill has left in its namespace. Where that fails the service
    /// is not to suffer, as what is left does nothing.
    pub(crate) async fn stand_down(&self, service: &Service) {
        if let Err(error) = self.stand_no_more(service).await {
            tracing::warn!(
                service = %service.name,
                error = %crate::error_chain(&error),
                "the nftables table godwit-loopback may still be in the service's namespace, without effect"
            );
        }
    }

    async fn stand_no_more(&self, service: &Service) -> Result<(), NetworkError> {
        self.standstills.forget(service);
        forget(&self.config(service).network_namespace).await
    }

    /// Nothing of the service is here any more: a namespace of its own goes with it, and another one is left as it
    /// was found.
    pub(crate) async fn stand_nowhere(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network {
            Attachment::Overlay => {
                self.standstills.forget(service);
                Ok(())
            }
            Attachment::Namespace(_) => self.stand_no_more(service).await,
        }
    }
}

/// What images tell to have been in doubt; nothing where they cannot be read, as the service moves all the same.
pub(crate) fn read_doubts(images: &Path, service: &str) -> Vec<Unacknowledged> {
    unacknowledged(images).unwrap_or_else(|error| {
        say_that_clients_wait(service, &error);
        Vec::new()
    })
}

async fn forget(netns: &Path) -> Result<(), NetworkError> {
    if !netns.exists() {
        return Ok(());
    }
    forget_standing(netns).await
}

fn say_that_clients_wait(service: &str, error: &(dyn std::error::Error + 'static)) {
    tracing::warn!(
        service,
        error = %crate::error_chain(error),
        "what was not acknowledged before the pause is not sent again at once; clients may wait for TCP to do so"
    );
}

fn in_doubt(image: Unacknowledged) -> InDoubt {
    let Unacknowledged { local, remote, sequence, bytes, finished, received, segment, window, timestamp } =
        image;
    InDoubt { local, remote, sequence, bytes, finished, received, segment, window, timestamp }
}
