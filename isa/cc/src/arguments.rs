//! The command lines of a compiler and of a linker, taken apart.
//!
//! What a build passes because every compiler knows it, and what has no meaning for neutral code
//! (position independence, the processor's model, stack protection), is accepted and left out. What
//! would make a program that is not neutral, or not the one that was asked for, is refused.

mod linker;

pub use linker::parse_linker;

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// A command line that cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum ArgumentError {
    /// An option without its value.
    #[error("option {0} needs a value")]
    Value(String),
    /// A response file.
    #[error("cannot read the arguments in {}: {source}", path.display())]
    Response {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// An option that neutral programs cannot have.
    #[error("option {option}: {reason}")]
    Refused {
        /// The option as it was given.
        option: String,
        /// Why not.
        reason: &'static str,
    },
    /// A file of a kind that cannot be compiled or linked.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// Nothing to do.
    #[error("no input files")]
    NoInput,
    /// One output for many.
    #[error("-o cannot be used with -c, -S or -E and several sources")]
    OneOutput,
}

/// How far the sources go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// `-E`, `-M`, `-MM`, `-fsyntax-only`: clang's own, there is no object.
    Front,
    /// `-S`: readable LLVM assembly.
    Assembly,
    /// `-c`: an object of bitcode.
    Object,
    /// To a program.
    Link,
}

/// Something to link, in the order of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A source in C or C++, with the language that `-x` gave.
    Source {
        /// The file; `-` is standard input.
        path: PathBuf,
        /// What clang's `-x` takes.
        language: Option<String>,
    },
    /// An object or an archive.
    File(PathBuf),
    /// `-lNAME`
    Library(OsString),
    /// The state of `--whole-archive` from here on.
    WholeArchive(bool),
}

/// A command line.
#[derive(Debug, Clone, Default)]
pub struct Job {
    /// How far to go.
    pub stage: Option<Stage>,
    /// `-o`
    pub output: Option<PathBuf>,
    /// What to compile and to link.
    pub inputs: Vec<Input>,
    /// What is passed to the front end.
    pub front: Vec<OsString>,
    /// `-L`
    pub library_paths: Vec<PathBuf>,
    /// `-u`: names that are wanted though nothing refers to them.
    pub wanted: Vec<String>,
    /// `-g` in any form but `-g0`.
    pub debug: bool,
    /// `--plain`: executables that never move.
    pub plain: bool,
    /// `--report`: tell what the link made.
    pub report: bool,
    /// `--save-module`: keep the neutral module beside the executables.
    pub save_module: bool,
    /// The sources of objects that were compiled on the way to a program, by the objects' names.
    pub compiled: HashMap<PathBuf, PathBuf>,
    /// The program has the C++ library: it is linked by `godwit-cxx`, or asks for it by name.
    pub cxx: bool,
    /// `-fno-exceptions`, which means something in C++ only.
    pub no_exceptions: bool,
    /// `-r`: join objects into one.
    pub relocatable: bool,
    /// `-v`
    pub verbose: bool,
    /// `-###`
    pub dry_run: bool,
    /// A linker's option whose value comes next.
    expecting: Option<String>,
}

const SHARED: &str = "a neutral program is one static executable for each instruction set; it has no shared \
                      libraries: configure with --disable-shared, or link the objects into the program";
const EXTENSION: &str = "an instruction-set extension exists on one set only";
const SANITIZER: &str = "there is no neutral form of a sanitizer's or profiler's runtime";
const ASSEMBLY: &str = "assembly is of one instruction set; a program that moves must be C or C++ throughout \
                        (most packages have a configure option such as --disable-asm)";
const LOADABLE: &str =
    "a shared object is code of one instruction set; link against a static library made by godwit-cc";

/// What sources in C++ are called.
const CXX_EXTENSIONS: &[&str] =
    &["cc", "cp", "cxx", "cpp", "c++", "C", "CPP", "ii", "hh", "hpp", "hxx", "h++", "H"];

