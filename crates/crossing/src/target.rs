//! What a process goes on under: a node, and the executables that it has there.

use std::collections::BTreeMap;

use godwit_isa_plan::Set;

use crate::executable::{Executable, ExecutableError};

/// What of a node the processes depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its instruction set.
    pub set: Set,
    /// Its kernel's pages, in bytes.
    pub page_bytes: u64,
    /// The first address that no process of it can have.
    pub address_end: u64,
}

/// An executable at a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// What it maps.
    pub executable: Executable,
    /// How long its file is, in bytes.
    pub bytes: u64,
    /// The `st_mode` of its file: kind and permissions.
    pub mode: u32,
}

impl Program {
    /// Reads the file of an executable, which has this `st_mode`.
    ///
    /// # Errors
    /// When it is none of `godwit-cc`'s.
    pub fn decode(file: &[u8], mode: u32) -> Result<Self, ExecutableError> {
        Ok(Self { executable: Executable::decode(file)?, bytes: file.len() as u64, mode })
    }
}

/// A node, and its executables by their paths in the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The node.
    pub node: Node,
    /// Those that its processes may have: all of the node's set.
    pub programs: BTreeMap<Vec<u8>, Program>,
    /// The filters of system calls that processes have are for its set, too.
    pub knows_filters: bool,
}

/// What people call a set.
pub(crate) fn called(set: Set) -> &'static str {
    match set {
        Set::X86_64 => "x86-64",
        Set::Aarch64 => "arm64",
    }
}
