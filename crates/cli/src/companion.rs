//! Programs that `godwit` becomes for some of its verbs: they replace this process, so that signals, streams and the
//! exit status are theirs. Beside godwit means: in the directory of its file, wherever a link to it is.
//!
//! ```text
//!   godwit cluster init …   ─▶ godwitd init …      beside godwit
//!   godwit lab …, bench …   ─▶ godwit-lab lab …    beside godwit, else in $PATH, as git finds its commands
//! ```

use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::Context as _;

/// The program of `godwit lab` and `godwit bench`.
const LAB: &str = "godwit-lab";
/// The verbs that it performs.
pub(crate) const VERBS_OF_LAB: [&str; 2] = ["lab", "bench"];

/// `godwit-lab` is not installed.
#[derive(Debug, thiserror::Error)]
#[error(
    "`godwit {verb}` needs the program {LAB}, which is neither in {} nor in a directory of $PATH; install it beside godwit, for example with `make release install` in godwit's source",
    directory.display()
)]
pub(crate) struct NoLab {
    /// The verb of `godwit` that needs it.
    verb: String,
    /// Where `godwit` is.
    directory: PathBuf,
}

/// Replaces this process by `godwitd`; returns only when that fails.
pub(crate) fn become_daemon<S: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = S>,
) -> anyhow::Result<ExitCode> {
    let program = own()?.with_file_name("godwitd");
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("{} cannot be started: install it beside godwit", program.display()))
}

/// Replaces this process by `godwit-lab`; returns only when that fails, with [`NoLab`] where it is not installed.
pub(crate) fn become_lab(verb: &str, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let own = own()?;
    let beside = own.with_file_name(LAB);
    let is_beside = beside.is_file();
    // A name without a slash is looked for in $PATH.
    let program = if is_beside { beside } else { PathBuf::from(LAB) };
    let error = Command::new(&program).args(arguments).exec();
    if !is_beside && error.kind() == io::ErrorKind::NotFound {
        let directory = own.parent().map(PathBuf::from).unwrap_or_default();
        return Err(NoLab { verb: verb.to_owned(), directory }.into());
    }
    Err(error).with_context(|| format!("{} cannot be started", program.display()))
}

/// The same for what this program can do in part by itself; nothing where `godwit-lab` is not installed.
pub(crate) fn become_lab_if_installed(
    verb: &str,
    arguments: &[OsString],
) -> Option<anyhow::Result<ExitCode>> {
    match become_lab(verb, arguments) {
        Err(error) if error.is::<NoLab>() => None,
        ended => Some(ended),
    }
}

/// The file of this program.
fn own() -> anyhow::Result<PathBuf> {
    env::current_exe().context("godwit cannot find its own program file")
}
