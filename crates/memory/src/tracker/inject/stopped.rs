//! All threads of a process, stopped.

use std::convert::Infallible;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::tracee::Tracee;
use super::{InjectError, refused, step};
use crate::process::Process;

/// How long a thread may take to stop that waits for a disk or a vfork child; the next round tries again.
const STOP_LIMIT: Duration = Duration::from_millis(250);

/// The same for one that waits only for a processor. The others would soon have to stand still again if this
/// were given up, and on a machine that is so busy they hardly run anyway.
const PROCESSOR_LIMIT: Duration = Duration::from_secs(5);

/// How often to look whether a thread has stopped. The event for it is SIGCHLD, which belongs to the
/// whole agent, and waitpid(2) has no time limit.
const STOP_LOOK: Duration = Duration::from_micros(50);

/// How often to look whether a thread waits for its tracer, see [`Tracing::let_execute`].
const EXECUTE_LOOK: Duration = Duration::from_millis(10);

/// What a tracer has done so far.
pub(super) struct Tracing<'a> {
    pub(super) process: &'a Process,
    /// What it traces.
    tasks: Mutex<Vec<i32>>,
}

/// Runs this in a thread that may trace threads of the process.
pub(super) fn in_tracer<T: Send>(
    process: &Process,
    run: impl FnOnce(&Tracing<'_>) -> Result<T, InjectError> + Send,
) -> Result<T, InjectError> {
    let tracing = Tracing { process, tasks: Mutex::default() };
    std::thread::scope(|scope| {
        let (running, ended) = channel::<Infallible>();
        let tracing = &tracing;
        let tracer = scope.spawn(move || {
            let _running = running;
            run(tracing)
        });
        while ended.recv_timeout(EXECUTE_LOOK) == Err(RecvTimeoutError::Timeout) {
            tracing.let_execute();
        }
        tracer.join().unwrap_or_else(|_| Err(refused("the tracer panicked")))
    })
}

impl Tracing<'_> {
    /// Begins to trace a thread and tells it to stop.
    pub(super) fn seize(&self, task: i32) -> Result<Tracee, InjectError> {
        let tracee = Tracee::seize(self.process, task)?;
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        // The PID of a thread may have gone to another between choosing and seizing it.
        if self.process.text(&format!("task/{task}/stat")).is_err() {
            return Err(InjectError::Gone);
        }
        tracee.interrupt().map_err(step("interrupt it"))?;
        Ok(tracee)
    }

    /// A thread that executes a program ends all others and waits until their tracer has taken note of
    /// that; and its tracer, when it begins to trace that thread, waits until the program is executed. So
    /// somebody else takes note. The first thread is not waited for, and its parent is to know how it ended.
    fn let_execute(&self) {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let others = tasks.iter().filter(|&&task| task != self.process.pid());
        others.for_each(|&task| self.take_note_of_end(task));
    }

    /// Stops are told as well, whatever is asked for, and those are the tracer's to hear of: so it is asked
    /// first whether the thread has ended.
    pub(super) fn take_note_of_end(&self, task: i32) {
        let ended = |flags: i32| {
            // SAFETY: the kernel writes to a variable of ours, of plain numbers. That there is nothing to
            // take note of is no error.
            unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let options = libc::WEXITED | libc::WNOHANG | libc::__WALL | flags;
                libc::waitid(libc::P_PID, task.unsigned_abs(), &raw mut info, options);
                [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED].contains(&info.si_code)
            }
        };
        // Its number may be another's by now.
        if self.process.text(&format!("task/{task}/stat")).is_ok() && ended(libc::WNOWAIT) {
            ended(0);
        }
    }
}

/// The threads of a process, none of which runs. They go on when this is dropped.
pub(super) struct Stopped {
    tracees: Vec<Tracee>,
}

impl Stopped {
    /// Stops all threads. Those that may not be able to stop come first, while the others still run.
    pub(super) fn all(tracing: &Tracing<'_>) -> Result<Self, InjectError> {
        let process = tracing.process;
        let mut stopped = Self { tracees: Vec::new() };
        loop {
            let tasks = process.tasks()?.into_iter().filter(|&task| stopped.find(task).is_none());
            let mut tasks: Vec<(i32, char)> =
                tasks.filter_map(|task| Some((task, process.state_of(task)?))).collect();
            if tasks.is_empty() {
                return Ok(stopped);
            }
            if tasks.iter().any(|&(_, state)| state == 'D') {
                tasks.retain(|&(_, state)| state == 'D');
            }
            let mut coming = Vec::new();
            let mut failed = Ok(());
            for (task, _) in tasks {
                match tracing.seize(task) {
                    Ok(tracee) => coming.push(tracee),
                    // It ended, which the next look at the list shows.
                    Err(InjectError::Gone) => process.check_alive()?,
                    Err(error) => {
                        failed = Err(error);
                        break;
                    }
                }
            }
            stopped.wait_for(process, coming)?;
            failed?;
        }
    }

    /// Waits until these threads have stopped. Many need a processor for that, so only one of them is looked
    /// at all the time.
    fn wait_for(&mut self, process: &Process, mut coming: Vec<Tracee>) -> Result<(), InjectError> {
        let is_over =
            |took, task| took > PROCESSOR_LIMIT || (took > STOP_LIMIT && process.state_of(task) == Some('D'));
        let mut begun = Instant::now();
        while let Some(tracee) = coming.pop() {
            match tracee.has_stopped() {
                Ok(true) => {
                    self.tracees.push(tracee);
                    begun = Instant::now();
                }
                Ok(false) if is_over(begun.elapsed(), tracee.task) => {
                    return Err(refused(format!("its thread {} does not stop", tracee.task)));
                }
                Ok(false) => {
                    coming.push(tracee);
                    if begun.elapsed() < STOP_LOOK {
                        std::thread::yield_now();
                    } else {
                        std::thread::sleep(STOP_LOOK);
                    }
                }
                Err(InjectError::Gone) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The thread with this ID.
    pub(super) fn find(&self, task: i32) -> Option<&Tracee> {
        self.tracees.iter().find(|tracee| tracee.task == task)
    }

    /// Lets all of them go on.
    pub(super) fn release(mut self) -> Result<(), InjectError> {
        self.go_on().map_err(step("let it go on"))
    }

    fn go_on(&mut self) -> Result<(), Errno> {
        let mut result = Ok(());
        for tracee in self.tracees.drain(..) {
            match tracee.go_on() {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => result = Err(errno),
            }
        }
        result
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // After another error. Those that this does not let go the end of the tracer does.
        let _ = self.go_on();
    }
}
