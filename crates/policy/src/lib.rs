//! What a move would be like, and when its rounds are to end: pure functions of what was measured.
//!
//! - [`curve`]: how many pages a service writes in a time.
//! - [`converge`]: whether another round of copying pays.
//! - [`outlook`]: a move thought through by both.

pub mod converge;
pub mod curve;
mod mode;
pub mod outlook;

pub use mode::Mode;

/// A page's bytes.
const PAGE: f64 = 4096.0;
