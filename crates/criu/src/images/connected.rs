//! The TCP connections of a dump.

use std::path::Path;

use prost::Message;

use super::{ImageError, ImageKind, records};

/// IPPROTO_TCP.
const TCP: u32 = 6;
/// States of RFC 9293, as the kernel numbers them, in which a socket has no other end: CLOSE and LISTEN.
const ALONE: [u32; 2] = [7, 10];

/// `file_entry`, as far as it is read here.
#[derive(Clone, PartialEq, Eq, Message)]
struct FileEntry {
    #[prost(message, optional, tag = "4")]
    socket: Option<Socket>,
}

/// `inet_sk_entry`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Socket {
    #[prost(uint32, required, tag = "5")]
    protocol: u32,
    #[prost(uint32, required, tag = "6")]
    state: u32,
}

/// How many TCP connections, which have another end, are in the images.
///
/// # Errors
/// The image of the files cannot be read, or is damaged.
pub fn connections(images: &Path) -> Result<usize, ImageError> {
    let files: Vec<FileEntry> = records(&images.join("files.img"), ImageKind::Files)?;
    let sockets = files.into_iter().filter_map(|file| file.socket);
    Ok(sockets.filter(|socket| socket.protocol == TCP && !ALONE.contains(&socket.state)).count())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::image;
    use super::*;

    #[test]
    fn sockets_that_listen_are_no_connections() {
        let directory = tempfile::tempdir().unwrap();
        let socket = |protocol, state| FileEntry { socket: Some(Socket { protocol, state }) };
        let files = [socket(TCP, 10), socket(TCP, 7), socket(TCP, 1), socket(TCP, 8), socket(17, 1)];
        std::fs::write(directory.path().join("files.img"), image(ImageKind::Files, &files)).unwrap();
        assert_eq!(connections(directory.path()).unwrap(), 2);
    }
}
