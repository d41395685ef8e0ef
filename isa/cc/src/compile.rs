//! Compiling: clang with the arm64 front end, to bitcode, with everything that belongs to one
//! instruction set taken away.

use crate::arguments::{self, Input, Job, Stage};
use crate::home::{CLANG, CXX_HEADERS, Home, PLUGIN};
use crate::{Error, link, tools};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What every neutral file is compiled with (isa/ABI.md, section 1); isa/libc/build has the same list.
/// It comes after the user's own options, which cannot undo it.
const NEUTRAL: &[&str] = &[
    "--target=aarch64-linux-musl",
    "-fno-pic",
    "-ffp-contract=off",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fomit-frame-pointer",
    "-mno-outline-atomics",
    "-nostdlibinc",
];

/// By these a source sees which processor it is for, and takes assembly or intrinsics. The fused
/// multiply-add is an instruction on some sets and a slow function on others.
const UNDEFINED: &[&str] = &[
    "__aarch64__",
    "__AARCH64EL__",
    "__AARCH64_CMODEL_SMALL__",
    "__ARM_64BIT_STATE",
    "__ARM_ACLE",
    "__ARM_ALIGN_MAX_STACK_PWR",
    "__ARM_ARCH",
    "__ARM_ARCH_8A",
    "__ARM_ARCH_ISA_A64",
    "__ARM_ARCH_PROFILE",
    "__ARM_FEATURE_CLZ",
    "__ARM_FEATURE_DIRECTED_ROUNDING",
    "__ARM_FEATURE_DIV",
    "__ARM_FEATURE_FMA",
    "__ARM_FEATURE_IDIV",
    "__ARM_FEATURE_LDREX",
    "__ARM_FEATURE_NUMERIC_MAXMIN",
    "__ARM_FEATURE_UNALIGNED",
    "__ARM_FP",
    "__ARM_FP16_ARGS",
    "__ARM_FP16_FORMAT_IEEE",
    "__ARM_NEON",
    "__ARM_NEON_FP",
    "__ARM_PCS_AAPCS64",
    "__ARM_SIZEOF_MINIMAL_ENUM",
    "__ARM_SIZEOF_WCHAR_T",
    "__ARM_STATE_ZA",
    "__ARM_STATE_ZT0",
    "__FP_FAST_FMA",
    "__FP_FAST_FMAF",
];

/// The arguments of clang before the file and the output.
fn front_arguments(home: &Home, job: &Job) -> Result<Vec<OsString>, Error> {
    let mut list: Vec<OsString> = vec!["-Wno-unused-command-line-argument".into(), "-fno-common".into()];
    list.extend(job.front.iter().cloned());
    // Refusals name a file and a line, also of what was compiled without -g.
    if !job.debug {
        list.push("-gline-tables-only".into());
    }
    list.extend(NEUTRAL.iter().map(OsString::from));
    list.extend(UNDEFINED.iter().map(|name| OsString::from(format!("-U{name}"))));
    list.push("-D__godwit__=1".into());
    let mut plugin = OsString::from("-fpass-plugin=");
    plugin.push(home.part(PLUGIN)?);
    list.push(plugin);
    Ok(list)
}

/// Where headers are. Those of C++ come first, since they include C's of the same names.
fn headers(home: &Home, job: &Job, is_cxx: bool) -> Result<Vec<OsString>, Error> {
    let mut list: Vec<OsString> = Vec::new();
    if is_cxx {
        list.extend(["-nostdinc++".into(), "-isystem".into(), home.part(CXX_HEADERS)?.into()]);
        if job.no_exceptions {
            list.push("-fno-exceptions".into());
        }
    }
    list.extend(["-isystem".into(), home.part("sysroot/include")?.into()]);
    Ok(list)
}

