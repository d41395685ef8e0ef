//! What a service's sockets send while it is frozen in a move, and what of that is sent again after the resume:
//! [`Standing`] and [`Resend`] at each step.
//!
//! | step | at the source | at the destination |
//! |---|---|---|
//! | before the freeze | [`Stand::stand_ready`] | [`Stand::stand_ready`], [`Stand::stand_apart`] |
//! | before the dump | [`Stand::stand`] | |
//! | restored | | [`Stand::look_at_doubts`] |
//! | the port is open | [`Stand::speak`], [`Stand::say_again`] | [`Stand::speak`] |
//! | it runs | | [`Stand::resend`] |
//! | next, or after a crash | [`Stand::stand_down`] | [`Stand::stand_down`] |
//! | it has left, or does not come | [`Stand::stand_nowhere`] | [`Stand::stand_nowhere`] |

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use godwit_criu::images::{Unacknowledged, unacknowledged};
use godwit_network::{InDoubt, NetworkError, Resend, Standing, forget_standing};
use tokio_util::task::AbortOnDropHandle;

use crate::service::{Attachment, Layout, Service};

/// What a node does with what a service's sockets send while it is frozen.
#[async_trait]
pub trait Stand: Send + Sync {
    /// Prepares for a freeze that comes soon: does beforehand what takes milliseconds.
    async fn stand_ready(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service is dumped next: what its sockets send from here on is held, and its sockets do not reach each other.
    fn stand(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service is restored here next: its sockets do not reach each other.
    fn stand_apart(&self, service: &Service) -> Result<(), NetworkError>;
    /// The service has been restored, and does not run: examines, beside what comes next, what was unacknowledged
    /// according to these images.
    fn look_at_doubts(&self, service: &Service, images: Vec<Unacknowledged>);
    /// The service continues here: its sockets reach each other again.
    async fn speak(&self, service: &Service) -> Result<(), NetworkError>;
    /// Sends what was held of a service that continues at its source.
    fn say_again(&self, service: &Service);
    /// Sends again what is still unacknowledged, of a service that runs here, on a thread of its own.
    fn resend(&self, service: &Service);
    /// The service runs here: removes what its freeze has left in its namespace. A failure does not harm the service,
    /// as what is left has no effect.
    async fn stand_down(&self, service: &Service);
    /// Nothing of the service is here any more: a namespace of its own goes with it, and another one is left as it
    /// was found.
    async fn stand_nowhere(&self, service: &Service) -> Result<(), NetworkError>;
    /// Drops what is held of a service that is elsewhere from now on.
    fn forget(&self, service: &Service);
}

/// The real [`Stand`]: services of this node that stand still, by their ids.
#[derive(Debug)]
pub struct Standstills {
    services: Mutex<HashMap<String, Standstill>>,
    layout: Layout,
    holds: bool,
}

#[derive(Debug)]
struct Standstill {
    standing: Standing,
    /// What is to be sent again.
    doubts: Option<AbortOnDropHandle<Option<Resend>>>,
}

impl Standstills {
    /// None yet. Frames are held where it `holds`; what drops them is for comparison only.
    #[must_use]
    pub fn new(layout: Layout, holds: bool) -> Self {
        Self { services: Mutex::default(), layout, holds }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Standstill>> {
        // Each change is one call.
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn stand_no_more(&self, service: &Service) -> Result<(), NetworkError> {
        self.forget(service);
        forget(&self.layout.namespace(service)).await
    }
}

#[async_trait]
impl Stand for Standstills {
    async fn stand_ready(&self, service: &Service) -> Result<(), NetworkError> {
        // In a namespace that godwit did not create nothing reaches an interface at which it could be held.
        let networks = u8::try_from(service.endpoints().len()).unwrap_or(u8::MAX);
        let standing = Standing::prepare(&self.layout.namespace(service), networks).await?;
        self.lock().insert(service.id.clone(), Standstill { standing, doubts: None });
        Ok(())
    }

    fn stand(&self, service: &Service) -> Result<(), NetworkError> {
        match self.lock().get(&service.id) {
            Some(still) if self.holds => still.standing.hold(),
            Some(still) => still.standing.hold_loopback(),
            None => Ok(()),
        }
    }

    fn stand_apart(&self, service: &Service) -> Result<(), NetworkError> {
        self.lock().get(&service.id).map_or(Ok(()), |still| still.standing.hold_loopback())
    }

    fn look_at_doubts(&self, service: &Service, images: Vec<Unacknowledged>) {
        if images.is_empty() || !self.holds {
            return;
        }
        let (netns, name) = (self.layout.namespace(service), service.name.clone());
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
        if let Some(still) = self.lock().get_mut(&service.id) {
            still.doubts = Some(AbortOnDropHandle::new(tokio::spawn(look)));
        }
    }

    async fn speak(&self, service: &Service) -> Result<(), NetworkError> {
        if let Some(still) = self.lock().get(&service.id) {
            return still.standing.let_go();
        }
        // Another life of this daemon may have stopped them.
        forget(&self.layout.namespace(service)).await
    }

    fn say_again(&self, service: &Service) {
        let sent = self.lock().get(&service.id).map(|still| still.standing.send_kept());
        match sent {
            Some(Ok(frames)) => {
                tracing::debug!(service = %service.name, frames, "what its sockets sent is sent again")
            }
            Some(Err(error)) => say_that_clients_wait(&service.name, &error),
            None => {}
        }
    }

    fn resend(&self, service: &Service) {
        let doubts = self.lock().get_mut(&service.id).and_then(|still| still.doubts.take());
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

    async fn stand_down(&self, service: &Service) {
        if let Err(error) = self.stand_no_more(service).await {
            tracing::warn!(
                service = %service.name,
                error = %crate::error_chain(&error),
                "the nftables table godwit-loopback may still be in the service's namespace, without effect"
            );
        }
    }

    async fn stand_nowhere(&self, service: &Service) -> Result<(), NetworkError> {
        match service.network {
            Attachment::Overlay => {
                self.forget(service);
                Ok(())
            }
            Attachment::Namespace(_) => self.stand_no_more(service).await,
        }
    }

    fn forget(&self, service: &Service) {
        drop(self.lock().remove(&service.id));
    }
}

/// What was unacknowledged according to images; nothing where they cannot be read, as the service moves all the same.
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
