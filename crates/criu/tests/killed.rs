//! A CRIU that is killed while it dumps leaves a process as it was, whatever it was doing. Needs root.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_criu::{Criu, DumpOptions};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The series of patches since which that is so.
const SERIES: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(60);

/// Threads that wait, and one that counts in a file.
const VICTIM: &str = "
import sys, threading, time
never = threading.Event()
for _ in range(8): threading.Thread(target=never.wait, daemon=True).start()
counts = 0
with open(sys.argv[1], 'w') as file:
    while True:
        counts += 1
        file.seek(0); file.write('%d\\n' % counts); file.flush()
        time.sleep(0.001)
";

struct Victim {
    process: Child,
    counter: PathBuf,
}

impl Victim {
    fn start(directory: &Path) -> Self {
        let counter = directory.join("counter");
        let mut command = Command::new("setsid");
        command.args(["python3", "-c", VICTIM]).arg(&counter);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let victim = Self { process: command.spawn().unwrap(), counter };
        victim.counts_on(0);
        victim
    }

    fn count(&self) -> u64 {
        fs::read_to_string(&self.counter).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Waits until it has counted further than that.
    fn counts_on(&self, than: u64) {
        let start = Instant::now();
        while self.count() <= than {
            assert!(
                start.elapsed() < PATIENCE,
                "it does not count on from {than}: {}",
                self.status(&["State", "Sig", "TracerPid"]).join(", ")
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.process.id().to_string()).join(name)
    }

    /// Lines of `/proc` of all threads that begin with one of these names.
    fn status(&self, names: &[&str]) -> Vec<String> {
        let threads = fs::read_dir(self.path("task")).unwrap();
        let texts = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).unwrap());
        let is_asked = |line: &&str| names.iter().any(|name| line.starts_with(name));
        texts.flat_map(|text| text.lines().filter(is_asked).map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    /// Its mappings of files and of code, its open files, and the signal masks of its threads.
    fn holds(&self) -> (Vec<String>, Vec<PathBuf>, Vec<String>) {
        let maps = fs::read_to_string(self.path("maps")).unwrap();
        let is_told = |line: &&str| line.contains('/') || line.contains('x');
        let maps = maps.lines().filter(is_told).map(str::to_owned).collect();
        let files =
            fs::read_dir(self.path("fd")).unwrap().map(|file| fs::read_link(file.unwrap().path()).unwrap());
        (maps, files.collect(), self.status(&["SigBlk"]))
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Lines that CRIU has written since it entered the process. How many come before depends on the node's mounts, which
/// other tests change meanwhile.
fn lines_within(log: &Path) -> usize {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().skip_while(|line| !line.contains("Parasite syscall_ip")).count()
}

/// Kills CRIU at so many moments of dumps of this process, spread over a whole one.
async fn kill_at(kills: usize, victim: &Victim, check: impl Fn(&str)) {
    let path = std::env::var_os("GODWIT_CRIU").unwrap_or("/usr/local/lib/godwit/bin/criu".into());
    let criu = Criu::new(&path);
    if criu.version().await.unwrap().series < SERIES {
        println!("{} lacks the patch killed-tracer", path.display());
        return;
    }
    let dump = || {
        let images = tempfile::tempdir().unwrap();
        let mut options = DumpOptions::new(victim.process.id(), "/", images.path(), images.path());
        options.log_level = 4;
        let (criu, log) = (criu.clone(), options.log());
        (tokio::spawn(async move { criu.dump(options).await }), log, images)
    };
    let (whole, log, _images) = dump();
    whole.await.unwrap().unwrap();
    let all = lines_within(&log);
    assert!(all > kills, "{all} lines of\n{}", fs::read_to_string(&log).unwrap());
    let mut killed = 0;
    for kill in 0..kills {
        let moment = 1 + (all - 1) * kill / kills;
        let (dumping, log, _images) = dump();
        while lines_within(&log) < moment && !dumping.is_finished() {
            tokio::task::yield_now().await;
        }
        godwit_criu::kill(victim.process.id());
        killed += usize::from(dumping.await.unwrap().is_err());
        check(&format!(
            "killed at line {moment} within the process, of\n{}",
            fs::read_to_string(&log).unwrap()
        ));
    }
    println!("{killed} of {kills} were killed before their end");
    // Some dumps may have ended first.
    assert!(killed > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_as_it_was_when_criu_is_killed_at_whatever_moment() {
    let directory = tempfile::tempdir().unwrap();
    let victim = Victim::start(directory.path());
    let before = victim.holds();
    kill_at(40, &victim, |when| {
        assert_eq!(victim.holds(), before, "{when}");
        victim.counts_on(victim.count());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_stays_so_and_goes_on_when_it_is_let() {
    let directory = tempfile::tempdir().unwrap();
    let victim = Victim::start(directory.path());
    let signal = |signal| kill(Pid::from_raw(i32::try_from(victim.process.id()).unwrap()), signal).unwrap();
    signal(Signal::SIGSTOP);
    let states = || victim.status(&["State"]).into_iter().collect::<BTreeSet<_>>();
    let stopped = BTreeSet::from(["State:\tT (stopped)".to_owned()]);
    let start = Instant::now();
    while states() != stopped {
        assert!(start.elapsed() < PATIENCE, "{:?}", states());
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = victim.holds();
    kill_at(20, &victim, |when| {
        assert_eq!(victim.holds(), before, "{when}");
        let start = Instant::now();
        // A thread that is let go stops when it next has a processor.
        while states() != stopped {
            assert!(start.elapsed() < PATIENCE, "{:?}, {when}", states());
            std::thread::sleep(Duration::from_millis(1));
        }
    })
    .await;
    let count = victim.count();
    signal(Signal::SIGCONT);
    victim.counts_on(count);
}
