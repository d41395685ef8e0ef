//! The images of a service at rest become those with which a node restores it under its own executables, of the same
//! instruction set or the other one.
//!
//! ```text
//! core      every thread begins at the resume entry with an empty native stack        threads.rs
//! mm        the executable's areas are those of the target's; the kernel's are gone    rewrite/space.rs
//! pagemap   what is private to a set is left out                                       rewrite/pages.rs
//! files     size and mode of the executables, flags                                            rewrite/opened.rs
//! ```
//!
//! Nothing executable is taken from the images. Sizes and addresses in them are checked, and what cannot be right is refused.

mod opened;
mod pages;
mod space;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;

use godwit_criu::images::{
    AddressSpace, Architecture, ChangedImages, ImageError, ImageKind, PendingSignal, ProcessImages,
    ProcessTreeEntry, Registers, ThreadImage,
};
use godwit_isa_plan::{PAGE, REQUEST_ENTRY, RETURN_ENTRY, SIGNAL_ENTRY, Set};

use crate::eligibility::{Process, program_of};
use crate::record::{Record, Request};
use crate::refusal::{Cause, Name, Unfit};
use crate::target::{Program, Target};
use crate::threads::starts;

/// The records of processes by their PIDs: what each has at [`godwit_isa_plan::RECORD`].
pub type Records = BTreeMap<u32, [u8; Record::BYTES]>;

/// The images of CPU features, which do not matter: executables are for the base of each set.
const OF_FEATURES: &str = "cpuinfo.img";

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rewritten {
    /// The new images.
    pub changed: ChangedImages,
    /// The set that the processes were at; none if all have ended.
    pub from: Option<Set>,
    /// Of each process that has not ended.
    pub processes: Vec<RewrittenProcess>,
}

/// A process that has been rewritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewrittenProcess {
    /// PID inside of the PID namespace.
    pub pid: u32,
    /// Its threads.
    pub threads: usize,
    /// Pages of the images that stay.
    pub kept_pages: u64,
    /// Those that are left out.
    pub dropped_pages: u64,
    /// The parts of its memory that go along, in order. Who brings pages that are not in the images brings none of others:
    /// there the target has its own, or zeros.
    pub staying: Vec<Range<u64>>,
}

/// The images were not rewritten.
#[derive(Debug, thiserror::Error)]
pub enum RewriteError {
    /// An image is missing or is not what it should be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The service cannot go on at this node.
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

/// Rewrites the images of a service at rest for a node.
///
/// # Errors
/// When an image is damaged, or a process cannot go on there.
pub fn rewrite(
    images: &ProcessImages,
    records: &Records,
    target: &Target,
) -> Result<Rewritten, RewriteError> {
    let there = target.node.page_bytes;
    if there != PAGE {
        return Err(Unfit::PageSize { here: PAGE, there }.into());
    }
    let files = opened::Files::decode(images)?;
    let (seen, done) = (BTreeSet::new(), Rewritten::default());
    let mut rewriting = Rewriting { images, target, files, seen, done };
    for process in images.tree()? {
        rewriting.process(&process, records.get(&process.pid))?;
    }
    let mut done = rewriting.done;
    let from = done.from.unwrap_or(target.node.set);
    rewriting.files.rewrite(from, target, &mut done.changed)?;
    pages::of_shared_memory(images, &mut done.changed)?;
    done.changed.removed.push(OF_FEATURES.to_owned());
    Ok(done)
}

struct Rewriting<'a> {
    images: &'a ProcessImages,
    target: &'a Target,
    files: opened::Files<'a>,
    /// Processes and threads so far.
    seen: BTreeSet<u32>,
    done: Rewritten,
}

