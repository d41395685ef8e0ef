//! The socket between a client and its pager: the greeting, and packets one at a time.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect, recvmsg, send,
    setsockopt, socket, sockopt::SendTimeout,
};
use nix::sys::stat::Mode;
use nix::sys::time::{TimeVal, TimeValLike};
use prost::Message;

use super::super::protocol::{Answer, Hello, MAX_PACKET, Request, ToClient, ToPager, VERSIONS, Welcome};
use super::super::{PagerError, short};
use super::PATIENCE;

/// A connection in the newest version that the pager speaks, too.
pub(super) fn greet(directory: &Path) -> Result<(OwnedFd, Welcome, OwnedFd), PagerError> {
    let failed = |source| PagerError::File {
        action: "connect to",
        path: directory.join(super::super::SOCKET),
        source,
    };
    let mut refused = String::new();
    for version in VERSIONS.rev() {
        let socket = connect_socket(directory).map_err(failed)?;
        let hello = ToPager { number: 1, request: Some(Request::Hello(Hello { version })) };
        send_packet(&socket, &hello.encode_to_vec()).map_err(failed)?;
        match receive_welcome(&socket, directory) {
            Ok((welcome, store)) => return Ok((socket, welcome, store)),
            Err(PagerError::Refused { reason, .. } | PagerError::Answer { reason, .. }) => refused = reason,
            // It ends the connection for what it does not understand; or it has ended itself.
            Err(PagerError::Gone { .. }) if super::super::running(directory)?.is_some() => {
                refused = "it closes the connection".to_owned();
            }
            Err(error) => return Err(error),
        }
    }
    Err(PagerError::Version { directory: directory.to_owned(), reason: refused })
}

fn connect_socket(directory: &Path) -> io::Result<OwnedFd> {
    let at = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(&short(&at))?)?;
    bound(&socket, PATIENCE)?;
    Ok(socket)
}

/// Bounds how long a packet may wait for room in the socket: a pager that stands still takes none.
fn bound(socket: &OwnedFd, most: Duration) -> io::Result<()> {
    let most = TimeVal::microseconds(i64::try_from(most.as_micros()).unwrap_or(i64::MAX));
    Ok(setsockopt(socket, SendTimeout, &most)?)
}

/// Whether the next packet need not wait for room.
pub(super) fn has_room(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
    // An error is for who sends.
    !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
}

pub(super) fn send_packet(socket: &OwnedFd, packet: &[u8]) -> io::Result<()> {
    loop {
        match send(socket.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

pub(super) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<ToClient> {
    receive_with(socket, buffer, None).map(|(packet, _)| packet)
}

/// One packet and the descriptor that came with it, if one did.
fn receive_with(
    socket: &OwnedFd,
    buffer: &mut [u8],
    control: Option<&mut [u8]>,
) -> io::Result<(ToClient, Option<OwnedFd>)> {
    let mut slices = [IoSliceMut::new(buffer)];
    let wants_fd = control.is_some();
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, control, MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fd = None;
    if wants_fd {
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                for number in numbers {
                    // SAFETY: the kernel made the descriptor for the receiver of the message.
                    fd = Some(unsafe { OwnedFd::from_raw_fd(number) });
                }
            }
        }
    }
    let (length, cut) = (message.bytes, message.flags.contains(MsgFlags::MSG_TRUNC));
    match buffer.get(..length) {
        Some([]) => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(packet) if !cut => ToClient::decode(packet)
            .map(|packet| (packet, fd))
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn receive_welcome(socket: &OwnedFd, directory: &Path) -> Result<(Welcome, OwnedFd), PagerError> {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    let ready = loop {
        match poll(&mut fds, timeout) {
            Err(Errno::EINTR) => {}
            other => break other,
        }
    };
    if ready != Ok(1) {
        return Err(PagerError::Silent { directory: directory.to_owned(), seconds: PATIENCE.as_secs() });
    }
    let mut buffer = vec![0; MAX_PACKET];
    let mut control = nix::cmsg_space!([RawFd; 1]);
    let strange = |reason: String| PagerError::Answer { directory: directory.to_owned(), reason };
    match receive_with(socket, &mut buffer, Some(&mut control)) {
        Ok((ToClient { answer: Some(Answer::Welcome(welcome)), .. }, Some(store))) => Ok((welcome, store)),
        Ok((ToClient { answer: Some(Answer::Refused(reason)), .. }, _)) => {
            Err(PagerError::Refused { directory: directory.to_owned(), reason })
        }
        Ok((packet, _)) => Err(strange(format!("{:?} instead of a welcome", packet.answer))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(PagerError::Gone { directory: directory.to_owned() })
        }
        Err(error) => Err(strange(error.to_string())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use nix::sys::socket::socketpair;

    use super::*;

    #[test]
    fn a_pager_that_takes_nothing_is_not_waited_for_without_end() {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        bound(&ours, Duration::from_millis(20)).unwrap();
        assert!(has_room(&ours));
        let packet = vec![0; MAX_PACKET];
        let error = (0..10_000).find_map(|_| send_packet(&ours, &packet).err());
        assert_eq!(error.expect("there is an end of its room").kind(), io::ErrorKind::WouldBlock);
        assert!(!has_room(&ours));
        drop(theirs);
        assert!(has_room(&ours), "it need not be waited for");
    }
}
