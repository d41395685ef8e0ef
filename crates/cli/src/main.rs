//! godwit-cli.
fn main() {}
