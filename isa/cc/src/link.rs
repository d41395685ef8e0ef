//! Linking: from objects and archives of bitcode to the index and its executables.

use crate::arguments::{self, Input, Job};
use crate::home::{CXX_EXTERNALS, CXX_LIBRARY, Home, PLUGIN};
use crate::native::{self, Effort, SETS};
use crate::symbols::{self, SymbolsError, Unit};
use crate::{Error, index, query, report, resolve};
use godwit_isa_link::{Amount, Inputs, Options, Set, Toolchain};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Executables cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// `-l` of nothing.
    #[error(
        "cannot find -l{name}: there is no lib{name}.a in {places}; it must be made by godwit-cc and godwit-ar"
    )]
    Library {
        /// The name.
        name: String,
        /// Where was looked.
        places: String,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The executables cannot be made.
    #[error(transparent)]
    Isa(#[from] godwit_isa_link::LinkError),
    /// What is to be measured does not exist.
    #[error("{MEASURE} is \"{0}\"; it may be data-stack, polls, checks or everything")]
    Measure(String),
    /// This machine runs no neutral programs.
    #[error("no executable can be made for a machine of the set {0}")]
    Machine(&'static str),
}

/// The neutral module of `prog` is `prog.module`.
const MODULE: &str = "module";

/// Names a part of what makes a program able to move: it gets no more than that. For `isa/bench` only.
const MEASURE: &str = "GODWIT_LINK_MEASURE";

/// Does what a linker's command line says.
///
/// # Errors
/// When that cannot be done.
pub fn as_linker(command_line: &[OsString]) -> Result<ExitCode, Error> {
    if command_line.iter().any(|argument| argument == "--version" || argument == "-V")
        || (command_line.len() == 1 && command_line[0] == "-v")
    {
        // Builds look for these words to know which options they may use.
        println!("godwit-ld {} (compatible with GNU linkers; {})", env!("CARGO_PKG_VERSION"), query::MACHINE);
        return Ok(ExitCode::SUCCESS);
    }
    let job = arguments::parse_linker(command_line)?;
    link(&Home::find()?, &job)
}

/// Is the program one that a configure script or CMake builds to look at, and throws away?
///
/// autoconf calls it `conftest`, and once gives no name to what it makes of `conftest.c`; CMake calls it `cmTC_…` and
/// `CMakeDetermineCompilerABI_C.bin`. Any other `a.out` is somebody's program.
#[must_use]
pub fn is_probe(output: &Path, job: &Job) -> bool {
    let name = output.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    output == Path::new("/dev/null")
        || (name == "a.out" && is_of_conftest(job))
        || name == "conftest"
        || name.starts_with("conftest.")
        || name.starts_with("cmTC_")
        || name.starts_with("CMakeDetermineCompilerABI_")
}

/// Is one of the inputs autoconf's, or was it made of that?
fn is_of_conftest(job: &Job) -> bool {
    job.inputs.iter().any(|input| {
        let Input::File(path) = input else { return false };
        let source = job.compiled.get(path).unwrap_or(path);
        source.file_stem().is_some_and(|stem| stem == "conftest")
    })
}

/// Links what a command line asks for; its sources have been compiled.
///
/// # Errors
/// When the objects are not neutral, do not make a whole program, or a tool fails.
pub fn link(home: &Home, job: &Job) -> Result<ExitCode, Error> {
    let output = job.output.clone().unwrap_or_else(|| "a.out".into());
    let scratch =
        tempfile::tempdir().map_err(|source| LinkError::Write { path: std::env::temp_dir(), source })?;
    if job.relocatable {
        let (paths, _) = files(home, job)?;
        symbols::read(&paths)?;
        native::join(&paths, &output)?;
        return Ok(ExitCode::SUCCESS);
    }

    let (mut paths, whole) = files(home, job)?;
    let is_probe = is_probe(&output, job);
    let plain = job.plain || is_probe;
    let first = paths.len();
    if !plain {
        // A part of the program like any other; the C library has what it wants, and does not have what it has.
        paths.push(home.part("runtime/neutral.bc")?);
    }
    if job.cxx {
        paths.push(home.part(CXX_LIBRARY)?);
    }
    paths.push(home.part("sysroot/lib/libc.a")?);
    let mut units = symbols::read(&paths)?;
    for unit in &mut units {
        unit.source = job.compiled.get(&unit.path).cloned();
    }
    let mut lists = read_list(home, "externals")?;
    if !plain {
        lists.push_str(&read_list(home, "runtime/externals")?);
    }
    if job.cxx {
        lists.push_str(&read_list(home, CXX_EXTERNALS)?);
    }
    let externals: HashSet<&str> = lists
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(' ').next())
        .collect();
    let mut wanted = vec!["__gw_main", "main"];
    wanted.extend(job.wanted.iter().map(String::as_str));
    let own = resolve::Own { first, moves: !plain, externals: &externals };
    let chosen = resolve::resolve(&units, &whole, &wanted, own)?;
    let bitcode = extract(&units, &chosen, scratch.path())?;

    if is_probe {
        let made = scratch.path().join("executable");
        let own = native::own_set().ok_or(LinkError::Machine(std::env::consts::ARCH))?;
        native::plain(home, &bitcode, &[(own, made.clone())], Effort::Probe, scratch.path())?;
        if output != Path::new("/dev/null") {
            put(&made, &output)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let identity = if plain {
        let outputs: Vec<(&str, PathBuf)> = SETS.iter().map(|set| (*set, beside(&output, set))).collect();
        native::plain(home, &bitcode, &outputs, Effort::Full, scratch.path())?;
        index::Identity::Plain
    } else {
        movable(home, bitcode, &output, job)?
    };
    index::write(&output, &identity, &SETS).map_err(|source| LinkError::Write { path: output, source })?;
    Ok(ExitCode::SUCCESS)
}

/// A list of names in the home, one in each line.
fn read_list(home: &Home, part: &str) -> Result<String, Error> {
    let path = home.part(part)?;
    Ok(std::fs::read_to_string(&path).map_err(|source| SymbolsError::Read { path, source })?)
}

/// What is linked to the program on each set.
pub(crate) fn natives(home: &Home) -> Result<BTreeMap<Set, Vec<PathBuf>>, Error> {
    let mut natives = BTreeMap::new();
    for set in Set::ALL {
        let own = Path::new(set.name());
        let parts = [
            home.part(Path::new("runtime").join(own).join("runtime.o"))?,
            home.part(own.join("libmath.a"))?,
            home.part(own.join("libgcc.a"))?,
        ];
        natives.insert(set, parts.to_vec());
    }
    Ok(natives)
}

/// Makes the executables of a program that can move, and gives the identity of this build.
fn movable(home: &Home, bitcode: Vec<PathBuf>, output: &Path, job: &Job) -> Result<index::Identity, Error> {
    let natives = natives(home)?;
    let amount = match std::env::var(MEASURE) {
        Ok(name) => Amount::named(&name).ok_or(LinkError::Measure(name))?,
        Err(_) => Amount::Everything,
    };
    let toolchain = Toolchain::debian(home.part(PLUGIN)?);
    let module = job.save_module.then(|| beside(output, MODULE));
    let options = Options { keep: None, probe: false, amount, toolchain, module };
    let made = godwit_isa_link::link(&Inputs { bitcode, natives, output: output.to_owned(), options })
        .map_err(LinkError::from)?;
    let binding = made.binding;
    if job.report {
        let identity = index::hex(&binding.identity());
        let executables: Vec<PathBuf> = made.executables.into_values().collect();
        print!("{}", report::report(output, &identity, &made.figures, &executables)?);
    }
    Ok(index::Identity::Movable { binding, module: job.save_module.then_some(MODULE) })
}

/// `prog.SET`
fn beside(output: &Path, set: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".");
    name.push(set);
    name.into()
}

/// Puts a finished executable where it is wanted, also when one of that name runs.
fn put(made: &Path, output: &Path) -> Result<(), LinkError> {
    let failed = |source| LinkError::Write { path: output.to_owned(), source };
    match std::fs::remove_file(output) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    std::fs::copy(made, output).map_err(failed)?;
    Ok(())
}

/// The files of the command line in their order, and which of them are taken whole.
fn files(home: &Home, job: &Job) -> Result<(Vec<PathBuf>, HashSet<usize>), Error> {
    let mut places = job.library_paths.clone();
    places.push(home.part("sysroot/lib")?);
    let mut paths: Vec<PathBuf> = Vec::new();
    let mut whole = HashSet::new();
    let mut take_whole = false;
    for input in &job.inputs {
        let path = match input {
            Input::WholeArchive(state) => {
                take_whole = *state;
                continue;
            }
            Input::File(path) => path.clone(),
            Input::Library(name) => match library(&name.to_string_lossy(), &places)? {
                Some(path) => path,
                None => continue,
            },
            Input::Source { .. } => continue,
        };
        // An archive that is named twice is one: order does not matter.
        if paths.contains(&path) && path.extension().is_some_and(|extension| extension == "a") {
            continue;
        }
        if take_whole {
            whole.insert(paths.len());
        }
        paths.push(path);
    }
    Ok((paths, whole))
}

/// The file of `-lNAME`; nothing for those that every program has.
fn library(name: &str, places: &[PathBuf]) -> Result<Option<PathBuf>, LinkError> {
    if matches!(name, "c" | "gcc" | "gcc_s" | "gcc_eh" | "atomic") {
        return Ok(None);
    }
    let file = match name.strip_prefix(':') {
        Some(file) => file.to_owned(),
        None => format!("lib{name}.a"),
    };
    match places.iter().map(|place| place.join(&file)).find(|path| path.exists()) {
        Some(path) => Ok(Some(path)),
        None => Err(LinkError::Library {
            name: name.to_owned(),
            places: places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", "),
        }),
    }
}

/// Files of the chosen parts: the objects as they are, and the members of archives under `scratch`.
fn extract(units: &[Unit], chosen: &[resolve::Chosen], scratch: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut open: HashMap<usize, File> = HashMap::new();
    let mut bitcode = Vec::new();
    for (unit, part) in chosen {
        let source = &units[*unit];
        let Some(member) = &source.parts[*part].member else {
            bitcode.push(source.path.clone());
            continue;
        };
        let read = |error| SymbolsError::Read { path: source.path.clone(), source: error };
        let file = match open.entry(*unit) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(File::open(&source.path).map_err(read)?)
            }
        };
        let mut bytes = vec![0; member.range.len()];
        file.seek(SeekFrom::Start(member.range.start as u64)).map_err(read)?;
        file.read_exact(&mut bytes).map_err(read)?;
        let path = scratch.join(format!("{unit}.{part}.bc"));
        std::fs::write(&path, bytes).map_err(|source| LinkError::Write { path: path.clone(), source })?;
        bitcode.push(path);
    }
    Ok(bitcode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_configure_and_cmake_look_at_is_a_probe_and_nothing_else() {
        let of = |input: &str| {
            let mut job = Job::default();
            job.inputs.push(Input::File(input.into()));
            job
        };
        for name in ["conftest", "./conftest", "/tmp/x/conftest.exe", "cmTC_1a2b3", "/dev/null"] {
            assert!(is_probe(Path::new(name), &of("main.o")), "{name}");
        }
        for name in ["a.out", "lua", "conftester", "src/gzip", "conftest_dir/prog"] {
            assert!(!is_probe(Path::new(name), &of("main.o")), "{name}");
        }
        assert!(is_probe(Path::new("a.out"), &of("x/conftest.o")));
    }
}
