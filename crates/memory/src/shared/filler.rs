//! A process to which shared memory is charged that comes from another node.
//!
//! The kernel charges a page of shared memory to the memory cgroup of the process that touches it first. If another
//! process writes it there by process_vm_writev(2), that is the process whose memory is written. So a filler maps the
//! memory in the cgroup of a service that is to come, and the pages are written into it:
//!
//! ```text
//! daemon ──process_vm_writev──▶ filler's mapping of the memory ══▶ charged to the service's cgroup
//!        ◀──address── stdout     │
//!        ───────────▶ stdin ─────┘ "path size": map it; "- address size": unmap it; its end: end
//! ```
//!
//! The charge stays when the filler has ended, as it does with the daemon.

use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

use super::Replica;

/// What makes `godwit-pager` a filler.
pub const WORD: &str = "fill";

/// A filler that runs; dropping it ends it.
#[derive(Debug)]
pub struct Filler {
    pid: Pid,
    /// It answers one line to each.
    asking: Mutex<Asking>,
}

#[derive(Debug)]
struct Asking {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Memory that a filler maps; it is unmapped when this is dropped.
#[derive(Debug)]
pub(super) struct Filling {
    filler: Arc<Filler>,
    address: usize,
    size: u64,
}

impl Filler {
    /// Starts one in the cgroup of the caller, from the program `godwit-pager`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path) -> io::Result<Arc<Self>> {
        let mut command = Command::new(program);
        command.arg(WORD).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let missing = || io::Error::other("the filler has no standard streams");
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = BufReader::new(child.stdout.take().ok_or_else(missing)?);
        Ok(Arc::new(Self { pid, asking: Mutex::new(Asking { child, input, output }) }))
    }

    /// Its PID, which is its own as long as this is not dropped.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// Maps what is on its way.
    pub(super) fn map(self: &Arc<Self>, replica: &Replica) -> io::Result<Filling> {
        let size = replica.size();
        let answer = self.ask(&format!("{} {size}", replica.path()))?;
        let address = usize::from_str_radix(&answer, 16).map_err(|_| io::Error::other(answer))?;
        Ok(Filling { filler: Arc::clone(self), address, size })
    }

    /// Ends it. What it was charged with stays charged.
    pub fn end(&self) {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        // It may have ended by itself; nothing of it is left behind in any case.
        let _ = asking.child.kill();
        let _ = asking.child.wait();
    }

    fn ask(&self, what: &str) -> io::Result<String> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(asking.input, "{what}")?;
        let mut answer = String::new();
        match asking.output.read_line(&mut answer)? {
            0 => Err(io::Error::other("the process that shared memory is charged to has ended")),
            _ => Ok(answer.trim_end().to_owned()),
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.end();
    }
}

impl Filling {
    pub(super) fn filler(&self) -> Arc<Filler> {
        Arc::clone(&self.filler)
    }

    /// Writes into the memory from this offset on; it is within it.
    pub(super) fn write(&self, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        let mut at = self.address + usize::try_from(offset).map_err(io::Error::other)?;
        while !bytes.is_empty() {
            let there = [RemoteIoVec { base: at, len: bytes.len() }];
            let written = process_vm_writev(self.filler.pid, &[IoSlice::new(bytes)], &there).map_err(|errno| {
                io::Error::other(format!(
                    "writing {} bytes for which the service's cgroup has to have memory fails: {}; it may be that its limit (--memory) is too low",
                    bytes.len(),
                    errno.desc()
                ))
            })?;
            at += written;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        // A filler that has ended maps nothing.
        let _ = self.filler.ask(&format!("- {:x} {}", self.address, self.size));
    }
}

/// Is a filler, until its input ends.
///
/// # Errors
/// Its input cannot be read, or nobody takes its answers.
pub fn run(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    for line in input.lines() {
        let answer = match obey(&line?) {
            Ok(address) => format!("{address:x}"),
            Err(error) => error.to_string(),
        };
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

fn obey(line: &str) -> io::Result<usize> {
    let unknown = || io::Error::other(format!("{line:?} is not what a filler does"));
    let mut words = line.split(' ');
    let first = words.next().ok_or_else(unknown)?;
    let mut number = |radix| {
        let word = words.next().ok_or_else(unknown)?;
        usize::from_str_radix(word, radix).map_err(|_| unknown())
    };
    if first == "-" {
        let address = number(16)?;
        let (length, start) = (length(number(10)?)?, NonNull::new(std::ptr::without_provenance_mut(address)));
        // SAFETY: the daemon names a mapping that was made here before, and nothing here refers to it.
        unsafe { munmap(start.ok_or_else(unknown)?, length.get()) }?;
        return Ok(address);
    }
    let length = length(number(10)?)?;
    let file = std::fs::File::options().read(true).write(true).open(first)?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &file, 0) }?;
    // SAFETY: the range is the mapping just made. Huge pages would take memory for pages that are holes.
    let _ = unsafe { madvise(start, length.get(), MmapAdvise::MADV_NOHUGEPAGE) };
    Ok(start.addr().get())
}

fn length(size: usize) -> io::Result<NonZeroUsize> {
    let whole = size.checked_next_multiple_of(4096).and_then(NonZeroUsize::new);
    whole.ok_or_else(|| io::Error::other("no such size"))
}
