//! Commands in containers of other engines, by the engines' programs: `podman exec` and `docker exec` take the same words.

use super::Keeps;
use super::environment::Environment;
use super::record::Record;
use crate::container::{ContainerConfig, EngineError};
use crate::exec::{self, ExecIo, ExecRequest};

/// Starts a command in a container.
pub(super) fn start(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
    request: &ExecRequest,
) -> Result<ExecIo, EngineError> {
    let record = Record::of(config)?;
    let failed = |reason: String| keeps.care().failed(&config.name, "run a command in", reason);
    let environment = Environment::of(&request.env).map_err(failed)?;
    let mut command = keeps.program();
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let not_run = |error| failed(format!("cannot run {program}: {error}"));
    command.args(["exec", "--interactive"]).args(request.terminal.map(|_| "--tty"));
    if !environment.file.is_empty() {
        let file = exec::hand_over(&mut command, environment.file.as_bytes()).map_err(not_run)?;
        command.args(["--env-file", &file]);
    }
    for (name, value) in &environment.passed {
        command.args(["--env", name]).env(name, value);
    }
    if let Some(user) = &request.user {
        command.args(["--user", user]);
    }
    if let Some(workdir) = &request.workdir {
        command.args(["--workdir", workdir]);
    }
    command.arg(&record.id).args(&request.command);
    exec::start(command, request.terminal).map_err(not_run)
}
