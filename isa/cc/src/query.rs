//! Questions that builds ask a compiler instead of giving it work.

use crate::home::{CLANG, Home};
use crate::{Error, Tool, tools};
use std::ffi::OsString;
use std::process::{Command, ExitCode};

/// The machine that programs are compiled for, in the form of a target's name. The front end is
/// arm64's; that the code is for other sets as well no build system has a word for.
pub const MACHINE: &str = "aarch64-linux-musl";

/// Answers the command line if it is a question.
///
/// # Errors
/// When clang, which knows most answers, cannot be run.
pub fn answer(tool: Tool, arguments: &[OsString]) -> Result<Option<ExitCode>, Error> {
    for argument in arguments {
        let text = argument.to_string_lossy();
        match text.as_ref() {
            "--version" => {
                println!("{}", version(tool)?);
                println!("Target: {MACHINE} (neutral: x86_64 and aarch64)");
            }
            "-dumpmachine" | "-print-target-triple" => println!("{MACHINE}"),
            "-print-multiarch" | "-print-multi-os-directory" | "-print-multi-directory" => println!("."),
            "-dumpversion" | "-dumpfullversion" | "-print-resource-dir" => {
                return Ok(Some(tools::pass_on(CLANG, std::slice::from_ref(argument))?));
            }
            "-print-sysroot" => println!("{}", Home::find()?.part("sysroot")?.display()),
            "-print-search-dirs" => {
                println!("libraries: ={}", Home::find()?.part("sysroot/lib")?.display());
            }
            "--help" => println!("{HELP}"),
            // As compilers do: with nothing to compile, -v tells the version on standard error.
            "-v" if arguments.len() == 1 => {
                eprintln!("{}", version(tool)?);
                eprintln!("Target: {MACHINE}");
            }
            other => {
                if let Some(name) = other.strip_prefix("-print-prog-name=") {
                    println!("{}", program(name));
                } else if let Some(name) = other.strip_prefix("-print-file-name=") {
                    let path = Home::find()?.part("sysroot/lib").map(|lib| lib.join(name));
                    match path {
                        Ok(path) if path.exists() => println!("{}", path.display()),
                        // A name that is not found is given back as it is.
                        _ => println!("{name}"),
                    }
                } else {
                    continue;
                }
            }
        }
        return Ok(Some(ExitCode::SUCCESS));
    }
    Ok(None)
}

const HELP: &str = "\
godwit-cc compiles C and C++ to programs that can change instruction set while they run; godwit-cxx links C++.
Usage: godwit-cc [options] file...      as cc; see isa/cc/README.md for what is refused
       godwit-cxx [options] file...     as c++
       godwit-cc --from-module PROG.module --set SET -o FILE      the executable of one set, from what --save-module kept
In a build: ./configure CC=godwit-cc CXX=godwit-cxx AR=godwit-ar RANLIB=godwit-ranlib LD=godwit-ld NM=llvm-nm-19 --disable-shared";

/// The program of the tool chain that does the work of `name`.
fn program(name: &str) -> String {
    match name {
        "ld" | "ar" | "ranlib" => {
            let beside = std::env::current_exe().ok().map(|own| own.with_file_name(format!("godwit-{name}")));
            match beside {
                Some(path) if path.exists() => path.display().to_string(),
                _ => format!("godwit-{name}"),
            }
        }
        "nm" | "strip" | "objcopy" | "objdump" | "readelf" => format!("llvm-{name}-19"),
        other => other.to_owned(),
    }
}

/// One line with our version and clang's.
fn version(tool: Tool) -> Result<String, Error> {
    let text = tools::output(Command::new(CLANG).arg("--version"), "asking for its version")?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let clang = text.lines().next().unwrap_or_default();
    Ok(format!("{} {} ({clang})", tool.name(), env!("CARGO_PKG_VERSION")))
}
