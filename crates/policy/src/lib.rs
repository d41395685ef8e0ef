//! When a service moves, where to, and how: pure functions of what was measured.
//!
//! What a move takes, and when its rounds are to end:
//!
//! - [`curve`]: how many pages a service writes in a time.
//! - [`converge`]: whether another round of copying pays.
//! - [`files`]: whether another pass over changed files pays.
//! - [`fixed`]: what a service is frozen for beside its pages.
//! - [`predict`]: a move in each mode, thought through by all of them.
//! - [`outlook`]: the same with what is known before a move is asked for.
//! - [`learn`]: what past moves say of such a prediction.
//! - [`degradation`]: what clients lose beside the frozen time.
//!
//! Whether it pays:
//!
//! - [`latency`]: what latency a client would have at a node.
//! - [`samples`]: what latency it has.
//! - [`loss`]: what a service loses by where it is.
//! - [`cost`]: what a move costs, and in which mode it costs least.
//! - [`constraint`]: what rules out a node.
//! - [`fleet`]: the best of thousands of nodes.
//! - [`dwell`]: how long a node stays the best.
//! - [`assess`]: a node, compared with where the service is.
//! - [`rules`], [`state`]: when and how often a service may move, and what is remembered for that.
//! - [`decide`]: the decision, with all it rests on.
//!
//! Measured numbers are of the types in [`quantity`], none of which can be NaN or endless.

pub mod assess;
pub mod constraint;
pub mod converge;
pub mod cost;
pub mod curve;
pub mod decide;
pub mod degradation;
pub mod dwell;
pub mod files;
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
pub mod samples;
pub mod state;

pub use mode::Mode;

/// A page's bytes.
const PAGE: f64 = 4096.0;