/// Names under which builds ask for the C++ library. It is one here.
const CXX_LIBRARIES: &[&str] =
    &["stdc++", "c++", "c++abi", "supc++", "c++experimental", "stdc++fs", "unwind"];

/// Options whose value is the next argument; for the front end as they are.
const FRONT_WITH_VALUE: &[&str] = &[
    "-I",
    "-D",
    "-U",
    "-include",
    "-imacros",
    "-isystem",
    "-iquote",
    "-idirafter",
    "-iprefix",
    "-iwithprefix",
    "-MF",
    "-MT",
    "-MQ",
    "-Xclang",
    "-Xpreprocessor",
    "--param",
    "-isysroot",
    "-iwithprefixbefore",
    "-mllvm",
];

/// Replaces each `@file` by the arguments in it.
///
/// # Errors
/// When a file that is there cannot be read.
pub fn expand(arguments: Vec<OsString>) -> Result<Vec<OsString>, ArgumentError> {
    let mut queue: VecDeque<OsString> = arguments.into();
    let mut expanded = Vec::new();
    // A file may name itself; no honest command line goes this deep.
    let mut files = 0;
    while let Some(argument) = queue.pop_front() {
        let path = argument.to_str().and_then(|text| text.strip_prefix('@')).map(PathBuf::from);
        match path {
            Some(path) if path.is_file() && files < 1000 => {
                files += 1;
                let text = std::fs::read_to_string(&path)
                    .map_err(|source| ArgumentError::Response { path, source })?;
                for word in words(&text).into_iter().rev() {
                    queue.push_front(word.into());
                }
            }
            _ => expanded.push(argument),
        }
    }
    Ok(expanded)
}

/// Words as GCC reads them from a response file: white space parts them, quotes and backslashes protect.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (_, '\\') => word.get_or_insert_default().extend(characters.next()),
            (Some(open), close) if open == close => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, space) if space.is_whitespace() => words.extend(word.take()),
            (_, other) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

/// Reads a compiler's command line.
///
/// # Errors
/// When something on it is refused.
pub fn parse_compiler(arguments: &[OsString]) -> Result<Job, ArgumentError> {
    let mut job = Job::default();
    let mut language: Option<String> = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let text = argument.to_string_lossy().into_owned();
        let mut value = || rest.next().cloned().ok_or_else(|| ArgumentError::Value(text.clone()));
        match text.as_str() {
            "-c" => job.advance(Stage::Object),
            "-S" => job.advance(Stage::Assembly),
            "-E" | "-M" | "-MM" | "-fsyntax-only" => {
                job.advance(Stage::Front);
                job.front.push(argument.clone());
            }
            "-o" => job.output = Some(value()?.into()),
            "-x" => language = Some(value()?.to_string_lossy().into_owned()).filter(|name| name != "none"),
            "-L" => job.library_paths.push(value()?.into()),
            "-l" => job.inputs.push(Input::Library(value()?)),
            "-u" => job.wanted.push(value()?.to_string_lossy().into_owned()),
            "-r" => job.relocatable = true,
            "-v" => job.verbose = true,
            "-###" => job.dry_run = true,
            "-Xlinker" => job.linker_option(&value()?)?,
            "-pthread" | "-pthreads" => job.front.push("-pthread".into()),
            "-" => job.inputs.push(Input::Source { path: "-".into(), language: language.clone() }),
            option if FRONT_WITH_VALUE.contains(&option) => {
                job.front.push(argument.clone());
                job.front.push(value()?);
            }
            // Values of which nothing is left to say.
            "-target" | "-z" | "-A" | "-T" | "-e" | "-Xassembler" | "-G" | "-aux-info" | "-B" => {
                let given = value()?;
                refuse_with_value(&text, &given)?;
            }
            option if option.starts_with('-') => {
                if let Some(list) = option.strip_prefix("-Wl,") {
                    for part in list.split(',') {
                        job.linker_option(OsStr::new(part))?;
                    }
                } else if let Some(path) = option.strip_prefix("-L") {
                    job.library_paths.push(path.into());
                } else if let Some(name) = option.strip_prefix("-l") {
                    job.inputs.push(Input::Library(name.into()));
                } else if let Some(path) = option.strip_prefix("-o") {
                    job.output = Some(path.into());
                } else if let Some(name) = option.strip_prefix("-x") {
                    language = Some(name.to_owned()).filter(|name| name != "none");
                } else {
                    job.compiler_option(argument, option)?;
                }
            }
            _ => job.inputs.push(input(argument, language.as_deref())?),
        }
    }
    job.finish()?;
    if job.inputs.iter().all(|input| matches!(input, Input::Library(_) | Input::WholeArchive(_))) {
        return Err(ArgumentError::NoInput);
    }
    Ok(job)
}

