//! A lab for as long as something is done in it.

use anyhow::Context as _;
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
