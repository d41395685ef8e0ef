//! Processes that do everything to their memory while it is tracked.
//!
//! The child is this test program again, as `torture_child`, told by lines on its standard input:
//! `do SEED COUNT` does so many random things; `run SEED` does them until the next line comes, with
//! threads that write beside it. It answers each line with `@`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Command_, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_memory::process::Process;
use godwit_memory::tracker::{Backend, Tracker};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::child::{Child, eventually, state};
use crate::replica::Replica;

const PAGE: usize = 4096;
const CHILD: &str = "torture::torture_child";
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
/// Processes of one family at most.
const FAMILY: usize = 4;

struct Torture {
    child: Command_,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Torture {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([CHILD, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("TORTURE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts");
        let input = child.stdin.take().expect("its input");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut torture = Self { child, input, output };
        torture.answered();
        torture
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the child listens");
    }

    fn answered(&mut self) {
        // The first answer stands behind what the test harness says.
        let mut line = String::new();
        while !line.contains('@') {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("an answer") > 0, "the child has ended");
        }
    }

    fn command(&mut self, line: &str) {
        self.tell(line);
        self.answered();
    }

    /// The child and all that it forked.
    fn family(&self) -> Vec<i32> {
        let mut all = vec![self.child.id().cast_signed()];
        let mut at = 0;
        while let Some(&pid) = all.get(at) {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            for thread in threads {
                let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                all.extend(text.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
            }
            at += 1;
        }
        all.retain(|&pid| state(pid).is_some_and(|state| state != 'Z'));
        all
    }

    /// Stops all of them, also those forked meanwhile.
    fn stop(&self) -> Vec<i32> {
        let mut stopped = Vec::new();
        eventually("all processes have stopped", || {
            let family = self.family();
            for &pid in &family {
                let _ = kill(Pid::from_raw(pid), Signal::SIGSTOP);
            }
            // One that was about to end is none of the family when it has.
            let has_stopped =
                |pid: i32| all_threads_stopped(pid) && state(pid).is_some_and(|state| state != 'Z');
            let still = family == stopped && family.iter().all(|&pid| has_stopped(pid));
            stopped = family;
            still
        });
        stopped
    }

    fn go_on(pids: &[i32]) {
        for &pid in pids {
            let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
        }
    }
}

fn all_threads_stopped(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
    })
}

