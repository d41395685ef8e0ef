//! A service that godwit-cc built (`programs/ledger.c`), which can go on under the destination's executables, and clients
//! that know what each of its answers has to be. Its programs need what `scripts/setup --isa` installs.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use godwit_isa_programs::compile::Compiler;
use godwit_lab::workload::Preset;

use crate::Bed;

/// The service's name.
pub const NAME: &str = "ledger";
/// Its address.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 100);
/// Its port.
pub const PORT: u16 = 7000;

/// Each so many numbers a client has the service start a process.
const CHILD_EACH: u64 = 100;

/// The words that the service changes by numbers, and has a checksum of.
const WORDS: usize = 1 << 18;

/// A root filesystem with nothing but the program of a source in `programs/`, built by godwit-cc for this machine.
pub fn preset(bed: &Bed, source: &str, arguments: &[&str]) -> Preset {
    let rootfs = bed.scratch().join(source);
    let path = Path::new("bin").join(source);
    fs::create_dir_all(rootfs.join("bin")).unwrap();
    fs::copy(built(bed, source, &[]).1, rootfs.join(&path)).unwrap();
    let command = [format!("/{}", path.display())];
    let command = command.into_iter().chain(arguments.iter().map(|&word| word.to_owned())).collect();
    Preset { rootfs, command, env: Vec::new(), user: None, port: PORT }
}

/// The program of a source in `programs/`, built by godwit-cc: the path to which it has added an instruction set for each, as
/// `godwit image pack` wants it.
pub fn program(bed: &Bed, source: &str) -> PathBuf {
    program_with(bed, source, &[])
}

/// The same, built with further options.
pub fn program_with(bed: &Bed, source: &str, options: &[&str]) -> PathBuf {
    built(bed, source, options).0
}

/// The same, and the executable for this machine.
fn built(bed: &Bed, source: &str, options: &[&str]) -> (PathBuf, PathBuf) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(format!("{source}.c"));
    let directory = bed.scratch().join(format!("{source}.built"));
    fs::create_dir_all(&directory).unwrap();
    let output = directory.join(source);
    let built = Compiler::godwit().and_then(|compiler| compiler.build(&[file], &output, options));
    let executable = built.unwrap_or_else(|error| panic!("{error:#}")).path;
    (output, executable)
}

/// An image for both instruction sets with the program, in a file.
pub fn image(bed: &Bed, node: &str) -> PathBuf {
    let (archive, program) = (bed.scratch().join("ledger.tar"), program(bed, "ledger"));
    let (to, from) = (archive.to_str().unwrap(), program.to_str().unwrap());
    bed.done(node, &["image", "pack", "-o", to, "--cmd", &PORT.to_string(), "ledger:1", from]);
    archive
}

/// Runs it on a node.
pub fn run(bed: &Bed, node: &str) {
    bed.run(node, NAME, ADDRESS, &preset(bed, "ledger", &[&PORT.to_string()]), &[]);
}

/// The only client of the service, with one connection, which it never renews.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    sum: u64,
    sent: u64,
    children: u64,
    /// As the service has them.
    words: Vec<u64>,
    checksum: u64,
}

impl Client {
    /// Connects.
    pub fn connect(bed: &Bed) -> Self {
        let stream = bed.connect(SocketAddrV4::new(ADDRESS, PORT));
        Self { stream, sum: 0, sent: 0, children: 1, words: vec![0; WORDS], checksum: 0 }
    }

    /// Answers may take so long.
    pub fn wait_up_to(&mut self, patience: std::time::Duration) {
        self.stream.set_read_timeout(Some(patience)).unwrap();
    }

    /// Sends a number and reads the answer: the instruction set by which it was computed, 1 for x86-64 and 2 for arm64; an
    /// error where it is not what it has to be.
    pub fn asks(&mut self) -> io::Result<u64> {
        self.sent += 1;
        let number = if self.sent.is_multiple_of(CHILD_EACH) { 0 } else { self.sent * 7919 };
        self.sum = self.sum.wrapping_add(number);
        self.children += u64::from(number == 0);
        // Numbers fit a word of the machine.
        let at = usize::try_from(number.wrapping_mul(4099)).unwrap_or(0) % WORDS;
        let word = &mut self.words[at];
        let before = *word;
        *word = before.wrapping_mul(31).wrapping_add(number);
        self.checksum = self.checksum.wrapping_sub(before).wrapping_add(*word);
        self.stream.write_all(&number.to_le_bytes())?;
        let mut answer = [[0; 8]; 4];
        self.stream.read_exact(answer.as_flattened_mut())?;
        let [sum, machine, children, checksum] = answer.map(u64::from_le_bytes);
        let due = (self.sum, self.children, self.checksum);
        if (sum, children, checksum) == due {
            return Ok(machine);
        }
        Err(io::Error::other(format!(
            "after {} numbers their sum, its children and its memory are {:x?} and not {due:x?}",
            self.sent,
            (sum, children, checksum)
        )))
    }
}

/// A client that asks without a pause.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<Client>>>,
}

impl Load {
    /// Begins.
    pub fn start(mut client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                client.asks()?;
            }
            Ok(client)
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends, and has been answered all that it asked.
    pub fn stop(mut self) -> Client {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join().unwrap();
        ended.unwrap_or_else(|error| panic!("a client of the service: {error}"))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
