//! The Redis of an image that `make base-image` has built: it can cross.

use std::{net::SocketAddrV4, path::Path};

use godwit_api::v1::run_request::Source;
use godwit_cli::client::Connection;

use crate::{
    services::{self, Service},
    trial::{ADDRESS, SERVICE},
};

const PORT: u16 = 6379;
/// How it runs where its memory is measured. It takes no snapshots: for one Redis forks, and the memory of both processes
/// would move.
pub(crate) const WITHOUT_SNAPSHOTS: [&str; 5] =
    ["/usr/bin/redis-server", "--protected-mode", "no", "--save", ""];

/// The image in a directory of them.
pub(crate) fn image(images: &Path) -> anyhow::Result<Source> {
    services::image(images, "redis")
}

/// Runs it on a node, by the image's own command if there are no words; where it listens.
pub(crate) async fn run(node: &Connection, image: &Source, command: &[&str]) -> anyhow::Result<SocketAddrV4> {
    let service = Service {
        name: SERVICE,
        address: ADDRESS,
        source: image.clone(),
        command: command.iter().copied().map(str::to_owned).collect(),
        ulimits: Vec::new(),
    };
    service.run(node).await?;
    Ok(SocketAddrV4::new(ADDRESS, PORT))
}
