//! Source packages of the distribution, unmodified, built once with `CC=godwit-cc` and kept until anything changes that
//! goes into them; and their programs run in one piece, captured in place, or moving.
//!
//! ```text
//!   aria2.rs    a client of one of the services    gocr.rs   what another one is asked
//!   base.rs     busybox and services on it, as images
//!   tools.rs    godwit-cc, godwit-state and what they need, built from this tree
//!   package.rs  a source package: fetched, unpacked, built, kept
//!   sdist.rs    a source archive of the Python package index
//!   travel.rs   a program's ways to run
//! ```

pub mod aria2;
pub mod base;
pub mod gocr;
pub mod package;
pub mod sdist;
pub mod tools;
pub mod travel;