/// Is a source in C++, when no language is given?
#[must_use]
pub fn is_cxx(source: &Path) -> bool {
    source.extension().and_then(OsStr::to_str).is_some_and(|extension| CXX_EXTENSIONS.contains(&extension))
}

/// What a file is, by its name; `language` is that of `-x`.
fn input(argument: &OsStr, language: Option<&str>) -> Result<Input, ArgumentError> {
    let path = PathBuf::from(argument);
    let refuse = |reason| Err(ArgumentError::File { path: path.clone(), reason });
    match language {
        Some("c" | "cpp-output" | "c-header" | "ir" | "c++" | "c++-cpp-output" | "c++-header") => {
            return Ok(Input::Source { path, language: language.map(str::to_owned) });
        }
        Some(name) if name.contains("assembler") => return refuse(ASSEMBLY),
        Some(_) => return refuse("only C and C++ are compiled"),
        None => {}
    }
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    match extension {
        "c" | "i" | "h" | "ll" => Ok(Input::Source { path, language: None }),
        extension if CXX_EXTENSIONS.contains(&extension) => Ok(Input::Source { path, language: None }),
        "s" | "S" | "sx" | "asm" => refuse(ASSEMBLY),
        "so" => refuse(LOADABLE),
        // What it really is shows when it is read: builds give objects any name.
        _ => Ok(Input::File(path)),
    }
}

/// Options of a compiler whose value is an argument of its own, and which only some values make right.
fn refuse_with_value(option: &str, value: &OsStr) -> Result<(), ArgumentError> {
    let whole = || format!("{option} {}", value.to_string_lossy());
    match option {
        "-T" => Err(ArgumentError::Refused {
            option: whole(),
            reason: "the layout of a neutral program is godwit's",
        }),
        "-e" => Err(ArgumentError::Refused {
            option: whole(),
            reason: "a neutral program starts in godwit's runtime",
        }),
        "-target" => {
            Err(ArgumentError::Refused { option: whole(), reason: "a neutral program is for all sets" })
        }
        _ => Ok(()),
    }
}

impl Job {
    /// The earliest stage that any option asks for is where it ends.
    fn advance(&mut self, stage: Stage) {
        let order = |stage: Stage| match stage {
            Stage::Front => 0,
            Stage::Assembly => 1,
            Stage::Object => 2,
            Stage::Link => 3,
        };
        if self.stage.is_none_or(|known| order(stage) < order(known)) {
            self.stage = Some(stage);
        }
    }

