//! Nodes that are virtual machines: a kernel, a systemd and a clock of their own, godwit installed from packages.
//!
//! ```text
//!   gwl-<lab>-a                                        network namespace, as of any node
//!     uplink0 ── bridge0 ── machine0                   to the lab's switch
//!                              │
//!     ┌── QEMU ────────────────┴──────────┐
//!     │  uplink0 .11   godwitd, services  │            address and name given when it starts
//!     │  control0      sshd               │ ◄── 127.0.0.1:22 of the namespace, for this host only
//!     └───────────────────────────────────┘
//!        disk: a layer of its own (state of the node) over the snapshot's over the image's
//! ```
//!
//! What a machine is like is said by [`crate::spec`].
//!
//! - `store`: images made from the distribution's packages, and snapshots of machines that have booted and have
//!   godwit installed, both kept in root's cache by what they are made from. `image` is the script that makes one.
//! - `emulator`: QEMU's command line, with KVM where it works and emulation elsewhere.
//! - `qmp`: the few words of QEMU's monitor protocol that saving and loading a snapshot take.
//! - `shell`: what runs in a machine, by ssh.
//! - `node`: a machine's life in its lab: start, identity, godwit, power, clock.

mod emulator;
pub(crate) mod node;
mod qmp;
pub(crate) mod shell;
mod store;
