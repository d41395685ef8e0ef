//! A container ends, and what belongs to it goes: what its engine has of it, its processes, its volumes as far as they go with
//! it, and what godwit knows of it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use super::keeps::Keeps;
use super::record::Record;
use super::{files, landing};
use crate::container::{ContainerConfig, EngineError, io_error};

/// Ends a container and removes what belongs to it, or gives back one that has not become a service.
pub(super) async fn remove(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
) -> Result<(), EngineError> {
    let Some(record) = Record::read(config)? else { return Ok(()) };
    let care = keeps.care();
    let tree = care.tree(config);
    let io = |path: &Path| {
        let action = format!("remove {}", path.display());
        move |source| io_error(&config.name, action, source)
    };
    if !record.ours {
        for (network, how) in &record.networks {
            if let Err(error) = keeps.join(config, &record.id, network, how).await {
                tracing::error!(container = %config.name, network, %error, "it is not put back on its network");
            }
        }
        files::unbind(&record, &tree).map_err(io(&tree))?;
        return Record::remove(config);
    }
    // Its directory is not removed while something is put there.
    care.logs_are_put(&config.name).await;
    match record.making {
        true => keeps.unmake(config, &record).await?,
        false => keeps.end_arrival(config, &record).await?,
    }
    let record = {
        // What its engine is being told is told by then, and nothing more is.
        let _alone = care.telling.lock().await;
        Record::change(config, |record| record.owes_policy = false)?
    };
    let own_cgroup = care.own_cgroup(config);
    landing::unbind_cgroup(&own_cgroup).map_err(io(&own_cgroup))?;
    if !record.id.is_empty() {
        keeps.remove_it(config, &record.id).await?;
    }
    // What an engine has forgotten, too.
    let lives = record.life.iter().map(|life| &life.cgroup);
    for cgroup in lives.chain(&record.landing) {
        care.processes.kill(&ContainerConfig { cgroup: cgroup.clone(), ..config.clone() }).await?;
    }
    files::unbind(&record, &tree).map_err(io(&tree))?;
    remove_volumes(keeps, config, &record).await?;
    // What has one of their names from here on is another's, however often the rest is tried.
    let record = Record::change(config, |record| (record.volumes, record.departed) = (Vec::new(), false))?;
    let place = (!record.id.is_empty()).then(|| care.place(&record.id));
    for path in record.waiting.iter().chain(&record.left).chain(&place) {
        let removed = path.clone();
        let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(removed)).await;
        match removed.map_err(io::Error::other).and_then(|removed| removed) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(path)(error)),
            _ => {}
        }
    }
    Record::remove(config)
}

/// Removes the volumes of a container that is not here any more, as far as they go with it: all of one that runs on another
/// node with them, of others those without a name of their user's choice. One that another container uses stays.
async fn remove_volumes(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
    record: &Record,
) -> Result<(), EngineError> {
    let of_container = record.volumes.iter().filter(|volume| record.departed || volume.anonymous);
    let mut names: Vec<_> = of_container.map(|volume| volume.name.clone()).collect();
    // Those that were made for an arrival which comes to nothing.
    if !record.settled && !record.token.is_empty() {
        names.extend(keeps.made_volumes(config, &record.token).await?);
    }
    for name in names {
        keeps.remove_volume(config, &name).await?;
    }
    Ok(())
}
