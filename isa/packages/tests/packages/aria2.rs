//! aria2, a server in C++: it answers on connections that stay open, in good cases and by exceptions, while it moves between
//! the sets.

use std::io::BufReader;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::aria2::ask;
use godwit_isa_packages::base::ARIA2;
use godwit_isa_packages::package::built;
use godwit_isa_packages::travel::{Every, changes, hopping};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{seed, wait_for_changes};

/// It listens a while after it has been started.
fn connect(address: SocketAddr, server: &mut Child) -> Result<BufReader<TcpStream>> {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(BufReader::new(stream)),
            Err(_) if server.try_wait()?.is_none() => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(error).context("the server has ended before it listened"),
        }
    }
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn a_server_in_cxx_answers_and_throws_while_it_moves() -> Result<()> {
    const CLIENTS: u64 = 4;
    const LEAST: u64 = 12;

    let program = built(ARIA2)?.join("src/aria2c");
    // A number that is free now; aria2 takes no socket from its parent.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let port = format!("--rpc-listen-port={}", address.port());
    let mut server = hopping(&program, Every::Time("250ms"), seed())?
        .args(["--no-conf", "--enable-rpc", "--disable-ipv6", "--quiet", &port])
        .stderr(Stdio::piped())
        .spawn()?;
    let mut connections = Vec::new();
    for _ in 0..CLIENTS {
        connections.push(connect(address, &mut server)?);
    }
    let (enough, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    let answered = std::thread::scope(|scope| -> Result<()> {
        let client = |mut connection: BufReader<TcpStream>| {
            let (enough, turns) = (&enough, &turns);
            scope.spawn(move || -> Result<()> {
                while !enough.load(Ordering::Relaxed) {
                    ask(&mut connection, 1 + turns.fetch_add(1, Ordering::Relaxed))?;
                }
                Ok(())
            })
        };
        let clients: Vec<_> = connections.into_iter().map(client).collect();
        let moved = wait_for_changes(server.id(), "aria2c", LEAST, || {
            clients.iter().any(|client| client.is_finished())
        });
        enough.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        moved
    });
    kill(Pid::from_raw(i32::try_from(server.id())?), Signal::SIGTERM)?;
    let mut output = server.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    answered.with_context(|| format!("the server said: {said}"))?;
    let moved = changes(&mut output)?;
    ensure!(moved >= LEAST, "it moved {moved} times only");
    let turns = turns.into_inner();
    ensure!(turns > LEAST, "{turns} turns only");
    println!("{turns} turns on {CLIENTS} connections, {moved} changes of the set");
    Ok(())
}
