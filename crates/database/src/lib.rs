//! What the SQLite files of a node have in common: the journal of its moves, its state, and the cluster's store.
//!
//! - [`mod@file`]: a file is the daemon's alone, and a write is on the disk when it returns.
//! - [`schema`]: numbered steps bring a file up to what this version of godwit reads and writes.
//! - [`blocking`]: asynchronous code waits for the disk without holding up other tasks.

pub mod blocking;
pub mod file;
pub mod schema;
