//! `godwit-runtime`: stands in the place of the OCI runtime of a container engine of others, and is the runtime for all
//! that godwitd does not want otherwise.
//!
//! ```text
//! godwitd ──▶ engine, told that this is its runtime ──▶ conmon or a shim ──▶ godwit-runtime ──▶ runc, with what godwitd has
//! ```
//! godwitd writes what to do into a directory. Podman calls the program by a link in it, for one call. Docker calls it for each
//! of its containers that has come from another node, or that godwitd has had it make; then the directory is one of [`STATE`],
//! or of `--state DIR`, and has the ID of the container for its name.
//!
//! | file | what |
//! |---|---|
//! | `instructions.json` | [`Instructions`], from godwitd |
//! | `arrived.json` | [`Arrived`], for godwitd, once the engine has come to the restore |
//!
//! - `checkpoint`: where the instructions say so nothing is dumped, so that an engine that exports a checkpoint exports no
//!   more than its description of the container.
//! - `restore`, and `create` where the engine knows of no restore: of the images that the instructions name. A `start` after
//!   such a `create` finds the container running.
//! - `create` in a network namespace of godwit's, at every start of the container: so its program has the network from its
//!   first instruction. Where there is no such namespace, as after a reboot, it is in the engine's, as the engine wants it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What godwitd wants.
#[derive(Debug, Deserialize)]
struct Instructions {
    /// The runtime.
    runtime: PathBuf,
    /// Where it looks for programs.
    path: String,
    /// The container that they are for.
    id: String,
    /// What a checkpoint or a restore of it becomes.
    task: Task,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Task {
    /// A checkpoint that dumps nothing.
    Describe,
    /// A restore.
    Restore {
        /// Directory of the images.
        images: PathBuf,
        /// Directory for CRIU's log.
        work: PathBuf,
        /// File with options for CRIU.
        criu_config: PathBuf,
        /// Whether no page that is put in place may bring others with it that come later.
        without_huge_pages: bool,
        /// The network namespace, where it is not the one that the engine names.
        network_namespace: Option<PathBuf>,
    },
    /// Each start in a network namespace that the engine has not made.
    Create {
        /// That.
        network_namespace: PathBuf,
    },
}

/// What the engine has made for a restore.
#[derive(Debug, Serialize)]
struct Arrived {
    /// Directory of the OCI description.
    bundle: PathBuf,
    /// Where the runtime writes the PID of the main process.
    pid_file: PathBuf,
}

/// What to do, in such a directory.
const INSTRUCTIONS: &str = "instructions.json";

/// Where the directories are that godwitd makes for the containers of Docker.
const STATE: &str = "/run/godwit/docker";

/// What the hook is called by which dockerd takes a container's network namespace for one of its own.
const ENGINES_HOOK: &str = "libnetwork-setkey";

/// Global options of runc and crun that have their value in the word after them.
const WITH_VALUE: &[&str] = &["--log", "--log-format", "--root", "--criu", "--rootless", "--cgroup-manager"];

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let words: Vec<OsString> = words.collect();
    match run(Path::new(&name), &words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let reason = format!("godwit-runtime: {reason}");
            // There containerd's shim looks for it: its standard error is the container's.
            if let Some(log) = value(&words, "--log") {
                let line = serde_json::json!({ "level": "error", "msg": reason });
                let _ = fs::write(log, format!("{line}\n"));
            }
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

/// The directory with the instructions for a call, and the call's words.
fn place_of<'a>(name: &Path, words: &'a [OsString]) -> (Option<PathBuf>, &'a [OsString]) {
    let (state, words) = match words {
        [option, state, words @ ..] if option == "--state" => (Path::new(state), words),
        _ => {
            // Without a directory the engine has looked the program up.
            let beside = name.parent().filter(|beside| !beside.as_os_str().is_empty());
            if let Some(beside) = beside.filter(|beside| beside.join(INSTRUCTIONS).exists()) {
                return (Some(beside.to_owned()), words);
            }
            (Path::new(STATE), words)
        }
    };
    let id = words.last().and_then(|last| last.to_str()).filter(|id| is_id(id));
    (id.map(|id| state.join(id)).filter(|place| place.join(INSTRUCTIONS).exists()), words)
}

/// Whether this can be an ID of a container; it becomes a part of paths.
fn is_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Does what is wanted; does not return where the runtime goes on in its place.
fn run(name: &Path, words: &[OsString]) -> Result<(), String> {
    let (place, words) = place_of(name, words);
    let Some(place) = place else { return Err(become_runtime(Path::new("runc"), words)) };
    let path = place.join(INSTRUCTIONS);
    let text = fs::read(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let Instructions { runtime, path: path_variable, id, task } =
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    let call = Call::of(words);
    let is_help = words.iter().any(|word| word == "--help" || word == "-h");
    match (task, call.verb.and_then(OsStr::to_str)) {
        // So an engine asks whether the runtime can do that, as crun cannot everywhere.
        (Task::Describe, Some("checkpoint")) if is_help => Ok(()),
        _ if is_help => Err(become_runtime(&runtime, words)),
        (Task::Describe, Some("checkpoint")) => {
            call.is_for(&id)?;
            describe(&call)
        }
        (Task::Create { network_namespace }, Some("create")) => {
            call.is_for(&id)?;
            let bundle = call.value("--bundle").ok_or("the engine names no bundle for a container")?;
            if is_namespace(&network_namespace) {
                edit(&bundle, |description| put_into(description, &network_namespace))?;
            }
            Err(become_runtime(&runtime, words))
        }
        // What was restored runs. The next start is a start.
        (Task::Restore { .. }, Some("start")) => {
            call.is_for(&id)?;
            let done = place.join("started.json");
            fs::rename(&path, &done).map_err(|error| format!("cannot rename {}: {error}", path.display()))
        }
        (
            Task::Restore { images, work, criu_config, without_huge_pages, network_namespace },
            Some("restore" | "create"),
        ) => {
            call.is_for(&id)?;
            let [bundle, pid_file] = ["--bundle", "--pid-file"].map(|option| call.value(option));
            let bundle = bundle.ok_or("the engine names no bundle for a restore")?;
            let pid_file = pid_file.ok_or("the engine names no file for the PID of a restore")?;
            adapt(&bundle, &criu_config, network_namespace.as_deref())?;
            let arrived = Arrived { bundle: bundle.clone(), pid_file: pid_file.clone() };
            write_whole(&place.join("arrived.json"), &json(&arrived)?)?;
            if without_huge_pages {
                // SAFETY: sets a flag of this process, which its children inherit.
                let set = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
                if set == -1 {
                    return Err(format!("cannot do without huge pages: {}", io::Error::last_os_error()));
                }
            }
            let mut words: Vec<OsString> = call.globals.to_vec();
            words.extend(
                ["restore", "--detach", "--tcp-established", "--file-locks", "--auto-dedup"].map(Into::into),
            );
            for (option, path) in [
                ("--bundle", bundle),
                ("--pid-file", pid_file),
                ("--image-path", images),
                ("--work-path", work),
            ] {
                words.extend([option.into(), path.into()]);
            }
            words.push(id.into());
            let error = Command::new(&runtime).args(words).env("PATH", path_variable).exec();
            Err(format!("cannot run {}: {error}", runtime.display()))
        }
        _ => Err(become_runtime(&runtime, words)),
    }
}

/// A call of a runtime, in its parts.
struct Call<'a> {
    globals: &'a [OsString],
    verb: Option<&'a OsStr>,
    rest: &'a [OsString],
}

impl<'a> Call<'a> {
    fn of(words: &'a [OsString]) -> Self {
        let mut at = 0;
        while let Some(word) = words.get(at) {
            if !word.as_encoded_bytes().starts_with(b"-") {
                break;
            }
            at += if WITH_VALUE.iter().any(|option| word == option) { 2 } else { 1 };
        }
        let at = at.min(words.len());
        let (globals, rest) = words.split_at(at);
        let (verb, rest) = rest.split_first().map_or((None, rest), |(verb, rest)| (Some(verb), rest));
        Self { globals, verb: verb.map(OsString::as_os_str), rest }
    }

