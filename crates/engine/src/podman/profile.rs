//! The AppArmor profile that Podman gives containers: it loads that when it makes the first one ready to start, and needs it for
//! one that comes from another node.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use std::{fs, io};

use godwit_names::ServiceName;
use tokio::process::Command;
use tokio::sync::Mutex;

use super::Podman;
use super::command::Call;
use crate::container::{EngineError, io_error};
use crate::foreign::{SHORT, landing};

/// What its name begins with; the release of a library of Podman's follows.
pub(super) const OWN: &str = "containers-default-";

/// By this label a container is known that was made for it.
const LABEL: &str = "godwit.profile";

/// It is there where systemd is.
const SYSTEMD: &str = "/run/systemd/system";

/// Whoever has been here lately has done what can be done. One at a time: a node may be asked by many.
#[derive(Debug, Default)]
pub(super) struct Attempts(Mutex<Option<Instant>>);

/// For so long it is not tried again: what Podman has not loaded then it does not load.
const LATELY: Duration = Duration::from_secs(300);

impl Podman {
    /// Has Podman load it, by a container that never runs.
    pub(super) async fn load_profile(&self, name: &ServiceName) -> Result<(), EngineError> {
        let mut last = self.profile_loads.0.lock().await;
        if last.is_some_and(|last| last.elapsed() < LATELY) {
            return Ok(());
        }
        *last = Some(Instant::now());
        let root = landing::in_storage(&self.storage(name).await?.root).join("profile");
        // Also of an earlier life of godwitd, which was ended in the middle.
        self.forget_makers(name, &root).await?;
        let made = || {
            fs::create_dir_all(&root)?;
            let program = root.join("none");
            fs::write(&program, "")?;
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        };
        made().map_err(|source| io_error(name, format!("make a root in {}", root.display()), source))?;
        let loaded = self.make_ready(name, &root).await;
        self.forget_makers(name, &root).await?;
        loaded
    }

    async fn make_ready(&self, name: &ServiceName, root: &Path) -> Result<(), EngineError> {
        let action = "have its AppArmor profile loaded for";
        let label = format!("--label={LABEL}=");
        let create = ["create", "--rootfs", "--network=none", &label, "--"].map(OsStr::new);
        let words = create.into_iter().chain([root.as_os_str(), OsStr::new("/none")]).collect();
        let created = self.call(&Call { name, action, words, settings: None }, SHORT).await?;
        let id = String::from_utf8_lossy(&created.stdout).trim().to_owned();
        let words = ["init", "--", &id].map(OsStr::new).to_vec();
        let call = Call { name, action, words, settings: None };
        self.end(&call, self.beside(&call), SHORT).await.map(drop)
    }

    /// Removes each container that was made for this, and its root. Whatever its label says, one with another root is none.
    async fn forget_makers(&self, name: &ServiceName, root: &Path) -> Result<(), EngineError> {
        let action = "remove what has loaded the AppArmor profile of";
        let filter = format!("label={LABEL}");
        let words = ["ps", "--all", "--quiet", "--no-trunc", "--filter", &filter].map(OsStr::new).to_vec();
        let listed = self.call(&Call { name, action, words, settings: None }, SHORT).await?;
        for id in String::from_utf8_lossy(&listed.stdout).split_whitespace() {
            let words =
                ["container", "inspect", "--format", "{{.Rootfs}}", "--", id].map(OsStr::new).to_vec();
            let its = self.call(&Call { name, action, words, settings: None }, SHORT).await?;
            if Path::new(String::from_utf8_lossy(&its.stdout).trim_end()) != root {
                continue;
            }
            let words = ["rm", "--force", "--", id].map(OsStr::new).to_vec();
            self.call(&Call { name, action, words, settings: None }, SHORT).await?;
        }
        match fs::remove_dir_all(root) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(io_error(name, format!("remove {}", root.display()), source))
            }
            _ => Ok(()),
        }
    }

    /// The same call by the service manager: godwitd's unit withholds CAP_MAC_ADMIN, which loading a profile needs.
    fn beside(&self, call: &Call<'_>) -> Command {
        if !Path::new(SYSTEMD).is_dir() {
            return self.command(call);
        }
        let mut command = Command::new("systemd-run");
        // conmon stays in the unit, and ends with its container. systemd would wait for it.
        command.args(["--quiet", "--wait", "--pipe", "--collect", "--property=KillMode=process", "--"]);
        command.arg(&self.config.podman);
        command.args(&call.words).stdin(Stdio::null());
        command
    }
}
