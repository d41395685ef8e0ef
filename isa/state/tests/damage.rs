//! State files that were damaged: godwit-state refuses each with its sentence, and so does the program's own runtime
//! when it is handed one directly. Never a crash, never a resume from something else than was captured.

#[path = "support/bench.rs"]
mod bench;
#[path = "support/programs.rs"]
mod programs;
mod support;

use std::path::{Path, PathBuf};

use godwit_isa_state::plan::{self, PAGE, Quarter, Slot};
use godwit_isa_state::{HEADER, Program, Set, StateFile};

use bench::{Bench, refused};
use programs::{godwit_state, program, run, stderr};
use support::{BYTES, DESCRIPTOR, MAPPING, PAST_END, PROCESS, THREAD, borders, raw, seal, seal_header};

/// The state that is damaged.
fn sound() -> Bench {
    Bench::new("travels", 1500, &["12"])
}

#[test]
fn every_field_of_the_header_that_is_altered_is_told() {
    let bench = sound();
    // Field and offset; what godwit-state and the runtime say, as altered and with right sums again.
    let damaged = ("the header was altered", "header is damaged");
    let fields = [
        (
            "magic",
            0,
            ("does not begin as a state", "not a state file"),
            ("does not begin as a state", "not a state file"),
        ),
        (
            "version",
            8,
            ("version 3", "another version of the format"),
            ("version 3", "another version of the format"),
        ),
        ("sections", 14, damaged, ("would begin here", "longer than the file")),
        ("identity", 16, damaged, ("is of build", "another build of this one")),
        ("identity's end", 47, damaged, ("is of build", "another build of this one")),
        ("length", 49, damaged, ("it", "truncated, or something was appended")),
        ("sum of the body", 56, damaged, ("behind offset 64: it was altered", "the state file is damaged")),
        ("sum of the header", 60, damaged, damaged),
    ];
    for (field, at, altered, sealed) in fields {
        let file = bench.with(|file| file[at] ^= 1);
        let with_sum = bench.with(|file| {
            file[at] ^= 1;
            if at < 60 {
                seal_header(file);
            }
        });
        for (file, (ours, runtime)) in [(file, altered), (with_sum, sealed)] {
            bench.refused_by_godwit_state(&file, field, ours);
            for set in Set::ALL {
                bench.refused_by_runtime(set, &file, field, runtime);
            }
        }
    }
}

#[test]
fn descriptors_that_cannot_be_are_refused_by_the_runtime_too() {
    let bench = sound();
    let borders = borders(&bench.sound);
    let kind = |at: usize| u32::from_le_bytes(bench.sound[at..at + 4].try_into().expect("four"));
    let begins: Vec<usize> = borders[..borders.len() - 1].to_vec();
    let of =
        |wanted: u32| *begins.iter().find(|at| kind(**at) == wanted).expect("the runtime has written one");
    let (open, process) = (of(DESCRIPTOR), of(PROCESS));
    // What is altered, in a section's header or in the record behind it.
    for (what, at, value, ours, runtime) in [
        ("number", open + 4, u32::MAX, "an impossible number", "descriptor is damaged"),
        ("kind", open + 24, 9, "of an unknown kind", "descriptor is damaged"),
        ("bits", open + 28, 64, "unknown flags", "descriptor is damaged"),
        ("shares", open + 36, u32::MAX, "an impossible number", "descriptor is damaged"),
        ("path", open + 24 + 56, 0, "a zero in its path", "path has a zero in it"),
        ("address", open + 8, 1, "must be zero for its type", "an open file without a path"),
        ("process", process + 4, 1, "must be zero for its type", "process is damaged"),
        ("directory", process + 24 + 8, 0, "a zero in its path", "path has a zero in it"),
    ] {
        let file = bench.with(|file| {
            file[at..at + 4].copy_from_slice(&value.to_le_bytes());
            seal(file);
        });
        bench.refused_by_godwit_state(&file, what, ours);
        for set in Set::ALL {
            bench.refused_by_runtime(set, &file, what, runtime);
        }
    }
    // One number twice.
    let next = borders[borders.iter().position(|border| *border == open).expect("a border") + 1];
    let file = bench.with(|file| {
        let section = file[open..next].to_vec();
        file.splice(next..next, section);
        let sections = u32::from_le_bytes(file[12..16].try_into().expect("four")) + 1;
        file[12..16].copy_from_slice(&sections.to_le_bytes());
        seal(file);
    });
    bench.refused_by_godwit_state(&file, "twice", "not in ascending order");
    for set in Set::ALL {
        bench.refused_by_runtime(set, &file, "twice", "descriptors are not in order");
    }
}

