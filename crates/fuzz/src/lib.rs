//! What the fuzz targets (`fuzz/fuzz_targets`) share: a place to write to with something beside it that must not be
//! touched, inputs with a structure, and one runtime. `tests/targets.rs` gives each target random bytes.

pub mod json;
pub mod tar;

/// What libFuzzer's macro of this name is to a fuzz target, where random bytes take the fuzzer's place: the function `run`.
#[macro_export]
macro_rules! fuzz_target {
    (|$input:ident: $type:ty| $body:expr) => {
        pub(crate) fn run(bytes: &[u8]) {
            let bytes = ::arbitrary::Unstructured::new(bytes);
            if let Ok($input) = <$type as ::arbitrary::Arbitrary>::arbitrary_take_rest(bytes) {
                $body
            }
        }
    };
}

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

/// What lies outside of [`Scratch::inside`], reachable as `../outside/secret` from there.
const SECRET: &str = "not to be touched";

/// A directory for the code that is tested, and one beside it that it must leave alone.
///
/// ```text
/// directory/inside/          what is tested writes here; the process's working directory
/// directory/outside/secret
/// ```
pub struct Scratch {
    directory: TempDir,
    before: Vec<Seen>,
}

/// What is compared of a file.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    name: OsString,
    mode: u32,
    owner: (u32, u32),
    links: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Scratch {
    /// In memory, where files cost least.
    ///
    /// # Panics
    /// When the directories cannot be made: nothing can be tested then.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new()
            .prefix("godwit-fuzz-")
            .tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })
            .expect("a directory for files");
        for name in ["inside", "outside"] {
            fs::create_dir(directory.path().join(name)).expect("directories in it");
        }
        fs::write(directory.path().join("outside/secret"), SECRET).expect("a file");
        let before = look(directory.path());
        let scratch = Self { directory, before };
        std::env::set_current_dir(scratch.inside()).expect("to go there");
        scratch
    }

    /// Where the code that is tested may write.
    #[must_use]
    pub fn inside(&self) -> PathBuf {
        self.directory.path().join("inside")
    }

    /// Panics if anything outside has come, gone or changed, be it a change time.
    ///
    /// # Panics
    /// That is how a finding is told to the fuzzer.
    pub fn assert_outside_untouched(&self) {
        let path = self.directory.path();
        assert_eq!(look(path), self.before, "something outside was touched");
        assert_eq!(fs::read_to_string(path.join("outside/secret")).expect("the secret"), SECRET);
        assert_eq!(fs::read_dir(path).expect("the directory").count(), 2, "something came beside it");
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

fn look(directory: &Path) -> Vec<Seen> {
    let outside = directory.join("outside");
    let entries = fs::read_dir(&outside).expect("the directory outside");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut seen: Vec<Seen> = names
        .chain([".".into()])
        .map(|name| {
            let data = fs::symlink_metadata(outside.join(&name)).expect("what is outside");
            Seen {
                name,
                mode: data.mode(),
                owner: (data.uid(), data.gid()),
                links: data.nlink(),
                modified: (data.mtime(), data.mtime_nsec()),
                changed: (data.ctime(), data.ctime_nsec()),
            }
        })
        .collect();
    seen.sort_by(|a, b| a.name.cmp(&b.name));
    seen
}

/// Names that paths in structured inputs are made of: few, so that inputs name the same things
/// again; harmless ones more often, so that inputs get somewhere; and all kinds that a parser could
/// go wrong with. Those that lead to `outside` do so from where trees and layers are made.
const NAMES: [&[u8]; 32] = [
    b"a",
    b"b",
    b"dir",
    b"link",
    b"a",
    b"b",
    b"dir",
    b"link",
    b"a",
    b"b",
    b"dir",
    b"link",
    b"c",
    b"c",
    b"..",
    b".",
    b"",
    b"outside",
    b"secret",
    b"../outside",
    b"../../../../outside",
    b"../../../../../outside",
    b"/proc/self/cwd/../outside",
    b"/proc/self/cwd/../outside",
    b"../outside/secret",
    b"\xff\xfe",
    b"a\0b",
    b".wh.a",
    b".wh.dir",
    b".wh.link",
    b".wh..wh..opq",
    b".wh..wh..plnk",
];

/// Where a symbolic link leads that leaves the place it is in, if it is followed: one that inputs
/// can go through from the start, for finding it by chance takes long.
#[must_use]
pub fn way_out(number: u8) -> &'static [u8] {
    NAMES[19 + usize::from(number % 5)]
}

/// A path out of up to three bytes: a name for each, and `/` between them; small bytes after the
/// first are left out.
#[must_use]
pub fn path(bytes: &[u8]) -> Vec<u8> {
    let used = bytes.iter().take(3).enumerate().filter(|(at, byte)| *at == 0 || **byte >= 0x60);
    used.map(|(_, byte)| NAMES[usize::from(byte % 32)]).collect::<Vec<_>>().join(&b'/')
}

/// Runs a future on the process's one runtime.
///
/// # Panics
/// When there can be no runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
        })
        .block_on(future)
}
