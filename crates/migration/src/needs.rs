//! What a service needs of the kernel of the node that it goes to, and where that is not given.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use godwit_memory::PAGE_SIZE;

/// From this version on, each PID namespace has a limit of its own, which is the highest that there is.
const OWN_PID_LIMIT: (u32, u32) = (6, 14);

/// The profile of a process that AppArmor does not confine.
const UNCONFINED: &str = "unconfined";

/// Domains of SELinux that confine nothing: a process that loses one gains nothing.
const FREE_DOMAINS: [&str; 5] = ["unconfined_t", "unconfined_service_t", "spc_t", "init_t", "kernel_t"];

/// Of another node's name of a profile so much is shown, characters.
const MOST_PROFILE: usize = 200;

/// Part of `Open`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct KernelNeeds {
    /// The highest PID or thread ID inside the service; 0 where it is not known.
    #[prost(uint32, tag = "1")]
    pub highest_id: u32,
    /// The AppArmor profile of its main process; empty where it has none.
    #[prost(string, tag = "2")]
    pub apparmor: String,
    /// The SELinux label of its main process; empty where nothing confines it.
    #[prost(string, tag = "3")]
    pub selinux: String,
    /// Lengths of its rings of asynchronous reads and writes (io_setup(2)) in bytes, each once, in ascending order.
    #[prost(uint64, repeated, tag = "4")]
    pub rings: Vec<u64>,
    /// Processes and threads; 0 where they are not counted.
    #[prost(uint32, tag = "5")]
    pub tasks: u32,
}

/// Tasks of CRIU that count with those that it restores, at least.
const CRIU_TASKS: u64 = 1;

impl KernelNeeds {
    /// Those of a service with these processes, by the files below `root`, which is `/`.
    pub(crate) fn of(root: &Path, pids: &[u32], main: u32) -> Self {
        let proc = root.join("proc");
        // What cannot be read is gone.
        let tasks = pids.iter().flat_map(|pid| {
            let tasks = fs::read_dir(proc.join(pid.to_string()).join("task"));
            tasks.into_iter().flatten().flatten()
        });
        let ids: Vec<_> = tasks.map(|task| inside(&task.path().join("status"))).collect();
        let profile = ["attr/apparmor/current", "attr/current"].into_iter().find_map(|file| {
            root.join("sys/kernel/security/apparmor").exists().then_some(())?;
            fs::read_to_string(proc.join(main.to_string()).join(file)).ok()
        });
        Self {
            highest_id: ids.iter().copied().flatten().max().unwrap_or(0),
            tasks: u32::try_from(ids.len()).unwrap_or(u32::MAX),
            apparmor: profile.as_deref().map_or("", named).to_owned(),
            selinux: label(root, main).unwrap_or_default(),
            rings: rings(&proc, pids),
        }
    }

    /// The AppArmor profile that the kernel does not have, by the files below `root`, where it has AppArmor.
    pub(crate) fn lacks_profile(&self, root: &Path) -> Option<&str> {
        let loaded = fs::read_to_string(root.join("sys/kernel/security/apparmor/profiles")).ok()?;
        let is_it = |line: &str| named(line) == self.apparmor;
        (!self.apparmor.is_empty() && !loaded.lines().any(is_it)).then_some(&self.apparmor)
    }

    /// What `node` does not give, by the files below `root` there.
    pub(crate) fn objections(&self, root: &Path, node: &str) -> Vec<String> {
        let mut reasons = Vec::new();
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let limit: u32 = read("proc/sys/kernel/pid_max").trim().parse().unwrap_or(u32::MAX);
        let kernel = version(&read("proc/sys/kernel/osrelease"));
        if kernel.is_some_and(|kernel| kernel < OWN_PID_LIMIT) && self.highest_id >= limit {
            reasons.push(format!(
                "the service has a process or thread with PID {}, and node {node} gives none from {limit} on; raise kernel.pid_max there (sysctl(8))",
                self.highest_id
            ));
        }
        let plain = |name: &str| -> String {
            let plain = |c: char| if c.is_control() { '?' } else { c };
            name.chars().map(plain).take(MOST_PROFILE).collect()
        };
        if !self.selinux.is_empty() {
            reasons.push(format!(
                "the service runs under the SELinux label {}, which CRIU does not restore: on node {node} nothing would confine it; start the service without one",
                plain(&self.selinux)
            ));
        }
        if !self.apparmor.is_empty() {
            let shown = plain(&self.apparmor);
            let securityfs = root.join("sys/kernel/security/apparmor");
            if !securityfs.exists() {
                reasons.push(format!(
                    "the service runs under the AppArmor profile {shown}, and node {node} has no AppArmor; enable it there, or start the service without a profile"
                ));
            } else if self.lacks_profile(root).is_some() {
                reasons.push(format!(
                    "the service runs under the AppArmor profile {shown}, which is not loaded on node {node}; load it there (apparmor_parser(8))"
                ));
            }
        }
        if let Some(processors) = count(&read("sys/devices/system/cpu/possible")) {
            let too_long = |ring: &u64| restored_ring(*ring, processors).is_some_and(|made| made != *ring);
            if let Some(ring) = self.rings.iter().copied().find(too_long) {
                let most = (requests(ring) / EACH).max(1);
                reasons.push(format!(
                    "the service has a ring for asynchronous reads and writes (io_setup(2)) of {} events, and the kernel of node {node} makes longer ones, as it counts with {processors} processors (/sys/devices/system/cpu/possible): CRIU cannot restore it there; move it to a node that counts with {most} at most, or switch native asynchronous I/O off in the service's configuration (MySQL: innodb_use_native_aio=0)",
                    events(ring)
                ));
            }
        }
        reasons
    }
}

