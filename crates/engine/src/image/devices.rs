//! The devices in an archive that a restore is about to unpack.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use godwit_criu::images::Device;

use super::archive::{MemberKind, Reader, Stream, TarFault};

/// Most bytes of an archive: of file systems with devices a container has one, `/dev`, with room for 64 MiB.
const MOST: u64 = 256 << 20;

/// An unpacked archive.
struct Unpacked<R>(io::Take<R>);

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> Stream for Unpacked<R> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.0).take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// The devices in an archive (tar, by gzip) that not every container has, with their paths.
///
/// # Errors
/// It cannot be read, as a restore could not.
pub(crate) fn foreign(path: &Path) -> Result<Vec<(String, Device)>, String> {
    let bad = |fault: TarFault| match fault {
        TarFault::NotTar => "it is not an archive".to_owned(),
        TarFault::Read { offset, source } => format!("it ends or breaks off at byte {offset}: {source}"),
        TarFault::Header { offset, reason } => format!("{reason}, at byte {offset}"),
    };
    let file = File::open(path).map_err(|error| error.to_string())?;
    let unpacked = MultiGzDecoder::new(BufReader::new(file)).take(MOST);
    let mut reader = Reader::new(Unpacked(unpacked));
    let mut found = Vec::new();
    while let Some(member) = reader.next().map_err(bad)? {
        let is_block = match member.kind {
            MemberKind::BlockDevice => true,
            MemberKind::CharacterDevice => false,
            _ => continue,
        };
        let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let node = Device { is_block, major: number(member.device.0), minor: number(member.device.1) };
        if !node.is_given() {
            let path: String = String::from_utf8_lossy(&member.path).chars().take(64).collect();
            found.push((path.escape_debug().to_string(), node));
        }
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn archive(devices: &[(&str, tar::EntryType, u32, u32)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (path, kind, major, minor) in devices {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(0);
            header.set_device_major(*major).unwrap();
            header.set_device_minor(*minor).unwrap();
            archive.append_data(&mut header, path, io::empty()).unwrap();
        }
        archive.into_inner().unwrap()
    }

    fn found_in(bytes: &[u8]) -> Result<Vec<(String, Device)>, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(bytes).unwrap();
        file.write_all(&packed.finish().unwrap()).unwrap();
        foreign(file.path())
    }

    #[test]
    fn devices_that_not_every_container_has_are_found() {
        use tar::EntryType::{Block, Char, Fifo, Regular};
        let own = [("null", Char, 1, 3), ("ptmx", Char, 5, 2), ("log", Fifo, 0, 0), ("x", Regular, 8, 0)];
        assert_eq!(found_in(&archive(&own)), Ok(vec![]));
        let others =
            [&own[..], &[("disk", Block, 8, 0), ("null2", Block, 1, 3), ("mem", Char, 1, 1)]].concat();
        let found = found_in(&archive(&others)).unwrap();
        let shown: Vec<_> = found.iter().map(|(path, node)| format!("{path}: {node}")).collect();
        assert_eq!(
            shown,
            ["disk: the block device 8:0", "null2: the block device 1:3", "mem: the character device 1:1"]
        );
        assert!(found_in(&archive(&own)[..600]).is_err());
        assert!(found_in(b"something else").is_err());
    }
}
