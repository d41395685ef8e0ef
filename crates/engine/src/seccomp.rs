//! Which system calls a container's processes may make: profiles, and the filter made of them.
//!
//! ```text
//! --security-opt seccomp=FILE ─▶ Profile::parse ─┐
//!                                                ├─▶ Profile::filter(capabilities) ─▶ linux.seccomp of
//!                      default (default.rs) ─────┘    of this machine's architecture   the config.json
//! ```
//!
//! A profile is JSON in the form that Podman, Docker and CRI-O read: the `linux.seccomp` of the OCI runtime
//! specification, whose rules may say besides for which capabilities and architectures they are
//! (`includes`, `excludes`), and `archMap` in place of `architectures`.
//!
//! runc compiles the filter with libseccomp and passes over names that its libseccomp does not know; what no
//! rule names is answered by the default action. The kernel keeps the compiled filter with each process; CRIU
//! carries it to another node, which looks whether it refuses what the profile refuses ([`refused`]). Besides, the
//! profile is only used again by `godwit exec`.

mod default;
mod refused;

use std::collections::BTreeSet;

pub(crate) use refused::refused;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Longest profile, in bytes: the longest of those that are published have 40 KiB.
pub const MAX_PROFILE: usize = 256 << 10;

/// Which filter a container's processes get.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seccomp {
    /// godwit's own profile.
    #[default]
    Default,
    /// None.
    Unconfined,
    /// This profile; [`Profile::parse`] has read it.
    Profile(String),
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is too long.
    #[error("the seccomp profile has {0} bytes; at most {MAX_PROFILE} are allowed")]
    TooLong(usize),
    /// It is not a profile.
    #[error("the seccomp profile cannot be read")]
    Json(#[from] serde_json::Error),
    /// A word in it is none that seccomp has.
    #[error("the seccomp profile has the {what} {word:?}, which {reason}")]
    Word {
        /// What the word stands for: action, operator, architecture.
        what: &'static str,
        /// The word.
        word: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A rule is about nothing.
    #[error("a rule of the seccomp profile names no system call")]
    NoName,
    /// An argument's number is none.
    #[error("a rule of the seccomp profile is about argument {0} of {1}; system calls have arguments 0 to 5")]
    Argument(u32, String),
}

/// A profile that has been read.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    default_action: String,
    #[serde(default)]
    default_errno_ret: Option<u32>,
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    arch_map: Option<Vec<Architectures>>,
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    syscalls: Option<Vec<Rule>>,
    /// The socket of a supervisor, which could not move with the service.
    #[serde(default)]
    listener_path: Option<String>,
}

/// An architecture with those whose programs its kernel runs, too.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Architectures {
    architecture: String,
    #[serde(default)]
    sub_architectures: Option<Vec<String>>,
}

/// What is done with some system calls.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Rule {
    names: Vec<String>,
    /// In place of `names`, as old profiles have it.
    name: Option<String>,
    action: String,
    errno_ret: Option<u32>,
    args: Option<Vec<Argument>>,
    includes: Condition,
    excludes: Condition,
}

/// A comparison with an argument of the call.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Argument {
    index: u32,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

/// When a rule is (not) for a container.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    /// Those that it holds, or does not.
    caps: Option<Vec<String>>,
    /// As Go names them: amd64, arm64.
    arches: Option<Vec<String>>,
}

const ACTIONS: &[&str] = &[
    "SCMP_ACT_KILL",
    "SCMP_ACT_KILL_PROCESS",
    "SCMP_ACT_KILL_THREAD",
    "SCMP_ACT_TRAP",
    "SCMP_ACT_ERRNO",
    "SCMP_ACT_TRACE",
    "SCMP_ACT_ALLOW",
    "SCMP_ACT_LOG",
];

const OPERATORS: &[&str] = &[
    "SCMP_CMP_NE",
    "SCMP_CMP_LT",
    "SCMP_CMP_LE",
    "SCMP_CMP_EQ",
    "SCMP_CMP_GE",
    "SCMP_CMP_GT",
    "SCMP_CMP_MASKED_EQ",
];

/// Flags of seccomp(2) that runc 1.1 knows.
const FLAGS: &[&str] =
    &["SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"];

/// A machine's architecture.
#[derive(Debug, Clone, Copy)]
struct Machine {
    /// As libseccomp names it.
    native: &'static str,
    /// The older ones whose programs its kernel runs as well.
    older: &'static [&'static str],
    /// As Go names it.
    name: &'static str,
}

