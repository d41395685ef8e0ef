//! Pages that have come are written into CRIU's images, and CRIU restores them: those of private mappings of files, which
//! userfaultfd does not take, and all pages where there is no userfaultfd.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use godwit_criu::images::{ImageError, LazyPages, bring, make_plain};
use godwit_memory::pager::{Client, Stored};
use godwit_memory::shared::Copies;
use godwit_memory::{PAGE_SIZE, Space};

use super::DestinationError;
use super::page_receiver::{PageReceiver, PageReceiverError};
use crate::resources::LocalError;

/// Puts all pages of the store into the images.
pub(super) async fn complete(receiver: &PageReceiver, images: &Path) -> Result<(), DestinationError> {
    let (mut index, client) = receiver.index().await?;
    index.sort_by_key(|stored| (stored.space, stored.addr));
    let pages = write(images, move |images| make_plain(images, &mut Store { index, client })).await?;
    tracing::info!(pages, "userfaultfd is not allowed here: the pages are restored as images");
    Ok(())
}

/// Puts what processes have written in private mappings of files into the images, where the dump has left it out.
pub(super) async fn bring_copied(receiver: &PageReceiver, images: &Path) -> Result<(), DestinationError> {
    let copied = receiver.shared().take_copied()?;
    write(images, move |images| bring(images, &mut Copied(copied))).await.map(drop)
}

async fn write(
    images: &Path,
    write: impl FnOnce(&Path) -> Result<u64, ImageError> + Send + 'static,
) -> Result<u64, DestinationError> {
    let directory = images.to_path_buf();
    let written = tokio::task::spawn_blocking(move || write(&directory)).await;
    Ok(written.map_err(PageReceiverError::from)?.map_err(|error| LocalError::Io {
        action: "write pages into the images in",
        path: images.to_path_buf(),
        source: io::Error::other(error),
    })?)
}

/// What processes have written in private mappings of files.
struct Copied(BTreeMap<Space, Arc<Copies>>);

impl LazyPages for Copied {
    fn next(&mut self, pid: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
        Ok(self.0.get(&pid).and_then(|copies| copies.next(&within)))
    }

    fn read(&mut self, pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.0.get(&pid) {
            Some(copies) => copies.take(address, buffer),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
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
