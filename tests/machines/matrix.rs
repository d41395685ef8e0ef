//! The matrix of machines: which services move between which machines, in each mode, there and back.
//!
//! A lab has two machines; in each of its *settings* (plain, a clock that is ahead, …) services move from `a` to
//! `b` and back in each mode, and are checked after each move: that is a *cell*. Where the way back must be refused, each
//! service is new. A cell that fails is told in the table
//! at the end, and the next one begins with a new service.
//!
//! `GODWIT_MATRIX='clock+3d,debian12-debian13/plain/redis/cold'` chooses the cells whose names contain one of
//! these words.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddrV4},
    panic::{AssertUnwindSafe, catch_unwind},
    process::Stdio,
    time::{Duration, Instant},
};

use godwit_lab::workload::{Preset, RedisClient, Rootfs, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, Report, compile_by, pattern::Pattern, psql::Psql};

use crate::{PATIENCE, all_ready, arm64, machines, send};

const MODES: [&str; 4] = ["cold", "precopy", "postcopy", "hybrid"];
/// Data of Redis.
const FILL: u64 = 8 << 20;
/// By how much a service's clock may be ahead of the time that has passed here: what two questions take on a busy host.
const SLACK: Duration = Duration::from_secs(20);

/// Two machines, and what is tried with them.
struct Pair {
    name: &'static str,
    machines: [&'static str; 2],
    back: Back,
    /// Of Redis.
    env: Option<&'static str>,
    settings: &'static [Setting],
    /// It needs the archive whose address is in this variable, and is left out without it.
    archive: Option<&'static str>,
}

/// The way back, for services that may use what the processors of `b` have since they were there.
#[derive(Clone, Copy)]
enum Back {
    Free,
    /// `a` lacks this, and refuses them.
    Lacks(&'static str),
    /// `a` may lack something.
    AsProcessorsSay,
}

/// No machine, but a namespace of this host, with its kernel and processors.
const HOST: &str = "this kernel";

/// What is special, and the services that move.
struct Setting {
    name: &'static str,
    make: fn(&Bed),
    services: &'static [Kind],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Redis,
    Pattern,
    Postgres,
    Clocks,
    /// A Redis that AppArmor confines.
    Confined,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "redis",
            Self::Pattern => "pattern",
            Self::Postgres => "postgres",
            Self::Clocks => "clocks",
            Self::Confined => "confined",
        })
    }
}

const PLAIN: &str = "plain";

/// The AppArmor profile of a confined Redis, and where a machine has it.
const PROFILE: &str = "lab-redis";
const PROFILE_FILE: &str = "/etc/apparmor.d/lab-redis";
/// The directory of its container that the profile lets nobody write.
const DENIED: &str = "denied";

/// All services but the confined one, and nothing special.
const ALL: Setting = Setting {
    name: PLAIN,
    make: |_| (),
    services: &[Kind::Redis, Kind::Pattern, Kind::Postgres, Kind::Clocks],
};
const CONFINED: Setting = Setting {
    name: "AppArmor",
    make: |bed| ["a", "b"].into_iter().for_each(|node| load_profile(bed, node)),
    services: &[Kind::Confined],
};