#[test]
fn a_state_of_another_build_is_refused_with_both_builds() {
    let bench = sound();
    let basics = program("basics");
    for verb in ["resume", "inspect"] {
        let output = run(godwit_state().arg(verb).arg(&bench.state).arg("--program").arg(&basics.prog));
        refused(&output, verb, &format!("the state is of build {}", program("travels").build.short()));
        refused(&output, verb, &format!("is of build {};", basics.build.short()));
    }
}

#[test]
fn a_file_that_ends_at_a_section_or_beside_one_is_refused() {
    let bench = sound();
    let borders = borders(&bench.sound);
    let (end, borders) = borders.split_last().expect("there are sections");
    assert_eq!(*end, bench.sound.len());
    assert!(borders.len() >= 4, "{borders:?}");
    let cuts =
        borders.iter().flat_map(|at| [*at - 1, *at, *at + 1, *at + 8, *at + 24]).chain([0, 1, 32, end - 1]);
    for cut in cuts.filter(|cut| cut < end) {
        let what = format!("cut at {cut}");
        let file = &bench.sound[..cut];
        let (ours, runtime) = if cut < HEADER {
            ("it ends at offset", "too short")
        } else {
            ("it ends at offset", "truncated")
        };
        bench.refused_by_godwit_state(file, &what, ours);
        bench.refused_by_runtime(Set::X86_64, file, &what, runtime);
        if cut < HEADER {
            continue;
        }
        // With right sums, and more sections told of than there are.
        let mut sealed = file.to_vec();
        seal(&mut sealed);
        let what = format!("cut at {cut}, with right sums");
        bench.refused_by_godwit_state(&sealed, &what, "at offset");
        bench.refused_by_runtime(Set::X86_64, &sealed, &what, "longer than the file");
    }
    let longer = bench.with(|file| file.push(0));
    bench.refused_by_godwit_state(&longer, "one byte more", "1 bytes were appended");
    bench.refused_by_runtime(Set::X86_64, &longer, "one byte more", "something was appended");
}

