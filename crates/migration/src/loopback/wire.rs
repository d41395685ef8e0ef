//! The way between the two nodes: it passes TLS records on, counts them, and can be slow, or cut after each.
//!
//! The connections are the real ones, TLS over TCP, by way of a relay on the loopback interface. What a node writes at
//! once is a record, or several where it is long: nothing is cut more coarsely than frames are sent.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_util::task::AbortOnDropHandle;

use super::machine::Machine;

/// Which way a record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    There,
    Back,
}

/// What happens on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    Never,
    /// A connection, numbered in the order in which they are made, after so many records in one direction.
    After {
        connection: usize,
        way: Way,
        records: usize,
    },
}

/// A connection, numbered as for [`Cut`], one direction of which takes so long for each record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slow {
    pub(super) connection: usize,
    pub(super) way: Way,
    pub(super) each: Duration,
}

/// Done at a record of all connections together.
type Deed = Box<dyn FnOnce() + Send>;

/// One world's.
pub(super) struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
    _relay: AbortOnDropHandle<()>,
}

struct Shared {
    cut: Cut,
    slow: Option<Slow>,
    connections: AtomicUsize,
    records: AtomicUsize,
    deed: Mutex<Option<(usize, Deed)>>,
    happened: AtomicUsize,
}

/// All relays run here.
static RELAYS: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

impl Wire {
    /// A wire to a node.
    pub(super) fn new(to: &Arc<Machine>, cut: Cut, slow: Option<Slow>, deed: Option<(usize, Deed)>) -> Self {
        let listener = RELAYS.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            cut,
            slow,
            connections: AtomicUsize::new(0),
            records: AtomicUsize::new(0),
            deed: Mutex::new(deed),
            happened: AtomicUsize::new(0),
        });
        let relay = relay(listener, Arc::clone(to), Arc::clone(&shared));
        Self { address, shared, _relay: AbortOnDropHandle::new(RELAYS.spawn(relay)) }
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// How many connections were made.
    pub(super) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Whether it was cut, or the deed done.
    pub(super) fn has_happened(&self) -> bool {
        self.shared.happened.load(Ordering::SeqCst) > 0
    }
}

async fn relay(listener: TcpListener, to: Arc<Machine>, shared: Arc<Shared>) {
    loop {
        let Ok((near, _)) = listener.accept().await else { return };
        let number = shared.connections.fetch_add(1, Ordering::SeqCst);
        let (to, shared) = (Arc::clone(&to), Arc::clone(&shared));
        tokio::spawn(async move {
            // Nobody listens while the daemon is down.
            let Some(address) = to.address() else { return };
            if let Ok(far) = TcpStream::connect(address).await {
                // A connection that breaks is what the test is about.
                let _ = carry(near, far, number, &shared).await;
            }
        });
    }
}

async fn carry(mut near: TcpStream, mut far: TcpStream, number: usize, shared: &Shared) -> io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (from_near, to_near) = near.split();
    let (from_far, to_far) = far.split();
    tokio::try_join!(
        pass(from_near, to_far, number, Way::There, shared),
        pass(from_far, to_near, number, Way::Back, shared)
    )?;
    Ok(())
}

/// Passes records on until there are no more; an error where the connection is cut.
async fn pass(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    connection: usize,
    way: Way,
    shared: &Shared,
) -> io::Result<()> {
    for records in 0.. {
        if shared.cut == (Cut::After { connection, way, records }) {
            shared.happened.fetch_add(1, Ordering::SeqCst);
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let mut head = [0; 5];
        match from.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            read => read?,
        };
        let mut record = vec![0; 5 + usize::from(u16::from_be_bytes([head[3], head[4]]))];
        record[..5].copy_from_slice(&head);
        from.read_exact(&mut record[5..]).await?;
        if let Some(slow) = shared.slow.filter(|slow| (slow.connection, slow.way) == (connection, way)) {
            tokio::time::sleep(slow.each).await;
        }
        to.write_all(&record).await?;
        let number = shared.records.fetch_add(1, Ordering::SeqCst);
        let deed =
            shared.deed.lock().unwrap_or_else(PoisonError::into_inner).take_if(|(at, _)| *at == number);
        if let Some((_, deed)) = deed {
            shared.happened.fetch_add(1, Ordering::SeqCst);
            deed();
        }
    }
    to.shutdown().await
}
