//! A service that runs, comes to rest, is dumped, and goes on from its images: one of two threads (`programs/service.c`), or
//! one of several processes (`programs/family.c`).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use godwit_criu::images::{ChangedImages, ImageKind, ProcessImages};
use godwit_criu::{Criu, DumpOptions};
use godwit_crossing::{
    Name, Node, Process, Program, Record, RecordError, Records, Rest, Target, areas_of_maps,
};
use godwit_isa_plan::{PAGE, RECORD, Set};
use godwit_isa_programs::compile::Compiler;
use godwit_isa_tests::rest::{Tree, record};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// So long that a machine which is busy with other tests comes to it.
const DEADLINE: Duration = Duration::from_secs(120);

/// The lines that a service prints while it works.
pub(crate) const LINES: usize = 60;

/// The programs.
const PROGRAMS: [&str; 2] = ["family", "service"];

fn criu() -> PathBuf {
    std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from)
}

/// A program's executable for a set.
pub(crate) fn executable(program: &str, set: Set) -> Result<PathBuf> {
    static BUILT: OnceLock<Result<tempfile::TempDir, String>> = OnceLock::new();
    let build = || {
        let directory = tempfile::tempdir()?;
        let compiler = Compiler::godwit()?;
        for program in PROGRAMS {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{program}.c"));
            compiler.build(&[source], &directory.path().join(program), &[])?;
        }
        Ok(directory)
    };
    let built = BUILT.get_or_init(|| build().map_err(|error: anyhow::Error| format!("{error:#}")));
    let directory = built.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(directory.path().join(format!("{program}.{}", set.name())))
}

/// A node with the executable of a set where a service has its own.
pub(crate) fn target(program: &str, set: Set) -> Result<Target> {
    let file = executable(program, set)?;
    let there = Program::decode(&fs::read(&file)?, fs::metadata(&file)?.mode())?;
    let here = executable(program, Set::X86_64)?;
    Ok(Target {
        node: Node { set, page_bytes: PAGE, address_end: 1 << 47 },
        programs: BTreeMap::from([(here.into_os_string().into_encoded_bytes(), there)]),
        knows_filters: false,
    })
}

