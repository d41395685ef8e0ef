//! Network, standstill, mounts and pagers of a node: fakes that note what was done to them, in the [`Machine`]; but for
//! the pagers, which are the real ones, each in a thread.

use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use godwit_criu::images::Unacknowledged;
use godwit_criu::obstacles::UnixSockets;
use godwit_engine::DefinedTmpfs;
use godwit_engine::rootfs::{Overlay, RootfsError};
use godwit_memory::pager::{Client, PagerError, Server, running};
use godwit_memory::shared::Filler;
use godwit_network::{Handed, NetworkError};

use super::machine::{Machine, Plug};
use crate::attach::Attach;
use crate::listeners::{Listening, Waiting};
use crate::mounts::Mounts;
use crate::pagers::Pagers;
use crate::service::Service;
use crate::standstill::Stand;
use crate::terms::OverlayTerms;

/// Network and standstill.
pub(super) struct Network(pub(super) Arc<Machine>);

fn injected() -> io::Error {
    io::Error::other("a fault is injected")
}

impl Network {
    fn step<T>(&self, verb: &str, work: impl FnOnce() -> Result<T, NetworkError>) -> Result<T, NetworkError> {
        let failed = || Err(NetworkError::NoNft(injected()));
        self.0.script.step(&format!("net.{verb}"), work).unwrap_or_else(failed)
    }

    /// Changes a service's place in the network, where it has one.
    fn change(
        &self,
        verb: &str,
        service: &Service,
        change: impl FnOnce(&mut Plug),
    ) -> Result<(), NetworkError> {
        self.step(verb, || {
            let gone = || {
                NetworkError::NoNft(io::Error::other(format!("{verb} of a service that is not plugged in")))
            };
            self.0.there().plugs.get_mut(&service.name).map(change).ok_or_else(gone)
        })
    }
}

#[async_trait]
impl Attach for Network {
    fn terms(&self) -> OverlayTerms {
        OverlayTerms { mtu: 1450, vxlan_port: 4789, encryption: "off".into(), prefix6: String::new() }
    }

    async fn plug(&self, service: &Service) -> Result<(), NetworkError> {
        self.step("plug", || {
            self.0.there().plugs.entry(service.name.clone()).or_default();
            Ok(())
        })
    }

    async fn join(&self, _service: &Service, _pid: u32) -> Result<bool, NetworkError> {
        Ok(false)
    }

    fn name_server(&self, _service: &Service) -> Option<Ipv4Addr> {
        None
    }

    async fn open(&self, service: &Service) -> Result<Handed, NetworkError> {
        let opened = self.change("open", service, |plug| {
            (plug.open, plug.held, plug.steered) = (true, false, false);
        });
        if self.0.there().containers.get(&service.name).is_some_and(|container| container.in_repair) {
            self.0.accuse("the port is open while connections are in repair mode".into());
        }
        opened.map(|()| Handed::default())
    }

    async fn close(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("close", service, |plug| plug.open = false)
    }

    async fn hold_for(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("hold_for", service, |plug| plug.held = true)
    }

    async fn hold_no_more(&self, _: &Service) -> Result<(), NetworkError> {
        self.step("hold_no_more", || Ok(()))
    }

    async fn bar_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("bar_newcomers", service, |plug| plug.barred = true)
    }

    async fn admit_newcomers(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("admit_newcomers", service, |plug| plug.barred = false)
    }

    async fn steer(&self, service: &Service, _: Ipv4Addr) -> Result<(), NetworkError> {
        self.change("steer", service, |plug| (plug.open, plug.steered) = (false, true))
    }

    fn forget_connections(&self, _: &[u32]) -> Result<(), NetworkError> {
        unreachable!("the service is in the overlay")
    }

    async fn unplug(&self, service: &Service) -> Result<(), NetworkError> {
        self.step("unplug", || {
            self.0.there().plugs.remove(&service.name);
            Ok(())
        })
    }

    fn check_namespace(&self, _: &Path) -> Result<(), NetworkError> {
        unreachable!("the service is in the overlay")
    }

    async fn listeners(&self, _: &Service) -> Result<io::Result<Box<dyn Listening>>, NetworkError> {
        self.step("listeners", || Ok(Ok(Box::new(Quiet(Arc::clone(&self.0))) as Box<dyn Listening>)))
    }

    async fn unix_sockets(&self, _: &Service, _: u32) -> Result<io::Result<UnixSockets>, NetworkError> {
        // Processes here talk to the test, which a real service could not.
        self.step("unix_sockets", || Ok(Err(io::ErrorKind::Unsupported.into())))
    }
}

/// Nobody connects.
struct Quiet(Arc<Machine>);

