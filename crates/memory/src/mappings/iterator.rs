//! The mappings of one process by a BPF iterator (Documentation/bpf/bpf_iterators.rst).
//!
//! The program is called for each mapping, and puts out three words:
//!
//! ```text
//! seq_write(context.meta.seq, { vma.vm_start, vma.vm_end, vma.vm_flags })
//! ```
//! Where the members are, the kernel's types tell. This program is also licensed under GPL-2.0, without which the kernel
//! does not let it call `seq_write`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

use super::Mapping;
use super::btf::{KERNEL, Types};

const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const ITER_CREATE: libc::c_long = 33;
const PROG_TYPE_TRACING: u32 = 26;
const TRACE_ITER: u32 = 28;
const SEQ_WRITE: i32 = 127;

/// Most mappings of one process. (The iterator of Linux 6.0 and before shows those of all.)
const MOST: usize = 1 << 20;

/// Bytes read at once: more than the kernel has ready, since it shows some mappings twice where a reader takes less
/// (seen in 6.18).
const PIECE: usize = 64 << 10;

/// `struct bpf_insn`: operation, registers (destination in the lower half), offset, immediate.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Instruction(u8, u8, i16, i32);

/// Of `union bpf_attr`, for the load of a program.
#[repr(C)]
#[derive(Debug, Default)]
struct Load {
    kind: u32,
    instructions: u32,
    first: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
    btf: u32,
    function_size: u32,
    functions: u64,
    function_count: u32,
    line_size: u32,
    lines: u64,
    line_count: u32,
    attach_to: u32,
}

/// For a link to an iterator.
#[repr(C)]
#[derive(Debug, Default)]
struct Link {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    what: u64,
    what_size: u32,
    unused: u32,
}

/// Of `union bpf_iter_link_info`: which process.
#[repr(C)]
#[derive(Debug, Default)]
struct Of {
    thread: u32,
    process: u32,
    descriptor: u32,
    unused: u32,
}

/// For an iterator of a link.
#[repr(C)]
#[derive(Debug, Default)]
struct Create {
    link: u32,
    flags: u32,
}

/// Calls bpf(2) for a descriptor.
fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attributes are a structure of the size that is told, of which the kernel reads as much as this command
    // knows; what they point to lives as long as the caller borrows it.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    let fd = Errno::result(i32::try_from(fd).unwrap_or(-1))?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: &impl AsRawFd) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// The program, loaded.
#[derive(Debug)]
pub(super) struct Iterator(OwnedFd);

impl Iterator {
    pub(super) fn load() -> io::Result<Self> {
        let types = std::fs::read(KERNEL)?;
        let types =
            Types::read(&types).ok_or_else(|| io::Error::other(format!("{KERNEL} cannot be read")))?;
        let missing = || io::Error::other("the kernel has no iterator over mappings");
        let attach_to = types.function("bpf_iter_task_vma").ok_or_else(missing)?;
        let offset = |member| {
            let offset = types.offset("vm_area_struct", member).ok_or_else(missing)?;
            i16::try_from(offset).map_err(io::Error::other)
        };
        let program = program([offset("vm_start")?, offset("vm_end")?, offset("vm_flags")?]);
        let license = c"Dual MIT/GPL";
        let load = Load {
            kind: PROG_TYPE_TRACING,
            instructions: u32::try_from(program.len()).map_err(io::Error::other)?,
            first: program.as_ptr().expose_provenance() as u64,
            license: license.as_ptr().expose_provenance() as u64,
            name: *b"godwit_mappings\0",
            attach_type: TRACE_ITER,
            attach_to,
            ..Load::default()
        };
        Ok(Self(bpf(PROG_LOAD, &load)?))
    }

    /// The mappings of a process, in the order of their addresses. A process whose main thread has ended has none here.
    pub(super) fn of(&self, pid: i32) -> io::Result<Vec<Mapping>> {
        let of = Of { thread: u32::try_from(pid).map_err(io::Error::other)?, ..Of::default() };
        let link = Link {
            program: number(&self.0),
            attach_type: TRACE_ITER,
            what: (&raw const of).expose_provenance() as u64,
            what_size: u32::try_from(size_of::<Of>()).map_err(io::Error::other)?,
            ..Link::default()
        };
        let link = bpf(LINK_CREATE, &link)?;
        let output = bpf(ITER_CREATE, &Create { link: number(&link), flags: 0 })?;
        let (mut output, mut piece) = (File::from(output), vec![0; PIECE]);
        let mut all: Vec<Mapping> = Vec::new();
        loop {
            let read = output.read(&mut piece)?;
            let (words, []) = piece[..read].as_chunks::<24>() else {
                return Err(io::Error::other("a part of a mapping is told"));
            };
            let before = all.last().map_or(0, |last| last.end);
            // Past its end, the kernel begins anew with some that it has shown (seen in 6.18).
            match words.first().map(mapping) {
                Some(first) if first.start >= before && all.len() < MOST => {
                    all.extend(words.iter().map(mapping))
                }
                _ => return Ok(all),
            }
        }
    }
}

fn mapping(told: &[u8; 24]) -> Mapping {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&told[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    Mapping { start: word(0), end: word(8), flags: word(16) }
}

/// The program, for members at these offsets.
fn program(offsets: [i16; 3]) -> Vec<Instruction> {
    const LOAD: u8 = 0x79;
    const STORE: u8 = 0x7b;
    const MOVE: u8 = 0xbf;
    const SET: u8 = 0xb7;
    const ADD: u8 = 0x07;
    const JUMP_IF_EQUAL: u8 = 0x15;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    let of = |operation, to: u8, from: u8, offset, immediate| {
        Instruction(operation, to | from << 4, offset, immediate)
    };
    let stored = (-24_i16..).step_by(8);
    let members = offsets
        .iter()
        .zip(stored)
        .flat_map(|(offset, at)| [of(LOAD, 3, 7, *offset, 0), of(STORE, 10, 3, at, 0)]);
    let body: Vec<_> = [of(LOAD, 8, 6, 0, 0)]
        .into_iter()
        .chain(members)
        .chain([
            of(MOVE, 1, 8, 0, 0),
            of(MOVE, 2, 10, 0, 0),
            of(ADD, 2, 0, 0, -24),
            of(SET, 3, 0, 0, 24),
            of(CALL, 0, 0, 0, SEQ_WRITE),
        ])
        .collect();
    // At the end there is no mapping.
    let over = i16::try_from(body.len()).unwrap_or(0);
    [of(LOAD, 6, 1, 0, 0), of(LOAD, 7, 1, 16, 0), of(JUMP_IF_EQUAL, 7, 0, over, 0)]
        .into_iter()
        .chain(body)
        .chain([of(SET, 0, 0, 0, 0), of(EXIT, 0, 0, 0, 0)])
        .collect()
}
