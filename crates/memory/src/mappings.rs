//! The mappings of processes with their flags, as `/proc/PID/smaps` has them, in a tenth of a millisecond.
//!
//! The kernel tells flags in `smaps` alone, beside sums for which it looks at each page: 8 ms for 256 MiB, and CRIU reads
//! them while a service is frozen. A BPF iterator over the mappings (`task_vma`, Linux 6.1 for one process) tells the
//! same flags without a look at pages:
//!
//! ```text
//! /proc/PID/maps ──lines──▶ text ──▶ DIRECTORY/PID, in the form of smaps
//! iterator ──────flags────▶
//! ```
//!
//! The flags' bits are the kernel's own affair. So what is made of them is compared with `smaps` of this process, in which
//! each flag is set somewhere, before anything is believed; and a process with a bit that is not known is left out.

mod btf;
mod flags;
mod iterator;

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::OnceLock;

use self::iterator::Iterator as Mapped;

/// A mapping of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    flags: u64,
}

/// What is known about mappings on this kernel.
static KNOWN: OnceLock<Option<Mapped>> = OnceLock::new();

/// Gets ready, where that has not been done: 20 ms.
pub fn prepare() {
    let _ = known();
}

fn known() -> Option<&'static Mapped> {
    let load = || Mapped::load().and_then(|mapped| flags::check(&mapped).map(|()| mapped));
    // Another thread may change a mapping of this process while both are read.
    let prepare = || match load().or_else(|_| load()).or_else(|_| load()) {
        Ok(mapped) => Some(mapped),
        Err(error) => {
            tracing::info!(%error, "this kernel does not tell the flags of mappings but in smaps: a dump takes longer with more memory");
            None
        }
    };
    KNOWN.get_or_init(prepare).as_ref()
}

/// Writes the mappings of each of these processes, which do not run, into a file of this directory that is named by its
/// PID. How many there are: none is written of a process that has ended, whose mappings have flags that are not known, or
/// where there is no room.
///
/// # Errors
/// A file that could not be written as a whole cannot be removed.
pub fn write(pids: &[i32], directory: &Path) -> io::Result<usize> {
    let Some(mapped) = known() else { return Ok(0) };
    let mut written = 0;
    for &pid in pids {
        if let Some(text) = text(mapped, pid) {
            let path = directory.join(pid.to_string());
            match std::fs::write(&path, text) {
                Ok(()) => written += 1,
                Err(error) => {
                    tracing::debug!(pid, %error, "the flags of its mappings are not told");
                    match std::fs::remove_file(path) {
                        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                        _ => {}
                    }
                }
            }
        }
    }
    Ok(written)
}

/// Of each mapping of a process the line of its `maps`, and one of its flags.
fn text(mapped: &Mapped, pid: i32) -> Option<Vec<u8>> {
    let failed = |error: io::Error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::debug!(pid, %error, "the flags of its mappings are not told");
        }
    };
    let mappings = mapped.of(pid).map_err(failed).ok()?;
    let maps = std::fs::read(format!("/proc/{pid}/maps")).map_err(failed).ok()?;
    joined(&maps, &mappings)
}