    /// How far to go.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage.unwrap_or(Stage::Link)
    }

    /// The sources among the inputs.
    pub fn sources(&self) -> impl Iterator<Item = &Path> {
        self.inputs.iter().filter_map(|input| match input {
            Input::Source { path, .. } => Some(path.as_path()),
            _ => None,
        })
    }

    /// An option of the compiler that is one argument.
    fn compiler_option(&mut self, argument: &OsStr, option: &str) -> Result<(), ArgumentError> {
        let refuse = |reason| Err(ArgumentError::Refused { option: option.to_owned(), reason });
        let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| option.starts_with(prefix));
        if matches!(option, "-shared" | "-dynamiclib") {
            return refuse(SHARED);
        }
        if option == "--plain" {
            self.plain = true;
            return Ok(());
        }
        if option == "--save-module" {
            self.save_module = true;
            return Ok(());
        }
        if option == "--report" {
            self.report = true;
            return Ok(());
        }
        if option.starts_with("--target=") {
            return refuse("a neutral program is for all sets");
        }
        if matches!(option, "-m32" | "-mx32" | "-m16" | "-mbig-endian") {
            return refuse("a neutral program is 64 bits wide and little-endian");
        }
        if starts(&[
            "-msse", "-mavx", "-mssse", "-maes", "-mpclmul", "-mfma", "-mbmi", "-mpopcnt", "-mneon",
            "-mlzcnt", "-msha",
        ]) {
            return refuse(EXTENSION);
        }
        if starts(&["-fsanitize", "-fprofile", "-fcoverage", "-fxray", "-fcs-profile"])
            || matches!(
                option,
                "-pg" | "--coverage" | "-coverage" | "-ftest-coverage" | "-finstrument-functions"
            )
        {
            return refuse(SANITIZER);
        }
        // Vectors only: it needs no runtime.
        if option != "-fopenmp-simd" && starts(&["-fopenmp", "-fopenacc"]) {
            return refuse("there is no neutral OpenMP runtime yet");
        }
        if option == "-fsplit-stack" || option == "-fblocks" {
            return refuse("neutral programs have no such thing");
        }
        if matches!(option, "-nostdlib" | "-nodefaultlibs" | "-nostartfiles" | "-nolibc")
            && self.stage() == Stage::Link
        {
            return refuse("a neutral program has godwit's runtime and C library in it");
        }
        if option.starts_with("-stdlib=") && option != "-stdlib=libc++" {
            return refuse("the C++ library of neutral programs is libc++");
        }
        if matches!(option, "-fexceptions" | "-fno-exceptions") {
            self.no_exceptions = option == "-fno-exceptions";
            return Ok(());
        }
        let meaningless = starts(&[
            "-m",
            "-flto",
            "-fno-lto",
            "-fuse-ld",
            "-fstack-protector",
            "-fno-stack-protector",
            "-fcf-protection",
            "-fstack-clash",
            "-fno-stack-clash",
            "-fno-semantic",
            "-fsemantic",
            "-ffat-lto",
            "-fno-fat-lto",
            "-fuse-linker-plugin",
            "-fno-use-linker-plugin",
            "-Wa,",
            "-specs=",
            "-fplt",
            "-fno-plt",
            "-ffp-contract",
            "-static-lib",
            "-static-pie",
            "-fasynchronous-unwind",
            "-fno-asynchronous-unwind",
            "-funwind-tables",
            "-fno-unwind-tables",
            "-fvisibility",
            "-fpic",
            "-fPIC",
            "-fpie",
            "-fPIE",
            "-fno-pic",
            "-fno-PIC",
            "-fno-pie",
            "-fno-PIE",
            "-femulated-tls",
            "-ftls-model",
            "-stdlib=",
        ]) || matches!(
            option,
            "-pie"
                | "-no-pie"
                | "-static"
                | "-rdynamic"
                | "-s"
                | "-pipe"
                | "-nopie"
                | "-nostdlib++"
                | "-nostdlib"
                | "-nodefaultlibs"
                | "-nostartfiles"
                | "-nolibc"
                | "-export-dynamic"
        );
        if meaningless {
            return Ok(());
        }
        if let Some(level) = option.strip_prefix("-g") {
            self.debug = level != "0";
        }
        self.front.push(argument.to_owned());
        Ok(())
    }

    /// What can only be seen at the end.
    fn finish(&mut self) -> Result<(), ArgumentError> {
        let asked = self.inputs.len();
        self.inputs.retain(
            |input| !matches!(input, Input::Library(name) if CXX_LIBRARIES.iter().any(|known| name == known)),
        );
        self.cxx |= self.inputs.len() != asked;
        if let Some(option) = self.expecting.take() {
            return Err(ArgumentError::Value(format!("-{option}")));
        }
        if self.plain && self.save_module {
            return Err(ArgumentError::Refused {
                option: "--save-module".into(),
                reason: "a plain program (--plain) never moves and has no neutral module",
            });
        }
        if self.stage() != Stage::Link && self.output.is_some() && self.sources().count() > 1 {
            return Err(ArgumentError::OneOutput);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Job, String> {
        let arguments: Vec<OsString> = line.iter().map(OsString::from).collect();
        parse_compiler(&arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn words_of_a_response_file_are_parted_as_gcc_does_it() {
        assert_eq!(words(" -I a\\ b\n'c d'\t\"e'f\" g\\\\h '' "), ["-I", "a b", "c d", "e'f", "g\\h", ""]);
        assert!(words(" \n\t").is_empty());
    }

    #[test]
    fn a_value_may_be_in_the_option_or_after_it_also_for_the_linker() -> Result<(), String> {
        let joined =
            parse(&["-ofile", "-Ldir", "-lz", "-Iinc", "-Wl,-rpath,/x,-u,name", "-Wl,-soname=y", "a.o"]);
        assert!(joined.is_err_and(|error| error.contains("-soname") || error.contains("-h")));
        let joined = parse(&["-ofile", "-Ldir", "-lz", "-Iinc", "-Wl,-rpath,/x,-u,name", "a.o"])?;
        let apart = parse(&[
            "-o",
            "file",
            "-L",
            "dir",
            "-l",
            "z",
            "-Iinc",
            "-Wl,-rpath",
            "-Wl,/x",
            "-Xlinker",
            "-u",
            "-Xlinker",
            "name",
            "a.o",
        ])?;
        for job in [&joined, &apart] {
            assert_eq!(job.output, Some("file".into()));
            assert_eq!(job.library_paths, [PathBuf::from("dir")]);
            assert_eq!(job.inputs, [Input::Library("z".into()), Input::File("a.o".into())]);
            assert_eq!(job.wanted, ["name"]);
            assert_eq!(job.stage(), Stage::Link);
        }
        Ok(())
    }

    #[test]
    fn the_earliest_stage_that_is_asked_for_ends_the_work() -> Result<(), String> {
        for (line, stage) in [
            (vec!["a.c"], Stage::Link),
            (vec!["-c", "a.c"], Stage::Object),
            (vec!["-c", "-S", "a.c"], Stage::Assembly),
            (vec!["-E", "-c", "a.c"], Stage::Front),
        ] {
            assert_eq!(parse(&line)?.stage(), stage, "{line:?}");
        }
        assert!(
            parse(&["-c", "a.c", "b.c", "-o", "x.o"]).is_err_and(|error| error.contains("several sources"))
        );
        Ok(())
    }

    #[test]
    fn what_has_no_meaning_is_left_out_and_the_rest_goes_to_the_front_end() -> Result<(), String> {
        let job = parse(&[
            "-fPIC",
            "-march=native",
            "-O2",
            "-std=c99",
            "-static",
            "-g",
            "-MF",
            "x.d",
            "-pthread",
            "-c",
            "a.c",
        ])?;
        assert_eq!(job.front, ["-O2", "-std=c99", "-g", "-MF", "x.d", "-pthread"]);
        assert!(job.debug && !parse(&["-g0", "a.c"])?.debug);
        Ok(())
    }

    #[test]
    fn a_missing_value_and_an_unknown_linker_option_are_errors() {
        for line in [
            &["a.c", "-o"][..],
            &["a.c", "-Wl,-rpath"],
            &["a.c", "-Wl,--no-such-option"],
            &["a.c", "--target=x"],
            &["a.c", "--plain", "--save-module"],
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
    }
}