    /// The value of an option of the verb.
    fn value(&self, option: &str) -> Option<PathBuf> {
        value(self.rest, option)
    }

    /// Checks that it is for this container, which is named last.
    fn is_for(&self, id: &str) -> Result<(), String> {
        match self.rest.last() {
            Some(last) if last == id => Ok(()),
            other => {
                Err(format!("these instructions are for container {id}, and the engine asks for {other:?}"))
            }
        }
    }
}

/// The value of an option, in the same word or in the next one.
fn value(words: &[OsString], option: &str) -> Option<PathBuf> {
    let text = |word: &OsString| word.to_str().map(str::to_owned);
    words.iter().enumerate().find_map(|(at, word)| {
        if word == option {
            return words.get(at + 1).map(PathBuf::from);
        }
        let text = text(word)?;
        text.strip_prefix(option)?.strip_prefix('=').map(PathBuf::from)
    })
}

/// Makes what an engine looks for after a checkpoint, and nothing else.
fn describe(call: &Call<'_>) -> Result<(), String> {
    let [images, work] = ["--image-path", "--work-path"].map(|option| call.value(option));
    let images = images.ok_or("the engine names no directory for the images of a checkpoint")?;
    fs::create_dir_all(&images).map_err(|error| format!("cannot create {}: {error}", images.display()))?;
    if let Some(work) = work {
        let statistics = work.join("stats-dump");
        fs::write(&statistics, "")
            .map_err(|error| format!("cannot write {}: {error}", statistics.display()))?;
    }
    Ok(())
}

/// Has the runtime give CRIU a file with options, by the annotation that runc knows for it, and take this network namespace.
fn adapt(bundle: &Path, criu_config: &Path, network_namespace: Option<&Path>) -> Result<(), String> {
    edit(bundle, |description| {
        description["annotations"]["org.criu.config"] = criu_config.to_string_lossy().into();
        if let Some(path) = network_namespace {
            put_into(description, path);
        }
    })
}

/// Puts a container into a network namespace that the engine has not made, and does not come to know: it would turn off
/// IPv6 there.
fn put_into(description: &mut Value, network_namespace: &Path) {
    name_namespace(description, network_namespace);
    if let Some(hooks) = description.pointer_mut("/hooks/prestart").and_then(Value::as_array_mut) {
        hooks.retain(|hook| hook["args"][0] != ENGINES_HOOK);
    }
}

fn name_namespace(description: &mut Value, network_namespace: &Path) {
    let namespaces = description["linux"]["namespaces"].as_array_mut().map(Vec::as_mut_slice);
    for namespace in namespaces.unwrap_or_default() {
        if namespace["type"] == "network" {
            namespace["path"] = network_namespace.to_string_lossy().into();
        }
    }
}

/// Whether a namespace is mounted there: it is on the filesystem of namespaces.
fn is_namespace(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    device(path).is_some_and(|there| Some(there) == device(Path::new("/proc/self/ns/net")))
}

/// Changes the OCI description that the engine has made.
fn edit(bundle: &Path, change: impl FnOnce(&mut Value)) -> Result<(), String> {
    let path = bundle.join("config.json");
    let text = fs::read(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let mut description: Value =
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    change(&mut description);
    write_whole(&path, &json(&description)?)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, String> {
    serde_json::to_vec(value).map_err(|error| error.to_string())
}

/// Writes a file that nobody sees half of.
fn write_whole(path: &Path, content: &[u8]) -> Result<(), String> {
    let half = path.with_extension("half");
    fs::write(&half, content)
        .and_then(|()| fs::rename(&half, path))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Why the runtime does not go on in the place of this program.
fn become_runtime(runtime: &Path, words: &[OsString]) -> String {
    let error = Command::new(runtime).args(words).exec();
    format!("cannot run {}: {error}", runtime.display())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_verb_is_found_behind_options_with_values_and_without() {
        let line = words(
            "--root=/r --log-format json --log restore --systemd-cgroup restore --bundle /b --pid-file=/p x",
        );
        let call = Call::of(&line);
        assert_eq!(call.verb.unwrap(), "restore");
        assert_eq!(call.globals.len(), 6);
        assert_eq!(value(call.globals, "--root").unwrap(), Path::new("/r"));
        assert_eq!(call.value("--bundle").unwrap(), Path::new("/b"));
        assert_eq!(call.value("--pid-file").unwrap(), Path::new("/p"));
        assert!(call.value("--work-path").is_none());
        call.is_for("x").unwrap();
        assert!(call.is_for("y").unwrap_err().contains("are for container y"));
    }

    #[test]
    fn instructions_are_beside_the_program_or_for_the_container() {
        let directory = tempfile::tempdir().unwrap();
        let (beside, id) = (directory.path().join("runtime"), "0a".repeat(32));
        let place = directory.path().join(&id);
        let line = words(&format!("--state {} --root /r start {id}", directory.path().display()));
        let of_state = |line: &[OsString]| place_of(Path::new("/usr/bin/godwit-runtime"), line).0;
        assert_eq!(of_state(&line), None, "there are none");
        fs::create_dir(&place).unwrap();
        fs::write(place.join(INSTRUCTIONS), "").unwrap();
        assert_eq!(of_state(&line), Some(place.clone()));
        assert_eq!(place_of(&beside, &line).1, words(&format!("--root /r start {id}")));
        let other = words(&format!("--state {} start ../{id}", directory.path().display()));
        assert_eq!(of_state(&other), None);
        fs::write(directory.path().join(INSTRUCTIONS), "").unwrap();
        let line = words("start x");
        assert_eq!(place_of(&beside, &line), (Some(directory.path().to_owned()), &line[..]));
    }

    #[test]
    fn a_call_without_a_verb_has_none() {
        let line = words("--version");
        assert!(Call::of(&line).verb.is_none());
        let line = words("--log");
        assert!(Call::of(&line).verb.is_none());
    }

    #[test]
    fn a_description_makes_what_the_engine_looks_for() {
        let directory = tempfile::tempdir().unwrap();
        let [images, work] = ["images", "work"].map(|name| directory.path().join(name));
        fs::create_dir(&work).unwrap();
        let line =
            words(&format!("checkpoint --image-path {} --work-path {} x", images.display(), work.display()));
        describe(&Call::of(&line)).unwrap();
        assert!(images.is_dir() && work.join("stats-dump").exists());
    }

    #[test]
    fn criu_is_given_its_options_beside_what_the_bundle_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        let text = r#"{"annotations":{"a":"b"},"root":{"path":"/r"},"linux":{"namespaces":[{"type":"network"},{"type":"pid"}]}}"#;
        fs::write(&path, text).unwrap();
        adapt(directory.path(), Path::new("/c"), Some(Path::new("/n"))).unwrap();
        let written: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(written["annotations"], serde_json::json!({"a": "b", "org.criu.config": "/c"}));
        assert_eq!(written["root"]["path"], "/r");
        let namespaces = serde_json::json!([{"type": "network", "path": "/n"}, {"type": "pid"}]);
        assert_eq!(written["linux"]["namespaces"], namespaces);
    }

    #[test]
    fn a_new_container_is_in_a_namespace_that_is_there_and_its_engine_takes_that_for_none_of_its_own() {
        assert!(is_namespace(Path::new("/proc/self/ns/net")));
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_namespace(&directory.path().join("nothing")) && !is_namespace(directory.path()));
        let mut description = serde_json::json!({
            "hooks": { "prestart": [{ "path": "/x", "args": [ENGINES_HOOK, "id"] }, { "path": "/y", "args": ["y"] }] },
            "linux": { "namespaces": [{ "type": "network" }, { "type": "pid" }] },
        });
        put_into(&mut description, Path::new("/n"));
        assert_eq!(description["hooks"]["prestart"], serde_json::json!([{ "path": "/y", "args": ["y"] }]));
        assert_eq!(description["linux"]["namespaces"][0]["path"], "/n");
        let mut plain = serde_json::json!({ "linux": { "namespaces": [] } });
        put_into(&mut plain, Path::new("/n"));
        assert_eq!(plain["hooks"], Value::Null, "it has none");
    }
}
