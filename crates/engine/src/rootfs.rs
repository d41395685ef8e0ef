//! Root filesystems of containers: an overlayfs over unpacked layers, and what can be asked of
//! one before a container starts (users, commands) and of its layers at any time (files).

mod layers;
mod lookup;
mod overlay;

#[cfg(test)]
mod tests;

pub use layers::{OfLayers, file_of_layers};
pub use lookup::{find_command, resolve_user};
pub use overlay::{MAX_LAYERS, Overlay};

use std::io;
use std::path::PathBuf;

/// Why a root filesystem cannot be mounted or used.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// A mount or unmount failed.
    #[error("root filesystem {}: cannot {action}", target.display())]
    Mount {
        /// Where it is mounted.
        target: PathBuf,
        /// What was tried.
        action: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// More layers than overlayfs stacks.
    #[error("root filesystem {}: {layers} layers cannot be stacked, at most {limit}; squash the image", target.display())]
    TooManyLayers {
        /// Where it is mounted.
        target: PathBuf,
        /// How many.
        layers: usize,
        /// What is allowed.
        limit: usize,
    },
    /// A file of the root filesystem cannot be read.
    #[error("root filesystem {}: {file} cannot be read", root.display())]
    Read {
        /// The root filesystem.
        root: PathBuf,
        /// The file within.
        file: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// There is no such user.
    #[error("root filesystem {}: there is no user {user:?} in its /etc/passwd; give a user that is, or a number", root.display())]
    NoUser {
        /// The root filesystem.
        root: PathBuf,
        /// What was asked for.
        user: String,
    },
    /// There is no such group.
    #[error("root filesystem {}: there is no group {group:?} in its /etc/group; give a group that is, or a number", root.display())]
    NoGroup {
        /// The root filesystem.
        root: PathBuf,
        /// What was asked for.
        group: String,
    },
    /// There is no such command.
    #[error("root filesystem {}: there is no command {command:?} (searched: {searched}); give a command that is there", root.display())]
    NoCommand {
        /// The root filesystem.
        root: PathBuf,
        /// What was asked for.
        command: String,
        /// Directories that were searched, or the path itself.
        searched: String,
    },
    /// What has the command's name cannot be run.
    #[error("root filesystem {}: {command} is {reason}; give a command that can be run", root.display())]
    NotExecutable {
        /// The root filesystem.
        root: PathBuf,
        /// Path within.
        command: String,
        /// Why.
        reason: &'static str,
    },
}
