//! How packages that more than one test runs become programs.

use crate::package::Recipe;

/// The server. It can load modules, but need not.
pub const REDIS: Recipe = Recipe {
    package: "redis",
    name: "server",
    commands: "
        settings=\"CC=$CC AR=$AR RANLIB=$RANLIB MALLOC=libc USE_SYSTEMD=no BUILD_TLS=no OPTIMIZATION=-O2\"
        make -C deps $settings hiredis linenoise lua hdr_histogram
        make -j2 -C src $settings LDFLAGS=-lgodwit-nodl redis-server",
};
