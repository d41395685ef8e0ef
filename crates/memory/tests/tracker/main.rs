//! Tracking real processes: what they hold after any course of events, and that they notice nothing.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "addresses of this 64-bit machine, and random numbers"
)]

mod child;
mod direct;
mod large;
mod moved;
mod reading;
mod registers;
mod replica;
mod sections;
mod signals;
mod threads;
mod torture;
mod undisturbed;