/// The language of a source as clang's `-x` has it, where its name does not tell; and whether that is C++. To a compiler of
/// C++ all sources are.
fn language<'job>(given: Option<&'job str>, path: &Path, by_cxx: bool) -> (Option<&'job str>, bool) {
    if let Some(name) = given {
        return (Some(name), name.starts_with("c++"));
    }
    let extension = path.extension().and_then(OsStr::to_str);
    match extension {
        _ if arguments::is_cxx(path) => (None, true),
        Some("h") if by_cxx => (Some("c++-header"), true),
        Some("i") if by_cxx => (Some("c++-cpp-output"), true),
        Some("ll") => (None, false),
        _ if by_cxx => (Some("c++"), true),
        _ => (None, false),
    }
}

/// Does what a compiler's command line says; `by_cxx` where the compiler is one of C++.
///
/// # Errors
/// When that cannot be done; what clang complains about is no error but the exit code.
pub fn as_compiler(command_line: &[OsString], by_cxx: bool) -> Result<ExitCode, Error> {
    let home = Home::find()?;
    let mut job = arguments::parse_compiler(command_line)?;
    job.cxx |= by_cxx;
    let front = front_arguments(&home, &job)?;
    let stage = job.stage();
    let emit: &[&str] = match stage {
        Stage::Front => &[],
        Stage::Assembly => &["-S", "-emit-llvm"],
        Stage::Object | Stage::Link => &["-c", "-emit-llvm"],
    };
    // Objects of a command that also links are gone with it.
    let scratch = tempfile::tempdir()
        .map_err(|source| arguments::ArgumentError::Response { path: std::env::temp_dir(), source })?;
    let mut objects = Vec::new();
    for (number, input) in job.inputs.iter().enumerate() {
        let Input::Source { path, language: given } = input else { continue };
        let (language, is_cxx) = language(given.as_deref(), path, by_cxx);
        let mut command = Command::new(CLANG);
        command.args(&front).args(headers(&home, &job, is_cxx)?).args(emit);
        if let Some(language) = language {
            command.args(["-x", language]);
        }
        command.arg(path);
        match stage {
            Stage::Front => {
                if let Some(output) = &job.output {
                    command.arg("-o").arg(output);
                }
            }
            Stage::Assembly => {
                command.arg("-o").arg(output_of(&job, path, "s"));
            }
            Stage::Object => {
                command.arg("-o").arg(output_of(&job, path, "o"));
            }
            Stage::Link => {
                let object = scratch.path().join(format!("{number}.{}.o", stem(path)));
                command.arg("-o").arg(&object);
                dependency_names(&job, path, &mut command);
                objects.push((number, object));
            }
        }
        if job.verbose {
            command.arg("-v");
        }
        if job.dry_run {
            command.arg("-###");
        }
        let status = command
            .status()
            .map_err(|source| tools::ToolError::Start { program: CLANG.to_owned(), source })?;
        if !status.success() {
            return Ok(tools::exit_code(status));
        }
    }
    if stage != Stage::Link || job.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    for (number, object) in objects {
        if let Input::Source { path, .. } = &job.inputs[number] {
            job.compiled.insert(object.clone(), path.clone());
        }
        job.inputs[number] = Input::File(object);
    }
    link::link(&home, &job)
}

/// `-o`, or the source's name with another extension in the working directory.
fn output_of(job: &Job, source: &Path, extension: &str) -> PathBuf {
    job.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.{extension}", stem(source))))
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "input".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

/// A command that also links compiles into a scratch directory; dependencies are to be named after
/// what the user sees.
fn dependency_names(job: &Job, source: &Path, command: &mut Command) {
    let given = |option: &str| job.front.iter().any(|argument| argument == option);
    if !given("-MD") && !given("-MMD") {
        return;
    }
    let output = job.output.clone().unwrap_or_else(|| "a.out".into());
    if !given("-MF") {
        let name = format!("{}-{}.d", output.file_name().unwrap_or_default().to_string_lossy(), stem(source));
        command.arg("-MF").arg(output.with_file_name(name));
    }
    if !given("-MT") && !given("-MQ") {
        command.arg("-MQ").arg(&output);
    }
}
