//! What is tried once in a pause, beside the load: the ways to a service that the load does not take.
//!
//! | field | what is asked as soon as the freeze is heard of |
//! |---|---|
//! | `new_ms` | a connection that did not exist, and a byte over it |
//! | `outgoing_ms` | a byte over a connection that the service had opened to the client |
//! | `datagram_ms` | a datagram: nobody sends it again |
//!
//! Each is the time until the answer was there; where none came, `…_error` says why. What is held waits for the
//! rest of the pause; what is dropped waits for a retransmission time-out, or for ever.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use godwit_lab::Lab;
use serde_json::Value;

use super::{parts::Orders, service::Service};

/// How long an answer is waited for: long enough for several retransmissions.
const PATIENCE: Duration = Duration::from_secs(10);

/// Probes that wait for the word.
pub(super) struct Probes(Vec<Probe>);

struct Probe {
    field: &'static str,
    go: Sender<()>,
    thread: JoinHandle<Option<io::Result<Duration>>>,
}

impl Probes {
    /// Opens what has to be open before, from the lab's client. Blocks.
    pub(super) fn prepare(lab: &Lab, service: Service) -> anyhow::Result<Self> {
        let at = SocketAddrV4::new(service.address, service.port);
        let client = lab.address("client")?;
        let inside = lab.clone();
        let new = move || -> io::Result<()> {
            let connect = || TcpStream::connect_timeout(&at.into(), PATIENCE);
            let mut stream = inside.inside("client", connect).map_err(io::Error::other)??;
            exchange(&mut stream)
        };
        let mut outgoing = opened_by(lab, service, client)?;
        let socket = lab.inside("client", || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))??;
        socket.connect(at)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        // The way is known before: this is about the pause.
        let datagram = move || -> io::Result<()> {
            socket.send(b"?")?;
            socket.recv(&mut [0]).map(drop)
        };
        datagram().context("the service does not answer datagrams")?;
        Ok(Self(vec![
            Probe::start("new", new)?,
            Probe::start("outgoing", move || exchange(&mut outgoing))?,
            Probe::start("datagram", datagram)?,
        ]))
    }

    /// The service is frozen.
    pub(super) fn go(&self) -> anyhow::Result<()> {
        self.0.iter().try_for_each(|probe| probe.go.send(())).context("a probe has ended before its time")
    }

    /// What became of them. Blocks.
    pub(super) fn finish(self, row: &mut Value) -> anyhow::Result<()> {
        for Probe { field, go, thread } in self.0 {
            // One that was not told to go ends now.
            drop(go);
            let took = thread.join().map_err(|_| anyhow::anyhow!("the probe {field} has panicked"))?;
            match took {
                Some(Ok(took)) => row[format!("{field}_ms")] = (took.as_secs_f64() * 1e3).into(),
                Some(Err(error)) => row[format!("{field}_error")] = error.to_string().into(),
                None => {}
            }
        }
        Ok(())
    }
}

impl Probe {
    fn start(
        field: &'static str,
        mut ask: impl FnMut() -> io::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (go, told): (_, Receiver<()>) = channel();
        let thread = thread::Builder::new().name("probe".into()).spawn(move || {
            // Not told: there was no pause.
            told.recv().ok()?;
            let begun = Instant::now();
            Some(ask().map(|()| begun.elapsed()))
        })?;
        Ok(Self { field, go, thread })
    }
}

/// A connection that the service opens.
fn opened_by(lab: &Lab, service: Service, client: Ipv4Addr) -> anyhow::Result<TcpStream> {
    let listener = lab.inside("client", || TcpListener::bind((client, 0)))??;
    let orders = SocketAddrV4::new(service.address, service.port + 2);
    let connect = || Ok(lab.inside("client", || TcpStream::connect(orders))??);
    let order = format!("connect {client}:{} 1", listener.local_addr()?.port());
    let answer = Orders::connect(connect)?.give(&order)?;
    anyhow::ensure!(answer == "ok", "the service answers {answer:?} to {order:?}");
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    exchange(&mut stream)?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}
