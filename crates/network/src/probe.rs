//! What of the network works on this node, for `godwit doctor`.

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// What was looked at.
    pub name: String,
    /// Whether godwit can work with it.
    pub ok: bool,
    /// What was found, and if it is not well, what to do.
    pub detail: String,
}

/// Looks at the node's network.
pub async fn probe(_uplink: &str) -> Vec<Fact> {
    Vec::new()
}
