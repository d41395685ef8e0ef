//! What a container uses, as its cgroups and its network namespace count it. cgroup v1 and v2.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::cgroup::Cgroup;
use crate::container::Usage;

/// What a cgroup uses, and the network namespace of one of its processes.
pub(super) fn of(cgroup: &Cgroup, pid: u32) -> Usage {
    let read = |controller: &str, file: &str| -> Option<String> {
        fs::read_to_string(cgroup.directory(controller).join(file)).ok()
    };
    let number = |controller: &str, file: &str| read(controller, file)?.trim().parse::<u64>().ok();
    let network = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("net/dev")).ok();
    let (cpu, memory, inactive, dropped, disk);
    if cgroup.is_unified() {
        cpu = read("", "cpu.stat").and_then(|text| field(&text, "usage_usec")).map(Duration::from_micros);
        let stat = read("", "memory.stat");
        memory = number("", "memory.current");
        (inactive, dropped) = (
            sum(stat.as_deref(), &["inactive_file"]),
            sum(stat.as_deref(), &["inactive_file", "active_file", "slab_reclaimable"]),
        );
        disk = read("", "io.stat").map(|text| sums(&text, of_io_stat));
    } else {
        cpu = number("cpuacct", "cpuacct.usage").map(Duration::from_nanos);
        let stat = read("memory", "memory.stat");
        memory = number("memory", "memory.usage_in_bytes");
        (inactive, dropped) = (
            sum(stat.as_deref(), &["total_inactive_file"]),
            sum(stat.as_deref(), &["total_inactive_file", "total_active_file"]),
        );
        disk =
            read("blkio", "blkio.throttle.io_service_bytes_recursive").map(|text| sums(&text, of_io_service));
    }
    Usage {
        cpu,
        memory: memory.zip(inactive).map(|(used, inactive)| used.saturating_sub(inactive)),
        needed_memory: memory.zip(dropped).map(|(used, dropped)| used.saturating_sub(dropped)),
        pids: number("pids", "pids.current"),
        network: network.map(|text| sums(&text, of_interface)),
        disk,
    }
}

/// What a lower limit of memory has to hold; see [`Usage::needed_memory`].
pub(super) fn needed_memory(cgroup: &Cgroup) -> Option<u64> {
    // There is no process 0: its network is not asked for.
    of(cgroup, 0).needed_memory
}

/// The number behind a name in lines of names and numbers.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The sum of these fields, all of which must be there.
fn sum(stat: Option<&str>, names: &[&str]) -> Option<u64> {
    names.iter().map(|name| field(stat?, name)).sum()
}

/// The sums of what all lines have.
fn sums(text: &str, of_line: fn(&str) -> Option<(u64, u64)>) -> (u64, u64) {
    text.lines().filter_map(of_line).fold((0, 0), |(first, second), (one, other)| {
        (first.saturating_add(one), second.saturating_add(other))
    })
}

/// `8:0 rbytes=1 wbytes=2 rios=3 …`
fn of_io_stat(line: &str) -> Option<(u64, u64)> {
    let value = |name: &str| line.split(' ').find_map(|part| part.strip_prefix(name)?.parse().ok());
    Some((value("rbytes=")?, value("wbytes=")?))
}

/// `8:0 Read 1` or `8:0 Write 2`
fn of_io_service(line: &str) -> Option<(u64, u64)> {
    let mut parts = line.split(' ').skip(1);
    match (parts.next()?, parts.next()?.parse().ok()?) {
        ("Read", bytes) => Some((bytes, 0)),
        ("Write", bytes) => Some((0, bytes)),
        _ => None,
    }
}

/// `eth0: ` with the bytes received first, and those sent ninth; see proc_pid_net(5).
fn of_interface(line: &str) -> Option<(u64, u64)> {
    let (name, figures) = line.split_once(':')?;
    let mut figures = figures.split_whitespace();
    let (received, sent) = (figures.next()?.parse().ok()?, figures.nth(7)?.parse().ok()?);
    (name.trim() != "lo").then_some((received, sent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_all_devices_and_interfaces_are_added() {
        let v2 = "8:0 rbytes=100 wbytes=20 rios=1 wios=1 dbytes=0 dios=0\n8:16 rbytes=5 wbytes=6 rios=1\n";
        assert_eq!(sums(v2, of_io_stat), (105, 26));
        let v1 =
            "8:0 Read 100\n8:0 Write 20\n8:0 Sync 7\n8:0 Total 120\n8:16 Read 5\n8:16 Write 6\nTotal 131\n";
        assert_eq!(sums(v1, of_io_service), (105, 26));
        let net = "Inter-|   Receive   |  Transmit\n face |bytes packets|bytes packets\n    \
            lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  eth0: 100 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n  eth1:5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n";
        assert_eq!(sums(net, of_interface), (105, 26));
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let stat = "inactive_file_x 1\ntotal_inactive_file 2\ninactive_file 3\n";
        assert_eq!(field(stat, "inactive_file"), Some(3));
        assert_eq!(field(stat, "total_inactive_file"), Some(2));
        assert_eq!(field(stat, "file"), None);
    }
}
