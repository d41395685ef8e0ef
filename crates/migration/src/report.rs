//! The report every migration ends in, and the clock that fills it.

use std::time::Instant;

use godwit_names::ServiceName;
use serde::{Deserialize, Serialize};

use crate::timeline::Span;

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The destination owns the service.
    Moved,
    /// The source still owns it, and it runs there.
    Aborted,
    /// The destination owned it, and ended it: pages that it still needed are gone.
    Lost,
    /// The source still owns it, and the destination has what makes its move shorter.
    Prepared,
}

impl Outcome {
    /// Its name in reports and events.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Aborted => "aborted",
            Self::Lost => "lost",
            Self::Prepared => "prepared",
        }
    }
}

/// Times in milliseconds, sizes in bytes; the fields are those of the design's report.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Identifies the migration in both journals.
    pub id: String,
    /// The service.
    pub name: ServiceName,
    /// `cold`, `precopy`, `postcopy` or `hybrid`: the one that was used.
    pub mode: String,
    /// Why this mode, where the user left the choice.
    pub why: String,
    /// How written pages were found: `uffd`, `soft-dirty` or `none`.
    pub tracker: String,
    /// Node it left.
    pub source: String,
    /// Node it went to.
    pub destination: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it was aborted or lost; where it moved, what has not been confirmed or released, if anything.
    pub reason: String,
    /// Whether it was aborted because the destination does not take the service: another node may.
    #[serde(default)]
    pub refused: bool,
    /// Passes over the memory while the service ran.
    pub rounds: u32,
    /// From the request until the source holds nothing the destination needs.
    pub total_ms: f64,
    /// From freezing at the source to resuming at the destination (or at the source when aborted).
    pub frozen_ms: f64,
    /// The frozen time as predicted before the freeze; 0 where nothing was predicted.
    pub predicted_frozen_ms: f64,
    /// Time spent on memory and files before the freeze: finding what to send.
    pub pre_dump_ms: f64,
    /// Sending it.
    pub pre_dump_transfer_ms: f64,
    /// CRIU's dump.
    pub dump_ms: f64,
    /// From the end of the dump until the destination had everything, without the restore beside it.
    pub dump_transfer_ms: f64,
    /// The restore and the commit.
    pub resume_ms: f64,
    /// From the resume until the destination had the pages that had stayed at the source.
    pub faulted_transfer_ms: f64,
    /// What the cut-over took of the frozen time, milliseconds: steering frames to the destination at the
    /// freeze, closing the port at the source, delivering frames and taking over the address there.
    pub cutover_ms: f64,
    /// Frames that came for the service while it was frozen and were delivered at the resume.
    pub held_frames: u64,
    /// Those for which there was no room.
    pub held_dropped: u64,
    /// Layers, files and pages sent before the freeze.
    pub pre_dump_bytes: u64,
    /// Images, files and pages sent while frozen.
    pub dump_bytes: u64,
    /// Pages sent after the resume.
    pub faulted_bytes: u64,
    /// Pages that a process at the destination had to wait for.
    pub faults: u64,
    /// Everything the source put on the wire, with framing.
    pub wire_bytes: u64,
    /// Of these, what the streams carried.
    pub memory_wire_bytes: u64,
    /// Layers, changed files and logs.
    pub file_bytes: u64,
    /// What the streams would have carried without framing, compression, deltas and retained pages: all pages that
    /// are not zero, and once more those found written after they were sent.
    pub page_bytes: u64,
    /// Pages of shared memory sent before the freeze, and once more those that changed after they were sent.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Pages of shared memory that changed after that and crossed while frozen. What CRIU dumped is not among them.
    #[serde(default)]
    pub shared_dump_bytes: u64,
    /// Pages of shared memory that were here only when the service was frozen, and followed it.
    #[serde(default)]
    pub shared_left_bytes: u64,
    /// Pages that the destination has retained, where the move was only prepared.
    #[serde(default)]
    pub retained_bytes: u64,
    /// Those for which it had no room.
    #[serde(default)]
    pub not_retained_bytes: u64,
    /// Blobs of layers that the destination had from the image's registry.
    #[serde(default)]
    pub layers_from_registry_bytes: u64,
    /// Those that it had from the source.
    #[serde(default)]
    pub layers_from_source_bytes: u64,
    /// Files that the destination has, where the move was only prepared; else those that it had from a preparation.
    #[serde(default)]
    pub retained_file_bytes: u64,
    /// Why files cross with the move that was only prepared, if they do.
    #[serde(default)]
    pub files_stay: String,
    /// Memory of the service at the freeze.
    pub memory_bytes: u64,
    /// The instruction set of the executables under which it goes on, as `uname -m` names it, where these are the
    /// destination's own; else empty.
    #[serde(default)]
    pub set: String,
    /// Of the frozen time, what its processes took to come to rest for that.
    #[serde(default)]
    pub park_ms: f64,
    /// And what the destination took to rewrite the images.
    #[serde(default)]
    pub rewrite_ms: f64,
    /// Where the frozen time went, in order; the sum is the frozen time.
    pub phases: Vec<Phase>,
    /// What both nodes did in the frozen time, side by side, by its beginning.
    pub timeline: Vec<Span>,
    /// Where the network namespace is at the destination, for a service in one that godwit did not create.
    pub network_namespace: String,
    /// The CRIU that dumped; with `+lazy-pages-external` where our patch had it skip the memory, `+external-shmem` where
    /// one had it skip shared memory, `+external-sysvshm` where one had it skip that of System V, `+tcp-inline` where another one had it put connections into the image of the files,
    /// `+external-smaps` where it was told the mappings, `+external-tmpfs` where a tmpfs was left to godwit, and
    /// `+external-file-pages` where what processes had written in private mappings of files was.
    pub criu: String,
    /// The CRIU that restored, if it is another; empty as long as it is not known.
    pub criu_there: String,
}

