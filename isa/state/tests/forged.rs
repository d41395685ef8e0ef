//! States whose records of the runtime's own were forged, with right sums: control blocks, pages and table of signals,
//! table of mappings. godwit-state refuses each, and so does the runtime of both sets: never a crash, never a program
//! that goes on from something else than was captured.

#[path = "support/bench.rs"]
mod bench;
#[path = "support/programs.rs"]
mod programs;
mod support;

use godwit_isa_state::plan::{self, PAGE, Quarter, Slot};
use godwit_isa_state::{HEADER, Set};
use object::{Object as _, ObjectSymbol as _};

use bench::{Bench, refused};
use programs::{godwit_state, program, run, stderr};
use support::{BYTES, borders, raw, seal};

/// Says so where godwit-state does not look, but leaves it to the runtime.
const ONLY_RUNTIME: &str = "";

/// The state whose records are forged.
fn sound() -> Bench {
    Bench::new("handles", 3000, &[])
}

/// The address of a variable of the runtime's.
fn symbol(name: &str) -> u64 {
    let bytes = std::fs::read(program("handles").executable(Set::X86_64)).expect("it was built");
    let file = object::File::parse(&*bytes).expect("it is ELF");
    file.symbols().find(|symbol| symbol.name() == Ok(name)).expect("the runtime has it").address()
}

/// Asserts that a state with these numbers at these addresses is refused by everybody.
fn refused_with(bench: &Bench, what: &str, forged: &[(u64, Value)], ours: &str, runtime: &str) {
    let file = bench.with(|file| {
        for (address, value) in forged {
            write(file, *address, &value.bytes());
        }
        seal(file);
    });
    bench.put(&file);
    if ours != ONLY_RUNTIME {
        refused(&bench.godwit_state("resume"), what, ours);
    }
    for set in Set::ALL {
        refused(&bench.runtime(set), &format!("{what} on {}", set.name()), runtime);
    }
}

#[derive(Clone, Copy)]
enum Value {
    Word(u32),
    Long(u64),
}

use Value::{Long, Word};

impl Value {
    fn bytes(self) -> Vec<u8> {
        match self {
            Word(value) => value.to_le_bytes().to_vec(),
            Long(value) => value.to_le_bytes().to_vec(),
        }
    }
}

/// Puts bytes at an address of the program: where the file has them, or in a section of their own where it has zeros.
fn write(file: &mut Vec<u8>, address: u64, bytes: &[u8]) {
    let long = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight"));
    let word = |file: &[u8], at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four"));
    let found = borders(file).into_iter().take_while(|at| *at < file.len()).find_map(|at| {
        let (begin, length) = (long(file, at + 8), long(file, at + 16));
        let is_inside = word(file, at) == BYTES && (begin..begin + length).contains(&address);
        is_inside.then(|| at + 24 + usize::try_from(address - begin).expect("in the file"))
    });
    if let Some(at) = found {
        file[at..at + bytes.len()].copy_from_slice(bytes);
        return;
    }
    let padded = [bytes, &[0; 8][bytes.len()..]].concat();
    file.splice(HEADER..HEADER, raw(BYTES, 0, address, bytes.len() as u64, &padded));
    let sections = word(file, 12) + 1;
    file[12..16].copy_from_slice(&sections.to_le_bytes());
}

#[test]
fn the_state_that_is_forged_here_is_sound() {
    let bench = sound();
    let whole = run(godwit_state().arg("run").arg(&program("handles").prog));
    assert_eq!(whole.status.code(), Some(5), "{}", stderr(&whole));
    let expected = String::from_utf8(whole.stdout).expect("text");
    // Of 12, on the alternate stack.
    assert!(expected.contains("failed 0, handled 1200, memory 15"), "{expected}");
    for set in Set::ALL {
        let output = bench.runtime(set);
        assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", set.name());
    }
}

