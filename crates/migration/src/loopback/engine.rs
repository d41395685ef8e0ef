//! A container engine and a checkpointer whose containers are [`Process`]es.

use std::io::{IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use godwit_criu::images::{Area, ImageKind, PageRun, Pagemap, ProcessTreeEntry, pagemap, process_tree};
use godwit_criu::{CriuError, DumpOptions, DumpResult, MemoryWay, Version};
use godwit_engine::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, ExecIo,
    ExecRequest, OutputPipes, RestoreRequest,
};
use godwit_memory::PAGE_SIZE;
use godwit_memory::process::AreaKind;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use prost::Message;

use super::machine::{Container, Machine};
use super::process::{BASE, PAGES, Process};
use crate::checkpoint::{Checkpoint, Dump};

/// What a node runs containers with.
pub(super) struct Containers(pub(super) Arc<Machine>);

fn failed(config: &ContainerConfig, verb: &str) -> EngineError {
    EngineError::Program {
        program: "the engine".into(),
        verb: verb.into(),
        name: config.name.clone(),
        reason: "a fault is injected".into(),
    }
}

impl Containers {
    fn find(&self, config: &ContainerConfig) -> Result<Container, EngineError> {
        let found = self.0.there().containers.get(&config.name).cloned();
        found.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    fn change(&self, config: &ContainerConfig, change: impl FnOnce(&mut Container)) {
        if let Some(container) = self.0.there().containers.get_mut(&config.name) {
            change(container);
        }
    }

    fn step<T>(
        &self,
        config: &ContainerConfig,
        verb: &str,
        work: impl FnOnce() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.0.script.step(&format!("engine.{verb}"), work).unwrap_or_else(|| Err(failed(config, verb)))
    }
}

#[async_trait]
impl Engine for Containers {
    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        Err(failed(config, "run"))
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        self.step(config, "state", || {
            let container = self.find(config)?;
            let status = if container.frozen { ContainerStatus::Paused } else { ContainerStatus::Running };
            Ok(ContainerState { status, pid: container.process.pid(), exit_code: None })
        })
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        let mut ended = self.find(config)?.ended.subscribe();
        // Its end may also be that nobody can tell of it any more.
        let _ = ended.wait_for(|ended| *ended).await;
        Ok(137)
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        self.step(config, "signal", || {
            assert_eq!(signal, libc::SIGKILL);
            let container = self.find(config)?;
            container.process.kill();
            container.ended.send_replace(true);
            Ok(())
        })
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.step(config, "freeze", || {
            self.find(config)?.process.stop();
            self.change(config, |container| container.frozen = true);
            Ok(())
        })
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let recovered = self.step(config, "recover", || self.find(config).map(drop));
        // Where it cannot be done the service goes on all the same.
        self.change(config, |container| container.in_repair = false);
        recovered
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.step(config, "thaw", || {
            let container = self.find(config)?;
            self.change(config, |container| container.frozen = false);
            if !container.stopped {
                self.0.lets_run(&container.process);
            }
            Ok(())
        })
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.step(config, "settle_log", || Ok(()))
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        self.step(config, "dump_target", || {
            let container = self.find(config)?;
            let plug = self.0.there().plugs.get(&config.name).map(|plug| plug.barred);
            if !container.frozen && plug == Some(true) {
                self.0.accuse("nobody can connect to a service that runs".into());
            }
            if container.frozen && self.0.is_occupied() {
                return Err(EngineError::Occupied { name: config.name.clone(), commands: 1 });
            }
            Ok(DumpTarget {
                volumes: Vec::new(),
                pid: container.process.pid(),
                root: config.rootfs.clone(),
                external_mounts: Vec::new(),
                network_namespace: (config.network_namespace.clone(), "net".into()),
                freezer: PathBuf::new(),
                extra_files: vec![("descriptors.json".into(), b"[]".to_vec())],
            })
        })
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        let config = &request.config;
        self.step(config, "restore", || {
            assert_eq!(request.lazy_pages, self.0.lazy);
            if !self.0.there().roots.contains(&config.rootfs) {
                return Err(failed(config, "restore without a root filesystem"));
            }
            let process = Arc::new(Process::new());
            match request.lazy_pages {
                true => hand_over(&process, request),
                false => fill(&process, request),
            }
            process.stop();
            let pid = process.pid();
            self.0.add(config, process, true);
            Ok(ContainerState { status: ContainerStatus::Running, pid, exit_code: None })
        })
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        self.step(config, "output_pipes", || Ok([1, 2]))
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        assert_eq!(pipes, [1, 2]);
        let machine = Arc::clone(&self.0);
        self.step(&request.config.clone(), "begin_restore", || {
            Ok(Box::new(Begun(Self(machine), request)) as Box<dyn BegunRestore>)
        })
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.step(config, "cont", || {
            assert_eq!(keep_stopped, [0_u32; 0]);
            let container = self.find(config)?;
            self.change(config, |container| container.stopped = false);
            self.0.lets_run(&container.process);
            self.0.uses_its_memory(container.process);
            Ok(())
        })
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.step(config, "stopped_processes", || Ok(Vec::new()))
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.step(config, "delete", || {
            if let Some(container) = self.0.there().containers.remove(&config.name) {
                container.process.kill();
                container.ended.send_replace(true);
            }
            Ok(())
        })
    }