impl KernelNeeds {
    /// Why `node` has no room for so many processes and threads, by the files below `root` there: `cgroup` is the path of the
    /// service's own cgroup, in which its own limit counts when all of them are there.
    pub(crate) fn lacks_tasks(&self, root: &Path, cgroup: &str, node: &str) -> Option<String> {
        let needed = u64::from(self.tasks).checked_add(CRIU_TASKS).filter(|_| self.tasks > 0)?;
        let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let (mount, proc) = (root.join("sys/fs/cgroup"), root.join("proc"));
        let hierarchy = if mount.join("cgroup.controllers").exists() { mount } else { mount.join("pids") };
        let above = Path::new(cgroup.trim_matches('/')).ancestors().skip(1);
        let of_cgroups = above.filter_map(|path| {
            let directory = hierarchy.join(path);
            let (most, has) =
                (number(&directory.join("pids.max"))?, number(&directory.join("pids.current"))?);
            Some((directory.join("pids.max").display().to_string(), most, has))
        });
        // `0.00 0.01 0.05 1/234 5678`: 234 there are.
        let load = fs::read_to_string(proc.join("loadavg")).unwrap_or_default();
        let all = load.split_whitespace().nth(3).and_then(|count| count.split_once('/')?.1.parse().ok());
        let of_kernel = all.and_then(|all: u64| {
            let most = number(&proc.join("sys/kernel/threads-max"))?;
            Some(("the sysctl kernel.threads-max".to_owned(), most, all))
        });
        let short = |(_, most, has): &(String, u64, u64)| most.saturating_sub(*has) < needed;
        let (limit, most, has) = of_cgroups.chain(of_kernel).find(short)?;
        Some(format!(
            "the service has {} processes and threads, and node {node} has {has} of the {most} that {limit} allows; raise that limit there",
            self.tasks
        ))
    }
}

/// A mapping of a ring in `/proc/PID/maps`.
const RING: &str = "/[aio]";
/// Bytes of an event in a ring, and of what is before the first.
const EVENT: u64 = 32;
/// For each processor that there can be, a kernel makes a ring for so many requests at least (`ioctx_alloc`).
const EACH: u64 = 4;
/// A ring has places for twice the requests, and so many more (`aio_setup_ring`).
const MORE: u64 = 2;

/// Places for events in a ring of so many bytes.
fn events(ring: u64) -> u64 {
    (ring / EVENT).saturating_sub(1)
}

/// For how many requests CRIU asks the kernel, to get a ring of so many bytes again.
fn requests(ring: u64) -> u64 {
    events(ring).saturating_sub(MORE) / 2
}

/// How long the ring is that CRIU gets in place of one, from a kernel that counts with so many processors; CRIU takes none
/// but one of the same length. None where the kernel would refuse such a length anyway.
fn restored_ring(ring: u64, processors: u64) -> Option<u64> {
    let requests = requests(ring).max(processors.checked_mul(EACH)?);
    let bytes = requests.checked_mul(2)?.checked_add(MORE + 1)?.checked_mul(EVENT)?;
    bytes.checked_next_multiple_of(PAGE_SIZE)
}

/// The lengths of the rings that these processes have.
fn rings(proc: &Path, pids: &[u32]) -> Vec<u64> {
    let mut lengths = BTreeSet::new();
    for pid in pids {
        // What cannot be read is gone.
        let maps = fs::read_to_string(proc.join(pid.to_string()).join("maps")).unwrap_or_default();
        lengths.extend(maps.lines().filter(|line| line.contains(RING)).filter_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?)
        }));
    }
    lengths.into_iter().collect()
}

/// How many a list of ranges has, such as `0-3,8`.
fn count(list: &str) -> Option<u64> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(range).sum()
}