/// None if the two are not of the same mappings, or a flag is not known.
fn joined(maps: &[u8], mappings: &[Mapping]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(maps.len() * 2);
    let mut mappings = mappings.iter();
    for line in maps.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        text.extend_from_slice(line);
        text.push(b'\n');
        // The kernel's own page at the end of the address space is no mapping, and has no flags that matter.
        if line.ends_with(b" [vsyscall]") {
            continue;
        }
        let mapping = mappings.next()?;
        let range = line.split(|byte| *byte == b' ').next()?;
        if range != format!("{:08x}-{:08x}", mapping.start, mapping.end).as_bytes() {
            return None;
        }
        text.extend_from_slice(b"VmFlags:");
        for word in flags::words(mapping.flags)? {
            text.push(b' ');
            text.extend_from_slice(word.as_bytes());
        }
        text.extend_from_slice(b" \n");
    }
    // Nothing of a process that has none any more.
    (mappings.next().is_none() && !text.is_empty()).then_some(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use super::*;

    const MAPS: &[u8] = b"\
00400000-00401000 r-xp 00000000 fe:00 7                          /bin/x y
7ffd00000000-7ffd00002000 rw-p 00000000 00:00 0                  [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0          [vsyscall]
";

    fn mappings() -> [Mapping; 2] {
        [
            Mapping { start: 0x40_0000, end: 0x40_1000, flags: 0x75 },
            Mapping { start: 0x7ffd_0000_0000, end: 0x7ffd_0000_2000, flags: 0x173 },
        ]
    }

    #[test]
    fn each_mapping_has_its_line_and_its_flags() {
        let text = String::from_utf8(joined(MAPS, &mappings()).unwrap()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[0].ends_with("/bin/x y") && lines[4].ends_with("[vsyscall]"), "{lines:?}");
        assert_eq!((lines[1], lines[3]), ("VmFlags: rd ex mr mw me ", "VmFlags: rd wr mr mw me gd "));
    }

    #[test]
    fn a_process_is_told_as_smaps_tells_it() {
        let Some(mapped) = known() else {
            assert!(!Path::new(btf::KERNEL).exists() || !nix::unistd::geteuid().is_root());
            return;
        };
        // It has nothing but what the kernel and its dynamic linker have mapped, and does not run.
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let own = nix::unistd::Pid::from_raw(pid);
        let is_asleep = || {
            let said = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
            said.starts_with(&format!("{} ", libc::SYS_clock_nanosleep))
        };
        while !is_asleep() {
            std::thread::yield_now();
        }
        nix::sys::signal::kill(own, nix::sys::signal::Signal::SIGSTOP).unwrap();
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(write(&[pid, i32::MAX], directory.path()).unwrap(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(text(mapped, pid).is_none(), "it has ended");
        let told = std::fs::read_to_string(directory.path().join(pid.to_string())).unwrap();
        let is_kept =
            |line: &&str| line.starts_with("VmFlags:") || line.split(' ').next().unwrap().contains('-');
        // The kernel's own page has flags in smaps alone.
        let ours: Vec<_> = told.lines().collect();
        let kernels: Vec<_> = smaps.lines().filter(is_kept).take(ours.len()).collect();
        assert!(ours.len() > 20);
        for (ours, kernels) in ours.iter().zip(&kernels) {
            let words = |line: &str| {
                line.split_whitespace().map(str::to_owned).collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!(words(ours), words(kernels));
        }
    }

    #[test]
    fn thousands_of_mappings_are_told() {
        let Some(mapped) = known() else { return };
        const PAGES: usize = 8000;
        let length = std::num::NonZeroUsize::new(PAGES * 4096).unwrap();
        let (access, flags) = (ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap_anonymous(None, length, access, flags) }.unwrap();
        for page in (0..PAGES).step_by(2) {
            // SAFETY: the page is of the mapping just made, which nothing refers to.
            unsafe { mprotect(start.byte_add(page * 4096), 4096, ProtFlags::PROT_NONE) }.unwrap();
        }
        let own = mapped.of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let first = start.addr().get() as u64;
        let told: Vec<_> = own
            .iter()
            .filter(|mapping| (first..first + PAGES as u64 * 4096).contains(&mapping.start))
            .collect();
        // SAFETY: as above.
        unsafe { munmap(start, length.get()) }.unwrap();
        assert_eq!(told.len(), PAGES);
        for (page, mapping) in told.iter().enumerate() {
            assert_eq!(mapping.start, first + page as u64 * 4096);
            assert_eq!(mapping.flags & 0x20_0007, 0x20_0000 | u64::from(page % 2 == 1), "{mapping:x?}");
        }
    }

    #[test]
    fn what_does_not_fit_together_is_not_told() {
        let [one, two] = mappings();
        for bad in [
            vec![one],
            vec![one, two, two],
            vec![two, one],
            vec![one, Mapping { end: two.end + 0x1000, ..two }],
            vec![one, Mapping { flags: 1 << 50, ..two }],
        ] {
            assert_eq!(joined(MAPS, &bad), None, "{bad:x?}");
        }
        assert_eq!(joined(b"", &[]), None, "a process without memory");
    }
}
