//! QEMU's command line, the same for a machine that boots, one that is to be saved, and one that goes on from a snapshot.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use super::store;
use crate::{
    config::UPLINK,
    error::{Context, LabError},
    spec::{Architecture, Machine},
};

/// Where it is noted which images KVM boots.
const TRIED: &str = "/run/godwit/machines";
/// A machine without a disk is switched off sooner under KVM, after a second.
const BOOTS: Duration = Duration::from_secs(20);
/// The note on an image whose kernel took longer than that.
const SLOW: &str = "slow";

/// What runs a machine's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// The host's own processors.
    Kvm,
    /// Emulation, some ten times slower.
    Emulation,
}

impl Accelerator {
    fn word(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Emulation => "emulation",
        }
    }
}

/// How a machine starts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// It boots.
    Boot,
    /// It boots, with its memory in this file, to be saved.
    BootToSave(&'a Path),
    /// It waits for a state, with a copy of its memory in this file.
    Load(&'a Path),
}

/// What a machine's disk, a qcow2 image, is read and written by.
#[derive(Debug)]
pub(crate) enum Disk<'a> {
    /// The emulator itself: what the machine has written stays in this file.
    File(&'a Path),
    /// A server that listens here.
    Served(&'a Path),
}

/// What a machine is started with.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) accelerator: Accelerator,
    /// Directory of kernel and initrd.
    pub(crate) image: &'a Path,
    pub(crate) disk: Disk<'a>,
    pub(crate) start: Start<'a>,
    /// Hardware address of its uplink.
    pub(crate) address: [u8; 6],
    /// The TAP device that its uplink is.
    pub(crate) tap: File,
    pub(crate) console: &'a Path,
    pub(crate) monitor: &'a Path,
}

/// The emulator of an architecture.
pub(crate) fn program(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Amd64 => "qemu-system-x86_64",
        Architecture::Arm64 => "qemu-system-aarch64",
    }
}

/// The emulator's name and version, and that it is there.
pub(crate) fn version(architecture: Architecture) -> Result<String, LabError> {
    let program = program(architecture);
    let output = Command::new(program).arg("--version").output().map_err(|_| LabError::NoMachineProgram {
        name: program.to_owned(),
        package: match architecture {
            Architecture::Amd64 => "qemu-system-x86",
            Architecture::Arm64 => "qemu-system-arm",
        },
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}

/// The server of a disk whose cache is lost with this process: what the machine writes goes into a temporary file, and
/// from there to the disk when the machine flushes (nbdkit-cache-filter(1)).
pub(crate) const DISK_SERVER: &str = "nbdkit";

/// Its arguments. It goes to the background, since in the foreground it would end with the thread that has started it, and
/// listens when it has written its pid.
pub(crate) fn serve_disk(command: &mut Command, disk: &Path, socket: &Path, pid: &Path) {
    command.arg("--unix").arg(socket).arg("--pidfile").arg(pid);
    command.args(["--filter=cache", "file"]).arg(option("file=", disk));
    // One unit of a guest's file system: no write takes a neighbour's along.
    command.args(["cache=writeback", "cache-min-block-size=4K"]);
}

/// KVM, where this image's kernel boots under it: that `/dev/kvm` is there, or that a processor can be set up, does not say
/// so. What came of it is noted until this host reboots.
pub(crate) fn accelerator(architecture: Architecture, image: &Path) -> Result<Accelerator, LabError> {
    if Architecture::own() != Some(architecture) || File::open("/dev/kvm").is_err() {
        return Ok(Accelerator::Emulation);
    }
    // Images have their digest for a name.
    let image = fs::canonicalize(image).context("finding", image.display())?;
    let known = Path::new(TRIED).join(image.file_name().unwrap_or_default());
    let noted = fs::read_to_string(&known).unwrap_or_default();
    let found = [Accelerator::Kvm, Accelerator::Emulation].into_iter().find(|one| one.word() == noted);
    if let Some(accelerator) = found {
        return Ok(accelerator);
    }
    let tried = boots(architecture, &image).context("trying KVM by", program(architecture))?;
    let accelerator = if tried == Tried::Boots { Accelerator::Kvm } else { Accelerator::Emulation };
    if accelerator == Accelerator::Emulation {
        store::say("this host's KVM does not boot the machine's kernel: its processors are emulated");
    }
    fs::create_dir_all(TRIED).context("creating", TRIED)?;
    // Another lab may note the same now.
    let new = known.with_extension(std::process::id().to_string());
    fs::write(&new, tried.note(&noted)).context("writing", new.display())?;
    fs::rename(&new, &known).context("renaming", new.display())?;
    Ok(accelerator)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
    Boots,
    Fails,
    TooSlow,
}

impl Tried {
    /// What is noted of it, after an earlier note. A kernel that takes too long is tried once more: the host may be less
    /// busy then.
    fn note(self, earlier: &str) -> &'static str {
        match self {
            Self::Boots => Accelerator::Kvm.word(),
            Self::TooSlow if earlier != SLOW => SLOW,
            Self::Fails | Self::TooSlow => Accelerator::Emulation.word(),
        }
    }
}

/// Whether the kernel of an image boots under KVM. Its initrd switches a machine without a disk off.
fn boots(architecture: Architecture, image: &Path) -> io::Result<Tried> {
    let mut command = Command::new(program(architecture));
    command.args(["-machine", board(architecture), "-accel", "kvm", "-cpu", "host", "-m", "512"]);
    command.args(["-nodefaults", "-display", "none", "-append", "quiet panic=-1"]);
    command.arg("-kernel").arg(image.join("kernel")).arg("-initrd").arg(image.join("initrd"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (to, complaints) = mpsc::channel();
    let stderr = child.stderr.take();
    thread::spawn(move || {
        let lines = stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).split(b'\n'));
        for line in lines.map_while(Result::ok) {
            // Whoever has heard enough does not listen any more.
            let _ = to.send(line);
        }
    });
    let deadline = Instant::now() + BOOTS;
    // The channel closes when QEMU ends.
    let early = loop {
        match complaints.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            // After such an error it stays, with its processors stopped.
            Ok(line) if line.starts_with(b"KVM internal error") => break Some(Tried::Fails),
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => break Some(Tried::TooSlow),
        }
    };
    let killed = if early.is_some() { child.kill() } else { Ok(()) };
    let status = child.wait()?;
    killed?;
    Ok(early.unwrap_or(if status.success() { Tried::Boots } else { Tried::Fails }))
}