impl Rewriting<'_> {
    fn process(
        &mut self,
        process: &ProcessTreeEntry,
        record: Option<&[u8; Record::BYTES]>,
    ) -> Result<(), RewriteError> {
        let ProcessTreeEntry { pid, threads, .. } = process;
        let images = self.images;
        let core_name = |thread: &u32| format!("core-{thread}.img");
        let first = core_name(pid);
        let core = ThreadImage::decode(images.record(&first)?).map_err(|reason| damaged(&first, reason))?;
        if !core.has_process() {
            return Err(damaged(&first, "it is not of a process".to_owned()).into());
        }
        let has_ended = core.has_ended().map_err(|reason| damaged(&first, reason))?;
        self.is_new(process, has_ended)?;
        if has_ended {
            let mut core = core;
            core.set_architecture(architecture(self.target.node.set));
            return self.insert(&first, ImageKind::Core, core.encode());
        }

        let space_name = format!("mm-{pid}.img");
        let of_space = |reason| damaged(&space_name, reason);
        let space = AddressSpace::decode(images.record(&space_name)?).map_err(of_space)?;
        let executable = self.files.executable(space.executable).ok_or_else(|| {
            of_space(format!(
                "its executable, file {}, is not among the open files by its own path",
                space.executable
            ))
        })?;
        let name = Name { pid: *pid, name: String::from_utf8_lossy(executable).into_owned() };
        let unfit = |cause| Unfit::Process { process: name.clone(), cause };
        let areas = space.areas(PAGE).map_err(of_space)?;

        // One at a time: taken apart, a core takes much more memory than in the images.
        let mut names = Vec::new();
        let mut pointers = Vec::new();
        let mut has_filter = false;
        for thread in threads {
            let name = core_name(thread);
            let read = || {
                let core =
                    ThreadImage::decode(images.record(&name)?).map_err(|reason| damaged(&name, reason))?;
                let facts = || Ok((core.architecture()?, core.thread_pointer()?, core.has_filter()?));
                facts().map_err(|reason| damaged(&name, reason))
            };
            let (architecture, pointer, filter) = read()?;
            let from = architecture.map(set);
            if from.is_none() || self.done.from.is_some_and(|other| Some(other) != from) {
                let reason = "it is of another instruction set than others, or of an unknown one".to_owned();
                return Err(damaged(&name, reason).into());
            }
            self.done.from = from;
            has_filter |= filter;
            pointers.push(pointer);
            names.push(name);
        }

        if self.files.has_namespaces() {
            return Err(unfit(Cause::MountNamespaces).into());
        }
        let record = record.ok_or_else(|| unfit(Cause::NotAtRest))?;
        let facts = Process {
            name: name.clone(),
            executable: executable.to_vec(),
            is_on_mount: !self.files.is_of_root(executable),
            record: Record::decode(record),
            areas: areas.iter().map(|area| space::facts(area, space.stack)).collect(),
            has_filter: has_filter
                && self.done.from != Some(self.target.node.set)
                && !self.target.knows_filters,
            has_rings: space.has_rings() || areas.iter().any(|area| area.is_ring()),
        };
        let program = program_of(&facts, self.target).map_err(unfit)?;
        space::all_known(&areas).map_err(unfit)?;
        let bounds = space.kernel_bounds().map_err(of_space)?;
        space::bounds_fit(space.stack, &bounds, self.target.node.address_end).map_err(unfit)?;
        match facts.record.ok().and_then(|record| record.rest) {
            None => return Err(unfit(Cause::NotAtRest).into()),
            Some(rest) if usize::try_from(rest.threads) != Ok(names.len()) => {
                return Err(unfit(Cause::Threads { said: rest.threads, there: names.len() }).into());
            }
            Some(_) => {}
        }
        let starts = starts(&pointers).map_err(|error| unfit(Cause::Thread(error)))?;

        let to = architecture(self.target.node.set);
        for (name, start) in names.into_iter().zip(starts) {
            let mut core =
                ThreadImage::decode(images.record(&name)?).map_err(|reason| damaged(&name, reason))?;
            let registers = Registers {
                program_counter: start.program_counter,
                stack_pointer: start.stack_pointer,
                thread_pointer: start.thread_pointer,
            };
            let begun = core.begin(to, &registers).and_then(|()| {
                core.change_actions(|action| {
                    let is_request = action.signal == Request::SIGNAL;
                    action.handler = if is_request { REQUEST_ENTRY } else { SIGNAL_ENTRY };
                    action.restorer = RETURN_ENTRY;
                })
            });
            let goes_on = Cell::new(false);
            // The target asks for rests of its own.
            let begun = begun.and_then(|()| {
                core.keep_pending(|PendingSignal { signal, code, value }| {
                    let request = Request::of(signal, code, value);
                    goes_on.set(goes_on.get() || matches!(request, Some(Request::GoOn(_))));
                    request.is_none()
                })
            });
            begun.map_err(|reason| damaged(&name, reason))?;
            if goes_on.get() {
                return Err(unfit(Cause::GoesOn).into());
            }
            self.insert(&name, ImageKind::Core, core.encode())?;
        }
        self.memory(process, &space, program, unfit)
    }

    /// Checks that no other process has its number or one of its threads.
    fn is_new(&mut self, process: &ProcessTreeEntry, has_ended: bool) -> Result<(), ImageError> {
        let ProcessTreeEntry { pid, threads, .. } = process;
        // CRIU does not fill in the number of the only thread of a process that has ended, nor does it read it.
        let ids: BTreeSet<_> =
            if has_ended { BTreeSet::from([*pid]) } else { threads.iter().chain([pid]).copied().collect() };
        let is_whole = if has_ended { threads.len() <= 1 } else { ids.len() == threads.len() };
        if is_whole && ids.into_iter().all(|id| self.seen.insert(id)) {
            return Ok(());
        }
        Err(damaged("pstree.img", format!("it has a thread of process {pid} twice, or not the first")))
    }

    fn memory(
        &mut self,
        process: &ProcessTreeEntry,
        space: &AddressSpace<'_>,
        program: &Program,
        unfit: impl Fn(Cause) -> Unfit,
    ) -> Result<(), RewriteError> {
        let pid = process.pid;
        let name = format!("mm-{pid}.img");
        let of_space = |reason| damaged(&name, reason);
        let from = self.done.from.unwrap_or(self.target.node.set);
        let areas = space.areas(PAGE).map_err(of_space)?;
        let executable = self.files.executable(space.executable);
        let is_its = |file| executable.is_some() && self.files.executable(file) == executable;
        let areas = space::areas(areas, program, (space.executable, is_its), (from, self.target.node.set))
            .map_err(unfit)?;
        let mut changed = space.clone();
        changed.set_areas(&areas);
        let vector = changed.auxiliary().map_err(of_space)?;
        changed.set_auxiliary(&space::auxiliary(&vector, &program.executable));
        let (code, data) = space::bounds(&program.executable);
        changed.set_bounds(&code, &data);
        self.insert(&name, ImageKind::Memory, changed.encode())?;
        let staying = space::staying_parts(&areas, space.stack, &program.executable);
        let (kept_pages, dropped_pages) =
            pages::of_process(self.images, pid, &staying, &mut self.done.changed)?;
        let threads = process.threads.len();
        self.done.processes.push(RewrittenProcess { pid, threads, kept_pages, dropped_pages, staying });
        Ok(())
    }

    fn insert(&mut self, name: &str, kind: ImageKind, record: Vec<u8>) -> Result<(), RewriteError> {
        Ok(self.done.changed.insert(name, kind, &[record])?)
    }
}

/// An image that is not what it should be.
fn damaged(name: &str, reason: String) -> ImageError {
    ImageError::Damaged { path: PathBuf::from(name), reason }
}

fn architecture(set: Set) -> Architecture {
    match set {
        Set::X86_64 => Architecture::X86_64,
        Set::Aarch64 => Architecture::Aarch64,
    }
}

fn set(architecture: Architecture) -> Set {
    match architecture {
        Architecture::X86_64 => Set::X86_64,
        Architecture::Aarch64 => Set::Aarch64,
    }
}
