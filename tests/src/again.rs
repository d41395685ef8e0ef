//! The programs with which the tool chain for two instruction sets is tested, as services that run them again and again
//! (`programs/again.c`): a move meets each of them at a poll that nobody has chosen. What a run prints has to be what a plain
//! build prints, wherever it was moved meanwhile.

use std::{fs, path::PathBuf, time::Duration};

use godwit_isa_programs::{
    catalogue::{Kind, Program, programs},
    compile::Compiler,
    run::Outcome,
};
use godwit_lab::workload::Preset;

use crate::{Bed, ledger, machines::PATIENCE, tier, wait_for_within};

/// How long a run of a plain build may take, also an emulated one.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a hundred runs may take.
const A_HUNDRED: Duration = Duration::from_secs(300);
/// Programs of one service.
const AT_ONCE: usize = 4;
/// What `interrupts` prints depends on how long it stands still: a timer rings three times before a call that the first is to
/// end. The main thread of `ends` ends before others, which CRIU cannot dump.
const LEFT_OUT: [&str; 2] = ["interrupts", "ends"];
/// What `make test` has time for.
const SELECTION: [&str; 6] = ["callbacks", "goto", "jumps", "sorting", "synchronise", "handlers"];

/// Programs that run in one service, at once.
#[derive(Debug)]
pub struct Group {
    /// Name of the service.
    pub name: String,
    programs: Vec<(Program, u64)>,
}

/// All programs of these kinds; a selection of them where not all is tested.
pub fn groups(bed: &Bed, kinds: &[Kind]) -> Vec<Group> {
    let all = kinds.iter().flat_map(|kind| programs(*kind).unwrap());
    let all: Vec<_> = all
        .filter(|program| !LEFT_OUT.contains(&&*program.name))
        .filter(|program| tier::is_full() || SELECTION.contains(&&*program.name))
        .map(|program| {
            let sum = sum(bed, &program);
            (program, sum)
        })
        .collect();
    let group = |(number, programs): (usize, &[(Program, u64)])| Group {
        name: format!("again{number}"),
        programs: programs.to_vec(),
    };
    all.chunks(AT_ONCE).enumerate().map(group).collect()
}

/// The sum of a plain build's run, as `again.c` has it.
fn sum(bed: &Bed, program: &Program) -> u64 {
    let reference =
        if program.wants_wide_library() { Compiler::plain_aarch64() } else { Compiler::plain_x86_64() };
    let directory = bed.scratch().join("plain");
    fs::create_dir_all(&directory).unwrap();
    let plain = reference.build(&program.sources, &directory.join(&program.name), &[]);
    let run = plain.and_then(|plain| plain.run(&[], LIMIT)).unwrap_or_else(|error| panic!("{error:#}"));
    let Outcome::Ended { status, output, errors } = run else { panic!("{} does not end", program.name) };
    assert!(
        status == 0 && errors.is_empty(),
        "{}: {status}, {}",
        program.name,
        String::from_utf8_lossy(&errors)
    );
    let fnv = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    output.iter().chain(&[0]).fold(0xcbf2_9ce4_8422_2325, fnv)
}

impl Group {
    /// What the service runs.
    fn words(&self) -> Vec<String> {
        let words = self
            .programs
            .iter()
            .flat_map(|(program, sum)| [format!("/bin/{}", program.name), format!("{sum:x}")]);
        words.collect()
    }

    /// Its programs, built by godwit-cc: as `godwit image pack` wants them.
    fn built(&self, bed: &Bed) -> Vec<PathBuf> {
        let build = |(program, _): &(Program, u64)| {
            let directory = bed.scratch().join("built");
            fs::create_dir_all(&directory).unwrap();
            let path = directory.join(&program.name);
            let built = Compiler::godwit().and_then(|compiler| compiler.build(&program.sources, &path, &[]));
            built.unwrap_or_else(|error| panic!("{error:#}"));
            path
        };
        self.programs.iter().map(build).collect()
    }

    /// A root filesystem with its programs for this machine.
    pub fn preset(&self, bed: &Bed) -> Preset {
        let words = self.words();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let preset = ledger::preset(bed, "again", &words);
        fs::create_dir_all(preset.rootfs.join("tmp")).unwrap();
        for path in self.built(bed) {
            let name = path.file_name().unwrap();
            let mut executable = path.clone().into_os_string();
            executable.push(format!(".{}", std::env::consts::ARCH));
            fs::copy(executable, preset.rootfs.join("bin").join(name)).unwrap();
        }
        preset
    }

    /// An image for both instruction sets with its programs, in a file.
    pub fn image(&self, bed: &Bed, node: &str) -> PathBuf {
        let archive = bed.scratch().join(format!("{}.tar", self.name));
        let again = ledger::program(bed, "again");
        let built = self.built(bed);
        let (words, name) = (serde_json::to_string(&self.words()).unwrap(), format!("{}:1", self.name));
        let files = bed.scratch().join("files");
        fs::create_dir_all(files.join("tmp")).unwrap();
        let mut command = vec!["image", "pack", "-o", archive.to_str().unwrap(), "--cmd", &words];
        command.extend(["--add", files.to_str().unwrap()]);
        command.extend([&*name, again.to_str().unwrap()]);
        command.extend(built.iter().map(|path| path.to_str().unwrap()));
        bed.done(node, &command);
        archive
    }

    /// How many hundred runs of each of its programs there were.
    fn hundreds(&self, bed: &Bed, node: &str) -> Vec<usize> {
        // The one who asked for a move hears of its end before an emulated destination has it in its books.
        let log = wait_for_within(PATIENCE, &format!("the log of {} on {node}", self.name), || {
            let said = bed.godwit(node, &["logs", &self.name]);
            (said.code == 0).then_some(said.stdout)
        });
        assert!(!log.contains("wrong"), "{log}");
        let of = |program: &Program| {
            let ending = format!(" runs of /bin/{}", program.name);
            log.lines().filter(|line| line.ends_with(&ending)).count()
        };
        self.programs.iter().map(|(program, _)| of(program)).collect()
    }

    /// Waits until each of its programs has been run for a hundred times more, rightly.
    pub fn goes_on(&self, bed: &Bed, node: &str) {
        let before = self.hundreds(bed, node);
        wait_for_within(A_HUNDRED, &format!("a hundred runs of each program of {}", self.name), || {
            let now = self.hundreds(bed, node);
            now.iter().zip(&before).all(|(now, before)| now > before).then_some(())
        });
    }

    /// Nothing was wrong so far.
    pub fn is_right(&self, bed: &Bed, node: &str) {
        self.hundreds(bed, node);
    }
}
