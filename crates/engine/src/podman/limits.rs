//! Podman 4.3.1 changes limits of a container that runs, and forgets them: its next start has those with which it was made. It
//! changes neither a restart policy nor a limit of processes. Newer ones were not tried, and are taken to do the same. So godwit
//! has Podman change limits after each start here. Where the container goes Podman makes it with the limits that it has then.

use serde_json::Value;

use super::Podman;
use super::definition::Definition;
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::limits::{self, Changes};
use crate::foreign::record::Record;
use crate::foreign::{Keeps, SHORT};

/// What Podman is asked to do, for the reader of an error.
const ACTION: &str = "change limits and restart policy of";

/// The time in which a limit of CPU holds, microseconds; as Podman has it.
const CPU_PERIOD: i64 = 100_000;

impl Definition {
    /// The definition with other limits, or what Podman cannot change.
    pub(super) fn changed(mut self, changes: &Changes) -> Result<Self, String> {
        let unknown =
            |what: &str| format!("Podman (4.3.1) cannot change {what}; make the container anew with another");
        if changes.restart.is_some() {
            return Err(unknown("a restart policy (--restart)"));
        }
        if changes.pids_limit.is_some() {
            return Err(unknown("a limit of processes (--pids-limit)"));
        }
        let number = |name: [&str; 2]| {
            let resources = &self.spec["linux"]["resources"];
            resources[name[0]][name[1]].as_i64().unwrap_or(0)
        };
        let old = (number(["memory", "limit"]), number(["memory", "swap"]));
        let quota = number(["cpu", "quota"]);
        if let Some(bytes) = changes.memory_bytes
            && let Some((memory, swap)) = limits::memory(old, bytes, "Podman")?
        {
            self.spec["linux"]["resources"]["memory"]["limit"] = memory.into();
            self.spec["linux"]["resources"]["memory"]["swap"] = swap.into();
        }
        match changes.cpu_millis {
            None => {}
            Some(0) if quota <= 0 => {}
            Some(0) => return Err(limits::lifted("Podman", "CPU limit (--cpus)")),
            Some(millis) => {
                let quota = i64::from(millis) * CPU_PERIOD / 1000;
                self.spec["linux"]["resources"]["cpu"]["quota"] = quota.into();
                self.spec["linux"]["resources"]["cpu"]["period"] = CPU_PERIOD.into();
            }
        }
        Ok(self)
    }

    /// Its limits of memory and CPU, in words of `podman update`.
    pub(super) fn limits(&self) -> Vec<String> {
        let resources = &self.spec["linux"]["resources"];
        let mut words = Vec::new();
        let mut add = |option: &str, value: &Value| {
            if let Some(value) = value.as_i64().filter(|value| *value != 0) {
                words.extend([option.to_owned(), value.to_string()]);
            }
        };
        add("--memory", &resources["memory"]["limit"]);
        add("--memory-swap", &resources["memory"]["swap"]);
        add("--cpu-period", &resources["cpu"]["period"]);
        add("--cpu-quota", &resources["cpu"]["quota"]);
        words
    }
}

impl Podman {
    /// Has Podman change them, now and after its next starts; the definition from here on.
    pub(super) async fn change_limits(
        &self,
        config: &ContainerConfig,
        id: &str,
        changes: &Changes,
    ) -> Result<Value, EngineError> {
        let failed = |reason: String| self.care().failed(&config.name, ACTION, reason);
        let (_, definition) = self.kept(config)?;
        let changed = definition.changed(changes).map_err(failed)?;
        let look = self.look(&config.name, id).await?;
        let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        // First: whatever comes of this, its next start has those that are recorded.
        Record::change(config, |record| record.limited = true)?;
        if look.running {
            self.update(config, id, &changed).await?;
        }
        Ok(changed.value())
    }

    /// Gives a container that runs the limits of a definition.
    pub(super) async fn update(
        &self,
        config: &ContainerConfig,
        id: &str,
        definition: &Definition,
    ) -> Result<(), EngineError> {
        let words = definition.limits();
        if words.is_empty() {
            return Ok(());
        }
        let words: Vec<&str> =
            ["container", "update"].into_iter().chain(words.iter().map(String::as_str)).collect();
        self.about((config, id), ACTION, &[&words[..], &["--"]].concat(), SHORT).await.map(drop)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_are_what_podman_is_told_again_and_are_not_lifted() {
        let told =
            json!({ "config": {}, "spec": { "ociVersion": "1.0.2", "root": { "path": "" }, "linux": {} } });
        let plain = Definition::told(&told).unwrap();
        assert_eq!(plain.limits(), [""; 0]);
        let changes = Changes { memory_bytes: Some(40), cpu_millis: Some(1500), ..Changes::default() };
        let changed = plain.clone().changed(&changes).unwrap();
        let told = "--memory 40 --memory-swap 80 --cpu-period 100000 --cpu-quota 150000";
        assert_eq!(changed.limits().join(" "), told);
        // They go with it.
        assert_eq!(Definition::told(&changed.value()).unwrap().of_no_node().limits().join(" "), told);
        let none = Changes { memory_bytes: Some(0), cpu_millis: Some(0), ..Changes::default() };
        assert!(changed.changed(&none).unwrap_err().contains("--memory"));
        assert_eq!(plain.clone().changed(&none).unwrap(), plain);
        let policy = Changes { pids_limit: Some(5), ..Changes::default() };
        assert!(plain.changed(&policy).unwrap_err().contains("--pids-limit"));
    }
}
