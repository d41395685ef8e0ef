//! The command line of a linker, and what a compiler's has for one (`-Wl,…`, `-Xlinker`).

use super::{ArgumentError, Input, Job, SHARED, Stage, input};
use std::ffi::{OsStr, OsString};
use std::path::Path;

const UNKNOWN: &str = "the linker of neutral programs does not know this option";

/// Reads a linker's command line.
///
/// # Errors
/// When something on it is refused.
pub fn parse_linker(arguments: &[OsString]) -> Result<Job, ArgumentError> {
    let mut job = Job { stage: Some(Stage::Link), ..Job::default() };
    for argument in arguments {
        job.linker_option(argument)?;
    }
    job.finish()?;
    if job.inputs.is_empty() {
        return Err(ArgumentError::NoInput);
    }
    Ok(job)
}

impl Job {
    /// One argument of a linker's command line.
    pub(super) fn linker_option(&mut self, argument: &OsStr) -> Result<(), ArgumentError> {
        let text = argument.to_string_lossy().into_owned();
        if let Some(option) = self.expecting.take() {
            return self.linker_value(&option, argument);
        }
        let refuse = |reason| Err(ArgumentError::Refused { option: text.clone(), reason });
        let Some(name) = text.strip_prefix('-') else {
            // The start files of a C library, where a build links by itself: the runtime has its own.
            if !starts_like_crt(argument) {
                self.inputs.push(input(argument, None)?);
            }
            return Ok(());
        };
        let long = name.strip_prefix('-').unwrap_or(name);
        let (key, value) = long.split_once('=').map_or((long, None), |(key, value)| (key, Some(value)));
        match key {
            "shared" | "Bshareable" => return refuse(SHARED),
            "whole-archive" => self.inputs.push(Input::WholeArchive(true)),
            "no-whole-archive" => self.inputs.push(Input::WholeArchive(false)),
            "r" | "relocatable" => self.relocatable = true,
            "wrap" | "defsym" | "script" | "T" | "version-script" | "entry" | "e" | "dynamic-list"
            | "section-start" | "Ttext" | "Tdata" | "Tbss" | "image-base" => {
                return refuse("the layout and the names of a neutral program are godwit's");
            }
            // Without a meaning for a static executable whose sections godwit lays out.
            "as-needed"
            | "no-as-needed"
            | "gc-sections"
            | "no-gc-sections"
            | "start-group"
            | "end-group"
            | "build-id"
            | "hash-style"
            | "eh-frame-hdr"
            | "no-eh-frame-hdr"
            | "export-dynamic"
            | "E"
            | "Bstatic"
            | "Bdynamic"
            | "Bsymbolic"
            | "Bsymbolic-functions"
            | "static"
            | "no-undefined"
            | "no-allow-shlib-undefined"
            | "allow-shlib-undefined"
            | "sort-common"
            | "strip-all"
            | "strip-debug"
            | "s"
            | "S"
            | "x"
            | "X"
            | "pie"
            | "no-pie"
            | "relax"
            | "no-relax"
            | "demangle"
            | "no-demangle"
            | "warn-common"
            | "fatal-warnings"
            | "no-fatal-warnings"
            | "print-gc-sections"
            | "icf"
            | "threads"
            | "no-threads"
            | "enable-new-dtags"
            | "disable-new-dtags"
            | "nostdlib"
            | "compress-debug-sections"
            | "dn"
            | "dy"
            | "non_shared"
            | "O"
            | "O0"
            | "O1"
            | "O2"
            | "O3"
            | "stats"
            | "no-keep-memory"
            | "reduce-memory-overheads"
            | "pop-state"
            | "push-state"
            | "no-copy-dt-needed-entries"
            | "copy-dt-needed-entries"
            | "noexecstack" => {}
            // The same, with a value that follows where none is joined.
            "rpath" | "rpath-link" | "soname" | "h" | "z" | "m" | "dynamic-linker" | "I" | "Map"
            | "sort-section" | "plugin" | "plugin-opt" | "lto" | "a" | "init" | "fini" => {
                if matches!(key, "init" | "fini") {
                    return refuse("start and end of a neutral program are constructors and destructors");
                }
                match value {
                    Some(value) => self.linker_value(key, OsStr::new(value))?,
                    None => self.expecting = Some(key.to_owned()),
                }
            }
            "o" | "output" | "L" | "library-path" | "l" | "library" | "u" | "undefined" => match value {
                Some(value) => self.linker_value(key, OsStr::new(value))?,
                None => self.expecting = Some(key.to_owned()),
            },
            "v" | "verbose" => self.verbose = true,
            // Ours, with the same meaning as in a compiler's command line.
            "plain" => self.plain = true,
            "report" => self.report = true,
            _ => return self.joined_linker_option(&text, name),
        }
        Ok(())
    }

    /// `-lNAME` and the like.
    fn joined_linker_option(&mut self, whole: &str, name: &str) -> Result<(), ArgumentError> {
        for key in ["l", "L", "o", "u"] {
            if let Some(value) = name.strip_prefix(key)
                && !whole.starts_with("--")
            {
                return self.linker_value(key, OsStr::new(value));
            }
        }
        if ["z", "m", "O", "h", "plugin-opt", "lto"].iter().any(|key| name.starts_with(key))
            && !whole.starts_with("--")
        {
            return Ok(());
        }
        Err(ArgumentError::Refused { option: whole.to_owned(), reason: UNKNOWN })
    }

    fn linker_value(&mut self, key: &str, value: &OsStr) -> Result<(), ArgumentError> {
        match key {
            "o" | "output" => self.output = Some(value.into()),
            "L" | "library-path" => self.library_paths.push(value.into()),
            "l" | "library" => self.inputs.push(Input::Library(value.to_owned())),
            "u" | "undefined" => self.wanted.push(value.to_string_lossy().into_owned()),
            "soname" | "h" => {
                return Err(ArgumentError::Refused { option: format!("-{key}"), reason: SHARED });
            }
            _ => {}
        }
        Ok(())
    }
}

/// `crt1.o`, `crti.o`, `crtbeginT.o`, …
fn starts_like_crt(argument: &OsStr) -> bool {
    Path::new(argument).file_name().and_then(OsStr::to_str).is_some_and(|name| {
        matches!(name, "crt1.o" | "Scrt1.o" | "rcrt1.o" | "crti.o" | "crtn.o")
            || (name.starts_with("crtbegin") || name.starts_with("crtend")) && name.ends_with(".o")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_files_of_other_c_libraries_are_left_to_godwit() -> Result<(), ArgumentError> {
        let line: Vec<OsString> =
            ["/usr/lib/crt1.o", "crtbeginT.o", "main.o", "crtn.o", "-lc"].map(OsString::from).into();
        let job = parse_linker(&line)?;
        assert_eq!(job.inputs, [Input::File("main.o".into()), Input::Library("c".into())]);
        Ok(())
    }

    #[test]
    fn values_of_options_without_a_meaning_are_no_files() -> Result<(), ArgumentError> {
        let line: Vec<OsString> = ["main.o", "--sort-section", "alignment", "-Map", "main.map", "--verbose"]
            .map(OsString::from)
            .into();
        let job = parse_linker(&line)?;
        assert_eq!((job.inputs, job.verbose), (vec![Input::File("main.o".into())], true));
        Ok(())
    }
}
