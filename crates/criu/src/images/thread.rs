//! `core-TID.img`: a thread, and in the image of a process's first thread what the process has as a whole. What can be
//! changed here is what depends on the instruction set; all else stays byte for byte.

use super::wire::{Fields, of_numbers};

/// Fields of `core_entry`.
mod field {
    pub(super) const MACHINE: u32 = 1;
    pub(super) const X86: u32 = 2;
    pub(super) const TASK: u32 = 3;
    pub(super) const THREAD: u32 = 5;
    pub(super) const AARCH64: u32 = 8;
    /// `thread_info_*` of the others.
    pub(super) const OTHERS: [u32; 6] = [6, 9, 10, 11, 12, 13];
}

/// Fields of `task_core_entry`.
mod task {
    pub(super) const STATE: u32 = 1;
    pub(super) const MASK: u32 = 5;
    pub(super) const NAME: u32 = 6;
    pub(super) const PENDING: u32 = 10;
    pub(super) const OLD_SECCOMP_MODE: u32 = 11;
    pub(super) const ACTIONS: u32 = 15;
}

/// Fields of `thread_core_entry`.
mod of_thread {
    pub(super) const ROBUST_LIST: u32 = 1;
    pub(super) const ROBUST_LIST_LENGTH: u32 = 2;
    pub(super) const MASK: u32 = 6;
    pub(super) const ALTERNATE_STACK: u32 = 7;
    pub(super) const PENDING: u32 = 9;
    pub(super) const SECCOMP_MODE: u32 = 11;
    pub(super) const RESTARTABLE_SEQUENCES: u32 = 15;
}

/// Fields of `sa_entry`.
mod action {
    pub(super) const HANDLER: u32 = 1;
    pub(super) const FLAGS: u32 = 2;
    pub(super) const RESTORER: u32 = 3;
    pub(super) const OF_32_BITS: u32 = 5;
}

/// `TASK_DEAD` and `TASK_ZOMBIE` of CRIU's `task_state`.
const ENDED: [u64; 2] = [2, 6];
/// The bit of x86-64's `mode` of registers that says 32 bits: `COMPAT`.
const OF_32_BITS: u64 = 2;
/// `SA_RESTORER`, the same on all sets.
const RESTORER: u64 = 0x0400_0000;
/// How many actions a process has. CRIU would look for another image where there were none.
const ACTIONS: usize = 62;
/// Most signals that wait in a queue: more than the kernel lets a user have in a usual setting.
const MOST_PENDING: usize = 1 << 20;
/// Signals that have no action.
const WITHOUT_ACTION: [i32; 2] = [9, 19];
/// All signals that can be blocked: all but those.
const ALL_BLOCKED: u64 = !(1 << 8 | 1 << 18);

/// An instruction set whose registers are known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// x86-64.
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

impl Architecture {
    /// `march` of `core_entry`.
    fn machine(self) -> u64 {
        match self {
            Self::X86_64 => 1,
            Self::Aarch64 => 3,
        }
    }
}

/// The registers with which a thread begins; all others are zero, or as the kernel gives them to a new program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Where it goes on.
    pub program_counter: u64,
    /// Its stack.
    pub stack_pointer: u64,
    /// `%fs` or `tpidr_el0`.
    pub thread_pointer: u64,
}

/// What becomes of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalAction {
    /// The signal.
    pub signal: i32,
    /// 0: the default; 1: it is ignored; else where the kernel calls.
    pub handler: u64,
    /// Where a handler returns to; only looked at if there is one.
    pub restorer: u64,
}

/// A signal that waits to be delivered, as far as it is looked at (`siginfo_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingSignal {
    /// The signal.
    pub signal: i32,
    /// `si_code`.
    pub code: i32,
    /// The number in `si_value` of one that was queued.
    pub value: u32,
}

/// A core, taken apart. Its errors say what is wrong with the image.
#[derive(Clone, Debug)]
pub struct ThreadImage<'a>(Fields<'a>);

impl<'a> ThreadImage<'a> {
    /// Takes the record of an image apart.
    pub fn decode(record: &'a [u8]) -> Result<Self, String> {
        Fields::decode(record).map(Self)
    }

