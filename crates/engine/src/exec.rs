//! Further commands in containers: how an engine's program for them is started, with pipes or on a terminal.
//!
//! ```text
//!   pipes      godwitd ◀──▶ 3 pipes ◀──▶ runc exec ──▶ the command, which has the pipes itself
//!   terminal   godwitd ◀──▶ [`Terminal`] ◀──▶ runc exec --tty ◀──▶ the container's terminal ◀──▶ the command
//! ```
//! The engines' programs pass a terminal on as they do for a user who types at one. When godwitd ends, or its user leaves,
//! they see theirs hang up; so does the command.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd, RawFd};
use std::process::Stdio;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::pty::{self, OpenptFlags};
use rustix::termios::{self, OptionalActions, Winsize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};

use crate::watch::watch;

/// The least number of a descriptor that a program inherits without being told by which number.
const HIGH: RawFd = 10;

/// A command to run in a container that runs.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    /// Command with arguments.
    pub command: Vec<String>,
    /// Further `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// The user that runs it; none: as the container.
    pub user: Option<String>,
    /// Absolute working directory inside; none: as the container.
    pub workdir: Option<String>,
    /// The size of its terminal; none: it has pipes.
    pub terminal: Option<TerminalSize>,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters of a line.
    pub columns: u16,
}

