//! The service that gives back what it gets ([`super::echo`]), run in a benchmark's lab.

use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

use anyhow::Context as _;
use godwit_api::v1::{PublishedPort, RunRequest, run_request::Source};
use godwit_cli::{client::Connection, global::Global};
use godwit_lab::{Lab, workload::Rootfs};

use super::parts::Orders;
use crate::trial::{SOURCE, blocking};

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Service {
    pub(super) name: &'static str,
    pub(super) address: Ipv4Addr,
    pub(super) port: u16,
    /// The nodes' port that leads to it.
    pub(super) published: Option<u16>,
}

/// Runs it on the source, with more words; returns when it answers.
pub(super) async fn start(lab: &Lab, service: Service, more: &[&str]) -> anyhow::Result<Connection> {
    let mut connection = connect(lab, SOURCE).await?;
    let directory = lab.state(SOURCE)?.with_file_name(service.name);
    let program = std::env::current_exe()?;
    let copied = program.clone();
    let rootfs = blocking(move || Ok(Rootfs::new(directory)?.binary(copied)?.path().to_owned())).await?;
    let (program, port) = (program.to_string_lossy().into_owned(), service.port.to_string());
    let publish = |host: u16| PublishedPort {
        host_port: host.into(),
        container_port: service.port.into(),
        protocol: "tcp".into(),
    };
    let request = RunRequest {
        name: service.name.to_owned(),
        address: service.address.to_string(),
        source: Some(Source::Rootfs(rootfs.to_string_lossy().into_owned())),
        command: [program.as_str(), "bench", "echo", "--port", &port]
            .iter()
            .chain(more)
            .map(|&word| word.to_owned())
            .collect(),
        publish: service.published.into_iter().map(publish).collect(),
        ..RunRequest::default()
    };
    connection.node.run(request).await.map_err(|status| connection.explain(&status))?;
    let there = lab.clone();
    let asked = blocking(move || {
        let orders = SocketAddrV4::new(service.address, service.port + 2);
        let connect = || Ok(there.inside("client", || TcpStream::connect(orders))??);
        Orders::connect(connect)?.give("count")
    });
    asked.await.context("the service does not start")?;
    Ok(connection)
}

/// The daemon of a node.
pub(super) async fn connect(lab: &Lab, node: &str) -> anyhow::Result<Connection> {
    let there =
        Global { json: true, socket: Some(lab.socket(node)?), node: None, lab: lab.name().to_owned() };
    Ok(Connection::open(&there).await?)
}