/// The profile that a line of AppArmor names, without its mode; nothing for no profile.
fn named(line: &str) -> &str {
    let line = line.trim_end_matches(['\n', '\0']);
    let name = line.rsplit_once(" (").map_or(line, |(name, _)| name);
    if name == UNCONFINED { "" } else { name }
}

/// The label of a process that SELinux confines.
fn label(root: &Path, pid: u32) -> Option<String> {
    root.join("sys/fs/selinux").join("enforce").exists().then_some(())?;
    let label = fs::read_to_string(root.join("proc").join(pid.to_string()).join("attr/current")).ok()?;
    let label = label.trim_end_matches(['\n', '\0']);
    // user:role:type:level
    (!FREE_DOMAINS.contains(&label.split(':').nth(2)?)).then(|| label.to_owned())
}

/// The highest ID that a thread has in its innermost PID namespace: its own, its process group's or its session's.
fn inside(status: &Path) -> Option<u32> {
    let text = fs::read_to_string(status).ok()?;
    // A restore needs those of leaders that have ended, too.
    let fields = ["NSpid:", "NSpgid:", "NSsid:"];
    let ids = text.lines().filter_map(|line| fields.iter().find_map(|field| line.strip_prefix(field)));
    ids.filter_map(|ids| ids.split_whitespace().last()?.parse().ok()).max()
}

