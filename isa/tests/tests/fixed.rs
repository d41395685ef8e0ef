//! What others know by its address is there in the executables of all sets, and the crossing reads them.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use godwit_crossing::{Executable, Fate};
use godwit_isa_link::Set;
use godwit_isa_plan::{DATA, PRIVATE_DATA, PRIVATE_TEXT, RECORD, RESUME_ENTRY, TEXT};
use godwit_isa_tests::build;
use object::read::elf::ElfFile64;
use object::{Object as _, ObjectSymbol as _};

fn address(file: &ElfFile64<'_>, name: &str) -> Result<u64> {
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok(name));
    Ok(symbol.with_context(|| format!("there is no {name}"))?.address())
}

#[test]
fn the_entries_and_the_record_have_the_same_addresses_on_all_sets() -> Result<()> {
    let program = build::program(&build::isa().join("tests/programs/basics.c"))?;
    for set in Set::ALL {
        let bytes = fs::read(program.executable(set))?;
        let file: ElfFile64<'_> = ElfFile64::parse(&*bytes)?;
        for (name, place) in [
            ("gw_entry_resume", RESUME_ENTRY),
            ("gw_entry_request", RESUME_ENTRY + 16),
            ("gw_entry_signal", RESUME_ENTRY + 32),
            ("gw_entry_return", RESUME_ENTRY + 48),
            ("__gw_build_identity", RECORD),
            ("gw_rest", RECORD + 32),
        ] {
            let found = address(&file, name)?;
            ensure!(found == place, "{name} is at {found:#x} on {}, not at {place:#x}", set.name());
        }
    }
    Ok(())
}

#[test]
fn an_executable_says_its_set_and_build_and_what_stays() -> Result<()> {
    let program = build::program(&build::isa().join("tests/programs/basics.c"))?;
    for set in Set::ALL {
        let bytes = fs::read(program.executable(set))?;
        let executable = Executable::decode(&bytes)?;
        ensure!(executable.set == set && executable.identity == program.report.binding.identity());
        let file: ElfFile64<'_> = ElfFile64::parse(&*bytes)?;
        let variables = address(&file, "__gw_neutral_data_begin")?;
        ensure!(DATA.contains(&variables) && Fate::of(variables, &executable) == Fate::Stays);
        for private in [PRIVATE_TEXT.start, TEXT.start, DATA.start, PRIVATE_DATA.start] {
            ensure!(Fate::of(private, &executable) == Fate::Replaced, "{private:#x} on {}", set.name());
        }
    }
    Ok(())
}
