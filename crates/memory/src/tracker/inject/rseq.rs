//! Restartable sequences: a thread announces a critical section, and when it loses the processor in it
//! the kernel sends it to the section's abort handler (rseq(2)).
//!
//! The kernel looks at where the thread is each time that it goes back to its own code after a stop. While
//! it runs a call of ours it is outside of the section, so the kernel takes the announcement away, and a
//! thread that was then put back into its section would go on in it with nobody to abort it. So it is sent
//! to the abort handler here, which the kernel would have done without us: the stop took the processor from
//! it.

use nix::errno::Errno;

use super::tracee::Tracee;
use super::{InjectError, refused};
use crate::process::Process;

const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;

/// Where `struct rseq` has the address of the section (linux/rseq.h).
const RSEQ_CS: u64 = 8;

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Debug, Default)]
struct Configuration {
    address: u64,
    size: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

/// `struct rseq_cs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Section {
    version: u32,
    flags: u32,
    start: u64,
    length: u64,
    abort: u64,
}

impl Section {
    fn parse(bytes: &[u8; 32]) -> Self {
        let (halves, _) = bytes.as_chunks::<4>();
        let (words, _) = bytes.as_chunks::<8>();
        Self {
            version: u32::from_ne_bytes(halves[0]),
            flags: u32::from_ne_bytes(halves[1]),
            start: u64::from_ne_bytes(words[1]),
            length: u64::from_ne_bytes(words[2]),
            abort: u64::from_ne_bytes(words[3]),
        }
    }

    fn contains(&self, pc: u64) -> bool {
        pc.wrapping_sub(self.start) < self.length
    }

    /// Whether the kernel takes it for one (kernel/rseq.c). It ends threads that announce another.
    fn is_sound(&self) -> bool {
        self.version == 0
            && self.flags == 0
            && self.start.checked_add(self.length).is_some()
            && !self.contains(self.abort)
    }
}

/// Where a stopped thread has to go on if it is in a critical section.
pub(super) fn abort_handler(process: &Process, tracee: &Tracee, pc: u64) -> Result<Option<u64>, InjectError> {
    let mut configuration = Configuration::default();
    match tracee.about(PTRACE_GET_RSEQ_CONFIGURATION, &mut configuration) {
        Ok(()) if configuration.address != 0 => {}
        Err(Errno::ESRCH) => return Err(InjectError::Gone),
        // It has registered nothing, or this kernel has no such thing.
        _ => return Ok(None),
    }
    let damaged =
        || refused(format!("its thread {} announces an invalid critical section (rseq)", tracee.task));
    let mut address = [0; 8];
    if process.read(configuration.address.wrapping_add(RSEQ_CS), &mut address)? != address.len() {
        return Err(damaged());
    }
    let address = u64::from_ne_bytes(address);
    if address == 0 {
        return Ok(None);
    }
    let mut bytes = [0; 32];
    if process.read(address, &mut bytes)? != bytes.len() {
        return Err(damaged());
    }
    let section = Section::parse(&bytes);
    let mut signature = [0; 4];
    let before = section.abort.wrapping_sub(signature.len() as u64);
    if !section.is_sound()
        || process.read(before, &mut signature)? != signature.len()
        || u32::from_ne_bytes(signature) != configuration.signature
    {
        return Err(damaged());
    }
    Ok(section.contains(pc).then_some(section.abort))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_from_its_start_to_before_its_end() {
        let mut bytes = [0; 32];
        bytes[8..16].copy_from_slice(&0x1000_u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&0x20_u64.to_ne_bytes());
        bytes[24..].copy_from_slice(&0x3000_u64.to_ne_bytes());
        let section = Section::parse(&bytes);
        assert_eq!(section, Section { version: 0, flags: 0, start: 0x1000, length: 0x20, abort: 0x3000 });
        assert!(section.is_sound());
        assert!(section.contains(0x1000) && section.contains(0x101f));
        assert!(!section.contains(0xfff) && !section.contains(0x1020));
    }

    #[test]
    fn what_the_kernel_does_not_take_for_a_section_is_none() {
        let sound = Section { version: 0, flags: 0, start: 0x1000, length: 0x20, abort: 0x3000 };
        for section in [
            Section { version: 1, ..sound },
            Section { flags: 1, ..sound },
            Section { length: u64::MAX, ..sound },
            Section { abort: 0x1010, ..sound },
        ] {
            assert!(!section.is_sound(), "{section:?}");
        }
    }
}
