//! A service whose processes go on under the executables that its image has here: whether they may, and CRIU's images
//! rewritten for that.
//!
//! All that is executable comes from layers of this node, whose digests were checked when they came. What the container has
//! changed is none of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use godwit_criu::images::{ImageError, ProcessImages, filters_let};
use godwit_crossing::{
    Cause, Name, Node, Process, Program, Record, Records, RewriteError, RewrittenProcess, Set, Target, Unfit,
    eligibility, rewrite,
};
use godwit_database::blocking::off_worker;
use godwit_engine::rootfs::{OfLayers, file_of_layers};
use godwit_isa_plan::image::{MOST_EXECUTABLE, MOST_EXECUTABLES};
use godwit_memory::{PAGE_SIZE, Space, pager::Extent};

use super::DestinationError;
use crate::crossing::{AtRest, REWRITING, this_node};
use crate::machine::machine;
use crate::message::Open;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;
use crate::timeline::Timeline;

/// Most executables of a service.
const MOST_PATHS: usize = 256;

/// Addresses that no process has.
const ADDRESS_END: u64 = 1 << 56;

/// What is to become of the processes.
pub(super) struct Crossing {
    node: Node,
    /// Bytes of the source's pages.
    page_bytes: u64,
    /// As they were when the source asked.
    processes: Vec<Process>,
    /// Executables that have been read from layers.
    known: Mutex<Executables>,
}

#[derive(Default)]
struct Executables {
    programs: BTreeMap<Vec<u8>, Program>,
    bytes: u64,
}

impl Crossing {
    /// That of a service that is offered; none where it goes on under the executables that it has.
    pub(super) fn of(open: &Open) -> Result<Option<Self>, DestinationError> {
        let Some(offer) = open.crossing.as_ref().filter(|offer| offer.always || open.machine != machine())
        else {
            return Ok(None);
        };
        let Some(mut processes) = offer.processes() else {
            return Err(DestinationError::Protocol("processes that cannot be"));
        };
        for process in &mut processes {
            // Whether a filter is for this set, too, is seen in the images.
            process.has_filter = false;
            // It is asked later.
            if let Ok(record) = &mut process.record {
                record.ready = true;
            }
        }
        let node = this_node().ok_or_else(|| {
            let why =
                "it cannot tell what its processes may map, or godwit-cc does not build for its machine";
            DestinationError::Refused(vec![why.to_owned()])
        })?;
        Ok(Some(Self { node, page_bytes: offer.page_bytes, processes, known: Mutex::default() }))
    }