impl Report {
    /// The report of a migration of which nothing is known yet but who takes part.
    #[must_use]
    pub fn begin(id: &str, name: &ServiceName, source: &str, destination: &str) -> Self {
        Self {
            id: id.into(),
            name: name.clone(),
            mode: String::new(),
            why: String::new(),
            tracker: String::new(),
            source: source.into(),
            destination: destination.into(),
            outcome: Outcome::Aborted,
            reason: String::new(),
            refused: false,
            rounds: 0,
            total_ms: 0.0,
            frozen_ms: 0.0,
            predicted_frozen_ms: 0.0,
            pre_dump_ms: 0.0,
            pre_dump_transfer_ms: 0.0,
            dump_ms: 0.0,
            dump_transfer_ms: 0.0,
            resume_ms: 0.0,
            faulted_transfer_ms: 0.0,
            cutover_ms: 0.0,
            held_frames: 0,
            held_dropped: 0,
            pre_dump_bytes: 0,
            dump_bytes: 0,
            faulted_bytes: 0,
            faults: 0,
            wire_bytes: 0,
            memory_wire_bytes: 0,
            file_bytes: 0,
            page_bytes: 0,
            shared_bytes: 0,
            shared_dump_bytes: 0,
            shared_left_bytes: 0,
            retained_bytes: 0,
            not_retained_bytes: 0,
            layers_from_registry_bytes: 0,
            layers_from_source_bytes: 0,
            retained_file_bytes: 0,
            files_stay: String::new(),
            memory_bytes: 0,
            set: String::new(),
            park_ms: 0.0,
            rewrite_ms: 0.0,
            phases: Vec::new(),
            timeline: Vec::new(),
            criu: String::new(),
            criu_there: String::new(),
            network_namespace: String::new(),
        }
    }
}

/// One stretch of the frozen time.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Phase {
    /// `freeze`, `dump`, `transfer`, `restore`, `pages` (those that were still on their way when all else was done,
    /// or which a restore without userfaultfd waited for), `commit`.
    pub phase: String,
    /// How long it took, milliseconds.
    pub ms: f64,
}

/// Milliseconds since `start`.
#[must_use]
pub fn ms_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Cuts a stretch of time into named phases without gaps.
#[derive(Debug)]
pub struct PhaseClock {
    start: Instant,
    last: Instant,
    phases: Vec<Phase>,
}

impl PhaseClock {
    /// Starts the first phase now.
    #[must_use]
    pub fn start() -> Self {
        let now = Instant::now();
        Self { start: now, last: now, phases: Vec::new() }
    }

    /// Ends the current phase, and gives it its name; returns its length in milliseconds.
    pub fn end(&mut self, phase: &str) -> f64 {
        self.end_at(phase, Instant::now())
    }

    /// The same for one that has ended already.
    pub fn end_at(&mut self, phase: &str, now: Instant) -> f64 {
        let ms = now.duration_since(self.last).as_secs_f64() * 1e3;
        self.last = now;
        self.phases.push(Phase { phase: phase.to_string(), ms });
        ms
    }

    /// When it started.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.start
    }

    /// Milliseconds from the start to the end of the last phase.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        self.last.duration_since(self.start).as_secs_f64() * 1e3
    }

    /// The phases so far.
    #[must_use]
    pub fn phases(&self) -> Vec<Phase> {
        self.phases.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_phase_that_ended_a_while_ago_has_the_length_that_it_had() {
        let mut clock = PhaseClock::start();
        clock.end("freeze");
        let ended = clock.last + Duration::from_millis(5);
        assert!((clock.end_at("undo", ended) - 5.0).abs() < 1e-6);
        let sum: f64 = clock.phases().iter().map(|phase| phase.ms).sum();
        assert!((clock.total_ms() - sum).abs() < 1e-6, "without gaps");
    }
}
