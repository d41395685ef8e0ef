//! Virtual machines as nodes: a kernel of their own, with what this machine's may lack (WireGuard, Open
//! vSwitch, netem). Emulated, so they need no hardware help and no privileges, and are some ten times
//! slower.
//!
//! ```text
//!   Vm::boot(&VmConfig { name, files, address, … })   tests/vm/image makes what it boots, once
//!     ├─ /test in it                 the files, unpacked
//!     ├─ eth0, if it has an address  one segment with all machines of the test process
//!     └─ vm.run("ip link")           exit code and output, by way of tests/vm/agent
//!   drop ──────────────────────────▶ it is gone
//! ```
//!
//! What it writes to its disk goes with it. What goes wrong in here ends the test with a sentence.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::Ipv4Addr,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD as STANDARD};

/// How long it may take to boot: 5 s on a machine that has nothing else to do.
const BOOT: Duration = Duration::from_secs(180);
/// The UDP port of the segment; its group is the process's own.
const SEGMENT_PORT: u16 = 24_788;

/// What a virtual machine is like.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Its host name.
    pub name: String,
    /// A directory whose content it finds at `/test`.
    pub files: Option<PathBuf>,
    /// Its address on the segment of this test process's machines, a network of 24 bits; none: it is on none.
    pub address: Option<Ipv4Addr>,
    /// MiB.
    pub memory: u32,
    /// Processors.
    pub processors: u32,
}

impl VmConfig {
    /// One without files and without a network, of 1 GiB and two processors.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let name = name.to_owned();
        Self { name, files: None, address: None, memory: 1024, processors: 2 }
    }
}

/// What a command in it came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The exit code.
    pub code: i32,
    /// Everything that it printed, also to standard error.
    pub output: String,
}

/// A virtual machine that runs.
#[derive(Debug)]
pub struct Vm {
    name: String,
    emulator: Child,
    agent: BufReader<UnixStream>,
    scratch: tempfile::TempDir,
}

impl Vm {
    /// Boots one, and waits until it can be told what to do.
    ///
    /// # Panics
    /// When it does not come up; its console is shown then.
    #[must_use]
    pub fn boot(config: &VmConfig) -> Self {
        let image = image();
        let scratch = tempfile::tempdir().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(BOOT)).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem"]);
        command.args(["-smp", &config.processors.to_string(), "-m", &config.memory.to_string()]);
        command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
        let console = scratch.path().join("console");
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.arg("-kernel").arg(image.join("kernel")).arg("-initrd").arg(image.join("initrd"));
        let mut line = "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off".to_owned();
        line.push_str(&format!(" godwit.name={}", config.name));
        let root = image.join("root.img");
        command.args(["-drive", &format!("file={},format=raw,if=virtio,snapshot=on", root.display())]);
        if let Some(files) = &config.files {
            let packed = scratch.path().join("files.tar");
            let done = Command::new("tar").arg("-cf").arg(&packed).arg("-C").arg(files).arg(".").status();
            assert!(done.unwrap().success(), "{} cannot be packed", files.display());
            let drive = format!("file={},format=raw,if=virtio,readonly=on", packed.display());
            command.args(["-drive", &drive]);
        }
        if let Some(address) = config.address {
            line.push_str(&format!(" godwit.address={address}/24"));
            // Frames go as multicast packets that do not leave this machine.
            let [_, _, high, low] = std::process::id().to_be_bytes();
            let group = Ipv4Addr::new(239, 255, high, low);
            let network = format!("socket,id=segment,mcast={group}:{SEGMENT_PORT},localaddr=127.0.0.1");
            let [a, b, c, d] = address.octets();
            let mac = format!("52:54:{a:02x}:{b:02x}:{c:02x}:{d:02x}");
            command.args([
                "-netdev",
                &network,
                "-device",
                &format!("virtio-net-pci,netdev=segment,mac={mac}"),
            ]);
        }
        command.args(["-append", &line]);
        // Its standard input is the other end of what the agent is told by.
        command.args(["-chardev", "socket,id=agent,fd=0", "-device", "virtio-serial-pci"]);
        command.args(["-device", "virtserialport,chardev=agent,name=godwit"]);
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        let emulator = command.spawn().expect("qemu-system-x86_64 cannot be started; run scripts/setup --vm");
        let mut vm = Self { name: config.name.clone(), emulator, agent: BufReader::new(ours), scratch };
        let greeting = vm.read_line();
        assert_eq!(greeting, "ready", "the virtual machine {} answers {greeting:?}", vm.name);
        vm
    }

    /// Runs a script of bash in it, which may take so long.
    ///
    /// # Panics
    /// When it takes longer, or the machine is gone; its console is shown then.
    pub fn try_run(&mut self, script: &str, patience: Duration) -> Done {
        self.agent.get_ref().set_read_timeout(Some(patience)).unwrap();
        let line = STANDARD.encode(script) + "\n";
        self.agent.get_mut().write_all(line.as_bytes()).unwrap();
        let head = self.read_line();
        let numbers =
            head.split_once(' ').and_then(|(code, length)| Some((code.parse().ok()?, length.parse().ok()?)));
        let (code, length): (i32, usize) = numbers.unwrap_or_else(|| panic!("{head:?} from {}", self.name));
        let mut output = vec![0; length];
        if let Err(error) = self.agent.read_exact(&mut output) {
            self.fail(&format!("{error} after {head:?}"));
        }
        Done { code, output: String::from_utf8_lossy(&output).into_owned() }
    }

    /// Runs a script that must succeed within a minute; what it printed.
    ///
    /// # Panics
    /// When it does not.
    pub fn run(&mut self, script: &str) -> String {
        let done = self.try_run(script, Duration::from_secs(60));
        assert_eq!(done.code, 0, "in {}, {script}: {}", self.name, done.output);
        done.output
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        match self.agent.read_line(&mut line) {
            Ok(length) if length > 0 => line.trim_end().to_owned(),
            Ok(_) => self.fail("it has ended"),
            Err(error) => self.fail(&error.to_string()),
        }
    }

    fn fail(&self, what: &str) -> ! {
        let console = std::fs::read_to_string(self.scratch.path().join("console")).unwrap_or_default();
        panic!("the virtual machine {}: {what}; its console:\n{console}", self.name)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // One that has ended by itself is gone as well.
        let _ = self.emulator.kill();
        let _ = self.emulator.wait();
    }
}

/// Makes the image, if it is not there; where it is.
fn image() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("vm/image");
    let output = Command::new(&script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{} has failed (see above)", script.display());
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end())
}