const PAIRS: &[Pair] = &[
    Pair {
        name: "debian12-debian13",
        machines: ["debian12", "debian13"],
        back: Back::Free,
        env: None,
        settings: &[
            ALL,
            Setting {
                name: "clock+1h",
                make: |bed| bed.lab().shift_clock("b", 3600).unwrap(),
                services: &[Kind::Redis, Kind::Clocks],
            },
            Setting {
                name: "clock+3d",
                // Beside the hour.
                make: |bed| bed.lab().shift_clock("b", 3 * 24 * 3600 - 3600).unwrap(),
                services: &[Kind::Redis, Kind::Clocks],
            },
            Setting {
                name: "booted later",
                make: |bed| {
                    bed.lab().cut_power("b").unwrap();
                    bed.lab().power_on("b").unwrap();
                    all_ready(bed, "a");
                    all_ready(bed, "b");
                },
                services: &[Kind::Redis, Kind::Clocks],
            },
            CONFINED,
        ],
        archive: None,
    },
    Pair {
        name: "ubuntu24-debian13",
        machines: ["ubuntu24.04", "debian13"],
        back: Back::Free,
        env: None,
        settings: &[ALL, CONFINED],
        archive: Some("GODWIT_UBUNTU_ARCHIVE"),
    },
    Pair {
        name: "debian13-host",
        // Older than the host's, so that the way there is free.
        machines: ["debian13:cpu=IvyBridge", HOST],
        back: Back::AsProcessorsSay,
        env: None,
        settings: &[ALL],
        archive: None,
    },
    Pair {
        name: "processors",
        // The newer has AVX2 and more, the older neither AVX nor XSAVE.
        machines: ["debian13:cpu=Westmere", "debian13:cpu=max"],
        back: Back::Lacks("avx2"),
        env: None,
        settings: &[Setting {
            name: PLAIN,
            make: |_| (),
            services: &[Kind::Redis, Kind::Pattern, Kind::Postgres],
        }],
        archive: None,
    },
    Pair {
        name: "processors, hidden",
        // What the newer has more is all of vectors and bits, which a C library can be told to leave alone.
        machines: ["debian13:cpu=IvyBridge", "debian13:cpu=Haswell"],
        back: Back::Free,
        env: Some(
            "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-BMI1,-BMI2,-MOVBE,-LZCNT",
        ),
        settings: &[Setting { name: PLAIN, make: |_| (), services: &[Kind::Redis] }],
        archive: None,
    },
    Pair {
        name: "cgroup1-cgroup2",
        machines: ["debian12:cgroup=1", "debian12"],
        back: Back::Free,
        env: None,
        settings: &[Setting {
            name: PLAIN,
            make: |_| (),
            services: &[Kind::Redis, Kind::Pattern, Kind::Postgres],
        }],
        archive: None,
    },
    Pair {
        name: "arm64-arm64",
        machines: ["arm64", "arm64"],
        back: Back::Free,
        env: None,
        settings: &[ALL],
        archive: None,
    },
];

/// Of these a cell's name has to contain one; none: all cells.
struct Chosen(Vec<String>);

impl Chosen {
    fn has(&self, cell: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|word| cell.contains(word.as_str()))
    }
}

/// What came of a cell.
struct Row {
    pair: &'static str,
    /// Empty, as service and mode, where the pair failed before any cell.
    setting: &'static str,
    service: Option<Kind>,
    mode: &'static str,
    /// What came of both ways, or why nothing did.
    result: Result<[Way; 2], String>,
}

enum Way {
    /// With this frozen time, milliseconds.
    Moved(f64),
    /// As it should be.
    Refused,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Moved(frozen_ms) => write!(f, "{frozen_ms:.0}"),
            Self::Refused => f.write_str("refused"),
        }
    }
}

fn cell(pair: &Pair, setting: &Setting, service: Kind, mode: &str) -> String {
    format!("{}/{}/{service}/{mode}", pair.name, setting.name)
}

/// A service that runs, and what its client remembers.
enum Running {
    Redis { client: RedisClient, number: i64 },
    Pattern(Pattern),
    Postgres { session: Psql, number: u32 },
    Clocks { address: Ipv4Addr, told: [u64; 2], at: Instant },
    Confined { client: RedisClient, number: i64 },
}

impl Running {
    /// Starts one on node `a`; its number makes its name and address its own.
    fn start(bed: &Bed, kind: Kind, name: &'static str, number: u8, env: Option<&str>) -> Self {
        let address = Ipv4Addr::new(10, 88, 0, number);
        match kind {
            Kind::Redis => {
                let preset = send_and_run(bed, name, address, || {
                    let mut preset =
                        if is_arm64(bed) { arm64::redis(bed) } else { bed.build(Workload::Redis) };
                    preset.env.extend(env.map(str::to_owned));
                    preset
                });
                let mut client =
                    RedisClient::connect(bed.lab(), CLIENT, preset.at(address), PATIENCE).unwrap();
                client.fill(FILL).unwrap();
                Self::Redis { client, number: 0 }
            }
            Kind::Pattern => Self::Pattern(Pattern::start(bed, name, number, true)),
            Kind::Postgres => {
                let arm64 = is_arm64(bed);
                let preset = if arm64 { arm64::postgres(bed) } else { bed.build(Workload::Postgres) };
                send_prepare_and_run(bed, name, address, preset, |preset| {
                    if arm64 {
                        arm64::initialize(bed, "a", preset);
                    }
                });
                let mut session = Psql::connect(bed, address, PATIENCE);
                session.query("CREATE TABLE t (number int PRIMARY KEY)");
                // It stays open over all moves.
                session.query("BEGIN");
                Self::Postgres { session, number: 0 }
            }
            Kind::Confined => {
                let preset = send_and_run(bed, name, address, || {
                    let mut preset = bed.build(Workload::Redis);
                    // Its directory can be set.
                    preset.command.extend(["--enable-protected-configs", "yes"].map(str::to_owned));
                    std::fs::create_dir_all(preset.rootfs.join(DENIED)).unwrap();
                    preset
                });
                let mut client =
                    RedisClient::connect(bed.lab(), CLIENT, preset.at(address), PATIENCE).unwrap();
                // It may write elsewhere.
                for command in [&["SAVE"][..], &["CONFIG", "SET", "dir", &format!("/{DENIED}")]] {
                    assert_eq!(client.call(command).unwrap(), Reply::Simple("OK".to_owned()), "{command:?}");
                }
                let mut service = Self::Confined { client, number: 0 };
                service.check(bed, "after its start");
                service
            }
            Kind::Clocks => {
                send_and_run(bed, name, address, || clocks(bed, name));
                Self::Clocks { address, told: tell(bed, address), at: Instant::now() }
            }
        }
    }

