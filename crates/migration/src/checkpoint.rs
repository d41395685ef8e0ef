//! What a move asks of CRIU: its features, and dumps. [`Checkpoint`] is the interface; on a node it is [`Criu`].

use std::path::Path;

use async_trait::async_trait;
use godwit_criu::{Criu, CriuError, DumpOptions, DumpResult, Prepared, Version};

/// A checkpointer.
#[async_trait]
pub trait Checkpoint: Send + Sync {
    /// Where it is.
    fn path(&self) -> &Path;
    /// Its release.
    async fn version(&self) -> Result<Version, CriuError>;
    /// Whether a dump leaves memory that is moved in another way untouched.
    async fn lazy_external(&self) -> Result<bool, CriuError>;
    /// Whether connections can go into the image of the files.
    async fn tcp_inline(&self) -> Result<bool, CriuError>;
    /// Whether the contents of shared memory can be moved in another way.
    async fn shared_external(&self) -> Result<bool, CriuError>;
    /// Whether the contents of System V segments can be.
    async fn system_v_external(&self) -> Result<bool, CriuError>;
    /// Whether a dump can be told the mappings of processes.
    async fn mappings_external(&self) -> Result<bool, CriuError>;
    /// Whether what is written in private mappings of files can be moved in another way.
    async fn file_pages_external(&self) -> Result<bool, CriuError>;
    /// Whether a restore maps what is not writable as it was.
    async fn keeps_rights(&self) -> Result<bool, CriuError>;
    /// Fills the cache of the kernel's features for the next restore.
    async fn stay_warm(&self) -> Result<(), CriuError>;
    /// Starts CRIU for a later dump.
    fn prepare(&self) -> Result<Box<dyn Dump>, CriuError>;
}

/// A checkpointer that has started, and waits for what it is to dump.
#[async_trait]
pub trait Dump: Send {
    /// Does the part of a dump with these options for which the processes need not stand still, if it can.
    async fn ready(&mut self, options: &DumpOptions) -> Result<(), CriuError>;
    /// Dumps; returns when it has let go of the processes. Dropping the future does not stop it.
    async fn dump(self: Box<Self>, options: DumpOptions) -> Result<DumpResult, CriuError>;
}

#[async_trait]
impl Checkpoint for Criu {
    fn path(&self) -> &Path {
        Self::path(self)
    }

    async fn version(&self) -> Result<Version, CriuError> {
        Self::version(self).await
    }

    async fn lazy_external(&self) -> Result<bool, CriuError> {
        Self::lazy_external(self).await
    }

    async fn tcp_inline(&self) -> Result<bool, CriuError> {
        Self::tcp_inline(self).await
    }

    async fn shared_external(&self) -> Result<bool, CriuError> {
        Self::shared_external(self).await
    }

    async fn system_v_external(&self) -> Result<bool, CriuError> {
        Self::system_v_external(self).await
    }

    async fn mappings_external(&self) -> Result<bool, CriuError> {
        Self::mappings_external(self).await
    }

    async fn file_pages_external(&self) -> Result<bool, CriuError> {
        Self::file_pages_external(self).await
    }

    async fn keeps_rights(&self) -> Result<bool, CriuError> {
        Self::keeps_rights(self).await
    }

    async fn stay_warm(&self) -> Result<(), CriuError> {
        Self::stay_warm(self).await
    }

    fn prepare(&self) -> Result<Box<dyn Dump>, CriuError> {
        Ok(Box::new(Self::prepare(self)?))
    }
}

#[async_trait]
impl Dump for Prepared {
    async fn ready(&mut self, options: &DumpOptions) -> Result<(), CriuError> {
        Self::ready(self, options).await
    }

    async fn dump(self: Box<Self>, options: DumpOptions) -> Result<DumpResult, CriuError> {
        Self::dump(*self, options).await
    }
}
