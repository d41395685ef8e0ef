//! Which contents of pages go along.

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
    let there = images.pages(pages_id);
    if there.unwrap_or(0) != offset {
        let there = there.unwrap_or(0);
        return Err(failed(format!(
            "it tells of {offset} bytes of pages, and pages-{pages_id}.img has {there}"
        )));
    }
    let stay: u64 = kept.iter().map(|range| range.end - range.start).sum();
    if there.is_some() && changed.pages.insert(pages_id, kept).is_some() {
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
    for name in images.names().filter(|name| name.starts_with("pagemap-shmem-")) {
        let pagemap = Pagemap::decode(images.image(name)?).map_err(|reason| damaged(name, reason))?;
        if changed.pages.contains_key(&pagemap.pages_id) {
            let reason = format!("pages-{}.img is a process's", pagemap.pages_id);
            return Err(damaged(name, reason));
        }
        changed.images.insert(name.to_owned(), pagemap.encode());
    }
    Ok(())
}
