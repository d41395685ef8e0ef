//! The end-to-end tests with a service that goes on under other executables: with `GODWIT_TEST_CROSSING=1` Redis is one of
//! godwit-cc's, which is built once and takes minutes, and each move is one with `--cross`.

use std::fs;

use godwit_isa_packages::{base::REDIS, package::built};
use godwit_lab::workload::Preset;

/// The environment variable that asks for it.
pub const VARIABLE: &str = "GODWIT_TEST_CROSSING";

/// Flags of each move: a busy machine takes longer than the default to let all threads poll.
pub(crate) const FLAGS: [&str; 3] = ["--cross", "--max-park-ms", "20000"];

/// Whether services cross.
#[must_use]
pub fn is_wanted() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "1")
}

/// Gives the root filesystem of a Redis the server that can cross.
pub(crate) fn replace_redis(preset: &Preset) {
    let sources = built(REDIS).unwrap_or_else(|error| panic!("{error:#}"));
    let executable = sources.join(format!("src/redis-server.{}", std::env::consts::ARCH));
    let path = preset.rootfs.join(preset.command[0].trim_start_matches('/'));
    fs::copy(&executable, &path).unwrap();
}
