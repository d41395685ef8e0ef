//! What a move would be like, and when its rounds are to end: pure functions of what was measured.
//!
//! - [`curve`]: how many pages a service writes in a time.
//! - [`converge`]: whether another round of copying pays.
//! - [`files`]: whether another pass over changed files pays.
//! - [`fixed`]: what a service is frozen for beside its pages.
//! - [`learn`]: what past moves say of such a prediction.
//! - [`outlook`]: a move thought through by all of them.

pub mod converge;
pub mod curve;
pub mod files;
pub mod fixed;
pub mod learn;
mod mode;
pub mod outlook;

pub use mode::Mode;

/// A page's bytes.
const PAGE: f64 = 4096.0;