impl From<TerminalSize> for Winsize {
    fn from(TerminalSize { rows, columns }: TerminalSize) -> Self {
        Self { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// A command under way: its streams, and the process to wait for.
#[derive(Debug)]
pub struct ExecIo {
    /// Its standard input, output and error.
    pub streams: ExecStreams,
    /// The engine's process whose exit status is the command's.
    pub child: Child,
}

/// This end of a command's streams.
#[derive(Debug)]
pub enum ExecStreams {
    /// Three pipes.
    Pipes {
        /// Write end of its standard input.
        stdin: OwnedFd,
        /// Read end of its standard output.
        stdout: OwnedFd,
        /// Read end of its standard error.
        stderr: OwnedFd,
    },
    /// A terminal for all three.
    Terminal(Terminal),
}

/// The end of a terminal at which a user sits.
#[derive(Debug)]
pub struct Terminal {
    end: AsyncFd<OwnedFd>,
}

impl Terminal {
    /// A terminal of this size, and the end at which a program sits.
    fn open(size: TerminalSize) -> io::Result<(Self, OwnedFd)> {
        let user = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        pty::grantpt(&user)?;
        pty::unlockpt(&user)?;
        let name = pty::ptsname(&user, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let program = rustix::fs::open(&*name, flags, Mode::empty())?;
        termios::tcsetwinsize(&user, size.into())?;
        // It passes on all that is typed, as a terminal does whose user has started the engine's program: the terminal in the
        // container is the one that shows what is typed, and makes signals of keys.
        let mut raw = termios::tcgetattr(&program)?;
        raw.make_raw();
        termios::tcsetattr(&program, OptionalActions::Now, &raw)?;
        rustix::fs::fcntl_setfl(&user, rustix::fs::fcntl_getfl(&user)? | OFlags::NONBLOCK)?;
        let end = watch(user, Interest::READABLE | Interest::WRITABLE)?;
        Ok((Self { end }, program))
    }

    /// Reads what the program has written; 0 when no program has the terminal any more.
    ///
    /// # Errors
    /// Those of read(2).
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read =
            self.end.async_io(Interest::READABLE, |end| Ok(rustix::io::read(end, &mut *buffer)?)).await;
        match read {
            // What Linux answers at a terminal whose other end is closed.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => Ok(0),
            read => read,
        }
    }

    /// Types at the terminal.
    ///
    /// # Errors
    /// Those of write(2): no program has the terminal any more.
    pub async fn write_all(&self, mut typed: &[u8]) -> io::Result<()> {
        while !typed.is_empty() {
            let write = |end: &OwnedFd| Ok(rustix::io::write(end, typed)?);
            let written = self.end.async_io(Interest::WRITABLE, write).await?;
            typed = &typed[written..];
        }
        Ok(())
    }

    /// Gives it another size, which the program is told.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resize(&self, size: TerminalSize) -> io::Result<()> {
        Ok(termios::tcsetwinsize(self.end.get_ref(), size.into())?)
    }
}

/// Whoever has started godwitd may have these ignored, as nohup(1) and shells in the background do, which its children
/// would inherit.
fn heed_signals() -> io::Result<()> {
    for number in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default action is no handler of this program.
        if unsafe { libc::signal(number, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Has an engine's program inherit a file with this text, which has no name; where the program finds it. For what is not to be
/// among its arguments, which every user of the machine can read: an environment may hold secrets.
pub(crate) fn hand_over(program: &mut Command, text: &[u8]) -> io::Result<String> {
    let mut file = File::from(rustix::fs::memfd_create(c"command", MemfdFlags::CLOEXEC)?);
    file.write_all(text)?;
    let file = high(&file)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: between fork and exec one system call is made. The file is open for as long as there is the command.
    unsafe {
        program.pre_exec(move || Ok(rustix::io::fcntl_setfd(&file, FdFlags::empty())?));
    }
    Ok(path)
}

/// The same file by a number that no program asks for.
fn high(file: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, HIGH)?)
}

/// Has an engine's program inherit these, each by its number, which is below [`HIGH`].
pub(crate) fn inherit<const N: usize>(program: &mut Command, files: [(OwnedFd, RawFd); N]) -> io::Result<()> {
    for (file, number) in files {
        let file = high(&file)?;
        // SAFETY: between fork and exec one system call is made. The file is open for as long as there is the command.
        unsafe {
            program.pre_exec(move || match libc::dup2(file.as_raw_fd(), number) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
    }
    Ok(())
}

/// Starts an engine's program for a command, with the streams that were asked for.
pub(crate) fn start(mut program: Command, terminal: Option<TerminalSize>) -> io::Result<ExecIo> {
    // SAFETY: between fork and exec only system calls are made.
    unsafe { program.pre_exec(heed_signals) };
    let Some(size) = terminal else {
        let ((stdin_read, stdin), (stdout, stdout_write), (stderr, stderr_write)) =
            (io::pipe()?, io::pipe()?, io::pipe()?);
        let child = program.stdin(stdin_read).stdout(stdout_write).stderr(stderr_write).spawn()?;
        let streams =
            ExecStreams::Pipes { stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into() };
        return Ok(ExecIo { streams, child });
    };
    let (terminal, end) = Terminal::open(size)?;
    program
        .stdin(Stdio::from(end.try_clone()?))
        .stdout(Stdio::from(end.try_clone()?))
        .stderr(Stdio::from(end));
    // SAFETY: between fork and exec only system calls are made. Standard input is the terminal by then.
    unsafe {
        program.pre_exec(|| {
            rustix::process::setsid()?;
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
            Ok(())
        });
    }
    let child = program.spawn()?;
    // The program's end stays open in it alone: its end is the terminal's.
    drop(program);
    Ok(ExecIo { streams: ExecStreams::Terminal(terminal), child })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    async fn read_all(terminal: &Terminal) -> String {
        let (mut said, mut buffer) = (Vec::new(), [0; 64]);
        loop {
            match terminal.read(&mut buffer).await.unwrap() {
                0 => return String::from_utf8(said).unwrap(),
                read => said.extend_from_slice(&buffer[..read]),
            }
        }
    }

    #[tokio::test]
    async fn a_program_on_a_terminal_has_it_for_all_its_streams_and_is_told_of_its_size() {
        let mut shell = Command::new("sh");
        let script = "stty sane; test -t 0 && test -t 1 && test -t 2 && stty size; trap 'stty size; exit 7' WINCH; echo ready; while :; do read line; done";
        shell.args(["-c", script]);
        let ExecIo { streams, mut child } =
            start(shell, Some(TerminalSize { rows: 7, columns: 33 })).unwrap();
        let ExecStreams::Terminal(terminal) = streams else { panic!("pipes") };
        let mut said = String::new();
        let mut buffer = [0; 64];
        while !said.contains("ready") {
            let read = terminal.read(&mut buffer).await.unwrap();
            said.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
        assert!(said.starts_with("7 33\r\n"), "{said:?}");
        terminal.resize(TerminalSize { rows: 8, columns: 44 }).unwrap();
        // A shell runs its handler when its read has ended.
        terminal.write_all(b"\n").await.unwrap();
        assert!(read_all(&terminal).await.contains("8 44\r\n"));
        assert_eq!(child.wait().await.unwrap().code(), Some(7));
    }

    #[tokio::test]
    async fn a_program_whose_terminal_is_closed_is_hung_up() {
        // One that reads would see its end, too, and may end by that.
        let mut sleep = Command::new("sleep");
        sleep.arg("1000").kill_on_drop(true);
        let ExecIo { streams, mut child } = start(sleep, Some(TerminalSize { rows: 1, columns: 1 })).unwrap();
        drop(streams);
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(child.wait().await.unwrap().signal(), Some(libc::SIGHUP));
    }
}
