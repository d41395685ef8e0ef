//! Where the tool chain's own files are, and what LLVM's tools are called.
//!
//! One directory, the *home*, holds all: `$GODWIT_ISA`, else `isa` beside the directory of this program
//! (a build tree's `target/isa`), else `../lib/godwit/isa` from it (an installed tree).
//!
//! ```text
//! HOME/sysroot/include        musl's headers
//! HOME/sysroot/lib/libc.a     musl as bitcode (isa/libc/build), and empty libm.a, libpthread.a, …
//! HOME/cxx/include/c++/v1     libc++'s headers
//! HOME/cxx/lib/libc++.a       libc++ and libc++abi as bitcode (isa/libcxx/build)
//! HOME/cxx/lib/externals      what those want of the passes
//! HOME/plugin/libgodwit-isa.so  LLVM passes (isa/plugin)
//! HOME/runtime/neutral.bc     the runtime's neutral part (isa/runtime)
//! HOME/runtime/externals      what that wants of its native part
//! HOME/runtime/SET/runtime.o  its native part for a set
//! HOME/SET/plain.a            the runtime of executables that never move (isa/runtime/plain)
//! HOME/SET/libmath.a          what the back end of a set may call by itself; and libgcc.a
//! HOME/externals              the names that the runtimes have, which are no part of the program
//! ```

use std::path::{Path, PathBuf};

/// LLVM's programs; one version, since bitcode of another may not be readable.
pub const CLANG: &str = "clang-19";
/// Makes and takes apart archives.
pub const LLVM_AR: &str = "llvm-ar-19";
/// Writes an archive's table of symbols.
pub const LLVM_RANLIB: &str = "llvm-ranlib-19";
/// Lists symbols.
pub const LLVM_NM: &str = "llvm-nm-19";
/// Joins bitcode files.
pub const LLVM_LINK: &str = "llvm-link-19";
/// Runs passes.
pub const OPT: &str = "opt-19";
/// Makes code for an instruction set.
pub const LLC: &str = "llc-19";
/// The linker.
pub const LLD: &str = "ld.lld-19";

/// Where the home has the passes.
pub const PLUGIN: &str = "plugin/libgodwit-isa.so";

/// Where the home has the headers of C++, the library, and the names which that wants of the passes.
pub const CXX_HEADERS: &str = "cxx/include/c++/v1";
/// The archive.
pub const CXX_LIBRARY: &str = "cxx/lib/libc++.a";
/// The list of names.
pub const CXX_EXTERNALS: &str = "cxx/lib/externals";

/// The home is not there or not whole.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// Nothing of the kind anywhere.
    #[error(
        "the tool chain's files are in none of {places}: run isa/build, or name their directory in GODWIT_ISA"
    )]
    Missing {
        /// Where was looked.
        places: String,
    },
    /// The home misses a part.
    #[error("{} is missing: run isa/build again", path.display())]
    Part {
        /// What is not there.
        path: PathBuf,
    },
}

/// The directory described above.
#[derive(Debug, Clone)]
pub struct Home {
    root: PathBuf,
}

impl Home {
    /// Finds it.
    ///
    /// # Errors
    /// When there is none.
    pub fn find() -> Result<Self, HomeError> {
        let mut places = Vec::new();
        if let Some(named) = std::env::var_os("GODWIT_ISA") {
            places.push(PathBuf::from(named));
        } else if let Some(directory) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
            places.push(directory.join("../isa"));
            places.push(directory.join("../lib/godwit/isa"));
        }
        match places.iter().find(|place| place.join("externals").exists()) {
            Some(root) => Ok(Self { root: root.clone() }),
            None => Err(HomeError::Missing {
                places: places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// A part of it, by its path inside.
    ///
    /// # Errors
    /// When it is not there.
    pub fn part(&self, path: impl AsRef<Path>) -> Result<PathBuf, HomeError> {
        let path = self.root.join(path);
        if path.exists() { Ok(path) } else { Err(HomeError::Part { path }) }
    }
}
