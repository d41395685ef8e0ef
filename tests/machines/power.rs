//! Power cuts: disks with a volatile cache, and moves whose machines lose power.
//!
//! In each phase of a move the source, the destination or both lose power, and come back in either order. The service
//! is a Redis that syncs each write before it answers, and that godwit starts again after a reboot. In the end it runs
//! on one node, the one whose journal says so, with every write that was answered; files that it has not synced are whole
//! wherever a commit or a living kernel vouches for them; and neither node holds anything of the move. One test is one phase, in a lab of its own; `GODWIT_POWER` names single cuts of it (`source`,
//! `destination`, `both-source-first`, `both-destination-first`).

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::Stdio,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Instant,
};

use godwit_lab::{
    Lab, Machine,
    workload::{Preset, RedisClient, Workload},
};
use godwit_tests::{
    Bed, CLIENT, TRIES,
    victim::{Attempt, Shown},
};

use crate::{PATIENCE, all_ready, machines, run, send, wait_for};

/// The service's name.
const NAME: &str = "redis";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data of the service, in memory and in its file.
const FILL: u64 = 2 << 20;
/// Directories of the service: one of its root filesystem, and a volume. Each has a file that nobody syncs.
const PLACES: [&str; 2] = ["/data", "/volume"];
/// Size of that file, bytes.
const UNSYNCED: u64 = 1 << 20;
/// Where a machine's daemon looks for the points at which it waits. The memory of the machine: a daemon that starts
/// after a power cut waits at none.
const POINTS: &str = "/run/points";
/// Seconds that a `godwit migrate` may take, with all that happens to its nodes.
const MOVE_SECONDS: u32 = 900;

/// A moment of a move: at the end of a phase, where it is held.
#[derive(Clone, Copy, Debug)]
struct Moment {
    point: &'static str,
    mode: &'static str,
    /// The source has decided that the service is the destination's.
    committed: bool,
    /// The destination has a stopped copy, and does not know what the source decides.
    doubtful: bool,
    /// Pages are at the source only.
    leaves: bool,
}

const fn before(point: &'static str, mode: &'static str) -> Moment {
    Moment { point, mode, committed: false, doubtful: false, leaves: false }
}

const fn after(point: &'static str, mode: &'static str) -> Moment {
    Moment { committed: true, ..before(point, mode) }
}

const fn doubtful(moment: Moment) -> Moment {
    Moment { doubtful: true, ..moment }
}

const fn leaves(moment: Moment) -> Moment {
    Moment { leaves: true, ..moment }
}

/// Which machines lose power, and which of two comes back first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    Source,
    Destination,
    BothSourceFirst,
    BothDestinationFirst,
}

impl Cut {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Source, "source"),
        (Self::Destination, "destination"),
        (Self::BothSourceFirst, "both-source-first"),
        (Self::BothDestinationFirst, "both-destination-first"),
    ];

    fn takes_source(self) -> bool {
        self != Self::Destination
    }

    fn takes_destination(self) -> bool {
        self != Self::Source
    }
}

macro_rules! moments {
    ($($name:ident: $moment:expr;)*) => {
        $(
            #[test]
            #[ignore = "boots virtual machines: make test-machines"]
            fn $name() {
                cut_at($moment);
            }
        )*
    };
}

moments! {
    power_is_cut_when_a_service_is_let_in: before("destination.reserved", "hybrid");
    power_is_cut_when_its_files_have_come: before("destination.prepared", "precopy");
    power_is_cut_when_its_memory_was_copied: before("source.copied", "hybrid");
    power_is_cut_when_it_is_frozen: before("source.frozen", "postcopy");
    power_is_cut_when_it_has_been_dumped: before("destination.received", "cold");
    power_is_cut_when_its_files_are_synced: before("destination.restoring", "precopy");
    power_is_cut_when_its_copy_is_complete: doubtful(before("destination.restored", "precopy"));
    power_is_cut_when_the_source_has_committed: doubtful(after("source.committed", "precopy"));
    power_is_cut_when_the_source_has_committed_and_has_pages:
        leaves(doubtful(after("source.committed", "postcopy")));
    power_is_cut_when_the_destination_knows: after("destination.committing", "cold");
    power_is_cut_when_it_runs_at_the_destination: after("destination.committed", "precopy");
    power_is_cut_when_pages_follow: leaves(after("source.serving", "postcopy"));
}

