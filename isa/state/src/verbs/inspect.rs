//! `godwit-state inspect`: what a state file holds, and whether executables can go on from it.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use godwit_isa_state::{Descriptor, Frame, Lock, Program, Set, StateFile, Thread, Usage, VERSION};
use serde::Serialize;
use tabwriter::TabWriter;

use crate::output::{self, size};

/// Show what is in a state file: build, program, threads with their frames, memory
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The state
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The program that was captured [default: the one by which it was started, if it is there]
    #[arg(long, value_name = "PROG")]
    program: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Inspection {
    file: String,
    bytes: u64,
    version: u32,
    build: String,
    sections: usize,
    /// The command line that it was started with.
    arguments: Option<Vec<String>>,
    /// By whose names the frames are told.
    program: Option<String>,
    /// What each set's executable is to the state.
    executables: Vec<Executable>,
    threads: Vec<ThreadView>,
    process: Option<ProcessView>,
    descriptors: Vec<DescriptorView>,
    locks: Vec<LockView>,
    memory: Usage,
}

#[derive(Debug, Serialize)]
struct ProcessView {
    directory: String,
    /// In octal, as people write it.
    umask: String,
}

#[derive(Debug, Serialize)]
struct DescriptorView {
    number: u32,
    kind: &'static str,
    path: String,
    /// The lowest number that has the same position.
    shares: u32,
    offset: u64,
    size: u64,
    /// 0, 1 or 2 as it was when the program started: a new process has its own.
    inherited: bool,
    /// Why another process could not open it again.
    refused: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct LockView {
    /// Of a descriptor of the file.
    number: u32,
    kind: &'static str,
    path: String,
    writes: bool,
    begin: u64,
    /// 0: up to the end.
    length: u64,
}

#[derive(Debug, Serialize)]
struct Executable {
    set: &'static str,
    path: String,
    /// Whether a resume would be accepted.
    fits: bool,
    /// Why not.
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct ThreadView {
    slot: u32,
    /// Whether a thread goes on in it.
    parked: bool,
    data_stack_bytes: u64,
    continuation_bytes: u64,
    /// How many frames; none when no executable is there to tell.
    depth: Option<u64>,
    /// The innermost first. Equal ones that follow one another are told once.
    frames: Vec<FrameView>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct FrameView {
    function: String,
    /// The number of the site in the program.
    site: u32,
    /// Which of its function's sites, from 1, and how many there are.
    call: u32,
    calls: u32,
    /// Bytes of its values.
    bytes: u32,
    times: u64,
}

pub(crate) fn run(args: &Args, json: bool) -> Result<u8> {
    let state = StateFile::open(&args.file)?;
    let arguments = state.arguments();
    let started_by = arguments.as_ref().and_then(|arguments| arguments.first()).map(PathBuf::from);
    let name = args.program.clone().or(started_by);

    let mut executables = Vec::new();
    let mut program = None;
    for set in Set::ALL {
        let Some(name) = &name else { break };
        let path = Program::executable(name, set);
        let found = Program::open(&path, set).map_err(anyhow::Error::from);
        let checked = found.and_then(|found| Ok(found.accepts(&state).map(|()| found)?));
        // What the user has named must be right; what the state names may be of another machine.
        let reason = match checked {
            Ok(fitting) => {
                program.get_or_insert(fitting);
                None
            }
            Err(error) if args.program.is_some() && path.exists() => {
                return Err(error)
                    .with_context(|| format!("the state file {} is refused", args.file.display()));
            }
            Err(error) => Some(format!("{error:#}")),
        };
        executables.push(Executable {
            set: set.name(),
            path: path.display().to_string(),
            fits: reason.is_none(),
            reason,
        });
    }
    if program.is_none()
        && let Some(name) = &args.program
    {
        anyhow::bail!("there is no executable of {}; name the program without its suffix", name.display());
    }

    let memory = state.memory();
    let threads = state
        .threads()
        .iter()
        .map(|thread| {
            let frames = program.as_ref().map(|program| program.frames(&memory, thread)).transpose()?;
            Ok(ThreadView::of(thread, frames.as_deref()))
        })
        .collect::<Result<_>>()?;
    let inspection = Inspection {
        file: args.file.display().to_string(),
        bytes: std::fs::metadata(&args.file).context("the state file is gone")?.len(),
        version: VERSION,
        build: state.build().to_string(),
        sections: state.sections().len(),
        arguments: arguments
            .map(|arguments| arguments.iter().map(|text| text.to_string_lossy().into_owned()).collect()),
        program: program.as_ref().map(|program| program.path().display().to_string()),
        executables,
        threads,
        process: state.process().map(|process| ProcessView {
            directory: process.directory.to_string_lossy().into_owned(),
            umask: format!("{:03o}", process.umask),
        }),
        descriptors: state.descriptors().map(DescriptorView::of).collect(),
        locks: state.locks().map(LockView::of).collect(),
        memory: Usage::of(state.sections()),
    };
    if json {
        output::json(&inspection)?;
    } else {
        show(&inspection, &state, args.program.as_deref())?;
    }
    Ok(0)
}

impl DescriptorView {
    fn of(open: &Descriptor) -> Self {
        Self {
            number: open.number,
            kind: open.kind.name(),
            path: open.path.to_string_lossy().into_owned(),
            shares: open.shares,
            offset: open.offset,
            size: open.size,
            inherited: open.inherited,
            refused: open.opens_again().err(),
        }
    }

    /// What people want to know of it beside number, kind and path.
    fn remark(&self) -> String {
        match self.refused {
            Some(why) => format!("cannot be opened again: it {why}"),
            None if self.inherited => "that of the process that resumes it".to_owned(),
            None if self.shares != self.number => format!("the same as {}", self.shares),
            None if self.kind == "file" => format!("at {} of {}", self.offset, self.size),
            None => String::new(),
        }
    }
}

impl LockView {
    fn of(lock: &Lock) -> Self {
        Self {
            number: lock.number,
            kind: lock.kind.name(),
            path: lock.path.to_string_lossy().into_owned(),
            writes: lock.writes,
            begin: lock.begin,
            length: lock.length,
        }
    }

    fn remark(&self) -> String {
        let how = if self.writes { "for writing" } else { "for reading" };
        match (self.begin, self.length) {
            (0, 0) => how.to_owned(),
            (begin, 0) => format!("{how}, from {begin} to the end"),
            (begin, length) => format!("{how}, {length} bytes from {begin}"),
        }
    }
}

impl ThreadView {
    fn of(thread: &Thread, frames: Option<&[Frame<'_>]>) -> Self {
        let mut views: Vec<FrameView> = Vec::new();
        for frame in frames.unwrap_or_default() {
            match views.last_mut() {
                Some(last) if last.site == frame.number => last.times += 1,
                _ => views.push(FrameView {
                    function: frame.site.function.to_owned(),
                    site: frame.number,
                    call: frame.site.call,
                    calls: frame.site.calls,
                    bytes: frame.site.bytes,
                    times: 1,
                }),
            }
        }
        Self {
            slot: thread.slot.number(),
            parked: thread.parked,
            data_stack_bytes: thread.data_stack_bytes(),
            continuation_bytes: thread.continuation_bytes(),
            depth: frames.map(|frames| frames.len() as u64),
            frames: views,
        }
    }
}

/// As many lines of a thread's frames as people read; JSON has all.
const SHOWN: usize = 64;

fn show(inspection: &Inspection, state: &StateFile, named: Option<&Path>) -> std::io::Result<()> {
    let mut out = TabWriter::new(std::io::stdout().lock());
    let i = inspection;
    writeln!(out, "State\t{}, {} in {} sections, version {}", i.file, size(i.bytes), i.sections, i.version)?;
    writeln!(out, "Checks\tchecksums, sections and control blocks are sound")?;
    writeln!(out, "Build\t{}", state.build().short())?;
    match &i.arguments {
        Some(arguments) => writeln!(out, "Started as\t{}", arguments.join(" "))?,
        None => writeln!(out, "Started as\tunknown, since the program has overwritten its arguments")?,
    }
    for executable in &i.executables {
        let fits = executable.reason.as_deref().unwrap_or("fits");
        writeln!(out, "{}\t{}: {fits}", executable.set, executable.path)?;
    }
    let memory = &i.memory;
    writeln!(out, "Data\t{}", size(memory.data))?;
    writeln!(out, "Heap\t{} of {} mapped", size(memory.heap), size(memory.heap_mapped))?;
    writeln!(out, "Mappings\t{} of {} mapped", size(memory.mappings), size(memory.mapped))?;
    for thread in &i.threads {
        out.flush()?;
        if !thread.parked {
            writeln!(
                out,
                "\nThread {}: ended or not started, data stack {}",
                thread.slot,
                size(thread.data_stack_bytes)
            )?;
            continue;
        }
        let depth =
            thread.depth.map_or_else(|| "frames unknown".to_owned(), |depth| format!("{depth} frames"));
        writeln!(
            out,
            "\nThread {}: {depth} in {}, data stack {}",
            thread.slot,
            size(thread.continuation_bytes),
            size(thread.data_stack_bytes)
        )?;
        let mut number = 0;
        for frame in thread.frames.iter().take(SHOWN) {
            let times = if frame.times == 1 { String::new() } else { format!(", {} times", frame.times) };
            writeln!(
                out,
                "  #{number}\t{}\tcall {} of {}{times}\tsite {}\t{}",
                frame.function,
                frame.call,
                frame.calls,
                frame.site,
                size(u64::from(frame.bytes))
            )?;
            number += frame.times;
        }
        if thread.frames.len() > SHOWN {
            writeln!(out, "  … and {} more lines, which --json shows", thread.frames.len() - SHOWN)?;
        }
    }
    if let Some(process) = &i.process {
        out.flush()?;
        writeln!(out, "\nIn {}, umask {}", process.directory, process.umask)?;
    }
    for open in i.descriptors.iter().take(SHOWN) {
        writeln!(out, "  {}\t{}\t{}\t{}", open.number, open.kind, open.path, open.remark())?;
    }
    if i.descriptors.len() > SHOWN {
        writeln!(out, "  … and {} more, which --json shows", i.descriptors.len() - SHOWN)?;
    }
    for lock in i.locks.iter().take(SHOWN) {
        writeln!(out, "  {}\t{}\t{}\t{}", lock.number, lock.kind, lock.path, lock.remark())?;
    }
    if i.locks.len() > SHOWN {
        writeln!(out, "  … and {} more, which --json shows", i.locks.len() - SHOWN)?;
    }
    if i.program.is_none() && named.is_none() {
        writeln!(out, "\nFor the names of functions, name the program with --program.")?;
    }
    out.flush()
}
