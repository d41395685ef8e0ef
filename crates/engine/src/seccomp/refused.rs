//! Which system calls a container's filter refuses, by number: what the filters of a service that arrives are
//! compared with.
//!
//! `numbers/*.txt` have the calls of each architecture up to Linux 6.17, as libseccomp names them: names and numbers in
//! turn. A name that is missing there costs nothing but its check.
//!
//! It is told of the same `linux.seccomp` that runc would be given. Where two versions of libseccomp make different
//! filters of it, nothing is demanded that one of them would not do: of calls that a profile allows while the filter
//! does not know them, and, where a profile lists what is refused, of calls newer than any libseccomp in use.

use std::collections::{BTreeMap, BTreeSet};

use godwit_criu::images::{Refused, RefusedOf};
use serde_json::Value;

/// Numbers below are looked at, of calls that there are and of later ones.
const LOOKED_AT: u32 = 512;
/// Calls from here on (Linux 5.10) are not known to every libseccomp.
const NEW: u32 = 440;
/// Calls by which a process can but take rights from itself: a filter that lets them pass gives nothing. Versions up to
/// 0.2.0 had them in the default profile, and services of theirs are to arrive.
const SELF_CONFINING: [&str; 3] = ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"];
/// The bit that numbers of x32 have.
const X32_BIT: u32 = 0x4000_0000;

const X86_64: &str = include_str!("numbers/x86_64.txt");
const X32: &str = include_str!("numbers/x32.txt");
const X86: &str = include_str!("numbers/x86.txt");
const AARCH64: &str = include_str!("numbers/aarch64.txt");
const ARM: &str = include_str!("numbers/arm.txt");
const RISCV64: &str = include_str!("numbers/riscv64.txt");

/// Calls of 32-bit x86 that stand for others: where one of these may be made, libseccomp lets the call pass that stands
/// for it.
const STANDING_FOR: [(&str, &str); 2] = [
    (
        "socketcall",
        "accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg recvmsg send \
         sendmmsg sendmsg sendto setsockopt shutdown socket socketpair",
    ),
    (
        "ipc",
        "msgctl msgget msgrcv msgsnd semctl semget semop semtimedop semtimedop_time64 shmat shmctl shmdt shmget",
    ),
];

/// An architecture whose programs a machine runs.
struct Architecture {
    /// As libseccomp names it.
    word: &'static str,
    name: &'static str,
    audit: u32,
    bit: u32,
    numbers: &'static str,
    /// Arguments have 32 bits, and no more of them is compared.
    is_32_bit: bool,
}

const fn architecture(
    word: &'static str,
    name: &'static str,
    audit: u32,
    numbers: &'static str,
    is_32_bit: bool,
) -> Architecture {
    Architecture { word, name, audit, bit: 0, numbers, is_32_bit }
}

const OF_X86_64: &[Architecture] = &[
    architecture("SCMP_ARCH_X86_64", "x86-64", 0xc000_003e, X86_64, false),
    Architecture { bit: X32_BIT, ..architecture("SCMP_ARCH_X32", "x32", 0xc000_003e, X32, true) },
    architecture("SCMP_ARCH_X86", "32-bit x86", 0x4000_0003, X86, true),
];
const OF_AARCH64: &[Architecture] = &[
    architecture("SCMP_ARCH_AARCH64", "arm64", 0xc000_00b7, AARCH64, false),
    architecture("SCMP_ARCH_ARM", "32-bit arm", 0x4000_0028, ARM, true),
];
const OF_RISCV64: &[Architecture] =
    &[architecture("SCMP_ARCH_RISCV64", "riscv64", 0xc000_00f3, RISCV64, false)];

/// Those of this machine, its own first.
fn architectures() -> &'static [Architecture] {
    match std::env::consts::ARCH {
        "aarch64" => OF_AARCH64,
        "riscv64" => OF_RISCV64,
        _ => OF_X86_64,
    }
}

/// Names and numbers of a table.
fn pairs(numbers: &'static str) -> impl Iterator<Item = (&'static str, u32)> {
    let mut words = numbers.split_ascii_whitespace();
    std::iter::from_fn(move || Some((words.next()?, words.next()?.parse().ok()?)))
}

