//! godwit-shim.
fn main() {}