/// Makes all cuts at a moment, one after the other.
fn cut_at(moment: Moment) {
    let chosen = std::env::var("GODWIT_POWER").unwrap_or_default();
    let mut stand = Stand::up(moment);
    for (cut, name) in Cut::ALL {
        if chosen.is_empty() || chosen.split(',').any(|one| one == name) {
            let begun = Instant::now();
            println!("{} {}, power cut: {name}", moment.mode, moment.point);
            stand.run(cut);
            println!("{} {}, {name}: {} s", moment.mode, moment.point, begun.elapsed().as_secs());
        }
    }
}

/// A lab with the service on one of its nodes.
struct Stand {
    moment: Moment,
    bed: Bed,
    preset: Preset,
    /// Where the service is, and the other node.
    at: [&'static str; 2],
    /// What the node with the service holds, and the one without.
    holdings: [BTreeSet<String>; 2],
    /// How often it has counted and said so.
    counted: i64,
    /// What the files say that nobody syncs.
    round: u32,
}

impl Stand {
    fn up(moment: Moment) -> Self {
        static STANDS: AtomicU32 = AtomicU32::new(0);
        let lab = format!("powercut{}", STANDS.fetch_add(1, Relaxed));
        let bed = Bed::up_with(&lab, |config| {
            // With one processor: QEMU before 8.1 now and then runs into the breakpoint with which Linux changes its code
            // while another processor runs, and Linux panics. A test that boots so often meets that.
            let machine = "debian13:processors=1:disk=volatile";
            machines(config, &[("a", machine), ("b", machine)]);
            // A machine that is emulated on a busy host is not hung.
            config.programs.serve_arguments.extend(["--patience", "300"].map(str::to_owned));
            let points = format!("{}=wait:{POINTS}", moment.point);
            config.programs.serve_environment.push(("GODWIT_FAILPOINTS".to_owned(), points));
        });
        let mut preset = bed.build(Workload::Redis);
        std::fs::create_dir(preset.rootfs.join("data")).unwrap();
        preset.command =
            ["/usr/bin/redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
                .into_iter()
                // What it answers is on its disk, and half a file is no file.
                .chain(["--appendonly", "yes", "--appendfsync", "always", "--aof-load-truncated", "no"])
                .chain(["--dir", "/data"])
                .map(str::to_owned)
                .collect();
        for node in ["a", "b"] {
            let go = format!("f {POINTS}/{}.go", moment.point);
            let make = format!("printf 'd {POINTS}\\n{go}\\n' >/etc/tmpfiles.d/points.conf");
            run(bed.lab(), node, &format!("{make}; systemd-tmpfiles --create points.conf"));
            // The kernel writes nothing by itself, however long a move takes here.
            let idle = "vm.dirty_writeback_centisecs = 0";
            run(
                bed.lab(),
                node,
                &format!(
                    "echo {idle} >/etc/sysctl.d/points.conf; sysctl -qp /etc/sysctl.d/points.conf; sync"
                ),
            );
        }
        send(&bed, "a", &preset);
        bed.run("a", NAME, ADDRESS, &preset, &["--restart", "always", "--volume", "volume:/volume"]);
        let mut client = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
        client.fill(FILL).unwrap();
        let mut stand =
            Self { moment, bed, preset, at: ["a", "b"], holdings: Default::default(), counted: 0, round: 0 };
        stand.runs_at("a");
        stand.holdings = ["a", "b"].map(|node| stand.steady_holdings(node));
        stand
    }

    fn run(&mut self, cut: Cut) {
        let Moment { point, committed, doubtful, leaves, .. } = self.moment;
        let [from, to] = self.at;
        let mut client = Counter::connect(&self.bed, &self.preset);
        for _ in 0..5 {
            self.counted = client.count();
        }
        let life = self.life();
        self.round += 1;
        self.write_unsynced();
        let mut attempt = Some(self.begin_and_hold());
        // It may count this or not: nobody was told.
        client.ask();
        let lab = self.bed.lab();
        if cut.takes_source() {
            lab.cut_power(from).unwrap();
        }
        if cut.takes_destination() {
            lab.cut_power(to).unwrap();
        }
        let holder = if point.starts_with("source") { from } else { to };
        let holder_lives = if holder == from { !cut.takes_source() } else { !cut.takes_destination() };
        if holder_lives {
            self.let_go(holder);
        }
        match cut {
            Cut::Source => {
                if doubtful {
                    self.shown(to, |shown| shown.state == "in-doubt");
                }
                self.comes_back(from);
            }
            Cut::Destination => {
                if !committed {
                    println!("aborted: {}", attempt.take().unwrap().aborted());
                    self.shown(from, |shown| shown.state == "running" && shown.node == from);
                }
                self.comes_back(to);
            }
            Cut::BothSourceFirst => {
                self.comes_back(from);
                self.comes_back(to);
            }
            Cut::BothDestinationFirst => {
                self.comes_back(to);
                if doubtful {
                    self.shown(to, |shown| shown.state == "in-doubt");
                }
                self.comes_back(from);
            }
        }
        for node in self.at {
            all_ready(&self.bed, node);
        }
        // One whose node has lost power knows nothing more.
        let said = attempt.map(Attempt::end);
        if committed && cut == Cut::Destination {
            let outcome = said.unwrap().report().outcome;
            assert!(outcome == "moved" || leaves && outcome == "lost", "{outcome}");
        }
        if committed {
            self.at.reverse();
        }
        self.runs_at(self.at[0]);
        let [owner, other] = self.at;
        // Its processes have outlived what happened to the other machine.
        let lived = if committed {
            !(cut.takes_destination() || leaves && cut.takes_source())
        } else {
            !cut.takes_source()
        };
        assert_eq!(self.life() == life, lived, "whether the processes are those from before");
        if !lived && committed && !cut.takes_destination() {
            let said = self.bed.done(owner, &["events", "--json"]);
            assert!(said.contains("lost"), "a service whose pages are gone is reported: {said}");
        }
        if lived {
            assert_eq!(client.answer(), self.counted + 1, "over the connection from before");
        }
        let mut counter = Counter::connect(&self.bed, &self.preset);
        let counted = counter.count() - 1;
        assert!(
            (self.counted..=self.counted + 1).contains(&counted),
            "{} were acknowledged, {counted} are there",
            self.counted
        );
        let mut data =
            RedisClient::connect(self.bed.lab(), CLIENT, self.preset.at(ADDRESS), PATIENCE).unwrap();
        data.check_fill(FILL).unwrap();
        // The destination syncs what it has received before the source commits.
        if committed || !cut.takes_source() {
            self.check_unsynced();
        }
        for (node, due) in [owner, other].into_iter().zip(&self.holdings) {
            self.holds(node, due);
        }
    }

    /// The content of a file that nobody syncs, as a command.
    fn unsynced(&self) -> String {
        format!("yes 'round {}' | head -c {UNSYNCED}", self.round)
    }

    fn write_unsynced(&self) {
        let [owner, _] = self.at;
        for place in PLACES {
            let script = format!("{} >/proc/$(pidof redis-server)/root{place}/unsynced", self.unsynced());
            run(self.bed.lab(), owner, &script);
        }
    }

    fn check_unsynced(&self) {
        let [owner, _] = self.at;
        for place in PLACES {
            let script =
                format!("{} | cmp - /proc/$(pidof redis-server)/root{place}/unsynced", self.unsynced());
            run(self.bed.lab(), owner, &script);
        }
    }

    /// Begins a move that is held when this returns.
    fn begin_and_hold(&self) -> Attempt {
        let Moment { point, mode, .. } = self.moment;
        let [from, to] = self.at;
        let holder = if point.starts_with("source") { from } else { to };
        let mark = format!("{POINTS}/{point}");
        for _ in 0..TRIES {
            run(self.bed.lab(), holder, &format!("rm -f {mark}.go {mark}.reached"));
            let arguments = ["--json", "migrate", NAME, "--to", to, "--mode", mode];
            let mut attempt = Attempt::of(self.bed.command_within(MOVE_SECONDS, from, &arguments));
            let held = wait_for(&format!("point {point} of the migration"), || {
                let seen = run(self.bed.lab(), holder, &format!("ls {POINTS}"));
                let reached = seen.lines().any(|name| name == format!("{point}.reached"));
                (reached || attempt.has_ended()).then_some(reached)
            });
            if held {
                return attempt;
            }
            self.let_go(holder);
            // On a busy host emulated machines do not keep the daemons' time limits.
            let said = attempt.aborted();
            println!("it was aborted before {point}, and is tried again: {said}");
        }
        panic!("the migration was aborted {TRIES} times before {point}")
    }

    fn let_go(&self, node: &str) {
        run(self.bed.lab(), node, &format!("touch {POINTS}/{}.go", self.moment.point));
    }

    /// A machine boots, and its daemon answers.
    fn comes_back(&self, node: &str) {
        self.bed.lab().power_on(node).unwrap();
        let mut last = String::new();
        wait_for(&format!("an answer of godwitd on {node}"), || {
            let said = self.bed.godwit(node, &["ps"]);
            if said.code != 0 && said.stderr != last {
                println!("node {node}: {}", said.stderr.trim_end());
                last.clone_from(&said.stderr);
            }
            (said.code == 0).then_some(())
        });
        self.never_runs_twice();
    }

    /// What `godwit ps` on a node says of the service, once it is right.
    fn shown(&self, node: &str, right: impl Fn(&Shown) -> bool) {
        let mut last = String::new();
        wait_for(&format!("the right answer of `godwit ps` on {node}"), || {
            let said = self.bed.godwit(node, &["--json", "ps", "-a"]);
            let shown: Vec<Shown> = serde_json::from_str(&said.stdout).ok()?;
            let shown = shown.into_iter().find(|shown| shown.name == NAME);
            let text = format!("{shown:?}");
            if text != last {
                println!("node {node} shows {text}");
                last = text;
            }
            shown.filter(&right).map(drop)
        });
    }

    /// It runs at that node, and both say so.
    fn runs_at(&self, node: &str) {
        for asked in ["a", "b"] {
            let state = if asked == node { "running" } else { "remote" };
            self.shown(asked, |shown| shown.state == state && shown.node == node);
        }
        // Those that were lost with the power are noticed a moment after the service has come, and it is started again.
        wait_for(&format!("its processes on {node}"), || (self.never_runs_twice() == [node]).then_some(()));
    }

    /// The machines with processes of it that are neither stopped nor frozen.
    fn never_runs_twice(&self) -> Vec<&'static str> {
        let lab = self.bed.lab();
        let powered = ["a", "b"].into_iter().filter(|node| has_power(lab, node));
        let script = r"for pid in $(pidof redis-server); do
                group=/sys/fs/cgroup$(cut -d: -f3 /proc/$pid/cgroup)
                grep -q '^State:.[TtZ]' /proc/$pid/status || grep -q '^frozen 1' $group/cgroup.events || echo $pid
            done";
        let nodes: Vec<_> = powered.filter(|node| !run(lab, node, script).is_empty()).collect();
        assert!(nodes.len() < 2, "it runs on both");
        nodes
    }

