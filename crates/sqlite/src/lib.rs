//! What SQLite remembers of the files of its databases, in the memory of other processes; and correcting it in copies of these
//! processes, whose files have other inode numbers.
//!
//! SQLite knows the file of a database by the device and the inode number that it had when it was opened
//! (`struct unixInodeInfo` in `os_unix.c`). By them the connections of a process share their locks, as POSIX has it. Where
//! there is no write-ahead log, each transaction that writes compares the inode number, and refuses with
//! `SQLITE_READONLY_DBMOVED` if it has changed.
//!
//! - [`databases`]: those that processes have open for writing, and where in memory each is remembered.
//! - [`correct`]: puts the new identity of the file there.

mod inode_info;
mod open;

pub use inode_info::{Identity, correct};
pub use open::{Database, databases};
