//! Podman's settings with another program for a runtime, for one call of it: what it reads anyway, and that.
//!
//! Podman keeps the name of a container's runtime, and looks the program up under it at each call. So a call that is given
//! another program under the same name leaves nothing behind, and no file of the node's is changed. Only conmon keeps the name
//! of the file with the settings, for the call by which it tells Podman of the container's end: by then the file has the
//! settings that Podman reads anyway.
//!
//! `CONTAINERS_CONF` takes the place of all other files (containers.conf(5)). `CONTAINERS_CONF_OVERRIDE`, which does not,
//! is younger than Podman 4.3.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// The files that Podman of root reads, the later over the earlier.
const FILES: &[&str] = &["/usr/share/containers/containers.conf", "/etc/containers/containers.conf"];

/// What is read after them, in the order of the names.
const DIRECTORY: &str = "/etc/containers/containers.conf.d";

/// What Podman of root reads on this node.
pub(super) fn of_node() -> io::Result<Table> {
    let own = std::env::var_os("CONTAINERS_CONF");
    read(&files(own.as_deref(), Path::new("/"))?)
}

/// The text of a file with these settings.
pub(super) fn text(settings: &Table) -> io::Result<String> {
    toml::to_string(settings).map_err(io::Error::other)
}

/// The first program that there is of those that the settings have for the runtime of this name.
pub(super) fn runtime(settings: &Table, name: &str) -> Option<PathBuf> {
    let programs = settings.get("engine")?.get("runtimes")?.get(name)?.as_array()?;
    programs.iter().filter_map(Value::as_str).map(PathBuf::from).find(|program| program.exists())
}

/// Those that there are, below a root.
fn files(own: Option<&OsStr>, root: &Path) -> io::Result<Vec<PathBuf>> {
    if let Some(own) = own {
        return Ok(vec![own.into()]);
    }
    let below = |path: &str| root.join(path.trim_start_matches('/'));
    let mut files: Vec<_> = FILES.iter().map(|path| below(path)).collect();
    match fs::read_dir(below(DIRECTORY)) {
        Ok(entries) => {
            let paths: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
            let mut more = paths?;
            more.retain(|path| path.extension().is_some_and(|end| end == "conf"));
            more.sort();
            files.extend(more);
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    files.retain(|path| path.exists());
    Ok(files)
}

fn read(files: &[PathBuf]) -> io::Result<Table> {
    let mut all = Table::new();
    for path in files {
        let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", path.display()));
        let text = fs::read_to_string(path).map_err(|error| failed(&error))?;
        lay_over(&mut all, text.parse().map_err(|error: toml::de::Error| failed(&error))?);
    }
    Ok(all)
}

/// What stands in a later file counts; tables are laid over each other.
fn lay_over(below: &mut Table, above: Table) {
    for (name, value) in above {
        match (below.get_mut(&name), value) {
            (Some(Value::Table(below)), Value::Table(above)) => lay_over(below, above),
            (_, value) => drop(below.insert(name, value)),
        }
    }
}

/// Puts `program` in the place of the runtime of this name; with `standard` as the one for new containers, too.
pub(super) fn add_runtime(settings: &mut Table, name: &str, program: &Path, standard: bool) {
    let programs = Value::Array(vec![program.to_string_lossy().into_owned().into()]);
    let mut engine = Table::new();
    engine.insert("runtimes".into(), Value::Table([(name.to_owned(), programs)].into_iter().collect()));
    if standard {
        engine.insert("runtime".into(), name.into());
    }
    lay_over(settings, [("engine".to_owned(), Value::Table(engine))].into_iter().collect());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn later_files_count_and_the_runtime_is_added_to_others() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("usr/share/containers/containers.conf", "[engine]\nruntime=\"crun\"\nevents_logger=\"file\"\n");
        write("etc/containers/containers.conf.d/20.conf", "[engine]\nevents_logger=\"journald\"\n");
        write(
            "etc/containers/containers.conf.d/10.conf",
            "[engine.runtimes]\nkata=[\"/k\"]\nrunc=[\"/r\"]\n",
        );
        write("etc/containers/containers.conf.d/30.conf.old", "no settings");
        let mut settings = read(&files(None, root.path()).unwrap()).unwrap();
        add_runtime(&mut settings, "runc", Path::new("/own"), true);
        assert_eq!(runtime(&settings, "kata"), None, "it is not there");
        let engine = settings["engine"].as_table().unwrap();
        assert_eq!(engine["events_logger"].as_str(), Some("journald"));
        assert_eq!(engine["runtime"].as_str(), Some("runc"));
        assert_eq!(engine["runtimes"]["kata"][0].as_str(), Some("/k"));
        assert_eq!(engine["runtimes"]["runc"].as_array().unwrap().len(), 1);
        assert_eq!(engine["runtimes"]["runc"][0].as_str(), Some("/own"));
    }

    #[test]
    fn a_file_of_the_environment_stands_for_all() {
        let own = OsStr::new("/x/containers.conf");
        assert_eq!(files(Some(own), Path::new("/")).unwrap(), [PathBuf::from(own)]);
    }

    #[test]
    fn a_broken_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("containers.conf");
        fs::write(&path, "[engine\n").unwrap();
        let error = read(std::slice::from_ref(&path)).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{error}");
    }
}
