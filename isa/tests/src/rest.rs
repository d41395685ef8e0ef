//! Rest from outside (`isa/ABI.md`, section 7), as a daemon asks for it: whole trees of processes come to rest, and go on
//! in place, or from the resume entry as processes do whose memory has been restored.

mod restart;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use godwit_crossing::{Record, RecordError, Request, Rest};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

pub use restart::restart;

/// Far more than a thread takes to its next poll on any machine: after that it never will.
const LONGEST: Duration = Duration::from_secs(60);
/// After so long a process is asked again.
const AGAIN: Duration = Duration::from_millis(100);
/// Between two looks. The kernel tells nobody that a process has come to rest.
const LOOK: Duration = Duration::from_micros(200);

/// A process and its descendants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Its first process.
    pub root: i32,
    /// The signal that asks it: [`Request::SIGNAL`], or what an emulator makes that of.
    pub signal: i32,
}

impl Tree {
    /// That of a process on this machine's own processor.
    #[must_use]
    pub fn of(root: i32) -> Self {
        Self { root, signal: Request::SIGNAL }
    }

    /// Brings all processes to rest; those that have ended, or end meanwhile, are left out. Gives what each says.
    ///
    /// # Errors
    /// When one does not come to rest, or is none that could.
    pub fn rest(&self) -> Result<Vec<(i32, Rest)>> {
        let begun = Instant::now();
        let mut asked: BTreeMap<i32, Instant> = BTreeMap::new();
        loop {
            let processes = self.processes();
            let mut resting = Vec::new();
            for &process in &processes {
                let Some(record) = record(process)? else { continue };
                match record.rest {
                    Some(rest) if rest.number > record.over => resting.push((process, rest)),
                    // One whose threads have ended in an exec may have forgotten; and once more does no harm.
                    None if record.ready && asked.get(&process).is_none_or(|time| time.elapsed() > AGAIN) => {
                        asked.insert(process, Instant::now());
                        let number = record.next().context("the process has no number left for a rest")?;
                        ask(process, self.signal, Request::Rest(number))?;
                    }
                    _ => {}
                }
            }
            // None of those at rest can fork.
            if resting.len() == processes.len() && self.processes() == processes {
                return Ok(resting);
            }
            let left =
                processes.iter().find(|process| !resting.iter().any(|(resting, _)| resting == *process));
            ensure!(begun.elapsed() < LONGEST, "process {left:?} does not come to rest: {}", waits(left));
            thread::sleep(LOOK);
        }
    }

    /// Lets all processes go on in place, and waits until they have heard it: before, a record tells of the old rest.
    ///
    /// # Errors
    /// When one does not.
    pub fn go_on(&self) -> Result<()> {
        let begun = Instant::now();
        let processes = self.processes();
        for &process in &processes {
            let Some(Record { rest: Some(rest), .. }) = record(process)? else { continue };
            ask(process, self.signal, Request::GoOn(u32::try_from(rest.number)?))?;
        }
        for process in processes {
            while record(process)?.is_some_and(|record| record.rest.is_some()) {
                ensure!(
                    begun.elapsed() < LONGEST,
                    "process {process} stays at rest: {}",
                    waits(Some(&process))
                );
                thread::sleep(LOOK);
            }
        }
        Ok(())
    }

    /// Has all processes go on as if their memory had been restored under the same executable.
    ///
    /// # Errors
    /// When one is not at rest, or the kernel does not let it be changed.
    pub fn restart(&self) -> Result<()> {
        self.processes().into_iter().try_for_each(restart)
    }

    /// Ends all processes, wherever they are. The first is left for whoever has started it to wait for.
    pub fn kill(&self) {
        for process in self.processes() {
            // One that has ended meanwhile needs none.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }

    /// The processes that have not ended, oldest first.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        let mut found = vec![self.root];
        let mut next = 0;
        while let Some(process) = found.get(next).copied() {
            found.extend(children(process));
            next += 1;
        }
        found.retain(|process| !has_ended(*process));
        found
    }
}

/// Queues the request's signal; one that has ended needs none.
///
/// # Errors
/// When the kernel refuses it.
pub fn ask(process: i32, signal: i32, request: Request) -> Result<()> {
    let result = queue(process, signal, request);
    let error = io::Error::last_os_error();
    let is_gone = error.raw_os_error() == Some(libc::ESRCH);
    ensure!(result == 0 || is_gone, "cannot ask process {process}: {error}");
    Ok(())
}

/// Has a command ask for its first rest before it executes its program, which hears it as soon as it listens.
pub fn asked_at_begin(command: &mut Command) -> &mut Command {
    let ask = || {
        // Until the program takes it down: before, it would end the process.
        // SAFETY: the set is an integer array only, and is filled before it is read.
        let blocked = unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, Request::SIGNAL);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
        };
        // SAFETY: the call takes nothing.
        let own = unsafe { libc::getpid() };
        if blocked == 0 && queue(own, Request::SIGNAL, Request::Rest(1)) == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    };
    // SAFETY: between fork and exec the closure makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(ask) }
}

fn queue(process: i32, signal: i32, request: Request) -> libc::c_long {
    let mut information = [0_u8; 128];
    let mut put = |at: usize, word: [u8; 4]| information[at..at + 4].copy_from_slice(&word);
    put(0, signal.to_ne_bytes());
    put(8, Request::CODE.to_ne_bytes());
    put(24, request.value().to_ne_bytes());
    // SAFETY: the kernel reads a siginfo_t, 128 bytes, which are there, and writes nothing.
    unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, process, signal, information.as_ptr()) }
}

