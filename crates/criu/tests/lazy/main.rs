//! Lazy dumps by a real CRIU, with restores from the memory that was left in the processes; needs
//! root.

#![allow(clippy::unwrap_used)]

mod limited;
mod pager;
mod reservation;
mod subject;
mod tree;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use godwit_criu::images::{LazyAreas, lazy_areas, make_plain, pagemap};
use godwit_criu::{Criu, DumpOptions, DumpResult, Memory, MemoryWay, Version, external_shared};
use pager::{Pager, Pages};
use subject::PAGE;
use tree::{Tree, reap};

fn criu() -> Criu {
    Criu::new(std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from))
}

/// The role of [`reservation`].
const RESERVES: &str = "reserves";

/// The role of [`limited`].
const LIMITED: &str = "limited";

/// No test: the process that the others dump.
#[test]
#[ignore = "started by the other tests"]
fn subject() {
    let (role, directory) = (std::env::var(tree::ROLE).unwrap(), std::env::current_dir().unwrap());
    std::process::exit(match role.as_str() {
        RESERVES => reservation::run(&directory),
        LIMITED => limited::run(&directory),
        role => match role.split_once(' ') {
            Some(("large", mebibytes)) => subject::run_large(mebibytes.parse().unwrap()),
            role => subject::run(&directory, role.is_some()),
        },
    })
}

/// Hands them out for images.
struct Given(Pages);

impl godwit_criu::images::LazyPages for Given {
    fn next(&mut self, pid: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let first = self.0.range((pid, within.start)..(pid, within.end)).next();
        Ok(first.map(|((_, address), _)| *address..address + PAGE as u64))
    }

    fn read(&mut self, pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.copy_from_slice(&self.0[&(pid, address)]);
        Ok(())
    }
}

/// A tree that is frozen, and where its images go.
struct Frozen {
    tree: Tree,
    directory: tempfile::TempDir,
}

impl Frozen {
    /// Processes with all kinds of memory that the CRIU at hand can dump.
    async fn tree() -> Self {
        let has_guards = criu().version().await.unwrap() >= Version::release(4, 2, 0);
        Self::new(if has_guards { "tree with-guards" } else { "tree" })
    }

    fn new(role: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("images")).unwrap();
        std::fs::create_dir(directory.path().join("work")).unwrap();
        let tree = Tree::start(role, directory.path());
        tree.freeze();
        Self { tree, directory }
    }

    fn images(&self) -> PathBuf {
        self.directory.path().join("images")
    }

    fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    fn options(&self, way: MemoryWay) -> DumpOptions {
        let mut options = DumpOptions::new(self.tree.pid, "/", self.images(), self.work());
        options.freezer = Some(self.tree.freezer.clone());
        options.memory = if way == MemoryWay::Written { Memory::Images } else { Memory::Lazy };
        options
    }

    async fn dump(&self, way: MemoryWay) -> DumpResult {
        let criu = if way == MemoryWay::Held { criu().as_stock() } else { criu() };
        let result = criu.dump(self.options(way)).await.unwrap();
        assert_eq!(result.way, way);
        assert!(self.tree.is_frozen());
        result
    }

    /// The contents of all pages of the lazy areas that are not zero.
    fn lazy_pages(&self) -> Pages {
        let mut pages = Pages::new();
        for LazyAreas { pid, ranges } in lazy_areas(&self.images()).unwrap() {
            let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
            for area in populated(pid) {
                for range in &ranges {
                    read(&memory, pid, range.start.max(area.start)..range.end.min(area.end), &mut pages);
                }
            }
        }
        pages
    }

    fn restore(&self, lazily: bool) {
        let mut command = Command::new(criu().path());
        command
            .arg("restore")
            .arg("--images-dir")
            .arg(self.images())
            .arg("--work-dir")
            .arg(self.work())
            .args(["--restore-detached", "--manage-cgroups=ignore", "--network-lock", "skip"])
            .args(["--file-locks", "--auto-dedup", "--log-file", "restore.log"]);
        if lazily {
            command.arg("--lazy-pages");
        }
        let status = command.status().unwrap();
        let log = std::fs::read_to_string(self.work().join("restore.log")).unwrap_or_default();
        assert!(status.success(), "{log}");
    }

    /// Lets the restored tree look at its memory.
    fn assert_right(&self) {
        // SAFETY: a call without pointers.
        unsafe { libc::kill(self.tree.pid.cast_signed(), libc::SIGUSR1) };
        let status = reap(self.tree.pid);
        let wrong: Vec<_> = ["root", "child", "grandchild"]
            .iter()
            .filter_map(|who| {
                std::fs::read_to_string(self.directory.path().join(format!("wrong-{who}"))).ok()
            })
            .collect();
        assert_eq!((status, wrong), (0, Vec::new()));
    }
}

