//! What an engine of others is like on a node, whatever container it is asked for.

use std::time::Duration;

/// How long an engine is waited for: one that has a container to import does not answer meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Whether an engine is such that its containers can move from a node and to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fitness {
    /// The node has no such engine.
    Absent,
    /// It is; this is its version.
    Fit(String),
    /// It is not.
    Unfit {
        /// Why.
        found: String,
        /// What to do.
        advice: String,
    },
}

impl Fitness {
    pub(crate) fn unfit(found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Unfit { found: found.into(), advice: advice.into() }
    }

    /// It has not answered.
    pub(crate) fn silent() -> Self {
        let found = format!("it has not answered for {} s", PATIENCE.as_secs());
        Self::unfit(found, "ask again; while a container comes to it, it answers later")
    }
}
