//! The limits of memory and CPU that a container's processes have now, whoever set them. cgroup v1 and v2.
//!
//! Some runtimes have the processes in a cgroup below the one with the limits, so each one that is named after the container
//! counts, and the tightest limit holds. What is no limit is that of the highest of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::cgroup::Cgroup;

/// Version 1 says so where there is no limit of memory: the most that is a multiple of a page.
const NO_LIMIT: i64 = i64::MAX - 65_535;

/// The share of CPU time that a cgroup has by itself.
const SHARES: u64 = 1024;
const WEIGHT: u64 = 100;

/// Limits as engines write them: -1 for none. Nothing of what this machine does not limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Memory, bytes.
    pub(crate) memory: Option<i64>,
    /// Memory and swap, bytes.
    pub(crate) swap: Option<i64>,
    /// CPU time in each period, and that; microseconds.
    pub(crate) cpu: Option<(i64, i64)>,
    /// Memory that is left to it while others need some, bytes.
    pub(crate) reservation: Option<i64>,
    pub(crate) share: Option<Share>,
    /// Processors on which it may run.
    pub(crate) processors: Option<Places>,
    /// Nodes of the machine from which it may have memory.
    pub(crate) memory_nodes: Option<Places>,
}

/// A share of CPU time. Version 2 has weights of 1 to 10,000, into which runtimes turn the shares of 2 to 262,144 that engines
/// know: older ones in proportion, newer ones so that the shares and the weight that a cgroup has by itself are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    Shares(u64),
    Weight(u64),
}

/// What older runtimes make of shares.
fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// What newer ones make of them, who may take a number that is whole but for the rounding for the next one.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 1 to 10,000
fn newer_weights(shares: u64) -> [u64; 2] {
    let log = (shares.clamp(2, 262_144) as f64).log2();
    let exact = 10_f64.powf((log * log + 125.0 * log) / 612.0 - 7.0 / 34.0);
    [exact - 1e-9, exact].map(|weight| weight.ceil() as u64)
}

impl Share {
    /// Whether it is what comes of so many shares, or of none that anybody has asked for.
    pub(crate) fn is(self, shares: Option<u64>) -> bool {
        match self {
            Self::Shares(now) => now == shares.unwrap_or(SHARES),
            Self::Weight(now) => match shares {
                None => now == WEIGHT,
                Some(shares) => now == weight(shares) || newer_weights(shares).contains(&now),
            },
        }
    }

    /// How many; -1 for the share that a cgroup has by itself.
    pub(crate) fn shares(self) -> i64 {
        let shares = match self {
            Self::Shares(SHARES) | Self::Weight(WEIGHT) => return -1,
            Self::Shares(shares) => shares,
            // The most that become this weight.
            Self::Weight(weight) => 2 + (weight.clamp(1, 10_000) * 262_142 - 1) / 9999,
        };
        i64::try_from(shares.min(262_144)).unwrap_or(-1)
    }
}

/// A list of processors, or of nodes of memory, as the kernel writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    list: String,
    /// Whether they are all that the cgroup above has.
    is_all: bool,
}

impl Places {
    /// Whether it is what comes of this list, or of none.
    pub(crate) fn is(&self, list: &str) -> bool {
        match list.trim() {
            "" => self.is_all,
            list => numbers(&self.list) == numbers(list),
        }
    }

    /// The list; nothing for all.
    pub(crate) fn list(&self) -> &str {
        if self.is_all { "" } else { &self.list }
    }
}

/// Where the kernel tells the processors that are there, and the nodes of memory.
pub(crate) const PROCESSORS: &str = "/sys/devices/system/cpu/online";
pub(crate) const MEMORY_NODES: &str = "/sys/devices/system/node/online";

/// What of a list this machine does not have, by what the kernel tells; nothing where that tells nothing.
pub(crate) fn missing(list: &str, told: &str) -> Vec<u16> {
    let there = std::fs::read_to_string(told).ok().and_then(|told| numbers(&told));
    let lacks = there.zip(numbers(list)).map(|(there, wanted)| wanted.difference(&there).copied().collect());
    lacks.unwrap_or_default()
}

/// The numbers of a list such as `0-2,7`; none of one that is not understood.
fn numbers(list: &str) -> Option<BTreeSet<u16>> {
    let mut numbers = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        numbers.extend(first.parse().ok()?..=last.parse::<u16>().ok()?);
    }
    Some(numbers)
}

