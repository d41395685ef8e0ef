//! The frames that functions left in a thread's continuation buffer when they were captured, the innermost lowest
//! (`isa/runtime/private/capture.c`):
//!
//! ```text
//! | values, as many bytes as the site has | u32 site | u32 mark |   …   | continuation pointer
//! ```

use crate::plan::Quarter;
use crate::{Memory, Mismatch, Program, Site, Thread};

/// `GW_TRAILER`.
const MARK: u32 = 0x4757_4652;
const TRAILER: usize = 8;

/// A function that was captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Where its values are.
    pub address: u64,
    /// The number of its site in the program.
    pub number: u32,
    /// The call that it waits in.
    pub site: Site<'a>,
}

impl Program {
    /// The frames of a thread, the innermost first.
    ///
    /// # Errors
    /// When they are not whole frames of this program.
    pub fn frames(&self, memory: &Memory<'_>, thread: &Thread) -> Result<Vec<Frame<'_>>, Mismatch> {
        let begin = thread.slot.quarter(Quarter::Continuation).start;
        let slot = thread.slot.number();
        let mut bytes = vec![0; usize::try_from(thread.continuation - begin).unwrap_or(0)];
        memory.read(begin, &mut bytes);
        let mut frames = Vec::new();
        let mut left = bytes.as_slice();
        while !left.is_empty() {
            let end = begin + left.len() as u64;
            let Some((values, [a, b, c, d, mark @ ..])) = left.split_last_chunk::<TRAILER>() else {
                return Err(Mismatch::Trailer { slot, address: begin });
            };
            let address = end - TRAILER as u64;
            if u32::from_le_bytes(*mark) != MARK {
                return Err(Mismatch::Trailer { slot, address });
            }
            let number = u32::from_le_bytes([*a, *b, *c, *d]);
            let site = self.site(number).ok_or_else(|| Mismatch::Site {
                slot,
                address,
                site: number,
                sites: self.sites(),
                program: self.path().to_owned(),
            })?;
            let rest = values.len().checked_sub(site.bytes as usize);
            let rest = rest.ok_or(Mismatch::FrameLength { slot, address, bytes: site.bytes })?;
            left = &values[..rest];
            frames.push(Frame { address: begin + rest as u64, number, site });
        }
        frames.reverse();
        Ok(frames)
    }
}
