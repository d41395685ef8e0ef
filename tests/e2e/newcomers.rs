//! Clients that come while a service moves: each gets its connection and its answer, whatever the moment.
//! Needs root.

use std::{
    io::{Read, Write},
    net::{SocketAddr, SocketAddrV4, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use godwit_tests::{
    CLIENT, MODES, PATIENCE,
    echo::{ADDRESS, Echo, PORT},
};

/// Clients at once, each of which comes again and again.
const CLIENTS: usize = 16;
/// Between two connections of a client: not so many that the client's ports run out.
const THINKING: Duration = Duration::from_millis(1);

/// Connects, asks, is answered, and leaves.
fn visit(at: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

#[test]
fn nobody_who_comes_at_whatever_moment_of_a_move_is_turned_away() {
    // Far clients: of every sixteen some are in the middle of it at any moment.
    let mut echo = Echo::up_over("newcomers", Some("1gbit,5ms".parse().unwrap()));
    let at = SocketAddr::V4(SocketAddrV4::new(ADDRESS, PORT));
    let (over, visits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (over, visits, lab) = (Arc::clone(&over), Arc::clone(&visits), echo.bed.lab().clone());
            let come = move || {
                while !over.load(Ordering::Relaxed) {
                    let visited = lab.inside(CLIENT, || visit(at)).unwrap();
                    visited.unwrap_or_else(|error| panic!("client {number}: {error}"));
                    visits.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(THINKING);
                }
            };
            thread::spawn(come)
        })
        .collect();
    for mode in MODES.iter().cycle().take(2 * MODES.len()) {
        let before = visits.load(Ordering::Relaxed);
        echo.moves(mode);
        assert!(visits.load(Ordering::Relaxed) > before, "{mode}: they come");
    }
    over.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().unwrap();
    }
    println!("{} connections", visits.load(Ordering::Relaxed));
}