/// The areas of a process that have a page: others may be too large to be read.
fn populated(pid: u32) -> Vec<Range<u64>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut areas, mut area) = (Vec::new(), 0..0);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next().unwrap() {
            "Rss:" if words.next() != Some("0") => areas.push(area.clone()),
            word if word.ends_with(':') => {}
            word => {
                let (start, end) = word.split_once('-').unwrap();
                let address = |text| u64::from_str_radix(text, 16).unwrap();
                area = address(start)..address(end);
            }
        }
    }
    areas
}

/// Reads through `/proc/PID/mem`, as process_vm_readv(2) refuses areas without PROT_READ.
fn read(memory: &File, pid: u32, range: Range<u64>, pages: &mut Pages) {
    for address in range.step_by(PAGE) {
        let mut page = vec![0; PAGE];
        memory.read_exact_at(&mut page, address).unwrap();
        if page.iter().any(|byte| *byte != 0) {
            pages.insert((pid, address), page);
        }
    }
}

/// Whether the CRIU at hand has our patch; says so when it has not.
async fn is_patched() -> bool {
    let patched = criu().lazy_external().await.unwrap();
    if !patched {
        eprintln!("skipped: this CRIU has no --lazy-pages-external");
    }
    patched
}

async fn comes_back_with_a_pager(way: MemoryWay) {
    let frozen = Frozen::tree().await;
    frozen.dump(way).await;
    let pages = frozen.lazy_pages();
    frozen.tree.kill();
    let pager = Pager::start(&frozen.work(), pages);
    frozen.restore(true);
    frozen.assert_right();
    assert!(pager.stop() > 100);
}

async fn comes_back_from_plain_images(way: MemoryWay) {
    let frozen = Frozen::tree().await;
    frozen.dump(way).await;
    let pages = frozen.lazy_pages();
    frozen.tree.kill();
    let count = pages.len() as u64;
    let added = make_plain(&frozen.images(), &mut Given(pages)).unwrap();
    assert!(added > 1000 && added <= count, "{added} of {count}");
    frozen.restore(false);
    frozen.assert_right();
}

#[tokio::test]
async fn memory_held_by_a_stock_criu_comes_back_with_a_pager() {
    comes_back_with_a_pager(MemoryWay::Held).await;
}

#[tokio::test]
async fn memory_that_criu_left_untouched_comes_back_with_a_pager() {
    if is_patched().await {
        comes_back_with_a_pager(MemoryWay::Untouched).await;
    }
}

#[tokio::test]
async fn memory_held_by_a_stock_criu_comes_back_from_plain_images() {
    comes_back_from_plain_images(MemoryWay::Held).await;
}

#[tokio::test]
async fn memory_that_criu_left_untouched_comes_back_from_plain_images() {
    if is_patched().await {
        comes_back_from_plain_images(MemoryWay::Untouched).await;
    }
}

async fn a_reservation_comes_back(way: MemoryWay) {
    if criu().version().await.unwrap().series == 0 {
        eprintln!("skipped: this CRIU has not all of godwit's patches");
        return;
    }
    let frozen = Frozen::new(RESERVES);
    frozen.dump(way).await;
    let members = frozen.tree.members();
    let later = way != MemoryWay::Written;
    let areas = || members.iter().map(|pid| reservation::areas(*pid, later)).collect::<Vec<_>>();
    let before = areas();
    let pages = later.then(|| frozen.lazy_pages());
    frozen.tree.kill();
    let pager = pages.map(|pages| Pager::start(&frozen.work(), pages));
    frozen.restore(later);
    assert_eq!(areas(), before);
    frozen.assert_right();
    if let Some(pager) = pager {
        assert!(pager.stop() > 0);
    }
}

#[tokio::test]
async fn a_reservation_larger_than_the_machine_comes_back_from_images() {
    a_reservation_comes_back(MemoryWay::Written).await;
}

#[tokio::test]
async fn a_reservation_larger_than_the_machine_comes_back_with_a_pager() {
    a_reservation_comes_back(MemoryWay::Untouched).await;
}

