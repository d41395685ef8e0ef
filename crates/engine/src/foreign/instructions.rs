//! What `godwit-runtime` is told of a container, in a directory that the two know.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use serde_json::{Value, json};

/// The file in which the runtime looks for what to do.
const INSTRUCTIONS: &str = "instructions.json";

/// Makes an empty directory in which the runtime finds instructions: `programs` are the runtime that it stands for, and where
/// that looks for programs.
pub(crate) fn instruct(place: &Path, programs: (&Path, &OsStr), id: &str, task: &Value) -> io::Result<()> {
    match fs::remove_dir_all(place) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    put_instructions(place, programs, id, task)
}

/// Puts instructions into such a directory, whatever is there besides; those that are there stay.
pub(crate) fn instruct_further(
    place: &Path,
    programs: (&Path, &OsStr),
    id: &str,
    task: &Value,
) -> io::Result<()> {
    match fs::symlink_metadata(place.join(INSTRUCTIONS)) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => put_instructions(place, programs, id, task),
        Err(error) => Err(error),
    }
}

fn put_instructions(
    place: &Path,
    (runtime, path_variable): (&Path, &OsStr),
    id: &str,
    task: &Value,
) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(place)?;
    let path_variable = path_variable.to_string_lossy();
    let instructions = json!({ "runtime": runtime, "path": path_variable, "id": id, "task": task });
    // The runtime may be called meanwhile.
    let half = place.join("instructions.half");
    fs::write(&half, instructions.to_string())?;
    fs::rename(&half, place.join(INSTRUCTIONS))
}
