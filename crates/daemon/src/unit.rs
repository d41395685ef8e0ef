//! The systemd unit `godwitd.service`: a node that was founded or has joined has it enabled and started.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The state directory of the node that the unit serves.
pub(crate) const STATE: &str = "/var/lib/godwit";

const UNIT: &str = "godwitd.service";

/// It exists while systemd is the machine's service manager: sd_booted(3).
const RUNNING: &str = "/run/systemd/system";

/// Where units are looked for (systemd.unit(5)), of these those that are for operators and packages.
const DIRECTORIES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// What systemd is asked for. A godwitd that serves another identity from the same directory is restarted, which its
/// services outlive.
const VERBS: [&str; 2] = ["enable", "restart"];

/// Why the unit was not enabled or started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnitError {
    /// systemd refused, or godwitd did not start.
    #[error(
        "the node has its identity, but `systemctl {verb} {UNIT}` failed: {said}; see `journalctl -u godwitd`, and when its reason is mended run `systemctl enable --now godwitd`"
    )]
    Failed {
        /// What was asked for.
        verb: &'static str,
        /// What systemctl said.
        said: String,
    },
    /// The unit is enabled, but the disk does not have that.
    #[error(
        "godwitd serves the node, but the links in {directory} that start it with the machine cannot be written to the disk; mend the disk and run `systemctl enable godwitd`",
        directory = .directory.display()
    )]
    NotOnDisk {
        /// Where the links are.
        directory: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is no systemctl.
    #[error(
        "the node has its identity, but systemctl cannot be started; run `systemctl enable --now godwitd`"
    )]
    NoSystemctl(#[source] io::Error),
}

/// The service manager of a machine, as far as its files tell.
#[derive(Debug)]
pub(crate) struct Systemd {
    running: PathBuf,
    directories: Vec<PathBuf>,
}

impl Systemd {
    /// This machine's.
    pub(crate) fn of_machine() -> Self {
        Self { running: RUNNING.into(), directories: DIRECTORIES.map(PathBuf::from).into() }
    }

    /// Enables and starts the unit, unless it is to be left as it is; returns the sentence that says what came of it, or
    /// what to do.
    pub(crate) fn start(&self, state: &Path, leave: bool) -> Result<String, UnitError> {
        self.start_by(systemctl, state, leave)
    }

    fn start_by(
        &self,
        mut systemctl: impl FnMut(&str) -> io::Result<Output>,
        state: &Path,
        leave: bool,
    ) -> Result<String, UnitError> {
        if state != Path::new(STATE) {
            return Ok(format!("start its daemon with `godwitd serve --state {}`", state.display()));
        }
        if !self.running.is_dir() {
            return Ok("systemd does not run here: start the node's daemon with `godwitd serve`".to_owned());
        }
        // Also a link to nowhere or to /dev/null is a unit, of which systemctl says what it is.
        if !self.directories.iter().any(|directory| directory.join(UNIT).symlink_metadata().is_ok()) {
            return Ok(format!(
                "systemd has no unit {UNIT}: start the node's daemon with `godwitd serve`, or install the unit"
            ));
        }
        if leave {
            return Ok("start the node's daemon with `systemctl enable --now godwitd`".to_owned());
        }
        for verb in VERBS {
            let output = systemctl(verb).map_err(UnitError::NoSystemctl)?;
            if !output.status.success() {
                return Err(UnitError::Failed { verb, said: in_one_line(&output) });
            }
        }
        for directory in &self.directories {
            sync_links(directory)
                .map_err(|source| UnitError::NotOnDisk { directory: directory.clone(), source })?;
        }
        Ok("godwitd serves the node, and starts with the machine".to_owned())
    }
}

/// `systemctl VERB godwitd.service`; it ends when the unit has started, or has failed to.
fn systemctl(verb: &str) -> io::Result<Output> {
    Command::new("systemctl").args(["--no-ask-password", verb, UNIT]).stdin(Stdio::null()).output()
}

/// Writes the links that enable the unit to the disk, which systemd does not: a machine that loses power at once would
/// boot without its daemon. Returns how many directories hold one.
fn sync_links(directory: &Path) -> io::Result<usize> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut synced = 0;
    for entry in entries {
        let below = entry?.path();
        if below.is_dir() && below.join(UNIT).symlink_metadata().is_ok() {
            File::open(&below)?.sync_all()?;
            synced += 1;
        }
    }
    if synced > 0 {
        // One of them may be new itself.
        File::open(directory)?.sync_all()?;
    }
    Ok(synced)
}

