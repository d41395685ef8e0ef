//! Repairs what CRIU's images tell wrongly of a frozen process, before a restore.
//!
//! A timerfd with an interval that ran out while its process was frozen shows a remaining time of 0
//! in `/proc/PID/fdinfo`, because the kernel starts the next interval only when the file is read
//! (`fs/timerfd.c`). CRIU takes that over, and a remaining time of 0 stops a timer
//! (`timerfd_settime(2)`): it would never run out again. So the next interval begins at the restore.
//! How often the timer ran out until then is kept by CRIU beside it (`ticks`).
//!
//! And limits of open files that were raised for the dump are again what they were.

mod brought;
mod hidden;
mod links;
mod mount;
mod mounts;
mod root;

use std::borrow::Cow;
use std::path::Path;

use prost::Message;

use crate::images::{ImageError, ImageKind, rewrite};

pub use brought::{Becomes, CONFINED, READ_ONLY, brought_mounts};
pub use hidden::{Here, Hidden, fit_kernel};
pub use links::{Links, links};
pub use mounts::external_mounts;
pub use root::forget_root_mode;

/// `file_entry` of a timerfd, whole.
#[derive(Clone, PartialEq, Eq, Message)]
struct FileEntry {
    #[prost(uint32, required, tag = "1")]
    kind: u32,
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "12")]
    timer: Option<TimerFd>,
}

/// `timerfd_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
struct TimerFd {
    #[prost(uint32, required, tag = "1")]
    id: u32,
    #[prost(uint32, required, tag = "2")]
    flags: u32,
    /// `fown_entry`, as it is.
    #[prost(bytes = "vec", required, tag = "3")]
    owner: Vec<u8>,
    #[prost(uint32, required, tag = "4")]
    clock: u32,
    #[prost(uint64, required, tag = "5")]
    ticks: u64,
    #[prost(uint32, required, tag = "6")]
    settime_flags: u32,
    /// Remaining time.
    #[prost(uint64, required, tag = "7")]
    value_s: u64,
    #[prost(uint64, required, tag = "8")]
    value_ns: u64,
    #[prost(uint64, required, tag = "9")]
    interval_s: u64,
    #[prost(uint64, required, tag = "10")]
    interval_ns: u64,
}

/// Repairs the images of a dump; tells how many timers it started and limits it put back.
pub fn repair(images: &Path) -> Result<usize, ImageError> {
    Ok(crate::limits::repair(images)? + repair_timers(images)?)
}

fn repair_timers(images: &Path) -> Result<usize, ImageError> {
    let mut count = 0;
    rewrite(&images.join("files.img"), ImageKind::Files, |records| {
        let mut repaired = Vec::with_capacity(records.len());
        for record in records {
            repaired.push(match FileEntry::decode(*record).map_err(|error| error.to_string())? {
                FileEntry { timer: Some(timer), kind, id } if timer.is_stuck() => {
                    let timer = TimerFd { value_s: timer.interval_s, value_ns: timer.interval_ns, ..timer };
                    count += 1;
                    Cow::Owned(FileEntry { kind, id, timer: Some(timer) }.encode_to_vec())
                }
                _ => Cow::Borrowed(*record),
            });
        }
        Ok((count > 0).then_some(repaired))
    })?;
    Ok(count)
}

impl TimerFd {
    /// Whether it has an interval, ran out, and would not go on after a restore. A timer that was
    /// stopped has not run out.
    fn is_stuck(&self) -> bool {
        (self.value_s, self.value_ns) == (0, 0)
            && (self.interval_s, self.interval_ns) != (0, 0)
            && self.ticks > 0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    const TIMERFD: u32 = 17;

    fn timer(id: u32, ticks: u64, value_ns: u64, interval_ns: u64) -> FileEntry {
        let timer = TimerFd {
            id,
            flags: 2,
            owner: vec![8, 0],
            clock: 1,
            ticks,
            settime_flags: 0,
            value_s: 0,
            value_ns,
            interval_s: 0,
            interval_ns,
        };
        FileEntry { kind: TIMERFD, id, timer: Some(timer) }
    }

    fn image(records: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = [0x5456_4319_u32, 0x5630_3138].map(u32::to_le_bytes).concat();
        for record in records {
            bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            bytes.extend(record);
        }
        bytes
    }

    #[test]
    fn only_timers_that_ran_out_and_have_an_interval_are_started() {
        // A regular file, with fields that are unknown here.
        let other = vec![0x08, 1, 0x10, 9, 0x1a, 2, 8, 9];
        let whole = [(1, 1, 0, 5), (2, 1, 3, 5), (3, 1, 0, 0), (4, 0, 0, 5)]
            .map(|(id, ticks, value, interval)| timer(id, ticks, value, interval).encode_to_vec());
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("files.img");
        fs::write(&path, image(&[&[other.clone()][..], &whole].concat())).unwrap();
        assert_eq!(repair(directory.path()).unwrap(), 1);
        let [_, second, third, fourth] = whole;
        let expected = image(&[other, timer(1, 1, 5, 5).encode_to_vec(), second, third, fourth]);
        assert_eq!(fs::read(&path).unwrap(), expected);
        assert_eq!(repair(directory.path()).unwrap(), 0);
    }

    #[test]
    fn a_damaged_image_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut bytes = image(&[timer(1, 1, 0, 5).encode_to_vec()]);
        bytes.truncate(bytes.len() - 1);
        fs::write(directory.path().join("files.img"), bytes).unwrap();
        let message = repair(directory.path()).unwrap_err().to_string();
        assert!(message.contains("files.img is damaged: it ends inside a record"), "{message}");
    }
}
