//! How the memory of a service moves.

/// How the memory moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Chosen by what is measured.
    #[default]
    Auto,
    /// All while the service is frozen.
    Cold,
    /// In rounds while it runs, and the rest while it is frozen.
    Precopy,
    /// After it runs at the destination.
    Postcopy,
    /// Once while it runs; what was written meanwhile after it runs at the destination.
    Hybrid,
}

impl Mode {
    /// Every mode, in the order in which they are told.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Cold, Self::Precopy, Self::Postcopy, Self::Hybrid];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cold => "cold",
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }

    /// The mode of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}