    async fn exec(&self, config: &ContainerConfig, _: &ExecRequest) -> Result<ExecIo, EngineError> {
        Err(failed(config, "exec"))
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        self.step(config, "exec_sessions", || Ok(0))
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.step(config, "processes", || {
            Ok(self.find(config).map(|found| found.process.pid()).into_iter().collect())
        })
    }

    async fn limit_cpu(&self, config: &ContainerConfig, _: u32) -> Result<(), EngineError> {
        self.step(config, "limit_cpu", || Ok(()))
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.step(config, "memory_current", || Ok(PAGES * PAGE_SIZE))
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.step(config, "memory_unshared", || Ok(16 << 20))
    }
}

/// A restore that waits for its images.
struct Begun(Containers, RestoreRequest);

#[async_trait]
impl BegunRestore for Begun {
    fn charge(&self, _pid: u32) -> Result<(), EngineError> {
        Ok(())
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        self.0.restore_stopped(&self.1).await
    }
}

/// Puts the pages of the images into a process.
fn fill(process: &Process, request: &RestoreRequest) {
    let pid = process_tree(&request.images).unwrap()[0].pid;
    let pages = pagemap(&request.images, pid).unwrap().expect("a pagemap");
    let file = std::fs::read(request.images.join(format!("pages-{}.img", pages.pages_id))).unwrap();
    let mut from = 0;
    for run in pages.runs.iter().filter(|run| run.present) {
        let length = usize::try_from(run.addresses.end - run.addresses.start).unwrap();
        process.put(run.addresses.start, &file[from..from + length]);
        from += length;
    }
}

