//! What a move would be like, and when its rounds are to end: pure functions of what was measured.
//!
//! - [`curve`]: how many pages a service writes in a time.
//! - [`converge`]: whether another round of copying pays.
//! - [`fixed`]: what a service is frozen for beside its pages.
//! - [`learn`]: what past moves say of such a prediction.
//! - [`outlook`]: a move thought through by all of them.

pub mod assess;
pub mod constraint;
pub mod converge;
pub mod cost;
pub mod curve;
pub mod decide;
pub mod degradation;
pub mod dwell;
pub mod fixed;
pub mod fleet;
pub mod latency;
pub mod learn;
pub mod loss;
mod mode;
pub mod outlook;
pub mod predict;
pub mod quantity;
mod rounds;
pub mod rules;
pub mod state;

pub use mode::Mode;

/// A page's bytes.
const PAGE: f64 = 4096.0;
