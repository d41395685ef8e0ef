//! The steps of a destination whose source waits for it with a frozen service.

/// What the destination has begun to do, so that a source whose service is frozen can see whether it makes progress.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Reached {
    /// The step.
    #[prost(enumeration = "Step", tag = "1")]
    pub step: i32,
}

/// A step of the destination while the service is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Step {
    /// None that this version knows.
    Unknown = 0,
    /// It makes the restore ready.
    Preparing = 1,
    /// It waits for all pages, as it cannot restore before they are there.
    Collecting = 2,
    /// CRIU restores the processes.
    Restoring = 3,
    /// It compares the restored processes with what came.
    Checking = 4,
    /// It waits for its disk to have the files that changed last.
    Syncing = 5,
    /// It records in its journal that all is restored.
    Noting = 6,
    /// It rewrites the images for its executables.
    Rewriting = 7,
}

impl Step {
    /// What it does, after "while it was to"; nothing for one that this version does not know.
    #[must_use]
    pub fn work(self) -> Option<&'static str> {
        Some(match self {
            Self::Unknown => return None,
            Self::Preparing => "make the restore ready",
            Self::Collecting => "take the pages of the service",
            Self::Restoring => "restore the processes",
            Self::Checking => "check the restored processes",
            Self::Syncing => "write the changed files to its disk",
            Self::Noting => "write to its journal",
            Self::Rewriting => "rewrite the images for its executables",
        })
    }
}
