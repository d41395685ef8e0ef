//! The layout: one linker script for all sets, which gives every function and variable of the program an address
//! of its own, with room for the largest of its versions. What only one set has (jump tables, constant pools, resume
//! clones, the private runtime) lies apart, where nothing neutral points to.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use godwit_isa_plan as plan;
use object::read::elf::{ElfFile64, ElfSection64};
use object::{
    Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionFlags, SectionIndex,
    SectionKind, SymbolKind, elf,
};

use crate::Set;

/// File name of a set's object of the program; private objects have other names.
pub(crate) const PROGRAM_OBJECT: &str = "gw-program.o";

// isa/ABI.md, section 3.
const PRIVATE_TEXT: u64 = plan::PRIVATE_TEXT.start;
const NEUTRAL_TEXT: u64 = plan::TEXT.start;
const NEUTRAL_DATA: u64 = plan::DATA.start;
const PRIVATE_DATA: u64 = plan::PRIVATE_DATA.start;
const PRIVATE_END: u64 = plan::PRIVATE_DATA.end;
/// Segments begin at multiples of the largest page of arm64 kernels.
const SEGMENT: u64 = 0x1_0000;
/// Code of hot functions begins at such addresses on both sets.
const TEXT_ALIGNMENT: u64 = 16;

/// What the kernel, or who restores a process, has the address of, at the beginning of the private text: the same on
/// every set. The objects of the private runtime have it in a section of this name.
const ENTRIES: &str = ".gw.entries";
const ENTRY_BYTES: usize = 16;
const ENTRY_NAMES: [&str; 4] = ["gw_entry_resume", "gw_entry_request", "gw_entry_signal", "gw_entry_return"];
/// The runtime's record for those who look from outside, behind the build's identity.
const RECORD: &str = ".gw.rest";
const RECORD_NAME: &str = "gw_rest";
const IDENTITY_BYTES: u64 = 32;

/// Sections of resume clones, and of blocks that only run in a capture. No function's name begins like that.
const COLD_TEXT: [&str; 2] = [".text.gw.", ".text.split."];

/// The addresses that belong to the program, not to a set.
pub(crate) fn is_neutral(address: u64) -> bool {
    (NEUTRAL_TEXT..PRIVATE_DATA).contains(&address)
}

