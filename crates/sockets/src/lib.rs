//! The sockets of a network namespace, as the kernel lists them (sock_diag(7)).
//!
//! - [`SockDiag`] is the question: one netlink socket, which asks in the namespace that it was opened in.
//! - [`inet`] has the layouts for TCP and UDP, [`unix`] those for unix sockets.
//!
//! ```text
//! request   nlmsghdr  inet_diag_req_v2 or unix_diag_req
//! answers   nlmsghdr  inet_diag_msg or unix_diag_msg    attributes   …      nlmsghdr NLMSG_DONE
//! ```
//!
//! A part that the kernel cut off is an error, never a guess. What is newer than the fields read here is passed over.
//! Nothing here knows of services, networks or CRIU.
//!
//! The crate `netlink-packet-sock-diag` (0.5) has these messages too. But it needs another `netlink-packet-core` than
//! rtnetlink 0.20, and it refuses a whole socket where a kernel gives a shorter `tcp_info` than it expects.

pub mod inet;
mod message;
pub mod unix;

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use message::Piece;

/// The kernel's answers about the sockets of a network namespace.
#[derive(Debug)]
pub struct SockDiag(OwnedFd);

impl SockDiag {
    /// Asks in the calling thread's network namespace, from whichever thread it is used.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn open() -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::bind(&socket, &kernel)?;
        // Nothing but the kernel can answer.
        rustix::net::connect(&socket, &kernel)?;
        Ok(Self(socket))
    }

    /// Sends a request for all sockets of a kind, and hands on each answer's body.
    fn dump(&self, request: &[u8], mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        self.send(&message::request(message::BY_FAMILY, message::DUMP, request))?;
        let mut buffer = vec![0; message::ANSWERS];
        loop {
            let answers = self.receive(&mut buffer)?;
            if message::read(answers, &mut take)? == Piece::Last {
                return Ok(());
            }
        }
    }

    /// Sends a request for one socket, and returns the answer's body; none where there is no such socket.
    fn one(&self, request: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.send(&message::request(message::BY_FAMILY, 0, request))?;
        let mut buffer = [0; message::ANSWER];
        let mut found = None;
        let read = message::read(self.receive(&mut buffer)?, |body| {
            found = Some(body.to_vec());
            Ok(())
        });
        match read {
            Ok(_) => found.ok_or_else(|| message::malformed("no answer")).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Has the kernel do something with one socket; no error where it is gone.
    fn act(&self, kind: u16, request: &[u8]) -> io::Result<()> {
        self.send(&message::request(kind, message::ACKNOWLEDGED, request))?;
        let mut buffer = [0; message::ANSWER];
        match message::read(self.receive(&mut buffer)?, |_| Ok(())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn send(&self, request: &[u8]) -> io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::net::send(&self.0, request, SendFlags::empty()))?;
        Ok(())
    }

    fn receive<'buffer>(&self, buffer: &'buffer mut [u8]) -> io::Result<&'buffer [u8]> {
        // With TRUNC the kernel returns the answer's whole length.
        let (_, length) =
            rustix::io::retry_on_intr(|| rustix::net::recv(&self.0, &mut *buffer, RecvFlags::TRUNC))?;
        buffer.get(..length).ok_or_else(|| message::malformed("an answer longer than any"))
    }
}