const X86_64: Machine =
    Machine { native: "SCMP_ARCH_X86_64", older: &["SCMP_ARCH_X86", "SCMP_ARCH_X32"], name: "amd64" };
const AARCH64: Machine = Machine { native: "SCMP_ARCH_AARCH64", older: &["SCMP_ARCH_ARM"], name: "arm64" };
const RISCV64: Machine = Machine { native: "SCMP_ARCH_RISCV64", older: &[], name: "riscv64" };

/// The machines for which a filter is made: this one, and where processes change their instruction set those of all sets, so
/// that the filter that the kernel keeps with them stays right.
fn machines(crosses: bool) -> &'static [Machine] {
    match std::env::consts::ARCH {
        "riscv64" => &[RISCV64],
        "aarch64" if crosses => &[AARCH64, X86_64],
        "aarch64" => &[AARCH64],
        _ if crosses => &[X86_64, AARCH64],
        _ => &[X86_64],
    }
}

impl Seccomp {
    /// The `linux.seccomp` for a container with these capabilities on this machine, and where it `crosses` on those of
    /// other instruction sets; none without a filter.
    pub fn filter(&self, capabilities: &[String], crosses: bool) -> Result<Option<Value>, ProfileError> {
        let machines = machines(crosses);
        match self {
            Self::Default => Ok(Some(default::filter(capabilities, machines))),
            Self::Unconfined => Ok(None),
            Self::Profile(text) => Ok(Some(Profile::parse(text)?.filter(capabilities, machines))),
        }
    }
}

impl Profile {
    /// Those that it names of a machine, which has its own in any case.
    fn architectures_of(&self, machine: &Machine) -> BTreeSet<&str> {
        let Machine { native, older, .. } = machine;
        match (&self.arch_map, &self.architectures) {
            (Some(map), _) => map
                .iter()
                .filter(|entry| entry.architecture == *native)
                .flat_map(|entry| entry.sub_architectures.iter().flatten())
                .map(String::as_str)
                .chain([*native])
                .collect(),
            (None, Some(named)) => named
                .iter()
                .map(String::as_str)
                // A profile may name the architectures of several machines.
                .filter(|name| name == native || older.contains(name))
                .chain([*native])
                .collect(),
            (None, None) => BTreeSet::from([*native]),
        }
    }

    /// Reads a profile; all that a container could fail to start for later is checked here.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        if text.len() > MAX_PROFILE {
            return Err(ProfileError::TooLong(text.len()));
        }
        let profile: Self = serde_json::from_str(text)?;
        check("action", &profile.default_action, ACTIONS)?;
        for flag in &profile.flags {
            check("flag", flag, FLAGS)?;
        }
        if let Some(path) = profile.listener_path.as_ref().filter(|path| !path.is_empty()) {
            return Err(ProfileError::Word {
                what: "listenerPath",
                word: path.clone(),
                reason: "names a supervisor, which could not move with the service",
            });
        }
        for rule in profile.syscalls.iter().flatten() {
            if rule.names().next().is_none() {
                return Err(ProfileError::NoName);
            }
            check("action", &rule.action, ACTIONS)?;
            for argument in rule.args.iter().flatten() {
                check("operator", &argument.op, OPERATORS)?;
                if argument.index > 5 {
                    let name = rule.names().next().unwrap_or_default().to_owned();
                    return Err(ProfileError::Argument(argument.index, name));
                }
            }
        }
        Ok(profile)
    }

    fn filter(&self, capabilities: &[String], machines: &[Machine]) -> Value {
        let architectures: BTreeSet<&str> =
            machines.iter().flat_map(|machine| self.architectures_of(machine)).collect();
        let rules = self.syscalls.iter().flatten().filter(|rule| rule.is_for(capabilities, machines));
        let mut filter = json!({
            "defaultAction": self.default_action,
            "architectures": architectures,
            "syscalls": rules.map(Rule::json).collect::<Vec<_>>(),
        });
        if let Some(errno) = self.default_errno_ret {
            filter["defaultErrnoRet"] = json!(errno);
        }
        if !self.flags.is_empty() {
            filter["flags"] = json!(self.flags);
        }
        filter
    }
}

