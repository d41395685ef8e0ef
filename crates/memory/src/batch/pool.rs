//! Buffers that batches are made in, and that come back when they have been sent.

use std::sync::{Arc, Mutex, PoisonError};

use super::{FRONT, MAX_PAGES, PAGE};

/// Most buffers that a pool keeps: as many as are under way between a sender and its connection.
const POOLED: usize = 24;

/// Buffers that were sent, for the batches to come: the first use of fresh memory costs as much as
/// copying the pages.
#[derive(Debug, Clone, Default)]
pub struct Pool(Arc<Mutex<Vec<Vec<u8>>>>);

impl Pool {
    /// A buffer with [`FRONT`] bytes.
    pub(super) fn take(&self) -> Vec<u8> {
        // Nothing can panic while the list is changed.
        let pooled = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = pooled.unwrap_or_else(|| Vec::with_capacity(FRONT + MAX_PAGES * PAGE + PAGE));
        buffer.clear();
        buffer.resize(FRONT, 0);
        buffer
    }

    pub(super) fn give(&self, buffer: Vec<u8>) {
        let mut pooled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pooled.len() < POOLED {
            pooled.push(buffer);
        }
    }
}

/// A buffer on the wire, which goes back to its pool after that.
pub(super) struct Lent {
    pub(super) buffer: Vec<u8>,
    pub(super) pool: Pool,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::batch::{Batch, Builder, Codec};

    #[test]
    fn buffers_go_round_between_builder_and_wire() {
        let pool = Pool::default();
        let mut builder = Builder::with(1, &pool);
        let mut place = None;
        for _ in 0..3 {
            builder.page(0x1000, &[1; PAGE]);
            let sent = builder.finish(Codec::Raw);
            let at = sent.as_ptr();
            Batch::decode(sent).unwrap();
            builder.page(0x2000, &[2; PAGE]);
            drop(builder.finish(Codec::Raw));
            assert_eq!(*place.get_or_insert(at), at, "the buffer that came back is used again");
        }
    }
}
