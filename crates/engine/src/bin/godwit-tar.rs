//! godwit-tar: what CRIU finds as `tar` in its path. It archives small tmpfs itself, and becomes tar(1) for all else.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    if godwit_engine::small_tar::run(&words).is_ok() {
        return ExitCode::SUCCESS;
    }
    match become_tar(&words) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("godwit-tar: there is no other tar to start: {error}; install tar");
            ExitCode::from(2)
        }
    }
}

/// The next program of the name tar in the path.
fn become_tar(words: &[OsString]) -> io::Result<Infallible> {
    let own = std::env::current_exe()?;
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let is_other = |program: &PathBuf| {
        program.is_file() && Path::new(program).canonicalize().is_ok_and(|program| program != own)
    };
    let other = std::env::split_paths(&path).map(|directory| directory.join("tar")).find(is_other);
    let other = other.ok_or(io::ErrorKind::NotFound)?;
    Err(Command::new(other).arg0("tar").args(words).exec())
}
