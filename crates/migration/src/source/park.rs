//! Before the freeze: processes that go on under other executables come to rest (`isa/ABI.md`, section 7), all of them
//! within a bound; and go on in place where the service stays.
//!
//! They are asked while they are frozen: the request would end a program that begins and does not listen yet, and one that
//! is frozen begins none. Each pass asks those that have been forked, or have begun, since the one before.
//!
//! A file says from before the first request until all have gone on, or have gone, that there may be processes at rest, also
//! over the end of this daemon.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_crossing::{Cause, Name, RecordError, Set, Unfit};
use godwit_engine::ContainerConfig;
use godwit_memory::process::{Process as Handle, ProcessError};

use super::jobs::Wanted;
use super::recorder::Recorder;
use super::{Source, SourceError};
use crate::crossing::AtRest;
use crate::crossing::processes::{named, open, present};
use crate::crossing::requests::{ToRest, ask_to_rest, has_unheard, record_of, tell_to_go_on};
use crate::crossing::waits::waits;
use crate::failpoint;
use crate::report::ms_since;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;

/// Between two looks: the kernel tells nobody that a process has come to rest, or has left it.
const LOOK: Duration = Duration::from_micros(200);
/// After so long processes are asked again: one that was about to begin another program may have forgotten.
const AGAIN: Duration = Duration::from_millis(25);
/// Memory of a process can be made so that reading it waits for another program. A frozen service does not wait longer for
/// that before it runs again.
const TELLING: Duration = Duration::from_secs(1);
/// Processes that are told to go on do so in microseconds when they have a processor.
const SETTLING: Duration = Duration::from_secs(5);

/// Processes by their PIDs in the node's namespace.
type Handles = BTreeMap<u32, Handle>;

/// What a pass has found.
enum Pass {
    /// All are at rest.
    AtRest(Vec<AtRest>),
    /// Those of `asked` are not yet.
    Asked { asked: Vec<u32>, handles: Handles },
}

impl Source {
    /// Freezes the service for its dump; at rest where it goes on under executables of this set.
    pub(super) async fn stop(
        &self,
        recorder: &mut Recorder,
        config: &ContainerConfig,
        crosses: Option<Set>,
    ) -> Result<Vec<AtRest>, SourceError> {
        if crosses.is_none() {
            self.step("freeze", 0, recorder.report.memory_bytes);
            return self.freeze_again(config, crosses).await;
        }
        let begun = Instant::now();
        self.step("rest", 0, recorder.report.memory_bytes);
        note_rest(&self.local, &self.id)?;
        // It may have been slowed to make copying converge, and would come to rest as slowly.
        self.local.engine.limit_cpu(config, self.service.cpu_millis).await?;
        let at_rest = self.freeze_again(config, crosses).await?;
        recorder.report.park_ms = ms_since(begun);
        recorder.end("rest");
        self.step("freeze", 0, recorder.report.memory_bytes);
        Ok(at_rest)
    }

    /// The same for a service that has run for a moment.
    pub(super) async fn freeze_again(
        &self,
        config: &ContainerConfig,
        crosses: Option<Set>,
    ) -> Result<Vec<AtRest>, SourceError> {
        match crosses {
            Some(set) => self.freeze_at_rest(config, set).await,
            None => Ok(self.local.engine.freeze(config).await.map(|()| Vec::new())?),
        }
    }

    /// Lets a service that was frozen so run.
    pub(super) async fn let_run(
        &self,
        config: &ContainerConfig,
        crosses: Option<Set>,
    ) -> Result<(), SourceError> {
        if crosses.is_some() {
            tell_all(&self.local, &self.service).await;
        }
        Ok(self.local.engine.thaw(config).await?)
    }