fn in_one_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let words: Vec<_> = text.split_whitespace().collect();
    match words.is_empty() {
        true => output.status.to_string(),
        false => words.join(" ").trim_end_matches('.').to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    /// A machine in a directory; systemd runs on it, and has the unit.
    fn machine() -> (tempfile::TempDir, Systemd) {
        let root = tempfile::tempdir().unwrap();
        let (running, units) = (root.path().join("run"), root.path().join("units"));
        fs::create_dir_all(&running).unwrap();
        fs::create_dir_all(&units).unwrap();
        fs::write(units.join(UNIT), "").unwrap();
        (root, Systemd { running, directories: vec!["/nonexistent".into(), units] })
    }

    fn ended(code: i32, said: &str) -> io::Result<Output> {
        Ok(Output { status: ExitStatus::from_raw(code << 8), stdout: Vec::new(), stderr: said.into() })
    }

    /// What is said, and what systemd was asked for.
    fn start(systemd: &Systemd, state: &str, leave: bool) -> (String, Vec<String>) {
        let mut asked = Vec::new();
        let said = systemd.start_by(
            |verb| {
                asked.push(verb.to_owned());
                ended(0, "Created symlink …\n")
            },
            Path::new(state),
            leave,
        );
        (said.unwrap(), asked)
    }

    #[test]
    fn the_unit_is_enabled_and_started() {
        let (_root, systemd) = machine();
        let (said, asked) = start(&systemd, STATE, false);
        assert_eq!((said.as_str(), asked.len()), ("godwitd serves the node, and starts with the machine", 2));
        assert_eq!(asked, VERBS);
    }

    #[test]
    fn the_directories_with_links_to_the_unit_are_written_to_the_disk() {
        let (root, systemd) = machine();
        let units = root.path().join("units");
        for name in ["multi-user.target.wants", "other.wants"] {
            fs::create_dir(units.join(name)).unwrap();
        }
        assert_eq!(sync_links(&units).unwrap(), 0);
        // A link to nowhere enables it, too.
        std::os::unix::fs::symlink("/nonexistent", units.join("multi-user.target.wants").join(UNIT)).unwrap();
        assert_eq!(sync_links(&units).unwrap(), 1);
        assert_eq!(sync_links(Path::new("/nonexistent")).unwrap(), 0);
        // What is no directory cannot be looked through.
        let systemd = Systemd { directories: vec![units.clone(), units.join(UNIT)], ..systemd };
        let error = systemd.start_by(|_| ended(0, ""), Path::new(STATE), false).unwrap_err().to_string();
        assert!(
            error.contains("cannot be written to the disk") && error.contains("units/godwitd.service"),
            "{error}"
        );
    }

    #[test]
    fn where_it_cannot_be_started_or_shall_not_the_operator_hears_what_to_do() {
        let nothing = Vec::<String>::new();
        let (root, systemd) = machine();
        let (said, asked) = start(&systemd, STATE, true);
        assert!(said.contains("`systemctl enable --now godwitd`") && asked == nothing, "{said} {asked:?}");
        // The unit serves another node.
        let (said, asked) = start(&systemd, "/s", false);
        assert!(said.contains("`godwitd serve --state /s`") && asked == nothing, "{said} {asked:?}");
        fs::remove_file(root.path().join("units").join(UNIT)).unwrap();
        let (said, asked) = start(&systemd, STATE, false);
        assert!(said.contains("no unit godwitd.service") && asked == nothing, "{said} {asked:?}");
        fs::remove_dir(root.path().join("run")).unwrap();
        let (said, asked) = start(&systemd, STATE, false);
        assert!(said.contains("systemd does not run here") && asked == nothing, "{said} {asked:?}");
    }

    #[test]
    fn what_systemctl_says_is_shown_in_one_line_with_what_to_do() {
        let (_root, systemd) = machine();
        let lines = "Job for godwitd.service failed.\nSee \"journalctl -xeu godwitd.service\" for details.\n";
        let failing = |verb: &str| ended(i32::from(verb == "restart"), lines);
        let error = systemd.start_by(failing, Path::new(STATE), false).unwrap_err().to_string();
        assert!(error.contains("`systemctl restart godwitd.service` failed: Job for"), "{error}");
        assert!(error.contains("`systemctl enable --now godwitd`") && !error.contains('\n'), "{error}");
        let silent = |_: &str| ended(3, "");
        let error = systemd.start_by(silent, Path::new(STATE), false).unwrap_err().to_string();
        assert!(error.contains("`systemctl enable godwitd.service` failed: exit status: 3"), "{error}");
        let missing = |_: &str| Err(io::ErrorKind::NotFound.into());
        let error = systemd.start_by(missing, Path::new(STATE), false).unwrap_err().to_string();
        assert!(error.contains("systemctl cannot be started"), "{error}");
    }
}