/// The executables cannot have one layout.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// An object could not be read.
    #[error("cannot read {path}: {reason}")]
    Object {
        /// Its path.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A variable that is not the same on all sets.
    #[error("{section} is {first} bytes long on {first_set}, but {second} bytes on {second_set}")]
    Size {
        /// The variable's section.
        section: String,
        /// Bytes on the first set.
        first: u64,
        /// Its name.
        first_set: &'static str,
        /// Bytes on the other.
        second: u64,
        /// Its name.
        second_set: &'static str,
    },
    /// A section that one set has and another has not.
    #[error("{section} is missing on {set}")]
    Missing {
        /// The section.
        section: String,
        /// Where it is missing.
        set: &'static str,
    },
    /// Neutral memory that would hold the address of something private.
    #[error("{section} holds the address of {target}, which differs between the sets")]
    PrivateAddress {
        /// The section with the address.
        section: String,
        /// What it points to.
        target: String,
    },
    /// A region is full.
    #[error("the program's {region} needs {bytes} bytes; the layout has room for {most}")]
    Full {
        /// Which.
        region: &'static str,
        /// What the program needs.
        bytes: u64,
        /// What there is.
        most: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Region {
    Text,
    ReadOnly,
    Data,
    Zeros,
}

impl Region {
    const ALL: [Self; 4] = [Self::Text, Self::ReadOnly, Self::Data, Self::Zeros];
}

#[derive(Clone, Debug)]
struct Section {
    name: String,
    region: Region,
    size: u64,
    alignment: u64,
}

/// Where everything neutral goes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Sections in the order of their addresses.
    placed: Vec<(u64, Section)>,
    /// The first address of each region.
    begins: [u64; Region::ALL.len()],
}

impl Layout {
    /// Lays out a program from its object on each set.
    ///
    /// # Errors
    /// When the objects disagree in something that must be the same, or a region is full.
    pub fn of(objects: &BTreeMap<Set, PathBuf>) -> Result<Self, LayoutError> {
        let mut merged: Vec<Section> = Vec::new();
        let mut first: Option<Set> = None;
        for (&set, path) in objects {
            let sections = neutral_sections(path)?;
            match first {
                None => {
                    first = Some(set);
                    merged = sections;
                }
                Some(first) => merge(&mut merged, first, sections, set)?,
            }
        }
        merged.sort_by_key(|section| section.region);
        place(merged)
    }

    /// The linker script, the same for all sets.
    #[must_use]
    pub fn script(&self, identity: &[u8; 32]) -> String {
        let mut script = String::from(
            "ENTRY(_start)\n\
             PHDRS {\n  private_text PT_LOAD FLAGS(5);\n  text PT_LOAD FLAGS(5);\n  rodata PT_LOAD FLAGS(4);\n  \
             data PT_LOAD FLAGS(6);\n  private_data PT_LOAD FLAGS(6);\n  private_rodata PT_LOAD FLAGS(4);\n  \
             stack PT_GNU_STACK FLAGS(6);\n}\nSECTIONS {\n",
        );
        line(
            &mut script,
            format_args!(
                "  .private.text {PRIVATE_TEXT:#x} : {{ *({ENTRIES}) *{PROGRAM_OBJECT}({}) *(.text) {} }} :private_text",
                COLD_TEXT.map(|prefix| format!("{prefix}*")).join(" "),
                others(".text.*")
            ),
        );
        line(
            &mut script,
            format_args!("  ASSERT(. <= {NEUTRAL_TEXT:#x}, \"the private text is too large\")"),
        );
        self.region(&mut script, Region::Text, ".text", "text");
        self.region(&mut script, Region::ReadOnly, ".rodata", "rodata");
        self.region(&mut script, Region::Data, ".data", "data");
        self.region(&mut script, Region::Zeros, ".bss", "data");
        line(
            &mut script,
            format_args!(
                "  .private.data {PRIVATE_DATA:#x} : {{\n    __gw_build_identity = .;{}\n    *({RECORD}) *(.data) {} \
                 *(.got .got.plt)\n  }} :private_data",
                quads(identity),
                others(".data.*")
            ),
        );
        line(
            &mut script,
            format_args!("  .private.bss : {{ *(.bss COMMON) {} }} :private_data", others(".bss.*")),
        );
        // Not in the section's own address: an empty section goes, and its address with it.
        line(&mut script, format_args!("  . = ALIGN({SEGMENT:#x});"));
        // What is left of the program's read-only data are jump tables and constant pools.
        script.push_str("  .private.rodata : { *(.gw.sites) *(.rodata .rodata.*) } :private_rodata\n");
        line(&mut script, format_args!("  ASSERT(. <= {PRIVATE_END:#x}, \"the private data is too large\")"));
        fixed(&mut script);
        for name in DEBUG_SECTIONS {
            line(&mut script, format_args!("  {name} 0 : {{ *({name}) }}"));
        }
        script.push_str(
            "  .comment 0 : { *(.comment) }\n  .symtab 0 : { *(.symtab) }\n  .shstrtab 0 : { *(.shstrtab) }\n  \
             .strtab 0 : { *(.strtab) }\n  \
             /DISCARD/ : { *(.note .note.* .eh_frame .eh_frame_hdr .llvm_addrsig .ARM.attributes) }\n}\n",
        );
        script
    }

    fn region(&self, script: &mut String, region: Region, output: &str, segment: &str) {
        let sections = self.placed.iter().filter(|(_, section)| section.region == region);
        line(script, format_args!("  {output} {:#x} : {{", self.begins[region as usize]));
        match region {
            Region::Data => script.push_str("    __gw_neutral_data_begin = .;\n"),
            Region::Zeros => script.push_str("    __gw_neutral_bss_begin = .;\n"),
            Region::Text | Region::ReadOnly => {}
        }
        for (address, section) in sections {
            let name = &section.name;
            let enumerated = !name.starts_with('.');
            line(script, format_args!("    . = {address:#x};"));
            if enumerated {
                line(script, format_args!("    __start_{name} = .;"));
            }
            line(script, format_args!("    *{PROGRAM_OBJECT}(\"{name}\")"));
            if enumerated {
                line(script, format_args!("    __stop_{name} = .;"));
            }
        }
        match region {
            Region::Text => script.push_str("    __gw_text_end = .;\n"),
            Region::Zeros => script.push_str("    . = ALIGN(16);\n    __gw_neutral_data_end = .;\n"),
            Region::ReadOnly | Region::Data => {}
        }
        line(script, format_args!("  }} :{segment}"));
    }
}

/// Has the linker look whether what others know by its address is there.
fn fixed(script: &mut String) {
    let entries = (PRIVATE_TEXT..).step_by(ENTRY_BYTES).zip(ENTRY_NAMES);
    for (address, name) in entries.chain([(PRIVATE_DATA + IDENTITY_BYTES, RECORD_NAME)]) {
        line(
            script,
            format_args!("  ASSERT({name} == {address:#x}, \"{name} is not at its place, {address:#x}\")"),
        );
    }
}

/// What `-g` leaves, in files of DWARF 4 and 5.
const DEBUG_SECTIONS: [&str; 14] = [
    ".debug_abbrev",
    ".debug_addr",
    ".debug_aranges",
    ".debug_frame",
    ".debug_info",
    ".debug_line",
    ".debug_line_str",
    ".debug_loc",
    ".debug_loclists",
    ".debug_names",
    ".debug_ranges",
    ".debug_rnglists",
    ".debug_str",
    ".debug_str_offsets",
];

/// Input sections of this name from all files but the program's.
fn others(name: &str) -> String {
    format!("*(EXCLUDE_FILE(*{PROGRAM_OBJECT}) {name})")
}

fn quads(identity: &[u8; 32]) -> String {
    let mut text = String::new();
    for word in identity.as_chunks::<8>().0 {
        let _ = write!(text, " QUAD({:#x})", u64::from_le_bytes(*word));
    }
    text
}

/// Writing to a string cannot fail.
fn line(script: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = script.write_fmt(text);
    script.push('\n');
}

fn place(sections: Vec<Section>) -> Result<Layout, LayoutError> {
    let mut placed: Vec<(u64, Section)> = Vec::with_capacity(sections.len());
    let mut begins = [0; Region::ALL.len()];
    let mut next = NEUTRAL_TEXT;
    let mut left = sections.into_iter().peekable();
    for region in Region::ALL {
        let mut members = Vec::new();
        while let Some(section) = left.next_if(|section| section.region == region) {
            members.push(section);
        }
        // An output section begins at a multiple of what its strictest member asks for; also an empty one must not
        // share a page with what is protected otherwise.
        let strictest = members.iter().map(|section| section.alignment).fold(TEXT_ALIGNMENT, u64::max);
        next = match region {
            Region::Text => NEUTRAL_TEXT,
            Region::ReadOnly => NEUTRAL_DATA,
            Region::Data => next.next_multiple_of(SEGMENT),
            Region::Zeros => next.next_multiple_of(strictest),
        };
        begins[region as usize] = next;
        for section in members {
            let least = if region == Region::Text { TEXT_ALIGNMENT } else { 1 };
            next = next.next_multiple_of(section.alignment.max(least));
            placed.push((next, section.clone()));
            next += section.size;
        }
        if region == Region::Text {
            check_full("text", NEUTRAL_TEXT, next, NEUTRAL_DATA)?;
        }
    }
    check_full("data", NEUTRAL_DATA, next, PRIVATE_DATA)?;
    Ok(Layout { placed, begins })
}

fn check_full(region: &'static str, begin: u64, end: u64, limit: u64) -> Result<(), LayoutError> {
    if end > limit {
        return Err(LayoutError::Full { region, bytes: end - begin, most: limit - begin });
    }
    Ok(())
}

/// Adds another set's sections: text gets the larger size, data must be equal.
fn merge(merged: &mut [Section], first: Set, others: Vec<Section>, set: Set) -> Result<(), LayoutError> {
    let mut others: BTreeMap<String, Section> =
        others.into_iter().map(|section| (section.name.clone(), section)).collect();
    for section in merged {
        let Some(other) = others.remove(&section.name) else {
            return Err(LayoutError::Missing { section: section.name.clone(), set: set.name() });
        };
        if section.region != Region::Text && section.size != other.size {
            return Err(LayoutError::Size {
                section: section.name.clone(),
                first: section.size,
                first_set: first.name(),
                second: other.size,
                second_set: set.name(),
            });
        }
        section.size = section.size.max(other.size);
        section.alignment = section.alignment.max(other.alignment);
        // A zero variable is in .bss or .data as the code generator likes.
        section.region = section.region.min(other.region);
    }
    match others.into_keys().next() {
        Some(section) => Err(LayoutError::Missing { section, set: first.name() }),
        None => Ok(()),
    }
}

/// The sections of an object that every set has, in its order.
fn neutral_sections(path: &Path) -> Result<Vec<Section>, LayoutError> {
    let unreadable = |reason: String| LayoutError::Object { path: path.to_owned(), reason };
    let bytes = fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    let object: ElfFile64<'_> = ElfFile64::parse(&*bytes).map_err(|error| unreadable(error.to_string()))?;

    let variables = sections_of_variables(&object);
    let mut sections = Vec::new();
    for section in object.sections() {
        let name = section.name().map_err(|error| unreadable(error.to_string()))?;
        let Some(region) = region_of(&section, &variables) else { continue };
        if region != Region::Text {
            check_pointers(&object, &section, name, &variables)?;
        }
        sections.push(Section {
            name: name.to_owned(),
            region,
            size: section.size(),
            alignment: section.align(),
        });
    }
    Ok(sections)
}

/// A variable has a symbol; what the code generators make for themselves (jump tables, constant pools) has none.
fn sections_of_variables(object: &ElfFile64<'_>) -> HashSet<SectionIndex> {
    object
        .symbols()
        .filter(|symbol| symbol.kind() == SymbolKind::Data)
        .filter_map(|symbol| symbol.section_index())
        .collect()
}

/// Which region a section of the program belongs to; none when it is private, or not loaded at all.
fn region_of(section: &ElfSection64<'_, '_>, variables: &HashSet<SectionIndex>) -> Option<Region> {
    let SectionFlags::Elf { sh_flags } = section.flags() else { return None };
    let name = section.name().ok()?;
    if sh_flags & u64::from(elf::SHF_ALLOC) == 0 || name.starts_with(".gw.") {
        return None;
    }
    if name.starts_with(".text") {
        let private = name == ".text" || COLD_TEXT.iter().any(|prefix| name.starts_with(prefix));
        return (!private).then_some(Region::Text);
    }
    if !variables.contains(&section.index()) {
        return None;
    }
    Some(match section.kind() {
        SectionKind::UninitializedData => Region::Zeros,
        _ if sh_flags & u64::from(elf::SHF_WRITE) == 0 => Region::ReadOnly,
        _ => Region::Data,
    })
}

/// Every address in neutral data must be that of something neutral.
fn check_pointers(
    object: &ElfFile64<'_>,
    section: &ElfSection64<'_, '_>,
    name: &str,
    variables: &HashSet<SectionIndex>,
) -> Result<(), LayoutError> {
    for (_, relocation) in section.relocations() {
        let RelocationTarget::Symbol(index) = relocation.target() else { continue };
        let Ok(symbol) = object.symbol_by_index(index) else { continue };
        let home = symbol.section_index().and_then(|index| object.section_by_index(index).ok());
        let neutral = match &home {
            Some(home) => region_of(home, variables).is_some(),
            // Undefined: a private function or a symbol of the layout (`__start_…`), which is neutral.
            None => {
                symbol.name().is_ok_and(|name| name.starts_with("__start_") || name.starts_with("__stop_"))
            }
        };
        if !neutral {
            let target = match symbol.name() {
                Ok("") | Err(_) => {
                    home.and_then(|home| home.name().ok().map(str::to_owned)).unwrap_or_default()
                }
                Ok(name) => name.to_owned(),
            };
            return Err(LayoutError::PrivateAddress { section: name.to_owned(), target });
        }
    }
    Ok(())
}
