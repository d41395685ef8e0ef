//! How far a migration has come according to a journal, and which stages go together.

/// Which side of a migration this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The service leaves.
    Source,
    /// The service arrives.
    Destination,
}

/// How far a migration has come, as promised on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Source: requested; the service runs here.
    Started,
    /// Source: the service is, or was about to be, frozen here.
    Frozen,
    /// Source: it is being aborted.
    Undoing,
    /// Destination: memory and disk have been reserved, nothing runs here.
    Reserved,
    /// Destination: the stopped copy is complete, the source may commit.
    Restored,
    /// The destination owns the service.
    Committed,
    /// As `committed`; the destination still needs pages from here.
    Serving,
    /// Source: as `committed`, and nothing of the service is left here. The destination may still ask.
    Released,
    /// Source: the migration was aborted, and the service runs here.
    Aborted,
    /// Destination: the copy is gone.
    Dropped,
    /// Nothing is left to do, and nobody will ask.
    Done,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Started,
        Self::Frozen,
        Self::Undoing,
        Self::Reserved,
        Self::Restored,
        Self::Committed,
        Self::Serving,
        Self::Released,
        Self::Aborted,
        Self::Dropped,
        Self::Done,
    ];

    /// Its name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Frozen => "frozen",
            Self::Undoing => "undoing",
            Self::Reserved => "reserved",
            Self::Restored => "restored",
            Self::Committed => "committed",
            Self::Serving => "serving",
            Self::Released => "released",
            Self::Aborted => "aborted",
            Self::Dropped => "dropped",
            Self::Done => "done",
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }

    /// Whether nothing is left to do and nobody will ask: it may be forgotten.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Aborted | Self::Dropped | Self::Done)
    }

    /// Whether this node still has something to do.
    #[must_use]
    pub fn is_open(self) -> bool {
        !self.is_final() && self != Self::Released
    }

    /// Whether the source has given the service away.
    #[must_use]
    pub fn is_committed(self) -> bool {
        matches!(self, Self::Committed | Self::Serving | Self::Released | Self::Done)
    }
}

/// What becomes of an entry when a newer migration of the same service begins on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Older {
    /// It is of the same incarnation, or needs nothing: nothing.
    Stays,
    /// It is over.
    Ends(Stage),
    /// The newer one cannot begin.
    Refuses,
}

/// The rule for [`Older`]: an entry for the service with this epoch, and a newer migration, for which its epoch
/// is `new`. A service that comes back with a higher epoch proves that its destination knows of the commit.
#[must_use]
pub fn older(role: Role, stage: Stage, epoch: u64, new_role: Role, new: u64) -> Older {
    match (role, stage) {
        (Role::Source, Stage::Released) if epoch.saturating_add(1) < new => Older::Ends(Stage::Done),
        _ if !stage.is_open() => Older::Stays,
        (Role::Source, Stage::Committed) if epoch.saturating_add(1) < new => Older::Ends(Stage::Done),
        (Role::Source, Stage::Started | Stage::Frozen | Stage::Undoing) if epoch < new => {
            Older::Ends(Stage::Aborted)
        }
        (Role::Destination, Stage::Reserved) if epoch <= new => Older::Ends(Stage::Dropped),
        (Role::Destination, Stage::Committed) if epoch < new => Older::Ends(Stage::Done),
        // It is this node's, and about to be complete.
        (Role::Destination, Stage::Committed) if epoch == new && new_role == Role::Source => Older::Stays,
        _ => Older::Refuses,
    }
}
