//! The seccomp filters in the images, beside the system calls that a container must not make.
//!
//! ```text
//!   core-PID.img   thread_core_entry: mode, and the number of the filter that was added last
//!   seccomp.img    seccomp_filter*: a program of classic BPF, the number of the one that was there before, and flags
//! ```
//! Where all threads of a process have the same filters only the main thread's are in the images, with a flag by which
//! it gives them to the others.
//!
//! Programs are not compared as bytes: those that two versions of libseccomp make of one profile differ. They are
//! run instead, as the kernel would, for each call that has to be refused. A call is refused if one filter of the
//! chain does so whatever the call's arguments are: where a program looks at them, both ways are followed.

use std::collections::BTreeMap;
use std::path::Path;

use prost::Message;

use super::{ImageError, ImageKind, single};

/// SECCOMP_MODE_FILTER.
const FILTER: u32 = 2;
/// SECCOMP_FILTER_FLAG_TSYNC.
const FOR_ALL_THREADS: u32 = 1;
/// Most instructions of a program, and most of a chain (MAX_INSNS_PER_PATH).
const MOST_INSTRUCTIONS: usize = 4096;
const MOST_IN_CHAIN: usize = 32_768;
/// Most steps for one call in one program: a way through it is no longer than the program, and of those that are made
/// of a profile few branch at an argument. One that takes more counts as one that lets the call pass.
const MOST_STEPS: usize = 1 << 16;
/// Most steps for all calls and chains of a service: some tenths of a second.
const MOST_STEPS_IN_ALL: usize = 1 << 26;

/// The system calls that no process of a container may make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refused {
    /// Those of each architecture whose programs this machine runs.
    pub of: Vec<RefusedOf>,
}

/// Those of one architecture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefusedOf {
    /// As in `linux/audit.h`.
    pub architecture: u32,
    /// Its name, for errors.
    pub name: &'static str,
    /// Numbers, and the names as far as they are known.
    pub always: Vec<(u32, &'static str)>,
    /// The same with certain arguments.
    pub with: Vec<(u32, &'static str, [u64; 6])>,
}

/// `seccomp_filter`.
#[derive(Clone, PartialEq, Eq, Message)]
struct Filter {
    #[prost(bytes = "vec", required, tag = "1")]
    program: Vec<u8>,
    #[prost(uint32, optional, tag = "2")]
    before: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    flags: Option<u32>,
}

/// `seccomp_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
struct Filters {
    #[prost(message, repeated, tag = "1")]
    filters: Vec<Filter>,
}

/// What each chain of filters in a directory of images refuses, looked at once.
pub(super) struct Chains<'a> {
    refused: &'a Refused,
    /// Each with the number of the one that was there before, and whether all threads get it.
    filters: Vec<(usize, Option<u32>, bool)>,
    /// By the number in `filters`: equal ones, of which a dump writes one for each process, are one.
    programs: Vec<Option<Vec<Instruction>>>,
    /// What is wrong with chains of these programs.
    known: BTreeMap<Vec<usize>, Option<String>>,
    left: usize,
}

impl<'a> Chains<'a> {
    /// Those in the images of a container that must not make these calls.
    pub(super) fn read(images: &Path, refused: &'a Refused) -> Result<Self, ImageError> {
        let path = images.join("seccomp.img");
        // Without a filter CRIU makes no such image, or an empty one.
        let is_there = std::fs::metadata(&path).is_ok_and(|status| status.len() > 0);
        let read = if is_there { single::<Filters>(&path, ImageKind::Seccomp)?.filters } else { Vec::new() };
        let (mut programs, mut places, mut filters) = (Vec::new(), BTreeMap::new(), Vec::new());
        for Filter { program, before, flags } in read {
            let place = *places.entry(program).or_insert_with_key(|bytes| {
                programs.push(decode(bytes));
                programs.len() - 1
            });
            filters.push((place, before, flags.unwrap_or(0) & FOR_ALL_THREADS != 0));
        }
        Ok(Self { refused, filters, programs, known: BTreeMap::new(), left: MOST_STEPS_IN_ALL })
    }

    /// What is wrong with a thread's filters: a verb with its objects.
    pub(super) fn excess(&mut self, mode: Option<u32>, last: Option<u32>) -> Option<String> {
        let (Some(FILTER), Some(last)) = (mode, last) else {
            return Some("has no seccomp filter, and the service has one".into());
        };
        let chain = match self.chain(last) {
            Ok(chain) => chain,
            Err(reason) => return Some(reason),
        };
        if let Some(known) = self.known.get(&chain) {
            return known.clone();
        }
        let wrong = self.let_through(&chain);
        self.known.insert(chain, wrong.clone());
        wrong
    }