    /// It answers, to the clients that it had, and has lost nothing.
    fn check(&mut self, bed: &Bed, when: &str) {
        match self {
            Self::Redis { client, number } => {
                for _ in 0..10 {
                    *number += 1;
                    let answer = client.call(&["INCR", "counter"]).unwrap();
                    assert_eq!(answer, Reply::Integer(*number), "{when}");
                }
                client.check_fill(FILL).unwrap();
            }
            Self::Confined { client, number } => {
                *number += 1;
                assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(*number), "{when}");
                let answer = client.call(&["SAVE"]).unwrap();
                assert!(
                    matches!(answer, Reply::Error(_)),
                    "{when} it may write what its profile denies: {answer:?}"
                );
                let read = "for pid in $(pidof redis-server); do cat /proc/$pid/attr/current; done";
                let profiles: String = ["a", "b"].iter().map(|node| run(bed, node, read)).collect();
                assert_eq!(profiles, format!("{PROFILE} (enforce)\n"), "{when}");
            }
            Self::Pattern(pattern) => pattern.check(bed, when),
            Self::Postgres { session, number } => {
                *number += 1;
                session.query(&format!("INSERT INTO t VALUES ({number})"));
                let rows = session.query("SELECT count(*), max(number) FROM t");
                assert_eq!(rows, [format!("{number}|{number}")], "{when}");
            }
            Self::Clocks { address, told, at } => {
                let (now, passed) = (tell(bed, *address), at.elapsed());
                for (before, after) in told.iter().zip(now) {
                    let most = before + u64::try_from((passed + SLACK).as_millis()).unwrap();
                    let fits = (*before..=most).contains(&after);
                    assert!(
                        fits,
                        "{when}: a clock of the service went from {before} ms to {after} ms in {passed:?}"
                    );
                }
                (*told, *at) = (now, Instant::now());
            }
        }
    }

    /// Moves it from `a` to `b`, and back if it can.
    fn go_and_come(&mut self, bed: &Bed, name: &str, mode: &str, back: Back) -> [Way; 2] {
        if matches!(self, Self::Confined { .. }) {
            run(bed, "b", &format!("apparmor_parser --remove {PROFILE_FILE}"));
            let said = bed.godwit("a", &["--json", "migrate", name, "--to", "b", "--mode", mode]);
            let reason = said.report().reason;
            let words = format!("runs under the AppArmor profile {PROFILE}, which is not loaded on node b");
            assert!(said.code == 1 && reason.contains(&words), "{reason}");
            load_profile(bed, "b");
        }
        let there = Way::Moved(self.migrate(bed, name, ["a", "b"], mode).frozen_ms);
        let lacking = match back {
            Back::Lacks(word) => vec![word.to_owned()],
            Back::AsProcessorsSay => lacking(bed),
            Back::Free => Vec::new(),
        };
        if lacking.is_empty() {
            return [there, Way::Moved(self.migrate(bed, name, ["b", "a"], mode).frozen_ms)];
        }
        let said = bed.godwit("b", &["--json", "migrate", name, "--to", "a", "--mode", mode]);
        let report = said.report();
        assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{report:?}");
        let refuses = ["node a refuses", "the CPU"].iter().all(|words| report.reason.contains(words));
        assert!(refuses && lacking.iter().any(|word| report.reason.contains(word)), "{}", report.reason);
        self.check(bed, "after it was refused");
        [there, Way::Refused]
    }

    /// Moves it to the other node.
    fn migrate(&mut self, bed: &Bed, name: &str, [from, to]: [&str; 2], mode: &str) -> Report {
        let report = match self {
            Self::Pattern(pattern) => pattern.move_and_check(bed, mode),
            _ => bed.migrate_so(name, from, to, &["--mode", mode]),
        };
        self.check(bed, &format!("after {mode} from {from} to {to}"));
        // Kernels differ in what they have of these, and all that this one has is covered.
        let pid = bed.pid(to, name);
        let bare = format!(
            "for path in /proc/kcore /proc/keys /proc/timer_list /sys/firmware; do \
             [ ! -e $path ] || grep -q \" $path \" /proc/{pid}/mountinfo || echo $path; done"
        );
        assert_eq!(
            run(bed, to, &bare),
            "",
            "after {mode} from {from} to {to}: what the service sees of node {to}"
        );
        report
    }
}