    /// The set, as the source is told it.
    pub(super) fn set(&self) -> &'static str {
        self.node.set.name()
    }

    /// What stands in the way of all that is not built for this, whatever its layers have.
    pub(super) fn objections_at_once(&self, service: &Service) -> Vec<String> {
        if service.kept.is_some() {
            let why = "a container that another engine keeps goes on under the executables that it has; run the image by godwit";
            return vec![why.to_owned()];
        }
        let others: Vec<_> =
            self.processes.iter().filter(|process| process.record.is_err()).cloned().collect();
        let target = Target { node: self.node, programs: BTreeMap::new(), knows_filters: true };
        sentences(eligibility(&others, self.page_bytes, &target))
    }

    /// What stands in the way, where all layers of the service are here, and in `upper` what the container has changed.
    pub(super) fn objections(
        &self,
        local: &NodeResources,
        service: &Service,
        upper: Option<&Path>,
    ) -> Result<Vec<String>, LocalError> {
        let paths = self.processes.iter().filter(|process| process.record.is_ok());
        let paths = paths.map(|process| process.executable.as_slice()).collect();
        let layers = local.layer_paths(service)?;
        let (target, changed) = match off_worker(|| self.target(&layers, upper, &paths))? {
            Ok(found) => found,
            Err(why) => return Ok(vec![why]),
        };
        let is_changed = |process: &&Process| changed.contains(process.executable.as_slice());
        let unfit =
            |process: &Process| Unfit::Process { process: process.name.clone(), cause: Cause::Changed };
        let mut found: Vec<_> = self.processes.iter().filter(is_changed).map(unfit).collect();
        let others: Vec<_> = self.processes.iter().filter(|process| !is_changed(process)).cloned().collect();
        found.extend(eligibility(&others, self.page_bytes, &target).err().unwrap_or_default());
        Ok(found.iter().map(ToString::to_string).collect())
    }

    /// This node with the executables that layers have at these paths, and those paths at which the container has something
    /// else; or why there are too many. One that is not there, or is none, is not among them.
    #[expect(clippy::type_complexity, reason = "it is taken apart at once")]
    fn target<'a>(
        &self,
        layers: &[PathBuf],
        upper: Option<&Path>,
        paths: &BTreeSet<&'a [u8]>,
    ) -> Result<Result<(Target, BTreeSet<&'a [u8]>), String>, LocalError> {
        if paths.len() > MOST_PATHS {
            return Ok(Err(format!(
                "its processes have {} executables, and {MOST_PATHS} at most can go on",
                paths.len()
            )));
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = BTreeSet::new();
        for path in paths {
            if known.programs.contains_key(*path) && upper.is_none() {
                continue;
            }
            let failed = |source| LocalError::Io {
                action: "read from its layers the executable",
                path: PathBuf::from(String::from_utf8_lossy(path).into_owned()),
                source,
            };
            match file_of_layers(layers, upper, path).map_err(failed)? {
                OfLayers::Changed => {
                    changed.insert(*path);
                }
                OfLayers::Absent => {}
                OfLayers::File(_) if known.programs.contains_key(*path) => {}
                OfLayers::File(file) => {
                    known.bytes = known.bytes.saturating_add(file.metadata().map_err(failed)?.len());
                    if known.bytes > MOST_EXECUTABLES {
                        return Ok(Err(format!(
                            "its executables have more than {} MiB",
                            MOST_EXECUTABLES >> 20
                        )));
                    }
                    let read = program(file).map_err(failed)?;
                    known.programs.extend(read.map(|program| (path.to_vec(), program)));
                }
            }
        }
        let of_paths = paths.iter().filter(|path| !changed.contains(*path));
        let programs =
            of_paths.filter_map(|path| Some((path.to_vec(), known.programs.get(*path)?.clone()))).collect();
        Ok(Ok((Target { node: self.node, programs, knows_filters: true }, changed)))
    }

    /// Rewrites the images of the processes in a directory, with what these say about rest.
    pub(super) async fn rewrite(
        &self,
        (local, service, timeline): (&NodeResources, &Service, &Timeline),
        directory: &Path,
        at_rest: Vec<AtRest>,
    ) -> Result<Vec<RewrittenProcess>, DestinationError> {
        let begun = Instant::now();
        let paths: BTreeSet<_> = at_rest.iter().map(|process| process.executable.as_slice()).collect();
        let records =
            records(&at_rest).ok_or(DestinationError::Protocol("no record of a process at rest"))?;
        let (layers, upper) = (local.layer_paths(service)?, local.changed_files(service)?);
        let (target, changed) = match off_worker(|| self.target(&layers, Some(&upper), &paths))? {
            Ok(found) => found,
            Err(why) => return Err(DestinationError::Refused(vec![why])),
        };
        if let Some(process) = at_rest.iter().find(|process| changed.contains(process.executable.as_slice()))
        {
            let name = String::from_utf8_lossy(&process.executable).into_owned();
            let unfit = Unfit::Process { process: Name { pid: process.pid, name }, cause: Cause::Changed };
            return Err(DestinationError::Refused(vec![unfit.to_string()]));
        }
        let images = directory.to_owned();
        let rewriting = tokio::task::spawn_blocking(move || {
            let mut target = target;
            target.knows_filters = knows_filters(&images, target.node.set)?;
            let read = ProcessImages::read(&images)?;
            let rewritten = rewrite(&read, &records, &target)?;
            rewritten.changed.write(&images)?;
            Ok::<_, RewriteError>(rewritten.processes)
        });
        let rewritten = rewriting.await?.map_err(|error| match error {
            RewriteError::Unfit(unfit) => DestinationError::Refused(vec![unfit.to_string()]),
            RewriteError::Image(error) => LocalError::Io {
                action: "rewrite for the executables of this node the images in",
                path: directory.to_owned(),
                source: io::Error::other(error),
            }
            .into(),
        })?;
        timeline.note(REWRITING, begun);
        Ok(rewritten)
    }
}

