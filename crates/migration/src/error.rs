//! Why a node could not do its part for a service: the error that both ends of a migration share.

use std::path::{Path, PathBuf};

use godwit_engine::EngineError;
use godwit_names::{ServiceName, VolumeName};
use godwit_network::NetworkError;

use crate::images::ImagesError;
use crate::journal::JournalError;

/// The daemon's sentence about what it could not do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClusterError(pub String);

/// Why this node could not prepare or clear the place of a service.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The container engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Root filesystem or layers.
    #[error(transparent)]
    Root(#[from] godwit_engine::rootfs::RootfsError),
    /// Image store.
    #[error(transparent)]
    Image(#[from] godwit_engine::image::ImageError),
    /// A layer's name.
    #[error(transparent)]
    Digest(#[from] godwit_engine::image::DigestError),
    /// Memory for images.
    #[error(transparent)]
    Images(#[from] ImagesError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The daemon.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The pages of a service on its way here; what went wrong with them is the destination's to say.
    #[error(transparent)]
    Pages(Box<dyn std::error::Error + Send + Sync>),
    /// A process of a service.
    #[error(transparent)]
    Process(#[from] godwit_memory::process::ProcessError),
    /// Processes of a service that stays do not go on.
    #[error(
        "processes of service {service} stay at rest, and are told to go on again; `godwit kill` ends the service"
    )]
    AtRest {
        /// The service.
        service: ServiceName,
    },
    /// A file operation.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// What is in a service's place is another's, or a later life of it.
    #[error(
        "{path} belongs to the service with id {id}, epoch {epoch}, of which a migration has not ended on this node; try again in a moment"
    )]
    InTheWay {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        id: String,
        /// At which epoch.
        epoch: u64,
    },
    /// A volume that is needed is not here.
    #[error("this node has no volume {name}; `godwit volume ls` lists those that it has")]
    NoVolume {
        /// The volume.
        name: VolumeName,
    },
    /// A volume is another service's.
    #[error(
        "service {service} has volume {name}, and one service at most has a volume; choose another volume, or remove the service first"
    )]
    VolumeTaken {
        /// The volume.
        name: VolumeName,
        /// Whose it is.
        service: ServiceName,
    },
    /// It cannot have what it is to have of this node.
    #[error("it cannot be started: {why}")]
    NotAllowed {
        /// In sentences.
        why: String,
    },
    /// There is a volume of that name.
    #[error("there is a volume {name} already: {user}")]
    VolumeExists {
        /// The volume.
        name: VolumeName,
        /// Who has it, in words.
        user: String,
    },
    /// The files of a volume.
    #[error(transparent)]
    Tree(#[from] godwit_engine::tree::TreeError),
    /// Whether the service has moved stands in a journal that can neither be written nor read.
    #[error(
        "the journal can be neither written nor read, so it is not known whether service {service} has moved; the service stays frozen, and godwitd ends: repair the disk that holds its state directory, and start it again"
    )]
    Undecided {
        /// The service.
        service: ServiceName,
        /// What the disk said.
        #[source]
        source: JournalError,
    },
    /// A task of ours ended by a panic.
    #[error("an internal task failed; see godwitd's log")]
    Task(#[from] tokio::task::JoinError),
}

/// For `map_err`: what was tried, on which path.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> LocalError {
    let path = path.to_path_buf();
    move |source| LocalError::Io { action, path, source }
}

/// Lets `?` turn what a [`LocalError`] is made of into an error that has it as its variant `Local`.
macro_rules! from_local_causes {
    ($target:ty: $($cause:ty),* $(,)?) => {$(
        impl From<$cause> for $target {
            fn from(cause: $cause) -> Self {
                Self::Local(cause.into())
            }
        }
    )*};
}
pub(crate) use from_local_causes;
