//! The log of a service as a stream: what is there, and what comes while it runs.

use std::pin::Pin;

use futures::Stream;
use godwit_api::v1::{LogEntry, LogsRequest};
use godwit_engine::runc::Runc;
use godwit_engine::runc::log::{self, LogReader, LogStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::convert;
use crate::node::Node;
use crate::services::owned;
use crate::status::internal;

/// Entries that wait for a slow reader; then the log is read no further.
const QUEUE: usize = 256;

type Entries = Pin<Box<dyn Stream<Item = Result<LogEntry, Status>> + Send>>;

/// Streams the log of a service of this node.
pub(crate) async fn stream(node: &Node, request: LogsRequest) -> Result<Entries, Status> {
    let service = owned(node, &convert::service_name(&request.name)?)?;
    if let Some(kept) = &service.service.kept {
        let config = node.local().config(&service.service);
        let id = node.keeper(kept).id_here(&config).map_err(internal)?.unwrap_or_default();
        return Err(Status::failed_precondition(format!(
            "the log of service {} is kept by its engine; `{} logs {}` on node {} shows it",
            request.name,
            kept.keeper.name(),
            id,
            node.name
        )));
    }
    let path = Runc::log_path(&node.local().config(&service.service));
    let name = request.name.clone();
    let broken = move |error: std::io::Error| {
        Status::internal(format!("the log of service {name} cannot be read: {error}"))
    };
    let mut reader = LogReader::open(&path).map_err(&broken)?;
    let (entries, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let ended = send(&mut reader, &request, &entries).await;
        if let Err(error) = ended {
            // The reader may have gone.
            let _ = entries.send(Err(broken(error))).await;
        }
    });
    Ok(Box::pin(ReceiverStream::new(stream)))
}

async fn send(
    reader: &mut LogReader,
    request: &LogsRequest,
    to: &mpsc::Sender<Result<LogEntry, Status>>,
) -> std::io::Result<()> {
    let since_ns =
        u64::try_from(request.since_ms).ok().filter(|ms| *ms > 0).map(|ms| ms.saturating_mul(1_000_000));
    if let Ok(lines) = usize::try_from(request.tail) {
        for entry in reader.tail(lines, since_ns)? {
            if to.send(Ok(shown(entry))).await.is_err() {
                return Ok(());
            }
        }
    }
    loop {
        let mut batch = reader.read()?;
        if batch.is_empty() {
            if !request.follow {
                return Ok(());
            }
            tokio::select! {
                more = reader.follow() => batch = more?,
                () = to.closed() => return Ok(()),
            }
        }
        for entry in batch {
            if since_ns.is_some_and(|since| entry.time_ns < since) {
                continue;
            }
            if to.send(Ok(shown(entry))).await.is_err() {
                return Ok(());
            }
        }
    }
}

fn shown(entry: log::LogEntry) -> LogEntry {
    let mut data = entry.data;
    if !entry.partial {
        data.push(b'\n');
    }
    LogEntry {
        time_ns: i64::try_from(entry.time_ns).unwrap_or(i64::MAX),
        stream: match entry.stream {
            LogStream::Stdout => "stdout".into(),
            LogStream::Stderr => "stderr".into(),
        },
        data: data.into(),
    }
}
