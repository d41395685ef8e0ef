//! Ctrl-C and SIGTERM as events, and the exit code after them.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit code after Ctrl-C, as shells have it.
pub const INTERRUPTED: u8 = 130;

/// SIGINT and SIGTERM: both ask for an orderly end.
pub struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// Catches both signals from now on.
    ///
    /// # Errors
    /// If the kernel refuses a handler.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Returns when one of them comes.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
