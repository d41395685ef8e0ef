//! Why a program could not go on. The runtime and `godwit-state next` end the program's own process then, whose standard
//! error the program may have closed. So they write to a file (`GODWIT_STATE_MESSAGES`, `isa/ABI.md`), and the waiting
//! godwit-state repeats it.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::output;

/// The variable that names the file to the runtime.
pub(crate) const VARIABLE: &str = "GODWIT_STATE_MESSAGES";

/// The file of a journey, which lies beside its state: `godwit-state next` is told of the state only.
pub(crate) fn beside(state: &Path) -> PathBuf {
    state.with_file_name("messages")
}

/// Adds a line; where there is no such file, it goes to standard error.
pub(crate) fn add(file: &Path, line: &str) {
    let opened = OpenOptions::new().append(true).open(file);
    if opened.and_then(|mut file| writeln!(file, "{line}")).is_err() {
        output::note(line);
    }
}

/// Says on standard error what the file has.
pub(crate) fn repeat(file: &Path) {
    let text = fs::read(file).unwrap_or_default();
    if !text.is_empty() {
        output::note(String::from_utf8_lossy(&text).trim_end());
    }
}
