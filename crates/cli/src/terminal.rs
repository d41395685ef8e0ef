//! The user's terminal, for a command inside a service that has one of its own.

use std::io::{self, IsTerminal as _};

use godwit_api::v1::TerminalSize;
use rustix::{
    stdio,
    termios::{self, OptionalActions, Termios},
};

/// The size of a terminal of which nobody knows it: that of the VT100.
const UNKNOWN: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// The size of the terminal that standard input, output or error is.
pub(crate) fn size() -> TerminalSize {
    let sizes = [stdio::stdout(), stdio::stdin(), stdio::stderr()].map(termios::tcgetwinsize);
    let known = sizes.into_iter().flatten().find(|size| size.ws_row > 0 && size.ws_col > 0);
    known.map_or(UNKNOWN, |size| TerminalSize { rows: size.ws_row.into(), columns: size.ws_col.into() })
}

/// Standard input as a terminal that passes on all that is typed, Ctrl-C among it, until this is dropped.
pub(crate) struct Raw {
    before: Termios,
}

impl Raw {
    /// Nothing where standard input is no terminal.
    pub(crate) fn begin() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = termios::tcgetattr(stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(stdio::stdin(), OptionalActions::Drain, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // There is nobody to tell who could do anything about it.
        let _ = termios::tcsetattr(stdio::stdin(), OptionalActions::Drain, &self.before);
    }
}
