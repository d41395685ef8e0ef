//! A service that writes all of its memory again and again ([`programs/writer.c`]), faster than any
//! link of a lab carries it, with a client whose connection must live on.
//!
//! [`programs/writer.c`]: ../programs/writer.c

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::Path,
};

use godwit_lab::{
    LabConfig,
    workload::{Preset, Rootfs},
};

use crate::{Bed, compile, hold::Points, victim::Attempt, wait_for};

/// The service's name.
pub const NAME: &str = "writer";
/// The memory that it writes, bytes.
pub const MEMORY: u64 = 8 << 20;
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 80);
const PORT: u16 = 7000;

/// The service on node `a`, and its client.
#[derive(Debug)]
pub struct Writer {
    connection: BufReader<TcpStream>,
    written: u64,
    /// Where its migrations can be held.
    pub points: Points,
    /// The lab.
    pub bed: Bed,
}

impl Writer {
    /// Runs it with these flags of `godwit run`, in a lab with links of this shape.
    pub fn up(test: &str, link: &str, flags: &[&str]) -> Self {
        let mut points = None;
        let bed = Bed::up_with(test, |config: &mut LabConfig| {
            config.link = Some(link.parse().unwrap());
            points = Some(Points::of(config));
        });
        let root = bed.scratch().join("root");
        Rootfs::new(&root).unwrap();
        compile("writer.c", &root.join("writer"));
        let preset = Preset {
            rootfs: root,
            command: ["/writer".to_owned(), (MEMORY >> 20).to_string()].into(),
            env: Vec::new(),
            user: None,
            port: PORT,
        };
        bed.run("a", NAME, ADDRESS, &preset, flags);
        let connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
        let mut writer = Self { connection, written: 0, points: points.unwrap(), bed };
        writer.check("at the start");
        writer
    }

    /// Over the connection that it has had from the beginning: it has gone on writing, and every page
    /// is as it wrote it.
    pub fn check(&mut self, when: &str) {
        // On a busy machine it may not have come to write yet.
        self.written = wait_for(&format!("{when}: something written since the last check"), || {
            let mut answer = String::new();
            self.connection.get_mut().write_all(b"?").unwrap();
            self.connection.read_line(&mut answer).unwrap();
            let written = answer.strip_prefix("ok ").and_then(|number| number.trim().parse().ok());
            let written: u64 = written.unwrap_or_else(|| panic!("{when}: the writer says {answer:?}"));
            (written > self.written).then_some(written)
        });
    }

    /// Starts a migration with these flags.
    pub fn begin(&self, from: &str, to: &str, flags: &[&str]) -> Attempt {
        Attempt::begin(&self.bed, NAME, from, to, flags)
    }

    /// Starts one that is held at `point` when this returns.
    pub fn begin_and_hold(&self, from: &str, to: &str, flags: &[&str], point: &str) -> Attempt {
        Attempt::held(&self.points, point, || self.begin(from, to, flags))
    }

    /// Its CPU limit on a node as the kernel has it, in thousandths of a CPU; none without a limit.
    pub fn cpu_millis(&self, node: &str) -> Option<u64> {
        let root = Path::new("/sys/fs/cgroup");
        let below = |root: &Path| root.join("godwit-lab").join(self.bed.lab().name()).join(node).join(NAME);
        let read = |path: &Path| {
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        // cgroup version 2 has a word for no limit, version 1 a negative number.
        let text = if root.join("cgroup.controllers").exists() {
            read(&below(root).join("cpu.max"))
        } else {
            let cpu = below(&root.join("cpu"));
            format!("{} {}", read(&cpu.join("cpu.cfs_quota_us")).trim(), read(&cpu.join("cpu.cfs_period_us")))
        };
        let (quota, period) = text.trim().split_once(' ').unwrap();
        Some(quota.parse::<u64>().ok()? * 1000 / period.parse::<u64>().unwrap())
    }
}
