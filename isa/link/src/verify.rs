//! Looks at the finished executables: every symbol of the program must have the same address in all of them, and
//! every variable the same size.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use object::read::elf::ElfFile64;
use object::{Object as _, ObjectSymbol as _, SymbolKind};

use crate::Set;
use crate::layout::is_neutral;

/// The executables differ.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// One could not be read.
    #[error("cannot read {path}: {reason}")]
    Executable {
        /// Its path.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A symbol differs.
    #[error("{symbol} is {first} on {first_set}, but {second} on {second_set}")]
    Differs {
        /// Its name.
        symbol: String,
        /// Address and size on the first set.
        first: String,
        /// The set.
        first_set: &'static str,
        /// Address and size on the other.
        second: String,
        /// The set.
        second_set: &'static str,
    },
}

/// Address, and for a variable its size: functions may differ in length.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    address: u64,
    size: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {:#x}, {} bytes", self.address, self.size)
    }
}

pub(crate) fn same_addresses(executables: &BTreeMap<Set, PathBuf>) -> Result<(), VerifyError> {
    let mut first: Option<(Set, BTreeMap<String, Place>)> = None;
    for (&set, path) in executables {
        let symbols = neutral_symbols(path)?;
        match &first {
            None => first = Some((set, symbols)),
            Some((first_set, expected)) => compare(*first_set, expected, set, &symbols)?,
        }
    }
    Ok(())
}

fn compare(
    first_set: Set,
    first: &BTreeMap<String, Place>,
    second_set: Set,
    second: &BTreeMap<String, Place>,
) -> Result<(), VerifyError> {
    let show = |place: Option<&Place>| place.map_or_else(|| String::from("missing"), Place::to_string);
    for symbol in first.keys().chain(second.keys()) {
        let (a, b) = (first.get(symbol), second.get(symbol));
        if a != b {
            return Err(VerifyError::Differs {
                symbol: symbol.clone(),
                first: show(a),
                first_set: first_set.name(),
                second: show(b),
                second_set: second_set.name(),
            });
        }
    }
    Ok(())
}

fn neutral_symbols(path: &Path) -> Result<BTreeMap<String, Place>, VerifyError> {
    let unreadable = |reason: String| VerifyError::Executable { path: path.to_owned(), reason };
    let bytes = fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    let file: ElfFile64<'_> = ElfFile64::parse(&*bytes).map_err(|error| unreadable(error.to_string()))?;
    let mut symbols = BTreeMap::new();
    for symbol in file.symbols() {
        let is_variable = symbol.kind() == SymbolKind::Data;
        if !is_neutral(symbol.address()) || !(is_variable || symbol.kind() == SymbolKind::Text) {
            continue;
        }
        let name = symbol.name().map_err(|error| unreadable(error.to_string()))?;
        // Mapping symbols of arm64 say where code and data begin; they are no symbols of the program.
        if name.starts_with('$') {
            continue;
        }
        let size = if is_variable { symbol.size() } else { 0 };
        symbols.insert(name.to_owned(), Place { address: symbol.address(), size });
    }
    Ok(symbols)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(places: &[(&str, u64, u64)]) -> BTreeMap<String, Place> {
        places.iter().map(|&(name, address, size)| (name.to_owned(), Place { address, size })).collect()
    }

    #[test]
    fn a_symbol_at_another_address_is_named() {
        let error = compare(
            Set::X86_64,
            &symbols(&[("main", 0x400_0000, 0), ("table", 0x800_0000, 8)]),
            Set::Aarch64,
            &symbols(&[("main", 0x400_0000, 0), ("table", 0x800_0010, 8)]),
        )
        .expect_err("the addresses differ");
        assert!(error.to_string().contains("table"), "{error}");
    }

    #[test]
    fn a_symbol_that_only_the_second_set_has_is_named() {
        let error = compare(Set::X86_64, &symbols(&[]), Set::Aarch64, &symbols(&[("extra", 0x800_0000, 8)]))
            .expect_err("one is missing");
        assert!(error.to_string().contains("extra is missing on x86_64"), "{error}");
    }
}
