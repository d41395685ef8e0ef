//! The tree that the files of a service are on their way, with those of directories of this node that go with it.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_database::blocking::off_worker;
use godwit_engine::tree::TreeSender;
use godwit_engine::{ContainerConfig, Copied, DumpTarget, files};
use godwit_names::VolumeName;

use super::{Source, SourceError};
use crate::bound::{self, Going};
use crate::service::Service;

impl Source {
    /// Its directories of this node whose files go with it. Where there is a reason against one, all reasons.
    pub(super) async fn copied(&self) -> Result<Vec<Going>, SourceError> {
        let service = self.service_said()?;
        let names: Vec<_> = copies_of(&service)?.into_iter().map(|(copied, _)| copied.name).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let config = self.local.config(&self.service);
        self.are_free(&config, &names).await?;
        let has = self.local.mount_namespace(&self.service).await?;
        let local = Arc::clone(&self.local);
        let opening = tokio::task::spawn_blocking(move || {
            bound::opened(&service, has, &local.binds).map_err(SourceError::NotEligible)
        });
        opening.await?
    }

    /// Refuses copies with the names of volumes that are here: the service could not come back with them.
    async fn are_free(&self, config: &ContainerConfig, names: &[VolumeName]) -> Result<(), SourceError> {
        let (node, mut reasons) = (&self.local.node, Vec::new());
        for name in names {
            let (owner, remedy) = match &self.service.kept {
                None if off_worker(|| self.local.volume(name))?.is_some() => {
                    (String::new(), format!("`godwit volume rm {name}`"))
                }
                Some(kept) if self.local.engine.volume_place(config, name).await?.is_some() => {
                    let keeper = kept.keeper;
                    (format!(" of {}'s", keeper.title()), format!("`{} volume rm {name}`", keeper.name()))
                }
                _ => continue,
            };
            reasons.push(format!(
                "node {node} has a volume {name}{owner} already, which is what files of the service would be at the destination; remove it ({remedy})"
            ));
        }
        if reasons.is_empty() { Ok(()) } else { Err(SourceError::NotEligible(reasons)) }
    }

    /// The files that move with it, of which nothing has been sent.
    pub(super) async fn tree(&self) -> Result<TreeSender, SourceError> {
        let own = self.local.changed_files(&self.service)?;
        let going = self.copied().await?;
        if going.is_empty() {
            return Ok(TreeSender::new(&own));
        }
        let has_volumes = match self.service.kept {
            None => self.service.volumes().next().is_some(),
            Some(_) => own.join(files::VOLUMES).is_dir(),
        };
        let has_file = going.iter().any(|going| going.copied.file.is_some());
        let tree = match has_volumes {
            // A directory that has a file is made before all else.
            true if has_file => TreeSender::new(&own).make(files::VOLUMES),
            true => TreeSender::new(&own),
            // An engine's is bound as a tree in any case.
            false if self.service.kept.is_some() => TreeSender::new(&own).make(files::VOLUMES),
            // Without volumes its changes are no tree with them.
            false => TreeSender::of_parts().make("").make(files::VOLUMES).put(files::UPPER, &own),
        };
        Ok(going.into_iter().fold(
            tree,
            |tree, Going { copied: Copied { name, file, .. }, source, opened }| {
                let volume = format!("{}/{name}", files::VOLUMES);
                match file {
                    None => tree.put_open(&volume, &source, opened),
                    Some(file) => tree.make(&volume).put_open(&format!("{volume}/{file}"), &source, opened),
                }
            },
        ))
    }

    /// What a checkpointer has to know: files of these directories go along, as a volume's do.
    pub(super) fn with_copies(&self, mut target: DumpTarget) -> Result<DumpTarget, SourceError> {
        let said = self.service_said()?;
        // Nothing is in a file.
        for (Copied { target: at, .. }, source) in
            copies_of(&said)?.into_iter().filter(|(copied, _)| copied.file.is_none())
        {
            let key = at.to_string_lossy();
            let inside = target.external_mounts.iter().find(|(_, known)| *known == key);
            let inside = inside.map_or_else(|| at.clone(), |(inside, _)| PathBuf::from(inside));
            target.volumes.push((inside, source.to_owned()));
        }
        Ok(target)
    }

    /// What a move would copy of this node's directories, in sentences.
    pub(super) fn copies(&self) -> Result<Vec<String>, SourceError> {
        let said = self.service_said()?;
        let copy = |(Copied { name, target, file }, source): bound::Of<'_>| {
            let (what, stays) = match file {
                None => ("the files in", "the directory"),
                Some(_) => ("the file", "the file here"),
            };
            format!(
                "{what} {} {} with it, as volume {name} at {}; {stays} stays on node {}, and is the service's no longer",
                source.display(),
                if file.is_none() { "go" } else { "goes" },
                target.display(),
                self.local.node
            )
        };
        Ok(copies_of(&said)?.into_iter().map(copy).collect())
    }

    /// Says what is left here, once it has moved.
    pub(super) async fn tell_of_copies(&self) {
        // What was said of the move was understood when it began.
        let Ok(said) = self.service_said() else { return };
        for (Copied { name, file, .. }, source) in copies_of(&said).unwrap_or_default() {
            let (what, stays) = match file {
                None => ("the files in", "the directory"),
                Some(_) => ("the file", "the file"),
            };
            let what = format!(
                "{what} {} went to node {} with it, as volume {name}; {stays} stays here as it is, and is the service's no longer",
                source.display(),
                self.destination
            );
            self.local.cluster.told(&self.service, &what).await;
        }
    }
}

/// Those that go with a service as it was said.
fn copies_of(said: &Service) -> Result<Vec<bound::Of<'_>>, SourceError> {
    bound::of(said).map_err(|why| SourceError::NotEligible(vec![why]))
}
