//! A pager under test, with a client as the daemon has it and CRIU's side of its socket.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::pager::{Client, Event, Events, Extent, PagerError, Stored, end, running, spawn};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tempfile::TempDir;

use crate::child::P;

/// How long what the pager does by itself may take on a busy machine.
const IN_THE_END: Duration = Duration::from_secs(60);

/// How long an event may take. It is reached only when something is broken.
pub(crate) const PATIENCE: u16 = 20_000;

pub(crate) struct Pager {
    pub(crate) directory: TempDir,
    pub(crate) client: Arc<Client>,
    /// A test may take them.
    pub(crate) events: Option<Events>,
}

impl Pager {
    pub(crate) fn new() -> Self {
        Self::with_bound(1 << 40)
    }

    pub(crate) fn with_bound(max_bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        start(directory.path(), max_bytes).unwrap();
        let (client, events) = Client::connect(directory.path()).unwrap();
        Self { directory, client: Arc::new(client), events: Some(events) }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        running(self.path()).unwrap()
    }

    /// The daemon crashes and comes again.
    pub(crate) fn reconnect(&mut self) {
        let (client, events) = Client::connect(self.path()).unwrap();
        self.client = Arc::new(client);
        self.events = Some(events);
    }

    /// Stores pages with these tags and puts them.
    pub(crate) fn put(&self, space: u32, addr: u64, tags: &[u64]) {
        put(&self.client, space, addr, tags);
    }

    pub(crate) fn pending(&self, space: u32, addr: u64, pages: u64) {
        self.client.pending(&[Extent { space, addr, pages }]).unwrap();
    }

    pub(crate) fn zero(&self, space: u32, addr: u64, pages: u64) {
        self.client.zero(&[Extent { space, addr, pages }]).unwrap();
    }

    /// CRIU restores these pages from its images.
    pub(crate) fn in_images(&self, space: u32, addr: u64, pages: u64) {
        self.client.in_images(&[Extent { space, addr, pages }]).unwrap();
    }

    /// Children have these pages empty.
    pub(crate) fn wiped_on_fork(&self, space: u32, addr: u64, pages: u64) {
        self.client.wiped_on_fork(&[Extent { space, addr, pages }]).unwrap();
    }

    pub(crate) fn events(&self) -> &Events {
        self.events.as_ref().unwrap()
    }

    pub(crate) fn event(&self) -> Event {
        use std::os::fd::AsFd;
        let mut fds = [nix::poll::PollFd::new(self.events().as_fd(), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut fds, PATIENCE).unwrap(), 1, "no event: {:?}", self.client.state());
        self.events().next().expect("the pager is gone")
    }

    /// Waits for an event, past faults.
    pub(crate) fn wait_for(&self, wanted: &Event) {
        loop {
            match self.event() {
                event if event == *wanted => return,
                Event::Fault { .. } => {}
                other => panic!("{other:?} instead of {wanted:?}"),
            }
        }
    }

    /// Bytes that the page store takes.
    pub(crate) fn store_bytes(&self) -> u64 {
        let pid = self.pid().unwrap();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let path = entry.unwrap().path();
            if std::fs::read_link(&path).unwrap().to_string_lossy().contains("memfd:godwit-pages") {
                use std::os::unix::fs::MetadataExt;
                return std::fs::metadata(&path).unwrap().blocks() * 512;
            }
        }
        panic!("the pager has no store");
    }

    /// Waits until the store is empty. Where shared memory comes in huge pages it never is: the kernel has made more
    /// of them than was written.
    pub(crate) fn wait_for_empty_store(&self) {
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        if setting.is_ok_and(|text| text.contains("[always]") || text.contains("[force]")) {
            return;
        }
        let begun = Instant::now();
        while begun.elapsed() < IN_THE_END {
            if self.store_bytes() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(5)); // a hole in a file is no event
        }
        panic!("the store holds {} bytes", self.store_bytes());
    }

    /// Waits until the pager process is gone.
    pub(crate) fn wait_for_end(&self) {
        while self.events().next().is_some() {}
        let begun = Instant::now();
        while begun.elapsed() < IN_THE_END {
            if self.pid().is_none() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5)); // the lock's end is no event
        }
        panic!("the pager lives on");
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.directory.path().join("log"));
            eprintln!("the pager's log: {}", log.unwrap_or_default());
        }
        // Also the guard.
        let _ = end(self.directory.path());
    }
}

/// Stores pages with these tags and puts them.
pub(crate) fn put(client: &Client, space: u32, addr: u64, tags: &[u64]) {
    let bytes: Vec<u8> = tags.iter().flat_map(|tag| tag.to_ne_bytes().repeat(512)).collect();
    let slot = client.store(&bytes).unwrap();
    let entry = Stored { space, addr, pages: tags.len() as u64, slot };
    client.put(&[entry]).unwrap();
}

pub(crate) fn start(directory: &Path, max_bytes: u64) -> Result<(), PagerError> {
    let binary = Path::new(env!("CARGO_BIN_EXE_godwit-pager"));
    spawn(binary, directory, max_bytes, &directory.join("log"))
}

/// CRIU's restorer.
pub(crate) struct Criu(UnixStream);

impl Criu {
    /// The pager listens in its own directory.
    pub(crate) fn connect(pager: &Pager) -> Self {
        pager.client.listen(pager.path()).unwrap();
        Self::connect_to(pager.path())
    }

    pub(crate) fn connect_to(directory: &Path) -> Self {
        Self(UnixStream::connect(directory.join("lazy-pages.socket")).unwrap())
    }

    pub(crate) fn process(&mut self, pid: i32, uffd: &OwnedFd) {
        self.0.write_all(&pid.to_ne_bytes()).unwrap();
        let fds = [uffd.as_raw_fd()];
        let control = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(&[0])], &control, MsgFlags::empty(), None).unwrap();
    }

    pub(crate) fn zombie(&mut self, pid: i32) {
        self.0.write_all(&(-pid).to_ne_bytes()).unwrap();
    }

    pub(crate) fn finished(mut self) {
        self.0.write_all(&0x5253_5446_u32.to_ne_bytes()).unwrap();
        // The pager closes its end.
        assert_eq!(self.0.read(&mut [0]).unwrap(), 0);
    }
}

/// Tags that are never zero, different for every page.
pub(crate) fn tags(space: u32, addr: u64, pages: u64, version: u64) -> Vec<u64> {
    (0..pages).map(|i| (u64::from(space) << 56) | (version << 48) | (addr / P + i) | 1 << 47).collect()
}
