//! The programs that a lab starts: where they lie, how they are started, what they wrote last.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::{
    config::LabConfig,
    error::{Context, LabError},
    handle::Lab,
    process::Process,
    registry,
};

/// Lines of a log that an error quotes.
const QUOTED_LINES: usize = 12;

/// Where a node's program lies.
pub(crate) fn of_node(config: &LabConfig, node: &str, name: &'static str) -> Result<PathBuf, LabError> {
    match config.programs.of_nodes.get(node) {
        Some(directory) => within(directory.clone(), name),
        None => path(config, name),
    }
}

/// Where one of our own programs lies: beside this one, or beside the directory of this test.
pub(crate) fn path(config: &LabConfig, name: &'static str) -> Result<PathBuf, LabError> {
    let beside = match &config.programs.directory {
        Some(directory) => directory.clone(),
        None => {
            let own = std::env::current_exe().context("finding", "the running program")?;
            let mut directory = own.parent().map(PathBuf::from).unwrap_or_default();
            if directory.ends_with("deps") {
                directory.pop();
            }
            directory
        }
    };
    within(beside, name)
}

fn within(beside: PathBuf, name: &'static str) -> Result<PathBuf, LabError> {
    let path = beside.join(name);
    if path.is_file() { Ok(path) } else { Err(LabError::NoProgram { name, beside }) }
}

/// Starts a program that outlives this one, away from its terminal.
pub(crate) fn start(lab: &Lab, role: &str, mut command: Command, log: &Path) -> Result<Child, LabError> {
    let file = File::options().create(true).append(true).open(log).context("opening", log.display())?;
    command.current_dir("/").stdin(Stdio::null()).stderr(file);
    // SAFETY: setsid is a bare system call, safe between fork and exec.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            Ok(())
        });
    }
    let child = command.spawn().context("starting", command.get_program().display())?;
    if let Some(process) = i32::try_from(child.id()).ok().and_then(Process::of) {
        registry::record_process(&lab.paths, role, &process)?;
    }
    Ok(child)
}

/// The last lines of a log, for an error.
pub(crate) fn tail(log: &Path) -> String {
    last_lines(&String::from_utf8_lossy(&fs::read(log).unwrap_or_default()))
}

/// The last lines of what a program wrote, for an error.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.trim_end().lines().collect();
    let from = lines.len().saturating_sub(QUOTED_LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}
