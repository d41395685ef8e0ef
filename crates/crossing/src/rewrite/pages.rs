//! Which contents of pages go along.

use std::collections::BTreeSet;
use std::ops::Range;

use godwit_criu::images::{ChangedImages, ImageError, PageRun, Pagemap, ProcessImages};
use godwit_isa_plan::PAGE;

use super::damaged;
use crate::kept::within;

/// Leaves out the pages of a process that are not in these parts of its memory, which are in order; how many stay, and how
/// many do not, of those with contents in the images.
pub(super) fn of_process(
    images: &ProcessImages,
    pid: u32,
    staying: &[Range<u64>],
    changed: &mut ChangedImages,
) -> Result<(u64, u64), ImageError> {
    let name = format!("pagemap-{pid}.img");
    let failed = |reason: String| damaged(&name, reason);
    let Pagemap { pages_id, runs } = Pagemap::decode(images.image(&name)?).map_err(failed)?;
    let mut new = Vec::new();
    let mut kept: Vec<Range<u64>> = Vec::new();
    let mut offset = 0_u64;
    for run in runs {
        if run.in_parent {
            return Err(failed("it refers to the images of an earlier dump".to_owned()));
        }
        for part in within(&run.addresses, staying) {
            if run.present {
                let begin = offset.saturating_add(part.start - run.addresses.start);
                let end = begin.saturating_add(part.end - part.start);
                match kept.last_mut() {
                    Some(last) if last.end == begin => last.end = end,
                    _ => kept.push(begin..end),
                }
            }
            new.push(PageRun { addresses: part, ..run.clone() });
        }
        if run.present {
            offset = offset.saturating_add(run.addresses.end - run.addresses.start);
        }
    }
    complete(images, pages_id, offset).map_err(failed)?;
    let stay: u64 = kept.iter().map(|range| range.end - range.start).sum();
    if images.pages(pages_id).is_some() && changed.pages.insert(pages_id, kept).is_some() {
        return Err(failed(format!("pages-{pages_id}.img is another process's")));
    }
    changed.images.insert(name, Pagemap { pages_id, runs: new }.encode());
    Ok((stay / PAGE, (offset - stay) / PAGE))
}

/// Memory that processes share goes along whole. Its images are written so that each version of CRIU reads them.
pub(super) fn of_shared_memory(
    images: &ProcessImages,
    changed: &mut ChangedImages,
) -> Result<(), ImageError> {
    let mut taken: BTreeSet<u32> = changed.pages.keys().copied().collect();
    for name in images.names().filter(|name| name.starts_with("pagemap-shmem-")) {
        let failed = |reason| damaged(name, reason);
        let pagemap = Pagemap::decode(images.image(name)?).map_err(failed)?;
        let Pagemap { pages_id, runs } = &pagemap;
        // A dump has nothing else: what a service shares comes whole, and before, or not at all.
        if runs.iter().any(|run| run.in_parent || !run.present) {
            return Err(failed("it has pages whose contents are not in the images".to_owned()));
        }
        let told =
            runs.iter().fold(0_u64, |told, run| told.saturating_add(run.addresses.end - run.addresses.start));
        complete(images, *pages_id, told).map_err(failed)?;
        if !taken.insert(*pages_id) {
            return Err(failed(format!("pages-{pages_id}.img is of other memory")));
        }
        changed.images.insert(name.to_owned(), pagemap.encode());
    }
    Ok(())
}

/// Does a file have as many bytes of pages as is told of it? Without any there need be no file.
fn complete(images: &ProcessImages, pages_id: u32, told: u64) -> Result<(), String> {
    match images.pages(pages_id).unwrap_or(0) {
        there if there == told => Ok(()),
        there => Err(format!("it tells of {told} bytes of pages, and pages-{pages_id}.img has {there}")),
    }
}