impl Listening for Quiet {
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        self.0.script.step("net.waiting", || Ok(None)).unwrap_or_else(|| Err(injected()))
    }

    fn being_made(&self, _: Duration) -> io::Result<bool> {
        self.0.script.step("net.being_made", || Ok(false)).unwrap_or_else(|| Err(injected()))
    }
}

#[async_trait]
impl Stand for Network {
    async fn stand_ready(&self, _: &Service) -> Result<(), NetworkError> {
        self.step("stand_ready", || Ok(()))
    }

    fn stand(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("stand", service, |plug| plug.apart = true)
    }

    fn stand_apart(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("stand_apart", service, |plug| plug.apart = true)
    }

    fn look_at_doubts(&self, _: &Service, _: Vec<Unacknowledged>) {}

    async fn speak(&self, service: &Service) -> Result<(), NetworkError> {
        self.change("speak", service, |plug| plug.apart = false)
    }

    fn say_again(&self, _: &Service) {}

    fn resend(&self, _: &Service) {}

    async fn stand_down(&self, service: &Service) {
        // Where it fails the service is not to suffer.
        let _ = self.change("stand_down", service, |plug| plug.apart = false);
    }

    async fn stand_nowhere(&self, _: &Service) -> Result<(), NetworkError> {
        self.step("stand_nowhere", || Ok(()))
    }

    fn forget(&self, _: &Service) {}
}

/// Mounts, of which directories are made in their place.
pub(super) struct Directories(pub(super) Arc<Machine>);

impl Directories {
    fn root(&self, verb: &str, root: &Overlay, work: impl FnOnce()) -> Result<(), RootfsError> {
        let failed =
            || RootfsError::Mount { target: root.target.clone(), action: verb.into(), source: injected() };
        self.0.script.step(&format!("mounts.{verb}"), work).ok_or_else(failed)
    }

    fn memory(&self, verb: &str, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.0.script.step(&format!("mounts.{verb}"), work).unwrap_or_else(|| Err(injected()))
    }
}

impl Mounts for Directories {
    fn mount_root(&self, root: &Overlay) -> Result<(), RootfsError> {
        self.root("mount_root", root, || {
            self.0.there().roots.insert(root.target.clone());
        })
    }

    fn unmount_root(&self, root: &Overlay) -> Result<(), RootfsError> {
        self.root("unmount_root", root, || {
            self.0.there().roots.remove(&root.target);
        })
    }

    fn mount_memory(&self, path: &Path, _: u64) -> io::Result<()> {
        self.memory("mount_memory", || {
            self.0.there().memories.insert(path.to_owned());
            Ok(())
        })
    }

    fn mount_tmpfs(&self, _: &Path, _: &DefinedTmpfs) -> io::Result<()> {
        self.memory("mount_tmpfs", || Ok(()))
    }

    fn unmount_memory(&self, path: &Path) -> io::Result<()> {
        self.memory("unmount_memory", || {
            if self.0.there().memories.remove(path) {
                // What was in it is gone.
                std::fs::remove_dir_all(path)?;
                std::fs::create_dir(path)?;
            }
            Ok(())
        })
    }
}

/// Pagers: threads, which outlive the daemon as processes do.
pub(super) struct Threads(pub(super) Arc<Machine>);

impl Threads {
    fn step(&self, verb: &str, work: impl FnOnce() -> Result<(), PagerError>) -> Result<(), PagerError> {
        let failed =
            || PagerError::Start { binary: PathBuf::from("the pager"), reason: "a fault is injected".into() };
        self.0.script.step(&format!("pagers.{verb}"), work).unwrap_or_else(|| Err(failed()))
    }
}

fn inode(directory: &Path) -> Result<u64, PagerError> {
    let failed = |source| PagerError::File { action: "look at", path: directory.into(), source };
    Ok(std::fs::metadata(directory).map_err(failed)?.ino())
}

impl Pagers for Threads {
    fn start(&self, directory: &Path, bytes: u64) -> Result<(), PagerError> {
        self.step("start", || {
            let mut server = Server::bind(directory, bytes)?;
            let thread = std::thread::spawn(move || server.run().unwrap());
            self.0.there().pagers.insert(inode(directory)?, thread);
            Ok(())
        })
    }

    fn filler(&self) -> std::io::Result<Arc<Filler>> {
        Err(std::io::Error::other("no service here has a memory limit"))
    }

    fn end(&self, directory: &Path) -> Result<(), PagerError> {
        self.step("end", || {
            if !directory.exists() {
                return Ok(());
            }
            let Some(thread) = self.0.there().pagers.remove(&inode(directory)?) else { return Ok(()) };
            // A process would be killed.
            while !thread.is_finished() && running(directory)?.is_some() {
                if let Ok((client, _events)) = Client::connect(directory) {
                    let _ = client.abandon();
                }
            }
            thread.join().unwrap();
            Ok(())
        })
    }
}