    /// Whether a main thread with these filters gives them to threads that have none: the first and the last do, one of
    /// which is installed after all others.
    pub(super) fn are_for_all_threads(&self, mode: Option<u32>, last: Option<u32>) -> bool {
        let filter = |number: u32| self.filters.get(usize::try_from(number).ok()?);
        let (Some(FILTER), Some(Some(mut next))) = (mode, last.map(filter)) else { return false };
        let is_last_for_all = next.2;
        // A circle ends where its length is looked at.
        for _ in 0..MOST_IN_CHAIN {
            match next.1.map(filter) {
                None => return is_last_for_all && next.2,
                Some(None) => return false,
                Some(Some(before)) => next = before,
            }
        }
        false
    }

    /// The programs of a chain, the last first.
    fn chain(&self, last: u32) -> Result<Vec<usize>, String> {
        let (mut chain, mut next, mut instructions) = (Vec::new(), Some(last), 0);
        while let Some(number) = next {
            let filter = usize::try_from(number).ok().and_then(|number| self.filters.get(number));
            let (place, before, _) =
                filter.ok_or_else(|| format!("has a seccomp filter {number} that no image contains"))?;
            let program = self.programs.get(*place).and_then(Option::as_ref);
            let program =
                program.ok_or_else(|| format!("has a seccomp filter {number} that is not a program"))?;
            instructions += program.len();
            if instructions > MOST_IN_CHAIN {
                return Err("has more seccomp filters than the kernel takes".into());
            }
            chain.push(*place);
            next = *before;
        }
        Ok(chain)
    }

    fn let_through(&mut self, chain: &[usize]) -> Option<String> {
        let Self { refused, programs, left, .. } = self;
        let chain: Vec<_> = chain.iter().filter_map(|place| programs.get(*place)?.as_deref()).collect();
        for of in &refused.of {
            let mut passes = |number, arguments| {
                let call = Call { number, architecture: of.architecture, arguments };
                chain.iter().all(|program| may_pass(program, &call, left))
            };
            let always = of.always.iter().find(|(number, _)| passes(*number, None));
            if let Some((number, name)) = always {
                return Some(format!(
                    "has a seccomp filter that allows {name} (system call {number} of {}), which the service's refuses",
                    of.name
                ));
            }
            let with = of.with.iter().find(|(number, _, arguments)| passes(*number, Some(*arguments)));
            if let Some((number, name, arguments)) = with {
                return Some(format!(
                    "has a seccomp filter that allows {name} with the arguments {arguments:x?} (system call \
                     {number} of {}), which the service's refuses",
                    of.name
                ));
            }
        }
        None
    }
}

/// Whether all filters in a directory of images let processes of an architecture (`linux/audit.h`) make a system call. What is
/// no program lets none be made.
///
/// # Errors
/// The image cannot be read.
pub fn filters_let(images: &Path, architecture: u32, number: u32) -> Result<bool, ImageError> {
    let refused = Refused::default();
    let Chains { programs, mut left, .. } = Chains::read(images, &refused)?;
    let call = Call { number, architecture, arguments: None };
    let passes = |program: &Option<Vec<Instruction>>| {
        program.as_ref().is_some_and(|program| may_pass(program, &call, &mut left))
    };
    Ok(programs.iter().all(passes))
}

/// `sock_filter`.
#[derive(Debug, Clone, Copy)]
struct Instruction {
    code: u16,
    yes: u8,
    no: u8,
    k: u32,
}

/// A call that is about to be made; without arguments: any.
struct Call {
    number: u32,
    architecture: u32,
    arguments: Option<[u64; 6]>,
}

impl Call {
    /// A word of `seccomp_data`; none where it is not known.
    fn word(&self, offset: u32) -> Option<u32> {
        match offset {
            0 => Some(self.number),
            4 => Some(self.architecture),
            16..64 => {
                let argument = self.arguments?[usize::try_from((offset - 16) / 8).ok()?];
                let low = argument & u64::from(u32::MAX);
                u32::try_from(if offset.is_multiple_of(8) { low } else { argument >> 32 }).ok()
            }
            _ => None,
        }
    }
}

