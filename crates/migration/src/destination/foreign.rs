//! A service whose pager is of a version with which this daemon cannot speak.
//!
//! The pager has outlived the daemon that started it, and works alone: the service runs, and the pager puts the pages
//! that it has in place. Pages that are still at the source stay there, and a process that needs one waits. Nothing is
//! lost as long as this daemon ends nothing. So it only says what to do, and asks the pager again until that answers or
//! is gone, or the service has ended.

use std::path::PathBuf;
use std::time::Duration;

use super::Memory;
use super::own::ended;
use super::recover::memory_in;
use crate::arrivals::Arrival;
use crate::resources::NodeResources;
use crate::service::Service;

/// Between two attempts: a pager does not change, but it may end.
const AGAIN: Duration = Duration::from_secs(5);

/// Pages in the care of such a pager.
pub(crate) struct Foreign {
    /// The pager's.
    directory: PathBuf,
    arrival: Arrival,
    /// Why it cannot be spoken with, and what to do.
    why: String,
}

impl Foreign {
    /// The pager in this directory cannot be spoken with, for this reason.
    pub(super) fn new(directory: PathBuf, arrival: Arrival, error: String) -> Self {
        let why = format!(
            "{error}; the service runs on with the pages that its pager has, and the pages that it lacks stay at its source: run the godwitd of the version with which the service came here until it is complete, or stop the service when that suits you (docs/compatibility.md)"
        );
        arrival.is_stuck(why.clone());
        Self { directory, arrival, why }
    }

    /// Waits until the pager can be spoken with, or is gone; or the service has ended.
    pub(super) async fn wait(self, local: &NodeResources, service: &Service, id: &str) -> Memory {
        let Self { why, .. } = &self;
        tracing::error!(migration = %id, service = %service.name, %why, "the service stays as it is");
        local.cluster.told(service, why).await;
        let (service, pause) = (ended(local, service), AGAIN);
        self.until(service, pause).await
    }

    async fn until(mut self, ended: impl Future<Output = ()>, pause: Duration) -> Memory {
        tokio::pin!(ended);
        loop {
            tokio::select! {
                () = &mut ended => return Memory::Foreign(self),
                // The source tries again.
                Some(connection) = self.arrival.connections.recv() => drop(connection),
                () = tokio::time::sleep(pause) => match memory_in(self.directory.clone(), self.arrival).await {
                    Memory::Foreign(again) => self = again,
                    other => return other,
                },
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::path::Path;
    use std::sync::Arc;

    use nix::fcntl::{Flock, FlockArg};
    use nix::sys::socket::{
        AddressFamily, Backlog, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, accept, bind, listen, recv,
        send, shutdown, socket,
    };
    use tokio::sync::mpsc;

    use super::*;
    use crate::arrivals::Arrivals;

    /// A pager that refuses all clients, until it is dropped.
    struct Other {
        _lives: Flock<File>,
        socket: Arc<OwnedFd>,
        refused: mpsc::UnboundedReceiver<()>,
    }

    impl Other {
        fn start(directory: &Path) -> Self {
            let lock = File::create(directory.join("pager.lock")).unwrap();
            let lives = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e).unwrap();
            let socket =
                socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
            bind(socket.as_raw_fd(), &UnixAddr::new(&directory.join("pager.sock")).unwrap()).unwrap();
            listen(&socket, Backlog::new(4).unwrap()).unwrap();
            let (socket, (sender, refused)) = (Arc::new(socket), mpsc::unbounded_channel());
            let listener = Arc::clone(&socket);
            std::thread::spawn(move || {
                while let Ok(client) = accept(listener.as_raw_fd()) {
                    // SAFETY: it was just made.
                    let client = unsafe { OwnedFd::from_raw_fd(client) };
                    let mut hello = [0; 100];
                    assert!(recv(client.as_raw_fd(), &mut hello, MsgFlags::empty()).unwrap() > 0);
                    // `Refused("no")`; a client that has gone does not take it.
                    let _ = send(client.as_raw_fd(), b"\x08\x01\x22\x02no", MsgFlags::MSG_NOSIGNAL);
                    let _ = sender.send(());
                }
            });
            Self { _lives: lives, socket, refused }
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            shutdown(self.socket.as_raw_fd(), Shutdown::Both).unwrap();
        }
    }

    #[tokio::test]
    async fn pages_in_a_pager_of_another_version_are_not_lost_and_the_pager_is_waited_for() {
        let (directory, arrivals) = (tempfile::tempdir().unwrap(), Arrivals::default());
        let mut pager = Other::start(directory.path());
        let arrival = arrivals.expect("01A", "a", "redis");
        let memory = memory_in(directory.path().to_owned(), arrival).await;
        let Memory::Foreign(foreign) = memory else { panic!("it must not be lost, nor whole") };
        assert!(arrivals.settled("redis").await.unwrap_err().contains("cannot speak"));

        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let ended = async { assert!(ended.await.is_err()) };
        let waiting = tokio::spawn(foreign.until(ended, Duration::from_millis(1)));
        for _ in 0..3 {
            pager.refused.recv().await.unwrap();
        }
        // The service ends: only then is it waited for no more.
        drop(end);
        assert!(matches!(waiting.await.unwrap(), Memory::Foreign(_)));
    }

    #[tokio::test]
    async fn a_pager_of_another_version_that_ends_takes_its_pages_with_it() {
        let (directory, arrivals) = (tempfile::tempdir().unwrap(), Arrivals::default());
        let pager = Other::start(directory.path());
        let arrival = arrivals.expect("01A", "a", "redis");
        let memory = memory_in(directory.path().to_owned(), arrival).await;
        let Memory::Foreign(foreign) = memory else { panic!("it must not be lost, nor whole") };
        drop(pager);
        let memory = foreign.until(std::future::pending(), Duration::from_millis(1)).await;
        assert!(matches!(memory, Memory::Lost(_)));
    }
}
