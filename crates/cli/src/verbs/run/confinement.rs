//! Flags of `godwit run` that say how the service's processes are held, and what starts them.

use std::path::Path;

use anyhow::{Context as _, bail};
use godwit_api::v1::{Entrypoint, RunRequest, Ulimit};

use crate::values;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// Program to run in place of the image's entrypoint, or its words as a JSON array; empty for none
    #[arg(long, value_name = "PROGRAM", value_parser = values::entrypoint)]
    entrypoint: Option<Entrypoint>,
    /// Capability to add to those that services have, for example NET_ADMIN; ALL for all
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    cap_add: Vec<String>,
    /// Capability to drop; ALL for all but those added
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',')]
    cap_drop: Vec<String>,
    /// seccomp=unconfined, seccomp=FILE with a profile in the form of Podman and Docker, or no-new-privileges
    #[arg(long, value_name = "OPTION")]
    security_opt: Vec<String>,
    /// Most processes and threads of the service; 0 or -1 for no limit [default: 2048]
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true, value_parser = values::pids)]
    pids_limit: Option<u64>,
    /// Refuse writes to the root filesystem; mounts keep their own setting
    #[arg(long)]
    read_only: bool,
    /// Limit of each process: NAME=SOFT[:HARD], for example nofile=1024:4096 or core=unlimited
    #[arg(long, value_name = "LIMIT", value_parser = values::ulimit)]
    ulimit: Vec<Ulimit>,
}

impl Flags {
    /// A request with these and nothing else.
    pub(super) fn request(self) -> anyhow::Result<RunRequest> {
        let mut request = RunRequest {
            entrypoint: self.entrypoint,
            cap_add: self.cap_add,
            cap_drop: self.cap_drop,
            pids_limit: self.pids_limit,
            read_only: self.read_only,
            ulimits: self.ulimit,
            ..RunRequest::default()
        };
        for option in self.security_opt {
            match option.split_once(['=', ':']).unwrap_or((&option, "")) {
                ("no-new-privileges", "" | "true") => request.no_new_privileges = true,
                ("no-new-privileges", "false") => request.no_new_privileges = false,
                ("seccomp", "unconfined") => request.seccomp = "unconfined".to_owned(),
                ("seccomp", file) if !file.is_empty() => request.seccomp = profile(Path::new(file))?,
                _ => bail!(
                    "--security-opt {option} is not known; write seccomp=unconfined, seccomp=FILE or no-new-privileges"
                ),
            }
        }
        Ok(request)
    }
}

/// The text of a profile. That it is one is for the daemon to say.
fn profile(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("the seccomp profile {} cannot be read", file.display()))?;
    if matches!(text.trim(), "" | "unconfined") {
        bail!("{} is not a seccomp profile", file.display());
    }
    Ok(text)
}
