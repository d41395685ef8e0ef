//! A restore without userfaultfd: the pages that have come are written into CRIU's images, and CRIU restores them.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use godwit_criu::images::{LazyPages, make_plain};
use godwit_memory::PAGE_SIZE;
use godwit_memory::pager::{Client, Stored};

use super::DestinationError;
use super::page_receiver::{PageReceiver, PageReceiverError};
use crate::resources::LocalError;

/// Puts all pages of the store into the images.
pub(super) async fn complete(receiver: &PageReceiver, images: &Path) -> Result<(), DestinationError> {
    let (mut index, client) = receiver.index().await?;
    index.sort_by_key(|stored| (stored.space, stored.addr));
    let directory = images.to_path_buf();
    let made = tokio::task::spawn_blocking(move || make_plain(&directory, &mut Store { index, client }));
    let pages = made.await.map_err(PageReceiverError::from)?.map_err(|error| LocalError::Io {
        action: "write pages into the images in",
        path: images.to_path_buf(),
        source: io::Error::other(error),
    })?;
    tracing::info!(pages, "userfaultfd is not allowed here: the pages are restored as images");
    Ok(())
}

/// The store as CRIU's images want it read: by process and address.
struct Store {
    index: Vec<Stored>,
    client: Arc<Client>,
}

impl Store {
    /// The first run that ends behind this address.
    fn find(&self, pid: u32, address: u64) -> Option<&Stored> {
        let at = self.index.partition_point(|stored| {
            (stored.space, stored.addr + stored.pages * PAGE_SIZE) <= (pid, address)
        });
        self.index.get(at).filter(|stored| stored.space == pid)
    }
}

impl LazyPages for Store {
    fn next(&mut self, pid: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let Some(stored) = self.find(pid, within.start) else { return Ok(None) };
        let start = stored.addr.max(within.start);
        let end = (stored.addr + stored.pages * PAGE_SIZE).min(within.end);
        Ok((start < end).then_some(start..end))
    }

    fn read(&mut self, pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        let Some(stored) = self.find(pid, address) else {
            return Err(io::Error::other(format!("page {address:#x} of process {pid} is not in the store")));
        };
        let slot = stored.slot + (address - stored.addr) / PAGE_SIZE;
        self.client.read(slot, buffer).map_err(io::Error::other)
    }
}