    /// Refuses a service that cannot come to rest as it is.
    pub(super) async fn check_not_stopped(&self, config: &ContainerConfig) -> Result<(), SourceError> {
        match self.local.engine.stopped_processes(config).await?.first() {
            None => Ok(()),
            Some(pid) => Err(SourceError::NotAtRest(format!(
                "process {pid} is stopped by a signal, and cannot come to rest; continue it (SIGCONT), or end it"
            ))),
        }
    }

    async fn freeze_at_rest(&self, config: &ContainerConfig, set: Set) -> Result<Vec<AtRest>, SourceError> {
        let (begun, limit) = (Instant::now(), self.options.max_park);
        let late = |Late { process, doing }: Late| {
            let limit = limit.as_millis();
            SourceError::NotAtRest(format!(
                "{process} has not come to rest within {limit} ms (--max-park-ms): {doing}"
            ))
        };
        let mut known = Handles::new();
        loop {
            self.local.engine.freeze(config).await?;
            self.check_not_stopped(config).await?;
            let pids = self.local.engine.processes(config).await?;
            let passing = self.jobs.run(move |_| pass(&pids, known, set)).await?;
            let (asked, handles) = match passing? {
                Pass::AtRest(all) => return Ok(all),
                Pass::Asked { asked, handles } => (asked, handles),
            };
            failpoint::point("source.asked").await;
            if begun.elapsed() > limit
                && let Some(process) = asked.first().and_then(|pid| handles.get(pid))
            {
                return Err(late(Late::of(process)));
            }
            self.local.engine.thaw(config).await?;
            let waiting = move |wanted: Wanted| {
                let asked: Vec<_> = asked.iter().filter_map(|pid| handles.get(pid)).collect();
                let late = until_at_rest(&asked, &|| wanted.is() && begun.elapsed() <= limit)?;
                Ok::<_, SourceError>((late, handles))
            };
            let (found, handles) = self.jobs.run(waiting).await??;
            if let Some(found) = found {
                return Err(late(found));
            }
            known = handles;
        }
    }
}

/// A process that does not come to rest in time.
struct Late {
    process: Name,
    /// What a thread of it does.
    doing: String,
}

impl Late {
    fn of(process: &Handle) -> Self {
        Self { process: named(process), doing: waits(process) }
    }
}

/// Looks at the frozen processes, and asks those that are not at rest. Those that are `known` from the pass before are not
/// opened again.
fn pass(pids: &[u32], mut known: Handles, set: Set) -> Result<Pass, SourceError> {
    let (mut resting, mut asked, mut handles) = (Vec::new(), Vec::new(), Handles::new());
    for &pid in pids {
        // Another process may have its number by now.
        let known = known.remove(&pid).filter(|process| !process.has_ended());
        let Some(process) =
            known.map_or_else(|| open(pid), |process| Ok(Some(process))).map_err(LocalError::from)?
        else {
            continue;
        };
        match present(asked_to_rest(&process, set)) {
            Ok(None) => continue,
            Ok(Some(Ok(Some(at_rest)))) => resting.push(at_rest),
            Ok(Some(Ok(None))) => asked.push(pid),
            Ok(Some(Err(cause))) => {
                let unfit = Unfit::Process { process: named(&process), cause };
                return Err(SourceError::NotAtRest(unfit.to_string()));
            }
            Err(ProcessError::Io { source, .. }) if source.raw_os_error() == Some(libc::EAGAIN) => {
                return Err(SourceError::NotAtRest(format!(
                    "{} cannot be asked to rest: its user has as many signals queued as may be (RLIMIT_SIGPENDING)",
                    named(&process)
                )));
            }
            Err(error) => return Err(LocalError::from(error).into()),
        }
        handles.insert(pid, process);
    }
    Ok(if asked.is_empty() { Pass::AtRest(resting) } else { Pass::Asked { asked, handles } })
}

