//! How an executable of a set is started on this machine: as it is, or under qemu-user.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use godwit_isa_state::{Program, ProgramError, Set};

/// The Debian package that has qemu for the other sets.
const QEMU_PACKAGE: &str = "qemu-user-static";
/// Variables of the runtime; a program sees only those of its own leg.
const PREFIX: &[u8] = b"GODWIT_STATE_";
/// By which a program's index hands on the name it was called by; here argument 0 is the name.
const NAME: &str = "GODWIT_ARGV0";

/// A program cannot be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MachineError {
    #[error("this machine is of the set {0}, for which there are no programs; use x86_64 or aarch64")]
    Foreign(&'static str),
    #[error("the program has no executable for {set}: there is no {}; link it with godwit-ld, or name it without its \
             suffix", path.display())]
    Missing { set: &'static str, path: PathBuf },
    #[error("the program's executable {} has no permission to be executed; give it with chmod +x", path.display())]
    Permission { path: PathBuf },
    #[error("{} cannot run on this machine, since neither qemu-{set}-static nor qemu-{set} is in PATH; install the \
             package {QEMU_PACKAGE}", path.display())]
    NoQemu { set: &'static str, path: PathBuf },
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// An executable that can be started here.
#[derive(Debug)]
pub(crate) struct Startable {
    /// What it is.
    pub(crate) program: Program,
    /// Its set.
    pub(crate) set: Set,
    /// The program's name, which it gets as its argument 0 on every set.
    name: OsString,
    qemu: Option<PathBuf>,
}

/// A command line to be.
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) path: PathBuf,
    pub(crate) arguments: Vec<OsString>,
}

/// This machine's set.
pub(crate) fn native() -> Result<Set, MachineError> {
    Set::native().ok_or(MachineError::Foreign(env::consts::ARCH))
}

impl Startable {
    /// Finds what is needed to run a program on a set.
    pub(crate) fn find(program: &Path, set: Set) -> Result<Self, MachineError> {
        let path = Program::executable(program, set);
        if !path.is_file() {
            return Err(MachineError::Missing { set: set.name(), path });
        }
        let qemu = if native()? == set {
            None
        } else {
            let names = [format!("qemu-{}-static", set.name()), format!("qemu-{}", set.name())];
            let found = names.iter().find_map(|name| in_path(name));
            Some(found.ok_or_else(|| MachineError::NoQemu { set: set.name(), path: path.clone() })?)
        };
        let program_of_set = Program::open(&path, set)?;
        if !is_executable(&path) {
            return Err(MachineError::Permission { path });
        }
        Ok(Self { program: program_of_set, set, name: program.as_os_str().to_owned(), qemu })
    }

    /// The command that starts it, without arguments, and without the runtime's variables.
    pub(crate) fn command(&self) -> std::io::Result<tokio::process::Command> {
        let words = self.words()?;
        let mut command = tokio::process::Command::new(words.path);
        let (name, arguments) = words.arguments.split_first().unwrap_or((&self.name, &[]));
        command.arg0(name).args(arguments);
        for (name, _) in env::vars_os().filter(|(name, _)| Self::is_ours(name)) {
            command.env_remove(name);
        }
        Ok(command)
    }

    /// What to execute, with argument 0 and those that come before the program's own.
    pub(crate) fn words(&self) -> std::io::Result<Words> {
        // A name without a slash would be looked for in PATH.
        let path = std::path::absolute(self.program.path())?;
        Ok(match &self.qemu {
            None => Words { path, arguments: vec![self.name.clone()] },
            Some(qemu) => {
                let own = qemu.clone().into_os_string();
                let arguments = vec![own, "-0".into(), self.name.clone(), path.into_os_string()];
                Words { path: qemu.clone(), arguments }
            }
        })
    }

    /// Is this variable the runtime's, or the index's?
    pub(crate) fn is_ours(name: &OsStr) -> bool {
        name.as_encoded_bytes().starts_with(PREFIX) || name == NAME
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|directory| directory.join(name))
        .find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}
