//! The tree that the files of a service are on their way, with those of directories of this node that go with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_engine::tree::TreeSender;
use godwit_engine::{DumpTarget, files};

use super::{Source, SourceError};
use crate::bound::{self, Going};

impl Source {
    /// Its directories of this node whose files go with it. Where there is a reason against one, all reasons.
    pub(super) async fn copied(&self) -> Result<Vec<Going>, SourceError> {
        let service = self.service_said()?;
        if bound::of(&service).is_empty() {
            return Ok(Vec::new());
        }
        let main = self.local.engine.state(&self.local.config(&self.service)).await?.pid;
        let local = Arc::clone(&self.local);
        let opening = tokio::task::spawn_blocking(move || {
            let root = PathBuf::from(format!("/proc/{main}/root"));
            let going = bound::opened(&service, &root, &local.binds).map_err(SourceError::NotEligible)?;
            let mut reasons = Vec::new();
            for Going { volume, .. } in &going {
                if local.volume(volume)?.is_some() {
                    reasons.push(format!(
                        "node {} has a volume {volume} already, which is what files of the service would be at the destination; remove it (`godwit volume rm {volume}`)",
                        local.node
                    ));
                }
            }
            if reasons.is_empty() { Ok(going) } else { Err(SourceError::NotEligible(reasons)) }
        });
        opening.await?
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
        let tree = match has_volumes {
            true => TreeSender::new(&own),
            // An engine's is bound as a tree in any case.
            false if self.service.kept.is_some() => TreeSender::new(&own).make(files::VOLUMES),
            // Without volumes its changes are no tree with them.
            false => TreeSender::of_parts().make("").make(files::VOLUMES).put(files::UPPER, &own),
        };
        Ok(going.into_iter().fold(tree, |tree, Going { volume, source, opened, .. }| {
            tree.put_open(&format!("{}/{volume}", files::VOLUMES), &source, opened)
        }))
    }

    /// What a checkpointer has to know: files of these directories go along, as a volume's do.
    pub(super) fn with_copies(&self, mut target: DumpTarget) -> Result<DumpTarget, SourceError> {
        let said = self.service_said()?;
        for (_, source, at) in bound::of(&said) {
            let key = at.to_string_lossy();
            let inside = target.external_mounts.iter().find(|(_, known)| *known == key);
            let inside = inside.map_or_else(|| at.to_owned(), |(inside, _)| PathBuf::from(inside));
            target.volumes.push((inside, source.to_owned()));
        }
        Ok(target)
    }

    /// What a move would copy of this node's directories, in sentences.
    pub(super) fn copies(&self) -> Result<Vec<String>, SourceError> {
        let said = self.service_said()?;
        let copy = |(volume, source, target): (_, &Path, &Path)| {
            format!(
                "the files in {} go with it, as volume {volume} at {}; the directory stays on node {}, and is the service's no longer",
                source.display(),
                target.display(),
                self.local.node
            )
        };
        Ok(bound::of(&said).into_iter().map(copy).collect())
    }

    /// Says what is left here, once it has moved.
    pub(super) async fn tell_of_copies(&self) {
        // What was said of the move was understood when it began.
        let Ok(said) = self.service_said() else { return };
        for (volume, source, _) in bound::of(&said) {
            let what = format!(
                "the files in {} went to node {} with it, as volume {volume}; the directory stays here as it is, and is the service's no longer",
                source.display(),
                self.destination
            );
            self.local.cluster.told(&self.service, &what).await;
        }
    }
}
