//! What holds a container's processes beside namespaces: user, capabilities, system calls, limits.
//!
//! A service carries all of it in full, whatever its node's default is: it is confined in the same way on
//! every node, of whatever version.

use serde::{Deserialize, Serialize};

use crate::seccomp::{Profile, ProfileError, Seccomp};

/// Most processes and threads of a container, as Podman has it.
pub const PIDS_LIMIT: u64 = 2048;

/// What a container's root may, as Docker has it and Podman did: without CAP_AUDIT_WRITE an interactive login by
/// OpenSSH or `login` ends at once.
const DEFAULT: &[&str] = &[
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Numeric ids the container's main process runs with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    #[serde(default)]
    pub groups: Vec<u32>,
}

/// All that Linux has (capabilities(7)), in the order of their numbers.
pub(crate) const ALL: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Resources that have limits (getrlimit(2)), as `ulimit` and Podman name them.
const RESOURCES: &[&str] = &[
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "rss",
    "rtprio",
    "rttime",
    "sigpending",
    "stack",
];

/// How a container's processes are held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Capabilities that a process can have, `CAP_…`, sorted. Those of root; others may gain them by files.
    pub capabilities: Vec<String>,
    /// System calls.
    pub seccomp: Seccomp,
    /// Whether set-user-id programs and capabilities of files are without effect.
    pub no_new_privileges: bool,
    /// Most processes and threads; 0 for no limit.
    pub pids_limit: u64,
    /// Whether the root filesystem refuses writes.
    pub read_only: bool,
    /// Limits that differ from those that containers have anyway.
    pub ulimits: Vec<Ulimit>,
}

/// A limit of each process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ulimit {
    /// The resource: `nofile`, `core`, …
    pub name: String,
    /// What holds now; `u64::MAX` for no limit.
    pub soft: u64,
    /// How far a process may raise it.
    pub hard: u64,
}

/// Why a container cannot be held so.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// There is no such capability.
    #[error("{0:?} is not a capability; capabilities(7) lists them, and ALL means all of them")]
    Capability(String),
    /// There is no such limit.
    #[error("{0:?} is not a limit of processes; the limits are {known}", known = RESOURCES.join(", "))]
    Resource(String),
    /// The soft limit is above the hard one.
    #[error("the limit {name} is {soft} and may be raised to {hard}: the second number must not be less")]
    Order {
        /// The resource.
        name: String,
        /// The soft limit.
        soft: u64,
        /// The hard limit.
        hard: u64,
    },
    /// A resource has two limits.
    #[error("the limit {0} is given twice")]
    Twice(String),
    /// The seccomp profile.
    #[error(transparent)]
    Seccomp(#[from] ProfileError),
}

impl Default for Confinement {
    fn default() -> Self {
        Self {
            capabilities: DEFAULT.iter().map(|name| (*name).to_owned()).collect(),
            seccomp: Seccomp::Default,
            no_new_privileges: false,
            pids_limit: PIDS_LIMIT,
            read_only: false,
            ulimits: Vec::new(),
        }
    }
}

impl Confinement {
    /// What versions gave that said nothing of it: their services go on as they began.
    #[must_use]
    pub fn of_older_versions() -> Self {
        let mut older = Self { seccomp: Seccomp::Unconfined, pids_limit: 0, ..Self::default() };
        older.capabilities.retain(|name| name != "CAP_AUDIT_WRITE");
        older
    }

