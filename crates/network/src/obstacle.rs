//! Who has VXLAN's UDP port when the overlay cannot have it.

use std::fs;
use std::path::Path;

use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkInfo};

use crate::netlink::{Link, Netlink, has_errno};
use crate::{NetworkError, OverlayConfig};

/// What it means that a VXLAN device could not be made or brought up: that the port is taken, by
/// whom, or what the kernel says.
pub(crate) async fn explain(
    netlink: &Netlink,
    config: &OverlayConfig,
    action: String,
    error: rtnetlink::Error,
) -> NetworkError {
    // EEXIST: another device has the same port and network. EADDRINUSE: another socket has the port.
    let taken = has_errno(&error, libc::EEXIST) || has_errno(&error, libc::EADDRINUSE);
    if !taken {
        return NetworkError::kernel(action)(error);
    }
    let links = netlink.links().await.unwrap_or_default();
    let at_port = |link: &&Link| link.name != config.vxlan && has(link, &InfoVxlan::Port(config.port));
    let same = links.iter().filter(at_port).find(|link| has(link, &InfoVxlan::Id(config.vni)));
    let holder = match (same, links.iter().find(at_port)) {
        (Some(link), _) => {
            format!("the VXLAN device {}, with the same network number {}", link.name, config.vni)
        }
        (None, Some(link)) => format!("the VXLAN device {}", link.name),
        (None, None) => socket_holder(config.port),
    };
    NetworkError::PortInUse { port: config.port, interface: config.vxlan.clone(), holder }
}

fn has(link: &Link, setting: &InfoVxlan) -> bool {
    link.kind == Some(InfoKind::Vxlan)
        && link.info.iter().any(|info| match info {
            LinkInfo::Data(InfoData::Vxlan(settings)) => settings.contains(setting),
            _ => false,
        })
}

/// The process that has a UDP socket at the port, in the network namespace of the calling thread.
fn socket_holder(port: u16) -> String {
    let tables = ["udp", "udp6"].map(|table| {
        // A table that cannot be read names nobody, which is what is said then.
        fs::read_to_string(Path::new("/proc/thread-self/net").join(table)).unwrap_or_default()
    });
    let inodes: Vec<u64> = tables.iter().flat_map(|table| inodes_at(table, port)).collect();
    match process_with(&inodes) {
        Some((pid, name)) => format!("the process {pid} ({name})"),
        None => "a socket of the kernel or of a process that is not seen from here".to_owned(),
    }
}

/// The inodes of the sockets bound to a port, from a table as in `/proc/net/udp` (proc(5)). The
/// kernel's own sockets have none.
fn inodes_at(table: &str, port: u16) -> Vec<u64> {
    let of_line = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (_, at) = fields.get(1)?.rsplit_once(':')?;
        let inode = fields.get(9)?.parse().ok()?;
        (u16::from_str_radix(at, 16) == Ok(port) && inode != 0).then_some(inode)
    };
    table.lines().skip(1).filter_map(of_line).collect()
}

fn process_with(inodes: &[u64]) -> Option<(u32, String)> {
    let wanted: Vec<_> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    if wanted.is_empty() {
        return None;
    }
    let holds_one = |process: &Path| {
        let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.into_iter().any(|target| wanted.iter().any(|name| Path::new(name) == target))
    };
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|_| holds_one(&process.path())) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim().to_owned()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sockets_at_a_port_are_found_in_the_kernels_table() {
        // As Linux 6.18 printed it.
        let table = "\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
   77: 00000000:12B5 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 0 2 0000000000000000 0
   78: 0100007F:12B5 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 41233 2 0000000000000000 0
   91: 0100007F:12B6 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 41234 2 0000000000000000 0
";
        assert_eq!(inodes_at(table, 4789), [41233]);
        assert_eq!(inodes_at(table, 9), Vec::<u64>::new());
        assert_eq!(inodes_at("", 4789), Vec::<u64>::new());
    }

    #[test]
    fn a_socket_of_this_process_is_told_with_its_number() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let holder = socket_holder(socket.local_addr().unwrap().port());
        assert!(holder.starts_with(&format!("the process {} (", std::process::id())), "{holder}");
    }
}