#[test]
fn a_byte_that_is_altered_anywhere_is_refused() {
    let bench = sound();
    let seed = std::env::var("GODWIT_ISA_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    println!("GODWIT_ISA_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..120 {
        let bytes = random.usize(1..5);
        let mut what = format!("seed {seed}, round {round}:");
        let file = bench.with(|file| {
            for _ in 0..bytes {
                let (at, mask) = (random.usize(..file.len()), random.u8(1..));
                // Another mask at the same place must not undo it.
                file[at] = bench.sound[at] ^ mask;
                what += &format!(" {at}^{mask:#x}");
            }
        });
        bench.refused_by_runtime(Set::X86_64, &file, &what, "state file");
        if round % 8 == 0 {
            bench.refused_by_runtime(Set::Aarch64, &file, &what, "state file");
            bench.refused_by_godwit_state(&file, &what, "is refused");
        }
    }
    // All of this with a file that is sound goes on.
    bench.put(&bench.sound);
    for set in Set::ALL {
        assert_eq!(bench.runtime(set).status.code(), Some(7));
    }
}

/// The sound state with one section more in front, and right sums.
fn with_section(sound: &[u8], section: &[u8]) -> Vec<u8> {
    let mut file = sound.to_vec();
    file.splice(HEADER..HEADER, section.iter().copied());
    let sections = u32::from_le_bytes(file[12..16].try_into().expect("four")) + 1;
    file[12..16].copy_from_slice(&sections.to_le_bytes());
    seal(&mut file);
    file
}

#[test]
fn sections_that_were_forged_with_right_sums_are_refused() {
    let bench = sound();
    let (data, heap) = (plan::DATA.start, plan::HEAP.start);
    let continuation = Slot::MAIN.quarter(Quarter::Continuation).start;
    let native = Slot::MAIN.quarter(Quarter::NativeStack).start;
    let bytes = |address: u64, length: u64| raw(BYTES, 0, address, length, &[1; 8]);
    let map = |address: u64, length: u64, protection: u32| raw(MAPPING, protection, address, length, &[]);
    let past_end =
        |address: u64, length: u64, protection: u32| raw(PAST_END, protection, address, length, &[]);
    let not_its_own = "memory that is not the program's";
    let too_long = "longer than the file";
    let cases = [
        ("type 0", raw(0, 0, 0, 0, &[]), "type 0, which is unknown", Some("a section of an unknown type")),
        ("type 9", raw(9, 0, 0, 0, &[]), "type 9, which is unknown", Some("a section of an unknown type")),
        ("bytes in private text", bytes(0x0040_0000, 8), "outside the program's memory", Some(not_its_own)),
        ("bytes in neutral text", bytes(0x0400_0000, 8), "outside the program's memory", Some(not_its_own)),
        ("bytes in private data", bytes(0x7000_0000, 8), "outside the program's memory", Some(not_its_own)),
        ("bytes at 0", bytes(0, 8), "outside the program's memory", Some(not_its_own)),
        (
            "bytes of the kernel",
            bytes(0xffff_8000_0000_0000, 8),
            "outside the program's memory",
            Some(not_its_own),
        ),
        ("bytes past the end", bytes(u64::MAX - 3, 8), "past the last address", Some(not_its_own)),
        ("a length of all", bytes(data, u64::MAX), "are left in the file", Some(too_long)),
        ("a length of nearly all", bytes(data, u64::MAX - 7), "are left in the file", Some(too_long)),
        ("a length of half", bytes(data, 1 << 63), "are left in the file", Some(too_long)),
        ("bytes in constants", bytes(data, 8), "outside the variables", Some(not_its_own)),
        ("bytes without memory", bytes(heap, 8), "maps no memory", Some(not_its_own)),
        ("bytes without a mapping", bytes(plan::MAP.start + PAGE, 8), "maps no memory", Some(not_its_own)),
        ("bytes in the native stack", bytes(native, 8), "outside the program's memory", Some(not_its_own)),
        ("bytes in a guard", bytes(continuation - 8, 8), "outside the program's memory", Some(not_its_own)),
        (
            "bytes of no thread",
            bytes(Slot::new(7).expect("it is").control_block(), 8),
            "slot 7",
            Some(not_its_own),
        ),
        ("bytes twice", bytes(Slot::MAIN.control_block(), 8), "gives too", None),
        ("no bytes", raw(BYTES, 0, data, 0, &[]), "is empty", Some(not_its_own)),
        (
            "a mapping over text",
            map(0x0400_0000, PAGE, 3),
            "outside the program's memory",
            Some("maps memory"),
        ),
        ("a mapping over data", map(data, PAGE, 3), "outside the program's memory", Some("maps memory")),
        (
            "a mapping over a slot",
            map(continuation, PAGE, 3),
            "outside the program's memory",
            Some("maps memory"),
        ),
        ("a mapping of all", map(heap, u64::MAX, 3), "past the last address", Some("maps memory")),
        ("a mapping beside a page", map(heap + 8, PAGE, 3), "not whole pages", Some("maps memory")),
        ("a mapping of no pages", map(heap, 100, 3), "not whole pages", Some("maps memory")),
        ("a mapping to execute", map(heap, PAGE, 7), "protection 0x7", Some("maps memory")),
        ("an empty mapping", map(heap, 0, 3), "is empty", Some("map")),
        (
            "behind a file's end in data",
            past_end(data, PAGE, 3),
            "outside the program's",
            Some("maps memory"),
        ),
        (
            "behind a file's end of all",
            past_end(heap, u64::MAX, 3),
            "past the last address",
            Some("maps memory"),
        ),
        ("behind a file's end beside a page", past_end(heap, 8, 3), "not whole pages", Some("maps memory")),
        ("behind a file's end to execute", past_end(heap, PAGE, 5), "protection 0x5", Some("maps memory")),
        (
            "a second thread",
            raw(THREAD, 0, 0, 0, &[]),
            "a second thread in slot 0",
            Some("a thread that cannot be"),
        ),
        ("a thread nowhere", raw(THREAD, 2045, 0, 0, &[]), "slot 2045", Some("thread")),
        (
            "a thread without memory",
            raw(THREAD, 5, 0, 0, &[]),
            "slot 5 has 0x0 as its own address",
            Some("threads are not those of the program"),
        ),
    ];
    for (what, section, ours, runtime) in cases {
        let file = with_section(&bench.sound, &section);
        bench.refused_by_godwit_state(&file, what, ours);
        if let Some(runtime) = runtime {
            for set in Set::ALL {
                bench.refused_by_runtime(set, &file, what, runtime);
            }
        }
    }
    // Two mappings of the same memory.
    let twice = [map(heap, PAGE, 3), map(heap, 2 * PAGE, 3)];
    let file = twice.iter().fold(bench.sound.clone(), |file, section| with_section(&file, section));
    bench.refused_by_godwit_state(&file, "two mappings", "gives too");
    bench.refused_by_runtime(Set::X86_64, &file, "two mappings", "cannot map");
    // One that is there and is not.
    let twice = [map(heap, PAGE, 3), past_end(heap, 2 * PAGE, 3)];
    let file = twice.iter().fold(bench.sound.clone(), |file, section| with_section(&file, section));
    bench.refused_by_godwit_state(&file, "a mapping over a file's end", "gives too");
    bench.refused_by_runtime(Set::X86_64, &file, "a mapping over a file's end", "cannot map");
    // Bytes where there is nothing to write to.
    let both = [bytes(heap, 8), past_end(heap, PAGE, 3)];
    let file = both.iter().fold(bench.sound.clone(), |file, section| with_section(&file, section));
    bench.refused_by_godwit_state(&file, "bytes behind a file's end", "maps no memory");
    for set in Set::ALL {
        bench.refused_by_runtime(set, &file, "bytes behind a file's end", not_its_own);
    }
}

/// Where in the file the byte at an address is.
fn offset_of(file: &[u8], address: u64) -> usize {
    borders(file)
        .into_iter()
        .take_while(|at| *at < file.len())
        .find_map(|at| {
            let begin = u64::from_le_bytes(file[at + 8..at + 16].try_into().expect("eight"));
            let length = u64::from_le_bytes(file[at + 16..at + 24].try_into().expect("eight"));
            let is_bytes = u32::from_le_bytes(file[at..at + 4].try_into().expect("four")) == BYTES;
            let inside = is_bytes && (begin..begin + length).contains(&address);
            inside.then(|| at + 24 + usize::try_from(address - begin).expect("in the file"))
        })
        .expect("the state has it")
}

#[test]
fn frames_and_control_blocks_that_were_forged_with_right_sums_are_refused() {
    let bench = sound();
    let block = Slot::MAIN.control_block();
    let pointer = offset_of(&bench.sound, block + 24);
    let end = u64::from_le_bytes(bench.sound[pointer..pointer + 8].try_into().expect("eight"));
    let trailer = offset_of(&bench.sound, end - 8);
    let begin = Slot::MAIN.quarter(Quarter::Continuation).start;
    let set = |at: usize, value: u64, bytes: usize| {
        bench.with(|file| {
            file[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            seal(file);
        })
    };
    let cases = [
        (
            "the outermost frame's mark",
            set(trailer + 4, 0, 4),
            "are damaged at",
            Some("continuation buffer is damaged"),
        ),
        (
            "the outermost frame's site",
            set(trailer, 0x7fff_ffff, 4),
            "names site",
            Some("continuation buffer is damaged"),
        ),
        ("no frames", set(pointer, begin, 8), "has no continuation frames", Some("thread is damaged")),
        (
            "a pointer outside",
            set(pointer, plan::HEAP.start, 8),
            "as its continuation pointer",
            Some("thread is damaged"),
        ),
        (
            "half a trailer",
            set(pointer, begin + 4, 8),
            "are damaged at",
            Some("continuation buffer is damaged"),
        ),
        (
            "another address",
            set(offset_of(&bench.sound, block), 64, 8),
            "as its own address",
            Some("thread is damaged"),
        ),
        (
            "a data stack elsewhere",
            set(offset_of(&bench.sound, block + 16), 64, 8),
            "as its data stack pointer",
            Some("thread is damaged"),
        ),
    ];
    for (what, file, ours, runtime) in cases {
        bench.refused_by_godwit_state(&file, what, ours);
        if let Some(runtime) = runtime {
            bench.refused_by_runtime(Set::X86_64, &file, what, runtime);
        }
    }
}

/// As [`Bench`], of a program with several threads, some of which have ended or not begun.
#[test]
fn threads_that_were_forged_with_right_sums_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("state");
    let sound = capture_threads(&path);
    let state = StateFile::decode(sound.clone().into()).expect("it is sound");
    let mut parked = state.threads().iter().filter(|thread| thread.parked && thread.slot != Slot::MAIN);
    let slot = parked.next_back().expect("the program has threads").slot;
    let idle = state.threads().iter().find(|thread| !thread.parked).expect("one was not started").slot;
    let with = |address: u64, value: u64, bytes: usize| {
        let mut file = sound.clone();
        let at = offset_of(&file, address);
        file[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        seal(&mut file);
        file
    };
    // The section of the slot, renamed.
    let renamed = |to: u32| {
        let mut file = sound.clone();
        let word = |file: &[u8], at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four"));
        let at = borders(&file).into_iter().find(|at| {
            *at < file.len() && word(&file, *at) == THREAD && word(&file, at + 4) == slot.number()
        });
        let at = at.expect("the slot has a section") + 4;
        file[at..at + 4].copy_from_slice(&to.to_le_bytes());
        seal(&mut file);
        file
    };
    let block = slot.control_block();
    let begin = slot.quarter(Quarter::Continuation).start;
    let damaged = "thread is damaged";
    let cases = [
        ("a thread that captures", with(block + 12, 1, 4), damaged),
        ("a thread that jumps", with(block + 12, 2, 4), damaged),
        ("a thread that has ended, with frames", with(block + 12, 3, 4), damaged),
        ("a thread without frames", with(block + 24, begin, 8), damaged),
        ("frames in another thread", with(block + 24, begin - (64 << 20) + 64, 8), damaged),
        ("a data stack in another thread", with(block + 16, block - (64 << 20), 8), damaged),
        ("another's slot", with(block + 44, 0, 4), damaged),
        ("a thread where none was started", with(idle.control_block() + 12, 0, 4), damaged),
        ("a section of another slot", renamed(2000), "memory that is not the program's"),
        ("a section of no slot", renamed(u32::MAX), "a thread that cannot be"),
        ("a section twice", renamed(0), "a thread that cannot be"),
    ];
    for (what, file, why) in cases {
        StateFile::decode(file.clone().into())
            .map(|state| {
                let path = program("threads").executable(Set::X86_64);
                Program::open(&path, Set::X86_64).expect("it was linked").accepts(&state)
            })
            .map_or_else(|_| (), |accepted| assert!(accepted.is_err(), "{what}: taken by godwit-state"));
        std::fs::write(&path, &file).expect("it is ours");
        for set in Set::ALL {
            let output = program("threads")
                .command(set)
                .env("GODWIT_STATE_RESUME", &path)
                .output()
                .expect("it starts");
            refused(&output, &format!("{what} on {}", set.name()), why);
        }
    }
}

/// A state in which threads are parked, and a slot is taken by one that was not started.
fn capture_threads(path: &Path) -> Vec<u8> {
    let output = run(godwit_state()
        .args(["--json", "run"])
        .arg(&program("threads").prog)
        .args(["--after-polls", "700", "--state"])
        .arg(path));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    assert_ne!(programs::report(&output)["threads"], 1, "the state has several slots in use");
    std::fs::read(path).expect("it was written")
}

#[test]
fn an_executable_that_was_damaged_is_refused_or_read_within_its_bounds() {
    let bench = sound();
    let path = program("travels").executable(Set::X86_64);
    let sound = std::fs::read(&path).expect("it was built");
    let state = StateFile::open(&bench.state).expect("it is sound");
    let read = |bytes: &[u8]| Program::decode(bytes, &path, Set::X86_64);
    assert_eq!(read(&sound).expect("it is sound").accepts(&state), Ok(()));
    assert!(read(&sound[..sound.len() / 2]).is_err());

    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    // The headers, the symbols at the end, and the tables; what is between is code.
    let (mut refused, mut fits) = (0, 0);
    for _ in 0..60 {
        let mut altered = sound.clone();
        for _ in 0..random.usize(1..40) {
            let at = match random.u8(..3) {
                0 => random.usize(..0x400),
                1 => sound.len() - 1 - random.usize(..0x4000),
                _ => random.usize(..sound.len()),
            };
            altered[at] = random.u8(..);
        }
        match read(&altered) {
            Err(_) => refused += 1,
            Ok(program) => fits += u32::from(program.accepts(&state).is_ok()),
        }
    }
    println!("{refused} refused, {fits} fit");
    assert!(refused > 0);
}

#[test]
fn what_is_no_file_is_told() {
    let travels = program("travels");
    let directory = tempfile::tempdir().expect("a directory");
    for path in
        [directory.path().join("missing state"), directory.path().to_owned(), PathBuf::from("/dev/null")]
    {
        let path: &Path = &path;
        let mut command = godwit_state();
        refused(
            &run(command.arg("resume").arg(path).arg("--program").arg(&travels.prog)),
            "no file",
            "state file",
        );
        let output = travels.command(Set::X86_64).env("GODWIT_STATE_RESUME", path).output();
        refused(&output.expect("it starts"), "no file", "state file");
    }
}