/// Has the pager fill a process, as CRIU's restorer does.
fn hand_over(process: &Process, request: &RestoreRequest) {
    let pid = process_tree(&request.images).unwrap()[0].pid;
    let mut pager = UnixStream::connect(request.work.join("lazy-pages.socket")).unwrap();
    let userfaultfd = process.lack().expect("a userfaultfd");
    pager.write_all(&pid.to_ne_bytes()).unwrap();
    let fds = [userfaultfd.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(pager.as_raw_fd(), &[IoSlice::new(&[0])], &control, MsgFlags::empty(), None).unwrap();
    pager.write_all(&0x5253_5446_u32.to_ne_bytes()).unwrap();
    // It closes its end when it has taken all.
    assert_eq!(pager.read(&mut [0]).unwrap(), 0);
}

/// What a node dumps processes with.
pub(super) struct Checkpointer(pub(super) Arc<Machine>);

impl Checkpointer {
    fn step<T>(&self, verb: &str, work: impl FnOnce() -> Result<T, CriuError>) -> Result<T, CriuError> {
        self.0.script.step(&format!("criu.{verb}"), work).unwrap_or_else(|| Err(broken(verb)))
    }
}

fn broken(verb: &str) -> CriuError {
    CriuError::Answer { path: "criu".into(), reason: format!("a fault is injected into {verb}") }
}

#[async_trait]
impl Checkpoint for Checkpointer {
    fn path(&self) -> &Path {
        Path::new("criu")
    }

    async fn version(&self) -> Result<Version, CriuError> {
        self.step("version", || Ok(Version::release(4, 2, 0)))
    }

    async fn lazy_external(&self) -> Result<bool, CriuError> {
        self.step("lazy_external", || Ok(true))
    }

    async fn shared_external(&self) -> Result<bool, CriuError> {
        self.step("shared_external", || Ok(false))
    }

    async fn system_v_external(&self) -> Result<bool, CriuError> {
        self.step("system_v_external", || Ok(false))
    }

    async fn mappings_external(&self) -> Result<bool, CriuError> {
        self.step("mappings_external", || Ok(false))
    }

    async fn file_pages_external(&self) -> Result<bool, CriuError> {
        self.step("file_pages_external", || Ok(false))
    }

    async fn keeps_rights(&self) -> Result<bool, CriuError> {
        self.step("keeps_rights", || Ok(true))
    }

    async fn tcp_inline(&self) -> Result<bool, CriuError> {
        self.step("tcp_inline", || Ok(false))
    }

    async fn stay_warm(&self) -> Result<(), CriuError> {
        self.step("stay_warm", || Ok(()))
    }

    fn prepare(&self) -> Result<Box<dyn Dump>, CriuError> {
        self.step("prepare", || Ok(Box::new(Started(Arc::clone(&self.0))) as Box<dyn Dump>))
    }
}

struct Started(Arc<Machine>);

#[async_trait]
impl Dump for Started {
    async fn ready(&mut self, _: &DumpOptions) -> Result<(), CriuError> {
        self.0.script.step("criu.ready", || ()).ok_or_else(|| broken("ready"))
    }

    async fn dump(self: Box<Self>, options: DumpOptions) -> Result<DumpResult, CriuError> {
        let in_repair = |is: bool| {
            let mut there = self.0.there();
            let mut containers = there.containers.values_mut();
            let container = containers.find(|container| container.process.pid() == options.pid).unwrap();
            container.in_repair = is;
            container.clone()
        };
        in_repair(true);
        let dumped = self.0.script.step("criu.dump", || {
            let container = in_repair(false);
            assert!(container.frozen && !container.process.runs(), "a process is dumped that runs");
            write_images(&container.process, &options.images, self.0.lazy);
            DumpResult {
                way: MemoryWay::Untouched,
                freezing: Duration::ZERO,
                frozen: Duration::ZERO,
                memory: Duration::ZERO,
                memory_write: Duration::ZERO,
                pages_written: 0,
                pages_scanned: 0,
            }
        });
        dumped.ok_or_else(|| broken("dump"))
    }
}

/// `mm_entry`.
#[derive(Clone, PartialEq, Message)]
struct Areas {
    #[prost(message, repeated, tag = "14")]
    areas: Vec<Area>,
}

/// The images of a process, without its pattern. What else it has is said to be in the images: whatever is
/// restored has it already.
fn write_images(process: &Process, images: &Path, lazy: bool) {
    let pid = process.space();
    let write = |name: String, kind: ImageKind, message: &[u8]| {
        let head =
            [0x5456_4319, kind as u32, u32::try_from(message.len()).unwrap()].map(u32::to_le_bytes).concat();
        std::fs::write(images.join(name), [&head, message].concat()).unwrap();
    };
    let tree = ProcessTreeEntry { pid, ppid: 0, pgid: pid, sid: pid, threads: vec![pid] };
    write("pstree.img".into(), ImageKind::ProcessTree, &tree.encode_to_vec());
    let pattern = BASE..BASE + PAGES * PAGE_SIZE;
    let area = Area { start: pattern.start, end: pattern.end, prot: 3, flags: 0x22, status: 1, advice: None };
    write(format!("mm-{pid}.img"), ImageKind::Memory, &Areas { areas: vec![area] }.encode_to_vec());
    // Where nothing comes later, only lazy areas are looked at.
    let is_other =
        |area: &godwit_memory::process::Area| lazy && area.kind == AreaKind::Private && area.range != pattern;
    let others = process.handle().areas().unwrap().into_iter().filter(is_other);
    let runs =
        others.map(|area| PageRun { addresses: area.range, present: false, lazy: false, in_parent: true });
    let runs = Vec::from_iter(runs);
    std::fs::write(images.join(format!("pagemap-{pid}.img")), Pagemap { pages_id: 1, runs }.encode())
        .unwrap();
    std::fs::write(images.join("pages-1.img"), b"").unwrap();
}
