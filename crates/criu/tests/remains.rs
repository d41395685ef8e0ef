//! What a killed CRIU has left is put right, in real processes.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use godwit_criu::remains;
use nix::errno::Errno;
use nix::sys::socket::sockopt::{ReuseAddr, TcpRepair};
use nix::sys::socket::{getsockopt, setsockopt};

/// A process that has these sockets, too, and does nothing with them.
fn holder(connection: &TcpStream, listener: &TcpListener) -> Child {
    let none = rustix::io::FdFlags::empty();
    rustix::io::fcntl_setfd(connection, none).unwrap();
    rustix::io::fcntl_setfd(listener, none).unwrap();
    Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_connection_in_repair_mode_works_again_and_has_its_options() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    client.write_all(b"question").unwrap();
    let mut holder = holder(&server, &listener);
    setsockopt(&server, TcpRepair, &1).unwrap();
    assert_eq!(server.read(&mut [0; 8]).unwrap_err().raw_os_error(), Some(Errno::EPERM as i32));

    assert_eq!(remains::clear(&[holder.id()]).unwrap(), 1);
    assert_eq!(getsockopt(&server, TcpRepair).unwrap(), 0);
    assert!(getsockopt(&listener, ReuseAddr).unwrap(), "the standard library sets it");
    assert!(getsockopt(&server, ReuseAddr).unwrap(), "or the service could not listen there again");
    let mut heard = [0; 8];
    server.read_exact(&mut heard).unwrap();
    server.write_all(&heard).unwrap();
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"question");
    assert_eq!(remains::clear(&[holder.id()]).unwrap(), 0, "nothing is left to do");

    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    assert_eq!(remains::clear(&[holder.id()]).unwrap(), 0, "of a process that is gone");
}
