//! Which name servers a container asks: the DNS server of its network, or those of the node that a container can reach.

use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::libc::O_NOFOLLOW;

/// A name is first looked up as it is: names of services have no dots. A question may be lost as a service moves or starts, so
/// it is asked more often than twice. How long it is waited for stays as it is: for musl and Go that is the time in all.
pub(crate) const OPTIONS: [&str; 2] = ["ndots:0", "attempts:5"];

/// More than such a file has, bytes.
const LONGEST: u64 = 16 << 10;

/// The node's name servers: the file, and the one behind systemd's local resolver.
const FILES: &[&str] = &["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// The `resolv.conf` of a container.
pub(crate) fn text(name_server: Option<Ipv4Addr>) -> String {
    let mut files = FILES.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    match name_server {
        Some(server) => of_network(server, &files.next().unwrap_or_default()),
        None => of_node(&mut files),
    }
}

/// Has a file of an engine's name the server; it is bound into a container, and stays the same file. The domains and options
/// that its engine or its user have given it stay.
///
/// The container may have written anything there, of any length.
pub(crate) fn write(file: &Path, server: Ipv4Addr) -> io::Result<()> {
    let mut opened = OpenOptions::new().read(true).write(true).custom_flags(O_NOFOLLOW).open(file)?;
    let mut found = Vec::new();
    (&mut opened).take(LONGEST).read_to_end(&mut found)?;
    let text = of_network(server, &String::from_utf8_lossy(&found));
    opened.seek(SeekFrom::Start(0))?;
    // Shortened last: what reads it meanwhile finds the server.
    opened.write_all(text.as_bytes())?;
    opened.set_len(text.len() as u64)
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with(['#', ';']))
}

fn is(line: &str, keyword: &str) -> bool {
    line.split_whitespace().next() == Some(keyword)
}

/// The server of a network, with domains and options out of a file. Of several options of a kind the last counts: its own.
fn of_network(server: Ipv4Addr, file: &str) -> String {
    let options = format!("options {}", OPTIONS.join(" "));
    let own = lines(file).filter(|line| {
        // Podman's domain of its own networks is known to its own server alone.
        let is_podmans = line.split_whitespace().eq(["search", "dns.podman"]);
        let says = ["search", "domain", "options", "sortlist"].iter().any(|keyword| is(line, keyword));
        says && !is_podmans && *line != options
    });
    let own = own.map(str::to_owned);
    [format!("nameserver {server}"), options.clone()].into_iter().chain(own).map(|line| line + "\n").collect()
}

/// The first file with name servers that a container can reach: not those on the node's loopback.
fn of_node(files: &mut dyn Iterator<Item = String>) -> String {
    let is_local = |line: &str| {
        let address = line.split_whitespace().nth(1).and_then(|address| address.parse::<IpAddr>().ok());
        address.is_none_or(|address| address.is_loopback())
    };
    let reachable = files.map(|text| {
        let kept = lines(&text).filter(|line| !(is(line, "nameserver") && is_local(line)));
        kept.map(|line| format!("{line}\n")).collect()
    });
    let has_server = |text: &String| text.lines().any(|line| is(line, "nameserver"));
    reachable.into_iter().find(has_server).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    const STUB: &str = "# comment\nnameserver 127.0.0.53\noptions edns0\n";
    const REAL: &str = "search lan\nnameserver 192.0.2.1\nnameserver ::1\n";

    #[test]
    fn name_servers_on_the_loopback_are_left_out() {
        let of = |files: &[&str]| of_node(&mut files.iter().copied().map(str::to_owned));
        assert_eq!(of(&[STUB, REAL]), "search lan\nnameserver 192.0.2.1\n");
        assert_eq!(of(&[STUB]), "");
    }

    #[test]
    fn the_server_of_a_network_is_the_only_one() {
        let server = Ipv4Addr::new(10, 88, 0, 1);
        let begin = "nameserver 10.88.0.1\noptions ndots:0 attempts:5\n";
        for (file, rest) in [
            (STUB, "options edns0\n"),
            (REAL, "search lan\n"),
            ("", ""),
            (
                "search dns.podman\nnameserver 10.89.0.1\nsearch corp.example lan\n",
                "search corp.example lan\n",
            ),
            ("options ndots:3\nwhatever\n\u{0}\n", "options ndots:3\n"),
        ] {
            let text = of_network(server, file);
            assert_eq!(text, format!("{begin}{rest}"));
            assert_eq!(of_network(server, &text), text, "it stays as it is");
        }
    }

    #[test]
    fn the_file_that_a_container_has_is_written_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("resolv.conf"), directory.path().join("link"));
        std::fs::write(&file, b"search corp.example\n\xff").unwrap();
        // As a container can make it: its length is nothing to rely on.
        std::fs::File::options().write(true).open(&file).unwrap().set_len(1 << 40).unwrap();
        symlink(&file, &link).unwrap();
        let server = Ipv4Addr::new(10, 88, 0, 1);
        assert!(write(&link, server).is_err());
        let before = std::fs::metadata(&file).unwrap().ino();
        write(&file, server).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), of_network(server, "search corp.example\n"));
        assert_eq!(std::fs::metadata(&file).unwrap().ino(), before);
        assert!(write(&directory.path().join("none"), server).is_err());
    }
}