/// Sends the signal as kill(2) does, which the kernel never refuses for a queue that is full: *go on*, without a number.
///
/// # Errors
/// When the kernel refuses it.
pub fn ask_plainly(process: i32, signal: i32) -> Result<()> {
    // SAFETY: the call takes numbers only.
    let result = unsafe { libc::kill(process, signal) };
    let error = io::Error::last_os_error();
    ensure!(result == 0, "cannot ask process {process}: {error}");
    Ok(())
}

/// Stops a child of this process as SIGSTOP does, and waits until it has stopped.
///
/// # Errors
/// When it has ended, or is not a child.
pub fn halt(process: i32) -> Result<()> {
    kill(Pid::from_raw(process), Signal::SIGSTOP)?;
    match waitpid(Pid::from_raw(process), Some(WaitPidFlag::WUNTRACED))? {
        WaitStatus::Stopped(..) => Ok(()),
        other => bail!("process {process} does not stop: {other:?}"),
    }
}

/// Lets it run again.
///
/// # Errors
/// When it has ended.
pub fn proceed(process: i32) -> Result<()> {
    Ok(kill(Pid::from_raw(process), Signal::SIGCONT)?)
}

/// Whether all threads of a process stand still, be its rest over or not: one that is to go on may not have noticed yet.
///
/// # Errors
/// When it has ended.
pub fn stands(process: i32) -> Result<bool> {
    const RESTING: u64 = 48;
    let mut word = [0; 4];
    File::open(format!("/proc/{process}/mem"))?
        .read_exact_at(&mut word, godwit_isa_plan::RECORD + RESTING)?;
    Ok(u32::from_le_bytes(word) != 0)
}

/// Whether a signal waits that was sent to the process. Those that the runtime has sent to a thread, to have it stop, may wait
/// as long as that stands still.
///
/// # Errors
/// When it has ended.
pub fn is_pending(process: i32, signal: i32) -> Result<bool> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = u64::from_str_radix(pending.context("the kernel tells no pending signals")?.trim(), 16)?;
    Ok(pending >> (signal - 1) & 1 == 1)
}

/// Sets how many signals its user may have in queues as the kernel judges a signal to this process, and gives what it
/// was.
///
/// # Errors
/// When the process has ended, or is another user's.
pub fn limit_queue(process: i32, signals: u64) -> Result<u64> {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel reads nothing and writes the limits to where there is room for them.
    let read = unsafe { libc::prlimit(process, libc::RLIMIT_SIGPENDING, std::ptr::null(), &raw mut old) };
    ensure!(read == 0, "no limit of process {process}: {}", io::Error::last_os_error());
    let new = libc::rlimit { rlim_cur: signals, ..old };
    // SAFETY: the kernel reads the limits, which are there, and writes nothing.
    let set =
        unsafe { libc::prlimit(process, libc::RLIMIT_SIGPENDING, &raw const new, std::ptr::null_mut()) };
    ensure!(set == 0, "cannot limit process {process}: {}", io::Error::last_os_error());
    Ok(old.rlim_cur)
}

/// What a process says about rest; nothing when it has ended.
///
/// # Errors
/// When it was not built by `godwit-cc`.
pub fn record(process: i32) -> Result<Option<Record>> {
    let mut bytes = [0; Record::BYTES];
    let memory = format!("/proc/{process}/mem");
    let read = File::open(&memory).and_then(|file| file.read_exact_at(&mut bytes, godwit_isa_plan::RECORD));
    if let Err(error) = read {
        // Not an error of its own: in the middle of an exec there is nothing.
        let is_gone = has_ended(process)
            || matches!(error.kind(), ErrorKind::NotFound | ErrorKind::UnexpectedEof)
            || matches!(error.raw_os_error(), Some(libc::EIO | libc::ESRCH));
        ensure!(is_gone, "cannot read {memory}: {error}");
        return Ok(None);
    }
    match Record::decode(&bytes) {
        Ok(record) => Ok(Some(record)),
        Err(RecordError::Foreign) => {
            bail!("process {process} ({:?}) is not godwit-cc's", executable(process))
        }
        Err(error) => Err(error.into()),
    }
}

/// The file that a process runs by.
fn executable(process: i32) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/{process}/exe"))
}

fn children(process: i32) -> Vec<i32> {
    threads(process)
        .into_iter()
        .filter_map(|thread| fs::read_to_string(format!("/proc/{process}/task/{thread}/children")).ok())
        .flat_map(|text| text.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn threads(process: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether a process or a thread is a zombie, or not there.
fn has_ended(number: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
    // The name before may hold any characters.
    let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

/// Where the threads of a process are, for a report.
fn waits(process: Option<&i32>) -> String {
    let Some(&process) = process else { return "none is left".to_owned() };
    let of_thread = |thread: i32| {
        let place = format!("/proc/{process}/task/{thread}");
        let read = |name: &str| fs::read_to_string(format!("{place}/{name}")).unwrap_or_default();
        format!("{thread}: {} ({})", read("syscall").trim(), read("wchan").trim())
    };
    threads(process).into_iter().map(of_thread).collect::<Vec<_>>().join("; ")
}

/// The executable of a process at rest, and its rest.
fn resting(process: i32) -> Result<(Vec<u8>, Rest)> {
    let record = record(process)?.with_context(|| format!("process {process} has ended"))?;
    let rest = record.rest.with_context(|| format!("process {process} is not at rest"))?;
    Ok((fs::read(format!("/proc/{process}/exe"))?, rest))
}
