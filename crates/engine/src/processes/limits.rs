//! The limits of memory and CPU that a container's processes have now, whoever set them. cgroup v1 and v2.
//!
//! Some runtimes have the processes in a cgroup below the one with the limits, so each one that is named after the container
//! counts, and the tightest limit holds.

use std::path::{Path, PathBuf};

use super::cgroup::Cgroup;

/// Version 1 says so where there is no limit of memory: the most that is a multiple of a page.
const NO_LIMIT: i64 = i64::MAX - 65_535;

/// Limits as engines write them: -1 for none. Nothing of what this machine does not limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Memory, bytes.
    pub(crate) memory: Option<i64>,
    /// Memory and swap, bytes.
    pub(crate) swap: Option<i64>,
    /// CPU time in each period, and that; microseconds.
    pub(crate) cpu: Option<(i64, i64)>,
}

impl Limits {
    /// Those of a container with this ID.
    pub(crate) fn of(cgroup: &Cgroup, id: &str) -> Self {
        let read = |directory: &Path, file: &str| std::fs::read_to_string(directory.join(file)).ok();
        let memory = named_after(cgroup.directory("memory"), id);
        let cpu = named_after(cgroup.directory("cpu"), id);
        if cgroup.is_unified() {
            let of = |file: &str| tightest(memory.iter().filter_map(|at| number(&read(at, file)?)));
            let (memory, swap) = (of("memory.max"), of("memory.swap.max"));
            let both = |(memory, swap): (i64, i64)| match memory < 0 || swap < 0 {
                true => -1,
                false => memory.saturating_add(swap),
            };
            let quotas = cpu.iter().filter_map(|at| quota(&read(at, "cpu.max")?));
            return Self { memory, swap: memory.zip(swap).map(both), cpu: tightest_cpu(quotas) };
        }
        let of = |file: &str| tightest(memory.iter().filter_map(|at| number(&read(at, file)?)));
        let quotas = cpu.iter().filter_map(|at| {
            Some((number(&read(at, "cpu.cfs_quota_us")?)?, number(&read(at, "cpu.cfs_period_us")?)?))
        });
        Self {
            memory: of("memory.limit_in_bytes"),
            swap: of("memory.memsw.limit_in_bytes"),
            cpu: tightest_cpu(quotas),
        }
    }
}

/// A cgroup, and those above it that are named after a container.
fn named_after(directory: PathBuf, id: &str) -> Vec<PathBuf> {
    let is_its = |path: &&Path| path.ancestors().any(|path| path.to_string_lossy().contains(id));
    let above: Vec<_> = directory.ancestors().skip(1).take_while(is_its).map(Path::to_owned).collect();
    std::iter::once(directory).chain(above).collect()
}

fn number(text: &str) -> Option<i64> {
    match text.trim() {
        "max" => Some(-1),
        text => text.parse().ok().map(|number| if number >= NO_LIMIT { -1 } else { number }),
    }
}

/// What `cpu.max` says.
fn quota(text: &str) -> Option<(i64, i64)> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some((number(quota)?, number(period)?))
}

fn tightest(all: impl Iterator<Item = i64>) -> Option<i64> {
    all.min_by_key(|limit| if *limit < 0 { i64::MAX } else { *limit })
}

fn tightest_cpu(all: impl Iterator<Item = (i64, i64)>) -> Option<(i64, i64)> {
    all.min_by_key(|(quota, period)| match *quota < 0 {
        true => i64::MAX,
        false => quota.saturating_mul(1_000_000) / (*period).max(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_is_the_loosest_and_a_kernels_words_are_understood() {
        assert_eq!([number("max\n"), number("9223372036854771712\n"), number("-1")], [Some(-1); 3]);
        assert_eq!((number("4096\n"), number("x")), (Some(4096), None));
        assert_eq!((quota("max 100000\n"), quota("5 10")), (Some((-1, 100_000)), Some((5, 10))));
        assert_eq!((tightest([-1, 7, 5].into_iter()), tightest([-1].into_iter())), (Some(5), Some(-1)));
        assert_eq!(tightest_cpu([(-1, 10), (50, 100), (10, 100)].into_iter()), Some((10, 100)));
    }

    #[test]
    fn a_cgroup_below_one_that_is_named_after_the_container_has_its_limits() {
        let all = named_after("/sys/fs/cgroup/machine.slice/libpod-0a.scope/container".into(), "0a");
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[1].ends_with("libpod-0a.scope"), "{all:?}");
        assert_eq!(named_after("/sys/fs/cgroup/x/y".into(), "0a").len(), 1);
    }
}
