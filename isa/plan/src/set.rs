//! The instruction sets that programs are built for.

/// An instruction set that programs are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// x86-64 without extensions.
    X86_64,
    /// 64-bit Arm, version 8.0.
    Aarch64,
}

impl Set {
    /// All sets, in the order in which they are listed everywhere.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// The name in file names and in `uname -m`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The set of the machine this runs on, if it is one of them.
    #[must_use]
    pub fn native() -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.name() == std::env::consts::ARCH)
    }
}