/// The instructions of a program; none where it cannot be one.
fn decode(bytes: &[u8]) -> Option<Vec<Instruction>> {
    let (instructions, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() || instructions.is_empty() || instructions.len() > MOST_INSTRUCTIONS {
        return None;
    }
    let instruction = |bytes: &[u8; 8]| {
        let [a, b, yes, no, k @ ..] = *bytes;
        Instruction { code: u16::from_ne_bytes([a, b]), yes, no, k: u32::from_ne_bytes(k) }
    };
    Some(instructions.iter().map(instruction).collect())
}

/// A place in a program with what is known there: nothing of a register that depends on what is not known.
#[derive(Clone, Copy, Default)]
struct State {
    at: usize,
    a: Option<u32>,
    x: Option<u32>,
    memory: [Option<u32>; 16],
}

/// Whether there is a way through the program at whose end the call is made. What the kernel would not take for a
/// program lets all pass, and so does one that takes more steps than there are `left`.
fn may_pass(program: &[Instruction], call: &Call, left: &mut usize) -> bool {
    let mut ways = vec![State::default()];
    let mut own = MOST_STEPS;
    while let Some(mut state) = ways.pop() {
        loop {
            if own == 0 || *left == 0 {
                return true;
            }
            own -= 1;
            *left -= 1;
            let Some(instruction) = program.get(state.at) else { return true };
            state.at += 1;
            match step(*instruction, &mut state, call) {
                Next::On => {}
                Next::Either(other) => ways.push(other),
                Next::Passes => return true,
                Next::Refused => break,
            }
        }
    }
    false
}

enum Next {
    On,
    /// Another way, too.
    Either(State),
    Passes,
    Refused,
}

fn step(Instruction { code, yes, no, k }: Instruction, state: &mut State, call: &Call) -> Next {
    let cell = usize::try_from(k).ok().filter(|cell| *cell < state.memory.len());
    let operand = if code & 0x08 == 0 { Some(k) } else { state.x };
    match (code, cell) {
        (0x00, _) => state.a = Some(k),
        (0x01, _) => state.x = Some(k),
        (0x20, _) => state.a = call.word(k),
        // The length of `seccomp_data`.
        (0x80, _) => state.a = Some(64),
        (0x81, _) => state.x = Some(64),
        (0x60, Some(cell)) => state.a = state.memory[cell],
        (0x61, Some(cell)) => state.x = state.memory[cell],
        (0x02, Some(cell)) => state.memory[cell] = state.a,
        (0x03, Some(cell)) => state.memory[cell] = state.x,
        (0x07, _) => state.x = state.a,
        (0x87, _) => state.a = state.x,
        (0x84, _) => state.a = state.a.map(u32::wrapping_neg),
        (0x04 | 0x0c | 0x14 | 0x1c | 0x24 | 0x2c | 0x34 | 0x3c | 0x44 | 0x4c | 0x54 | 0x5c, _)
        | (0x64 | 0x6c | 0x74 | 0x7c | 0xa4 | 0xac, _) => match (state.a, operand) {
            // The kernel ends a program so that divides by nothing.
            (_, Some(0)) if code & 0xf0 == 0x30 => return Next::Refused,
            (Some(a), Some(b)) => state.a = Some(calculated(code & 0xf0, a, b)),
            _ => state.a = None,
        },
        (0x05, _) => state.at = state.at.saturating_add(usize::try_from(k).unwrap_or(usize::MAX)),
        (0x15 | 0x1d | 0x25 | 0x2d | 0x35 | 0x3d | 0x45 | 0x4d, _) => {
            let known = state.a.zip(operand).map(|(a, b)| match code & 0xf0 {
                0x10 => a == b,
                0x20 => a > b,
                0x30 => a >= b,
                _ => a & b != 0,
            });
            let other = State { at: state.at + usize::from(no), ..*state };
            match known {
                Some(false) => *state = other,
                Some(true) => state.at += usize::from(yes),
                None => {
                    state.at += usize::from(yes);
                    return Next::Either(other);
                }
            }
        }
        (0x06, _) => return answer(Some(k)),
        (0x16, _) => return answer(state.a),
        _ => return Next::Passes,
    }
    Next::On
}

fn calculated(operation: u16, a: u32, b: u32) -> u32 {
    match operation {
        0x00 => a.wrapping_add(b),
        0x10 => a.wrapping_sub(b),
        0x20 => a.wrapping_mul(b),
        0x30 => a / b.max(1),
        0x40 => a | b,
        0x50 => a & b,
        0x60 => a.checked_shl(b).unwrap_or(0),
        0x70 => a.checked_shr(b).unwrap_or(0),
        _ => a ^ b,
    }
}

/// Whether a call is made that is answered so: SECCOMP_RET_TRACE, LOG and ALLOW, and what is not known.
fn answer(value: Option<u32>) -> Next {
    match value.map(|value| value & 0xffff_0000) {
        None | Some(0x7ff0_0000 | 0x7ffc_0000 | 0x7fff_0000) => Next::Passes,
        Some(_) => Next::Refused,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::super::tests::image;
    use super::*;

    const NATIVE: u32 = 0xc000_003e;
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0001;
    const LOAD: u16 = 0x20;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;

    fn program(instructions: &[(u16, u8, u8, u32)]) -> Vec<u8> {
        let bytes = instructions
            .iter()
            .map(|(code, yes, no, k)| [&code.to_ne_bytes()[..], &[*yes, *no], &k.to_ne_bytes()].concat());
        bytes.collect::<Vec<_>>().concat()
    }

    /// Refuses this call.
    fn refuses(number: u32) -> Vec<u8> {
        program(&[(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO), (RETURN, 0, 0, ALLOW)])
    }

    fn refused() -> Refused {
        let with = vec![(2, "two", [7, 0, 0, 0, 0, 0])];
        Refused {
            of: vec![RefusedOf { architecture: NATIVE, name: "x86-64", always: vec![(1, "one")], with }],
        }
    }

    #[test]
    fn filters_let_only_those_architectures_make_calls_for_which_they_are() {
        const ARCHITECTURE: u32 = 4;
        let directory = tempfile::tempdir().unwrap();
        let lets = |architecture| filters_let(directory.path(), architecture, 94).unwrap();
        assert!(lets(0xc000_00b7), "without a filter");
        let native =
            [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, NATIVE), (RETURN, 0, 0, 0), (RETURN, 0, 0, ALLOW)];
        let filters = |all: &[Vec<u8>]| {
            let filter = |program: &Vec<u8>| Filter { program: program.clone(), before: None, flags: None };
            let filters = all.iter().map(filter).collect();
            let bytes = image(ImageKind::Seccomp, &[Filters { filters }]);
            std::fs::write(directory.path().join("seccomp.img"), bytes).unwrap();
        };
        filters(&[refuses(1)]);
        assert!(lets(NATIVE) && lets(0xc000_00b7));
        filters(&[refuses(1), program(&native)]);
        assert!(lets(NATIVE) && !lets(0xc000_00b7));
        filters(&[refuses(94)]);
        assert!(!lets(NATIVE));
        filters(&[vec![1, 2, 3]]);
        assert!(!lets(NATIVE));
    }

    /// An image with a filter that refuses call 1, and what it must refuse.
    pub(in super::super) fn refusing_one() -> Vec<u8> {
        image(
            ImageKind::Seccomp,
            &[Filters { filters: vec![Filter { program: refuses(1), before: None, flags: Some(1) }] }],
        )
    }

    pub(in super::super) fn one() -> Refused {
        let mut refused = refused();
        refused.of[0].with.clear();
        refused
    }

    /// What is wrong with a chain of these programs, the oldest first.
    fn wrong(programs: &[Vec<u8>]) -> Option<String> {
        let filters = (0u32..).zip(programs);
        let filter = |(number, program): (u32, &Vec<u8>)| Filter {
            program: program.clone(),
            before: number.checked_sub(1),
            flags: None,
        };
        let directory = tempfile::tempdir().unwrap();
        let filters = Filters { filters: filters.map(filter).collect() };
        std::fs::write(directory.path().join("seccomp.img"), image(ImageKind::Seccomp, &[filters])).unwrap();
        let refused = refused();
        let mut chains = Chains::read(directory.path(), &refused).unwrap();
        let last = u32::try_from(programs.len()).unwrap().checked_sub(1);
        let wrong = chains.excess(Some(FILTER), last);
        assert_eq!(chains.excess(Some(FILTER), last), wrong, "the second thread");
        wrong
    }

    #[test]
    fn a_chain_that_refuses_what_it_must_is_no_excess() {
        let both = program(&[
            (LOAD, 0, 0, 0),
            (EQUAL, 4, 0, 1),
            (EQUAL, 0, 2, 2),
            (LOAD, 0, 0, 16),
            (EQUAL, 1, 0, 7),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ERRNO),
        ]);
        assert_eq!(wrong(std::slice::from_ref(&both)), None);
        // What a process adds later, and what was there before, take nothing away.
        assert_eq!(wrong(&[refuses(5), both.clone(), refuses(6)]), None);
        assert_eq!(wrong(&[refuses(1), refuses(2)]), None, "each refuses its part");
    }

    #[test]
    fn a_chain_that_allows_what_it_must_not_is_named() {
        let allows = |name: &str, programs: &[Vec<u8>]| {
            let wrong = wrong(programs).unwrap();
            assert!(wrong.contains(name), "{name}: {wrong}");
        };
        allows("allows one (system call 1 of x86-64)", &[refuses(2)]);
        allows("allows two with the arguments [7, 0, 0, 0, 0, 0]", &[refuses(1)]);
        allows("allows one ", &[program(&[(RETURN, 0, 0, ALLOW)])]);
        for answer in [0x7ff0_0000, 0x7ffc_0000] {
            allows("allows one ", &[program(&[(RETURN, 0, 0, answer)])]);
        }
        // Only with an argument that nobody would guess.
        let secret = program(&[
            (LOAD, 0, 0, 56),
            (EQUAL, 0, 1, 0xdead_beef),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ERRNO),
        ]);
        allows("allows one ", &[secret]);
        // Only for another architecture.
        let elsewhere =
            program(&[(LOAD, 0, 0, 4), (EQUAL, 0, 1, NATIVE), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO)]);
        allows("allows one ", &[elsewhere]);
        // Nothing that the kernel would take.
        allows("allows one ", &[program(&[(0xffff, 0, 0, 0)])]);
        allows("allows one ", &[program(&[(0x05, 0, 0, u32::MAX)])]);
        allows("that is not a program", &[vec![0; 7]]);
        allows("that is not a program", &[Vec::new()]);
    }

    #[test]
    fn a_thread_without_a_filter_and_chains_that_cannot_be_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let refused = refused();
        let mut none = Chains::read(directory.path(), &refused).unwrap();
        for (mode, last) in [(None, None), (Some(0), Some(0)), (Some(1), None), (Some(2), None)] {
            assert!(none.excess(mode, last).unwrap().contains("has no seccomp filter"));
        }
        assert!(none.excess(Some(2), Some(0)).unwrap().contains("no image contains"));
        let itself = Filters { filters: vec![Filter { program: refuses(1), before: Some(0), flags: None }] };
        std::fs::write(directory.path().join("seccomp.img"), image(ImageKind::Seccomp, &[itself])).unwrap();
        let mut circle = Chains::read(directory.path(), &refused).unwrap();
        assert!(circle.excess(Some(2), Some(0)).unwrap().contains("more seccomp filters"));
    }

    #[test]
    fn filters_are_for_all_threads_where_the_first_and_the_last_are() {
        let directory = tempfile::tempdir().unwrap();
        let filter = |before, flags| Filter { program: refuses(1), before, flags };
        let filters = [
            filter(None, Some(1)),
            filter(Some(0), None),
            filter(Some(1), Some(5)),
            filter(None, None),
            filter(Some(3), Some(1)),
            filter(Some(5), Some(1)),
            filter(Some(9), Some(1)),
        ];
        let filters = Filters { filters: filters.to_vec() };
        std::fs::write(directory.path().join("seccomp.img"), image(ImageKind::Seccomp, &[filters])).unwrap();
        let refused = refused();
        let chains = Chains::read(directory.path(), &refused).unwrap();
        let these: Vec<_> =
            (0..8).filter(|last| chains.are_for_all_threads(Some(FILTER), Some(*last))).collect();
        assert_eq!(these, [0, 2]);
        assert!(
            !chains.are_for_all_threads(Some(1), Some(0)) && !chains.are_for_all_threads(Some(FILTER), None)
        );
    }

    proptest! {
        #[test]
        fn any_program_ends(
            instructions in proptest::collection::vec(
                (prop_oneof![Just(0x15u16), Just(0x20), Just(0x06), Just(0x54), Just(0x60), any::<u16>()], any::<u8>(), any::<u8>(), any::<u32>()),
                1..64,
            )
        ) {
            let program = decode(&program(&instructions)).unwrap();
            let known = Call { number: 1, architecture: NATIVE, arguments: Some([0; 6]) };
            let any = Call { number: 1, architecture: NATIVE, arguments: None };
            // What passes with certain arguments does so with any.
            let left = &mut MOST_STEPS_IN_ALL.clone();
            prop_assert!(!may_pass(&program, &known, left) || may_pass(&program, &any, left));
        }
    }
}
