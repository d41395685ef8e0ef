//! What OCI images say of programs that can change their instruction set: who writes images, who pulls and who runs them agree
//! on it here.

/// Annotation of an index, or of a manifest's descriptor in it: with the value [`MARKED`] the image's programs are the same
/// ones on each platform, built by `godwit-cc`.
pub const CROSSING: &str = "io.godwit.crossing";
/// Annotation, with the same value, of the manifest in such an index that has the programs' neutral modules.
pub const MODULES: &str = "io.godwit.modules";
/// See [`CROSSING`].
pub const MARKED: &str = "1";
/// The type of a module's blob. It is for no platform: nothing unpacks it.
pub const MODULE_TYPE: &str = "application/vnd.godwit.module.v1+llvm-bitcode";
/// Annotations of a module: the path of its program in the image, and the two digests that with its own are the program's
/// identity ([`crate::Binding`]), in hexadecimal digits.
pub const MODULE_KEYS: [&str; 3] = ["io.godwit.path", "io.godwit.layout", "io.godwit.toolchain"];
/// Longest executable of such a program, in bytes: a destination reads it whole. Those of godwit-cc have some MiB.
pub const MOST_EXECUTABLE: u64 = 64 << 20;
/// Longest module, in bytes; godwit-cc takes no longer one.
pub const MOST_MODULE: u64 = 256 << 20;
/// Most bytes of all executables of a service or an image, for one set: they are in memory at once.
pub const MOST_EXECUTABLES: u64 = 512 << 20;
