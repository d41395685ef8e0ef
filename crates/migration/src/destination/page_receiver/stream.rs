//! One stream at the destination: what comes on it is checked, unpacked and stored.

use std::sync::Arc;

use godwit_database::blocking::off_worker;
use godwit_memory::batch::{Batch, Kind, MAX_PAGES, Run, apply_deltas};
use godwit_memory::pager::{Client, Extent, Stored};
use godwit_memory::{PAGE_SIZE, Range, Space};
use godwit_transfer::Carrier;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use super::shared::{Shared, is_shared};
use super::waiting::Waiting;
use super::{PageReceiverError, Status};
use crate::link::Link;
use crate::message::Message;
use crate::page_map::PageMap;
use crate::retained::Retained;

/// Batches between a stream's connection and the thread that stores them.
const QUEUE: usize = 8;

const PAGE: usize = 4096;

/// The stream of pages that a process waits for: they are few, and another thread would only take longer
/// to wake than they take to store.
pub(super) async fn take_faulted(mut stream: Link, mut into: Storing) -> Result<(), PageReceiverError> {
    loop {
        match stream.receive().await? {
            Message::Pages(bytes) if into.client.has_room() => into.store(bytes)?,
            // The pager is slow or hangs: other tasks must not wait with this one.
            Message::Pages(bytes) => off_worker(|| into.store(bytes))?,
            other => return Err(stream.unexpected(&other, "Pages").into()),
        }
    }
}

/// One stream: what comes is checked and stored, in order.
pub(crate) async fn take<S: Carrier>(
    mut stream: Link<S>,
    mut into: Storing,
    status_tx: watch::Sender<Status>,
) -> Result<(), PageReceiverError> {
    let (sender, mut batches) = mpsc::channel::<bytes::Bytes>(QUEUE);
    let (idle, mut idling) = watch::channel(0u64);
    let mut storing = AbortOnDropHandle::new(tokio::task::spawn_blocking(move || {
        while let Some(bytes) = batches.blocking_recv() {
            into.store(bytes)?;
            idle.send_modify(|stored| *stored += 1);
        }
        Ok::<_, PageReceiverError>(())
    }));
    let mut given = 0u64;
    loop {
        let message = tokio::select! {
            message = stream.receive() => message?,
            ended = &mut storing => return ended?,
        };
        match message {
            Message::Pages(bytes) => {
                given += 1;
                if sender.send(bytes).await.is_err() {
                    return storing.await?;
                }
            }
            Message::PagesEnd => {
                if idling.wait_for(|stored| *stored == given).await.is_err() {
                    return storing.await?;
                }
                status_tx.send_modify(|status| status.arrived += 1);
                stream.send(Message::PagesEnd).await?;
            }
            other => return Err(stream.unexpected(&other, "Pages").into()),
        }
    }
}

/// What the streams bring their pages into.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) client: Arc<Client>,
    pub(crate) retained: Option<Arc<Retained>>,
    pub(crate) shared: Shared,
    /// Most bytes of shared memory.
    pub(crate) most: u64,
}

/// One stream's way into the store.
pub(crate) struct Storing {
    client: Arc<Client>,
    retained: Option<Arc<Retained>>,
    shared: Shared,
    most: u64,
    waiting: Waiting,
    /// Where this stream's pages are: deltas apply to what is there.
    slots: PageMap<u64>,
}

/// Pages of zeros.
fn zeros(range: &Range) -> bytes::Bytes {
    vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)].into()
}

/// No slot.
const NOWHERE: u64 = u64::MAX;

impl Storing {
    pub(crate) fn new(into: &Target, waiting: &Waiting) -> Self {
        let Target { client, retained, shared, most } = into.clone();
        Self { client, retained, shared, most, waiting: waiting.clone(), slots: PageMap::new(NOWHERE) }
    }

    fn store(&mut self, bytes: bytes::Bytes) -> Result<(), PageReceiverError> {
        let batch = Batch::decode(bytes)?;
        let is_shared = is_shared(batch.space);
        if is_shared && !self.shared.is_left(batch.space) {
            return self.shared.store(batch, self.most);
        }
        let Batch { space, runs } = batch;
        let (mut stored, mut zero) = (Vec::new(), Vec::new());
        for Run { range, kind, data } in runs {
            let pages = (range.end - range.start) / PAGE_SIZE;
            let content = match kind {
                // The service may have given the page back, and written it: the pager knows.
                Kind::Zero if is_shared && pages <= MAX_PAGES as u64 => zeros(&range),
                Kind::Zero if is_shared => {
                    return Err(PageReceiverError::Protocol("more pages of shared memory than a batch has"));
                }
                Kind::Retained | Kind::Delta if is_shared => {
                    return Err(PageReceiverError::Protocol("pages of shared memory by their name"));
                }
                Kind::Zero => {
                    zero.push(Extent { space, addr: range.start, pages });
                    self.note(space, &range, None);
                    continue;
                }
                Kind::Data => data,
                Kind::Retained => self.retained(space, &range)?,
                Kind::Delta => self.changed(space, &range, &data)?,
            };
            let slot = self.client.store(&content)?;
            stored.push(Stored { space, addr: range.start, pages, slot });
            if !is_shared {
                self.note(space, &range, Some(slot));
            }
        }
        if !zero.is_empty() {
            self.client.zero(&zero)?;
        }
        if !stored.is_empty() {
            self.client.put(&stored)?;
        }
        let came = stored.iter().map(|stored| (stored.space, stored.addr, stored.pages));
        let came = came.chain(zero.iter().map(|zero| (zero.space, zero.addr, zero.pages)));
        came.for_each(|(space, address, pages)| self.waiting.came(space, address / PAGE_SIZE, pages));
        Ok(())
    }

    /// Remembers where pages are now.
    fn note(&mut self, space: Space, range: &Range, slot: Option<u64>) {
        for (page, address) in (0..).zip((range.start..range.end).step_by(PAGE)) {
            self.slots.set(space, address, slot.map_or(NOWHERE, |slot| slot + page));
        }
    }

    /// What was retained of these pages when the service left.
    fn retained(&self, space: Space, range: &Range) -> Result<bytes::Bytes, PageReceiverError> {
        let retained = self
            .retained
            .as_ref()
            .ok_or(PageReceiverError::Protocol("pages that were never retained here"))?;
        let mut content = bytes::BytesMut::new();
        for address in (range.start..range.end).step_by(PAGE) {
            let page = retained.page(space, address)?;
            content.extend_from_slice(
                &page.ok_or(PageReceiverError::Protocol("a page that was not retained here"))?,
            );
        }
        Ok(content.freeze())
    }

    /// Pages as they are now, by their deltas.
    fn changed(&self, space: Space, range: &Range, deltas: &[u8]) -> Result<bytes::Bytes, PageReceiverError> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut content = vec![0; length];
        for (page, address) in content.as_chunks_mut::<PAGE>().0.iter_mut().zip((range.start..).step_by(PAGE))
        {
            let slot = Some(self.slots.get(space, address)).filter(|slot| *slot != NOWHERE);
            let slot = slot.ok_or(PageReceiverError::Protocol("a delta to a page that never came"))?;
            self.client.read(slot, page)?;
        }
        apply_deltas(deltas, &mut content)?;
        Ok(content.into())
    }
}
