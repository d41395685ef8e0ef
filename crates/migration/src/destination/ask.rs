//! A source asks whether a service may come, and how quick the link is, of which nothing is kept here; or it prepares the
//! move ([`super::prepared`]).

use std::sync::Arc;

use super::admit::{Asked, answer_to_question};
use super::{DestinationError, answer_to_failed, prepared};
use crate::link::Link;
use crate::message::{Message, Open};
use crate::resources::NodeResources;

/// Most that is taken to measure the link, in all, bytes: a second of 10 Gbit/s.
const MOST_PROBED: usize = 1 << 30;

/// Answers one question to its end.
pub(super) async fn answer(local: &Arc<NodeResources>, mut link: Link, open: Open) {
    let source = link.node().to_string();
    let ended = match answer_to_question(local, &source, open).await {
        Ok(asked) => answered(local, &mut link, asked).await,
        Err(error) => link.send(answer_to_failed(&error)).await.map_err(Into::into),
    };
    if let Err(error) = ended {
        tracing::info!(%source, error = %crate::error_chain(&error), "a question was not asked to its end");
    }
    link.close().await;
}

/// Answers, and acknowledges what comes to measure the link, until the source leaves or prepares the move.
async fn answered(local: &Arc<NodeResources>, link: &mut Link, asked: Asked) -> Result<(), DestinationError> {
    link.send(Message::Accepted(asked.accepted.clone())).await?;
    let mut probed = 0_usize;
    loop {
        match link.receive().await {
            Ok(Message::Probe(data)) => probed = probed.saturating_add(data.len()),
            Ok(Message::Prepare) => return prepared::take_in(local, link, asked).await,
            Ok(Message::ProbeEnd) => link.send(Message::ProbeEnd).await?,
            Ok(other) => return Err(link.unexpected(&other, "Probe").into()),
            Err(error) if error.is_of_closing() => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if probed > MOST_PROBED {
            return Err(DestinationError::Protocol("more than a link is measured with"));
        }
    }
}