    /// What tells one life of its processes from the next.
    fn life(&self) -> String {
        let mut client = Counter::connect(&self.bed, &self.preset);
        client.stream.get_mut().write_all(b"INFO server\r\n").unwrap();
        let mut line = String::new();
        while !line.starts_with("run_id:") {
            line.clear();
            assert_ne!(client.stream.read_line(&mut line).unwrap(), 0, "no run_id");
        }
        line
    }

    fn holds(&self, node: &str, due: &BTreeSet<String>) {
        let mut last = String::new();
        wait_for(&format!("an end on {node} of everything that belongs to a migration"), || {
            let now = holdings(self.bed.lab(), node);
            let more: Vec<_> = now.difference(due).collect();
            let less: Vec<_> = due.difference(&now).collect();
            let text = format!("node {node} has more: {more:?}, lacks: {less:?}");
            if text != last {
                println!("{text}");
                last = text;
            }
            (now == *due).then_some(())
        });
    }

    /// What a node at rest holds.
    fn steady_holdings(&self, node: &str) -> BTreeSet<String> {
        let mut last = BTreeSet::new();
        wait_for(&format!("node {node} to be at rest"), || {
            let before = std::mem::replace(&mut last, holdings(self.bed.lab(), node));
            (before == last).then(|| last.clone())
        })
    }
}

fn has_power(lab: &Lab, node: &str) -> bool {
    // The file of a machine without power is still there, and nobody listens.
    std::os::unix::net::UnixStream::connect(lab.socket(node).unwrap()).is_ok()
}

/// What a machine holds of services and migrations.
fn holdings(lab: &Lab, node: &str) -> BTreeSet<String> {
    let script = "cd /; find run/godwit/migrations run/godwit/pagers run/godwit/netns run/godwit/runc \
            var/lib/godwit/services var/lib/godwit/volumes -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/^/file /'
        findmnt -rno TARGET | grep godwit | sed 's/^/mount /'
        find sys/fs/cgroup/godwit -mindepth 1 -type d 2>/dev/null | sed 's/^/cgroup /'
        ip -o link | sed -E 's/^[0-9]+: ([^:@]*).*/interface \\1/'
        ip neigh show proxy | sed 's/^/proxy /'
        ps -eo comm= | grep -E '^(godwit|criu|runc)' | sort -u | sed 's/^/process /'
        true";
    run(lab, node, script).lines().map(|line| line.trim().to_owned()).collect()
}

/// A connection that counts.
struct Counter {
    stream: BufReader<TcpStream>,
}

impl Counter {
    fn connect(bed: &Bed, preset: &Preset) -> Self {
        // When this answers, the service has read its file.
        drop(RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap());
        let stream = bed.connect(preset.at(ADDRESS));
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    fn ask(&mut self) {
        self.stream.get_mut().write_all(b"INCR counter\r\n").unwrap();
    }

    fn answer(&mut self) -> i64 {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line.trim()
            .strip_prefix(':')
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("{line:?}"))
    }