impl Drop for Torture {
    fn drop(&mut self) {
        for pid in self.stop() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

fn seed() -> u64 {
    let seed = std::env::var("TORTURE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |time| time.as_nanos() as u64)
    });
    println!("TORTURE_SEED={seed}");
    seed
}

/// Steps between scans, then a scan of the process as it stands still.
fn in_steps(backend: Backend, steps: u32) {
    let mut random = Random(seed());
    let mut torture = Torture::start();
    let mut tracker = Tracker::new(backend);
    let mut replica = Replica::new();
    for _ in 0..steps {
        torture.command(&format!("do {} {}", random.next(), 1 + random.below(30)));
        replica.scan(&mut tracker, &torture.family(), false);
        if random.below(4) == 0 {
            let stopped = torture.stop();
            replica.scan(&mut tracker, &stopped, true);
            replica.assert_equals(&stopped);
            Torture::go_on(&stopped);
        }
    }
    let stopped = torture.stop();
    replica.scan(&mut tracker, &stopped, true);
    replica.assert_equals(&stopped);
}

/// Scans while the processes run as fast as they can, and there are copies of this process's descriptors.
fn at_full_speed(backend: Backend, stops: u32) {
    let mut random = Random(seed());
    let mut torture = Torture::start();
    let mut tracker = Tracker::new(backend);
    let mut replica = Replica::new();
    for _ in 0..stops {
        let _copies = Child::fork(|| {
            loop {
                // SAFETY: a plain system call.
                unsafe { libc::pause() };
            }
        });
        torture.tell(&format!("run {}", random.next()));
        for _ in 0..8 {
            replica.scan(&mut tracker, &torture.family(), false);
        }
        let stopped = torture.stop();
        replica.scan(&mut tracker, &stopped, true);
        replica.assert_equals(&stopped);
        Torture::go_on(&stopped);
        // Ends the run, which is answered first.
        torture.tell("do 1 1");
        torture.answered();
        torture.answered();
    }
}

#[test]
fn a_replica_is_exact_after_any_steps() {
    in_steps(Backend::Uffd, 25);
}

#[test]
fn a_replica_is_exact_after_scans_at_full_speed() {
    at_full_speed(Backend::Uffd, 3);
}

#[test]
fn without_tracking_a_replica_is_exact_too() {
    in_steps(Backend::None, 8);
}

#[test]
fn a_huge_mapping_costs_what_is_touched() {
    let mut torture = Torture::start();
    torture.command("huge");
    let mut tracker = Tracker::new(Backend::Uffd);
    let mut replica = Replica::new();
    let pids = torture.family();
    replica.scan(&mut tracker, &pids, false);
    torture.command("huge");
    let round = replica.scan(&mut tracker, &pids, false);
    let huge = |range: &&godwit_memory::Range| {
        range.start >= HUGE_AT as u64 && range.end <= (HUGE_AT + HUGE_LEN) as u64
    };
    let pages: u64 =
        round.spaces[0].written.iter().filter(huge).map(|range| (range.end - range.start) / 4096).sum();
    assert_eq!(pages, 3, "the touched pages and none other");
    let tables = std::fs::read_to_string(format!("/proc/{}/status", pids[0])).expect("its status");
    let tables: u64 = tables
        .lines()
        .find_map(|line| line.strip_prefix("VmPTE:")?.split_whitespace().next()?.parse().ok())
        .expect("its page tables");
    assert!(tables < 4096, "page tables of {tables} KiB for a mapping that is hardly used");
    assert!(replica.pages(Process::open(pids[0]).expect("it lives").space()) > 3);
}

const HUGE_AT: usize = 0x1000_0000_0000;
const HUGE_LEN: usize = 1 << 40;

#[test]
#[ignore = "the child of the other tests"]
fn torture_child() {
    if std::env::var_os("TORTURE").is_none() {
        return;
    }
    // Threads would go on beside, and the parent would wait for an answer.
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
    let mut things = Things::new();
    answer();
    let (sender, commands) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let mut next = commands.recv();
    while let Ok(line) = next {
        next = Err(std::sync::mpsc::RecvError);
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse().ok()).unwrap_or(1);
        match words[0] {
            "do" => {
                let mut random = Random(number(1));
                (0..number(2)).for_each(|_| things.something(&mut random));
            }
            "run" => {
                let mut random = Random(number(1));
                let ended = AtomicBool::new(false);
                let hot = things.hot as usize;
                std::thread::scope(|scope| {
                    for _ in 0..2 {
                        scope.spawn(|| write_hot(hot, &ended));
                    }
                    while let Err(std::sync::mpsc::TryRecvError::Empty) =
                        commands.try_recv().map(|line| next = Ok(line))
                    {
                        things.something(&mut random);
                    }
                    ended.store(true, Ordering::Relaxed);
                });
                answer();
                continue;
            }
            "huge" => things.touch_huge(),
            other => panic!("{other}"),
        }
        answer();
        next = commands.recv();
    }
    std::process::exit(0);
}

fn answer() {
    println!("@");
    std::io::stdout().flush().expect("the parent listens");
}

const HOT: usize = 256;

fn write_hot(hot: usize, ended: &AtomicBool) {
    let mut random = Random(hot as u64 ^ 99);
    while !ended.load(Ordering::Relaxed) {
        let at = hot + random.below(HOT as u64) as usize * PAGE + random.below(512) as usize * 8;
        // SAFETY: the hot pages stay mapped as long as the process runs; races on them are meant.
        unsafe { (at as *mut u64).write_volatile(random.next()) };
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 |= 1 << 40;
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 20) % limit
    }
}

/// Mappings of the child. Whole pages, and all that happens to them is meant.
struct Things {
    areas: Vec<(usize, usize)>,
    hot: *mut u8,
    brk: usize,
    children: Vec<i32>,
    is_child: bool,
    /// How often memory came to stay that the page mover must not touch, and how often the heap grew: areas are few
    /// also where much is done.
    stay: u32,
    grown: u32,
}

