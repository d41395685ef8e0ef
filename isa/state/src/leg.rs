//! One process of a program: started, handed the signals that godwit-state gets, and waited for until it ends or
//! leaves a state.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result};
use godwit_isa_state::{EXIT_CAPTURED, StateFile};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal as listen};
use tokio::sync::mpsc;

use crate::machine::Startable;
use crate::messages;

/// When to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Polls(u64),
    Time(Duration),
    Signal(Signal),
}

/// A process to be.
#[derive(Debug)]
pub(crate) struct Leg<'a> {
    pub(crate) executable: &'a Startable,
    /// For a program that starts; one that goes on has those that it started with.
    pub(crate) arguments: &'a [OsString],
    /// Where it goes on from.
    pub(crate) resume: Option<&'a Path>,
    /// When to capture, and where to.
    pub(crate) capture: Option<(Request, &'a Path)>,
    /// What the process becomes when it was captured, instead of ending.
    pub(crate) next: Option<&'a Path>,
    /// A file for what the runtime says when the program cannot go on. Without one it goes to standard error.
    pub(crate) messages: Option<&'a Path>,
}

/// The variables that ask the runtime for a capture.
pub(crate) fn capture_variables(request: Request, state: &Path) -> [(&'static str, OsString); 2] {
    let (name, value) = match request {
        Request::Polls(polls) => ("GODWIT_STATE_POLLS", polls.to_string()),
        // 0 would mean never.
        Request::Time(time) => ("GODWIT_STATE_TIMER", time.as_micros().max(1).to_string()),
        Request::Signal(signal) => ("GODWIT_STATE_SIGNAL", (signal as i32).to_string()),
    };
    [("GODWIT_STATE_SAVE", state.as_os_str().to_owned()), (name, value.into())]
}

/// How a leg ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// It left this state, which was read back and fits the executable.
    Captured(StateFile),
    /// By itself.
    Exited(i32),
    /// By a signal.
    Killed(i32),
}

/// Handed on besides the one that a capture waits for: what people and supervisors send to a command.
const FORWARDED: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2];

impl Leg<'_> {
    /// Runs it.
    pub(crate) async fn run(&self) -> Result<Ending> {
        let ending = self.run_silently().await;
        if let Some(file) = self.messages {
            messages::repeat(file);
        }
        ending
    }

    async fn run_silently(&self) -> Result<Ending> {
        let path = self.executable.program.path().display();
        let mut command = self.executable.command().with_context(|| format!("cannot find {path}"))?;
        command.args(self.arguments);
        if let Some(state) = self.resume {
            command.env("GODWIT_STATE_RESUME", state);
        }
        if let Some((request, state)) = self.capture {
            // The program may change its directory.
            let state = std::path::absolute(state).context("cannot tell the current directory")?;
            command.envs(capture_variables(request, &state));
        }
        if let Some(next) = self.next {
            command.env("GODWIT_STATE_NEXT", next);
        }
        if let Some(messages) = self.messages {
            command.env(messages::VARIABLE, messages);
        }
        let before = self.state_identity()?;
        // From here on no signal ends this process alone and leaves the program behind.
        let mut signals = self.listen().context("cannot listen for signals")?;
        let mut child = command.spawn().with_context(|| format!("cannot start {path}"))?;
        let status =
            wait(&mut child, &mut signals).await.with_context(|| format!("cannot wait for {path}"))?;
        self.ending(status, before)
    }

    fn ending(&self, status: ExitStatus, before: Option<(u64, u64)>) -> Result<Ending> {
        let Some(code) = status.code() else {
            return Ok(Ending::Killed(status.signal().unwrap_or_default()));
        };
        if self.next.is_some() {
            return Ok(Ending::Exited(code));
        }
        let after = self.state_identity()?;
        let Some((_, path)) =
            self.capture.filter(|_| code == EXIT_CAPTURED && after.is_some() && after != before)
        else {
            return Ok(Ending::Exited(code));
        };
        let unsound = "the program left a state that is not sound, which is a defect of godwit";
        let state = StateFile::open(path).context(unsound)?;
        self.executable.program.accepts(&state).context(unsound)?;
        Ok(Ending::Captured(state))
    }

    /// Which file stands where the state will be. The runtime renames a new one to there, so that a program which ends
    /// with the status of a capture by itself is told from one that was captured.
    fn state_identity(&self) -> Result<Option<(u64, u64)>> {
        let Some((_, path)) = self.capture else { return Ok(None) };
        match std::fs::metadata(path) {
            Ok(file) => Ok(Some((file.dev(), file.ino()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot examine {}", path.display())),
        }
    }

    fn listen(&self) -> io::Result<mpsc::UnboundedReceiver<Signal>> {
        let mut signals = FORWARDED.to_vec();
        if let Some((Request::Signal(signal), _)) = self.capture
            && !signals.contains(&signal)
        {
            signals.push(signal);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        // The terminal sends these to the program as well.
        let from_terminal = io::stdin().is_terminal();
        for signal in signals {
            let mut stream = listen(SignalKind::from_raw(signal as i32))?;
            let sender = sender.clone();
            let hand_on = !(from_terminal && matches!(signal, Signal::SIGINT | Signal::SIGQUIT));
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    if hand_on && sender.send(signal).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(receiver)
    }
}

async fn wait(child: &mut Child, signals: &mut mpsc::UnboundedReceiver<Signal>) -> io::Result<ExitStatus> {
    loop {
        tokio::select! {
            status = child.wait() => return status,
            Some(signal) = signals.recv() => {
                // As long as it has an identity it was not waited for, so the number is still its own.
                if let Some(id) = child.id().and_then(|id| i32::try_from(id).ok()) {
                    signal::kill(Pid::from_raw(id), signal)?;
                }
            }
        }
    }
}
