//! Tracking real processes: what they hold after any course of events, and that they notice nothing.

mod child;
mod replica;
mod torture;
mod undisturbed;
