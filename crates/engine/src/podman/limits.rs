//! Podman 4.3.1 changes limits of a container that runs, and forgets them: its next start has those with which it was made. It
//! changes neither a restart policy nor a limit of processes. Newer ones were not tried, and are taken to do the same. So godwit
//! has Podman change limits after each start here. Where the container goes Podman makes it with the limits that it has then:
//! those of its cgroup, since Podman does not know what `podman update` has changed.

use serde_json::{Value, json};

use super::Podman;
use super::definition::Definition;
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::limits::{self, Changes};
use crate::foreign::record::Record;
use crate::foreign::renewed::cpu_millis;
use crate::foreign::{Keeps, Renewed, SHORT};
use crate::processes::limits::{self as limits_now, Limits};

/// What Podman is asked to do, for the reader of an error.
const ACTION: &str = "change limits and restart policy of";

/// Limits, by the names that they have in the OCI's `spec`.
const MEMORY: [&str; 2] = ["memory", "limit"];
const SWAP: [&str; 2] = ["memory", "swap"];
const QUOTA: [&str; 2] = ["cpu", "quota"];
const PERIOD: [&str; 2] = ["cpu", "period"];
const RESERVATION: [&str; 2] = ["memory", "reservation"];
const SHARES: [&str; 2] = ["cpu", "shares"];
const PROCESSORS: [&str; 2] = ["cpu", "cpus"];
const MEMORY_NODES: [&str; 2] = ["cpu", "mems"];