fn send_and_run(bed: &Bed, name: &str, address: Ipv4Addr, build: impl FnOnce() -> Preset) -> Preset {
    send_prepare_and_run(bed, name, address, build(), |_| ())
}

/// The same, with what has to be done in the machine before it runs.
fn send_prepare_and_run(
    bed: &Bed,
    name: &str,
    address: Ipv4Addr,
    preset: Preset,
    prepare: impl FnOnce(&Preset),
) -> Preset {
    send(bed, "a", &preset);
    prepare(&preset);
    bed.run("a", name, address, &preset, &[]);
    // The next service of this kind builds its own.
    std::fs::remove_dir_all(&preset.rootfs).unwrap();
    preset
}

/// Makes a machine confine what it starts as Redis.
fn load_profile(bed: &Bed, node: &str) {
    let rules = "file, network, capability, signal, ptrace,";
    let profile = format!(
        "profile {PROFILE} /usr/bin/redis-* flags=(attach_disconnected) {{ {rules} deny /{DENIED}/** w, }}"
    );
    run(bed, node, &format!("echo '{profile}' >{PROFILE_FILE}; apparmor_parser --replace {PROFILE_FILE}"));
}

fn is_arm64(bed: &Bed) -> bool {
    let machine = bed.lab().machine("a");
    machine.is_some_and(|machine| machine.architecture == godwit_lab::Architecture::Arm64)
}

/// What programs on `b` can use and those on `a` cannot, of features of which no program does without: vectors.
fn lacking(bed: &Bed) -> Vec<String> {
    let words = |node: &str| run(bed, node, "sed -n 's/^flags.*: //p' /proc/cpuinfo | head -n 1");
    let there = words("a");
    let there: Vec<&str> = there.split_whitespace().collect();
    let more = words("b");
    let more = more.split_whitespace().filter(|word| word.starts_with("avx") && !there.contains(word));
    more.map(str::to_owned).collect()
}

/// What tells its clocks.
fn clocks(bed: &Bed, name: &str) -> Preset {
    let root = bed.scratch().join(name);
    Rootfs::new(&root).unwrap();
    let compiler = if is_arm64(bed) { "aarch64-linux-gnu-gcc" } else { "cc" };
    compile_by(compiler, "clocks.c", &root.join("clocks"));
    Preset { rootfs: root, command: vec!["/clocks".to_owned()], env: Vec::new(), user: None, port: 7001 }
}

/// CLOCK_MONOTONIC and CLOCK_BOOTTIME of the service, in milliseconds.
fn tell(bed: &Bed, address: Ipv4Addr) -> [u64; 2] {
    let mut answer = String::new();
    let mut connection = bed.connect(SocketAddrV4::new(address, 7001));
    std::io::Read::read_to_string(&mut connection, &mut answer).unwrap();
    let told: Vec<u64> = answer.split_whitespace().map(|number| number.parse().unwrap()).collect();
    [told[0], told[1]]
}

/// What a machine is.
fn facts(bed: &Bed, node: &str) -> String {
    let script = r#"printf '%s; %s; cgroup %s; AppArmor %s; huge pages %s; up %s s' "$(uname -rm)" \
        "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)" "$(stat -fc %T /sys/fs/cgroup)" \
        "$(cat /sys/module/apparmor/parameters/enabled)" \
        "$(sed 's/.*\[\(.*\)\].*/\1/' /sys/kernel/mm/transparent_hugepage/enabled)" "$(cut -d. -f1 /proc/uptime)""#;
    run(bed, node, script)
}

