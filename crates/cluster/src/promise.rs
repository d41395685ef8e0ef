//! What a service's settings promise of its copies, as a table that the rules and the nodes ask.
//!
//! | fence | restart from | other nodes take over | copies that run | lease lapses | silence at the commit | at the start |
//! |---|---|---|---|---|---|---|
//! | default | none | never | one | go on | go on | go on |
//! | default | checkpoint, image | after the limit | one in reach | go on | go on | wait |
//! | strict | none | never | one | go on | wait | wait |
//! | strict | checkpoint, image | after the limit | one, while godwitd runs | wait | wait | wait |
//!
//! *While godwitd runs*: godwitd freezes the service when the lease lapses. Its containers outlive it (`KillMode=process`), so
//! when godwitd has ended, or hangs, the copy runs on beside that of the next owner.
//!
//! *In reach*: beside it those of nodes that cannot reach the store. *Go on*: the service runs. At the commit of a move that
//! is forward, by the source's journal. *Wait*: it is frozen, or not started, until the store answers.
//!
//! To roll back on silence is in no row: the store may have made the commit, or may make it later.

/// Whether a service would rather stop than run twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fence {
    /// It runs on when its node cannot reach the store.
    #[default]
    Default,
    /// It is frozen before another node may start it.
    Strict,
}

/// What another node starts the service from when its node is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RestartFrom {
    /// Nothing: the service waits for its node.
    #[default]
    None,
    /// Its last checkpoint.
    Checkpoint,
    /// Its image, without what it had in memory and on disk.
    Image,
}

/// The settings of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Settings {
    /// Whether it would rather stop than run twice.
    pub fence: Fence,
    /// What another node starts it from.
    pub restart_from: RestartFrom,
}

/// How many copies of a service run at an instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// At most one. Where other nodes take over, that holds as long as the owner's godwitd runs: nothing else freezes its copy.
    One,
    /// At most one on nodes that reach the store. After a take-over the copy of an earlier owner runs on until that node
    /// reaches the store again.
    OneInReach,
}

/// What a node does when the store is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// What the service would do without a store.
    GoOn,
    /// The service does not run until the store has answered.
    Wait,
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// Another node may become the owner when this one's lease has stood still for its limit.
    pub taken_over: bool,
    /// Copies that run.
    pub copies: Copies,
    /// When the node's lease lapses.
    pub lapse: Silence,
    /// When the commit of a move has no answer. [`Silence::GoOn`] is forward, by the source's journal.
    pub commit: Silence,
    /// When the node has started.
    pub start: Silence,
}

impl Settings {
    /// What they promise.
    #[must_use]
    pub const fn promise(self) -> Promise {
        use Silence::{GoOn, Wait};
        match (self.fence, self.restart_from) {
            (Fence::Default, RestartFrom::None) => {
                Promise { taken_over: false, copies: Copies::One, lapse: GoOn, commit: GoOn, start: GoOn }
            }
            (Fence::Default, RestartFrom::Checkpoint | RestartFrom::Image) => Promise {
                taken_over: true,
                copies: Copies::OneInReach,
                lapse: GoOn,
                commit: GoOn,
                start: Wait,
            },
            (Fence::Strict, RestartFrom::None) => {
                Promise { taken_over: false, copies: Copies::One, lapse: GoOn, commit: Wait, start: Wait }
            }
            (Fence::Strict, RestartFrom::Checkpoint | RestartFrom::Image) => {
                Promise { taken_over: true, copies: Copies::One, lapse: Wait, commit: Wait, start: Wait }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_can_be_taken_over_runs_once_only_if_it_is_frozen_when_the_lease_lapses() {
        for fence in [Fence::Default, Fence::Strict] {
            for restart_from in [RestartFrom::None, RestartFrom::Checkpoint, RestartFrom::Image] {
                let promise = Settings { fence, restart_from }.promise();
                let safe = !promise.taken_over
                    || [promise.lapse, promise.commit, promise.start] == [Silence::Wait; 3];
                assert_eq!(promise.copies == Copies::One, safe, "{fence:?} {restart_from:?}");
                assert_eq!(promise.taken_over, restart_from != RestartFrom::None);
            }
        }
    }
}
