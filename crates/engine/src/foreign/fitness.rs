//! What an engine of others is like on a node, whatever container it is asked for.

/// Whether containers of an engine move from a node and to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fitness {
    /// The node has no such engine.
    Absent,
    /// They do; this is the engine's version.
    Fit(String),
    /// They do not, or in one direction only: why, and what to do.
    Unfit(String),
}
