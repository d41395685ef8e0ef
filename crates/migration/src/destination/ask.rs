//! A source asks whether a service may come, and how quick the link is. Nothing is kept here of that.

use super::admit::answer_to_question;
use super::{DestinationError, answer_to_failed};
use crate::link::Link;
use crate::message::{Message, Open};
use crate::resources::NodeResources;

/// Most that is taken to measure the link, in all, bytes: a second of 10 Gbit/s.
const MOST_PROBED: usize = 1 << 30;

/// Answers one question to its end.
pub(super) async fn answer(local: &NodeResources, mut link: Link, open: Open) {
    let source = link.node().to_string();
    let ended = match answer_to_question(local, &source, open).await {
        Ok(accepted) => measured(&mut link, Message::Accepted(accepted)).await,
        Err(error) => link.send(answer_to_failed(&error)).await.map_err(Into::into),
    };
    if let Err(error) = ended {
        tracing::info!(%source, error = %crate::error_chain(&error), "a question was not asked to its end");
    }
    link.close().await;
}

/// Answers, and acknowledges what comes to measure the link, until the source leaves.
async fn measured(link: &mut Link, accepted: Message) -> Result<(), DestinationError> {
    link.send(accepted).await?;
    let mut probed = 0_usize;
    loop {
        match link.receive().await {
            Ok(Message::Probe(data)) => probed = probed.saturating_add(data.len()),
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
