//! The rules by which a service moves. The defaults are those of the design.

use std::time::Duration;

use crate::quantity::Share;

/// When a service is looked at for a move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Its clients lose more than this part of their weight,
    pub arm: Share,
    /// for this time.
    pub time: Duration,
    /// It is looked at until they lose less than this part.
    pub disarm: Share,
}

impl Default for Thresholds {
    /// What is lost while it is not armed is lost in any case, and mostly more than a move costs. So the time is short; how
    /// often a service goes to and fro is the matter of its debt.
    fn default() -> Self {
        Self { arm: Share::clamped(0.05), time: Duration::from_secs(1), disarm: Share::clamped(0.02) }
    }
}

/// How much moving is too much for a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgets {
    /// Most moves in an hour.
    pub moves: u32,
    /// Most frozen time in an hour.
    pub frozen: Duration,
    /// Between two moves at least so many times the longer of the two passes.
    pub rest: u32,
    /// Services that a node sends at once.
    pub sends: u32,
}

impl Default for Budgets {
    fn default() -> Self {
        Self { moves: 6, frozen: Duration::from_millis(3600), rest: 10, sends: 1 }
    }
}

/// All rules.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rules {
    /// When a service is looked at.
    pub thresholds: Thresholds,
    /// How often it may move.
    pub budgets: Budgets,
}
