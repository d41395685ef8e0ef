//! Daemons that come and go, and what is not the protocol.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use godwit_memory::pager::{Client, Event, Extent, PagerError, Stored, VERSIONS};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket};

use crate::child::{Op, P};
use crate::service::{PATIENCE, Pager, start, tags};
use crate::{BASE, restored};

#[test]
fn a_daemon_that_comes_again_goes_on_where_the_other_stopped() {
    let mut pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 10, 0));
    pager.pending(7, BASE + 10 * P, 1000);
    let child = restored(&pager, 2000);
    pager.client.push().unwrap();
    child.tell(Op::Read, BASE + 20 * P, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + 20 * P });
    pager.put(7, BASE + 10 * P, &tags(7, BASE + 10 * P, 5, 0));
    // Written, but the daemon dies before it can tell.
    let written = pager.client.store(&[1; 4096 * 3]).unwrap();
    pager.reconnect();
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + 20 * P });
    let state = pager.client.state().unwrap();
    assert!(state.push && state.restore_finished && !state.done);
    assert_eq!((state.pending, state.waiting), (995, 1));
    assert_eq!(pager.client.missing().unwrap(), [Extent { space: 7, addr: BASE + 15 * P, pages: 995 }]);
    assert_eq!(pager.client.store(&[2; 4096]).unwrap(), written);
    pager.put(7, BASE + 15 * P, &tags(7, BASE + 15 * P, 995, 0));
    pager.wait_for(&Event::Done);
    assert_eq!(child.answer().0, tags(7, BASE + 20 * P, 1, 0));
    assert_eq!(child.ask(Op::Read, BASE, 1010, 0), tags(7, BASE, 1010, 0));
    pager.reconnect();
    assert!(pager.client.state().unwrap().done);
    pager.client.abandon().unwrap();
    pager.wait_for_end();
}

#[test]
fn what_a_dead_daemon_stored_and_never_put_is_given_back() {
    let mut pager = Pager::new();
    pager.put(7, BASE, &[1, 2]);
    pager.client.store(&vec![1; 4096 * 500]).unwrap();
    assert!(pager.store_bytes() > 500 * P);
    pager.reconnect();
    assert_eq!(pager.store_bytes(), 2 * P);
}

#[test]
fn faults_are_served_while_no_daemon_is_there() {
    let mut pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 100, 0));
    let child = restored(&pager, 100);
    let (client, events) = Client::connect(pager.path()).unwrap();
    // The second client took the place of the first, and goes away too.
    assert_eq!(pager.events().next(), None);
    assert!(matches!(pager.client.state(), Err(PagerError::Gone { .. })));
    drop(client);
    assert_eq!(events.next(), None);
    assert_eq!(child.ask(Op::Read, BASE, 100, 0), tags(7, BASE, 100, 0));
    pager.reconnect();
    assert_eq!(pager.client.state().unwrap().faults, 7, "16 pages come with each");
}

#[test]
fn long_lists_of_missing_and_stored_pages_are_complete() {
    let pager = Pager::new();
    let missing: Vec<_> = (0..5000).map(|i| Extent { space: 7, addr: BASE + i * 2 * P, pages: 1 }).collect();
    pager.client.pending(&missing).unwrap();
    let first = pager.client.store(&vec![1; 4096 * 3000]).unwrap();
    let stored: Vec<_> = (0..3000)
        .map(|i| Stored { space: 8, addr: BASE + i * P, pages: 1, slot: first + 2999 - i })
        .collect();
    pager.client.put(&stored).unwrap();
    assert_eq!(pager.client.missing().unwrap(), missing);
    assert_eq!(pager.client.index().unwrap(), stored);
    let mut page = [0; 4096];
    pager.client.read(first, &mut page).unwrap();
    assert_eq!(page, [1; 4096]);
}