/// The largest page of any machine, bytes.
const LARGEST_PAGE: i64 = 64 << 10;

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

    /// A limit of its, by the names that it has in `spec`; -1 for none.
    fn limit_of(&self, name: [&str; 2]) -> i64 {
        let limit = self.spec["linux"]["resources"][name[0]][name[1]].as_i64();
        limit.filter(|limit| *limit > 0).unwrap_or(-1)
    }

    fn set_limit(&mut self, name: [&str; 2], limit: i64) {
        self.set_resource(name, (limit > 0).then(|| limit.into()));
    }

    fn set_resource(&mut self, name: [&str; 2], value: Option<Value>) {
        let of = &mut self.spec["linux"]["resources"][name[0]];
        if !of.is_object() {
            *of = json!({});
        }
        match (value, of.as_object_mut()) {
            (Some(value), _) => of[name[1]] = value,
            (None, Some(of)) => drop(of.remove(name[1])),
            (None, None) => {}
        }
    }

    /// The definition with the limits that the container has now.
    pub(super) fn limited(mut self, now: Limits) -> Self {
        let differs = |now: i64, old: i64| match now < 0 || old < 0 {
            true => now.max(-1) != old,
            // A kernel rounds down to whole pages.
            false => now > old || now <= old - LARGEST_PAGE,
        };
        let old = (self.limit_of(MEMORY), self.limit_of(SWAP));
        let memory = now.memory.filter(|memory| differs(*memory, old.0));
        if let Some(memory) = memory {
            self.set_limit(MEMORY, memory);
        }
        match (now.swap, memory) {
            (Some(swap), _) if differs(swap, old.1) => self.set_limit(SWAP, swap),
            // This machine limits no swap, and another may.
            (None, Some(memory)) => {
                let bytes = u64::try_from(memory).unwrap_or(0);
                let both = limits::memory((old.0.max(0), old.1.max(0)), bytes, "Podman").ok().flatten();
                self.set_limit(SWAP, both.map_or(-1, |(_, swap)| swap));
            }
            _ => {}
        }
        if let Some((quota, period)) = now.cpu {
            let of = |period: i64| if period > 0 { period } else { CPU_PERIOD };
            let old = (self.limit_of(QUOTA), of(self.limit_of(PERIOD)));
            if quota.max(-1) != old.0 || quota > 0 && of(period) != old.1 {
                self.set_limit(QUOTA, quota);
                self.set_limit(PERIOD, if quota > 0 { of(period) } else { -1 });
            }
        }
        if let Some(reservation) = now.reservation.filter(|now| differs(*now, self.limit_of(RESERVATION))) {
            self.set_limit(RESERVATION, reservation);
        }
        let shares = u64::try_from(self.limit_of(SHARES)).ok();
        if let Some(share) = now.share.filter(|share| !share.is(shares)) {
            self.set_limit(SHARES, share.shares());
        }
        for (name, places) in [(PROCESSORS, now.processors), (MEMORY_NODES, now.memory_nodes)] {
            let old = self.spec["linux"]["resources"][name[0]][name[1]].as_str().unwrap_or_default();
            if let Some(places) = places.filter(|places| !places.is(old)) {
                let list = Some(places.list()).filter(|list| !list.is_empty());
                self.set_resource(name, list.map(Into::into));
            }
        }
        self
    }

    /// What speaks against having it run on the processors, and with the memory nodes, that it is to: this machine lacks some.
    pub(super) fn against_places(&self) -> Vec<String> {
        let all = [
            (PROCESSORS, "processors", "--cpuset-cpus", limits_now::PROCESSORS),
            (MEMORY_NODES, "memory nodes", "--cpuset-mems", limits_now::MEMORY_NODES),
        ];
        let against = |(name, what, option, told): ([&str; 2], &str, &str, &str)| {
            let list = self.spec["linux"]["resources"][name[0]][name[1]].as_str().unwrap_or_default();
            let missing = limits_now::missing(list, told);
            let told = || {
                let first: Vec<_> = missing.iter().take(8).map(u16::to_string).collect();
                let missing = first.join(",") + if missing.len() > first.len() { ",…" } else { "" };
                format!(
                    "it is to use the {what} {list} ({option}), and {missing} are not there; `podman update {option}` changes that"
                )
            };
            (!missing.is_empty()).then(told)
        };
        all.into_iter().filter_map(against).collect()
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
        add("--memory-reservation", &resources["memory"]["reservation"]);
        add("--cpu-shares", &resources["cpu"]["shares"]);
        for (option, name) in [("--cpuset-cpus", PROCESSORS), ("--cpuset-mems", MEMORY_NODES)] {
            let list = resources[name[0]][name[1]].as_str().filter(|list| !list.is_empty());
            words.extend(list.into_iter().flat_map(|list| [option.to_owned(), list.to_owned()]));
        }
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

    /// The definition with the name that Podman has for it now, and the limits that it runs with; nothing where Podman has no such
    /// container.
    pub(super) async fn as_it_is_now(
        &self,
        config: &ContainerConfig,
        id: &str,
    ) -> Result<Option<Renewed>, EngineError> {
        let Some(inspected) = self.inspect(&config.name, id).await? else { return Ok(None) };
        let (_, recorded) = self.kept(config)?;
        let mut definition = recorded.named(&inspected.name);
        if inspected.state.running {
            let (placed, _) = self.care().placed(config)?;
            let cgroup = self.care().processes.cgroup(&placed)?;
            definition = definition.limited(Limits::of(&cgroup, id));
        }
        let memory_bytes = u64::try_from(definition.limit_of(MEMORY)).unwrap_or(0);
        let cpu_millis = cpu_millis(definition.limit_of(QUOTA), definition.limit_of(PERIOD));
        Ok(Some(Renewed { definition: definition.value(), memory_bytes, cpu_millis }))
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
    use crate::processes::limits::Share;

    #[test]
    fn the_limits_of_the_cgroup_are_taken_over_where_they_are_others() {
        let told =
            json!({ "config": {}, "spec": { "ociVersion": "1.0.2", "root": { "path": "" }, "linux": {} } });
        let plain = Definition::told(&told).unwrap();
        let none = Limits {
            memory: Some(-1),
            swap: Some(-1),
            cpu: Some((-1, 100_000)),
            reservation: Some(-1),
            share: Some(Share::Shares(1024)),
            ..Limits::default()
        };
        assert_eq!(plain.clone().limited(none.clone()).limits(), [""; 0]);
        assert_eq!(plain.clone().limited(Limits::default()), plain);
        let some = Limits {
            memory: Some(4 << 20),
            swap: Some(8 << 20),
            cpu: Some((5000, 10_000)),
            reservation: Some(1 << 20),
            share: Some(Share::Weight(20)),
            ..Limits::default()
        };
        let limited = plain.limited(some.clone());
        let words = "--memory 4194304 --memory-swap 8388608 --cpu-period 10000 --cpu-quota 5000 --memory-reservation 1048576 --cpu-shares 526";
        assert_eq!(limited.limits().join(" "), words);
        // They go with it.
        assert_eq!(Definition::told(&limited.value()).unwrap().limits().join(" "), words);
        // A page that is not whole is none.
        let changes = Changes { memory_bytes: Some((4 << 20) + 1), ..Changes::default() };
        let odd = limited.clone().changed(&changes).unwrap();
        assert_eq!(odd.clone().limited(some), odd);
        // Without swap in its cgroup there is as much of it as memory.
        let more = Limits { memory: Some(8 << 20), ..Limits::default() };
        assert!(
            limited
                .clone()
                .limited(more)
                .limits()
                .join(" ")
                .starts_with("--memory 8388608 --memory-swap 16777216")
        );
        assert_eq!(limited.limited(none).limits(), [""; 0]);
    }

    #[test]
    fn processors_that_this_machine_lacks_are_named() {
        let cpu = json!({ "cpus": "0,60000", "mems": "0" });
        let told = json!({
            "config": {}, "spec": { "ociVersion": "1.0.2", "root": { "path": "" }, "linux": { "resources": { "cpu": cpu } } },
        });
        let found = Definition::told(&told).unwrap().against_places();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("processors 0,60000 (--cpuset-cpus), and 60000 are not there"),
            "{found:?}"
        );
    }

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