impl Rule {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().chain(&self.name).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// A rule includes when it names something that the container has, or one of its machines, and excludes when it names
    /// such a thing, or all of them.
    fn is_for(&self, capabilities: &[String], machines: &[Machine]) -> bool {
        let holds = |names: &Option<Vec<String>>| {
            names
                .as_ref()
                .filter(|names| !names.is_empty())
                .map(|names| names.iter().any(|name| capabilities.contains(name)))
        };
        let names = |names: &Option<Vec<String>>, machine: &Machine| {
            names.as_ref().is_some_and(|names| names.iter().any(|name| name == machine.name))
        };
        let is_of_any = self.includes.arches.as_ref().is_none_or(Vec::is_empty);
        holds(&self.includes.caps).unwrap_or(true)
            && (is_of_any || machines.iter().any(|machine| names(&self.includes.arches, machine)))
            && !holds(&self.excludes.caps).unwrap_or(false)
            && !machines.iter().all(|machine| names(&self.excludes.arches, machine))
    }

    fn json(&self) -> Value {
        let arguments: Vec<_> = self
            .args
            .iter()
            .flatten()
            .map(|a| json!({ "index": a.index, "value": a.value, "valueTwo": a.value_two, "op": a.op }))
            .collect();
        let mut rule =
            json!({ "names": self.names().collect::<Vec<_>>(), "action": self.action, "args": arguments });
        if let Some(errno) = self.errno_ret {
            rule["errnoRet"] = json!(errno);
        }
        rule
    }
}