#[test]
fn forged_control_blocks_are_refused() {
    let bench = sound();
    let block = Slot::MAIN.control_block();
    let thread = "thread is damaged";
    for (what, forged, ours) in [
        ("a request to capture", (block + 8, Word(1)), "0x1 as its request"),
        ("a signal that nobody holds", (block + 8, Word(4)), "0x4 as its request"),
        ("any request", (block + 8, Word(u32::MAX)), "0xffffffff as its request"),
        ("a longjmp on its way", (block + 48, Long(64)), "0x40 as its longjmp on its way"),
        ("a fault's handler", (block + 96, Word(1)), "0x1 as its mark of a fault's handler"),
        ("a word to clear in text", (block + 88, Long(plan::TEXT.start)), "as its word to clear"),
        ("a word to clear nowhere", (block + 88, Long(64)), "0x40 as its word to clear"),
        ("a word to clear of the kernel's", (block + 88, Long(u64::MAX - 3)), "as its word to clear"),
        ("a word to clear beside a word", (block + 88, Long(plan::DATA.start + 0x1_0001)), "as its word to"),
        // Of the plan, but not of this program.
        ("a word to clear that is not mapped", (block + 88, Long(plan::MAP.end - 64)), ONLY_RUNTIME),
        ("another thread's number", (block + 80, Word(3)), ONLY_RUNTIME),
    ] {
        refused_with(&bench, what, &[forged], ours, thread);
    }
    let threads = symbol("__gw_threads");
    let nobody = "no thread to go on with";
    refused_with(&bench, "no process", &[(threads, Word(0))], ONLY_RUNTIME, thread);
    refused_with(
        &bench,
        "process beyond",
        &[(threads, Word(1 << 22)), (block + 80, Word(1 << 22))],
        ONLY_RUNTIME,
        nobody,
    );
    // In an alternate stack, which is the program's memory, and the thread's own ends elsewhere.
    let page = Slot::MAIN.quarter(Quarter::Control).end - PAGE;
    let own = Slot::MAIN.quarter(Quarter::DataStack);
    for (what, data_stack) in
        [("nowhere", 64), ("in text", plan::TEXT.start + 64), ("not mapped", plan::HEAP.end - 64)]
    {
        let forged = [(block + 16, Long(data_stack)), (page + 56, Long(own.end - 4096))];
        refused_with(&bench, what, &forged, ONLY_RUNTIME, thread);
    }
    refused_with(
        &bench,
        "own stack outside",
        &[(block + 16, Long(64)), (page + 56, Long(64))],
        "data stack pointer",
        thread,
    );
}

#[test]
fn forged_pages_of_signals_are_refused() {
    let bench = sound();
    let block = Slot::MAIN.control_block();
    let page = Slot::MAIN.quarter(Quarter::Control).end - PAGE;
    let signals = "signals are damaged";
    let kill = 1 << 8;
    let reserved = 1 << 57;
    for (what, forged, ours) in [
        ("SIGKILL blocked", (page, Long(kill)), "0x100 as its signal mask"),
        ("the reserved signal blocked", (page, Long(reserved)), "as its signal mask"),
        ("all blocked behind a wait", (page + 8, Long(u64::MAX)), "as its signal mask behind a wait"),
        ("two masks behind a wait", (page + 16, Word(2)), "0x2 as its mark of a mask behind a wait"),
        ("an unknown interruption", (page + 20, Word(3)), "0x3 as its mark of an interrupted call"),
        ("an alternate stack nowhere", (page + 32, Long(64)), "0x40 as its alternate stack"),
        ("one of the kernel's", (page + 32, Long(u64::MAX - 100)), "as its alternate stack"),
        ("one in text", (page + 32, Long(plan::TEXT.start)), "as its alternate stack"),
        ("one that is too long", (page + 40, Long(u64::MAX)), "as its alternate stack"),
        ("unknown flags", (page + 48, Long(2)), "0x2 as its alternate stack's flags"),
    ] {
        refused_with(&bench, what, &[forged], ours, signals);
    }
    for signal in [0, 9, 19, 58, 65, u32::MAX] {
        let forged = [(page + 28, Word(1)), (block + 8, Word(4)), (page + 64, Word(signal))];
        refused_with(&bench, &format!("signal {signal} held"), &forged, "as its held signal", signals);
    }
    let twice = [(page + 28, Word(2)), (block + 8, Word(4)), (page + 64, Word(10))];
    refused_with(&bench, "held twice", &twice, "0x2 as its mark of a held signal", signals);
    // Held, but no poll would look at it.
    let unseen = [(page + 28, Word(1)), (page + 64, Word(10))];
    refused_with(&bench, "held unseen", &unseen, "0x0 as its request", "thread is damaged");
}

