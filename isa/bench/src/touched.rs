//! How much of a program's text is executed at all. An emulator translates what is executed, once, and can tell what:
//! `qemu-x86_64 -d in_asm` writes a line `0xADDRESS:  BYTES  INSTRUCTION` for each instruction.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_programs::run::Executable;
use serde::{Deserialize, Serialize};

const EMULATOR: &str = "qemu-x86_64-static";

/// A program's text in its plain build and in the one that can move, bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Text {
    pub(crate) name: String,
    pub(crate) plain: u64,
    pub(crate) godwit: u64,
    pub(crate) plain_touched: u64,
    pub(crate) godwit_touched: u64,
}

/// Bytes of instructions that a run executes.
///
/// # Errors
/// When the emulator is not there or the program fails in it.
pub(crate) fn bytes(executable: &Executable, arguments: &[&str]) -> Result<u64> {
    let scratch = tempfile::tempdir().context("cannot make a directory for the emulator's log")?;
    let log = scratch.path().join("log");
    let output = Command::new(EMULATOR)
        .args(["-d", "in_asm", "-D"])
        .arg(&log)
        .arg(&executable.path)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {EMULATOR}; install the packages with scripts/setup --isa"))?;
    ensure!(
        output.status.success(),
        "{} fails in {EMULATOR}: {}",
        executable.path.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let log = std::fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let bytes = count(&log);
    ensure!(bytes > 0, "{EMULATOR} reports no executed instruction");
    Ok(bytes)
}

/// Different bytes in the lines of a log; blocks may be translated more than once. An instruction of many bytes goes on
/// in lines of its own, with their addresses.
fn count(log: &str) -> u64 {
    let mut seen = BTreeSet::new();
    for line in log.lines() {
        let Some((address, rest)) = line.strip_prefix("0x").and_then(|line| line.split_once(':')) else {
            continue;
        };
        let Ok(address) = u64::from_str_radix(address, 16) else { continue };
        let is_byte = |word: &&str| word.len() == 2 && u8::from_str_radix(word, 16).is_ok();
        let bytes = rest.split_whitespace().take_while(is_byte).count() as u64;
        seen.extend(address..address + bytes);
    }
    seen.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_counts_once() {
        let log = "----------------\nIN: _start\n0x00411120:  31 ed                    xorl     %ebp, %ebp\n\
                   0x00411122:  48 89 e7                 movq     %rsp, %rdi\n\nIN:\n\
                   0x00411122:  48 89 e7                 movq     %rsp, %rdi\n0x00411130:  c3   retq\n";
        assert_eq!(count(log), 6);
    }
}
