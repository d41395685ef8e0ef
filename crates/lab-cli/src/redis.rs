//! The Redis of an image that `make base-image` has built: it can cross.

use std::{
    net::SocketAddrV4,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use godwit_api::v1::{RunRequest, run_request::Source};
use godwit_cli::client::Connection;

use crate::trial::{ADDRESS, SERVICE};

const PORT: u16 = 6379;
/// How it runs where its memory is measured. It takes no snapshots: for one Redis forks, and the memory of both processes
/// would move.
pub(crate) const WITHOUT_SNAPSHOTS: [&str; 5] =
    ["/usr/bin/redis-server", "--protected-mode", "no", "--save", ""];

/// The absolute path of the image, which must be there.
pub(crate) fn image(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().with_context(|| {
        format!(
            "the image {} cannot be read: `make base-image BASE=redis` builds it, and --image names another",
            path.display()
        )
    })
}

/// Runs it on a node, by the image's own command if there are no words; where it listens.
pub(crate) async fn run(node: &Connection, image: &Path, command: &[&str]) -> anyhow::Result<SocketAddrV4> {
    let request = RunRequest {
        name: SERVICE.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Image(image.to_string_lossy().into_owned())),
        command: command.iter().copied().map(str::to_owned).collect(),
        ..RunRequest::default()
    };
    node.node.clone().run(request).await.map_err(|status| node.explain(&status))?;
    Ok(SocketAddrV4::new(ADDRESS, PORT))
}