/// What a filter refuses, of which this is the `linux.seccomp`.
pub(crate) fn refused(filter: &Value) -> Refused {
    let known: BTreeSet<&str> =
        [X86_64, X32, X86, AARCH64, ARM, RISCV64].into_iter().flat_map(pairs).map(|(name, _)| name).collect();
    let rules = Rules::of(filter);
    let allows_unknown = rules
        .by_name
        .iter()
        .any(|(name, rules)| !known.contains(name.as_str()) && rules.iter().any(|rule| rule.passes));
    let named = |architecture: &Architecture| {
        filter["architectures"].as_array().into_iter().flatten().any(|word| word == architecture.word)
    };
    let of = architectures().iter().enumerate().map(|(place, architecture)| {
        let Architecture { name, audit, bit, .. } = *architecture;
        if place != 0 && !named(architecture) {
            let always =
                (0..LOOKED_AT).map(|number| (number | bit, "a call of another architecture")).collect();
            return RefusedOf { architecture: audit, name, always, with: Vec::new() };
        }
        let (mut always, mut with) = (Vec::new(), Vec::new());
        let mut numbers: BTreeMap<u32, Vec<&'static str>> = BTreeMap::new();
        for (name, number) in pairs(architecture.numbers) {
            numbers.entry(number).or_default().push(name);
        }
        // Old and new names of one call.
        for (number, spoken) in &numbers {
            let names: Vec<_> = spoken.iter().copied().chain(standing_for(architecture, spoken)).collect();
            let Some(name) = names.first().copied().filter(|name| !SELF_CONFINING.contains(name)) else {
                continue;
            };
            if rules.is_never_made(&names) && (!rules.default_passes || *number < NEW) {
                always.push((number | bit, name));
            } else if names.len() == spoken.len() && (!rules.default_passes || *number < NEW) {
                let vectors = rules.refused_with(&names, architecture.is_32_bit);
                with.extend(vectors.into_iter().map(|arguments| (number | bit, name, arguments)));
            }
        }
        if !rules.default_passes && !allows_unknown {
            // Of a later kernel.
            let last = numbers.range(..LOOKED_AT).next_back().map_or(0, |(number, _)| *number);
            always.extend((last + 1..LOOKED_AT).map(|number| (number | bit, "a call without a name")));
        }
        RefusedOf { architecture: audit, name, always, with }
    });
    Refused { of: of.collect() }
}

/// The calls that are made by one of these.
fn standing_for(architecture: &Architecture, names: &[&str]) -> impl Iterator<Item = &'static str> {
    let found =
        STANDING_FOR.iter().find(|(name, _)| architecture.word == "SCMP_ARCH_X86" && names.contains(name));
    found.into_iter().flat_map(|(_, others)| others.split_ascii_whitespace())
}

/// What is done with calls.
struct Rules {
    default_passes: bool,
    by_name: BTreeMap<String, Vec<Rule>>,
}

struct Rule {
    passes: bool,
    conditions: Vec<Condition>,
}

#[derive(Clone, Copy)]
struct Condition {
    index: usize,
    value: u64,
    second: u64,
    operator: Operator,
}

#[derive(Clone, Copy)]
enum Operator {
    Unequal,
    Less,
    LessOrEqual,
    Equal,
    GreaterOrEqual,
    Greater,
    Masked,
}

/// Whether a call is made that is answered so.
fn passes(action: &Value) -> bool {
    matches!(action.as_str(), Some("SCMP_ACT_ALLOW" | "SCMP_ACT_LOG" | "SCMP_ACT_TRACE"))
}

impl Rules {
    fn of(filter: &Value) -> Self {
        let mut by_name: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
        for rule in filter["syscalls"].as_array().into_iter().flatten() {
            for name in rule["names"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                let conditions = rule["args"].as_array().into_iter().flatten().filter_map(Condition::of);
                let rule = Rule { passes: passes(&rule["action"]), conditions: conditions.collect() };
                by_name.entry(name.to_owned()).or_default().push(rule);
            }
        }
        Self { default_passes: passes(&filter["defaultAction"]), by_name }
    }

