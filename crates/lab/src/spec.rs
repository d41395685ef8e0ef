//! What a machine is, as it is written: `debian12`, `arm64`, `debian13:cpu=Haswell:memory=2GiB:processors=1`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::error::LabError;

/// What a machine's name may stand for: its series as the archive calls it.
const DISTRIBUTIONS: [(&str, &str); 3] =
    [("debian12", "bookworm"), ("debian13", "trixie"), ("ubuntu24.04", "noble")];
/// The distribution where only the architecture is named.
const USUAL: &str = "debian13";
/// MiB.
const MEMORY: std::ops::RangeInclusive<u32> = 512..=65_536;
/// The version of cgroups that distributions use.
const CGROUP: u8 = 2;
const PROCESSORS: std::ops::RangeInclusive<u32> = 1..=64;

/// An instruction set that machines can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// x86-64.
    Amd64,
    /// 64-bit ARM.
    Arm64,
}

impl Architecture {
    /// That of this host; none where machines of it are not known.
    pub(crate) fn own() -> Option<Self> {
        [Self::Amd64, Self::Arm64].into_iter().find(|one| one.rust_name() == std::env::consts::ARCH)
    }

    fn rust_name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}

/// As Debian calls it.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        })
    }
}

/// A node that is a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Machine {
    distribution: String,
    /// Its instruction set.
    pub architecture: Architecture,
    /// A CPU model of QEMU's; none: the host's own under KVM, else all that the emulation can do.
    pub cpu: Option<String>,
    /// MiB.
    pub memory: u32,
    /// How many processors it has.
    pub processors: u32,
    /// Version of its cgroups.
    pub cgroup: u8,
    /// Its disk has a cache that a power cut empties: what the machine has not flushed is lost.
    pub volatile_disk: bool,
    /// Seconds by which its clock is ahead of the host's.
    pub(crate) clock_ahead: i64,
}

impl Machine {
    /// The series of its distribution, as the archive calls it.
    pub(crate) fn suite(&self) -> &'static str {
        DISTRIBUTIONS.iter().find(|(name, _)| *name == self.distribution).map_or("", |(_, suite)| suite)
    }

    /// What it runs, such as `debian12/amd64`.
    pub(crate) fn system(&self) -> String {
        format!("{}/{}", self.distribution, self.architecture)
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.distribution, self.architecture)?;
        if let Some(cpu) = &self.cpu {
            write!(f, ":cpu={cpu}")?;
        }
        write!(f, ":memory={}MiB:processors={}", self.memory, self.processors)?;
        if self.cgroup != CGROUP {
            write!(f, ":cgroup={}", self.cgroup)?;
        }
        if self.volatile_disk {
            f.write_str(":disk=volatile")?;
        }
        if self.clock_ahead != 0 {
            write!(f, ":clock={:+}s", self.clock_ahead)?;
        }
        Ok(())
    }
}

impl From<Machine> for String {
    fn from(machine: Machine) -> Self {
        machine.to_string()
    }
}

impl TryFrom<String> for Machine {
    type Error = LabError;
    fn try_from(text: String) -> Result<Self, LabError> {
        text.parse()
    }
}

