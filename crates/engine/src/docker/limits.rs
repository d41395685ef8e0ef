//! Docker changes limits and restart policy of a container, and keeps them for its next starts. Its users do the same by
//! `docker update`, which a move takes along.

use serde_json::Value;

use super::Docker;
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::limits::Changes;
use crate::foreign::record::Record;
use crate::foreign::{Keeps, Renewed, SHORT};

/// What dockerd is asked to do, for the reader of an error.
const ACTION: &str = "change limits and restart policy of";

impl Docker {
    /// Has dockerd change them; the definition from here on.
    pub(super) async fn change_limits(
        &self,
        config: &ContainerConfig,
        id: &str,
        changes: &Changes,
    ) -> Result<Value, EngineError> {
        // The policy that has come with it is not to follow this one.
        let _alone = self.care().telling.lock().await;
        if Record::of(config)?.owes_policy {
            let reason = "it has just come, and Docker has not been told all of it; try again".to_owned();
            return Err(self.care().failed(&config.name, ACTION, reason));
        }
        let (_, definition) = self.kept(config)?;
        let (changed, told) =
            definition.changed(changes).map_err(|reason| self.care().failed(&config.name, ACTION, reason))?;
        if told.as_object().is_some_and(|told| !told.is_empty()) {
            self.about(config, ACTION, &format!("/containers/{id}/update"), Some(&told), SHORT).await?;
        }
        Ok(changed.value())
    }

    /// The definition with what Docker has of it now; nothing where it has no such container.
    pub(super) async fn as_it_is_now(
        &self,
        config: &ContainerConfig,
        id: &str,
    ) -> Result<Option<Renewed>, EngineError> {
        // The policy that has come with it may just be told.
        let _alone = self.care().telling.lock().await;
        let owes_policy = Record::of(config)?.owes_policy;
        let Some(inspected) = self.inspect(&config.name, id).await? else { return Ok(None) };
        let unknown = inspected.unknown_settings();
        if !unknown.is_empty() {
            return Err(self.care().unfit(&config.name, unknown));
        }
        let mut now = inspected.definition().map_err(|error| {
            let reason = format!("what Docker tells of it is not understood: {error}");
            self.care().failed(&config.name, "give godwit", reason)
        })?;
        let (_, recorded) = self.kept(config)?;
        if !recorded.knows_image(&now) {
            now = self.with_image(&config.name, now, &inspected).await?;
        }
        let renewed = recorded.renewed(now, owes_policy);
        let (memory_bytes, cpu_millis) = renewed.memory_and_cpu();
        Ok(Some(Renewed { definition: renewed.value(), memory_bytes, cpu_millis }))
    }

    /// Has dockerd change them to those of the definition.
    pub(super) async fn change_limits_back(
        &self,
        config: &ContainerConfig,
        id: &str,
    ) -> Result<(), EngineError> {
        let _alone = self.care().telling.lock().await;
        let owes_policy = Record::of(config)?.owes_policy;
        let (_, definition) = self.kept(config)?;
        let told = definition.limits_and_policy(owes_policy);
        self.about(config, ACTION, &format!("/containers/{id}/update"), Some(&told), SHORT).await
    }
}
