//! lighttpd, an HTTP server: it answers on connections that stay open for the whole time while it moves between the sets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::base::LIGHTTPD;
use godwit_isa_packages::package::built;
use godwit_isa_packages::travel::{Every, changes, hopping};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{seed, wait_for_changes};

/// A file's contents, different for each name, without a pattern that a shift would not show.
fn contents(name: usize, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(name as u64);
    (0..bytes).map(|_| random.u8(..)).collect()
}

/// One request on a connection that stays, and its whole answer.
fn get(connection: &mut BufReader<TcpStream>, name: usize) -> Result<Vec<u8>> {
    write!(connection.get_mut(), "GET /file{name} HTTP/1.1\r\nHost: here\r\n\r\n")?;
    let mut line = String::new();
    connection.read_line(&mut line)?;
    ensure!(line == "HTTP/1.1 200 OK\r\n", "file{name} was answered by {line:?}");
    let mut length = None;
    loop {
        line.clear();
        ensure!(connection.read_line(&mut line)? > 0, "the connection was closed in the middle of an answer");
        if line == "\r\n" {
            break;
        }
        ensure!(!line.eq_ignore_ascii_case("connection: close\r\n"), "the connection is not kept");
        if let Some((field, value)) = line.split_once(':')
            && field.eq_ignore_ascii_case("content-length")
        {
            length = Some(value.trim().parse::<usize>()?);
        }
    }
    let mut body = vec![0; length.context("an answer without its length")?];
    connection.read_exact(&mut body)?;
    Ok(body)
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn a_server_keeps_its_connections_while_it_moves() -> Result<()> {
    const SIZES: [usize; 5] = [0, 1, 4_000, 70_000, 1_500_000];
    const CLIENTS: usize = 4;
    const LEAST: u64 = 12;

    let program = built(LIGHTTPD)?.join("src/lighttpd");
    let place = tempfile::tempdir()?;
    for (name, bytes) in SIZES.into_iter().enumerate() {
        std::fs::write(place.path().join(format!("file{name}")), contents(name, bytes))?;
    }
    // It is handed the socket on which it listens, so that no other server can take the number meanwhile.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let configuration = format!(
        "server.document-root = \"{}\"\nserver.bind = \"/dev/stdin\"\nserver.max-keep-alive-requests = 1000000\n\
         server.max-keep-alive-idle = 600\nserver.max-read-idle = 600\nserver.max-write-idle = 600\n\
         server.modules = (\"mod_indexfile\", \"mod_staticfile\")\n",
        place.path().display()
    );
    let file = place.path().join("lighttpd.conf");
    std::fs::write(&file, configuration)?;

    let seed = seed();
    let server = hopping(&program, Every::Time("60ms"), seed)?
        .arg("-D")
        .arg("-f")
        .arg(&file)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stderr(Stdio::piped())
        .spawn()?;
    let enough = AtomicBool::new(false);
    let asked = std::thread::scope(|scope| -> Result<usize> {
        let client = |number: usize| {
            let enough = &enough;
            scope.spawn(move || -> Result<usize> {
                let mut connection = BufReader::new(TcpStream::connect(address)?);
                let mut random = fastrand::Rng::with_seed(seed + number as u64);
                let mut asked = 0;
                while !enough.load(Ordering::Relaxed) {
                    let name = random.usize(..SIZES.len());
                    let body = get(&mut connection, name).with_context(|| format!("request {asked}"))?;
                    ensure!(body == contents(name, SIZES[name]), "file{name} came with other bytes");
                    asked += 1;
                }
                Ok(asked)
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        // It has changed the set often enough when the plan beside its state says so.
        let moved = wait_for_changes(server.id(), "lighttpd", LEAST, || {
            clients.iter().any(|client| client.is_finished())
        });
        enough.store(true, Ordering::Relaxed);
        let mut asked = 0;
        for client in clients {
            asked += client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        moved.map(|()| asked)
    });
    kill(Pid::from_raw(i32::try_from(server.id())?), Signal::SIGTERM)?;
    let mut output = server.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let asked = asked.with_context(|| format!("the server said: {said}"))?;
    let moved = changes(&mut output)?;
    ensure!(moved >= LEAST, "it moved {moved} times only");
    ensure!(asked > CLIENTS, "{asked} requests only");
    println!("{asked} requests on {CLIENTS} connections, {moved} changes of the set");
    Ok(())
}
