//! Gives a process at rest what one has whose memory was restored under the same executable: text and private data as
//! in the file, empty native stacks, threads at the resume entry. Done by a debugger's means, where a restore would do it
//! by images.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_crossing::{Contents, Executable, Fate, Start, starts};
use godwit_isa_plan::PAGE;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options, regset};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Changes the memory and the registers of a process at rest, and lets its threads run.
///
/// # Errors
/// When the process is not at rest, or the kernel does not let it be changed.
pub fn restart(process: i32) -> Result<()> {
    let (file, rest) = super::resting(process)?;
    let executable = Executable::decode(&file)?;
    let mut threads = Vec::new();
    for thread in super::threads(process).into_iter().map(Pid::from_raw) {
        // One that had ended before the rest may still have a name.
        if stop(thread)? {
            threads.push(thread);
        }
    }
    ensure!(
        threads.len() == rest.threads as usize,
        "process {process} has {} threads: {rest:?}",
        threads.len()
    );
    let pointers =
        threads.iter().map(|thread| Ok(ptrace::getregs(*thread)?.fs_base)).collect::<Result<Vec<u64>>>()?;
    let starts = starts(&pointers)?;
    replace_memory(process, &executable, &file)?;
    for (thread, start) in threads.iter().zip(starts) {
        set_registers(*thread, &start)?;
    }
    threads.into_iter().try_for_each(|thread| let_go(thread, process))
}

/// Lets a thread run; or takes note of its end, if one that ran before has ended the process. The process itself is left
/// to whoever has started it.
fn let_go(thread: Pid, process: i32) -> Result<()> {
    match ptrace::detach(thread, None) {
        Err(Errno::ESRCH) if thread.as_raw() != process => {
            waitpid(thread, Some(WaitPidFlag::__WALL)).map(drop)?
        }
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Stops a thread; or says that it has ended.
fn stop(thread: Pid) -> Result<bool> {
    let stopped = ptrace::seize(thread, Options::empty())
        .and_then(|()| ptrace::interrupt(thread))
        .and_then(|()| waitpid(thread, Some(WaitPidFlag::__WALL)));
    match stopped {
        Ok(WaitStatus::PtraceEvent(..)) => Ok(true),
        _ if super::has_ended(thread.as_raw()) => Ok(false),
        other => bail!("thread {thread} does not stop: {other:?}"),
    }
}

/// As CRIU gives them to a thread whose images say the same.
fn set_registers(thread: Pid, start: &Start) -> Result<()> {
    let segments = ptrace::getregs(thread)?;
    // SAFETY: both are integers only, of which zero is a value.
    let (mut general, mut float): (libc::user_regs_struct, libc::user_fpregs_struct) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    general.rip = start.program_counter;
    general.rsp = start.stack_pointer;
    general.fs_base = start.thread_pointer;
    (general.cs, general.ss, general.eflags) = (segments.cs, segments.ss, 0x202);
    // No kernel call is to be issued again.
    general.orig_rax = u64::MAX;
    (float.cwd, float.mxcsr) = (0x37f, 0x1f80);
    ptrace::setregset::<regset::NT_PRFPREG>(thread, float)?;
    ptrace::setregs(thread, general)?;
    Ok(())
}

fn replace_memory(process: i32, executable: &Executable, file: &[u8]) -> Result<()> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let present = File::open(format!("/proc/{process}/pagemap"))?;
    for pages in areas(process)? {
        for page in pages.step_by(usize::try_from(PAGE)?) {
            let new = match Fate::of(page, executable) {
                Fate::Replaced => match executable.contents(page, file) {
                    Contents::Bytes(bytes) => bytes,
                    Contents::Unmapped => continue,
                },
                Fate::Emptied => &[],
                Fate::Stays | Fate::Outside => continue,
            };
            // What the process has never touched is as in the file already, and a stack's is zero.
            if !is_present(&present, page)? {
                continue;
            }
            let mut whole = vec![0; usize::try_from(PAGE)?];
            whole[..new.len()].copy_from_slice(new);
            let mut old = whole.clone();
            memory.read_exact_at(&mut old, page).with_context(|| format!("at {page:#x}"))?;
            if old != whole {
                memory.write_all_at(&whole, page).with_context(|| format!("at {page:#x}"))?;
            }
        }
    }
    Ok(())
}

/// Where a process has memory.
fn areas(process: i32) -> Result<Vec<Range<u64>>> {
    let text = fs::read_to_string(format!("/proc/{process}/maps"))?;
    let area = |line: &str| {
        let (begin, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    text.lines().map(|line| area(line).with_context(|| format!("not a line of maps: {line}"))).collect()
}

/// In memory or in swap.
fn is_present(pagemap: &File, page: u64) -> Result<bool> {
    const PRESENT_OR_SWAPPED: u64 = 3 << 62;
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, page / PAGE * 8)?;
    Ok(u64::from_ne_bytes(entry) & PRESENT_OR_SWAPPED != 0)
}
