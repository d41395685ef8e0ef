//! The size of the code of a 64-bit little-endian ELF file, from its section headers (System V ABI, chapter 4).
//!
//! ```text
//! header:   0x28 u64 offset of the section headers, 0x3a u16 size of one, 0x3c u16 how many
//! section:  0x08 u64 flags, 0x20 u64 size
//! ```

use anyhow::{Context as _, Result, ensure};

/// `SHF_EXECINSTR`: the section holds instructions.
const EXECUTABLE: u64 = 4;

/// The sum of the sizes of all sections that hold instructions.
///
/// # Errors
/// When the bytes are no such file, or end before their section headers do.
pub(crate) fn executable_bytes(file: &[u8]) -> Result<u64> {
    ensure!(file.starts_with(b"\x7fELF\x02\x01"), "not a 64-bit little-endian ELF file");
    let start = usize::try_from(word(file, 0x28)?).context("the section headers lie beyond any file")?;
    let (size, count) = (half(file, 0x3a)?, half(file, 0x3c)?);
    ensure!(count > 0 && size >= 0x40, "there are no section headers");
    let mut sum = 0;
    for number in 0..count {
        let header = start.checked_add(number * size).context("the section headers lie beyond any file")?;
        if word(file, header + 8)? & EXECUTABLE != 0 {
            sum += word(file, header + 0x20)?;
        }
    }
    Ok(sum)
}

fn word(file: &[u8], at: usize) -> Result<u64> {
    let bytes = file.get(at..).and_then(|rest| rest.first_chunk()).context("the file ends too early")?;
    Ok(u64::from_le_bytes(*bytes))
}

fn half(file: &[u8], at: usize) -> Result<usize> {
    let bytes = file.get(at..).and_then(|rest| rest.first_chunk()).context("the file ends too early")?;
    Ok(usize::from(u16::from_le_bytes(*bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(sections: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; 0x40];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[0x28] = 0x40;
        bytes[0x3a] = 0x40;
        bytes[0x3c] = u8::try_from(sections.len()).expect("few sections");
        for (flags, size) in sections {
            let mut header = [0; 0x40];
            header[8..16].copy_from_slice(&flags.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            bytes.extend_from_slice(&header);
        }
        bytes
    }

    #[test]
    fn only_sections_with_instructions_count() {
        assert_eq!(
            executable_bytes(&file(&[(2, 1000), (6, 30), (3, 70), (6, 12)])).expect("it is right"),
            42
        );
    }

    #[test]
    fn what_is_cut_off_or_no_elf_file_is_refused() {
        let whole = file(&[(6, 1)]);
        for length in 0..whole.len() - 0x18 {
            assert!(executable_bytes(&whole[..length]).is_err(), "{length} bytes are taken for a whole file");
        }
        assert!(executable_bytes(b"#!/bin/sh\nexit 0\n").is_err());
    }

    #[test]
    fn this_test_itself_has_code() {
        let path = std::env::current_exe().expect("a test has a file");
        let bytes = std::fs::read(path).expect("it can be read");
        let text = executable_bytes(&bytes).expect("it is an ELF file");
        assert!(text > 1000 && text < bytes.len() as u64, "{text} bytes of code");
    }
}