fn check(what: &'static str, word: &str, known: &[&str]) -> Result<(), ProfileError> {
    if known.contains(&word) {
        return Ok(());
    }
    let reason = match word {
        "SCMP_ACT_NOTIFY" => "asks a supervisor, which could not move with the service",
        _ => "is not one that runc knows",
    };
    Err(ProfileError::Word { what, word: word.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(filter: &Value, action: &str) -> Vec<String> {
        let rules = filter["syscalls"].as_array().unwrap().iter().filter(|rule| rule["action"] == action);
        rules
            .flat_map(|rule| rule["names"].as_array().unwrap().clone())
            .map(|name| name.as_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn a_rule_is_for_containers_that_hold_its_capability() {
        let text = r#"{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":38,"archMap":[
            {"architecture":"SCMP_ARCH_X86_64","subArchitectures":["SCMP_ARCH_X86"]},
            {"architecture":"SCMP_ARCH_AARCH64","subArchitectures":["SCMP_ARCH_ARM"]}],
            "syscalls":[
            {"names":["bpf"],"action":"SCMP_ACT_ALLOW","args":[],"includes":{"caps":["CAP_BPF"]},"excludes":{}},
            {"names":["chroot"],"action":"SCMP_ACT_ERRNO","errnoRet":1,"includes":{},"excludes":{"caps":["CAP_SYS_CHROOT"]}},
            {"name":"read","action":"SCMP_ACT_ALLOW","args":null},
            {"names":["s390_sthyi"],"action":"SCMP_ACT_ALLOW","includes":{"arches":["s390x"]}}]}"#;
        let profile = Profile::parse(text).unwrap();
        let without = profile.filter(&[], machines(false));
        assert_eq!(names(&without, "SCMP_ACT_ALLOW"), ["read"]);
        assert_eq!(names(&without, "SCMP_ACT_ERRNO"), ["chroot"]);
        assert_eq!(
            (&without["defaultErrnoRet"], &without["syscalls"][0]["errnoRet"]),
            (&json!(38), &json!(1))
        );
        let with = profile.filter(&["CAP_BPF".into(), "CAP_SYS_CHROOT".into()], machines(false));
        assert_eq!(names(&with, "SCMP_ACT_ALLOW"), ["bpf", "read"]);
        assert!(names(&with, "SCMP_ACT_ERRNO").is_empty());
        assert_eq!(with["architectures"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn where_processes_change_their_instruction_set_the_filter_is_for_both() {
        let text = r#"{"defaultAction":"SCMP_ACT_ERRNO","archMap":[
            {"architecture":"SCMP_ARCH_X86_64","subArchitectures":["SCMP_ARCH_X86"]},
            {"architecture":"SCMP_ARCH_AARCH64","subArchitectures":["SCMP_ARCH_ARM"]}],
            "syscalls":[
            {"names":["arch_prctl"],"action":"SCMP_ACT_ALLOW","includes":{"arches":["amd64"]}},
            {"names":["sync_file_range2"],"action":"SCMP_ACT_ALLOW","includes":{"arches":["arm64"]}},
            {"names":["s390_sthyi"],"action":"SCMP_ACT_ALLOW","includes":{"arches":["s390x"]}},
            {"names":["one"],"action":"SCMP_ACT_ALLOW","excludes":{"arches":["amd64"]}},
            {"names":["none"],"action":"SCMP_ACT_ALLOW","excludes":{"arches":["amd64","arm64"]}}]}"#;
        let both = [X86_64, AARCH64];
        let filter = Profile::parse(text).unwrap().filter(&[], &both);
        assert_eq!(names(&filter, "SCMP_ACT_ALLOW"), ["arch_prctl", "sync_file_range2", "one"]);
        let words = json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM", "SCMP_ARCH_X86", "SCMP_ARCH_X86_64"]);
        assert_eq!(filter["architectures"], words);
        // The same at either end.
        assert_eq!(Profile::parse(text).unwrap().filter(&[], &[AARCH64, X86_64]), filter);
        let own = default::filter(&[], &both);
        let allowed = names(&own, "SCMP_ACT_ALLOW");
        assert!(allowed.iter().any(|name| name == "arch_prctl"), "{allowed:?}");
        let words: Vec<_> = own["architectures"].as_array().unwrap().iter().collect();
        assert_eq!(words.len(), 5, "{words:?}");
    }

    #[test]
    fn what_is_no_profile_is_refused_with_the_word() {
        for (text, said) in [
            ("[]", "cannot be read"),
            (r#"{"defaultAction":"ALLOW"}"#, "the action \"ALLOW\""),
            (r#"{"defaultAction":"SCMP_ACT_NOTIFY"}"#, "supervisor"),
            (r#"{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/run/x"}"#, "supervisor"),
            (
                r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"action":"SCMP_ACT_ERRNO"}]}"#,
                "names no system call",
            ),
            (
                r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_ERRNO","args":[{"index":6,"value":0,"op":"SCMP_CMP_EQ"}]}]}"#,
                "argument 6 of read",
            ),
        ] {
            let error = Profile::parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let long = Profile::parse(&" ".repeat(MAX_PROFILE + 1)).unwrap_err();
        assert!(matches!(long, ProfileError::TooLong(_)), "{long}");
    }

    #[test]
    fn the_default_profile_is_one_itself_and_allows_more_to_who_holds_more() {
        let none = Seccomp::Default.filter(&[], false).unwrap().unwrap();
        let profile = Profile::parse(&none.to_string()).unwrap();
        assert_eq!(
            names(&profile.filter(&[], machines(false)), "SCMP_ACT_ALLOW"),
            names(&none, "SCMP_ACT_ALLOW")
        );
        let allowed = names(&none, "SCMP_ACT_ALLOW");
        for call in ["read", "clone3", "futex", "mount", "rseq", "socket"] {
            assert!(allowed.iter().any(|name| name == call), "{call}");
        }
        for call in ["bpf", "ptrace", "userfaultfd", "io_uring_setup", "kexec_load", "chroot", "init_module"]
        {
            assert!(!allowed.iter().any(|name| name == call), "{call}");
        }
        // Neither allowed nor refused with an error of its own: as if the kernel had none.
        let named = [allowed, names(&none, "SCMP_ACT_ERRNO")].concat();
        assert!(!named.iter().any(|name| name.starts_with("landlock_")), "{named:?}");
        assert_eq!(none["defaultErrnoRet"], 38);
        let admin = Seccomp::Default.filter(&["CAP_SYS_ADMIN".into()], false).unwrap().unwrap();
        assert!(names(&admin, "SCMP_ACT_ALLOW").iter().any(|name| name == "bpf"));
        assert!(!names(&admin, "SCMP_ACT_ERRNO").iter().any(|name| name == "bpf"));
        assert_eq!(Seccomp::Unconfined.filter(&[], false).unwrap(), None);
    }

    #[test]
    fn no_system_call_of_the_default_profile_is_named_twice_for_one_container() {
        let all: Vec<_> =
            default::BY_CAPABILITY.iter().map(|(capability, _)| (*capability).to_owned()).collect();
        for capabilities in [&[][..], &all[..]] {
            let filter = Seccomp::Default.filter(capabilities, false).unwrap().unwrap();
            let rules = filter["syscalls"].as_array().unwrap();
            let plain = rules.iter().filter(|rule| rule["args"].as_array().is_none_or(Vec::is_empty));
            let mut seen = BTreeSet::new();
            for name in plain.flat_map(|rule| rule["names"].as_array().unwrap()) {
                assert!(seen.insert(name.as_str().unwrap()), "{name}");
            }
        }
    }
}