fn board(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Amd64 => "q35,vmport=off",
        Architecture::Arm64 => "virt,gic-version=3",
    }
}

fn cpu(machine: &Machine, accelerator: Accelerator) -> &str {
    match (&machine.cpu, accelerator, machine.architecture) {
        (Some(model), ..) => model,
        (None, Accelerator::Kvm, _) => "host",
        (None, Accelerator::Emulation, Architecture::Amd64) => "max",
        // The largest has pointer authentication, which is slow to emulate.
        (None, Accelerator::Emulation, Architecture::Arm64) => "cortex-a72",
    }
}

/// What of the command line a snapshot depends on: all that the machine can see, but not where its files are.
pub(crate) fn shape(machine: &Machine, accelerator: Accelerator) -> Vec<String> {
    let emulation = "tcg,thread=multi,tb-size=512";
    let mut words = vec![
        "-accel".to_owned(),
        if accelerator == Accelerator::Kvm { "kvm" } else { emulation }.to_owned(),
        "-machine".to_owned(),
        format!("{},memory-backend=ram", board(machine.architecture)),
        "-cpu".to_owned(),
        cpu(machine, accelerator).to_owned(),
        "-smp".to_owned(),
        machine.processors.to_string(),
        "-m".to_owned(),
        machine.memory.to_string(),
    ];
    let console = match machine.architecture {
        Architecture::Amd64 => "ttyS0",
        Architecture::Arm64 => "ttyAMA0",
    };
    // The host is trusted here, and what guards against other processes costs an emulated processor a third.
    let cgroup = if machine.cgroup == 1 { " systemd.unified_cgroup_hierarchy=0" } else { "" };
    let kernel = format!(
        "root=/dev/vda console={console} quiet loglevel=4 panic=-1 mitigations=off systemd.show_status=0 \
         systemd.getty_auto=0{cgroup}"
    );
    words.extend(["-append".to_owned(), kernel]);
    words.extend(["-nodefaults", "-display", "none", "-device", "virtio-rng-pci"].map(str::to_owned));
    words
}

