//! godwit-daemon.
fn main() {}
