//! How a service's memory is to move: the mode, the way to find written pages, and when to freeze.

use std::time::Duration;

use godwit_memory::tracker::{Backend, Detected};
use godwit_policy::Mode;
use godwit_policy::converge::Goals;

use super::{Source, SourceError};
use crate::report::Report;

/// Mode `auto` moves a service with less memory cold: on any usable link it crosses before a second scan would pay
/// off.
const SMALL: u64 = 4 << 20;

/// How the memory of this service will move.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) mode: Mode,
    pub(super) backend: Backend,
    pub(super) goals: Goals,
    /// Why this mode, in one line; empty when the user named it.
    why: String,
}

impl Plan {
    /// The plan for a destination that can, or cannot, restore before all pages are there.
    pub(super) fn with(mut self, userfaultfd: bool, node: &str) -> Result<Self, SourceError> {
        if userfaultfd || !self.goals.postcopy {
            return Ok(self);
        }
        if matches!(self.mode, Mode::Postcopy | Mode::Hybrid) {
            return Err(SourceError::NotEligible(vec![format!(
                "mode {} needs userfaultfd, which node {node} does not allow; `godwit doctor` there says why. Modes cold and precopy do not need it",
                self.mode.name()
            )]));
        }
        self.goals.postcopy = false;
        Ok(self)
    }

    /// Why this mode; empty when the user named it.
    pub(super) fn why(&self) -> &str {
        &self.why
    }

    /// Whether what the service writes changes how it moves.
    pub(super) fn needs_writes(&self) -> bool {
        matches!(self.mode, Mode::Precopy | Mode::Hybrid)
    }

    /// Notes the choice in the report.
    pub(super) fn tell(&self, report: &mut Report) {
        report.mode = self.mode.name().into();
        report.why.clone_from(&self.why);
        report.tracker = self.backend.name().into();
    }
}

impl Source {
    /// Chooses the mode.
    pub(super) fn plan(&self, memory: u64) -> Result<Plan, SourceError> {
        let Detected { backend, reasons } = self.local.tracker.clone();
        let blind = backend == Backend::None;
        let (mode, why) = match self.options.mode {
            Mode::Auto if blind && self.options.postcopy => {
                (Mode::Postcopy, "this kernel cannot tell which pages are written".to_owned())
            }
            Mode::Auto if blind => (Mode::Cold, "this kernel cannot tell which pages are written".to_owned()),
            Mode::Auto if memory < SMALL => {
                (Mode::Cold, format!("{} MiB of memory cross sooner than a round pays", memory >> 20))
            }
            Mode::Auto => (
                Mode::Precopy,
                "only what the service writes meanwhile has to cross while it is frozen".to_owned(),
            ),
            _ if blind && self.options.prepares => {
                return Err(SourceError::NotEligible(vec![format!(
                    "node {} cannot tell which pages the service writes: {}; without that nothing can be prepared",
                    self.local.node,
                    reasons.join("; ")
                )]));
            }
            mode @ (Mode::Precopy | Mode::Hybrid) if blind => {
                return Err(SourceError::NotEligible(vec![format!(
                    "mode {} needs to know which pages are written, and node {} cannot tell: {}; use mode cold or postcopy",
                    mode.name(),
                    self.local.node,
                    reasons.join("; ")
                )]));
            }
            mode => (mode, String::new()),
        };
        let after = matches!(mode, Mode::Postcopy | Mode::Hybrid);
        let goals = Goals {
            max_frozen: self.options.max_frozen,
            margin: Duration::ZERO,
            max_rounds: self.options.max_rounds,
            throttle: self.options.throttle && !after,
            postcopy: after || (self.options.postcopy && mode == Mode::Precopy),
            thrifty: after,
        };
        Ok(Plan { mode, backend, goals, why })
    }
}