#[tokio::test]
async fn a_process_that_may_open_and_map_no_more_is_dumped_and_restored_with_its_limits() {
    let frozen = Frozen::new(LIMITED);
    let before = limited::limits_of(frozen.tree.pid);
    frozen.dump(MemoryWay::Written).await;
    assert_eq!(limited::limits_of(frozen.tree.pid), before);
    frozen.tree.kill();
    assert_eq!(godwit_criu::repair::repair(&frozen.images()).unwrap(), 2);
    frozen.restore(false);
    assert_eq!(limited::limits_of(frozen.tree.pid), before);
    frozen.assert_right();
}

#[tokio::test]
async fn a_stock_criu_opens_no_port_for_the_memory() {
    let frozen = Frozen::tree().await;
    let mut options = frozen.options(MemoryWay::Held);
    options.log_level = 4;
    let log = options.log();
    criu().as_stock().dump(options).await.unwrap();
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("Reusing ps socket") && !log.contains("server on port"), "{log}");
}

#[tokio::test]
async fn a_prepared_criu_that_is_not_needed_ends() {
    ends_unless_needed(&format!("{} \"$@\"", criu().path().display())).await;
}

#[tokio::test]
async fn a_prepared_criu_that_hangs_ends_too() {
    // It does not even notice that its socket is closed.
    ends_unless_needed("sleep 1000").await;
}

/// Options of a dump by a CRIU that writes a full log; none if the one at hand has not our patch `prepared-dump`.
async fn options_to_make_ready(frozen: &Frozen) -> Option<DumpOptions> {
    let can = criu().version().await.unwrap().series >= 6;
    can.then(|| DumpOptions { log_level: 4, ..frozen.options(MemoryWay::Untouched) })
}

/// How often CRIU's log has this.
fn logged(options: &DumpOptions, text: &str) -> usize {
    std::fs::read_to_string(options.log()).unwrap().matches(text).count()
}

const PREPARES: &str = "Preparing image inventory";
const TAKES: &str = "Seized task";

#[tokio::test]
async fn a_dump_is_made_ready_while_the_processes_run() {
    let frozen = Frozen::tree().await;
    let Some(mut options) = options_to_make_ready(&frozen).await else { return };
    frozen.tree.thaw();
    let mut prepared = criu().prepare().unwrap();
    prepared.ready(&options).await.unwrap();
    assert_eq!((logged(&options, PREPARES), logged(&options, TAKES)), (1, 0));
    frozen.tree.freeze();
    // What is known only now.
    options.external.push(external_shared(4711));
    assert_eq!(prepared.dump(options.clone()).await.unwrap().way, MemoryWay::Untouched);
    assert!(frozen.tree.is_frozen());
    assert_eq!(logged(&options, "Adding external object: shmem[4711]"), 1);
    assert_eq!(logged(&options, PREPARES), 1);
    assert!(logged(&options, TAKES) > 0);
    frozen.tree.thaw();
    frozen.assert_right();
}

#[tokio::test]
async fn a_dump_that_is_not_the_one_made_ready_begins_anew() {
    let frozen = Frozen::tree().await;
    let Some(options) = options_to_make_ready(&frozen).await else { return };
    let mut prepared = criu().prepare().unwrap();
    prepared.ready(&options).await.unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let others = DumpOptions { images: elsewhere.path().to_owned(), ..options.clone() };
    prepared.dump(others).await.unwrap();
    assert!(elsewhere.path().join("inventory.img").exists());
    assert!(!options.images.join("inventory.img").exists());
    frozen.tree.thaw();
    frozen.assert_right();
}

#[tokio::test]
async fn a_dump_that_was_made_ready_and_is_not_needed_leaves_nothing() {
    let frozen = Frozen::tree().await;
    let Some(options) = options_to_make_ready(&frozen).await else { return };
    frozen.tree.thaw();
    let (directory, program) = noting_criu(&format!("{} \"$@\"", criu().path().display()));
    let mut prepared = Criu::new(program).prepare().unwrap();
    prepared.ready(&options).await.unwrap();
    // Two were started to ask for its version.
    let pids = std::fs::read_to_string(directory.path().join("pids")).unwrap();
    drop(prepared);
    for pid in pids.lines().map(|pid| pid.parse().unwrap()) {
        reap(pid);
        // With its guard, which is in its process group.
        let group = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
        while nix::sys::signal::killpg(group, None).is_ok() {
            tokio::task::yield_now().await;
        }
    }
    assert!(!options.images.join("inventory.img").exists());
    frozen.assert_right();
}