    fn for_names<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = &'a Rule> {
        names.iter().filter_map(|name| self.by_name.get(*name)).flatten()
    }

    /// Whether the call of these names is refused whatever its arguments are.
    fn is_never_made(&self, names: &[&str]) -> bool {
        let mut rules = self.for_names(names).peekable();
        if rules.peek().is_none() {
            return !self.default_passes;
        }
        let mut is_left_to_default = true;
        for rule in rules {
            if rule.passes {
                return false;
            }
            is_left_to_default &= !rule.conditions.is_empty();
        }
        !(is_left_to_default && self.default_passes)
    }

    /// Whether some reading of the rules makes the call: a rule does, or none is for it and the default does.
    fn may_be_made(&self, names: &[&str], arguments: &[u64; 6]) -> bool {
        let mut matching = self.for_names(names).filter(|rule| rule.is_for(arguments)).peekable();
        if matching.peek().is_none() {
            return self.default_passes;
        }
        matching.any(|rule| rule.passes)
    }

    /// Arguments at the borders of the rules with which the call is refused.
    fn refused_with(&self, names: &[&str], is_32_bit: bool) -> Vec<[u64; 6]> {
        let mut values: [BTreeSet<u64>; 6] = Default::default();
        for Condition { index, value, second, .. } in self.for_names(names).flat_map(|rule| &rule.conditions)
        {
            let at_border = [0, *value, *second, value.wrapping_add(1), value.wrapping_sub(1), !value];
            values[*index].extend(at_border.map(|value| if is_32_bit { value & 0xffff_ffff } else { value }));
        }
        let mut vectors = BTreeSet::from([[0; 6]]);
        for (index, values) in values.iter().enumerate() {
            let longer: Vec<_> = vectors
                .iter()
                .flat_map(|vector| {
                    values.iter().map(move |value| {
                        let mut vector = *vector;
                        vector[index] = *value;
                        vector
                    })
                })
                .collect();
            vectors.extend(longer);
            if vectors.len() > MOST_VECTORS {
                break;
            }
        }
        vectors.into_iter().filter(|vector| !self.may_be_made(names, vector)).take(MOST_VECTORS).collect()
    }
}

/// Most arguments of one call that are tried.
const MOST_VECTORS: usize = 256;

impl Rule {
    /// Of several conditions on one argument runc makes several rules.
    fn is_for(&self, arguments: &[u64; 6]) -> bool {
        let holds = |condition: &Condition| condition.holds(arguments[condition.index]);
        let twice = self.conditions.iter().enumerate().any(|(at, condition)| {
            self.conditions.iter().take(at).any(|other| other.index == condition.index)
        });
        if twice { self.conditions.iter().any(holds) } else { self.conditions.iter().all(holds) }
    }
}

impl Condition {
    fn of(argument: &Value) -> Option<Self> {
        let operator = match argument["op"].as_str()? {
            "SCMP_CMP_NE" => Operator::Unequal,
            "SCMP_CMP_LT" => Operator::Less,
            "SCMP_CMP_LE" => Operator::LessOrEqual,
            "SCMP_CMP_EQ" => Operator::Equal,
            "SCMP_CMP_GE" => Operator::GreaterOrEqual,
            "SCMP_CMP_GT" => Operator::Greater,
            _ => Operator::Masked,
        };
        let index = usize::try_from(argument["index"].as_u64()?).ok().filter(|index| *index < 6)?;
        let number = |field: &str| argument[field].as_u64().unwrap_or(0);
        Some(Self { index, value: number("value"), second: number("valueTwo"), operator })
    }