impl FromStr for Machine {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        let bad = |reason: String| LabError::BadMachine { given: text.to_owned(), reason };
        let mut words = text.split(':');
        let system = words.next().unwrap_or_default();
        let (distribution, architecture) = match system {
            "arm64" | "amd64" => (USUAL, Some(system)),
            _ => match system.split_once('/') {
                Some((distribution, architecture)) => (distribution, Some(architecture)),
                None => (system, None),
            },
        };
        if !DISTRIBUTIONS.iter().any(|(name, _)| *name == distribution) {
            return Err(bad(format!("there is no distribution {distribution:?}")));
        }
        let architecture = match architecture {
            Some("amd64") => Architecture::Amd64,
            Some("arm64") => Architecture::Arm64,
            Some(other) => return Err(bad(format!("there is no architecture {other:?}"))),
            None => {
                Architecture::own().ok_or_else(|| bad("its architecture must be named here".to_owned()))?
            }
        };
        let mut machine = Self {
            distribution: distribution.to_owned(),
            architecture,
            cpu: None,
            memory: 1024,
            processors: 2,
            cgroup: CGROUP,
            volatile_disk: false,
            clock_ahead: 0,
        };
        for word in words {
            match word.split_once('=') {
                Some(("cpu", model)) if is_model(model) => machine.cpu = Some(model.to_owned()),
                Some(("cpu", model)) => return Err(bad(format!("{model:?} cannot be a CPU model"))),
                Some(("memory", memory)) => machine.memory = mebibytes(memory).map_err(bad)?,
                Some(("processors", number)) => {
                    let known = number.parse().ok().filter(|number| PROCESSORS.contains(number));
                    machine.processors =
                        known.ok_or_else(|| bad(format!("it can have 1 to 64 processors, not {number}")))?;
                }
                Some(("cgroup", "1")) if distribution != "debian12" => {
                    return Err(
                        bad("only systemd of debian12 still starts with cgroup version 1".to_owned()),
                    );
                }
                Some(("cgroup", version)) => {
                    let known = version.parse().ok().filter(|version| [1, CGROUP].contains(version));
                    machine.cgroup =
                        known.ok_or_else(|| bad(format!("there is no cgroup version {version:?}")))?;
                }
                Some(("disk", "volatile")) => machine.volatile_disk = true,
                Some(("disk", other)) => {
                    return Err(bad(format!("its disk can be volatile, not {other:?}")));
                }
                Some(("clock", seconds)) => {
                    let seconds = seconds.strip_suffix('s').and_then(|seconds| seconds.parse().ok());
                    machine.clock_ahead = seconds
                        .ok_or_else(|| bad("its clock is off by seconds, such as +3600s".to_owned()))?;
                }
                _ => return Err(bad(format!("{word:?} is no option"))),
            }
        }
        Ok(machine)
    }
}

/// Models have names such as Haswell-v4 or cortex-a72, and features behind commas are not taken.
fn is_model(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn mebibytes(text: &str) -> Result<u32, String> {
    let units = [("GiB", 1024), ("MiB", 1)];
    let read = units.iter().find_map(|(unit, scale)| {
        text.strip_suffix(unit).and_then(|number| number.parse::<u32>().ok()?.checked_mul(*scale))
    });
    read.filter(|memory| MEMORY.contains(memory))
        .ok_or_else(|| format!("its memory can be 512MiB to 64GiB, in MiB or GiB, not {text:?}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_read_and_written() {
        let text = "debian12/amd64:cpu=Haswell-v4:memory=2GiB:processors=1:cgroup=1";
        let machine: Machine = text.parse().unwrap();
        assert_eq!((machine.suite(), machine.architecture), ("bookworm", Architecture::Amd64));
        assert_eq!(
            (machine.cpu.as_deref(), machine.memory, machine.processors),
            (Some("Haswell-v4"), 2048, 1)
        );
        assert_eq!(machine.cgroup, 1);
        assert_eq!(machine.to_string().parse::<Machine>().unwrap(), machine);
        let usual: Machine = "arm64".parse().unwrap();
        assert_eq!((usual.suite(), usual.architecture), ("trixie", Architecture::Arm64));
        let ahead = Machine { clock_ahead: -259_200, volatile_disk: true, ..usual };
        assert_eq!(ahead.to_string().parse::<Machine>().unwrap(), ahead);
        assert_eq!("debian13".parse::<Machine>().unwrap().architecture, Architecture::own().unwrap());
        assert_eq!("ubuntu24.04/amd64".parse::<Machine>().unwrap().suite(), "noble");
    }

    #[test]
    fn bad_machines_are_refused_with_what_to_write() {
        for text in [
            "",
            "debian11",
            "debian12/riscv64",
            "debian12:cpu=",
            "debian12:cpu=max,+avx",
            "debian12:memory=1",
            "debian12:memory=1TiB",
            "debian12:memory=99999999GiB",
            "debian12:processors=0",
            "debian12:cgroup=3",
            "debian13:cgroup=1",
            "debian12:clock=soon",
            "debian12:disk=1GiB",
            "debian12:disk",
            "debian12:",
        ] {
            let message = text.parse::<Machine>().unwrap_err().to_string();
            assert!(message.contains("debian12"), "{text}: {message}");
        }
    }
}