fn map(at: usize, length: usize, flags: i32) -> usize {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    let kind = if flags & libc::MAP_SHARED == 0 { libc::MAP_PRIVATE } else { 0 };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = flags | fixed | kind | libc::MAP_ANONYMOUS;
    // SAFETY: new mappings, or such on top of areas that only `Things` knows.
    let at = unsafe { libc::mmap(at as *mut _, length, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at as usize
}

impl Things {
    fn new() -> Self {
        let hot = map(0, HOT * PAGE, 0) as *mut u8;
        Self { areas: Vec::new(), hot, brk: 0, children: Vec::new(), is_child: false, stay: 0, grown: 0 }
    }

    fn touch_huge(&mut self) {
        if self.brk == 0 {
            self.brk = 1;
            map(HUGE_AT, HUGE_LEN, libc::MAP_NORESERVE);
        }
        for at in [0, HUGE_LEN / 2 + 5 * PAGE, HUGE_LEN - PAGE] {
            // SAFETY: inside the mapping made above.
            unsafe { *((HUGE_AT + at) as *mut u8) += 1 };
        }
    }

    /// An area, and a part of it.
    fn some(&self, random: &mut Random) -> Option<(usize, usize, usize)> {
        if self.areas.is_empty() {
            return None;
        }
        let at = random.below(self.areas.len() as u64) as usize;
        let (start, length) = self.areas[at];
        let pages = (length / PAGE) as u64;
        let first = random.below(pages) as usize;
        let count = 1 + random.below((pages - first as u64).min(40)) as usize;
        Some((at, start + first * PAGE, count * PAGE))
    }

    fn write(&self, start: usize, length: usize, random: &mut Random) {
        // Guard pages and pages without rights are passed over: writing through the file obeys
        // neither, and fails for the former.
        let mut bytes = [0_u8; 64];
        for page in (start..start + length).step_by(PAGE) {
            if random.below(3) == 0 {
                continue;
            }
            bytes.iter_mut().for_each(|byte| *byte = random.next() as u8);
            let at = page + random.below(60) as usize * 64;
            let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 64 };
            let remote = libc::iovec { iov_base: at as *mut _, iov_len: 64 };
            // SAFETY: the kernel writes to pages of ours, or refuses.
            unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        }
    }

    /// Writes as the program itself does.
    fn store(&self, start: usize, length: usize, random: &mut Random) {
        for page in (start..start + length).step_by(PAGE) {
            // SAFETY: callers give writable pages.
            unsafe { ((page + random.below(500) as usize * 8) as *mut u64).write_volatile(random.next()) };
        }
    }

    #[expect(clippy::too_many_lines, reason = "one list of what can happen")]
    fn something(&mut self, random: &mut Random) {
        if self.areas.len() > 40 {
            let at = random.below(self.areas.len() as u64) as usize;
            let (start, length) = self.areas.swap_remove(at);
            // SAFETY: an area of ours that nothing refers to.
            unsafe { libc::munmap(start as *mut _, length) };
        }
        let what = random.below(24);
        match what {
            0 | 1 => {
                let length = (1 + random.below(64) as usize) * PAGE;
                let start = map(0, length, 0);
                self.store(start, length / 2 / PAGE * PAGE, random);
                self.areas.push((start, length));
                return;
            }
            // Transparent huge pages.
            2 => {
                let start = map(0, 6 << 20, 0);
                // SAFETY: a mapping of ours.
                unsafe { libc::madvise(start as *mut _, 6 << 20, libc::MADV_HUGEPAGE) };
                self.store(start + (1 << 20), (random.below(1024) as usize + 1) * PAGE, random);
                self.areas.push((start, 6 << 20));
                return;
            }
            3 => {
                // SAFETY: the end of the heap is only taken back where it is still this function's.
                unsafe {
                    let now = libc::sbrk(0) as usize;
                    if self.brk > 1 && now == self.brk {
                        libc::sbrk(-(4 * PAGE as isize));
                        self.brk = 0;
                        self.grown -= 1;
                    } else if self.grown < 64 {
                        self.grown += 1;
                        let start = libc::sbrk(8 * PAGE as isize) as usize;
                        self.store(start + PAGE, 6 * PAGE, random);
                        self.brk = libc::sbrk(0) as usize;
                    }
                }
                return;
            }
            4 => return self.not_lazy(random),
            5 => return self.fork(random),
            6 => {
                let page = random.below(HOT as u64 - 10) as usize * PAGE;
                return self.store(self.hot as usize + page, 10 * PAGE, random);
            }
            _ => {}
        }
        let Some((index, start, length)) = self.some(random) else { return };
        let at = start as *mut libc::c_void;
        // SAFETY: areas of ours that nothing refers to; what the kernel refuses does not happen.
        unsafe {
            match what {
                7 => {
                    libc::munmap(at, length);
                    if random.below(2) == 0 {
                        map(start, length, 0);
                    } else {
                        let (first, whole) = self.areas.swap_remove(index);
                        let parts =
                            [(first, start - first), (start + length, first + whole - start - length)];
                        self.areas.extend(parts.into_iter().filter(|(_, length)| *length > 0));
                    }
                }
                8 | 9 => {
                    libc::madvise(at, length, libc::MADV_DONTNEED);
                }
                10 => {
                    libc::mprotect(at, length, libc::PROT_NONE);
                }
                11 => {
                    libc::mprotect(at, length, libc::PROT_READ | libc::PROT_EXEC);
                }
                12 | 13 => {
                    libc::mprotect(at, length, libc::PROT_READ | libc::PROT_WRITE);
                }
                14 => {
                    libc::madvise(at, length, MADV_GUARD_INSTALL);
                }
                15 => {
                    libc::madvise(at, length, MADV_GUARD_REMOVE);
                }
                16 => {
                    libc::mlock(at, length);
                }
                17 => {
                    libc::munlock(at, length);
                }
                18 => {
                    let (start, length) = self.areas[index];
                    let longer = length + 8 * PAGE;
                    let moved = libc::mremap(start as *mut _, length, longer, libc::MREMAP_MAYMOVE);
                    if moved != libc::MAP_FAILED {
                        self.areas[index] = (moved as usize, longer);
                    }
                }
                19 => {
                    // Onto a part of another area.
                    let Some((_, to, _)) = self.some(random) else { return };
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    if to != start && libc::mremap(at, PAGE, PAGE, flags, to) != libc::MAP_FAILED {
                        map(start, PAGE, 0);
                    }
                }
                20 => {
                    libc::madvise(at, length, libc::MADV_FREE);
                }
                _ => self.write(start, length, random),
            }
        }
    }

    /// Memory that the page mover must not touch: files and what is shared.
    fn not_lazy(&mut self, random: &mut Random) {
        let shared = map(0, 4 * PAGE, libc::MAP_SHARED);
        self.store(shared, 4 * PAGE, random);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a private mapping of this program's file, which no reference points to.
        unsafe {
            let file = libc::open(c"/proc/self/exe".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let start = libc::mmap(null_mut(), 4 * PAGE, protection, libc::MAP_PRIVATE, file, 0);
            libc::close(file);
            self.store(start as usize, 4 * PAGE, random);
            libc::munmap(start, 4 * PAGE);
            libc::munmap(shared as *mut _, 4 * PAGE);
            if self.stay < 32 && random.below(4) == 0 {
                self.stay += 1;
                let file = libc::open(c"/proc/self/exe".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
                let start = libc::mmap(null_mut(), 4 * PAGE, protection, libc::MAP_PRIVATE, file, 0);
                libc::close(file);
                self.store(start as usize, 4 * PAGE, random);
                let shared = map(0, 4 * PAGE, libc::MAP_SHARED);
                self.store(shared, 4 * PAGE, random);
            }
        }
    }

    /// A child that goes its own way for a while, and then goes on, ends, or becomes another program.
    fn fork(&mut self, random: &mut Random) {
        // SAFETY: as for all children here; this one also allocates, which this C library allows.
        unsafe {
            self.children.retain(|&pid| libc::waitpid(pid, null_mut(), libc::WNOHANG) == 0);
            if self.is_child || self.children.len() + 1 >= FAMILY {
                return;
            }
            let seed = random.next();
            let pid = libc::fork();
            if pid > 0 {
                self.children.push(pid);
                return;
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            self.is_child = true;
            let mut random = Random(seed);
            for _ in 0..random.below(2000) {
                self.something(&mut random);
            }
            match random.below(4) {
                0 => libc::_exit(0),
                1 => {
                    let arguments = [c"sleep".as_ptr(), c"1000".as_ptr(), std::ptr::null()];
                    libc::execv(c"/bin/sleep".as_ptr(), arguments.as_ptr());
                    libc::_exit(1);
                }
                2 => loop {
                    libc::pause();
                },
                _ => loop {
                    self.something(&mut random);
                },
            }
        }
    }
}
