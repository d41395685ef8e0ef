//! `--report`: what a link made of a program, in figures.
//!
//! ```text
//! prog: identity 5f3a…
//!   capture.sites           1204
//!   polls.latch              311
//!   …
//!   prog.x86_64            bytes
//!     neutral code         70674
//!     …
//! ```

use object::{Object as _, ObjectSection as _};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A report cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// An executable cannot be read back.
    #[error("cannot read {} back for the report: {source}", path.display())]
    Read {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no executable.
    #[error("cannot read {} back for the report: {source}", path.display())]
    Executable {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: object::Error,
    },
}

/// The sections of an executable (isa/ABI.md, section 3), and what they hold.
const SECTIONS: [(&str, &str); 9] = [
    (".text", "neutral code"),
    (".private.text", "private code: runtime, capture, resume"),
    (".rodata", "neutral constants"),
    (".data", "neutral data"),
    (".bss", "neutral data of zeros"),
    (".private.rodata", "private constants, jump tables"),
    (".private.data", "private data"),
    (".private.bss", "private data of zeros"),
    (".debug", "debug information"),
];

/// The report on a program with the figures of the passes and the executables.
///
/// # Errors
/// When an executable cannot be read.
pub fn report(
    program: &Path,
    identity: &str,
    figures: &BTreeMap<String, u64>,
    executables: &[PathBuf],
) -> Result<String, ReportError> {
    let mut text = format!("{}: identity {identity}\n", program.display());
    // Writing to a string cannot fail.
    for (name, figure) in figures {
        let _ = writeln!(text, "  {name:<40} {figure:>10}");
    }
    for path in executables {
        let bytes = std::fs::read(path).map_err(|source| ReportError::Read { path: path.clone(), source })?;
        let _ = writeln!(text, "  {:<40} {:>10}", format!("{}, bytes", path.display()), bytes.len());
        let file = object::File::parse(&*bytes)
            .map_err(|source| ReportError::Executable { path: path.clone(), source })?;
        for (prefix, meaning) in SECTIONS {
            let size: u64 = file
                .sections()
                .filter(|section| section.name().is_ok_and(|name| belongs(name, prefix)))
                .map(|section| section.size())
                .sum();
            let _ = writeln!(text, "    {meaning:<38} {size:>10}");
        }
    }
    Ok(text)
}

/// `.text` has `.text` and `.text.x`; `.debug` has `.debug_line`.
fn belongs(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '_']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_counted_where_they_belong() {
        assert!(
            belongs(".text", ".text") && belongs(".text.cold", ".text") && belongs(".debug_line", ".debug")
        );
        assert!(!belongs(".private.text", ".text") && !belongs(".textual", ".text"));
    }

    #[test]
    fn a_report_has_every_figure_and_every_kind_of_section() {
        let own = std::env::current_exe().unwrap_or_default();
        let figures = BTreeMap::from([("capture.sites".to_owned(), 12)]);
        let text = report(Path::new("prog"), "abc", &figures, &[own]).unwrap_or_default();
        assert!(text.starts_with("prog: identity abc\n  capture.sites"), "{text}");
        assert!(SECTIONS.iter().all(|(_, meaning)| text.contains(meaning)), "{text}");
    }

    #[test]
    fn what_is_no_executable_is_told() {
        let error = report(Path::new("prog"), "", &BTreeMap::new(), &["/dev/null".into()]);
        assert!(error.is_err_and(|error| error.to_string().contains("/dev/null")));
    }
}
