//! One file per verb: its flags, the request it makes, what it prints; `each.rs` is what several of them do alike.

pub(crate) mod adopt;
pub(crate) mod cancel;
pub(crate) mod capture;
pub(crate) mod check;
pub(crate) mod cluster;
pub(crate) mod completions;
pub(crate) mod doctor;
mod each;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod image;
pub(crate) mod inspect;
pub(crate) mod lab;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod migrate;
pub(crate) mod network;
pub(crate) mod nodes;
pub(crate) mod ps;
pub(crate) mod resolve;
pub(crate) mod restart;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod start;
pub(crate) mod stop;
pub(crate) mod version;
pub(crate) mod volume;