fn run(bed: &Bed, node: &str, script: &str) -> String {
    let mut command = bed.lab().command(node, "bash").unwrap();
    let output = command.args(["-c", script]).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Adds the chosen cells of a pair, tried in one lab. What is no cell's own fault panics.
fn try_pair(pair: &Pair, chosen: &Chosen, rows: &mut Vec<Row>) {
    let is_chosen = |setting: &Setting, kind: Kind, mode: &str| chosen.has(&cell(pair, setting, kind, mode));
    let wanted = |setting: &&Setting| {
        setting.services.iter().any(|kind| MODES.iter().any(|mode| is_chosen(setting, *kind, mode)))
    };
    if !pair.settings.iter().any(|setting| wanted(&setting)) {
        return;
    }
    let lacks = |archive: &&str| std::env::var_os(archive).is_none_or(|address| address.is_empty());
    if let Some(archive) = pair.archive.filter(lacks) {
        println!("{} is left out: {archive} does not name an archive", pair.name);
        return;
    }
    let bed = Bed::up_with("matrix", |config| {
        let all = ["a", "b"].into_iter().zip(pair.machines).filter(|(_, machine)| *machine != HOST);
        machines(config, &all.collect::<Vec<_>>());
    });
    // This host's own setting stays.
    for node in ["a", "b"].into_iter().filter(|node| bed.lab().machine(node).is_some()) {
        run(&bed, node, "echo always >/sys/kernel/mm/transparent_hugepage/enabled");
    }
    let mut number = 20;
    for setting in pair.settings.iter().filter(wanted) {
        (setting.make)(&bed);
        println!("{}, {}\n  a: {}\n  b: {}", pair.name, setting.name, facts(&bed, "a"), facts(&bed, "b"));
        for kind in setting.services {
            let modes = MODES.iter().filter(|mode| is_chosen(setting, *kind, mode));
            let mut running: Option<(&'static str, Running)> = None;
            for mode in modes {
                let begun = Instant::now();
                let result = catch_unwind(AssertUnwindSafe(|| {
                    let (name, service) = running.get_or_insert_with(|| {
                        number += 1;
                        // They are few, and live as long as this process.
                        let name: &'static str = format!("{kind}{number}").leak();
                        (name, Running::start(&bed, *kind, name, number, pair.env))
                    });
                    service.go_and_come(&bed, name, mode, pair.back)
                }));
                if matches!(result, Ok([_, Way::Refused]))
                    && let Some((name, _)) = running.take()
                {
                    bed.done("b", &["rm", "--force", name]);
                }
                let result = result.map_err(|panic| {
                    // Whatever it is, and wherever: the next cell has another.
                    running = None;
                    reason(panic.as_ref())
                });
                let (setting, service) = (setting.name, Some(*kind));
                let row = Row { pair: pair.name, setting, service, mode, result };
                println!("{row} ({:.0} s)", begun.elapsed().as_secs_f64());
                rows.push(row);
            }
            if let Some((name, _)) = running {
                bed.done("a", &["rm", "--force", name]);
            }
        }
    }
}

fn reason(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").replace(['\n', '|'], " ")
}

/// A line of the table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = self.service.map_or_else(String::new, |service| service.to_string());
        write!(f, "| {} | {} | {service} | {} | ", self.pair, self.setting, self.mode)?;
        match &self.result {
            Ok([there, back]) => write!(f, "passed | {there} | {back} |"),
            Err(reason) => write!(f, "FAILED: {reason} | | |"),
        }
    }
}

/// Tries cells and prints their table; fails when one of them has failed.
fn try_cells(chosen: &Chosen) {
    let mut rows = Vec::new();
    for pair in PAIRS {
        // The others are tried all the same, and what was tried is told.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| try_pair(pair, chosen, &mut rows))) {
            let result = Err(reason(panic.as_ref()));
            rows.push(Row { pair: pair.name, setting: "", service: None, mode: "", result });
        }
    }
    println!("\n| machines | setting | service | mode | result | frozen ms, there | back |");
    println!("|---|---|---|---|---|---:|---:|");
    rows.iter().for_each(|row| println!("{row}"));
    let failed = rows.iter().filter(|row| row.result.is_err()).count();
    assert!(!rows.is_empty(), "no cell has such a name, or all that have are left out");
    assert_eq!(failed, 0, "of {} cells", rows.len());
}

/// `make test-full` runs it: the machines, the packages in them, and moves between two kernels.
#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn smoke_redis_moves_between_debian_12_and_13() {
    let name = |mode| format!("debian12-debian13/{PLAIN}/redis/{mode}");
    try_cells(&Chosen(["precopy", "postcopy"].map(name).to_vec()));
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn all_services_move_between_all_machines_in_all_modes() {
    let words = std::env::var("GODWIT_MATRIX").unwrap_or_default();
    try_cells(&Chosen(words.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()));
}
