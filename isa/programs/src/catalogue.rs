//! Which programs there are, of which files they are made, and with which sizes they run.

use std::path::{Path, PathBuf};

/// What a program is for, and the directory it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Computes for a while, for benchmarks too; verifies its own result.
    Kernels,
    /// Exercises one part of the language.
    Language,
    /// Several threads.
    Threads,
    /// Signals and timers.
    Signals,
    /// The language C++ and its library.
    Cxx,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Kernels, Self::Language, Self::Threads, Self::Signals, Self::Cxx];

    /// The directory's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernels => "kernels",
            Self::Language => "language",
            Self::Threads => "threads",
            Self::Signals => "signals",
            Self::Cxx => "cxx",
        }
    }
}

/// A program.
#[derive(Debug, Clone)]
pub struct Program {
    /// The name of its first file, without the ending.
    pub name: String,
    /// What it is for.
    pub kind: Kind,
    /// Its files, whole paths.
    pub sources: Vec<PathBuf>,
}

impl Program {
    /// The argument for a run of about one to three seconds on a machine of 2024, for kernels (`ft` and `mg`: half a
    /// second, since the next size is eight times as large).
    #[must_use]
    pub fn large(&self) -> Option<&'static str> {
        KERNELS
            .iter()
            .find(|kernel| kernel.name == self.name && self.kind == Kind::Kernels)
            .map(|kernel| kernel.size)
    }

    /// Whether it needs pipes and the like to stay open when it moves.
    #[must_use]
    pub fn has_kernel_objects(&self) -> bool {
        match self.kind {
            Kind::Threads => matches!(self.name.as_str(), "blocked" | "cancel"),
            Kind::Signals => matches!(self.name.as_str(), "interrupts" | "timers" | "waits_on_descriptors"),
            Kind::Kernels | Kind::Language | Kind::Cxx => false,
        }
    }

    /// Whether a plain build can run under emulation. There the kernel finds no owner of a mutex with priority inheritance:
    /// the program's numbers of threads are not its own (futex(2), ESRCH).
    #[must_use]
    pub fn can_be_emulated(&self) -> bool {
        self.name != "inheritance"
    }

    /// Whether its output is only right where the C library's own `long double` is binary128.
    #[must_use]
    pub fn wants_wide_library(&self) -> bool {
        self.name == "long_double_print"
    }
}

/// A kernel for benchmarks that are not run from the repository.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Its file is `NAME.c`.
    pub name: &'static str,
    /// What is in that; it includes [`KERNEL_HEADER`].
    pub source: &'static str,
    /// The argument with which it takes some seconds.
    pub size: &'static str,
}

/// What all kernels include, as `kernel.h`.
pub const KERNEL_HEADER: &str = include_str!("../kernels/kernel.h");

macro_rules! kernel {
    ($name:literal, $size:literal) => {
        Kernel { name: $name, source: include_str!(concat!("../kernels/", $name, ".c")), size: $size }
    };
}

/// All kernels.
pub const KERNELS: [Kernel; 16] = [
    kernel!("ackermann", "12"),
    kernel!("cg", "200000"),
    kernel!("dhrystone", "80000000"),
    kernel!("ep", "120000000"),
    kernel!("fib", "44"),
    kernel!("ft", "7"),
    kernel!("histogram", "60000000"),
    kernel!("is", "30000000"),
    kernel!("kmeans", "1200000"),
    kernel!("linear_regression", "60000000"),
    kernel!("linpack", "2500"),
    kernel!("matrix_multiply", "1800"),
    kernel!("mg", "7"),
    kernel!("pca", "1300"),
    kernel!("string_match", "18000000"),
    kernel!("word_count", "3000000"),
];

/// The directory of this crate, in which the programs lie.
#[must_use]
pub fn directory() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All programs of a kind, by name. A file `NAME_other.c` belongs to the program `NAME`; sources in C++ end with `.cc`.
///
/// # Errors
/// When the directory cannot be read.
pub fn programs(kind: Kind) -> std::io::Result<Vec<Program>> {
    let mut files = std::fs::read_dir(directory().join(kind.name()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "c" || ending == "cc"));
    files.sort();
    let mut programs: Vec<Program> = Vec::new();
    for path in files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        match programs.last_mut() {
            Some(last) if name == format!("{}_other", last.name) => last.sources.push(path),
            _ => programs.push(Program { name, kind, sources: vec![path] }),
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_size_for_benchmarks_and_every_size_a_kernel() {
        let kernels = programs(Kind::Kernels).expect("the directory is there");
        assert_eq!(kernels.len(), KERNELS.len());
        for kernel in &kernels {
            assert!(kernel.large().is_some(), "{} has no size", kernel.name);
        }
    }

    #[test]
    fn a_second_file_belongs_to_the_program_of_its_name() {
        let language = programs(Kind::Language).expect("the directory is there");
        let two = language.iter().find(|program| program.name == "constructors").expect("it is there");
        assert_eq!(two.sources.len(), 2);
        assert!(language.iter().all(|program| !program.name.ends_with("_other")));
    }

    #[test]
    fn every_program_says_what_it_is_for_in_its_first_line() {
        for kind in Kind::ALL {
            for source in programs(kind).expect("the directory is there").iter().flat_map(|one| &one.sources)
            {
                let text = std::fs::read_to_string(source).expect("it can be read");
                assert!(text.starts_with("// "), "{} begins without a comment", source.display());
            }
        }
    }
}
