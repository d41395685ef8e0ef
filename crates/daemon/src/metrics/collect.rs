//! One answer at a time: whoever asks while it is collected, or soon after, has the same.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus::TextEncoder;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::series::Series;
use super::{services, state};
use crate::counters::catalog;
use crate::node::Node;

/// For how long an answer is given again. Prometheus asks each minute, or each few seconds at most.
const FRESH: Duration = Duration::from_secs(1);

/// How long the figures of services may take in all: less than the ten seconds for which Prometheus waits.
const DEADLINE: Duration = Duration::from_secs(5);

/// An answer, or why there is none.
type Answer = Result<Bytes, String>;

/// Collects answers.
#[derive(Clone)]
pub(super) struct Collecting {
    node: Arc<Node>,
    last: Arc<Mutex<Option<(Instant, Answer)>>>,
}

impl Collecting {
    pub(super) fn new(node: &Arc<Node>) -> Self {
        Self { node: Arc::clone(node), last: Arc::default() }
    }

    /// All metrics as text.
    pub(super) async fn answer(&self) -> Answer {
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((at, answer)) = &*last
            && at.elapsed() < FRESH
        {
            return answer.clone();
        }
        let node = Arc::clone(&self.node);
        // It goes on where the one who asked has gone, and the next one waits for it: there is never a second one beside it.
        let collected = tokio::spawn(async move {
            let answer = off_workers(node).await;
            *last = Some((Instant::now(), answer.clone()));
            answer
        });
        collected.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

/// On a thread of its own: it reads some files for each service, and the others carry the moves.
async fn off_workers(node: Arc<Node>) -> Answer {
    let runtime = Handle::current();
    let collecting = tokio::task::spawn_blocking(move || runtime.block_on(collect(&node)));
    collecting.await.unwrap_or_else(|error| Err(error.to_string()))
}

async fn collect(node: &Arc<Node>) -> Answer {
    let begun = Instant::now();
    let mut series = Series::default();
    state::collect(node, &mut series)?;
    services::collect(node, begun + DEADLINE, &mut series).await?;
    let counted = node.counters.gather();
    series.put(catalog::COLLECTED, &[], begun.elapsed().as_secs_f64());
    let text = TextEncoder::new().encode_to_string(&series.with(counted));
    text.map(Bytes::from).map_err(|error| error.to_string())
}