#[test]
fn a_forged_table_of_signals_is_refused() {
    let bench = sound();
    let table = symbol("__gw_signal_table");
    let (action, timer, pending) =
        (|signal: u64| table + (signal - 1) * 32, table + 2184, table + 2184 + 128 * 112);
    let signals = "signals are damaged";
    let handler = symbol("handler");
    for (what, forged, ours) in [
        ("a handler nowhere", vec![(action(10), Long(64))], "handler of signal 10 is 0x40"),
        (
            "a handler in the runtime",
            vec![(action(10), Long(0x0040_1000))],
            "handler of signal 10 is 0x401000",
        ),
        ("a handler in data", vec![(action(10), Long(table))], "handler of signal 10"),
        ("a handler of the kernel's", vec![(action(12), Long(u64::MAX - 15))], "handler of signal 12"),
        ("the middle of a handler", vec![(action(10), Long(handler + 4))], "handler of signal 10"),
        ("a handler's mask", vec![(action(10) + 16, Long(1 << 18))], "mask of the handler of signal 10"),
        ("known twice", vec![(action(10) + 24, Long(2))], "mark of the action of signal 10 is 0x2"),
        (
            "SIGKILL handled",
            vec![(action(9), Long(handler)), (action(9) + 24, Long(1))],
            "the action of signal 9",
        ),
        (
            "the reserved one",
            vec![(action(58), Long(1)), (action(58) + 24, Long(1))],
            "the action of signal 58",
        ),
        ("a timer half made", vec![(timer, Word(1))], "mark of timer 0 is 0x1"),
        ("an unknown timer", vec![(timer + 112, Word(7))], "mark of timer 1 is 0x7"),
        ("a timer's signal 0", vec![(timer + 24, Word(0))], "signal of timer 0 is 0x0"),
        ("a timer's signal 65", vec![(timer + 24, Word(65))], "signal of timer 0 is 0x41"),
        ("a timer's reserved signal", vec![(timer + 24, Word(58))], "signal of timer 0 is 0x3a"),
        ("a timer that makes threads", vec![(timer + 28, Word(2))], "way to tell of timer 0 is 0x2"),
        ("a signal 0 that waits", vec![(pending + 8, Word(0))], "number of waiting signal 0 is 0x0"),
        ("SIGKILL that waits", vec![(pending + 8, Word(9))], "number of waiting signal 0 is 0x9"),
        ("a signal 65 that waits", vec![(pending + 8, Word(65))], "number of waiting signal 0 is 0x41"),
        ("for a thread that is not there", vec![(pending, Long(5))], "addressee of waiting signal 0 is 0x5"),
        ("for no slot", vec![(pending, Long(u64::MAX))], "addressee of waiting signal 0"),
        ("more that wait than were sent", vec![(table + 2052, Word(2))], "waiting signal 1"),
    ] {
        refused_with(&bench, what, &forged, ours, signals);
    }
    for count in [1025, u32::MAX] {
        let ours = "count of signals that wait, of which there are at most 1024";
        refused_with(
            &bench,
            "too many",
            &[(table + 2052, Word(count))],
            ours,
            "more pending signals than there can be",
        );
    }
}

#[test]
fn a_forged_table_of_mappings_is_refused_by_the_runtime() {
    let bench = sound();
    let neutral = symbol("__gw_neutral");
    let table = plan::MAP_TABLE.start;
    let mappings = "mappings are damaged";
    // Two entries: the heap and a mapping. Each has begin, end, protection and flags.
    for (what, forged) in [
        ("no entries", (neutral + 8, Long(0))),
        ("one entry less", (neutral + 8, Long(1))),
        ("one entry more", (neutral + 8, Long(3))),
        ("more entries than fit", (neutral + 8, Long(u64::MAX))),
        ("entries behind the table", (neutral + 8, Long((plan::MAP.start - table) / 24 + 1))),
        ("a heap that ends nowhere", (neutral, Long(64))),
        ("a heap that ends too far up", (neutral, Long(plan::HEAP.end + 1))),
        ("an entry elsewhere", (table + 24, Long(plan::DATA.start))),
        ("an entry beside a page", (table + 24, Long(plan::MAP.start + 8))),
        ("an entry that is shorter", (table + 32, Long(plan::MAP.start + PAGE))),
        ("an entry that is longer", (table + 32, Long(plan::MAP.start + 8 * PAGE))),
        ("an entry backwards", (table + 32, Long(plan::MAP.start))),
        ("an entry past the end", (table + 32, Long(!(PAGE - 1)))),
        ("entries over one another", (table + 8, Long(plan::MAP.start + PAGE))),
        ("another protection", (table + 40, Word(1))),
        ("a protection to execute", (table + 40, Word(7))),
        ("flags that nobody has", (table + 44, Word(0x122))),
    ] {
        refused_with(&bench, what, &[forged], ONLY_RUNTIME, mappings);
    }
}
