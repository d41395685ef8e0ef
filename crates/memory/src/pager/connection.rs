//! The pager's end of the connection to its client: packets in, packets out, never waiting.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, SockFlag, accept4, recv, sendmsg};
use prost::Message;

use super::protocol::{Answer, MAX_PACKET, ToClient, ToPager};
use super::store::Store;

/// The connection.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    /// The client has said hello in our version.
    pub(crate) greeted: bool,
    /// The socket is watched for room.
    pub(crate) waits_to_send: bool,
    out: VecDeque<Vec<u8>>,
    /// Goes with the first packet.
    store: Option<Arc<Store>>,
    buffer: Vec<u8>,
}

impl Connection {
    /// The client that connects, if one does.
    pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<Self>> {
        match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK) {
            Ok(fd) => Ok(Some(Self {
                // SAFETY: the descriptor was just made for us.
                socket: unsafe { OwnedFd::from_raw_fd(fd) },
                greeted: false,
                waits_to_send: false,
                out: VecDeque::new(),
                store: None,
                buffer: vec![0; MAX_PACKET],
            })),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The next packet, if one has come. An error is the end of the connection.
    pub(crate) fn receive(&mut self) -> io::Result<Option<ToPager>> {
        // With MSG_TRUNC the length is the packet's, also when it does not fit.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
        let length = match recv(self.socket.as_raw_fd(), &mut self.buffer, flags) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => length,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let garbage = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
        let packet = self
            .buffer
            .get(..length)
            .ok_or_else(|| garbage(format!("a packet of {length} bytes, of {MAX_PACKET} at most")))?;
        ToPager::decode(packet).map(Some).map_err(|error| garbage(error.to_string()))
    }

    /// Sends the store with the next packet.
    pub(crate) fn attach(&mut self, store: Arc<Store>) {
        self.store = Some(store);
    }

    /// Queues a packet.
    pub(crate) fn send(&mut self, number: u64, answer: Answer) {
        self.out.push_back(ToClient { number, answer: Some(answer) }.encode_to_vec());
    }

    /// Sends what the socket takes; `true` if something is left. An error is the end of the
    /// connection.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while let Some(packet) = self.out.front() {
            let store = self.store.as_ref().map(|store| [store.as_fd().as_raw_fd()]);
            let control: Vec<_> = store.iter().map(|fds| ControlMessage::ScmRights(fds)).collect();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(packet)], &control, flags, None) {
                Ok(_) => {}
                Err(Errno::EAGAIN) => return Ok(true),
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            self.store = None;
            self.out.pop_front();
        }
        Ok(false)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