    /// The record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.0.encode()
    }

    /// The instruction set; none: one that is not known here.
    pub fn architecture(&self) -> Result<Option<Architecture>, String> {
        let machine = self.0.number(field::MACHINE)?;
        Ok([Architecture::X86_64, Architecture::Aarch64]
            .into_iter()
            .find(|one| Some(one.machine()) == machine))
    }

    /// Is this of a process as a whole, or of one more thread?
    #[must_use]
    pub fn has_process(&self) -> bool {
        self.0.has(field::TASK)
    }

    /// Is this of a process that has ended, and waits for its parent to ask how?
    pub fn has_ended(&self) -> Result<bool, String> {
        let Some(task) = self.0.bytes(field::TASK)? else { return Ok(false) };
        Ok(Fields::decode(task)?.number(task::STATE)?.is_some_and(|state| ENDED.contains(&state)))
    }

    /// The process's name, as the kernel has it.
    pub fn name(&self) -> Result<String, String> {
        let Some(task) = self.0.bytes(field::TASK)? else { return Ok(String::new()) };
        let task = Fields::decode(task)?;
        Ok(String::from_utf8_lossy(task.bytes(task::NAME)?.unwrap_or_default()).into_owned())
    }

    /// Is there a filter of system calls (seccomp)?
    pub fn has_filter(&self) -> Result<bool, String> {
        for (part, mode) in [(field::TASK, task::OLD_SECCOMP_MODE), (field::THREAD, of_thread::SECCOMP_MODE)]
        {
            let Some(inner) = self.0.bytes(part)? else { continue };
            if Fields::decode(inner)?.number(mode)?.is_some_and(|mode| mode != 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The thread pointer.
    pub fn thread_pointer(&self) -> Result<u64, String> {
        let missing = "it has no registers of its instruction set";
        let part =
            |fields: &Fields<'_>, tag: u32| Ok::<_, String>(fields.bytes(tag)?.ok_or(missing)?.to_vec());
        match self.architecture()? {
            None => Err("it is of an instruction set that is not known here".to_owned()),
            Some(Architecture::Aarch64) => {
                let state = part(&self.0, field::AARCH64)?;
                Ok(Fields::decode(&state)?.number(2)?.ok_or(missing)?)
            }
            Some(Architecture::X86_64) => {
                let state = part(&self.0, field::X86)?;
                let registers = part(&Fields::decode(&state)?, 2)?;
                let registers = Fields::decode(&registers)?;
                if registers.number(28)?.is_some_and(|mode| mode == OF_32_BITS) {
                    return Err("it runs code of 32 bits".to_owned());
                }
                Ok(registers.number(22)?.ok_or(missing)?)
            }
        }
    }

    /// Says of which instruction set it is, and nothing more: of a process that has ended.
    pub fn set_architecture(&mut self, architecture: Architecture) {
        self.0.set_number(field::MACHINE, architecture.machine());
    }

    /// Lets the thread begin with these registers of an instruction set, in place of those that it had, and all signals
    /// blocked. The robust list, the area of restartable sequences and a stack for signals are not registered.
    pub fn begin(&mut self, architecture: Architecture, registers: &Registers) -> Result<(), String> {
        self.set_architecture(architecture);
        for tag in field::OTHERS.into_iter().chain([field::X86, field::AARCH64]) {
            self.0.remove(tag);
        }
        match architecture {
            Architecture::X86_64 => self.0.set_bytes(field::X86, x86(registers)),
            Architecture::Aarch64 => self.0.set_bytes(field::AARCH64, aarch64(registers)),
        }
        // CRIU takes the mask of a process's first thread from here, and those of others from there.
        let is_first = self.0.change(field::TASK, |fields| {
            fields.set_number(task::MASK, ALL_BLOCKED);
            Ok(())
        })?;
        self.0.change(field::THREAD, |fields| {
            if !is_first || fields.has(of_thread::MASK) {
                fields.set_number(of_thread::MASK, ALL_BLOCKED);
            }
            fields.remove(of_thread::ALTERNATE_STACK);
            fields.set_number(of_thread::ROBUST_LIST, 0);
            fields.set_number(of_thread::ROBUST_LIST_LENGTH, 0);
            fields.remove(of_thread::RESTARTABLE_SEQUENCES);
            Ok(())
        })?;
        Ok(())
    }

    /// Keeps, of the signals that wait for the thread and, in the image of the first, for the process, those that `keep`
    /// wants.
    pub fn keep_pending(&mut self, keep: impl Fn(PendingSignal) -> bool) -> Result<(), String> {
        for (part, queue) in [(field::TASK, task::PENDING), (field::THREAD, of_thread::PENDING)] {
            self.0.change(part, |fields| {
                fields.change_at_most(MOST_PENDING, queue, |fields| kept(fields, &keep))?;
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Gives each signal that has a handler the one that `change` puts into its action. A restorer is used on each set.
    pub fn change_actions(&mut self, change: impl Fn(&mut SignalAction)) -> Result<(), String> {
        self.0.change(field::TASK, |fields| {
            let actions = fields.all(task::ACTIONS)?;
            let mut changed = Vec::with_capacity(actions.len());
            if actions.len() != ACTIONS {
                return Err(format!("it has actions of {} signals, and must have {ACTIONS}", actions.len()));
            }
            let mut signals = (1..).filter(|signal| !WITHOUT_ACTION.contains(signal));
            for inner in actions {
                let mut fields = Fields::decode(inner)?;
                let number = |tag| Ok::<_, String>(fields.number(tag)?.unwrap_or(0));
                let (handler, restorer) = (number(action::HANDLER)?, number(action::RESTORER)?);
                if number(action::OF_32_BITS)? != 0 {
                    return Err("it has an action of a signal that is for code of 32 bits".to_owned());
                }
                let flags = number(action::FLAGS)? | RESTORER;
                let mut action = SignalAction { signal: signals.next().unwrap_or(0), handler, restorer };
                if handler <= 1 {
                    changed.push(inner.to_vec());
                    continue;
                }
                change(&mut action);
                fields.set_number(action::HANDLER, action.handler);
                fields.set_number(action::FLAGS, flags);
                fields.set_number(action::RESTORER, action.restorer);
                changed.push(fields.encode());
            }
            fields.set_all(task::ACTIONS, changed);
            Ok(())
        })?;
        Ok(())
    }
}

/// Keeps signals of a `signal_queue_entry { repeated siginfo_entry signals = 1 { bytes siginfo = 1 } }`.
fn kept(queue: &mut Fields<'_>, keep: impl Fn(PendingSignal) -> bool) -> Result<(), String> {
    let all = queue.all(1)?;
    let mut kept = Vec::with_capacity(all.len());
    for entry in &all {
        let fields = Fields::decode(entry)?;
        let information = fields.bytes(1)?.unwrap_or_default();
        let word = |at: usize| {
            let bytes = information.get(at..).and_then(<[u8]>::first_chunk);
            bytes.copied().map(u32::from_le_bytes).ok_or("a signal that waits is not whole")
        };
        let (signal, code) = (word(0)?.cast_signed(), word(8)?.cast_signed());
        if keep(PendingSignal { signal, code, value: word(24)? }) {
            kept.push(entry.to_vec());
        }
    }
    if kept.len() < all.len() {
        queue.set_all(1, kept);
    }
    Ok(())
}

/// `thread_info_x86` of a thread that begins.
fn x86(registers: &Registers) -> Vec<u8> {
    let general = (1..=28).map(|tag| {
        let value = match tag {
            // No system call is to be issued again.
            16 => u64::MAX,
            17 => registers.program_counter,
            // The segments of user code of 64 bits and its stack, and the flag of interrupts.
            18 => 0x33,
            19 => 0x202,
            20 => registers.stack_pointer,
            21 => 0x2b,
            22 => registers.thread_pointer,
            // They are of 64 bits.
            28 => 1,
            _ => 0,
        };
        (tag, value)
    });
    let floating = (1..=8).map(|tag| {
        let value = match tag {
            // All exceptions masked, and the nearest value: what a new program has.
            1 => 0x37f,
            7 => 0x1f80,
            8 => 0xffff,
            _ => 0,
        };
        (tag, value)
    });
    let mut state = Fields::default();
    state.set_number(1, 0);
    state.set_bytes(2, of_numbers(general));
    state.set_bytes(3, of_numbers(floating.chain([(9, 0); 32]).chain([(10, 0); 64])));
    state.encode()
}

/// `thread_info_aarch64` of a thread that begins. It has no keys of pointer authentication, so it gets new ones.
fn aarch64(registers: &Registers) -> Vec<u8> {
    let pointers = [(2, registers.stack_pointer), (3, registers.program_counter), (4, 0)];
    let mut state = Fields::default();
    state.set_number(1, 0);
    state.set_number(2, registers.thread_pointer);
    state.set_bytes(3, of_numbers([(1, 0); 31].into_iter().chain(pointers)));
    state.set_bytes(4, of_numbers([(1, 0); 64].into_iter().chain([(2, 0), (3, 0)])));
    state.encode()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REGISTERS: Registers = Registers {
        program_counter: 0x40_0000,
        stack_pointer: 0x10_0400_0000,
        thread_pointer: 0x10_0c01_0000,
    };

    /// A process on x86-64 with a handler, and with fields that are not known here.
    fn process() -> Vec<u8> {
        let mut handled = Fields::default();
        for (tag, number) in [(1, 0x1234), (2, 4), (3, 0x5678), (4, 9), (60, 5)] {
            handled.set_number(tag, number);
        }
        let mut task = Fields::default();
        task.set_number(task::STATE, 1);
        task.set_bytes(task::NAME, b"redis-server".to_vec());
        let ignored = vec![0x08, 1, 0x10, 0, 0x18, 0, 0x20, 0];
        let rest = std::iter::repeat_n(ignored.clone(), ACTIONS - 2);
        task.set_all(task::ACTIONS, [ignored, handled.encode()].into_iter().chain(rest));
        task.set_number(70, 3);
        let mut thread = Fields::default();
        for (tag, number) in [(1, 0x7000), (2, 24), (3, 5), (6, 1 << 63)] {
            thread.set_number(tag, number);
        }
        thread.set_bytes(of_thread::ALTERNATE_STACK, vec![8, 0, 16, 0, 24, 2]);
        thread.set_bytes(of_thread::RESTARTABLE_SEQUENCES, vec![8, 1]);
        let mut core = Fields::default();
        core.set_number(field::MACHINE, 1);
        core.set_bytes(field::X86, x86(&REGISTERS));
        core.set_bytes(field::TASK, task.encode());
        core.set_bytes(field::THREAD, thread.encode());
        core.set_bytes(80, b"unknown".to_vec());
        core.encode()
    }

    #[test]
    fn a_thread_begins_on_another_set_and_keeps_what_is_the_same_there() {
        let before = process();
        let mut core = ThreadImage::decode(&before).unwrap();
        assert_eq!(core.architecture(), Ok(Some(Architecture::X86_64)));
        assert_eq!(core.name().unwrap(), "redis-server");
        assert_eq!(core.thread_pointer(), Ok(REGISTERS.thread_pointer));
        core.begin(Architecture::Aarch64, &REGISTERS).unwrap();
        let there = core.encode();
        let mut there = ThreadImage::decode(&there).unwrap();
        assert_eq!(there.architecture(), Ok(Some(Architecture::Aarch64)));
        assert_eq!(there.thread_pointer(), Ok(REGISTERS.thread_pointer));
        assert!(!there.0.has(field::X86));
        let thread = Fields::decode(there.0.bytes(field::THREAD).unwrap().unwrap()).unwrap();
        let numbers = [1, 2, 3, 6].map(|tag| thread.number(tag).unwrap());
        assert_eq!(numbers, [Some(0), Some(0), Some(5), Some(0xffff_ffff_fffb_feff)]);
        assert!(!thread.has(7) && !thread.has(15));
        let task = Fields::decode(there.0.bytes(field::TASK).unwrap().unwrap()).unwrap();
        assert_eq!(task.number(5), Ok(Some(0xffff_ffff_fffb_feff)));
        // And back: but for what is not registered any more, it is the same.
        there.begin(Architecture::X86_64, &REGISTERS).unwrap();
        let mut expected = ThreadImage::decode(&before).unwrap();
        expected.begin(Architecture::X86_64, &REGISTERS).unwrap();
        assert_eq!(there.encode(), expected.encode());
        assert!(expected.encode().ends_with(b"unknown"));
    }

    #[test]
    fn only_handlers_are_changed_and_each_knows_its_signal() {
        let before = process();
        let mut core = ThreadImage::decode(&before).unwrap();
        core.change_actions(|action| {
            assert_eq!(*action, SignalAction { signal: 2, handler: 0x1234, restorer: 0x5678 });
            (action.handler, action.restorer) = (0x40_0020, 0x40_0030);
        })
        .unwrap();
        let task = core.0.bytes(field::TASK).unwrap().unwrap();
        let task = Fields::decode(task).unwrap();
        let actions = task.all(task::ACTIONS).unwrap();
        assert_eq!(actions[0], [0x08, 1, 0x10, 0, 0x18, 0, 0x20, 0]);
        let changed = Fields::decode(actions[1]).unwrap();
        let numbers = [1, 2, 3, 4, 60].map(|tag| changed.number(tag).unwrap().unwrap());
        assert_eq!(numbers, [0x40_0020, RESTORER | 4, 0x40_0030, 9, 5]);
        assert_eq!(task.number(70), Ok(Some(3)));
    }

    #[test]
    fn signals_that_wait_are_kept_or_not_for_process_and_thread() {
        let entry = |signal: u8, value: u8| {
            let mut information = vec![0; 128];
            (information[0], information[24]) = (signal, value);
            information[8..12].copy_from_slice(&(-6_i32).to_le_bytes());
            let mut entry = Fields::default();
            entry.set_bytes(1, information);
            entry.encode()
        };
        let core = |of_process: &[Vec<u8>], of_thread: &[Vec<u8>]| {
            let mut core = Fields::default();
            let parts =
                [(field::TASK, task::PENDING, of_process), (field::THREAD, of_thread::PENDING, of_thread)];
            for (part, tag, all) in parts {
                let (mut queue, mut inner) = (Fields::default(), Fields::default());
                queue.set_all(1, all.iter().cloned());
                inner.set_bytes(tag, queue.encode());
                core.set_bytes(part, inner.encode());
            }
            core.encode()
        };
        let before = core(&[entry(14, 0), entry(58, 5)], &[entry(58, 9), entry(58, 1)]);
        let mut image = ThreadImage::decode(&before).unwrap();
        image.keep_pending(|_| true).unwrap();
        assert_eq!(image.encode(), before);
        image
            .keep_pending(|pending| {
                assert_eq!(pending.code, -6);
                pending.signal != 58 || pending.value == 9
            })
            .unwrap();
        assert_eq!(image.encode(), core(&[entry(14, 0)], &[entry(58, 9)]));
        let short = core(&[vec![0x0a, 2, 1, 2]], &[]);
        let error = ThreadImage::decode(&short).unwrap().keep_pending(|_| true).unwrap_err();
        assert_eq!(error, "a signal that waits is not whole");
    }

    #[test]
    fn a_process_has_all_actions() {
        let mut core = Fields::default();
        core.set_bytes(field::TASK, Vec::new());
        let mut core = ThreadImage(core);
        assert!(core.has_process());
        assert!(core.change_actions(|_| {}).unwrap_err().contains("actions of 0 signals"));
    }

    #[test]
    fn signals_are_counted_without_those_that_have_no_action() {
        let mut task = Fields::default();
        let handled = [0x08, 2, 0x10, 0, 0x18, 0, 0x20, 0].to_vec();
        task.set_all(task::ACTIONS, std::iter::repeat_n(handled, ACTIONS));
        let mut core = Fields::default();
        core.set_bytes(field::TASK, task.encode());
        let seen = std::cell::RefCell::new(Vec::new());
        ThreadImage(core).change_actions(|action| seen.borrow_mut().push(action.signal)).unwrap();
        let expected: Vec<i32> = (1..=64).filter(|signal| !WITHOUT_ACTION.contains(signal)).collect();
        assert_eq!(seen.into_inner(), expected);
    }

    #[test]
    fn code_of_32_bits_and_filters_are_told() {
        let mut core = Fields::default();
        core.set_number(field::MACHINE, 1);
        let mut general = Fields::default();
        general.set_number(22, 5);
        general.set_number(28, OF_32_BITS);
        let mut state = Fields::default();
        state.set_bytes(2, general.encode());
        core.set_bytes(field::X86, state.encode());
        core.set_bytes(field::THREAD, vec![0x58, 2]);
        let core = ThreadImage(core);
        assert!(core.thread_pointer().unwrap_err().contains("32 bits"));
        assert_eq!(core.has_filter(), Ok(true));
        assert_eq!(ThreadImage::decode(&process()).unwrap().has_filter(), Ok(false));
    }
}