    fn count(&mut self) -> i64 {
        self.ask();
        self.answer()
    }
}

/// How often a disk may have written by chance what it was not asked to: the kernel flushes for its own journal, too.
const CHANCES: u32 = 3;

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn a_volatile_disk_loses_in_a_power_cut_what_was_not_flushed_and_nothing_else() {
    let bed = Bed::up_with("disk", |config| {
        config.nodes = vec!["a".to_owned()];
        config.daemons = false;
        let machine: Machine = "debian13:disk=volatile".parse().unwrap();
        config.machines.insert("a".to_owned(), machine);
    });
    let lab = bed.lab();
    // Whatever else writes in the machine would flush the disk, too.
    let write = |file: &str, number: u32, how: &str| {
        format!("printf '%4096d' {number} | dd of=/srv/{file} bs=4096 conv=notrunc{how} status=none\n")
    };
    let mut kept = Vec::new();
    run(lab, "a", &(write("flushed", 0, "") + &write("sent", 0, "") + "sync"));
    for number in 1..=CHANCES {
        let script = format!(
            "sync\n{}{}echo written",
            write("flushed", number, ",fsync"),
            // Past the machine's own cache: its disk has it when dd ends.
            write("sent", number, " oflag=direct"),
        );
        let mut command = lab.command("a", "bash").unwrap();
        let output = command.args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.stdout, b"written\n", "{}", String::from_utf8_lossy(&output.stderr));
        lab.cut_power("a").unwrap();
        lab.power_on("a").unwrap();
        let read = |file| run(lab, "a", &format!("cat /srv/{file}")).trim().parse::<u32>().unwrap();
        assert_eq!(read("flushed"), number, "a disk may not lose what was flushed");
        let sent = read("sent");
        assert!(sent <= number);
        kept.push(sent == number);
        if sent < number {
            return;
        }
    }
    panic!("what was written and not flushed is there after each power cut: {kept:?}");
}
