//! The AppArmor profile that Podman gives containers: it loads that when it makes the first one ready to start, and needs it for
//! one that comes from another node.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use godwit_names::ServiceName;
use tokio::process::Command;

use super::Podman;
use super::command::Call;
use crate::container::{EngineError, io_error};
use crate::foreign::{SHORT, landing};

/// What its name begins with; the release of a library of Podman's follows.
pub(super) const OWN: &str = "containers-default-";

/// It is there where systemd is.
const SYSTEMD: &str = "/run/systemd/system";

impl Podman {
    /// Has Podman load it, by a container that never runs.
    pub(super) async fn load_profile(&self, name: &ServiceName) -> Result<(), EngineError> {
        let waiting = landing::in_storage(&self.storage(name).await?.root);
        let made = || {
            fs::create_dir_all(&waiting)?;
            let root = tempfile::tempdir_in(&waiting)?;
            let program = root.path().join("none");
            fs::write(&program, "")?;
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
            Ok(root)
        };
        let root = made()
            .map_err(|source| io_error(name, format!("make a root in {}", waiting.display()), source))?;
        let create =
            ["create", "--rootfs", "--network=none", "--label=godwit.profile=", "--"].map(OsStr::new);
        let words = create.into_iter().chain([root.path().as_os_str(), OsStr::new("/none")]).collect();
        let action = "have its AppArmor profile loaded for";
        let created = self.call(&Call { name, action, words, settings: None }, SHORT).await?;
        let id = String::from_utf8_lossy(&created.stdout).trim().to_owned();
        let words = ["init", "--", &id].map(OsStr::new).to_vec();
        let call = Call { name, action, words, settings: None };
        let loaded = self.end(&call, self.beside(&call), SHORT).await;
        let words = ["rm", "--force", "--", &id].map(OsStr::new).to_vec();
        let action = "remove what has loaded the AppArmor profile of";
        self.call(&Call { name, action, words, settings: None }, SHORT).await?;
        loaded.map(drop)
    }

    /// The same call by the service manager: godwitd's unit withholds CAP_MAC_ADMIN, which loading a profile needs.
    fn beside(&self, call: &Call<'_>) -> Command {
        if !Path::new(SYSTEMD).is_dir() {
            return self.command(call);
        }
        let mut command = Command::new("systemd-run");
        command.args(["--quiet", "--wait", "--pipe", "--collect", "--"]).arg(&self.config.podman);
        command.args(&call.words).stdin(std::process::Stdio::null());
        command
    }
}