impl Limits {
    /// Those of a container with this ID.
    pub(crate) fn of(cgroup: &Cgroup, id: &str) -> Self {
        let read = |directory: &Path, file: &str| std::fs::read_to_string(directory.join(file)).ok();
        let memory = named_after(cgroup.directory("memory"), id);
        let cpu = named_after(cgroup.directory("cpu"), id);
        let share = |file: &str| read(cpu.last()?, file)?.trim().parse().ok();
        // Of the cgroups of one container some have none, and nobody has lifted it then.
        let reserved = |file: &str| {
            let reserved = memory.iter().filter_map(|at| number(&read(at, file)?));
            reserved.max().filter(|bytes| *bytes > 0)
        };
        let cpuset = named_after(cgroup.directory("cpuset"), id);
        let places = |file: &str| {
            let of_all = cpuset.last()?.parent().and_then(|above| read(above, file)).unwrap_or_default();
            let lists = cpuset.iter().filter_map(|at| read(at, file));
            let list = lists.map(|list| list.trim().to_owned()).find(|list| !list.is_empty())?;
            Some(Places { is_all: list == of_all.trim(), list })
        };
        let (processors, memory_nodes) = (places("cpuset.cpus"), places("cpuset.mems"));
        if cgroup.is_unified() {
            let of = |file: &str| tightest(memory.iter().filter_map(|at| number(&read(at, file)?)));
            let (memory, swap) = (of("memory.max"), of("memory.swap.max"));
            let both = |(memory, swap): (i64, i64)| match memory < 0 || swap < 0 {
                true => -1,
                false => memory.saturating_add(swap),
            };
            let quotas = cpu.iter().filter_map(|at| quota(&read(at, "cpu.max")?));
            return Self {
                memory,
                swap: memory.zip(swap).map(both),
                cpu: tightest_cpu(quotas),
                reservation: reserved("memory.low"),
                share: share("cpu.weight").map(Share::Weight),
                processors,
                memory_nodes,
            };
        }
        let of = |file: &str| tightest(memory.iter().filter_map(|at| number(&read(at, file)?)));
        let quotas = cpu.iter().filter_map(|at| {
            Some((number(&read(at, "cpu.cfs_quota_us")?)?, number(&read(at, "cpu.cfs_period_us")?)?))
        });
        Self {
            memory: of("memory.limit_in_bytes"),
            swap: of("memory.memsw.limit_in_bytes"),
            cpu: tightest_cpu(quotas),
            reservation: reserved("memory.soft_limit_in_bytes"),
            share: share("cpu.shares").map(Share::Shares),
            processors,
            memory_nodes,
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
#[allow(clippy::unwrap_used)]
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
    fn a_share_is_the_same_in_both_versions() {
        // As runc 1.1 turns them: 512 become 20, and 1024 become 39. As newer ones do: 59 and 100.
        assert_eq!([2, 512, 1024, 262_144].map(|shares| newer_weights(shares)[0]), [1, 59, 100, 10_000]);
        assert!(Share::Weight(59).is(Some(512)) && Share::Weight(100).is(Some(1024)));
        for (shares, weight) in [(2, 1), (512, 20), (1024, 39), (262_144, 10_000)] {
            assert!(Share::Weight(weight).is(Some(shares)), "{shares}");
            let again = u64::try_from(Share::Weight(weight).shares()).unwrap();
            assert!(Share::Weight(weight).is(Some(again)), "{shares}: {again}");
        }
        assert!(!Share::Weight(20).is(Some(1024)) && !Share::Weight(20).is(None));
        assert!(Share::Weight(100).is(None) && Share::Shares(1024).is(None));
        assert_eq!((Share::Weight(100).shares(), Share::Shares(1024).shares()), (-1, -1));
        assert_eq!(Share::Shares(7).shares(), 7);
    }

    #[test]
    fn places_are_those_of_a_list_however_it_is_written() {
        let places = |list: &str, is_all| Places { list: list.into(), is_all };
        assert!(places("0-2", false).is("2,0,1") && !places("0-2", false).is("0,1"));
        assert!(places("0-1", true).is("") && places("0-1", true).is("0,1"));
        assert!(!places("0", false).is("") && !places("0", false).is("x"));
        assert_eq!((places("0", false).list(), places("0", true).list()), ("0", ""));
    }

    #[test]
    fn processors_that_are_not_there_are_told() {
        assert_eq!(missing("0", PROCESSORS), [0; 0]);
        assert_eq!(missing("0,60000-60001", PROCESSORS), [60_000, 60_001]);
        assert_eq!((missing("x", PROCESSORS), missing("7", "/none")), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_cgroup_below_one_that_is_named_after_the_container_has_its_limits() {
        let all = named_after("/sys/fs/cgroup/machine.slice/libpod-0a.scope/container".into(), "0a");
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[1].ends_with("libpod-0a.scope"), "{all:?}");
        assert_eq!(named_after("/sys/fs/cgroup/x/y".into(), "0a").len(), 1);
    }
}