    fn holds(&self, argument: u64) -> bool {
        match self.operator {
            Operator::Unequal => argument != self.value,
            Operator::Less => argument < self.value,
            Operator::LessOrEqual => argument <= self.value,
            Operator::Equal => argument == self.value,
            Operator::GreaterOrEqual => argument >= self.value,
            Operator::Greater => argument > self.value,
            Operator::Masked => argument & self.value == self.second,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::super::{Seccomp, default};
    use super::*;

    /// The names of the first architecture's calls that are refused.
    fn always(filter: &Value) -> BTreeSet<&'static str> {
        refused(filter).of[0].always.iter().map(|(_, name)| *name).collect()
    }

    #[test]
    fn the_default_profile_names_no_call_that_the_tables_lack() {
        let known: BTreeSet<_> = [X86_64, X32, X86, AARCH64, ARM, RISCV64]
            .into_iter()
            .flat_map(pairs)
            .map(|(name, _)| name)
            .collect();
        assert!(known.len() > 450 && pairs(X86_64).any(|pair| pair == ("mseal", 462)));
        let filter = Seccomp::Default.filter(&[], false).unwrap().unwrap();
        for rule in filter["syscalls"].as_array().unwrap() {
            for name in rule["names"].as_array().unwrap() {
                assert!(known.contains(name.as_str().unwrap()), "{name}");
            }
        }
    }

    #[test]
    fn the_default_profile_refuses_what_it_does_not_allow_on_every_architecture() {
        let filter = Seccomp::Default.filter(&[], false).unwrap().unwrap();
        let refused = refused(&filter);
        assert_eq!(refused.of.len(), architectures().len());
        for of in &refused.of {
            let names: Vec<_> = of.always.iter().map(|(_, name)| *name).collect();
            for name in
                ["bpf", "ptrace", "userfaultfd", "io_uring_setup", "init_module", "a call without a name"]
            {
                assert!(names.contains(&name), "{name} on {}", of.name);
            }
            for name in ["read", "clone3", "futex", "mount", "personality", "socket", "socketcall"] {
                assert!(!names.contains(&name), "{name} on {}", of.name);
            }
        }
        // The audit socket (AF_NETLINK, NETLINK_AUDIT), and a personality of another system.
        let with = |call: &str, arguments: [u64; 6]| {
            refused.of[0].with.iter().any(|(_, name, these)| *name == call && *these == arguments)
        };
        assert!(with("socket", [16, 0, 9, 0, 0, 0]) && !with("socket", [16, 0, 8, 0, 0, 0]), "{refused:?}");
        assert!(with("personality", [1, 0, 0, 0, 0, 0]) && !with("personality", [8, 0, 0, 0, 0, 0]));
        let all: Vec<_> =
            default::BY_CAPABILITY.iter().map(|(capability, _)| (*capability).to_owned()).collect();
        let more = always(&Seccomp::Default.filter(&all, false).unwrap().unwrap());
        assert!(!more.contains("bpf") && more.contains("io_uring_setup"));
    }

    #[test]
    fn a_filter_of_an_older_version_that_lets_a_program_confine_itself_gives_it_nothing() {
        let filter = Seccomp::Default.filter(&[], false).unwrap().unwrap();
        let found = always(&filter);
        assert!(found.contains("memfd_secret") && found.contains("io_uring_setup"), "{found:?}");
        assert!(!found.iter().any(|name| name.starts_with("landlock_")), "{found:?}");
    }

    #[test]
    fn a_profile_that_lists_what_is_refused_refuses_that() {
        let filter = json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": [architectures()[0].word], "syscalls": [
            { "names": ["syslog", "mseal", "of_the_future"], "action": "SCMP_ACT_ERRNO" },
            { "names": ["chroot"], "action": "SCMP_ACT_KILL", "args": [{ "index": 0, "value": 3, "op": "SCMP_CMP_GE" }] },
        ]});
        let refused = refused(&filter);
        assert_eq!(always(&filter), BTreeSet::from(["syslog"]), "not every libseccomp knows mseal");
        let with: Vec<_> =
            refused.of[0].with.iter().map(|(_, name, arguments)| (*name, arguments[0])).collect();
        assert_eq!(with, [("chroot", 3), ("chroot", 4), ("chroot", !3)]);
        // Programs of other architectures, which it does not name, are ended.
        for of in &refused.of[1..] {
            assert_eq!(of.always.len(), 512, "{}", of.name);
        }
    }

    #[test]
    fn nothing_is_demanded_of_calls_that_a_profile_allows_and_nobody_here_knows() {
        let profile = |name: &str| json!({ "defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{ "names": ["read", name], "action": "SCMP_ACT_ALLOW" }] });
        assert!(always(&profile("write")).contains("a call without a name"));
        let later = always(&profile("of_the_future"));
        assert!(!later.contains("a call without a name") && later.contains("write"));
    }
}