/// Asks a process, unless it is at rest, or asked, already; what it is to the destination if it is.
fn asked_to_rest(process: &Handle, set: Set) -> Result<Result<Option<AtRest>, Cause>, ProcessError> {
    let (record, bytes) = record_of(process)?;
    let record = match record {
        Ok(record) => record,
        Err(RecordError::Foreign) => return Ok(Err(Cause::NotBuilt(set))),
        Err(error @ RecordError::Version(_)) => return Ok(Err(Cause::Record(error))),
    };
    match ToRest::of(&record, has_unheard(process)?) {
        ToRest::AtRest => {
            let executable = process.executable()?.into_os_string().into_vec();
            return Ok(Ok(Some(AtRest { pid: process.space(), record: bytes, executable })));
        }
        ToRest::Ask(number) => ask_to_rest(process, number)?,
        ToRest::Wait => {}
        ToRest::Never => return Ok(Err(Cause::NoNumber)),
    }
    Ok(Ok(None))
}

/// Waits until these processes rest, have ended, or are due to be asked again; the first that does not rest, when it is no
/// longer waited for.
fn until_at_rest(asked: &[&Handle], is_waited_for: &dyn Fn() -> bool) -> Result<Option<Late>, SourceError> {
    let begun = Instant::now();
    // One that has come to rest stays there; the next pass would see it if it did not.
    for process in asked {
        while present(is_late(process)).map_err(LocalError::from)? == Some(true) {
            if !is_waited_for() {
                return Ok(Some(Late::of(process)));
            }
            if begun.elapsed() > AGAIN {
                return Ok(None);
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(None)
}

fn is_late(process: &Handle) -> Result<bool, ProcessError> {
    Ok(match record_of(process)? {
        (Ok(record), _) => record.rest.is_none() || has_unheard(process)?,
        // What has become another program is looked at again.
        (Err(_), _) => false,
    })
}

/// From now on processes of the service may be at rest.
fn note_rest(local: &NodeResources, id: &str) -> Result<(), LocalError> {
    let path = local.layout.at_rest(id);
    let write = || {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&path, b"")
    };
    write().map_err(|source| LocalError::Io { action: "write", path: path.clone(), source })
}

/// Whether processes of the service may be at rest for this migration.
pub(super) fn may_rest(local: &NodeResources, id: &str) -> bool {
    local.layout.at_rest(id).exists()
}

/// None of them is, or none is here any more.
pub(super) fn forget_rest(local: &NodeResources, id: &str) -> Result<(), LocalError> {
    let path: &Path = &local.layout.at_rest(id);
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(LocalError::Io { action: "remove", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Has the processes of a service go on in place as soon as they run: those at rest, and those that come to it. Whether none
/// is left to be told. What fails here is looked at again by [`until_all_go_on`].
pub(super) async fn tell_all(local: &NodeResources, service: &Service) -> bool {
    let pids = match local.engine.processes(&local.config(service)).await {
        Ok(pids) => pids,
        Err(error) => {
            tracing::error!(service = %service.name, error = %crate::error_chain(&error), "cannot look for processes at rest");
            return false;
        }
    };
    let name = service.name.clone();
    let telling = tokio::task::spawn_blocking(move || {
        let mut all_go = true;
        for pid in pids {
            let told = open(pid).and_then(|process| {
                let told = process.map(|process| tell_to_go_on(&process)).transpose();
                present(told).map(|told| told.flatten().unwrap_or(true))
            });
            all_go &= told.unwrap_or_else(|error| {
                tracing::error!(service = %name, error = %crate::error_chain(&error), "a process may stay at rest");
                false
            });
        }
        all_go
    });
    matches!(tokio::time::timeout(TELLING, telling).await, Ok(Ok(true)))
}

/// Returns when no process of a service that runs is at rest, or on its way to it.
pub(super) async fn until_all_go_on(local: &NodeResources, service: &Service) -> Result<(), LocalError> {
    let begun = Instant::now();
    while !tell_all(local, service).await {
        if begun.elapsed() > SETTLING {
            return Err(LocalError::AtRest { service: service.name.clone() });
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}
