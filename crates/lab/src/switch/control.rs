//! Requests to the running link program: one JSON message each way over a packet socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::OwnedFd,
    path::Path,
    time::Duration,
};

use rustix::{
    fd::AsFd,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with, sockopt,
    },
};
use serde::{Deserialize, Serialize};

use super::fabric::Counters;
use crate::{
    conditions::{Conditions, Step},
    config::Link,
};

/// The longest message; the figures of 81 ports fit several times.
const MAX_MESSAGE: usize = 64 << 10;
/// A link program that does not answer for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the link program can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Nothing passes between the two hosts any more.
    Cut(String, String),
    /// It passes again.
    Heal(String, String),
    /// Another rate and delay for all access links.
    Link(Option<Link>),
    /// The way between two hosts is like this from now on; without any step, like their own links.
    Way(String, String, Vec<Step>),
    /// More steps of that.
    WayOn(String, String, Vec<Step>),
    /// The ways that have conditions of their own.
    Ways,
    /// The figures of every port.
    Figures,
    /// The pairs that are cut.
    Cuts,
}

/// What passed one host's access link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortFigures {
    /// The host.
    pub host: String,
    /// Its counters.
    pub counters: Counters,
}

/// A way between two hosts that has conditions of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WayStatus {
    /// The hosts.
    pub between: (String, String),
    /// What it is like now.
    pub conditions: Conditions,
}

/// The answer to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Done,
    Figures(Vec<PortFigures>),
    Cuts(Vec<(String, String)>),
    Ways(Vec<WayStatus>),
    Refused(String),
}

/// Asks the link program at `path`.
pub(crate) fn ask(path: &Path, request: &Request) -> io::Result<Answer> {
    let socket = packet_socket(SocketFlags::CLOEXEC)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    send(&socket, request)?;
    receive(&socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Makes the socket that requests come in by.
pub(crate) fn serve(path: &Path) -> io::Result<OwnedFd> {
    let socket = packet_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, 16)?;
    Ok(socket)
}

fn packet_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The next caller, if one waits.
pub(crate) fn accept(socket: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

/// Sends one message.
pub(crate) fn send(socket: impl AsFd, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let parts = [IoSlice::new(&bytes)];
    sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message; none if the other side has gone.
pub(crate) fn receive<T: for<'de> Deserialize<'de>>(socket: impl AsFd) -> io::Result<Option<T>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let length = recvmsg(socket, &mut parts, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())?.bytes;
    match bytes.get(..length) {
        None | Some([]) => Ok(None),
        Some(message) => Ok(Some(serde_json::from_slice(message)?)),
    }
}
