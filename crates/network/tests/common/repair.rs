//! Moves an established TCP connection between sockets with `TCP_REPAIR`, as CRIU does it: the
//! old socket vanishes without a word to its peer, the new one goes on at the same numbers.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

use std::io;
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const TCP_QUEUE_SEQ: i32 = 21;
const TCP_REPAIR_OPTIONS: i32 = 22;
const RECEIVE_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;
const OPTION_MSS: u32 = 2;
const MSS: u32 = 1410;

/// A connection without data in its queues and without window scaling, timestamps and SACK.
#[derive(Debug, Clone, Copy)]
pub struct Saved {
    local: SocketAddrV4,
    peer: SocketAddrV4,
    received: u32,
    sent: u32,
}

/// Takes a connection out of the kernel.
pub fn save(connection: TcpStream) -> Saved {
    let v4 = |address| match address {
        std::net::SocketAddr::V4(address) => address,
        other @ std::net::SocketAddr::V6(_) => panic!("{other} is not IPv4"),
    };
    let (local, peer) = (v4(connection.local_addr().unwrap()), v4(connection.peer_addr().unwrap()));
    set(&connection, TCP_REPAIR, &1_i32);
    let number = |queue: i32| {
        set(&connection, TCP_REPAIR_QUEUE, &queue);
        get(&connection, TCP_QUEUE_SEQ)
    };
    Saved { local, peer, received: number(RECEIVE_QUEUE), sent: number(SEND_QUEUE) }
}

/// Puts a connection into the kernel, in the calling thread's namespace. It stays silent until
/// [`resume`].
pub fn restore(saved: Saved) -> TcpStream {
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor was just opened, and nobody else has it.
    let connection = TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    set(&connection, TCP_REPAIR, &1_i32);
    with_address(saved.local, |address, length| {
        // SAFETY: `address` is readable for `length` bytes during the call.
        unsafe { libc::bind(fd, address, length) }
    });
    for (queue, number) in [(RECEIVE_QUEUE, saved.received), (SEND_QUEUE, saved.sent)] {
        set(&connection, TCP_REPAIR_QUEUE, &queue);
        set(&connection, TCP_QUEUE_SEQ, &number);
    }
    with_address(saved.peer, |address, length| {
        // SAFETY: `address` is readable for `length` bytes during the call.
        unsafe { libc::connect(fd, address, length) }
    });
    set(&connection, TCP_REPAIR_OPTIONS, &[OPTION_MSS, MSS]);
    connection
}

/// Lets a restored connection go on.
pub fn resume(connection: &TcpStream) {
    set(connection, TCP_REPAIR, &0_i32);
}

fn with_address(address: SocketAddrV4, call: impl FnOnce(*const libc::sockaddr, u32) -> i32) {
    let raw = libc::sockaddr_in {
        sin_family: libc::AF_INET.try_into().unwrap(),
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    };
    let result = call((&raw const raw).cast(), size_of_val(&raw).try_into().unwrap());
    assert_eq!(result, 0, "{address}: {}", io::Error::last_os_error());
}

fn set<T>(socket: &TcpStream, option: i32, value: &T) {
    let length = size_of::<T>().try_into().unwrap();
    // SAFETY: `value` is readable for its size during the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const *value).cast(), length)
    };
    assert_eq!(result, 0, "option {option}: {}", io::Error::last_os_error());
}

fn get(socket: &TcpStream, option: i32) -> u32 {
    let (mut value, mut length) = (0_u32, 4);
    // SAFETY: `value` is writable for `length` bytes, and `length` itself is writable.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    assert_eq!(result, 0, "option {option}: {}", io::Error::last_os_error());
    value
}