/// The command that runs a machine; the caller chooses the network namespace.
pub(crate) fn arguments(command: &mut Command, parts: &Parts<'_>) -> Result<(), LabError> {
    command.args(shape(parts.machine, parts.accelerator));
    command.arg("-kernel").arg(parts.image.join("kernel")).arg("-initrd").arg(parts.image.join("initrd"));
    let size = format!("{}M", parts.machine.memory);
    let memory = match parts.start {
        Start::Boot => format!("memory-backend-ram,id=ram,size={size}").into(),
        Start::BootToSave(file) => {
            option(&format!("memory-backend-file,id=ram,size={size},share=on,mem-path="), file)
        }
        // Written pages are its own; all others are shared with all machines that began there.
        Start::Load(file) => {
            option(&format!("memory-backend-file,id=ram,size={size},share=off,mem-path="), file)
        }
    };
    command.arg("-object").arg(memory);
    if matches!(parts.start, Start::Load(_)) {
        command.args(["-incoming", "defer"]);
    }
    command.arg("-drive").arg(match parts.disk {
        Disk::File(path) => {
            option("driver=qcow2,if=virtio,cache=writeback,file.driver=file,file.filename=", path)
        }
        Disk::Served(socket) => {
            let server = "driver=qcow2,if=virtio,cache=writeback,file.driver=nbd,file.server.type=unix";
            option(&format!("{server},file.server.path="), socket)
        }
    });
    command.args(["-netdev", "user,id=control,restrict=on,hostfwd=tcp:127.0.0.1:22-:22"]);
    command.args(["-device", "virtio-net-pci,netdev=control,mac=52:54:00:00:00:01,romfile="]);
    let tap = OwnedFd::from(parts.tap.try_clone().context("duplicating the TAP device of", UPLINK)?);
    let address = parts.address.map(|byte| format!("{byte:02x}")).join(":");
    command.arg("-netdev").arg(format!("tap,id=uplink,fd={}", tap.as_raw_fd()));
    command.arg("-device").arg(format!("virtio-net-pci,netdev=uplink,mac={address},romfile="));
    command.arg("-serial").arg(option("file:", parts.console));
    command.arg("-qmp").arg(option("unix:", &with_suffix(parts.monitor, ",server=on,wait=off")));
    if parts.machine.clock_ahead != 0 {
        command.arg("-rtc").arg(format!("base={}", wall_clock(parts.machine.clock_ahead)?));
    }
    // SAFETY: fcntl is a bare system call, safe between fork and exec; the descriptor is open until then.
    unsafe {
        command.pre_exec(move || {
            rustix::io::fcntl_setfd(&tap, rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    Ok(())
}

fn option(prefix: &str, path: &Path) -> OsString {
    let mut text = OsString::from(prefix);
    text.push(path);
    text
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut text = path.as_os_str().to_owned();
    text.push(suffix);
    text.into()
}

/// The time so many seconds from now, as QEMU reads it.
fn wall_clock(seconds: i64) -> Result<String, LabError> {
    let output = Command::new("date")
        .args(["--utc", &format!("--date={seconds:+} seconds"), "+%Y-%m-%dT%H:%M:%S"])
        .output()
        .context("running", "date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_boots_too_slowly_under_kvm_is_tried_twice() {
        let first = Tried::TooSlow.note("");
        assert!(![Accelerator::Kvm.word(), Accelerator::Emulation.word()].contains(&first), "{first}");
        assert_eq!(Tried::TooSlow.note(first), Accelerator::Emulation.word());
        assert_eq!(Tried::Boots.note(first), Accelerator::Kvm.word());
        assert_eq!(Tried::Fails.note(""), Accelerator::Emulation.word());
    }

    #[test]
    fn kvm_gives_a_machine_the_processor_of_the_host_and_emulation_one_of_its_own() {
        for (machine, accelerator, accel, model) in [
            ("debian13/amd64", Accelerator::Kvm, "kvm", "host"),
            ("debian13/amd64:cpu=Westmere", Accelerator::Kvm, "kvm", "Westmere"),
            ("debian13/arm64", Accelerator::Kvm, "kvm", "host"),
            ("debian13/amd64", Accelerator::Emulation, "tcg,thread=multi,tb-size=512", "max"),
            ("debian13/arm64", Accelerator::Emulation, "tcg,thread=multi,tb-size=512", "cortex-a72"),
        ] {
            let words = shape(&machine.parse().unwrap(), accelerator);
            let after = |option: &str| {
                let at = words.iter().position(|word| word == option).unwrap();
                words[at + 1].as_str()
            };
            assert_eq!((after("-accel"), after("-cpu")), (accel, model), "{machine} {accelerator:?}");
        }
    }
}