#[test]
fn more_than_the_bound_is_refused_and_said() {
    let mut pager = Pager::with_bound(100 * P);
    pager.put(7, BASE, &tags(7, BASE, 100, 0));
    // Again, in place of the same.
    pager.put(7, BASE, &tags(7, BASE, 100, 1));
    assert_eq!(pager.client.state().unwrap().failed, "");
    pager.put(7, BASE + 100 * P, &[1]);
    match pager.event() {
        Event::Failed { reason } => assert!(reason.contains("100 are allowed"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let entry = Stored { space: 7, addr: BASE, pages: 1, slot: 500 };
    assert!(matches!(pager.client.put(&[entry]), Err(PagerError::Refused { .. })));
    pager.reconnect();
    assert!(pager.client.put(&[entry]).is_err(), "it is remembered");
    assert_eq!(pager.client.state().unwrap().stored, 100);
}

#[test]
fn a_pager_ends_when_it_is_told() {
    let mut pager = Pager::new();
    assert!(pager.pid().is_some());
    assert!(matches!(start(pager.path(), 1 << 30), Err(PagerError::Start { .. })));
    pager.put(7, BASE, &[1]);
    pager.client.abandon().unwrap();
    pager.wait_for_end();
    // The directory can be used again, at once: nothing of the pager is left when its lock is free.
    for _ in 0..20 {
        start(pager.path(), 1 << 30).unwrap();
        pager.reconnect();
        pager.client.abandon().unwrap();
        // Without the pauses of `wait_for_end`.
        let begun = Instant::now();
        while pager.pid().is_some() {
            assert!(begun.elapsed().as_millis() < u128::from(PATIENCE), "the pager lives on");
        }
    }
    start(pager.path(), 1 << 30).unwrap();
    assert!(pager.pid().is_some());
}

#[test]
fn the_socket_is_for_the_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let pager = Pager::new();
    let mode = std::fs::metadata(pager.path().join("pager.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

pub(crate) fn raw(pager: &Pager) -> OwnedFd {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(socket.as_raw_fd(), &UnixAddr::new(&pager.path().join("pager.sock")).unwrap()).unwrap();
    socket
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    let mut pager = Pager::new();
    pager.put(7, BASE, &[5]);
    let state = pager.client.state().unwrap();
    // Fields: 1 number, 2 Hello{1 version}, 3 Put{1 entry{1 space, 2 addr, 3 pages, 4 slot}}.
    let hello = [0x08, 1, 0x12, 2, 0x08, 1];
    let put_before_hello: &[u8] = &[0x1a, 0];
    let large = vec![0x1a; 100_000];
    let first: [&[u8]; 5] = [&[0xff; 40], &[0x08], &large, put_before_hello, &[]];
    for packet in first {
        let socket = raw(&pager);
        let flags = MsgFlags::MSG_NOSIGNAL;
        send(socket.as_raw_fd(), packet, flags).unwrap();
        assert_eq!(recv(socket.as_raw_fd(), &mut [0; 100], MsgFlags::empty()).unwrap(), 0);
    }
    // After a hello: no request; a page that is none; a slot that is used; one past the end.
    let second: [&[u8]; 4] = [
        &[0x08, 9],
        &[0x1a, 10, 0x0a, 8, 0x08, 7, 0x10, 1, 0x18, 1, 0x20, 9],
        &[0x1a, 9, 0x0a, 7, 0x08, 7, 0x10, 0, 0x18, 1, 0x20],
        &[0x1a, 8, 0x0a, 6, 0x08, 7, 0x18, 1, 0x20, 0],
    ];
    for packet in second {
        let socket = raw(&pager);
        send(socket.as_raw_fd(), &hello, MsgFlags::MSG_NOSIGNAL).unwrap();
        assert!(recv(socket.as_raw_fd(), &mut [0; 1000], MsgFlags::empty()).unwrap() > 0);
        send(socket.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL).unwrap();
        assert_eq!(recv(socket.as_raw_fd(), &mut [0; 1000], MsgFlags::empty()).unwrap(), 0);
    }
    // Another version is told so.
    let socket = raw(&pager);
    send(socket.as_raw_fd(), &[0x08, 1, 0x12, 2, 0x08, 99], MsgFlags::MSG_NOSIGNAL).unwrap();
    let mut answer = [0; 1000];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.contains("version 99"), "{answer}");
    pager.reconnect();
    assert_eq!(pager.client.state().unwrap(), state);
}

/// A pager of another version: it lives, and answers so many hellos with `answer`, or by closing the connection.
fn other_version(
    directory: &std::path::Path,
    answer: Option<Vec<u8>>,
    hellos: usize,
) -> std::thread::JoinHandle<()> {
    use std::os::fd::FromRawFd;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    nix::sys::socket::bind(listener.as_raw_fd(), &UnixAddr::new(&directory.join("pager.sock")).unwrap())
        .unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(4).unwrap()).unwrap();
    std::thread::spawn(move || {
        for _ in 0..hellos {
            let fd = nix::sys::socket::accept(listener.as_raw_fd()).unwrap();
            // SAFETY: it was just made.
            let client = unsafe { OwnedFd::from_raw_fd(fd) };
            let mut hello = [0; 100];
            assert!(recv(client.as_raw_fd(), &mut hello, MsgFlags::empty()).unwrap() > 0);
            if let Some(answer) = &answer {
                send(client.as_raw_fd(), answer, MsgFlags::MSG_NOSIGNAL).unwrap();
                // Until the client goes.
                assert_eq!(recv(client.as_raw_fd(), &mut hello, MsgFlags::empty()), Ok(0));
            }
        }
    })
}

#[test]
fn a_pager_of_another_version_is_told_from_one_that_has_failed() {
    // "no" as Refused; then an answer of a kind that this version does not know; then none at all.
    for answer in [Some(b"\x08\x01\x22\x02no".to_vec()), Some(b"\x08\x01\xfa\x01\x00".to_vec()), None] {
        let directory = tempfile::tempdir().unwrap();
        let lock = std::fs::File::create(directory.path().join("pager.lock")).unwrap();
        let _lives = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusiveNonblock)
            .map_err(|(_, e)| e)
            .unwrap();
        // It is asked in each version.
        let pager = other_version(directory.path(), answer.clone(), VERSIONS.count());
        let met = Client::connect(directory.path()).map(drop);
        assert!(matches!(met, Err(PagerError::Version { .. })), "{answer:?}: {met:?}");
        pager.join().unwrap();
    }
}

#[test]
fn a_pager_that_has_ended_is_not_taken_for_one_of_another_version() {
    let directory = tempfile::tempdir().unwrap();
    let pager = other_version(directory.path(), None, 1);
    let met = Client::connect(directory.path()).map(drop);
    assert!(matches!(met, Err(PagerError::Gone { .. })), "{met:?}");
    pager.join().unwrap();
}
