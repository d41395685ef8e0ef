//! Files of one service at different times, in a directory: `godwit checkpoint --every`.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use crate::output;

/// `20261126T163000Z`.
const TIME: &[u8] = b"dddddddd\x54dddddd\x5a";

/// The files of a service in a directory.
pub(super) struct Series<'a> {
    pub(super) directory: &'a Path,
    pub(super) service: &'a str,
    /// With its dot: `.tar.zst`.
    pub(super) ending: &'a str,
}

impl Series<'_> {
    /// The file of a moment.
    pub(super) fn file(&self, at: SystemTime) -> PathBuf {
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let time = output::rfc3339(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX), 3);
        let seconds: String = time.chars().take_while(|c| *c != '.').filter(|c| !"-:".contains(*c)).collect();
        self.directory.join(format!("{}-{seconds}Z{}", self.service, self.ending))
    }

    /// Removes all of them but the latest, and returns those that it has removed.
    pub(super) fn prune(&self, keep: usize) -> io::Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.directory)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| self.has(name)) && entry.file_type()?.is_file() {
                all.push(entry.path());
            }
        }
        // Their names are in the order of their times.
        all.sort();
        all.truncate(all.len().saturating_sub(keep));
        all.iter().try_for_each(fs::remove_file)?;
        Ok(all)
    }

    /// Whether a file of this name is one of them.
    fn has(&self, name: &str) -> bool {
        let time = name
            .strip_prefix(self.service)
            .and_then(|rest| rest.strip_prefix('-'))
            .and_then(|rest| rest.strip_suffix(self.ending));
        let fits = |(found, wanted): (u8, &u8)| match wanted {
            b'd' => found.is_ascii_digit(),
            wanted => found == *wanted,
        };
        time.is_some_and(|time| time.len() == TIME.len() && time.bytes().zip(TIME).all(fits))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_latest_are_kept_and_what_is_none_of_them_stays() {
        let directory = tempfile::tempdir().unwrap();
        let series = Series { directory: directory.path(), service: "web", ending: ".tar.zst" };
        let at = |seconds| series.file(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert!(at(1_795_704_586).ends_with("web-20261126T144946Z.tar.zst"));
        for seconds in [1_795_704_586, 1_795_790_986, 1_700_000_000, 0] {
            fs::write(at(seconds), "").unwrap();
        }
        let others =
            ["web-2-20261126T144946Z.tar.zst", "web-20261126T144946Z.tar", "web-latest.tar.zst", "web"];
        others.iter().for_each(|name| fs::write(directory.path().join(name), "").unwrap());
        fs::create_dir(at(1)).unwrap();
        assert_eq!(series.prune(2).unwrap(), [at(0), at(1_700_000_000)]);
        assert!(at(1_795_704_586).exists() && at(1_795_790_986).exists() && at(1).exists());
        assert!(others.iter().all(|name| directory.path().join(name).exists()));
        assert!(series.prune(2).unwrap().is_empty());
    }
}