    /// Adds to and then takes from the capabilities. Each name may lack `CAP_`, in any case, or be `ALL`.
    pub fn change_capabilities(&mut self, add: &[String], drop: &[String]) -> Result<(), ConfinementError> {
        let named = |names: &[String]| -> Result<Vec<&'static str>, ConfinementError> {
            let mut found = Vec::new();
            for name in names {
                let upper = name.to_ascii_uppercase();
                let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
                match ALL.iter().find(|known| known.strip_prefix("CAP_") == Some(short)) {
                    Some(known) => found.push(*known),
                    None if upper == "ALL" => found.extend(ALL),
                    None => return Err(ConfinementError::Capability(name.clone())),
                }
            }
            Ok(found)
        };
        let (added, dropped) = (named(add)?, named(drop)?);
        let all = |names: &[String]| names.iter().any(|name| name.eq_ignore_ascii_case("ALL"));
        // As Podman has it: `--cap-drop ALL --cap-add X` leaves X, `--cap-add ALL --cap-drop X` all but X.
        if all(drop) {
            self.capabilities.clear();
        }
        self.capabilities.extend(added.iter().map(|name| (*name).to_owned()));
        if !all(drop) {
            self.capabilities.retain(|name| !dropped.contains(&name.as_str()));
        }
        self.capabilities.sort();
        self.capabilities.dedup();
        Ok(())
    }

    /// Whether a container can be held so; for what came from elsewhere.
    pub fn check(&self) -> Result<(), ConfinementError> {
        if let Some(name) = self.capabilities.iter().find(|name| !ALL.contains(&name.as_str())) {
            return Err(ConfinementError::Capability(name.clone()));
        }
        for (at, limit) in self.ulimits.iter().enumerate() {
            if !RESOURCES.contains(&limit.name.as_str()) {
                return Err(ConfinementError::Resource(limit.name.clone()));
            }
            if limit.soft > limit.hard {
                let Ulimit { name, soft, hard } = limit.clone();
                return Err(ConfinementError::Order { name, soft, hard });
            }
            if self.ulimits.iter().take(at).any(|other| other.name == limit.name) {
                return Err(ConfinementError::Twice(limit.name.clone()));
            }
        }
        if let Seccomp::Profile(text) = &self.seccomp {
            Profile::parse(text)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn changed(add: &[&str], drop: &[&str]) -> Vec<String> {
        let words = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut confinement = Confinement::default();
        confinement.change_capabilities(&words(add), &words(drop)).unwrap();
        confinement.check().unwrap();
        confinement.capabilities
    }

    #[test]
    fn capabilities_are_added_and_dropped_under_any_spelling() {
        let changed_so = changed(&["net_admin", "CAP_SYS_PTRACE"], &["cap_chown"]);
        assert!(
            changed_so.contains(&"CAP_NET_ADMIN".to_owned())
                && changed_so.contains(&"CAP_SYS_PTRACE".to_owned())
        );
        assert!(!changed_so.contains(&"CAP_CHOWN".to_owned()));
        assert_eq!(changed_so.len(), DEFAULT.len() + 1);
        assert_eq!(changed(&["chown"], &["ALL"]), ["CAP_CHOWN"]);
        assert_eq!(changed(&["all"], &["SYS_ADMIN"]).len(), ALL.len() - 1);
        let unknown = Confinement::default().change_capabilities(&["fly".into()], &[]).unwrap_err();
        assert!(unknown.to_string().contains("\"fly\""), "{unknown}");
    }

    #[test]
    fn what_came_from_elsewhere_is_checked() {
        let with = |change: fn(&mut Confinement)| {
            let mut confinement = Confinement::default();
            change(&mut confinement);
            confinement.check().unwrap_err().to_string()
        };
        let limit = |name: &str, soft, hard| Ulimit { name: name.into(), soft, hard };
        assert!(with(|c| c.capabilities.push("CAP_X".into())).contains("CAP_X"));
        assert!(with(|c| c.seccomp = Seccomp::Profile("{".into())).contains("seccomp"));
        let mut confinement = Confinement { ulimits: vec![limit("files", 1, 2)], ..Confinement::default() };
        assert!(confinement.check().unwrap_err().to_string().contains("\"files\" is not a limit"));
        confinement.ulimits = vec![limit("core", 3, 2)];
        assert!(confinement.check().unwrap_err().to_string().contains("is 3 and may be raised to 2"));
        confinement.ulimits = vec![limit("core", 1, 2), limit("core", 1, 2)];
        assert!(confinement.check().unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn a_service_of_an_older_version_goes_on_as_it_began() {
        let older = Confinement::of_older_versions();
        older.check().unwrap();
        assert_eq!((older.seccomp, older.pids_limit), (Seccomp::Unconfined, 0));
        assert_eq!(older.capabilities.len() + 1, DEFAULT.len());
    }
}
