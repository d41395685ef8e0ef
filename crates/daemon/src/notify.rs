//! Tells the service manager that the node serves, or ends (sd_notify(3)), where one has started it.
//!
//! The manager listens on the datagram socket that `NOTIFY_SOCKET` names. The variable is taken out of the
//! environment: runc would pass it on to containers.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

const VARIABLE: &str = "NOTIFY_SOCKET";

/// Where the service manager listens, if there is one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Manager(Option<OsString>);

impl Manager {
    /// Takes it from the environment.
    ///
    /// # Safety
    /// The process has one thread.
    pub(crate) unsafe fn take() -> Self {
        let socket = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        // SAFETY: no other thread reads the environment, by the caller's word.
        unsafe { std::env::remove_var(VARIABLE) };
        Self(socket)
    }

    /// Tells it a state, such as `READY=1`; nothing happens where there is none.
    pub(crate) fn tell(&self, state: &str) -> io::Result<()> {
        let Some(name) = &self.0 else { return Ok(()) };
        let socket = UnixDatagram::unbound()?;
        socket.send_to_addr(state.as_bytes(), &address(name)?)?;
        Ok(())
    }
}

/// A path, or with `@` in front a name in the kernel's own space of names (unix(7)).
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(name),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_service_manager_is_told_on_the_socket_that_it_names() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let unnamed = format!("@godwit-test-{}", std::process::id());
        for name in [path.as_os_str().to_owned(), unnamed.into()] {
            let listening = UnixDatagram::bind_addr(&address(&name).unwrap()).unwrap();
            Manager(Some(name)).tell("READY=1").unwrap();
            let mut told = [0; 64];
            let length = listening.recv(&mut told).unwrap();
            assert_eq!(&told[..length], b"READY=1");
        }
        Manager(None).tell("READY=1").unwrap();
    }
}