/// What an undisturbed run prints.
pub(crate) fn expected(program: &str) -> Result<String> {
    let output = Command::new(executable(program, Set::X86_64)?).arg(LINES.to_string()).output()?;
    ensure!(output.status.success(), "the service fails by itself: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// A service that runs.
pub(crate) struct Service {
    /// What was started here: the service, or the CRIU that has restored it and waits for its end.
    child: Child,
    program: &'static str,
    /// Its first process.
    pub(crate) pid: u32,
    directory: tempfile::TempDir,
}

/// What a dump of a service is.
pub(crate) struct Dumped {
    pub(crate) images: ProcessImages,
    pub(crate) records: Records,
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            // All of its processes are in a group of their own.
            let _ = signal(-i64::from(self.pid), Signal::SIGKILL);
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Service {
    pub(crate) fn start(program: &'static str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let output = File::create(directory.path().join("output"))?;
        let child = Command::new("setsid")
            .arg(executable(program, Set::X86_64)?)
            .arg(LINES.to_string())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        let pid = child.id();
        Ok(Self { child, program, pid, directory })
    }

    pub(crate) fn output(&self) -> Result<String> {
        Ok(fs::read_to_string(self.directory.path().join("output"))?)
    }

    /// Waits until it has printed this many lines.
    pub(crate) fn prints(&self, lines: usize) -> Result<()> {
        self.until("has not printed enough", || Ok(self.output()?.lines().count() >= lines))
    }

    /// Asks it to rest when it has printed this many lines, and waits until all of its processes do.
    pub(crate) fn rest_after(&self, lines: usize) -> Result<Vec<Rest>> {
        self.prints(lines)?;
        let rests = Tree::of(i32::try_from(self.pid)?).rest()?;
        Ok(rests.into_iter().map(|(_, rest)| rest).collect())
    }

    /// Has it rest when it has printed this many lines, and dumps it into a new directory.
    pub(crate) fn dump_after(&mut self, lines: usize, images: &Path) -> Result<Dumped> {
        self.rest_after(lines)?;
        self.dump(images)
    }

    /// The children of its first process, oldest first.
    pub(crate) fn children(&self) -> Result<Vec<u32>> {
        let pid = self.pid;
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        Ok(text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
    }

    /// Waits until one of its processes is in a state of proc_pid_stat(5).
    pub(crate) fn is_in_state(&self, pid: u32, state: char) -> Result<()> {
        self.until(&format!("has not come to state {state} in process {pid}"), || {
            let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name before may hold any characters.
            Ok(text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(state)))
        })
    }

    /// How much memory its first process has locked, as the kernel writes it.
    pub(crate) fn locked(&self) -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        Ok(line.context("the kernel does not say what is locked")?.trim().to_owned())
    }

    /// What can be seen of it while it runs.
    pub(crate) fn facts(&self) -> Result<Process> {
        let pid = self.pid;
        let said = Cell::new(None);
        self.until("does not listen", || {
            said.set(record(i32::try_from(pid)?)?);
            Ok(said.get().is_some_and(|record| record.ready))
        })?;
        let executable = executable(self.program, Set::X86_64)?;
        let areas = areas_of_maps(&fs::read(format!("/proc/{pid}/maps"))?);
        Ok(Process {
            name: Name { pid, name: executable.display().to_string() },
            executable: executable.into_os_string().into_encoded_bytes(),
            is_on_mount: false,
            record: said.get().ok_or(RecordError::Foreign),
            areas: areas.context("the kernel tells its memory in another way")?,
            has_filter: false,
            has_rings: false,
        })
    }

    /// Dumps it, which ends it, into a new directory.
    pub(crate) fn dump(&mut self, images: &Path) -> Result<Dumped> {
        let processes = [self.children()?, vec![self.pid]].concat();
        fs::create_dir(images)?;
        let mut options = DumpOptions::new(self.pid, "/", images, images);
        options.leave_running = false;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(Criu::new(criu()).dump(options))?;
        self.child.wait()?;
        // They go on under the same numbers.
        let is_gone = |pid: &u32| !Path::new(&format!("/proc/{pid}")).exists();
        self.until("has processes that stay", || Ok(processes.iter().all(is_gone)))?;
        read(images)
    }

    /// Lets it go on from images.
    pub(crate) fn restore(&mut self, images: &Path) -> Result<()> {
        let log = images.join("restore.log");
        self.child = Command::new(criu())
            .args(["restore", "--log-file", "restore.log", "-v4", "--images-dir"])
            .arg(images)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let began = Instant::now();
        let is_there =
            || fs::read_to_string(&log).unwrap_or_default().contains("Restore finished successfully");
        while !is_there() {
            let has_failed = self.child.try_wait()?.is_some() && !is_there();
            if has_failed || began.elapsed() > DEADLINE {
                bail!("the restore failed: {}", fs::read_to_string(&log)?);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits for its end.
    pub(crate) fn end(&mut self) -> Result<String> {
        self.until("does not end", || Ok(!Path::new(&format!("/proc/{}/fd/0", self.pid)).exists()))?;
        self.child.wait()?;
        self.output()
    }

    /// Nothing tells of what happens in another process, so it is looked at again and again.
    fn until(&self, what: &str, is_so: impl Fn() -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        while !is_so()? {
            ensure!(began.elapsed() < DEADLINE, "the service {what}: {}", self.output()?);
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Sends a signal to a process, or to a group of them by its negative number.
pub(crate) fn signal(pid: i64, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid.try_into()?), signal)?)
}

/// The images of a dump, with the record of each process that has not ended.
fn read(directory: &Path) -> Result<Dumped> {
    // The service runs in the mount namespace of the test, of which CRIU dumps nothing: one mount, field 7 with "/".
    let (name, mut mounts) = ("mountpoints-1.img", ChangedImages::default());
    mounts.insert(name, ImageKind::Mountpoints, &[vec![0x3a, 1, b'/']])?;
    mounts.write(directory)?;
    let images = ProcessImages::read(directory)?;
    // CRIU restores it without.
    fs::remove_file(directory.join(name))?;
    let mut records = Records::new();
    for process in images.tree()? {
        if images.image(&format!("mm-{}.img", process.pid)).is_err() {
            continue;
        }
        let mut record = [0; Record::BYTES];
        if images.contents(directory, process.pid, RECORD, &mut record)? {
            records.insert(process.pid, record);
        }
    }
    Ok(Dumped { images, records })
}