/// Whether all filters of system calls in the images let processes of a set end: one that was made without it refuses all
/// calls of its.
fn knows_filters(images: &Path, set: Set) -> Result<bool, ImageError> {
    // `linux/audit.h`, and the numbers of exit_group(2).
    let (architecture, exit) = match set {
        Set::X86_64 => (0xc000_003e, 231),
        Set::Aarch64 => (0xc000_00b7, 94),
    };
    filters_let(images, architecture, exit)
}

fn sentences(found: Result<(), Vec<Unfit>>) -> Vec<String> {
    found.err().unwrap_or_default().iter().map(ToString::to_string).collect()
}

fn program(file: File) -> io::Result<Option<Program>> {
    let metadata = file.metadata()?;
    if metadata.len() > MOST_EXECUTABLE {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.take(MOST_EXECUTABLE).read_to_end(&mut bytes)?;
    // What is no program of godwit-cc's is no twin of one.
    Ok(Program::decode(&bytes, metadata.mode()).ok())
}

/// What processes say; none where one says nothing, or two have one PID.
fn records(at_rest: &[AtRest]) -> Option<Records> {
    let mut records = Records::new();
    for process in at_rest {
        let record: [u8; Record::BYTES] = process.record.as_slice().try_into().ok()?;
        records.insert(process.pid, record).is_none().then_some(())?;
    }
    Some(records)
}

/// What of the memory of processes is not to be brought to them.
pub(super) fn left_out(processes: &[RewrittenProcess]) -> Vec<Extent> {
    let mut extents = Vec::new();
    for process in processes {
        let space: Space = process.pid;
        let ends = process.staying.iter().map(|range| range.end);
        let starts = process.staying.iter().map(|range| range.start);
        let gaps = std::iter::once(0).chain(ends).zip(starts.chain([ADDRESS_END]));
        let gaps = gaps.filter(|(start, end)| start < end);
        extents.extend(gaps.map(|(addr, end)| Extent { space, addr, pages: (end - addr) / PAGE_SIZE }));
    }
    extents
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::crossing::CrossingOffer;

    #[test]
    fn what_does_not_stay_is_left_out() {
        let process = |pid, staying: &[std::ops::Range<u64>]| RewrittenProcess {
            pid,
            threads: 1,
            kept_pages: 0,
            dropped_pages: 0,
            staying: staying.to_vec(),
        };
        let found = left_out(&[process(3, &[0..0x1000, 0x3000..0x5000]), process(4, &[])]);
        let told: Vec<_> = found.iter().map(|extent| (extent.space, extent.addr, extent.pages)).collect();
        let all = ADDRESS_END / PAGE_SIZE;
        assert_eq!(told, [(3, 0x1000, 2), (3, 0x5000, all - 5), (4, 0, all)]);
    }

    #[test]
    fn a_process_without_a_record_or_with_two_is_refused() {
        let process = |pid, length| AtRest { pid, record: vec![0; length], executable: Vec::new() };
        assert_eq!(records(&[process(1, 80), process(2, 80)]).unwrap().len(), 2);
        assert_eq!(records(&[process(1, 79)]), None);
        assert_eq!(records(&[process(1, 80), process(1, 80)]), None);
    }

    #[test]
    fn a_service_crosses_to_another_machine_or_where_that_is_asked_for() {
        let offer = |always| CrossingOffer { always, page_bytes: 4096, processes: Vec::new() };
        let open = |machine: String, crossing| Open { machine, crossing, ..Open::default() };
        let crosses = |open: &Open| Crossing::of(open).unwrap().is_some();
        assert!(!crosses(&open(machine(), None)) && !crosses(&open("other".into(), None)));
        assert!(!crosses(&open(machine(), Some(offer(false)))));
        assert!(crosses(&open(machine(), Some(offer(true)))));
        assert!(crosses(&open("other".into(), Some(offer(false)))));
    }
}