/// The first two numbers of a kernel's release.
#[must_use]
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A root directory with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const SOURCE: [(&str, &str); 5] = [
        ("proc/7/task/7/status", "Name:\tx\nNSpid:\t7\t1\n"),
        ("proc/7/task/8/status", "Name:\tx\nNSpid:\t8\t40000\n"),
        ("proc/9/task/9/status", "Name:\tx\nNSpid:\t9\t2\nNSpgid:\t0\t40001\nNSsid:\t0\t5\n"),
        ("proc/7/attr/current", "docker-default (enforce)\n"),
        ("sys/kernel/security/apparmor/profiles", ""),
    ];

    #[test]
    fn the_highest_id_and_the_profile_are_found() {
        let told = KernelNeeds::of(root(&SOURCE).path(), &[7, 9, 11], 7);
        assert_eq!((told.highest_id, told.apparmor.as_str()), (40_001, "docker-default"));
        // Without AppArmor the file is of another module, or has nothing.
        assert_eq!(KernelNeeds::of(root(&SOURCE[..4]).path(), &[9], 7).apparmor, "");
        let free = [SOURCE[4], ("proc/7/attr/current", "unconfined\n")];
        assert_eq!(KernelNeeds::of(root(&free).path(), &[], 7), KernelNeeds::default());
    }

    #[test]
    fn more_tasks_than_a_cgroup_above_or_the_kernel_has_room_for_are_refused() {
        let told = KernelNeeds::of(root(&SOURCE).path(), &[7, 9, 11], 7);
        assert_eq!(told.tasks, 3);
        let lacks = |files: &[(&str, &str)]| told.lacks_tasks(root(files).path(), "/services/b/web", "b");
        let above = |most, has| {
            [
                ("sys/fs/cgroup/pids/services/pids.max", most),
                ("sys/fs/cgroup/pids/services/pids.current", has),
            ]
        };
        for (most, has) in [("14\n", "10\n"), ("max\n", "10\n")] {
            assert_eq!(lacks(&above(most, has)), None);
        }
        let refused = lacks(&above("13\n", "10\n")).unwrap();
        for words in
            ["has 3 processes and threads", "node b has 10 of the 13", "pids/services/pids.max allows"]
        {
            assert!(refused.contains(words), "{refused}");
        }
        // Its own limit is lifted for the restore, and one that is above it in version 2 counts.
        let own = [
            ("sys/fs/cgroup/pids/services/b/web/pids.max", "1"),
            ("sys/fs/cgroup/pids/services/b/web/pids.current", "1"),
        ];
        assert_eq!(lacks(&own), None);
        let unified = [
            ("sys/fs/cgroup/cgroup.controllers", "pids"),
            ("sys/fs/cgroup/services/b/pids.max", "3"),
            ("sys/fs/cgroup/services/b/pids.current", "0"),
        ];
        assert!(lacks(&unified).unwrap().contains("0 of the 3"));
        let kernel =
            |most| [("proc/loadavg", "0.00 0.01 0.05 1/500 5678\n"), ("proc/sys/kernel/threads-max", most)];
        assert_eq!(lacks(&kernel("504\n")), None);
        assert!(
            lacks(&kernel("503\n"))
                .unwrap()
                .contains("node b has 500 of the 503 that the sysctl kernel.threads-max")
        );
        let older = KernelNeeds { tasks: 0, ..told.clone() };
        assert_eq!(older.lacks_tasks(root(&unified).path(), "services/b/web", "b"), None);
    }

    #[test]
    fn an_id_is_refused_where_the_kernel_would_not_give_it() {
        let objections = |release: &str, limit: &str, highest_id| {
            let files = [("proc/sys/kernel/osrelease", release), ("proc/sys/kernel/pid_max", limit)];
            KernelNeeds { highest_id, ..KernelNeeds::default() }.objections(root(&files).path(), "b")
        };
        assert_eq!(objections("6.1.0-30-amd64\n", "32768\n", 32_767), Vec::<String>::new());
        let refused = objections("6.1.0-30-amd64\n", "32768\n", 32_768);
        assert!(refused[0].contains("PID 32768, and node b gives none from 32768 on; raise kernel.pid_max"));
        // There each namespace has its own.
        assert!(objections("6.14.2\n", "32768\n", 40_000).is_empty());
        assert!(objections("", "", 40_000).is_empty(), "nothing is known");
    }

    #[test]
    fn a_profile_must_be_loaded() {
        let needs = KernelNeeds { apparmor: "docker-default".into(), ..KernelNeeds::default() };
        let profiles = "sys/kernel/security/apparmor/profiles";
        let loaded = root(&[(profiles, "man_filter (enforce)\ndocker-default (enforce)\n")]);
        assert_eq!(needs.objections(loaded.path(), "b"), Vec::<String>::new());
        assert_eq!(needs.lacks_profile(loaded.path()), None);
        let of_others = root(&[(profiles, "docker (enforce)\n")]);
        assert_eq!(needs.lacks_profile(of_others.path()), Some("docker-default"));
        let other = needs.objections(of_others.path(), "b");
        assert!(other[0].contains("profile docker-default, which is not loaded on node b"), "{other:?}");
        let none = needs.objections(root(&[]).path(), "b");
        assert!(none[0].contains("node b has no AppArmor"), "{none:?}");
    }

    #[test]
    fn what_selinux_confines_is_refused() {
        let of = |label: &str| {
            let files = [("sys/fs/selinux/enforce", "0"), ("proc/7/attr/current", label)];
            KernelNeeds::of(root(&files).path(), &[7], 7)
        };
        let confined = of("system_u:system_r:container_t:s0:c1,c2\0");
        let refused = confined.objections(root(&[]).path(), "b");
        assert!(
            refused[0].contains("label system_u:system_r:container_t:s0:c1,c2, which CRIU"),
            "{refused:?}"
        );
        assert_eq!(of("unconfined_u:unconfined_r:unconfined_t:s0\0"), KernelNeeds::default());
        assert_eq!(of("kernel"), KernelNeeds::default());
        let without = [("proc/7/attr/current", "system_u:system_r:container_t:s0\n")];
        assert_eq!(KernelNeeds::of(root(&without).path(), &[7], 7), KernelNeeds::default());
    }

    #[test]
    fn a_ring_is_refused_where_the_kernel_makes_longer_ones() {
        let maps = "7f0000000000-7f0000001000 rw-s 00000000 00:11 9  /[aio] (deleted)\n\
                    7f0000002000-7f0000007000 rw-s 00000000 00:11 9  /[aio] (deleted)\n\
                    7f0000008000-7f0000009000 rw-p 00000000 00:00 0\n";
        let told =
            KernelNeeds::of(root(&[("proc/7/maps", maps), ("proc/9/maps", maps)]).path(), &[7, 9, 11], 7);
        assert_eq!(told.rings, [0x1000, 0x5000]);
        let objections = |rings: &[u64], possible: &str| {
            let needs = KernelNeeds { rings: rings.into(), ..KernelNeeds::default() };
            needs.objections(root(&[("sys/devices/system/cpu/possible", possible)]).path(), "b")
        };
        // 62 requests are in one page, for 15 processors and no more.
        for possible in ["0\n", "0-1\n", "0-14\n", "0-7,9\n", "", "all\n"] {
            assert_eq!(objections(&[0x1000], possible), Vec::<String>::new(), "{possible}");
        }
        let refused = objections(&[0x1000, 0x5000], "0-15\n");
        assert_eq!(refused.len(), 1);
        for words in ["of 127 events", "kernel of node b", "counts with 16 processors", "with 15 at most"] {
            assert!(refused[0].contains(words), "{refused:?}");
        }
        // A longer ring has room for more of them.
        assert_eq!(objections(&[0x5000], "0-63\n"), Vec::<String>::new());
        assert!(objections(&[0x5000], "0-79\n")[0].contains("of 639 events"));
        assert!(
            objections(&[0, 1, u64::MAX], "0-18446744073709551614\n").len() <= 1,
            "of a peer that tells anything"
        );
    }

    #[test]
    fn a_release_has_two_numbers() {
        assert_eq!(version("6.12.43+deb13-amd64"), Some((6, 12)));
        assert_eq!((version("6"), version("x.y"), version("")), (None, None, None));
    }
}