/// A program that is this command, and where it notes its process each time, a line each.
fn noting_criu(command: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let [program, note] = ["criu", "pids"].map(|name| directory.path().join(name));
    let script = format!("#!/bin/sh\necho $$ >>{} && exec {command}\n", note.display());
    // By another process: a child of another test that is not its program yet would have it open.
    let written = std::process::Command::new("sh")
        .args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"", program.to_str().unwrap(), &script])
        .status();
    assert!(written.unwrap().success());
    (directory, program)
}

async fn ends_unless_needed(command: &str) {
    let (directory, program) = noting_criu(command);
    let prepared = Criu::new(program).prepare().unwrap();
    let note = directory.path().join("pids");
    let pid: u32 = loop {
        match std::fs::read_to_string(&note) {
            Ok(noted) if noted.ends_with('\n') => break noted.trim().parse().unwrap(),
            _ => tokio::task::yield_now().await,
        }
    };
    drop(prepared);
    // Whoever reaps it, tokio or this, it has ended then.
    reap(pid);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[tokio::test]
async fn after_a_lazy_dump_the_processes_can_go_on() {
    let frozen = Frozen::tree().await;
    frozen.dump(MemoryWay::Held).await;
    frozen.tree.thaw();
    frozen.assert_right();
}

#[tokio::test]
async fn a_lazy_dump_that_nobody_waits_for_comes_to_its_end() {
    let frozen = Frozen::tree().await;
    let dump = tokio::spawn({
        let options = frozen.options(MemoryWay::Held);
        async move { criu().dump(options).await }
    });
    // CRIU is at work when it has its log.
    while !frozen.work().join("dump.log").exists() {
        tokio::task::yield_now().await;
    }
    dump.abort();
    match dump.await {
        Err(error) => assert!(error.is_cancelled(), "{error}"),
        // It had ended by then.
        Ok(ended) => drop(ended.unwrap()),
    }
    godwit_criu::settled(frozen.tree.pid).await;
    assert!(frozen.tree.is_frozen());
    assert!(!lazy_areas(&frozen.images()).unwrap().is_empty());
    frozen.tree.thaw();
    frozen.assert_right();
}

#[tokio::test]
async fn a_lazy_dump_leaves_out_all_but_the_pages_under_stack_pointers() {
    if !is_patched().await {
        return;
    }
    let frozen = Frozen::tree().await;
    frozen.dump(MemoryWay::Untouched).await;
    for LazyAreas { pid, ranges } in lazy_areas(&frozen.images()).unwrap() {
        let runs = pagemap(&frozen.images(), pid).unwrap().unwrap().runs;
        let inside = |run: &Range<u64>| ranges.iter().any(|r| r.start <= run.start && run.end <= r.end);
        let pages: u64 = runs
            .iter()
            .filter(|run| inside(&run.addresses))
            .inspect(|run| assert!(run.present && !run.lazy, "{run:x?}"))
            .map(|run| (run.addresses.end - run.addresses.start) / PAGE as u64)
            .sum();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count() as u64;
        assert!((1..=threads).contains(&pages), "{pages} pages for {threads} threads");
    }
}

/// Prints how long dumps take: median of nine, in milliseconds. For people.
#[tokio::test]
#[ignore = "measures, asserts nothing"]
async fn figures() {
    let sizes = std::env::var("GODWIT_SIZES").unwrap_or("32 1024 4096".into());
    let _ = criu().warm_up().await;
    for size in sizes.split(' ') {
        let frozen = Frozen::new(&format!("large {size}"));
        let mut ways = vec![MemoryWay::Held, MemoryWay::Untouched];
        if !criu().lazy_external().await.unwrap() {
            ways.pop();
        }
        if size.parse::<u32>().unwrap() <= 1024 {
            ways.insert(0, MemoryWay::Written);
        }
        for way in ways {
            let mut times = Vec::new();
            for _ in 0..9 {
                let images = tempfile::tempdir_in("/dev/shm").unwrap();
                let mut options = frozen.options(way);
                options.images = images.path().to_owned();
                let prepared = criu().prepare().unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
                let begin = Instant::now();
                let result = prepared.dump(options).await.unwrap();
                times.push((begin.elapsed(), result.frozen));
            }
            times.sort();
            let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
            let (whole, held) = times[times.len() / 2];
            println!(
                "{size} MiB, {way:?}: {:.1} ms, of which by CRIU's count frozen {:.1} ms (best {:.1} ms)",
                milliseconds(whole),
                milliseconds(held),
                milliseconds(times[0].0)
            );
        }
    }
}
