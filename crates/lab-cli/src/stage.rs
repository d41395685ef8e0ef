//! A lab for as long as something is done in it, and the command `godwit` on its nodes.

use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use godwit_lab::{Lab, LabConfig};

use crate::trial::blocking;

/// Brings a lab up, in place of one that was left behind under its name, has something done in it, and takes it down, whatever
/// came of that. One that is to be kept stays.
pub(crate) async fn in_lab<T>(
    config: LabConfig,
    keep: bool,
    work: impl AsyncFnOnce(&Lab) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let lab = blocking(move || {
        remove_lab(&config.name)?;
        Ok(Lab::up(&config)?)
    })
    .await?;
    let outcome = work(&lab).await;
    let down = match keep {
        true => Ok(()),
        false => blocking(move || remove_lab(lab.name())).await,
    };
    // Why the work failed says more than that its lab could not be taken down after it.
    let value = outcome?;
    down.context("the lab could not be taken down")?;
    Ok(value)
}

/// Takes a lab down, if it is there.
pub(crate) fn remove_lab(name: &str) -> anyhow::Result<()> {
    if Lab::list().iter().any(|lab| lab == name) {
        Lab::down(name)?;
    }
    Ok(())
}

/// What `godwit` with these words says on a node, where it must succeed. Blocks.
pub(crate) fn godwit(lab: &Lab, node: &str, words: &[&str]) -> anyhow::Result<String> {
    let output = command(lab, node)?.args(words).stdin(Stdio::null()).output()?;
    let [said, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    ensure!(output.status.success(), "godwit {} on {node}: {}", words.join(" "), errors.trim());
    Ok(said.trim().to_owned())
}

/// The command of a node: in a machine the one that is installed there.
fn command(lab: &Lab, node: &str) -> anyhow::Result<Command> {
    if lab.machine(node).is_some() {
        return Ok(lab.command(node, "godwit")?);
    }
    let program = std::env::current_exe()?.with_file_name("godwit");
    let mut command = lab.command(node, program)?;
    command.arg("--socket").arg(lab.socket(node)?);
    Ok(command)
}
