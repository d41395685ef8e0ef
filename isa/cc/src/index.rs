//! The file under the program's own name: a script that lists the executables, and starts the one for
//! the machine at hand.
//!
//! ```text
//! #!/bin/sh
//! # godwit program, version 1
//! # identity: 64 hexadecimal digits of the build, or "plain"
//! # layout: and # toolchain: 64 digits each, of which and of the module's digest the identity is made
//! # module: prog.module                                with --save-module
//! # executable: x86_64 prog.x86_64
//! # executable: aarch64 prog.aarch64
//! …
//! ```
//! The program sees the name it was called by as its first argument, through `GODWIT_ARGV0`, which the
//! C library takes out of the environment before `main`.

use godwit_isa_link::Binding;
use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// What the index says that the program is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// It never moves.
    Plain,
    /// It can move.
    Movable {
        /// What its identity is made of.
        binding: Binding,
        /// What is added to the program's name for its neutral module, where that was kept.
        module: Option<&'static str>,
    },
}

/// Bytes in hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes the index of the executables `PROGRAM.SET`.
///
/// # Errors
/// When it cannot be written.
pub fn write(program: &Path, identity: &Identity, sets: &[&str]) -> io::Result<()> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let mut text = String::from("#!/bin/sh\n# godwit program, version 1\n");
    match identity {
        Identity::Plain => text.push_str("# identity: plain\n"),
        Identity::Movable { binding, module } => {
            let parts = [
                ("identity", &binding.identity()),
                ("layout", &binding.layout),
                ("toolchain", &binding.toolchain),
            ];
            for (key, digest) in parts {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "# {key}: {}", hex(digest));
            }
            if let Some(module) = module {
                let _ = writeln!(text, "# module: {name}.{module}");
            }
        }
    }
    for set in sets {
        let _ = writeln!(text, "# executable: {set} {name}.{set}");
    }
    let together = sets.iter().map(|set| format!("{name}.{set}")).collect::<Vec<_>>().join(" and ");
    text.push_str(
        "set=$(uname -m)\n\
         [ \"$set\" != arm64 ] || set=aarch64\n\
         file=$0\n\
         [ ! -h \"$file\" ] || file=$(readlink -f \"$file\")\n\
         if [ ! -x \"$file.$set\" ]; then\n\
         \x20   echo \"$0: the executable $file.$set is missing. $0 only starts it.\" >&2\n\
         \x20   cat >&2 <<'END'\n",
    );
    let _ = writeln!(
        text,
        "godwit-cc has made three files, which stay in one directory: {name}, {together}.\nCopy or install all three; to rename one, rename the others alike, for example to NEW and NEW.{}.\nEND",
        sets.join(", NEW.")
    );
    text.push_str(
        "    exit 127\n\
         fi\n\
         GODWIT_ARGV0=$0 exec \"$file.$set\" \"$@\"\n",
    );
    // What was there may be an executable that runs, or a link to one.
    match std::fs::remove_file(program) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::write(program, text)?;
    std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o755))
}
