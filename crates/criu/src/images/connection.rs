//! `tcp-stream-INODE.img`: a TCP connection, and what is missing in it for one without window scaling.
//!
//! ```text
//! file = magic(u32) kind(u32) length(u32) tcp_stream_entry(length bytes) queues
//! ```
//!
//! CRIU sets the scale of windows only where both ends had agreed on one (RFC 7323). But a socket that is
//! put together again has chosen a scale of its own by then, as for a connection that is about to be opened,
//! and shifts the window that it offers by it: the other end, which does not shift back, sees a window of a
//! few bytes, and the connection crawls (Linux 6.18, CRIU 4.2.1). A scale of 0 at both ends says the same
//! as none, and is set.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use prost::Message;

use super::{COMMON_MAGIC, ImageError, take_word};

/// `TCP_STREAM_MAGIC`.
pub(super) const KIND: u32 = 0x5146_5506;
/// `TCPI_OPT_WSCALE` of `opt_mask`.
const SCALED: u32 = 4;
/// Bytes before the message.
pub(super) const HEAD: usize = 12;
/// A message has at most seventeen numbers: what is read of every connection.
const BEGIN: u64 = 256;

/// `tcp_stream_entry`, as far as it is read here.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Stream {
    #[prost(uint32, required, tag = "5")]
    opt_mask: u32,
}

/// The fields that are added. Of a field that is there twice the last counts (protobuf's encoding).
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Scale {
    #[prost(uint32, required, tag = "5")]
    opt_mask: u32,
    #[prost(uint32, required, tag = "6")]
    snd_wscale: u32,
    #[prost(uint32, optional, tag = "8")]
    rcv_wscale: Option<u32>,
}

/// Gives a connection without window scaling the scale 0; whether it had none.
///
/// # Errors
/// It cannot be read or written, or is no image of a connection.
pub fn scale_windows(path: &Path) -> Result<bool, ImageError> {
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let mut begin = Vec::new();
    File::open(path).and_then(|file| file.take(BEGIN).read_to_end(&mut begin)).map_err(read_error)?;
    let damaged = |reason| ImageError::Damaged { path: path.to_owned(), reason };
    if added(&begin).map_err(damaged)?.is_none() {
        return Ok(false);
    }
    let whole = fs::read(path).map_err(read_error)?;
    let Some(scaled) = added(&whole).map_err(damaged)? else { return Ok(false) };
    fs::write(path, scaled).map_err(|source| ImageError::Write { path: path.to_owned(), source })?;
    Ok(true)
}

/// An image with the scale, if it lacks one; what follows its message stays.
fn added(image: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut rest = image;
    let head = [take_word(&mut rest), take_word(&mut rest)];
    if head != [Some(COMMON_MAGIC), Some(KIND)] {
        return Err("it is not an image of a connection".to_owned());
    }
    let length = take_word(&mut rest).and_then(|length| usize::try_from(length).ok());
    let message = length.and_then(|length| rest.get(..length)).ok_or("it is cut off")?;
    let Stream { opt_mask } = Stream::decode(message).map_err(|error| error.to_string())?;
    if opt_mask & SCALED != 0 {
        return Ok(None);
    }
    let scale = Scale { opt_mask: opt_mask | SCALED, snd_wscale: 0, rcv_wscale: Some(0) };
    let message = [message, &scale.encode_to_vec()].concat();
    let length = u32::try_from(message.len()).map_err(|error| error.to_string())?;
    let after = rest.get(message.len() - scale.encoded_len()..).unwrap_or_default();
    let head = image.get(..HEAD - size_of::<u32>()).unwrap_or_default();
    Ok(Some([head, &length.to_le_bytes(), &message, after].concat()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// More of the message, to see that it stays.
    #[derive(Clone, Copy, PartialEq, Eq, Message)]
    struct Entry {
        #[prost(uint32, required, tag = "1")]
        inq_len: u32,
        #[prost(uint32, required, tag = "5")]
        opt_mask: u32,
        #[prost(uint32, required, tag = "6")]
        snd_wscale: u32,
        #[prost(uint32, optional, tag = "8")]
        rcv_wscale: Option<u32>,
        #[prost(uint32, optional, tag = "17")]
        rcv_wup: Option<u32>,
    }

    fn image(entry: Entry, queues: &[u8]) -> Vec<u8> {
        let message = entry.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_le_bytes();
        [&COMMON_MAGIC.to_le_bytes()[..], &KIND.to_le_bytes(), &length, &message, queues].concat()
    }

    fn entry(opt_mask: u32) -> Entry {
        Entry { inq_len: 600, opt_mask, snd_wscale: 9, rcv_wscale: None, rcv_wup: Some(u32::MAX) }
    }

    #[test]
    fn only_a_connection_without_a_scale_gets_one_and_keeps_the_rest() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tcp-stream-1f.img");
        let queues = vec![7; 600];
        fs::write(&path, image(entry(0), &queues)).unwrap();
        assert!(scale_windows(&path).unwrap());
        let bytes = fs::read(&path).unwrap();
        let length = usize::try_from(u32::from_le_bytes(bytes[8..12].try_into().unwrap())).unwrap();
        let seen = Entry::decode(&bytes[HEAD..HEAD + length]).unwrap();
        assert_eq!(seen, Entry { opt_mask: SCALED, snd_wscale: 0, rcv_wscale: Some(0), ..entry(0) });
        assert_eq!(bytes[HEAD + length..], queues);
        // Once is enough.
        assert!(!scale_windows(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), bytes);

        let scaled = image(entry(7), &queues);
        fs::write(&path, &scaled).unwrap();
        assert!(!scale_windows(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), scaled);
    }

    #[test]
    fn what_is_no_connection_is_refused() {
        let whole = image(entry(0), b"queue");
        let of_its_own = whole.len() - b"queue".len();
        for length in 0..of_its_own {
            assert!(added(&whole[..length]).is_err(), "{length}");
        }
        let mut other = whole;
        other[4] ^= 1;
        assert!(added(&other).is_err());
    }
}
